"""What every server of the bench serves, and how it is told to change: the same tools, the same controls.

    POST /change?version=N&count=K   the tool `zz_changing` becomes "Version N", then N + 1 … N + K - 1
    POST /touch?uri=U&count=K        the content of a resource is another one, K times
    POST /control                    a port on which the same is said in a line, `change N K` or `touch U K`, and
                                     answered by an empty one: without HTTP, which is nothing of what is measured then

Over stdio, the tool `touch` says that COUNT resources, each another one, have other contents: nothing that a server
tells of those can be told together. The first line of standard output, on HTTP, is the port.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

__all__ = [
    "CHANGING",
    "DESCRIPTION",
    "PATIENT",
    "TOUCHED",
    "Control",
    "announce",
    "controls",
    "find_tickets",
    "listening_socket",
    "read_options",
    "read_query",
    "serve_plainly",
    "version_text",
]

TOUCHED = "bench://item"
"""Clients on stdio subscribe to it; what is touched lies below."""

CHANGING = "zz_changing"
"""The only tool that ever changes, and the last of the list, in the order of coming and of names."""

PATIENT: dict[str, Any] = {"timeout_keep_alive": 120, "access_log": False}
"""How uvicorn is told to leave idle connections open for a while, and to log no request. The slowest server takes ten
seconds to answer a herd once: with uvicorn's 5, it would have closed the herd's first connections by then."""

DESCRIPTION = "Finds the tickets of one sprint that mention a text, newest first."

Change = Callable[[int], Awaitable[None]]
Touch = Callable[[str], Awaitable[None]]


def find_tickets(sprint: int, text: str = "", limit: int = 20) -> str:
    return f"nothing in sprint {sprint} mentions {text!r}"[:limit]


def version_text(version: int) -> str:
    """Of a fixed length, so that the floor can write it into recorded bytes."""
    return f"Version {version:06} of a tool that changes."


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=["http", "stdio"])
    parser.add_argument("--tools", type=int, default=10)
    parser.add_argument("--own-process", action="store_true", help="Tidings: with `live.run()`")
    return parser.parse_args()


def controls(route: Callable[..., Any], change: Change, touch: Touch) -> None:
    """Add the controls; `route` is the server's own `custom_route`."""

    done = Response(b"{}")

    async def on_change(request: Request) -> Response:
        asked = read_query(request)
        first, count = int(asked["version"]), int(asked.get("count", "1"))
        for version in range(first, first + count):
            await change(version)
        return done

    async def on_touch(request: Request) -> Response:
        asked = read_query(request)
        for _ in range(int(asked.get("count", "1"))):
            await touch(asked["uri"])
        return done

    async def on_control(request: Request) -> Response:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: Control(change, touch), "127.0.0.1", 0)
        return Response(str(listener.sockets[0].getsockname()[1]))

    route("/control", methods=["POST"])(on_control)
    route("/change", methods=["POST"])(on_change)
    route("/touch", methods=["POST"])(on_touch)


class Control(asyncio.Protocol):
    """A connection on which a server is told to change, one line at a time."""

    def __init__(self, change: Change, touch: Touch) -> None:
        self._change = change
        self._touch = touch
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as it is
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        task = asyncio.ensure_future(self._follow(*data.decode().split()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, what: str, which: str, count: str) -> None:
        failure = ""
        try:
            for number in range(int(count)):
                await (self._change(int(which) + number) if what == "change" else self._touch(which))
        except Exception as error:  # the client says what it was
            failure = f"{type(error).__name__}: {error}"
        self._transport.write(failure.encode() + b"\n")


def read_query(request: Request) -> dict[str, str]:
    """Of the load client, which escapes nothing. What only the bench needs must not weigh on what it measures."""
    query: bytes = request.scope["query_string"]
    return dict(part.split("=", 1) for part in query.decode().split("&"))


def listening_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=4096)


def announce(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def serve_plainly(app: Any) -> None:
    """As `uvicorn app:app` does, without a line of log per request and patient with idle connections."""
    import uvicorn

    listener = listening_socket()
    announce(listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_level="warning",
        timeout_graceful_shutdown=1,
        **PATIENT,
    )
    uvicorn.Server(config).run(sockets=[listener])
