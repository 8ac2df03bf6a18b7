"""An OpenAI-compatible server for a model on disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.start import exit_on_interrupt, exit_process, import_module
from moesaic.base import keys
from moesaic.base.errors import ConfigError, DataError
from moesaic.serve.config import ServeConfig

if TYPE_CHECKING:
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.hf.origin import Origin
    from moesaic.models.lm import LanguageModel
    from moesaic.serve.http.api_model import ApiModel
    from moesaic.serve.prompts import PromptEncoder

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""
_INTERRUPTED = 130


def serve(
    directory: Path,
    config: ServeConfig,
    on_ready: Callable[[dict[str, Any]], None],
    on_warning: Callable[[str], None],
) -> int:
    """Serve the model in `directory` until a signal; return the exit status.

    Args:
        directory: a run, a checkpoint or a Hugging Face directory.
        config: settings.
        on_ready: function that gets the address and the limits when clients may connect.
        on_warning: function that gets sentences for the user.
    """
    with exit_on_interrupt():
        for package in _EXTRA:
            _import_extra(package)
        server = import_module("moesaic.serve.http.server")
        app = import_module("moesaic.serve.http.app")
        engine_thread = import_module("moesaic.serve.engine_thread")
    api_key = _read_key(config)
    with server.bind(config.host, config.port) as bound:
        if api_key is None and not server.is_loopback(bound):
            on_warning(
                f"host = {keys.show(config.host)} without an API key: any program that reaches "
                "this machine can use the model; give --api-key-file FILE"
            )
        model, engine = _open(directory, config, on_warning)
        thread = engine_thread.EngineThread(engine)
        metrics = import_module("moesaic.serve.http.metrics").Metrics(model.name, thread.stats)
        application = app.make_app(app.Service(model, thread, metrics, api_key=api_key))
        facts = {
            "url": server.url_of(bound), "model": model.name, "memory": config.memory,
            "context": model.context, "cache_tokens": engine.limits.cache_tokens,
            "max_running": engine.limits.max_running, "max_waiting": engine.limits.max_waiting,
        }  # fmt: skip
        thread.start()
        try:
            ended_by = server.run(
                application, bound, config.drain_s, lambda: on_ready(facts), exit_process
            )
        finally:
            thread.close()
    return _INTERRUPTED if ended_by == signal.SIGINT else 0
