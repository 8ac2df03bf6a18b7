"""Leases: experts return to any place with the same bits, and waves change no bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from sorted_rows import identity_permutation, random_permutation, run_bank
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.facts.expert_blocks import BlockKind
from moesaic.kernels import cpu_gemv
from moesaic.nn.experts import tiles
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.places import StatePlaces
from moesaic.testing.places import make_places

HIDDEN, FFN = 16, 32
COUNTS = [3, 0, 9, 1, 0, 4]


MakeBanks = Callable[..., tuple[ExpertBank, ExpertBank]]


@pytest.fixture
def make_banks(tmp_path: Path) -> Iterator[MakeBanks]:
    """Yield a function that returns a bank with all experts in memory, and one with the same
    experts in `places` places."""
    with ExitStack() as stack:

        def make(places: int, dtype: torch.dtype = torch.float32, rank: int = 0) -> Any:
            found = make_places(tmp_path / "experts", len(COUNTS), 3 * HIDDEN * FFN, places, dtype)
            banks = []
            for given in (None, stack.enter_context(found)):
                bank = ExpertBank(range(10, 10 + len(COUNTS)), HIDDEN, FFN, places=given)
                if rank:
                    bank.add_adapters(rank, 0.7)
                    bank.arena.requires_grad_(False)
                banks.append(bank.to(dtype))
            full, few = banks
            for parameter in full.parameters():
                parameter.data.normal_(std=0.3)
            if rank:
                assert full.adapters is not None
                assert few.adapters is not None
                few.adapters.arena.data.copy_(full.adapters.arena.data)
            for slot, source in enumerate(full.arena):
                with places_of(few).borrow(slot, writes=True) as target, torch.no_grad():
                    target.copy_(source)
            return full, few

        yield make


def places_of(bank: ExpertBank) -> StatePlaces:
    assert isinstance(bank.places, StatePlaces)
    return bank.places


def is_in_memory(places: StatePlaces, slot: int) -> bool:
    return places.block(slot) in places._cache.contents()[0]


def gradients(bank: ExpertBank) -> list[Tensor]:
    """Return the gradient of each expert, or of its adapters."""
    if bank.adapters is not None:
        assert bank.adapters.arena.grad is not None
        return list(bank.adapters.arena.grad)
    if bank.places is None:
        assert bank.arena.grad is not None
        return list(bank.arena.grad)
    found = []
    for slot in range(len(bank.experts)):
        with places_of(bank).borrow(slot, BlockKind.GRADIENT) as row:
            found.append(row.clone())
    return found


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evicted_experts_return_with_the_same_bits(
    make_banks: MakeBanks, dtype: torch.dtype
) -> None:
    full, few = make_banks(2, dtype)
    places = places_of(few)
    assert sum(is_in_memory(places, slot) for slot in range(6)) == 2
    for slot in (5, 0, 3, 3, 1, 5, 2, 4, 0):
        with places.borrow(slot) as row:
            assert torch.equal(row, full.arena[slot])
            assert is_in_memory(places, slot)
    with places.borrow(3, writes=True) as row, torch.no_grad():
        row.neg_()
    for slot in (0, 1, 2, 3):
        with places.borrow(slot) as row:
            assert torch.equal(row, -full.arena[slot] if slot == 3 else full.arena[slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("changed", [1, 2, 3 * HIDDEN * FFN])
def test_changed_signs_of_zeros_are_kept(
    make_banks: MakeBanks, dtype: torch.dtype, changed: int
) -> None:
    """A block of zeros is not written, but one of negative zeros is."""
    places = places_of(make_banks(2, dtype)[1])
    for slot in range(6):
        with places.borrow(slot, BlockKind.FIRST_MOMENT, writes=True) as row:
            row[:changed] = -0.0
    for slot in range(6):
        with places.borrow(slot, BlockKind.FIRST_MOMENT) as row:
            assert int(row.signbit().sum()) == changed


def test_experts_in_use_stay(make_banks: MakeBanks) -> None:
    places = places_of(make_banks(2)[1])
    with places.request([0]) as first, places.request([0]):
        for slot in (1, 2, 3):
            with places.request([slot]) as other:
                assert other[slot] != first[0]
        assert is_in_memory(places, 0)
        with places.request([4]), pytest.raises(RuntimeError, match="3 blocks are held at once"):
            places.request([5]).__enter__()
        with places.request([5]):  # The refused one held nothing.
            pass
    with places.request([1, 2]):
        assert not is_in_memory(places, 0)


def test_uses_are_counted_from_forward_through_backward(make_banks: MakeBanks) -> None:
    few = make_banks(4)[1]
    places, permutation = places_of(few), identity_permutation([1, 0, 2, 0, 0, 1])
    x = torch.randn(4, HIDDEN, requires_grad=True)
    outputs = [run_bank(few, x, permutation) for _ in range(2)]  # Two micro-batches in flight.
    assert [places.leased[slot] for slot in range(6)] == [2, 0, 2, 0, 0, 2]
    outputs[0].sum().backward()
    assert [places.leased[slot] for slot in range(6)] == [1, 0, 1, 0, 0, 1]
    with torch.no_grad():
        run_bank(few, x, permutation)  # Releases at once.
    assert places.leased.total() == 3
    torch.autograd.grad(outputs[1].sum(), x, retain_graph=True)  # Half of a split backward.
    assert places.leased.total() == 3
    torch.autograd.grad(outputs[1].sum(), few.arena)
    assert places.leased.total() == 0
    dropped = run_bank(few, x, permutation)
    assert places.leased.total() == 3
    del dropped
    assert places.leased.total() == 0


@pytest.mark.parametrize("places", [4, 8, 20])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("range_rows", [1, 4, 1000])
def test_waves_change_no_bit(
    make_banks: MakeBanks,
    places: int,
    rank: int,
    weighted: bool,
    range_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two passes in flight add to the same gradients."""
    monkeypatch.setattr(tiles, "_RANGE_BYTES", range_rows * 2 * FFN * 4)
    permutation, results = random_permutation(21, 6, 2), []
    x, weights, cotangent = torch.randn(21, HIDDEN), torch.rand(21, 2), torch.randn(21, HIDDEN)
    banks = make_banks(places, rank=rank)
    for bank in banks:
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        given = inputs[1] if weighted else None
        outputs = [run_bank(bank, inputs[0] * scale, permutation, given) for scale in (1.0, 0.5)]
        with torch.no_grad():
            plain = run_bank(bank, inputs[0], permutation, given)
        for out in reversed(outputs):
            out.backward(cotangent)
        inputs_grads = [one.grad for one in inputs if one.grad is not None]
        results.append([*outputs, plain, *inputs_grads, *gradients(bank)])
    assert equal(*results)
    assert places_of(banks[1]).leased.total() == 0


@pytest.mark.parametrize("counts", [[0] * 6, [0, 0, 0, 0, 0, 7]])
def test_few_slots_with_rows(make_banks: MakeBanks, counts: list[int]) -> None:
    results, banks = [], make_banks(4)
    x = torch.randn(sum(counts), HIDDEN)
    for bank in banks:
        rows = x.clone().requires_grad_()
        out = run_bank(bank, rows, identity_permutation(counts))
        out.sum().backward()
        assert rows.grad is not None
        results.append([out, rows.grad, *gradients(bank)])
    assert equal(*results)


def test_calls_of_one_pass_share_a_gradient(make_banks: MakeBanks) -> None:
    """Later calls add to slots that the first one touched, and to others."""
    parts, results = ([3, 0, 2, 0, 0, 1], [0, 4, 1, 0, 0, 2], [1, 0, 0, 0, 0, 0]), []
    xs = [torch.randn(sum(counts), HIDDEN) for counts in parts]
    banks = make_banks(4)
    for bank in banks:
        with bank.expert_function(len(parts)) as compute:
            outputs = [
                compute(x, identity_permutation(counts), None)
                for x, counts in zip(xs, parts, strict=True)
            ]
        torch.cat(outputs).square().sum().backward()
        results.append([*outputs, *gradients(bank)])
    assert equal(*results)
    assert places_of(banks[1]).leased.total() == 0


@pytest.mark.parametrize("order", [("x", "arena"), ("arena", "x")])
def test_split_backward_changes_no_bit(make_banks: MakeBanks, order: tuple[str, str]) -> None:
    permutation, results = identity_permutation(COUNTS), []
    x, cotangent = torch.randn(sum(COUNTS), HIDDEN), torch.randn(sum(COUNTS), HIDDEN)
    for bank in make_banks(4):
        inputs = {"x": x.clone().requires_grad_(), "arena": bank.arena}
        out = run_bank(bank, inputs["x"] * 1.0, permutation)
        found = {
            name: torch.autograd.grad(out, inputs[name], cotangent, retain_graph=True)[0]
            for name in order
        }
        whole = found["arena"] if bank.places is None else gradients(bank)
        results.append([found["x"], *whole])
    assert equal(*results)


def test_few_rows_take_the_same_kernels(
    make_banks: MakeBanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gemv, "_MIN_ELEMENTS", 1)
    banks = make_banks(4)
    for counts in ([2, 0, 1, 3, 2, 0], [1, 0, 1, 5, 1, 3]):
        x = torch.randn(sum(counts), HIDDEN)
        results = [[run_bank(bank, x, identity_permutation(counts))] for bank in banks]
        assert equal(*results)


def test_replicas_need_all_experts(make_banks: MakeBanks) -> None:
    full, few = make_banks(4)
    assert full.whole_arena() is full.arena
    with pytest.raises(ConfigError, match="need all 6 experts of a layer in memory"):
        few.whole_arena()


def test_a_change_between_forward_and_backward_is_an_error(make_banks: MakeBanks) -> None:
    full, _ = make_banks(4)
    out = run_bank(full, torch.randn(4, HIDDEN), identity_permutation([4, 0, 0, 0, 0, 0]))
    with torch.no_grad():
        full.arena.mul_(2.0)
    with pytest.raises(RuntimeError, match="experts changed between forward and backward"):
        out.sum().backward()
