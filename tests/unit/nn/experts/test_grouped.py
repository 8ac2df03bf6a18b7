"""Gated experts: finite differences, slot ranges, split backward, threads, and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from sorted_rows import identity_permutation, random_permutation, run_bank, run_experts
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moesaic.kernels import cpu_gemm, cpu_gemv, threads
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts import tiles
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.grouped import GatedExperts, gated_experts
from moesaic.nn.experts.lease import Lease

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
def test_gradcheck(counts: list[int]) -> None:
    rows = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    arena = torch.randn(3, 3 * 4 * 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, a: run_experts(r, a, counts, 5), (rows, arena))


@pytest.mark.parametrize("counts", [[3, 0, 2, 9, 0, 1], [0, 0, 0, 0, 0, 4], [0] * 6])
def test_slot_ranges_change_no_bit(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows are whole cache lines: otherwise the last digit depends on alignment.
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    arena = torch.randn(6, 3 * 16 * 16, requires_grad=True)
    cotangent = torch.randn(sum(counts), 16)
    results = []
    for num_rows in (1, 4, 1000):
        monkeypatch.setattr(tiles, "_RANGE_BYTES", num_rows * 2 * 16 * 4)
        out = run_experts(rows, arena, counts, 16)
        results.append((out, *torch.autograd.grad(out, (rows, arena), cotangent)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def experts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows, an arena with gradient, and the output; the input is no leaf, as in a model."""
    rows = torch.randn(14, 16, requires_grad=True)
    arena = torch.randn(3, 3 * 16 * 8, requires_grad=True)
    return rows, arena, run_experts(rows * 1.0, arena, [9, 0, 5], 8)


@pytest.mark.parametrize("range_rows", [1, 1000])
def test_split_backward_equals_full_backward_with_equal_flops(
    range_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_RANGE_BYTES", range_rows * 2 * 8 * 4)
    rows, arena, out = experts()
    cotangent, flops, split = torch.randn_like(out), [], []
    whole = torch.autograd.grad(out, (rows, arena), cotangent, retain_graph=True)
    for one in (rows, arena):
        with FlopCounterMode(display=False) as counter:
            split += torch.autograd.grad(out, one, cotangent, retain_graph=True)
        flops.append(counter.get_total_flops())
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
    assert flops == [2 * 14 * 3 * 16 * 8] * 2


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("range_rows", [1, 3, 1000])
def test_gradients_of_row_weights_in_any_order(
    range_rows: int, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of weights come alone or with others, before or after them."""
    monkeypatch.setattr(tiles, "_RANGE_BYTES", range_rows * 2 * 5 * 8)
    permutation, bank = random_permutation(9, 4, 2), ExpertBank(range(4), 6, 5)
    if adapted:
        bank.add_adapters(3, 0.7)
        bank.arena.requires_grad_(False)
    for parameter in bank.double().parameters():
        parameter.data.normal_()
    (parameter,) = (one for one in bank.parameters() if one.requires_grad)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    assert permutation.present_NK is not None

    def apply(*arguments: torch.Tensor) -> torch.Tensor:
        masked = torch.where(permutation.present_NK, arguments[1], 0.0)
        return run_bank(bank, arguments[0], permutation, masked)

    assert torch.autograd.gradcheck(apply, (x, weights))
    out, inputs = apply(x, weights), (x, parameter, weights)
    cotangent = torch.randn_like(out)
    whole = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    plain, slow = identity_permutation([int(n) for n in permutation.counts]), torch.zeros_like(out)
    results = (
        run_bank(bank, x[permutation.tokens_R], plain) * weights.view(-1)[permutation.order_R, None]
    )
    slow = slow.index_add(0, permutation.tokens_R, results)
    expected = torch.autograd.grad(slow, inputs, cotangent)
    for a, b in zip((out, *whole), (slow, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for places in ([0], [2], [1], [2, 1], [0, 2]):
        requested = [inputs[place] for place in places]
        grads = torch.autograd.grad(out, requested, cotangent, retain_graph=True)
        for place, one in zip(places, grads, strict=True):
            assert torch.equal(one, whole[place])


@pytest.mark.parametrize("has_few_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_with_few_rows_are_computed_at_once(
    dtype: torch.dtype, has_few_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward takes two matmuls for all slots, backward goes slot by slot.

    With one slot that has too many rows, forward goes slot by slot too.
    """
    monkeypatch.setattr(tiles, "_RANGE_BYTES", 2 * 8 * dtype.itemsize)
    tokens = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    arena = torch.randn(5, 3 * 16 * 8, dtype=dtype, requires_grad=True)
    counts = [2, 0, 1, 3, 2] if has_few_rows else [1, 0, 1, 5, 1]
    cotangent, results, gemv_counts = torch.randn(8, 16, dtype=dtype), [], list[list[int]]()
    multiply = cpu_gemv.grouped_gemv

    def recording_gemv(rows: Tensor, matrices: Tensor, counts: list[int], out: Tensor) -> None:
        gemv_counts.append(counts)
        multiply(rows, matrices, counts, out)

    monkeypatch.setattr(cpu_gemv, "grouped_gemv", recording_gemv)
    for min_elements in (1 << 19, 1):
        monkeypatch.setattr(cpu_gemv, "_MIN_ELEMENTS", min_elements)
        out = run_experts(tokens, arena, counts, 8)
        results.append((out, *torch.autograd.grad(out, (tokens, arena), cotangent)))
        assert min_elements == 1 or not gemv_counts
    assert (
        gemv_counts[:2] == [counts] * 2
        if has_few_rows
        else [sum(one) for one in gemv_counts[:2]] == [1, 1]
    )
    assert len(tiles.split_slots(tokens, identity_permutation(counts), 8)) > 1
    for one, other in zip(*results, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        assert (one.double() - other).norm() <= tolerance * one.double().norm()


@pytest.mark.parametrize("range_rows", [1, 1000])
@pytest.mark.parametrize(("num", "weighted"), [(70, True), (70, False), (9, True)])
def test_forward_without_gradients(
    num: int, weighted: bool, range_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas, and slots with few and many rows, are included."""
    monkeypatch.setattr(tiles, "_RANGE_BYTES", range_rows * 2 * 24 * 2)
    monkeypatch.setattr(cpu_gemm, "_MIN_ONEDNN_MACS", 0)
    monkeypatch.setattr(cpu_gemv, "_MIN_ELEMENTS", 1)
    permutation, arena = (
        random_permutation(num, 5, 2),
        (0.2 * torch.randn(5, 3 * 16 * 24)).bfloat16(),
    )
    assert int(permutation.counts.max()) > 3
    assert num > 9 or int(permutation.counts.min()) <= 3
    tokens = torch.randn(num, 16, dtype=torch.bfloat16)
    weights = torch.rand(num, 2, dtype=torch.bfloat16) if weighted else None
    wide = None if weights is None else weights.float()
    wide_arena = arena.float()
    expected = GatedExperts.apply(
        tokens.float(), wide_arena, wide, Lease(wide_arena, 24), None, *permutation
    )
    for num_owned in (5, 3):
        owned, replicas = (
            (arena, None) if num_owned == 5 else arena.split([num_owned, 5 - num_owned])
        )
        lease = Lease(owned, 24, replicas=replicas)
        with FlopCounterMode(display=False) as counter:
            actual, _ = gated_experts(tokens, weights, lease, permutation)
        assert counter.get_total_flops() == 2 * len(permutation.order_R) * 3 * 16 * 24
        assert (actual - expected).norm() < 0.02 * expected.norm()
        arguments = tokens, owned, weights, lease, None, *permutation
        assert torch.equal(actual, GatedExperts.apply(*arguments))


def test_bank_skips_autograd_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, tokens = ExpertBank(range(2), 16, 8), torch.randn(5, 16)
    bank.arena.data.normal_()
    with_gradients = run_bank(bank, tokens, identity_permutation([2, 3]))
    monkeypatch.setattr(GatedExperts, "apply", None)
    with torch.no_grad():
        assert torch.equal(run_bank(bank, tokens, identity_permutation([2, 3])), with_gradients)


def test_rank_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gemv, "_MIN_ELEMENTS", 1)
    assert run_experts(torch.randn(0, 16), torch.zeros(0, 3 * 16 * 8), [], 8).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_with_small_weights_stay_close(dtype: torch.dtype) -> None:
    permutation, bank = random_permutation(40, 4, 2), ExpertBank(range(4), 16, 24)
    bank.arena.data.normal_(std=0.3)
    x, weights, cotangent = torch.randn(40, 16), 1e-3 * torch.rand(40, 2), torch.randn(40, 16)
    results = []
    for kind in (torch.float32, dtype):
        given = [t.to(kind).requires_grad_() for t in (x, weights)]
        out = run_bank(bank, given[0], permutation, given[1])
        grads = torch.autograd.grad(out, (*given, bank.arena), cotangent.to(kind))
        results.append([t.float() for t in (out, *grads)])
    for expected, narrow in zip(*results, strict=True):
        assert (narrow - expected).norm() < 0.03 * expected.norm()


def test_split_backward_with_another_gradient_recomputes() -> None:
    rows, arena, out = experts()
    first = torch.randn_like(out)
    for other in (torch.randn_like(out), first):
        torch.autograd.grad(out, rows, first, retain_graph=True)
        if other is first:
            first.mul_(3.0)
        (actual,) = torch.autograd.grad(out, arena, other, retain_graph=True)
        whole = torch.autograd.grad(out, (rows, arena), other, retain_graph=True)
        assert torch.equal(actual, whole[1])


def test_bank_matrices_cover_every_element_once() -> None:
    bank = ExpertBank([4, 7], hidden=3, ffn=5)
    mark = torch.zeros_like(bank.arena)
    for _, _, view in bank.matrices(mark):
        view += 1
    assert bool((mark == 1).all())
    shapes = [(e, part, tuple(v.shape)) for e, part, v in bank.matrices(bank.arena)]
    assert shapes[:3] == [(4, "gate", (5, 3)), (4, "up", (5, 3)), (4, "down", (3, 5))]
    assert {e for e, _, _ in shapes} == {4, 7}


@pytest.fixture
def computed_ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Use two threads; yield the ranges that they have computed."""
    before, taken = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    if threads.thread_pool() is None:
        pytest.skip("this build of torch has no OpenMP whose threads can be set")
    run_each = threads.ThreadPool.run_each

    def recording_run_each(
        self: threads.ThreadPool, work: Callable[[int], None], items: Iterable[int]
    ) -> None:
        chosen = list(items)
        taken.extend(chosen)
        run_each(self, work, chosen)

    monkeypatch.setattr(threads.ThreadPool, "run_each", recording_run_each)
    monkeypatch.setattr(tiles, "_RANGE_BYTES", 32 * 2 * 16 * 4)
    monkeypatch.setattr(tiles, "_MIN_THREADED_BYTES", 0)
    yield taken
    torch.set_num_threads(before)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(
    computed_ranges: list[int], dtype: torch.dtype, adapted: bool, large: bool
) -> None:
    """An expert with most rows uses all threads, which may sum in another order."""
    counts = [400 if large else 40, 3, 0, 39, 27, 1, 30, 25]
    bank = ExpertBank(range(8), 16, 16)
    if adapted:
        bank.add_adapters(4, 0.5)
    for parameter in bank.parameters():
        parameter.data.normal_()
    learns = [p for name, p in bank.named_parameters() if not adapted or name != "arena"]
    rows = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weights = torch.rand(sum(counts), 1, dtype=dtype, requires_grad=True)
    order, row_numbers = torch.arange(sum(counts)), torch.arange(sum(counts))[:, None]
    permutation = Permutation(torch.tensor(counts), order, row_numbers)
    cotangent, results = torch.randn(sum(counts), 16, dtype=dtype), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        out = run_bank(bank, rows, permutation, weights)
        results.append((out, *torch.autograd.grad(out, (rows, weights, *learns), cotangent)))
    assert set(computed_ranges) == set(range(large, max(computed_ranges) + 1))
    for one, other in zip(*results, strict=True):
        if large:
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


def test_double_backward_raises() -> None:
    rows, _, out = experts()
    with pytest.raises(NotImplementedError, match="leave out create_graph"):
        torch.autograd.grad(out.square().sum(), rows, create_graph=True)
