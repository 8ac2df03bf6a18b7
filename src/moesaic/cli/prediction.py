"""Predictions of a step as text, for jobs and for traced models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.base.errors import ConfigError
from moesaic.cli import screen
from moesaic.facts.workload import STEP, Block
from moesaic.facts.workload.gradient_reduction import ALL_REDUCTIONS

MAX_BLOCK_ROWS = 16
"""Most rows of blocks."""
_WIDTH = 18
"""Width of the names of rows; block names may be longer."""
_MINUTES_S, _LONG_S = 180.0, 2 * 3600.0


def print_prediction(
    opening: str, facts: Mapping[str, Any], extra_rows: Mapping[str, str], remark: str = ""
) -> None:
    """Print the time of a step by phase and by block, memory by kind, and the bottleneck.

    Args:
        opening: Model, ranks and cluster of the prediction.
        facts: The prediction, as `--json` prints it.
        extra_rows: More rows of text by name.
        remark: Remark on the memory of a rank.
    """
    needs = facts["memory_per_rank"]
    kinds = {name: num_bytes for name, num_bytes in needs.items() if name != "peak_bytes"}
    rows = [
        ("step", f"{format_seconds(facts['step_s'])}, of which"),
        *((f"  {name}", format_seconds(seconds)) for name, seconds in facts["phases_s"].items()),
        *extra_rows.items(),
        ("memory per rank", f"peak {screen.format_bytes(needs['peak_bytes'])} of "
         f"{screen.format_bytes(facts['memory_bytes'])}{remark}; "
         f"{screen.format_bytes(sum(kinds.values()))} in total, of which"),
        *((f"  {name.removesuffix('_bytes')}", screen.format_bytes(num_bytes))
          for name, num_bytes in kinds.items() if num_bytes),
    ]  # fmt: skip
    if "bottleneck" in facts:
        rows.append(("bottleneck", facts["bottleneck"]))
    blocks = _block_rows({name: s for name, s in facts["blocks_s"].items() if name != STEP})
    if facts["blocks_s"].get(STEP):
        blocks.append(("  outside blocks", format_seconds(facts["blocks_s"][STEP])))
    calibration, basis = facts["calibration"], ""
    if calibration:
        num_runs = calibration["runs"]
        basis = f", calibrated by {num_runs} run{'s'[: num_runs > 1]}"
        basis += " on other devices" * (facts["device"] not in calibration["devices"])
    screen.print_line(f"{opening}; predicted{basis}, not measured\n")
    _print_rows(rows, _WIDTH)
    _print_rows(blocks, max(_WIDTH, *(len(name) for name, _ in blocks)))


def _print_rows(rows: Sequence[tuple[str, str]], width: int) -> None:
    for name, value in rows:
        screen.print_line(f"{name:<{width}} {value}")


def _block_rows(blocks_s: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return a row per block kind and time; of many rows, the slowest."""
    kinds = Counter(map(_block_kind, blocks_s))
    alike: dict[tuple[str, str], list[str]] = {}
    for name, seconds in blocks_s.items():
        alike.setdefault((_block_kind(name), format_seconds(seconds)), []).append(name)
    slowest = sorted(alike, key=lambda row: -blocks_s[alike[row][0]])[:MAX_BLOCK_ROWS]
    rows = [("blocks", "forward, backward and update of a step, with waiting")]
    for kind, shown in alike:
        names = alike[kind, shown]
        if (kind, shown) not in slowest:
            continue
        label = kind if len(names) == kinds[kind] else f"{names[0]} and others"
        label = names[0] if len(names) == 1 else label
        rows.append((f"  {label}", shown + f" each, {len(names)} blocks" * (len(names) > 1)))
    if len(alike) > len(slowest):
        rows.append(("  others", f"faster; {len(alike) - len(slowest)} more rows in --json"))
    return rows


def _block_kind(block: str) -> str:
    """Return a block's name with * for numbers."""
    return ".".join("*" if part.isdecimal() else part for part in block.split("."))


def check_step_time(cluster: str, step_s: float, *others: float) -> None:
    """Raise ConfigError if a step takes no time or if any figure is not finite."""
    if not (0 < step_s < math.inf and all(map(math.isfinite, others))):
        raise ConfigError(
            f"a step on cluster '{cluster}' would take {step_s} s: correct figures in the cluster "
            "file or sizes of the model that are too small or too large"
        )


def format_seconds(seconds: float) -> str:
    """Return seconds as text: 12.30 ms, 3.5 hours."""
    if seconds >= _LONG_S:
        return f"{seconds / 3600:,.1f} hours"
    if seconds >= _MINUTES_S:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def count_collectives(blocks: Sequence[Block], micro_batches: int) -> dict[str, int]:
    """Return the collectives of a rank per step, and how many of them are gradient reductions."""
    passes = [one for block in blocks for one in (block.forward, block.backward)]
    collectives = [one for work in passes for one in work.collectives] * micro_batches
    collectives += [one for block in blocks for one in block.update.collectives]
    num_reductions = sum(one.name in ALL_REDUCTIONS for one in collectives)
    return {"per_step": len(collectives), "gradient_reductions": num_reductions}
