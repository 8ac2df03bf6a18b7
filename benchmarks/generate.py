"""Generate result pages and the README's table from the records: `python -m benchmarks.generate`.

It refuses a page whose record is of a dirty tree or of an unknown commit, as its figures could not
be reproduced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import DIRTY, RECORDS, UNKNOWN, Row, figure, is_known, read  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
WHAT = {
    "foundation": "a training step against `transformers`, saving against torch's, damage found",
    "facts": "predictions of time and memory against measurement and a published table",
    "families": "training of four families against `transformers`, conversion against a copy",
    "layer": "the expert layer and its exchange against peers and limits",
    "balance": "replicas of hot experts against none and against even routing",
    "planner": "chosen layouts against all others, the search against exhaustive search",
    "serve": "inference with less memory than the model, many streams, and a server",
    "tables": "embedding tables by key in memory and on a drive, whole recommenders, click data",
    "titan": "students beside a teacher that trains, distillation against TRL, scoring by lm-eval",
    "titan-quality": "distilled students against the same students alone, control, credibility",
    "memory": "expert state on a drive against limits, DeepSpeed, file mappings and cache policies",
}
"""What each theme measures."""
HEAD = ("figure", "value", "95% interval", "bar", "holds", "against", "rounds")
RIGHT = {"value", "rounds", "machine"}
"""Columns that are aligned to the right."""


def generate() -> list[str]:
    """Write every page and the README's table; return one line for each refused record."""
    themes, complaints = {}, []
    for path in sorted(RECORDS.glob("*.json")):
        rows = read(path)
        reason = refusal(rows) or unknown(rows)
        if reason:
            complaints.append(f"benchmarks/records/{path.name} {reason}: no page is made of it")
            continue
        themes[path.stem] = rows
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{path.stem}.md").write_text(page(path.stem, rows))
    if themes and not complaints and README.exists():
        README.write_text(with_table(README.read_text(), table(themes)))
    return complaints


def refusal(rows: Sequence[Row]) -> str:
    """Return why no page is made of these rows; empty if one is."""
    for row in rows:
        if row.commit.endswith(DIRTY):
            return f"was taken from a tree that differs from commit {row.commit[:12]}"
        if row.commit == UNKNOWN or len(row.commit) != 40:
            return f"names no commit ('{row.commit}')"
    return ""


def unknown(rows: Sequence[Row]) -> str:
    """Return which commit this repository lacks; empty if it has all."""
    for commit in sorted({row.commit for row in rows}):
        if not is_known(commit):
            return f"was taken from commit {commit[:12]}, which this repository does not have"
    return ""


def page(theme: str, rows: Sequence[Row]) -> str:
    """Return a theme's page: measured and simulated figures apart, claims before details."""
    parts = [
        f"# Results: {theme}",
        f"Generated from `benchmarks/records/{theme}.json` by `python -m benchmarks.generate`; the "
        "protocol is [benchmarks/README.md](../README.md).",
    ]
    for title, kind in (("Measured", False), ("Simulated", True)):
        chosen = [row for row in rows if row.simulated == kind]
        claims = [row for row in chosen if row.bar]
        details = [row for row in chosen if not row.bar]
        if chosen:
            parts.append(f"## {title}")
        if claims:
            parts.append(_full_table(claims, _machines(rows)))
        if details:
            parts += ["Details, without a bar:", _full_table(details, _machines(rows))]
    notes = RESULTS.parent / f"{theme}.md"
    if notes.exists():
        parts += ["## What bounds them", notes.read_text().strip()]
    parts.append("## Where and how")
    parts += [f"- {fact}" for fact in _facts(rows)]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("how\n- ", "how\n\n- ") + "\n"


def _facts(rows: Sequence[Row]) -> list[str]:
    """Return machines, commits and commands, each once."""
    machines = _machines(rows)
    kinds = [("machine: ", "hardware"), ("commit: `", "commit"), ("command: `", "command")]
    if len(machines) > 1:
        kinds.pop(0)
    numbered = [f"machine {at}: {name}" for at, name in enumerate(machines, 1)]
    return [
        *(numbered if len(machines) > 1 else []),
        *(
            f"{words}{value}{'`' if words.endswith('`') else ''}"
            for words, key in kinds
            for value in sorted({str(getattr(row, key)) for row in rows})
        ),
    ]


def _machines(rows: Sequence[Row]) -> list[str]:
    """Return machines that rows were measured on."""
    return sorted({row.hardware for row in rows if not row.simulated})


def _full_table(rows: Sequence[Row], machines: Sequence[str]) -> str:
    """Return rows as a table, with their machine if a page has several."""
    several = len(machines) > 1 and not rows[0].simulated
    bars = any(row.bar for row in rows)
    heads = [name for name in HEAD if bars or name not in ("bar", "holds")]
    heads += ["machine"] * several
    lines = [heads, ["---:" if name in RIGHT else "---" for name in heads]]
    for row in rows:
        lines.append(
            [
                row.name, _value(row), _interval(row), *([row.bar, verdict(row)] if bars else []),
                row.against, str(row.repeats),
                *([str(machines.index(row.hardware) + 1)] if several else []),
            ]
        )  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table(themes: dict[str, list[Row]]) -> str:
    """Return the README's table: by theme, how many measured figures hold."""
    lines = [
        "| theme | figures | targets met | missed | not measured |",
        f"|{' --- |' * 2}{' ---: |' * 3}",
    ]
    for theme, rows in themes.items():
        bars = [row.holds for row in rows if row.bar and not row.simulated]
        numbers = [sum(one is holds for one in bars) for holds in (True, False, None)]
        cells = (
            f"[{theme}](benchmarks/results/{theme}.md)",
            WHAT.get(theme, "-"),
            *map(str, numbers),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(text: str, new: str) -> str:
    """Return `text` with `new` between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"README.md has no {BEGIN} ... {END}: put the markers where the table goes"
        )
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def verdict(row: Row) -> str:
    """Return in a word whether a row holds."""
    return {True: "yes", False: "**missed**", None: "untried"}[row.holds]


def _value(row: Row) -> str:
    unit = "" if row.unit == "ratio" else f" {row.unit}"
    return f"{figure(row.value)}{unit}"


def _interval(row: Row) -> str:
    return "{} to {}".format(*map(figure, row.interval)) if row.interval else "-"


def main() -> int:
    """Write all pages; print refusals."""
    complaints = generate()
    print("\n".join(complaints) or "The result pages and the README's table are current.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
