"""Models: loaded from any form on disk, with their tokenizer, to generate text and to save."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.engine import TextEngine, load_network
from moesaic.api.generation import Generation
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.models.hf.settings import ConvertConfig
from moesaic.serve.config import EngineConfig, LoadConfig
from moesaic.serve.prompts import Prompt, PromptEncoder

if TYPE_CHECKING:
    from moesaic.models.hf.origin import Origin
    from moesaic.models.lm import LanguageModel
    from moesaic.models.recommender_files import RecommenderOrigin
    from moesaic.models.tokenizer import Tokenizer


class Model:
    """A language model on one device, with its tokenizer; weights are read on first use."""

    def __init__(self, origin: Origin, settings: LoadConfig) -> None:
        self._origin, self._settings = origin, settings
        self._prompts = PromptEncoder(origin, settings.tokenizer)

    @property
    def path(self) -> Path:
        """Directory of the weights."""
        return self._origin.path

    @property
    def warnings(self) -> list[str]:
        """Sentences about the files, such as a damaged checkpoint that was passed over."""
        return self._origin.warnings

    @cached_property
    def module(self) -> LanguageModel:
        """The network, a `torch.nn.Module`."""
        return load_network(self._origin, self._settings).model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with, unless another one was chosen."""
        return self._prompts.tokenizer

    def generate(
        self, *prompts: Prompt, chat: bool = False, system: str | None = None, **sampling: Any
    ) -> list[Generation]:
        """Return the continuations of all prompts; see `Engine.generate`.

        The weights are those that the module has now.
        """
        from moesaic.serve.loading import ServedModel

        def load_module() -> ServedModel:
            return ServedModel(self.module)

        with TextEngine(self._origin, EngineConfig(), self._prompts, load_module) as engine:
            return engine.generate(prompts, chat=chat, system=system, **sampling)

    def _save(self, directory: Path) -> None:
        from moesaic.models.hf.shards import InMemoryTensors
        from moesaic.models.hf.writer import write_model
        from moesaic.models.state import tensor_shards

        origin = self._origin
        write_model(
            directory, origin.model, InMemoryTensors(tensor_shards(self.module)),
            companions=origin.companions, special_token_ids=origin.special_token_ids,
        )  # fmt: skip


def load(
    directory: str | Path,
    *,
    device: str = "auto",
    precision: str = "keep",
    grouped_mm: str = "auto",
    tokenizer: str | None = None,
) -> Model:
    """Return the model in a Hugging Face directory, a run or a checkpoint.

    Args:
        directory: where it is; of a run, the newest intact checkpoint counts.
        device: torch device; auto: a GPU if there is one, else cpu.
        precision: keep (the dtype of the embedding on file), fp32, bf16 or fp64.
        grouped_mm: kernels of the expert matmuls on a GPU, as in a job.
        tokenizer: "bytes", or the path of a tokenizer.json; None: the model's own.
    """
    from moesaic.models.hf.origin import open_origin

    settings = {
        "device": device, "precision": precision, "grouped_mm": grouped_mm, "tokenizer": tokenizer,
    }  # fmt: skip
    return Model(open_origin(Path(directory)), parse(LoadConfig, settings, "load"))


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> Origin | RecommenderOrigin:
    """Write the model in `source` as a new directory, without loading it whole; return where it
    came from, with warnings.

    `settings` are those of `moesaic convert`, such as `to="adapter"`. `on_progress` receives the
    bytes done and in total. A recommender has one format and no settings.
    """
    config = parse(ConvertConfig, settings, "convert")
    from moesaic.models.recommender_files import is_recommender

    if is_recommender(Path(source)):
        from moesaic.api.recommender import export

        if given := config.non_default_fields:
            raise ConfigError(
                f"'{source}' is a recommender, and {min(given)} is for language models: remove it"
            )
        return export(Path(source), Path(directory))
    import torch

    from moesaic.kernels import device
    from moesaic.models.hf.convert import convert as convert_model

    device.activate(torch.device("cpu"))  # Reuse freed memory between tensors.
    return convert_model(
        Path(source), Path(directory), config.to, config.dtype, config.max_shard_bytes,
        on_progress, config.student,
    )  # fmt: skip


def save(model: Model, directory: str | Path) -> None:
    """Write a model with its present weights as a new Hugging Face directory."""
    model._save(Path(directory))
