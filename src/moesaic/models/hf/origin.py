"""Where a model comes from: Hugging Face directory, checkpoint or run, as one and the same thing.

An origin knows the model's sizes, gives its weights one tensor at a time, and knows which files
travel along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, DataError, StoreError, WeightsError
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
from moesaic.models.hf.tokens import (
    END,
    GENERATION_NAME,
    ROLES,
    as_ids,
    read_object,
    renamed,
    special_token_ids,
)
from moesaic.models.hf.writer import find_companions
from moesaic.models.tokenizer import FileTokenizer

TOKENIZER = "tokenizer"
"""Directory of a run, or of a bare checkpoint, that holds the files that travel along."""


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
    special: dict[str, Any] = field(default_factory=dict)
    """Ids of special tokens by the tokenizer that a run learnt with: generation settings that come
    from elsewhere may name others."""

    def end_ids(self) -> list[int]:
        """What ends a text, as transformers has it: what generation settings name; without such a
        file, or where it names no end, config.json."""
        for path in self.companions:
            if path.name == GENERATION_NAME:
                settings = renamed(read_object(path), self.special, f"'{path}'")
                if ends := as_ids(settings.get(END), f"'{path}'"):
                    return ends
        return as_ids(self.model.extras.get(END), f"'{self.path}'")

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
    special: dict[str, Any] = {}
    for directory in (path / TOKENIZER, path.parent.parent / TOKENIZER):
        if not companions and (companions := find_companions(directory)):
            special = _special_tokens(directory, job)
            model = _with_special_tokens(model, special, trained=bool(job), origin=f"'{path}'")
    generation = Path(job.get("source") or path) / GENERATION_NAME
    if generation.is_file() and GENERATION_NAME not in {c.name for c in companions}:
        companions.append(generation)
    finetune = None
    if job.get("finetune") is not None:
        finetune = parse(FinetuneConfig, job["finetune"], f"checkpoint '{path}'")
        facts = {**facts, "job": {**job, "finetune": None}}  # What is read is merged.
    tensors = CheckpointTensors(checkpoint, model, finetune)
    special = special if job else {}
    return Origin(path, model, tensors, companions, facts, warnings, finetune, special)


def _model_of(facts: Mapping[str, Any], path: Path) -> ModelConfig:
    """The model that a checkpoint holds: of the job that made it, or its own."""
    raw = (facts.get("job") or facts).get("model")
    if not isinstance(raw, dict):
        raise ConfigError(f"checkpoint '{path}' does not say what model it holds: give another one")
    return parse(ModelConfig, raw, f"checkpoint '{path}'")


def _special_tokens(directory: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of special tokens by the tokenizer in `directory`; a run on conversations has learnt to
    end by the end of a turn too."""
    special = special_token_ids(directory)
    if (job.get("data") or {}).get("format") == "chat":
        from moesaic.models.chat import ChatTemplate, end_of_turn  # Jinja, which others spare.

        with suppress(DataError):  # Files that somebody has changed since.
            tokenizer = FileTokenizer(str(directory))
            end = end_of_turn(ChatTemplate(directory, "restore it", clock=False), tokenizer)
            if end not in (None, tokenizer.end_id):
                special[END] = [tokenizer.end_id, end]
    return special


def _with_special_tokens(
    model: ModelConfig, special: Mapping[str, Any], *, trained: bool, origin: str
) -> ModelConfig:
    """`model` naming the `special` tokens: all where it names none; else, if it was `trained` with
    them, where it names others."""
    if not any(f"{role}_id" in model.extras for role in ROLES):
        named = {**model.extras, **special}
    elif trained:
        named = renamed(model.extras, special, origin)
    else:
        return model
    return model.model_copy(update={"extras": named})


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
