"""The tools of every server of the bench, and the commands that change them.

    POST /change?version=N&count=K   the tool `zz_changing` becomes "Version N", then N + 1 … N + K - 1
    POST /touch?uri=U&count=K        the content of a resource changes, K times
    POST /control                    returns a port that takes the same as a line, `change N K` or `touch U K`, and
                                     answers with an empty line: without the cost of HTTP

Over stdio, the tool `touch` changes the contents of COUNT different resources, so that a server cannot combine their
notifications. Over HTTP, the first line of standard output is the port.
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
"""Clients on stdio subscribe to it; the touched resources are below it."""

CHANGING = "zz_changing"
"""The only tool that changes. It is the last of the list, in order of registration and of names."""

PATIENT: dict[str, Any] = {"timeout_keep_alive": 120, "access_log": False}
"""Options of uvicorn: a long idle timeout, and no access log. The slowest server takes ten seconds to answer all
clients once; with the default of 5 seconds, it would have closed the first connections by then."""

DESCRIPTION = "Finds the tickets of one sprint that mention a text, newest first."

Change = Callable[[int], Awaitable[None]]
Touch = Callable[[str], Awaitable[None]]


def find_tickets(sprint: int, text: str = "", limit: int = 20) -> str:
    return f"nothing in sprint {sprint} mentions {text!r}"[:limit]


def version_text(version: int) -> str:
    """Return a description of fixed length, so that the floor can write it into recorded bytes."""
    return f"Version {version:06} of a tool that changes."


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=["http", "stdio"])
    parser.add_argument("--tools", type=int, default=10)
    parser.add_argument("--own-process", action="store_true", help="Tidings: with `live.run()`")
    return parser.parse_args()


def controls(route: Callable[..., Any], change: Change, touch: Touch) -> None:
    """Add the routes of the commands; `route` is the server's `custom_route`."""

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
    """A connection that takes change commands, one line each."""

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
        except Exception as error:  # the client reports it
            failure = f"{type(error).__name__}: {error}"
        self._transport.write(failure.encode() + b"\n")


def read_query(request: Request) -> dict[str, str]:
    """Return the query parameters. The load client escapes nothing, so this is cheaper than a parser."""
    query: bytes = request.scope["query_string"]
    return dict(part.split("=", 1) for part in query.decode().split("&"))


def listening_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=4096)


def announce(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def serve_plainly(app: Any) -> None:
    """Serve as `uvicorn app:app` does, without an access log and with a long idle timeout."""
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
