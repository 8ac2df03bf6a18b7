"""End of the server."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from fastapi import FastAPI

from moesaic.serve.http.server import Hooks, _Server


def test_an_idle_connection_of_the_last_moment_is_closed() -> None:
    """uvicorn tells only those that it knows when the port closes."""
    config = uvicorn.Config(FastAPI(), lifespan="off", log_config=None)
    config.load()
    ignore: Any = lambda *_: None  # noqa: E731
    server = _Server(config, 60, Hooks(ignore, ignore, ignore, ignore))
    server.lifespan, server.servers = config.lifespan_class(config), []

    class Late:
        def shutdown(self) -> None:
            server.server_state.connections.discard(self)  # type: ignore[arg-type]

    async def end() -> None:
        late: Any = Late()
        add = server.server_state.connections.add
        asyncio.get_running_loop().call_later(0.05, add, late)
        await asyncio.wait_for(server.shutdown(), 30)

    asyncio.run(end())
    assert not server.server_state.connections
