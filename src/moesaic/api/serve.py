"""An OpenAI-compatible server for a model on disk."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moesaic.api.engine import load_network, make_engine
from moesaic.api.start import exit_process, import_module
from moesaic.base import keys
from moesaic.base.errors import ConfigError, DataError, StoreError, write_error
from moesaic.base.events import EventLog
from moesaic.serve.config import ServeConfig
from moesaic.serve.prompts import PromptEncoder

if TYPE_CHECKING:
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.hf.origin import Origin
    from moesaic.serve.engine import EngineLimits, InferenceEngine
    from moesaic.serve.engine_thread import EngineThread
    from moesaic.serve.expert_reads import RegimeChoice
    from moesaic.serve.http.api_model import ApiModel
    from moesaic.serve.http.app import Service
    from moesaic.serve.loading import ServedModel

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""
_INTERRUPTED = 130
_LOG = logging.getLogger(__name__)


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
    on_progress: Callable[[int, int], None],
) -> int:
    """Serve the model in `directory` until a signal; return the exit status.

    Args:
        directory: a run, a checkpoint or a Hugging Face directory.
        config: settings.
        on_ready: function that gets the address and the limits when clients may connect.
        on_warning: function that gets sentences for the user.
        on_progress: function that gets the bytes of weights read and in total, while they load.
    """
    _check_packages()
    api_key = _read_key(config)
    import_module("moesaic.serve.http.app")
    from moesaic.serve.http import server

    with server.bind(config.host, config.port) as bound:
        if api_key is None and not server.is_loopback(bound):
            on_warning(
                f"host = {keys.show(config.host)} without an API key: any program that reaches "
                "this machine can use the model; give --api-key-file FILE"
            )
        import_server()
        from moesaic.serve.engine_thread import EngineThread
        from moesaic.serve.http.app import make_app

        origin = _open(directory, config, on_warning)
        prompts = PromptEncoder(origin, config.tokenizer)
        template = _find_template(prompts, on_warning)
        with load_network(origin, config, on_progress) as served, ExitStack() as stack:
            for warning in served.warnings:
                on_warning(warning)
            engine = make_engine(served, config, config.max_waiting, prompts.masked_ids)
            if config.events is not None:
                stack.callback(_log_decisions(served, Path(config.events), on_warning).close)
            name = config.name or directory.resolve().name
            model = _make_api_model(name, origin, prompts, template, config, engine.limits)
            facts = ServerFacts(
                server.url_of(bound), model.name, config.memory, model.context,
                engine.limits.cache_tokens, engine.limits.max_running, engine.limits.max_waiting,
            )  # fmt: skip
            thread = EngineThread(engine)
            service = _make_service(model, served, thread, api_key)
            hooks = server.Hooks(
                lambda: on_ready(facts), partial(_log_open_texts, engine, config.drain_s),
                engine.cancel_all, exit_process,
            )  # fmt: skip
            thread.start()
            try:
                ended_by = server.run(make_app(service), bound, config.drain_s, hooks)
            finally:
                thread.close()
    return _INTERRUPTED if ended_by == signal.SIGINT else 0


def _log_open_texts(engine: InferenceEngine, drain_s: int) -> None:
    """Say what the end of the server waits for."""
    stats = engine.stats()
    num_open = stats.num_running + stats.num_waiting
    if num_open:
        _LOG.info(
            "ending: %d open texts may take up to %d s; a second signal ends the process",
            num_open, drain_s,
        )  # fmt: skip


def _log_decisions(served: ServedModel, path: Path, on_warning: Callable[[str], None]) -> EventLog:
    """Return a log of the engine's decisions, from now on until it cannot be written."""
    try:
        log = EventLog(path.expanduser())
    except OSError as error:
        raise write_error(f"events = {keys.show(str(path))}", error) from None
    if served.decision is not None:
        facts, outcome, _ = served.decision
        log.emit("memory", facts=facts._asdict(), decision=outcome._asdict())

    reads = served.reads
    if reads is None:
        return log

    def record(choice: RegimeChoice) -> None:
        try:
            log.emit("reading", facts=choice.facts._asdict(), decision=choice.outcome._asdict())
        except StoreError as error:  # It must not end the requests of the pass.
            reads.on_change = None
            with suppress(OSError):
                log.close()
            on_warning(f"events end here: {error}")

    reads.on_change = record
    return log


def _make_service(
    model: ApiModel, served: ServedModel, thread: EngineThread, api_key: str | None
) -> Service:
    from moesaic.serve.http.app import Service
    from moesaic.serve.http.experts import ExpertFacts
    from moesaic.serve.http.metrics import Metrics

    def experts() -> ExpertFacts:
        used = served.expert_stats
        return ExpertFacts(served.experts_in_memory(), used.hits, used.misses)

    if served.reads is None:
        return Service(model, thread, Metrics(model.name, thread.stats), api_key=api_key)
    metrics = Metrics(model.name, thread.stats, lambda: served.expert_stats)
    return Service(model, thread, metrics, experts=experts, api_key=api_key)


def import_server() -> None:
    """Import all that a server needs. Raise ConfigError if the extra is not installed."""
    _check_packages()
    for name in ("http.app", "engine_thread", "loading"):
        import_module(f"moesaic.serve.{name}")


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


def _open(directory: Path, config: ServeConfig, on_warning: Callable[[str], None]) -> Origin:
    """Return the model's files, after checks that need no weights."""
    from moesaic.models.hf.origin import open_origin

    origin = open_origin(directory)
    for warning in origin.warnings:
        on_warning(warning)
    limit = origin.model.max_positions
    if config.context is not None and config.context > limit:
        raise ConfigError(
            f"context = {config.context} is more than the model's {limit} positions: lower it"
        )
    return origin


def _make_api_model(
    name: str,
    origin: Origin,
    prompts: PromptEncoder,
    template: ChatTemplate | None,
    config: ServeConfig,
    limits: EngineLimits,
) -> ApiModel:
    """Return the model as clients see it."""
    from moesaic.serve.http.api_model import ApiModel

    facts = origin.model
    room = limits.cache_tokens // limits.page_tokens * limits.page_tokens
    if config.context is not None and config.context > room:
        raise ConfigError(
            f"context = {config.context} is more than the key-value cache of {room} positions: "
            "raise cache_tokens, or lower context"
        )
    return ApiModel(
        name=name, tokenizer=prompts.tokenizer, control=prompts.control, template=template,
        end_ids=prompts.end_ids,
        chat_end_ids=prompts.end_ids if template is None else prompts.chat_end_ids,
        vocab=facts.vocab, context=min(config.context or facts.max_positions, room),
        max_choices=limits.max_waiting, expert_layers=tuple(facts.expert_layers),
        num_experts=facts.experts, created=int(time.time()),
    )  # fmt: skip


def _find_template(
    prompts: PromptEncoder, on_warning: Callable[[str], None]
) -> ChatTemplate | None:
    """Return the model's chat template; None, and warn, if it has none that works. A missing
    tokenizer is an error."""
    from moesaic.models.tokenizer import ByteTokenizer

    off = "/v1/chat/completions is off"
    if prompts.tokenizer.name == ByteTokenizer.name:
        on_warning(f"{off}: the bytes tokenizer has no chat template")
        return None
    try:
        return prompts.template
    except (ConfigError, DataError) as error:
        on_warning(f"{off}: {error}")
        return None
