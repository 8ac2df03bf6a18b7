"""Weights in eight bits with one scale a block, as DeepSeek-V3 and others are published.

Beside a tensor X of such numbers lies X_scale_inv: what each block of BLOCK by BLOCK of them is
multiplied by; the last blocks of rows and columns may be narrower. Torch is not imported here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moesaic.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SCHEME = "quantization_config"
"""The key of config.json that says how weights are stored."""
BLOCK = 128
DTYPE = "F8_E4M3"
"""How the header of a file calls the numbers."""

_FIXED: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK], "expert_dtype": "fp8",
}  # fmt: skip
_REQUIRED = ("quant_method", "weight_block_size")
_FREE = (
    "dequantize", "ignored_layers", "modules_to_convert", "modules_to_not_convert", "scale_fmt",
)  # fmt: skip
"""Keys that the tensors themselves answer, or that speak of products in eight bits."""


def check_scheme(scheme: object, origin: str) -> None:
    """Raise unless `scheme`, the value of SCHEME, means what is read here."""
    remedy = "fetch the model in bf16, or dequantise it with the library that wrote it"
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"{origin}: {SCHEME} = {json.dumps(scheme)} is no table: {remedy}")
    for key in (*_REQUIRED, *scheme):
        value, only = scheme.get(key), _FIXED.get(key)
        left_out = value is None and key not in _REQUIRED
        if value != only and not left_out and key not in _FREE:
            raise ConfigError(
                f"{origin}: {SCHEME}.{key} = {json.dumps(value)} is not supported: "
                f"only {json.dumps(only)} is; {remedy}"
            )


def scale_name(tensor: str) -> str:
    """The name of the scales of `tensor`."""
    return f"{tensor}_scale_inv"


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape`, one a block of its last two dimensions."""
    return (*shape[:-2], *(-(-extent // BLOCK) for extent in shape[-2:]))


def scale_box(box: Sequence[slice]) -> tuple[slice, ...]:
    """The scales that the elements in `box` of a tensor need."""
    blocks = (slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in box[-2:])
    return (*box[:-2], *blocks)


def dequantise(part: Tensor, scales: Tensor, box: Sequence[slice]) -> Tensor:
    """The elements in `box` of a tensor, from their eight bits and the scales of `scale_box`.

    One fp32 product an element, a row of blocks at a time.
    """
    result = part.float()
    rows, columns = box[-2:]
    first = columns.start % BLOCK
    for block in range(scales.shape[-2]):
        start = max(rows.start, (rows.start // BLOCK + block) * BLOCK) - rows.start
        stop = min(rows.stop, (rows.start // BLOCK + block + 1) * BLOCK) - rows.start
        wide = scales[..., block : block + 1, :].float().repeat_interleave(BLOCK, dim=-1)
        result[..., start:stop, :] *= wide[..., first : first + columns.stop - columns.start]
    return result
