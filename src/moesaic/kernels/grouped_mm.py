"""Matmuls of dense weights and of experts: the custom ops and the choice of their backend.

Rows are sorted by slot; `counts[s]` of them (a CPU tensor) belong to slot s. Weights are views of
an arena: [slots, N, K] with any stride between slots. Custom ops are opaque to torch's compiler,
FLOP counter and profiler. A profiler of one thread does not see the ops of the thread pool.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moesaic.base.errors import ConfigError
from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels import cpu_gemm, fused, threads
from moesaic.kernels import device as devices

_MIN_CAPABILITY = (8, 0)
"""Minimum compute capability of the Triton kernels."""
_OPS = torch.library.Library("moesaic", "DEF")
# `torch.library.custom_op` would do, but its first call imports torch's compiler, which takes a
# second, and each call costs five times as much.
_OPS.define("matmul(Tensor rows, Tensor weight, bool transposed) -> Tensor")
_OPS.define("matmul_into(Tensor rows, Tensor weight, bool transposed, Tensor(a!) out) -> ()")
_OPS.define(
    "grouped_mm(Tensor rows, Tensor weight, Tensor counts, bool transposed, str backend='torch')"
    " -> Tensor"
)
_OPS.define(
    "grouped_mm_into(Tensor rows, Tensor weight, Tensor counts, bool transposed, Tensor(a!) out,"
    " str backend='torch') -> ()"
)
_OPS.define(
    "grouped_swiglu(Tensor rows, Tensor gate_up, Tensor counts, Tensor(a!)? inner,"
    " Tensor(b!) activated, str backend) -> ()"
)
_OPS.define(
    "grouped_wgrad(Tensor left, Tensor right, Tensor counts, Tensor(a!) out, bool accumulate,"
    " str backend='torch') -> ()"
)


def _matmul(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    matrix = weight if transposed else weight.T
    return (
        cpu_gemm.onednn_linear(rows, matrix)
        if cpu_gemm.uses_onednn(rows, weight)
        else rows @ matrix.T
    )


def _matmul_into(rows: Tensor, weight: Tensor, transposed: bool, out: Tensor) -> None:
    if cpu_gemm.uses_onednn(rows, weight):
        out.copy_(_matmul(rows, weight, transposed))
    else:
        torch.mm(rows, weight.T if transposed else weight, out=out)


def _grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, backend: str = "torch"
) -> Tensor:
    if backend == "torch" and _uses_torch_grouped_mm(rows, weight):
        operand = weight.to(rows.dtype)
        operand = operand.transpose(1, 2) if transposed else operand
        product: Tensor = F.grouped_mm(rows, operand, offs=_slot_ends(counts, rows.device))
        return product
    out = _fake_grouped_mm(rows, weight, counts, transposed, backend)
    _grouped_mm_into(rows, weight, counts, transposed, out, backend)
    return out


def _grouped_mm_into(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    transposed: bool,
    out: Tensor,
    backend: str = "torch",
) -> None:
    if backend != "torch" and _supports_triton(rows, weight):
        from moesaic.kernels import triton_gemm

        triton_gemm.grouped_mm(rows, weight, counts, transposed, out)
        return
    if backend != "torch" and _uses_torch_grouped_mm(rows, weight):
        out.copy_(_grouped_mm(rows, weight, counts, transposed))
        return
    cpu_gemm.grouped_mm(rows, weight, counts, transposed, out)


def _grouped_swiglu(
    rows: Tensor,
    gate_up: Tensor,
    counts: Tensor,
    inner: Tensor | None,
    activated: Tensor,
    backend: str,
) -> None:
    if _supports_triton(rows, gate_up):
        from moesaic.kernels import triton_gemm

        triton_gemm.grouped_swiglu(rows, gate_up, counts, inner, activated)
        return
    result = _grouped_mm(rows, gate_up, counts, True, backend)
    if inner is not None:
        inner.copy_(result)
    gate, up = result.chunk(2, dim=1)
    torch.mul(F.silu(gate), up, out=activated)


def _supports_triton(*tensors: Tensor) -> bool:
    """Return whether the Triton kernels can read them; those of LoRA may be misaligned."""
    from moesaic.kernels import triton_gemm

    return triton_gemm.is_supported(*tensors)


def _grouped_wgrad(
    left: Tensor,
    right: Tensor,
    counts: Tensor,
    out: Tensor,
    accumulate: bool,
    backend: str = "torch",
) -> None:
    if backend != "torch" and _supports_triton(left, right):
        from moesaic.kernels import triton_gemm

        triton_gemm.grouped_wgrad(left, right, counts, out, accumulate)
        return
    cpu_gemm.grouped_wgrad(left, right, counts, out, accumulate)


def _fake_grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, backend: str = "torch"
) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1] if transposed else weight.shape[2]))


def _fake_matmul(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0 if transposed else 1]))


def _fake_into(*_: Any, **__: Any) -> None:
    """Stand in for an op that only writes to its arguments."""


for _name, _op, _fake in (
    ("matmul", _matmul, _fake_matmul),
    ("matmul_into", _matmul_into, _fake_into),
    ("grouped_mm", _grouped_mm, _fake_grouped_mm),
    ("grouped_mm_into", _grouped_mm_into, _fake_into),
    ("grouped_swiglu", _grouped_swiglu, _fake_into),
    ("grouped_wgrad", _grouped_wgrad, _fake_into),
):
    _OPS.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moesaic::{_name}", _fake, lib=_OPS)


def matmul(rows: Tensor, weight: Tensor, *, transposed: bool, out: Tensor | None = None) -> Tensor:
    """Return rows @ weight, or rows @ weight.T if `transposed`. oneDNN caches its kernels by shape,
    so this suits shapes that recur."""
    _check_no_grad(rows, weight)
    if out is None:
        out = torch.ops.moesaic.matmul.default(rows, weight, transposed)
    else:
        torch.ops.moesaic.matmul_into.default(rows, weight, transposed, out)
    return out


def check_backend(
    backend: Literal["auto"] | MatmulBackend, device: torch.device, key: str = "kernels.grouped_mm"
) -> None:
    """Raise ConfigError unless `backend`, the value of the setting `key`, runs on `device`."""
    reason = None if backend == "auto" else reason_not_to_run(backend, device)
    if reason is not None:
        raise ConfigError(f'{key} = "{backend}" {reason}')


@cache
def choose_backend(
    backend: Literal["auto"] | MatmulBackend, device: torch.device, dtype: torch.dtype
) -> MatmulBackend:
    """Return the backend of the expert matmuls on `device`, for tokens of `dtype`.

    auto: Triton on GPUs of a tuned compute capability, for fp32, bf16 and fp16, if Triton works
    there; else torch.
    """
    if backend != "auto":
        return backend
    is_tuned = (
        devices.compute_capability(device) in devices.TUNED_CAPABILITY
        and dtype in devices.KERNEL_DTYPES
    )
    return "triton" if is_tuned and reason_not_to_run("triton", device) is None else "torch"


def reason_not_to_run(backend: MatmulBackend, device: torch.device) -> str | None:
    """Return why `backend` cannot run on `device`, with the remedy, or None."""
    if backend == "torch":
        return None
    if device.type == "cpu":
        return "needs a GPU, and this run computes on the CPU: remove the setting"
    capability = devices.compute_capability(device)
    if capability < _MIN_CAPABILITY:
        has = _dotted(capability) if any(capability) else "none"
        return (
            f"needs an NVIDIA GPU of compute capability {_dotted(_MIN_CAPABILITY)} or more, and "
            f'this one has {has}: set it to "torch"'
        )
    why = fused.triton_error()
    if why is None:
        return None
    return (
        f"needs Triton, which fails here ({why}): run pip install triton and install a C "
        'compiler, or set it to "torch"'
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    transposed: bool,
    out: Tensor | None = None,
    backend: MatmulBackend = "torch",
) -> Tensor:
    """Return rows[s] @ weight[s], or rows[s] @ weight[s].T if `transposed`, for every slot s."""
    _check_no_grad(rows, weight)
    if out is None:
        out = torch.ops.moesaic.grouped_mm.default(rows, weight, counts, transposed, backend)
    else:
        torch.ops.moesaic.grouped_mm_into.default(rows, weight, counts, transposed, out, backend)
    return out


def grouped_swiglu(
    rows: Tensor,
    gate_up: Tensor,
    counts: Tensor,
    activated: Tensor,
    inner: Tensor | None,
    backend: MatmulBackend,
) -> None:
    """Write silu(gate) * up of rows[s] @ gate_up[s].T to `activated` for every slot s. `inner`, if
    given, receives gate and up."""
    _check_no_grad(rows, gate_up)
    torch.ops.moesaic.grouped_swiglu.default(rows, gate_up, counts, inner, activated, backend)


def grouped_wgrad(
    left: Tensor,
    right: Tensor,
    counts: Tensor,
    out: Tensor,
    accumulate: bool = False,
    backend: MatmulBackend = "torch",
) -> None:
    """Write left[s].T @ right[s] to out[s] for every slot s, or add it if `accumulate`. A slot
    without rows gets zeros, or keeps its values if `accumulate`."""
    _check_no_grad(left, right)
    torch.ops.moesaic.grouped_wgrad.default(left, right, counts, out, accumulate, backend)


def _check_no_grad(*tensors: Tensor) -> None:
    """Raise if autograd would record these: the ops have no gradient formulas."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(
            "moesaic's matmul ops record no gradients: call them under torch.no_grad()"
        )


def describe_backend(
    device: torch.device, dtype: torch.dtype, backend: Literal["auto"] | MatmulBackend = "auto"
) -> str:
    """Return the backend of the expert matmuls on `device` for log lines, for tokens of `dtype`."""
    if device.type != "cpu":
        kind = choose_backend(backend, device, dtype)
        capability = devices.compute_capability(device)
        has = f" (capability {_dotted(capability)})" if any(capability) else ""
        if kind != "torch" and dtype in devices.KERNEL_DTYPES:
            kernels = "Triton grouped matmul"
        else:
            kernels = "torch.grouped_mm" if dtype == torch.bfloat16 else "torch.mm per expert"
        return f"{kernels} on {device}{has}"
    library = "torch.mm"
    if cpu_gemm.onednn_supports(dtype):
        library = "oneDNN (torch.mm for small matmuls)"
    pool = threads.thread_pool()
    split = "" if pool is None else f", small experts in parallel on {pool.size} threads"
    return f"{library} per expert{split}"


def _uses_torch_grouped_mm(rows: Tensor, weight: Tensor) -> bool:
    """Return whether `F.grouped_mm` multiplies these: bf16 on a GPU. On a CPU it only loops."""
    is_gpu_bf16 = rows.device.type != "cpu" and rows.dtype == torch.bfloat16 and rows.shape[0] > 0
    # It needs 16-byte-aligned rows; a LoRA rank that is not a multiple of 8 has none.
    return is_gpu_bf16 and not any(extent % 8 for extent in weight.shape[1:])


def _slot_ends(counts: Tensor, device: torch.device) -> Tensor:
    return counts.cumsum(0).to(torch.int32).to(device, non_blocking=True)


@register_flop_formula([torch.ops.moesaic.matmul, torch.ops.moesaic.matmul_into])
def _matmul_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[0] * weight[1]


@register_flop_formula([torch.ops.moesaic.grouped_mm, torch.ops.moesaic.grouped_mm_into])
def _grouped_mm_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.moesaic.grouped_swiglu)
def _grouped_swiglu_flops(
    rows: tuple[int, ...], gate_up: tuple[int, ...], *_: Any, **__: Any
) -> int:
    return 2 * rows[0] * gate_up[1] * gate_up[2]


@register_flop_formula(torch.ops.moesaic.grouped_wgrad)
def _grouped_wgrad_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
