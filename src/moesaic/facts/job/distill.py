"""Settings of distillation: students that learn beside the model, and what each learns from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.facts.job.balance import no_effect
from moesaic.facts.job.model import ModelConfig

TEACHER = "model"
"""Name of the job's own model among teachers."""
Divergence = Literal["forward", "reverse", "jensen"]
"""Divergence of a student's probabilities q from its teacher's p.

forward: KL(p || q). reverse: KL(q || p). jensen: the mean of KL(p || m) and KL(q || m) for the mean
m of p and q.
"""


AUXILIARY = "auxiliary"
"""Block of a student's auxiliary weights, and of the losses against its teacher.

Logical names of these weights start with it, behind the student's own prefix; exports leave them
out.
"""


def student_prefix(name: str) -> str:
    """Return the start of the logical names of a student's tensors."""
    return f"students.{name}."


ROUTERS = "routers"
"""Name of the auxiliary losses of a student's routers among its losses."""


class StudentLosses(Section):
    """Weights of a student's losses; a loss with weight 0 is not computed."""

    text: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of next tokens, as without a teacher."""
    logits: float = Field(default=0.0, ge=0)
    """Weight of the divergence between the next-token distributions of teacher and student."""
    attention: float = Field(default=0.0, ge=0)
    """Weight of the divergence between the attention probabilities of the last layers, head by
    head."""
    relations: float = Field(default=0.0, ge=0)
    """Weight of the divergence between query-query and key-key relations of the last layers, for
    unlike numbers of heads."""
    hidden: float = Field(default=0.0, ge=0)
    """Weight of the mean squared distance between the normalised last hidden states."""

    @property
    def given(self) -> dict[str, float]:
        """Weights above 0, by the name of the loss."""
        return {name: weight for name, weight in self.model_dump().items() if weight > 0}

    @property
    def needs_attention(self) -> bool:
        """True if a loss reads queries and keys."""
        return self.attention > 0 or self.relations > 0

    def conflicts(self) -> Iterator[str]:
        """Yield a sentence if no loss counts."""
        if not self.given:
            yield "all weights are 0: give one of them a value above 0"


def _needs_layer(given: Mapping[str, Any]) -> bool:
    """Return the default of `auxiliary_layer` beside the values that were given."""
    losses = given.get("losses")
    return losses is None or losses.needs_attention


class StudentConfig(Section):
    """A model that learns from the job's model, or from another student, in the same steps."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"source"})

    name: str
    """Name of the student, for figures, checkpoints and `moesaic convert --student`."""
    model: ModelConfig
    """Model of the student, with the keys of `[model]`; its `vocab` defaults to the teacher's."""
    source: str | None = None
    """Hugging Face model directory with the initial weights (`model.from` in the file)."""
    teacher: str = TEACHER
    """Name of the student that this one learns from; "model": the job's own model."""
    losses: StudentLosses = StudentLosses(text=1.0, attention=1.0)
    """Weights of the losses. Without this table `text` and `attention` are 1; with it, a loss that
    is not named is 0."""
    auxiliary_layer: bool = Field(default_factory=_needs_layer)
    """Compare attention in an auxiliary layer on top of the student, which exports leave out. It
    has as many heads as the teacher, and trains all weights of the layers below. Default: true if
    `losses.attention` or `losses.relations` is above 0."""
    divergence: Divergence = "forward"
    """Divergence of the `logits` loss. forward: KL(teacher || student). reverse: KL(student ||
    teacher). jensen: Jensen-Shannon, between both and their mean."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of both distributions in the `logits` loss; above 1 it raises small
    probabilities. The loss is not multiplied by its square: raise `losses.logits` instead."""
    interval: int = Field(default=1, ge=1)
    """Steps from one with all losses to the next; steps between them have the `text` loss alone."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the student; unset: `optimizer.lr`."""

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z0-9_-]+", name) or name == TEACHER:
            raise ValueError(
                f'{keys.show(name)} cannot name a student: give lower-case letters, digits, "_" '
                f'and "-", and not "{TEACHER}", the name of the teacher'
            )
        return name

    def conflicts(self) -> Iterator[str]:
        """Yield settings that leave nothing to learn."""
        if not self.losses.given:
            return  # The losses say so.
        if self.auxiliary_layer and not self.losses.needs_attention:
            yield (
                "auxiliary_layer = true without losses.attention and losses.relations learns "
                "nothing: remove it, or give one of these losses a weight"
            )
        if self.interval > 1 and not self.losses.text:
            yield (
                f"interval = {self.interval} with losses.text = 0 leaves steps without a loss: set "
                "interval = 1, or give losses.text a weight"
            )

    def weights_at(self, step: int) -> dict[str, float]:
        """Return the weights of the losses that count after `step` finished steps, by name."""
        is_between = step % self.interval > 0
        return {
            name: weight
            for name, weight in self.losses.given.items()
            if name == "text" or not is_between
        }

    def learns_from_model_at(self, step: int) -> bool:
        """Return whether the student learns from the job's own model after `step` finished steps,
        and so needs its forward pass."""
        return self.teacher == TEACHER and bool(self.weights_at(step).keys() - {"text"})

    def trained_by(self, weight: str) -> frozenset[str] | None:
        """Return the names of the losses with a gradient in `weight`, a logical name without the
        student's prefix; None if all have one."""
        top, last = frozenset({"text", "logits"}), f"layers.{self.model.layers - 1}."
        pairwise = frozenset({"attention", "relations"})
        if weight.startswith(f"{AUXILIARY}.layer."):
            return pairwise
        if weight.startswith(f"{AUXILIARY}.projection."):
            return frozenset({"hidden"})
        if weight.startswith("head."):
            return top
        if not weight.startswith(last) or self.auxiliary_layer or self.model.latent:
            return None
        name = weight.removeprefix(last)
        if name.startswith(("attention_norm.", "attention.q", "attention.k")):
            return None
        before_router = ("attention.v.", "attention.o.", "ffn_norm.", "moe.router.")
        feeds_router = self.model.layers - 1 in self.model.expert_layers
        routers = {ROUTERS} if feeds_router and name.startswith(before_router) else set()
        return top | {"hidden"} | routers

    def ineffective_settings(self) -> list[str]:
        """Return one sentence for each given setting that has no effect."""
        if self.losses.logits:
            return []
        given = self.non_default_fields & {"divergence", "temperature"}
        return no_effect(f"student.{self.name}", given, "losses.logits is 0")


class DistillConfig(Section):
    """Settings of distillation that all students share."""

    frozen: bool = False
    """Keep the teacher (the job's model) as it is: it has no gradient and no optimizer state, and
    only the students learn."""


def students_in_order(students: Sequence[StudentConfig]) -> list[StudentConfig]:
    """Return students with each after its teacher, otherwise in the given order.

    Students whose teachers form a ring, or are unknown, are left out.
    """
    placed: dict[str, StudentConfig] = {}
    while True:
        ready = [
            one for one in students
            if one.name not in placed and (one.teacher == TEACHER or one.teacher in placed)
        ]  # fmt: skip
        if not ready:
            return list(placed.values())
        placed.update((one.name, one) for one in ready)


def logits_warnings(students: Sequence[StudentConfig]) -> list[str]:
    """Return a warning for each student of logits that no loss of its teacher trains."""
    silent = {one.name for one in students if not (one.losses.text or one.losses.logits)}
    return [
        f'student "{one.name}" learns the logits of "{one.teacher}", which no loss trains: give '
        f'"{one.teacher}" losses.text or losses.logits'
        for one in students
        if one.losses.logits and one.teacher in silent
    ]


def student_errors(
    model: ModelConfig, students: Sequence[StudentConfig], sequence: int
) -> Iterator[str]:
    """Yield a sentence for each reason why `students` cannot learn from `model` in samples of
    `sequence` tokens."""
    models = {TEACHER: model, **{one.name: one.model for one in students}}
    names = [one.name for one in students]
    for index, student in enumerate(students):
        if student.name in names[:index]:
            yield (
                f'student.name = "{student.name}" stands twice: give each student a name of its own'
            )
        if student.teacher not in models:
            yield (
                f'student "{student.name}": teacher = {keys.show(student.teacher)} is not known: '
                + keys.suggest_choice(student.teacher, list(models), keys.join_words(list(models)))
            )
        else:
            error = _model_error(student, models[student.teacher], sequence)
            if error is not None:
                yield f'student "{student.name}": {error}'
    ring = _find_ring(students)
    if ring:
        pairs = [f'"{one.name}" from "{one.teacher}"' for one in ring]
        yield (
            f"students learn in a ring ({', '.join(pairs)}), so none of them learns from the "
            f'model: set teacher = "{TEACHER}" in [[student]] "{ring[0].name}", or in another one'
        )


def _find_ring(students: Sequence[StudentConfig]) -> list[StudentConfig]:
    """Return students that learn from each other in a ring, each before its teacher; none if there
    is no ring."""
    known = {one.name: one for one in students}
    for first in students:
        path: list[StudentConfig] = []
        one: StudentConfig | None = first
        while one is not None and one not in path:
            path.append(one)
            one = known.get(one.teacher)
        if one is not None:
            return path[path.index(one) :]
    return []


def _model_error(student: StudentConfig, teacher: ModelConfig, sequence: int) -> str | None:
    """Return why the model of `student` cannot learn from `teacher`, or None."""
    own, losses = student.model, student.losses
    if own.vocab != teacher.vocab:
        return (
            f"model.vocab = {own.vocab}, and its teacher has {teacher.vocab}: both read the same "
            "tokens, make them equal"
        )
    if losses.needs_attention and (own.latent or teacher.latent):
        latent = "its model" if own.latent else "its teacher"
        return (
            f"losses.attention and losses.relations compare queries and keys, and {latent} has "
            "latent attention (model.latent): set both to 0, and use losses.logits or losses.hidden"
        )
    if losses.attention and not student.auxiliary_layer and own.heads != teacher.heads:
        return (
            f"model.heads = {own.heads}, and its teacher has {teacher.heads}, but "
            "losses.attention compares head by head: set auxiliary_layer = true, or make "
            "model.heads equal"
        )
    windows = [one.window for one in (own, teacher)]
    seen = [min(window or sequence, sequence) for window in windows]
    if losses.needs_attention and not student.auxiliary_layer and seen[0] != seen[1]:
        shown, target = (f"= {one}" if one else "is unset" for one in windows)
        loss = "attention" if losses.attention else "relations"
        return (
            f"model.window {shown} and that of its teacher {target}, but losses.{loss} compares "
            "the last layers over the same tokens: make both windows equal, or set "
            "auxiliary_layer = true"
        )
    return None
