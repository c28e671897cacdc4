"""Opening listen streams: what is accepted, what is refused, and what a request leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import json
import socket
import weakref
from typing import Any

import anyio
import pytest

from tests.support.faults.wire import Stream
from tests.support.http_server import META, Door, Line, open_door, some_server
from tests.support.loops import anyio_backend
from tests.support.sdk_clients import DEADLINE
from tests.support.waiting import until
from tidings import Feature, LimitReached, Policy
from tidings.http.listen import ListenStream
from tidings.http.parking import ParkedStream

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

TOOLS = {"toolsListChanged": True}
EVERYTHING = {**TOOLS, "promptsListChanged": True, "resourcesListChanged": True, "resourceSubscriptions": ["door://r"]}


def listens(line: Line, request_id: Any = 1, wanted: Any = None, meta: Any = None, **headers: str | None) -> bytes:
    params = {"notifications": TOOLS if wanted is None else wanted, "_meta": {**META, **(meta or {})}}
    return line.asks("subscriptions/listen", request_id, params, **headers)


async def response(line: Line, request: bytes) -> list[bytes]:
    """Return the lines of the head, but for the date, and the first event."""
    line.writer.write(request)
    async with asyncio.timeout(DEADLINE):
        head = (await line.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        size = await line.reader.readline()
        event = await line.reader.readexactly(int(size, 16) + 2)
    return [*(each for each in head if not each.startswith(b"date:")), event]


def outlets(door: Door) -> list[type]:
    return [type(stream.response) for stream in door.live.listen_streams]


# What is accepted

ACCEPTED: dict[str, dict[str, Any]] = {
    "a list": {},
    "all there is": {"wanted": EVERYTHING},
    "a pattern": {"wanted": {"resourceSubscriptions": ["door://*"]}},
    "a text as id": {"request_id": "mine"},
    "an id to be escaped": {"request_id": 'ä"\u2028'},
    "a large id": {"request_id": 2**70},
    "a cursor": {"meta": {"dev.tidings/resume": {"epoch": "other", "topics": {"tools": None}}}},
    "terms": {"meta": {"dev.tidings/filter": {"names": ["a*"], "bookmarks": True}}},
    "the extension": {
        "meta": {"io.modelcontextprotocol/clientCapabilities": {"extensions": {"dev.tidings/changes": {}}}}
    },
    "another header": {"X_Other": "yes"},
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_same_request_opens_the_same_stream_again(case: str) -> None:
    """The second time, the checks of headers and params are cached."""
    responses = []
    async with open_door(some_server()) as door:
        for _ in range(2):
            async with door.line() as line:
                responses.append(await response(line, listens(line, **ACCEPTED[case])))
                assert outlets(door) == [ParkedStream]
            await until(lambda: not outlets(door))
        assert door.live.subscriptions.limits.count == 0
        assert door.server.server_state.total_requests == 2
    assert responses[0] == responses[1]
    acknowledged = json.loads(responses[0][-1].split(b"data: ")[1])["params"]["_meta"]
    assert acknowledged["io.modelcontextprotocol/subscriptionId"] == ACCEPTED[case].get("request_id", 1)


async def test_client_that_leaves_does_not_change_the_stream_of_another_with_the_same_request() -> None:
    """Requests with the same params share what is remembered of them."""
    async with open_door(some_server()) as door, door.line() as first, door.line() as second:
        for request_id, line in enumerate((first, second)):
            await response(line, listens(line, request_id, EVERYTHING))
        first.writer.close()
        await until(lambda: len(outlets(door)) == 1)
        door.live.resources.updated("door://r")
        with anyio.fail_after(DEADLINE):
            told = await Stream(second.reader, second.writer).event()
        assert told is not None
        assert told["method"] == "notifications/resources/updated"
        assert told["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == 1


async def test_stream_whose_request_comes_in_two_pieces_is_parked() -> None:
    async with open_door(some_server()) as door, door.line() as line:
        request = listens(line)
        line.writer.write(request[:-10])
        connections: Any = door.server.server_state.connections
        await until(lambda: any(each.cycle for each in connections))
        assert b"acknowledged" in (await response(line, request[-10:]))[-1]
        assert outlets(door) == [ParkedStream]


# What is refused

REFUSED: dict[str, tuple[bytes, dict[str, Any]]] = {
    "nothing wanted": (b"200", {"wanted": {}}),
    "nothing allowed": (b"200", {"wanted": {"promptsListChanged": True}}),
    "too many URIs": (b"400", {"wanted": {"resourceSubscriptions": ["door://r", "door://s"]}}),
    "no list of URIs": (b"400", {"wanted": {"resourceSubscriptions": "door://r"}}),
    "no object": (b"400", {"wanted": []}),
    "an id that is none": (b"400", {"request_id": True}),
    "another version in the body": (b"400", {"meta": {"io.modelcontextprotocol/protocolVersion": "2025-11-25"}}),
    "another method in the header": (b"400", {"Mcp_Method": "tools/list"}),
    "another host": (b"421", {"Host": "evil.example"}),
    "another origin": (b"403", {"Origin": "https://evil.example"}),
    "no event stream": (b"406", {"Accept": "application/json"}),
    "another type": (b"400", {"Content_Type": "text/plain"}),
    "a body that is no text": (b"400", {"request_id": "mine"}),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused_request_gets_its_error_and_the_connection_goes_on(case: str) -> None:
    """Twice, so that nothing that was refused once is remembered as good."""
    asked = []

    def authorize(principal: Any, topic: Any) -> bool:
        asked.append(topic)
        return topic is not Feature.PROMPTS

    policy = Policy(max_uris=1, list_memory=3600)
    async with open_door(some_server(), policy=policy, authorize=authorize) as door, door.line() as line:
        status, changes = REFUSED[case]
        request = listens(line, **changes)
        if case == "a body that is no text":
            request = request.replace(b"mine", b"\xff\xffne")
        first, second = await line.send(request), await line.send(request)
        assert first == second
        assert status in first.status
        assert (b"acknowledged" in first.body) is case.startswith("nothing")
        assert asked == ([Feature.PROMPTS] * 2 if case == "nothing allowed" else [])
        assert door.live.subscriptions.limits.count == 0
        await response(line, listens(line))
        assert outlets(door) == [ParkedStream]


@pytest.mark.parametrize("setting", ["max_streams", "max_streams_per_address"])
async def test_stream_past_a_limit_is_refused_until_another_ends(setting: str) -> None:
    async with open_door(some_server(), policy=Policy().but(**{setting: 1})) as door, door.line() as one:
        await response(one, listens(one))
        async with door.line() as line:
            assert b"503" in (await line.send(listens(line))).status
        one.writer.close()
        await until(lambda: door.live.subscriptions.limits.count == 0)
        async with door.line() as line:
            await response(line, listens(line))


async def test_client_behind_a_proxy_is_counted_by_the_address_that_the_proxy_names() -> None:
    policy = Policy(max_streams_per_address=1)
    async with open_door(some_server(), policy=policy) as door, door.line() as one, door.line() as other:
        await response(one, listens(one))
        await response(other, listens(other, X_Forwarded_For="192.0.2.1"))
        async with door.line() as line:
            assert b"503" in (await line.send(listens(line, X_Forwarded_For="192.0.2.1"))).status


async def test_mcp_middleware_sees_every_stream() -> None:
    seen = []

    async def middleware(ctx: Any, call_next: Any) -> Any:
        seen.append(ctx.method)
        return await call_next(ctx)

    async with open_door(some_server()) as door:
        async with door.line() as line:
            await response(line, listens(line))
        door.live.lowlevel.middleware.append(middleware)
        async with door.line() as line:
            await response(line, listens(line))
    assert seen == ["subscriptions/listen"]


async def test_authorization_that_has_to_be_awaited_is_awaited_once_for_each_stream() -> None:
    asked = []

    async def allow(principal: Any, topic: Any) -> bool:
        async with asyncio.timeout(DEADLINE):
            await asyncio.sleep(0)
        return True

    def authorize(principal: Any, topic: Any) -> Any:
        asked.append(asyncio.ensure_future(allow(principal, topic)))
        return asked[-1]

    async with open_door(some_server(), authorize=authorize) as door:
        for _ in range(2):
            async with door.line() as line:
                assert b'"toolsListChanged":true' in (await response(line, listens(line)))[-1]
    assert len(asked) == 2
    assert all(each.done() for each in asked)


# What a request leaves behind


@pytest.mark.parametrize("failure", [RuntimeError("a defect"), LimitReached("a limit")], ids=["a defect", "a limit"])
async def test_failure_after_parking_ends_the_connection(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise failure

    async with open_door(some_server()) as door:
        with monkeypatch.context() as patch:
            patch.setattr(ListenStream, "subscribe", fail)
            async with door.line() as line:
                line.writer.write(listens(line))
                async with asyncio.timeout(DEADLINE):
                    with contextlib.suppress(ConnectionResetError):
                        assert (await line.reader.read()).count(b"HTTP/1.1") <= 1
        await until(lambda: not door.server.server_state.connections)
        assert door.live.subscriptions.limits.count == 0
        async with door.line() as line:
            await response(line, listens(line))


async def test_kernel_notices_a_reader_that_vanished() -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("Linux has it")
    policy = Policy(write_deadline=7, keep_alive=5)
    async with open_door(some_server(), policy=policy) as door, door.line() as line:
        await response(line, listens(line))
        [parked] = door.server.server_state.connections
        assert isinstance(parked, ParkedStream)
        connection = parked._transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, option) == 12_000


class Thing:
    """An object that a weak reference can follow."""


async def test_context_of_the_first_stream_ends_with_it() -> None:
    """Its keep-alives are timed for all streams after it."""
    mark: contextvars.ContextVar[Thing] = contextvars.ContextVar("mark")
    things: list[weakref.ref[Thing]] = []

    def authorize(principal: Any, topic: Any) -> bool:
        if not things:
            thing = Thing()
            things.append(weakref.ref(thing))
            mark.set(thing)
        return True

    async with open_door(some_server(), authorize=authorize) as door, door.line() as second:
        async with door.line() as first:
            await response(first, listens(first))
            await response(second, listens(second))
        await until(lambda: len(outlets(door)) == 1)
        gc.collect()
        assert [thing() for thing in things] == [None]
