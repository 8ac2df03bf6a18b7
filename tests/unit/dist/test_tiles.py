"""Triton kernels of the experts: results, in Triton's interpreter where there is no GPU; which
kernels a device gets; compilation for several compute capabilities.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.dist import device as devices
from moesaic.dist import passes, products
from moesaic.facts.job.train import GroupedMM
from moesaic.facts.plan.checks import basis, check
from moesaic.facts.plan.layout import planned
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.travel import Ranks
from moesaic.testing.jobs import tiny_job

pytest.importorskip("triton")

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0], [40, 0, 17], [2, 131, 3]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter takes bf16 for whole numbers.
TYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (DEVICE.type == "cuda")]


@pytest.fixture(scope="module")
def tiles() -> Any:
    return importlib.import_module("moesaic.dist.tiles")


def of_slots(numbers: Tensor, counts: list[int]) -> list[Tensor]:
    """Exactly."""
    return list(numbers.double().split(counts))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transposed", [True, False])
def test_rows_by_matrices(
    tiles: Any, counts: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    """With matrices that lie apart and are of another type, and places between others."""
    arena = torch.randn(3, 2, 72, 40, device=DEVICE)
    rows = torch.randn(sum(counts), 40 if transposed else 72, device=DEVICE).to(dtype)
    for weight in (arena[:, 1], arena[:, 1].to(dtype)):
        place = torch.full((sum(counts) + 2, 90), 7.0, device=DEVICE).to(dtype)
        into = place[1:-1, 2 : 2 + weight.shape[1 if transposed else 2]]
        tiles.grouped_mm(rows, weight, torch.tensor(counts), transposed, into, eight=False)
        exact = [
            part @ (w.T if transposed else w)
            for part, w in zip(of_slots(rows, counts), weight.to(dtype).double(), strict=True)
        ]
        torch.testing.assert_close(into, torch.cat(exact).to(dtype))
        into.fill_(7.0)
        assert bool((place == 7.0).all()), "nothing beside its place was written"


def test_what_is_no_number_stays_with_its_slot(tiles: Any) -> None:
    counts = torch.tensor([3, 3, 2])
    for wrong in (0, 1):
        pair = [torch.randn(8, 16, device=DEVICE) for _ in range(2)]
        pair[wrong][3:6] = torch.nan
        out = torch.empty(3, 16, 16, device=DEVICE)
        tiles.grouped_outer(*pair, counts, out, False)
        assert bool(out[[0, 2]].isfinite().all())
        assert bool(out[1].isnan().all())
        rows, weight = torch.randn(8, 16, device=DEVICE), torch.randn(3, 16, 16, device=DEVICE)
        (rows if wrong else weight)[3 * wrong : 3 * wrong + 3] = torch.nan
        weight[[0, 2]] = 1.0
        into = torch.empty(8, 16, device=DEVICE)
        tiles.grouped_mm(rows, weight, counts, True, into, eight=False)
        assert bool(into[[0, 1, 2, 6, 7]].isfinite().all())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_gates_and_ups(tiles: Any, counts: list[int], dtype: torch.dtype) -> None:
    """What comes of them is written with them, or without."""
    weight = torch.randn(3, 144, 40, device=DEVICE).to(dtype)
    rows = torch.randn(sum(counts), 40, device=DEVICE).to(dtype)
    inner, (activated, alone) = rows.new_empty(len(rows), 144), rows.new_empty(2, len(rows), 72)
    tiles.grouped_gated(rows, weight, torch.tensor(counts), inner, activated, eight=False)
    tiles.grouped_gated(rows, weight, torch.tensor(counts), None, alone, eight=False)
    pairs = zip(of_slots(rows, counts), weight, strict=True)
    exact = torch.cat([x @ w.double().T for x, w in pairs])
    torch.testing.assert_close(inner, exact.to(dtype))
    gate, up = inner.double().chunk(2, dim=1)
    torch.testing.assert_close(activated, (F.silu(gate) * up).to(dtype))
    assert torch.equal(activated, alone)
    assert torch.equal(activated, tiles.activate(inner))


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_back_between_products(tiles: Any, weighed: bool, dtype: torch.dtype) -> None:
    """As autograd has it; gradients of weights go to their places and nowhere else."""
    inner, grad = (torch.randn(9, n, device=DEVICE).to(dtype) for n in (144, 72))
    order = torch.randperm(12, device=DEVICE)[:9]
    weights = torch.rand(12, device=DEVICE).to(dtype) if weighed else None
    grad_weights = torch.full((12,), 7.0, device=DEVICE).to(dtype) if weighed else None
    found = tiles.gated_back(inner, grad, weights, order, grad_weights)
    leaf = inner.double().requires_grad_()
    scale = torch.ones(12, device=DEVICE) if weights is None else weights
    scale = scale.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    activated = F.silu(gate) * up * scale[order, None]
    activated.backward(grad.double())
    torch.testing.assert_close(found[0], leaf.grad.to(dtype))
    torch.testing.assert_close(found[1], activated.detach().to(dtype))
    if grad_weights is not None:
        there = torch.zeros(12, dtype=torch.bool, device=DEVICE).index_fill(0, order, True)
        torch.testing.assert_close(grad_weights[there], scale.grad[there].to(dtype))
        assert bool((grad_weights[~there] == 7.0).all())


@pytest.mark.parametrize("hidden", [1, 40, 1500])
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_a_token_are_added_up(tiles: Any, hidden: int, dtype: torch.dtype) -> None:
    """Weighed or not, and however they lie."""
    rows = torch.randn(9, hidden, device=DEVICE).to(dtype)
    places = torch.randint(8, (5, 3), device=DEVICE)
    weights = torch.rand(5, 3, device=DEVICE).to(dtype)
    exact = (rows.double()[places] * weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(tiles.add_up(rows, places, weights), exact.to(dtype))
    plain = tiles.add_up(rows, places, None)
    torch.testing.assert_close(plain, rows.double()[places].sum(1).to(dtype))
    turned = rows.T.contiguous().T, places.T.contiguous().T, weights.T.contiguous().T
    assert torch.equal(tiles.add_up(*turned), tiles.add_up(rows, places, weights))


@pytest.mark.parametrize("hidden", [1, 40, 1500])
@pytest.mark.parametrize("choices", [1, 3])
def test_rows_are_copies_of_tokens(tiles: Any, hidden: int, choices: int) -> None:
    tokens = torch.randn(7, hidden + 2, device=DEVICE)[:, 1:-1]
    order = torch.randint(7 * choices, (18,), device=DEVICE)
    assert torch.equal(tiles.copies(tokens, order, choices), tokens[order // choices])
    assert tiles.copies(tokens, order[:0], choices).shape == (0, hidden)
    for other in (tokens.T.contiguous().T, tokens[0, 0].expand(7, hidden), tokens[0].expand(7, -1)):
        assert torch.equal(tiles.copies(other, order, choices), other[order // choices])


def test_a_table_is_of_the_numbers_that_are_there(tiles: Any) -> None:
    """Other numbers in the same place, or in other memory, have a table of their own."""
    counts = torch.tensor([3, 0, 130], device=DEVICE)
    first = tiles.table(counts, 133, 128)
    assert tiles.table(counts, 133, 128)[0] is first[0]
    assert tiles.table(counts[:], 133, 128)[0] is first[0]
    assert first[0][:10].tolist() == [3, 0, 0, 3, 2, 3, 133, 2, 131, 133]
    assert first[1].tolist() == [0, 3, 3, 133]
    assert tiles.table(counts, 133, 64)[0][0] == 4
    tiles.table(counts, 133, 128)
    counts[1] = 2
    assert tiles.table(counts, 135, 128)[0][0] == 4
    counts -= 1
    assert tiles.table(counts.clone(), 135, 128)[0][0] == 4
    with torch.inference_mode():
        alone = torch.tensor([1, 0, 2], device=DEVICE)
        assert tiles.table(alone, 3, 16)[0][0] == 2
        alone[1] = 5
        assert tiles.table(alone, 8, 16)[0][0] == 3


@pytest.mark.parametrize(("length", "slots"), [(0, 4), (1, 3), (300, 5), (1000, 70), (640, 130)])
def test_rows_are_sorted(tiles: Any, length: int, slots: int) -> None:
    """By slot, and as they stood; what is of no slot has no row."""
    of = torch.randint(slots + 1, (length,))
    counts, order, rows = (one.cpu() for one in tiles.sort(of.to(DEVICE), slots))
    assert torch.equal(counts, of.bincount(minlength=slots + 1)[:slots])
    exact = of.argsort(stable=True)[: int(counts.sum())]
    assert torch.equal(order[: len(exact)], exact)
    assert torch.equal(rows[exact], torch.arange(len(exact)))
    assert bool((rows[of == slots] == 0).all())


def test_rows_that_lie_otherwise_are_torchs(tiles: Any) -> None:
    """Tiles are of rows of whole sixteen bytes."""
    rows = torch.randn(6, 12, device=DEVICE)
    assert tiles.serve(rows[:, :8], rows[:, 4:])
    assert not tiles.serve(rows[:, 1:9], rows)
    assert not tiles.serve(rows, rows[:, ::2])
    assert not tiles.serve(rows.double(), rows)
    assert tiles.serve(rows, rows.half()), "what is of another type is copied"
    assert not tiles.serve(rows[:, :10].half().contiguous(), rows[None, :, :10])
    weight, counts = torch.randn(2, 7, 5, device=DEVICE), torch.tensor([2, 4])
    for by in ("triton", "fp8"):
        found = products.grouped_mm(rows[:, :5], weight, counts, True, by=by)
        pairs = zip(of_slots(rows[:, :5], [2, 4]), weight, strict=True)
        exact = torch.cat([x @ w.double().T for x, w in pairs])
        torch.testing.assert_close(found, exact.float())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("added", [True, False])
def test_rows_by_rows(tiles: Any, counts: list[int], dtype: torch.dtype, added: bool) -> None:
    """Slots without rows come to nothing."""
    left, right = (torch.randn(sum(counts), n, device=DEVICE).to(dtype) for n in (40, 72))
    before = torch.randn(3, 40, 72, device=DEVICE)
    out = before.clone()
    tiles.grouped_outer(left, right, torch.tensor(counts), out, added)
    pairs = zip(of_slots(left, counts), of_slots(right, counts), strict=True)
    exact = torch.stack([a.T @ b for a, b in pairs]) + before.double() * added
    torch.testing.assert_close(out, exact.float())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [True, False])
def test_eight_bits_are_scaled(tiles: Any, counts: list[int], transposed: bool) -> None:
    """By row and by column, however far these are from one another; as close as eight bits are."""
    weight = torch.randn(3, 72, 40, device=DEVICE)
    weight *= torch.logspace(-6, 6, 72 if transposed else 40, device=DEVICE).view(
        (-1, 1) if transposed else (1, -1)
    )
    rows = torch.randn(sum(counts), 40 if transposed else 72, device=DEVICE)
    rows *= torch.logspace(-9, 9, sum(counts), device=DEVICE)[:, None]
    out = rows.new_empty((sum(counts), 72 if transposed else 40))
    tiles.grouped_mm(rows, weight, torch.tensor(counts), transposed, out, eight=True)
    matrices = weight.transpose(1, 2) if transposed else weight
    (rows8, by_row), (turned8, by_column) = (
        tiles.narrowed(rows), tiles.narrowed_turned(matrices)
    )  # fmt: skip
    matrices8 = turned8.transpose(1, 2)
    exact, near = [], []
    for slot, (start, stop) in enumerate(pairwise([0, *torch.tensor(counts).cumsum(0).tolist()])):
        scales = by_row[start:stop, None].double() * by_column[slot].double()
        near.append(rows8[start:stop].double() @ matrices8[slot].double() * scales)
        exact.append(rows[start:stop].double() @ matrices[slot].double())
    # Of four significant bits one factor is off by a sixteenth at most; of what is added up some
    # GPUs keep thirteen.
    sizes = [
        part.abs() @ matrix.double().abs()
        for part, matrix in zip(of_slots(rows, counts), matrices, strict=True)
    ]
    assert bool(((out - torch.cat(exact)).abs() <= 0.13 * torch.cat(sizes)).all())
    assert bool(((out - torch.cat(near)).abs() <= 1e-3 * torch.cat(sizes)).all())


def test_narrow_numbers_stay_what_they_are(tiles: Any) -> None:
    """Nothing stays nothing, the largest comes back as it was, and what is no number is none."""
    numbers = torch.tensor([[0.0, 0.0], [3.0, -448.0 * 7], [float("nan"), 1.0], [1e-40, 0.0]])
    eight, scales = tiles.narrowed(numbers.to(DEVICE))
    back = (eight.float() * scales[:, None]).cpu()
    turned, by_column = tiles.narrowed_turned(numbers.T[None].contiguous().to(DEVICE))
    torch.testing.assert_close(by_column[0], scales, rtol=0, atol=0, equal_nan=True)
    again = tiles.narrowed(numbers.T.contiguous().T.to(DEVICE))[1]
    torch.testing.assert_close(again, scales, rtol=0, atol=0, equal_nan=True)
    there = torch.arange(4) != 2
    assert torch.equal(turned[0].float()[there], eight.float()[there])
    assert back[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(back[1, 1], numbers[1, 1])
    assert bool(back[2].isnan().any())
    assert bool(back[3].isfinite().all())


def passed(
    bank: Bank,
    choices: Tensor,
    seed: int,
    *,
    summed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Results of a layer's experts, and gradients of tokens, weights of rows and matrices."""
    draw = torch.Generator().manual_seed(seed)
    tokens, cotangent = (torch.randn(len(choices), bank.hidden, generator=draw) for _ in range(2))
    weights = torch.rand(choices.shape, generator=draw)
    device = bank.arena.device
    leaves = [tokens.to(device, dtype).requires_grad_(), weights.to(device).requires_grad_()]
    dispatcher = Dispatcher(len(bank.experts), Ranks())
    by = bank.grouped_mm(dtype)
    counted = dispatcher.count(choices.to(device), training=True, whole=True, by=by)
    assert (counted.placed is None) == (by == "torch")
    placed = dispatcher.place(counted)
    sent = dispatcher.start(*leaves, placed)
    with bank.at_work() as compute:
        out = sent.through(compute)
    if summed:  # A gradient of one number, that of all.
        out.sum().backward()
    else:
        out.backward(cotangent.to(device, dtype))
    own = bank.arena if bank.adapters is None else bank.adapters.arena
    found = [out.detach(), *(leaf.grad for leaf in [*leaves, own])]
    own.grad = None
    return [one for one in found if one is not None]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("spread", ["even", "all to one", "by chance"])
def test_a_layer_by_them_is_the_same(tiles: Any, adapted: bool, spread: str) -> None:
    """Forward and backward, and near enough in eight bits, but for what comes of adapters alone;
    passes between products by kernels, too."""
    del tiles
    plain = torch.device("cpu")
    choices = {
        "even": torch.arange(24).view(12, 2) % 4,
        "all to one": torch.tensor([[2, 0]] * 12),
        "by chance": torch.rand(12, 4, generator=torch.Generator().manual_seed(3)).argsort()[:, :2],
    }[spread]
    found = {}
    for by in get_args(GroupedMM):
        device = plain if by == "torch" else DEVICE
        bank = Bank(range(4), 24, 40, by=by)
        if adapted:
            bank.adapt(4, 2.0)
        bank.to(device)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for one in bank.parameters():
                one.copy_(torch.randn(one.shape, generator=draw) * 0.3)
        found[by] = [one.cpu() for one in passed(bank, choices, 5, summed=spread == "by chance")]
    assert len(found["torch"]) == 4
    for one, other, eight in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        # The interpreter cuts off where a GPU rounds.
        assert 0 < float((eight - one).norm() / one.norm()) < 0.15


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "ffn"),
    [(64, 4, 64, 128), (1000, 16, 256, 512), (4096, 8, 1024, 768)],
)
@pytest.mark.parametrize("spread", ["even", "skewed", "empty"])
def test_triton_on_a_gpu_equals_torch(
    tokens: int, experts: int, hidden: int, ffn: int, spread: str, dtype: torch.dtype
) -> None:
    """Forward and all gradients, also with experts that have most or no tokens."""
    odds = {
        "even": torch.ones(experts),
        "skewed": torch.arange(1, experts + 1) ** -2.0,
        "empty": torch.arange(experts) % 2 + 1e-9 * (torch.arange(experts) == 0),
    }[spread]
    draw = torch.Generator().manual_seed(3)
    choices = odds.expand(tokens, -1).multinomial(2, generator=draw)
    found = {}
    for by in ("torch", "triton"):
        bank = Bank(range(experts), hidden, ffn, by=by)
        with torch.no_grad():
            bank.arena.normal_(std=hidden**-0.5, generator=torch.Generator().manual_seed(1))
        found[by] = [one.double() for one in passed(bank.to(DEVICE), choices, 5, dtype=dtype)]
    assert len(found["torch"]) == 4
    # TF32 is off, so float32 results differ in the order of sums alone.
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for one, other in zip(*found.values(), strict=True):
        assert bool(other.isfinite().all())
        assert float((one - other).norm() / one.norm()) < limit


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    """Return a device of this compute capability, on which Triton works."""
    monkeypatch.setattr(devices, "generation", lambda device: capability)
    monkeypatch.setattr(passes, "hindrance", lambda: None)
    products.choose.cache_clear()
    return torch.device("cuda", 0)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget what was chosen for devices of other capabilities."""
    yield
    products.choose.cache_clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("capability", "dtype", "taken"),
    [
        ((9, 0), torch.bfloat16, "triton"),
        ((9, 0), torch.float16, "triton"),
        ((9, 0), torch.float32, "torch"),
        ((9, 0), torch.float64, "torch"),
        *[(other, torch.bfloat16, "torch") for other in ((0, 0), (8, 0), (8, 9), (10, 0), (12, 0))],
    ],
)
def test_auto_takes_triton_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, taken: str
) -> None:
    device = gpu(monkeypatch, capability)
    assert products.choose("auto", device, dtype) == taken
    assert Bank(range(2), 8, 8).grouped_mm(dtype) == "torch", "it lies on the CPU"
    for by in get_args(GroupedMM):
        assert products.choose(by, device, dtype) == by


@pytest.mark.usefixtures("forgotten")
def test_auto_takes_torch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(passes, "hindrance", lambda: "Failed to find C compiler")
    assert products.choose("auto", device, torch.bfloat16) == "torch"
    products.check("auto", device)
    products.check("torch", device)
    with pytest.raises(ConfigError, match=r"needs Triton, .*find C compiler.*pip install triton"):
        products.check("fp8", device)


@pytest.mark.usefixtures("forgotten")
def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    products.check("torch", torch.device("cpu"))
    products.check("auto", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r'kernels.grouped_mm = "triton" is for GPUs.*leave it'):
        products.check("triton", torch.device("cpu"))
    device = gpu(monkeypatch, (7, 5))
    with pytest.raises(ConfigError, match=r'8.0 or more, and this one has 7.5: set it to "torch"$'):
        products.check("triton", device)
    device = gpu(monkeypatch, (0, 0))
    with pytest.raises(ConfigError, match=r"8.0 or more, and this one has none"):
        products.check("triton", device)
    device = gpu(monkeypatch, (8, 0))
    products.check("triton", device)
    with pytest.raises(ConfigError, match=r'8.9 or more, and this one has 8.0: .*"triton" or "to'):
        products.check("fp8", device)
    for capability in ((9, 0), (12, 0)):
        products.check("fp8", gpu(monkeypatch, capability))


@pytest.mark.usefixtures("forgotten")
def test_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    cases = [
        ("auto", torch.bfloat16, "Triton grouped matmul on cuda:0 (capability 9.0)"),
        ("auto", torch.float32, "torch.mm per expert on cuda:0 (capability 9.0)"),
        ("fp8", torch.bfloat16, "Triton grouped matmul in fp8 on cuda:0 (capability 9.0)"),
        ("triton", torch.float64, "torch.mm per expert on cuda:0 (capability 9.0)"),
        ("torch", torch.bfloat16, "torch.grouped_mm on cuda:0 (capability 9.0)"),
    ]
    for by, dtype, words in cases:
        assert products.engine(device, dtype, by) == words
    assert (
        products.engine(gpu(monkeypatch, (0, 0)), torch.float32) == "torch.mm per expert on cuda:0"
    )


def test_why_triton_cannot_be_used(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not there, or what it makes for a GPU cannot be made."""
    asked = passes.hindrance.__wrapped__

    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(tiles, "start", lambda: None)
    assert asked() is None
    monkeypatch.setattr(tiles, "start", fail)
    assert asked() == "Failed to find C compiler"
    monkeypatch.setitem(sys.modules, "moesaic.dist.tiles", None)
    monkeypatch.delattr("moesaic.dist.tiles")
    assert "tiles" in str(asked())


def test_jobs_and_plans_say_what_multiplies() -> None:
    """Nobody but the job takes eight bits; kernels have no fp64."""
    job = tiny_job(train={"precision": "bf16"}, kernels={"grouped_mm": "fp8"})
    assert planned(job, 1).grouped_mm == "fp8"
    assert planned(tiny_job(), 1).grouped_mm == "auto"
    with pytest.raises(ConfigError, match=r'kernels.grouped_mm = "triton" with train.precision'):
        tiny_job(kernels={"grouped_mm": "triton"})
    dense = {"family": "llama", "experts": 0, "top_k": 0}
    idle = tiny_job(model=dense, kernels={"grouped_mm": "triton"}).idle()
    assert "kernels.grouped_mm has no effect: the model is dense" in idle


@pytest.mark.parametrize("plan_first", [True, False])
def test_no_plan_gives_or_takes_eight_bits(plan_first: bool) -> None:
    """Nor does one ask for kernels that a job's precision has not; a dense model has no experts."""
    eight = tiny_job(train={"precision": "bf16"}, kernels={"grouped_mm": "fp8"})
    plain = tiny_job(train={"precision": "bf16"})
    ours, job = (planned(eight, 1), plain) if plan_first else (planned(plain, 1), eight)
    with pytest.raises(
        ConfigError, match=r'--plan x: grouped_mm = "(fp8|auto)", but kernels.*equal'
    ):
        check(ours, job, "--plan x")
    for by in ("torch", "triton"):
        check(planned(plain, 1).model_copy(update={"grouped_mm": by}), plain, "--plan x")
    kernels = planned(tiny_job(), 1).model_copy(update={"grouped_mm": "triton"})
    with pytest.raises(ConfigError, match=r'grouped_mm = "triton" with train.precision = "fp64"'):
        check(kernels, tiny_job(), "--plan x")
    dense = tiny_job(model={"family": "llama", "experts": 0, "top_k": 0})
    check(planned(dense, 1).model_copy(update={"grouped_mm": "triton"}), dense, "--plan x")


@pytest.mark.parametrize("by", ["triton", "fp8"])
def test_kernels_are_not_for_a_job_of_the_cpu(by: GroupedMM) -> None:
    with pytest.raises(ConfigError, match=r'is for GPUs, and train.device = "cpu": leave one'):
        tiny_job(kernels={"grouped_mm": by}, train={"precision": "fp32", "device": "cpu"})
    dense = {"family": "llama", "experts": 0, "top_k": 0}
    tiny_job(kernels={"grouped_mm": by}, train={"device": "cpu"}, model=dense)
    job = tiny_job(train={"precision": "fp32", "device": "cpu"})
    if by == "triton":
        with pytest.raises(ConfigError, match="is for GPUs"):
            check(planned(job, 1).model_copy(update={"grouped_mm": by}), job, "--plan x")


def test_predictions_do_not_rest_on_what_multiplies_by_itself() -> None:
    """The cost model has the same figures for torch and triton; fp8 is asked for."""
    job = tiny_job(train={"precision": "bf16"})
    plans = [
        planned(job, 1).model_copy(update={"grouped_mm": by})
        for by in ("auto", *get_args(GroupedMM))
    ]
    *others, eight = (basis(job, plan) for plan in plans)
    assert len(set(others)) == 1
    assert eight not in others


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moesaic.dist import kernels, tiles
import torch

generation = int(sys.argv[1])

def compiled(function, pointers, consts, own):
    names = function.arg_names
    kinds = {n: pointers.get(n, "constexpr" if n in consts else "i32") for n in names}
    source = ASTSource(function, kinds, consts)
    target = GPUTarget("cuda", generation, 32)
    options = {"num_warps": own.warps, "num_stages": own.stages}
    made = triton.compile(source, target, options)
    print(function.__name__, made.metadata.shared, len(made.asm["cubin"]))

types = {"bf16": torch.bfloat16, "fp32": torch.float32}
if generation >= 89:
    types["fp8e4nv"] = tiles.EIGHT
for kind, dtype in types.items():
    eight = dtype == tiles.EIGHT
    for rows in (16, 64, 4096) if kind == "bf16" else (4096,):
        own = tiles.blocks(dtype, rows, divmod(generation, 10))
        for gated in (False, True) if kind != "fp32" else (False,):
            tile = [1, 2, own.columns // 2, own.depth] if gated else [1, own.columns, own.depth]
            wide = "bf16" if eight else kind
            compiled(kernels.rows_by_matrices, {
                "rows": f"tensordesc<{kind}[{own.rows},{own.depth}]>",
                "matrices": f"tensordesc<{kind}{tile}>".replace(" ", ""),
                "out": f"*{wide}", "activated": f"*{wide}", "tiles": "*i32",
                "row_scales": "*fp32", "column_scales": "*fp32",
            }, {
                "TURNED": True, "GATED": gated, "KEPT": True, "SCALED": eight,
                "PRECISION": "tf32x3", "PROGRAMS": 132, "TOGETHER": 4,
                "M": own.rows, "N": own.columns, "K": own.depth,
            }, own)
        own = tiles.blocks_of_outer(dtype, rows, divmod(generation, 10))
        if not eight:
            compiled(kernels.rows_by_rows, {
                "left": f"tensordesc<{kind}[{own.depth},{own.rows}]>",
                "right": f"tensordesc<{kind}[{own.depth},{own.columns}]>",
                "out": "*fp32", "ends": "*i32",
            }, {
                "ADDED": True, "PRECISION": "tf32x3", "M": own.rows, "N": own.columns,
                "R": own.depth,
            }, own)
"""


@pytest.mark.parametrize(
    ("generation", "shared"),
    [
        (90, 227),
        *[
            pytest.param(generation, shared, marks=pytest.mark.soak)
            for generation, shared in ((80, 163), (89, 99), (100, 227), (120, 99))
        ],
    ],
)
def test_they_are_compiled_for_gpus(generation: int, shared: int, tmp_path: Any) -> None:
    """And what a program has in the memory of its processor, which is `shared` KiB, fits."""
    there = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(generation)], capture_output=True, text=True,
        timeout=300, check=False, env=there | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 11 + 2 * (generation >= 89)
    for _, used, size in lines:
        assert int(used) <= shared << 10
        assert int(size) > 0
