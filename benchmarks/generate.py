"""Result pages and the README's table, from the records alone: `python -m benchmarks.generate`.

A page is refused while its record comes from a dirty tree or from a commit that nobody knows:
a figure that cannot be taken again is none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import DIRTY, RECORDS, UNKNOWN, Row, figure, is_known, read  # noqa: E402
from benchmarks.picture import of_balance  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
WHAT = {
    "foundation": "a training step against `transformers`, saving against torch's, damage found",
    "facts": "predictions of time and memory against what was measured",
    "families": "training of four families against `transformers`, conversion against the disk",
    "layer": "experts against dense products and peers, and all that crosses a link",
    "balance": "copies of hot experts against none, even loads and every other policy",
}
"""What is measured, theme by theme."""
HEAD = "| figure | value | 95% interval | bar | holds | against | rounds |"


def generate() -> list[str]:
    """Write every page and the README's table; what was refused, and why, one line each."""
    themes, complaints = {}, []
    for path in sorted(RECORDS.glob("*.json")):
        rows = read(path)
        reason = refusal(rows) or unknown(rows)
        if reason:
            complaints.append(f"benchmarks/records/{path.name} {reason}: no page is made of it")
            continue
        themes[path.stem] = rows
        RESULTS.mkdir(exist_ok=True)
        drawn = picture(path.stem, rows)
        if drawn is not None:
            (RESULTS / f"{path.stem}.svg").write_text(drawn)
        (RESULTS / f"{path.stem}.md").write_text(page(path.stem, rows))
    if themes and not complaints and README.exists():
        README.write_text(with_table(README.read_text(), table(themes)))
    return complaints


def picture(theme: str, rows: Sequence[Row]) -> str | None:
    """What a theme's page shows, if it shows anything."""
    return of_balance(rows) if theme == "balance" else None


def refusal(rows: Sequence[Row]) -> str:
    """Why no page may be made of these rows; empty if one may."""
    for row in rows:
        if row.commit.endswith(DIRTY):
            return f"was taken from a tree that differs from commit {row.commit[:12]}"
        if row.commit == UNKNOWN or len(row.commit) != 40:
            return f"names no commit ('{row.commit}')"
    return ""


def unknown(rows: Sequence[Row]) -> str:
    """Why their commits are not to be found here; empty if they are."""
    for commit in sorted({row.commit for row in rows}):
        if not is_known(commit):
            return f"was taken from commit {commit[:12]}, which this repository does not have"
    return ""


def page(theme: str, rows: Sequence[Row]) -> str:
    """A theme's result page: measured and simulated figures apart, and what to know of them."""
    parts = [
        f"# Results: {theme}",
        f"Generated from `benchmarks/records/{theme}.json` by `python -m benchmarks.generate`; the "
        "protocol is [benchmarks/README.md](../README.md).",
    ]
    for title, kind in (("Measured", False), ("Simulated", True)):
        chosen = [row for row in rows if row.simulated == kind]
        if chosen and not kind and picture(theme, rows) is not None:
            parts += [f"## {title}", f"![{theme}, case by case]({theme}.svg)"]
            parts += [_full_table(chosen, _machines(rows))]
        elif chosen:
            parts += [f"## {title}", _full_table(chosen, _machines(rows))]
    notes = RESULTS.parent / f"{theme}.md"
    if notes.exists():
        parts += ["## What bounds them", notes.read_text().strip()]
    parts.append("## Where and how")
    parts += [f"- {fact}" for fact in _facts(rows)]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("how\n- ", "how\n\n- ") + "\n"


def _facts(rows: Sequence[Row]) -> list[str]:
    """Machines, commits and commands, each said once."""
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
    """Machines that rows were measured on."""
    return sorted({row.hardware for row in rows if not row.simulated})


def _full_table(rows: Sequence[Row], machines: Sequence[str]) -> str:
    """Rows, and where several machines measured a page's rows, which."""
    lines = [HEAD, "| --- | ---: | --- | --- | --- | --- | ---: |"]
    several = len(machines) > 1 and not rows[0].simulated
    if several:
        lines = [f"{HEAD} machine |", f"{lines[1]} ---: |"]
    for row in rows:
        cells = (
            row.name, _value(row), _interval(row), row.bar or "-", verdict(row), row.against,
            str(row.repeats), *([str(machines.index(row.hardware) + 1)] if several else []),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(themes: dict[str, list[Row]]) -> str:
    """The README's table: theme by theme, how many measured figures keep to their bars."""
    lines = [
        "| theme | of what | bars that hold | missed | untried |",
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
    """`text` with `new` between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"README.md has no {BEGIN} ... {END}: put the markers where the table goes"
        )
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def verdict(row: Row) -> str:
    """Whether a row holds, in a word."""
    if not row.bar:
        return "-"
    return {True: "yes", False: "**missed**", None: "untried"}[row.holds]


def _value(row: Row) -> str:
    unit = "" if row.unit == "ratio" else f" {row.unit}"
    return f"{figure(row.value)}{unit}"


def _interval(row: Row) -> str:
    return "{} to {}".format(*map(figure, row.interval)) if row.interval else "-"


def main() -> int:
    """Write what may be written; say what may not."""
    complaints = generate()
    print("\n".join(complaints) or "The result pages and the README's table are current.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
