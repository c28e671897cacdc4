"""Streams that are opened at their connection, in our own process: the same promises as on the whole way, byte by byte.

The whole way is through uvicorn's request and ASGI. A request that names the address of a proxy's client always takes
it, so that the same one can be sent both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import json
import logging
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from starlette.middleware import Middleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.faults.wire import Stream
from tests.loops import anyio_backend
from tests.servers.door import META, Door, Line, open_door, some_server
from tests.servers.ears import DEADLINE
from tidings import Feature, LimitReached, Policy
from tidings.lanes.answers import known_door
from tidings.lanes.app import _protocol
from tidings.lanes.listen import ListenLane
from tidings.lanes.parked import Parked

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio

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


async def until(is_so: Any) -> None:
    async with asyncio.timeout(DEADLINE):
        while not is_so():  # noqa: ASYNC110  # of what others do there is no event
            await asyncio.sleep(0.01)


def listens(line: Line, request_id: Any = 1, wanted: Any = None, meta: Any = None, **headers: str | None) -> bytes:
    params = {"notifications": TOOLS if wanted is None else wanted, "_meta": {**META, **(meta or {})}}
    return line.asks("subscriptions/listen", request_id, params, **headers)


# The same bytes

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
async def test_a_stream_begins_with_the_same_bytes_on_either_way(case: str, tried: list[bool]) -> None:
    async with opening() as door:
        said = []
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                said.append(await response(line, listens(line, **ACCEPTED[case], **headers)))
                assert streams(door) == [Parked]
            await until(lambda: not streams(door))
        assert tried == [True, True]
        assert said[0] == said[1] == said[2]
        assert door.live.gate.count == 0
        assert door.server.server_state.total_requests == 3 + 2  # the first were the door's own


REFUSED: dict[str, dict[str, Any]] = {
    "nothing wanted": {"wanted": {}},
    "nothing allowed": {"wanted": {"promptsListChanged": True}},
    "too many URIs": {"wanted": {"resourceSubscriptions": ["door://r", "door://s"]}},
    "no list of URIs": {"wanted": {"resourceSubscriptions": "door://r"}},
    "no object": {"wanted": []},
    "an id that is none": {"request_id": True},
    "another version in the body": {"meta": {"io.modelcontextprotocol/protocolVersion": "2025-11-25"}},
    "another method in the header": {"Mcp_Method": "tools/list"},
    "another host": {"Host": "evil.example"},
    "another origin": {"Origin": "https://evil.example"},
    "no event stream": {"Accept": "application/json"},
    "another type": {"Content_Type": "text/plain"},
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_refused_with_the_same_bytes_on_either_way(case: str, tried: list[bool]) -> None:
    policy = Policy(max_uris=1, list_memory=3600)
    asked = []

    def authorize(principal: Any, topic: Any) -> bool:
        asked.append(topic)
        return topic is not Feature.PROMPTS

    async with opening(policy=policy, authorize=authorize) as door:
        asked.clear()
        said = []
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                request = listens(line, **{**REFUSED[case], **headers})
                said.append(await response(line, request, is_stream=False))
        assert said[0] == said[1] == said[2]
        assert (True in tried) is case.startswith("nothing"), "errors are worded on the whole way"
        assert asked == ([Feature.PROMPTS] * 3 if case == "nothing allowed" else [])
        assert not streams(door)
        assert door.live.gate.count == 0


async def test_a_body_that_is_no_text_is_refused_with_the_same_bytes(tried: list[bool]) -> None:
    async with opening() as door:
        said = []
        for headers in ({}, WHOLE_WAY):
            async with door.line() as line:
                request = listens(line, "mine", **headers).replace(b"mine", b"\xff\xffne")
                said.append(await response(line, request, is_stream=False))
        assert said[0] == said[1]
        assert b"400" in said[0][0]


@pytest.mark.parametrize("knob", ["max_streams", "max_streams_per_address"])
async def test_one_stream_too_many_is_refused_with_the_same_bytes(knob: str, tried: list[bool]) -> None:
    async with opening(policy=Policy().but(**{knob: 2})) as door, door.line() as one, door.line() as other:
        await response(one, listens(one))
        await response(other, listens(other))
        said = []
        for headers in ({}, WHOLE_WAY):
            async with door.line() as line:
                said.append(await response(line, listens(line, **headers), is_stream=False))
        assert said[0] == said[1]
        assert b"503" in said[0][0]
        assert tried == [True, True, False]
        one.writer.close()
        await until(lambda: door.live.gate.count == 1)
        async with door.line() as line:
            await response(line, listens(line))
        assert tried[-1]


async def test_whose_address_a_proxy_names_is_counted_by_it(tried: list[bool]) -> None:
    async with opening(policy=Policy(max_streams_per_address=1)) as door, door.line() as one, door.line() as other:
        await response(one, listens(one))
        await response(other, listens(other, X_Forwarded_For="192.0.2.1"))
        assert tried == [True]
        async with door.line() as line:
            assert b"503" in (await response(line, listens(line, X_Forwarded_For="192.0.2.1"), is_stream=False))[0]


# What stands before it


async def test_a_new_rule_for_hosts_counts_at_once(tried: list[bool]) -> None:
    async with opening() as door:
        for _ in range(2):
            async with door.line() as line:
                await response(line, listens(line))
        settings = door.live.server.session_manager.security_settings
        settings.allowed_hosts[:] = ["elsewhere"]
        async with door.line() as line:
            assert b"421" in (await response(line, listens(line), is_stream=False))[0]
        assert tried == [True, True]


async def test_a_middleware_of_the_users_sees_every_stream(tried: list[bool]) -> None:
    async with opening() as door:
        seen = []

        async def middleware(ctx: Any, call_next: Any) -> Any:
            seen.append(ctx.method)
            return await call_next(ctx)

        async with door.line() as line:
            await response(line, listens(line))
        door.live.lowlevel.middleware.append(middleware)
        async with door.line() as line:
            await response(line, listens(line))
        assert seen == ["subscriptions/listen"]
        assert tried == [True]


async def test_an_app_with_a_middleware_has_no_shortcut(tried: list[bool]) -> None:
    class Labelled:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(scope, receive, send)

    def prepare(app: Any) -> None:
        app.user_middleware.append(Middleware(Labelled))

    async with opening(prepare=prepare) as door:
        for _ in range(2):
            async with door.line() as line:
                await response(line, listens(line))
                assert streams(door) == [Parked]
            await until(lambda: not streams(door))
        assert known_door(door.server.config) is None
        assert tried == []


# Who may watch what


async def allow_slowly(principal: Any, topic: Any) -> bool:
    async with asyncio.timeout(DEADLINE):  # which works in a task only
        await asyncio.sleep(0)
    return True


class Allowing:
    async def __call__(self, principal: Any, topic: Any) -> bool:
        return await allow_slowly(principal, topic)


@pytest.mark.parametrize(
    "authorize",
    [allow_slowly, functools.partial(allow_slowly), Allowing(), lambda principal, topic: allow_slowly(None, topic)],
    ids=["a function", "a partial one", "an object", "a plain function"],
)
async def test_an_authorization_that_waits_is_waited_for(authorize: Any, tried: list[bool]) -> None:
    async with opening(authorize=authorize) as door:
        for _ in range(3):
            async with door.line() as line:
                assert b'"toolsListChanged":true' in (await response(line, listens(line)))[-1]
        assert tried == [False] * 3


async def test_an_authorization_that_waits_is_asked_once(tried: list[bool]) -> None:
    asked = []

    def authorize(principal: Any, topic: Any) -> Any:
        asked.append(asyncio.ensure_future(allow_slowly(principal, topic)))
        return asked[-1]

    async with opening(authorize=authorize) as door:
        for _ in range(2):
            async with door.line() as line:
                await response(line, listens(line))
        assert len(asked) == 3  # the first was the door's own
        assert all(each.done() for each in asked)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["the first on its connection", "a later one"])
async def test_after_a_refusal_the_connection_goes_on(is_fresh: bool, tried: list[bool]) -> None:
    def authorize(principal: Any, topic: Any) -> bool:
        return topic is not Feature.PROMPTS

    async with opening(authorize=authorize, timeout_keep_alive=DEADLINE) as door:
        async with door.line() as line:  # whose head is remembered
            await line.send(listens(line, wanted={"promptsListChanged": True}))
        tried.clear()
        async with door.line() as line:
            if not is_fresh:
                await line.send(line.asks("tools/list"))
            for request_id in range(3):
                refused = await line.send(listens(line, request_id, {"promptsListChanged": True}))
                assert b"acknowledged" in refused.body
                assert b'"id":%d,"result"' % request_id in refused.body
            assert b"200" in (await line.send(line.asks("tools/list"))).status
            assert door.live.gate.count == 0
            await response(line, listens(line))
            assert streams(door) == [Parked]
        assert tried == [True] * 4


async def test_an_authorization_that_fails_refuses(caplog: pytest.LogCaptureFixture, tried: list[bool]) -> None:
    def authorize(principal: Any, topic: Any) -> bool:
        if topic == "door://r":
            raise ValueError("secret")
        return True

    async with opening(authorize=authorize) as door, door.line() as line:
        said = await response(line, listens(line, wanted=EVERYTHING))
        assert b"resourceSubscriptions" not in said[-1]
        assert b"resourcesListChanged" in said[-1]
        assert tried == [True]
        assert "authorize() failed for 'door://r'" in caplog.text


async def test_what_is_set_for_one_request_ends_with_it(tried: list[bool]) -> None:
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
    seen = []

    def note() -> None:
        span = trace.get_current_span().get_span_context()
        seen.append((mark.get(), format(span.trace_id, "032x") if span.is_valid else None))

    def authorize(principal: Any, topic: Any) -> bool:
        note()
        mark.set("left behind")
        return True

    async with opening(authorize=authorize) as door:
        door.live.hub.last = lambda topic: note()
        seen.clear()
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                await response(line, listens(line, meta={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, **headers))
            await until(lambda: not streams(door))
        assert seen == [("none", TRACE), ("none", None)] * 3  # asked, and gone
        assert tried == [True] * 2


class Thing:
    """Something that can be seen to be gone."""


async def test_nothing_of_the_first_request_is_kept_for_the_streams_after_it() -> None:
    """Its keep-alives are timed for all of them."""
    mark: contextvars.ContextVar[Thing] = contextvars.ContextVar("mark")
    things: list[weakref.ref[Thing]] = []

    def authorize(principal: Any, topic: Any) -> bool:
        if not things:
            thing = Thing()
            things.append(weakref.ref(thing))
            mark.set(thing)
        return True

    async with opening(authorize=authorize) as door, door.line() as second:
        async with door.line() as first:
            await response(first, listens(first))
            await response(second, listens(second))
        await until(lambda: len(streams(door)) == 1)
        gc.collect()
        assert [thing() for thing in things] == [None]


# The connection


@pytest.mark.parametrize("is_seen", [True, False], ids=["a form that was seen", "a new one"])
async def test_a_stream_is_opened_on_a_connection_that_was_used_before(is_seen: bool, tried: list[bool]) -> None:
    async with opening(timeout_keep_alive=0.1) as door:
        if is_seen:
            async with door.line() as line:
                await response(line, listens(line))
        tried.clear()
        async with door.line() as line:
            await line.send(line.asks("tools/list"))
            await response(line, listens(line))
            assert tried == [True]
            async with door.line() as other:  # idle for as long as a connection may be
                await other.send(other.asks("tools/list"))
                assert await other.ended()
            door.live.tools.add(lambda: "", name="new")
            with anyio.fail_after(DEADLINE):
                told = await Stream(line.reader, line.writer).event()
            assert told is not None
            assert told["params"]["tool"]["name"] == "new"


@pytest.mark.parametrize("behind", ["a request", "the beginning of one"])
async def test_a_stream_with_something_behind_it_is_not_opened_there(behind: str, tried: list[bool]) -> None:
    async with opening() as door:
        async with door.line() as other:
            await response(other, listens(other))
        await until(lambda: not door.server.server_state.connections)
        async with door.line() as line:
            rest = line.asks("tools/list", 2) if behind == "a request" else b"POST /mcp"
            await response(line, listens(line) + rest)
            assert tried == [True]
            (connection,) = door.server.server_state.connections
            assert isinstance(connection, HttpToolsProtocol)
        await until(lambda: not door.server.server_state.connections)
        assert (door.live.gate.count, streams(door)) == (0, [])


@pytest.mark.parametrize("step", [1, 7, 400])
async def test_it_makes_no_difference_in_which_pieces_a_request_comes(step: int) -> None:
    async with opening() as door, door.line() as line:
        request = listens(line)
        for start in range(0, len(request) - step, step):
            line.writer.write(request[start : start + step])
            await line.writer.drain()
            await asyncio.sleep(0)
        rest = len(range(0, len(request) - step, step)) * step
        assert b"acknowledged" in (await response(line, request[rest:]))[-1]


async def test_on_plain_asgi_a_stream_whose_request_comes_in_two_pieces_is_parked_too() -> None:
    """Its beginning was read before Starlette's layers, and the way to its connection is still known behind them."""
    async with open_door(some_server(), "asgi") as door:
        async with door.line() as line:
            await response(line, listens(line))  # from here on, the form is known
        await until(lambda: not door.server.server_state.connections)
        async with door.line() as line:
            request = listens(line)
            line.writer.write(request[:-10])
            connections: Any = door.server.server_state.connections
            await until(lambda: any(each.cycle for each in connections))
            assert b"acknowledged" in (await response(line, request[-10:]))[-1]
            assert streams(door) == [Parked]


async def test_a_connection_on_which_nothing_came_leaves_nothing_behind() -> None:
    async with opening() as door:
        connections = door.server.server_state.connections
        await until(lambda: not connections)
        async with door.line():
            await until(lambda: len(connections) == 1)
            assert [type(each).__mro__[1] for each in connections] == [_protocol()]
        await until(lambda: not connections)


async def test_a_server_that_stops_ends_a_connection_on_which_nothing_came() -> None:
    async with opening() as door, door.line() as line:
        await until(lambda: len(door.server.server_state.connections) == 1)
        door.server.should_exit = True
        assert await line.ended()


async def test_a_server_that_stops_opens_no_stream_there(tried: list[bool]) -> None:
    async with opening() as door, door.line() as line:
        door.live.is_stopping = True
        said = await response(line, listens(line), is_stream=False)
        assert b"acknowledged" in said[-1]
        assert b'"resultType":"complete"' in said[-1]
        assert tried == [False]


async def test_a_reader_that_vanishes_is_noticed_by_the_kernel(tried: list[bool]) -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        pytest.skip("Linux has it")
    policy = Policy(write_deadline=7, keep_alive=5)
    async with opening(policy=policy) as door:
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                await response(line, listens(line, **headers))
                [parked] = door.server.server_state.connections
                assert isinstance(parked, Parked)
                connection = parked._transport.get_extra_info("socket")
                assert connection.getsockopt(socket.IPPROTO_TCP, option) == 12_000
            await until(lambda: not streams(door))
        assert tried == [True, True]


FAILURES = [RuntimeError("a defect"), LimitReached("a limit")]


@pytest.mark.parametrize("failure", FAILURES, ids=["a defect", "a limit"])
async def test_what_fails_before_a_stream_is_parked_goes_the_whole_way(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    async with opening() as door:
        monkeypatch.setattr("tidings.lanes.listen.honour_at_once", fail)
        for _ in range(2):  # a new form, and one that was seen
            async with door.line() as line:
                assert b"acknowledged" in (await response(line, listens(line)))[-1]
                assert streams(door) == [Parked]
            await until(lambda: not streams(door))
        assert door.live.gate.count == 0
        assert ("could not be opened at its connection" in caplog.text) is (failure is FAILURES[0])


@pytest.mark.parametrize("failure", FAILURES, ids=["a defect", "a limit"])
async def test_what_fails_once_a_stream_is_parked_ends_the_connection(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    async with opening() as door:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(ListenLane, "_begin", fail)
                async with door.line() as line:
                    line.writer.write(listens(line))
                    async with asyncio.timeout(DEADLINE):
                        with contextlib.suppress(ConnectionResetError):
                            assert (await line.reader.read()).count(b"HTTP/1.1") <= 1
            await until(lambda: not door.server.server_state.connections)
            assert door.live.gate.count == 0
            async with door.line() as line:  # whose head is remembered
                await response(line, listens(line))
            await until(lambda: not streams(door))
        assert caplog.text.count("could not be opened at its connection") == 2


async def test_the_log_of_requests_has_streams_too(caplog: pytest.LogCaptureFixture, tried: list[bool]) -> None:
    caplog.set_level(logging.INFO, "uvicorn.access")
    async with opening(access_log=True) as door:
        caplog.clear()
        for headers in ({}, {}, WHOLE_WAY):
            async with door.line() as line:
                await response(line, listens(line, **headers))
        said = [record.getMessage().partition(" - ")[2] for record in caplog.records if record.name == "uvicorn.access"]
        assert said == ['"POST /mcp HTTP/1.1" 200'] * 3
        assert tried == [True, True]


async def test_all_who_ask_the_same_are_told_as_if_they_were_alone() -> None:
    """What is remembered of a request is shared: nobody's changes it."""
    async with opening() as door, door.line() as first, door.line() as second:
        for request_id, line in enumerate((first, second)):
            said = await response(line, listens(line, request_id, EVERYTHING))
            meta = json.loads(said[-1].split(b"data: ")[1])["params"]["_meta"]
            assert meta["io.modelcontextprotocol/subscriptionId"] == request_id
        first.writer.close()
        await until(lambda: len(streams(door)) == 1)
        door.live.resources.updated("door://r")
        with anyio.fail_after(DEADLINE):
            told = await Stream(second.reader, second.writer).event()
        assert told is not None
        assert told["method"] == "notifications/resources/updated"
