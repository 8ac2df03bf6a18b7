"""The server process: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from moesaic.base.errors import ConfigError

_BACKLOG = 2048
_STUCK_S = 5
"""Seconds until connections are closed whose clients read no answer or send no request."""
_LATE_S = 0.5
"""Seconds after which every connection of the closed port is known."""
_KEEP_ALIVE_S = 30
"""Idle time after which a connection is closed; clients keep theirs for less."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, which does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host = '{host}' is no address of this machine ({error}): set host to 127.0.0.1, or "
            "0.0.0.0 for other machines"
        ) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _bind_error(error, host, port) from None
    return bound


def listen(bound: socket.socket) -> None:
    """Let clients connect."""
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(_BACKLOG)
    except OSError as error:  # Another program bound it too, and listened first.
        raise _bind_error(error, host, port) from None


def url_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only programs on this machine can connect."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class Hooks(NamedTuple):
    """Functions that the server calls."""

    on_ready: Callable[[], None]
    """Called when clients may connect."""
    on_drain: Callable[[], None]
    """Called when the port is about to close and open answers have time to finish."""
    end_answers: Callable[[], None]
    """Called when the time for open answers is over; they end with an error soon after."""
    end_process: Callable[[int], None]
    """Called at a second signal, with the exit status."""


def run(app: FastAPI, bound: socket.socket, drain_s: int, hooks: Hooks) -> int:
    """Serve until SIGTERM or SIGINT; return the signal that ended it.

    SIGTERM lets open answers finish, for up to `drain_s` seconds. SIGINT ends them with an error. A
    second signal ends the process.
    """
    _raise_file_limit()
    listen(bound)
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False,
        proxy_headers=False, lifespan="on", ws="none", http="h11", loop="asyncio",
        backlog=_BACKLOG, timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip
    server = _Server(config, drain_s, hooks)
    server.run(sockets=[bound])
    return server.ended_by


class _Server(uvicorn.Server):
    """A server that a signal ends without killing the process."""

    def __init__(self, config: uvicorn.Config, drain_s: int, hooks: Hooks) -> None:
        super().__init__(config)
        self._drain_s, self._hooks = drain_s, hooks
        self.ended_by = 0
        """Number of the signal that ended the server."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, and report it."""
        await super().startup(sockets)
        self._hooks.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, and wait for open answers unless a person interrupted the server."""
        drain_s = 0 if self.ended_by == signal.SIGINT else self._drain_s
        if drain_s:
            self._hooks.on_drain()
        self.config.timeout_graceful_shutdown = drain_s + _STUCK_S
        loop = asyncio.get_running_loop()
        timer = loop.call_later(drain_s, self._hooks.end_answers)
        late = loop.call_later(_LATE_S, self._close_idle)
        await super().shutdown(sockets)
        timer.cancel()
        late.cancel()

    def _close_idle(self) -> None:
        """Close idle connections that were accepted just before the port closed, which uvicorn has
        not seen."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, end the process at the second."""
        del frame
        if self.should_exit:
            self._hooks.end_process(128 + sig)
        self.should_exit, self.ended_by = True, sig


def _bind_error(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        remedy = "is taken: stop the program that listens there, or set port to another one"
        return ConfigError(f"port = {port} of {host} {remedy}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(f"port = {port} is reserved for root: set port to one from 1024")
    return ConfigError(
        f"host = '{host}' cannot be used ({error.strerror}): set host to an address of this machine"
    )


def _raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
