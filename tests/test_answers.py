"""Lists answered at the connection: HTTP is as uvicorn speaks it, and what is not answered there never shows that it
was held back.

A list that is still being made is in test_answers_waiting, requests at random in test_answers_random.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.support.http_server import META, Door, Line, modern, open_door, some_server
from tests.support.lists import LISTED, ids, warm
from tests.support.lists import quick_door as door
from tests.support.sdk_clients import DEADLINE, MODERN
from tests.support.waiting import until
from tidings.lanes.answers import QuickAnswers

__all__ = ["door"]

pytestmark = pytest.mark.anyio
FIRST_LINE = "POST /mcp HTTP/1.1"
IDLE = 0.2
"""Seconds that a connection may be idle, where that is short."""


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
    async with open_door(some_server(), "connection", timeout_keep_alive=IDLE) as door:
        await warm(door)
        with anyio.fail_after(DEADLINE):
            while not await is_kept(door):
                pass


async def is_kept(door: Door) -> bool:
    """Whether a connection that is asked without a pause lives for longer than it may be idle. It does not only where
    the machine itself made such a pause."""
    async with door.line() as line:
        began = asked = anyio.current_time()
        while anyio.current_time() < began + 2.5 * IDLE:
            before, asked = asked, anyio.current_time()
            try:
                assert b"200" in (await line.send(line.asks("tools/list"))).status
            except (EOFError, ConnectionError):
                assert anyio.current_time() - before >= IDLE, "it was not idle for so long"
                return False
        assert await line.ended()
    return True


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
