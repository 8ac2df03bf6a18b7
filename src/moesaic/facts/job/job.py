"""The whole job, and the checks between its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field

from moesaic.base import keys
from moesaic.base.config import CONFLICTS_ALLOWED, Section, parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job.balance import BalanceConfig, no_effect
from moesaic.facts.job.control import ControlConfig
from moesaic.facts.job.credibility import LABELS, CredibilityConfig
from moesaic.facts.job.data import DataConfig
from moesaic.facts.job.device_name import is_gpu
from moesaic.facts.job.distill import TEACHER, DistillConfig, StudentConfig, student_errors
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.job.memory import MemoryConfig
from moesaic.facts.job.model import PRESETS, ModelConfig
from moesaic.facts.job.other_names import OTHER_NAMES, OTHER_WAYS
from moesaic.facts.job.routing import RoutingConfig
from moesaic.facts.job.train import (
    CheckpointConfig,
    KernelsConfig,
    LayoutConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    grouped_mm_fault,
    warmup_conflicts,
)

_DISPATCH_KEYS = {"dispatch", "dispatch_hosts", "overlap_local", "chunks"}


class Job(Section):
    """One training job, with every default filled in."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"source"})
    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES
    other_ways: ClassVar[Mapping[str, str]] = OTHER_WAYS

    kind: Literal["lm"] = "lm"
    """Kind of job. lm: one language model, trained on next-token prediction."""
    plan: Literal["auto", "layout"] | None = None
    """Source of the layout, unless `--plan` or `--cluster` give one. auto: `moesaic train` measures
    its machines and searches for the fastest layout, in which keys of `[layout]` that the job
    writes stay. layout: `[layout]` as it is. Unset: auto for a job without `[layout]` on several
    ranks, else layout."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all randomness: initial weights, order of samples, noise."""
    source: str | None = None
    """Hugging Face model directory with the initial weights (`[model] from` in the file)."""
    model: ModelConfig
    """Model: `preset = NAME` and changes to it, `from = DIR`, or every size."""
    routing: RoutingConfig = RoutingConfig()
    """Router of the expert layers, its losses and its capacity."""
    layout: LayoutConfig = LayoutConfig()
    """Parallel layout of the ranks."""
    kernels: KernelsConfig = KernelsConfig()
    """GPU kernels of the run."""
    balance: BalanceConfig = BalanceConfig()
    """Balancing of expert loads over the `ep` ranks."""
    finetune: FinetuneConfig | None = None
    """Weights that a run trains; without this table all of them."""
    student: list[StudentConfig] = Field(default_factory=list)
    """Smaller models that learn from the model in the same steps."""
    distill: DistillConfig = DistillConfig()
    """Distillation into the students."""
    data: DataConfig
    """Text, tokenizer and packing."""
    control: ControlConfig | None = None
    """Attributes of texts (genre, topic, keywords, sentiment, length) that prompts name; without
    this table there are no prompts."""
    credibility: CredibilityConfig | None = None
    """Head that tells original from generated text; without this table there is none."""
    train: TrainConfig
    """Length, batch and precision."""
    memory: MemoryConfig | None = None
    """Budget of memory, and the drive for expert state beyond it; without this table all state is
    in memory."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints that a run writes and keeps."""
    log: LogConfig = LogConfig()
    """Loggers besides the run's own events."""

    def conflicts(self) -> Iterator[str]:
        """Yield settings of different tables that do not go together."""
        own = [
            *self._size_conflicts(), *self._router_conflicts(), *self._finetune_conflicts(),
            *self._control_conflicts(), *self._block_order_conflicts(),
            *self._credibility_conflicts(),
        ]  # fmt: skip
        yield from own
        if not own:
            yield from self._student_conflicts()

    def _size_conflicts(self) -> Iterator[str]:
        """Yield numbers of one table that are too large for another one."""
        if self.model.top_k == 1 and self.model.renormalise:
            yield (
                "model.renormalise = true with model.top_k = 1 makes every weight 1, so that the "
                "router learns nothing from the loss: set model.renormalise = false, or start from "
                "another model"
            )
        yield from warmup_conflicts(self.schedule, self.train)
        if self.data.sequence > self.model.max_positions:
            yield (
                f"data.sequence = {self.data.sequence} is longer than "
                f"model.max_positions = {self.model.max_positions}: shorten it, or raise the latter"
            )
        error = grouped_mm_fault(self.kernels.grouped_mm, self.train)
        if error and self.model.experts:
            yield f"kernels.{error}"

    def _router_conflicts(self) -> Iterator[str]:
        """Yield why the model does not support the job's router."""
        model, router = self.model, self.routing.router
        needs = {"switch": 1, "gshard": 2}.get(router)
        if needs is None or any(model.conflicts()):
            return
        if not model.experts or model.score_function == "sigmoid":
            what = "which uses sigmoid scores" if model.experts else "which is dense"
            yield (
                f'routing.router = "{router}" with model.family = "{model.family}", {what}: set '
                'routing.router = "top-k"'
            )
            return
        if model.top_k != needs:
            yield (
                f'routing.router = "{router}" chooses {needs} of the experts, but model.top_k = '
                f'{model.top_k}: set model.top_k = {needs}, or routing.router = "top-k"'
            )
        if router == "gshard" and self.routing.capacity_factor is None:
            yield (
                'routing.router = "gshard" drops tokens beyond a capacity: set '
                "routing.capacity_factor (1.2 is usual)"
            )

    def _credibility_conflicts(self) -> Iterator[str]:
        """Yield settings that do not go with [credibility], or need it."""
        data_format, labels = self.data.format, self.model.labels
        if self.credibility is None:
            if data_format == "labelled":
                yield (
                    'data.format = "labelled" is for jobs that learn the labels: add '
                    '[credibility], or set data.format = "auto" to read the text alone'
                )
            if labels:
                yield f"model.labels = {labels} without [credibility]: remove it"
            return
        if data_format != "labelled":
            yield (
                f'data.format = "{data_format}" with [credibility], which learns labels: set '
                'data.format = "labelled", with files of moesaic generate --adversarial'
            )
        if labels != len(LABELS):
            yield f"model.labels = {labels} with [credibility]: set it to {len(LABELS)}"
        refused = {
            f"layout.{name} = {getattr(self.layout, name)}": getattr(self.layout, name) > 1
            for name in ("tp", "etp", "pp")
        }
        refused |= {
            "[memory]": self.memory is not None, "[[student]]": bool(self.student),
            'train.micro_batch_order = "by_block"': self.is_by_block and self.memory is None,
            "[control]": self.control is not None,
        }  # fmt: skip
        yield from _refusals(refused, "[credibility]")

    def _finetune_conflicts(self) -> Iterator[str]:
        """Yield adapters that the model or the policy of replicas cannot have."""
        finetune, model = self.finetune, self.model
        if finetune is None or finetune.method != "lora":
            return
        available = _available_targets(model)
        if not available & set(finetune.targets):
            yield (
                f"finetune.targets = {keys.show(finetune.targets)} names nothing that this model "
                f"has: choose from {keys.show(sorted(available))}"
            )
        if finetune.rank > model.hidden:
            yield (
                f"finetune.rank = {finetune.rank} is more than model.hidden = {model.hidden}, the "
                "largest rank of these matrices: lower it"
            )
        # The default policy makes no replicas of experts with adapters.
        if "experts" in finetune.targets and self.balance.policy not in ("none", "quota"):
            yield (
                f'balance.policy = "{self.balance.policy}" with "experts" in finetune.targets: '
                'adapters of experts have no replicas, set balance.policy = "none", or remove '
                '"experts"'
            )

    def _control_conflicts(self) -> Iterator[str]:
        """Yield settings that leave no room for prompts, or do not train them."""
        if self.control is None:
            return
        data = self.data
        for key, value in (("format", "chat"), ("format", "dataset"), ("packing", "stream")):
            if getattr(data, key) == value:
                yield (
                    f'data.{key} = "{value}" does not work with [control], whose samples are whole '
                    "texts from files of text, JSON lines or Parquet: remove one of the two"
                )
        if self.finetune is not None and self.finetune.method == "lora":
            yield (
                'finetune.method = "lora" with [control] would not train the embedding, which '
                'holds the soft prompts: set finetune.method = "full"'
            )

    @property
    def is_by_block(self) -> bool:
        """True if all micro-batches pass through one block before the next."""
        order = self.train.micro_batch_order
        return self.memory is not None if order == "auto" else order == "by_block"

    def _block_order_conflicts(self) -> Iterator[str]:
        """Yield settings that need another order of micro-batches, or all experts in memory."""
        if self.memory is not None:
            yield from self._memory_conflicts()
        if not self.is_by_block:
            return
        key = "[memory]" if self.memory is not None else 'train.micro_batch_order = "by_block"'
        if self.layout.pp > 1:
            yield (
                f"layout.pp = {self.layout.pp} with {key}: pipeline ranks work on one micro-batch "
                "at a time, set layout.pp = 1"
            )
        if "policy" in self.balance.non_default_fields and self.balance.uses_replicas:
            yield (
                f'balance.policy = "{self.balance.policy}" with {key}: replicas of experts are '
                'sent for one micro-batch at a time, set balance.policy = "none"'
            )
        if self.model.tied and self.layout.dp_shard != 1:
            yield (
                f"layout.dp_shard = {keys.show(self.layout.dp_shard)} with {key} and a tied "
                "embedding: FSDP2 cannot gather the shared weight with two blocks, set "
                "layout.dp_shard = 1"
            )

    def _memory_conflicts(self) -> Iterator[str]:
        """Yield settings that do not work with expert state on a drive."""
        if not self.model.experts:
            yield (
                "[memory] keeps state of experts on a drive, but the model is dense "
                "(model.experts = 0): remove the table"
            )
        refused = {
            'train.micro_batch_order = "by_micro_batch"': not self.is_by_block,
            f'optimizer.moments = "{self.optimizer.moments}"': self.optimizer.moments != "full",
            "[finetune]": self.finetune is not None,
            f'train.device = "{self.train.device}"': is_gpu(self.train.device),
            f"balance.migrate_every = {self.balance.migrate_every}": (
                self.balance.migrate_every > 0
            ),
            f"layout.chunks = {self.layout.chunks}": self.layout.chunks not in ("auto", 1),
        }
        yield from _refusals(refused, "[memory]")

    def _student_conflicts(self) -> Iterator[str]:
        """Yield why the students cannot learn beside the model."""
        if not self.student:
            if self.distill.frozen:
                yield (
                    "distill.frozen = true without [[student]] trains nothing: add a student, or "
                    "remove it"
                )
            return
        refused = {
            "[memory]": self.memory is not None,
            "[finetune]": self.finetune is not None,
            'train.micro_batch_order = "by_block"': self.is_by_block and self.memory is None,
            'train.precision = "fp16"': self.train.precision == "fp16",
        }
        own = [*_refusals(refused, "[[student]]")]
        own = own or [*student_errors(self.model, self.student, self.data.sequence)]
        yield from own
        if own:
            return
        for student in self.student:
            for sentence in student_job(self, student).conflicts():
                yield f'student "{student.name}": {sentence}'

    def model_of(self, name: str) -> ModelConfig:
        """Return the model of a student, or the job's own for the name "model"."""
        if name == TEACHER:
            return self.model
        return next(one.model for one in self.student if one.name == name)

    def ineffective_settings(self, layout_keys: AbstractSet[str] | None = None) -> list[str]:
        """Return one sentence for each setting that was given, is not a default, and has no effect.

        With a plan, `layout_keys` are the layout settings to check: the plan may override the
        others."""
        found = []
        for applies, table, names, reason in self._unused_settings():
            given = getattr(self, table).non_default_fields
            if table == "layout" and layout_keys is not None:
                given = layout_keys
            found += no_effect(table, given & names, reason) if applies else []
        if self.layout.ep > 1:
            found += self.balance.ineffective_settings()
        if self.finetune is not None and self.finetune.method == "lora":
            targets, available = set(self.finetune.targets), _available_targets(self.model)
            if targets - available:
                found.append(
                    f"finetune.targets names {keys.join_words(sorted(targets - available), 'and')},"
                    f" which the model lacks: set it to {keys.show(sorted(targets & available))}"
                )
        found += [text for one in self.student for text in one.ineffective_settings()]
        if self.checkpoint.every > self.train.steps:
            found.append(
                f"checkpoint.every = {self.checkpoint.every} is more than train.steps = "
                f"{self.train.steps}: the run saves only at the end"
            )
        return found

    def _unused_settings(self) -> list[tuple[bool, str, AbstractSet[str], str]]:
        """Return for each reason if it applies, a table, its settings without effect, and the
        reason."""
        model, layout, finetune = self.model, self.layout, self.finetune
        dense, has_validation = not model.experts, self.data.validation_path is not None
        has_validation |= self.data.validation_share > 0
        alone = "the model is dense" if dense else "every rank has all experts"
        unused: list[tuple[bool, str, AbstractSet[str], str]] = [
            (dense, "kernels", {"grouped_mm"}, alone),
            (dense, "routing", set(type(self.routing).model_fields), alone),
            (
                not dense and model.score_function != "sigmoid", "routing", {"bias_update_rate"},
                f'the routers of family "{model.family}" have no bias',
            ),
            (layout.ep == 1, "balance", set(type(self.balance).model_fields) - {"policy"}, alone),
            (layout.ep == 1 and self.balance.policy != "none", "balance", {"policy"}, alone),
            (layout.ep == 1, "layout", _DISPATCH_KEYS, "layout.ep = 1 dispatches no tokens"),
            (
                layout.ep > 1 and layout.dispatch == "auto", "layout", {"dispatch_hosts"},
                'layout.dispatch = "auto" finds the hosts',
            ),
            (layout.pp == 1, "layout", {"schedule"}, "layout.pp = 1 makes no pipeline"),
            (
                self.schedule.kind == "constant", "schedule", {"final"},
                'schedule.kind = "constant" does not decay',
            ),
            (
                not has_validation, "train", {"validate_every", "validation_samples"},
                "there is no validation text (data.validation_path, data.validation_share)",
            ),
        ]  # fmt: skip
        if finetune is not None:
            frozen, full = finetune.router == "frozen", finetune.method == "full"
            unused += [
                (dense, "finetune", {"router"}, alone),
                (
                    frozen and model.score_function == "sigmoid", "routing", {"bias_update_rate"},
                    'finetune.router = "frozen"',
                ),
                (full, "finetune", {"targets", "rank", "alpha"}, 'finetune.method = "full"'),
            ]  # fmt: skip
        return unused


def teacher_job(job: Job) -> Job:
    """Return `job` without its students."""
    return job.model_copy(update={"student": [], "distill": DistillConfig()})


def student_job(job: Job, student: StudentConfig) -> Job:
    """Return the job that trains `student` alone, on the text of `job`, without a teacher.

    Its expert parallelism is the largest that both models divide, and its dense parameters are
    whole on every rank. It has no auxiliary layer."""
    model, layout = student.model, job.layout
    ep = math.gcd(model.experts, layout.ep) if model.experts else 1
    hosts = layout.dispatch_hosts
    changes: dict[str, Any] = {
        "model": model, "source": student.source, "student": [], "distill": DistillConfig(),
        "layout": LayoutConfig(
            ep=ep, dispatch=layout.dispatch,
            dispatch_hosts=hosts if hosts and ep % hosts == 0 else None,
        ),
        "routing": job.routing.model_copy(update={"record": None, "replay": None})
        if model.experts else RoutingConfig(),
        "balance": BalanceConfig(policy="none"),
        "optimizer": job.optimizer.model_copy(update={"lr": student.lr or job.optimizer.lr}),
    }  # fmt: skip
    values = {**dict(job), **changes}
    # `Job.conflicts` of the whole job names those of this one.
    return Job.model_validate(values, by_name=True, by_alias=False, context=CONFLICTS_ALLOWED)


def _refusals(refused: Mapping[str, bool], other: str) -> Iterator[str]:
    """Yield a sentence for each setting that is refused beside another one."""
    for setting, is_refused in refused.items():
        if is_refused:
            yield f"{setting} does not work with {other}: remove one of them"


def _available_targets(model: ModelConfig) -> set[str]:
    """Return the adapter targets that `model` has."""
    experts = len(model.expert_layers)
    available = {
        "attention": True, "experts": experts > 0, "ffn": experts < model.layers,
        "shared": model.shared_experts > 0,
    }  # fmt: skip
    return {target for target, has_target in available.items() if has_target}


def fill_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` with `[model] preset = NAME` replaced by its sizes; the user's own keys win.

    Models of students are resolved too, with the vocabulary of the job's model by default. An
    unknown preset stays: the parser names it beside the other mistakes."""
    filled = _fill_model(raw, {})
    students, model = raw.get("student"), filled.get("model")
    if not isinstance(students, list) or not isinstance(model, dict):
        return filled
    shared = {key: model[key] for key in ("vocab",) if key in model}
    found = [_fill_model(one, shared) if isinstance(one, dict) else one for one in students]
    return {**filled, "student": found}


def _fill_model(raw: dict[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `raw` with its model's preset replaced; its own keys win, then `shared`."""
    model = raw.get("model")
    if not isinstance(model, dict):
        return raw
    own, sizes = {**shared, **model}, dict[str, Any]()
    if own.get("preset") in list(PRESETS):
        sizes = PRESETS[own.pop("preset")]
    return {**raw, "model": {**sizes, **own}}


def parse_language_model(raw: Mapping[str, Any], origin: str) -> Job:
    """Return the job of a run of a language model; raise ConfigError for a run of another kind."""
    if raw.get("kind", "lm") != "lm":
        raise ConfigError(
            f'{origin}: kind = "{raw["kind"]}" has no experts: give a run of a language model'
        )
    return parse(Job, raw, origin)
