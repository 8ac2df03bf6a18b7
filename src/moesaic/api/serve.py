"""An OpenAI-compatible server for a model on disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moesaic.api.engine import default_cache_tokens, load_network
from moesaic.api.start import exit_on_interrupt, exit_process, import_module
from moesaic.base import keys
from moesaic.base.errors import ConfigError, DataError
from moesaic.serve.config import ServeConfig
from moesaic.serve.prompts import PromptEncoder

if TYPE_CHECKING:
    import socket

    from moesaic.models.chat import ChatTemplate
    from moesaic.serve.engine import InferenceEngine
    from moesaic.serve.http.api_model import ApiModel

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""
_INTERRUPTED = 130


class ServerFacts(NamedTuple):
    """A server that clients can connect to."""

    url: str
    model: str
    """Name of the model."""
    memory: str | None
    """Budget of the process; None: none."""
    context: int
    """Most tokens of a prompt and its continuation."""
    cache_tokens: int
    """Positions of the key-value cache over all requests."""
    max_running: int
    max_waiting: int


def serve(
    directory: Path,
    config: ServeConfig,
    on_ready: Callable[[ServerFacts], None],
    on_warning: Callable[[str], None],
) -> int:
    """Serve the model in `directory` until a signal; return the exit status.

    Args:
        directory: a run, a checkpoint or a Hugging Face directory.
        config: settings.
        on_ready: function that gets the address and the limits when clients may connect.
        on_warning: function that gets sentences for the user.
    """
    _check_packages()
    api_key = _read_key(config)
    with exit_on_interrupt():
        import_module("moesaic.serve.http.app")
    from moesaic.serve.http import server

    with server.bind(config.host, config.port) as bound:
        if api_key is None and not server.is_loopback(bound):
            on_warning(
                f"host = {keys.show(config.host)} without an API key: any program that reaches "
                "this machine can use the model; give --api-key-file FILE"
            )
        with exit_on_interrupt():
            import_module("moesaic.serve.engine_thread")
            import_module("moesaic.serve.loading")
        model, engine = _open(directory, config, on_warning)
        limits = engine.limits
        facts = ServerFacts(
            server.url_of(bound), model.name, config.memory, model.context, limits.cache_tokens,
            limits.max_running, limits.max_waiting,
        )  # fmt: skip
        ended_by = _run(model, engine, api_key, bound, config.drain_s, lambda: on_ready(facts))
    return _INTERRUPTED if ended_by == signal.SIGINT else 0


def _run(
    model: ApiModel,
    engine: InferenceEngine,
    api_key: str | None,
    bound: socket.socket,
    drain_s: int,
    on_ready: Callable[[], None],
) -> int:
    """Serve until a signal, and return it."""
    from moesaic.serve.engine_thread import EngineThread
    from moesaic.serve.http import server
    from moesaic.serve.http.app import Service, make_app
    from moesaic.serve.http.metrics import Metrics

    thread = EngineThread(engine)
    service = Service(model, thread, Metrics(model.name, thread.stats), api_key=api_key)
    thread.start()
    try:
        hooks = server.Hooks(on_ready, engine.cancel_all, exit_process)
        return server.run(make_app(service), bound, drain_s, hooks)
    finally:
        thread.close()


def _check_packages() -> None:
    """Raise ConfigError if the extra is not installed."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ConfigError(
                f"moesaic serve needs the package {package.replace('_', '-')}: "
                "pip install 'moesaic[serve]'"
            )


def _read_key(config: ServeConfig) -> str | None:
    """Return the API key of the settings, or of the file that they name."""
    if config.api_key_file is None:
        return config.api_key
    shown = f"api_key_file = {keys.show(config.api_key_file)}"
    if config.api_key is not None:
        raise ConfigError(f"{shown} and api_key exclude each other: remove one of them")
    try:
        key = Path(config.api_key_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{shown} cannot be read ({reason}): give a file with a key") from None
    if not key:
        raise ConfigError(f"{shown} is empty: write a key into it")
    return key


def _open(
    directory: Path, config: ServeConfig, on_warning: Callable[[str], None]
) -> tuple[ApiModel, InferenceEngine]:
    """Return the model as clients see it, and an engine that has its weights."""
    from moesaic.models.hf.origin import open_origin
    from moesaic.serve.engine import EngineLimits, InferenceEngine
    from moesaic.serve.http.api_model import ApiModel

    origin = open_origin(directory)
    for warning in origin.warnings:
        on_warning(warning)
    prompts = PromptEncoder(origin, config.tokenizer)
    tokenizer, template = prompts.tokenizer, _find_template(prompts, on_warning)
    facts, context = origin.model, config.context or origin.model.max_positions
    if context > facts.max_positions:
        raise ConfigError(
            f"context = {context} is more than the model's {facts.max_positions} positions: "
            "lower it"
        )
    network = load_network(origin, config, config.memory)
    limits = EngineLimits(
        max_running=config.max_running, max_waiting=config.max_waiting,
        tokens_per_pass=config.tokens_per_pass,
        cache_tokens=config.cache_tokens or default_cache_tokens(network, config.max_running),
    )  # fmt: skip
    room = limits.cache_tokens // limits.page_tokens * limits.page_tokens
    if config.context is not None and context > room:
        raise ConfigError(
            f"context = {context} is more than the key-value cache of {room} positions: raise "
            "cache_tokens, or lower context"
        )
    model = ApiModel(
        name=config.name or directory.resolve().name,
        tokenizer=tokenizer, template=template, end_ids=prompts.end_ids,
        chat_end_ids=prompts.end_ids if template is None else prompts.chat_end_ids,
        vocab=facts.vocab, context=min(context, room), max_choices=limits.max_waiting,
        expert_layers=tuple(facts.expert_layers), num_experts=facts.experts,
        created=int(time.time()),
    )  # fmt: skip
    return model, InferenceEngine(network, limits)


def _find_template(
    prompts: PromptEncoder, on_warning: Callable[[str], None]
) -> ChatTemplate | None:
    """Return the model's chat template; None, and warn, if it has none that works."""
    try:
        return prompts.template
    except (ConfigError, DataError) as error:
        on_warning(f"/v1/chat/completions is off: {error}")
        return None
