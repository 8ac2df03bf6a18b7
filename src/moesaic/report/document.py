"""HTML of a report: one self-contained file, and the elements of its pages.

Style, script and Plotly are inlined. A content security policy allows exactly these scripts and
forbids every request, so markup in the names of a run cannot execute.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from moesaic.report.charts.figure import Figure

LOGO = (
    '<svg xmlns="http://www.w3.org/2000/svg" class="logo" viewBox="0 0 40 40">'
    '<rect x="2" y="2" width="16" height="16" rx="3" fill="#2a6fbb"/>'
    '<rect x="22" y="2" width="16" height="16" rx="3" fill="#e07b1a"/>'
    '<rect x="2" y="22" width="16" height="16" rx="3" fill="#12876f"/>'
    '<rect x="23" y="23" width="14" height="14" rx="3" fill="#8e5aa8" '
    'transform="rotate(12 30 30)"/>'
    "</svg>"
)
"""Logo of the page as SVG."""


def document(title: str, body: str, figures: Sequence[Figure], num_steps: int, loads: Any) -> str:
    """Return the whole file: `body` is HTML, `title` is text; `page.js` draws the rest."""
    data = {
        "figures": [figure.to_json() for figure in figures], "span": num_steps, "loads": loads,
    }  # fmt: skip
    plotly, script = _inline(plotly_source()), _inline(_asset("page.js"))
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    icon = base64.b64encode(LOGO.encode()).decode()
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{html.escape(title)}</title>\n",
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n',
            f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n",
            body,
            f'\n<script type="application/json" id="page-data">{embed(data)}</script>\n',
            f"<script>{plotly}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def header(title: str, state: str) -> str:
    """Return the head of the page; `title` is text, `state` is HTML."""
    return (
        f'<header><div class="brand">{LOGO}<div><p>moesaic run report</p>'
        f"<h1>{html.escape(title)}</h1></div></div>{state}</header>"
    )


def section(title: str, content: str, extra: str = "") -> str:
    """Return a section of HTML `content`; `extra` stands beside the title."""
    return f'<section><div class="bar"><h2>{title}</h2>{extra}</div>{content}</section>'


def cards(figures: Sequence[Figure]) -> str:
    """Return a grid of charts, each with its title and guide."""
    return f'<div class="grid">{"".join(_card(figure) for figure in figures)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def table_card(guide: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a card with a table; the guide says what to look for."""
    text = html.escape(guide)
    return f'<div class="card flat"><p class="guide">{text}</p>{table(header, rows)}</div>'


def _card(figure: Figure) -> str:
    title = html.escape(figure.title)
    return (
        f'<figure class="card span-{figure.span}" id="card-{figure.name}">'
        f"<figcaption><h3>{title}</h3>"
        f'<p class="guide">{html.escape(figure.guide)}</p></figcaption>'
        f'<div class="chart" id="{figure.name}" role="img" style="--height:{figure.height}px" '
        f'aria-label="{title}"></div></figure>'
    )


def embed(data: Any) -> str:
    """Return `data` as JSON that is safe inside a script element, whatever its strings hold."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plotly_source() -> str:
    """Return the plot library: the cartesian bundle of plotly.js, vendored in `assets/`."""
    return _asset("plotly-cartesian.min.js")


def _asset(name: str) -> str:
    return (files("moesaic.report") / "assets" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    # These sequences occur only in strings and regular expressions, where "<\/" means "</".
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
