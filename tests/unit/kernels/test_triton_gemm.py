"""Triton kernels of the experts: results, in Triton's interpreter where there is no GPU; which
kernels a device gets; compilation for several compute capabilities.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.job.train import MatmulBackend
from moesaic.facts.plan import Plan
from moesaic.facts.plan.checks import check_plan
from moesaic.facts.plan.layout import plan_from_job
from moesaic.kernels import device as devices
from moesaic.kernels import fused, grouped_mm
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.testing.jobs import tiny_job

pytest.importorskip("triton")

COUNTS = [[3, 0, 2], [0, 0, 0], [40, 0, 17], [2, 131, 3]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter treats bf16 as integers.
DTYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (DEVICE.type == "cuda")]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("moesaic.kernels.triton_gemm")


def multiply_by_slot(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """Return rows[s] @ matrices[s] for every slot s, in fp64."""
    pairs = zip(rows.double().split(counts), matrices.double(), strict=True)
    return torch.cat([part @ matrix for part, matrix in pairs])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_mm_equals_fp64(
    kernels: Any, counts: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    """Strided matrices of another dtype, and a strided output."""
    arena = torch.randn(3, 2, 72, 40, device=DEVICE)
    rows = torch.randn(sum(counts), 40 if transposed else 72, device=DEVICE).to(dtype)
    for weight in (arena[:, 1], arena[:, 1].to(dtype)):
        place = torch.full((sum(counts) + 2, 90), 7.0, device=DEVICE).to(dtype)
        into = place[1:-1, 2 : 2 + weight.shape[1 if transposed else 2]]
        kernels.grouped_mm(rows, weight, torch.tensor(counts), transposed, into)
        matrices = weight.to(dtype).mT if transposed else weight.to(dtype)
        exact = multiply_by_slot(rows, matrices, counts)
        torch.testing.assert_close(into, exact.to(dtype))
        into.fill_(7.0)
        assert bool((place == 7.0).all()), "only `into` was written"


def test_nan_stays_in_its_slot(kernels: Any) -> None:
    counts = torch.tensor([3, 3, 2])
    for wrong in (0, 1):
        pair = [torch.randn(8, 16, device=DEVICE) for _ in range(2)]
        pair[wrong][3:6] = torch.nan
        out = torch.empty(3, 16, 16, device=DEVICE)
        kernels.grouped_wgrad(*pair, counts, out, False)
        assert bool(out[[0, 2]].isfinite().all())
        assert bool(out[1].isnan().all())
        rows, weight = torch.randn(8, 16, device=DEVICE), torch.randn(3, 16, 16, device=DEVICE)
        (rows if wrong else weight)[3 * wrong : 3 * wrong + 3] = torch.nan
        weight[[0, 2]] = 1.0
        into = torch.empty(8, 16, device=DEVICE)
        kernels.grouped_mm(rows, weight, counts, True, into)
        assert bool(into[[0, 1, 2, 6, 7]].isfinite().all())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_swiglu_equals_fp64(kernels: Any, counts: list[int], dtype: torch.dtype) -> None:
    """With and without `inner`."""
    weight = torch.randn(3, 144, 40, device=DEVICE).to(dtype)
    rows = torch.randn(sum(counts), 40, device=DEVICE).to(dtype)
    inner, (activated, alone) = rows.new_empty(len(rows), 144), rows.new_empty(2, len(rows), 72)
    kernels.grouped_swiglu(rows, weight, torch.tensor(counts), inner, activated)
    kernels.grouped_swiglu(rows, weight, torch.tensor(counts), None, alone)
    torch.testing.assert_close(inner, multiply_by_slot(rows, weight.mT, counts).to(dtype))
    gate, up = inner.double().chunk(2, dim=1)
    torch.testing.assert_close(activated, (F.silu(gate) * up).to(dtype))
    assert torch.equal(activated, alone)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_backward_equals_autograd(kernels: Any, weighted: bool, dtype: torch.dtype) -> None:
    """Weight gradients are written at `order` only."""
    inner, grad = (torch.randn(9, n, device=DEVICE).to(dtype) for n in (144, 72))
    order = torch.randperm(12, device=DEVICE)[:9]
    weights = torch.rand(12, device=DEVICE).to(dtype) if weighted else None
    grad_weights = torch.full((12,), 7.0, device=DEVICE).to(dtype) if weighted else None
    found = kernels.swiglu_backward(inner, grad, weights, order, grad_weights)
    leaf = inner.double().requires_grad_()
    scale = torch.ones(12, device=DEVICE) if weights is None else weights
    scale = scale.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    activated = F.silu(gate) * up * scale[order, None]
    activated.backward(grad.double())
    torch.testing.assert_close(found[0], leaf.grad.to(dtype))
    torch.testing.assert_close(found[1], activated.detach().to(dtype))
    if grad_weights is not None:
        written = torch.zeros(12, dtype=torch.bool, device=DEVICE).index_fill(0, order, True)
        torch.testing.assert_close(grad_weights[written], scale.grad[written].to(dtype))
        assert bool((grad_weights[~written] == 7.0).all())


@pytest.mark.parametrize("hidden", [1, 40, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpermute_equals_fp64(kernels: Any, hidden: int, dtype: torch.dtype) -> None:
    """With and without weights, and with any strides."""
    rows = torch.randn(9, hidden, device=DEVICE).to(dtype)
    row_indices = torch.randint(8, (5, 3), device=DEVICE)
    weights = torch.rand(5, 3, device=DEVICE).to(dtype)
    exact = (rows.double()[row_indices] * weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(kernels.unpermute(rows, row_indices, weights), exact.to(dtype))
    plain = kernels.unpermute(rows, row_indices, None)
    torch.testing.assert_close(plain, rows.double()[row_indices].sum(1).to(dtype))
    strided = rows.T.contiguous().T, row_indices.T.contiguous().T, weights.T.contiguous().T
    assert torch.equal(kernels.unpermute(*strided), kernels.unpermute(rows, row_indices, weights))


@pytest.mark.parametrize("hidden", [1, 40, 1500])
@pytest.mark.parametrize("top_k", [1, 3])
def test_permute_copies_tokens(kernels: Any, hidden: int, top_k: int) -> None:
    tokens = torch.randn(7, hidden + 2, device=DEVICE)[:, 1:-1]
    order = torch.randint(7 * top_k, (18,), device=DEVICE)
    assert torch.equal(kernels.permute(tokens, order, top_k), tokens[order // top_k])
    assert kernels.permute(tokens, order[:0], top_k).shape == (0, hidden)
    for other in (tokens.T.contiguous().T, tokens[0, 0].expand(7, hidden), tokens[0].expand(7, -1)):
        assert torch.equal(kernels.permute(other, order, top_k), other[order // top_k])


def test_tile_table_follows_counts(kernels: Any) -> None:
    """Changed counts get a new table, in the same tensor or another one."""
    counts = torch.tensor([3, 0, 130], device=DEVICE)
    first = kernels.tile_table(counts, 133, 128)
    assert kernels.tile_table(counts, 133, 128)[0] is first[0]
    assert kernels.tile_table(counts[:], 133, 128)[0] is first[0]
    assert first[0][:10].tolist() == [3, 0, 0, 3, 2, 3, 133, 2, 131, 133]
    assert first[1].tolist() == [0, 3, 3, 133]
    assert kernels.tile_table(counts, 133, 64)[0][0] == 4
    kernels.tile_table(counts, 133, 128)
    counts[1] = 2
    assert kernels.tile_table(counts, 135, 128)[0][0] == 4
    counts -= 1
    assert kernels.tile_table(counts.clone(), 135, 128)[0][0] == 4
    with torch.inference_mode():
        alone = torch.tensor([1, 0, 2], device=DEVICE)
        assert kernels.tile_table(alone, 3, 16)[0][0] == 2
        alone[1] = 5
        assert kernels.tile_table(alone, 8, 16)[0][0] == 3


@pytest.mark.parametrize(("length", "slots"), [(0, 4), (1, 3), (300, 5), (1000, 70), (640, 130)])
def test_sort_by_slot_is_stable(kernels: Any, length: int, slots: int) -> None:
    """Assignments without a slot get no row."""
    assigned = torch.randint(slots + 1, (length,))
    counts, order, rows = (
        result.cpu() for result in kernels.sort_by_slot(assigned.to(DEVICE), slots)
    )
    assert torch.equal(counts, assigned.bincount(minlength=slots + 1)[:slots])
    exact = assigned.argsort(stable=True)[: int(counts.sum())]
    assert torch.equal(order[: len(exact)], exact)
    assert torch.equal(rows[exact], torch.arange(len(exact)))
    assert bool((rows[assigned == slots] == 0).all())


def test_misaligned_operands_use_torch(kernels: Any) -> None:
    """Tensor descriptors need strides of 16 bytes."""
    rows = torch.randn(6, 12, device=DEVICE)
    assert kernels.is_supported(rows[:, :8], rows[:, 4:])
    assert not kernels.is_supported(rows[:, 1:9], rows)
    assert not kernels.is_supported(rows, rows[:, ::2])
    assert not kernels.is_supported(rows.double(), rows)
    assert kernels.is_supported(rows, rows.half()), "other dtypes are copied"
    assert not kernels.is_supported(rows[:, :10].half().contiguous(), rows[None, :, :10])
    weight, counts = torch.randn(2, 7, 5, device=DEVICE), torch.tensor([2, 4])
    found = grouped_mm.grouped_mm(rows[:, :5], weight, counts, True, backend="triton")
    torch.testing.assert_close(found, multiply_by_slot(rows[:, :5], weight.mT, [2, 4]).float())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [True, False])
def test_grouped_wgrad_equals_fp64(
    kernels: Any, counts: list[int], dtype: torch.dtype, accumulate: bool
) -> None:
    """Slots without rows get zeros."""
    left, right = (torch.randn(sum(counts), n, device=DEVICE).to(dtype) for n in (40, 72))
    before = torch.randn(3, 40, 72, device=DEVICE)
    out = before.clone()
    kernels.grouped_wgrad(left, right, torch.tensor(counts), out, accumulate)
    pairs = zip(left.double().split(counts), right.double().split(counts), strict=True)
    exact = torch.stack([a.T @ b for a, b in pairs]) + before.double() * accumulate
    torch.testing.assert_close(out, exact.float())


def run_layer(
    bank: ExpertBank,
    choices: Tensor,
    seed: int,
    *,
    sum_loss: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the output of a layer's experts, and the gradients of tokens, weights and matrices."""
    draw = torch.Generator().manual_seed(seed)
    tokens, cotangent = (torch.randn(len(choices), bank.hidden, generator=draw) for _ in range(2))
    weights = torch.rand(choices.shape, generator=draw)
    device = bank.arena.device
    leaves = [tokens.to(device, dtype).requires_grad_(), weights.to(device).requires_grad_()]
    dispatcher = Dispatcher(len(bank.experts), DispatchGroups())
    backend = bank.matmul_backend(dtype)
    counted = dispatcher.count(
        choices.to(device), training=True, allow_device_counts=True, backend=backend
    )
    assert (counted.token_slots is None) == (backend == "torch")
    placed = dispatcher.assign_slots(counted)
    sent = dispatcher.start_dispatch(*leaves, placed)
    with bank.expert_function() as compute:
        out = sent.run_experts(compute)
    if sum_loss:  # The gradient is an expanded scalar.
        out.sum().backward()
    else:
        out.backward(cotangent.to(device, dtype))
    trained = bank.arena if bank.adapters is None else bank.adapters.arena
    found = [out.detach(), *(leaf.grad for leaf in [*leaves, trained])]
    trained.grad = None
    return [one for one in found if one is not None]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("spread", ["even", "all to one", "random"])
def test_layer_equals_torch_backend(kernels: Any, lora: bool, spread: str) -> None:
    """Forward and backward, with the elementwise kernels."""
    del kernels
    cpu = torch.device("cpu")
    choices = {
        "even": torch.arange(24).view(12, 2) % 4,
        "all to one": torch.tensor([[2, 0]] * 12),
        "random": torch.rand(12, 4, generator=torch.Generator().manual_seed(3)).argsort()[:, :2],
    }[spread]
    found = {}
    for backend in get_args(MatmulBackend):
        device = cpu if backend == "torch" else DEVICE
        bank = ExpertBank(range(4), 24, 40, backend=backend)
        if lora:
            bank.add_adapters(4, 2.0)
        bank.to(device)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in bank.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        found[backend] = [
            one.cpu() for one in run_layer(bank, choices, 5, sum_loss=spread == "random")
        ]
    assert len(found["torch"]) == 4
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


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
    for backend in ("torch", "triton"):
        bank = ExpertBank(range(experts), hidden, ffn, backend=backend)
        with torch.no_grad():
            bank.arena.normal_(std=hidden**-0.5, generator=torch.Generator().manual_seed(1))
        found[backend] = [
            one.double() for one in run_layer(bank.to(DEVICE), choices, 5, dtype=dtype)
        ]
    assert len(found["torch"]) == 4
    # TF32 is off, so float32 results differ in the order of sums alone.
    limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for one, other in zip(*found.values(), strict=True):
        assert bool(other.isfinite().all())
        assert float((one - other).norm() / one.norm()) < limit


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    """Return a device of this compute capability, on which Triton works."""
    monkeypatch.setattr(devices, "compute_capability", lambda device: capability)
    monkeypatch.setattr(fused, "triton_error", lambda: None)
    grouped_mm.choose_backend.cache_clear()
    return torch.device("cuda", 0)


@pytest.fixture
def cleared_cache() -> Iterator[None]:
    """Clear the cache of chosen backends after the test."""
    yield
    grouped_mm.choose_backend.cache_clear()


@pytest.mark.usefixtures("cleared_cache")
@pytest.mark.parametrize(
    ("capability", "dtype", "backend"),
    [
        ((9, 0), torch.bfloat16, "triton"),
        ((9, 0), torch.float32, "triton"),
        ((9, 0), torch.float64, "torch"),
        *[(other, torch.bfloat16, "torch") for other in ((0, 0), (8, 0), (10, 0))],
    ],
)
def test_auto_selects_triton_on_measured_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    device = gpu(monkeypatch, capability)
    assert grouped_mm.choose_backend("auto", device, dtype) == backend
    for explicit in get_args(MatmulBackend):
        assert grouped_mm.choose_backend(explicit, device, dtype) == explicit


@pytest.mark.usefixtures("cleared_cache")
def test_auto_selects_torch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(fused, "triton_error", lambda: "Failed to find C compiler")
    assert grouped_mm.choose_backend("auto", device, torch.bfloat16) == "torch"
    with pytest.raises(ConfigError, match=r"needs Triton, .*find C compiler.*pip install triton"):
        grouped_mm.check_backend("triton", device)


@pytest.mark.usefixtures("cleared_cache")
@pytest.mark.parametrize(
    ("capability", "message"),
    [
        (None, r'kernels.grouped_mm = "triton" needs a GPU.*remove the setting'),
        ((7, 5), r'8.0 or more, and this one has 7.5: set it to "torch"$'),
        ((0, 0), r"8.0 or more, and this one has none"),
    ],
)
def test_backends_that_cannot_run_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    message: str,
) -> None:
    device = torch.device("cpu") if capability is None else gpu(monkeypatch, capability)
    with pytest.raises(ConfigError, match=message):
        grouped_mm.check_backend("triton", device)
    grouped_mm.check_backend("torch", device)
    grouped_mm.check_backend("auto", device)
    grouped_mm.check_backend("triton", gpu(monkeypatch, (8, 0)))


@pytest.mark.usefixtures("cleared_cache")
def test_backend_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    for backend, dtype, text in (
        ("auto", torch.bfloat16, "Triton grouped matmul on cuda:0 (capability 9.0)"),
        ("triton", torch.float64, "torch.mm per expert on cuda:0 (capability 9.0)"),
        ("torch", torch.bfloat16, "torch.grouped_mm on cuda:0 (capability 9.0)"),
    ):
        assert grouped_mm.describe_backend(device, dtype, backend) == text


def test_triton_error_names_the_reason(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not installed, or cannot compile its driver."""
    triton_error = fused.triton_error.__wrapped__

    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "start_triton", lambda: None)
    assert triton_error() is None
    monkeypatch.setattr(kernels, "start_triton", fail)
    assert triton_error() == "Failed to find C compiler"
    monkeypatch.setitem(sys.modules, "moesaic.kernels.triton_gemm", None)
    monkeypatch.delattr("moesaic.kernels.triton_gemm")
    assert "triton_gemm" in str(triton_error())


DENSE = {"family": "llama", "experts": 0, "top_k": 0}
BF16 = {"precision": "bf16"}


def with_backend(job: Job, backend: str) -> Plan:
    return plan_from_job(job, 1).model_copy(update={"grouped_mm": backend})


def test_jobs_that_cannot_use_a_backend_are_rejected() -> None:
    """The Triton kernels have no fp64, and run on GPUs only; a dense model has no experts."""
    with pytest.raises(ConfigError, match=r'kernels.grouped_mm = "triton" with train.precision'):
        tiny_job(kernels={"grouped_mm": "triton"})
    with pytest.raises(ConfigError, match=r'is for GPUs, and train.device = "cpu": leave one'):
        tiny_job(kernels={"grouped_mm": "triton"}, train={**BF16, "device": "cpu"})
    dense = tiny_job(model=DENSE, kernels={"grouped_mm": "triton"}, train={"device": "cpu"})
    assert "kernels.grouped_mm has no effect: the model is dense" in dense.ineffective_settings()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({}, 'grouped_mm = "triton" with train.precision = "fp64"'),
        ({**BF16, "device": "cpu"}, "is for GPUs"),
    ],
)
def test_plans_that_contradict_their_job_are_rejected(train: dict[str, Any], message: str) -> None:
    job = tiny_job(train=train)
    with pytest.raises(ConfigError, match=message):
        check_plan(with_backend(job, "triton"), job, "--plan x")
    dense = tiny_job(model=DENSE)
    check_plan(with_backend(dense, "triton"), dense, "--plan x")


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moesaic.kernels import triton_gemm, triton_kernels
import torch

generation, few = int(sys.argv[1]), sys.argv[2] == "few"

def compile_kernel(function, pointers, consts, size):
    names = function.arg_names
    types = {n: pointers.get(n, "constexpr" if n in consts else "i32") for n in names}
    source = ASTSource(function, types, consts)
    target = GPUTarget("cuda", generation, 32)
    options = {"num_warps": size.warps, "num_stages": size.stages}
    kernel = triton.compile(source, target, options)
    print(function.__name__, kernel.metadata.shared, len(kernel.asm["cubin"]))

for kind, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
    for rows in (16, 64, 4096) if kind == "bf16" else (4096,):
        size = triton_gemm.tile_size(dtype, rows, divmod(generation, 10))
        either = (rows != 64,) if few else (False, True)
        for gated in either if kind != "fp32" else (False,):
            tile = [1, 2, size.columns // 2, size.depth] if gated else [1, size.columns, size.depth]
            compile_kernel(triton_kernels.grouped_mm, {
                "rows": f"tensordesc<{kind}[{size.rows},{size.depth}]>",
                "matrices": f"tensordesc<{kind}{tile}>".replace(" ", ""),
                "out": f"*{kind}", "activated": f"*{kind}", "tiles": "*i32",
            }, {
                "TRANSPOSED": True, "GATED": gated, "KEEP_INNER": True,
                "PRECISION": "tf32x3", "PROGRAMS": 132, "GROUP_TILES": 4,
                "M": size.rows, "N": size.columns, "K": size.depth,
            }, size)
        size = triton_gemm.wgrad_tile_size(dtype, rows, divmod(generation, 10))
        compile_kernel(triton_kernels.grouped_wgrad, {
            "left": f"tensordesc<{kind}[{size.depth},{size.rows}]>",
            "right": f"tensordesc<{kind}[{size.depth},{size.columns}]>",
            "out": "*fp32", "ends": "*i32",
        }, {
            "ACCUMULATE": True, "PRECISION": "tf32x3", "M": size.rows, "N": size.columns,
            "R": size.depth,
        }, size)
"""


@pytest.mark.parametrize(
    ("generation", "shared", "number"),
    [
        (90, 227, 8),
        pytest.param(90, 227, 11, marks=pytest.mark.soak),
        *[
            pytest.param(generation, shared, 11, marks=pytest.mark.soak)
            for generation, shared in ((80, 163), (89, 99), (100, 227), (120, 99))
        ],
    ],
)
def test_kernels_compile_for_gpus(generation: int, shared: int, number: int, tmp_path: Any) -> None:
    """The kernels fit in `shared` KiB of shared memory; a few are gated for some sizes only."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [str(generation), "few" if number < 11 else "all"]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *words], capture_output=True, text=True, timeout=300,
        check=False, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == number
    for _, used, size in lines:
        assert int(used) <= shared << 10
        assert int(size) > 0
