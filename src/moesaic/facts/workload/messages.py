"""Every collective of a step as one rank takes part in it: which operation, whose, how many bytes.

Sizes are exact but for those of a token exchange, which follow the loads. What travels over which
link, and how long it takes, is for whoever knows the cluster.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload.loads import stops
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.sizes import BUCKET_BYTES, Sizes

ALIGNMENT = 256
"""A gradient begins in its bucket at a multiple of so many bytes."""

TOKENS, RESULTS = "tokens", "results"
"""Names of what travels to experts, and from them."""

_NUMBER_BYTES = 8

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class Message:
    """One collective operation, seen from one rank."""

    name: str
    """What it is for."""
    operation: Operation
    ranks: tuple[int, ...]
    """Who takes part."""
    num_bytes: int
    """What this rank brings; of an all-gather, what it has when all is done."""
    send: tuple[int, ...] = ()
    """Bytes to each of `ranks`, itself included; of an all_to_all only."""
    receive: tuple[int, ...] = ()
    """Bytes from each of `ranks`, itself included; of an all_to_all only."""
    first: bool = False
    """Whether its block computes with what it brings."""


@dataclass(frozen=True)
class Talk:
    """Messages of a part of a block, each way in their order."""

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()

    def then(self, *others: Talk) -> Talk:
        """This, and `others` one after another; backward the last comes first."""
        forward, backward = self.forward, self.backward
        for other in others:
            forward, backward = (*forward, *other.forward), (*other.backward, *backward)
        return Talk(forward, backward)

    def ahead(self, alone: bool) -> Talk:
        """The same; `alone`, without backward."""
        return Talk(self.forward) if alone else self


@dataclass(frozen=True)
class Slices:
    """What the slices of one replica say to each other; a single one has nothing to say."""

    s: Sizes
    ranks: tuple[int, ...]
    alike: tuple[int, ...]
    """Those of them that have the same experts."""

    @classmethod
    def of(cls, s: Sizes, plan: Plan, rank: int) -> Slices:
        """Those that `rank` is among."""
        groups = plan.slice_groups(), plan.expert_slice_groups()
        return cls(s, *(group_of(some, rank) for some in groups))

    def join_runs(self, width: int) -> Talk:
        """All tokens, `width` channels each, where each slice has a run of them."""
        num_bytes = self.s.tokens * width * self.s.narrow
        return Talk(self._joined(num_bytes), self._summed(num_bytes)).ahead(self.s.begins)

    def sum_runs(self, each: int) -> Talk:
        """The stream, of which each slice gets a run of the sum of all; in `each` bytes."""
        num_bytes = self.s.joined * each
        return Talk(self._summed(num_bytes), self._joined(num_bytes))

    def head_norms(self) -> Talk:
        """A sum of squares for each token's queries, and one for its keys."""
        if self.s.model.normed != "whole":
            return Talk()
        squares = self._say("squares", "all_reduce", self.s.tokens * self.s.wide)
        return Talk(2 * squares, 2 * squares)

    def head(self) -> Talk:
        """Tokens, and then one number of each: what its logits here come to."""
        sums: tuple[Message, ...] = ()
        for rows, times in self.s.chunks:
            num_bytes = rows * self.s.slices * self.s.wide
            sums += times * self._say("log-sums", "all_gather", num_bytes)
        return self.join_runs(self.s.model.hidden).then(Talk(sums))

    def join_choices(self) -> Talk:
        """Experts of all tokens that go to the same ones, and their weights."""
        chosen = self.s.sent * self.s.model.top_k
        weights = self._among_alike("all_gather", chosen * self.s.wide)
        back = self._among_alike("reduce_scatter", chosen * self.s.wide)
        there = Talk((*self._among_alike("all_gather", chosen * _NUMBER_BYTES), *weights), back)
        return there.ahead(self.s.begins and not self.s.learning.routers)

    def join_sent(self) -> Talk:
        """Those tokens."""
        num_bytes = self.s.sent * self.s.model.hidden * self.s.narrow
        there = Talk(
            self._among_alike("all_gather", num_bytes),
            self._among_alike("reduce_scatter", num_bytes),
        )
        return there.ahead(self.s.begins)

    def sum_results(self) -> Talk:
        """What slices of experts make of them, of which each gets its own tokens' sum."""
        num_bytes = self.s.sent * self.s.model.hidden * self.s.narrow
        return Talk(
            self._among_alike("reduce_scatter", num_bytes),
            self._among_alike("all_gather", num_bytes),
        )

    def _among_alike(self, operation: Operation, num_bytes: int) -> tuple[Message, ...]:
        if self.s.expert_slices == 1:
            return ()
        name = "join tokens" if operation == "all_gather" else "sum results"
        return (Message(name, operation, self.alike, num_bytes),)

    def _joined(self, num_bytes: int) -> tuple[Message, ...]:
        return self._say("join runs", "all_gather", num_bytes)

    def _summed(self, num_bytes: int) -> tuple[Message, ...]:
        return self._say("sum runs", "reduce_scatter", num_bytes)

    def _say(self, name: str, operation: Operation, num_bytes: int) -> tuple[Message, ...]:
        if self.s.slices == 1:
            return ()
        return (Message(name, operation, self.ranks, num_bytes),)


def group_of(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """The ranks of `groups` that `rank` is among."""
    return next(tuple(group) for group in groups if rank in group)


def part_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks of the part of the pipeline that `rank` is in: all of them without one."""
    first = plan.part(rank) * plan.span
    return tuple(range(first, first + plan.span))


def counts(job: Job, plan: Plan, rank: int) -> Talk:
    """How many tokens go where: an all-gather before each exchange."""
    ranks = group_of(plan.same_expert_slice_groups(), rank)
    if len(ranks) == 1:
        return Talk()
    visits = sum(stops(plan)) if plan.dispatch == "visits" and plan.ep > 1 else 0
    chunk = job.model.top_k * (job.model.experts + 1) + visits
    own = _NUMBER_BYTES * (plan.chunks * chunk + 1)
    return Talk((Message("counts", "all_gather", ranks, len(ranks) * own),))


def exchange(name: str, ranks: tuple[int, ...], out: Sequence[int], back: Sequence[int]) -> Talk:
    """Rows between the `ranks` that share out the experts: bytes `out` to each, `back` from each.

    Backward they go the other way.
    """
    if len(ranks) == 1:
        return Talk()
    to, from_ = tuple(out), tuple(back)
    return Talk(
        (Message(name, "all_to_all", ranks, sum(to), to, from_),),
        (Message(name, "all_to_all", ranks, sum(from_), from_, to),),
    )


def look_up(s: Sizes, plan: Plan, rank: int) -> Talk:
    """Between ranks that share out the embedding's columns: how many tokens each has, everybody's
    tokens to all, and columns of each one's from all."""
    if s.columns == 1:
        return Talk()
    ranks, count = part_of(plan, rank), s.columns
    tokens = [len(plan.rows(one, s.asked // s.sequence)) * s.sequence for one in ranks]
    row = s.model.hidden // count * s.wide
    counted = Message("counts", "all_gather", ranks, count * _NUMBER_BYTES)
    asked = exchange(
        "ids", ranks, [s.tokens * _NUMBER_BYTES] * count, [n * _NUMBER_BYTES for n in tokens]
    )
    told = exchange("columns", ranks, [n * row for n in tokens], [s.tokens * row] * count)
    backward = told.backward if s.learning.weights else ()
    return Talk((counted, *asked.forward, *told.forward), backward)


def join_columns(s: Sizes, plan: Plan, rank: int) -> Talk:
    """The columns of a tied weight for the head, and what each has of the sum of its gradients."""
    if not s.joins_table:
        return Talk()
    ranks = part_of(plan, rank)
    there = tuple(Message("join columns", "all_gather", ranks, size) for size in s.table_batches)
    back = tuple(
        Message("sum columns", "reduce_scatter", ranks, size)
        for size in s.table_batches
        if s.learning.weights
    )
    return Talk(there, back)


def gathered(held: Sequence[Parameter], ranks: tuple[int, ...], width: int) -> Message:
    """What puts one group of FSDP together.

    Args:
        held: its parameters, whole or as a slice has them.
        ranks: who share them out.
        width: bytes of an element.
    """
    own = sum(local_size(p, len(ranks)) for p in held) * width
    return Message("parameters", "all_gather", ranks, own * len(ranks), first=True)


def scattered(
    learning: Sequence[Parameter], ranks: tuple[int, ...], copies: tuple[int, ...], width: int
) -> tuple[Message, tuple[Message, ...]]:
    """What sums and shares out its gradients, those of what is `learning`; and, once a step, what
    sums them over the ranks that hold `copies` of the same share."""
    own = sum(local_size(p, len(ranks)) for p in learning) * width
    summed = (Message("copies", "all_reduce", copies, own),) if len(copies) > 1 else ()
    return Message("gradients", "reduce_scatter", ranks, own * len(ranks)), summed


@dataclass(frozen=True)
class Together:
    """Tensors that share a message: a run of some that were given in order."""

    members: range
    """Their numbers."""
    starts: tuple[int, ...]
    """Bytes before each of them."""
    num_bytes: int
    """Of the message: of them, and of what lies between them."""


def together(
    sizes: Sequence[int], most: int = BUCKET_BYTES, behind: Container[int] = ()
) -> Iterator[Together]:
    """Tensors of `sizes` bytes, in their order, as they share messages of at most so many bytes;
    in each of them those whose numbers are `behind` stand after all others."""
    first, filled = 0, 0
    for number, size in enumerate(sizes):
        if number > first and filled + size > most:
            yield _side_by_side(range(first, number), sizes, behind)
            first, filled = number, 0
        filled += _aligned(size)
    if sizes:
        yield _side_by_side(range(first, len(sizes)), sizes, behind)


def _side_by_side(members: range, sizes: Sequence[int], behind: Container[int]) -> Together:
    starts, end = dict[int, int](), 0
    for number in sorted(members, key=lambda one: one in behind):
        starts[number] = _aligned(end)
        end = starts[number] + sizes[number]
    return Together(members, tuple(starts[number] for number in members), end)


def _aligned(num_bytes: int) -> int:
    """The next multiple of what tensors begin at."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def scalars(model: ModelConfig, plan: Plan, rank: int) -> Iterator[Message]:
    """Sums of single numbers: targets, the gradient's norm, what the log says of a step.

    Of a pipeline the log has every layer's tokens by expert and drops, from the parts along a
    chain.
    """
    everyone = tuple(range(plan.ranks))
    chain = tuple(range(rank % plan.span, plan.ranks, plan.span))
    loads = model.layers * (model.experts + 1)
    for name, ranks, numbers in (
        ("targets", part_of(plan, rank), 1), ("norm", everyone, 1), ("losses", everyone, 4),
        ("loads", chain, loads),
    ):  # fmt: skip
        if len(ranks) > 1:
            yield Message(name, "all_reduce", ranks, numbers * _NUMBER_BYTES)
