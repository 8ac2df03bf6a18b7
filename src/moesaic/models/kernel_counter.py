"""Counter of the kernels that torch launches: matmuls by shape, bytes moved by other kernels.

Matmuls include those inside attention, convolutions (patches times weights) and grouped matmuls.
For another operation with a torch flop formula, the shape follows from its flops and its
result. An operation that multiplies by an unknown amount is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from moesaic.base.errors import UserError
from moesaic.facts.workload import MatmulShape, Op
from moesaic.facts.workload.loads import split_evenly
from moesaic.facts.workload.sizes import FloatType

DTYPE_NAMES: dict[torch.dtype, FloatType] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip

GATHER_OPS = (
    "embedding", "index_select", "gather", "index", "_embedding_bag", "_embedding_bag_forward_only",
)  # fmt: skip
"""Operations that read as many elements of their first argument as the indices select."""

OVERWRITE_OPS = (
    "copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
)  # fmt: skip
"""Operations that overwrite their first argument without reading it."""

SCATTER_OPS = ("scatter_add_", "index_add_", "index_copy_", "index_put_", "_index_put_impl_")
"""Operations that write as many elements of their first argument as the last one has."""

TRANSCENDENTAL_OPS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tanh", "sigmoid", "erf",
    "gelu", "gelu_backward", "silu", "silu_backward", "softplus", "softplus_backward", "mish",
    "mish_backward", "elu", "log_sigmoid_forward", "logsumexp", "_softmax", "_safe_softmax",
    "_log_softmax", "_log_softmax_backward_data",
)  # fmt: skip
"""Operations that compute a transcendental function of every element."""

FREE_OP_PREFIXES = ("empty", "new_empty", "lift_fresh")
"""Name prefixes of operations that only allocate, or take over existing memory."""

UNSUPPORTED_MATMUL_OPS = (
    "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_fft_r2c", "_fft_c2r", "_fft_c2c",
    "_linalg_svd", "_linalg_eigh", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex",
    "linalg_qr", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "linalg_eig", "linalg_cholesky_ex", "linalg_solve_triangular", "linalg_lstsq", "cholesky",
    "triangular_solve", "_cdist_forward", "_trilinear", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd", "_int_mm",
)  # fmt: skip
"""Operations that multiply matrices by an amount that is not known here."""


Kwargs = dict[str, Any]
OpCounts = Iterator[tuple[Op, int]]
"""A matmul, or attention of one head, and the number of each."""


@dataclass
class KernelCounts:
    """Counts of one block's kernels."""

    moved_bytes: int = 0
    """Bytes read and written by kernels other than matmuls."""
    num_kernels: int = 0
    """Kernel launches."""
    num_transcendentals: int = 0
    """Elements of transcendental functions, outside of attention."""
    ops: Counter[Op] = field(default_factory=Counter)
    """Matmuls, and heads of attention."""

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls, in full."""
        return sum(op.flops * count for op, count in self.ops.items())


class KernelCounter(TorchDispatchMode):
    """Dispatch mode that counts matmuls, bytes of other kernels, and kernel launches.

    Tensors may be real or fake, because only shapes matter.
    """

    def __init__(self, current_counts: Callable[[], KernelCounts]) -> None:
        """Create the counter; `current_counts` returns those to add the next kernel to."""
        super().__init__()
        self.counts = current_counts

    def run_op(self, func: Any, args: Any, kwargs: Kwargs) -> Any:
        """Run `func` and return its result."""
        return func(*args, **kwargs)

    def find_matmuls(
        self, func: Any, name: str, args: Any, kwargs: Kwargs, out: Any
    ) -> OpCounts | None:
        """Return the matmuls of one call; None if it is not a matmul."""
        shape_function = _shape_function(func, name)
        if shape_function is not None:
            return shape_function({**named_arguments(func, args, kwargs), "result": out})
        if func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            return iter([_matmul_from_flops(name, flops, out)])
        if name in UNSUPPORTED_MATMUL_OPS:
            raise UserError(_unknown_op_message(name))
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, count it and return its result."""
        out = self.run_op(func, args, kwargs or {})
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        read = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        if name.startswith(FREE_OP_PREFIXES) or not _launches_kernel(func, read, written):
            return out
        counts = self.counts()
        counts.num_kernels += 1
        matmuls = self.find_matmuls(func, name, args, kwargs or {}, out)
        if matmuls is None:
            counts.moved_bytes += _moved_bytes(name, read, written)
            if name.removesuffix("_") in TRANSCENDENTAL_OPS:
                counts.num_transcendentals += max(tensor.numel() for tensor in (*read, *written))
            return out
        dtype = _dtype_name(name, read)
        for op, count in matmuls:
            counts.ops[replace(op, dtype=dtype)] += count
        return out


def _launches_kernel(func: Any, read: list[Tensor], written: list[Tensor]) -> bool:
    """Return whether the operation writes memory; views and queries launch no kernel."""
    storages = {storage_key(t) for t in read}
    fresh = any(storage_key(t) not in storages for t in written)
    return fresh or func._schema.is_mutable


def storage_key(tensor: Tensor) -> int:
    """Return a key of a live tensor's storage; fake tensors have no address."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _dtype_name(name: str, tensors: list[Tensor]) -> FloatType:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            if tensor.dtype in DTYPE_NAMES:
                return DTYPE_NAMES[tensor.dtype]
            raise UserError(
                f"{name} multiplies {tensor.dtype}, which is not supported: trace the model in "
                "float64, float32, bfloat16 or float16"
            )
    raise UserError(
        f"{name} multiplies integers, which is not supported: trace the model in floats"
    )


def _moved_bytes(name: str, read: list[Tensor], written: list[Tensor]) -> int:
    """Return the bytes that a kernel other than a matmul reads and writes."""
    moved = 0
    if name in OVERWRITE_OPS:
        read = read[1:]
    if name in ("zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "full_like"):
        read = []
    if name in GATHER_OPS and len(read) > 1:
        rows = read[1].numel() if name.startswith("_embedding") else written[0].shape[0]
        width = read[0].shape[-1] if name.startswith("_emb") else written[0][:1].numel()
        moved += rows * width * read[0].itemsize
        read, written = read[1:], written[:1]
    if name == "embedding_dense_backward":  # It adds rows into a zeroed table.
        moved += 2 * read[0].nbytes
    if name in SCATTER_OPS:
        table, source = read[0], read[-1]
        moved += min(source.numel() * table.itemsize, touched_bytes(table))
        read, written = read[1:], []
    return moved + sum(map(touched_bytes, (*read, *written)))


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, with repeated elements counted once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def named_arguments(func: Any, args: Any, kwargs: Kwargs) -> Kwargs:
    """Return the arguments of a call by name, with defaults."""
    arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
    passed = zip(func._schema.arguments, args, strict=False)
    return arguments | {argument.name: value for argument, value in passed} | kwargs


def matmul(rows: int, columns: int, inner: int, count: int = 1) -> tuple[Op, int]:
    """Return `count` matmuls of [rows, inner] and [inner, columns]."""
    return Op("matmul", (MatmulShape(rows, columns, inner),)), count


def _shape_function(func: Any, name: str) -> Callable[[Kwargs], OpCounts] | None:
    """Return the shape function of `func`, in place or not; any attention kernel has the same."""
    if func.namespace != "aten":
        return None
    if name.startswith("_scaled_dot_product_"):
        return partial(_attention, is_backward=name.endswith("_backward"))
    return SHAPE_FUNCTIONS.get(name) or SHAPE_FUNCTIONS.get(name.removesuffix("_"))


def _unknown_op_message(name: str) -> str:
    return (
        f"{name} multiplies matrices in a way that is not known: use a model without it, "
        "or register its flops with torch.utils.flop_counter.register_flop_formula"
    )


def _matmul_from_flops(name: str, flops: int, out: Any) -> tuple[Op, int]:
    """Return the matmul that has this result and this many flops."""
    result = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
    each = 2 * result.numel() if result is not None else 0
    if result is None or not each or flops % each:
        raise UserError(_unknown_op_message(name))
    columns = result.shape[-1] if result.dim() else 1
    return matmul(result.numel() // columns, columns, flops // each)


def _matmul_shapes(left: str, right: str) -> Callable[[Kwargs], OpCounts]:
    """Return the shape function of a matmul or batched matmul."""

    def shapes(arguments: Kwargs) -> OpCounts:
        a, b = arguments[left].shape, arguments[right].shape
        yield matmul(a[-2], b[-1], a[-1], math.prod(a[:-2]))

    return shapes


def _grouped_mm_shapes(arguments: Kwargs) -> OpCounts:
    """Yield the shapes of torch's grouped matmul, split evenly: group offsets are tensor values."""
    a, b = arguments["self"].shape, arguments["mat2"].shape
    if len(a) == len(b) == 3:
        yield matmul(a[1], b[2], a[2], a[0])
        return
    *_, rows, inner = a
    columns, groups = b[-1], len(arguments["offs"])
    # Groups split the inner dimension if both are matrices, else the free one of the only matrix.
    split = inner if len(a) == len(b) else rows if len(a) == 2 else columns
    for size, count in Counter(split_evenly(split, groups)).items():
        if not size:
            continue
        if len(a) == len(b):
            yield matmul(rows, columns, size, count)
        elif len(a) == 2:
            yield matmul(size, columns, inner, count)
        else:
            yield matmul(rows, size, inner, count)


def _conv_shapes(arguments: Kwargs) -> OpCounts:
    """Yield patches x weights, or pixels x weights if transposed."""
    weight, groups = arguments["weight"].shape, arguments["groups"]
    channels, inner = weight[0] // groups, math.prod(weight[1:])
    pixels = arguments["input" if arguments["transposed"] else "result"].movedim(1, -1)[..., 0]
    if arguments["transposed"]:
        channels, inner = inner, channels
    yield matmul(pixels.numel(), channels, inner, groups)


def _conv_backward_shapes(arguments: Kwargs) -> OpCounts:
    """Yield the matmuls of the input and weight gradients, one per group."""
    grad, x, weight = (arguments[key].shape for key in ("grad_output", "input", "weight"))
    groups, inner = arguments["groups"], math.prod(weight[1:])
    group_channels = weight[0] // groups
    # One operand has a column per patch element, the other the remaining channels.
    feature_map = x if arguments["transposed"] else grad
    num_patches = feature_map[0] * math.prod(feature_map[2:])
    for_input, for_weight = arguments["output_mask"][:2]
    if for_input and arguments["transposed"]:
        yield matmul(num_patches, group_channels, inner, groups)
    elif for_input:
        yield matmul(num_patches, inner, group_channels, groups)
    if for_weight:
        yield matmul(group_channels, inner, num_patches, groups)


def _attention(arguments: Kwargs, is_backward: bool = False) -> OpCounts:
    """Yield attention of one head and sequence; backward recomputes the scores."""
    *batch, rows, width = arguments["query"].shape
    keys, values = arguments["key"].shape[-2], arguments["value"].shape[-1]
    num_scores = rows * keys
    if arguments.get("is_causal"):
        num_scores = sum(min(row + 1, keys) for row in range(rows))
    scores, kind = MatmulShape(rows, keys, width), "attention"
    matmuls = [scores, MatmulShape(rows, values, keys)]
    if is_backward:
        kind = "attention backward"
        matmuls = [
            scores, MatmulShape(rows, keys, values), MatmulShape(keys, values, rows),
            MatmulShape(rows, width, keys), MatmulShape(keys, width, rows),
        ]  # fmt: skip
    op = Op(
        "attend", tuple(matmuls), num_transcendentals=num_scores,
        kind=kind * (rows == keys),  # Clusters are benchmarked with self-attention only.
        causal_fraction=num_scores / (rows * keys) if num_scores else 1.0,
    )  # fmt: skip
    yield op, math.prod(batch)


SHAPE_FUNCTIONS: dict[str, Callable[[Kwargs], OpCounts]] = {
    "mm": _matmul_shapes("self", "mat2"),
    "addmm": _matmul_shapes("mat1", "mat2"),
    "bmm": _matmul_shapes("self", "mat2"),
    "baddbmm": _matmul_shapes("batch1", "batch2"),
    "addbmm": _matmul_shapes("batch1", "batch2"),
    "_grouped_mm": _grouped_mm_shapes,
    "convolution": _conv_shapes,
    "convolution_backward": _conv_backward_shapes,
}
"""Shape functions by operation name."""
