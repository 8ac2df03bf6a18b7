"""Distillation objective: a teacher predicts next tokens, and students learn beside it.

One forward pass of the teacher serves all students. Its head also computes the students' losses on
logits, while the logits of a chunk of tokens exist. Other losses compare by-products of the last
layers. No gradient reaches a teacher, so its bits are those of a run without students. A frozen
teacher does not run in steps in which no student learns from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from moesaic.dist.collectives import all_reduce_
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.job.distill import ROUTERS, TEACHER, StudentConfig
from moesaic.models.lm import LanguageModel
from moesaic.models.student import Auxiliary
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.divergence import attention_divergence, hidden_distance, relation_divergence
from moesaic.nn.inputs import ByProduct, HeadFollower, Inputs
from moesaic.nn.loss import IGNORE_INDEX, follower_losses
from moesaic.nn.reports import AttentionReport, BlockReport, Reports, moe_reports
from moesaic.train.data.batch import Batch
from moesaic.train.lm_stats import LMStepStats, StudentStats
from moesaic.train.objectives.lm import LanguageModelObjective, Losses, detach_all
from moesaic.train.objectives.objective import StepContext, StepResult
from moesaic.train.parts import Part
from moesaic.train.phases import PhaseTimer

_BY_PRODUCTS: frozenset[ByProduct] = frozenset({"hidden_states", "queries_and_keys"})
"""By-products of a last layer that losses compare."""
_PAIRWISE = {"attention": attention_divergence, "relations": relation_divergence}
"""Losses that compare queries and keys, by name."""


@dataclass(frozen=True)
class StudentLosses(Losses):
    """Losses of one student in one micro-batch on this rank; `loss` is that of its text, or 0."""

    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """This rank's term of each loss by name, without its weight; "loss" is that of the text."""


@dataclass(frozen=True)
class DistillLosses(Losses):
    """Losses of the teacher in one micro-batch on this rank, and those of its students."""

    students: tuple[StudentLosses, ...] = ()
    """Losses of each student, in the order of the objective."""
    targets: int = 0
    """Targets of a validation batch that this rank counts."""


@dataclass(frozen=True)
class _Pass:
    """Forward pass of one model."""

    inputs: Inputs
    output: Tensor
    """Output of the head: a loss, or the normed input of a student's projection."""
    reports: Reports

    @property
    def last(self) -> BlockReport:
        """Report of the last layer."""
        return next(one for one in self.reports.values() if one.hidden_states is not None)

    @property
    def attention(self) -> AttentionReport:
        """Queries and keys of the last layer."""
        assert self.last.attention is not None
        return self.last.attention

    @property
    def hidden_states(self) -> Tensor:
        """Output of the last layer, [batch, sequence, hidden]."""
        assert self.last.hidden_states is not None
        return self.last.hidden_states

    @property
    def metadata(self) -> AttentionMetadata:
        """Keys that each query attends to."""
        assert self.inputs.attention is not None
        return self.inputs.attention

    def token_weights(self, factor: float) -> Tensor:
        """Return `factor` for each token with a target, 0.0 for the others, [batch, sequence]."""
        assert self.inputs.targets is not None
        present = self.inputs.targets != IGNORE_INDEX
        return present.to(self.inputs.rotary.cosine.dtype) * factor


class StudentObjective(LanguageModelObjective):
    """Losses of one student beside its teacher."""

    def __init__(
        self,
        job: Job,
        world: World,
        part: Part[LanguageModel],
        config: StudentConfig,
        auxiliary: Auxiliary,
    ) -> None:
        """Create the objective.

        Args:
            job: job of the student alone.
            world: the ranks.
            part: model of the student, and its auxiliary weights.
            config: what it learns from.
            auxiliary: its auxiliary weights.
        """
        super().__init__(job, world, part)
        self.config, self.auxiliary, self.name = config, auxiliary, config.name

    def trained_losses_at(self, step: int) -> set[str]:
        """Return the names of the losses with a gradient after `step` finished steps."""
        routing, names = self.job.routing, set(self.config.weights_at(step))
        has_router_losses = self.job.model.experts and (routing.balance_loss or routing.z_loss)
        return names | {ROUTERS} if has_router_losses else names

    def start(self, batch: Batch, context: StepContext) -> _StudentPass:
        """Run the model without its output projection."""
        inputs = _keep_last_layer(self.training_inputs(batch, context), self.job)
        inputs = replace(inputs, project=False)
        output, reports = self.part.model(batch.inputs.to(self.world.device), inputs)
        return _StudentPass(inputs, output, reports, self, self.config.weights_at(context.step))

    def router_losses(self, losses: Sequence[Losses]) -> dict[str, float]:
        """Return the auxiliary losses of a step over all ranks, by name; none without experts."""
        if not self.job.model.experts:
            return {}
        _, _, balance, z, _ = self._reduce_losses(losses)
        return {"balance_loss": balance, "z_loss": z}


@dataclass(frozen=True)
class _StudentPass(_Pass):
    """Forward pass of a student, and its losses so far."""

    objective: StudentObjective
    weights: Mapping[str, float]
    """Weights of the losses that count."""
    weighted: list[Tensor] = field(default_factory=list)
    """Losses with gradient, times weight and scale."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Losses without gradient, weight and scale, by name; "loss" is that of the text."""

    @property
    def has_logits(self) -> bool:
        """True if a loss on logits has a weight."""
        return bool(self.weights.keys() & {"text", "logits"})

    def make_follower(self, factor: float, teacher: int) -> HeadFollower:
        """Return the student for the head that computes its losses on logits; see `HeadFollower`.

        `factor` multiplies the weights.
        """
        config, weights = self.objective.config, self.weights
        return HeadFollower(
            self.output.flatten(0, 1), self.objective.part.model.head.weight,
            weights.get("text", 0.0) * factor, weights.get("logits", 0.0) * factor,
            config.divergence, config.temperature, teacher,
        )  # fmt: skip

    def add_head_losses(self, loss: Tensor, sums: Tensor, targets: int) -> None:
        """Add losses on logits: their weighted sum with gradient, and cross-entropy and divergence
        without weights, summed over tokens."""
        self.terms["loss"], divergence = (sums / max(targets, 1)).unbind()
        if "logits" in self.weights:
            self.terms["logits"] = divergence
        if self.has_logits:
            self.weighted.append(loss)

    def add_loss(self, name: str, loss: Tensor, scale: float) -> None:
        """Add another loss, which has its `scale` but not its weight."""
        self.terms[name] = loss.detach() / scale
        self.weighted.append(self.weights[name] * loss)

    def finish(self, scale: float) -> tuple[Tensor, StudentLosses]:
        """Return a tensor whose backward gives the student's gradients, and the losses."""
        total, reports = _add_up(self.weighted), self.reports.values()
        total, aux_losses = self.objective.attach_aux_losses(total, reports, scale)
        text = self.terms.get("loss", torch.zeros_like(total.detach()))
        moe = detach_all(moe_reports(reports))
        return total, StudentLosses(text, aux_losses, moe, self.terms)


class DistillObjective(LanguageModelObjective):
    """Next-token prediction by a teacher, the objective's own part, and losses of its students."""

    def __init__(
        self,
        job: Job,
        world: World,
        part: Part[LanguageModel],
        students: Sequence[StudentObjective],
    ) -> None:
        """Create the objective; each of `students` comes after its teacher."""
        super().__init__(job, world, part)
        self.students, self._is_frozen = students, job.distill.frozen

    def training_inputs(self, batch: Batch, context: StepContext) -> Inputs:
        """Return the teacher's inputs; if it is frozen, those of evaluation with targets."""
        inputs = _keep_last_layer(super().training_inputs(batch, context), self.job)
        return replace(inputs, training=not self._is_frozen)

    def compute_loss(self, batch: Batch, context: StepContext) -> tuple[Tensor, DistillLosses]:
        """Return a tensor whose backward gives the gradients of all parts, times the scale, and
        the losses."""
        factor = context.scale / max(context.units, 1)
        passes = {one.name: one.start(batch, context) for one in self.students}
        followers = _make_followers(passes, factor)
        models, roots = dict[str, _Pass](passes), list[Tensor]()
        if self._needs_teacher(context.step):
            teacher, own = self._run_teacher(batch, context, tuple(followers.values()))
            models[TEACHER], head = teacher, teacher.reports["head"].follower_losses
            roots += [] if self._is_frozen else [teacher.output]
        else:
            own, head = Losses(torch.full((), torch.nan, device=self.world.device)), None
            if followers:
                targets = batch.targets.to(self.world.device).flatten()
                head = follower_losses(targets, tuple(followers.values()))
        if head is not None:
            for name, loss, sums in zip(followers, head.loss.unbind(), head.sums, strict=True):
                passes[name].add_head_losses(loss, sums, context.units)
        for name, model in models.items():
            students = [one for one in passes.values() if one.objective.config.teacher == name]
            _compare(model, students, model.token_weights(factor), context.scale)
        finished = [one.finish(context.scale) for one in passes.values()]
        return _add_up([*roots, *(total for total, _ in finished)]), DistillLosses(
            **vars(own), students=tuple(found for _, found in finished)
        )

    def _needs_teacher(self, step: int) -> bool:
        """Return whether the teacher runs after `step` finished steps: it trains, a student learns
        from it, or its routing is recorded."""
        return (
            not self._is_frozen
            or self.routing_recorder is not None
            or any(one.config.learns_from_model_at(step) for one in self.students)
        )

    def _run_teacher(
        self, batch: Batch, context: StepContext, followers: tuple[HeadFollower, ...]
    ) -> tuple[_Pass, Losses]:
        """Return the teacher's pass, whose output is the root of its gradients, and its losses."""
        inputs = replace(self.training_inputs(batch, context), followers=followers)
        with torch.no_grad() if self._is_frozen else nullcontext():
            root, losses, reports = self.run_model(batch, inputs, context.scale)
        return _Pass(inputs, root, reports), losses

    def evaluate(self, batch: Batch) -> DistillLosses:
        """Return the losses of a validation batch, of each student by its own head."""
        losses = [student.evaluate(batch).loss for student in self.students]
        return DistillLosses(
            super().evaluate(batch).loss,
            students=tuple(StudentLosses(loss, terms={"loss": loss}) for loss in losses),
            targets=self.num_units(batch),
        )

    def validation_figures(self, losses: Sequence[Losses]) -> dict[str, float]:
        """Return the mean loss of each student over all targets."""
        found = cast("Sequence[DistillLosses]", losses)
        targets = torch.tensor(sum(one.targets for one in found), device=self.world.device)
        total = max(int(all_reduce_(targets, self.world.group)), 1)
        return {
            f"{student.name}/{name}": value / total
            for student, terms in zip(self.students, self._sum_terms(losses), strict=True)
            for name, value in terms.items()
        }

    def after_update(self, losses: Sequence[Losses]) -> None:
        """Adjust router biases of the teacher, unless it is frozen, and of each student."""
        if not self._is_frozen:
            super().after_update(losses)
        for index, student in enumerate(self.students):
            student.after_update(_losses_of(losses, index))

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> LMStepStats:
        """Return the statistics of a step, with those of each student."""
        stats, students = super().finish_step(result, phases), dict[str, StudentStats]()
        if not self._needs_teacher(result.step - 1):
            stats = replace(stats, has_run=False, balance={})
        with phases("log"):
            for index, terms in enumerate(self._sum_terms(result.losses)):
                student = self.students[index]
                routers = student.router_losses(_losses_of(result.losses, index))
                prefix = student.part.prefix
                students[student.name] = StudentStats(
                    terms | routers, result.grad_norms[prefix], result.learning_rates[prefix]
                )
        return replace(stats, students=students)

    def _sum_terms(self, losses: Sequence[Losses]) -> list[dict[str, float]]:
        """Return the losses of each student by name, summed over micro-batches and ranks."""
        terms = [
            [one.terms for one in _losses_of(losses, index)] for index in range(len(self.students))
        ]
        local = [
            torch.stack([one[name].double() for one in found]).sum()
            for found in terms
            for name in found[0]
        ]
        sums = iter(all_reduce_(torch.stack(local), self.world.group).tolist())
        return [{name: next(sums) for name in found[0]} for found in terms]


def _make_followers(passes: Mapping[str, _StudentPass], factor: float) -> dict[str, HeadFollower]:
    """Return the students whose logits a loss needs, by name, each after its teacher."""
    teachers = {one.objective.config.teacher for one in passes.values() if "logits" in one.weights}
    followers = dict[str, HeadFollower]()
    for name, one in passes.items():
        if one.has_logits or name in teachers:
            order, teacher = list(followers), one.objective.config.teacher
            index = order.index(teacher) if teacher in order else -1
            followers[name] = one.make_follower(factor, index)
    return followers


def _compare(
    teacher: _Pass, students: Sequence[_StudentPass], token_weights: Tensor, scale: float
) -> None:
    """Add the losses of `students` that compare by-products with those of their teacher, which gets
    no gradient."""
    attention = {
        id(one): one.objective.auxiliary.attend(one.last, one.inputs)
        for one in students
        if one.weights.keys() & _PAIRWISE.keys()
    }
    for name, divergence in _PAIRWISE.items():
        chosen = [one for one in students if name in one.weights]
        if chosen:
            own = [attention[id(one)] for one in chosen]
            losses = divergence(teacher.attention, own, teacher.metadata, token_weights)
            for one, loss in zip(chosen, losses.unbind(), strict=True):
                one.add_loss(name, loss, scale)
    for one in (one for one in students if "hidden" in one.weights):
        states = one.objective.auxiliary.project(one.hidden_states)
        loss = hidden_distance(teacher.hidden_states, states, token_weights)
        one.add_loss("hidden", loss, scale)


def _add_up(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars."""
    total = tensors[0]
    for one in tensors[1:]:
        total = total + one
    return total


def _losses_of(losses: Sequence[Losses], index: int) -> list[StudentLosses]:
    """Return the losses of the student at `index` in each micro-batch."""
    return [one.students[index] for one in cast("Sequence[DistillLosses]", losses)]


def _keep_last_layer(inputs: Inputs, job: Job) -> Inputs:
    """Return inputs for which the last layer keeps what losses compare."""
    last = frozenset({job.model.layers - 1})
    return replace(inputs, keep=inputs.keep | _BY_PRODUCTS, keep_layers=last)
