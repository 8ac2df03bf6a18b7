from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job, student_job, students_in_order, teacher_job
from moesaic.facts.job.distill import StudentLosses
from moesaic.facts.job.job import fill_preset
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import plan_from_job, prediction_digest, student_plan

JOB = """
[model]
preset = "tiny-olmoe"
vocab = 400

[layout]
ep = 4

[data]
path = "text.txt"
sequence = 64

[train]
steps = 10
batch = 8

[[student]]
name = "small"
model = { preset = "tiny-dense", heads = 2 }
teacher = "assistant"

[[student]]
name = "assistant"
model = { preset = "tiny-mixtral", experts = 6 }
losses = { logits = 1.0 }
"""
SMALL, ASSISTANT = 0, 1


def job(*sets: str, **changes: dict[int, dict[str, Any]]) -> Job:
    """Return the job with keys of its students changed, by their index."""
    raw = apply_sets(tomllib.loads(JOB), sets)
    for index, own in changes.get("students", {}).items():
        raw["student"][index] = {**raw["student"][index], **own}
    return parse(Job, fill_preset(raw), "job.toml")


def test_defaults_of_a_student() -> None:
    small, assistant = job().student
    assert small.model.vocab == assistant.model.vocab == 400
    assert small.model.hidden == PRESETS["tiny-dense"]["hidden"]
    assert small.losses == StudentLosses(text=1.0, attention=1.0)
    assert small.auxiliary_layer
    assert assistant.losses == StudentLosses(logits=1.0)
    assert not assistant.auxiliary_layer
    assert job(students={SMALL: {"losses": {"relations": 1}}}).student[SMALL].auxiliary_layer
    assert job(students={SMALL: {"model": PRESETS["tiny-dense"] | {"vocab": 400}}}).student
    assert not job().distill.frozen


def test_a_job_with_students_round_trips_through_json_and_toml() -> None:
    made = job("distill.frozen=true")
    assert parse(Job, json.loads(made.to_json()), "job.json") == made
    assert parse(Job, tomllib.loads(made.to_toml()), "job.toml") == made


def test_students_stand_after_their_teachers() -> None:
    made = job()
    assert [one.name for one in students_in_order(made.student)] == ["assistant", "small"]
    assert made.model_of("small") == made.student[SMALL].model
    assert made.model_of("model") == made.model


TINY = PRESETS["tiny-dense"]
LATENT = "compare queries and keys, and its {} has latent attention"
WRONG: list[tuple[list[str], dict[int, Any], str]] = [
    (["distill.frozen=true", "student=[]"], {}, "distill.frozen = true without [[student]] trains"),
    (["memory={host='1GB', ssd='ssd'}"], {}, "[memory] does not work with [[student]]: "),
    (["finetune={}"], {}, "[finetune] does not work with [[student]]"),
    (["train.micro_batch_order=by_block"], {}, '"by_block" does not work with [[student]]'),
    (["train.precision=fp16"], {}, 'train.precision = "fp16" does not work with [[student]]'),
    (["data.sequence=80", "model.max_positions=80"], {SMALL: {"model": TINY | {"max_positions": 64,
      "vocab": 400}}},
     'student "small": data.sequence = 80 is longer than model.max_positions = 64'),
    ([], {SMALL: {"name": "assistant"}}, 'student.name = "assistant" stands twice'),
    ([], {SMALL: {"name": "model"}}, 'student[0].name: "model" cannot name a student: give'),
    ([], {SMALL: {"name": "a.b"}}, 'student[0].name: "a.b" cannot name a student: give'),
    ([], {SMALL: {"teacher": "asistant"}},
     'student "small": teacher = "asistant" is not known: did you mean "assistant" (it takes '),
    ([], {ASSISTANT: {"teacher": "small"}},
     'students learn in a ring ("small" from "assistant", "assistant" from "small"), so none of '
     'them learns from the model: set teacher = "model" in [[student]] "small", or'),
    ([], {SMALL: {"teacher": "small"}}, 'students learn in a ring ("small" from "small")'),
    (["student.lr=1"], {}, "student.lr=1: 'student' is a list of tables: name one, as in student."),
    ([], {SMALL: {"model": TINY}},
     'student "small": model.vocab = 320, and its teacher has 400: both read the same tokens'),
    ([], {SMALL: {"auxiliary_layer": False}},
     'student "small": model.heads = 2, and its teacher has 4, but losses.attention compares head '
     "by head: set auxiliary_layer = true, or make model.heads equal"),
    ([], {ASSISTANT: {"model": {"preset": "tiny-mixtral", "window": 32}, "losses": {"relations": 1},
      "auxiliary_layer": False}},
     'student "assistant": model.window = 32 and that of its teacher is unset, but '
     "losses.relations compares the last layers over the same tokens: make both windows equal, "
     "or set "
     "auxiliary_layer = true"),
    ([], {SMALL: {"model": PRESETS["tiny-deepseek"] | {"vocab": 400}}}, LATENT.format("model")),
    ([], {ASSISTANT: {"model": PRESETS["tiny-deepseek"] | {"vocab": 400}}},
     LATENT.format("teacher")),
    ([], {SMALL: {"losses": {"text": 0}}}, "student[0].losses: all weights are 0: give one"),
    ([], {SMALL: {"losses": {"text": -1}}}, "student[0].losses.text = -1: give a number from 0"),
    ([], {SMALL: {"losses": {"logit": 1}}}, "unknown key 'student[0].losses.logit': did you mean"),
    ([], {SMALL: {"losses": {"logits": 1}, "auxiliary_layer": True}},
     "student[0]: auxiliary_layer = true without losses.attention and losses.relations learns"),
    ([], {SMALL: {"losses": {"logits": 1}, "interval": 2}},
     "student[0]: interval = 2 with losses.text = 0 leaves steps without a loss"),
    ([], {ASSISTANT: {"model": {"preset": "tiny-mixtral", "top_k": 1}}},
     'student "assistant": model.renormalise = true with model.top_k = 1'),
    ([], {ASSISTANT: {"model": {"preset": "tiny-mixtrel"}}},
     'student[1].model.preset = "tiny-mixtrel" is not known: did you mean "tiny-mixtral"'),
    (["routing.router=switch", "model.top_k=1"], {},
     'student "assistant": routing.router = "switch" chooses 1 of the experts'),
    ([], {SMALL: {"divergence": "backward"}},
     'student[0].divergence = "backward" is not known: give "forward", "reverse" or "jensen"'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sets", "students", "sentence"), WRONG, ids=[case[2][:30] for case in WRONG]
)
def test_impossible_student_is_reported_in_one_sentence(
    sets: list[str], students: dict[int, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*sets, students=students)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["tp", "etp", "pp"])
def test_a_split_of_the_layers_is_refused(key: str) -> None:
    made = job("layout.ep=1", f"layout.{key}=2", *["layout.tp=2"] * (key == "etp"))
    with pytest.raises(ConfigError, match=r"layout\.e?[tp]p = 2 with \[\[student\]\]: students"):
        plan_from_job(made, 2)


def test_latent_attention_can_teach_by_logits() -> None:
    deepseek = PRESETS["tiny-deepseek"] | {"vocab": 400}
    assert job(students={ASSISTANT: {"model": deepseek}, SMALL: {"losses": {"hidden": 1}}}).student


@pytest.mark.parametrize(
    "changes",
    [{"auxiliary_layer": True}, {"model": {"preset": "tiny-mixtral", "window": 64}},
     {"losses": {"logits": 1}}],
)  # fmt: skip
def test_windows_may_differ_if_no_loss_sees_it(changes: dict[str, Any]) -> None:
    """A window of a whole sample hides nothing."""
    own = {"model": {"preset": "tiny-mixtral", "window": 32}, "auxiliary_layer": False,
           "losses": {"attention": 1}}  # fmt: skip
    assert job(students={ASSISTANT: {**own, **changes}}).student


def test_settings_without_effect_are_reported() -> None:
    found = job(students={SMALL: {"temperature": 2.0}, ASSISTANT: {"temperature": 2.0}})
    assert "student.small.temperature has no effect: losses.logits is 0" in (
        found.ineffective_settings()
    )
    assert not any("assistant" in text for text in found.ineffective_settings())
    explicit = job(students={SMALL: {"auxiliary_layer": False, "losses": {"hidden": 1}}})
    assert explicit.student[SMALL].non_default_fields >= {"model", "losses"}
    assert "auxiliary_layer" not in explicit.student[SMALL].non_default_fields
    assert not any("small" in text for text in explicit.ineffective_settings())


def test_the_job_of_a_student_alone() -> None:
    """Its experts are split over a divisor of the teacher's ranks; its own keys win."""
    made = job(
        "routing.record=routes", "layout.dp_shard=2", "layout.dispatch=dedup",
        "layout.dispatch_hosts=4", students={SMALL: {"lr": 0.5}},
    )  # fmt: skip
    small, assistant = (student_job(made, one) for one in made.student)
    assert (small.layout.ep, assistant.layout.ep) == (1, 2)
    assert (assistant.layout.dispatch, assistant.layout.dispatch_hosts) == ("dedup", None)
    assert small.layout.dp_shard == assistant.layout.dp_shard == 1
    assert (small.optimizer.lr, assistant.optimizer.lr) == (0.5, made.optimizer.lr)
    for alone, student in zip((small, assistant), made.student, strict=True):
        assert alone.model == student.model
        assert not alone.student
        assert alone.routing.record is None
        assert (alone.data, alone.train, alone.seed) == (made.data, made.train, made.seed)
    assert teacher_job(made).student == []
    assert teacher_job(made).routing.record == "routes"


def test_the_plan_of_a_student_has_the_ranks_of_the_teacher() -> None:
    made = job()
    plan = plan_from_job(made, 8)
    alone, own = student_plan(plan, made, made.student[ASSISTANT])
    assert (own.ranks, own.ep, own.experts, own.dp_shard) == (8, 2, 6, 1)
    assert alone.model.experts == 6


def test_predictions_are_for_these_students() -> None:
    made, other = job(), job(students={ASSISTANT: {"losses": {"hidden": 1.0}}})
    plan = plan_from_job(made, 4)
    digests = {prediction_digest(one, plan) for one in (made, other, teacher_job(made))}
    assert len(digests) == 3
