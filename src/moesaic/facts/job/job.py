"""The whole job and what must hold between its parts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

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
    """One training job, every default filled in."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"source"})

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of everything random: initial weights, order of samples, noise."""
    source: str | None = None
    """Hugging Face model directory that the weights come from (`[model] from` in the file)."""
    model: ModelConfig
    """The model: `preset = NAME` and changes to it, `from = DIR`, or every size."""
    routing: RoutingConfig = RoutingConfig()
    """How tokens find experts."""
    layout: LayoutConfig = LayoutConfig()
    """How the ranks share the model."""
    kernels: KernelsConfig = KernelsConfig()
    """GPU kernels of the run."""
    balance: BalanceConfig = BalanceConfig()
    """What is done about experts that get more tokens than others, where ranks share them out."""
    finetune: FinetuneConfig | None = None
    """What a run changes of the weights that it starts from; without this table all of them."""
    data: DataConfig
    """Text, tokenizer and packing."""
    train: TrainConfig
    """Length, batch and precision."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over steps."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run saves, and what it keeps."""
    log: LogConfig = LogConfig()
    """Where figures go."""

    @model_validator(mode="after")
    def _consistent(self) -> Job:
        self._check_experts()
        self._check_balance()
        uncut = self.uncut(self.layout.tp, self.layout.etp)
        if uncut is not None:
            raise ValueError(f"layout.{uncut}")
        self._check_finetune()
        fault = grouped_mm_fault(self.kernels.grouped_mm, self.train)
        if fault and self.model.experts:
            raise ValueError(f"kernels.{fault}")
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
        """Whether the model's routers can be of the kind that is asked for."""
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
        if model.score == "sigmoid":
            raise ValueError(
                f'routing.router = "{router}" with model.family = "{model.family}", whose routers '
                f"choose by sigmoids, in groups, with a bias: {own}"
            )
        if model.top_k != needs:
            also = " and model.renormalise = false" * (needs == 1 and model.renormalise)
            remedy = f"set model.top_k = {needs}{also}"
            if self.source is not None:  # Which says what the model is.
                remedy = f"{own}, or start from a model that chooses {needs}"
            raise ValueError(
                f'routing.router = "{router}" chooses {needs} of the experts, '
                f"but model.top_k = {model.top_k}: {remedy}"
            )
        if router == "gshard" and self.routing.capacity is None:
            raise ValueError(
                'routing.router = "gshard" drops tokens beyond a capacity: set routing.capacity '
                "(1.2 is usual)"
            )

    def _check_balance(self) -> None:
        finetune, policy = self.finetune, self.balance.policy
        asked = policy not in ("none", "quota")  # The default leaves adapters alone.
        if not asked or finetune is None or finetune.method != "lora":
            return
        if "experts" in finetune.targets:
            raise ValueError(
                f'balance.policy = "{policy}" with "experts" among finetune.targets: adapters of '
                'experts have no copies, set balance.policy = "none", or adapt what is not an '
                "expert's"
            )

    def uncut(self, tp: int, etp: int) -> str | None:
        """Why `tp` slices, `etp` of an expert, cannot share this job's matrices and tokens equally;
        None: they can."""
        model = self.model
        widths = {"model.heads": model.heads, "model.kv_heads": model.kv_heads}
        widths["model.vocab"] = model.vocab
        for layer in range(model.layers - len(model.expert_layers)):
            own = layer < model.dense_layers and model.dense_ffn is not None
            widths["model.dense_ffn" if own else "model.ffn"] = model.inner(layer)
        if model.shared:
            widths["model.shared * model.ffn"] = model.shared * model.ffn
        widths["data.sequence"] = self.data.sequence
        for key, width in widths.items():
            if width % tp:
                return (
                    f"tp = {tp} does not divide {key} = {width}, which the slices share out: "
                    "choose a divisor"
                )
        if etp > 1:
            uncut = self._uncut_expert(tp, etp)
            if uncut is not None:
                return uncut
        return None if tp == 1 else self._cut_block(tp, etp)

    def _uncut_expert(self, tp: int, etp: int) -> str | None:
        model = self.model
        if not model.experts:
            return f"etp = {etp} with a dense model (model.experts = 0): set etp = 1"
        if tp % etp:
            return (
                f"etp = {etp} does not divide tp = {tp}, and slices of experts are slices of all "
                "else too: choose a divisor, or raise tp"
            )
        if model.ffn % etp:
            return (
                f"etp = {etp} does not divide model.ffn = {model.ffn}, which the slices of an "
                "expert share out: choose a divisor"
            )
        finetune = self.finetune
        if finetune is not None and finetune.method == "lora" and "experts" in finetune.targets:
            return (
                f'etp = {etp} with "experts" among finetune.targets: adapters of experts are not '
                "cut into slices, set etp = 1, or adapt what is not an expert's"
            )
        return None

    def _cut_block(self, tp: int, etp: int) -> str | None:
        """Which matrix slices would cut inside a block of its moments; None: none."""
        finetune = self.finetune
        if self.optimizer.moments != "8bit":
            return None
        # Beside a matrix that does not learn its adapter does, whose A has as many columns.
        learnt = None if finetune is None or finetune.method == "full" else finetune.targets
        for target, key, slices, matrix, width in self._sliced_columns(tp, etp):
            if (learnt is None or target in learnt) and width // slices % MOMENT_BLOCK:
                return (
                    f'{key} = {slices} with optimizer.moments = "8bit", which has blocks of '
                    f"{MOMENT_BLOCK} columns: slices of {matrix} have {width // slices} columns, "
                    f'set optimizer.moments to "bf16" or "full", or {key} = 1'
                )
        return None

    def _sliced_columns(self, tp: int, etp: int) -> Iterator[tuple[str, str, int, str, int]]:
        """What slices share out the columns of: what fine-tuning calls it, the axis and its size,
        the matrix in words, how many there are."""
        model = self.model
        values = model.head_dim if model.latent is None else model.latent.value
        yield "attention", "tp", tp, "the output of attention", model.heads * values
        for layer in range(model.layers - len(model.expert_layers)):
            name = f"the output of feed-forward network {layer}"
            yield "ffn", "tp", tp, name, model.inner(layer)
        if model.shared:
            yield "shared", "tp", tp, "the output of shared experts", model.shared * model.ffn
        if etp > 1:
            yield "experts", "etp", etp, "the output of experts", model.ffn

    def _check_finetune(self) -> None:
        finetune, model = self.finetune, self.model
        if finetune is None or finetune.method != "lora":
            return
        here = _targets(model)
        if not here & set(finetune.targets):
            raise ValueError(
                f"finetune.targets = {keys.show(finetune.targets)} names nothing that this model "
                f"has: choose of {keys.show(sorted(here))}"
            )
        if finetune.rank > model.hidden:
            raise ValueError(
                f"finetune.rank = {finetune.rank} is more than model.hidden = {model.hidden}, the "
                "rank that the matrices themselves can have: lower it"
            )

    def _idle_finetune(self) -> list[str]:
        finetune = self.finetune
        if finetune is None:
            return []
        given = finetune.model_fields_set
        found: list[str] = []
        if finetune.method == "full":
            found += [
                f'finetune.{key} has no effect: finetune.method = "full"'
                for key in sorted(given & {"targets", "rank", "alpha"})
            ]
        else:
            found += self._absent_targets(finetune)
        if "router" in given and not self.model.experts:
            found.append("finetune.router has no effect: the model is dense")
        return found

    def _absent_targets(self, finetune: FinetuneConfig) -> list[str]:
        here, targets = _targets(self.model), set(finetune.targets)
        absent = sorted(targets - here)
        if "targets" in finetune.model_fields_set or not absent:
            return [f'finetune.targets: the model has no "{one}", leave it out' for one in absent]
        return [
            f"finetune.targets is by default {keys.show(finetune.targets)}, and the model has no "
            f"{keys.listed([keys.show(one) for one in absent])}: set it to "
            f"{keys.show(sorted(here))} to adapt all that it has, or to "
            f"{keys.show(sorted(here & targets))} to leave it at that"
        ]

    def _biases_stay(self) -> bool:
        return self.finetune is not None and self.finetune.router == "frozen"

    def _idle_layout(self, given: AbstractSet[str]) -> list[str]:
        layout = self.layout
        found: list[str] = []
        if layout.ep == 1:
            found += [
                f"layout.{key} has no effect: layout.ep = 1 sends no token"
                for key in ("dispatch", "hosts", "local", "chunks")
                if key in given
            ]
            dense = not self.model.experts
            found += self.balance.idle_alone(
                "the model is dense" if dense else "every rank has all experts"
            )
        elif layout.dispatch == "auto" and "hosts" in given:
            found.append('layout.hosts has no effect: layout.dispatch = "auto" finds the hosts')
        if layout.pp == 1 and "schedule" in given:
            found.append("layout.schedule has no effect: layout.pp = 1 makes no pipeline")
        return found

    def idle(self, layout: AbstractSet[str] | None = None) -> list[str]:
        """A sentence for each setting that was given, with a value of its own, and has no effect in
        this job; of those of the layout these were given, where a plan rules the job, which has
        more to say of them."""
        found = self._idle_finetune()
        found += self._idle_layout(self.layout.asked if layout is None else layout)
        if self.layout.ep > 1:
            found += self.balance.idle()
        if not self.model.experts:
            for table in ("kernels", "routing"):
                given = sorted(getattr(self, table).asked)
                found += [f"{table}.{key} has no effect: the model is dense" for key in given]
        elif self.model.score != "sigmoid" and "bias_step" in self.routing.asked:
            found.append(
                f'routing.bias_step has no effect: the routers of family "{self.model.family}" '
                "have no bias"
            )
        elif self._biases_stay() and "bias_step" in self.routing.asked:
            found.append('routing.bias_step has no effect: finetune.router = "frozen"')
        if self.schedule.kind == "constant" and "final" in self.schedule.asked:
            found.append('schedule.final has no effect: schedule.kind = "constant" does not decay')
        if not (self.data.validation_path or self.data.validation_share):
            given = sorted(self.train.asked & {"validate_every", "validation_samples"})
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


def _targets(model: ModelConfig) -> set[str]:
    """Which of the targets of adapters `model` has."""
    experts = len(model.expert_layers)
    here = {
        "attention": True, "experts": experts > 0, "ffn": experts < model.layers,
        "shared": model.shared > 0,
    }  # fmt: skip
    return {target for target, is_there in here.items() if is_there}


def fill_preset(raw: dict[str, Any], origin: str) -> dict[str, Any]:
    """`raw` with `[model] preset = NAME` replaced by its sizes, under the user's own keys."""
    model = raw.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return raw
    chosen = dict(model)
    name = chosen.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        known = keys.listed([keys.show(preset) for preset in PRESETS])
        remedy = keys.choose(str(name), list(PRESETS), known)
        raise ConfigError(f"{origin}: model.preset = {keys.show(name)} is not known: {remedy}")
    return {**raw, "model": {**PRESETS[name], **chosen}}
