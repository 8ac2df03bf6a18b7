"""Plans: their meaning, their checks, and comparison with jobs and machines."""

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
    check_places,
    check_plan,
    describe_plan,
    idle_ranks,
    idle_ranks_warning,
    job_under_plan,
    load_plan,
    measure,
    plan_from_job,
    plan_from_layout,
    prediction_digest,
    stage_blocks,
)
from moesaic.facts.workload.loads import routed_by_layer
from moesaic.testing.jobs import tiny_job

MODEL = parse(ModelConfig, PRESETS["tiny-olmoe"], "preset")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ep, shard = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ranks = ep * shard * draw(st.integers(1, 3))
    return Plan(ranks=ranks, ep=ep, dp_shard=shard, experts=ep * draw(st.integers(0, 4)))


@given(plans())
def test_ep_group_has_every_expert_once(plan: Plan) -> None:
    for group in plan.ep_groups():
        assert [expert for rank in group for expert in plan.experts_of(rank, 0)] == list(
            range(plan.experts)
        )
    for group in plan.expert_dp_groups():
        assert len({plan.experts_of(rank, 0) for rank in group}) == 1
    for groups in (plan.ep_groups(), plan.expert_dp_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(plan.ranks))


@given(plans(), st.integers(0, 100))
def test_samples_are_split_in_order(plan: Plan, batch: int) -> None:
    rows = [row for rank in range(plan.ranks) for row in plan.sample_range(rank, batch)]
    assert rows == list(range(batch))
    sizes = {len(plan.sample_range(rank, batch)) for rank in range(plan.ranks)}
    assert max(sizes) - min(sizes) <= 1


def test_layout_is_resolved() -> None:
    assert plan_from_layout(LayoutConfig(ep=2, dp_shard="all"), MODEL, 4) == Plan(
        ranks=4, ep=2, dp_shard=4, experts=16
    )
    assert plan_from_layout(LayoutConfig(), MODEL, 3) == Plan(ranks=3, ep=1, dp_shard=1, experts=16)


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
            LayoutConfig(dp_shard=3), 4,
            "layout.dp_shard = 3 does not divide the number of ranks (4): "
            "choose a divisor of 4, or start another number of ranks (--nproc)",
        ),
        (
            LayoutConfig(ep=3), 3,
            "layout.ep = 3 does not divide model.experts = 16: "
            "choose a divisor of the number of experts",
        ),
        (
            LayoutConfig(tp=2, embedding="columns"), 4,
            'layout.embedding = "columns" with layout.tp = 2, which already shards the '
            'vocabulary: set layout.embedding to "whole", or layout.tp to 1',
        ),
    ],
)  # fmt: skip
def test_impossible_layout_is_rejected(layout: LayoutConfig, ranks: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_layout(layout, MODEL, ranks)
    assert str(caught.value) == sentence


def test_embedding_columns_are_sharded_over_stage_ranks() -> None:
    layout = LayoutConfig(embedding="columns", pp=2)
    assert plan_from_layout(layout, MODEL, 8).embedding_shards == 4
    assert "embedding columns over 4, dense" in describe_plan(plan_from_layout(layout, MODEL, 8))
    for alone in (plan_from_layout(layout, MODEL, 2), plan_from_layout(LayoutConfig(), MODEL, 8)):
        assert (alone.embedding, alone.embedding_shards) == ("whole", 1)
        assert "columns" not in describe_plan(alone)


@pytest.mark.parametrize(
    ("ranks", "tables", "words"),
    [
        (4, {}, None),
        (1, {"model": {"hidden": 31}}, None),
        (3, {}, "columns\" splits model.hidden = 32 columns over 3 ranks, which do not divide"),
        (
            6, {"layout": {"pp": 2}, "train": {"micro_batches": 2}},
            "columns over 3 ranks of a pipeline stage, which do not divide them: set ",
        ),
        (2, {"optimizer": {"moments": "bf16"}}, None),
        (
            2, {"optimizer": {"moments": "8bit"}},
            "which has blocks of 128 columns: a rank has 16 columns, set optimizer.moments to",
        ),
        (2, {"optimizer": {"moments": "8bit"}, "model": {"hidden": 256}}, None),
    ],
)  # fmt: skip
def test_embedding_columns_that_do_not_divide(
    ranks: int, tables: dict[str, Any], words: str | None
) -> None:
    """From a job, and from an edited plan."""
    layout = {**tables.get("layout", {}), "embedding": "columns"}
    job = tiny_job(**{**tables, "layout": layout})
    edited = plan_from_job(tiny_job(**tables), ranks).model_copy(update={"embedding": "columns"})
    if words is None:
        assert plan_from_job(job, ranks).embedding_shards == ranks
        check_plan(edited, job, "--plan 'p.json'")
        return
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        plan_from_job(job, ranks)
    assert 'layout.embedding = "columns"' in str(caught.value)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        check_plan(edited, job, "--plan 'p.json'")
    assert str(caught.value).startswith("--plan 'p.json': embedding = \"columns\"")


def test_tensor_parallelism_excludes_column_sharding() -> None:
    with pytest.raises(ValueError, match='embedding = "columns" with tp = 2, which already shards'):
        Plan(ranks=4, ep=1, dp_shard=1, tp=2, experts=0, embedding="columns")


def test_layers_are_split_evenly() -> None:
    model = MODEL.model_copy(update={"layers": 5})
    layout = LayoutConfig(pp=2, schedule="interleaved")
    assert stage_blocks(plan_from_layout(layout, model, 2), model) == [
        ["embed", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "layers.4", "head"]
    ]  # fmt: skip
    layout = LayoutConfig(pp=2)
    assert [len(names) for names in stage_blocks(plan_from_layout(layout, model, 2), model)] == [
        3,
        4,
    ]
    assert plan_from_job(tiny_job(), 1).stages == [["embed", "layers.0", "layers.1", "head"]]


@pytest.mark.parametrize(
    ("layout", "train", "words"),
    [
        ({"pp": 2}, {"micro_batches": 2}, None),
        ({"pp": 2, "schedule": "gpipe"}, {}, None),
        ({"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 4}, None),
        ({"pp": 3}, {}, "layout.pp = 3 does not divide the number of ranks (4): choose a div"),
        ({"pp": 4}, {"micro_batches": 4}, "into 4 stages, but model.layers = 2: a stage has at"),
        (
            {"pp": 2, "schedule": "interleaved"}, {"micro_batches": 2},
            'layout.schedule = "interleaved" splits the model into 4 stages, but model.layers = 2',
        ),
        ({"pp": 2}, {}, "train.micro_batches = 1 is fewer than layout.pp = 2, but layout.sche"),
        (
            {"pp": 2}, {"batch": 9},
            'schedule = "1f1b" keeps that many in flight: raise it to 3, or set layout.sche',
        ),
        (
            {"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 5, "batch": 10},
            'train.micro_batches = 5 with layout.schedule = "zero-bubble", which processes them in '
            "5 // 2 = 2 equal rounds (layout.pp = 2), but 2 does not divide 5: choose 2 or 10",
        ),
        ({"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 3, "batch": 9}, None),
        (
            {"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 2, "recompute": True},
            'train.recompute = true with layout.schedule = "zero-bubble", whose split backward',
        ),
    ],
)  # fmt: skip
def test_impossible_pipeline_is_rejected(
    layout: dict[str, Any], train: dict[str, Any], words: str | None
) -> None:
    job = tiny_job(layout=layout, train=train)
    if words is None:
        plan = plan_from_job(job, 4)
        check_plan(plan, job, "plan")
        assert job_under_plan(tiny_job(train=train), plan) == job_under_plan(job, plan)
        assert job_under_plan(job, plan).layout == job.layout.model_copy(
            update={"dispatch": "all_to_all"}
        )
        return
    with pytest.raises(ConfigError) as caught:
        plan_from_job(job, 4)
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
         "train.micro_batches = 1): use fewer ranks, or raise train.batch to 16"),
        ({"tp": 2, "ep": 2, "etp": 2}, {"batch": 8, "micro_batches": 8}, 4,
         "2 of 4 ranks have no sample in a micro-batch (train.batch = 8, train.micro_batches = 8): "
         "lower train.micro_batches to 4, or raise train.batch to 16"),
        ({"pp": 2}, {"batch": 8, "micro_batches": 8}, 4, "2 of 4 ranks have no sample in a "
         "micro-batch (train.batch = 8, train.micro_batches = 8): lower train.micro_batches to 4"),
        ({"pp": 2}, {"batch": 2, "micro_batches": 2}, 4, "2 of 4 ranks have no sample in a "
         "micro-batch (train.batch = 2, train.micro_batches = 2): use fewer ranks, or raise "),
        ({}, {"batch": 2}, 3, "1 of 3 ranks has no sample in a micro-batch (train.batch = 2, "),
    ],
)  # fmt: skip
def test_ranks_without_samples_are_reported_with_a_remedy(
    layout: dict[str, Any], train: dict[str, Any], ranks: int, words: str | None
) -> None:
    job = tiny_job(layout=layout, train=train, model={"vocab": 64})
    plan = plan_from_job(job, ranks)
    size = job.train.batch // job.train.micro_batches
    idle = [rank for rank in range(ranks) if len(plan.sample_range(rank, size)) == 0]
    assert idle_ranks(plan, job) == len(idle)
    sentence = idle_ranks_warning(plan, job)
    assert (sentence is None) == (words is None) == (not idle)
    if sentence is None or words is None:
        return
    assert sentence.startswith(words)
    for key, value in re.findall(r"train\.(\w+) to (\d+)", sentence):
        job = tiny_job(layout=layout, train={**train, key: int(value)}, model={"vocab": 64})
        assert idle_ranks_warning(plan_from_job(job, ranks), job) is None


def test_too_many_ranks_are_rejected() -> None:
    with pytest.raises(ConfigError, match="a plan has at most 1048576 ranks, not 4294967296: use"):
        plan_from_layout(LayoutConfig(), MODEL, 1 << 32)


RAW: dict[str, Any] = {"ranks": 4, "ep": 2, "dp_shard": 1, "experts": 4}
PLACE = {"host": "a", "device": "A CPU", "kind": "cpu"}
PREDICTIONS: dict[str, Any] = {
    "cluster": "c", "step_s": 2.0, "phases_s": {"forward": 2.0}, "blocks_s": {"step": 2.0},
    "tokens_per_s": 50.0, "used_bytes_by_kind": {"peak": 1 << 30},
}  # fmt: skip
SPAN = {"phase": "forward", "block": "layers.0.attention to layers.99.attention"}


def timeline_change(*ranks: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Return a change of a plan: predictions with a timeline, one entry for each of `ranks`."""
    spans = [{**SPAN, "computing_s": 1.5, "collectives_s": 0.25, "waiting_s": 0.25}] * 2
    entries = [{"rank": 1, "spans": spans, **one} for one in ranks or (change,)]
    return {"predictions": {**PREDICTIONS, "timeline": entries}}


def negative(key: str, name: str) -> dict[str, Any]:
    """Return a change of a plan: a negative prediction."""
    return {"predictions": {**PREDICTIONS, key: {name: -1}}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ep": 3}, "ep = 3 does not divide ranks = 4: choose a divisor"),
        ({"dp_shard": 8}, "dp_shard = 8 does not divide ranks = 4: choose a divisor"),
        ({"etp": 2}, "etp = 2 does not divide tp = 1, whose ranks split the experts"),
        ({"ep": 4, "tp": 2, "etp": 2}, "ep * etp = 8 does not divide ranks = 4: choose a divisor"),
        ({"experts": 5}, "ep = 2 does not divide experts = 5: choose a divisor"),
        (
            {"expert_placement": [[0, 1]]},
            "expert_placement has 1 lists for ep = 2: give one for each",
        ),
        (
            {"expert_placement": [[0, 1], [1, 2]]},
            "expert_placement names expert 1 twice, in expert_placement[0] and in expert",
        ),
        (
            {"expert_placement": [[0, 0], [1, 2]]},
            "expert_placement names expert 0 twice, in expert_placement[0] and again there",
        ),
        (
            {"expert_placement": [[0, 1], [3]]},
            "expert_placement lacks expert 2, but experts = 4: place every",
        ),
        (
            {"experts": 6, "expert_placement": [[0, 1], [2, 3]]},
            "expert_placement lacks expert 4 and 1 more, but experts",
        ),
        (
            {"expert_placement": [[0, 1], [2, 4]]},
            "expert_placement[1] names expert 4, but experts = 4",
        ),
        (
            {"expert_placement": [[0], [1, 2, 3]]},
            "expert_placement[0] has 1 experts where each rank has 2",
        ),
        (
            {"experts": 0, "expert_placement": [[0], []]},
            "expert_placement[0] names expert 0, but experts = 0: empty",
        ),
        (
            {"expert_placement": [["0"], [1]]},
            'expert_placement[0][0] = "0" is a string: give an integer',
        ),
        (
            {"predictions": {**PREDICTIONS, "used_bytes_by_kind": {"peak": 1.5}}},
            "predictions.used_bytes_by_kind.peak = 1.5 is a number with a fraction: give",
        ),
        (
            {"predictions": {**PREDICTIONS, "phases_s": {"": 1.0}}},
            'predictions.phases_s."" = "" is empty: give a number',
        ),
        (
            {"expert_placement_by_layer": {"1": [[0, 1], [1, 2]]}},
            "expert_placement_by_layer.1 names expert 1 twice, in expert_placement_by_layer.1[0]",
        ),
        (
            {"expert_placement_by_layer": {"1": [[0, 1]]}},
            "expert_placement_by_layer.1 has 1 lists for ep = 2: give",
        ),
        (
            {"expert_placement_by_layer": {"1": [[0, 1], [3]]}},
            "expert_placement_by_layer.1 lacks expert 2, but exp",
        ),
        (
            {"expert_placement_by_layer": {"1": [[0], [1, 2, 3]]}},
            "expert_placement_by_layer.1[0] has 1 experts where",
        ),
        (
            {"expert_placement_by_layer": {"one": [[0, 1], [2, 3]]}},
            'expert_placement_by_layer has the key "one", but its keys are numbers',
        ),
        (
            {"expert_placement_by_layer": {"01": [[0, 1], [2, 3]]}},
            'expert_placement_by_layer has the key "01", but',
        ),
        (
            {"expert_placement_by_layer": {"1": [["0"], [1]]}},
            'expert_placement_by_layer.1[0][0] = "0" is a string',
        ),
        (
            {"expert_placement_by_layer": [[0]]},
            "expert_placement_by_layer = [[0]] is a list: give a table",
        ),
        (
            {"expert_placement": 3},
            "expert_placement = 3 is an integer: give a list of lists of integers",
        ),
        ({"pp": 2, "stages": [["embed", "head"]]}, "stages lists 1 stages where pp = 2 and"),
        ({"stages": [["embed"], ["head"]]}, "stages lists 2 stages where pp = 1: spread the names"),
        ({"tiers": {"moments": "ssd"}}, 'tiers.moments = "ssd" is not known: give "device"'),
        ({"mode": "async"}, 'mode = "async" is not known: give "synchronous"'),
        ({"places": [PLACE] * 3}, "places has 3 entries for ranks = 4: give every rank one"),
        ({"places": [PLACE, {}]}, "places[1].host is missing"),
        ({"expert_replicas": [[], [0]]}, "expert_replicas[1] names expert 0, but only a job's"),
        ({"copy": {}}, "unknown key 'copy'"),
        ({"rank": 2}, "unknown key 'rank': did you mean 'ranks'?"),
        (
            {"homes": [[0, 1], [2, 3]]},
            "unknown key 'homes': the keys at the top are ranks,",
        ),
        ({"ranks": 1 << 60}, "ranks = 1152921504606846976 is out of range: give an integer from 1"),
        ({"experts": 10**11}, "experts = 100000000000 is out of range: give an integer from 0"),
        ({"ranks": 10**9, "ep": 10**9, "experts": 0}, "ranks = 1000000000 is out of range"),
        (negative("phases_s", "forward"), "predictions.phases_s.forward = -1.0 is below 0: plan"),
        (negative("blocks_s", "step"), "predictions.blocks_s.step = -1.0 is below 0: plan"),
        (
            negative("used_bytes_by_kind", "peak"),
            "predictions.used_bytes_by_kind.peak = -1 is below 0: plan",
        ),
        (
            timeline_change(rank=4),
            "predictions.timeline[0].rank = 4, but ranks = 4: predictions belong",
        ),
        (timeline_change({}, {}), "predictions.timeline has rank 1 twice: remove one of the two"),
        (
            timeline_change(rank=-1),
            "predictions.timeline[0].rank = -1 is out of range: give an integer from 0",
        ),
        (timeline_change(spans=[]), "predictions.timeline[0].spans = [] is "),
        (
            timeline_change(spans=[{"phase": "forward", "block": "head", "waiting_s": -1.0}]),
            "predictions.timeline[0].spans[0].waiting_s = -1.0 is out of range: give a number from",
        ),
        (
            timeline_change(spans=[{"phase": "forward", "block": "head", "collective_s": 1.0}]),
            "unknown key 'predictions.timeline[0].spans[0].collective_s': did you mean",
        ),
    ],
)
def test_impossible_plan_file_is_rejected(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    place = tmp_path / "plan.json"
    place.write_text(json.dumps({**RAW, **change}))
    with pytest.raises(ConfigError) as caught:
        load_plan(place)
    assert str(caught.value).startswith(f"--plan '{place}': {sentence}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not readable JSON"), ("[]", "holds no JSON object")]
)
def test_missing_or_broken_file_is_rejected(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_plan(tmp_path / "plan.json")


def test_duplicate_json_key_is_rejected(tmp_path: Path) -> None:
    """JSON would use the last one, although the first may have been edited."""
    place = tmp_path / "plan.json"
    place.write_text('{"ranks": 4, "ep": 2, "dp_shard": 1, "ep": 4, "experts": 4}')
    with pytest.raises(ConfigError, match="has the key 'ep' twice in one object: remove one"):
        load_plan(place)


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    place.write_text(json.dumps(RAW), encoding="utf-8-sig")
    assert load_plan(place) == Plan.model_validate(RAW)


def test_plan_round_trips_through_json(tmp_path: Path) -> None:
    predictions = Predictions.model_validate(timeline_change({})["predictions"])
    plan = plan_from_job(tiny_job(layout={"ep": 2}), 4).model_copy(
        update={"places": [RankPlace.model_validate(PLACE)] * 4, "predictions": predictions}
    )
    text = plan.to_json()
    assert '  "expert_placement": [[0, 1, 2, 3], [4, 5, 6, 7]],\n' in text
    (tmp_path / "plan.json").write_text(text)
    assert load_plan(tmp_path / "plan.json") == plan
    span = json.dumps({**SPAN, "computing_s": 1.5, "collectives_s": 0.25, "waiting_s": 0.25})
    assert text.count(f"          {span}") == 2  # On one line, whatever its length.
    assert Predictions.model_validate(PREDICTIONS).timeline == []
    assert "predictions" not in plan.decisions()


def test_expert_placement_is_obeyed() -> None:
    plan = Plan.model_validate({**RAW, "expert_placement": [[3, 0], [2, 1]]})
    assert [plan.experts_of(rank, 0) for rank in range(4)] == [(3, 0), (2, 1), (3, 0), (2, 1)]
    assert plan.slot_experts(0) == [3, 0, 2, 1]
    layers = {"2": [[0, 1], [2, 3]], "10": [[0, 3], [1, 2]]}
    plan = Plan.model_validate(
        {**RAW, "expert_placement": [[3, 0], [2, 1]], "expert_placement_by_layer": layers}
    )
    assert [plan.slot_experts(layer) for layer in (0, 2, 10)] == [
        [3, 0, 2, 1],
        [0, 1, 2, 3],
        [0, 3, 1, 2],
    ]
    assert [plan.experts_of(rank, 10) for rank in range(3)] == [(0, 3), (1, 2), (0, 3)]
    moved = plan.with_expert_placement({10: [3, 0, 2, 1], 3: [0, 2, 3, 1]})
    assert moved.expert_placement_by_layer == {"2": layers["2"], "3": [[0, 2], [3, 1]]}
    assert Plan.model_validate_json(moved.to_json()) == moved
    bare = {name: value for name, value in RAW.items() if name != "expert_placement"}
    assert Plan.model_validate({**bare, "expert_placement": []}) == Plan.model_validate(bare)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"micro_batches": 1, "stages": [["embed", "layers.0", "layers.1", "head"]]}, None),
        ({"experts": 16}, "experts = 16, but model.experts = 8: plan this job anew"),
        ({"micro_batches": 2}, "micro_batches = 2, but train.micro_batches = 1, and a plan"),
        ({"stages": [["embed"]]}, "no stage lists block 'layers.0': add it to stages[0]"),
        ({"stages": [["embed", "layers.9"]]}, "stages[0] lists block 'layers.9', which the model"),
        (
            {"stages": [["embed", "embed"]]},
            "stages lists block 'embed' twice: once is enough",
        ),
        (
            {"stages": [["embed", "layers.1", "layers.0", "head"]]},
            "stages[0] has block 'layers.1' out of order: keep the order",
        ),
        (
            {"tp": 2},
            "tp = 2 does not divide model.vocab = 61, which the TP ranks split: choose a",
        ),
        (
            {"pp": 2, "stages": [["embed", "layers.0"], ["layers.1", "head"]]},
            "train.micro_batches = 1 is fewer than pp = 2, but schedule",
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
            "stages[0] has block 'layers.1' out of order: keep the order",
        ),
    ],
)
def test_plan_is_checked_against_job(change: dict[str, Any], sentence: str | None) -> None:
    plan = Plan.model_validate({**RAW, "experts": 8, **change})
    if sentence is None:
        check_plan(plan, tiny_job(), "plan")
        return
    with pytest.raises(ConfigError) as caught:
        check_plan(plan, tiny_job(), "plan")
    assert str(caught.value).startswith(f"plan: {sentence}")


def test_dense_model_rejects_expert_parallelism() -> None:
    dense = tiny_job(model={"family": "llama", "experts": 0, "top_k": 0}, routing={})
    plan = Plan.model_validate({"ranks": 2, "ep": 2, "dp_shard": 1, "experts": 0})
    with pytest.raises(ConfigError, match=r"plan: ep = 2 with a dense model \(experts = 0\)"):
        check_plan(plan, dense, "plan")


def test_tensor_parallelism_is_checked_against_job() -> None:
    """A plan may shard tensors where the job does not, and cannot."""
    plan = Plan.model_validate({"ranks": 2, "ep": 1, "dp_shard": 1, "tp": 2, "experts": 8})
    narrow = {"moments": "8bit"}
    words = 'plan: tp = 2 with optimizer.moments = "8bit", which has blocks'
    with pytest.raises(ConfigError, match=f"^{words}"):
        check_plan(plan, tiny_job(model={"vocab": 60}, optimizer=narrow), "plan")
    check_plan(plan, tiny_job(model={"vocab": 60, "head_dim": 64}, optimizer=narrow), "plan")


def test_expert_tensor_parallel_groups() -> None:
    plan = Plan(ranks=8, ep=2, dp_shard=1, tp=2, etp=2, experts=4)
    assert plan.etp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.ep_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert plan.same_etp_rank_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert plan.expert_dp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [plan.experts_of(rank, 0) for rank in range(5)] == [
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
        (0, 1),
    ]
    with pytest.raises(ConfigError, match=r"^plan: etp = 2 does not divide model\.ffn = 15, which"):
        check_plan(plan, tiny_job(model={"vocab": 60, "experts": 4, "ffn": 15}), "plan")


def test_routed_tokens_follow_expert_placement() -> None:
    plan = Plan.model_validate({**RAW, "ranks": 2, "expert_placement": [[3, 0], [2, 1]]})
    job, load = tiny_job(model={"experts": 4, "layers": 1}), [[1, 2, 3, 4], [10, 20, 30, 40]]
    (one,), (other,) = (routed_by_layer(job, plan, rank, [load]) for rank in (0, 1))
    assert (one.slot_tokens, other.slot_tokens) == ([44, 11], [33, 22])
    assert one.exchanges == (((0, 1), [5, 5], [5, 50], 10),)
    assert other.exchanges == (((0, 1), [50, 50], [5, 50], 100),)


def test_plan_overrides_job() -> None:
    job = tiny_job(layout={"dispatch": "all_to_all"})
    assert job_under_plan(job, plan_from_job(job, 4)) == job
    plan = Plan.model_validate({**RAW, "experts": 8, "recompute": True})
    layout = {"ep": 2, "dispatch": "all_to_all"}
    assert job_under_plan(job, plan) == tiny_job(layout=layout, train={"recompute": True})
    assert job_under_plan(tiny_job(), plan) == job_under_plan(job, plan)
    every = tiny_job(layout={"dp_shard": "all", "dispatch": "dedup", "dispatch_hosts": 1})
    assert job_under_plan(every, plan_from_job(every, 4)) == every


def places(*hosts: str, device: str = "A CPU", kind: str = "cpu") -> list[RankPlace]:
    return [
        RankPlace.model_validate({"host": host, "device": device, "kind": kind}) for host in hosts
    ]


@pytest.mark.parametrize(
    ("actual", "sentence"),
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
def test_plan_is_checked_against_machines(actual: list[RankPlace], sentence: str | None) -> None:
    plan = Plan.model_validate({**RAW, "places": places("a", "a", "b", "b")})
    check_places(Plan.model_validate(RAW), actual, "plan")
    if sentence is None:
        check_places(plan, actual, "plan")
        return
    with pytest.raises(ConfigError) as caught:
        check_places(plan, actual, "plan")
    assert str(caught.value).startswith(f"plan: {sentence}")


def test_measurements_skip_first_steps() -> None:
    measured = measure(100, [9, 9, 9, 4, 5, 6], {"data": [1, 1, 1, 2, 2, 2]}, 7.0, "resident")
    assert measured is not None
    assert (measured.steps, measured.step_s, measured.phases_s) == (3, 5.0, {"data": 2.0})
    assert measured.tokens_per_s == 20.0
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
def test_prediction_digest_depends_on_the_work(change: dict[str, Any]) -> None:
    job, other = tiny_job(), tiny_job(**change)
    plan = plan_from_job(job, 2)
    assert prediction_digest(job, plan) != prediction_digest(other, plan_from_job(other, 2))
    later = tiny_job(train={"steps": 20}, optimizer={"lr": 1.0}, model={"max_positions": 8192})
    assert prediction_digest(later, plan_from_job(later, 2)) == prediction_digest(job, plan)


def test_prediction_digest_depends_on_the_plan() -> None:
    job, plan = tiny_job(layout={"ep": 2}), plan_from_job(tiny_job(layout={"ep": 2}), 2)
    swapped = plan.model_copy(update={"expert_placement": [[7, 1, 2, 3], [4, 5, 6, 0]]})
    again = plan.with_expert_placement({1: [7, 1, 2, 3, 4, 5, 6, 0]})
    there = plan.model_copy(update={"places": [RankPlace.model_validate(PLACE)] * 2})
    assert len({prediction_digest(job, one) for one in (plan, swapped, again)}) == 3
    assert prediction_digest(job, there) == prediction_digest(job, plan)


def test_placement_of_dense_layer_is_rejected() -> None:
    latent = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6}
    model = {
        "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "dense_ffn": 40,
        "shared_experts": 1, "expert_groups": 4, "top_expert_groups": 2,
        "routed_scaling_factor": 2.5, "latent": latent,
    }  # fmt: skip
    job, by_rank = tiny_job(model=model, layout={"ep": 2}), [[1, 3, 5, 7], [0, 2, 4, 6]]
    plan = plan_from_job(job, 2)
    check_plan(plan.model_copy(update={"expert_placement_by_layer": {"2": by_rank}}), job, "plan")
    sentence = r"^plan: expert_placement_by_layer has layer 0, but layers with experts are 1"
    with pytest.raises(ConfigError, match=sentence):
        check_plan(
            plan.model_copy(update={"expert_placement_by_layer": {"0": by_rank}}), job, "plan"
        )


def test_default_overlap_keeps_the_digest() -> None:
    job = tiny_job(layout={"ep": 2})
    assert prediction_digest(job, plan_from_job(job, 2)) == "dbef26628315c984"
    first = tiny_job(layout={"ep": 2, "overlap_local": True})
    assert prediction_digest(first, plan_from_job(first, 2)) != prediction_digest(
        job, plan_from_job(job, 2)
    )


def test_dispatch_settings_are_ignored_without_expert_parallelism() -> None:
    """`Job.ineffective_settings` reports them."""
    plain = plan_from_job(tiny_job(), 2)
    for sentence in (
        {"chunks": 4},
        {"overlap_local": True},
        {"overlap_local": False},
        {"dispatch_hosts": 1},
    ):
        assert plan_from_job(tiny_job(layout=sentence), 2) == plain
    assert plan_from_job(tiny_job(layout={"ep": 2, "dispatch_hosts": 1}), 2).dispatch_hosts == 1
