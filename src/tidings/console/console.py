"""The console of one server: it records changes and deliveries from its construction on, and makes its routes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from tidings.console.access import Access
from tidings.console.app import ConsoleRoutes, IsLoggedIn
from tidings.console.record import Record
from tidings.console.samples import Samples
from tidings.console.stream import EventStream
from tidings.console.views import Served, Views

if TYPE_CHECKING:
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.routing import Route

    from tidings.server.loop_bridge import LoopBridge
    from tidings.server.subscribe import Subscriptions

__all__ = ["Console", "Mode"]

Mode = Literal["read", "write"]
"""`write` also allows calling tools, reading resources, getting prompts, and ending streams."""

_SAMPLE_INTERVAL = 1.0


class Server(Served, Protocol):
    @property
    def bridge(self) -> LoopBridge: ...
    @property
    def subscriptions(self) -> Subscriptions: ...


class Console:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._record = Record(server.hub)
        self._samples = Samples(server.hub.counts.latency, server.hub.catalog.now())
        self._record.start()
        server.subscriptions.client_observer = self._record
        server.bridge.on_bind(self._start)
        if server.bridge.is_bound:
            server.bridge.call(self._start)

    def routes(self, mode: Mode, token: str | None, security: TransportSecuritySettings | None) -> list[Route]:
        """Return the routes for `/console` and everything below. `security` has the accepted Host headers."""
        access = Access(token, security, mode)
        views = Views(self._server, self._record, self._samples, can_write=access.can_write, has_login=access.has_login)
        return ConsoleRoutes(views, access, partial(self._stream, views)).make()

    def _stream(self, views: Views, is_logged_in: IsLoggedIn) -> EventStream:
        server = self._server

        def must_end() -> bool:
            return server.subscriptions.is_stopping or not is_logged_in()

        return EventStream(server.hub, self._record, self._samples, views, must_end)

    def _start(self) -> None:
        self._server.bridge.start_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL)
            with self._server.hub.catalog.lock:
                self._samples.take(self._server.hub.catalog.now())
                self._record.expire_deadlines()
