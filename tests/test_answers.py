"""Lists answered at the connection: HTTP is as uvicorn speaks it, and what is not answered there never shows that it
was held back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.servers.board import Own
from tests.servers.door import FRONTS, META, Answer, Door, Line, modern, open_door, some_server
from tests.servers.ears import MODERN
from tests.waiting import until
from tidings.lanes import answers
from tidings.lanes.answers import QuickAnswers

pytestmark = pytest.mark.anyio

LISTED = modern("tools/list")
FIRST_LINE = "POST /mcp HTTP/1.1"


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with open_door(some_server(), "connection") as door:
        await warm(door)
        yield door


async def warm(door: Door) -> None:
    for _ in range(3):
        await door.send(lambda line: line.asks("tools/list"))


def ids(answers: list[Any]) -> list[Any]:
    return [json.loads(answer.body)["id"] for answer in answers]


async def test_one_connection_is_kept_for_many_requests(door: Door) -> None:
    before = door.counts["connection"]
    async with door.line() as line:
        told = [await line.send(line.asks("tools/list", number)) for number in range(20)]
    assert ids(told) == list(range(20))
    assert door.counts["connection"] == before + 20


async def test_an_idle_connection_ends_when_uvicorn_would_end_it() -> None:
    async with open_door(some_server(), "connection", timeout_keep_alive=0) as door:
        for _ in range(3):
            async with door.line() as line:
                await line.send(line.asks("tools/list"))
                assert await line.ended()
        assert door.counts["connection"] > 0


async def test_requests_behind_one_another_are_answered_in_their_order(door: Door) -> None:
    call = modern("tools/call", "call", params={"name": "clock", "arguments": {}})
    async with door.line() as line:
        named = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/call", "Mcp_Name": "clock"}
        parts = [line.asks("tools/list", 1), line.asks("tools/list", 2), line.request(call, **named)]
        parts += [line.asks("tools/list", 3), line.request(call, **named), line.asks("tools/list", 4)]
        line.writer.write(b"".join(parts))
        told = [await line.answer() for _ in parts]
        assert ids(told) == [1, 2, "call", 3, "call", 4]
        assert ids([await line.send(line.asks("tools/list", 5))]) == [5]


@pytest.mark.parametrize("step", [1, 7, 100])
async def test_it_makes_no_difference_in_which_pieces_a_request_comes(door: Door, step: int) -> None:
    async with door.line() as line:
        whole = await line.send(line.asks("tools/list"))
        raw = b"\r\n" + line.asks("tools/list") + line.asks("tools/list")
        line.writer.transport.get_extra_info("socket").setsockopt(6, 1, 1)  # no piece waits for the next
        for start in range(0, len(raw), step):
            line.writer.write(raw[start : start + step])
            await anyio.lowlevel.checkpoint()
        assert [await line.answer(), await line.answer()] == [whole, whole]


@pytest.mark.parametrize(
    "case", ["HTTP/1.0", "HTTP/1.0 kept", "close", "chunked", "expect", "upgrade", "GET", "large", "no length"]
)
async def test_what_is_not_plain_http_is_uvicorns(door: Door, case: str) -> None:
    async with open_door(some_server(), "asgi") as plain:
        plain.live.epoch = door.live.epoch
        await warm(plain)
        said = []
        for each in (plain, door):
            before = each.counts["connection"]
            async with each.line() as line:
                line.writer.write(unusual(line, case))
                answers = [await line.answer()]
                if case == "expect":
                    assert b"100" in answers[0].status
                    line.writer.write(LISTED)
                    answers.append(await line.answer())
                if case in ("HTTP/1.0", "HTTP/1.0 kept", "close"):
                    assert await line.ended()
                else:
                    answers.append(await line.send(line.asks("tools/list", "after")))
            assert each.counts["connection"] - before <= 1  # the one after
            said.append([answer._replace(headers=sorted(answer.headers)) for answer in answers])
        assert said[0] == said[1]


def unusual(line: Line, case: str) -> bytes:
    raw = line.asks("tools/list")
    body = raw.partition(b"\r\n\r\n")[2]
    match case:
        case "HTTP/1.0":
            return raw.replace(b"HTTP/1.1", b"HTTP/1.0")
        case "HTTP/1.0 kept":
            return line.asks("tools/list", Connection="keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0")
        case "close":
            return line.asks("tools/list", Connection="close")
        case "chunked":
            head = line.asks("tools/list", Content_Length=None, Transfer_Encoding="chunked").partition(b"\r\n\r\n")[0]
            return head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        case "expect":
            return line.asks("tools/list", Expect="100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        case "upgrade":
            return line.asks("tools/list", Connection="Upgrade", Upgrade="h2c")
        case "GET":
            return raw.replace(b"POST", b"GET", 1)
        case "large":
            meta = {**META, "dev.example/x": "x" * 100_000}
            named = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/list"}
            return line.request(modern("tools/list", params={"_meta": meta}), **named)
        case _:
            return line.asks("tools/list", Content_Length=None).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


async def test_a_body_that_looks_like_a_request_is_a_body(door: Door) -> None:
    async with door.line() as line:
        raw = line.asks("tools/list")
        assert b"200" in (await line.send(raw)).status
        before = dict(door.counts)
        line.writer.write(line.head(raw, {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/list"}, FIRST_LINE))
        connections: set[Any] = door.server.server_state.connections
        await until(lambda: any(each._claim for each in connections))  # it is held back until its body is there
        assert b"400" in (await line.send(raw)).status
        assert door.counts["connection"] == before["connection"]


async def test_an_idle_connection_that_was_just_answered_lives_on() -> None:
    async with open_door(some_server(), "connection", timeout_keep_alive=0.2) as door, door.line() as line:
        await warm(door)
        await line.send(line.asks("tools/list"))
        began = anyio.current_time()
        while anyio.current_time() < began + 0.5:  # longer than it may be idle, and never idle
            assert b"200" in (await line.send(line.asks("tools/list"))).status
        assert await line.ended()


async def test_a_limit_of_connections_is_uvicorns_to_keep() -> None:
    async with open_door(some_server(), "connection", limit_concurrency=2) as door:
        async with door.line() as first:
            await first.send(first.asks("tools/list"))
            async with door.line() as second:
                answer = await second.send(second.asks("tools/list"))
        assert b"503" in answer.status
        assert door.counts["connection"] == 0


async def test_an_app_under_another_path_is_left_alone() -> None:
    async with open_door(some_server(), "connection", root_path="/below") as door:
        await warm(door)
        assert door.counts["connection"] == 0


async def test_the_log_of_requests_has_them_all(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        told = [record.getMessage().split(" - ", 1)[1] for record in caplog.records if record.name == "uvicorn.access"]
        caplog.clear()
        return told

    with caplog.at_level(logging.INFO, "uvicorn.access"):
        async with open_door(some_server(), "connection", access_log=True, proxy_headers=True) as door:
            await warm(door)
            caplog.clear()
            before = door.counts["connection"]
            await door.send(lambda line: line.asks("tools/list"))
            await door.by_sdk(lambda line: line.asks("tools/list"))
            assert door.counts["connection"] == before + 1
            assert lines() == ['"POST /mcp HTTP/1.1" 200'] * 2

            # Whose address a proxy names is uvicorn's to find out.
            await door.send(lambda line: line.asks("tools/list", X_Forwarded_For="10.1.2.3"))
            assert door.counts["connection"] == before + 1
            assert "10.1.2.3" in caplog.text


async def test_a_request_that_is_half_there_when_the_server_stops_is_still_answered(door: Door) -> None:
    async with door.line() as line:
        raw = line.asks("tools/list")
        await line.send(raw)
        line.writer.write(raw[:-5])
        connections: set[Any] = door.server.server_state.connections
        await until(lambda: any(each._claim for each in connections))
        (protocol,) = connections
        protocol.shutdown()
        answer = await line.send(raw[-5:])
        assert b"200" in answer.status
        assert (b"connection", b"close") in answer.headers
        assert await line.ended()


async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(door: Door) -> None:
    async with door.line() as line:
        line.writer.write(line.asks("tools/list")[:-5])
    await until(lambda: not door.server.server_state.connections)
    assert not door.server.server_state.tasks
    await warm(door)


async def test_a_client_that_does_not_read_is_not_written_to_without_end() -> None:
    server = some_server()
    server.add_tool(lambda: "", name="large", description="x" * 900_000)
    async with open_door(server, "connection") as door, door.line() as deaf:
        await warm(door)
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(40):
            deaf.writer.write(deaf.asks("tools/list", number))
        await warm(door)
        buffered = [each.transport.get_write_buffer_size() for each in door.server.server_state.connections]
        assert max(buffered) < 4_000_000
        deaf.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert ids([await deaf.answer() for _ in range(40)]) == list(range(40))


def test_it_can_stand_before_another_protocol() -> None:
    seen: list[str] = []

    class Other(HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            seen.append(str(self.scope["type"]))
            super().on_headers_complete()

    class Both(QuickAnswers, Other):
        pass

    assert Both.__mro__[1:4] == (QuickAnswers, Other, HttpToolsProtocol)

    async def scenario() -> None:
        async with open_door(some_server(), "asgi") as door:
            door.server.config.http_protocol_class = Both
            await warm(door)
            assert seen
            before = len(seen)
            await warm(door)
            assert len(seen) == before

    asyncio.run(scenario())


# While a list is being made


class Making:
    """A list that changed, and is being made until the test says so."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.may = asyncio.Event()
        self.fails = False
        original = door.live.answered

        async def answered(method: str, version: str) -> dict[str, Any]:
            await self.may.wait()
            if self.fails:
                raise RuntimeError("no")
            return await original(method, version)

        door.live.answered = answered  # type: ignore[method-assign]
        door.live.tools.add(lambda: "", name="new", description="")
        self.before = dict(door.counts)

    @property
    def waiting(self) -> list[Any]:
        connections: set[Any] = self.door.server.server_state.connections
        return [each for each in connections if each._held is not None]

    async def until_waiting(self, number: int) -> None:
        await until(lambda: len(self.waiting) == number)

    def counted(self) -> tuple[int, int]:
        """How many the SDK has answered meanwhile, and how many the connections."""
        return tuple(self.door.counts[key] - self.before[key] for key in ("sdk", "connection"))  # type: ignore[return-value]

    @property
    def doors(self) -> list[Any]:
        return [each for each in answers._doors.values() if each.front is self.door.front]


@asynccontextmanager
async def herd(door: Door, size: int) -> AsyncIterator[tuple[Making, list[Line]]]:
    """Connections whose request for a list that is being made has come, and waits."""
    async with AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(door.line()) for _ in range(size)]
        for number, line in enumerate(lines):  # each was here before
            await line.send(line.asks("tools/list", number))
        making = Making(door)
        for number, line in enumerate(lines):
            line.writer.write(line.asks("tools/list", number))
        await making.until_waiting(size)
        yield making, lines


async def test_a_herd_waits_at_the_connection_for_a_list_that_is_being_made(door: Door) -> None:
    async with herd(door, 5) as (making, lines):
        assert not door.server.server_state.tasks
        making.may.set()
        told = [await line.answer() for line in lines]
        assert making.counted() == (0, 5)
        assert ids(told) == [0, 1, 2, 3, 4]
        assert all(b'"new"' in answer.body for answer in told)
        assert told[3] == await door.by_sdk(lambda line: line.asks("tools/list", 3))
        assert [each._waiting for each in making.doors] == [{}]


async def test_a_list_that_can_not_be_made_is_asked_for_by_one_of_those_who_wait(door: Door) -> None:
    async with herd(door, 5) as (making, lines):
        making.fails = True
        making.may.set()
        told = [await line.answer() for line in lines]
        assert all(b'"new"' in answer.body for answer in told)
        assert making.counted()[0] == 1


async def test_another_change_meanwhile_keeps_nobody_waiting(door: Door) -> None:
    async with herd(door, 3) as (making, lines):
        door.live.tools.add(lambda: "", name="newer", description="")
        making.may.set()
        told = [await line.answer() for line in lines]
        assert all(b'"newer"' in answer.body for answer in told)
        assert making.counted() == (0, 3)


async def test_one_that_leaves_while_it_waits_leaves_nothing_behind(door: Door) -> None:
    async with herd(door, 3) as (making, lines):
        lines[1].writer.close()
        await making.until_waiting(2)
        [waiting] = making.doors[0]._waiting.values()
        assert len(waiting) == 2
        making.may.set()
        assert ids([await lines[0].answer(), await lines[2].answer()]) == [0, 2]


async def test_one_that_fails_while_it_goes_on_takes_nobody_with_it(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with herd(door, 3) as (making, lines):
        [waiting] = making.doors[0]._waiting.values()
        first = next(iter(waiting))

        def go_on(answers: Any) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(first, "go_on", go_on)
        making.may.set()
        assert ids([await lines[1].answer(), await lines[2].answer()]) == [1, 2]
        assert "a connection failed" in caplog.text


async def test_a_request_behind_one_that_waits_is_answered_after_it(door: Door) -> None:
    async with herd(door, 2) as (making, lines):
        lines[0].writer.write(lines[0].asks("tools/list", "next"))
        await making.until_waiting(1)
        making.may.set()
        assert ids([await lines[0].answer(), await lines[0].answer(), await lines[1].answer()]) == [0, "next", 1]


async def test_one_that_waits_when_the_server_stops_is_still_answered(door: Door) -> None:
    async with herd(door, 1) as (making, [line]):
        [protocol] = making.waiting
        protocol.shutdown()
        making.may.set()
        answer = await line.answer()
        assert b'"new"' in answer.body
        assert (b"connection", b"close") in answer.headers
        assert await line.ended()


async def test_one_that_waits_is_not_idle() -> None:
    async with open_door(some_server(), "connection", timeout_keep_alive=0.2) as door:
        await warm(door)
        async with herd(door, 1) as (making, [line]), door.line() as other:
            began = anyio.current_time()
            while anyio.current_time() < began + 0.5:  # longer than a connection may be idle
                await other.send(other.request(b"", start="GET /nothing HTTP/1.1"))
            making.may.set()
            assert b'"new"' in (await line.answer()).body
            assert await line.ended()


@pytest.mark.parametrize("what", ["middleware", "hosts", "not shared", "route"])
async def test_who_has_to_see_a_request_sees_one_that_waited(door: Door, what: str) -> None:
    async with herd(door, 3) as (making, lines):
        own: Any = Own()
        match what:
            case "middleware":
                door.live.server.middleware.append(own)
            case "hosts":
                door.live.server.session_manager.security_settings.allowed_hosts.clear()
            case "not shared":
                door.live._shared_lists = False
            case _:
                door.app.routes.insert(0, Route("/mcp", lambda request: Response(status_code=418), methods=["POST"]))
        making.may.set()
        told = [await line.answer() for line in lines]
        expected = {"hosts": b"421", "route": b"418"}.get(what, b"200")
        assert all(expected in answer.status for answer in told)
        assert making.counted() == (0 if what == "route" else 3, 0)


# Whatever comes

VALUES = {
    "Host": ["127.0.0.1:80", "localhost:1", "evil.example", ""],
    "Origin": ["http://localhost:5", "http://evil.example", "null"],
    "Accept": ["*/*", "application/*, text/*", "text/event-stream", "application/json;q=1, text/event-stream;q=0.1"],
    "Content_Type": ["application/json; charset=utf-8", "APPLICATION/JSON", "application/jsonx", "text/plain"],
    "MCP_Protocol_Version": ["2025-06-18", "2026-07-28 ", "2031-01-01", ""],
    "Mcp_Method": ["tools/list", "prompts/list", "server/discover", "subscriptions/other", ""],
    "Mcp_Name": ["weather", ""],
    "Mcp_Session_Id": ["nobody", "own", "own"],
    "Traceparent": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"],
    "X_Other": ["x"],
}
HEADERS = st.fixed_dictionaries(
    {}, optional={name: st.none() | st.sampled_from(values) for name, values in VALUES.items()}
)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
TRACES = st.sampled_from(["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1", "x"]) | JSON
METAS = st.just(META) | st.builds(
    lambda meta, traces: {**META, **meta, **traces},
    st.dictionaries(st.sampled_from([*META, "progressToken", "x"]), JSON, max_size=3),
    st.just({}) | st.dictionaries(st.sampled_from(["traceparent", "tracestate"]), TRACES),
)
PARAMS = st.builds(
    lambda meta, more: {"_meta": meta, **more},
    METAS,
    st.just({}) | st.dictionaries(st.sampled_from(["cursor", "x"]), JSON, max_size=1),
)
BODIES = st.builds(
    lambda members, cut: json.dumps(members, ensure_ascii=cut % 2 == 0).encode()[: None if cut < 9 else -1],
    st.fixed_dictionaries(
        {
            "jsonrpc": st.just("2.0") | st.sampled_from(["1.0", 2]),
            "id": st.integers() | st.text(max_size=5) | JSON,
            "method": st.just("tools/list") | st.sampled_from(["prompts/list", "server/discover", "nothing"]),
            "params": PARAMS | JSON,
        },
        optional={"extra": JSON},
    ),
    st.integers(0, 9),
)


@pytest.mark.parametrize("front", FRONTS)
def test_whatever_comes_is_answered_as_the_sdk_would(front: str) -> None:
    with asyncio.Runner() as runner:
        context = open_door(some_server(), front)
        door = runner.run(context.__aenter__())
        runner.run(warm(door))
        session = runner.run(session_of(door))
        before = door.counts["connection"]

        @example(headers={}, body=LISTED)
        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(headers=st.just({}) | HEADERS, body=st.just(LISTED) | BODIES)
        def check(headers: dict[str, str | None], body: bytes) -> None:
            def raw(line: Line) -> bytes:
                named = {"MCP_Protocol_Version": MODERN, "Mcp_Method": "tools/list", **headers}
                if named.get("Mcp_Session_Id") == "own":
                    named |= session
                return line.request(body, **named)

            async def ask() -> None:
                said = without_new_session(await door.by_sdk(raw))
                for _ in range(3):
                    assert without_new_session(await door.send(raw)) == said

            runner.run(ask())

        try:
            check()
        finally:
            runner.run(context.__aexit__(None, None, None))
        assert (door.counts["connection"] >= before + 3) == (front == "connection")


async def session_of(door: Door) -> dict[str, str | None]:
    async with door.line() as line:
        return await line.shake_hands("2025-06-18")


def without_new_session(answer: Answer) -> Answer:
    """The SDK gives an id even to the sessions that it refuses to open."""
    is_refused = b"200" not in answer.status
    return answer._replace(headers=[each for each in answer.headers if not is_refused or each[0] != b"mcp-session-id"])
