"""The model as clients see it: requests of the wire format become requests to the engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import MappingProxyType

from moesaic.base.errors import ConfigError, DataError
from moesaic.facts.job.control import ControlValues
from moesaic.models.chat import ChatTemplate
from moesaic.models.control import ControlPrompts
from moesaic.models.tokenizer import Tokenizer
from moesaic.serve.http.errors import ApiError, too_long
from moesaic.serve.http.schemas import ChatRequest, CompletionRequest
from moesaic.serve.requests import GenerationRequest, SamplingParams

_SEED_RANGE = 2**63
_MAX_DIGITS = 20


@dataclass(frozen=True)
class ApiModel:
    """A model with its name, its tokenizer and its limits."""

    name: str
    tokenizer: Tokenizer
    control: ControlPrompts | None
    """Prompts of attributes; None if the model was trained without them."""
    template: ChatTemplate | None
    """Chat template; None if the model has none."""
    end_ids: frozenset[int]
    """Tokens that end a text."""
    chat_end_ids: frozenset[int]
    """Tokens that end an answer in a chat."""
    vocab: int
    """Ids of the model's vocabulary."""
    context: int
    """Most tokens of a prompt and its continuation."""
    max_choices: int
    """Most choices of a request, over all its prompts: as many as may wait."""
    expert_layers: tuple[int, ...]
    """Layers with experts."""
    num_experts: int
    """Experts of each of these layers."""
    created: int
    """Time of the start, in seconds since 1970."""

    def check_name(self, name: str | None) -> None:
        """Raise ApiError unless `name` is this model's, or None."""
        if name is not None and name != self.name:
            raise ApiError(
                f"the model '{name[:80]}' is not served here: use '{self.name}'",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    def requests(self, body: CompletionRequest | ChatRequest) -> list[GenerationRequest]:
        """Return the requests to the engine, prompt by prompt with all its choices."""
        self.check_name(body.model)
        if isinstance(body, ChatRequest):
            prompts, ends, param = [self._encode_chat(body)], self.chat_end_ids, "messages"
        else:
            prompts, ends, param = self._encode_prompts(body), self.end_ids, "prompt"
        if len(prompts) * body.num_choices > self.max_choices:
            raise ApiError(
                f"{len(prompts)} prompts with n = {body.num_choices} are more than the "
                f"{self.max_choices} choices that may wait here: send them in several requests",
                param="n", code="invalid_value",
            )  # fmt: skip
        sampling = self._sampling(body)
        requests = []
        for prompt in prompts:
            if not prompt:
                raise ApiError(f"{param} has no tokens: give some text", param=param)
            max_tokens = self._max_tokens(len(prompt), body, param)
            requests += [
                GenerationRequest(
                    prompt, max_tokens, sampling,
                    end_ids=frozenset() if body.ignore_eos else ends,
                    choice=choice, top_logprobs=body.top_candidates,
                )
                for choice in range(body.num_choices)
            ]  # fmt: skip
        return requests

    def token_text(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return self.tokenizer.decode([token], with_special_tokens=True)

    def _encode_prompts(self, body: CompletionRequest) -> list[tuple[int, ...]]:
        prompts = []
        for prompt in body.prompt:
            if body.control is not None:
                prompts.append(self._encode_control(body.control, prompt))
                continue
            if isinstance(prompt, str):
                prompts.append(tuple(self.tokenizer.encode(prompt)))
                continue
            wrong = next((token for token in prompt if not 0 <= token < self.vocab), None)
            if wrong is not None:
                raise ApiError(
                    f"prompt has the token {wrong}, and the model's ids are 0 to "
                    f"{self.vocab - 1}: encode the text with the model's tokenizer",
                    param="prompt", code="invalid_value",
                )  # fmt: skip
            prompts.append(prompt)
        return prompts

    def _encode_control(
        self, values: ControlValues, prompt: str | tuple[int, ...]
    ) -> tuple[int, ...]:
        reason = "is for prompts that are texts: give one, or leave it out"
        if self.control is None:
            reason = f"is not known to the model '{self.name}': leave it out"
        elif isinstance(prompt, str):
            try:
                return tuple(self.control.encode(values, prompt))
            except ConfigError as error:
                raise ApiError(str(error), param="control", code="invalid_value") from None
        raise ApiError(f"control {reason}", param="control", code="invalid_value")

    def _encode_chat(self, body: ChatRequest) -> tuple[int, ...]:
        if self.template is None:
            raise ApiError(
                f"the model '{self.name}' has no chat template: use /v1/completions",
                param="messages", code="chat_template_missing",
            )  # fmt: skip
        try:
            text = self.template.render([message.rendered() for message in body.messages])
        except DataError as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from None
        return tuple(self.tokenizer.encode(text, has_special_tokens=True))

    def _max_tokens(
        self, num_prompt: int, body: CompletionRequest | ChatRequest, param: str
    ) -> int:
        room, wanted = self.context - num_prompt, body.token_limit
        if room < 1:
            raise too_long(
                f"{param} has {num_prompt} tokens, and this server takes {self.context} tokens of "
                "prompt and answer together: shorten it",
                param,
            )
        if wanted is not None and wanted > room:
            raise too_long(
                f"{param} has {num_prompt} tokens and max_tokens = {wanted}: together more than "
                f"the {self.context} tokens of this server; give max_tokens up to {room}, or "
                "shorten the prompt",
                "max_tokens",
            )
        return room if wanted is None else wanted

    def _sampling(self, body: CompletionRequest | ChatRequest) -> SamplingParams:
        seed = secrets.randbelow(_SEED_RANGE) if body.seed is None else body.seed % _SEED_RANGE
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=MappingProxyType(self._logit_bias(body)),
            seed=seed,
        )

    def _logit_bias(self, body: CompletionRequest | ChatRequest) -> dict[int, float]:
        bias = {}
        for key, value in (body.logit_bias or {}).items():
            # Python refuses to read longer numbers.
            is_number = key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS
            if not is_number or int(key) >= self.vocab:
                raise ApiError(
                    f"logit_bias has the key '{key[:80]}': give token ids from 0 to "
                    f"{self.vocab - 1}",
                    param="logit_bias", code="invalid_value",
                )  # fmt: skip
            bias[int(key)] = value
        return bias
