"""Run themes: `python -m benchmarks [THEME ...]` prints their tables and replaces their records."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from benchmarks import generate, measure
from moesaic.cli.start import sleep_soon

THEMES = ("foundation", "facts", "families", "layer", "balance")


def main(arguments: list[str] | None = None) -> int:
    """Take every figure of the themes named, or of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("themes", nargs="*", metavar="THEME", help=f"of {', '.join(THEMES)}")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of every timed figure")
    parser.add_argument(
        "--simulated", action="store_true",
        help="take rows of the simulator anew; those of a clock stay as they were",
    )  # fmt: skip
    parser.add_argument(
        "--parts", nargs="?", const="", metavar="PART",
        help="take a part anew: of facts operations, of families training, bubbles or conversion, "
        "of layer experts (or a shape of them: olmoe, qwen3-moe, mixtral, deepseek-v3), hosts, "
        "overlap, fusion, embedding, peers, exchange, step, gpu-decoding, gpu or tutel (or a "
        "shape: gpu-olmoe), "
        "of balance host, hosts, model, break-even, early, planning or policies; without a name, "
        "the first",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    sleep_soon()  # As the program's own processes do, and before a theme imports torch.
    unknown = sorted(set(options.themes) - set(THEMES))
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: a figure needs 1 or more")
    if unknown:
        parser.error(f"there is no theme '{unknown[0]}': take one of {', '.join(THEMES)}")
    if measure.commit().endswith(measure.DIRTY):
        print("The tree differs from its commit: the records will say so, and no page is made.")
    for theme in options.themes or THEMES:
        module = importlib.import_module(f"benchmarks.{theme}")
        if options.simulated or options.parts is not None:
            if options.simulated and hasattr(module, "simulated_rows"):
                run_some((row for row in module.simulated_rows() if row.simulated), theme)
            if options.parts is not None:
                run_some(part(module, theme, options.parts)(options.rounds), theme)
        else:
            run(module, theme, options.rounds)
    complaints = generate.generate()
    print("\n".join(complaints) or "The result pages and the README's table are current.")
    return 0


def part(module: ModuleType, theme: str, name: str) -> Callable[[int], Iterator[measure.Row]]:
    """What takes the part `name` of a theme, or its first one."""
    parts: dict[str, Callable[[int], Iterator[measure.Row]]] = getattr(module, "PARTS", {})
    name = name or next(iter(parts), "")
    if name not in parts:
        known = f"take one of {', '.join(parts)}" if parts else "take all of it"
        raise SystemExit(f"theme '{theme}' has no part '{name}': {known}")
    return parts[name]


def run(module: ModuleType, theme: str, rounds: int) -> None:
    """Print a theme's rows as they come, and write its record when all are there."""
    print(f"{theme}: {measure.hardware()}", flush=True)
    rows = []
    for row in module.rows(rounds):
        rows.append(row)
        print(line(row), flush=True)
    print(f"written to {measure.write(theme, rows)}")


def run_some(coming: Iterable[measure.Row], theme: str) -> None:
    """Print some of a theme's rows as they come, and put them into its record."""
    fresh = {}
    for row in coming:
        fresh[row.name] = row
        print(line(row), flush=True)
    path = measure.RECORDS / f"{theme}.json"
    known = measure.read(path) if path.is_file() else []
    rows = [kept(row, fresh.pop(row.name, row)) for row in known]
    print(f"written to {measure.write(theme, [*rows, *fresh.values()])}")


def kept(known: measure.Row, fresh: measure.Row) -> measure.Row:
    """What is measured stays where it cannot be measured now."""
    if known.value is None or fresh.value is not None:
        return fresh
    print(f"  kept as it was, for this machine cannot say it: {known.name}")
    return known


def line(row: measure.Row) -> str:
    """A row as a line of text."""
    spread = ""
    if row.interval:
        spread = " [{}, {}]".format(*map(measure.figure, row.interval))
    verdict = {True: "holds", False: "MISSED", None: ""}[row.holds]
    words = f"  {row.name}: {measure.figure(row.value)} {row.unit}{spread}"
    return f"{words}  {row.bar} {verdict}".rstrip() + f"\n      against {row.against}"


if __name__ == "__main__":
    sys.exit(main())
