"""MoE layers of a single rank on a device: no host sync, and few launches.

Meta tensors stand for the device: reading a value from one raises an error.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels import fused
from moesaic.nn import moe, router
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.dispatch.all_to_all import (
    DispatchGroups,
)
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.tiles import split_slots
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.moe import MoE
from moesaic.nn.reports import MoEReport
from moesaic.nn.router import NO_EXPERT, Router

HIDDEN, FFN, EXPERTS, TOP_K = 16, 8, 6, 2
NO_LAUNCH = {
    "alias", "detach", "device", "empty", "empty_like", "expand", "new_empty", "select", "slice",
    "split", "split_with_sizes", "t", "transpose", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
"""Operations that launch no kernel."""


class Launches(TorchDispatchMode):
    """Recorder of launched operations that forbids copies from device to host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it if it launches a kernel."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in {"_to_copy", "copy_"} and isinstance(result, Tensor):
            sources = [one for one in args if isinstance(one, Tensor)]
            from_device = any(one.device.type != "cpu" for one in sources)
            assert not (from_device and result.device.type == "cpu"), "the host waits"
        if name not in NO_LAUNCH:
            self.names.append(name)
        return result


def make_layer(device: str, **options: Any) -> MoE:
    result = MoE(
        Router(3, HIDDEN, EXPERTS, TOP_K, **options),
        ExpertBank(range(EXPERTS), HIDDEN, FFN, backend="triton"),
        Dispatcher(EXPERTS, DispatchGroups(), capacity=None),
    )
    return result.to(device)


def make_inputs(*, training: bool, **more: Any) -> Inputs:
    return Inputs(Rotary(torch.empty(0), torch.empty(0)), training=training, **more)


@pytest.fixture
def meta_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable autocast, which does not support meta tensors."""
    monkeypatch.setattr(router.torch, "autocast", lambda *a, **k: nullcontext())
    monkeypatch.setattr(moe, "compute_dtype", lambda x: x.dtype)


def train_step(one: MoE, x: Tensor) -> MoEReport:
    """Run forward and backward of the output and all losses."""
    out, report = one(x, make_inputs(training=True))
    assert out.shape == x.shape
    assert report.counts.shape == (1, EXPERTS)
    assert report.requested.shape == (EXPERTS,)
    assert report.counts.device == report.requested.device == x.device
    assert report.balance_decision is None
    AuxLoss([report], None).attach(out.sum(), 1.0, 1.0).backward()
    return report


@pytest.mark.usefixtures("meta_tensors")
@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("kind", ["top-k", "switch", "balanced"])
def test_training_needs_no_host_sync(tokens: int, kind: str) -> None:
    one = make_layer("meta", kind=kind)
    x = torch.empty(1, tokens, HIDDEN, device="meta", requires_grad=True)
    train_step(one, x)
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in one.parameters())


@pytest.mark.usefixtures("meta_tensors")
def test_migrated_experts_and_adapters_need_no_host_sync() -> None:
    one = make_layer("meta")
    one.set_slot_experts([4, 2, 0, 5, 1, 3])
    one.bank.add_adapters(4, 0.5)
    one.bank.arena.requires_grad_(False)
    one.to("meta")
    x = torch.empty(1, 20, HIDDEN, device="meta", requires_grad=True)
    train_step(one, x)
    assert one.bank.adapters is not None
    assert one.bank.adapters.arena.grad is not None


@torch.no_grad()
@pytest.mark.usefixtures("meta_tensors")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_needs_no_host_sync(
    dtype: torch.dtype, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "compute_dtype", lambda x: dtype)
    inputs = make_inputs(training=training)
    out, report = make_layer("meta")(torch.empty(1, 40, HIDDEN, device="meta"), inputs)
    assert (out.device.type, out.dtype) == ("meta", dtype)
    assert report.counts.device.type == "meta"


def test_gpu_copies_nothing_to_the_host() -> None:
    with FakeTensorMode(), Launches() as launches:
        experts_TK = torch.empty(40, TOP_K, dtype=torch.int64, device="cuda")
        weights_TK = torch.empty(40, TOP_K, device="cuda")
        tokens_TH = torch.empty(40, HIDDEN, device="cuda", dtype=torch.bfloat16)
        dispatcher = Dispatcher(EXPERTS, DispatchGroups())
        token_slots = dispatcher.assign_slots(
            dispatcher.count(experts_TK, training=True, allow_device_counts=True, backend="triton")
        )
        permutations = list[Permutation]()

        def record(tokens: Tensor, permutation: Permutation, weights_NK: Tensor | None) -> Tensor:
            assert weights_NK is not None
            permutations.append(permutation)
            return tokens

        out = dispatcher.start_dispatch(tokens_TH, weights_TK, token_slots).run_experts(record)
        (permutation,) = permutations
        ranges = split_slots(tokens_TH, permutation, FFN, EXPERTS)
    assert out is tokens_TH
    assert [(one.slots, one.rows) for one in ranges] == [(slice(0, EXPERTS), slice(0, 80))]
    assert {one.device.type for one in (*permutation[:2], token_slots.counts_RCS)} == {"cuda"}
    assert len(launches.names) < 10


@pytest.mark.usefixtures("meta_tensors")
def test_few_launches_between_router_and_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a layer is made after the experts are launched."""
    one, launch_counts = make_layer("meta").to(torch.bfloat16), dict[str, int]()
    forward = one.router.forward

    def recording_route(*args: Any) -> Any:
        actual = forward(*args)
        launch_counts["routed"] = len(launches.names)
        return actual

    monkeypatch.setattr(one.router, "forward", recording_route)
    x = torch.empty(1, 40, HIDDEN, device="meta", dtype=torch.bfloat16)
    for _ in range(2):
        with Launches() as launches:
            one(x, make_inputs(training=True))
    between = launches.names[launch_counts["routed"] : launches.names.index("grouped_swiglu")]
    # The second copies weights to the dtype of tokens.
    assert between == ["sort_by_slot", "_to_copy", "permute"]


def cases() -> dict[str, tuple[Tensor, int]]:
    """Return (choices [tokens, K], number of experts) by name."""
    draw = torch.Generator().manual_seed(5)

    def top_experts(tokens: int, experts: int, top_k: int) -> Tensor:
        return torch.rand(tokens, experts, generator=draw).topk(top_k).indices

    in_turn = (torch.arange(12)[:, None] * 2 + torch.arange(2)) % 6
    return {
        "even": (in_turn, 6),
        "random": (top_experts(50, 64, 8), 64),
        "skewed": (torch.tensor([[5, 0]]).expand(33, 2), 6),
        "of one expert": (torch.zeros(7, 1, dtype=torch.int64), 1),
        "one token": (top_experts(1, 6, 3), 6),
        "no token": (top_experts(0, 6, 3), 6),
        "many experts": (top_experts(40, 1024, 4), 1024),
    }


CASES = cases()


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_device_counts_equal_host_counts(name: str, moved: bool) -> None:
    pytest.importorskip("triton")
    experts_TK, experts = CASES[name]
    slot_experts = torch.randperm(experts).tolist() if moved else None
    dispatcher = Dispatcher(experts, DispatchGroups(), slot_experts=slot_experts)
    on_device, on_host = (
        dispatcher.count_on_device(experts_TK),
        dispatcher.count(experts_TK, training=True, allow_device_counts=True),
    )
    assert (on_host.token_slots, on_device.token_slots is None) == (None, False)
    for one in ("counts_RE", "counts_RCE"):
        assert torch.equal(getattr(on_host, one), getattr(on_device, one))
    assert torch.equal(on_host.requested_KE.sum(0), on_device.requested_KE[0])
    token_slots, expected = dispatcher.assign_slots(on_device), dispatcher.assign_slots(on_host)
    assert torch.equal(token_slots.slots_TK, expected.slots_TK)
    assert torch.equal(token_slots.counts_RCS, expected.counts_RCS)
    tokens = torch.randn(len(experts_TK), 4, dtype=torch.float64)
    weights = torch.rand(experts_TK.shape)
    permutations = list[tuple[Tensor, Permutation, Tensor | None]]()

    def record(*given: Any) -> Tensor:
        permutations.append(given)
        return given[0]

    for one in (token_slots, expected):
        dispatcher.start_dispatch(tokens, weights, one).run_experts(record)
    (rows, permutation, actual_weights), (expected_rows, expected_permutation, expected_weights) = (
        permutations
    )
    assert rows is expected_rows is tokens
    assert actual_weights is not None
    assert expected_weights is not None
    assert torch.equal(actual_weights, expected_weights)
    assert actual_weights.dtype == expected_weights.dtype
    for one, other in zip(permutation[:3], expected_permutation[:3], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_cases_that_need_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacity, chunks, local pieces, dropped choices, many experts, torch matmuls, and the CPU."""
    choices = CASES["even"][0]
    monkeypatch.setattr(fused, "sort_by_slot", None)
    for options in ({}, {"capacity": 2.0}, {"num_chunks": 2}, {"overlap_local": True}):
        counted = Dispatcher(6, DispatchGroups(), **options).count(
            choices, training=True, allow_device_counts=True
        )
        assert counted.token_slots is None
        assert counted.counts_RE.tolist() == [[4] * 6]
    meta_choices = choices.to("meta")
    cases: list[tuple[dict[str, Any], bool, MatmulBackend]] = [
        ({"capacity": 2.0}, True, "triton"), ({"num_chunks": 2}, True, "triton"),
        ({"overlap_local": True}, True, "triton"), ({}, False, "triton"), ({}, True, "torch"),
    ]  # fmt: skip
    with pytest.raises(NotImplementedError):
        Dispatcher(fused.MAX_SORT_SLOTS + 1, DispatchGroups()).count(
            meta_choices, training=True, allow_device_counts=True, backend="triton"
        )
    for options, allow_device_counts, backend in cases:
        with pytest.raises(NotImplementedError):
            Dispatcher(6, DispatchGroups(), **options).count(
                meta_choices,
                training=True,
                allow_device_counts=allow_device_counts,
                backend=backend,
            )
    assert choices.min() > NO_EXPERT


@pytest.mark.parametrize(
    ("kind", "training", "replayed", "is_complete"),
    [
        ("top-k", True, False, True), ("top-k", False, False, True), ("top-k", True, True, False),
        ("switch", True, False, True), ("gshard", True, False, False),
        ("gshard", False, False, False), ("balanced", True, False, True),
    ],
)  # fmt: skip
def test_routers_report_complete_choices(
    kind: Any, training: bool, replayed: bool, is_complete: bool
) -> None:
    one, routing_replay = Router(0, 4, 6, 2, kind=kind), None
    torch.nn.init.normal_(one.weight)
    if replayed:
        routing_replay = {0: torch.tensor([[1, 2], [-2, 3], [0, 1]])}
    inputs = make_inputs(training=training, routing_replay=routing_replay)
    routing = one(torch.randn(3, 4), inputs)
    assert routing.is_complete == is_complete
    assert not is_complete or bool((routing.experts_TK >= 0).all())
