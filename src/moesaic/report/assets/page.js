// Draw the figures of #page-data. Colours are names of CSS variables, resolved when drawn, so light,
// dark and print share one figure. The layer selector fills the heat map of one layer.
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const config = {
    displayModeBar: false, displaylogo: false, responsive: true, showTips: false,
  };
  const figures = new Map(page.figures.map((figure) => [figure.name, figure]));

  function themed(value, css) {
    if (typeof value === "string") {
      return value.startsWith("var(") ? css.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) {
      const plain = value.length > 2 && typeof value[0] === "number";
      return plain ? value : value.map((item) => themed(item, css));
    }
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, css)]));
    }
    return value;
  }

  const axis = {
    gridcolor: "var(--grid)", linecolor: "var(--rule)", zerolinecolor: "var(--rule)",
    tickfont: { size: 11.5 }, automargin: true,
  };

  function look(layout) {
    const family = getComputedStyle(document.body).fontFamily;
    const full = {
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 12, color: "var(--ink-soft)" },
      margin: { l: 52, r: 14, t: 10, b: 40 }, hovermode: "x unified", hoverdistance: 40,
      hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--rule)", font: { family, color: "var(--ink)", size: 12 } },
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", font: { size: 12 } },
      dragmode: "zoom",
      ...layout,
    };
    for (const key of ["xaxis", "yaxis"]) full[key] = { ...axis, ...full[key] };
    if (!full.xaxis.title) {
      full.xaxis.title = { text: "step" };
      full.xaxis.hoverformat = ",.0f";
      full.xaxis.unifiedhovertitle = { text: "<b>step %{x}</b>" };
      if (page.span <= 10) full.xaxis.dtick = 1;
    }
    for (const key of ["xaxis", "yaxis"]) if (full[key].title) full[key].title.standoff = 6;
    if (layout.showlegend !== false && !layout.margin) full.margin = { ...full.margin, t: 34 };
    return full;
  }

  function draw(name) {
    const figure = figures.get(name);
    const css = getComputedStyle(document.documentElement);
    Plotly.react(name, themed(figure.data, css), themed(look(figure.layout), css), config);
  }

  function choose(at) {
    const loads = page.loads;
    const layer = loads.layers[at];
    const overview = figures.get("expert-overview");
    const flags = overview.data.slice(1).flatMap((marks) => marks.x
      .map((expert, mark) => ({ expert, kind: marks.name, layer: marks.y[mark] }))
      .filter((flag) => flag.layer === layer));
    const crowded = loads.hundredths[at].length > 32;
    const heat = figures.get("expert-load");
    heat.data[0].z = loads.hundredths[at].map((row) => row.map((cell) => (cell === null ? null : cell / 100)));
    heat.layout.annotations = flags.map((flag) => ({
      xref: "paper", x: 1.004, xanchor: "left", y: flag.expert, yanchor: "middle", showarrow: false,
      text: crowded ? (flag.kind === "dead" ? "\u00d7" : "\u25b2") : `<b>${flag.kind}</b>`,
      font: { size: 11, color: flag.kind === "dead" ? "var(--series-0)" : "var(--series-1)" },
    }));
    overview.layout.shapes = [{
      type: "rect", xref: "paper", x0: 0, x1: 1, y0: layer - 0.5, y1: layer + 0.5,
      line: { color: "var(--ink)", width: 2 },
    }];
    document.getElementById("layer").value = String(at);
    document.querySelector("#card-expert-load h3").textContent = `Load by step, layer ${layer}`;
    ["expert-load", "expert-overview"].forEach(draw);
  }

  function drawAll() {
    for (const name of figures.keys()) draw(name);
  }

  if (page.loads !== null) {
    const select = document.getElementById("layer");
    select.addEventListener("change", () => choose(Number(select.value)));
    choose(page.loads.chosen);
    document.getElementById("expert-overview").on("plotly_click", (event) => {
      const at = page.loads.layers.indexOf(event.points[0].y);
      if (at >= 0) choose(at);
    });
  }
  drawAll();

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  // Printed pages are light and as wide as paper.
  function print(on) {
    document.documentElement.classList.toggle("printing", on);
    document.body.style.width = on ? "1040px" : "";
    for (const name of figures.keys()) Plotly.Plots.resize(name);
    drawAll();
  }
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  document.body.dataset.drawn = "yes";
})();
