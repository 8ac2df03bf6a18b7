"""The whole job, and the checks between its tables."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.base.errors import ConfigError
from moesaic.facts.job.balance import BalanceConfig
from moesaic.facts.job.data import DataConfig
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.job.model import PRESETS, ModelConfig
from moesaic.facts.job.routing import RoutingConfig
from moesaic.facts.job.train import (
    MOMENT_BLOCK,
    CheckpointConfig,
    KernelsConfig,
    LayoutConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    grouped_mm_fault,
)


class Job(Section):
    """One training job, with every default filled in."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"source"})

    kind: Literal["lm"] = "lm"
    """Kind of job. lm: one language model, trained on next-token prediction."""
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
    data: DataConfig
    """Text, tokenizer and packing."""
    train: TrainConfig
    """Length, batch and precision."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over steps."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints that a run writes and keeps."""
    log: LogConfig = LogConfig()
    """Loggers besides the run's own events."""

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        self._check_experts()
        self._check_balance()
        error = self.tensor_parallel_error(self.layout.tp, self.layout.etp)
        if error is not None:
            raise ValueError(f"layout.{error}")
        self._check_finetune()
        error = grouped_mm_fault(self.kernels.grouped_mm, self.train)
        if error and self.model.experts:
            raise ValueError(f"kernels.{error}")
        if self.schedule.warmup > self.train.steps:
            raise ValueError(
                f"schedule.warmup = {self.schedule.warmup} is longer than "
                f"train.steps = {self.train.steps}: shorten the warm-up, or train longer"
            )
        if self.data.sequence > self.model.max_positions:
            raise ValueError(
                f"data.sequence = {self.data.sequence} is longer than "
                f"model.max_positions = {self.model.max_positions}: shorten it, or raise the latter"
            )
        return self

    def _check_experts(self) -> None:
        model, ep = self.model, self.layout.ep
        if ep > 1 and not model.experts:
            raise ValueError(
                f"layout.ep = {ep} with a dense model (model.experts = 0): set layout.ep = 1, or "
                "choose a model with experts"
            )
        if model.experts % ep:
            raise ValueError(
                f"layout.ep = {ep} does not divide model.experts = {model.experts}: "
                "choose a divisor of the number of experts"
            )
        if model.top_k == 1 and model.renormalise:
            fixed = "start from another model" if self.source else "set model.renormalise = false"
            raise ValueError(
                "model.renormalise = true with model.top_k = 1 makes every weight 1, so that the "
                f"router learns nothing from the loss: {fixed}"
            )
        self._check_router()

    def _check_router(self) -> None:
        """Raise ValueError if the model does not support the job's router."""
        model, router = self.model, self.routing.router
        needs = {"switch": 1, "gshard": 2}.get(router)
        if needs is None:
            return
        own = 'set routing.router = "top-k"' + " and routing.noise = 0" * bool(self.routing.noise)
        if not model.experts:
            raise ValueError(
                f'routing.router = "{router}" with a dense model (model.experts = 0): '
                "remove it, or choose a model with experts"
            )
        if model.score_function == "sigmoid":
            raise ValueError(
                f'routing.router = "{router}" with model.family = "{model.family}", whose routers '
                f"use sigmoid scores, expert groups and a bias: {own}"
            )
        if model.top_k != needs:
            also = " and model.renormalise = false" * (needs == 1 and model.renormalise)
            remedy = f"set model.top_k = {needs}{also}"
            if self.source is not None:  # The source fixes the model.
                remedy = f"{own}, or start from a model that chooses {needs}"
            raise ValueError(
                f'routing.router = "{router}" chooses {needs} of the experts, '
                f"but model.top_k = {model.top_k}: {remedy}"
            )
        if router == "gshard" and self.routing.capacity_factor is None:
            raise ValueError(
                'routing.router = "gshard" drops tokens beyond a capacity: set '
                "routing.capacity_factor (1.2 is usual)"
            )

    def _check_balance(self) -> None:
        finetune, policy = self.finetune, self.balance.policy
        # The default policy makes no replicas of experts with adapters.
        needs_replicas = policy not in ("none", "quota")
        if not needs_replicas or finetune is None or finetune.method != "lora":
            return
        if "experts" in finetune.targets:
            raise ValueError(
                f'balance.policy = "{policy}" with "experts" in finetune.targets: adapters of '
                'experts have no replicas, set balance.policy = "none", or remove "experts"'
            )

    def tensor_parallel_error(self, tp: int, etp: int) -> str | None:
        """Return why tensor parallelism of this size cannot split the job's matrices and tokens.

        None means that it can. `etp` counts for the matrices of experts."""
        model = self.model
        widths = {"model.heads": model.heads, "model.kv_heads": model.kv_heads}
        widths["model.vocab"] = model.vocab
        for layer in range(model.layers - len(model.expert_layers)):
            own = layer < model.dense_layers and model.dense_ffn is not None
            widths["model.dense_ffn" if own else "model.ffn"] = model.ffn_width(layer)
        if model.shared_experts:
            widths["model.shared_experts * model.ffn"] = model.shared_experts * model.ffn
        widths["data.sequence"] = self.data.sequence
        for key, width in widths.items():
            if width % tp:
                return (
                    f"tp = {tp} does not divide {key} = {width}, which the TP ranks split: "
                    "choose a divisor"
                )
        if etp > 1:
            error = self._expert_tensor_parallel_error(tp, etp)
            if error is not None:
                return error
        return None if tp == 1 else self._moment_block_error(tp, etp)

    def _expert_tensor_parallel_error(self, tp: int, etp: int) -> str | None:
        model = self.model
        if not model.experts:
            return f"etp = {etp} with a dense model (model.experts = 0): set etp = 1"
        if tp % etp:
            return (
                f"etp = {etp} does not divide tp = {tp}, whose ranks split the experts: "
                "choose a divisor, or raise tp"
            )
        if model.ffn % etp:
            return (
                f"etp = {etp} does not divide model.ffn = {model.ffn}, which the ranks of an "
                "expert split: choose a divisor"
            )
        finetune = self.finetune
        if finetune is not None and finetune.method == "lora" and "experts" in finetune.targets:
            return (
                f'etp = {etp} with "experts" in finetune.targets: adapters of experts cannot be '
                'sharded, set etp = 1, or remove "experts"'
            )
        return None

    def _moment_block_error(self, tp: int, etp: int) -> str | None:
        """Return which matrix would be sharded inside a block of its 8-bit moments, or None."""
        finetune = self.finetune
        if self.optimizer.moments != "8bit":
            return None
        # A frozen matrix has an adapter instead, whose A has as many columns.
        trained = None if finetune is None or finetune.method == "full" else finetune.targets
        for target, key, shards, matrix, width in self._column_shards(tp, etp):
            if (trained is None or target in trained) and width // shards % MOMENT_BLOCK:
                return (
                    f'{key} = {shards} with optimizer.moments = "8bit", which has blocks of '
                    f"{MOMENT_BLOCK} columns: shards of {matrix} have {width // shards} columns, "
                    f'set optimizer.moments to "bf16" or "full", or {key} = 1'
                )
        return None

    def _column_shards(self, tp: int, etp: int) -> Iterator[tuple[str, str, int, str, int]]:
        """Yield the matrices that are sharded by column.

        Each item is the adapter target, the key and size of the parallel axis, the matrix in words,
        and its number of columns."""
        model = self.model
        values = model.head_dim if model.latent is None else model.latent.v_head_dim
        yield "attention", "tp", tp, "the output of attention", model.heads * values
        for layer in range(model.layers - len(model.expert_layers)):
            name = f"the output of feed-forward network {layer}"
            yield "ffn", "tp", tp, name, model.ffn_width(layer)
        if model.shared_experts:
            yield (
                "shared",
                "tp",
                tp,
                "the output of shared experts",
                model.shared_experts * model.ffn,
            )
        if etp > 1:
            yield "experts", "etp", etp, "the output of experts", model.ffn

    def _check_finetune(self) -> None:
        finetune, model = self.finetune, self.model
        if finetune is None or finetune.method != "lora":
            return
        available = _available_targets(model)
        if not available & set(finetune.targets):
            raise ValueError(
                f"finetune.targets = {keys.show(finetune.targets)} names nothing that this model "
                f"has: choose from {keys.show(sorted(available))}"
            )
        if finetune.rank > model.hidden:
            raise ValueError(
                f"finetune.rank = {finetune.rank} is more than model.hidden = {model.hidden}, the "
                "largest rank of these matrices: lower it"
            )

    def _ineffective_finetune(self) -> list[str]:
        finetune = self.finetune
        if finetune is None:
            return []
        given = finetune.model_fields_set
        sentences: list[str] = []
        if finetune.method == "full":
            sentences += [
                f'finetune.{key} has no effect: finetune.method = "full"'
                for key in sorted(given & {"targets", "rank", "alpha"})
            ]
        else:
            sentences += self._missing_targets(finetune)
        if "router" in given and not self.model.experts:
            sentences.append("finetune.router has no effect: the model is dense")
        return sentences

    def _missing_targets(self, finetune: FinetuneConfig) -> list[str]:
        available, targets = _available_targets(self.model), set(finetune.targets)
        absent = sorted(targets - available)
        if "targets" in finetune.model_fields_set or not absent:
            return [f'finetune.targets: the model has no "{one}", leave it out' for one in absent]
        return [
            f"finetune.targets is by default {keys.show(finetune.targets)}, and the model has no "
            f"{keys.join_words([keys.show(one) for one in absent])}: set it to "
            f"{keys.show(sorted(available))} to adapt everything, or to "
            f"{keys.show(sorted(available & targets))} to keep the default"
        ]

    def _has_frozen_biases(self) -> bool:
        return self.finetune is not None and self.finetune.router == "frozen"

    def _ineffective_layout(self, given_keys: AbstractSet[str]) -> list[str]:
        layout = self.layout
        found: list[str] = []
        if layout.ep == 1:
            found += [
                f"layout.{key} has no effect: layout.ep = 1 dispatches no tokens"
                for key in ("dispatch", "dispatch_hosts", "overlap_local", "chunks")
                if key in given_keys
            ]
            dense = not self.model.experts
            found += self.balance.ineffective_settings_without_ep(
                "the model is dense" if dense else "every rank has all experts"
            )
        elif layout.dispatch == "auto" and "dispatch_hosts" in given_keys:
            found.append(
                'layout.dispatch_hosts has no effect: layout.dispatch = "auto" finds the hosts'
            )
        if layout.pp == 1 and "schedule" in given_keys:
            found.append("layout.schedule has no effect: layout.pp = 1 makes no pipeline")
        return found

    def ineffective_settings(self, layout_keys: AbstractSet[str] | None = None) -> list[str]:
        """Return one sentence for each setting that was given, is not a default, and has no effect.

        With a plan, `layout_keys` are the layout settings to check: the plan may override the
        others."""
        found = self._ineffective_finetune()
        found += self._ineffective_layout(
            self.layout.non_default_fields if layout_keys is None else layout_keys
        )
        if self.layout.ep > 1:
            found += self.balance.ineffective_settings()
        if not self.model.experts:
            for table in ("kernels", "routing"):
                given = sorted(getattr(self, table).non_default_fields)
                found += [f"{table}.{key} has no effect: the model is dense" for key in given]
        elif (
            self.model.score_function != "sigmoid"
            and "bias_update_rate" in self.routing.non_default_fields
        ):
            found.append(
                "routing.bias_update_rate has no effect: the routers of family "
                f'"{self.model.family}" have no bias'
            )
        elif self._has_frozen_biases() and "bias_update_rate" in self.routing.non_default_fields:
            found.append('routing.bias_update_rate has no effect: finetune.router = "frozen"')
        if self.schedule.kind == "constant" and "final" in self.schedule.non_default_fields:
            found.append('schedule.final has no effect: schedule.kind = "constant" does not decay')
        if not (self.data.validation_path or self.data.validation_share):
            given = sorted(self.train.non_default_fields & {"validate_every", "validation_samples"})
            found += [
                f"train.{key} has no effect: there is no validation text "
                "(data.validation_path, data.validation_share)"
                for key in given
            ]
        if self.checkpoint.every > self.train.steps:
            found.append(
                f"checkpoint.every = {self.checkpoint.every} is more than train.steps = "
                f"{self.train.steps}: the run saves only at the end"
            )
        return found


def _available_targets(model: ModelConfig) -> set[str]:
    """Return the adapter targets that `model` has."""
    experts = len(model.expert_layers)
    available = {
        "attention": True, "experts": experts > 0, "ffn": experts < model.layers,
        "shared": model.shared_experts > 0,
    }  # fmt: skip
    return {target for target, has_target in available.items() if has_target}


def fill_preset(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return `raw` with `[model] preset = NAME` replaced by its sizes; the user's own keys win."""
    model = raw.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return raw
    chosen = dict(model)
    name = chosen.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        known = keys.join_words([keys.show(preset) for preset in PRESETS])
        remedy = keys.suggest_choice(str(name), list(PRESETS), known)
        raise ConfigError(f"{origin}: model.preset = {keys.show(name)} is not known: {remedy}")
    return {**raw, "model": {**PRESETS[name], **chosen}}
