"""AdamW that stores moments of matrices in two bytes or one byte per element; vectors keep full
moments.

A few rows at a time are decoded, updated by AdamW's fused kernel and encoded again while they are
in cache. Encoding rounds stochastically, which keeps the mean. With decays near one, an update
changes a moment by less than half a step of a low-bit type. Rounding to nearest would lose it. The
random bits are a function of seed, name, update and position in the logical tensor, so every layout
rounds alike.

The 8-bit format is block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization"). Blocks of a row share a scale, their largest magnitude. Codes are dense
near it and reach seven decades below it. The second moment is stored as its square root, by which
the update divides. The root spans half as many decades, and a nonzero root never becomes zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.state import (
    FIRST_CODES,
    FIRST_MOMENT,
    FIRST_SCALES,
    ROOT_CODES,
    ROOT_SCALES,
    SECOND_MOMENT,
    TensorShard,
)
from moesaic.facts.job import OptimizerConfig
from moesaic.facts.job.train import MOMENT_BLOCK
from moesaic.facts.workload.sizes import GPU_MOMENT_CHUNK, MOMENT_CHUNK
from moesaic.kernels.randomness import bits
from moesaic.models.state import LocalParam
from moesaic.train.optim import AdamW, FlatParams

_LOW_16_BITS = 0xFFFF
_KEY_SHIFT = 15
"""Low bits of an fp32 number that lookup tables ignore."""


class LowBitAdamW(AdamW):
    """AdamW with low-bit moments of matrices, by logical name."""

    def __init__(
        self, config: OptimizerConfig, seed: int, device: torch.device, prefix: str = ""
    ) -> None:
        """Create the optimizer of the part with this `prefix`, which sets its random bits apart."""
        super().__init__(config)
        self._seed, self._prefix = seed, prefix
        self._format: BF16Moments | EightBitMoments = (
            BF16Moments(device) if config.moments == "bf16" else EightBitMoments(device)
        )
        self._chunk_elements = MOMENT_CHUNK if device.type == "cpu" else GPU_MOMENT_CHUNK

    def init_moments(self, flat_params: FlatParams, rank: int) -> None:
        """Create zero moments for the parameters as `rank` stores them."""
        if not flat_params.has_weight_decay:
            super().init_moments(flat_params, rank)
            return
        for item in flat_params.params:
            for values in item.parameter_shards(rank):
                self.moments[values.name] = self._format.zeros(values)

    def moment_shards(self, param: LocalParam, rank: int) -> Iterator[TensorShard]:
        """Yield a parameter's moments as state shards."""
        if not param.has_weight_decay:
            yield from super().moment_shards(param, rank)
            return
        for values in param.parameter_shards(rank):
            yield from self._format.shards(values, self.moments[values.name])

    def update_block(
        self, flat_params: Sequence[FlatParams], rank: int, step: int, *, lr: float, clip: float
    ) -> None:
        """Update parameters of a block in place by their gradients, matrices one by one."""
        super().update_block(
            [one for one in flat_params if not one.has_weight_decay], rank, step, lr=lr, clip=clip
        )
        for item in (item for one in flat_params if one.has_weight_decay for item in one.params):
            shards = zip(item.parameter_shards(rank), item.grad_shards(rank), strict=True)
            for values, lent_grad in shards:
                with lent_grad.borrow(writes=True) as grad:
                    self.update_matrix(values, grad, step, lr=lr, clip=clip)

    @torch.no_grad()
    def update_matrix(
        self, values: TensorShard, grad: Tensor, step: int, *, lr: float, clip: float
    ) -> None:
        """Apply one step to a matrix in place, a chunk of rows at a time; see `update`."""
        stored, (num_rows, columns) = self.moments[values.name], values.size
        rows = max(self._chunk_elements // max(columns, 1), 1)
        with values.borrow(writes=True) as tensor:
            for start in range(0, num_rows, rows):
                rows_slice = slice(start, start + rows)
                chunk = [moment[rows_slice] for moment in stored]
                moments = self._format.decode(chunk, tensor.dtype)
                self.update(
                    [tensor[rows_slice]],
                    [grad[rows_slice]],
                    [moments],
                    step,
                    lr=lr,
                    clip=clip,
                    decay=True,
                )
                positions = _element_indices(values, start, len(chunk[0]), tensor.device)
                purpose = f"moments {self._prefix}{values.name}"
                draws = bits(self._seed, purpose, step, positions)
                self._format.encode(*moments, chunk, draws)


def _element_indices(values: TensorShard, start: int, rows: int, device: torch.device) -> Tensor:
    """Return each element's flat position in the logical tensor, modulo 2^32, int32 [rows,
    columns]."""
    first_row, first_column = values.offset
    row = torch.arange(rows, device=device) + (first_row + start)
    column = torch.arange(values.size[1], device=device) + first_column
    return (row[:, None] * values.shape[1]).int() + column.int()


class BF16Moments:
    """Both moments in bfloat16."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, values: TensorShard) -> tuple[Tensor, Tensor]:
        """Return zero moments in the shape of the values."""
        first = torch.zeros(values.size, dtype=torch.bfloat16, device=self._device)
        return first, torch.zeros_like(first)

    def shards(self, values: TensorShard, moments: Sequence[Tensor]) -> Iterator[TensorShard]:
        """Yield moments with the shape and offset of their values."""
        for kind, tensor in zip((FIRST_MOMENT, SECOND_MOMENT), moments, strict=True):
            yield TensorShard.of_tensor(
                kind, values.name, values.shape, values.offset, tensor, values.owners
            )

    def decode(self, moments: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return both moments cast to `dtype`."""
        first, second = moments
        return first.to(dtype), second.to(dtype)

    def encode(
        self, first: Tensor, second: Tensor, moments: Sequence[Tensor], draws: Tensor
    ) -> None:
        """Add 16 random bits below bfloat16's precision, then truncate."""
        for wide, narrow, draw in zip((first, second), moments, (draws, draws >> 16), strict=True):
            raw = wide.float().view(torch.int32)
            rounded = (raw + (draw & _LOW_16_BITS)) & ~_LOW_16_BITS
            narrow.copy_(rounded.view(torch.float32))


class EightBitMoments:
    """8-bit codes, with one fp32 scale per block of a row."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._signed = Codebook.from_values(dynamic_codebook(signed=True), device)
        self._unsigned = Codebook.from_values(dynamic_codebook(signed=False), device)

    def zeros(self, values: TensorShard) -> tuple[Tensor, ...]:
        """Return zero codes in the shape of the values and zero scales per block. A shard must not
        cut a block."""
        (_, first), (rows, columns) = values.offset, values.size
        end = first + columns
        assert not first % MOMENT_BLOCK, values.name
        assert not end % MOMENT_BLOCK or end == values.shape[1], values.name
        blocks = -(-columns // MOMENT_BLOCK)
        codes = torch.zeros(values.size, dtype=torch.int8, device=self._device)
        scales = torch.zeros(rows, blocks, device=self._device)
        return codes, scales, torch.zeros_like(codes, dtype=torch.uint8), torch.zeros_like(scales)

    def shards(self, values: TensorShard, moments: Sequence[Tensor]) -> Iterator[TensorShard]:
        """Yield codes like their values, and scales with blocks for columns."""
        (row, column), (rows, columns) = values.offset, values.shape
        blocks = (rows, -(-columns // MOMENT_BLOCK)), (row, column // MOMENT_BLOCK)
        boxes = ((values.shape, values.offset), blocks) * 2
        kinds = (FIRST_CODES, FIRST_SCALES, ROOT_CODES, ROOT_SCALES)
        for kind, tensor, (shape, offset) in zip(kinds, moments, boxes, strict=True):
            yield TensorShard.of_tensor(kind, values.name, shape, offset, tensor, values.owners)

    def decode(self, moments: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the values that the codes and scales represent."""
        first_codes, first_scales, root_codes, root_scales = moments
        magnitudes = dequantise(first_codes.abs(), first_scales, self._signed)
        root = dequantise(root_codes, root_scales, self._unsigned)
        return (magnitudes * first_codes.sign()).to(dtype), root.square_().to(dtype)

    def encode(
        self, first: Tensor, second: Tensor, moments: Sequence[Tensor], draws: Tensor
    ) -> None:
        """Write new scales, and codes rounded at random to a neighbour."""
        first_codes, first_scales, root_codes, root_scales = moments
        first, root = first.float(), second.float().sqrt()
        codes = quantise(first.abs(), first_scales, self._signed, draws)
        first_codes.copy_(codes * first.sign())
        codes = quantise(root, root_scales, self._unsigned, draws >> 16)
        root_codes.copy_(torch.maximum(codes, root > 0))


def dynamic_codebook(*, signed: bool) -> Tensor:
    """Return the values of codes 0, 1, ... in [0, 1]: 128 magnitudes if `signed`, else 256.

    Each decade further down has half as many levels, at the midpoints of equal parts of the decade.
    The largest level is 1, so the largest number of a block is exact.
    """
    values, width = [0.0], 7 if signed else 8
    for decade in range(6, -1, -1):
        parts = 1 << (width - 1 - decade)
        values += [10.0**-decade * (0.1 + 0.9 * (n + 0.5) / parts) for n in range(parts)]
    if signed:
        values.pop()
    return torch.tensor([*values, 1.0])


@dataclass(frozen=True)
class Codebook:
    """Values of magnitude codes, with lookup tables that replace a search."""

    values: Tensor
    next_values: Tensor
    """Next larger value of each code; infinite for the last."""
    gaps: Tensor
    """Difference to the next value; 0 for the last."""
    lowest_codes: Tensor
    """Code at or below the smallest number of each `_table_key`. Any number with this key has that
    code or the next, because no two values share a key."""

    @classmethod
    def from_values(cls, values: Tensor, device: torch.device) -> Codebook:
        """Build the tables of `values` on `device`."""
        keys = torch.arange(int(_table_key(torch.ones(1))) + 1, dtype=torch.int32)
        least = (keys << _KEY_SHIFT).view(torch.float32)
        starts = torch.bucketize(least, values, right=True, out_int32=True) - 1
        nexts = F.pad(values[1:], (0, 1), value=torch.inf)
        gaps = F.pad(values.diff(), (0, 1))
        return cls(*(table.to(device) for table in (values, nexts, gaps, starts)))

    def lower_codes(self, shares: Tensor) -> Tensor:
        """Return the codes of the largest values not above `shares`, which are in [0, 1]."""
        codes = _look_up(self.lowest_codes, _table_key(shares))
        return codes.add_(shares >= _look_up(self.next_values, codes))


def _table_key(shares: Tensor) -> Tensor:
    """Return the exponent and the upper eight mantissa bits of non-negative fp32 numbers."""
    return shares.view(torch.int32) >> _KEY_SHIFT


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten()).view(codes.shape)


def dequantise(codes: Tensor, scales: Tensor, codebook: Codebook) -> Tensor:
    """Return the fp32 values of `codes` [rows, columns]."""
    decoded = _look_up(codebook.values, codes.int())
    return decoded.mul_(_expand_scales(scales, codes.shape[1]))


def quantise(values: Tensor, scales: Tensor, codebook: Codebook, draws: Tensor) -> Tensor:
    """Return the codes of non-negative `values` [rows, columns] and write the scales of their
    blocks.

    The low 12 bits of its draw decide if a number between two levels takes the lower or the upper.
    A number on a level keeps it for any draw, whatever the division by the scale rounds.
    """
    columns = values.shape[1]
    padding = -columns % MOMENT_BLOCK
    padded = F.pad(values, (0, padding)) if padding else values
    torch.amax(padded.unflatten(1, (-1, MOMENT_BLOCK)), dim=2, out=scales)
    smallest = torch.finfo(torch.float32).tiny
    shares = values / _expand_scales(scales.clamp(min=smallest), columns)
    codes = codebook.lower_codes(shares)
    threshold = ((draws & 0xFFF) + 0.5).mul_(2.0**-12).mul_(_look_up(codebook.gaps, codes))
    return codes.add_(shares.sub_(_look_up(codebook.values, codes)) > threshold)


def _expand_scales(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(MOMENT_BLOCK, dim=1)[:, :columns]
