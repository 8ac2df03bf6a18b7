"""AdamW whose moments take two bytes an element, or one; vectors keep theirs as they are.

A few rows of a matrix at a time are widened, updated by the kernel of all AdamW, and narrowed again
while they are in the cache. Narrowing rounds at random, up or down with odds that keep the mean:
with decays near one an update changes a moment by less than half a step of a narrow type, and
rounding to the nearest would lose it every time. The draws are a function of seed, name, update and
place in the logical tensor, so that every layout rounds alike.

Eight bits are block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization"): blocks of a row share a scale, the largest magnitude, and codes are fine near it and
reach seven decades below it. Of the second moment it is the root that is kept: that is what the
update divides by, its range is half as many decades, and where it was not zero it stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.state import (
    FIRST_CODES,
    FIRST_MOMENT,
    FIRST_SCALES,
    PARAMETER,
    ROOT_CODES,
    ROOT_SCALES,
    SECOND_MOMENT,
    Piece,
)
from moesaic.facts.job import OptimizerConfig
from moesaic.facts.job.train import MOMENT_BLOCK
from moesaic.facts.workload.sizes import GPU_MOMENT_CHUNK, MOMENT_CHUNK
from moesaic.models.pieces import Held
from moesaic.nn.randomness import bits
from moesaic.train.optim import AdamW, Stretch

_LOW = 0xFFFF
_KEY_SHIFT = 15
"""Bits of an fp32 number that tables of levels do not look at."""


class Format(Protocol):
    """How the two moments of a matrix are kept."""

    def zeros(self, values: Piece) -> tuple[Tensor, ...]:
        """What is kept of moments that are zero."""

    def pieces(self, values: Piece, kept: Sequence[Tensor]) -> Iterator[Piece]:
        """What is kept as pieces of state."""

    def widen(self, kept: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both moments of some rows."""

    def narrow(self, first: Tensor, second: Tensor, kept: Sequence[Tensor], draws: Tensor) -> None:
        """Write both moments of some rows, rounded by 32 random bits an element."""


class NarrowAdamW(AdamW):
    """AdamW over matrices whose moments are narrow, by logical name."""

    def __init__(self, config: OptimizerConfig, seed: int, device: torch.device) -> None:
        super().__init__(config)
        self._seed = seed
        self._format: Format = HalfMoments() if config.moments == "bf16" else ByteMoments(device)
        self._elements = MOMENT_CHUNK if device.type == "cpu" else GPU_MOMENT_CHUNK

    def hold(self, stretch: Stretch, rank: int) -> None:
        """Create zero moments for parameters as `rank` holds them."""
        if not stretch.decays:
            super().hold(stretch, rank)
            return
        for item in stretch.items:
            for values in item.pieces(PARAMETER, item.local, rank):
                self.moments[values.name] = self._format.zeros(values)

    def pieces(self, item: Held, rank: int) -> Iterator[Piece]:
        """A parameter's moments as pieces of state."""
        if not item.decays:
            yield from super().pieces(item, rank)
            return
        for values in item.pieces(PARAMETER, item.local, rank):
            yield from self._format.pieces(values, self.moments[values.name])

    def apply(
        self, some: Sequence[Stretch], rank: int, step: int, *, lr: float, clip: float
    ) -> None:
        """Update a block, or some of it, by its gradients, in place: matrices one by one."""
        super().apply([one for one in some if not one.decays], rank, step, lr=lr, clip=clip)
        for item in (item for one in some if one.decays for item in one.items):
            grads = item.pieces(PARAMETER, item.grad, rank)
            for values, grad in zip(item.pieces(PARAMETER, item.local, rank), grads, strict=True):
                self.update_matrix(values, grad.tensor, step, lr=lr, clip=clip)

    @torch.no_grad()
    def update_matrix(
        self, values: Piece, grad: Tensor, step: int, *, lr: float, clip: float
    ) -> None:
        """As `update`, of a matrix."""
        kept, tensor = self.moments[values.name], values.tensor
        rows = max(self._elements // max(tensor.shape[1], 1), 1)
        for start in range(0, len(tensor), rows):
            part = slice(start, start + rows)
            stored = [one[part] for one in kept]
            moments = self._format.widen(stored, tensor.dtype)
            self.update([tensor[part]], [grad[part]], [moments], step, lr=lr, clip=clip, decay=True)
            places = _places(values, start, len(stored[0]))
            draws = bits(self._seed, f"moments {values.name}", step, places)
            self._format.narrow(*moments, stored, draws)


def _places(values: Piece, start: int, rows: int) -> Tensor:
    """Where in the logical tensor each element of some rows stands, modulo 2^32, in int32."""
    device, (first_row, first_column) = values.tensor.device, values.offset
    row = torch.arange(rows, device=device) + (first_row + start)
    column = torch.arange(values.tensor.shape[1], device=device) + first_column
    return (row[:, None] * values.shape[1]).int() + column.int()


class HalfMoments:
    """Both in bfloat16."""

    def zeros(self, values: Piece) -> tuple[Tensor, Tensor]:
        """As many as values."""
        first = torch.zeros_like(values.tensor, dtype=torch.bfloat16)
        return first, torch.zeros_like(first)

    def pieces(self, values: Piece, kept: Sequence[Tensor]) -> Iterator[Piece]:
        """Of the boxes of their values."""
        for kind, tensor in zip((FIRST_MOMENT, SECOND_MOMENT), kept, strict=True):
            yield Piece(kind, values.name, values.shape, values.offset, tensor, values.owners)

    def widen(self, kept: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same numbers."""
        first, second = kept
        return first.to(dtype), second.to(dtype)

    def narrow(self, first: Tensor, second: Tensor, kept: Sequence[Tensor], draws: Tensor) -> None:
        """The bits that a bfloat16 has no place for carry over if the draw makes them."""
        for wide, narrow, draw in zip((first, second), kept, (draws, draws >> 16), strict=True):
            raw = wide.float().view(torch.int32)
            rounded = (raw + (draw & _LOW)) & ~_LOW
            narrow.copy_(rounded.view(torch.float32))


class ByteMoments:
    """Codes of eight bits, and scales by block."""

    def __init__(self, device: torch.device) -> None:
        self._signed = Levels.of(dynamic_levels(signed=True), device)
        self._unsigned = Levels.of(dynamic_levels(signed=False), device)

    def zeros(self, values: Piece) -> tuple[Tensor, ...]:
        """Codes in the boxes of values, scales in boxes of blocks, none of which is cut."""
        (_, first), (rows, columns) = values.offset, values.tensor.shape
        end = first + columns
        assert not first % MOMENT_BLOCK, values.name
        assert not end % MOMENT_BLOCK or end == values.shape[1], values.name
        blocks, device = -(-columns // MOMENT_BLOCK), values.tensor.device
        codes = torch.zeros_like(values.tensor, dtype=torch.int8)
        scales = torch.zeros(rows, blocks, device=device)
        return codes, scales, torch.zeros_like(codes, dtype=torch.uint8), torch.zeros_like(scales)

    def pieces(self, values: Piece, kept: Sequence[Tensor]) -> Iterator[Piece]:
        """Scales are tensors of their own logical shape."""
        (row, column), (rows, columns) = values.offset, values.shape
        blocks = (rows, -(-columns // MOMENT_BLOCK)), (row, column // MOMENT_BLOCK)
        boxes = ((values.shape, values.offset), blocks) * 2
        kinds = (FIRST_CODES, FIRST_SCALES, ROOT_CODES, ROOT_SCALES)
        for kind, tensor, (shape, offset) in zip(kinds, kept, boxes, strict=True):
            yield Piece(kind, values.name, shape, offset, tensor, values.owners)

    def widen(self, kept: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What codes stand for."""
        first_codes, first_scales, root_codes, root_scales = kept
        magnitudes = dequantise(first_codes.abs(), first_scales, self._signed)
        root = dequantise(root_codes, root_scales, self._unsigned)
        return (magnitudes * first_codes.sign()).to(dtype), root.square_().to(dtype)

    def narrow(self, first: Tensor, second: Tensor, kept: Sequence[Tensor], draws: Tensor) -> None:
        """Codes by chance the one below or above; scales anew."""
        first_codes, first_scales, root_codes, root_scales = kept
        first, root = first.float(), second.float().sqrt()
        codes = quantise(first.abs(), first_scales, self._signed, draws)
        first_codes.copy_(codes * first.sign())
        codes = quantise(root, root_scales, self._unsigned, draws >> 16)
        root_codes.copy_(torch.maximum(codes, root > 0))


def dynamic_levels(*, signed: bool) -> Tensor:
    """What the codes 0, 1, ... stand for, from 0 to 1: magnitudes of signed numbers have 128.

    Below a tenth to the n there are half as many as below a tenth to the n - 1: middles of equal
    parts of a decade. The largest is 1, so that the largest number of a block is exact.
    """
    found, width = [0.0], 7 if signed else 8
    for decade in range(6, -1, -1):
        parts = 1 << (width - 1 - decade)
        found += [10.0**-decade * (0.1 + 0.9 * (n + 0.5) / parts) for n in range(parts)]
    if signed:
        found.pop()
    return torch.tensor([*found, 1.0])


@dataclass(frozen=True)
class Levels:
    """What the codes of magnitudes stand for, and tables that spare a search among them."""

    values: Tensor
    nexts: Tensor
    """The level after each; infinite after the last."""
    gaps: Tensor
    """From each level to the next; none from the last."""
    starts: Tensor
    """The code at or below the least number of each `_key`: of all such numbers it is that one or
    the next, because no two levels have one key."""

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> Levels:
        """The tables of `values`."""
        keys = torch.arange(int(_key(torch.ones(1))) + 1, dtype=torch.int32)
        least = (keys << _KEY_SHIFT).view(torch.float32)
        starts = torch.bucketize(least, values, right=True, out_int32=True) - 1
        nexts = F.pad(values[1:], (0, 1), value=torch.inf)
        gaps = F.pad(values.diff(), (0, 1))
        return cls(*(table.to(device) for table in (values, nexts, gaps, starts)))

    def below(self, shares: Tensor) -> Tensor:
        """Codes of the largest levels that are not above `shares`, which are from 0 to 1."""
        start = _look_up(self.starts, _key(shares))
        return start.add_(shares >= _look_up(self.nexts, start))


def _key(shares: Tensor) -> Tensor:
    """The exponent of fp32 numbers and eight bits of their mantissa."""
    return shares.view(torch.int32) >> _KEY_SHIFT


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten()).view(codes.shape)


def dequantise(codes: Tensor, scales: Tensor, levels: Levels) -> Tensor:
    """What `codes` [rows, columns] stand for, in fp32."""
    found = _look_up(levels.values, codes.int())
    return found.mul_(_spread(scales, codes.shape[1]))


def quantise(values: Tensor, scales: Tensor, levels: Levels, draws: Tensor) -> Tensor:
    """Codes of `values` [rows, columns], none below zero; writes the scales of their blocks.

    A number between two levels takes the one or the other by the low 12 bits of its draw; on a
    level it stays, whatever is drawn and for all rounding of the division by its scale.
    """
    columns = values.shape[1]
    rest = -columns % MOMENT_BLOCK
    padded = F.pad(values, (0, rest)) if rest else values
    torch.amax(padded.unflatten(1, (-1, MOMENT_BLOCK)), dim=2, out=scales)
    least = torch.finfo(torch.float32).tiny
    shares = values / _spread(scales.clamp(min=least), columns)
    below = levels.below(shares)
    threshold = ((draws & 0xFFF) + 0.5).mul_(2.0**-12).mul_(_look_up(levels.gaps, below))
    return below.add_(shares.sub_(_look_up(levels.values, below)) > threshold)


def _spread(scales: Tensor, columns: int) -> Tensor:
    return scales.repeat_interleave(MOMENT_BLOCK, dim=1)[:, :columns]
