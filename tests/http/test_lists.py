"""Lists over HTTP: every kept answer is the SDK's, byte for byte, is there before it is asked for, and is bounded.

What is the SDK's to answer is in test_lists_aside, legacy sessions in test_lists_sessions.
"""

from __future__ import annotations

import json
from typing import Any

import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext

from tests.support.http_server import META, LocalServer, RawClient, example_server, modern_body, serving
from tests.support.kinds import Own
from tests.support.lists import LISTS, changed, fill_cache, local, posted, sdk_requests
from tests.support.sdk_clients import LEGACY, MODERN
from tests.support.waiting import until
from tidings.http import request_checks

__all__ = ["local"]

pytestmark = pytest.mark.anyio


# Equality


@pytest.mark.parametrize("method", [*LISTS, "server/discover"])
async def test_cached_response_equals_the_sdk_response(local: LocalServer, method: str) -> None:
    await fill_cache(local)
    for request_id in (1, 0, -7, 10**17, 2**70, "", "zwei", "a b/c", '"\\', "x" * 1000):
        said = await local.sdk_response(lambda client, each=request_id: client.modern(method, each))
        with sdk_requests(local, 0):
            for _ in range(2):
                assert await local.send(lambda client, each=request_id: client.modern(method, each)) == said
        assert json.loads(said.body)["id"] == request_id


@pytest.mark.parametrize("json_response", [True, False])
@pytest.mark.parametrize("version", LEGACY)
async def test_cached_legacy_response_equals_the_sdk_response(version: str, json_response: bool) -> None:
    async with (
        serving(example_server(), app={"json_response": json_response}) as local,
        local.client() as client,
    ):
        sessions = [await client.initialize(version) for _ in range(3)]
        assert len({named["Mcp_Session_Id"] for named in sessions}) == 3
        for method in LISTS:
            for named in sessions:
                for request_id in (5, "five"):
                    body = json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method}).encode()
                    raw = client.request(body, **named)
                    said = await local.sdk_response(raw)
                    await client.send(raw)
                    with sdk_requests(local, 0):
                        assert await client.send(raw) == said
                    assert (b"mcp-session-id", (named["Mcp_Session_Id"] or "").encode()) in said.headers
                    is_json = (b"content-type", b"application/json") in said.headers
                    assert is_json == json_response
        asked: list[dict[str, Any]] = [{}, {"_meta": {}}, {"_meta": {"dev.example/x": 1}}, {"cursor": "x"}]
        with sdk_requests(local, len(LISTS)):
            for method in LISTS:
                for params in asked:
                    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
                    await client.send(client.request(body, **sessions[0]))


async def test_response_has_its_cursor_and_follows_every_change(local: LocalServer) -> None:
    await fill_cache(local)
    for number in range(3):
        local.live.tools.add(lambda: "", name=f"new{number}", description="")
        told = [
            json.loads((await local.send(lambda client: client.modern("tools/list"))).body)["result"] for _ in range(3)
        ]
        assert told[0] == told[1] == told[2]
        assert f"new{number}" in {tool["name"] for tool in told[0]["tools"]}
        version = local.live.catalog.tools.version
        assert told[0]["_meta"]["dev.tidings/cursor"]["topics"]["tools"] == version._asdict()


async def test_list_handler_added_later_is_used() -> None:
    async def list_tools(ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[])

    server: Server[Any] = Server("later")
    async with serving(server, shared_lists=True) as local:
        assert b"404" in (await local.send(changed())).status
        server.add_request_handler("tools/list", types.PaginatedRequestParams, list_tools)
        await local.live.refresh()
        for _ in range(2):
            assert b"200" in (await local.send(changed())).status
        with sdk_requests(local, 0):
            await local.send(changed())


async def test_removed_list_handler_gives_the_sdk_error(local: LocalServer) -> None:
    await fill_cache(local)
    del local.live.lowlevel._request_handlers["tools/list"]
    with sdk_requests(local, 1):
        assert b"404" in (await local.send(changed())).status


async def test_disconnect_in_the_middle_of_a_request_leaves_nothing_behind(local: LocalServer) -> None:
    state = local.server.server_state
    async with local.client() as client:
        client.writer.write(client.modern("tools/list")[:-5])
        await until(lambda: state.tasks)
    await until(lambda: not state.connections and not state.tasks)
    await fill_cache(local)


# Beforehand


async def test_used_response_is_made_again_before_clients_ask() -> None:
    """And it is what the SDK would have said, cursor and all."""
    async with serving(example_server()) as local:
        await fill_cache(local)
        for number in range(3):
            for method in LISTS:
                assert b"200" in (await local.send(lambda client, method=method: client.modern(method))).status
            with sdk_requests(local, 0), local.live.catalog.batch():  # many changes are one
                local.live.tools.add(lambda: "", name=f"new{number}", description="100 % — grüße")
                local.live.tools.add(lambda: "", name=f"other{number}", description="")
                local.live.resources.add(lambda: "", uri=f"local://new{number}", name="new", description=None)
            for method in LISTS:
                with sdk_requests(local, 0):
                    told = await local.send(lambda client, method=method: client.modern(method))
                assert told == await local.sdk_response(lambda client, method=method: client.modern(method))
        assert b"new2" in (await local.send(changed())).body


async def test_unused_response_is_not_made_again() -> None:
    server = example_server()
    async with serving(server) as local:
        await fill_cache(local)
        made: list[str] = []
        original = local.live.list_reader.request

        async def answered(method: str, version: str) -> dict[str, Any]:
            made.append(method)
            return await original(method, version)

        local.live.list_reader.request = answered  # type: ignore[method-assign]
        for number in range(5):
            local.live.tools.add(lambda: "", name=f"new{number}", description="")
            await local.send(lambda client: client.request(b"", start="GET /nothing HTTP/1.1"))
        assert made == ["tools/list"]

        own: Any = Own()
        await fill_cache(local)
        server.middleware.append(own)
        local.live.tools.add(lambda: "", name="last", description="")
        await fill_cache(local)
        assert made == ["tools/list"]


async def test_many_changes_make_only_the_last_response() -> None:
    async with serving(example_server()) as local:
        await fill_cache(local)
        made: list[int] = []
        original = local.live.list_reader.request

        async def answered(method: str, version: str) -> dict[str, Any]:
            made.append(len(local.live.catalog.tools))
            return await original(method, version)

        local.live.list_reader.request = answered  # type: ignore[method-assign]
        for number in range(5):
            local.live.tools.add(lambda: "", name=f"new{number}", description="")
        with sdk_requests(local, 0):
            assert b"new4" in (await local.send(changed())).body
        assert made == [7]


async def test_response_that_cannot_be_made_in_advance_is_made_on_request(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(example_server()) as local:
        await fill_cache(local)

        async def answered(method: str, version: str) -> dict[str, Any]:
            raise RuntimeError("no")

        local.live.list_reader.request = answered  # type: ignore[method-assign]
        local.live.tools.add(lambda: "", name="new", description="")
        with sdk_requests(local, 1):
            for _ in range(3):
                assert b"new" in (await local.send(changed())).body


# Request ids

REST = b',"method":"tools/list","params":{"_meta":%b}}' % json.dumps(META).encode()


@pytest.mark.parametrize(
    "tag",
    [
        *(b"1000001", b'"abcde"', b'"a b/c"', b"-100000", b"0000001", b"-000000", b"1000.00", b"1e00000", b"null   "),
        *(b"[1,2,3]", b'"abc\\\\"', b'"abc\\""', b'1,"a":2', b'1,"id":2', b'"\xc3\xb6abc"', b"      1"),
    ],
)
async def test_unusual_request_id_gets_the_sdk_response(local: LocalServer, tag: bytes) -> None:
    first = posted(b'{"jsonrpc":"2.0","id":1000000' + REST)
    for _ in range(3):
        assert json.loads((await local.send(first)).body)["id"] == 1000000
    with sdk_requests(local, 0):
        await local.send(first)
    raw = posted(b'{"jsonrpc":"2.0","id":' + tag + REST)
    said = await local.sdk_response(raw)
    for _ in range(2):
        assert await local.send(raw) == said
        assert json.loads((await local.send(first)).body)["id"] == 1000000


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
async def test_response_has_the_id_of_its_request(local: LocalServer, body: bytes) -> None:
    for number in (7, 7, 7, 8, 9):
        raw = posted(body % number)
        assert await local.send(raw) == await local.sdk_response(raw)


# Bounds


async def test_cached_checks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_checks, "_MAX_CACHED", 8)
    async with serving(example_server()) as local:
        said = await local.send(changed())
        memos: list[dict[Any, Any]] = [local.front._checks._headers, local.front._checks._list_params]
        for number in range(30):
            info = {"name": f"client {number}", "version": "1" * number}
            params = {"_meta": {**META, "io.modelcontextprotocol/clientInfo": info}}

            def raw(client: RawClient, number: int = number, params: Any = params) -> bytes:
                accept = f"application/json, text/event-stream, x/{number}"
                body = modern_body("tools/list", params=params)
                return client.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list", Accept=accept)

            assert await local.send(raw) == await local.send(raw) == said
            assert all(0 < len(memo) <= 8 for memo in memos)

        # Who is traced says something else in each request, and no more than one is remembered of it.
        last = next(reversed(memos[1]))
        for number in range(1, 30):
            traced = {"traceparent": f"00-{number:032x}-{number:016x}-01", "tracestate": f"vendor={number}"}
            assert await local.send(posted(modern_body("tools/list", params={"_meta": {**META, **traced}}))) == said
        assert list(memos[1])[-2] == last

        # And nothing large is remembered at all.
        await local.send(changed())
        sizes = [len(memo) for memo in memos]
        large = {**META, "dev.example/x": "x" * 8000}
        body = modern_body("tools/list", params={"_meta": large})
        raw_large = posted(body)
        assert b"200" in (await local.send(raw_large)).status
        assert b"200" in (await local.send(changed(Accept="application/json, text/event-stream," + "x" * 8000))).status
        assert [len(memo) for memo in memos] == sizes
