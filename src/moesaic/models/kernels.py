"""Kernels as torch starts them, one by one: products with their sizes, bytes that others move.

Products are whatever multiplies matrices, also inside: attention, convolutions (patches times
weights, which they are), grouped products of experts. What else registers flops with torch is read
off its flops and its result. An operation that is known to multiply, but not how much, is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from moesaic.base.errors import UserError
from moesaic.facts.workload.sizes import Type

TYPES: dict[torch.dtype, Type] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip

HOUSE = "moesaic"
"""Where the house's own operations are."""

PICKING = (
    "embedding", "index_select", "gather", "index", "_embedding_bag", "_embedding_bag_forward_only",
)  # fmt: skip
"""They read as many elements of their first argument as their indices say."""

OVERWRITING = (
    "copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
)  # fmt: skip
"""They write all of their first argument, and do not read it."""

PLACING = ("scatter_add_", "index_add_", "index_copy_", "index_put_", "_index_put_impl_")
"""They write as many elements of their first argument as their last one has."""

GRADIENTS = ("scatter_add", "index_add", "index_put")
"""Autograd writes to its own table of zeros by those in place, but by these while it is watched."""

SPECIAL = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tanh", "sigmoid", "erf",
    "gelu", "gelu_backward", "silu", "silu_backward", "softplus", "softplus_backward", "mish",
    "mish_backward", "elu", "log_sigmoid_forward", "logsumexp", "_softmax", "_safe_softmax",
    "_log_softmax", "_log_softmax_backward_data",
)  # fmt: skip
"""They take an exponential, or the like, of every number."""

IDLE = ("empty", "new_empty", "lift_fresh")
"""Beginnings of what only makes room, or takes over what is there."""

OPAQUE = (
    "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_fft_r2c", "_fft_c2r", "_fft_c2c",
    "_linalg_svd", "_linalg_eigh", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex",
    "linalg_qr", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "linalg_eig", "linalg_cholesky_ex", "linalg_solve_triangular", "linalg_lstsq", "cholesky",
    "triangular_solve", "_cdist_forward", "_trilinear", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd", "_int_mm",
)  # fmt: skip
"""They multiply, and nothing here says how much."""


class Shape(NamedTuple):
    """One matrix product: [rows, inner] and [inner, columns]."""

    rows: int
    columns: int
    inner: int


class Heads(NamedTuple):
    """Attention of one head of one sequence."""

    queries: int
    keys: int
    width: int
    values: int
    share: float
    """What is left to a kernel that skips what causality hides."""
    back: bool


Named = dict[str, Any]
Shapes = Iterator[tuple[Shape | Heads, int]]
"""Products and how often."""


@dataclass
class Seen:
    """What was done."""

    moved_bytes: int = 0
    """Read and written by kernels other than products."""
    calls: int = 0
    """All kernels started."""
    specials: int = 0
    """Numbers of which an exponential, or the like, is taken outside of attention."""
    products: Counter[tuple[Shape | Heads, Type]] = field(default_factory=Counter)


class Passes(TorchDispatchMode):
    """Counts products, bytes that other kernels read and write, and all kernels.

    Tensors may be real or fake: only sizes are looked at, but for the slots of the house's experts.
    """

    def __init__(self, place: Callable[[], Seen]) -> None:
        """`place` says where the kernel that starts now is counted."""
        super().__init__()
        self._place = place

    def call(self, func: Any, args: Any, kwargs: Named) -> Any:
        """What `func` returns."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls and counts."""
        out = self.call(func, args, kwargs or {})
        written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        read = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        if name.startswith(IDLE) or not _works(func, read, written):
            return out
        seen = self._place()
        seen.calls += 1
        found = products(func, name, args, kwargs or {}, out)
        if func.namespace == HOUSE and name in SLOTWISE:
            SLOTWISE[name](seen, args)
        if found is None:
            placing = name in GRADIENTS and torch._C._current_autograd_node() is not None
            seen.moved_bytes += _moved(f"{name}_" if placing else name, read, written)
            if name.removesuffix("_") in SPECIAL:
                seen.specials += max(one.numel() for one in (*read, *written))
            return out
        kind = _type(name, read)
        for shape, count in found:
            seen.products[shape, kind] += count
        return out


def _works(func: Any, read: list[Tensor], written: list[Tensor]) -> bool:
    """Whether anything is written: views, and questions about tensors, start no kernel."""
    storages = {storage_key(t) for t in read}
    fresh = any(storage_key(t) not in storages for t in written)
    return fresh or func._schema.is_mutable


def storage_key(tensor: Tensor) -> int:
    """What tells storages apart while they live: those of fake tensors have no address."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _type(name: str, read: list[Tensor]) -> Type:
    for tensor in read:
        if tensor.is_floating_point() or tensor.is_complex():
            if tensor.dtype in TYPES:
                return TYPES[tensor.dtype]
            raise UserError(
                f"{name} multiplies {tensor.dtype}, which has no speed here: trace the model in "
                "float64, float32, bfloat16 or float16"
            )
    raise UserError(
        f"{name} multiplies whole numbers, which have no speed here: trace it in floats"
    )


def _moved(name: str, read: list[Tensor], written: list[Tensor]) -> int:
    """Bytes that a kernel other than a product reads and writes."""
    moved = 0
    if name in OVERWRITING:
        read = read[1:]
    if name in ("zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "full_like"):
        read = []
    if name in PICKING and len(read) > 1:
        rows = read[1].numel() if name.startswith("_embedding") else written[0].shape[0]
        width = read[0].shape[-1] if name.startswith("_emb") else written[0][:1].numel()
        moved += rows * width * read[0].itemsize
        read, written = read[1:], written[:1]
    if name == "embedding_dense_backward":  # Into a table of zeros, row by row.
        moved += 2 * read[0].nbytes
    if name in PLACING:
        moved += _placed(read)
        read, written = read[1:], []
    return moved + sum(map(touched, (*read, *written)))


def _placed(read: list[Tensor]) -> int:
    """Bytes that are written to places of the first of `read`, by the last and those between."""
    table, *indices, source = read
    elements = source.numel()
    if elements == 1 and indices:  # One value may go to all places.
        elements = max(one.numel() for one in indices) * math.prod(table.shape[len(indices) :])
    return min(elements * table.itemsize, touched(table))


def touched(tensor: Tensor) -> int:
    """Bytes of a tensor, those that it repeats counted once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _see_slots(seen: Seen, args: Any) -> None:
    """Zeros of slots without rows; gradients in another type than factors, written once more."""
    left, busy, out = args[0], int((args[2] > 0).sum()), args[3]
    size = out[0].numel()
    seen.moved_bytes += (len(out) - busy) * size * out.itemsize
    if left.dtype != out.dtype:
        seen.calls += busy
        seen.moved_bytes += busy * size * (left.itemsize + out.itemsize)


def _see_casts(seen: Seen, args: Any) -> None:
    """Matrices narrowed to the type of rows: on a CPU one by one where there are some, on a GPU all
    at once."""
    rows, weight, busy = args[0], args[1], int((args[2] > 0).sum())
    if rows.dtype != weight.dtype:
        on_cpu = rows.device.type == "cpu"
        matrices = busy if on_cpu else len(weight)
        seen.calls += busy if on_cpu else 1
        seen.moved_bytes += matrices * weight[0].numel() * (rows.itemsize + weight.itemsize)


SLOTWISE = {
    "grouped_outer": _see_slots, "grouped_mm": _see_casts, "grouped_mm_into": _see_casts,
}  # fmt: skip
"""What our own products of slots do beside multiplying."""


def products(func: Any, name: str, args: Any, kwargs: Named, out: Any) -> Shapes | None:
    """The matrix products that one call is; None: it is something else."""
    how = _how(func, name)
    if how is not None:
        places = zip(func._schema.arguments, args, strict=False)
        given = {one.name: one.default_value for one in func._schema.arguments}
        given |= {one.name: value for one, value in places}
        return how({**given, **kwargs})
    if func._overloadpacket in flop_registry:
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        return iter([_by_flops(name, flops, out)])
    if name in OPAQUE:
        raise UserError(_unknown(name))
    return None


def _how(func: Any, name: str) -> Callable[[Named], Shapes] | None:
    """What knows the sizes of `func`, in place or not; of attention, whichever kernel it is."""
    if func.namespace not in ("aten", HOUSE):
        return None
    if name.startswith("_scaled_dot_product_"):
        return partial(_attend, back=name.endswith("_backward"))
    return SHAPES.get(name) or SHAPES.get(name.removesuffix("_"))


def _unknown(name: str) -> str:
    return (
        f"{name} multiplies matrices in a way that is not known here: give a model that does "
        "without it, or register its flops with torch.utils.flop_counter.register_flop_formula"
    )


def _by_flops(name: str, flops: int, out: Any) -> tuple[Shape, int]:
    """The product that makes a result of this size with so many flops."""
    result = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
    each = 2 * result.numel() if result is not None else 0
    if result is None or not each or flops % each:
        raise UserError(_unknown(name))
    columns = result.shape[-1] if result.dim() else 1
    return Shape(result.numel() // columns, columns, flops // each), 1


def _matrices(left: str, right: str) -> Callable[[Named], Shapes]:
    """A product, or a batch of them, of the arguments of these names; vectors are thin matrices."""

    def shapes(given: Named) -> Shapes:
        a, b = given[left].shape, given[right].shape
        if len(a) == 1:
            a = (1, *a)
        columns = b[-1] if len(b) > 1 else 1
        yield Shape(a[-2], columns, a[-1]), math.prod(a[:-2])

    return shapes


def _grouped(given: Named) -> Shapes:
    """Torch's product of groups of rows, spread evenly: ends of groups are numbers of a tensor."""
    a, b = given["self"].shape, given["mat2"].shape
    if len(a) == len(b) == 2:  # Groups share out what is added up.
        for inner, count in _evenly(a[1], len(given["offs"])):
            yield Shape(a[0], b[1], inner), count
    elif len(a) == 2:
        for rows, count in _evenly(a[0], b[0]):
            yield Shape(rows, b[2], a[1]), count
    elif len(b) == 2:
        for columns, count in _evenly(b[1], a[0]):
            yield Shape(a[1], columns, a[2]), count
    else:
        yield Shape(a[1], b[2], a[2]), a[0]


def _evenly(total: int, groups: int) -> Iterator[tuple[int, int]]:
    """How many groups have how much."""
    each, more = divmod(total, groups)
    yield from ((size, n) for size, n in ((each + 1, more), (each, groups - more)) if size and n)


def _rows(given: Named) -> Shapes:
    (rows, inner), weight = given["rows"].shape, given["weight"].shape
    yield Shape(rows, weight[0 if given["transposed"] else 1], inner), 1


def _expert_rows(given: Named) -> Shapes:
    rows, weight = given["rows"], given["weight"]
    columns = weight.shape[1] if given["transposed"] else weight.shape[2]
    for count, times in Counter(given["counts"].tolist()).items():
        if count:
            yield Shape(count, columns, rows.shape[1]), times


def _expert_weights(given: Named) -> Shapes:
    rows, columns = given["left"].shape[1], given["right"].shape[1]
    for count, times in Counter(given["counts"].tolist()).items():
        if count:
            yield Shape(count, rows, columns), times


def _convolve(given: Named) -> Shapes:
    """Patches times weights; transposed, pixels times weights."""
    x, weight, groups = given["input"].shape, given["weight"].shape, given["groups"]
    if given["transposed"]:
        yield Shape(x[0] * math.prod(x[2:]), math.prod(weight[1:]), weight[0] // groups), groups
        return
    places = math.prod(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, pad, dilation, stride in zip(
            x[2:], weight[2:], *(_per_side(given[k], x) for k in ("padding", "dilation", "stride")),
            strict=True,
        )
    )  # fmt: skip
    yield Shape(x[0] * places, weight[0] // groups, math.prod(weight[1:])), groups


def _per_side(value: list[int], x: Any) -> list[int]:
    """One number may stand for all sides."""
    return list(value) if len(value) == len(x) - 2 else list(value) * (len(x) - 2)


def _convolve_back(given: Named) -> Shapes:
    """Gradients of input and weights, each one product a group."""
    grad, x, weight = (given[key].shape for key in ("grad_output", "input", "weight"))
    groups, inner = given["groups"], math.prod(weight[1:])
    across = weight[0] // groups
    # One factor has as many columns as a patch, the other as there are channels beyond it.
    small = x if given["transposed"] else grad
    places = small[0] * math.prod(small[2:])
    for_input, for_weight = given["output_mask"][:2]
    if for_input and given["transposed"]:
        yield Shape(places, across, inner), groups
    elif for_input:
        yield Shape(places, inner, across), groups
    if for_weight:
        yield Shape(across, inner, places), groups


def _attend(given: Named, back: bool = False) -> Shapes:
    """Queries with all keys and values of their head."""
    *batch, rows, width = given["query"].shape
    keys, values = given["key"].shape[-2], given["value"].shape[-1]
    share = _causal_share(given, rows, keys)
    yield Heads(rows, keys, width, values, share, back), math.prod(batch)


def _causal_share(given: Named, rows: int, keys: int) -> float:
    if not given.get("is_causal") or not rows or not keys:
        return 1.0
    return sum(min(row + 1, keys) for row in range(rows)) / (rows * keys)


SHAPES: dict[str, Callable[[Named], Shapes]] = {
    "mm": _matrices("self", "mat2"),
    "addmm": _matrices("mat1", "mat2"),
    "bmm": _matrices("self", "mat2"),
    "baddbmm": _matrices("batch1", "batch2"),
    "addbmm": _matrices("batch1", "batch2"),
    "mv": _matrices("self", "vec"),
    "addmv": _matrices("mat", "vec"),
    "dot": _matrices("self", "tensor"),
    "_grouped_mm": _grouped,
    "product": _rows,
    "product_into": _rows,
    "grouped_mm": _expert_rows,
    "grouped_mm_into": _expert_rows,
    "grouped_outer": _expert_weights,
    "convolution": _convolve,
    "convolution_backward": _convolve_back,
}
"""Products by the name of the operation."""
