from __future__ import annotations

import json
import tomllib
from typing import get_args

import pytest

from moesaic.base import keys
from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import FinetuneConfig, Job, ModelConfig, Preset, Prices
from moesaic.facts.job.finetune import Target
from moesaic.facts.job.job import _targets, fill_preset
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import count
from moesaic.facts.workload.finetune import adapters, describe

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
     "a token visits each expert once, lower it"),
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
     "job.toml: model.rope_theta = 1.0 is not above 1, so that no channel turns more slowly than "
     'another, as model.rope_scaling.kind = "yarn" needs: raise it'),
    (["model.rope_scaling={kind='llama3', factor=2.0, low=4.0}"],
     "--set model.rope_scaling={kind='llama3', factor=2.0, low=4.0}: "
     "model.rope_scaling.low = 4.0 is not below model.rope_scaling.high = 4.0: lower it"),
    (["model.window=8"],
     'job.toml: model.window = 8 belongs to family "mixtral" or "qwen3_moe", not "olmoe": '
     "remove it"),
    (['model.family="deepseek_v3"'],
     'job.toml: model.family = "deepseek_v3" has latent attention, but there is no model.latent: '
     "give model.latent.width, .rotary and .value"),
    ([DEEPSEEK, "model.latent={width=8, rotary=32, value=8}"],
     "job.toml: model.latent.rotary = 32 leaves nothing of model.head_dim = 32, the width of a "
     "head's turned and other channels: lower it"),
    ([DEEPSEEK, "model.kv_heads=2"],
     "job.toml: model.kv_heads = 2 with latent attention, in which every head has keys of its "
     "own: set it to model.heads = 4"),
    ([DEEPSEEK, "model.dense_layers=4"],
     "job.toml: model.dense_layers = 4 leaves none of model.layers = 4 with experts: lower it"),
    ([DEEPSEEK, "model.groups=3"],
     "job.toml: model.groups = 3 does not divide model.experts = 16: "
     "choose a divisor of the number of experts"),
    ([DEEPSEEK, "model.top_groups=1", "model.top_k=5"],
     "job.toml: model.top_k = 5 is more than the 4 experts of model.top_groups = 1 groups: "
     "raise top_groups, or lower top_k"),
    ([DEEPSEEK, "model.groups=16", "model.top_groups=4"],
     "job.toml: model.groups = 16 leaves one of model.experts = 16 in a group, which is chosen by "
     "its best 2: lower model.groups"),
    (["layout.ep=3"],
     "job.toml: layout.ep = 3 does not divide model.experts = 16: "
     "choose a divisor of the number of experts"),
    (["layout.tp=3", "layout.ep=2"],
     "job.toml: layout.tp = 3 does not divide model.heads = 4, which the slices share out: "
     "choose a divisor"),
    (["layout.tp=2", "model.vocab=321"],
     "job.toml: layout.tp = 2 does not divide model.vocab = 321, which the slices share out: "
     "choose a divisor"),
    (["layout.tp=2", 'optimizer.moments="8bit"', "model.head_dim=32"],
     'job.toml: layout.tp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "slices of the output of attention have 64 columns, set optimizer.moments to "
     '"bf16" or "full", or tp = 1'),
    ([DEEPSEEK, "layout.tp=2", 'optimizer.moments="8bit"', "model.dense_ffn=256",
      "model.latent={width=8, rotary=4, value=64}", "model.ffn=64"],
     'job.toml: layout.tp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "slices of the output of shared experts have 32 columns, set optimizer.moments to "
     '"bf16" or "full", or tp = 1'),
    (["layout.etp=2"],
     "job.toml: layout.etp = 2 does not divide tp = 1, and slices of experts are slices of all "
     "else too: choose a divisor, or raise tp"),
    (["layout.tp=2", "layout.etp=2", 'optimizer.moments="8bit"', "model.head_dim=64",
      "model.ffn=128"],
     'job.toml: layout.etp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "slices of the output of experts have 64 columns, set optimizer.moments to "
     '"bf16" or "full", or etp = 1'),
    (["layout.tp=2", 'optimizer.moments="8bit"', "model.head_dim=32", 'finetune.method="lora"'],
     'job.toml: layout.tp = 2 with optimizer.moments = "8bit", which has blocks of 128 columns: '
     "slices of the output of attention have 64 columns, set optimizer.moments to "
     '"bf16" or "full", or tp = 1'),
    (["layout.tp=2", "layout.etp=2", 'finetune.method="lora"'],
     'job.toml: layout.etp = 2 with "experts" among finetune.targets: adapters of experts are not '
     "cut into slices, set etp = 1, or adapt what is not an expert's"),
    ([DENSE, "layout.ep=2"],
     "job.toml: layout.ep = 2 with a dense model (model.experts = 0): "
     "set layout.ep = 1, or choose a model with experts"),
    (["routing.router=switch"],
     'job.toml: routing.router = "switch" chooses 1 of the experts, but model.top_k = 4: '
     "set model.top_k = 1"),
    (["routing.router=gshard", "routing.capacity=1.2"],
     'job.toml: routing.router = "gshard" chooses 2 of the experts, but model.top_k = 4: '
     "set model.top_k = 2"),
    (["routing.router=gshard", "model.top_k=2"],
     'job.toml: routing.router = "gshard" drops tokens beyond a capacity: '
     "set routing.capacity (1.2 is usual)"),
    (["model.preset=tiny-deepseek", "routing.router=gshard"],
     'job.toml: routing.router = "gshard" with model.family = "deepseek_v3", whose routers choose '
     'by sigmoids, in groups, with a bias: set routing.router = "top-k"'),
    (["model.preset=tiny-deepseek", "routing.router=switch", "routing.noise=0.1"],
     'job.toml: routing.router = "switch" with model.family = "deepseek_v3", whose routers choose '
     'by sigmoids, in groups, with a bias: set routing.router = "top-k" and routing.noise = 0'),
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
     'job.toml: routing.router = "switch" with model.family = "deepseek_v3", whose routers choose '
     'by sigmoids, in groups, with a bias: set routing.router = "top-k"'),
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
    (["layout.shard=0"],
     '--set layout.shard=0: layout.shard = 0 is out of range: give an integer from 1 or "all"'),
    (["seed=-1"],
     "--set seed=-1: seed = -1 is out of range: "
     "give an integer from 0 and below 2^63"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "sentence"), WRONG, ids=lambda value: str(value)[:30])
def test_an_impossible_job_is_one_sentence(sets: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(*sets)
    told = str(caught.value)
    if not sentence.startswith("--set"):
        # A mistake between keys names the items that may have made it.
        for item in sets:
            told = told.replace(f" and --set {item}", "").replace(f" with --set {item}", "")
    assert told == sentence


def test_a_mistake_between_keys_names_file_and_items() -> None:
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
        ["layout.ep=16", "layout.shard=all"],
        ["routing.router=gshard", "routing.capacity=1.2", "model.top_k=2"],
        ["routing.router=switch", "routing.noise=0.1", "model.top_k=1"],
        ["schedule.warmup=10", "data.sequence=4096", "train.micro_batches=8"],
        ["optimizer.lr=1", "train.clip=0", "model.clip_qkv=8", "seed=9223372036854775807"],
    ],
)
def test_a_job_survives_json(sets: list[str]) -> None:
    made = job(*sets)
    assert parse(Job, json.loads(made.to_json()), "job.json") == made
    assert parse(Job, tomllib.loads(made.to_toml()), "job.toml") == made


def test_preset_sizes_give_way_to_the_users() -> None:
    made = job("model.layers=1", "model.vocab=257")
    assert made.model == parse(
        ModelConfig, {**PRESETS["tiny-olmoe"], "layers": 1, "vocab": 257}, "preset"
    )
    assert PRESETS["tiny-olmoe"]["layers"] == 4


def test_presets_are_named_and_possible() -> None:
    assert set(get_args(Preset)) == set(PRESETS)
    for name in PRESETS:
        assert job(f"model.preset={name}").model.family


def test_settings_without_effect_are_told() -> None:
    assert job().idle() == []
    assert job(DENSE, "routing.z_loss=0.1", "routing.balance_loss=0.1").idle() == [
        "routing.balance_loss has no effect: the model is dense",
        "routing.z_loss has no effect: the model is dense",
    ]
    assert job("routing.bias_step=0.01").idle() == [
        'routing.bias_step has no effect: the routers of family "olmoe" have no bias'
    ]
    assert job("model.preset=tiny-deepseek", "routing.bias_step=0.01").idle() == []
    given = ("dispatch=visits", "hosts=1", "local=along", "chunks=2")
    assert job(*(f"layout.{one}" for one in given)).idle() == [
        f"layout.{key} has no effect: layout.ep = 1 sends no token"
        for key in ("dispatch", "hosts", "local", "chunks")
    ]
    assert job("layout.dispatch=visits", "layout.ep=2").idle() == []
    assert job("layout.hosts=1", "layout.ep=2").idle() == [
        'layout.hosts has no effect: layout.dispatch = "auto" finds the hosts'
    ]
    assert job("layout.schedule=gpipe").idle() == [
        "layout.schedule has no effect: layout.pp = 1 makes no pipeline"
    ]
    told = job(
        "schedule.kind=constant", "schedule.final=0.5", "train.validate_every=5",
        "checkpoint.every=11",
    ).idle()  # fmt: skip
    assert [sentence.split()[0] for sentence in told] == [
        "schedule.final", "train.validate_every", "checkpoint.every",
    ]  # fmt: skip
    assert job("train.validate_every=5", "data.validation_share=0.1").idle() == []


PRICES = "balance.prices={rows_per_s=1e4, bytes_per_s=1e9, latency_s=0, hides=%s, handling_s=1e-9}"


@pytest.mark.parametrize(
    ("sets", "idle"),
    [
        (['balance.policy="none"', "balance.copies=1", "balance.early=true"],
         ['copies has no effect: balance.policy = "none"',
          'early has no effect: balance.policy = "none"']),
        ([PRICES % "true", "balance.measure=true"],
         ["measure has no effect: balance.prices says what copies cost"]),
        ([PRICES % "false"],
         ["prices.handling_s has no effect: balance.prices.hides = false"]),
        (["balance.copies=1", "balance.measure=true"], []),
        (["balance.as_published=true"], ['as_published has no effect: balance.policy = "quota"']),
        (['balance.policy="eplb"', "balance.as_published=true"], []),
        *((([f'balance.policy="{policy}"', "balance.least_rows=8"],
            [f'least_rows has no effect: balance.policy = "{policy}"']))
          for policy in ("eplb", "pro-prophet", "faster-moe")),
        (["balance.least_rows=8"], []),
        (['balance.policy="none"', "balance.replan_every=4", "balance.measure=true"],
         ['measure has no effect: balance.policy = "none"',
          'replan_every has no effect: balance.policy = "none"']),
        (['balance.policy="none"', "balance.measure=true", "balance.rehome_every=5"], []),
        ([PRICES % "true", 'balance.policy="none"'],
         ['prices has no effect: balance.policy = "none"']),
        *(([f'balance.policy="{policy}"', "balance.early=true"],
           [f'early has no effect: balance.policy = "{policy}" has early copies in any case'])
          for policy in ("eplb", "pro-prophet")),
        (['balance.policy="quota"', "balance.early=true"], []),
        (["balance.copies=0", "balance.copies_sent=2", "balance.measure=true"],
         ["copies_sent has no effect: balance.copies = 0",
          "measure has no effect: balance.copies = 0"]),
    ],
)  # fmt: skip
def test_settings_of_balance_without_effect_are_told(sets: list[str], idle: list[str]) -> None:
    assert job(*sets, "layout.ep=2").idle() == [f"balance.{one}" for one in idle]


def test_settings_of_balance_are_idle_where_every_rank_has_all_experts() -> None:
    given = {
        "policy": '"eplb"', "as_published": "true", "copies": "1", "early": "true",
        "measure": "true", "rehome_every": "5",
    }  # fmt: skip
    told = job(*(f"balance.{key}={value}" for key, value in given.items())).idle()
    assert told == [f"balance.{key} has no effect: every rank has all experts" for key in given]
    assert job('balance.policy="none"', "balance.early=false").idle() == []
    (told,) = (one for one in job(DENSE, "balance.early=true").idle() if "balance" in one)
    assert told == "balance.early has no effect: the model is dense"


def test_prices_say_all_that_is_counted_on() -> None:
    prices = Prices(
        rows_per_s=1e4, bytes_per_s=1e9, latency_s=1e-4, matrices_s=2e-3, hides=True,
        handling_s=5e-10,
    )  # fmt: skip
    assert prices.words() == (
        "experts take 10,000 rows/s and 2 ms for their matrices, 1 GB/s travel, an exchange takes "
        "0.1 ms, handling a byte of a copy 0.5 ns, copies travel while ranks compute"
    )
    least = {"matrices_s": 0.0, "handling_s": 0.0, "hides": False}
    assert prices.model_copy(update=least).words() == (
        "experts take 10,000 rows/s, 1 GB/s travel, an exchange takes 0.1 ms, ranks move copies by "
        "hand"
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
          '"experts": set it to ["attention", "ffn"] to adapt all that it has, or to '
          '["attention"] to leave it at that']),
        ([DENSE, 'finetune.method="lora"', 'finetune.targets=["attention"]'], []),
        (['model.preset="tiny-deepseek"', 'finetune.router="frozen"', "routing.bias_step=0.5"],
         ['routing.bias_step has no effect: finetune.router = "frozen"']),
        (['model.preset="tiny-deepseek"', 'finetune.router="train"', "routing.bias_step=0.5"], []),
        ([DENSE, 'finetune.router="train"'],
         ["finetune.router has no effect: the model is dense"]),
    ],
)  # fmt: skip
def test_settings_of_fine_tuning_without_effect_are_told(
    sets: list[str], expected: list[str]
) -> None:
    assert job(*sets).idle() == expected


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("tiny-")])
@pytest.mark.parametrize("changes", [{}, {"layers": 1, "dense_layers": 0, "shared": 0}])
def test_a_model_has_the_targets_that_adapters_are_made_for(
    preset: str, changes: dict[str, int]
) -> None:
    """The job refuses targets before there are parameters to look at."""
    model = parse(ModelConfig, {**PRESETS[preset], **changes}, "preset")
    found = {
        target
        for target in get_args(Target)
        if list(adapters(model, FinetuneConfig(method="lora", targets=[target])))
    }
    assert _targets(model) == found


def test_what_is_learnt_is_told_by_name() -> None:
    lora = job('finetune.method="lora"', "finetune.rank=4", 'finetune.router="train"')
    first, *lines = describe(lora)
    model = lora.model
    learnt = model.layers * (model.experts * (model.hidden + 3 * 4 * (model.hidden + model.ffn)))
    learnt += model.layers * 4 * 2 * 4 * model.hidden
    assert first.startswith(f"learns {learnt:,} of {count(model).total + learnt - 8192:,} param")
    assert "  layers.*.moe.router.weight: 8,192" in lines
    assert [line.partition(":")[0].strip() for line in lines] == [
        "layers.*.moe.router.weight",
        *(f"layers.*.attention.{part}.lora_*" for part in "qkvo"),
        *(f"layers.*.moe.experts.*.{part}.lora_*" for part in ("gate", "up", "down")),
    ]
