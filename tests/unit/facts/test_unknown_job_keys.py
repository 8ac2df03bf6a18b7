"""Unknown keys of a job: names of other frameworks, misspelt, shortened or far from every key."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from moesaic.base import keys, unknown_keys
from moesaic.base.config import apply_sets, parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import CtrJob, Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.job.other_names import CTR_NAMES, CTR_WAYS, OTHER_NAMES, OTHER_WAYS


def test_names_of_other_frameworks_are_known_and_are_no_keys() -> None:
    known = {entry.path for entry in keys.walk(Job)}
    assert set(OTHER_NAMES.values()) <= known
    assert not {f"{key.rpartition('.')[0]}.{name}" for name, key in OTHER_NAMES.items()} & known
    assert not set(OTHER_WAYS) & known
    written = set(re.findall(r"\b([a-z]+\.[a-z_]+)\b", " ".join(OTHER_WAYS.values())))
    assert written <= known, "a key that is no more"


def test_names_of_recommenders_are_known_and_are_no_keys() -> None:
    known = {entry.path for entry in keys.walk(CtrJob)}
    own = CTR_NAMES.items() - OTHER_NAMES.items()
    assert {key for _, key in own} <= known
    tables = {name: f"{key.rpartition('.')[0]}." if "." in key else "" for name, key in own}
    assert not {name if "." in name else f"{tables[name]}{name}" for name, _ in own} & known
    written = set(re.findall(r"\b([a-z]+\.[a-z_]+)\b", " ".join(CTR_WAYS.values())))
    assert written <= known, "a key that is not of recommenders"


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ("table.learning_rate table.lrr embedding.learning_rate", "table.lr"),
        ("embedding_dim model.embed_dim model.embedding_size", "model.dim"),
        ("data.categorical sparse_features", "data.slots"), ("data.dense_features", "data.dense"),
        ("table.capacity num_embeddings", "table.max_rows"), ("cache_size", "table.host"),
        ("table.ttl", "table.evict_days"),
        ("learning_rate", "optimizer.lr"), ("max_steps", "train.steps"),
    ],
)  # fmt: skip
def test_a_recommender_knows_the_names_of_other_frameworks(names: str, key: str) -> None:
    for name in names.split():
        assert unknown_keys.meant(CtrJob, name.split(".")).keys == [key]


def test_a_table_of_another_name_is_not_kept() -> None:
    assert unknown_keys.meant(Job, ["ctr", "model", "num_layers"]).keys == ["model.layers"]
    own = unknown_keys.meant(Job, ["student", "small", "model", "num_layers"]).keys
    assert own == ["student.small.model.layers"]


@pytest.mark.parametrize(
    "name", ["layout.ep", "layout.schedule", "layout.embedding", "ep_size", "fsdp", "dp_size", "cp"]
)
def test_a_recommender_has_no_layout(name: str) -> None:
    way = unknown_keys.meant(CtrJob, name.split(".")).way
    assert way is not None
    assert "--nproc N" in way


MEANT = {
    "model.top_k": "model.experts_per_token num_experts_per_tok moe_router_topk moe.top_k",
    "model.experts": "model.num_experts num_local_experts moe.num_experts routing.num_experts",
    "model.layers": "n_layer num_hidden_layers model.n_layers", "model.heads": "n_head",
    "model.hidden": "n_embd hidden_size", "model.ffn": "intermediate_size",
    "model.vocab": "vocab_size", "model.preset": "model.name", "model.from": "base_model",
    "routing.balance_loss": "moe.aux_loss_coef moe-aux-loss-coeff",
    "layout.ep": "expert_model_parallel_size parallelism.expert_parallel_degree",
    "layout.tp": "tensor_parallel_degree parallel.tp", "layout.pp": "pipeline_parallel_degree",
    "layout.dp_shard": "fsdp layout.zero zero_stage layout.fsdp zero_optimization.stage",
    "finetune.rank": "finetune.r lora.r lora_r peft.r",
    "finetune.alpha": "lora_alpha lora.alpha", "finetune.targets": "lora.target_modules",
    "data.path": "data.name dataset train_file data.train_path training.dataset",
    "data.sequence": "seq_len max_seq_length training.seq_len block_size",
    "data.tokenizer": "tokenizer.name tokenizer.path tokenizer_path model.tokenizer_path",
    "train.steps": "max_iters trainer.max_steps training.steps trainning.steps",
    "train.batch": "global_batch_size batchsize data_loader.batch_size training.batch_size",
    "train.micro_batches": "gradient_accumulation_steps", "train.precision": "bf16 fp16 dtype",
    "train.recompute": "gradient_checkpointing activation_checkpoint.mode",
    "train.clip": "max_grad_norm training.max_norm", "train.validate_every": "eval_steps",
    "optimizer.kind": "optimizer.name optimizer.type optim",
    "optimizer.lr": "lr train.lr optimizer.learning_rate training.lr",
    "optimizer.betas": "optimizer.momentum adam_beta1 optimizer.beta2",
    "optimizer.epsilon": "eps optimizer.eps",
    "optimizer.weight_decay": "weight_decay train.weight_decay",
    "schedule.kind": "lr_scheduler_type scheduler.type",
    "schedule.warmup": "warmup_steps lr_scheduler.warmup_steps",
    "checkpoint.every": "save_steps save_interval checkpoint.interval",
    "seed": "train.seed", "layout": "parallelism", "train": "training", "model": "modle.preset",
}  # fmt: skip


@pytest.mark.parametrize("key", MEANT)
def test_a_key_of_another_framework_names_the_key(key: str) -> None:
    for name in MEANT[key].split():
        assert mistake_in(name).endswith(f": did you mean '{key}'?"), name


WAYS = {
    "--out DIR": "output_dir save_dir logging_dir train.output_dir checkpoint.dir job.dump_folder",
    "--resume": "resume_from_checkpoint checkpoint.resume",
    "--nproc N": "nproc_per_node layout.dp dp_degree data_parallel_size trainer.devices",
    "train.steps": "epochs train.epochs train.num_train_epochs train.max_epochs trainer.epochs",
    "train.batch": "per_device_train_batch_size",
    "train.micro_batches": "micro_batch_size",
    "every step is logged": "train.log_every logging_steps log.interval metrics.log_freq",
    "name of its directory": "name run_name train.name",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_no_key_has_says_what_to_do(way: str) -> None:
    for name in WAYS[way].split():
        sentence = mistake_in(name)
        assert sentence.startswith(f"unknown key '{name}': ")
        assert way in sentence
        assert "did you mean" not in sentence


NO_NAMES = {
    "layout": "layout.r layout.name layout.save",
    "finetune": "finetune.bias finetune.name",
    "schedule": "schedule.load schedule.bias",
}


@pytest.mark.parametrize("table", NO_NAMES)
def test_a_short_word_has_its_meaning_in_some_tables_alone(table: str) -> None:
    for name in NO_NAMES[table].split():
        assert f"unknown key '{name}': '{table}' has the keys " in mistake_in(name)


NEAR = {
    "optimizer.lr": "optimizer.learning_rat learning_rat learn_rate optimiser.lr",
    "layout.ep": "layout.expert_paralel layout_ep layout.EP", "layout.etp": "layout.etp_size",
    "train.batch": "train.global_batch global_batch batch_siz train.batches",
    "schedule.warmup": "warmup_step optimizer.lr_warmup_step schedule.warmup_tokens",
    "routing.capacity_factor": "capacity routing.capacity moe.capacity cap capacity_fact",
    "train.steps": "stepz Steps train_step max_step", "train.clip": "max_grad train.clip_value",
    "model.layers": "n_layr num_hiden_layers model.layrs", "finetune.alpha": "lora_alfa",
    "data.sequence": "seq_leng data.sequense", "checkpoint.keep": "checkpoint.keep_last",
    "optimizer.weight_decay": "optimizer.decay weight_decy", "model.norm_epsilon": "model.norm",
    "train.micro_batches": "gradient_accum", "train.validation_samples": "train.validation",
    "data.text_key": "data.text", "student.temperature": "temp student.temp",
}  # fmt: skip


@pytest.mark.parametrize("key", NEAR)
def test_a_misspelt_or_shortened_key_names_the_nearest(key: str) -> None:
    for name in NEAR[key].split():
        assert meant(name) == ([key], None), name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("router", ["routing.router", "finetune.router"]),
        ("loss", ["routing.z_loss", "routing.balance_loss"]),
        ("pipeline", ["layout.pp", "layout.schedule"]),
        ("decay", ["optimizer.weight_decay", "schedule.kind"]),
        ("gradient", ["train.micro_batches", "train.recompute", "train.clip"]),
    ],
)
def test_a_name_of_a_few_keys_names_them(name: str, expected: list[str]) -> None:
    assert meant(name) == (expected, None)
    *first, last = [f"'{key}'" for key in expected]
    assert sentence_about(name).endswith(f": did you mean {', '.join(first)} or {last}?")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("micro_batch_siz", "give train.micro_batches"), ("train.epoch", "give train.steps"),
        ("output_di", "--out DIR"), ("num_gpu", "--nproc N"), ("dropouts", "has no dropout"),
    ],
)  # fmt: skip
def test_a_misspelt_name_that_no_key_has_says_what_to_do(name: str, words: str) -> None:
    assert words in sentence_about(name)


FAR = (
    "layout.depth layout.type layout.banana layout.kind knol zzz notes batch_norm val_batch_size "
    "hidden_dropout_prob num size train.colour train.max routing.temperature optimizer.fused"
)


@pytest.mark.parametrize("name", FAR.split())
def test_a_name_that_is_near_no_key_gets_the_keys_of_its_table(name: str) -> None:
    assert meant(name) == ([], None)
    table = name.rpartition(".")[0]
    words = f"'{table}' has the keys " if table else "the keys at the top are "
    assert sentence_about(name).startswith(f"unknown key '{name}': {words}")


def meant(name: str) -> tuple[list[str], str | None]:
    """Return the keys of a job that a name may mean, and how else to say it."""
    found = unknown_keys.meant(Job, name.split("."))
    return list(found.keys), found.way


def sentence_about(name: str) -> str:
    """Return the error of a key."""
    with pytest.raises(ConfigError) as caught:
        unknown_keys.locate(Job, name)
    return str(caught.value)


def test_a_misspelt_table_in_a_table_is_one_mistake() -> None:
    value = {"kind": "yarn", "factor": 2.0}
    (found,) = unknown_keys.unknown_keys(Job, ["model", "rope_scalling"], value)
    assert found.meant == "model.rope_scaling"


def mistake_in(name: str) -> str:
    """Return the sentence about a job with this key."""
    tables: dict[str, Any] = {"model": PRESETS["tiny-olmoe"], "train": {"steps": 1, "batch": 2}}
    tables = copy.deepcopy({**tables, "data": {"path": "x", "sequence": 8}})
    with pytest.raises(ConfigError) as caught:
        parse(Job, apply_sets(tables, [f"{name}=1"]), "job")
    return str(caught.value).removeprefix("job: ")


def test_a_key_in_the_model_of_a_student_is_meant_there() -> None:
    for name, key in (("num_experts", "experts"), ("n_layer", "layers"), ("hiden", "hidden")):
        found = unknown_keys.meant(Job, ["student", "model", name])
        assert found.keys == [f"student.model.{key}"]
