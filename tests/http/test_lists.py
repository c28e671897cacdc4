"""Cached lists over HTTP: they equal the SDK's responses, are made before clients ask, and are bounded.

`test_lists_fallback.py` has the requests that go to the SDK, `test_lists_sessions.py` legacy sessions.

Covers `server/list_cache.py`.
"""

from __future__ import annotations

import json
from typing import Any

import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import MCPServer

from tests.support.http_server import META, LocalServer, RawClient, example_server, modern_body, serving
from tests.support.kinds import Own
from tests.support.lists import LISTS, changed, fill_cache, listed, local, posted, sdk_requests
from tests.support.sdk_clients import LEGACY, MODERN
from tests.support.waiting import until
from tidings import Policy
from tidings.core.frames import CURSOR_KEY
from tidings.http import request_checks
from tidings.sdk.internals import registry_of

__all__ = ["local"]

pytestmark = pytest.mark.anyio


# Cached responses equal those of the SDK


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


async def test_list_results_carry_cursor_and_cache_hints() -> None:
    async with serving(example_server(), policy=Policy(list_max_age=3600, list_ttl=5)) as local:
        for method in LISTS:
            for request_id in (1, "two", 3):
                said = await local.send(lambda client, method=method, each=request_id: client.modern(method, each))
                result = json.loads(said.body)["result"]
                assert result["ttlMs"] == 5000
                assert result["cacheScope"] in ("public", "private")
                version = result["_meta"][CURSOR_KEY]["topics"][method.partition("/")[0]]
                assert version["revision"] > 0
                assert version["digest"]


async def test_discovery_comes_from_the_cache_until_the_offer_changes(local: LocalServer) -> None:
    def discover(client: RawClient) -> bytes:
        return client.modern("server/discover")

    await fill_cache(local)
    said = await local.send(discover)
    lowlevel = local.live.lowlevel
    lowlevel.extensions = {**lowlevel.extensions, "dev.example/unnoticed": {}}
    assert await local.send(discover) == said

    lowlevel.instructions = "Read the board first."
    updated = (await local.send(discover)).body
    assert b"Read the board first." in updated
    assert b"dev.example/unnoticed" in updated


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


async def test_change_in_place_is_told_when_a_list_shows_it() -> None:
    """Before any list was made, and between two lists with a noticed change between them."""
    server = example_server()
    async with serving(server) as local:
        tools = registry_of(server, "tools")
        name, tool = next(iter(tools.items()))
        told: list[str] = []
        local.live.hub.subscribe(lambda note: told.extend(f"{c.operation} {c.key}" for c in note.changes), "tools")
        for version in (MODERN, LEGACY[-1]):
            tool.description = f"changed in place before a client of {version} asks"
            if version == MODERN:
                body = (await local.send(changed())).body
            else:
                local.live.tools.add(lambda: "", name="new")
                await until(lambda: told == ["added new"])
                told.clear()
                async with local.client() as client:
                    session = await client.initialize(version)
                    body = (await client.send(listed(**session)(client))).body
            assert tool.description.encode() in body
            await until(lambda: told == [f"updated {name}"])
            told.clear()


# Order


class OrderedServers:
    """Servers of each kind that list the tools `zeta` and `alpha`, in this order."""

    tools = ("zeta", "alpha")

    @classmethod
    def make(cls, kind: str) -> Any:
        if kind == "Server":

            async def list_tools(ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
                return types.ListToolsResult(tools=[types.Tool.model_validate(definition(name)) for name in cls.tools])

            return Server("ordered", on_list_tools=list_tools)
        server: Any = MCPServer("ordered") if kind == "MCPServer" else FastMCP("ordered")
        for name in cls.tools:
            server.tool(name=name)(lambda: "")
        return server


def definition(name: str) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"}}


async def tool_names(local: LocalServer) -> list[str]:
    return [tool["name"] for tool in json.loads((await local.send(changed())).body)["result"]["tools"]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["MCPServer", "Server", "FastMCP"])
async def test_list_is_in_the_order_of_the_server(kind: str, shared: bool) -> None:
    async with serving(OrderedServers.make(kind), shared_lists=shared) as local:
        for _ in range(2):
            assert await tool_names(local) == ["zeta", "alpha"]
        tools = local.live.tools
        if kind == "Server":
            tools.add(definition("middle"), handler=lambda: "")
        else:
            tools.add(lambda: "", name="middle")
        tools.update("zeta", description="keeps its place")
        for _ in range(2):
            assert await tool_names(local) == ["zeta", "alpha", "middle"]


@pytest.mark.parametrize("kind", ["MCPServer", "Server", "FastMCP"])
async def test_list_order_name_sorts_by_name(kind: str) -> None:
    async with serving(OrderedServers.make(kind), policy=Policy(list_order="name")) as local:
        assert await tool_names(local) == ["alpha", "zeta"]


async def test_other_order_alone_notifies_no_client_and_is_in_the_next_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for an order that Tidings notices only in a list, and for a registry that tells of each step."""
    registered, unnoticed = OrderedServers.make("MCPServer"), OrderedServers.make("Server")
    for server in (registered, unnoticed):
        max_age = 0.0 if server is unnoticed else 3600
        async with serving(server, shared_lists=True, policy=Policy(list_max_age=max_age)) as local:
            told: list[object] = []
            assert await tool_names(local) == ["zeta", "alpha"]
            local.live.hub.subscribe(told.append, "tools")
            before = local.live.catalog.tools.version.digest
            if server is unnoticed:
                monkeypatch.setattr(OrderedServers, "tools", ("alpha", "zeta"))
            else:
                tools = registry_of(server, "tools")
                tools["zeta"] = tools.pop("zeta")
            for _ in range(2):
                assert await tool_names(local) == ["alpha", "zeta"]
            await local.live.refresh()
            assert told == []
            assert local.live.catalog.tools.version.digest == before


# Responses made in advance


async def test_used_response_is_made_again_before_clients_ask() -> None:
    """It equals the response of the SDK, with its cursor."""
    async with serving(example_server()) as local:
        await fill_cache(local)
        for number in range(3):
            for method in LISTS:
                assert b"200" in (await local.send(lambda client, method=method: client.modern(method))).status
            with sdk_requests(local, 0), local.live.catalog.batch():  # one notification for all
                local.live.tools.add(lambda: "", name=f"new{number}", description="100 % — grüße")
                local.live.tools.add(lambda: "", name=f"other{number}", description="")
                local.live.resources.add(lambda: "", uri=f"local://new{number}", name="new", description=None)
            for method in LISTS:
                with sdk_requests(local, 0):
                    told = await local.send(lambda client, method=method: client.modern(method))
                assert told == await local.sdk_response(lambda client, method=method: client.modern(method))
        assert b"new2" in (await local.send(changed())).body


def record_reads(local: LocalServer) -> list[int]:
    """Return a list to which each read of a list by Tidings itself appends the number of tools."""
    reads: list[int] = []
    original = local.live.list_reader.request

    async def request(method: str, version: str) -> dict[str, Any]:
        reads.append(len(local.live.catalog.tools))
        return await original(method, version)

    local.live.list_reader.request = request  # type: ignore[method-assign]
    return reads


async def test_unused_response_is_not_made_again() -> None:
    server = example_server()
    async with serving(server) as local:
        await fill_cache(local)
        reads = record_reads(local)
        for number in range(5):
            local.live.tools.add(lambda: "", name=f"new{number}", description="")
            await local.send(lambda client: client.request(b"", start="GET /nothing HTTP/1.1"))
        assert len(reads) == 1

        own: Any = Own()
        await fill_cache(local)
        server.middleware.append(own)
        local.live.tools.add(lambda: "", name="last", description="")
        await fill_cache(local)
        assert len(reads) == 1


async def test_many_changes_make_only_the_last_response() -> None:
    async with serving(example_server()) as local:
        await fill_cache(local)
        reads = record_reads(local)
        for number in range(5):
            local.live.tools.add(lambda: "", name=f"new{number}", description="")
        with sdk_requests(local, 0):
            assert b"new4" in (await local.send(changed())).body
        assert reads == [7]


# Request ids

REST = b',"method":"tools/list","params":{"_meta":%b}}' % json.dumps(META).encode()


@pytest.mark.parametrize(
    "start",
    [
        *(b'"id":0000001', b'"id":-0', b'"id":1000.00', b'"id":1e00000', b'"id":[1,2,3]', b'"id":1,"a":2', b'"id":  1'),
        *(b'"id":1,"id":2', b'"\\u0069d":7', b'"id":"\xc3\xb6"', b'"id":"\\u00f6\\/"', b'"id":"\x7f"'),
    ],
)
async def test_unusual_request_id_gets_the_sdk_response(local: LocalServer, start: bytes) -> None:
    await fill_cache(local)
    raw = posted(b'{"jsonrpc":"2.0",' + start + REST)
    said = await local.sdk_response(raw)
    for _ in range(2):
        assert await local.send(raw) == said


# Bounds


async def test_cached_checks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_checks, "_MAX_CACHED", 8)
    async with serving(example_server()) as local:
        said = await local.send(changed())
        caches: list[dict[Any, Any]] = [local.front._checks._headers, local.front._checks._list_params]
        for number in range(30):
            info = {"name": f"client {number}", "version": "1" * number}
            params = {"_meta": {**META, "io.modelcontextprotocol/clientInfo": info}}

            def raw(client: RawClient, number: int = number, params: Any = params) -> bytes:
                accept = f"application/json, text/event-stream, x/{number}"
                body = modern_body("tools/list", params=params)
                return client.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list", Accept=accept)

            assert await local.send(raw) == await local.send(raw) == said
            assert all(0 < len(cache) <= 8 for cache in caches)

        # A traced client sends other params in each request, but takes one entry.
        last = next(reversed(caches[1]))
        for number in range(1, 30):
            traced = {"traceparent": f"00-{number:032x}-{number:016x}-01", "tracestate": f"vendor={number}"}
            assert await local.send(posted(modern_body("tools/list", params={"_meta": {**META, **traced}}))) == said
        assert list(caches[1])[-2] == last

        # Large headers and params are not cached.
        await local.send(changed())
        sizes = [len(cache) for cache in caches]
        large = {**META, "dev.example/x": "x" * 8000}
        body = modern_body("tools/list", params={"_meta": large})
        raw_large = posted(body)
        assert b"200" in (await local.send(raw_large)).status
        assert b"200" in (await local.send(changed(Accept="application/json, text/event-stream," + "x" * 8000))).status
        assert [len(cache) for cache in caches] == sizes
