"""The network of many experts: finite differences, shares, halves of its backward, flops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from straight import experts_of, straight, through
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moesaic.dist import device as devices
from moesaic.dist import loops, threads, vectors
from moesaic.nn import shares
from moesaic.nn.bank import Bank
from moesaic.nn.grouped import GatedExperts, Total, gated_experts
from moesaic.nn.routes import Routes, inverse

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
def test_gradcheck(counts: list[int]) -> None:
    rows = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    arena = torch.randn(3, 3 * 4 * 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, a: experts_of(r, a, counts, 5), (rows, arena))


@pytest.mark.parametrize("counts", [[3, 0, 2, 9, 0, 1], [0, 0, 0, 0, 0, 4], [0] * 6])
def test_shares_change_no_bit(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows of whole cache lines: elsewhere a kernel's last digit depends on the alignment it meets.
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    arena = torch.randn(6, 3 * 16 * 16, requires_grad=True)
    cotangent = torch.randn(sum(counts), 16)
    results = []
    for num_rows in (1, 4, 1000):
        monkeypatch.setattr(shares, "_SHARE_BYTES", num_rows * 2 * 16 * 4)
        out = experts_of(rows, arena, counts, 16)
        results.append((out, *torch.autograd.grad(out, (rows, arena), cotangent)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def experts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, an arena that learns, and what comes of them; rows are a result, as in a model."""
    rows = torch.randn(14, 16, requires_grad=True)
    arena = torch.randn(3, 3 * 16 * 8, requires_grad=True)
    return rows, arena, experts_of(rows * 1.0, arena, [9, 0, 5], 8)


@pytest.mark.parametrize("share_rows", [1, 1000])
def test_halves_of_a_backward_are_the_whole_and_no_more_work(
    share_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_SHARE_BYTES", share_rows * 2 * 8 * 4)
    rows, arena, out = experts()
    cotangent, spent, halves = torch.randn_like(out), [], []
    whole = torch.autograd.grad(out, (rows, arena), cotangent, retain_graph=True)
    for one in (rows, arena):
        with FlopCounterMode(display=False) as counter:
            halves += torch.autograd.grad(out, one, cotangent, retain_graph=True)
        spent.append(counter.get_total_flops())
    assert all(torch.equal(a, b) for a, b in zip(whole, halves, strict=True))
    assert spent == [2 * 14 * 3 * 16 * 8] * 2


def routes_of(tokens: int, slots: int, choices: int) -> Routes:
    """Random slots of each token, of which every fifth (token, choice) has none."""
    chosen = torch.rand(tokens, slots).topk(choices).indices
    present = torch.arange(tokens * choices).view(tokens, choices) % 5 != 3
    flat = torch.where(present, chosen, slots).view(-1)
    order = flat.argsort(stable=True)[: int(present.sum())]
    rows = inverse(order, len(flat)).view(tokens, choices)
    return Routes(torch.bincount(flat, minlength=slots)[:slots], order, rows, present)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("share_rows", [1, 3, 1000])
def test_weights_of_rows_may_be_asked_for_at_any_time(
    share_rows: int, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside tokens or not, before or after the gradient of what learns."""
    monkeypatch.setattr(shares, "_SHARE_BYTES", share_rows * 2 * 5 * 8)
    routes, bank = routes_of(9, 4, 2), Bank(range(4), 6, 5)
    if adapted:
        bank.adapt(3, 0.7)
        bank.arena.requires_grad_(False)
    for parameter in bank.double().parameters():
        parameter.data.normal_()
    (learnt,) = (one for one in bank.parameters() if one.requires_grad)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(9, 2, dtype=torch.float64, requires_grad=True)
    assert routes.present_NK is not None

    def apply(*given: torch.Tensor) -> torch.Tensor:
        masked = torch.where(routes.present_NK, given[1], 0.0)
        return through(bank, given[0], routes, masked)

    assert torch.autograd.gradcheck(apply, (x, weights))
    out, inputs = apply(x, weights), (x, learnt, weights)
    cotangent = torch.randn_like(out)
    whole = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    plain, slow = straight([int(n) for n in routes.counts]), torch.zeros_like(out)
    results = through(bank, x[routes.tokens_R], plain) * weights.view(-1)[routes.order_R, None]
    slow = slow.index_add(0, routes.tokens_R, results)
    expected = torch.autograd.grad(slow, inputs, cotangent)
    for a, b in zip((out, *whole), (slow, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for places in ([0], [2], [1], [2, 1], [0, 2]):
        asked = [inputs[place] for place in places]
        found = torch.autograd.grad(out, asked, cotangent, retain_graph=True)
        for place, one in zip(places, found, strict=True):
            assert torch.equal(one, whole[place])


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_of_few_rows_are_taken_at_once_and_change_nothing(
    dtype: torch.dtype, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products for all slots forward, and backward slot by slot; with one slot that has too
    many rows, slot by slot as ever."""
    monkeypatch.setattr(shares, "_SHARE_BYTES", 2 * 8 * dtype.itemsize)
    tokens = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    arena = torch.randn(5, 3 * 16 * 8, dtype=dtype, requires_grad=True)
    counts = [2, 0, 1, 3, 2] if few else [1, 0, 1, 5, 1]
    cotangent, found, asked = torch.randn(8, 16, dtype=dtype), [], list[list[int]]()
    multiply = vectors.multiply

    def seen(rows: Tensor, matrices: Tensor, counts: list[int], out: Tensor) -> None:
        asked.append(counts)
        multiply(rows, matrices, counts, out)

    monkeypatch.setattr(vectors, "multiply", seen)
    for least in (1 << 19, 1):
        monkeypatch.setattr(vectors, "_LEAST", least)
        out = experts_of(tokens, arena, counts, 8)
        found.append((out, *torch.autograd.grad(out, (tokens, arena), cotangent)))
        assert least == 1 or not asked
    assert asked[:2] == [counts] * 2 if few else [sum(one) for one in asked[:2]] == [1, 1]
    assert len(shares.shares(tokens, straight(counts), 8)) > 1
    for one, other in zip(*found, strict=True):
        close = 1e-6 if dtype == torch.float32 else 1e-2
        assert (one.double() - other).norm() <= close * one.double().norm()


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("share_rows", [1, 1000])
@pytest.mark.parametrize(("num", "weighted"), [(70, True), (70, False), (9, True)])
def test_without_gradients_the_same_comes_out(
    num: int, weighted: bool, share_rows: int, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of guests too, of slots with few rows and many."""
    monkeypatch.setattr(shares, "_SHARE_BYTES", share_rows * 2 * 24 * 2)
    monkeypatch.setattr(devices, "multiplies_in_tiles", lambda: turned)
    monkeypatch.setattr(loops, "_WORTH", 0)
    monkeypatch.setattr(vectors, "_LEAST", 1)
    routes, arena = routes_of(num, 5, 2), (0.2 * torch.randn(5, 3 * 16 * 24)).bfloat16()
    assert int(routes.counts.max()) > 3
    assert num > 9 or int(routes.counts.min()) <= 3
    tokens = torch.randn(num, 16, dtype=torch.bfloat16)
    weights = torch.rand(num, 2, dtype=torch.bfloat16) if weighted else None
    wide = None if weights is None else weights.float()
    exact = GatedExperts.apply(tokens.float(), arena.float(), None, wide, 24, Total(), *routes)
    for own in (5, 3):
        mine, guests = (arena, None) if own == 5 else arena.split([own, 5 - own])
        given = (tokens, mine, guests, weights, 24, Total())
        with FlopCounterMode(display=False) as counter:
            found = gated_experts(*given, *routes)
        assert counter.get_total_flops() == 2 * len(routes.order_R) * 3 * 16 * 24
        assert (found - exact).norm() < 0.02 * exact.norm()
        if not turned:
            assert torch.equal(found, GatedExperts.apply(*given, *routes))


def test_the_bank_asks_whether_a_backward_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    bank, tokens = Bank(range(2), 16, 8), torch.randn(5, 16)
    bank.arena.data.normal_()
    with_gradients = through(bank, tokens, straight([2, 3]))
    monkeypatch.setattr(GatedExperts, "apply", None)
    with torch.no_grad():
        assert torch.equal(through(bank, tokens, straight([2, 3])), with_gradients)


def test_few_rows_of_guests_are_as_if_all_slots_were_of_one_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vectors, "_LEAST", 1)
    tokens, arena, counts = torch.randn(6, 16), torch.randn(5, 3 * 16 * 8), [1, 0, 2, 1, 2]
    own, guests = arena.split([3, 2])
    found = GatedExperts.apply(tokens, own, guests, None, 8, Total(), *straight(counts))
    torch.testing.assert_close(found, experts_of(tokens, arena, counts, 8))


def test_a_rank_without_slots_has_results_of_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_LEAST", 1)
    assert experts_of(torch.randn(0, 16), torch.zeros(0, 3 * 16 * 8), [], 8).shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_of_little_weight_stay_close(dtype: torch.dtype) -> None:
    routes, bank = routes_of(40, 4, 2), Bank(range(4), 16, 24)
    bank.arena.data.normal_(std=0.3)
    x, weights, cotangent = torch.randn(40, 16), 1e-3 * torch.rand(40, 2), torch.randn(40, 16)
    results = []
    for kind in (torch.float32, dtype):
        given = [t.to(kind).requires_grad_() for t in (x, weights)]
        out = through(bank, given[0], routes, given[1])
        grads = torch.autograd.grad(out, (*given, bank.arena), cotangent.to(kind))
        results.append([t.float() for t in (out, *grads)])
    for exact, near in zip(*results, strict=True):
        assert (near - exact).norm() < 0.03 * exact.norm()


def test_a_second_half_that_begins_with_something_else_takes_nothing_over() -> None:
    rows, arena, out = experts()
    first = torch.randn_like(out)
    for other in (torch.randn_like(out), first):
        torch.autograd.grad(out, rows, first, retain_graph=True)
        if other is first:
            first.mul_(3.0)
        (found,) = torch.autograd.grad(out, arena, other, retain_graph=True)
        whole = torch.autograd.grad(out, (rows, arena), other, retain_graph=True)
        assert torch.equal(found, whole[1])


def test_flops_are_counted() -> None:
    counts = [3, 0, 2]
    rows = torch.randn(5, 4, requires_grad=True)
    arena = torch.randn(3, 60, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        experts_of(rows, arena, counts, 5).sum().backward()
    assert counter.get_total_flops() == 3 * (2 * 5 * 4 * 10 + 2 * 5 * 5 * 4)


def test_bf16_rows_over_fp32_weights() -> None:
    torch.manual_seed(1)
    rows = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    arena = (0.2 * torch.randn(2, 3 * 16 * 8)).requires_grad_()
    counts = [25, 15]
    out = experts_of(rows, arena, counts, 8)
    out.float().square().sum().backward()
    assert (out.dtype, arena.grad.dtype) == (torch.bfloat16, torch.float32)
    wide = rows.detach().float().requires_grad_()
    exact = arena.detach().clone().requires_grad_()
    reference = experts_of(wide, exact, counts, 8)
    reference.square().sum().backward()
    for a, b in ((out.float(), reference), (arena.grad, exact.grad), (rows.grad, wide.grad)):
        assert float(((a.float() - b).norm() / b.norm()).detach()) < 0.02


def test_the_bank_names_every_element_once() -> None:
    bank = Bank([4, 7], hidden=3, ffn=5)
    mark = torch.zeros_like(bank.arena)
    for _, _, view in bank.matrices(mark):
        view += 1
    assert bool((mark == 1).all())
    shapes = [(e, part, tuple(v.shape)) for e, part, v in bank.matrices(bank.acquire())]
    assert shapes[:3] == [(4, "gate", (5, 3)), (4, "up", (5, 3)), (4, "down", (3, 5))]
    assert {e for e, _, _ in shapes} == {4, 7}
    bank.release()


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two threads; the shares that they have taken."""
    before, taken = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    if threads.crew() is None:
        pytest.skip("this build of torch has no OpenMP to be told of threads")
    each = threads.Crew.each

    def watched(self: threads.Crew, work: Callable[[int], None], items: Iterable[int]) -> None:
        chosen = list(items)
        taken.extend(chosen)
        each(self, work, chosen)

    monkeypatch.setattr(threads.Crew, "each", watched)
    monkeypatch.setattr(shares, "_SHARE_BYTES", 32 * 2 * 16 * 4)
    monkeypatch.setattr(shares, "_LEAST_BYTES", 0)
    yield taken
    torch.set_num_threads(before)


def test_threads_find_the_gradients_of_weights(crew: list[int]) -> None:
    routes, bank = routes_of(200, 8, 2), Bank(range(8), 16, 16)
    bank.arena.data.normal_()
    x, weights = torch.randn(200, 16, requires_grad=True), torch.rand(200, 2, requires_grad=True)
    cotangent, results = torch.randn(200, 16), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        out = through(bank, x, routes, weights)
        results.append((out, *torch.autograd.grad(out, (x, weights, bank.arena), cotangent)))
    assert len(set(crew)) > 2
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(
    crew: list[int], dtype: torch.dtype, adapted: bool, large: bool
) -> None:
    """An expert with most rows is left to all threads, which may split its sums otherwise."""
    counts = [400 if large else 40, 3, 0, 39, 27, 1, 30, 25]
    bank = Bank(range(8), 16, 16)
    if adapted:
        bank.adapt(4, 0.5)
    for parameter in bank.parameters():
        parameter.data.normal_()
    learns = [p for name, p in bank.named_parameters() if not adapted or name != "arena"]
    rows = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    cotangent, results = torch.randn(sum(counts), 16, dtype=dtype), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        out = through(bank, rows, straight(counts))
        results.append((out, *torch.autograd.grad(out, (rows, *learns), cotangent)))
    assert set(crew) == set(range(large, max(crew) + 1))
    for one, other in zip(*results, strict=True):
        if large:
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


def test_a_graph_of_backward_is_refused() -> None:
    rows, _, out = experts()
    with pytest.raises(NotImplementedError, match="leave out create_graph"):
        torch.autograd.grad(out.square().sum(), rows, create_graph=True)
