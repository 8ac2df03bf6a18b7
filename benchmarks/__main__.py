"""Measure themes: `python -m benchmarks [THEME ...]` prints figures and updates records."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from benchmarks import generate, measure
from moesaic.api.start import set_spin_count

THEMES = (
    "foundation", "facts", "families", "layer", "balance", "memory", "serve", "tables", "titan",
    "titan-quality", "planner",
)  # fmt: skip
ROUNDS = 15
"""Rounds of a timed figure: every part then ends within 20 minutes on two cores."""
Part = Callable[[int], Iterator[measure.Row]]


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts named, or all parts of the themes named, or all themes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("themes", nargs="*", metavar="THEME", help=f"of {', '.join(THEMES)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of every timed figure")
    parser.add_argument(
        "--parts", nargs="+", metavar="PART",
        help="parts of the one theme named; benchmarks/README.md lists them",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    set_spin_count()  # As moesaic's own processes do, and before a theme imports torch.
    unknown = sorted(name for name in options.themes if not is_theme(name))
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: a figure needs 1 or more")
    if unknown:
        parser.error(f"there is no theme '{unknown[0]}': take one of {', '.join(THEMES)}")
    if options.parts and len(options.themes) != 1:
        parser.error("--parts needs one theme: python -m benchmarks THEME --parts PART")
    if measure.commit().endswith(measure.DIRTY):
        print("The tree differs from its commit: the records will say so, and no page is made.")
    for theme in options.themes or THEMES:
        module = importlib.import_module(f"benchmarks.{theme.replace('-', '_')}")
        print(f"{theme}: {measure.hardware()}", flush=True)
        for part in chosen(module, theme, options.parts or ()):
            run(part(options.rounds), theme)
    complaints = generate.generate()
    print("\n".join(complaints) or "The result pages and the README's table are current.")
    return 0


def is_theme(name: str) -> bool:
    """Return whether a theme of this name can be measured; one without a record runs by name."""
    if name in THEMES:
        return True
    is_module = name.isidentifier() and (measure.ROOT / "benchmarks" / f"{name}.py").is_file()
    return is_module and hasattr(importlib.import_module(f"benchmarks.{name}"), "PARTS")


def chosen(module: ModuleType, theme: str, names: Iterable[str]) -> list[Part]:
    """Return the parts of a theme with these names; without names, all but those set apart."""
    parts: dict[str, Part] = module.PARTS
    apart: tuple[str, ...] = getattr(module, "APART", ())
    names = list(names) or [name for name in parts if name not in apart]
    for name in names:
        if name not in parts:
            known = ", ".join(parts)
            raise SystemExit(f"theme '{theme}' has no part '{name}': take one of {known}")
    return [parts[name] for name in names]


def run(coming: Iterable[measure.Row], theme: str) -> None:
    """Print rows as they come, and put them into the theme's record."""
    fresh = {}
    for row in coming:
        fresh[row.name] = row
        print(line(row), flush=True)
    path = measure.RECORDS / f"{theme}.json"
    known = measure.read(path) if path.is_file() else []
    rows = [kept(row, fresh.pop(row.name, row)) for row in known]
    print(f"written to {measure.write(theme, [*rows, *fresh.values()])}")


def kept(known: measure.Row, fresh: measure.Row) -> measure.Row:
    """Return the known row if this machine cannot measure it, else the fresh one."""
    if known.value is None or fresh.value is not None:
        return fresh
    print(f"  kept, as this machine cannot measure it: {known.name}")
    return known


def line(row: measure.Row) -> str:
    """Return a row as text."""
    spread = ""
    if row.interval:
        spread = " [{}, {}]".format(*map(measure.figure, row.interval))
    verdict = {True: "holds", False: "MISSED", None: ""}[row.holds]
    words = f"  {row.name}: {measure.figure(row.value)} {row.unit}{spread}"
    return f"{words}  {row.bar} {verdict}".rstrip() + f"\n      against {row.against}"


if __name__ == "__main__":
    sys.exit(main())
