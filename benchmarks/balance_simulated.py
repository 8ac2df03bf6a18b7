"""Balance, simulated: Pro-Prophet's models on its clusters, and many devices, by the model alone.

No clock is in it: seconds are those of `policy.balance.model`. The paper does not publish loads,
nor what its GPUs and links reach: four figures were sought on a grid until three published rows
came out as nearly as they do, and all other rows are foretold. Loads are drawn by Zipf; other
experts are hot in other layers and, little by little, in later iterations. Those of many devices
are by the shares of a real run, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure
from benchmarks.natural import least_even, trained
from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance import Search, at_copies, faster_moe, pro_prophet, quota, times

SKEW = 1.0
_EFFICIENCY = 0.03
"""Of a GPU's data sheet in fp32, that experts reach."""
_EXCHANGES_BYTES_PER_S, _COPIES_BYTES_PER_S = 4e9, 8e9
"""Of what a GPU exchanges with all others, and of copies."""
CALIBRATED = (("S", 1), ("M", 1), ("L", 1))
"""Rows of the first machines that these three and the exponent were sought on."""
ITERATIONS, WARM = 12, 2
"""Of a run, and of those that come before what counts."""
DRIFT = 0.05
"""How much of the logarithm of a share changes by chance from one iteration to the next."""
SHAPES = {
    "S": (12, 512, 1024), "M": (12, 1024, 2048), "L": (12, 2048, 4096), "DS": (24, 512, 1024),
    "DM": (24, 1024, 2048),
}  # fmt: skip
"""Layers, width and inner width; every feed-forward network has as many experts as there are GPUs,
each of two matrices."""
SEQUENCE = 1024
MANY = ((64, 64), (64, 256), (256, 256), (1024, 512), (2048, 512))
"""Devices and experts beyond the paper's."""
TOKENS, TOP_K = 4096, 8
"""Of each of these devices, and of each token."""
Floats = NDArray[np.float64]


class Machines(NamedTuple):
    """GPUs of a kind, and what is between them."""

    name: str
    gpus: int
    tokens: int
    """Of an iteration."""
    flops: float
    published: dict[tuple[str, int], tuple[float, float]]
    """Speed-ups over DeepSpeed-MoE by shape and choices: FasterMoE's and Pro-Prophet's."""
    between: dict[int, tuple[float, float]] | None = None
    """Where no more is published: Pro-Prophet's least and largest, by choices."""


CLUSTERS = (
    Machines(
        "4 hosts of 4 RTX 3090, NVLink in pairs", 16, 16384, 35.6e12,
        {
            ("S", 1): (1.63, 1.98), ("S", 2): (2.31, 2.62), ("M", 1): (1.99, 2.22),
            ("M", 2): (1.82, 2.10), ("L", 1): (1.62, 1.80), ("L", 2): (1.94, 2.23),
            ("DS", 1): (1.34, 1.70), ("DS", 2): (1.77, 1.94), ("DM", 1): (1.68, 2.26),
            ("DM", 2): (1.84, 2.07),
        },
    ),
    Machines(
        "2 hosts of 4 RTX 2080 Ti", 8, 4096, 13.4e12,
        {
            ("S", 1): (1.20, 1.30), ("S", 2): (1.56, 1.91), ("M", 1): (1.02, 1.18),
            ("M", 2): (1.29, 1.94), ("DS", 1): (1.12, 1.30), ("DS", 2): (1.44, 1.64),
            ("DM", 1): (0.96, 1.26), ("DM", 2): (1.25, 1.58),
        },
    ),
    Machines(
        "8 hosts of 4 RTX 3090", 32, 32768, 35.6e12, {}, {1: (1.47, 2.66), 2: (1.36, 2.37)},
    ),
)  # fmt: skip
LEAST, LARGEST = 1.18, 2.66
"""Of Pro-Prophet's speed-ups over DeepSpeed-MoE, over all that it measured."""


def rows() -> Iterator[measure.Row]:
    """Every figure."""
    for machines in CLUSTERS:
        gains, theirs = list[float](), list[float]()
        for shape in SHAPES:
            for top_k in (1, 2):
                seconds = iterations(machines, shape, top_k)
                others = min(s for name, s in seconds.items() if name != "quota")
                gains.append(others / seconds["quota"])
                theirs.append(seconds["DeepSpeed-MoE"] / seconds["Pro-Prophet"])
                yield from _rows(machines, shape, top_k, seconds)
        yield measure.row(
            f"{machines.name}: quota over the best of the others, where it gains the least",
            min(gains), "ratio", bar=">= 1.0", against="the best of the three, by the same model",
            repeats=1, simulated=True,
        )  # fmt: skip
        yield measure.row(
            f"{machines.name}: Pro-Prophet over DeepSpeed-MoE, where it gains the most",
            max(theirs), "ratio", bar=f"<= {LARGEST}", repeats=1, simulated=True,
            against=f"the most that was published, {LARGEST}, over all of its machines",
        )  # fmt: skip
    yield from _many()


def _rows(
    machines: Machines, shape: str, top_k: int, seconds: dict[str, float]
) -> Iterator[measure.Row]:
    title = f"{machines.name}, {shape}, top-{top_k}"
    published = machines.published.get((shape, top_k))
    calibrated = machines is CLUSTERS[0] and (shape, top_k) in CALIBRATED
    for at, name in enumerate(("FasterMoE", "Pro-Prophet", "quota")):
        said = "every row at home"
        if published is not None and name != "quota":
            said += f"; published: {published[at]}" + ", calibrated on it" * calibrated
        elif name == "Pro-Prophet" and machines.between is not None:
            said += "; published: {} to {}".format(*machines.between[top_k])
        yield measure.row(
            f"{title}: {name} over DeepSpeed-MoE", seconds["DeepSpeed-MoE"] / seconds[name],
            "ratio", bar=f">= {LEAST}" if name == "Pro-Prophet" and not calibrated else "",
            against=said, repeats=1, simulated=True,
        )  # fmt: skip


def iterations(machines: Machines, shape: str, top_k: int) -> dict[str, float]:
    """Seconds of all iterations that count, by system."""
    layers, width, inner = SHAPES[shape]
    setting = setting_of(machines, width, inner)
    straight = setting._replace(relays=False)  # Ours has an expert's home send every copy.
    found = dict.fromkeys(("DeepSpeed-MoE", "FasterMoE", "Pro-Prophet", "quota"), 0.0)
    for layer in range(layers):
        before: Ints | None = None
        for step, counts in enumerate(
            loads(machines.gpus, machines.gpus, machines.tokens, top_k, layer)
        ):
            if step >= WARM and before is not None:
                late = pro_prophet(before, setting, Search(coefficient=1.0))
                decided = {
                    "DeepSpeed-MoE": unchanged(),
                    "FasterMoE": faster_moe(counts, setting),
                    "Pro-Prophet": at_copies(counts, late.copies),
                    "quota": quota(counts, straight),
                }
                for name, balance in decided.items():
                    on = straight if name == "quota" else setting
                    found[name] += layer_s(counts, on, balance, hides=name != "FasterMoE")
            before = counts
    return found


def layer_s(counts: Ints, setting: Setting, balance: Balance, *, hides: bool) -> float:
    """Seconds of a layer and of what is between it and the next; FasterMoE hides no copies."""
    taken = times(counts, setting, balance)
    whole = (
        taken.whole if hides else 4 * taken.exchange + 3 * taken.experts + taken.out + taken.back
    )
    return whole + 3 * setting.beside_s


def setting_of(machines: Machines, width: int, inner: int) -> Setting:
    """What a layer costs there, in fp32."""
    speed = _EFFICIENCY * machines.flops
    tokens = machines.tokens / machines.gpus
    beside = tokens * (8 * width**2 + 4 * width * SEQUENCE) / speed
    # The model knows one speed of links: what is faster has fewer bytes.
    faster = _COPIES_BYTES_PER_S / _EXCHANGES_BYTES_PER_S
    expert_bytes = 4.0 * 2 * width * inner / faster
    return Setting(
        np.arange(machines.gpus), machines.gpus, speed / (4 * width * inner), 4.0 * width,
        _EXCHANGES_BYTES_PER_S, expert_bytes, expert_bytes, latency_s=2e-5, beside_s=beside,
        relays=True,
    )  # fmt: skip


def loads(ranks: int, experts: int, tokens: int, top_k: int, seed: int) -> Iterator[Ints]:
    """Rows of every rank for every expert, iteration after iteration."""
    draw = np.random.default_rng([seed, ranks, experts])
    shares = draw.permutation(-SKEW * np.log(np.arange(1, experts + 1)))
    for _ in range(ITERATIONS):
        yield _drawn(np.exp(shares) / np.exp(shares).sum(), ranks, tokens // ranks * top_k, draw)
        shares = shares + DRIFT * draw.standard_normal(experts)


def _drawn(odds: Floats, ranks: int, rows: int, draw: np.random.Generator) -> Ints:
    """So many rows of each rank, by shares of its own that are about those."""
    each = np.stack([draw.dirichlet(200 * odds) for _ in range(ranks)])
    return np.stack([draw.multinomial(rows, one) for one in each])


def recorded(ranks: int, shares: Floats, tokens: int, top_k: int) -> list[Ints]:
    """The same by the last steps of a real run, shares [steps, experts]; what nobody chose there
    is nobody's here."""
    draw = np.random.default_rng(shares.shape)
    last = shares[WARM - ITERATIONS :]
    floor = 1e-9  # A Dirichlet distribution takes nothing that is 0.
    return [_drawn(one + floor, ranks, tokens // ranks * top_k, draw) for one in last]


def large(ranks: int, experts: int) -> Setting:
    """GPUs at half of 312 TFLOP/s, 25 GB/s each, and experts of 2,048 x 1,024 in bf16."""
    numbers = 3 * 2048 * 1024
    return Setting(
        np.arange(experts) * ranks // experts, ranks, 0.5 * 312e12 / (2 * numbers), 2 * 2048.0,
        2.5e10, 2.0 * numbers, 4.0 * numbers, latency_s=1e-5, beside_s=1e-3, least_rows=64,
    )  # fmt: skip


def _many() -> Iterator[measure.Row]:
    """Ours and the paper's on 64 to 2,048 devices, by loads that are drawn, and by a real run's."""
    runs = {experts: least_even(trained(experts, TOP_K)) for experts in {e for _, e in MANY}}
    for ranks, experts in MANY:
        tokens = ranks * TOKENS
        drawn = list(loads(ranks, experts, tokens, TOP_K, 0))[WARM:]
        yield from _compared(f"{ranks:,} devices, {experts} experts, top-{TOP_K}", drawn)
        yield from _compared(
            f"{ranks:,} devices, {experts} experts, top-{TOP_K}, a run's loads",
            recorded(ranks, runs[experts], tokens, TOP_K),
        )


def _compared(shape: str, every: list[Ints]) -> Iterator[measure.Row]:
    """Loads under each policy."""
    setting = large(*every[0].shape)
    policies: dict[str, Callable[[Ints, Setting], Balance]] = {
        "Pro-Prophet": pro_prophet, "FasterMoE": faster_moe, "quota": quota,
    }  # fmt: skip
    seconds = {"plain": sum(layer_s(one, setting, unchanged(), hides=True) for one in every)}
    for name, policy in policies.items():
        balances = ((one, policy(one, setting)) for one in every)
        seconds[name] = sum(
            layer_s(one, setting, balance, hides=name != "FasterMoE") for one, balance in balances
        )
    said = "half of 312 TFLOP/s, 25 GB/s"
    for name in policies:
        yield measure.row(
            f"{shape}: {name} over plain", seconds["plain"] / seconds[name], "ratio", bar="",
            against=f"every row at home; GPUs at {said}", repeats=1, simulated=True,
        )  # fmt: skip
    best = min(s for name, s in seconds.items() if name != "quota")
    yield measure.row(
        f"{shape}: quota over the best of the others", best / seconds["quota"], "ratio",
        bar=">= 1.0", against=f"the best of the three; GPUs at {said}", repeats=1,
        simulated=True,
    )  # fmt: skip
