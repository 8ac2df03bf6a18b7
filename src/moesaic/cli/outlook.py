"""What is predicted of a step, as a person reads it; of a job and of a foreign model alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.base.errors import ConfigError
from moesaic.cli import screen
from moesaic.facts.workload import STEP, Block
from moesaic.facts.workload.sums import SUMS

BLOCKS = 16
"""Lines of blocks, at most."""
_WIDTH = 18
"""Of the names of lines, but for longer ones of blocks."""
_MINUTES_S, _LONG_S = 180.0, 2 * 3600.0


def tell(
    opening: str, facts: Mapping[str, Any], rates: Mapping[str, str], remark: str = ""
) -> None:
    """Print the time of a step by phase and by block, memory by kind, what binds.

    Args:
        opening: what is predicted, and of what.
        facts: the prediction, as `--json` prints it.
        rates: what follows from the time of a step, in words.
        remark: on the memory of a rank.
    """
    needs = facts["memory_per_rank"]
    kinds = {name: num_bytes for name, num_bytes in needs.items() if name != "peak_bytes"}
    rows = [
        ("step", f"{time(facts['step_s'])}, of which"),
        *((f"  {name}", time(seconds)) for name, seconds in facts["phases_s"].items()),
        *rates.items(),
        ("memory per rank", f"{screen.size(needs['peak_bytes'])} of "
         f"{screen.size(facts['memory_bytes'])} at one time{remark}; "
         f"{screen.size(sum(kinds.values()))} in all, of which"),
        *((f"  {name.removesuffix('_bytes')}", screen.size(num_bytes))
          for name, num_bytes in kinds.items() if num_bytes),
    ]  # fmt: skip
    if "binds" in facts:
        rows.append(("binds", facts["binds"]))
    blocks = _by_block({name: s for name, s in facts["blocks_s"].items() if name != STEP})
    if facts["blocks_s"].get(STEP):
        blocks.append(("  in none of them", time(facts["blocks_s"][STEP])))
    learnt = facts["calibration"]
    basis = f", calibrated by {learnt['runs']} run{'s'[: learnt['runs'] > 1]}" if learnt else ""
    basis += " of other devices" * bool(learnt and facts["device"] not in learnt["devices"])
    screen.say(f"{opening}; computed{basis}, not measured\n")
    _say(rows, _WIDTH)
    _say(blocks, max(_WIDTH, *(len(name) for name, _ in blocks)))


def _say(rows: Sequence[tuple[str, str]], width: int) -> None:
    for name, value in rows:
        screen.say(f"{name:<{width}} {value}")


def _by_block(blocks_s: Mapping[str, float]) -> list[tuple[str, str]]:
    """Lines of what blocks take: of one kind that take the same together, of many the slowest."""
    kinds = Counter(map(_kind, blocks_s))
    alike: dict[tuple[str, str], list[str]] = {}
    for name, seconds in blocks_s.items():
        alike.setdefault((_kind(name), time(seconds)), []).append(name)
    slowest = sorted(alike, key=lambda one: -blocks_s[alike[one][0]])[:BLOCKS]
    rows = [("blocks", "of the step: forward, backward and update, waiting in them included")]
    for kind, shown in alike:
        names = alike[kind, shown]
        if (kind, shown) not in slowest:
            continue
        every = len(names) == kinds[kind]
        called = names[0] if len(names) == 1 else kind if every else f"{names[0]} and others"
        rows.append((f"  {called}", shown + f" each, {len(names)} of them" * (len(names) > 1)))
    if len(alike) > len(slowest):
        rows.append(("  others", f"less; {len(alike) - len(slowest)} more lines, see --json"))
    return rows


def _kind(block: str) -> str:
    """A block's name without numbers."""
    return ".".join("*" if part.isdecimal() else part for part in block.split("."))


def check(cluster: str, step_s: float, *others: float) -> None:
    """Refuse a prediction that is no number, or of no time: nothing could be told of it."""
    if not (0 < step_s < math.inf and all(map(math.isfinite, others))):
        raise ConfigError(
            f"a step on cluster '{cluster}' would take {step_s} s: its figures, or the sizes of "
            "what runs, are too small or too large; correct them"
        )


def time(seconds: float) -> str:
    """Seconds for people: 12.30 ms, 3.5 hours."""
    if seconds >= _LONG_S:
        return f"{seconds / 3600:,.1f} hours"
    if seconds >= _MINUTES_S:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def messages(blocks: Sequence[Block], micro_batches: int) -> dict[str, int]:
    """Collective operations of a rank in a step, and how many of them are sums of gradients."""
    ways = [way for block in blocks for way in (block.forward, block.backward)]
    often = [one for way in ways for one in way.messages] * micro_batches
    found = [*often, *(one for block in blocks for one in block.update.messages)]
    return {"step": len(found), "sums": sum(one.name in SUMS for one in found)}
