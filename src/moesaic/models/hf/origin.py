"""Where a model comes from: Hugging Face directory, checkpoint or run, as one and the same thing.

An origin knows the model's sizes, gives its weights one tensor at a time, and knows which files
travel along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.dist.checkpoint import Checkpoint, newest_intact
from moesaic.dist.checkpoint.manifest import COMMIT, MANIFEST
from moesaic.dist.state import PARAMETER, Piece
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.workload import parameters
from moesaic.facts.workload.finetune import A, B, adapter_stem, adapters
from moesaic.models.hf.config import CONFIG_NAME, read_config, what_else
from moesaic.models.hf.reader import DTYPES, HFSource
from moesaic.models.hf.shards import Tensors
from moesaic.models.hf.tokens import ROLES, special_token_ids
from moesaic.models.hf.writer import find_companions

TOKENIZER = "tokenizer"
"""Directory of a run, or of a bare checkpoint, that holds the files that travel along."""
GENERATION_NAME = "generation_config.json"


@dataclass(frozen=True)
class Origin:
    """A model to be had."""

    path: Path
    """The directory that the weights are in."""
    model: ModelConfig
    tensors: Tensors
    companions: list[Path]
    """Tokenizer and generation files."""
    facts: dict[str, Any]
    """What a checkpoint of this model says of itself."""
    warnings: list[str] = field(default_factory=list)
    """What a person should know."""
    finetune: FinetuneConfig | None = None
    """How the weights were learnt, if adapters may lie beside them."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write parameters into pieces of any layout and dtype: an origin is a `Source`."""
        for piece in pieces:
            whole = self.tensors.read(piece.name)
            spans = zip(piece.offset, piece.tensor.shape, strict=True)
            piece.tensor.copy_(whole[tuple(slice(o, o + n) for o, n in spans)])


def open_origin(path: Path, once: bool = False) -> Origin:
    """The model at `path`, whatever form it has there; `once` if nothing will be read again."""
    if (path / CONFIG_NAME).is_file():
        return _from_huggingface(path, once)
    if (path / COMMIT).exists() or (path / MANIFEST).exists():
        return _from_checkpoint(Checkpoint.open(path, once=once))
    for directory in (path / "checkpoints", path):
        if directory.is_dir() and any(directory.glob("step-*")):
            passed_over: list[str] = []
            checkpoint = newest_intact(directory, passed_over.append)
            if checkpoint is None:
                reasons = "; ".join(passed_over) or (
                    "what is there is not named as a run names it, step-00001000: say which one"
                )
                raise StoreError(
                    f"'{directory}' holds no intact checkpoint: restore one from a copy ({reasons})"
                )
            origin = _from_checkpoint(checkpoint)
            if passed_over:
                used = f"what follows is of step {checkpoint.step}, '{checkpoint.path}'"
                origin.warnings[:0] = [*passed_over, used]
            return origin
    raise ConfigError(
        f"'{path}' {what_else(path)}: "
        "give a Hugging Face model directory, a checkpoint or a run directory"
    )


def _from_huggingface(path: Path, once: bool) -> Origin:
    model, warnings = read_config(path)
    source = HFSource(path, model, once)
    facts = {"model": model.model_dump(mode="json"), "source": str(path)}
    return Origin(path, model, source, find_companions(path), facts, [*warnings, *source.notes])


def _from_checkpoint(checkpoint: Checkpoint) -> Origin:
    path, facts = checkpoint.path, checkpoint.facts
    job = facts.get("job") or {}
    model, warnings = _model_of(facts, path), []
    router = (job.get("routing") or {}).get("router", "top-k")
    if router == "gshard":  # always renormalises, whatever the model says
        model = model.model_copy(update={"renormalise": True})
    elif router == "balanced":
        warnings.append(
            f"'{path}' was trained with routing.router = \"balanced\", which has no place in a "
            "config.json: whoever reads the model routes by the router's scores"
        )
    companions: list[Path] = []
    for directory in (path / TOKENIZER, path.parent.parent / TOKENIZER):
        if not companions and (companions := find_companions(directory)):
            model = _with_special_tokens(model, directory)
    generation = Path(job.get("source") or path) / GENERATION_NAME
    if generation.is_file() and GENERATION_NAME not in {c.name for c in companions}:
        companions.append(generation)
    finetune = None
    if job.get("finetune") is not None:
        finetune = parse(FinetuneConfig, job["finetune"], f"checkpoint '{path}'")
        facts = {**facts, "job": {**job, "finetune": None}}  # What is read is merged.
    tensors = CheckpointTensors(checkpoint, model, finetune)
    return Origin(path, model, tensors, companions, facts, warnings, finetune)


def _model_of(facts: Mapping[str, Any], path: Path) -> ModelConfig:
    """The model that a checkpoint holds: of the job that made it, or its own."""
    raw = (facts.get("job") or facts).get("model")
    if not isinstance(raw, dict):
        raise ConfigError(f"checkpoint '{path}' does not say what model it holds: give another one")
    return parse(ModelConfig, raw, f"checkpoint '{path}'")


def _with_special_tokens(model: ModelConfig, directory: Path) -> ModelConfig:
    """`model` with the ids of the tokenizer in `directory`, where nothing else names any."""
    if any(f"{role}_id" in model.extras for role in ROLES):
        return model
    return model.model_copy(update={"extras": {**model.extras, **special_token_ids(directory)}})


class CheckpointTensors:
    """The parameters in a checkpoint, of whatever layout, adapters merged into what they adapt."""

    def __init__(
        self, checkpoint: Checkpoint, model: ModelConfig, finetune: FinetuneConfig | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._records = checkpoint.tensors
        self._scale = 0.0 if finetune is None else finetune.scale
        everything = (*parameters(model), *adapters(model, finetune))
        self._shapes = {p.name: p.shape for p in everything}
        for name, shape in self._shapes.items():
            record = self._records.get(f"{PARAMETER}/{name}")
            if record is None or record.shape != shape or record.dtype not in DTYPES:
                found = f"{record.dtype} {list(record.shape)}" if record else "nothing"
                raise WeightsError(
                    f"checkpoint '{checkpoint.path}' should hold '{name}' of shape {list(shape)} "
                    f"and holds {found}: its weights and its job must be of one model"
                )

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one parameter."""
        return DTYPES[self._records[f"{PARAMETER}/{name}"].dtype]

    def read(self, name: str) -> Tensor:
        """One whole parameter; what is adapted is merged in fp64."""
        stem = adapter_stem(name)
        if f"{stem}{A}" not in self._shapes:
            lent = self._checkpoint.lend(f"{PARAMETER}/{name}")
            return self._stored(name) if lent is None else lent
        tensor = self._stored(name)
        a, b = (self._stored(f"{stem}{end}").double() for end in (A, B))
        return torch.addmm(tensor.double(), b, a, alpha=self._scale).to(tensor.dtype)

    def _stored(self, name: str) -> Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=self.dtype(name))
        self._checkpoint.fill([Piece(PARAMETER, name, shape, (0,) * len(shape), tensor, (0,))])
        return tensor
