"""The processes and apps that Tidings runs: the server's own ASGI app made live, and uvicorn around it.

Streams end on the signal itself: uvicorn runs an app's shutdown only after it has waited for open connections, which a
stream never closes by itself.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tidings.http.disconnects import RequestReference
from tidings.http.router import Router
from tidings.server import internals as seams
from tidings.server.garbage_collection import spare, sparing

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["build_app", "run_http", "serve_app"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def build_app(live: Live, options: dict[str, Any]) -> Any:
    """The Starlette app of the user's server, with our front where the SDK's session manager is called."""
    server = live.server
    if hasattr(server, "streamable_http_app"):
        app = server.streamable_http_app(**options)
        manager = server.session_manager
        manager.asgi_app = Router(live, manager)

        def take_place() -> Any:
            return manager
    else:
        app = server.http_app(**options)
        endpoint = seams.fastmcp_endpoint(app)

        def take_place() -> Any:
            # FastMCP makes a session manager with every start of the app.
            manager = endpoint.session_manager
            manager.asgi_app = Router(live, manager)
            return manager

    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(started: Any) -> AsyncIterator[Any]:  # the app, or another one that it is mounted in
        _add_request_reference(app)
        async with inner(started) as state:
            live.restart()
            # Read before the first client: one that only listens would otherwise be told of all that was there.
            await live.attend(seams.lifespan_state_of(take_place()))
            with _on_signal(live.stop):
                try:
                    yield state
                finally:
                    live.stop()

    app.router.lifespan_context = lifespan
    return app


def _add_request_reference(app: Any) -> None:
    """Put `RequestReference` before the app's own middleware, all of which is known when the app starts."""
    if app.user_middleware and not isinstance(app.middleware_stack, RequestReference):
        app.middleware_stack = RequestReference(app.middleware_stack or app.build_middleware_stack())


@contextmanager
def _on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the event loop when the process is told to end, before whoever handled the signal so far."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; its owner then stops us through the app's shutdown
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def handle(number: int, frame: Any) -> None:
        loop.call_soon_threadsafe(stop)
        previous = before[signal.Signals(number)]
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, previous in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, previous)


def run_http(
    live: Live, *, host: str = "127.0.0.1", port: int = 8000, log_level: str | int | None = "info", **options: Any
) -> None:
    if hasattr(live.server, "streamable_http_app"):
        options.setdefault("host", host)
    logs_access = _logs_access(log_level)
    serve_app(live.http_app(**options), host=host, port=port, log_level=log_level, access_log=logs_access)


def _logs_access(level: str | int | None) -> bool:
    """Whether a level lets lines about requests through: uvicorn would put each together even if it is dropped."""
    if isinstance(level, str):
        return level.lower() in ("trace", "debug", "info")
    return level is None or level <= logging.INFO


def serve_app(
    app: Any,
    *,
    sockets: list[socket.socket] | None = None,
    on_signal: Callable[[], None] | None = None,
    **options: Any,
) -> None:
    """Run uvicorn around an app of ours until the process is told to stop, which calls `on_signal` first. `options` are
    those of `uvicorn.Config`."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            gc.collect()
            spare()

        def handle_exit(self, sig: int, frame: Any) -> None:
            if on_signal is not None:
                on_signal()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=1,  # streams end by themselves; a request that hangs must not keep the process
        **options,
    )
    with sparing(), suppress(KeyboardInterrupt):  # which uvicorn raises anew once everything has ended
        Server(config).run(sockets=sockets)
