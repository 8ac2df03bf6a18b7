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
    idle_ranks_warning,
    job_under_plan,
    load_plan,
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
            {"tp": 3}, 4,
            "layout.tp = 3 does not divide 4 ranks: use 1, 2 or 4, or 3 ranks "
            "(--nproc 3, nproc=3 in Python)",
        ),
        ({"ep": 16}, 16, "layout.ep = 16 does not divide model.experts = 8: use 1, 2, 4 or 8"),
        ({}, 2_000_000, "nproc = 2000000: give an integer from 1 and up to 1048576"),
        (
            {"embedding": "columns"}, 3,
            'layout.embedding = "columns" splits model.hidden = 32 columns over the 3 ranks of a '
            'pipeline stage: set layout.embedding = "whole", or use 1 rank '
            "(--nproc 1, nproc=1 in Python)",
        ),
        (
            {"pp": 2}, 2,
            'train.micro_batches = 1 is fewer than layout.pp = 2, but layout.schedule = "1f1b" '
            "keeps that many in flight: raise train.micro_batches to 2, or set "
            'layout.schedule = "gpipe"',
        ),
    ],
)  # fmt: skip
def test_mistake_in_a_layout_names_the_keys_of_the_job(
    layout: dict[str, Any], ranks: int, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_job(tiny_job(layout=layout), ranks, "j.toml")
    assert str(caught.value) == f"j.toml: {sentence}"


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
        (3, {}, 'embedding = "columns" splits model.hidden = 32 columns over the 3 ranks of a'),
        (2, {"optimizer": {"moments": "bf16"}}, None),
        (2, {"optimizer": {"moments": "8bit"}}, "128 columns: a rank has 16 columns, set optim"),
        (2, {"optimizer": {"moments": "8bit"}, "model": {"hidden": 256}}, None),
    ],
)
def test_embedding_columns_that_do_not_divide(
    ranks: int, tables: dict[str, Any], words: str | None
) -> None:
    """From a job, and from an edited plan."""
    job = tiny_job(**tables, layout={"embedding": "columns"})
    edited = plan_from_job(tiny_job(**tables), ranks).model_copy(update={"embedding": "columns"})
    if words is None:
        assert plan_from_job(job, ranks).embedding_shards == ranks
        check_plan(edited, job, "plan")
        return
    for fails in (lambda: plan_from_job(job, ranks), lambda: check_plan(edited, job, "plan")):
        with pytest.raises(ConfigError, match=re.escape(words)):
            fails()


def test_everything_that_does_not_fit_the_ranks_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_job(tiny_job(layout={"pp": 5, "tp": 3, "ep": 7}), 8, "job.toml")
    heading, *lines = str(caught.value).splitlines()
    assert heading == "job.toml: 3 mistakes"
    for line, group in zip(lines, ("pp = 5", "tp = 3", "ep = 7"), strict=True):
        assert line.startswith(f"  layout.{group} does not divide 8 ranks: use 1, 2, 4 or 8, or ")
    with pytest.raises(ConfigError) as caught:
        plan_from_job(tiny_job(layout={"pp": 4, "tp": 2}), 8, "job.toml")
    heading, tensor, pipeline = str(caught.value).splitlines()
    assert heading == "job.toml: 2 mistakes"
    assert tensor.startswith("  layout.tp = 2 does not divide model.vocab = 61, which these ranks")
    assert pipeline.startswith("  layout.pp = 4 with layout.schedule")


def test_a_size_that_follows_from_a_wrong_one_is_not_named() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_from_job(tiny_job(layout={"dp_shard": "all", "tp": 3}), 10, "job.toml")
    assert "layout.tp = 3 does not divide 10 ranks" in str(caught.value)
    assert "mistakes" not in str(caught.value)


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
        ({"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 3, "batch": 9}, None),
        ({"pp": 4}, {"micro_batches": 4}, "into 4 stages, but model.layers = 2: a stage has at"),
        (
            {"pp": 2, "schedule": "interleaved"}, {"micro_batches": 2},
            'schedule = "interleaved" splits the model into 4 stages, but model.layers = 2',
        ),
        (
            {"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 5, "batch": 10},
            "in equal rounds of layout.pp = 2 or somewhat more: choose a multiple of 2",
        ),
        (
            {"pp": 2, "schedule": "zero-bubble"}, {"micro_batches": 2, "recompute": True},
            'recompute every layer twice: set train.recompute = false, or layout.schedule = "1f1b"',
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
        return
    with pytest.raises(ConfigError) as caught:
        plan_from_job(job, 4)
    assert words in str(caught.value)


NARROW_DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "dense_ffn": 40,
    "shared_experts": 1, "expert_groups": 4, "top_expert_groups": 2,
    "routed_scaling_factor": 2.5, "vocab": 60,
    "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
}  # fmt: skip
WIDE = {"vocab": 60, "head_dim": 64}


@pytest.mark.parametrize(
    ("layout", "tables", "words"),
    [
        ({"tp": 2}, {"model": {"vocab": 60}}, None),
        ({"tp": 2}, {}, "tp = 2 does not divide model.vocab = 61, which these ranks split: use 1"),
        ({"tp": 2, "etp": 2}, {"model": {"vocab": 60, "ffn": 15}}, "ffn = 15, which these ranks "),
        ({"tp": 2}, {"model": {**NARROW_DEEPSEEK, "dense_ffn": 41}}, "network 0 = 41, which"),
        ({"tp": 8}, {"model": {"vocab": 64}}, "heads = 4, which these ranks split: use 1 or 2"),
        (
            {"tp": 2}, {"model": {"vocab": 60}, "optimizer": {"moments": "8bit"}},
            "blocks of 128 columns, but shards of the output of attention over 2 TP ranks have 16",
        ),
        ({"tp": 2}, {"model": WIDE, "optimizer": {"moments": "8bit"}}, None),
        (
            {"tp": 2, "etp": 2}, {"model": WIDE, "optimizer": {"moments": "8bit"}},
            "shards of the output of experts over 2 TP ranks have 12: set it to",
        ),
        (
            {"tp": 2}, {"model": NARROW_DEEPSEEK, "optimizer": {"moments": "8bit"},
                        "finetune": {"method": "lora", "targets": ["shared"]}},
            "shards of the output of shared experts over 2 TP ranks have",
        ),
        (
            {"tp": 2, "etp": 2}, {"model": {"vocab": 60}, "finetune": {"method": "lora"}},
            'etp = 2 with "experts" in finetune.targets: adapters of experts cannot be sharded',
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_split_are_rejected(
    layout: dict[str, Any], tables: dict[str, Any], words: str | None
) -> None:
    job = tiny_job(**tables, layout=layout)
    if words is None:
        plan_from_job(job, 8)
        return
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        plan_from_job(job, 8)
    assert str(caught.value).startswith(("the job: layout.", "the job: optimizer.moments = "))


@pytest.mark.parametrize(
    ("layout", "train", "ranks", "idle"),
    [
        ({}, {"batch": 8, "micro_batches": 2}, 3, 0),
        ({"tp": 2}, {"batch": 4, "micro_batches": 2}, 4, 0),
        ({}, {"batch": 4, "micro_batches": 4}, 4, 3),
        ({"tp": 2, "ep": 2, "etp": 2}, {"batch": 8, "micro_batches": 8}, 4, 2),
        ({"pp": 2}, {"batch": 8, "micro_batches": 8}, 4, 2),
        ({}, {"batch": 2}, 3, 1),
    ],
)
def test_ranks_without_samples_are_reported_with_a_remedy(
    layout: dict[str, Any], train: dict[str, Any], ranks: int, idle: int
) -> None:
    job = tiny_job(layout=layout, train=train, model={"vocab": 64})
    plan = plan_from_job(job, ranks)
    sentence = idle_ranks_warning(plan, job) or ""
    assert sentence.startswith(f"{idle} of {ranks} ranks ") == bool(idle)
    for batch in re.findall(r"raise train.batch to (\d+)", sentence):
        job = tiny_job(layout=layout, train={**train, "batch": int(batch)}, model={"vocab": 64})
        assert idle_ranks_warning(plan_from_job(job, ranks), job) is None


RAW: dict[str, Any] = {"ranks": 4, "ep": 2, "dp_shard": 1, "experts": 4}
PLACE = {"host": "a", "device": "A CPU", "kind": "cpu"}
PREDICTIONS: dict[str, Any] = {
    "cluster": "c", "step_s": 2.0, "phases_s": {"forward": 2.0}, "blocks_s": {"step": 2.0},
    "tokens_per_s": 50.0, "used_bytes_by_kind": {"peak": 1 << 30},
}  # fmt: skip
PHASE = {"phase": "forward", "computing_s": 1.5, "collectives_s": 0.25, "waiting_s": 0.25}


def predictions(**change: Any) -> dict[str, Any]:
    """Return a change of a plan: other predictions."""
    return {"predictions": {**PREDICTIONS, **change}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"ep": 3, "experts": 6},
            "ep = 3 does not divide 4 ranks: use 1, 2 or 4, or another number of ranks",
        ),
        ({"dp_shard": 8}, "dp_shard = 8 does not divide 4 ranks: use 1, 2 or 4, or another"),
        ({"etp": 2}, "etp = 2 does not divide tp = 1, whose ranks split the experts"),
        ({"ep": 4, "tp": 2, "etp": 2}, "ep * etp = 8 does not divide 4 ranks: use 1, 2 or 4"),
        ({"experts": 5}, "ep = 2 does not divide experts = 5: use 1 or 5"),
        ({"tp": 2, "embedding": "columns"}, 'embedding = "columns" with tp = 2, which already'),
        ({"dispatch_hosts": 3}, "dispatch_hosts = 3 does not divide ep = 2, and every host has"),
        ({"ep": 1, "chunks": 2}, "chunks = 2 and overlap_local = false with ep = 1, where all"),
        ({"expert_placement": [[0, 1]]}, "expert_placement has expert 2 0 times: place every"),
        ({"expert_placement": [[0, 1], [1, 2]]}, "expert_placement has expert 1 2 times: place"),
        ({"expert_placement": [[0, 1], [2, 4]]}, "expert_placement has expert 3 0 times: place"),
        ({"expert_placement": [[0], [1, 2, 3]]}, "expert_placement has shares of [1, 3]: place"),
        ({"experts": 0, "expert_placement": [[0], []]}, "expert_placement has expert 0 1 times"),
        (
            {"expert_placement": [["0"], [1]]},
            'expert_placement[0][0] = "0": expert_placement takes a',
        ),
        (
            predictions(phases_s={"": 1.0}),
            'predictions.phases_s."" = "": predictions.phases_s take',
        ),
        (
            {"expert_placement_by_layer": {"1": [[0, 1], [1, 2]]}},
            "expert_placement_by_layer.1 has expert 1 2 times: place every expert once",
        ),
        (
            {"expert_placement_by_layer": [[0]]},
            "expert_placement_by_layer = [[0]]: give a table",
        ),
        ({"pp": 2, "stages": [["embed", "head"]]}, "stages lists 1 stages where pp = 2 and"),
        ({"stages": [["embed"], ["head"]]}, "stages lists 2 stages where pp = 1: spread the names"),
        ({"places": [PLACE] * 3}, "places has 3 entries for ranks = 4: give every rank one"),
        (
            {"places": [PLACE, {"device": "A CPU", "kind": "cpu"}]},
            "places[1].host is missing",
        ),
        ({"homes": [[0, 1], [2, 3]]}, "unknown key 'homes': the keys at the top are "),
        ({"ranks": 1 << 60}, "ranks = 1152921504606846976: give an integer from 1"),
        (
            predictions(phases_s={"forward": -1}),
            "predictions.phases_s.forward = -1: predictions.phases_s takes a table of values",
        ),
        (
            predictions(timeline=[{"rank": 0, "phases": [{**PHASE, "waiting_s": -1.0}]}]),
            "predictions.timeline[0].phases[0].waiting_s = -1.0: give a number",
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
    assert str(caught.value).startswith(f"plan '{place}': {sentence}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not readable JSON"), ("[]", "holds no JSON object")]
)
def test_missing_or_broken_file_is_rejected(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_plan(tmp_path / "plan.json")


def test_plan_round_trips_through_json(tmp_path: Path) -> None:
    timeline = [{"rank": 1, "phases": [PHASE]}]
    plan = plan_from_job(tiny_job(layout={"ep": 2}), 4).model_copy(
        update={
            "places": [RankPlace.model_validate(PLACE)] * 4,
            "predictions": Predictions.model_validate({**PREDICTIONS, "timeline": timeline}),
        }
    )
    text = plan.to_json()
    assert '  "expert_placement": [[0, 1, 2, 3], [4, 5, 6, 7]],\n' in text
    assert json.dumps(PLACE) in text  # On one line.
    (tmp_path / "plan.json").write_text(text)
    assert load_plan(tmp_path / "plan.json") == plan
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


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"micro_batches": 1, "stages": [["embed", "layers.0", "layers.1", "head"]]}, None),
        ({"experts": 16}, "experts = 16, but model.experts = 8: plan this job anew"),
        ({"micro_batches": 2}, "micro_batches = 2, but train.micro_batches = 1, and a plan"),
        ({"stages": [["embed"]]}, "stages has no block where block 'layers.0' comes next: list"),
        (
            {"stages": [["embed", "embed"]]},
            "stages has block 'embed' where block 'layers.0' comes next",
        ),
        (
            {"pp": 2, "schedule": "gpipe", "stages": [["embed", "layers.1"], ["layers.0", "head"]]},
            "stages has block 'layers.1' where block 'layers.0' comes next",
        ),
        (
            {"stages": [["embed", "layers.0", "layers.1", "head", "x"]]},
            "stages has block 'x' where no block comes next",
        ),
        (
            {
                "pp": 2,
                "schedule": "gpipe",
                "stages": [["embed", "layers.0", "layers.1", "head"], []],
            },
            "stages[1] is empty: give it a block, or lower pp",
        ),
        ({"tp": 2}, "tp = 2 does not divide model.vocab = 61, which these ranks split: use 1"),
        *(
            (
                {"expert_placement_by_layer": {layer: [[0, 1, 2, 3], [4, 5, 6, 7]]}},
                f'expert_placement_by_layer has layer "{layer}", but layers with experts are 0 to',
            )
            for layer in ("2", "one", "01")
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


def test_expert_tensor_parallel_groups() -> None:
    plan = Plan(ranks=8, ep=2, dp_shard=1, tp=2, etp=2, experts=4)
    assert list(plan.etp_groups()) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list(plan.ep_groups()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert list(plan.same_etp_rank_groups()) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list(plan.expert_dp_groups()) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [plan.experts_of(rank, 0) for rank in range(5)] == [
        (0, 1),
        (0, 1),
        (2, 3),
        (2, 3),
        (0, 1),
    ]


def test_routed_tokens_follow_expert_placement() -> None:
    plan = Plan.model_validate({**RAW, "ranks": 2, "expert_placement": [[3, 0], [2, 1]]})
    job, load = tiny_job(model={"experts": 4, "layers": 1}), [[1, 2, 3, 4], [10, 20, 30, 40]]
    (one,), (other,) = (routed_by_layer(job, plan, rank, [load]) for rank in (0, 1))
    assert (one.slot_tokens, other.slot_tokens) == ([44, 11], [33, 22])
    assert one.exchanges == (((0, 1), [5, 5], [5, 50], 10),)
    assert other.exchanges == (((0, 1), [50, 50], [5, 50], 100),)


def test_plan_overrides_job() -> None:
    plan = Plan.model_validate({**RAW, "experts": 8, "recompute": True})
    ruled = job_under_plan(tiny_job(layout={"ep": 4, "chunks": 2, "dispatch": "dedup"}), plan)
    assert (ruled.layout.ep, ruled.layout.dispatch, ruled.layout.chunks) == (2, "all_to_all", 1)
    assert ruled.train.recompute
    assert job_under_plan(ruled, plan) == ruled


def test_plan_keeps_what_the_job_leaves_open() -> None:
    job = tiny_job(layout={"ep": 2, "dp_shard": "all"})
    assert job_under_plan(job, plan_from_job(job, 4)) == job
    plan = Plan.model_validate({**RAW, "experts": 8, "dispatch": "dedup", "dispatch_hosts": 2})
    assert job_under_plan(tiny_job(), plan).layout == LayoutConfig(
        ep=2, dp_shard=plan.dp_shard, dispatch="dedup", dispatch_hosts=2
    )


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
    job, by_rank = tiny_job(model=NARROW_DEEPSEEK, layout={"ep": 2}), [[1, 3, 5, 7], [0, 2, 4, 6]]
    plan = plan_from_job(job, 2)
    check_plan(plan.model_copy(update={"expert_placement_by_layer": {"2": by_rank}}), job, "plan")
    with pytest.raises(ConfigError, match='has layer "0", but layers with experts are 1'):
        check_plan(
            plan.model_copy(update={"expert_placement_by_layer": {"0": by_rank}}), job, "plan"
        )


def test_dispatch_settings_are_ignored_without_expert_parallelism() -> None:
    """`Job.ineffective_settings` reports them."""
    layout = {"chunks": 4, "overlap_local": True, "dispatch_hosts": 1}
    assert plan_from_job(tiny_job(layout=layout), 2) == plan_from_job(tiny_job(), 2)
    assert plan_from_job(tiny_job(layout={"ep": 2, "dispatch_hosts": 1}), 2).dispatch_hosts == 1
