"""fp8 weights with one scale per block, the format of DeepSeek-V3. Does not import torch.

Tensor X has the scales X_scale_inv, one factor per block of BLOCK_SIZE x BLOCK_SIZE elements. The
last blocks of rows and columns may be smaller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moesaic.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

QUANTIZATION_KEY = "quantization_config"
"""Key of config.json for the storage format of weights."""
BLOCK_SIZE = 128
DTYPE = "F8_E4M3"
"""Name of the dtype in a safetensors header."""

_FIXED: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE], "expert_dtype": "fp8",
}  # fmt: skip
_REQUIRED = ("quant_method", "weight_block_size")
_IGNORED_KEYS = (
    "dequantize", "ignored_layers", "modules_to_convert", "modules_to_not_convert", "scale_fmt",
)  # fmt: skip
"""Keys that the tensors already answer, or that concern fp8 matmuls."""


def check_scheme(scheme: object, origin: str) -> None:
    """Raise unless `scheme`, the value of `QUANTIZATION_KEY`, describes the supported format."""
    remedy = "fetch the model in bf16, or dequantise it with the library that wrote it"
    if not isinstance(scheme, Mapping):
        raise ConfigError(
            f"{origin}: {QUANTIZATION_KEY} = {json.dumps(scheme)} is no table: {remedy}"
        )
    for key in (*_REQUIRED, *scheme):
        value, supported = scheme.get(key), _FIXED.get(key)
        is_optional = value is None and key not in _REQUIRED
        if value != supported and not is_optional and key not in _IGNORED_KEYS:
            raise ConfigError(
                f"{origin}: {QUANTIZATION_KEY}.{key} = {json.dumps(value)} is not supported: "
                f"only {json.dumps(supported)} is; {remedy}"
            )


def scale_name(tensor: str) -> str:
    """Return the name of the scales of `tensor`."""
    return f"{tensor}_scale_inv"


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales: one per block of the last two dimensions of `shape`."""
    return (*shape[:-2], *(-(-extent // BLOCK_SIZE) for extent in shape[-2:]))


def scale_box(box: Sequence[slice]) -> tuple[slice, ...]:
    """Return the box of scales for the elements in `box` of a tensor."""
    blocks = (slice(s.start // BLOCK_SIZE, -(-s.stop // BLOCK_SIZE)) for s in box[-2:])
    return (*box[:-2], *blocks)


def dequantise(part: Tensor, scales: Tensor, box: Sequence[slice]) -> Tensor:
    """Return the elements in `box` of a tensor as fp32.

    Args:
        part: the fp8 values of the box.
        scales: the scales of `scale_box(box)`.
        box: the box, one slice per dimension.
    """
    result = part.float()
    rows, columns = box[-2:]
    offset = columns.start % BLOCK_SIZE
    for block in range(scales.shape[-2]):
        start = max(rows.start, (rows.start // BLOCK_SIZE + block) * BLOCK_SIZE) - rows.start
        stop = min(rows.stop, (rows.start // BLOCK_SIZE + block + 1) * BLOCK_SIZE) - rows.start
        factors = scales[..., block : block + 1, :].float().repeat_interleave(BLOCK_SIZE, dim=-1)
        result[..., start:stop, :] *= factors[..., offset : offset + columns.stop - columns.start]
    return result
