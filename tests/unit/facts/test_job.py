from __future__ import annotations

import json
import re
import tomllib
from typing import get_args

import pytest

from moesaic.base import keys
from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster.file import ClusterFile
from moesaic.facts.job import FinetuneConfig, Job, ModelConfig, Preset
from moesaic.facts.job.finetune import AdapterTarget
from moesaic.facts.job.job import _available_targets, fill_preset
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import count_parameters
from moesaic.facts.workload.parameters import adapters, describe_trainable

GOOD = """
[model]
preset = "tiny-olmoe"

[data]
path = "text.txt"
sequence = 64

[train]
steps = 10
batch = 8
"""
DEEPSEEK = "model.preset=tiny-deepseek"
DENSE = 'model.preset="tiny-dense"'


def job(*sets: str) -> Job:
    raw = apply_sets(tomllib.loads(GOOD), sets)
    return parse(Job, fill_preset(raw), "job.toml", sets)


WRONG = [
    (['model.preset="tiny-olmo"'],
     'model.preset="tiny-olmo": model.preset = "tiny-olmo" is not known: did you mean '
     '"tiny-olmoe" (it takes "tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", '
     '"tiny-deepseek", "olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b" or "deepseek-v3")?'),
    (['finetune.targets=["expert"]'],
     'finetune.targets=["expert"]: '
     'finetune.targets[0] = "expert" is not known: did you mean "experts" (it takes a list of one '
     'or more of "attention", "experts", "ffn" or "shared")?'),
    (["model.heads=6"],
     "job.toml: model.kv_heads = 4 does not divide model.heads = 6: "
     "use 1, 2, 3 or 6"),
    (["model.head_dim=31"],
     "job.toml: model.head_dim = 31 is odd: the rotary embedding pairs channels, "
     "give an even number"),
    (["model.top_k=0"],
     "job.toml: model.experts = 16 with model.top_k = 0: give both, or neither for a dense model"),
    (["model.top_k=17"],
     "job.toml: model.top_k = 17 is more than model.experts = 16: "
     "a token uses each expert once, lower it"),
    (['model.family="llama"'],
     'job.toml: model.family = "llama" is dense, but model.experts = 16: '
     'set model.experts and model.top_k to 0, or family to one of "mixtral", '
     '"olmoe", "qwen3_moe", "deepseek_v3"'),
    (["model.experts=0", "model.top_k=0"],
     'job.toml: model.family = "olmoe" has experts, but model.experts = 0: '
     'give model.experts and model.top_k, or set family to "llama"'),
    (['model.family="mixtral"', "model.clip_qkv=8"],
     'job.toml: model.clip_qkv = 8.0 belongs to family "olmoe", not "mixtral": remove it'),
    (["model.rope_theta=1.0", "model.rope_scaling={kind='yarn', factor=2.0}"],
     "job.toml: model.rope_theta = 1.0 is not above 1, so all channels rotate at one speed, which "
     'model.rope_scaling.kind = "yarn" cannot scale: raise it'),
    (["model.rope_scaling={kind='llama3', factor=2.0, low_freq_factor=4.0}"],
     "model.rope_scaling={kind='llama3', factor=2.0, low_freq_factor=4.0}: "
     "model.rope_scaling.low_freq_factor = 4.0 is not below "
     "model.rope_scaling.high_freq_factor = 4.0: lower it"),
    (["model.window=8"],
     'job.toml: model.window = 8 belongs to family "mixtral" or "qwen3_moe", not "olmoe": '
     "remove it"),
    (['model.family="deepseek_v3"'],
     'job.toml: model.family = "deepseek_v3" has latent attention, but model.latent is missing: '
     "give model.latent.kv_lora_rank, .qk_rope_head_dim and .v_head_dim"),
    ([DEEPSEEK, "model.latent={kv_lora_rank=8, qk_rope_head_dim=32, v_head_dim=8}"],
     "job.toml: model.latent.qk_rope_head_dim = 32 is all of model.head_dim = 32, which has other "
     "channels too: lower it"),
    ([DEEPSEEK, "model.kv_heads=2"],
     "job.toml: model.kv_heads = 2 with latent attention, where every head has its own "
     "keys: set it to model.heads = 4"),
    ([DEEPSEEK, "model.dense_layers=4"],
     "job.toml: model.dense_layers = 4 leaves none of model.layers = 4 with experts: lower it"),
    ([DEEPSEEK, "model.expert_groups=3"],
     "job.toml: model.expert_groups = 3 does not divide model.experts = 16: "
     "use 1, 2, 4, 8 or 16"),
    ([DEEPSEEK, "model.top_expert_groups=1", "model.top_k=5"],
     "job.toml: model.top_k = 5 is more than the 4 experts of model.top_expert_groups = 1 groups: "
     "raise model.top_expert_groups, or lower model.top_k"),
    ([DEEPSEEK, "model.expert_groups=16", "model.top_expert_groups=4"],
     "job.toml: model.expert_groups = 16 leaves one of model.experts = 16 in a group, and groups "
     "are ranked by 2 scores: lower model.expert_groups"),
    (["routing.router=switch"],
     'job.toml: routing.router = "switch" chooses 1 of the experts, but model.top_k = 4: '
     'set model.top_k = 1, or routing.router = "top-k"'),
    (["routing.router=gshard", "model.top_k=2"],
     'job.toml: routing.router = "gshard" drops tokens beyond a capacity: '
     "set routing.capacity_factor (1.2 is usual)"),
    (["model.preset=tiny-deepseek", "routing.router=gshard"],
     'job.toml: routing.router = "gshard" with model.family = "deepseek_v3", which uses sigmoid '
     'scores: set routing.router = "top-k"'),
    ([DENSE, "routing.router=switch"],
     'job.toml: routing.router = "switch" with model.family = "llama", which is dense: set '
     'routing.router = "top-k"'),
    (["model.top_k=1", "model.renormalise=true"],
     "job.toml: model.renormalise = true with model.top_k = 1 makes every weight 1, so that the "
     "router learns nothing from the loss: set model.renormalise = false, or start from another "
     "model"),
    (["routing.noise=0.1"],
     'job.toml: routing.noise = 0.1 belongs to routing.router = "switch", not "top-k": '
     "set it to 0"),
    (["routing.record=a", "routing.replay=b"],
     'job.toml: routing.record = "a" and routing.replay = "b" exclude each other: remove one'),
    (["train.micro_batches=3"],
     "job.toml: train.batch = 8 is not divisible by train.micro_batches = 3: "
     "a batch has equal parts, change one"),
    (["optimizer.betas=[0.9, 1.0]"],
     "job.toml: optimizer.betas = [0.9, 1.0] is out of range: each is from 0 and below 1"),
    (["schedule.warmup=11"],
     "job.toml: schedule.warmup = 11 is longer than train.steps = 10: "
     "shorten the warm-up, or train longer"),
    (["data.sequence=4097"],
     "job.toml: data.sequence = 4097 is longer than model.max_positions = 4096: "
     "shorten it, or raise the latter"),
    (["data.validation_path=v.txt", "data.validation_share=0.1"],
     'job.toml: data.validation_path = "v.txt" and data.validation_share = 0.1 exclude each other: '
     "remove one"),
    (["seed=-1"],
     "seed=-1: seed = -1: "
     "give an integer from 0 and below 2^63"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "sentence"), WRONG, ids=lambda value: str(value)[:30])
def test_impossible_job_is_reported_in_one_sentence(sets: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*sets)
    message = str(caught.value)
    if not sentence.startswith(tuple(f"{item}: " for item in sets)):
        # A mistake between keys names the items that may have made it.
        for item in sets:
            message = message.replace(f" and {item}", "").replace(f" with {item}", "")
    assert message == sentence


def test_all_keys_that_do_not_go_together_are_named() -> None:
    """Those inside one table, and those of several."""
    with pytest.raises(ConfigError) as caught:
        job("model.heads=6", "train.micro_batches=3", "schedule.warmup=11", "data.sequence=4097")
    heading, *lines = str(caught.value).splitlines()
    assert heading == "job.toml: 4 mistakes"
    starts = (
        "model.kv_heads = 4 does",
        "train.batch = 8 is",
        "schedule.warmup = ",
        "data.sequence",
    )
    for line, start in zip(lines, starts, strict=True):
        assert start in line


HEADS, BATCH = "model.kv_heads = 4 does not", "train.batch = 8 is not"
WARMUP, SEQUENCE = "schedule.warmup = 11 is", "data.sequence = 4097 is"


@pytest.mark.parametrize(
    ("sets", "conflicts"),
    [
        (["lr=3"], [HEADS, BATCH, WARMUP, SEQUENCE]),
        (["train.precision=fp8"], [HEADS, BATCH, WARMUP, SEQUENCE]),
        (["schedule.warmpu=3"], [HEADS, BATCH, SEQUENCE]),
        (["model.max_position=9000"], [HEADS, BATCH, WARMUP]),
        (["layout.foo=2"], [HEADS, BATCH, WARMUP]),
        (["train.steps=x"], [HEADS]),
    ],
)
def test_conflicts_are_named_beside_other_mistakes(sets: list[str], conflicts: list[str]) -> None:
    """But none that may only follow from a misspelt or wrong key."""
    wrong = ["model.heads=6", "train.micro_batches=3", "schedule.warmup=11", "data.sequence=4097"]
    with pytest.raises(ConfigError) as caught:
        job(*wrong, *sets)
    message = str(caught.value)
    assert message.startswith(f"job.toml: {len(conflicts) + 1} mistakes\n")
    assert all(one in message for one in conflicts), message


STUDENTS = """student=[{name = "a", model = {preset = "tiny-dense"}},
    {name = "b", model = {preset = "tiny-dense"}}]"""


@pytest.mark.parametrize(
    ("sets", "number"),
    [
        ([STUDENTS, "train.micro_batches=3"], 1),
        ([STUDENTS, "train.micro_batches=3", "optimizer.betas=[0.9, 1.0]"], 2),
        ([DEEPSEEK, "model.heads=6"], 1),
        ([DEEPSEEK, "model.kv_heads=3", "model.heads=5"], 1),
        ([DENSE, "model.expert_groups=3"], 1),
        (["model.top_k=0", "routing.router=switch"], 1),
        (["model.dense_layers=9", "train.batch=3", "train.micro_batches=2"], 2),
    ],
)
def test_a_mistake_is_named_once(sets: list[str], number: int) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*sets)
    message = str(caught.value)
    found = re.search(r": (\d+) mistakes\n", message)
    assert (int(found[1]) if found else 1) == number, message


def test_keys_of_a_student_that_do_not_go_together_are_named_with_its_place() -> None:
    students = """[{name = "a", model = {preset = "tiny-dense", head_dim = 31}},
        {name = "b", model = {preset = "tiny-dense"}, interval = 2, losses = {logits = 1.0}}]"""
    with pytest.raises(ConfigError) as caught:
        job(f"student={students}", "schedule.warmup=11")
    message = str(caught.value)
    assert "student[0].model: model.head_dim = 31 is odd: the rotary embedding" in message
    assert "student[1]: interval = 2 with losses.text = 0 leaves steps without" in message
    assert "schedule.warmup = 11 is longer" in message


@pytest.mark.parametrize(
    "sets",
    [
        [],
        [DENSE],
        ["layout.ep=16", "layout.dp_shard=all"],
        ["routing.router=gshard", "routing.capacity_factor=1.2", "model.top_k=2"],
        ["routing.router=switch", "routing.noise=0.1", "model.top_k=1"],
        ["schedule.warmup=10", "data.sequence=4096", "train.micro_batches=8"],
        ["optimizer.lr=1", "train.clip=0", "model.clip_qkv=8", "seed=9223372036854775807"],
    ],
)
def test_job_round_trips_through_json_and_toml(sets: list[str]) -> None:
    made = job(*sets)
    assert parse(Job, json.loads(made.to_json()), "job.json") == made
    assert parse(Job, tomllib.loads(made.to_toml()), "job.toml") == made


def test_user_keys_override_preset() -> None:
    made = job("model.layers=1", "model.vocab=257")
    assert made.model == parse(
        ModelConfig, {**PRESETS["tiny-olmoe"], "layers": 1, "vocab": 257}, "preset"
    )
    assert PRESETS["tiny-olmoe"]["layers"] == 4


def test_presets_are_listed_and_valid() -> None:
    assert set(get_args(Preset)) == set(PRESETS)
    for name in PRESETS:
        assert job(f"model.preset={name}").model.family


@pytest.mark.parametrize(
    ("sets", "keys", "reason"),
    [
        ([], [], ""),
        ([DENSE, "routing.z_loss=0.1", "routing.balance_loss=0.1"],
         ["routing.balance_loss", "routing.z_loss"], "the model is dense"),
        (["routing.bias_update_rate=0.01"], ["routing.bias_update_rate"],
         'the routers of family "olmoe" have no bias'),
        ([DEEPSEEK, "routing.bias_update_rate=0.01"], [], ""),
        (["layout.dispatch=dedup", "layout.dispatch_hosts=1", "layout.overlap_local=false",
          "layout.chunks=2"],
         ["layout.chunks", "layout.dispatch", "layout.dispatch_hosts", "layout.overlap_local"],
         "layout.ep = 1 dispatches no tokens"),
        (["layout.dispatch=dedup", "layout.ep=2"], [], ""),
        (["layout.dispatch_hosts=1", "layout.ep=2"], ["layout.dispatch_hosts"],
         'layout.dispatch = "auto" finds the hosts'),
        (["layout.schedule=gpipe"], ["layout.schedule"], "layout.pp = 1 makes no pipeline"),
        (["schedule.kind=constant", "schedule.final=0.5"], ["schedule.final"],
         'schedule.kind = "constant" does not decay'),
        (["train.validate_every=5"], ["train.validate_every"],
         "there is no validation text (data.validation_path, data.validation_share)"),
        (["train.validate_every=5", "data.validation_share=0.1"], [], ""),
        (["finetune.rank=4"], ["finetune.rank"], 'finetune.method = "full"'),
        (['finetune.method="lora"', "finetune.rank=4"], [], ""),
        ([DENSE, 'finetune.method="lora"', 'finetune.targets=["attention"]'], [], ""),
        ([DEEPSEEK, 'finetune.router="frozen"', "routing.bias_update_rate=0.5"],
         ["routing.bias_update_rate"], 'finetune.router = "frozen"'),
        ([DEEPSEEK, 'finetune.router="train"', "routing.bias_update_rate=0.5"], [], ""),
        ([DENSE, 'finetune.router="train"'], ["finetune.router"], "the model is dense"),
        (['balance.policy="eplb"', "balance.prefetch=true"],
         ["balance.policy", "balance.prefetch"], "every rank has all experts"),
        (['balance.policy="none"', "balance.prefetch=false"], [], ""),
        ([DENSE, "balance.prefetch=true"], ["balance.prefetch"], "the model is dense"),
    ],
)  # fmt: skip
def test_ineffective_settings_are_reported(sets: list[str], keys: list[str], reason: str) -> None:
    found = job(*sets).ineffective_settings()
    assert sorted(found) == [f"{key} has no effect: {reason}" for key in keys]


def test_other_settings_without_effect_are_reported() -> None:
    (late,) = job("checkpoint.every=11").ineffective_settings()
    assert late.startswith("checkpoint.every = 11 is more than train.steps = 10")
    (missing,) = job(DENSE, 'finetune.method="lora"').ineffective_settings()
    assert missing == (
        'finetune.targets names experts, which the model lacks: set it to ["attention"]'
    )


COSTS = (
    "balance.costs={expert_tokens_per_s=1e4, bytes_per_s=1e9, latency_s=0, overlaps=%s, "
    "cpu_s_per_byte=1e-9}"
)


@pytest.mark.parametrize(
    ("sets", "sentences"),
    [
        (['balance.policy="none"', "balance.max_replicas=1", "balance.prefetch=true"],
         ['max_replicas has no effect: balance.policy = "none"',
          'prefetch has no effect: balance.policy = "none"']),
        (["balance.max_replicas=1"], []),
        (["balance.as_published=true"], ['as_published has no effect: balance.policy = "quota"']),
        (['balance.policy="eplb"', "balance.as_published=true"], []),
        *((([f'balance.policy="{policy}"', "balance.min_replica_tokens=8"],
            [f'min_replica_tokens has no effect: balance.policy = "{policy}"']))
          for policy in ("eplb", "pro-prophet", "faster-moe")),
        (["balance.min_replica_tokens=8"], []),
        (['balance.policy="none"', "balance.replan_every=4"],
         ['replan_every has no effect: balance.policy = "none"']),
        ([COSTS % "true", 'balance.policy="none"', "balance.migrate_every=5"], []),
        ([COSTS % "true", 'balance.policy="none"'],
         ['costs has no effect: balance.policy = "none"']),
        *(([f'balance.policy="{policy}"', "balance.prefetch=true"],
           [f'prefetch has no effect: balance.policy = "{policy}"'])
          for policy in ("eplb", "pro-prophet")),
        (['balance.policy="quota"', "balance.prefetch=true"], []),
        (["balance.max_replicas=0", "balance.max_replicas_sent=2"],
         ["max_replicas_sent has no effect: balance.max_replicas = 0"]),
    ],
)  # fmt: skip
def test_ineffective_balance_settings_are_reported(sets: list[str], sentences: list[str]) -> None:
    assert job(*sets, "layout.ep=2").ineffective_settings() == [
        f"balance.{one}" for one in sentences
    ]


def test_every_key_is_documented() -> None:
    for key in (*keys.walk(Job), *keys.walk(ClusterFile)):
        assert len(key.meaning) > 5, key
        assert key.meaning.endswith((".", "...")), key
    assert {"model.preset", "model.from"} < {key.path for key in keys.walk(Job)}
    assert "source" not in {key.path for key in keys.walk(Job)}


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny-")])
@pytest.mark.parametrize("changes", [{}, {"layers": 1, "dense_layers": 0, "shared_experts": 0}])
def test_available_targets_match_adapters(preset: str, changes: dict[str, int]) -> None:
    """The job rejects targets before any parameter exists."""
    model = parse(ModelConfig, {**PRESETS[preset], **changes}, "preset")
    found = {
        target
        for target in get_args(AdapterTarget)
        if list(adapters(model, FinetuneConfig(method="lora", targets=[target])))
    }
    assert _available_targets(model) == found


def test_trainable_parameters_are_listed_by_name() -> None:
    lora = job('finetune.method="lora"', "finetune.rank=4", 'finetune.router="train"')
    first, *lines = describe_trainable(lora)
    model = lora.model
    trained = model.layers * (model.experts * (model.hidden + 3 * 4 * (model.hidden + model.ffn)))
    trained += model.layers * 4 * 2 * 4 * model.hidden
    assert first.startswith(
        f"trains {trained:,} of {count_parameters(model).total + trained - 8192:,} param"
    )
    assert first.endswith("%): LoRA of q, k, v, o, gate, up, down; routers")
    assert sum(int(line.rpartition(": ")[2].replace(",", "")) for line in lines) == trained
    assert "  layers.*.moe.router.weight: 8,192" in lines
    assert [line.partition(":")[0].strip() for line in lines] == [
        "layers.*.moe.router.weight",
        *(f"layers.*.attention.{part}.lora_*" for part in "qkvo"),
        *(f"layers.*.moe.experts.*.{part}.lora_*" for part in ("gate", "up", "down")),
    ]
    for changes, words in (
        (('finetune.targets=["attention"]', 'finetune.method="lora"'), "LoRA of q, k, v, o"),
        (('finetune.method="full"',), "every weight but those of routers"),
        (('finetune.method="full"', 'finetune.router="train"'), "every weight"),
    ):
        assert describe_trainable(job(*changes))[0].endswith(f"%): {words}")


def test_a_key_is_missing_beside_an_unknown_one_unless_that_means_it() -> None:
    sentences = {
        "lr": ["unknown key 'train.lr'", "train.steps is missing", "train.batch is missing"],
        "max_steps": ["unknown key 'train.max_steps'", "train.batch is missing"],
    }
    for name, starts in sentences.items():
        tables = {"model": PRESETS["tiny-olmoe"], "data": {"path": "x", "sequence": 8}}
        with pytest.raises(ConfigError) as caught:
            parse(Job, {**tables, "train": {name: 1}}, "job")
        _, *lines = str(caught.value).splitlines()
        assert [line.strip().partition(":")[0] for line in lines] == starts
    with pytest.raises(ConfigError) as caught:
        parse(Job, {**tables, "training": {"max_steps": 1, "batch_size": 1}}, "job")
    assert "train is missing" not in str(caught.value)
