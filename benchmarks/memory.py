"""Theme `memory`: training with expert state on a drive, against limits, peers and the kernel.

Every arm is a process in a control group of its own, whose limit includes page cache. Arms take
steps in turn, and start with files that are not in memory. memory.md says how to install DeepSpeed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import measure
from benchmarks.memory_arm import Settings
from benchmarks.memory_group import Arm, Killed, can_limit, mixed_bandwidth, started
from benchmarks.memory_traffic import Shape, Uses, must_move, touched_experts
from moesaic.facts.expert_blocks import BlockKind
from moesaic.testing.residency import belady_misses

SHAPE = Shape(layers=14)
"""About 700 million parameters."""
COUNTED = Shape(hidden=64, ffn=224, heads=2, kv_heads=1, vocab=64, sequence=32)
"""The same layers and experts with narrow blocks, where only blocks are counted."""
MAX_ROUNDS = 3
"""Rounds of arms that take seconds a step."""
FAR, NEAR, WITHIN = 1.2, 1.35, ", within 1.5 times"
"""Factors on the larger of compute and drive, and the mark of cases in which both are near."""
SLACK_BYTES = 64 << 20
STATE_PER_LIMIT = 4
PEAK_BUDGETS = (900_000_000, 1_050_000_000, 1_300_000_000)
PEERS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moesaic" / "peers"
PEER_LIMITS = (2_081_000_000, 4_000_000_000, 8_000_000_000, 12_000_000_000, 16_000_000_000)
"""Limits that peers try in turn; the first is that of moesaic."""
WHERE = "control groups of version 1 and root are needed"


@contextmanager
def scratch() -> Iterator[str]:
    """Yield a new directory on the drive of the working tree."""
    parent = measure.ROOT / "build"
    parent.mkdir(exist_ok=True)
    directory = tempfile.mkdtemp(dir=parent, prefix="memory-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def interpreter_bytes(directory: str) -> int:
    """Return the peak of a process after a step of one block, without its budget."""
    tiny = replace(COUNTED, layers=1, experts=2, micro_batches=1)
    with started(lambda: Arm.training(Settings(tiny, directory, host="64MB"))) as arm:
        arm.step()
        return arm.peak_bytes


class Budget:
    """Budget of a group whose limit holds it, the interpreter and some slack."""

    def __init__(self, interpreter: int, limit: int) -> None:
        self.limit, self.host_bytes = limit, limit - interpreter - 2 * SLACK_BYTES

    @property
    def host(self) -> str:
        """The budget as the job has it."""
        return f"{self.host_bytes}B"


def quarter(interpreter: int) -> Budget:
    """Return the budget of a group with a quarter of the expert state."""
    return Budget(interpreter, SHAPE.state_bytes // STATE_PER_LIMIT)


def in_turn(arms: dict[str, Arm], rounds: int, warmup: int = 1) -> measure.Times:
    """Let arms take steps in turn, each after all files were written."""
    calls: dict[str, Callable[[], object]] = {name: arm.step for name, arm in arms.items()}
    rounds = min(rounds, MAX_ROUNDS)
    return measure.interleave(calls, rounds, warmup=warmup, patience_s=60.0, before=os.sync)


def limits(rounds: int) -> Iterator[measure.Row]:
    """Compare steps with what processor and drive need at least."""
    name = (
        f"step time with expert state 4 times memory, over {FAR} times the larger of compute and "
        f"drive, {NEAR} times where both lie within 1.5 times of each other"
    )
    if not can_limit():
        yield measure.untried(name, "<= 1.0", WHERE)
        return
    rows = list[measure.Row]()
    with scratch() as directory:
        budget = quarter(interpreter_bytes(directory))
        for third in (False, True):
            for clip in (0.0, 1.0):
                settings = Settings(SHAPE, directory, clip=clip, third=third, recompute=True)
                rows.append(limit_of(settings, budget, rounds))
    scaled = [
        replace(row, value=(row.value or 0.0) / (NEAR if WITHIN in row.against else FAR))
        for row in rows
    ]
    yield replace(measure.worst(name, scaled, "<= 1.0"), interval=None)
    yield from rows


def limit_of(settings: Settings, budget: Budget, rounds: int) -> measure.Row:
    """Measure one case of `limits`."""
    directory, shape = Path(settings.directory), settings.shape
    tiered = replace(settings, host=budget.host)
    with ExitStack() as stack:
        arms = {
            "untiered": stack.enter_context(started(lambda: Arm.training(settings))),
            "tiered": stack.enter_context(started(lambda: Arm.training(tiered, budget.limit))),
        }
        before = mixed_bandwidth(directory, shape.block_bytes)
        times = in_turn(arms, rounds)
        after = mixed_bandwidth(directory, shape.block_bytes)
        num_blocks = int(arms["tiered"].ready["num_blocks"])
        taken = len(arms["tiered"].figures)
        cpu_s = [one["cpu_s"] for one in arms["untiered"].figures[-times.rounds :]]
        figures = arms["tiered"].figures[-times.rounds :]
    moved = [
        sum(must_move(uses(settings, step), num_blocks, clips=bool(settings.clip)))
        for step in range(taken - times.rounds, taken)
    ]
    compute = np.asarray(cpu_s) / (os.cpu_count() or 1)
    drive = np.asarray(moved) * shape.block_bytes / ((before + after) / 2)
    ratios = np.asarray(times.seconds["tiered"]) / np.maximum(compute, drive)
    needs = float(np.median(compute)), float(np.median(drive))
    real = float(np.median([one["memory_read_bytes"] + one["memory_written_bytes"]
                            for one in figures]))  # fmt: skip
    near = WITHIN if max(needs) <= 1.5 * min(needs) else ""
    touched = "a third touched" if settings.third else "all experts touched"
    clipping = "clipping" if settings.clip else "no clipping"
    return measure.row(
        f"step time over the larger limit, {touched}, {clipping}", float(np.median(ratios)),
        "ratio", bar="", interval=measure.bootstrap(ratios), repeats=times.rounds,
        against=f"compute {needs[0]:.1f} s, drive {needs[1]:.1f} s{near}; "
        f"{np.median(moved) * shape.block_bytes / 1e9:.1f} GB must move, {real / 1e9:.1f} GB do; "
        f"drive {before / 1e9:.2f} GB/s before, {after / 1e9:.2f} after; "
        f"{num_blocks} of {3 * shape.num_experts} blocks in memory, waited "
        f"{np.median([one['memory_stall_s'] for one in figures]):.1f} s",
    )  # fmt: skip


def uses(settings: Settings, step: int) -> Uses:
    """Return the experts that a step uses."""
    if not settings.third:
        return Uses(settings.shape.num_experts, 0)
    now, last = (touched_experts(settings.shape, one) for one in (step, step - 1))
    pairs = zip(now, last, strict=True)
    behind = sum(len(set(new) - set(old)) for new, old in pairs)
    return Uses(sum(map(len, now)), behind)


def kernel(rounds: int) -> Iterator[measure.Row]:
    """Compare with arenas that are mapped from files, in the smallest limit that they survive."""
    name = "training tokens/s over arenas mapped from files, expert state 4 times memory"
    if not can_limit():
        yield measure.untried(name, ">= 3", WHERE)
        return
    with scratch() as directory, ExitStack() as stack:
        budget = quarter(interpreter_bytes(directory))
        settings = Settings(SHAPE, directory, clip=1.0, recompute=True)
        tiered, mapped = replace(settings, host=budget.host), replace(settings, mapped=True)
        theirs, limit = surviving(partial(Arm.training, mapped))
        stack.callback(theirs.close)
        arms = {
            "tiered": stack.enter_context(started(partial(Arm.training, tiered, budget.limit))),
            "mapped": theirs,
        }
        times = in_turn(arms, rounds)
    ratio, interval = times.ratio("mapped", "tiered")
    yield measure.row(
        name, ratio, "ratio", bar=">= 3", interval=interval, repeats=times.rounds,
        against="the same run with parameters, moments and gradients in shared file mappings, in "
        f"{limit / 1e6:.0f} MB, the smallest of {limits_text()} that it survives; moesaic in "
        f"{budget.limit / 1e6:.0f} MB; {times.median('tiered'):.1f} s and "
        f"{times.median('mapped'):.1f} s a step",
    )  # fmt: skip


def resident(rounds: int) -> Iterator[measure.Row]:
    """Compare a budget in which all state fits with a run without one."""
    shape = replace(SHAPE, layers=3)
    with scratch() as directory, ExitStack() as stack:
        settings = Settings(shape, directory, clip=1.0)
        tiered = replace(settings, host="6GB")
        arms = {
            "untiered": stack.enter_context(started(lambda: Arm.training(settings))),
            "tiered": stack.enter_context(started(lambda: Arm.training(tiered))),
        }
        times = measure.interleave(
            {name: arm.step for name, arm in arms.items()}, rounds, patience_s=60.0
        )
    ratio, interval = times.ratio("tiered", "untiered")
    yield measure.row(
        "step time with a budget in which all fits, over a run without", ratio, "ratio",
        bar="<= 1.05", interval=interval, repeats=times.rounds,
        against="the same order of micro-batches, memory.period = 0; three layers",
    )  # fmt: skip


def peaks(rounds: int) -> Iterator[measure.Row]:
    """Compare the peak of the group with the budget."""
    del rounds
    name = "peak memory beyond budget and interpreter, worst of three budgets, none killed"
    if not can_limit():
        yield replace(measure.untried(name, "<= 64", WHERE), unit="MiB")
        return
    with scratch() as directory:
        interpreter = interpreter_bytes(directory)
        settings = Settings(replace(SHAPE, layers=7), directory, clip=1.0)
        rows = [
            peak(replace(settings, host=f"{host_bytes}B"), host_bytes, interpreter)
            for host_bytes in PEAK_BUDGETS
        ]
    yield from measure.claim(name, "<= 64", rows)


def peak(settings: Settings, host_bytes: int, interpreter: int) -> measure.Row:
    """Measure the peak of a group with one budget. A killed process needs more than its limit."""
    limit = host_bytes + interpreter + 4 * SLACK_BYTES
    note, peak_bytes = "", limit
    try:
        with started(partial(Arm.training, settings, limit)) as arm:
            arm.step()
            arm.step()
            peak_bytes = arm.peak_bytes
    except Killed:
        note = f"; killed at a limit of {limit / 1e6:.0f} MB, so it needs more than this"
    return measure.row(
        f"peak memory beyond budget and interpreter, {host_bytes / 1e6:.0f} MB",
        (peak_bytes - host_bytes - interpreter) / 2**20, "MiB", bar="", repeats=2,
        against=f"memory.host plus the interpreter, {interpreter / 2**20:.0f} MiB{note}",
    )  # fmt: skip


def count_blocks(rounds: int) -> Iterator[measure.Row]:
    """Count reads and writes of blocks under each policy, all experts touched and a third."""
    del rounds
    steps, first = 16, 6
    with scratch() as directory:
        found = {
            (third, policy): counted(directory, steps, first, policy, third=third)
            for third in (False, True)
            for policy in ("next-use", "lru", "lfu", "se-moe")
        }
    note = f"counts of {steps - first} steps, {COUNTED.num_experts} experts, narrow blocks"
    everything = 3 * COUNTED.num_experts * (steps - first)
    yield measure.row(
        "blocks written with a third of experts touched, over all state every step",
        found[True, "next-use"][1] / everything, "ratio", bar="<= 0.6", repeats=steps - first,
        against=f"parameters and moments of all experts written in each step; {note}",
    )  # fmt: skip
    details = list[measure.Row]()
    for third in (False, True):
        words = "a third touched" if third else "all touched"
        ours = found[third, "next-use"]
        for policy in ("lru", "lfu", "se-moe"):
            details.append(
                measure.row(
                    f"blocks read, {words}, over {policy}", ours[0] / found[third, policy][0],
                    "ratio", bar="", repeats=steps - first, against=note,
                )
            )  # fmt: skip
    yield measure.worst("blocks read, over the best of LRU, LFU and SE-MoE", details, "<= 1.0")
    for third, bar in ((False, "<= 1.1"), (True, "")):
        ours = found[third, "next-use"]
        yield measure.row(
            f"blocks read, {'a third' if third else 'all'} touched, over Belady", ours[0] / ours[2],
            "ratio", bar=bar, repeats=steps - first,
            against=f"the optimum for the same uses, known in advance; {note}",
        )  # fmt: skip
    yield from details


def counted(
    directory: str, steps: int, first: int, policy: str, *, third: bool
) -> tuple[float, float, float]:
    """Return blocks read, blocks written, and the reads of Belady, from step `first` on."""
    settings = Settings(
        COUNTED, directory, host="100MB", third=third, residency=policy, num_blocks=24, traced=True
    )
    with started(lambda: Arm.training(settings)) as arm:
        uses = list[list[tuple[int, int]]]()
        for _ in range(steps):
            uses.append([(block, number) for block, number in arm.step().pop("uses")])
    figures = arm.figures[first:]
    reads = sum(one["memory_reads"] for one in figures)
    written = sum(one["memory_written_bytes"] for one in figures) / COUNTED.block_bytes
    return reads, written, _belady(uses, first, 24)


def _belady(uses: Sequence[Sequence[tuple[int, int]]], first: int, num_blocks: int) -> float:
    """Return Belady's reads from step `first` on. Each gradient is new, and made without a read."""
    names = dict[tuple[int, int], int]()
    trace = [[names.setdefault(use, len(names)) for use in step] for step in uses]
    before = [use for step in trace[:first] for use in step]
    whole = [use for step in trace for use in step]
    gradients = {
        name
        for (block, _), name in names.items()
        if block // COUNTED.experts % len(BlockKind) == BlockKind.GRADIENT
    }
    new = len(gradients.intersection(whole)) - len(gradients.intersection(before))
    return belady_misses(whole, num_blocks) - belady_misses(before, num_blocks) - new


def deepspeed(rounds: int) -> Iterator[measure.Row]:
    """Compare with DeepSpeed ZeRO-3, parameters and optimizer on NVMe."""
    name = "training tokens/s over DeepSpeed ZeRO-3 on NVMe, clipping, four micro-batches"
    python = PEERS / "env" / "bin" / "python"
    if not can_limit() or not python.exists():
        why = "DeepSpeed not installed; benchmarks/memory.md says how" if can_limit() else WHERE
        yield measure.untried(name, ">= 2", why)
        return
    with scratch() as directory, scratch() as swap, ExitStack() as stack:
        budget = quarter(interpreter_bytes(directory))
        ours = Settings(SHAPE, directory, host=budget.host, clip=1.0, recompute=True)
        raw = {"shape": asdict(SHAPE), "directory": swap, "clip": 1.0}
        theirs, limit = surviving(partial(start_deepspeed, str(python), json.dumps(raw)))
        stack.callback(theirs.close)
        arms = {
            "moesaic": stack.enter_context(started(lambda: Arm.training(ours, budget.limit))),
            "DeepSpeed": theirs,
        }
        times = in_turn(arms, rounds, warmup=1)
    ratio, interval = times.ratio("DeepSpeed", "moesaic")
    yield measure.row(
        name, ratio, "ratio", bar=">= 2", interval=interval, repeats=times.rounds,
        against=f"DeepSpeed 0.19.8, without recomputation, in {limit / 1e6:.0f} MB, the smallest "
        f"of {limits_text()} that it survives; "
        f"moesaic in {budget.limit / 1e6:.0f} MB; {times.median('DeepSpeed'):.1f} s and "
        f"{times.median('moesaic'):.1f} s a step",
    )  # fmt: skip


def limits_text() -> str:
    """Return the limits of peers in words."""
    return ", ".join(f"{one / 1e6:.0f}" for one in PEER_LIMITS)


def surviving(start: Callable[[int], Arm]) -> tuple[Arm, int]:
    """Return a peer after a step, under the smallest limit that it survives."""
    for limit in PEER_LIMITS:
        arm = None
        try:
            arm = start(limit)
            arm.step()
        except Killed:
            if arm is not None:
                arm.close()
            continue
        return arm, limit
    raise RuntimeError(f"the peer needs more than {max(PEER_LIMITS)} bytes")


def start_deepspeed(python: str, settings: str, limit: int) -> Arm:
    """Start DeepSpeed's run."""
    libraries = PEERS / "libaio" / "usr" / "lib" / "x86_64-linux-gnu"
    env = {
        **{key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"},
        "TORCH_EXTENSIONS_DIR": str(PEERS / "extensions"), "LD_LIBRARY_PATH": str(libraries),
        "LIBRARY_PATH": str(libraries), "LDFLAGS": f"-L{libraries}",
        "CPATH": str(PEERS / "libaio" / "usr" / "include"), "PYTHONPATH": "",
        "PATH": f"{PEERS / 'env' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    script = str(Path(__file__).with_name("memory_deepspeed.py"))
    return Arm([python, script, settings], limit, env)


PARTS = {
    "limits": limits, "deepspeed": deepspeed, "kernel": kernel, "resident": resident,
    "peaks": peaks, "counts": count_blocks,
}  # fmt: skip
