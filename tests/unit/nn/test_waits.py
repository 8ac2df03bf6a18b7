"""A rank alone on a device that is not the CPU: its layers wait for no number, and take few steps.

Tensors without numbers stand for such a device: whoever asks one of them for a number fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.dist import passes
from moesaic.facts.job.train import GroupedMM
from moesaic.nn import dispatch, moe, router
from moesaic.nn.bank import Bank
from moesaic.nn.context import Context, Rotary
from moesaic.nn.dispatch import Counted, Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.router import NOBODY, Router
from moesaic.nn.routes import Routes
from moesaic.nn.shares import shares
from moesaic.nn.travel import Ranks, bounds, routes, routes_of_all

HIDDEN, FFN, EXPERTS, TOP_K = 16, 8, 6, 2
NOTHING_TO_DO = {
    "alias", "detach", "device", "empty", "empty_like", "expand", "new_empty", "select", "slice",
    "split", "t", "transpose", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
"""Calls that launch nothing."""


class Launches(TorchDispatchMode):
    """What is launched; copies from a device to the host are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what does something."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in {"_to_copy", "copy_"} and isinstance(result, Tensor):
            sources = [one for one in args if isinstance(one, Tensor)]
            came = any(one.device.type != "cpu" for one in sources)
            assert not (came and result.device.type == "cpu"), "the host waits"
        if name not in NOTHING_TO_DO:
            self.names.append(name)
        return result


def layer(device: str, **more: Any) -> MoE:
    """An expert layer there."""
    made = MoE(
        Router(3, HIDDEN, EXPERTS, TOP_K, **more),
        Bank(range(EXPERTS), HIDDEN, FFN, by="triton"),
        Dispatcher(EXPERTS, Ranks(), capacity=None),
    )
    return made.to(device)


def context(*, training: bool) -> Context:
    """Of one micro-batch."""
    made = Context(Rotary(torch.empty(0), torch.empty(0)))
    made.training = training
    return made


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision, which does not know such tensors, stays away."""
    monkeypatch.setattr(router.torch, "autocast", lambda *a, **k: nullcontext())
    monkeypatch.setattr(moe, "compute_dtype", lambda x: x.dtype)


def learn(one: MoE, x: Tensor) -> Context:
    """Forward and backward, of all losses."""
    ctx = context(training=True)
    out = one(x, ctx)
    facts = ctx.layers[3]
    assert out.shape == x.shape
    assert facts.counts.shape == (1, EXPERTS)
    assert facts.asked.shape == (EXPERTS,)
    assert facts.counts.device == facts.asked.device == x.device
    assert (facts.dropped, facts.visits, facts.spread) == (0, None, None)
    (out.sum() + facts.balance + facts.z).backward()
    return ctx


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("kind", ["top-k", "switch", "balanced"])
def test_a_layer_learns_and_waits_for_no_number(tokens: int, kind: str) -> None:
    one = layer("meta", kind=kind)
    x = torch.empty(1, tokens, HIDDEN, device="meta", requires_grad=True)
    learn(one, x)
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in one.parameters())


@pytest.mark.usefixtures("without_numbers")
def test_experts_that_moved_are_found_without_waiting() -> None:
    one = layer("meta")
    one.rehome([4, 2, 0, 5, 1, 3])
    learn(one, torch.empty(2, 9, HIDDEN, device="meta"))


@pytest.mark.usefixtures("without_numbers")
def test_adapters_wait_for_no_number() -> None:
    one = layer("meta")
    one.bank.adapt(4, 0.5)
    one.bank.arena.requires_grad_(False)
    one.to("meta")
    x = torch.empty(1, 20, HIDDEN, device="meta", requires_grad=True)
    learn(one, x)
    assert one.bank.adapters is not None
    assert one.bank.adapters.arena.grad is not None


@torch.no_grad()
@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_not_learn_waits_for_no_number(
    dtype: torch.dtype, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "compute_dtype", lambda x: dtype)
    ctx = context(training=training)
    out = layer("meta")(torch.empty(1, 40, HIDDEN, device="meta"), ctx)
    assert (out.device.type, out.dtype) == ("meta", dtype)
    assert ctx.layers[3].counts.device.type == "meta"


def test_a_gpu_copies_nothing_to_the_host() -> None:
    with FakeTensorMode(), Launches() as seen:
        experts_TK = torch.empty(40, TOP_K, dtype=torch.int64, device="cuda")
        weights_TK = torch.empty(40, TOP_K, device="cuda")
        tokens_TH = torch.empty(40, HIDDEN, device="cuda", dtype=torch.bfloat16)
        dispatcher = Dispatcher(EXPERTS, Ranks())
        placed = dispatcher.place(
            dispatcher.count(experts_TK, training=True, whole=True, by="triton")
        )
        ways = list[Routes]()

        def keep(tokens: Tensor, way: Routes, weights_NK: Tensor | None) -> Tensor:
            assert weights_NK is not None
            ways.append(way)
            return tokens

        out = dispatcher.start(tokens_TH, weights_TK, placed).through(keep)
        (way,) = ways
        parts = shares(tokens_TH, way, FFN, EXPERTS)
    assert out is tokens_TH
    assert [(one.slots, one.rows) for one in parts] == [(slice(0, EXPERTS), slice(0, 80))]
    assert {one.device.type for one in (*way[:2], placed.counts_RCS)} == {"cuda"}
    assert len(seen.names) < 10


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize("kernels", [True, False])  # That sort: there may be too many experts.
def test_few_launches_from_router_to_experts(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a layer reports is made when experts are at work."""
    if not kernels:
        monkeypatch.setattr(passes, "MOST_SLOTS", EXPERTS - 1)
    one, marks = layer("meta").to(torch.bfloat16), dict[str, int]()
    route = one.router.forward

    def routed(*args: Any) -> Any:
        found = route(*args)
        marks["routed"] = len(seen.names)
        return found

    monkeypatch.setattr(one.router, "forward", routed)
    x = torch.empty(1, 40, HIDDEN, device="meta", dtype=torch.bfloat16)
    for _ in range(2):
        with Launches() as seen:
            one(x, context(training=True))
    between = seen.names[marks["routed"] : seen.names.index("grouped_activated")]
    by_torch = ["_to_copy", "sort", "searchsorted", "sub", "arange", "scatter_"]
    assert between == [
        *(["sort"] if kernels else by_torch),  # The way.
        "_to_copy",  # Weights, to the type of tokens.
        "copies",  # Rows.
    ]  # fmt: skip


def cases() -> dict[str, tuple[Tensor, int]]:
    """Choices [tokens, K] among so many experts."""
    draw = torch.Generator().manual_seed(5)

    def best(tokens: int, experts: int, top_k: int) -> Tensor:
        return torch.rand(tokens, experts, generator=draw).topk(top_k).indices

    turn = (torch.arange(12)[:, None] * 2 + torch.arange(2)) % 6
    return {
        "even": (turn, 6),
        "random": (best(50, 64, 8), 64),
        "skewed": (torch.tensor([[5, 0]]).expand(33, 2), 6),
        "of one expert": (torch.zeros(7, 1, dtype=torch.int64), 1),
        "one token": (best(1, 6, 3), 6),
        "no token": (best(0, 6, 3), 6),
        "255 experts": (best(40, 255, 4), 255),
        "256 experts": (best(40, 256, 4), 256),
        "many experts": (best(300, 40_000, 2), 40_000),
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_all_at_once_are_the_routes_of_the_host(name: str) -> None:
    slots_NK, slots = CASES[name]
    counts_S = torch.bincount(slots_NK.reshape(-1), minlength=slots)
    due = routes(slots_NK, slots_NK < slots, counts_S)
    found = routes_of_all(slots_NK, bounds(slots, slots_NK.device))
    assert found.present_NK is None
    assert due.present_NK is not None
    assert due.rows_NK is not None
    assert found.rows_NK is not None
    assert due.present_NK.all()
    assert torch.equal(found.counts, due.counts)
    assert torch.equal(found.order_R, due.order_R)
    assert torch.equal(found.rows_NK, due.rows_NK)
    assert [one.dtype for one in found[:3]] == [torch.int64] * 3
    rows = torch.randn(slots_NK.numel(), 5)
    assert torch.equal(found.add_up(rows), due.add_up(rows))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_all_at_once_is_what_the_host_counts(name: str, moved: bool) -> None:
    experts_TK, experts = CASES[name]
    homes = torch.randperm(experts).tolist() if moved else None
    dispatcher = Dispatcher(experts, Ranks(), slots=homes)
    there, here = (
        dispatcher.count_there(experts_TK),
        dispatcher.count(experts_TK, training=True, whole=True),
    )
    assert (here.placed, there.placed is None) == (None, False)
    for one in ("asked_E", "counts_RE", "counts_RCE"):
        assert torch.equal(getattr(here, one), getattr(there, one))
    assert (here.num_tokens, here.dropped) == (there.num_tokens, there.dropped)
    placed, due = dispatcher.place(there), dispatcher.place(here)
    assert torch.equal(placed.slots_TK, due.slots_TK)
    assert torch.equal(placed.counts_RCS, due.counts_RCS)
    tokens = torch.randn(len(experts_TK), 4, dtype=torch.float64)
    weights = torch.rand(experts_TK.shape)
    ways = list[tuple[Tensor, Routes, Tensor | None]]()

    def keep(*given: Any) -> Tensor:
        ways.append(given)
        return given[0]

    for one in (placed, due):
        dispatcher.start(tokens, weights, one).through(keep)
    (rows, way, weighs), (due_rows, due_way, due_weighs) = ways
    assert rows is due_rows is tokens
    assert weighs is not None
    assert due_weighs is not None
    assert torch.equal(weighs, due_weighs)
    assert weighs.dtype == due_weighs.dtype
    for one, other in zip(way[:3], due_way[:3], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["top-k", "balanced"])
def test_a_layer_is_the_same_bit_by_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for there in (False, True):
        torch.manual_seed(3)
        one = layer("cpu", kind=kind)
        one.bank.by = "torch"
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        if there:
            monkeypatch.setattr(one.dispatcher, "count", _there(one.dispatcher))
        x = torch.randn(2, 15, HIDDEN, requires_grad=True)
        facts = learn(one, x).layers[3]
        grads = [parameter.grad for parameter in one.parameters()]
        found.append([facts.counts, facts.asked, facts.balance, facts.z, x.grad, *grads])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def _there(dispatcher: Dispatcher) -> Callable[..., Counted]:
    def count(experts_TK: Tensor, *, training: bool, whole: bool, by: str) -> Counted:
        assert training
        assert whole
        assert by == "torch"
        return dispatcher.count_there(experts_TK)

    return count


def test_who_must_know_numbers_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacity, chunks, pieces, what was given up, and torch's products; on the CPU everybody."""
    chosen = CASES["even"][0]
    monkeypatch.setattr(dispatch, "routes_of_all", None)
    for more in ({}, {"capacity": 2.0}, {"chunks": 2}, {"local_first": True}):
        counted = Dispatcher(6, Ranks(), **more).count(chosen, training=True, whole=True)
        assert counted.placed is None
        assert counted.counts_RE.tolist() == [[4] * 6]
    far = chosen.to("meta")
    cases: list[tuple[dict[str, Any], bool, GroupedMM]] = [
        ({"capacity": 2.0}, True, "triton"), ({"chunks": 2}, True, "triton"),
        ({"local_first": True}, True, "triton"), ({}, False, "triton"), ({}, True, "torch"),
    ]  # fmt: skip
    for more, whole, by in cases:
        with pytest.raises(NotImplementedError):
            Dispatcher(6, Ranks(), **more).count(far, training=True, whole=whole, by=by)
    assert chosen.min() > NOBODY


@pytest.mark.parametrize(
    ("kind", "training", "replayed", "whole"),
    [
        ("top-k", True, False, True), ("top-k", False, False, True), ("top-k", True, True, False),
        ("switch", True, False, True), ("gshard", True, False, False),
        ("gshard", False, False, False), ("balanced", True, False, True),
    ],
)  # fmt: skip
def test_routers_say_whether_all_choices_are_experts(
    kind: Any, training: bool, replayed: bool, whole: bool
) -> None:
    one, ctx = Router(0, 4, 6, 2, kind=kind), context(training=training)
    torch.nn.init.normal_(one.weight)
    if replayed:
        ctx.replay = {0: torch.tensor([[1, 2], [-2, 3], [0, 1]])}
    routing = one(torch.randn(3, 4), ctx)
    assert routing.whole == whole
    assert not whole or bool((routing.experts_TK >= 0).all())


def test_numbers_that_nobody_has_are_one_share() -> None:
    way = routes_of_all(CASES["random"][0].to("meta"), bounds(64, torch.device("meta")))
    (share,) = shares(torch.empty(50, 4, device="meta"), way, 8, 64, "triton")
    assert (share.slots, share.rows) == (slice(0, 64), slice(0, 400))
    assert share.counts is way.counts
    assert (share.alone, share.arena, share.by) == (False, 0, "triton")
