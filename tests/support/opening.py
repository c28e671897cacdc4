"""Streams that are opened at their connection, in our own process, and on the whole way.

The whole way is through uvicorn's request and ASGI. A request that names the address of a proxy's client always takes
it, so that the same one can be sent both ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.http_server import META, Door, Line, open_door, some_server
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings.lanes.listen import ListenLane

WHOLE_WAY = {"X_Forwarded_For": "127.0.0.1"}
TOOLS = {"toolsListChanged": True}
EVERYTHING = {**TOOLS, "promptsListChanged": True, "resourcesListChanged": True, "resourceSubscriptions": ["door://r"]}
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each stream that was to be opened at its connection, whether it was, or was refused there."""
    found: list[bool] = []
    serve = ListenLane.serve_at_once

    def serve_at_once(*args: Any) -> bool:
        found.append(serve(*args))
        return found[-1]

    monkeypatch.setattr(ListenLane, "serve_at_once", serve_at_once)
    return found


@asynccontextmanager
async def opening(**options: Any) -> AsyncIterator[Door]:
    """A server of our own process that has had one stream before. The next one's head is read and remembered, and
    from then on known by its bytes."""
    async with open_door(some_server(), "connection", **options) as door:
        async with door.line() as line:
            await response(line, listens(line, 0))
        await until(lambda: not streams(door))
        yield door


async def response(line: Line, request: bytes, *, is_stream: bool = True) -> list[bytes]:
    """The lines of the head, but for the date, and the first event or all of the body."""
    line.writer.write(request)
    if not is_stream:
        answer = await line.answer()
        return [answer.status, *(b"%b: %b" % header for header in answer.headers), answer.body]
    async with asyncio.timeout(DEADLINE):
        head = (await line.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        size = await line.reader.readline()
        event = await line.reader.readexactly(int(size, 16) + 2)
    return [*(each for each in head if not each.startswith(b"date:")), size, event]


def streams(door: Door) -> list[type]:
    return [type(stream.channel) for streams in door.live.listen._streams for stream in streams]


def listens(line: Line, request_id: Any = 1, wanted: Any = None, meta: Any = None, **headers: str | None) -> bytes:
    params = {"notifications": TOOLS if wanted is None else wanted, "_meta": {**META, **(meta or {})}}
    return line.asks("subscriptions/listen", request_id, params, **headers)
