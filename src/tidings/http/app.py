"""The server's own ASGI app, made live, and uvicorn around it.

Streams end on the signal itself: uvicorn runs the shutdown of an app only after it has waited for open connections, and
a stream does not close by itself.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from tidings.http.disconnects import RequestReference, check_uvicorn
from tidings.http.local_addresses import make_security, needs_security
from tidings.runtime.shutdown import FINISH_CALLS, on_signals
from tidings.sdk import internals
from tidings.server.garbage_collection import freeze_objects, restored_gc_settings
from tidings.server.list_reader import ListReader

__all__ = ["make_live", "own_app", "run_http", "serve_app"]

logger = logging.getLogger(__name__)


def own_app(server: Any, options: dict[str, Any]) -> Any:
    """Return the Starlette app that a server makes, with the checks of `Host` and `Origin` for a local bind."""
    if not hasattr(server, "streamable_http_app"):
        return server.http_app(**options)
    host = options.get("host")
    if options.get("transport_security") is None and needs_security(host):
        options = {**options, "transport_security": make_security(host)}
    return server.streamable_http_app(**options)


def make_live(
    server: Any,
    app: Any,
    *,
    make_router: Callable[[Any], Any],
    reader: ListReader,
    start: Callable[[], None],
    stop: Callable[[], None],
) -> None:
    """Put the router of Tidings into the new Starlette app of a server, in place of the SDK's session manager.

    `make_router` returns the router for a session manager. `start` and `stop` are called with the app."""
    if hasattr(server, "streamable_http_app"):
        manager = server.session_manager
        manager.asgi_app = make_router(manager)

        def find_manager() -> Any:
            return manager
    else:
        endpoint = internals.fastmcp_endpoint(app)

        def find_manager() -> Any:
            # FastMCP makes a session manager at every start of the app.
            manager = endpoint.session_manager
            manager.asgi_app = make_router(manager)
            return manager

    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(started: Any) -> AsyncIterator[Any]:  # `started` is the app, or one that it is mounted in
        _add_request_reference(app)
        async with inner(started) as state:
            start()
            # Before the first client: one that only listens would otherwise be notified of all items.
            await reader.ensure_loaded(internals.lifespan_state_of(find_manager()))
            loop = asyncio.get_running_loop()
            with on_signals(lambda number: loop.call_soon_threadsafe(stop), chains=True):
                try:
                    yield state
                finally:
                    stop()

    app.router.lifespan_context = lifespan


def _add_request_reference(app: Any) -> None:
    """Put `RequestReference` before the app's own middleware, all of which is known when the app starts."""
    if app.user_middleware and not isinstance(app.middleware_stack, RequestReference):
        app.middleware_stack = RequestReference(app.middleware_stack or app.build_middleware_stack())


def run_http(
    server: Any,
    make_app: Callable[..., Any],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str | int | None = "info",
    **options: Any,
) -> None:
    """Run uvicorn with the app of a server until the process gets a signal to end. `options` are those of the app."""
    if hasattr(server, "streamable_http_app"):
        options["host"] = host
    if isinstance(log_level, str):
        logs_access = log_level.lower() in ("trace", "debug", "info")
    else:
        logs_access = log_level is None or log_level <= logging.INFO
    # uvicorn formats each access line even if it is dropped afterwards.
    serve_app(make_app(**options), host=host, port=port, log_level=log_level, access_log=logs_access)


def serve_app(
    app: Any,
    *,
    sockets: list[socket.socket] | None = None,
    on_start: Callable[[], None] | None = None,
    on_signal: Callable[[], None] | None = None,
    **options: Any,
) -> None:
    """Run uvicorn with an app until the process gets a signal to end. Call `on_start` when it accepts connections, and
    `on_signal` when it gets the signal.

    `options` are those of `uvicorn.Config`."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            gc.collect()
            freeze_objects()
            if on_start is not None and self.started:
                on_start()

        def handle_exit(self, sig: int, frame: Any) -> None:
            if on_signal is not None:
                on_signal()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=FINISH_CALLS,
        **options,
    )
    config.load()  # loads the protocol modules, which `check_uvicorn` checks
    check_uvicorn()
    with restored_gc_settings(), suppress(KeyboardInterrupt):  # uvicorn raises it again after the shutdown
        Server(config).run(sockets=sockets)
