"""Students beside their teacher: equal bits, equal layouts, and losses as on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from layouts import ASKING, SIGMOID, Array, plain, put_together, sparing, worst_element
from students import ALL, ASSISTANT, DENSE, SMALL, SPARSE, STUDENTS
from torch import Tensor, nn

from moesaic.base.errors import DivergedError
from moesaic.dist.state import EXPERT_TOKENS, FIRST_MOMENT, SECOND_MOMENT
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.models.lm import LanguageModel
from moesaic.nn.loss import IGNORE_INDEX
from moesaic.nn.reports import BlockReport
from moesaic.testing.divergences import (
    attention_by_whole,
    hidden_by_whole,
    relations_by_whole,
    visible_keys,
)
from moesaic.testing.jobs import TINY, RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.train.assemble import LMRun
from moesaic.train.data.batch import Batch, Samples
from moesaic.train.data.packing import fill_samples
from moesaic.train.objectives.distill import DistillObjective, StudentObjective
from moesaic.train.objectives.lm import make_inputs, num_targets
from moesaic.train.parts import Part

STEPS = 2
BUSY: dict[str, Any] = {"train": {"micro_batches": 2}, "layout": {"ep": 1}}
SAMPLES = RandomSamples(61, 12)
Figures = list[dict[str, float]]


def train(
    world: World, job: Job, steps: int = STEPS
) -> tuple[Figures, dict[str, float], list[Any]]:
    """Train on one rank; return the figures of steps and of validation, and the state."""
    run = start_run(job, world)
    figures = [run.step(SAMPLES).figures(1.0) for _ in range(steps)]
    loss, _, more = run.validate(SAMPLES, 8)
    state = [plain(shard) for shard in run.state().shards]
    run.close()
    return figures, {"loss": loss, **more}, state


def train_alone(students: Sequence[Mapping[str, Any]], **tables: Any) -> tuple[Any, ...]:
    """Train the tiny job with `students` on this process."""
    job = tiny_job(student=list(students), **{**BUSY, **tables})
    figures, validation, state = train(World.solo(), job)
    return figures, validation, put_together([state])


@pytest.fixture(scope="module")
def five() -> tuple[Any, ...]:
    """A run with five students."""
    return train_alone(STUDENTS)


def own_figures(figures: Figures, start: str) -> Figures:
    """Return the figures whose names start with `start`; with none of a student for ""."""
    return [
        {key: one[key] for key in one if (key.startswith(start) if start else "/" not in key)}
        for one in figures
    ]


def own_state(state: Mapping[str, Array], start: str) -> dict[str, Array]:
    """Return the tensors of a student whose prefix is `start`, or of the teacher for ""."""
    return {
        key: state[key]
        for key in state
        if (f"/students.{start}" in key if start else "/students." not in key)
    }


def assert_same_bits(one: tuple[Any, ...], other: tuple[Any, ...], name: str = "") -> None:
    """Check that a student, or the teacher for "", is the same in both runs."""
    figures = [own_figures(run[0], name and f"{name}/") for run in (one, other)]
    assert figures[0] == figures[1]
    assert figures[0][0]
    states = [own_state(run[2], name and f"{name}.") for run in (one, other)]
    assert states[0].keys() == states[1].keys() != set()
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


def test_the_teacher_keeps_its_bits_beside_one_student_and_five(five: tuple[Any, ...]) -> None:
    without, one = train_alone([]), train_alone([ASSISTANT])
    assert without[0][0]["grad_norm"] > TINY.get("train", {}).get("clip", 1.0)
    for run in (one, five):
        assert_same_bits(run, without)
        assert run[1]["loss"] == without[1]["loss"]


@pytest.mark.parametrize(
    "names", [["assistant"], ["small", "assistant"], ["sparse", "quiet", "rare"]]
)
def test_a_student_keeps_its_bits_beside_siblings(five: tuple[Any, ...], names: list[str]) -> None:
    some = train_alone([one for one in STUDENTS if one["name"] in names])
    for name in names:
        assert_same_bits(some, five, name)
        assert some[1][f"{name}/loss"] == five[1][f"{name}/loss"]


@pytest.mark.soak
def test_bits_are_kept_in_bf16_with_recomputation_too() -> None:
    train = {"train": {"micro_batches": 2, "precision": "bf16", "recompute": True}}
    without, one, all_five = (train_alone(some, **train) for some in ([], [ASSISTANT], STUDENTS))
    assert_same_bits(all_five, without)
    assert_same_bits(one, all_five, "assistant")


def test_figures_name_each_student(five: tuple[Any, ...]) -> None:
    first, second = five[0]
    assert {key for key in first if key.startswith("small/")} == {
        f"small/{name}" for name in ("loss", *ALL, "grad_norm", "lr") if name != "text"
    }
    assert {key for key in first if key.startswith("assistant/")} >= {"assistant/balance_loss"}
    assert "quiet/loss" not in first
    assert "rare/logits" in first
    assert "rare/logits" not in second
    assert second["rare/loss"] != first["rare/loss"]
    assert (first["lr"], first["assistant/lr"]) == (0.0015, 0.005)
    assert set(five[1]) == {"loss", *(f"{one['name']}/loss" for one in STUDENTS)}


MOVING: dict[str, Any] = {"balance": {**ASKING, "migrate_every": 1}}
"""Tables of a teacher whose experts have replicas and migrate."""
FROZEN: dict[str, Any] = {"distill": {"frozen": True}}


@pytest.mark.parametrize(
    ("size", "layout", "tables"),
    sparing(
        [
            [2, {"ep": 2, "dp_shard": 2}, {}], [2, {"dp_shard": 2}, {}], [4, {"ep": 4}, {}],
            [4, {"ep": 2, "dp_shard": "all"}, {}], [2, {"ep": 2}, MOVING],
            [2, {"ep": 2, "dp_shard": 2}, FROZEN],
        ],
        6,
    ),
)  # fmt: skip
def test_every_layout_equals_one_process(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    """With four ranks and micro-batches of two samples, two ranks have none."""
    students = [one for one in STUDENTS if one["name"] != "quiet"]
    students = students if size == 4 else students[:2]
    tables = {**tables, "train": {"micro_batches": 4}}
    results = ranks.run(size, train, tiny_job(student=students, layout=layout, **tables))
    expected = train_alone(students, **tables)
    for figures, validation, _ in results:
        for one, other in zip([*figures, validation], [*expected[0], expected[1]], strict=True):
            shared = {key: one[key] for key in other}
            assert shared == pytest.approx(other, rel=1e-9, abs=1e-12)
    whole = put_together([state for *_, state in results])
    known = {key: whole[key] for key in whole if not key.startswith(EXPERT_TOKENS)}
    assert worst_element(known, expected[2]) < 1e-9


def run_whole(part: Part[LanguageModel], batch: Batch, job: Job) -> tuple[Tensor, BlockReport]:
    """Return the logits of a model, [batch, sequence, vocab], and the report of its last layer."""
    inputs = replace(
        make_inputs(part.model, batch, job, 0),
        project=False, training=True, keep=frozenset({"hidden_states", "queries_and_keys"}),
    )  # fmt: skip
    normed, reports = part.model(batch.inputs, inputs)
    return normed @ part.model.head.weight.T, reports[f"layers.{job.model.layers - 1}"]


def compare_logits(p: Tensor, q: Tensor, kind: str) -> Tensor:
    """Return the divergence of each token from log-probabilities, [batch, sequence]."""
    if kind == "jensen":
        mean = (p.exp() + q.exp()).log() - np.log(2.0)
        return (compare_logits(p, mean, "forward") + compare_logits(q, mean, "forward")) / 2
    p, q = (q, p) if kind == "reverse" else (p, q)
    return (p.exp() * (p - q)).sum(-1)


def whole_losses(
    student: StudentObjective,
    own: tuple[Tensor, BlockReport],
    teacher: tuple[Tensor, BlockReport],
    batch: Batch,
    units: int,
) -> dict[str, Tensor]:
    """Return all losses of a student, from whole tensors; `teacher` has no gradient."""
    config, (logits, last), (target, target_last) = student.config, own, teacher
    present = (batch.targets >= 0).double() / units
    log_p, log_q = (one.log_softmax(-1) for one in (target, logits))
    text = -log_q.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
    tempered = [(one / config.temperature).log_softmax(-1) for one in (log_p, log_q)]
    found = {
        "text": (text * present).sum(),
        "logits": (compare_logits(*tempered, config.divergence) * present).sum(),
    }
    if config.losses.needs_attention:
        inputs = make_inputs(student.part.model, batch, student.job, 0)
        both = target_last.attention, student.auxiliary.attend(last, inputs)
        visible = visible_keys(batch.documents)
        found["attention"] = attention_by_whole(*both, visible, present)
        found["relations"] = relations_by_whole(*both, visible, present, (4, 2))
    if config.losses.hidden:
        states = student.auxiliary.project(last.hidden_states)
        found["hidden"] = hidden_by_whole(target_last.hidden_states, states, present)
    return found


def without_gradient(done: tuple[Tensor, BlockReport]) -> tuple[Tensor, BlockReport]:
    """Return the logits and the report of a teacher, detached."""
    logits, last = done
    queries, keys = last.attention.queries.detach(), last.attention.keys.detach()
    attention = last.attention._replace(queries=queries, keys=keys)
    states = last.hidden_states.detach()
    return logits.detach(), last._replace(attention=attention, hidden_states=states)


class MaskedSamples:
    """Samples with prompts, filled up with repetitions; every fourth one has no target at all."""

    def __len__(self) -> int:
        return 1 << 30

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of `indices`, each with one or two documents."""
        del shuffled
        index = np.array(indices)
        counts = 1 + index % 2
        owner = index.repeat(counts)
        lengths = 2 + owner % 4
        tokens = np.random.default_rng(index[0]).integers(61, size=(2, lengths.sum()))
        is_prompt = (tokens[0] % 3 == 0) | (owner % 4 == 3).repeat(lengths)
        targets = np.where(is_prompt, IGNORE_INDEX, tokens[1])
        return fill_samples(index, tokens[0], targets, lengths, counts, 12)


@pytest.mark.parametrize("samples", [SAMPLES, MaskedSamples()], ids=["packed", "masked"])
def test_gradients_equal_those_of_whole_tensors(samples: Samples) -> None:
    """Cover three students: one behind an assistant, and each with a divergence of its own."""
    routing = {"balance_loss": 0.0, "z_loss": 0.0}
    job = tiny_job(student=STUDENTS[:3], routing=routing)
    run, batch = start_run(job), samples.batch(range(8))
    is_row_masked = (batch.targets == IGNORE_INDEX).all(dim=1)
    assert bool(is_row_masked.any()) is (samples is not SAMPLES)
    (losses,) = run.compute_gradients(samples)
    done = {"model": run_whole(run.objective.part, batch, job)}
    for student, found in zip(students_of(run).values(), losses.students, strict=True):
        done[student.name] = run_whole(student.part, batch, student.job)
        teacher = without_gradient(done[student.config.teacher])
        whole = whole_losses(student, done[student.name], teacher, batch, num_targets(batch))
        weights = {name: one for name, one in student.config.losses.model_dump().items() if one}
        for name in weights:
            term = found.terms["loss" if name == "text" else name]
            torch.testing.assert_close(term, whole[name].detach(), rtol=1e-9, atol=1e-12)
        items = student.part.trainable
        gradients = [item.grad.clone() for item in items]
        total = sum(weight * whole[name] for name, weight in weights.items())
        parameters = [item.parameter for item in items]
        for item, one, other in zip(
            items, gradients, torch.autograd.grad(total, parameters), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=item.name)
    run.close()


class CountForwards:
    """Count the forward passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.number = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.number += 1


def students_of(run: LMRun) -> dict[str, StudentObjective]:
    """Return the students of a run by name."""
    assert isinstance(run.objective, DistillObjective)
    return {one.name: one for one in run.objective.students}


@pytest.mark.parametrize("frozen", [False, True])
def test_one_forward_of_the_teacher_serves_all(frozen: bool) -> None:
    job = tiny_job(student=STUDENTS, distill={"frozen": frozen}, **BUSY)
    run = start_run(job)
    models = [run.objective.part.model, *(one.part.model for one in students_of(run).values())]
    counts = [CountForwards(model) for model in models]
    for _ in range(STEPS):
        run.step(SAMPLES)
    assert [count.number for count in counts] == [STEPS * job.train.micro_batches] * len(counts)
    run.close()


BIASED: dict[str, Any] = {"model": SIGMOID["model"], "routing": SIGMOID["routing"]}
"""Tables of a teacher whose routers have a bias, and whose attention is latent."""


@pytest.mark.parametrize(
    ("students", "tables"),
    [(STUDENTS, {}), ([{**SMALL, "teacher": "model", "losses": {"logits": 1.0}}], BIASED)],
)
def test_a_frozen_teacher_has_no_moments_and_stays(
    students: Sequence[Mapping[str, Any]], tables: dict[str, Any]
) -> None:
    figures, _, state = train_alone(students, distill={"frozen": True}, **tables)
    (expected, *_), _, _ = train_alone([], **tables)
    initial = start_run(tiny_job(**BUSY, **tables))
    values = put_together([[plain(shard) for shard in initial.state().shards]])
    teacher = own_state(state, "")
    assert {key.partition("/")[0] for key in teacher} == {"parameter"}
    assert all(np.array_equal(teacher[key], values[key]) for key in teacher)
    assert figures[0]["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert figures[0]["grad_norm"] == 0.0
    assert figures[1]["small/grad_norm"] > 0
    initial.close()


def missing_gradients(student: Mapping[str, Any], step: int = 0) -> set[str]:
    """Return the weights of a student without a gradient after a backward pass, which are those
    that skip the update."""
    run = start_run(tiny_job(student=[student], **BUSY), counters={"step": step})
    run.compute_gradients(SAMPLES)
    (part,) = (one for one in run.parts if one.prefix)
    found = {item.name for item in part.trainable if item.parameter.grad is None}
    skipping = part._losses_without_update(step)
    assert found == {item.name for item in part.trainable if item.losses in skipping}
    run.close()
    return found


def test_without_an_auxiliary_layer_the_end_of_the_last_layer_has_no_gradient() -> None:
    model = {**DENSE, "layers": 2, "heads": 4}
    student = {"name": "small", "model": model, "losses": {"attention": 1.0}}
    kept = {"head.norm.weight", "head.weight"}
    assert missing_gradients(student) == kept
    last = "layers.1."
    assert missing_gradients({**student, "auxiliary_layer": False}) == kept | {
        f"{last}{name}.weight"
        for name in ("attention.v", "attention.o", "ffn_norm", "ffn.gate", "ffn.up", "ffn.down")
    }
    assert not missing_gradients({**student, "losses": {"attention": 1.0, "text": 1.0}})
    assert missing_gradients(HEADLESS) == kept | {"layers.0.moe.bank.arena"}
    assert not missing_gradients(SELDOM)
    assert missing_gradients(SELDOM, 1) == {
        "auxiliary.projection.weight",
        *(f"auxiliary.layer.{name}.weight" for name in ("norm", "q", "k")),
    }


HEADLESS: dict[str, Any] = {
    "name": "headless", "model": SPARSE, "losses": {"attention": 1.0}, "auxiliary_layer": False,
}  # fmt: skip
"""Student whose head and last experts have no loss; losses of its router reach the attention."""
SELDOM: dict[str, Any] = {
    "name": "seldom", "model": DENSE, "interval": 2,
    "losses": {"text": 1.0, "attention": 1.0, "hidden": 1.0},
}  # fmt: skip
"""Student whose auxiliary weights have no loss in every other step."""
DECAYING: dict[str, Any] = {
    "optimizer": {"weight_decay": 0.5, "lr": 0.01}, "schedule": {"warmup": 0, "kind": "constant"},
    "train": {"micro_batches": 2},
}  # fmt: skip


def states(world: World, job: Job, steps: int) -> tuple[list[list[Any]], dict[str, int]]:
    """Return this rank's state before the first step and after each, and the counters."""
    run, found = start_run(job, world), list[list[Any]]()
    for step in range(steps + 1):
        found.append([plain(shard) for shard in run.state().shards])
        if step < steps:
            run.step(SAMPLES)
    counters = dict(run.counters)
    run.close()
    return found, counters


def test_weights_without_a_loss_skip_the_update(ranks: RankPool) -> None:
    """They neither decay nor count the step. Two ranks give what one does."""
    tables = {"student": [HEADLESS, SELDOM], **DECAYING}
    alone, counters = states(World.solo(), tiny_job(**tables, layout={"ep": 1}), 3)
    first, *later = (put_together([state]) for state in alone)
    both = ranks.run(2, states, tiny_job(**tables, layout={"ep": 2, "dp_shard": 2}), 3)
    last = put_together([found[-1] for found, _ in both])
    assert worst_element(last, later[-1]) < 1e-9
    assert all(found == counters for _, found in both)

    head = [key for key in first if "students.headless." in key
            and any(name in key for name in (".head.", ".experts."))]  # fmt: skip
    assert len(head) > 2
    assert all(np.array_equal(first[key], later[-1][key]) for key in head)
    auxiliary = [key for key in first if "students.seldom.auxiliary." in key]
    for key in (one for one in first if "/students." in one and one not in head):
        is_kept = [np.array_equal(*(state[key] for state in pair))
                   for pair in pairwise((first, *later))]  # fmt: skip
        assert is_kept == ([False, True, False] if key in auxiliary else [False] * 3), key
    assert {key: one for key, one in counters.items() if "without" in key} == {
        "students.headless.updates_without.logits+text": 3,
        "students.headless.updates_without.hidden+logits+text": 3,
        "students.seldom.updates_without.attention+relations": 1,
        "students.seldom.updates_without.hidden": 1,
    }
    name = "students.seldom.auxiliary.layer.q.weight"
    before, after = later[1][f"parameter/{name}"], later[2]
    m, v = (after[f"{kind}/{name}"] / (1 - beta**2)
            for kind, beta in ((FIRST_MOMENT, 0.9), (SECOND_MOMENT, 0.95)))  # fmt: skip
    expected = before * (1 - 0.01 * 0.5) - 0.01 * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(after[f"parameter/{name}"], expected, rtol=1e-9)


def count_passes(world: World, job: Job) -> tuple[Figures, list[int], list[Any]]:
    """Train four steps; return their figures, the teacher's passes after each, and the state."""
    run = start_run(job, world)
    count, numbers, figures = CountForwards(run.objective.part.model), list[int](), []
    for _ in range(4):
        figures.append(run.step(SAMPLES).figures(1.0))
        numbers.append(count.number)
    state = [plain(shard) for shard in run.state().shards]
    run.close()
    return figures, numbers, state


SPLIT: dict[str, Any] = {"layout": {"ep": 2, "dp_shard": 2}}


@pytest.mark.parametrize(
    ("size", "tables"),
    [
        (1, {}), (1, {"train": {"micro_batches": 2, "precision": "bf16"}}), (2, SPLIT),
        (2, {"layout": {"ep": 2}, **MOVING}),
    ],
)  # fmt: skip
def test_a_frozen_teacher_runs_only_where_it_teaches(
    ranks: RankPool, size: int, tables: dict[str, Any]
) -> None:
    """A student keeps its bits in steps without the teacher."""
    assistant = {**SELDOM, "name": "text", "losses": {"text": 1.0}}
    below = {**SELDOM, "name": "below", "teacher": "text", "interval": 1}
    logits = {**below, "name": "lower", "losses": {"text": 0.5, "logits": 1.0}}
    students = [SELDOM | {"interval": 3}, assistant, below, logits]
    runs = []
    for others in ([], [SMALL | {"teacher": "model"}]):
        job = tiny_job(student=[*students, *others], **{**BUSY, **FROZEN, **tables})
        results = (
            ranks.run(size, count_passes, job) if size > 1 else [count_passes(World.solo(), job)]
        )
        figures, numbers, _ = results[0]
        assert numbers == ([2, 4, 6, 8] if others else [2, 2, 2, 4])
        assert ["loss" in one for one in figures] == [True, bool(others), bool(others), True]
        runs.append((figures, None, put_together([state for *_, state in results])))
    for name in ("seldom", "text", "below", "lower"):
        assert_same_bits(*runs, name)


def test_a_student_equal_to_its_teacher_has_neither_loss_nor_gradient() -> None:
    losses = {name: weight for name, weight in ALL.items() if name != "text"}
    routing = {"balance_loss": 0.0, "z_loss": 0.0}
    for divergence in ("forward", "reverse", "jensen"):
        student = {
            "name": "twin", "model": TINY["model"], "losses": losses, "auxiliary_layer": False,
            "divergence": divergence,
        }  # fmt: skip
        run = start_run(tiny_job(student=[student], routing=routing, **BUSY))
        teacher, twin = (part.model for part in run.parts)
        twin.load_state_dict(teacher.state_dict())
        found = run.step(SAMPLES).figures(1.0)
        assert found["twin/loss"] == pytest.approx(found["loss"], rel=1e-12)
        for name in ("logits", "attention", "relations", "hidden", "grad_norm"):
            assert abs(found[f"twin/{name}"]) < 1e-12, name
        run.close()


def test_a_gradient_that_is_not_finite_names_its_student() -> None:
    run = start_run(tiny_job(student=[SMALL, ASSISTANT], **BUSY))
    students_of(run)["small"].part.model.head.norm.weight.data[0] = torch.inf
    with pytest.raises(DivergedError, match=r'norm of student "small" is nan, and nothing was'):
        run.step(SAMPLES)
    run.close()
