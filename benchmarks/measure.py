"""Measure figures: contenders timed in turn, paired ratios, intervals, facts, records.

A figure is the median of paired ratios, printed with its bootstrap interval; it holds when the
median is inside the bar. Rounds in which other programs used the machine are repeated. README.md
is the protocol.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
GENERATED = ("benchmarks/records", "benchmarks/results", "README.md")
"""Paths that a measurement writes; changes there do not make the tree dirty."""

UNKNOWN = "unknown"
DIRTY = "-dirty"
FOREIGN_SHARE = 0.04
"""Share of the processors that other programs may use in a round."""

_BAR = re.compile(r"(>=|<=|==)\s*(\S+)")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Row:
    """One figure; its fields are the keys of a record."""

    name: str
    value: float | None
    """None if it could not be measured."""
    unit: str
    bar: str
    """The goal, as '>= 1.0', '<= 0.25' or '== 300'; empty where there is none."""
    holds: bool | None
    """Whether the value is inside the bar; None without a bar or without a value."""
    against: str
    """The peer and its version, or the limit."""
    interval: tuple[float, float] | None
    """95% interval of the value, by bootstrap; None for a count."""
    repeats: int
    simulated: bool
    """Whether a simulator computed the value; otherwise a clock measured it."""
    command: str
    commit: str
    hardware: str


def row(
    name: str,
    value: float | None,
    unit: str,
    *,
    bar: str,
    against: str,
    repeats: int,
    interval: tuple[float, float] | None = None,
    simulated: bool = False,
) -> Row:
    """Return a figure, with this machine, commit and command line filled in.

    Args:
        name: the figure's name.
        value: the figure.
        unit: its unit; `ratio` for a ratio.
        bar: see `Row`.
        against: see `Row`.
        repeats: rounds.
        interval: see `Row`.
        simulated: see `Row`.
    """
    return Row(
        name, value, unit, bar, holds(bar, value), against, interval, repeats,
        simulated, command=own_command(), commit=commit(), hardware=hardware(),
    )  # fmt: skip


def compare(name: str, times: Times, of: str, to: str, *, against: str) -> Row:
    """Return the figure of a contender's seconds over those of another, paired by round.

    Args:
        name: the figure's name.
        times: seconds of both.
        of: the contender above the line.
        to: the contender below the line.
        against: see `Row`.
    """
    ratio, interval = times.ratio(of, to)
    return row(
        name, ratio, "ratio", bar="", against=against, interval=interval, repeats=times.rounds
    )


def untried(name: str, bar: str, why: str) -> Row:
    """Return a ratio that cannot be measured here."""
    return row(name, None, "ratio", bar=bar, against=f"untried: {why}", repeats=0)


def worst(name: str, rows: Sequence[Row], bar: str = "") -> Row:
    """Return one row for a claim: the worst of `rows` (the highest if the bar is an upper one).

    Value, interval, repeats, commit, machine and command are those of the row that it stands for.
    """
    tried = [one for one in rows if one.value is not None]
    if not tried:
        return replace(rows[0], name=name, bar=bar, holds=None)
    sign = -1.0 if bar.startswith("<=") else 1.0
    one = min(tried, key=lambda row: sign * (row.value or 0.0))
    more = f", {len(rows) - len(tried)} more untried" * (len(tried) < len(rows))
    against = f"{one.against}; worst of {len(tried)}{more}: {one.name}"
    return replace(one, name=name, bar=bar, holds=holds(bar, one.value), against=against)


def claim(name: str, bar: str, details: Sequence[Row]) -> Iterator[Row]:
    """Yield one row for a claim, the worst of `details`, and then the details."""
    yield worst(name, details, bar)
    yield from details


def joint(name: str, parts: Sequence[Row]) -> Iterator[Row]:
    """Yield one row for figures with bars of their own, '>= b' each, and then the figures.

    Its value is the smallest of the figures over their bars, so its bar is 1."""
    bars = [float(one.bar.removeprefix(">= ")) for one in parts]
    tried = [pair for pair in zip(parts, bars, strict=True) if pair[0].value is not None]
    if tried:
        one, bar = min(tried, key=lambda pair: (pair[0].value or 0.0) / pair[1])
        shares = [(part.value or 0.0) / least for part, least in tried]
        low, high = one.interval or (math.nan, math.nan)
        interval = (low / bar, high / bar) if one.interval else None
        yield replace(
            one, name=f"{name}, over its bar", value=min(shares), bar=">= 1", interval=interval,
            holds=holds(">= 1", min(shares)) if len(tried) == len(parts) else None,
            against=f"{one.name}: {one.value:.3g}, bar {bar:g}",
        )  # fmt: skip
    else:
        yield replace(parts[0], name=f"{name}, over its bar", bar=">= 1")
    for part, least in zip(parts, bars, strict=True):
        yield replace(part, name=f"{part.name} (bar {least:g})", bar="", holds=None)


def holds(bar: str, value: float | None) -> bool | None:
    """Return whether the value, a median, is inside the bar."""
    if not bar or value is None:
        return None
    match = _BAR.fullmatch(bar)
    if match is None:
        raise ValueError(f"bar = '{bar}': write '>= 1.0', '<= 0.25', '== 300', or nothing")
    goal = float(match[2])
    return {">=": value >= goal, "<=": value <= goal, "==": value == goal}[match[1]]


def bootstrap(
    values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile-bootstrap interval of the median of `values`."""
    sample = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(sample), size=(resamples, len(sample)))
    medians = np.median(sample[draws], axis=1)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(medians, (tail, 100.0 - tail))
    return float(low), float(high)


@dataclass
class Times:
    """Seconds of every contender, by round."""

    seconds: dict[str, list[float]]
    disturbed: int = 0
    """Rounds kept although others used the machine, as patience had run out."""
    retaken: int = 0
    """Rounds dropped and repeated."""
    rounds: int = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = min(map(len, self.seconds.values()))

    def median(self, name: str) -> float:
        """Return median seconds of a contender."""
        return float(np.median(self.seconds[name]))

    def ratios(self, of: str, to: str) -> NDArray[np.float64]:
        """Return seconds of `of` over seconds of `to`, by round."""
        ratios: NDArray[np.float64] = np.divide(self.seconds[of], self.seconds[to])
        return ratios

    def ratio(self, of: str, to: str) -> tuple[float, tuple[float, float]]:
        """Return the median of the paired ratios, and its interval."""
        ratios = self.ratios(of, to)
        return float(np.median(ratios)), bootstrap(ratios)


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    patience_s: float = 1200.0,
    root: int | None = None,
    before: Callable[[], object] = lambda: None,
) -> Times:
    """Time all contenders in every round; the order turns with each round.

    Args:
        contenders: what to time, by name.
        rounds: rounds to keep.
        warmup: calls of each before the first round.
        patience_s: disturbed rounds are repeated for so long; later ones are kept.
        root: the process whose descendants are not foreign; absent: this one.
        before: what is done before each call, untimed.
    """
    for call in contenders.values():
        for _ in range(warmup):
            call()
    patient_until = time.perf_counter() + patience_s
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    disturbed = retaken = taken = 0
    while taken < rounds:
        names = list(contenders) if (taken + retaken) % 2 == 0 else list(contenders)[::-1]
        watch = Watch(root)
        one = {name: _seconds(contenders[name], before) for name in names}
        noisy = watch.foreign_share() > FOREIGN_SHARE
        left_s = patient_until - time.perf_counter()
        if noisy and left_s > 0:
            retaken += 1
            wait_for_quiet(root, limit_s=left_s)
            continue
        disturbed += noisy
        taken += 1
        for name, spent in one.items():
            seconds[name].append(spent)
    return Times(seconds, disturbed, retaken)


def _seconds(call: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Watch:
    """Processor time of foreign programs since this was made (Linux; elsewhere 0).

    Foreign are all processes but `root` (absent: this one) and its descendants.
    """

    def __init__(self, root: int | None = None) -> None:
        self._root = root or os.getpid()
        self._began, self._others_s = time.perf_counter(), _others_s(self._root)

    def foreign_share(self) -> float:
        """Return processor time of foreign programs, as a share of the machine's."""
        had = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return (_others_s(self._root) - self._others_s) / max(had, _TICK_S)


def wait_for_quiet(root: int | None = None, *, limit_s: float = 120.0, look_s: float = 0.5) -> bool:
    """Wait until foreign programs are idle; return False if they were not within `limit_s`."""
    end = time.perf_counter() + limit_s
    while time.perf_counter() < end:
        watch = Watch(root)
        time.sleep(look_s)
        if watch.foreign_share() < FOREIGN_SHARE:
            return True
    return False


def _others_s(root: int) -> float:
    """Return processor seconds of all programs but `root` and its descendants."""
    if not Path("/proc/stat").exists():
        return 0.0
    ticks = [int(t) for t in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy = sum(ticks[:3]) + sum(ticks[5:8])
    return (busy - sum(_own_ticks(root))) * _TICK_S


def _own_ticks(root: int) -> list[int]:
    """Return processor ticks of `root` and of its descendants."""
    used: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(entry.name)
        parents[pid] = int(after_name[1])
        used[pid] = sum(int(t) for t in after_name[11:15])
    family = {root}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return [used.get(pid, 0) for pid in family]


def commit() -> str:
    """Return the hash of the checkout, with `-dirty` if files differ; or `unknown`."""
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", *(f":!{p}" for p in GENERATED))
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return head + (DIRTY if changes else "")


def is_known(commit_hash: str) -> bool:
    """Return whether the repository has this commit."""
    try:
        _git("cat-file", "-e", f"{commit_hash}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def own_command() -> str:
    """Return this process's command line, as typed at the root of the repository."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        return " ".join(["python", *sys.argv])
    return " ".join(["python -m", module.name.removesuffix(".__main__"), *sys.argv[1:]])


def hardware() -> str:
    """Return the machine and the versions that decide speed, as text."""
    facts = [f"{_processor()}, {os.cpu_count()} cores"]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts.append(f"{pages / 2**30:.0f} GiB")
    facts.append(f"{platform.system()}, Python {platform.python_version()}")
    facts.append(f"torch {metadata.version('torch')}")
    return "; ".join(facts)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    text = path.read_text()
    named = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    words = named.get("model name", platform.machine())
    if "cpu family" in named:
        words += f" (family {named['cpu family']}, model {named.get('model', '?')})"
    widest = [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in text]
    return words + (f" {widest[-1]}" if widest else "")


def write(theme: str, rows: Sequence[Row]) -> Path:
    """Replace a theme's record."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{theme}.json"
    path.write_text(json.dumps([asdict(r) for r in rows], indent=2) + "\n")
    return path


def read(path: Path) -> list[Row]:
    """Return the rows of a record; an error names its fault."""
    names = {f.name for f in fields(Row)}
    rows = []
    for index, raw in enumerate(json.loads(path.read_text())):
        if set(raw) != names:
            odd = ", ".join(sorted(set(raw) ^ names))
            raise ValueError(f"{path.name}, row {index}: these keys are missing or unknown: {odd}")
        if raw["interval"] is not None:
            low, high = raw["interval"]
            raw["interval"] = (float(low), float(high))
        rows.append(Row(**raw))
    return rows


def figure(value: float | None) -> str:
    """Return a figure with three significant digits."""
    if value is None:
        return "-"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"
