"""What is there at the fullest moments of a step of a rank that is in a part of a pipeline.

Micro-batches are under way: a forward adds what its stage keeps of one, a backward takes it away.
So the order in which the part computes is walked, action by action. What torch's schedules hold on
to counts too, as torch 2.13 has it: tensors to receive the input of each micro-batch and the
gradient of its result in, made once; results until their backward; and what was sent, which all
schedules but 1f1b keep until a step ends.

Where backward comes in halves, the first keeps all that forward kept, and gradients of results
beside it, for the second to make those of weights from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.plan import stages
from moesaic.facts.plan.order import order
from moesaic.facts.workload.kept import captured_attention, captured_network, logits_bytes
from moesaic.facts.workload.parameters import Parameter
from moesaic.facts.workload.peaks import Step
from moesaic.facts.workload.share import Share

_NORM_STREAMS = 5
"""Tensors as large as the residual stream that backward of a norm makes on its way."""


@dataclass
class _Stage:
    """One of the rank's stages, in bytes of one micro-batch."""

    layers: list[int]
    first: bool
    """Of the model's stages."""
    last: bool
    kept: dict[str, int]
    """What forward keeps of each block, beside what has been received."""
    sent: int
    """Its result, for the next stage."""
    captured: int
    """What the first half of backward keeps."""
    gradients: int
    """All of them."""
    begun: bool = False
    """Whether gradients are there."""

    @property
    def all_kept(self) -> int:
        """What forward keeps."""
        return sum(self.kept.values())


class Flight(Step):
    """Moments of the step of a rank that has some of the model's stages."""

    def __init__(self, share: Share, loads: Sequence[ArrayLike] | None, on_cpu: bool) -> None:
        super().__init__(share, loads, on_cpu)
        plan, times = share.plan, share.job.train.micro_batches
        part = plan.part(share.rank)
        self.stream = self.s.stream * self.s.wide
        names = stages(plan, share.job.model)
        mine = range(part, plan.num_stages, plan.pp)
        self.stages = {number: self._stage(number, names[number]) for number in mine}
        received = sum(2 - stage.first - stage.last for stage in self.stages.values())
        self.buffers = received * times * self.stream
        self.there = self.made = self.most_there = self.most_forward = self.most_backward = 0
        for kind, number, batch in order(plan.schedule, plan.pp, len(self.stages), times, part):
            stage = self.stages[number]
            if kind == "forward":
                self._pass(number, stage)
            elif kind == "input":
                self._first_half(stage)
            elif kind == "backward" or stage.first:  # Nothing comes before its weights.
                self._back(stage, batch)
            else:
                self._second_half(stage, batch)

    def most_gathered(self) -> int:
        """All that FSDP shares out: it stays together until the last backward is done."""
        whole = self.root + sum(self.whole.values())
        return (self.plan.shard > 1) * whole * self.s.wide

    def most_kept(self) -> int:
        """The most that is kept of micro-batches under way, but for what the head keeps of one."""
        return self.buffers + self.most_there - self.kept.get("head", 0)

    def head(self) -> int:
        """What it keeps of one micro-batch, its logits, and a table that has come together for it,
        where it is."""
        if "head" not in self.kept:
            return 0
        return self.kept["head"] + logits_bytes(self.s) + self.joined_table()

    def stays(self) -> bool:
        """In the first backward of a stage gradients stay."""
        return True

    def forward(self) -> int:
        """The most that is there in any forward."""
        return self.buffers + self.most_gathered() + self.most_forward

    def backward(self) -> int:
        """The most that is there in any backward, or when copies of gradients are summed."""
        mask = 0 if self.recompute else self.s.mask
        contexts = (self.kept["context"] - mask) * self.job.train.micro_batches
        reduced = sum(self.shards) + self.arena * len(self.routed)
        end = contexts + reduced * self.s.wide + self.flat()
        return self.buffers + max(self.most_gathered() + self.most_backward, end)

    def _gradient_size(self, parameter: Parameter) -> int:
        """Whole, too, until the last backward is done."""
        return parameter.size

    def _stage(self, number: int, names: Sequence[str]) -> _Stage:
        layers = [index for index in self.layers if f"layers.{index}" in names]
        kept = {name: self.kept[name] for name in names}
        if self.recompute:
            kept.update({f"layers.{index}": self.stream for index in layers})
        first, last = number == 0, number == self.plan.num_stages - 1
        if not first:
            kept[names[0]] -= self.stream  # It has been received.
        captured = sum(map(self._captured, layers))
        if last and (self.s.casts or self.s.slices > 1):  # Else it is what the head has formed.
            captured += self.stream
        gradients = sum(self.own[index] for index in layers) + (first or last) * self.root_grads
        return _Stage(
            layers, first, last, kept, (not last) * self.stream, captured, gradients * self.s.wide
        )

    def _captured(self, index: int) -> int:
        """Gradients of a layer's results that wait for the second half."""
        learns, routed = self.arena > 0, self.routed.get(index)
        return captured_attention(self.s) + captured_network(self.s, index, routed, learns=learns)

    def _pass(self, number: int, stage: _Stage) -> None:
        """Forward of one micro-batch; what all its blocks share comes with the first stage, and
        the last one that has no more use for the mask lets go of it."""
        if number == min(self.stages):
            self.there += self.kept["context"]
        self.there += stage.all_kept + stage.sent
        self.most_there = max(self.most_there, self.there)
        logits = logits_bytes(self.s) + self.joined_table() if stage.last else 0
        self.most_forward = max(self.most_forward, self.there + self.made + logits)
        if number == max(self.stages) and not self.recompute:
            self.there -= self.s.mask

    def _back(self, stage: _Stage, batch: int) -> None:
        """All of backward, layer by layer."""
        wide, coming = self.s.wide, stage.last * self.root_grads * self.s.wide
        if stage.last:
            self._note(self.there + self.made + self.parted())
        there = self.there + self.made - stage.kept.get("head", 0)
        for index in reversed(stage.layers):
            name = f"layers.{index}"
            working = self.working(index, not stage.begun)
            if name == list(stage.kept)[-1] and not stage.last:
                working -= self.stream  # The gradient that it begins with has been received.
            if self.recompute:
                again = self.kept[name] - self.stream
                self.most_there = max(self.most_there, self.there + again)
                working += again
            self._note(there + working + (not stage.begun) * coming)
            there -= stage.kept[name]
            coming += self.own[index] * wide
        if stage.first:  # Of slices, the gradient of all their tokens comes before the embedding's.
            joined = (self.s.slices > 1) * self.s.joined + self.s.looked_up
            most = max(self.table + joined, self.asking())
            self._note(there + (not stage.begun) * coming + most * wide)
        self._done(stage, batch, stage.all_kept)

    def _first_half(self, stage: _Stage) -> None:
        """Gradients for the stage before; nothing that forward kept goes."""
        if stage.first:
            return
        self.there += stage.captured
        self.most_there = max(self.most_there, self.there)
        there = self.there + self.made + self.stream
        self._note(there + _NORM_STREAMS * self.stream)
        for index in stage.layers[:1]:
            if index in self.routed:
                routed = self.routed[index]
                gradients = sum(routed.slots) * self.s.model.hidden * self.s.narrow
                working = self.rows(routed, stay=self.arena > 0) * self.s.narrow
                self._note(there - self._captured(index) + gradients + working)

    def _second_half(self, stage: _Stage, batch: int) -> None:
        """Gradients of weights."""
        there = self.there + self.made
        self._note(there + max(self.arena * self.s.wide, stage.last * self.parted()))
        if not stage.begun:
            self._note(there + stage.gradients - stage.captured)
        self._done(stage, batch, stage.all_kept + stage.captured)

    def _note(self, num_bytes: int) -> None:
        """That so much is there in backward."""
        self.most_backward = max(self.most_backward, num_bytes)

    def _done(self, stage: _Stage, batch: int, kept: int) -> None:
        """With backward of a micro-batch: what was kept of it goes, and what was sent may stay."""
        self.there -= kept
        if self.plan.schedule != "1f1b":
            self.there += (not stage.first) * self.stream
        else:  # The latest gradient stays, and the last result that was sent by itself.
            self.there += (not stage.first and not stage.begun) * self.stream
            ahead = min(self.plan.pp - self.plan.part(self.rank), self.job.train.micro_batches)
            self.there -= stage.sent * (batch != ahead - 2)
        self.made += 0 if stage.begun else stage.gradients
        stage.begun = True
