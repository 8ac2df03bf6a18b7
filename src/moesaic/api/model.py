"""Models: loaded from any form on disk, with their tokenizer, to generate text and to save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.models.hf.settings import ConvertConfig
from moesaic.serve.config import GenerateConfig

if TYPE_CHECKING:
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.hf.origin import Origin
    from moesaic.models.lm import LanguageModel
    from moesaic.models.tokenizer import Tokenizer


class Generation(NamedTuple):
    """Continuation of one prompt."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int]
    """New token ids, up to and including an end token."""
    text: str
    """Text of the new tokens."""


class Model:
    """A language model on one device, with its tokenizer; weights are read on first use."""

    def __init__(self, origin: Origin, settings: GenerateConfig) -> None:
        self._origin, self._settings = origin, settings

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
        from moesaic.kernels import device as devices
        from moesaic.kernels.grouped_mm import check_backend
        from moesaic.serve.loading import load_model

        settings, origin = self._settings, self._origin
        device = devices.resolve(settings.device, key="device")
        backend = settings.grouped_mm if origin.model.experts else "auto"
        check_backend(backend, device, key="grouped_mm")
        devices.activate(device)
        return load_model(origin, device, settings.precision, settings.grouped_mm).model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with."""
        from moesaic.models.tokenizer import open_tokenizer

        origin, chosen = self._origin, self._settings.tokenizer
        data = (origin.facts.get("job") or {}).get("data") or {}
        if chosen is not None:
            tokenizer = open_tokenizer(chosen, key="tokenizer")
        elif data.get("tokenizer") == "bytes":
            tokenizer = open_tokenizer("bytes")
        else:
            found = [file.parent for file in origin.companions if file.name == "tokenizer.json"]
            if not found:
                raise ConfigError(
                    f"'{origin.path}' has no tokenizer.json: set tokenizer to the path of one"
                )
            tokenizer = open_tokenizer(str(found[0]), data.get("end_token"))
        if tokenizer.size > origin.model.vocab:
            raise ConfigError(
                f"the tokenizer '{tokenizer.name}' has {tokenizer.size} ids, but the model has "
                f"model.vocab = {origin.model.vocab}: set tokenizer to the one that the model "
                "was trained with"
            )
        return tokenizer

    def generate(
        self,
        *prompts: str,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
        chat: bool = False,
        system: str | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[Generation]:
        """Return the continuation of each prompt.

        Args:
            prompts: texts to continue.
            max_tokens: maximum number of tokens to generate per prompt.
            temperature: sampling temperature; 0 always picks the most likely token.
            top_p: draw from the likeliest tokens whose probabilities sum to this.
            seed: random seed; the same seed and prompt give the same text.
            chat: send each prompt as a user message, by the model's chat template.
            system: system message before each prompt, in a chat.
            on_token: function of (row, token id), called for every new token.
        """
        from moesaic.serve.generate import Sampling, generate

        settings = {
            "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed,
        }  # fmt: skip
        parse(GenerateConfig, settings, "generate")
        template = self._template() if chat else None
        ids = self._encode(prompts, template, system)
        self._check_lengths(prompts, ids, max_tokens)
        new = generate(
            self.module, ids, max_tokens, end_ids=self._end_ids(template),
            sampling=Sampling(temperature, top_p, seed), on_token=on_token,
        )  # fmt: skip
        return [
            Generation(text, row, tokens, self.tokenizer.decode(tokens))
            for text, row, tokens in zip(prompts, ids, new, strict=True)
        ]

    def _template(self) -> ChatTemplate:
        name = self.tokenizer.name
        if name == "bytes":
            raise ConfigError(
                "a chat needs a chat template, and the bytes tokenizer has none: continue plain "
                "text, or use a model with another tokenizer"
            )
        from moesaic.models.chat import ChatTemplate

        return ChatTemplate(Path(name).expanduser())

    def _encode(
        self, prompts: Sequence[str], template: ChatTemplate | None, system: str | None
    ) -> list[list[int]]:
        encode = self.tokenizer.encode
        if template is None:
            if system is not None:
                raise ConfigError(
                    f"system = {keys.show(system)} needs a chat: ask for a chat, or remove system"
                )
            return [encode(text) for text in prompts]
        opening = [] if system is None else [{"role": "system", "content": system}]
        messages = [[*opening, {"role": "user", "content": text}] for text in prompts]
        return [encode(template.render(chat), with_special_tokens=True) for chat in messages]

    def _end_ids(self, template: ChatTemplate | None) -> list[int]:
        """Return the ids that end a text: those of the model's files, else the tokenizer's own.

        In a chat the end of an answer also counts.
        """
        ends = set(self._origin.end_ids() or [self.tokenizer.end_id])
        if template is not None:
            from moesaic.models.tokenizer import FileTokenizer

            assert isinstance(self.tokenizer, FileTokenizer), "bytes have no template"
            end = template.end_of_turn_id(self.tokenizer)
            ends |= set() if end is None else {end}
        return sorted(ends)

    def _check_lengths(
        self, prompts: Sequence[str], ids: Sequence[Sequence[int]], max_tokens: int
    ) -> None:
        """Raise ConfigError for prompts that are empty or too long, before weights are read."""
        limit = self._origin.model.max_positions
        for text, row in zip(prompts, ids, strict=True):
            if not row:
                raise ConfigError(f"prompt {keys.show(text)} has no tokens: give some text")
            if len(row) + max_tokens > limit:
                raise ConfigError(
                    f"prompt {keys.show(text)} ({len(row)} tokens) and max_tokens = {max_tokens} "
                    f"exceed the model's {limit} positions: shorten the prompt, or lower max_tokens"
                )

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
    return Model(open_origin(Path(directory)), parse(GenerateConfig, settings, "load"))


def convert(
    source: str | Path,
    directory: str | Path,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> Origin:
    """Write the model in `source` as a new directory, without loading it whole; return where it
    came from, with warnings.

    `settings` are those of `moesaic convert`, such as `to="adapter"`. `on_progress` receives the
    bytes done and in total.
    """
    config = parse(ConvertConfig, settings, "convert")
    import torch

    from moesaic.kernels import device
    from moesaic.models.hf.convert import convert as convert_model

    device.activate(torch.device("cpu"))  # Reuse freed memory between tensors.
    return convert_model(
        Path(source), Path(directory), config.to, config.dtype, config.max_shard_bytes, on_progress
    )


def save(model: Model, directory: str | Path) -> None:
    """Write a model with its present weights as a new Hugging Face directory."""
    model._save(Path(directory))
