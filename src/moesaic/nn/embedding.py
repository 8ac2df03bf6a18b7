"""Embedding bags over rows that are looked up by key: a table, or a parameter.

`TableBag` stands where `nn.EmbeddingBag(mode="sum")` stood. Gradients do not reach a parameter:
backward pushes them to the rows, which update themselves.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moesaic.base.errors import ConfigError


class RowSums(Protocol):
    """Sums of rows that a batch has looked up."""

    sums: NDArray[Any]
    """Sums of rows, [bags, dim]."""

    def push(self, grad_sums: NDArray[Any], clicks: NDArray[np.float32] | None = None) -> None:
        """Collect the gradients of `sums` for the next step; clicks are per bag."""


class Rows(Protocol):
    """Embedding rows by key."""

    dim: int
    """Numbers of a row."""

    def look_up(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64], *, training: bool
    ) -> RowSums:
        """Return the sums of rows; bag b holds the keys from offsets[b] to offsets[b + 1]."""

    def step(self) -> None:
        """Update rows by all gradients collected since the last step."""


class ParameterRows:
    """Rows of a parameter, whose keys are its row numbers; its optimizer updates them."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight
        """Rows, [rows, dim]."""
        self.dim = weight.shape[1]

    def look_up(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64], *, training: bool
    ) -> _ParameterSums:
        """Return the sums of rows in bags."""
        return _ParameterSums(self.weight, keys, offsets)

    def step(self) -> None:
        """Do nothing: gradients are in `weight.grad`, for its optimizer."""


class _ParameterSums:
    """Sums of rows of a parameter, and the way of gradients back to it."""

    def __init__(
        self, weight: nn.Parameter, keys: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> None:
        with torch.enable_grad():
            self._sums = nn.functional.embedding_bag(
                torch.from_numpy(keys), weight, torch.from_numpy(offsets), mode="sum",
                include_last_offset=True,
            )  # fmt: skip
        self.sums: NDArray[Any] = self._sums.detach().numpy()

    def push(self, grad_sums: NDArray[Any], clicks: NDArray[np.float32] | None = None) -> None:
        """Add gradients to those of the parameter."""
        self._sums.backward(torch.from_numpy(grad_sums))


class TableBag(nn.Module):
    """Sums of embedding rows in bags of keys."""

    def __init__(
        self, rows: Rows, *, fused: bool = False, include_last_offset: bool = False
    ) -> None:
        """Make a module over rows.

        Args:
            rows: rows that this module looks up.
            fused: True updates rows in backward; otherwise call `rows.step()` after backward.
            include_last_offset: True if `offsets` end with the number of keys.
        """
        super().__init__()
        self.rows, self.fused, self.include_last_offset = rows, fused, include_last_offset

    def forward(
        self, keys: Tensor, offsets: Tensor | None = None, *, clicks: Tensor | None = None
    ) -> Tensor:
        """Return the sums of rows, [bags, dim]; an empty bag has zeros.

        Args:
            keys: int64 keys, [keys] with `offsets`, or [bags, keys of a bag] without.
            offsets: first key of each bag; see `include_last_offset`.
            clicks: 1 for each bag of a clicked sample, [bags]; None: none was clicked.
        """
        flat, ends = self._as_bags(keys, offsets)
        training = torch.is_grad_enabled()
        lookup = self.rows.look_up(flat.numpy(), ends.numpy(), training=training)
        root = torch.zeros(0, requires_grad=training)  # Makes autograd call backward.
        labels = None if clicks is None else clicks.to(torch.float32).numpy()
        if labels is not None and labels.shape != (len(ends) - 1,):
            raise ConfigError(
                f"clicks have shape {labels.shape}: pass one for each of the {len(ends) - 1} bags"
            )
        sums: Tensor = _Sums.apply(root, lookup, labels, self.rows if self.fused else None)
        return sums

    def _as_bags(self, keys: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return flat keys, and offsets that end with their number."""
        for name, given in (("keys", keys), ("offsets", offsets)):
            if not isinstance(given, Tensor | None):
                raise ConfigError(f"{name} are a {type(given).__name__}: pass a torch tensor")
        if keys.dim() == 2 and offsets is None:
            bags, size = keys.shape
            return keys.reshape(-1), torch.arange(bags + 1) * size
        if keys.dim() != 1 or offsets is None:
            raise ConfigError(
                f"keys have shape {tuple(keys.shape)} and offsets are "
                f"{'missing' if offsets is None else 'given'}: pass flat keys with offsets, or "
                "keys of shape [bags, keys of a bag] without"
            )
        _check_offsets(offsets, len(keys), self.include_last_offset)
        if self.include_last_offset:
            return keys, offsets
        return keys, torch.cat([offsets, offsets.new_tensor([len(keys)])])


def _check_offsets(offsets: Tensor, num_keys: int, include_last_offset: bool) -> None:
    """Raise ConfigError unless offsets divide the keys into bags: compiled loops trust them."""
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        kind, shape = str(offsets.dtype).removeprefix("torch."), tuple(offsets.shape)
        raise ConfigError(f"offsets have the type {kind} and shape {shape}: pass int64, [bags]")
    ends = offsets if include_last_offset else nn.functional.pad(offsets, (0, 1), value=num_keys)
    if not len(ends) or ends[0] != 0 or ends[-1] != num_keys or (ends[1:] < ends[:-1]).any():
        last = f", and at the end {num_keys}" if include_last_offset else ""
        raise ConfigError(
            f"offsets {_show_fault(ends, num_keys)}, so they do not divide {num_keys} keys into "
            f"bags: pass the first key of each bag, from 0 up{last}"
        )


def _show_fault(ends: Tensor, num_keys: int) -> str:
    """Return the first fault of offsets, which end with the number of keys, in words."""
    if not len(ends):
        return "are empty"
    if ends[0] != 0:
        return f"start with {int(ends[0])}"
    falls = torch.nonzero(ends[1:] < ends[:-1])
    if len(falls):
        place = int(falls[0]) + 1
        return f"fall from {int(ends[place - 1])} to {int(ends[place])} at {place}"
    return f"end with {int(ends[-1])}, not {num_keys}"


class _Sums(torch.autograd.Function):
    """Sums of a look-up; backward pushes their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        root: Tensor,
        lookup: RowSums,
        clicks: NDArray[np.float32] | None,
        fused: Rows | None,
    ) -> Tensor:
        """Return the sums."""
        ctx.lookup, ctx.clicks, ctx.fused = lookup, clicks, fused
        return torch.from_numpy(lookup.sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        """Push the gradient of the sums to the rows."""
        ctx.lookup.push(grads[0].contiguous().numpy(), ctx.clicks)
        if ctx.fused is not None:
            ctx.fused.step()
        return None, None, None, None
