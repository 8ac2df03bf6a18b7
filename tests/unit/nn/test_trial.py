"""Kernels of our own are held against torch where they are to be, and timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist import loops, passes
from moesaic.dist.products import leaves_choice, obstacle
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router
from moesaic.nn.travel import Ranks
from moesaic.nn.trial import Load, Trial

HIDDEN, FFN, EXPERTS, TOP_K = 16, 12, 4, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter takes bf16 for whole numbers.
TYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (DEVICE.type == "cuda")]


@pytest.fixture
def tiles() -> Any:
    pytest.importorskip("triton")
    from moesaic.dist import tiles

    return tiles


def layer(*, adapted: bool = False, **more: Any) -> MoE:
    """Experts with numbers; what else, of the router. Adapters are as new ones: half are zero."""
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
        if made.bank.adapters is not None:
            for _, name, view in made.bank.adapters.matrices(made.bank.adapters.arena):
                view.mul_(name.endswith("lora_a"))
    return made.to(DEVICE)


def trial(tokens: int, *, adapted: bool = False, **more: Any) -> Trial:
    return Trial(layer(adapted=adapted).bank, Load(tokens, TOP_K, torch.float32, **more))


def is_off(one: Trial) -> bool:
    """Whether results are found to be others, and nothing else."""
    return (one.fault() or "").endswith(" times as far from torch's as they may be")


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_right_is_found_right(dtype: torch.dtype, adapted: bool) -> None:
    """And nothing of the layer, or of anybody's chances, is another than before."""
    moe = layer(adapted=adapted)
    before = {name: one.detach().clone() for name, one in moe.named_parameters()}
    chances = torch.get_rng_state()
    alone, times = adapted, 2 - adapted
    load = Load(30, TOP_K, dtype, times, alone=alone, waited_for=not alone)
    assert Trial(moe.bank, load).fault() is None
    assert moe.bank.by == "auto"
    assert torch.get_rng_state().equal(chances)
    for name, one in moe.named_parameters():
        assert one.grad is None
        assert one.equal(before[name])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_few_tokens_are_right_too(tokens: int) -> None:
    assert trial(tokens, alone=True, waited_for=False).fault() is None


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_others_are_right_too(weighted: bool) -> None:
    bank = layer().bank
    assert Trial(bank, Load(24, 1, torch.float32, 2, weighted=weighted)).fault() is None


def _last_row_of_a_slot(out: Tensor, counts: Tensor) -> None:
    """As where the end of a tile is not masked: of a slot whose rows are no whole tiles."""
    uneven = [slot for slot, rows in enumerate(counts.tolist()) if rows % 16]
    out[int(counts[: uneven[-1] + 1].sum()) - 1] *= 1.2


def _a_number(out: Tensor, counts: Tensor) -> None:
    out[len(out) // 2, -1] = float("nan")


def _a_row(out: Tensor, counts: Tensor) -> None:
    out[0] = 0.0


def _of_empty(out: Tensor, counts: Tensor) -> None:
    """Of matrices: what is left where no row is."""
    out[int((counts == 0).nonzero()[0])] = 1e-3


def _a_column(out: Tensor, counts: Tensor) -> None:
    """As where the end of a tile's columns is not written."""
    out[:, -1] = 0.0


@pytest.mark.parametrize("transposed", [False, True], ids=["backward", "forward"])
@pytest.mark.parametrize("spoil", [_last_row_of_a_slot, _a_number, _a_row, _a_column])
@pytest.mark.parametrize("tokens", [13, 64])
def test_products_that_are_wrong_are_found(
    tiles: Any, tokens: int, spoil: Callable[[Tensor, Tensor], None], transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A single row among all of a pass, or a number of it, is enough; with even rows too."""
    right = tiles.grouped_mm

    def wrong(
        rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Tensor, **more: Any
    ) -> None:
        right(rows, weight, counts, turned, out, **more)
        if turned == transposed:
            spoil(out, counts)

    monkeypatch.setattr(tiles, "grouped_mm", wrong)
    assert is_off(trial(tokens, alone=True))


@pytest.mark.parametrize("spoil", [_a_number, _a_row, _of_empty])
@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_of_matrices_that_are_wrong_are_found(
    tiles: Any, adapted: bool, spoil: Callable[[Tensor, Tensor], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    right = tiles.grouped_outer

    def wrong(left: Tensor, other: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        right(left, other, counts, out, added)
        spoil(out.flatten(1), counts) if spoil is _of_empty else spoil(out[-1], counts)

    monkeypatch.setattr(tiles, "grouped_outer", wrong)
    assert is_off(trial(24, alone=True, adapted=adapted))


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_not_written_is_found(
    tiles: Any, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that comes again has what torch has made, as on a GPU: of the same pass it would be
    right. Nothing is written, or nothing for experts without rows."""
    ours, torchs, memory = tiles.grouped_outer, loops.outer, dict[Any, Tensor]()

    def right(left: Tensor, other: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        torchs(left, other, counts, out, added)
        memory[out.shape] = out.detach().clone()

    def wrong(left: Tensor, other: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        before = memory[out.shape]
        if kept:
            ours(left, other, counts, out, added)
            before = torch.where((counts == 0)[:, None, None].to(out.device), before, out)
        out.copy_(before)

    monkeypatch.setattr(loops, "outer", right)
    monkeypatch.setattr(tiles, "grouped_outer", wrong)
    assert is_off(trial(24, alone=True))


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("gated_back", {"weighted": False}),
        ("activate", {}),
        ("grouped_gated", {"alone": True}),
        ("grouped_outer", {"times": 2}),
    ],
)
def test_what_only_some_layouts_do_is_tried_for_them(
    tiles: Any, name: str, load: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of others have no weights; halves of a backward activate anew; where no backward follows
    nothing is kept; several computations add to what is there."""
    right = getattr(tiles, name)
    only = {
        "gated_back": lambda given: given[2] is None,
        "activate": lambda given: True,
        "grouped_gated": lambda given: given[3] is None,
        "grouped_outer": lambda given: given[4],
    }[name]

    def wrong(*given: Any, **more: Any) -> Any:
        found = right(*given, **more)
        if only(given):
            spoilt = {"grouped_gated": given[4:5], "grouped_outer": given[3:4]}.get(name, found)
            for one in [spoilt] if isinstance(spoilt, Tensor) else spoilt:
                one.mul_(1.1)
        return found

    monkeypatch.setattr(tiles, name, wrong)
    bank = layer().bank
    choices = 1 if "weighted" in load else TOP_K
    assert is_off(Trial(bank, Load(24, choices, torch.float32, **load)))


def test_gradients_of_weights_that_are_wrong_are_found(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tiles.gated_back

    def wrong(*given: Any) -> Any:
        found = right(*given)
        given[-1].view(-1)[7] *= -1
        return found

    monkeypatch.setattr(tiles, "gated_back", wrong)
    assert is_off(trial(24, alone=True))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (AssertionError(), "AssertionError"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
    ],
)
def test_whatever_is_raised_speaks_against_them(
    tiles: Any, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tiles, "grouped_mm", refuses)
    for adapted in (False, True):
        moe = layer(adapted=adapted)
        before = [one.detach().clone() for one in moe.parameters()]
        load = Load(24, TOP_K, torch.float32, alone=True)
        assert Trial(moe.bank, load).fault() == words
        assert moe.bank.by == "auto"
        assert all(map(torch.equal, before, moe.parameters()))


@pytest.mark.usefixtures("tiles")
def test_results_that_are_no_numbers_are_no_measure() -> None:
    moe = layer()
    with torch.no_grad():
        moe.bank.arena[1, 3] = float("inf")
    fault = Trial(moe.bank, Load(24, TOP_K, torch.float32)).fault()
    assert fault == "what torch makes of numbers by chance is not finite in torch.float32"


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("waited_for", [False, True])
def test_both_are_timed_in_turn(waited_for: bool) -> None:
    """By a clock by which a pass of torch takes 2 s, and one of kernels 1 s."""
    moe = layer()
    now = itertools.accumulate(itertools.cycle([0.0, 2.0, 0.0, 1.0]))
    load = Load(6, TOP_K, torch.float32, 2, alone=True, waited_for=waited_for)
    timed = Trial(moe.bank, load)
    assert timed.seconds(lambda _: next(now)) == {"torch": 2.0, "triton": 1.0}
    assert moe.bank.by == "auto"
    assert all(one.grad is None for one in moe.parameters())


@pytest.mark.parametrize(
    ("more", "load"),
    [
        ({}, Load(24, TOP_K, torch.float32, alone=True, waited_for=False)),
        ({"kind": "gshard"}, Load(24, TOP_K, torch.float32, alone=True)),
    ],
)
def test_loads_of_a_rank_alone(more: dict[str, Any], load: Load) -> None:
    assert Load.of(layer(**more), 24, torch.float32) == load


def test_loads_in_other_layouts() -> None:
    """In chunks, with a capacity, and with rows of others, each of which is a token by itself, or
    visits, which have some rows each."""
    moe, kind = layer(), torch.float32
    moe.dispatcher = Dispatcher(EXPERTS, Ranks(), chunks=3)
    assert Load.of(moe, 24, kind) == Load(8, TOP_K, kind, 2, alone=True)
    moe.dispatcher = Dispatcher(EXPERTS, Ranks(), capacity=1.5)
    assert Load.of(moe, 24, kind) == Load(24, TOP_K, kind, alone=True)
    moe.dispatcher.ranks = Ranks(carriers=(object(),))  # type: ignore[arg-type]
    assert Load.of(moe, 24, kind) == Load(48, 1, kind, weighted=False)
    moe.dispatcher._stops = [2]
    assert Load.of(moe, 24, kind) == Load(24, TOP_K, kind)
    assert Load.of(moe, 0, kind).tokens == 1


def test_kernels_are_tried_where_they_were_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = torch.device("cuda"), dict[tuple[int, int], str | None]()
    monkeypatch.setattr(passes, "hindrance", lambda: None)
    for generation in ((0, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(devices, "generation", lambda _, it=generation: it)
        found[generation] = obstacle(gpu)
    words = "they are for compute capability 8.0 or more of NVIDIA's GPUs, not "
    assert list(found.values()) == [f"{words}0.0", f"{words}7.5", None, None, None, None]
    monkeypatch.setattr(passes, "hindrance", lambda: "no compiler")
    assert obstacle(gpu) == "Triton cannot be used: no compiler"
    assert leaves_choice(gpu)
    assert not leaves_choice(torch.device("cpu"))
