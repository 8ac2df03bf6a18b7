"""A step of a pipeline as events: each part in its own order, and what stages hand on.

All parts stand in one list. In it every part keeps its order (`facts.plan.order`), and nothing
comes before what it waits for. An event concerns the ranks of one part; what ranks of several do
together comes after the pipeline, as in any step.

What is an estimate: every backward of a micro-batch adds up an equal share of the gradients; of a
backward in two halves the first one makes all passes over memory; and what a stage hands on is held
up by what else leaves its part at that time, but by nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.facts.job.train import Schedule
from moesaic.facts.plan import Action, order
from moesaic.facts.workload import SLOTS, STEP, Block, Message, Op, Product, Work
from moesaic.policy.cost.event import PIPELINE, Event, Handover, Seconds
from moesaic.policy.cost.lanes import ORDER, Lanes

_OPENING = frozenset({"unshard", "parameters"})
"""What a stage does once before its first forward: it puts its parameters together."""
_CLOSING = frozenset({"reshard", "gradients", "copies"})
"""What a stage does once after its last backward: it adds up and shares out their gradients."""
_ADDING = frozenset({"accumulate"})
"""What backwards do, and an update tells of all of them together."""
_LAST = frozenset({"backward", "weight"})
"""Kinds of actions with which a micro-batch is done with a stage."""
_AHEAD = frozenset({"interleaved", "zero-bubble"})
"""Schedules that ask for what comes before they need it."""


@dataclass(frozen=True)
class Flow:
    """What goes through a pipeline in a step."""

    stages: Sequence[Sequence[str]]
    """Names of the blocks of each stage, as a plan has them."""
    micro_batches: int
    stream_bytes: Sequence[int]
    """What a rank hands on of a micro-batch, forward and back."""


def pipelined(
    lanes: Lanes, flow: Flow, work: Mapping[int, Sequence[Block]], alike: Mapping[int, list[int]]
) -> list[Event]:
    """One whole step.

    Args:
        lanes: ranks on a cluster.
        flow: what goes through them.
        work: blocks of the first of each kind of ranks, those of its own stages.
        alike: ranks of a part that have its work on its kind of device, by the first of them.
    """
    parts = []
    for index in range(lanes.plan.pp):
        mine = {first: same for first, same in alike.items() if lanes.plan.part(first) == index}
        rows = list(zip(*(work[first] for first in mine), strict=True))
        parts.append(Part(lanes, flow, list(mine.values()), rows))
    rest = [event for part in parts for event in part.after()]
    rest += _across(lanes, parts)
    rest.sort(key=lambda event: (ORDER.index(event.phase), bool(event.groups)))
    first = sum(event.phase == "data" for event in rest)
    return [*rest[:first], *_inside(lanes, flow, parts), *rest[first:]]


def in_turn(
    schedule: Schedule, parts: int, stages_per_part: int, micro_batches: int
) -> Iterator[Action]:
    """What all parts compute, in an order that each of them keeps and where nothing comes early."""
    last, done = parts * stages_per_part - 1, set[Action]()
    queues = [
        deque(order(schedule, parts, stages_per_part, micro_batches, part)) for part in range(parts)
    ]
    while any(queues):
        count = len(done)
        for queue in queues:
            while queue and ((before := awaited(queue[0], last)) is None or before in done):
                done.add(queue[0])
                yield queue.popleft()
        assert len(done) > count, f"parts of schedule {schedule} wait for each other"


def awaited(action: Action, last: int) -> Action | None:
    """What another stage has to hand over before `action`; `last` is the model's last stage."""
    if action.kind == "forward":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == "weight" or action.stage == last:
        return None
    return action._replace(stage=action.stage + 1)


@dataclass(frozen=True)
class Part:
    """One part: what its ranks do in a micro-batch, and once a step."""

    lanes: Lanes
    flow: Flow
    ranks: Sequence[list[int]]
    """Its ranks that have equal work, kind by kind."""
    rows: Sequence[Sequence[Block]]
    """Its blocks, each on the first of every kind."""
    _known: dict[tuple[str, int], list[Event]] = field(default_factory=dict)
    """What is the same in all micro-batches, by kind of action and stage."""

    def action(self, action: Action) -> list[Event]:
        """One action, without what comes to it before."""
        key = action.kind, action.stage
        if key not in self._known:
            self._known[key] = list(self._once(*key))
        name = f"{action.kind} {action.batch}"
        return [
            event if event.is_message else replace(event, name=name) for event in self._known[key]
        ]

    def once(self, stage: int, names: Container[str]) -> Iterator[Event]:
        """What one of its stages does once a step in the pipeline, of such `names`."""
        for row in self._of(stage):
            works = [_only(block.update, names) for block in row]
            yield from self.lanes.block_events(PIPELINE, row, works, self.ranks)

    def after(self) -> Iterator[Event]:
        """What it does once a step by itself, but for what is done in the pipeline."""
        inside = _OPENING | _CLOSING | _ADDING
        for row in reversed(self.rows):
            works = [self._own(block.update, inside) for block in row]
            yield from self.lanes.block_events("", row, works, self.ranks)

    def _own(self, update: Work, inside: Container[str]) -> Work:
        return Work(
            tuple(op for op in update.ops if op.name not in inside),
            tuple(
                message
                for message in update.messages
                if message.name not in inside and not self.lanes.crosses(message)
            ),
        )

    def _of(self, stage: int) -> list[Sequence[Block]]:
        """Its blocks of one stage; a layer has two of them."""
        names = self.flow.stages[stage]
        return [row for row in self.rows if ".".join(row[0].name.split(".")[:2]) in names]

    def _once(self, kind: str, stage: int) -> Iterator[Event]:
        """The blocks of a stage one way, or one half of it: each computes, and then speaks; but for
        what it says of chunks of tokens."""
        lanes, ranks, times = self.lanes, self.ranks, self.flow.micro_batches
        adds, rows = kind in _LAST, self._of(stage)
        for row in rows if kind == "forward" else reversed(rows):
            works = [one_way(block, kind, first=stage == 0) for block in row]
            woven = lanes.plan.overlaps
            computed = [() if woven else work.ops for work in works]
            each = lanes.computing(computed, ranks)
            if adds:
                more = lanes.computing([_only(one.update, _ADDING).ops for one in row], ranks)
                each = tuple(a + b / times for a, b in zip(each, more, strict=True))
            yield Event(kind, PIPELINE, row[0].name, lanes.spread(each, ranks))
            if woven:
                yield from lanes.block_events(PIPELINE, row, works, ranks)
            else:
                said = lanes.block_messages(PIPELINE, row[0].name, works, ranks)
                yield from (event for _, event in said)


def _only(work: Work, names: Container[str]) -> Work:
    return Work(
        tuple(op for op in work.ops if op.name in names),
        tuple(message for message in work.messages if message.name in names),
    )


def one_way(block: Block, kind: str, *, first: bool) -> Work:
    """What a kind of action does with a block: the `first` stage has its backward in `weight`."""
    if kind == "forward":
        return block.forward
    if kind == "backward" or (first and kind == "weight"):
        return block.backward
    if first:
        return Work()
    inputs, weights = halves(block)
    return Work(inputs, block.backward.messages) if kind == "input" else Work(weights)


def halves(block: Block) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The operations of a block's backward: for gradients of its input, and for those of weights.

    Where forward multiplies [rows, inner] by a weight [inner, columns], the product over its rows
    is the weight's gradient; those of slots say so themselves.
    """
    forward: dict[str, list[Product]] = defaultdict(list)
    for op in block.forward.ops:
        forward[op.name] += op.products
    inputs, weights = list[Op](), list[Op]()
    for op in block.backward.ops:
        found = [one for one in op.products if one.of_weights]
        left = [one for one in op.products if not one.of_weights]
        known = op.kind == SLOTS or op.kind.startswith("attention")
        for one in () if known else forward[op.name]:
            for sides in ((one.columns, one.inner), (one.inner, one.columns)):
                product = Product(*sides, one.rows, one.count)
                if product in left:
                    left.remove(product)
                    found.append(product)
                    break
        inputs.append(replace(op, products=tuple(left)))
        if found:
            weights.append(Op(op.name, tuple(found), type=op.type, kind=op.kind))
    return tuple(inputs), tuple(weights)


def _inside(lanes: Lanes, flow: Flow, parts: Sequence[Part]) -> Iterator[Event]:
    """Forward and backward of all micro-batches."""
    last, pp, schedule = len(flow.stages) - 1, len(parts), lanes.plan.schedule
    actions = list(in_turn(schedule, pp, len(flow.stages) // pp, flow.micro_batches))
    takers = {awaited(action, last): action for action in actions}
    ways, coming = Ways(lanes, flow), dict[Action, Event]()
    for action in actions:
        part, first = parts[action.stage % pp], action.kind == "forward" and not action.batch
        taking = [coming.pop(action)] if action in coming else []
        opening = part.once(action.stage, _OPENING) if first else ()
        yield from (*opening, *taking) if schedule in _AHEAD else (*taking, *opening)
        events = part.action(action)
        taker = takers.get(action)
        if taker is not None:
            coming[taker] = ways.taking(action, taker)
            events[-1] = replace(events[-1], leaves=coming[taker].takes)
        yield from events
        if action.kind in _LAST and action.batch == flow.micro_batches - 1:
            yield from part.once(action.stage, _CLOSING)


class Ways:
    """How what stages hand to one another travels."""

    def __init__(self, lanes: Lanes, flow: Flow) -> None:
        self._lanes, self._flow = lanes, flow
        self._chains = np.array(lanes.plan.chain_groups())
        self._seconds: dict[tuple[int, int], Seconds] = {}

    def taking(self, action: Action, taker: Action) -> Event:
        """Ranks take over for `taker` what `action` has left."""
        plan = self._lanes.plan
        here, there = action.stage % plan.pp, taker.stage % plan.pp
        senders, receivers = self._chains[:, here], self._chains[:, there]
        if (here, there) not in self._seconds:
            pairs = list(zip(senders.tolist(), receivers.tolist(), strict=True))
            num_bytes = [self._flow.stream_bytes[rank] for rank, _ in pairs]
            self._seconds[here, there] = self._lanes.sending_s(pairs, num_bytes)
        what = "activations" if action.kind == "forward" else "gradients"
        return Event(
            f"{what} {action.batch}", PIPELINE, STEP, self._seconds[here, there],
            takes=Handover(senders, receivers, plan.schedule in _AHEAD),
        )  # fmt: skip


def _across(lanes: Lanes, parts: Sequence[Part]) -> Iterator[Event]:
    """What ranks of several parts do together, once a step."""
    found: dict[tuple[str, int], tuple[list[Message], list[list[int]]]] = {}
    for part in parts:
        for kind, ranks in enumerate(part.ranks):
            times: Counter[str] = Counter()
            for message in (one for row in part.rows for one in row[kind].update.messages):
                if lanes.crosses(message):
                    known = found.setdefault((message.name, times[message.name]), ([], []))
                    known[0].append(message)
                    known[1].append(ranks)
                    times[message.name] += 1
    for messages, ranks_of_all in found.values():
        yield lanes.message("", STEP, messages, ranks_of_all)
