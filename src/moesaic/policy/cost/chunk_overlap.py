"""Order of events for an expert layer whose tokens travel in chunks.

While experts compute one chunk, the next chunk arrives and the results of the previous one return.
Backward does the same for gradients, in the opposite direction. With `overlap_local`, local tokens
are computed separately: before, between and after chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from moesaic.facts.workload import EXPERTS, RESULTS, TOKENS
from moesaic.policy.cost.event import AsyncMessage, Event

ChunkExchanges = list[list[Event]]
"""Collectives of each chunk, one per exchange step."""


def interleave_chunks(
    compute: Sequence[Event],
    collectives: Sequence[Event],
    shape: tuple[int, int],
    overlaps: Callable[[Event], bool],
    *,
    local_first: bool = False,
) -> Iterator[Event]:
    """Yield the events of one pass of a block, with exchanges overlapped by expert computing.

    Args:
        compute: operations in order; those of experts chunk by chunk.
        collectives: collectives in order; exchanges chunk by chunk.
        shape: number of chunks, and exchange steps per chunk.
        overlaps: whether a collective runs while its ranks compute.
        local_first: whether experts also compute local tokens before, between and after chunks.
    """
    pending, num_ops = deque(collectives), shape[0] + (shape[0] + 1) * local_first
    for is_experts, run in groupby(compute, lambda event: event.name == EXPERTS):
        ops = list(run)
        while is_experts and len(ops) >= num_ops:
            chunk_ops, ops = ops[:num_ops], ops[num_ops:]
            while pending and not _is_exchange(pending[0]):
                yield pending.popleft()
            incoming = _pop_exchange(pending, shape)
            local = deque(chunk_ops[::2]) if local_first else deque[Event]()
            chunk_ops = chunk_ops[1::2] if local_first else chunk_ops
            yield from _interleave_experts(
                chunk_ops, incoming, _pop_exchange(pending, shape), overlaps, local
            )
        yield from ops
    yield from pending


def _is_exchange(event: Event) -> bool:
    return event.name in (TOKENS, RESULTS)


def _pop_exchange(pending: deque[Event], shape: tuple[int, int]) -> ChunkExchanges:
    """Remove and return the next exchange of `pending`, if any; other collectives stay."""
    num_chunks, num_steps = shape
    exchange = [event for event in pending if _is_exchange(event)][: num_chunks * num_steps]
    for event in exchange:
        pending.remove(event)
    return [exchange[at : at + num_steps] for at in range(0, len(exchange), num_steps)]


def _interleave_experts(
    ops: Sequence[Event],
    incoming: ChunkExchanges,
    outgoing: ChunkExchanges,
    overlaps: Callable[[Event], bool],
    local: deque[Event],
) -> Iterator[Event]:
    """Yield the expert operations with their exchanges.

    Only the first step of an incoming exchange and the last step of an outgoing one are overlapped.
    """
    in_flight = list[Event]()  # Incoming chunks whose first step has been launched.
    sent: AsyncMessage | None = None

    def launch(event: Event) -> Event:
        return replace(event, launches=AsyncMessage()) if overlaps(event) else event

    for at, op in enumerate(ops):
        if incoming and not at:
            in_flight.append(launch(incoming[0][0]))
            yield in_flight[0]
        if local:
            yield local.popleft()
        arrived = in_flight[at].launches if incoming else None
        if arrived is not None:
            yield _wait_event(op, arrived)
        yield from (_without_channels(event) for event in (incoming[at][1:] if incoming else ()))
        if incoming[at + 1 :]:
            in_flight.append(launch(incoming[at + 1][0]))
            yield in_flight[-1]
        yield op
        if sent is not None:
            yield _wait_event(op, sent)
        if outgoing:
            *earlier, last = outgoing[at]
            last = launch(last)
            sent = last.launches
            yield from (*map(_without_channels, earlier), last)
    yield from local
    if sent is not None:
        yield _wait_event(ops[-1], sent)


def _without_channels(event: Event) -> Event:
    """Return a collective inside hosts, which does not wait for those between hosts."""
    return replace(event, channels=())


def _wait_event(op: Event, message: AsyncMessage) -> Event:
    """Return an event that only waits for `message`."""
    return Event(EXPERTS, op.phase, op.block, np.zeros_like(op.seconds), waits_for=message)
