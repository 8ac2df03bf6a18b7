"""Work and memory of teacher and students: those of each alone, added up."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic.base.config import parse
from moesaic.facts.job import Job, student_job, teacher_job
from moesaic.facts.job.job import fill_preset
from moesaic.facts.plan import plan_from_job
from moesaic.facts.workload import Part, job_parts, memory, memory_of_parts, workload
from moesaic.facts.workload.parts import relation_heads
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import FOLLOWER_CHUNK_TOKENS, Sizes
from moesaic.models.student import auxiliary_params, build_auxiliary
from moesaic.nn.inputs import HeadFollower
from moesaic.nn.loss import head_loss
from moesaic.testing.flops import CUSTOM_FLOPS
from moesaic.testing.jobs import TINY, RandomSamples
from moesaic.testing.memory import peak_allocated
from moesaic.testing.runs import start_run

SIZES = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 12}
LLAMA = {"family": "llama", **SIZES}
MIXED = {"family": "qwen3_moe", **SIZES, "experts": 4, "top_k": 2, "renormalise": True}
STUDENTS: list[dict[str, Any]] = [
    {"name": "last", "model": LLAMA, "teacher": "first"},
    {"name": "first", "model": MIXED, "losses": {"attention": 1, "logits": 1, "hidden": 1}},
    {"name": "other", "model": LLAMA, "losses": {"relations": 1}, "teacher": "first"},
    {"name": "twin", "model": LLAMA, "teacher": "first"},
]  # fmt: skip


def make_job(**changes: Any) -> Job:
    raw = {**TINY, "layout": {"ep": 4}, "student": STUDENTS, **changes}
    return parse(Job, fill_preset(raw), "job")


def parts_of(job: Job, ranks: int = 4) -> dict[str, Part]:
    return {part.name: part for part in job_parts(job, plan_from_job(job, ranks))}


def test_parts_stand_behind_their_teachers() -> None:
    parts = parts_of(make_job())
    assert list(parts) == ["model", "first", "last", "other", "twin"]
    assert [part.plan.ep for part in parts.values()] == [4, 4, 1, 1, 1]
    assert parts["last"].teacher == parts["first"].job.model
    assert [part.prefix for part in parts.values()][:2] == ["", "students.first."]
    # The first of two students computes the scores of their teacher's attention.
    assert [name for name, part in parts.items() if part.computes_teacher_scores] == [
        "first",
        "last",
    ]


def test_a_job_without_students_is_one_part() -> None:
    job = teacher_job(make_job())
    (part,) = parts_of(job).values()
    plan = plan_from_job(job, 4)
    assert part.blocks(3) == workload(job, plan, 3)
    assert memory_of_parts([part], 3) == memory(job, plan, 3)
    assert part.checkpoint_bytes(3) == RankParams(job, plan, 3).checkpoint_bytes()


def test_the_work_of_a_student_is_that_of_its_own_job_and_its_losses() -> None:
    job, rank = make_job(), 1
    parts = parts_of(job)
    assert parts["model"].blocks(rank) == workload(teacher_job(job), parts["model"].plan, rank)
    for student in job.student:
        part = parts[student.name]
        assert part.job == student_job(job, student)
        alone = workload(part.job, part.plan, rank)
        *own, auxiliary, last = part.blocks(rank)
        assert last == alone[-1]
        assert own[:-1] == alone[:-2]
        assert (own[-1] == alone[-2]) is (student.name != "other"), "no loss on logits, no logits"
        assert auxiliary.name == "auxiliary"
        assert auxiliary.forward.flops > 0
        assert bool(auxiliary.update.collectives)
    assert [op.name for op in parts["first"].blocks(rank)[-2].forward.ops] == [
        "norm", "auxiliary q", "auxiliary k", "attention", "auxiliary projection",
        "hidden distance", "divergence",
    ]  # fmt: skip
    last, twin = (parts[name].blocks(rank)[-2].forward.flops for name in ("last", "twin"))
    assert 0 < twin < last, "the teacher's scores are computed once"


@pytest.mark.parametrize("name", ["last", "first"])
def test_auxiliary_weights_are_those_of_the_module(name: str) -> None:
    part = parts_of(make_job())[name]
    assert part.teacher is not None
    assert part.student is not None
    module = build_auxiliary(part.student, part.teacher, torch.float32, torch.device("meta"))
    expected = {one.name: tuple(one.parameter.shape) for one in auxiliary_params(module, [0])}
    assert {one.name: one.shape for one in part.auxiliary} == expected
    projection = {"auxiliary.projection.weight": (32, 16)} if name == "first" else {}
    assert projection == {key: expected[key] for key in expected if "projection" in key}


def test_memory_adds_up() -> None:
    job = make_job()
    parts = parts_of(job)
    each = {name: part.memory(2) for name, part in parts.items()}
    total = memory_of_parts(list(parts.values()), 2)
    for kind, num_bytes in total.by_kind().items():
        own = [one.by_kind()[kind] for one in each.values()]
        if kind == "working_bytes":
            assert max(own) <= num_bytes < sum(own)
        else:
            assert num_bytes == sum(own), kind
    part = parts["last"]
    alone, weights = memory(part.job, part.plan, 2), 8 * sum(one.size for one in part.auxiliary)
    assert weights > 0
    assert each["last"].parameters_bytes == alone.parameters_bytes + weights
    assert each["last"].moments_bytes == alone.moments_bytes + 2 * weights
    assert each["last"].gradients_bytes == alone.gradients_bytes + weights
    assert each["last"].staging_bytes == alone.staging_bytes + 3 * weights // 4


def test_each_student_that_teaches_logits_keeps_a_chunk() -> None:
    """Allocations of the head, of chains with two students and with four."""
    vocab, tokens, width = 4000, FOLLOWER_CHUNK_TOKENS, 4
    dense = {**LLAMA, "vocab": vocab}
    predicted, found = list[int](), list[int]()

    def run(number: int) -> None:
        x, weight = torch.randn(tokens, width), torch.randn(vocab, width)
        followers = [
            HeadFollower(x.clone().requires_grad_(), weight, 0.5, 0.5, teacher=index - 1)
            for index in range(number)
        ]
        head_loss(x, weight, torch.zeros(tokens, dtype=torch.int64), 1.0, followers=followers)

    for number in (2, 4):
        chain = [
            {"name": f"s{i}", "model": dense, "teacher": f"s{i - 1}" if i else "model",
             "losses": {"text": 1, "logits": 1}}
            for i in range(number)
        ]  # fmt: skip
        job = make_job(
            model={**TINY["model"], "vocab": vocab}, student=chain, layout={},
            data={"path": "x", "sequence": tokens},
            train={"steps": 4, "batch": 1, "precision": "fp32"},
        )  # fmt: skip
        predicted.append(memory_of_parts(list(parts_of(job, 1).values())).working_bytes)
        found += peak_allocated(partial(run, number))
    assert predicted[1] - predicted[0] == 2 * tokens * vocab * 4
    assert found[1] - found[0] == pytest.approx(predicted[1] - predicted[0], rel=0.1)


def test_each_thread_compares_scores_of_other_rows() -> None:
    """Up to as many threads as there are samples, and only on a CPU."""
    job = make_job(
        layout={}, data={"path": "x", "sequence": 4096},
        train={"steps": 4, "batch": 3, "precision": "fp32"},
    )  # fmt: skip
    part = parts_of(job, 1)["first"]
    on_cpu, on_gpu = (Sizes(part.job, part.plan, 0, on_cpu) for on_cpu in (True, False))
    one, two, many = (part.score_bytes(on_cpu, threads) for threads in (1, 2, 64))
    assert one == 4 * 4 * 64 * 4096 * 4, "tensors, heads, queries, keys and bytes of a number"
    assert (two, many) == (2 * one, 3 * one)
    assert part.score_bytes(on_gpu, 64) == part.score_bytes(on_gpu, 1)
    parts = list(parts_of(job, 1).values())
    assert memory_of_parts(parts, threads=2).working_bytes >= 2 * one


@pytest.mark.parametrize("intervals", [[1], [3], [2, 4], [2, 3], [4, 6, 10], [5, 1], []])
def test_blocks_compute_in_a_share_of_the_steps(intervals: list[int]) -> None:
    """The shares are those of a count of the steps."""
    students = [
        {"name": f"s{n}", "model": LLAMA, "losses": {"text": 1, "hidden": 1}, "interval": n}
        for n in intervals
    ]
    students.append({"name": "text", "model": LLAMA, "losses": {"text": 1}})
    students.append({"name": "far", "model": LLAMA, "teacher": "text"})
    parts = parts_of(make_job(student=students, distill={"frozen": True}))
    steps = range(math.lcm(*intervals))
    used = [any(step % n == 0 for n in intervals) for step in steps]
    share = sum(used) / len(steps)
    assert parts["model"].share_of_steps("layers.0.ffn") == pytest.approx(share)
    assert parts["model"].share_of_steps("step") == 1.0
    for n in intervals:
        assert parts[f"s{n}"].share_of_steps("auxiliary") == 1 / n
        assert parts[f"s{n}"].share_of_steps("head") == 1.0


def test_the_student_with_the_shortest_interval_computes_the_scores() -> None:
    last, twin = ({**one, "teacher": "model"} for one in (STUDENTS[0], STUDENTS[3]))
    parts = parts_of(make_job(student=[last | {"interval": 4}, twin]))
    assert [one.name for one in parts.values() if one.computes_teacher_scores] == ["twin"]


def test_a_frozen_teacher_computes_forward_alone() -> None:
    job = make_job(distill={"frozen": True})
    part = parts_of(job)["model"]
    trained = replace(part, is_frozen=False)
    for own, whole in zip(part.blocks(0), trained.blocks(0), strict=True):
        assert not own.backward.ops
        assert not own.update.ops
        if own.name != "head":
            assert own.forward == whole.forward
        else:
            assert 3 * own.forward.flops == whole.forward.flops
    assert {call.name for call in part.blocks(0)[-1].update.collectives} == {
        "targets", "losses", "expert counts"
    }  # fmt: skip
    needs, whole_needs = part.memory(), trained.memory()
    assert needs.parameters_bytes == whole_needs.parameters_bytes
    assert needs.moments_bytes == needs.gradients_bytes == 0
    assert 0 < needs.activations_bytes < whole_needs.activations_bytes / 4
    assert part.checkpoint_bytes(0) * 3 == pytest.approx(trained.checkpoint_bytes(0), rel=0.01)


@pytest.mark.parametrize(
    ("width", "teacher_width", "max_heads", "heads"),
    [(64, 64, 8, 8), (48, 64, 8, 8), (48, 64, 16, 16), (36, 64, 8, 4), (9, 64, 8, 1)],
)
def test_relation_heads_divide_both_widths(
    width: int, teacher_width: int, max_heads: int, heads: int
) -> None:
    assert relation_heads(width, teacher_width, max_heads) == heads


COMPARED: list[dict[str, Any]] = [
    {"name": "a", "model": LLAMA},
    {"name": "b", "model": MIXED, "losses": {"attention": 1}},
    {"name": "c", "model": LLAMA, "losses": {"relations": 1, "logits": 1, "hidden": 1},
     "auxiliary_layer": False, "teacher": "b"},
    {"name": "d", "model": {**MIXED, "heads": 4, "kv_heads": 4}, "auxiliary_layer": False},
]  # fmt: skip


@pytest.mark.parametrize(("frozen", "window"), [(False, None), (True, 70)])
def test_a_step_has_the_predicted_flops(frozen: bool, window: int | None) -> None:
    """The whole step of a teacher and four students, several blocks of queries long."""
    teacher = {**TINY["model"], "family": "mixtral", "window": window}
    same = {"model": {**COMPARED[3]["model"], "window": window}}
    job = make_job(
        model=teacher, layout={}, student=[*COMPARED[:3], COMPARED[3] | same],
        distill={"frozen": frozen},
        data={"path": "x", "sequence": 150}, train={"steps": 4, "batch": 2, "precision": "fp64"},
        routing={"router": "balanced"} if window is None else {},
    )  # fmt: skip
    run = start_run(job)
    counter = FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS)
    with counter:
        run.step(RandomSamples(61, 150, packed=False))
    run.close()
    predicted = [
        block.forward.flops + block.backward.flops
        for part in parts_of(job, 1).values()
        for block in part.blocks(0)
    ]
    assert sum(predicted) == counter.get_total_flops()
