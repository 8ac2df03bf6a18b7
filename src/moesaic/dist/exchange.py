"""Rows from rank to rank of a group, and what carries them there."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Rows on their way."""

    def wait(self) -> object:
        """Return when they have arrived."""


class Carrier(Protocol):
    """Carries rows between the ranks of a group; all of them ask for the same, in one order."""

    name: str
    """What a person calls it."""
    group: dist.ProcessGroup

    def start(self, rows: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Work]:
        """Launch `send[i]` consecutive rows to rank i of the group; zero is allowed.

        What arrives, by rank, may be read when the work has been waited for; `rows` may be written
        to from then on.
        """

    def close(self) -> None:
        """Let go of what it holds."""


class ByGroup:
    """Leaves it to the group's own all-to-all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name: str = dist.get_backend(group)

    def start(self, rows: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Work]:
        """As `Carrier` says."""
        result = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(
            result, rows.contiguous(), receive, send, group=self.group, async_op=True
        )
        assert work is not None
        return result, work

    def close(self) -> None:
        """Nothing is held."""


class Exchange(torch.autograd.Function):
    """Rows to ranks, as a carrier takes them: `send[i]` consecutive ones to rank i.

    The exchange is launched and not awaited; whoever reads the result first calls `wait` on the
    work that was appended to `works`. Its backward is the exchange in the other direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        carrier: Carrier,
        works: list[Work],
    ) -> Tensor:
        """Launch the exchange."""
        ctx.send, ctx.receive, ctx.carrier = send, receive, carrier
        result, work = carrier.start(rows, send, receive)
        works.append(work)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Send every row's gradient back to where the row came from."""
        result, work = ctx.carrier.start(grads[0], ctx.receive, ctx.send)
        work.wait()
        return result, None, None, None, None
