"""The plan: what it means, what it refuses, how it is held against jobs and machines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import LayoutConfig, ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import (
    Plan,
    Predictions,
    RankPlace,
    basis,
    check,
    check_places,
    idle_ranks,
    idle_words,
    in_words,
    lay_out,
    load_plan,
    measure,
    planned,
    ruled,
    stages,
)
from moesaic.facts.workload.loads import routed
from moesaic.testing.jobs import tiny_job

MODEL = parse(ModelConfig, PRESETS["tiny-olmoe"], "preset")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ep, shard = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ranks = ep * shard * draw(st.integers(1, 3))
    return Plan(ranks=ranks, ep=ep, shard=shard, experts=ep * draw(st.integers(0, 4)))


@given(plans())
def test_every_expert_lives_once_in_a_group(plan: Plan) -> None:
    for group in plan.expert_groups():
        assert [expert for rank in group for expert in plan.homes(rank, 0)] == list(
            range(plan.experts)
        )
    for group in plan.replica_groups():
        assert len({plan.homes(rank, 0) for rank in group}) == 1
    for groups in (plan.expert_groups(), plan.replica_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(plan.ranks))


@given(plans(), st.integers(0, 100))
def test_every_sample_is_held_once_and_in_order(plan: Plan, batch: int) -> None:
    rows = [row for rank in range(plan.ranks) for row in plan.rows(rank, batch)]
    assert rows == list(range(batch))
    sizes = {len(plan.rows(rank, batch)) for rank in range(plan.ranks)}
    assert max(sizes) - min(sizes) <= 1


def test_a_layout_is_resolved() -> None:
    assert lay_out(LayoutConfig(ep=2, shard="all"), MODEL, 4) == Plan(
        ranks=4, ep=2, shard=4, experts=16
    )
    assert lay_out(LayoutConfig(), MODEL, 3) == Plan(ranks=3, ep=1, shard=1, experts=16)


@pytest.mark.parametrize(
    ("layout", "ranks", "sentence"),
    [
        (
            LayoutConfig(ep=4), 2,
            "layout.ep = 4 does not divide the number of ranks (2): "
            "choose a divisor of 2, or start another number of ranks (--nproc)",
        ),
        (
            LayoutConfig(pp=2), 1,
            "layout.pp = 2 does not divide the number of ranks (1): "
            "set it to 1, or start another number of ranks (--nproc)",
        ),
        (
            LayoutConfig(shard=3), 4,
            "layout.shard = 3 does not divide the number of ranks (4): "
            "choose a divisor of 4, or start another number of ranks (--nproc)",
        ),
        (
            LayoutConfig(ep=3), 3,
            "layout.ep = 3 does not divide model.experts = 16: "
            "choose a divisor of the number of experts",
        ),
        (
            LayoutConfig(tp=2, embedding="columns"), 4,
            'layout.embedding = "columns" with layout.tp = 2, whose slices share out the words of '
            'the table already: set layout.embedding to "whole", or layout.tp to 1',
        ),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit(layout: LayoutConfig, ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lay_out(layout, MODEL, ranks)
    assert str(caught.value) == sentence


def test_columns_are_over_the_ranks_of_a_part() -> None:
    layout = LayoutConfig(embedding="columns", pp=2)
    assert lay_out(layout, MODEL, 8).columns == 4
    assert "the embedding's columns over 4, dense" in in_words(lay_out(layout, MODEL, 8))
    for alone in (lay_out(layout, MODEL, 2), lay_out(LayoutConfig(), MODEL, 8)):
        assert (alone.embedding, alone.columns) == ("whole", 1)
        assert "columns" not in in_words(alone)


@pytest.mark.parametrize(
    ("ranks", "tables", "words"),
    [
        (4, {}, None),
        (1, {"model": {"hidden": 31}}, None),
        (3, {}, "columns\" shares out model.hidden = 32 columns over 3 ranks, which do not divide"),
        (
            6, {"layout": {"pp": 2}, "train": {"micro_batches": 2}},
            "columns over 3 ranks of a part of the pipeline, which do not divide them: set ",
        ),
        (2, {"optimizer": {"moments": "bf16"}}, None),
        (
            2, {"optimizer": {"moments": "8bit"}},
            "which has blocks of 128 columns: a rank has 16 columns, set optimizer.moments to",
        ),
        (2, {"optimizer": {"moments": "8bit"}, "model": {"hidden": 256}}, None),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_shared_out(
    ranks: int, tables: dict[str, Any], words: str | None
) -> None:
    """By a job, and by a plan that someone has edited."""
    layout = {**tables.get("layout", {}), "embedding": "columns"}
    job = tiny_job(**{**tables, "layout": layout})
    edited = planned(tiny_job(**tables), ranks).model_copy(update={"embedding": "columns"})
    if words is None:
        assert planned(job, ranks).columns == ranks
        check(edited, job, "--plan 'p.json'")
        return
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        planned(job, ranks)
    assert 'layout.embedding = "columns"' in str(caught.value)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        check(edited, job, "--plan 'p.json'")
    assert str(caught.value).startswith("--plan 'p.json': embedding = \"columns\"")


def test_slices_have_no_columns() -> None:
    with pytest.raises(ValueError, match='embedding = "columns" with tp = 2, whose slices share'):
        Plan(ranks=4, ep=1, shard=1, tp=2, experts=0, embedding="columns")


def test_layers_are_cut_evenly() -> None:
    model = MODEL.model_copy(update={"layers": 5})
    layout = LayoutConfig(pp=2, schedule="interleaved")
    assert stages(lay_out(layout, model, 2), model) == [
        ["embed", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "layers.4", "head"]
    ]  # fmt: skip
    layout = LayoutConfig(pp=2)
    assert [len(names) for names in stages(lay_out(layout, model, 2), model)] == [3, 4]
    assert planned(tiny_job(), 1).stages == [["embed", "layers.0", "layers.1", "head"]]


@pytest.mark.parametrize(
    ("layout", "train", "words"),
    [
        ({"pp": 2}, {"micro_batches": 2}, None),
        ({"pp": 2, "schedule": "gpipe"}, {}, None),
        ({"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 4}, None),
        ({"pp": 3}, {}, "layout.pp = 3 does not divide the number of ranks (4): choose a div"),
        ({"pp": 4}, {"micro_batches": 4}, "into 4 stages, and model.layers = 2: a stage has one"),
        (
            {"pp": 2, "schedule": "interleaved"}, {"micro_batches": 2},
            'layout.schedule = "interleaved" cuts the model into 4 stages, and model.layers = 2',
        ),
        ({"pp": 2}, {}, "train.micro_batches = 1 is fewer than layout.pp = 2, and the parts of"),
        (
            {"pp": 2}, {"batch": 9},
            'parts of schedule "1f1b" work on as many at a time: raise it to 3, or set layout.sche',
        ),
        (
            {"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 5, "batch": 10},
            'train.micro_batches = 5 with layout.schedule = "zero-bubble", which takes them in '
            "5 // 2 = 2 equal rounds (layout.pp = 2), and 2 does not divide 5: choose 2 or 10",
        ),
        ({"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 3, "batch": 9}, None),
        (
            {"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 2, "recompute": True},
            'train.recompute = true with layout.schedule = "zero-bubble", whose backward comes in',
        ),
    ],
)  # fmt: skip
def test_a_pipeline_that_a_job_cannot_have(
    layout: dict[str, Any], train: dict[str, Any], words: str | None
) -> None:
    job = tiny_job(layout=layout, train=train)
    if words is None:
        plan = planned(job, 4)
        check(plan, job, "plan")
        assert ruled(tiny_job(train=train), plan) == ruled(job, plan)
        assert ruled(job, plan).layout == job.layout.model_copy(update={"dispatch": "rows"})
        return
    with pytest.raises(ConfigError) as caught:
        planned(job, 4)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "train", "ranks", "words"),
    [
        ({}, {"batch": 4, "micro_batches": 1}, 4, None),
        ({}, {"batch": 8, "micro_batches": 2}, 3, None),
        ({"tp": 2}, {"batch": 4, "micro_batches": 2}, 4, None),
        (
            {}, {"batch": 4, "micro_batches": 4}, 4,
            "3 of 4 ranks have no sample in a micro-batch (train.batch = 4, train.micro_batches = "
            "4): lower train.micro_batches to 1, or raise train.batch to 16",
        ),
        ({}, {"batch": 8}, 16, "8 of 16 ranks have no sample in a micro-batch (train.batch = 8, "
         "train.micro_batches = 1): take fewer ranks, or raise train.batch to 16"),
        ({"tp": 2, "ep": 2, "etp": 2}, {"batch": 8, "micro_batches": 8}, 4,
         "2 of 4 ranks have no sample in a micro-batch (train.batch = 8, train.micro_batches = 8): "
         "lower train.micro_batches to 4, or raise train.batch to 16"),
        ({"pp": 2}, {"batch": 8, "micro_batches": 8}, 4, "2 of 4 ranks have no sample in a "
         "micro-batch (train.batch = 8, train.micro_batches = 8): lower train.micro_batches to 4"),
        ({"pp": 2}, {"batch": 2, "micro_batches": 2}, 4, "2 of 4 ranks have no sample in a "
         "micro-batch (train.batch = 2, train.micro_batches = 2): take fewer ranks, or raise "),
        ({}, {"batch": 2}, 3, "1 of 3 ranks has no sample in a micro-batch (train.batch = 2, "),
    ],
)  # fmt: skip
def test_ranks_without_a_sample_are_told_with_what_gives_them_some(
    layout: dict[str, Any], train: dict[str, Any], ranks: int, words: str | None
) -> None:
    job = tiny_job(layout=layout, train=train, model={"vocab": 64})
    plan = planned(job, ranks)
    size = job.train.batch // job.train.micro_batches
    idle = [rank for rank in range(ranks) if len(plan.rows(rank, size)) == 0]
    assert idle_ranks(plan, job) == len(idle)
    said = idle_words(plan, job)
    assert (said is None) == (words is None) == (not idle)
    if said is None or words is None:
        return
    assert said.startswith(words)
    for key, value in re.findall(r"train\.(\w+) to (\d+)", said):
        job = tiny_job(layout=layout, train={**train, key: int(value)}, model={"vocab": 64})
        assert idle_words(planned(job, ranks), job) is None


def test_no_more_ranks_than_a_plan_can_be_for() -> None:
    with pytest.raises(ConfigError, match="a plan has 1048576 ranks at most, not 4294967296: ask"):
        lay_out(LayoutConfig(), MODEL, 1 << 32)


RAW: dict[str, Any] = {"ranks": 4, "ep": 2, "shard": 1, "experts": 4}
PLACE = {"host": "a", "device": "A CPU", "kind": "cpu"}
PREDICTIONS: dict[str, Any] = {
    "cluster": "c", "step_s": 2.0, "phases_s": {"forward": 2.0}, "blocks_s": {"step": 2.0},
    "tokens_per_s": 50.0, "memory_bytes": {"peak": 1 << 30},
}  # fmt: skip
SPAN = {"phase": "forward", "block": "layers.0.attention to layers.99.attention"}


def told(*ranks: dict[str, Any], **change: Any) -> dict[str, Any]:
    """A change of a plan: predictions with a timeline, one entry for each of `ranks`."""
    spans = [{**SPAN, "computing_s": 1.5, "messages_s": 0.25, "waiting_s": 0.25}] * 2
    entries = [{"rank": 1, "spans": spans, **one} for one in ranks or (change,)]
    return {"predictions": {**PREDICTIONS, "timeline": entries}}


def below_zero(key: str, name: str) -> dict[str, Any]:
    """A change of a plan: a prediction that cannot be."""
    return {"predictions": {**PREDICTIONS, key: {name: -1}}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ep": 3}, "ep = 3 does not divide ranks = 4: choose a divisor"),
        ({"shard": 8}, "shard = 8 does not divide ranks = 4: choose a divisor"),
        ({"etp": 2}, "etp = 2 does not divide tp = 1, and slices of experts are slices of all"),
        ({"ep": 4, "tp": 2, "etp": 2}, "ep * etp = 8 does not divide ranks = 4: choose a divisor"),
        ({"experts": 5}, "ep = 2 does not divide experts = 5: choose a divisor"),
        ({"homes": [[0, 1]]}, "homes has 1 lists for ep = 2: give each of the ranks"),
        ({"homes": [[0, 1], [1, 2]]}, "homes names expert 1 twice, in homes[0] and in homes[1]"),
        ({"homes": [[0, 0], [1, 2]]}, "homes names expert 0 twice, in homes[0] and again there"),
        ({"homes": [[0, 1], [3]]}, "homes lacks expert 2, and experts = 4: give every expert a"),
        ({"experts": 6, "homes": [[0, 1], [2, 3]]}, "homes lacks expert 4 and 1 more, and experts"),
        ({"homes": [[0, 1], [2, 4]]}, "homes[1] names expert 4, and experts = 4"),
        ({"homes": [[0], [1, 2, 3]]}, "homes[0] has 1 experts where each rank has 2"),
        ({"experts": 0, "homes": [[0], []]}, "homes[0] names expert 0, and experts = 0: empty"),
        ({"homes": [["0"], [1]]}, 'homes[0][0] = "0" is a string: give an integer'),
        (
            {"predictions": {**PREDICTIONS, "memory_bytes": {"peak": 1.5}}},
            "predictions.memory_bytes.peak = 1.5 is a number with a fraction: give an integer",
        ),
        (
            {"predictions": {**PREDICTIONS, "phases_s": {"": 1.0}}},
            'predictions.phases_s."" = "" is empty: give a number',
        ),
        (
            {"homes_of_layers": {"1": [[0, 1], [1, 2]]}},
            "homes_of_layers.1 names expert 1 twice, in homes_of_layers.1[0] and in",
        ),
        ({"homes_of_layers": {"1": [[0, 1]]}}, "homes_of_layers.1 has 1 lists for ep = 2: give"),
        ({"homes_of_layers": {"1": [[0, 1], [3]]}}, "homes_of_layers.1 lacks expert 2, and exp"),
        ({"homes_of_layers": {"1": [[0], [1, 2, 3]]}}, "homes_of_layers.1[0] has 1 experts where"),
        (
            {"homes_of_layers": {"one": [[0, 1], [2, 3]]}},
            'homes_of_layers has the key "one" where its keys are numbers of layers, such as "3"',
        ),
        ({"homes_of_layers": {"01": [[0, 1], [2, 3]]}}, 'homes_of_layers has the key "01" where'),
        ({"homes_of_layers": {"1": [["0"], [1]]}}, 'homes_of_layers.1[0][0] = "0" is a string'),
        ({"homes_of_layers": [[0]]}, "homes_of_layers = [[0]] is a list: give a table"),
        ({"homes": 3}, "homes = 3 is an integer: give a list of lists of integers"),
        ({"pp": 2, "stages": [["embed", "head"]]}, "stages lists 1 stages where pp = 2 and"),
        ({"stages": [["embed"], ["head"]]}, "stages lists 2 stages where pp = 1: spread the names"),
        ({"tiers": {"moments": "ssd"}}, 'tiers.moments = "ssd" is not known: give "device"'),
        ({"mode": "async"}, 'mode = "async" is not known: give "synchronous"'),
        ({"places": [PLACE] * 3}, "places has 3 entries for ranks = 4: give every rank one"),
        ({"places": [PLACE, {}]}, "places[1].host is missing"),
        ({"copies": [[], [0]]}, "copies[1] names expert 0, and a plan sends no expert to where"),
        ({"copy": {}}, "unknown key 'copy'"),
        ({"rank": 2}, "unknown key 'rank': did you mean 'ranks'?"),
        (
            {"homes_by_rank": [[0, 1], [2, 3]]},
            "unknown key 'homes_by_rank': the keys at the top are ranks,",
        ),
        ({"ranks": 1 << 60}, "ranks = 1152921504606846976 is out of range: give an integer from 1"),
        ({"experts": 10**11}, "experts = 100000000000 is out of range: give an integer from 0"),
        ({"ranks": 10**9, "ep": 10**9, "experts": 0}, "ranks = 1000000000 is out of range"),
        (below_zero("phases_s", "forward"), "predictions.phases_s.forward = -1.0 is below 0: plan"),
        (below_zero("blocks_s", "step"), "predictions.blocks_s.step = -1.0 is below 0: plan"),
        (below_zero("memory_bytes", "peak"), "predictions.memory_bytes.peak = -1 is below 0: plan"),
        (told(rank=4), "predictions.timeline[0].rank = 4, and ranks = 4: predictions are of an"),
        (told({}, {}), "predictions.timeline has rank 1 twice: remove one of the two"),
        (
            told(rank=-1),
            "predictions.timeline[0].rank = -1 is out of range: give an integer from 0",
        ),
        (told(spans=[]), "predictions.timeline[0].spans = [] is "),
        (
            told(spans=[{"phase": "forward", "block": "head", "waiting_s": -1.0}]),
            "predictions.timeline[0].spans[0].waiting_s = -1.0 is out of range: give a number from",
        ),
        (
            told(spans=[{"phase": "forward", "block": "head", "message_s": 1.0}]),
            "unknown key 'predictions.timeline[0].spans[0].message_s': did you mean",
        ),
    ],
)
def test_an_impossible_edit(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    place.write_text(json.dumps({**RAW, **change}))
    with pytest.raises(ConfigError) as caught:
        load_plan(place)
    assert str(caught.value).startswith(f"--plan '{place}': {sentence}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not readable JSON"), ("[]", "holds no JSON object")]
)
def test_no_plan_at_all(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_plan(tmp_path / "plan.json")


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """JSON has the last one count, which is not what whoever edits the first would think."""
    place = tmp_path / "plan.json"
    place.write_text('{"ranks": 4, "ep": 2, "shard": 1, "ep": 4, "experts": 4}')
    with pytest.raises(ConfigError, match="has the key 'ep' twice in one object: remove one"):
        load_plan(place)


def test_a_mark_before_its_text_is_passed_over(tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    place.write_text(json.dumps(RAW), encoding="utf-8-sig")
    assert load_plan(place) == Plan.model_validate(RAW)


def test_it_is_written_and_read_back(tmp_path: Path) -> None:
    predictions = Predictions.model_validate(told({})["predictions"])
    plan = planned(tiny_job(layout={"ep": 2}), 4).model_copy(
        update={"places": [RankPlace.model_validate(PLACE)] * 4, "predictions": predictions}
    )
    text = plan.to_json()
    assert '  "homes": [[0, 1, 2, 3], [4, 5, 6, 7]],\n' in text
    (tmp_path / "plan.json").write_text(text)
    assert load_plan(tmp_path / "plan.json") == plan
    span = json.dumps({**SPAN, "computing_s": 1.5, "messages_s": 0.25, "waiting_s": 0.25})
    assert text.count(f"          {span}") == 2  # On one line, though it is a long one.
    assert Predictions.model_validate(PREDICTIONS).timeline == []
    assert "predictions" not in plan.decisions()


def test_homes_are_where_the_plan_says() -> None:
    plan = Plan.model_validate({**RAW, "homes": [[3, 0], [2, 1]]})
    assert [plan.homes(rank, 0) for rank in range(4)] == [(3, 0), (2, 1), (3, 0), (2, 1)]
    assert plan.slots(0) == [3, 0, 2, 1]
    layers = {"2": [[0, 1], [2, 3]], "10": [[0, 3], [1, 2]]}
    plan = Plan.model_validate({**RAW, "homes": [[3, 0], [2, 1]], "homes_of_layers": layers})
    assert [plan.slots(layer) for layer in (0, 2, 10)] == [[3, 0, 2, 1], [0, 1, 2, 3], [0, 3, 1, 2]]
    assert [plan.homes(rank, 10) for rank in range(3)] == [(0, 3), (1, 2), (0, 3)]
    moved = plan.with_slots({10: [3, 0, 2, 1], 3: [0, 2, 3, 1]})
    assert moved.homes_of_layers == {"2": layers["2"], "3": [[0, 2], [3, 1]]}
    assert Plan.model_validate_json(moved.to_json()) == moved
    bare = {name: value for name, value in RAW.items() if name != "homes"}
    assert Plan.model_validate({**bare, "homes": []}) == Plan.model_validate(bare)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"micro_batches": 1, "stages": [["embed", "layers.0", "layers.1", "head"]]}, None),
        ({"experts": 16}, "experts = 16, but model.experts = 8: plan this job anew"),
        ({"micro_batches": 2}, "micro_batches = 2, but train.micro_batches = 1, and the numbers"),
        ({"stages": [["embed"]]}, "no stage lists block 'layers.0': add it to stages[0]"),
        ({"stages": [["embed", "layers.9"]]}, "stages[0] lists block 'layers.9', which the model"),
        (
            {"stages": [["embed", "embed"]]},
            "stages lists block 'embed' twice: once is enough",
        ),
        (
            {"stages": [["embed", "layers.1", "layers.0", "head"]]},
            "stages[0] has block 'layers.1' in another place than the model: keep the order",
        ),
        (
            {"tp": 2},
            "tp = 2 does not divide model.vocab = 61, which the slices share out: choose a",
        ),
        (
            {"pp": 2, "stages": [["embed", "layers.0"], ["layers.1", "head"]]},
            "train.micro_batches = 1 is fewer than pp = 2, and the parts of",
        ),
        (
            {"pp": 2, "schedule": "zero-bubble", "recompute": True, "micro_batches": None},
            'recompute = true with schedule = "zero-bubble"',
        ),
        (
            {"pp": 2, "schedule": "gpipe", "stages": [["embed", "layers.0"], ["layers.1"]]},
            "no stage lists block 'head': add it to stages[1]",
        ),
        (
            {"pp": 2, "stages": [["embed", "layers.0", "layers.1", "head"], []]},
            "stages[1] is empty: give it a block, or lower pp",
        ),
        (
            {"pp": 2, "stages": [["embed", "layers.1"], ["layers.0", "head"]]},
            "stages[0] has block 'layers.1' in another place than the model: keep the order",
        ),
    ],
)
def test_it_is_held_against_the_job(change: dict[str, Any], sentence: str | None) -> None:
    plan = Plan.model_validate({**RAW, "experts": 8, **change})
    if sentence is None:
        check(plan, tiny_job(), "plan")
        return
    with pytest.raises(ConfigError) as caught:
        check(plan, tiny_job(), "plan")
    assert str(caught.value).startswith(f"plan: {sentence}")


def test_a_dense_model_has_no_experts_to_share_out() -> None:
    dense = tiny_job(model={"family": "llama", "experts": 0, "top_k": 0}, routing={})
    plan = Plan.model_validate({"ranks": 2, "ep": 2, "shard": 1, "experts": 0})
    with pytest.raises(ConfigError, match=r"plan: ep = 2 with a dense model \(experts = 0\)"):
        check(plan, dense, "plan")


def test_slices_are_held_against_all_that_they_would_cut() -> None:
    """A plan may have slices where the job has none, and cannot have any."""
    plan = Plan.model_validate({"ranks": 2, "ep": 1, "shard": 1, "tp": 2, "experts": 8})
    narrow = {"moments": "8bit"}
    words = 'plan: tp = 2 with optimizer.moments = "8bit", which has blocks'
    with pytest.raises(ConfigError, match=f"^{words}"):
        check(plan, tiny_job(model={"vocab": 60}, optimizer=narrow), "plan")
    check(plan, tiny_job(model={"vocab": 60, "head_dim": 64}, optimizer=narrow), "plan")


def test_slices_of_experts_are_places_of_their_own() -> None:
    plan = Plan(ranks=8, ep=2, shard=1, tp=2, etp=2, experts=4)
    assert plan.expert_slice_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.expert_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert plan.same_expert_slice_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert plan.replica_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [plan.homes(rank, 0) for rank in range(5)] == [(0, 1), (0, 1), (2, 3), (2, 3), (0, 1)]
    with pytest.raises(ConfigError, match=r"^plan: etp = 2 does not divide model\.ffn = 15, which"):
        check(plan, tiny_job(model={"vocab": 60, "experts": 4, "ffn": 15}), "plan")


def test_work_follows_the_homes() -> None:
    plan = Plan.model_validate({**RAW, "ranks": 2, "homes": [[3, 0], [2, 1]]})
    job, load = tiny_job(model={"experts": 4, "layers": 1}), [[1, 2, 3, 4], [10, 20, 30, 40]]
    (one,), (other,) = (routed(job, plan, rank, [load]) for rank in (0, 1))
    assert (one.slots, other.slots) == ([44, 11], [33, 22])
    assert one.trips == (((0, 1), [5, 5], [5, 50], 10),)
    assert other.trips == (((0, 1), [50, 50], [5, 50], 100),)


def test_it_overrules_the_job() -> None:
    job = tiny_job(layout={"dispatch": "rows"})
    assert ruled(job, planned(job, 4)) == job
    plan = Plan.model_validate({**RAW, "experts": 8, "recompute": True})
    layout = {"ep": 2, "dispatch": "rows"}
    assert ruled(job, plan) == tiny_job(layout=layout, train={"recompute": True})
    assert ruled(tiny_job(), plan) == ruled(job, plan)
    every = tiny_job(layout={"shard": "all", "dispatch": "visits", "hosts": 1})
    assert ruled(every, planned(every, 4)) == every


def places(*hosts: str, device: str = "A CPU", kind: str = "cpu") -> list[RankPlace]:
    return [
        RankPlace.model_validate({"host": host, "device": device, "kind": kind}) for host in hosts
    ]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (places("x", "x", "y", "y"), None),
        (places("x", "x", "y", "y", device="a  cpu"), None),
        (
            places("x", "x", "y", "y", device="B"),
            "rank 0 is planned for a 'A CPU', but it has 'B': start the ranks",
        ),
        (
            [*places("x", "x", "y"), *places("y", kind="gpu")],
            "rank 3 is planned for a device of kind 'cpu', but it has 'gpu'",
        ),
        (
            places("x", "y", "y", "y"),
            "rank 1 is planned for rank 0's host, but it runs on another host",
        ),
        (
            places("x", "x", "x", "y"),
            "rank 2 is planned for a host of its own, but it runs on rank 0's host",
        ),
    ],
)
def test_it_is_held_against_machines(found: list[RankPlace], sentence: str | None) -> None:
    plan = Plan.model_validate({**RAW, "places": places("a", "a", "b", "b")})
    check_places(Plan.model_validate(RAW), found, "plan")
    if sentence is None:
        check_places(plan, found, "plan")
        return
    with pytest.raises(ConfigError) as caught:
        check_places(plan, found, "plan")
    assert str(caught.value).startswith(f"plan: {sentence}")


def test_the_first_steps_are_not_measured() -> None:
    found = measure(100, [9, 9, 9, 4, 5, 6], {"data": [1, 1, 1, 2, 2, 2]}, 7.0, "resident")
    assert found is not None
    assert (found.steps, found.step_s, found.phases_s) == (3, 5.0, {"data": 2.0})
    assert found.tokens_per_s == 20.0
    alone = measure(100, [9.0], {}, None, "resident")
    assert alone is not None
    assert alone.step_s == 9.0
    assert measure(100, [], {}, None, "resident") is None


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"hidden": 64}}, {"train": {"batch": 16}}, {"train": {"precision": "fp32"}},
        {"train": {"clip": 0.0}}, {"data": {"sequence": 16}}, {"data": {"packing": "stream"}},
        {"layout": {"ep": 2}}, {"train": {"recompute": True}}, {"optimizer": {"moments": "8bit"}},
        {"finetune": {"method": "lora"}},
    ],
)  # fmt: skip
def test_predictions_know_what_they_are_of(change: dict[str, Any]) -> None:
    job, other = tiny_job(), tiny_job(**change)
    plan = planned(job, 2)
    assert basis(job, plan) != basis(other, planned(other, 2))
    later = tiny_job(train={"steps": 20}, optimizer={"lr": 1.0}, model={"max_positions": 8192})
    assert basis(later, planned(later, 2)) == basis(job, plan)


def test_predictions_are_of_a_plan_before_it_was_edited() -> None:
    job, plan = tiny_job(layout={"ep": 2}), planned(tiny_job(layout={"ep": 2}), 2)
    swapped = plan.model_copy(update={"homes_by_rank": [[7, 1, 2, 3], [4, 5, 6, 0]]})
    again = plan.with_slots({1: [7, 1, 2, 3, 4, 5, 6, 0]})
    there = plan.model_copy(update={"places": [RankPlace.model_validate(PLACE)] * 2})
    assert len({basis(job, one) for one in (plan, swapped, again)}) == 3
    assert basis(job, there) == basis(job, plan)


def test_homes_are_of_layers_that_have_experts() -> None:
    latent = {"width": 10, "queries": 12, "rotary": 4, "value": 6}
    model = {
        "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "dense_ffn": 40,
        "shared": 1, "groups": 4, "top_groups": 2, "scale": 2.5, "latent": latent,
    }  # fmt: skip
    job, homes = tiny_job(model=model, layout={"ep": 2}), [[1, 3, 5, 7], [0, 2, 4, 6]]
    plan = planned(job, 2)
    check(plan.model_copy(update={"homes_of_layers": {"2": homes}}), job, "plan")
    said = r"^plan: homes_of_layers has layer 0, and layers with experts are 1 to 2: remove it"
    with pytest.raises(ConfigError, match=said):
        check(plan.model_copy(update={"homes_of_layers": {"0": homes}}), job, "plan")


def test_a_plan_that_says_nothing_of_local_tokens_keeps_its_digest() -> None:
    job = tiny_job(layout={"ep": 2})
    assert basis(job, planned(job, 2)) == "5cbbc346dce2e11e"
    first = tiny_job(layout={"ep": 2, "local": "first"})
    assert basis(first, planned(first, 2)) != basis(job, planned(job, 2))


def test_where_no_token_travels_nothing_said_of_it_matters() -> None:
    """It is told, as `Job.idle` tests."""
    plain = planned(tiny_job(), 2)
    for said in ({"chunks": 4}, {"local": "first"}, {"local": "along"}, {"hosts": 1}):
        assert planned(tiny_job(layout=said), 2) == plain
    assert planned(tiny_job(layout={"ep": 2, "hosts": 1}), 2).hosts == 1
