"""Lists over HTTP: every kept answer is the SDK's, byte for byte, is there before it is asked for, and is bounded.

What is the SDK's to answer is in test_lists_aside, legacy sessions in test_lists_sessions.
"""

from __future__ import annotations

import json
from typing import Any

import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext

from tests.support.http_server import META, Door, Line, modern, open_door, some_server
from tests.support.kinds import Own
from tests.support.lists import LISTS, changed, door, posted, sdk_requests, warm
from tests.support.sdk_clients import LEGACY, MODERN
from tests.support.waiting import until
from tidings.http import request_checks

__all__ = ["door"]

pytestmark = pytest.mark.anyio


# Equality


@pytest.mark.parametrize("method", [*LISTS, "server/discover"])
async def test_a_kept_answer_is_the_sdks_byte_for_byte(door: Door, method: str) -> None:
    await warm(door)
    for request_id in (1, 0, -7, 10**17, "", "zwei", "a b/c"):
        said = await door.by_sdk(lambda line, each=request_id: line.asks(method, each))
        with sdk_requests(door, 0):
            for _ in range(2):
                assert await door.send(lambda line, each=request_id: line.asks(method, each)) == said
        assert json.loads(said.body)["id"] == request_id


@pytest.mark.parametrize("json_response", [True, False])
@pytest.mark.parametrize("version", LEGACY)
async def test_a_kept_legacy_answer_is_the_sdks_byte_for_byte(version: str, json_response: bool) -> None:
    async with open_door(some_server(), app={"json_response": json_response}) as door, door.line() as line:
        sessions = [await line.shake_hands(version) for _ in range(3)]
        assert len({named["Mcp_Session_Id"] for named in sessions}) == 3
        for method in LISTS:
            for named in sessions:
                for request_id in (5, "five"):
                    body = json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method}).encode()
                    raw = line.request(body, **named)
                    said = await door.by_sdk(raw)
                    await line.send(raw)
                    with sdk_requests(door, 0):
                        assert await line.send(raw) == said
                    assert (b"mcp-session-id", (named["Mcp_Session_Id"] or "").encode()) in said.headers
                    is_json = (b"content-type", b"application/json") in said.headers
                    assert is_json == json_response
        asked: list[dict[str, Any]] = [{}, {"_meta": {}}, {"_meta": {"dev.example/x": 1}}, {"cursor": "x"}]
        with sdk_requests(door, len(LISTS)):
            for method in LISTS:
                for params in asked:
                    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
                    await line.send(line.request(body, **sessions[0]))


async def test_an_answer_has_the_cursor_it_was_made_at_and_follows_every_change(door: Door) -> None:
    await warm(door)
    for number in range(3):
        door.live.tools.add(lambda: "", name=f"new{number}", description="")
        told = [json.loads((await door.send(lambda line: line.asks("tools/list"))).body)["result"] for _ in range(3)]
        assert told[0] == told[1] == told[2]
        assert f"new{number}" in {tool["name"] for tool in told[0]["tools"]}
        version = door.live.catalog.tools.version
        assert told[0]["_meta"]["dev.tidings/cursor"]["topics"]["tools"] == version._asdict()


async def test_a_list_that_is_served_only_later_is_found_then() -> None:
    async def list_tools(ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[])

    server: Server[Any] = Server("later")
    async with open_door(server, shared_lists=True) as door:
        assert b"404" in (await door.send(changed())).status
        server.add_request_handler("tools/list", types.PaginatedRequestParams, list_tools)
        await door.live.refresh()
        for _ in range(2):
            assert b"200" in (await door.send(changed())).status
        with sdk_requests(door, 0):
            await door.send(changed())


async def test_a_list_that_is_served_no_longer_is_refused_as_by_the_sdk(door: Door) -> None:
    await warm(door)
    del door.live.lowlevel._request_handlers["tools/list"]
    with sdk_requests(door, 1):
        assert b"404" in (await door.send(changed())).status


async def test_client_that_leaves_in_the_middle_of_a_request_leaves_nothing_behind(door: Door) -> None:
    state = door.server.server_state
    async with door.line() as line:
        line.writer.write(line.asks("tools/list")[:-5])
        await until(lambda: state.tasks)
    await until(lambda: not state.connections and not state.tasks)
    await warm(door)


# Beforehand


async def test_where_a_herd_came_before_the_answer_is_there_before_the_next_one_asks() -> None:
    """And it is what the SDK would have said, cursor and all."""
    async with open_door(some_server()) as door:
        await warm(door)
        for number in range(3):
            for method in LISTS:
                assert b"200" in (await door.send(lambda line, method=method: line.asks(method))).status
            with sdk_requests(door, 0), door.live.catalog.batch():  # many changes are one
                door.live.tools.add(lambda: "", name=f"new{number}", description="100 % — grüße")
                door.live.tools.add(lambda: "", name=f"other{number}", description="")
                door.live.resources.add(lambda: "", uri=f"door://new{number}", name="new", description=None)
            for method in LISTS:
                with sdk_requests(door, 0):
                    told = await door.send(lambda line, method=method: line.asks(method))
                assert told == await door.by_sdk(lambda line, method=method: line.asks(method))
        assert b"new2" in (await door.send(changed())).body


async def test_where_nobody_asks_nothing_is_made() -> None:
    server = some_server()
    async with open_door(server) as door:
        await warm(door)
        made: list[str] = []
        original = door.live.list_reader.request

        async def answered(method: str, version: str) -> dict[str, Any]:
            made.append(method)
            return await original(method, version)

        door.live.list_reader.request = answered  # type: ignore[method-assign]
        for number in range(5):
            door.live.tools.add(lambda: "", name=f"new{number}", description="")
            await door.send(lambda line: line.request(b"", start="GET /nothing HTTP/1.1"))
        assert made == ["tools/list"]

        own: Any = Own()
        await warm(door)
        server.middleware.append(own)
        door.live.tools.add(lambda: "", name="last", description="")
        await warm(door)
        assert made == ["tools/list"]


async def test_of_many_changes_at_once_only_the_last_is_made() -> None:
    async with open_door(some_server()) as door:
        await warm(door)
        made: list[int] = []
        original = door.live.list_reader.request

        async def answered(method: str, version: str) -> dict[str, Any]:
            made.append(len(door.live.catalog.tools))
            return await original(method, version)

        door.live.list_reader.request = answered  # type: ignore[method-assign]
        for number in range(5):
            door.live.tools.add(lambda: "", name=f"new{number}", description="")
        with sdk_requests(door, 0):
            assert b"new4" in (await door.send(changed())).body
        assert made == [7]


async def test_what_can_not_be_made_beforehand_is_made_for_whoever_asks(caplog: pytest.LogCaptureFixture) -> None:
    async with open_door(some_server()) as door:
        await warm(door)

        async def answered(method: str, version: str) -> dict[str, Any]:
            raise RuntimeError("no")

        door.live.list_reader.request = answered  # type: ignore[method-assign]
        door.live.tools.add(lambda: "", name="new", description="")
        with sdk_requests(door, 1):
            for _ in range(3):
                assert b"new" in (await door.send(changed())).body


# Request ids

REST = b',"method":"tools/list","params":{"_meta":%b}}' % json.dumps(META).encode()


@pytest.mark.parametrize(
    "tag",
    [
        *(b"1000001", b'"abcde"', b'"a b/c"', b"-100000", b"0000001", b"-000000", b"1000.00", b"1e00000", b"null   "),
        *(b"[1,2,3]", b'"abc\\\\"', b'"abc\\""', b'1,"a":2', b'1,"id":2', b'"\xc3\xb6abc"', b"      1"),
    ],
)
async def test_with_another_id_of_the_same_length_it_is_what_the_sdk_says(door: Door, tag: bytes) -> None:
    first = posted(b'{"jsonrpc":"2.0","id":1000000' + REST)
    for _ in range(3):
        assert json.loads((await door.send(first)).body)["id"] == 1000000
    with sdk_requests(door, 0):
        await door.send(first)
    raw = posted(b'{"jsonrpc":"2.0","id":' + tag + REST)
    said = await door.by_sdk(raw)
    for _ in range(2):
        assert await door.send(raw) == said
        assert json.loads((await door.send(first)).body)["id"] == 1000000


@pytest.mark.parametrize(
    "body",
    [
        b'{"jsonrpc":"2.0","\\u0069d":7' + REST.replace(b'{"_meta":{', b'{"_meta":{"dev.example/x":{"id":%d},'),
        b'{"jsonrpc":"2.0","i\\u0064":7' + REST.replace(b'{"_meta":{', b'{"_meta":{"dev.example/x":{"id":%d},'),
        b'{"jsonrpc":"2.0","id":7' + REST.replace(b'{"_meta":{', b'{"_meta":{"dev.example/x":{"id":%d},'),
        b'{"jsonrpc":"2.0","id":%d,"id":7' + REST,
        b'{"id" : %d ,"jsonrpc":"2.0"' + REST,
    ],
)
async def test_an_id_is_the_requests_own(door: Door, body: bytes) -> None:
    for number in (7, 7, 7, 8, 9):
        raw = posted(body % number)
        assert await door.send(raw) == await door.by_sdk(raw)


# Bounds


async def test_what_is_remembered_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_checks, "_MAX_CACHED", 8)
    async with open_door(some_server()) as door:
        said = await door.send(changed())
        memos: list[dict[Any, Any]] = [door.front._checks._headers, door.front._checks._list_params]
        for number in range(30):
            info = {"name": f"client {number}", "version": "1" * number}
            params = {"_meta": {**META, "io.modelcontextprotocol/clientInfo": info}}

            def raw(line: Line, number: int = number, params: Any = params) -> bytes:
                accept = f"application/json, text/event-stream, x/{number}"
                body = modern("tools/list", params=params)
                return line.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list", Accept=accept)

            assert await door.send(raw) == await door.send(raw) == said
            assert all(0 < len(memo) <= 8 for memo in memos)

        # Who is traced says something else in each request, and no more than one is remembered of it.
        last = next(reversed(memos[1]))
        for number in range(1, 30):
            traced = {"traceparent": f"00-{number:032x}-{number:016x}-01", "tracestate": f"vendor={number}"}
            assert await door.send(posted(modern("tools/list", params={"_meta": {**META, **traced}}))) == said
        assert list(memos[1])[-2] == last

        # And nothing large is remembered at all.
        await door.send(changed())
        sizes = [len(memo) for memo in memos]
        large = {**META, "dev.example/x": "x" * 8000}
        body = modern("tools/list", params={"_meta": large})
        raw_large = posted(body)
        assert b"200" in (await door.send(raw_large)).status
        assert b"200" in (await door.send(changed(Accept="application/json, text/event-stream," + "x" * 8000))).status
        assert [len(memo) for memo in memos] == sizes
