"""Kernels of our own are held against torch where they are to be, and timed.

What is spoilt are stand-ins for them (`standins`), which are right in every type; kernels
themselves are tried once, as an interpreter has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import standins
import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist import loops, passes
from moesaic.dist.products import leaves_choice, obstacle
from moesaic.nn import trial
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router
from moesaic.nn.travel import Ranks
from moesaic.nn.trial import Load, Trial

HIDDEN, FFN, EXPERTS, TOP_K = 64, 48, 4, 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FREE = {"waited_for": False}


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels' module, with stand-ins in their places."""
    pytest.importorskip("triton")
    from moesaic.dist import tiles

    standins.install(tiles, monkeypatch)
    return tiles


def layer(
    hidden: int = HIDDEN, ffn: int = FFN, experts: int = EXPERTS, top_k: int = TOP_K, *,
    adapted: int = 0, **more: Any,
) -> MoE:  # fmt: skip
    """Experts, with adapters of such a rank; what else, of the router."""
    made = MoE(
        Router(0, hidden, experts, top_k, **more), Bank(range(experts), hidden, ffn),
        Dispatcher(experts, Ranks()),
    )  # fmt: skip
    if adapted:
        made.bank.adapt(adapted, 1.0)
        made.bank.arena.requires_grad_(False)
    return made.to(DEVICE)


def fault(moe: MoE, *load: Any, **more: Any) -> str | None:
    return Trial(moe.bank, [Load(*load, **more)]).fault()


def spoil(tiles: Any, patch: pytest.MonkeyPatch, name: str, how: Callable[..., Any]) -> None:
    """What `name` does, and behind it `how`, which is given its result and what it was given."""
    right = getattr(standins, name)

    def wrong(*given: Any, **more: Any) -> Any:
        found = right(*given, **more)
        other = how(found, *given)
        return found if other is None else other

    patch.setattr(tiles, name, wrong)


FAR = " times as far from torch's as they may be"
NO_NUMBERS = "results are no numbers where torch's are"
NOT_ZERO = "results are other than zero where torch's are zero"


def is_off(found: str | None, words: str = FAR) -> bool:
    """Whether results are found to be others in that way, and nothing else."""
    return (found or "").endswith(words)


LOADS = [FREE, {}, {"times": 2}, {"weighted": False}, {"again": True}]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize(
    ("hidden", "ffn", "experts", "top_k", "tokens"),
    [(64, 48, 4, 2, 64), (37, 29, 3, 2, 17), (64, 48, 1, 1, 1), (64, 48, 4, 4, 1), (8, 8, 2, 1, 1),
     (256, 128, 8, 2, 128)],
)  # fmt: skip
def test_what_is_right_is_found_right(
    dtype: torch.dtype, hidden: int, ffn: int, experts: int, top_k: int, tokens: int
) -> None:
    """And nobody's chances are others than before."""
    chances = torch.get_rng_state()
    for more in LOADS:
        choices = top_k if more.get("weighted", True) else 1
        moe = layer(hidden, ffn, experts, top_k)
        assert fault(moe, tokens, choices, dtype, **more) is None
        assert moe.bank.by == "auto"
        assert all(one.grad is None for one in moe.parameters())
    assert layer(hidden, ffn, experts, top_k, adapted=3) is not None
    assert fault(layer(hidden, ffn, experts, top_k, adapted=3), tokens, top_k, dtype) is None
    assert torch.get_rng_state().equal(chances) or DEVICE.type == "cpu"


@pytest.mark.parametrize(("adapted", "more"), [(4, FREE), (0, {"times": 2})])
def test_kernels_themselves_are_found_right(
    adapted: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few numbers of rows, for interpreted they take long."""
    pytest.importorskip("triton")
    monkeypatch.setattr(trial, "_ROWS", (1,))
    assert fault(layer(16, 12, adapted=adapted), 10, TOP_K, FP32, **more) is None


def _partial_tile(out: Tensor, counts: Tensor, high: int = 16) -> None:
    """As where the end of a tile is not masked."""
    ends = counts.cumsum(0).tolist()
    for end, rows in zip(ends, counts.tolist(), strict=True):
        out[end - rows % high : end] *= 1.2


def _a_number(out: Tensor, counts: Tensor) -> None:
    out[len(out) // 2, -1] = float("nan")


def _a_row(out: Tensor, counts: Tensor) -> None:
    out[0] = 0.0


def _a_column(out: Tensor, counts: Tensor) -> None:
    """As where the end of a tile's columns is not written."""
    out[:, -1] = 0.0


def _of_one_expert(out: Tensor, counts: Tensor) -> None:
    end = int(counts[: len(counts) // 2 + 1].sum())
    out[end - int(counts[len(counts) // 2]) : end, -1] = 0.0


def _the_first_slot(out: Tensor, counts: Tensor) -> None:
    out[: int(counts[0])] = 5.0


def _the_last_empty(out: Tensor, counts: Tensor) -> None:
    if counts[-1] == 0:
        out.zero_()


def _neighbours_empty(out: Tensor, counts: Tensor) -> None:
    if ((counts[1:] == 0) & (counts[:-1] == 0)).any():
        out.zero_()


def _uneven(out: Tensor, counts: Tensor) -> None:
    some = counts[counts > 0]
    if (some != some[:1]).any():
        out.zero_()


SPOILT = [
    _partial_tile, _a_number, _a_row, _a_column, _of_one_expert, _the_first_slot, _the_last_empty,
    _neighbours_empty, _uneven,
]  # fmt: skip


@pytest.mark.parametrize("forward", [False, True], ids=["backward", "forward"])
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products_that_are_wrong_are_found(
    tiles: Any, dtype: torch.dtype, how: Callable[[Tensor, Tensor], None], forward: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A single row among all of a pass, or a number of it, is enough; with even rows too."""

    def wrong(
        _: None, rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Any
    ) -> None:
        if turned == forward and len(out):
            how(out, counts)

    spoil(tiles, monkeypatch, "grouped_mm", wrong)
    words = NO_NUMBERS if how is _a_number else FAR
    assert is_off(fault(layer(experts=8), 256, TOP_K, dtype), words)


@pytest.mark.parametrize(
    ("experts", "choices", "more"),
    [(1, 1, {"weighted": False}), (2, 1, {"weighted": False}), (2, 2, {}), (3, 2, {}),
     (2, 1, FREE), (4, 1, {"weighted": False})],
)  # fmt: skip
def test_tiles_are_never_whole_by_themselves(
    tiles: Any, experts: int, choices: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few slots there are, and however round the number of tokens."""

    def wrong(
        _: None, rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Any
    ) -> None:
        _partial_tile(out, counts, 128)

    spoil(tiles, monkeypatch, "grouped_mm", wrong)
    assert is_off(fault(layer(experts=experts), 1024, choices, FP32, **more))


@pytest.mark.parametrize("more", [FREE, {}, {"times": 2}], ids=str)
@pytest.mark.parametrize(("experts", "tokens"), [(4, 30), (8, 200), (8, 600), (8, 2200)])
def test_other_numbers_of_rows_are_tried(
    tiles: Any, experts: int, tokens: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For them tiles are others, of which any may be more than a GPU has room for: those that are
    as high as they are for up to four times the rows."""
    met, of_outer = set[Any](), set[Any]()

    def notes(_: None, some: Tensor, weight: Tensor, *others: Any) -> None:
        met.add(tiles.blocks(FP16, max(len(some) / len(weight), 1)))

    def notes_outer(_: None, left: Tensor, right: Tensor, counts: Tensor, *others: Any) -> None:
        of_outer.add(tiles.blocks_of_outer(FP16, len(left) / len(counts)))

    spoil(tiles, monkeypatch, "grouped_mm", notes)
    spoil(tiles, monkeypatch, "grouped_outer", notes_outer)
    assert fault(layer(16, 8, experts), tokens, TOP_K, FP16, **more) is None
    most = range(1, tokens * TOP_K // experts * 4, 8)
    assert met >= {tiles.blocks(FP16, rows) for rows in most}
    assert of_outer >= {tiles.blocks_of_outer(FP16, rows) for rows in most}


def test_tiles_that_there_is_no_room_for_are_found(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: None, some: Tensor, weight: Tensor, *others: Any) -> None:
        if len(some) / len(weight) <= 2:
            raise RuntimeError("out of resource: shared memory")

    spoil(tiles, monkeypatch, "grouped_mm", refuses)
    assert (
        fault(layer(), 150, TOP_K, FP32, **FREE) == "RuntimeError: out of resource: shared memory"
    )


def _of_empty(out: Tensor, counts: Tensor) -> None:
    """Of matrices: what is left where no row is."""
    out[counts == 0] = 1e-3


def _a_matrix_row(out: Tensor, counts: Tensor) -> None:
    out[-1, -1] *= 1.5


def _of_the_first(out: Tensor, counts: Tensor) -> None:
    out[0] = 5.0 if counts[0] else 0.0


@pytest.mark.parametrize("how", [_of_empty, _a_matrix_row, _of_the_first, _a_number])
@pytest.mark.parametrize("adapted", [0, 8])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_matrices_that_are_wrong_are_found(
    tiles: Any, adapted: int, dtype: torch.dtype, how: Callable[[Tensor, Tensor], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def wrong(_: None, left: Tensor, right: Tensor, counts: Tensor, out: Any, added: bool) -> None:
        how(out, counts)

    spoil(tiles, monkeypatch, "grouped_outer", wrong)
    words = NO_NUMBERS if how is _a_number else FAR
    assert is_off(fault(layer(adapted=adapted), 64, TOP_K, dtype), words)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_columns_of_narrow_gradients_are_compared(
    tiles: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an adapter with few channels and many columns."""

    def wrong(_: None, left: Tensor, right: Tensor, counts: Tensor, out: Any, added: bool) -> None:
        if out.shape[1] == 8:
            out[:, :, -2:] = 0

    spoil(tiles, monkeypatch, "grouped_outer", wrong)
    assert is_off(fault(layer(520, 520, 2, 1, adapted=8), 32, 1, dtype))


def test_what_is_added_to_is_kept_where_no_row_is(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next computation of a pass, which has rows for others."""

    def wrong(_: None, left: Tensor, right: Tensor, counts: Tensor, out: Any, added: bool) -> None:
        out[counts == 0] = 0

    spoil(tiles, monkeypatch, "grouped_outer", wrong)
    assert is_off(fault(layer(), 64, TOP_K, FP32, times=2))
    assert fault(layer(), 64, TOP_K, FP32) is None


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_not_written_is_found(
    tiles: Any, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that comes again has what torch has made, as on a GPU: of the same pass it would be
    right. Nothing is written, or nothing for experts without rows."""
    torchs, memory = loops.outer, dict[Any, Tensor]()

    def right(left: Tensor, other: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        torchs(left, other, counts, out, added)
        memory[out.shape] = out.detach().clone()

    def wrong(left: Tensor, other: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        before = memory[out.shape]
        if kept:
            standins.grouped_outer(left, other, counts, out, added)
            before = torch.where((counts == 0)[:, None, None].to(out.device), before, out)
        out.copy_(before)

    monkeypatch.setattr(loops, "outer", right)
    monkeypatch.setattr(tiles, "grouped_outer", wrong)
    assert is_off(fault(layer(), 24, TOP_K, FP32), NOT_ZERO)


@pytest.mark.parametrize("name", ["grouped_outer", "gated_back"])
def test_what_is_right_the_first_time_alone_is_found(
    tiles: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def wrong(found: Any, *given: Any) -> None:
        if next(calls) > 2:
            (given[3] if found is None else found[0]).mul_(2.0)

    spoil(tiles, monkeypatch, name, wrong)
    assert is_off(fault(layer(), 64, TOP_K, FP32, **FREE))


@pytest.mark.parametrize(
    ("name", "load", "only"),
    [
        ("gated_back", {"weighted": False}, lambda given: given[2] is None),
        ("activate", {}, lambda given: True),
        ("grouped_gated", FREE, lambda given: given[3] is None),
        ("grouped_outer", {"times": 2}, lambda given: given[4]),
    ],
)
def test_what_only_some_layouts_do_is_tried_for_them(
    tiles: Any, name: str, load: dict[str, Any], only: Callable[[Any], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of others have no weights; halves of a backward activate anew; where no backward follows
    nothing is kept; several computations add to what is there."""

    def wrong(found: Any, *given: Any) -> None:
        if only(given):
            spoilt = {"grouped_gated": given[4:5], "grouped_outer": given[3:4]}.get(name, found)
            for one in [spoilt] if isinstance(spoilt, Tensor) else spoilt:
                one.mul_(1.1)

    spoil(tiles, monkeypatch, name, wrong)
    assert is_off(fault(layer(), 24, TOP_K if load.get("weighted", True) else 1, FP32, **load))


@pytest.mark.parametrize(("dtype", "share"), [(FP32, 0.997), (FP16, 0.99), (BF16, 0.94)])
@pytest.mark.parametrize("name", ["grouped_mm", "gated_back"])
def test_what_is_a_little_off_everywhere_is_found(
    tiles: Any, name: str, dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of products, or gradients of routers' weights."""

    def wrong(found: Any, *given: Any) -> None:
        given[4].mul_(share)

    spoil(tiles, monkeypatch, name, wrong)
    assert is_off(fault(layer(256, 128, 8), 512, TOP_K, dtype, **FREE))


def _no_number_of_large_gates(found: Any, inner: Tensor, grad: Tensor, *others: Any) -> None:
    """As where an exponential ends."""
    found[0][:, : grad.shape[1]][inner[:, : grad.shape[1]].abs() > 12] = float("nan")


def _of_one_that_has_most(
    _: None, rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Tensor
) -> None:
    if len(rows) > 16 and counts.max() > 0.8 * len(rows):
        out.zero_()


def _where_most_are_empty(
    _: None, left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool
) -> None:
    if (counts == 0).sum() > 0.6 * len(counts):
        out[counts == 0] = 1.0


def _the_last_whole_tile(
    _: None, rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Tensor,
    *, high: int = 128,
) -> None:  # fmt: skip
    for end, number in zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True):
        if number and number % high == 0:
            out[end - high : end] = 0.0


def _a_row_by_itself(
    _: None, left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool,
    *, high: int = 128,
) -> None:  # fmt: skip
    """The one of a tile that is there for it alone."""
    ends = counts.cumsum(0).tolist()
    for slot, (end, number) in enumerate(zip(ends, counts.tolist(), strict=True)):
        if number % high == 1 and number > 1:
            out[slot] -= torch.outer(left[end - 1], right[end - 1])


def _few_rows(
    _: None, rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Tensor
) -> None:
    if len(rows) < 8:
        out.zero_()


@pytest.mark.parametrize(
    ("name", "how", "experts", "tokens"),
    [
        ("gated_back", _no_number_of_large_gates, 4, 256),
        ("grouped_mm", _of_one_that_has_most, 8, 256),
        ("grouped_outer", _where_most_are_empty, 8, 256),
        ("grouped_mm", _few_rows, 8, 256),
        *(
            (name, partial(how, high=high), experts, tokens)
            for name, how in (
                ("grouped_mm", _the_last_whole_tile), ("grouped_outer", _a_row_by_itself),
            )
            for high, experts, tokens in ((128, 4, 1024), (128, 1, 700), (64, 3, 150), (16, 6, 40))
        ),
    ],
)  # fmt: skip
def test_what_only_some_passes_of_a_run_meet_is_tried(
    tiles: Any, name: str, how: Callable[..., None], experts: int, tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Gates of a trained model, an expert that most tokens go to, slots that just fill their tiles
    or have a row more, a pass of next to no tokens."""
    spoil(tiles, monkeypatch, name, how)
    words = NO_NUMBERS if how is _no_number_of_large_gates else FAR
    assert is_off(fault(layer(experts=experts), tokens, 1, FP32, weighted=False), words)


@pytest.mark.parametrize(("experts", "choices", "tokens"), [(8, 8, 60), (6, 3, 30), (5, 1, 40)])
def test_tiles_are_just_full_and_a_row_is_over(
    experts: int, choices: int, tokens: int, tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many choices a token has; both are of one mean, by which the tiles are chosen."""
    seen = list[list[int]]()

    def notes(_: None, rows: Tensor, weight: Tensor, counts: Tensor, *others: Any) -> None:
        seen.append(counts.tolist())

    spoil(tiles, monkeypatch, "grouped_mm", notes)
    assert fault(layer(experts=experts), tokens, choices, FP32) is None
    high = tiles.blocks(FP32, tokens * choices / experts).rows
    moved = [high + (-1 if slot % 2 else 1) for slot in range(experts)]
    moved[-1] -= experts % 2
    assert [high] * experts in seen
    assert moved in seen


def test_what_goes_by_the_rows_of_a_pass_before_is_found(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which were as many, and lay otherwise."""
    known = dict[Any, Tensor]()

    def stale(rows: Tensor, weight: Tensor, counts: Tensor, *others: Any, eight: bool) -> None:
        counts = known.setdefault((len(rows), len(counts)), counts.clone())
        standins.grouped_mm(rows, weight, counts, *others, eight=eight)

    monkeypatch.setattr(tiles, "grouped_mm", stale)
    assert is_off(fault(layer(experts=8), 256, TOP_K, FP32, **FREE))


def test_what_has_no_room_when_tokens_are_large_says_nothing(tiles: Any) -> None:
    """Of a type whose numbers end early, for torch too."""
    assert fault(layer(8, 4096, 2, 1), 64, 1, FP16) is None


def test_a_gradient_of_one_weight_that_is_wrong_is_found(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(found: Any, *given: Any) -> None:
        given[-1].view(-1)[7] *= -1

    spoil(tiles, monkeypatch, "gated_back", wrong)
    assert is_off(fault(layer(), 24, TOP_K, FP32, **FREE))


def test_few_gradients_of_weights_may_not_be_no_numbers(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(found: Any, *given: Any) -> None:
        if given[4].numel() <= 8:
            given[4].fill_(float("nan"))

    spoil(tiles, monkeypatch, "gated_back", wrong)
    assert is_off(fault(layer(experts=8), 64, TOP_K, FP32, **FREE), NO_NUMBERS)


@pytest.mark.parametrize(
    ("name", "which"),
    [("sort", 0), ("sort", 1), ("sort", 2), ("copies", None), ("add_up", None)],
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_that_is_elsewhere_is_found(
    tiles: Any, name: str, which: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(found: Any, *given: Any) -> None:
        one = found if which is None else found[which]
        if len(one) > 3:
            one[[1, 2]] = one[[2, 1]].clone() + (name == "sort" and which == 0)

    spoil(tiles, monkeypatch, name, wrong)
    assert fault(layer(), 64, TOP_K, dtype, **FREE)


def test_experts_as_they_are_hide_nothing(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not zeros, not numbers that are no numbers, not a few channels that are large."""

    def wrong(
        _: None, rows: Tensor, weight: Tensor, counts: Tensor, turned: bool, out: Any
    ) -> None:
        if turned and out.shape[1] == HIDDEN:
            out[:, 8:] *= 0.5

    spoil(tiles, monkeypatch, "grouped_mm", wrong)
    for fill in (0.0, float("nan"), 1000.0):
        moe = layer()
        with torch.no_grad():
            moe.bank.arena.fill_(fill)
            moe.bank.arena[:, : moe.bank.arena.shape[1] // 2] = 0.01
        assert is_off(fault(moe, 64, TOP_K, BF16, **FREE))


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
    for adapted in (0, 4):
        moe = layer(adapted=adapted)
        assert fault(moe, 24, TOP_K, FP32, **FREE) == words
        assert moe.bank.by == "auto"


def test_results_that_are_no_numbers_are_no_measure(
    tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(left: Tensor, other: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
        out.fill_(float("inf"))

    monkeypatch.setattr(loops, "outer", infinite)
    words = "what torch makes of numbers by chance is not finite in torch.float32"
    assert fault(layer(), 24, TOP_K, FP32) == words


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("more", [{}, FREE, {"again": True}])
def test_both_are_timed_in_turn(more: dict[str, Any]) -> None:
    """By a clock by which a pass of torch takes 2 s, and one of kernels 1 s."""
    moe = layer()
    now = itertools.accumulate(itertools.cycle([0.0, 2.0, 0.0, 1.0]))
    load = Load(6, TOP_K, FP32, 2, **more)
    timed = Trial(moe.bank, [load, Load(6, TOP_K, FP32, learns=False)])
    assert timed.seconds(lambda _: next(now)) == {"torch": 2.0, "triton": 1.0}
    assert moe.bank.by == "auto"
    assert all(one.grad is None for one in moe.parameters())


def passes_of(tiles: Any, patch: pytest.MonkeyPatch, loads: list[Load]) -> dict[str, int]:
    """How often products forward and gradients of matrices are asked for while kernels are timed,
    for each pass."""
    counted = {"grouped_gated": 0, "grouped_outer": 0}

    def count(name: str, *_: Any) -> None:
        counted[name] += 1

    for name in counted:
        spoil(tiles, patch, name, partial(count, name))
    now = itertools.count(0.0, 1e3)
    Trial(layer().bank, loads).seconds(lambda _: float(next(now)))
    return {name: number // 6 for name, number in counted.items()}


def test_what_is_timed_is_what_is_run(tiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results once more where backward computes them anew; not what validation alone has."""
    load = Load(6, TOP_K, FP32, **FREE)
    once = passes_of(tiles, monkeypatch, [load, Load(6, TOP_K, FP32, learns=False)])
    again = passes_of(tiles, monkeypatch, [Load(6, TOP_K, FP32, again=True, **FREE)])
    assert again["grouped_gated"] == 2 * once["grouped_gated"] > 0
    assert again["grouped_outer"] == once["grouped_outer"] > 0


@pytest.mark.parametrize(
    ("more", "load"),
    [({}, Load(24, TOP_K, FP32, **FREE)), ({"kind": "gshard"}, Load(24, TOP_K, FP32))],
)
def test_loads_of_a_rank_alone(more: dict[str, Any], load: Load) -> None:
    assert Load.all_of(layer(**more), 24, FP32) == [load]


def test_loads_in_other_layouts() -> None:
    """In chunks, with a capacity, and with rows of others, each of which is a token by itself, or
    visits, which have some rows each; what stays, where it is computed by itself, is tokens."""
    moe = layer()
    moe.dispatcher = Dispatcher(EXPERTS, Ranks(), chunks=3)
    assert Load.all_of(moe, 25, FP32) == [Load(9, TOP_K, FP32, 2)]
    moe.dispatcher = Dispatcher(EXPERTS, Ranks(), capacity=1.5)
    validation = Load(24, TOP_K, FP32, waited_for=False, learns=False)
    assert Load.all_of(moe, 24, FP32) == [Load(24, TOP_K, FP32), validation]
    others = Ranks(carriers=(object(),))  # type: ignore[arg-type]
    moe.dispatcher = Dispatcher(EXPERTS, others, capacity=1.5)
    assert Load.all_of(moe, 24, FP32, again=True) == [Load(48, 1, FP32, weighted=False, again=True)]
    moe.dispatcher._stops = [2]
    assert Load.all_of(moe, 24, FP32) == [Load(24, TOP_K, FP32)]
    assert Load.all_of(moe, 0, FP32)[0].tokens == 1
    moe.dispatcher = Dispatcher(EXPERTS, others, local_first=True)
    assert Load.all_of(moe, 24, FP32) == [
        Load(16, 1, FP32, 2, weighted=False), Load(8, TOP_K, FP32, 2),
    ]  # fmt: skip


def test_kernels_are_tried_where_they_were_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, found = torch.device("cuda"), dict[tuple[int, int], str | None]()
    monkeypatch.setattr(passes, "hindrance", lambda: None)
    for generation in ((0, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(devices, "generation", lambda _, it=generation: it)
        found[generation] = obstacle(gpu)
    words = "they are for compute capability 8.0 or more of NVIDIA's GPUs, "
    assert list(found.values()) == [
        f"{words}which this device has none of", f"{words}not 7.5", None, None, None, None,
    ]  # fmt: skip
    monkeypatch.setattr(passes, "hindrance", lambda: "no compiler")
    assert obstacle(gpu) == "Triton cannot be used: no compiler"
    assert leaves_choice(gpu)
    assert not leaves_choice(torch.device("cpu"))
