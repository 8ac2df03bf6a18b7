"""What may multiply experts is timed where it is right, and not taken where it is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dist import tiles
from moesaic.facts.job.train import Products
from moesaic.nn import trial
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router
from moesaic.nn.travel import Ranks
from moesaic.nn.trial import Load, Tried, tried

HIDDEN, FFN, EXPERTS, TOP_K = 16, 8, 4, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layer(*, adapted: bool = False, **more: Any) -> MoE:
    """Experts with numbers; what else, of the router."""
    made = MoE(
        Router(0, HIDDEN, EXPERTS, TOP_K, **more), Bank(range(EXPERTS), HIDDEN, FFN),
        Dispatcher(EXPERTS, Ranks()),
    )  # fmt: skip
    if adapted:
        made.bank.adapt(4, 1.0)
        made.bank.arena.requires_grad_(False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made.to(DEVICE)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has both."""
    monkeypatch.setattr(trial, "candidates", lambda *_: ("torch", "triton"))


def ticking() -> Callable[[torch.device], float]:
    """A clock by which each pass of torch takes 2 s, and one of kernels 1 s: they are asked for in
    turn, and the clock before and after each."""
    each = itertools.cycle([0.0, 2.0, 0.0, 1.0])
    now = itertools.accumulate(each)
    return lambda _: next(now)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    ("back", "waited_for", "adapted"),
    [(False, True, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_both_are_timed_in_turn(back: bool, waited_for: bool, adapted: bool) -> None:
    """And nothing of the layer is another than before."""
    moe = layer(adapted=adapted)
    before = {name: one.detach().clone() for name, one in moe.named_parameters()}
    load = Load(6, TOP_K, torch.float32, back=back, waited_for=waited_for)
    assert tried(moe.bank, load, ticking()) == Tried({"torch": 2.0, "triton": 1.0}, {})
    assert moe.bank.by == "auto"
    for name, one in moe.named_parameters():
        assert one.grad is None
        assert one.equal(before[name])


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_narrow_numbers_are_right_within_their_digits(dtype: torch.dtype) -> None:
    found = tried(layer().bank, Load(40, TOP_K, dtype))
    assert found.faults == {}
    assert set(found.seconds) == {"torch", "triton"}
    assert min(found.seconds.values()) > 0


def _wrong(kind: str, of: Tensor, counts: Tensor) -> None:
    """One row, or number, of one expert's results."""
    if kind == "row":
        of[int(counts[0])] *= 1.2
    elif kind == "missing":
        of[0] = 0.0
    else:
        of[3, 5] = float("nan")


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("kind", ["row", "missing", "nan"])
def test_what_is_wrong_is_not_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row among all of a pass is enough."""
    right = tiles.grouped_mm

    def wrong(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor,
              **more: Any) -> None:  # fmt: skip
        right(rows, weight, counts, transposed, out, **more)
        if not transposed:  # In backward.
            _wrong(kind, out, counts)

    monkeypatch.setattr(tiles, "grouped_mm", wrong)
    found = tried(layer().bank, Load(24, TOP_K, torch.float32))
    assert list(found.seconds) == ["torch"]
    assert list(found.faults) == ["triton"]
    assert "of themselves from torch's" in found.faults["triton"]
    assert tried(layer().bank, Load(24, TOP_K, torch.float32, back=False)).faults == {}


@pytest.mark.usefixtures("both")
def test_gradients_of_matrices_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tiles.grouped_outer

    def wrong(left: Tensor, right_: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        right(left, right_, counts, out, added)
        out[-1, 0] = 0.0

    monkeypatch.setattr(tiles, "grouped_outer", wrong)
    assert list(tried(layer().bank, Load(24, TOP_K, torch.float32)).faults) == ["triton"]


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    ("error", "words"),
    [(RuntimeError("out of memory"), "out of memory"), (RuntimeError(), "RuntimeError")],
)
def test_what_cannot_be_started_is_not_taken(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tiles, "grouped_gated", refuses)
    found = tried(layer().bank, Load(24, TOP_K, torch.float32))
    assert found.faults == {"triton": words}
    assert list(found.seconds) == ["torch"]


@pytest.mark.usefixtures("both")
def test_errors_of_triton_are_its_own_and_others_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def refuses(*_: Any, **__: Any) -> None:
        raise OutOfResources(300_000, 200_000, "shared memory")

    monkeypatch.setattr(tiles, "grouped_gated", refuses)
    found = tried(layer().bank, Load(24, TOP_K, torch.float32))
    assert "shared memory" in found.faults["triton"]
    monkeypatch.setattr(tiles, "grouped_gated", None)
    moe = layer()
    with pytest.raises(TypeError):
        tried(moe.bank, Load(24, TOP_K, torch.float32))
    assert moe.bank.by == "auto"


@pytest.mark.usefixtures("both")
def test_results_that_are_no_numbers_are_no_measure() -> None:
    moe = layer()
    with torch.no_grad():
        moe.bank.arena[1, 3] = float("inf")
    assert tried(moe.bank, Load(24, TOP_K, torch.float32)) == Tried()


def test_without_a_choice_nothing_is_tried() -> None:
    """As on a CPU, or in numbers that kernels are not for."""

    def never(_: torch.device) -> float:
        raise AssertionError

    kind = torch.float64
    assert tried(layer().double().bank, Load(24, TOP_K, kind), never) == Tried()


@pytest.mark.parametrize(
    ("more", "load"),
    [
        ({}, Load(24, TOP_K, torch.float32, waited_for=False)),
        ({"kind": "gshard"}, Load(24, TOP_K, torch.float32)),
    ],
)
def test_loads_of_a_rank_alone(more: dict[str, Any], load: Load) -> None:
    assert Load.of(layer(**more), 24, torch.float32) == load


def test_loads_in_other_layouts() -> None:
    """In chunks, with a capacity, and with rows of others, each of which is a token by itself."""
    moe = layer()
    moe.dispatcher = Dispatcher(EXPERTS, Ranks(), chunks=3)
    assert Load.of(moe, 24, torch.float32) == Load(8, TOP_K, torch.float32)
    moe.dispatcher = Dispatcher(EXPERTS, Ranks(), capacity=1.5)
    assert Load.of(moe, 24, torch.float32) == Load(24, TOP_K, torch.float32)
    moe.dispatcher.ranks = Ranks(carriers=(object(),))  # type: ignore[arg-type]
    assert Load.of(moe, 24, torch.float32, back=False) == Load(48, 1, torch.float32, back=False)
    assert Load.of(moe, 0, torch.float32).tokens == 1


def test_products_are_what_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs: what they have been compiled for, of numbers that they are for."""
    from moesaic.dist import device as devices
    from moesaic.dist import passes
    from moesaic.dist.products import candidates

    gpu, two = torch.device("cuda"), ("torch", "triton")
    found: dict[tuple[int, int], tuple[Products, ...]] = {}
    monkeypatch.setattr(passes, "hindrance", lambda: None)
    for generation in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0), (0, 0)):
        monkeypatch.setattr(devices, "generation", lambda _, it=generation: it)
        found[generation] = candidates(gpu, torch.bfloat16)
        assert candidates(gpu, torch.float64) == ("torch",)
    assert [one for one, names in found.items() if names == two] == [
        (8, 0),
        (8, 9),
        (9, 0),
        (12, 0),
    ]
    monkeypatch.setattr(devices, "generation", lambda _: (9, 0))
    monkeypatch.setattr(passes, "hindrance", lambda: "no compiler")
    assert candidates(gpu, torch.bfloat16) == ("torch",)
