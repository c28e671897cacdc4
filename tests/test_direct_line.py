"""Legacy streams, which stay responses: events take the direct line to the connection only if nobody would see them on
the way.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faults.wire import get_request, open_session
from tests.support.loops import anyio_backend
from tests.support.streams import Capitals, Labelled, Server, connected, event, rest, serving
from tidings.lanes.parked import DirectLine

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio


class Seeing:
    """A middleware that changes a few events only."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.seen = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.body" and scope["method"] == "GET":
                self.seen += b"edition" in message["body"]
                message = {**message, "body": message["body"].replace(b"edition 2", b"edition X")}
            await send(message)

        await self._app(scope, receive, changed if scope["type"] == "http" else send)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What went out on direct lines."""
    written: list[bytes] = []

    def noted(self: DirectLine, chunk: bytes) -> bool:
        is_written = write(self, chunk)
        written.extend([chunk] if is_written else [])
        return is_written

    write = DirectLine.write
    monkeypatch.setattr(DirectLine, "write", noted)
    return written


async def legacy_editions(server: Server) -> list[str]:
    """What a legacy client is told of three changes."""
    session_id = await open_session(server.address[1])
    told = []
    async with connected(server, get_request(session_id)) as (stream, _):
        for number in range(3):
            server.change(f"edition {number}")
            told.append((await event(stream))["params"]["tool"]["description"])
        server.live.stop()
        assert await rest(stream) == []
        assert stream.is_terminated
    return told


EDITIONS = ["edition 0", "edition 1", "edition 2"]


@pytest.mark.parametrize("http", [{}, {"http": "httptools"}], ids=["our protocol", "uvicorn's"])
@pytest.mark.parametrize("middleware", [(), (Labelled,), (Capitals,)], ids=["none", "labelled", "capitals"])
async def test_events_take_the_direct_line_only_if_nobody_else_would_see_them(
    middleware: tuple[Any, ...], http: dict[str, str], direct: list[bytes]
) -> None:
    async with serving(*middleware, **http) as server:
        assert await legacy_editions(server) == EDITIONS
    assert len(direct) == (0 if middleware else 3), "what each stream begins with shows how it arrives"


@pytest.mark.parametrize("is_around", [True, False], ids=["around the app", "in the app"])
async def test_a_middleware_sees_and_may_change_every_event(is_around: bool, direct: list[bytes]) -> None:
    seeing: list[Seeing] = []

    def made(app: Any) -> Seeing:
        seeing.append(Seeing(app))
        return seeing[-1]

    async with serving(*([] if is_around else [made]), around=made if is_around else None, http="httptools") as server:
        assert await legacy_editions(server) == [*EDITIONS[:2], "edition X"]
    assert sum(each.seen for each in seeing) == 3
    assert direct == []
