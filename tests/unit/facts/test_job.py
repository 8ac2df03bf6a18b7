from __future__ import annotations

import json
import tomllib
from typing import get_args

import pytest

from moesaic.base import keys
from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import FinetuneConfig, Job, ModelConfig, Preset, Prices
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
    return parse(Job, fill_preset(raw, "job.toml"), "job.toml", sets)


WRONG = [
    (['model.preset="tiny-olmo"'],
     'job.toml: model.preset = "tiny-olmo" is not known: did you mean "tiny-olmoe" (it takes '
     '"tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek", "olmoe-1b-7b", '
     '"mixtral-8x7b", "qwen3-30b-a3b" or "deepseek-v3")?'),
    (["model.preset=[1]"],
     'job.toml: model.preset = [1] is not known: give "tiny-dense", "tiny-mixtral", "tiny-olmoe", '
     '"tiny-qwen3", "tiny-deepseek", "olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b" or '
     '"deepseek-v3"'),
    (['finetune.targets=["experts", "q_proj"]'],
     '--set finetune.targets=["experts", "q_proj"]: '
     'finetune.targets[1] = "q_proj" is not known: give "attention", "experts", "ffn" or "shared"'),
    (["finetune.targets=[]"],
     "--set finetune.targets=[]: finetune.targets = [] is empty: give a list of one or more of "
     '"attention", "experts", "ffn" or "shared"'),
    (['finetune.targets=["expert"]'],
     '--set finetune.targets=["expert"]: '
     'finetune.targets[0] = "expert" is not known: did you mean "experts" (it takes "attention", '
     '"experts", "ffn" or "shared")?'),
    (["model.heads=6"],
     "job.toml: model.kv_heads = 4 does not divide model.heads = 6: "
     "choose a divisor of the number of heads"),
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
     "--set model.rope_scaling={kind='llama3', factor=2.0, low_freq_factor=4.0}: "
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
     "choose a divisor of the number of experts"),
    ([DEEPSEEK, "model.top_expert_groups=1", "model.top_k=5"],
     "job.toml: model.top_k = 5 is more than the 4 experts of model.top_expert_groups = 1 groups: "
     "raise model.top_expert_groups, or lower model.top_k"),
    ([DEEPSEEK, "model.expert_groups=16", "model.top_expert_groups=4"],
     "job.toml: model.expert_groups = 16 leaves one of model.experts = 16 in a group, and groups "
     "are ranked by 2 scores: lower model.expert_groups"),
    (["layout.ep=3"],
     "job.toml: layout.ep = 3 does not divide model.experts = 16: "
     "choose a divisor of the number of experts"),
    (["layout.tp=3", "layout.ep=2"],
     "job.toml: layout.tp = 3 does not divide model.heads = 4, which the TP ranks split: "
     "choose a divisor"),
    (["layout.tp=2", "model.vocab=321"],
     "job.toml: layout.tp = 2 does not divide model.vocab = 321, which the TP ranks split: "
     "choose a divisor"),
    (["layout.tp=2", 'optimizer.moments="8bit"', "model.head_dim=32"],
     'job.toml: layout.tp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "shards of the output of attention have 64 columns, set optimizer.moments to "
     '"bf16" or "full", or tp = 1'),
    ([DEEPSEEK, "layout.tp=2", 'optimizer.moments="8bit"', "model.dense_ffn=256",
      "model.latent={kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=64}", "model.ffn=64"],
     'job.toml: layout.tp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "shards of the output of shared experts have 32 columns, set optimizer.moments to "
     '"bf16" or "full", or tp = 1'),
    (["layout.etp=2"],
     "job.toml: layout.etp = 2 does not divide tp = 1, whose ranks split the experts: "
     "choose a divisor, or raise tp"),
    (["layout.tp=2", "layout.etp=2", 'optimizer.moments="8bit"', "model.head_dim=64",
      "model.ffn=128"],
     'job.toml: layout.etp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "shards of the output of experts have 64 columns, set optimizer.moments to "
     '"bf16" or "full", or etp = 1'),
    (["layout.tp=2", 'optimizer.moments="8bit"', "model.head_dim=32", 'finetune.method="lora"'],
     'job.toml: layout.tp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "shards of the output of attention have 64 columns, set optimizer.moments to "
     '"bf16" or "full", or tp = 1'),
    (["layout.tp=2", "layout.etp=2", 'finetune.method="lora"'],
     'job.toml: layout.etp = 2 with "experts" in finetune.targets: adapters of experts '
     'cannot be sharded, set etp = 1, or remove "experts"'),
    ([DENSE, "layout.ep=2"],
     "job.toml: layout.ep = 2 with a dense model (model.experts = 0): "
     "set layout.ep = 1, or choose a model with experts"),
    (["routing.router=switch"],
     'job.toml: routing.router = "switch" chooses 1 of the experts, but model.top_k = 4: '
     "set model.top_k = 1"),
    (["routing.router=gshard", "routing.capacity_factor=1.2"],
     'job.toml: routing.router = "gshard" chooses 2 of the experts, but model.top_k = 4: '
     "set model.top_k = 2"),
    (["routing.router=gshard", "model.top_k=2"],
     'job.toml: routing.router = "gshard" drops tokens beyond a capacity: '
     "set routing.capacity_factor (1.2 is usual)"),
    (["model.preset=tiny-deepseek", "routing.router=gshard"],
     'job.toml: routing.router = "gshard" with model.family = "deepseek_v3", whose routers use '
     'sigmoid scores, expert groups and a bias: set routing.router = "top-k"'),
    (["model.preset=tiny-deepseek", "routing.router=switch", "routing.noise=0.1"],
     'job.toml: routing.router = "switch" with model.family = "deepseek_v3", whose routers use '
     'sigmoid scores, expert groups and a bias: set routing.router = "top-k" and '
     "routing.noise = 0"),
    (["model.preset=tiny-mixtral", "routing.router=switch"],
     'job.toml: routing.router = "switch" chooses 1 of the experts, but model.top_k = 2: '
     "set model.top_k = 1 and model.renormalise = false"),
    (["source=hf", "routing.router=switch", "routing.noise=0.1"],
     'job.toml: routing.router = "switch" chooses 1 of the experts, but model.top_k = 4: '
     'set routing.router = "top-k" and routing.noise = 0, or start from a model that chooses 1'),
    (["source=hf", "routing.router=gshard"],
     'job.toml: routing.router = "gshard" chooses 2 of the experts, but model.top_k = 4: '
     'set routing.router = "top-k", or start from a model that chooses 2'),
    (["source=hf", "model.top_k=1", "model.renormalise=true"],
     "job.toml: model.renormalise = true with model.top_k = 1 makes every weight 1, so that the "
     "router learns nothing from the loss: start from another model"),
    ([DENSE, "routing.router=gshard"],
     'job.toml: routing.router = "gshard" with a dense model (model.experts = 0): '
     "remove it, or choose a model with experts"),
    (["model.preset=tiny-deepseek", "routing.router=switch"],
     'job.toml: routing.router = "switch" with model.family = "deepseek_v3", whose routers use '
     'sigmoid scores, expert groups and a bias: set routing.router = "top-k"'),
    ([DENSE, "routing.router=switch"],
     'job.toml: routing.router = "switch" with a dense model (model.experts = 0): '
     "remove it, or choose a model with experts"),
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
    (["layout.dp_shard=0"],
     "--set layout.dp_shard=0: layout.dp_shard = 0 is out of range: give an integer from 1 or "
     '"all"'),
    (["seed=-1"],
     "--set seed=-1: seed = -1 is out of range: "
     "give an integer from 0 and below 2^63"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "sentence"), WRONG, ids=lambda value: str(value)[:30])
def test_impossible_job_is_reported_in_one_sentence(sets: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*sets)
    message = str(caught.value)
    if not sentence.startswith("--set"):
        # A mistake between keys names the items that may have made it.
        for item in sets:
            message = message.replace(f" and --set {item}", "").replace(f" with --set {item}", "")
    assert message == sentence


def test_error_between_keys_names_file_and_set_items() -> None:
    with pytest.raises(ConfigError) as caught:
        job("data.validation_path=v.txt", "train.steps=3", "data.validation_share=0.1")
    assert str(caught.value).startswith(
        "job.toml with --set data.validation_path=v.txt and --set data.validation_share=0.1: "
        'data.validation_path = "v.txt" and data.validation_share = 0.1 exclude each other'
    )


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


def test_ineffective_settings_are_reported() -> None:
    assert job().ineffective_settings() == []
    assert job(DENSE, "routing.z_loss=0.1", "routing.balance_loss=0.1").ineffective_settings() == [
        "routing.balance_loss has no effect: the model is dense",
        "routing.z_loss has no effect: the model is dense",
    ]
    assert job("routing.bias_update_rate=0.01").ineffective_settings() == [
        'routing.bias_update_rate has no effect: the routers of family "olmoe" have no bias'
    ]
    assert (
        job("model.preset=tiny-deepseek", "routing.bias_update_rate=0.01").ineffective_settings()
        == []
    )
    given = ("dispatch=dedup", "dispatch_hosts=1", "overlap_local=false", "chunks=2")
    assert job(*(f"layout.{one}" for one in given)).ineffective_settings() == [
        f"layout.{key} has no effect: layout.ep = 1 dispatches no tokens"
        for key in ("dispatch", "dispatch_hosts", "overlap_local", "chunks")
    ]
    assert job("layout.dispatch=dedup", "layout.ep=2").ineffective_settings() == []
    assert job("layout.dispatch_hosts=1", "layout.ep=2").ineffective_settings() == [
        'layout.dispatch_hosts has no effect: layout.dispatch = "auto" finds the hosts'
    ]
    assert job("layout.schedule=gpipe").ineffective_settings() == [
        "layout.schedule has no effect: layout.pp = 1 makes no pipeline"
    ]
    message = job(
        "schedule.kind=constant", "schedule.final=0.5", "train.validate_every=5",
        "checkpoint.every=11",
    ).ineffective_settings()  # fmt: skip
    assert [sentence.split()[0] for sentence in message] == [
        "schedule.final", "train.validate_every", "checkpoint.every",
    ]  # fmt: skip
    assert job("train.validate_every=5", "data.validation_share=0.1").ineffective_settings() == []


PRICES = (
    "balance.prices={expert_tokens_per_s=1e4, bytes_per_s=1e9, latency_s=0, overlaps=%s, "
    "cpu_s_per_byte=1e-9}"
)


@pytest.mark.parametrize(
    ("sets", "sentences"),
    [
        (['balance.policy="none"', "balance.max_replicas=1", "balance.prefetch=true"],
         ['max_replicas has no effect: balance.policy = "none"',
          'prefetch has no effect: balance.policy = "none"']),
        ([PRICES % "false"],
         ["prices.cpu_s_per_byte has no effect: balance.prices.overlaps = false"]),
        (["balance.max_replicas=1"], []),
        (["balance.as_published=true"], ['as_published has no effect: balance.policy = "quota"']),
        (['balance.policy="eplb"', "balance.as_published=true"], []),
        *((([f'balance.policy="{policy}"', "balance.min_replica_tokens=8"],
            [f'min_replica_tokens has no effect: balance.policy = "{policy}"']))
          for policy in ("eplb", "pro-prophet", "faster-moe")),
        (["balance.min_replica_tokens=8"], []),
        (['balance.policy="none"', "balance.replan_every=4"],
         ['replan_every has no effect: balance.policy = "none"']),
        ([PRICES % "true", 'balance.policy="none"', "balance.migrate_every=5"], []),
        ([PRICES % "true", 'balance.policy="none"'],
         ['prices has no effect: balance.policy = "none"']),
        *(([f'balance.policy="{policy}"', "balance.prefetch=true"],
           [f'prefetch has no effect: balance.policy = "{policy}" always prefetches'])
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


def test_balance_settings_are_ineffective_without_expert_parallelism() -> None:
    given = {
        "policy": '"eplb"', "as_published": "true", "max_replicas": "1", "prefetch": "true",
        "migrate_every": "5",
    }  # fmt: skip
    message = job(
        *(f"balance.{key}={value}" for key, value in given.items())
    ).ineffective_settings()
    assert message == [f"balance.{key} has no effect: every rank has all experts" for key in given]
    assert job('balance.policy="none"', "balance.prefetch=false").ineffective_settings() == []
    (message,) = (
        one
        for one in job(DENSE, "balance.prefetch=true").ineffective_settings()
        if "balance" in one
    )
    assert message == "balance.prefetch has no effect: the model is dense"


def test_prices_description() -> None:
    prices = Prices(
        expert_tokens_per_s=1e4, bytes_per_s=1e9, latency_s=1e-4, weight_read_s=2e-3, overlaps=True,
        cpu_s_per_byte=5e-10,
    )  # fmt: skip
    assert prices.describe() == (
        "experts 10,000 tokens/s plus 2 ms to read weights, exchanges 1 GB/s with 0.1 ms latency, "
        "0.5 ns of CPU per replica byte, replicas overlapped with compute"
    )
    least = {"weight_read_s": 0.0, "cpu_s_per_byte": 0.0, "overlaps": False}
    assert prices.model_copy(update=least).describe() == (
        "experts 10,000 tokens/s, exchanges 1 GB/s with 0.1 ms latency, replicas copied by the "
        "ranks"
    )


def test_every_key_is_documented() -> None:
    for key in keys.walk(Job):
        assert len(key.meaning) > 10, key
        assert key.meaning.endswith("."), key
    assert {"model.preset", "model.from"} < {key.path for key in keys.walk(Job)}
    assert "source" not in {key.path for key in keys.walk(Job)}


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["finetune.rank=4"], ['finetune.rank has no effect: finetune.method = "full"']),
        (['finetune.method="lora"', "finetune.rank=4"], []),
        (['finetune.method="lora"', 'finetune.targets=["ffn", "attention"]'],
         ['finetune.targets: the model has no "ffn", leave it out']),
        ([DENSE, 'finetune.method="lora"'],
         ['finetune.targets is by default ["attention", "experts"], and the model has no '
          '"experts": set it to ["attention", "ffn"] to adapt everything, or to '
          '["attention"] to keep the default']),
        ([DENSE, 'finetune.method="lora"', 'finetune.targets=["attention"]'], []),
        (['model.preset="tiny-deepseek"', 'finetune.router="frozen"',
          "routing.bias_update_rate=0.5"],
         ['routing.bias_update_rate has no effect: finetune.router = "frozen"']),
        (['model.preset="tiny-deepseek"', 'finetune.router="train"',
          "routing.bias_update_rate=0.5"], []),
        ([DENSE, 'finetune.router="train"'],
         ["finetune.router has no effect: the model is dense"]),
    ],
)  # fmt: skip
def test_ineffective_finetune_settings_are_reported(sets: list[str], expected: list[str]) -> None:
    assert job(*sets).ineffective_settings() == expected


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
    assert "  layers.*.moe.router.weight: 8,192" in lines
    assert [line.partition(":")[0].strip() for line in lines] == [
        "layers.*.moe.router.weight",
        *(f"layers.*.attention.{part}.lora_*" for part in "qkvo"),
        *(f"layers.*.moe.experts.*.{part}.lora_*" for part in ("gate", "up", "down")),
    ]
