"""Prompts of a model on disk: texts, conversations and token ids become the model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.models.hf.special_tokens import START_KEY, special_token_ids
from moesaic.models.tokenizer import FileTokenizer, Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from moesaic.facts.job import ControlValues
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.control import ControlPrompts
    from moesaic.models.hf.origin import Origin

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text, token ids, or the messages of a conversation."""


class PromptEncoder:
    """Tokenizer, chat template and end tokens of a model; each is read on first use."""

    def __init__(self, origin: Origin, tokenizer: str | None = None) -> None:
        """Create an encoder for `origin`, with another tokenizer than its own if one is named."""
        self._origin, self._chosen = origin, tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with, unless another one is chosen."""
        origin = self._origin
        job = origin.facts.get("job") or {}
        data = job.get("data") or {}
        if self._chosen is not None:
            tokenizer = open_tokenizer(self._chosen, key="tokenizer")
        elif data.get("tokenizer") == "bytes" and job.get("control") is None:
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

    @cached_property
    def control(self) -> ControlPrompts | None:
        """Prompts of attributes; None if the model was trained without them."""
        from moesaic.models.control import ControlPrompts

        return ControlPrompts.find(self.tokenizer)

    @property
    def masked_ids(self) -> Sequence[int]:
        """Tokens that are never generated, because only prompts have them."""
        return () if self.control is None else self.control.reserved_ids

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template beside the tokenizer; ConfigError or DataError if there is none."""
        name = self.tokenizer.name
        if name == "bytes":
            raise ConfigError(
                "a chat needs a chat template, and the bytes tokenizer has none: continue plain "
                "text, or use a model with another tokenizer"
            )
        from moesaic.models.chat import ChatTemplate

        return ChatTemplate(Path(name).expanduser())

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text: those of the model's files, else the tokenizer's own."""
        return frozenset(self._origin.end_ids() or [self.tokenizer.end_id])

    @cached_property
    def chat_end_ids(self) -> frozenset[int]:
        """Tokens that end an answer: also the one that the template writes after it."""
        template = self.template
        assert isinstance(self.tokenizer, FileTokenizer), "bytes have no template"
        end = template.end_of_turn_id(self.tokenizer)
        return self.end_ids if end is None else self.end_ids | {end}

    def ends(self, is_chat: bool) -> frozenset[int]:
        """Return the tokens that end a text or, in a chat, an answer."""
        return self.chat_end_ids if is_chat else self.end_ids

    @cached_property
    def start_id(self) -> int:
        """Token before a text that has no context: the tokenizer's start token, else its end
        token."""
        path = Path(self.tokenizer.name).expanduser()
        if isinstance(self.tokenizer, FileTokenizer):
            directory = path if path.is_dir() else path.parent
            start: int = special_token_ids(directory).get(START_KEY, self.tokenizer.end_id)
            return start
        return self.tokenizer.end_id

    def encode_pair(
        self, context: str | Sequence[int], continuation: str | Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of the text that continues it.

        They are encoded as one text. Spaces at the end of the context belong to the continuation,
        as tokenizers join them with the next word. An empty context becomes the start token.
        """
        if not isinstance(context, str) or not isinstance(continuation, str):
            if isinstance(context, str) or isinstance(continuation, str):
                raise ConfigError(
                    f"context {keys.show(context)} and continuation {keys.show(continuation)}: "
                    "give two texts, or token ids of both"
                )
            return list(context), list(continuation)
        encode, stripped = self.tokenizer.encode, context.rstrip()
        if not stripped:
            return [self.start_id], encode(context + continuation, has_special_tokens=True)
        before = encode(stripped)
        return before, encode(context + continuation)[len(before) :]

    def encode(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        is_chat: bool = False,
        system: str | None = None,
        control: ControlValues | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt; ConfigError for one without room for `max_tokens`.

        Args:
            prompt: a text, token ids, or messages with `role` and `content`.
            max_tokens: maximum number of tokens that follow.
            is_chat: whether a text is a user message of a chat.
            system: system message before a chat that has none.
            control: attributes of the text, which may be empty then.
        """
        if control is None or not control.given:
            ids = self._encode(prompt, is_chat, system)
        else:
            ids = self._encode_control(prompt, is_chat, control)
        limit = self._origin.model.max_positions
        if not ids:
            raise ConfigError(f"prompt {keys.show(prompt)} has no tokens: give some text")
        if not max_tokens and len(ids) > limit:
            raise ConfigError(
                f"text {keys.show(prompt)} has {len(ids)} tokens, and the model has {limit} "
                "positions: shorten it"
            )
        if len(ids) + max_tokens > limit:
            raise ConfigError(
                f"prompt {keys.show(prompt)} ({len(ids)} tokens) and max_tokens = {max_tokens} "
                f"exceed the model's {limit} positions: shorten the prompt, or lower max_tokens"
            )
        return ids

    def _encode_control(self, prompt: Prompt, is_chat: bool, control: ControlValues) -> list[int]:
        if self.control is None:
            raise ConfigError(
                f"control = {keys.show(control.given)}, and '{self._origin.path}' was trained "
                "without [control]: leave it out, or train with that table"
            )
        if is_chat or not isinstance(prompt, str):
            found = "this is a chat" if is_chat else f"the prompt {keys.show(prompt)} is none"
            raise ConfigError(
                f"control = {keys.show(control.given)} stands before a text, and {found}: leave it "
                "out, or give a text without a chat"
            )
        return self.control.encode(control, prompt)

    def _encode(self, prompt: Prompt, is_chat: bool, system: str | None) -> list[int]:
        parts: Any = prompt
        if isinstance(prompt, str) and is_chat:
            parts = [{"role": "user", "content": prompt}]
        if isinstance(parts, list | tuple) and parts and all(isinstance(p, dict) for p in parts):
            if system is not None and parts[0].get("role") != "system":
                parts = [{"role": "system", "content": system}, *parts]
            text = self.template.render(parts)
            return self.tokenizer.encode(text, has_special_tokens=True)
        if system is not None:
            raise ConfigError(
                f"system = {keys.show(system)} needs a chat: ask for a chat, or remove system"
            )
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(parts, list | tuple) and all(type(part) is int for part in parts):
            return list(parts)
        raise ConfigError(
            f"prompt {keys.show(prompt)} is not known: give a text, token ids, or messages"
        )
