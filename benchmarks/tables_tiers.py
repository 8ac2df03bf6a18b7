"""Parts of theme `tables`: rows on a drive, against the drive, rocksdict and a table in memory.

One process has the table in a control group, whose limit includes page cache. It reads cold rows,
and takes steps with and without reading ahead. Another has all rows in memory. Rounds take turns.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure
from benchmarks.memory_group import Arm, can_limit, started
from benchmarks.tables_tiers_arm import BARE_THREADS, EXPONENT, SLOTS, WIDTHS, Settings

LIMIT_BYTES = 1 << 30
"""Limit of the control group, beyond the interpreter."""
SLACK_BYTES = 64 << 20
"""Part of the limit for arrays of a step."""
STEP_KEYS, PASS_STEPS, PASSES = 32_768, 16, 2
ROWS_LOG2, DIM, RECORD_BYTES = 24, 64, 272
ROCKSDICT_ROWS = 1 << 21
MAX_ROUNDS = 5
WARM_STEPS = 32
PEERS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moesaic" / "peers"
ROCKSDICT = PEERS / "tables" / "bin" / "python"
READS = "distinct cold 4 KiB blocks per second, uniform keys"
STEPS = "training step of a recommender, 16 M rows of 64, 1 GiB for rows and index"
LIMITS = (
    (f"{READS}, over {BARE_THREADS} bare preadv threads", ">= 0.8"),
    (f"{READS}, over rocksdict", ">= 3"),
    (f"{STEPS}, share of the larger bound", ">= 0.75"),
    (f"{STEPS}, over rows read when due", ">= 1.4"),
)
"""Figures of this part, and their bars."""


@dataclass(frozen=True)
class Rounds:
    """Figures of each round, [rounds]."""

    reads: NDArray[np.float64]
    """Distinct blocks per second by the table's reads."""
    bare: NDArray[np.float64]
    """Blocks per second by bare threads."""
    rocksdict: NDArray[np.float64]
    """Rows per second by one call of rocksdict for many keys."""
    rocksdict_threads: NDArray[np.float64]
    """Rows per second by several threads that call rocksdict."""
    ahead: NDArray[np.float64]
    """Seconds of a step whose rows were read ahead."""
    ahead_blocks: NDArray[np.float64]
    """Blocks read for such a step."""
    due: NDArray[np.float64]
    """Seconds of a step that reads its rows itself."""
    memory: NDArray[np.float64]
    """Seconds of a step with all rows in memory."""

    @property
    def bounds(self) -> NDArray[np.float64]:
        """Seconds that a step needs at least: in memory, or for its reads."""
        return np.maximum(self.memory, self.ahead_blocks / self.reads)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new directory on the drive of the working tree."""
    parent = measure.ROOT / "build"
    parent.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=parent, prefix="tables-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def tiers(
    rounds: int, rows_log2: int = ROWS_LOG2, limit: int = LIMIT_BYTES
) -> Iterator[measure.Row]:
    """Compare reads and steps of a table whose rows are on a drive."""
    if not can_limit() or not ROCKSDICT.exists():
        why = "control groups of version 1, root and rocksdict in the peers' environment are needed"
        rows = [measure.untried(name, bar, why) for name, bar in LIMITS]
        yield from measure.joint("cold blocks of a table per second, over peers", rows[:2])
        yield from measure.joint("training step of a table beyond memory, over limits", rows[2:])
        return
    with scratch() as directory, ExitStack() as stack:
        settings = Settings(rows_log2, DIM, STEP_KEYS, str(directory))
        group = interpreter_bytes(settings) + limit
        tiered = replace(settings, host_bytes=limit - SLACK_BYTES)
        arms = {
            "tiers": stack.enter_context(started(lambda: table_arm(tiered, group))),
            "memory": stack.enter_context(started(lambda: table_arm(settings))),
            "rocksdict": stack.enter_context(
                started(lambda: rocksdict_arm(directory / "rocksdict"))
            ),
        }
        for name in ("tiers", "memory"):
            arms[name].step({"do": "due", "steps": WARM_STEPS})
        found = take(arms, min(rounds, MAX_ROUNDS))
        last = next(one for one in arms["tiers"].figures[::-1] if "hit_rate" in one)
        peak = arms["tiers"].peak_bytes
    rows = list(rows_of(found, last, peak / group))
    yield from measure.joint("cold blocks of a table per second, over peers", rows[:2])
    yield from measure.joint("training step of a table beyond memory, over limits", rows[2:])


def table_arm(settings: Settings, limit: int = 0) -> Arm:
    """Start a process with a table."""
    command = [sys.executable, "-m", "benchmarks.tables_tiers_arm", settings.to_json()]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return Arm(command, limit, {**os.environ, **threads})


def rocksdict_arm(directory: Path) -> Arm:
    """Start a process with rocksdict."""
    script = measure.ROOT / "benchmarks" / "tables_rocksdict.py"
    path, sizes = directory / "rocksdict", (ROCKSDICT_ROWS, RECORD_BYTES)
    return Arm([str(ROCKSDICT), str(script), str(path), *map(str, sizes)])


def interpreter_bytes(settings: Settings) -> int:
    """Return the peak of a process with a small table, without its budget."""
    small = replace(settings, rows_log2=12, step_keys=64, host_bytes=8 << 20)
    with started(lambda: table_arm(small)) as arm:
        arm.step({"do": "due", "steps": 2})
        arm.step({"do": "ahead", "passes": 1, "pass_steps": 2})
        return max(arm.peak_bytes - small.host_bytes, 0)


def take(arms: dict[str, Arm], rounds: int) -> Rounds:
    """Let arms take turns; reads are measured before and after steps that read."""
    figures: dict[str, list[float]] = {name: [] for name in Rounds.__dataclass_fields__}

    def put(name: str, arm: str, key: str, **request: object) -> None:
        figures[name].append(float(arms[arm].step(request)[key]))

    for _ in range(rounds):
        put("due", "tiers", "step_s", do="due", steps=PASS_STEPS)
        before = arms["tiers"].step({"do": "reads"})["blocks_per_s"]
        put("bare", "tiers", "blocks_per_s", do="bare")
        put("ahead", "tiers", "step_s", do="ahead", passes=PASSES, pass_steps=PASS_STEPS)
        figures["ahead_blocks"].append(float(arms["tiers"].figures[-1]["blocks"]))
        put("reads", "tiers", "blocks_per_s", do="reads")
        figures["reads"][-1] = (figures["reads"][-1] + before) / 2
        put("memory", "memory", "step_s", do="due", steps=PASS_STEPS)
        put("rocksdict", "rocksdict", "rows_per_s", threads=1)
        put("rocksdict_threads", "rocksdict", "rows_per_s", threads=BARE_THREADS)
    return Rounds(**{name: np.asarray(values) for name, values in figures.items()})


def rows_of(found: Rounds, last: dict[str, object], peak: float) -> Iterator[measure.Row]:
    """Yield the figures."""
    ratios = (
        found.reads / found.bare, found.reads / found.rocksdict, found.bounds / found.ahead,
        found.due / found.ahead,
    )  # fmt: skip
    against = (
        f"{np.median(found.bare):,.0f} blocks/s of {BARE_THREADS} threads in preadv",
        f"rocksdict 0.3.29, get of 4096 keys, direct reads: {np.median(found.rocksdict):,.0f} "
        f"rows/s; {BARE_THREADS} threads that call it: {np.median(found.rocksdict_threads):,.0f}",
        f"the step in memory, {np.median(found.memory) * 1e3:.0f} ms with a network of "
        f"{SLOTS * DIM}-{'-'.join(map(str, WIDTHS))}-1, or "
        f"{np.median(found.ahead_blocks):,.0f} cold blocks at {np.median(found.reads):,.0f}/s, "
        f"whichever takes longer; Zipf {EXPONENT}, hit rate {last['hit_rate']:.2f}, peak "
        f"{peak:.2f} of the limit",
        f"each batch's rows read when due, in parallel: {np.median(found.due) * 1e3:.0f} ms",
    )
    for (name, bar), values, text in zip(LIMITS, ratios, against, strict=True):
        yield measure.row(
            name, float(np.median(values)), "ratio", bar=bar, against=text,
            interval=measure.bootstrap(values), repeats=len(values),
        )  # fmt: skip


PARTS = {"tiers": tiers}
