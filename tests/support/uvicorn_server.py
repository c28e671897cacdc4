"""Run an ASGI app under uvicorn in the event loop of the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from tests.support.waiting import DEADLINE, until

__all__ = ["address_of", "run_uvicorn"]


class FastServer(uvicorn.Server):
    """A server that notices its end at once. uvicorn's own checks for it ten times a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the headers that every response has
        await until(lambda: self.should_exit, deadline=None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            await until(lambda: not state.connections and not state.tasks, self.config.timeout_graceful_shutdown)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


@asynccontextmanager
async def run_uvicorn(
    app: Any, *, sockets: list[socket.socket] | None = None, **options: Any
) -> AsyncIterator[uvicorn.Server]:
    """Serve an app on the given sockets or a free port of this machine; `options` are those of uvicorn."""
    options = {"port": 0, "log_config": None, "access_log": False, "timeout_graceful_shutdown": 1, **options}
    server = FastServer(uvicorn.Config(app, **options))
    # Not `serve()`, which would handle the signals of the tests' own process.
    running = asyncio.create_task(server._serve(sockets))
    await until(lambda: server.started or running.done())
    try:
        yield server
    finally:
        server.should_exit = True
        async with asyncio.timeout(DEADLINE):
            await running


def address_of(server: uvicorn.Server) -> Any:
    return server.servers[0].sockets[0].getsockname()
