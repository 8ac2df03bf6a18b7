"""Sums of gradients over ranks that learn the same: which ones, and in which messages.

Gradients share buckets in the order in which backward finishes them, as `dist.buckets` has them: a
bucket leaves with the last of its gradients, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.workload.holdings import block_of, model_block
from moesaic.facts.workload.messages import Message, Together, group_of, part_of, together
from moesaic.facts.workload.ops import Op
from moesaic.facts.workload.parameters import Parameter, rank_size
from moesaic.facts.workload.share import Share
from moesaic.facts.workload.sizes import STORED_BYTES

GRADIENTS = ("dense", "slices", "experts")
"""Names of messages that may leave under backward."""

SUMS = (*GRADIENTS, "ends", "gradients", "copies", "sum columns")
"""Names of all sums of gradients, those of FSDP and of a tied head's columns too."""


@dataclass(frozen=True)
class Gradient:
    """What is added up of one parameter."""

    block: str
    """In whose backward it comes."""
    num_bytes: int
    decays: bool = True
    """Whether weight decay applies to the parameter: what has none stands behind what has."""
    parameter: Parameter | None = None
    """A dense one."""


@dataclass(frozen=True)
class Sums:
    """Gradients that the same ranks add up."""

    name: str
    """Of their messages."""
    ranks: tuple[int, ...]
    gradients: Sequence[Gradient]
    """In the order in which backward finishes them."""
    early: bool = True
    """Whether they leave under backward."""
    stay: bool = True
    """Whether they stay in their bucket, and are not copied back."""

    @cached_property
    def buckets(self) -> list[Together]:
        """What travels together; nothing, where nobody else has a part in it."""
        sizes = [one.num_bytes for one in self.gradients]
        behind = {at for at, one in enumerate(self.gradients) if not one.decays}
        return list(together(sizes, behind=behind)) if len(self.ranks) > 1 else []


def sums_of(share: Share) -> list[Sums]:
    """Those that a rank takes part in."""
    plan, rank, model = share.plan, share.rank, share.job.model
    width, early = STORED_BYTES[share.job.train.precision], plan.pp == 1
    dense = _in_backward(share.learning_dense, share)

    def gradients(some: Iterable[Parameter]) -> list[Gradient]:
        replica = plan.replica(rank)
        return [
            Gradient(
                block_of(p, model), rank_size(p, plan.shard, replica) * width, len(p.shape) > 1, p
            )
            for p in some
        ]

    whole = gradients(p for p in dense if not (share.is_cut(p) or p.columns))
    if plan.shard == 1:
        cut = gradients(p for p in dense if share.is_cut(p))
        alike = group_of(plan.same_slice_groups(), rank)
        found = [
            Sums("dense", part_of(plan, rank), whole, early),
            Sums("slices", alike, cut, early),
        ]
    else:  # FSDP sums over ranks that hold the same slices, and its tensors stay its own.
        slices = group_of(plan.slice_groups(), rank)
        found = [Sums("dense", slices, whole, early=False, stay=False)]
    arenas: dict[str, int] = {}
    for p in _in_backward([p for p in share.experts if p.name in share.learning], share):
        block = block_of(p, model)
        arenas[block] = arenas.get(block, 0) + p.size * width
    copies = group_of(plan.replica_groups(), rank)
    found.append(Sums("experts", copies, [Gradient(*one) for one in arenas.items()], early))
    if model.tied and plan.pp > 1 and plan.part(rank) in (0, plan.pp - 1):
        ends = rank % plan.span, rank % plan.span + plan.ranks - plan.span
        tied = gradients(p for p in dense if p.name.startswith("embed."))
        found.append(Sums("ends", ends, tied, early=False))
    return found


def leading(share: Share, groups: Sequence[Sums]) -> frozenset[str]:
    """Names of the first dense parameter of each tensor that the optimizer is given: parameters of
    one block that lie side by side in a bucket of these groups, as far as they decay or do not, are
    one, and any other is one by itself."""
    firsts, beside = dict[object, str](), set[str]()
    for one in (one for one in groups if one.stay and one.name in ("dense", "slices")):
        for number, bucket in enumerate(one.buckets):
            some = [one.gradients[at].parameter for at in bucket.members]
            for p in (p for p in some if p is not None):
                where = one.name, number, model_block(p), len(p.shape) > 1
                firsts.setdefault(where, p.name)
                beside.add(p.name)
    apart = (p.name for p in share.learning_dense if p.name not in beside)
    return frozenset((*firsts.values(), *apart))


def _in_backward(some: Sequence[Parameter], share: Share) -> list[Parameter]:
    """In the order of backward: that of the model's modules, from behind."""

    def place(p: Parameter) -> tuple[float, bool]:
        if p.layer is not None:
            return p.layer, not block_of(p, share.job.model).endswith(".attention")
        # The head's norm comes behind its weight.
        return (
            (-1, False) if model_block(p) == "embed" else (share.job.model.layers, p.kind == "norm")
        )

    return sorted(some, key=place)[::-1]


@dataclass(frozen=True)
class Said:
    """What comes of sums, beside what a step does without them."""

    messages: dict[str, list[Message]]
    """By the block in whose backward the last gradient comes; by an empty name, of the end."""
    ops: tuple[Op, ...]
    """Copies into buckets, and back."""


def said(groups: Sequence[Sums]) -> Said:
    """All messages; of a block, those of experts come last, as ranks may have none."""
    found: dict[str, list[Message]] = {}
    moved, calls = {True: 0, False: 0}, {True: 0, False: 0}
    for one in groups:
        for bucket in one.buckets:
            last = one.gradients[bucket.members[-1]].block if one.early else ""
            message = Message(one.name, "all_reduce", one.ranks, bucket.num_bytes)
            found.setdefault(last, []).append(message)
            if len(bucket.members) > 1:
                moved[one.early] += (2 if one.stay else 4) * bucket.num_bytes
                calls[one.early] += len(bucket.members) if one.stay else 2
    ops = Op("fill", (), moved[True], calls[True]), Op("reduce", (), moved[False], calls[False])
    return Said(found, ops)
