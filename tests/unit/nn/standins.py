"""What kernels of our own are to do, in torch, adding up in fp32: right in any type, and quick."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install(tiles: Any, patch: Any) -> None:
    """Have them in the kernels' places, all slots in one launch, as on a GPU."""
    for one in ALL:
        patch.setattr(tiles, one.__name__, one)
    patch.setattr("moesaic.nn.shares._SHARE_BYTES", 1 << 44)


def _by_slot(counts: Tensor) -> Iterator[tuple[int, slice]]:
    end = 0
    for slot, rows in enumerate(counts.tolist()):
        yield slot, slice(end, end + rows)
        end += rows


def grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor, *, eight: bool
) -> None:
    del eight
    narrow = weight.to(rows.dtype).float()
    for slot, part in _by_slot(counts):
        matrix = narrow[slot].T if transposed else narrow[slot]
        out[part] = (rows[part].float() @ matrix).to(out.dtype)


def grouped_gated(
    rows: Tensor, gate_up: Tensor, counts: Tensor, inner: Tensor | None, activated: Tensor,
    *, eight: bool,
) -> None:  # fmt: skip
    own = rows.new_empty((len(rows), gate_up.shape[1])) if inner is None else inner
    grouped_mm(rows, gate_up, counts, True, own, eight=eight)
    activated.copy_(activate(own))


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
    for slot, part in _by_slot(counts):
        found = left[part].float().T @ right[part].float()
        out[slot] = (found + out[slot].float() if added else found).to(out.dtype)


def activate(inner: Tensor) -> Tensor:
    gate, up = inner.float().chunk(2, 1)
    return (F.silu(gate) * up).to(inner.dtype)


def gated_back(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, of_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    gate, up = inner.float().chunk(2, 1)
    odds, wide = gate.sigmoid(), grad.float()
    silu = gate * odds
    each = torch.ones(len(grad), 1, device=grad.device)
    if weights is not None and of_weights is not None:
        each = weights[order].float()[:, None]
        of_weights[order] = (wide * silu * up).sum(1).to(of_weights.dtype)
    wide = wide * each
    parts = torch.cat([wide * up * (odds + silu * (1 - odds)), wide * silu], 1)
    return parts.to(inner.dtype), (silu * up * each).to(grad.dtype)


def copies(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    return tokens[order // choices]


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    each = torch.ones(places.shape, device=rows.device) if weights is None else weights.float()
    return (rows.float()[places] * each[..., None]).sum(1).to(rows.dtype)


def sort(slots: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    order = slots.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=slots.device)
    return slots.bincount(minlength=number), order, rows


ALL = (grouped_mm, grouped_gated, grouped_outer, activate, gated_back, copies, add_up, sort)
