"""List requests over HTTP that go to the SDK: unusual and invalid ones, and those behind middleware or a token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import MCPServer

from tests.support.http_server import (
    META,
    HttpResponse,
    LocalServer,
    RawClient,
    example_server,
    modern_body,
    serving,
)
from tests.support.kinds import Own
from tests.support.lists import LISTED, Raw, changed, fill_cache, listed, local, posted, sdk_requests
from tests.support.messages import initialize
from tests.support.sdk_clients import DEADLINE, LEGACY, MODERN
from tests.support.tokens import authentication
from tests.support.uvicorn_server import address_of, run_uvicorn
from tidings.sdk import internals

__all__ = ["local"]

pytestmark = pytest.mark.anyio


# Unusual and invalid requests


def doubled(name: bytes) -> Raw:
    def raw(client: RawClient) -> bytes:
        head, _, body = client.modern("tools/list").partition(b"\r\n\r\n")
        same = next(each for each in head.split(b"\r\n") if each.lower().startswith(name + b":"))
        return head + b"\r\n" + same + b"\r\n\r\n" + body

    return raw


def traced(**fields: object) -> Raw:
    meta = {**META, "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", **fields}
    return posted(modern_body("tools/list", params={"_meta": meta}))


DOUBTFUL: dict[str, tuple[bytes, Raw]] = {
    "another host": (b"421", changed(Host="evil.example")),
    "another origin": (b"403", changed(Origin="http://evil.example")),
    "only JSON is accepted": (b"406", changed(Accept="application/json")),
    "no JSON is accepted": (b"406", changed(Accept="text/event-stream")),
    "nothing is accepted": (b"406", changed(Accept=None)),
    "another content type": (b"400", changed(Content_Type="text/plain")),
    "two methods": (b"400", doubled(b"mcp-method")),
    "two versions": (b"400", doubled(b"mcp-protocol-version")),
    "another method in the body": (b"400", posted(modern_body("prompts/list"))),
    "the header of a listen request": (b"400", changed(Mcp_Method="subscriptions/listen")),
    "another version in the body": (
        b"400",
        posted(LISTED.replace(MODERN.encode(), b"2026-07-29")),
    ),
    "an unknown version": (b"400", changed(MCP_Protocol_Version="2031-01-01")),
    "a cursor": (b"200", posted(modern_body("tools/list", params={"cursor": "x"}))),
    "a progress token": (b"200", posted(modern_body("tools/list", params={"_meta": {**META, "progressToken": 1}}))),
    "an unknown member": (b"200", posted(modern_body("tools/list", extra=1))),
    "an id with more than one encoding": (b"200", posted(modern_body("tools/list", "grüße"))),
    "an id that is no integer": (b"400", posted(modern_body("tools/list", 1.0))),
    "an id that is null": (b"400", posted(modern_body("tools/list", None))),
    "no id": (b"202", posted(LISTED.replace(b'"id": 1, ', b""))),
    "a batch": (b"400", posted(b"[" + LISTED + b"]")),
    "text after the request": (b"400", posted(LISTED + b"x")),
    "an incomplete body": (b"400", posted(LISTED[:-1])),
    "an empty body": (b"400", posted(b"")),
    "no JSON-RPC": (b"400", posted(LISTED.replace(b'"2.0"', b'"1.0"'))),
    "a value that is not UTF-8": (b"400", posted(LISTED.replace(b'"1"', b'"\xff"'))),
    "a method that is not UTF-8": (b"400", posted(LISTED.replace(b'"tools/list"', b'"\xff"'))),
    "a member that is not UTF-8": (b"400", posted(LISTED[:-1] + b', "\xff": 1}')),
    "a trace beside a member that is not UTF-8": (
        b"400",
        posted(LISTED.replace(b'"_meta": {', b'"_meta": {"\xff": 1, "traceparent": "x", ')),
    ),
    "a trace that is not text": (b"200", traced(tracestate=[[]])),
    "baggage that is not text": (b"200", traced(baggage=[1])),
    "invalid capabilities": (
        b"400",
        posted(modern_body("tools/list", params={"_meta": {**META, "io.modelcontextprotocol/clientCapabilities": 7}})),
    ),
    "no capabilities": (b"400", posted(LISTED.replace(b"clientCapabilities", b"clientIncapabilities"))),
    "no params": (b"400", posted(b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}')),
    "too deep": (b"400", posted(b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":' + b"[" * 5000)),
    "too large": (b"413", posted(modern_body("tools/list", params={"x": "x" * 5_000_000}))),
}


@pytest.mark.parametrize("case", DOUBTFUL)
async def test_doubtful_request_goes_to_the_sdk(local: LocalServer, case: str) -> None:
    """Twice, because a request that was refused must not be cached as valid."""
    status, raw = DOUBTFUL[case]
    await fill_cache(local)
    said = await local.sdk_response(raw)
    assert status in said.status
    with sdk_requests(local, 2):
        assert [await local.send(raw), await local.send(raw)] == [said, said]


async def test_whitespace_after_a_header_value_is_ignored(local: LocalServer) -> None:
    await fill_cache(local)
    said = await local.send(changed())
    with sdk_requests(local, 0):
        assert (
            await local.send(changed(Accept="application/json, text/event-stream \t", Mcp_Method="tools/list ")) == said
        )


@pytest.mark.parametrize("path", ["/mcp?x=1", "/mcp/", "/%6dcp", "/other"])
async def test_other_paths_are_not_affected(local: LocalServer, path: str) -> None:
    def raw(client: RawClient) -> bytes:
        return client.modern("tools/list").replace(b"/mcp", path.encode(), 1)

    await fill_cache(local)
    said = await local.sdk_response(raw)
    assert [await local.send(raw), await local.send(raw)] == [said, said]


async def test_user_middleware_sees_every_list_request() -> None:
    server = example_server()
    async with serving(server) as local:
        await fill_cache(local)
        with sdk_requests(local, 0):
            await fill_cache(local)
        own: Any = Own()
        server.middleware.append(own)  # which may come at any time
        with sdk_requests(local, 15):
            await fill_cache(local)


@pytest.mark.parametrize("method", ["tools/list", "server/discover", "initialize"])
@pytest.mark.parametrize("result", [types.ErrorData(code=-32050, message="closed on sundays"), ["not a result"]])
async def test_error_of_user_middleware_is_the_response(method: str, result: Any) -> None:
    async def refuse(ctx: Any, call_next: Any) -> Any:
        return result if ctx.method == method else await call_next(ctx)

    def raw(client: RawClient) -> bytes:
        if method == "initialize":
            return client.request(json.dumps(initialize(LEGACY[-1])).encode())
        return client.modern(method)

    server = example_server()
    server.middleware.append(refuse)
    async with serving(server) as local:
        said = await local.send(raw)
        # A plain server, without Live.
        plain = example_server()
        plain.middleware.append(refuse)
        async with run_uvicorn(plain.streamable_http_app()) as running:
            reader, writer = await asyncio.open_connection(*address_of(running)[:2])
            client = RawClient(address_of(running)[1], reader, writer)
            expected = await client.send(raw(client))
            writer.close()
        assert (said.status, said.body) == (expected.status, expected.body)
        assert b'"error"' in said.body
        assert not local.live.failures


async def test_changed_host_rules_apply_immediately() -> None:
    async with serving(example_server()) as local:
        await fill_cache(local)
        settings = local.live.server.session_manager.security_settings
        settings.allowed_hosts.remove("127.0.0.1:*")
        assert b"421" in (await local.send(changed())).status
        settings.allowed_hosts.append("127.0.0.1:*")
        assert b"200" in (await local.send(changed())).status
        settings.enable_dns_rebinding_protection = False
        assert b"200" in (await local.send(changed(Host="evil.example"))).status
        settings.enable_dns_rebinding_protection = True
        assert b"421" in (await local.send(changed(Host="evil.example"))).status


async def test_lists_that_differ_by_caller_are_not_cached() -> None:
    async def list_tools(ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[])

    server: Server[Any] = Server("each", on_list_tools=list_tools)
    async with serving(server) as local:
        with sdk_requests(local, 2):
            for _ in range(2):
                assert b"200" in (await local.send(changed())).status


# Authentication


class PerCaller(MCPServer[Any]):
    """Overrides a method of the SDK, and shows one tool only to alice."""

    async def list_tools(self) -> list[types.Tool]:
        token = get_access_token()
        is_hers = token is not None and token.client_id == "alice"
        return [tool for tool in await super().list_tools() if is_hers or tool.name != "hers"]


async def test_overridden_list_method_is_called_for_every_request() -> None:
    server = PerCaller("each", log_level="CRITICAL", **authentication())
    for name in ("hers", "everybodys"):
        server.add_tool(lambda: "", name=name)

    def names(answer: HttpResponse) -> list[str]:
        text = answer.body.partition(b"data: ")[2] or answer.body
        return [tool["name"] for tool in json.loads(text)["result"]["tools"]]

    async with serving(server) as local, local.client() as client:
        sessions = {who: await client.initialize(LEGACY[-1], Authorization=f"Bearer {who}") for who in ("alice", "bob")}
        for who in ("alice", "alice", "bob", "alice", "bob"):
            shown = ["hers", "everybodys"] if who == "alice" else ["everybodys"]
            assert names(await local.send(changed(Authorization=f"Bearer {who}"))) == shown
            assert names(await local.send(listed(**sessions[who]))) == shown

        # Other clients get no notification of an item that only alice may see.
        client.writer.write(client.listen_request(1, Authorization="Bearer bob"))
        with anyio.fail_after(DEADLINE):
            await client.reader.readuntil(b"acknowledged")
        server.remove_tool("hers")
        for name in ("hers", "new"):
            server.add_tool(lambda: "", name=name)
        with anyio.fail_after(DEADLINE):
            assert b"hers" not in await client.reader.readuntil(b'"name":"new"')


def replace_method(server: MCPServer[Any]) -> None:
    async def list_tools() -> list[types.Tool]:
        return [types.Tool(name=caller(), input_schema={"type": "object"})]

    server.list_tools = list_tools  # type: ignore[method-assign]


def replace_handler(server: MCPServer[Any]) -> None:
    async def handle(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(name=caller(), input_schema={"type": "object"})])

    internals.lowlevel_of(server).add_request_handler("tools/list", types.PaginatedRequestParams, handle)


def replace_discover(server: MCPServer[Any]) -> None:
    async def handle(ctx: Any, params: Any) -> types.DiscoverResult:
        result = await lowlevel._handle_discover(ctx, params)
        return result.model_copy(update={"instructions": caller()})

    lowlevel = internals.lowlevel_of(server)
    lowlevel.add_request_handler("server/discover", types.RequestParams, handle)


def replace_capabilities(server: MCPServer[Any]) -> None:
    lowlevel = internals.lowlevel_of(server)
    original = lowlevel.get_capabilities

    def get_capabilities(*args: Any, **options: Any) -> types.ServerCapabilities:
        return original(*args, **options).model_copy(update={"experimental": {caller(): {}}})

    lowlevel.get_capabilities = get_capabilities  # type: ignore[method-assign]


def caller() -> str:
    token = get_access_token()
    return f"only for {token.client_id if token else 'nobody'}"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("method", "replace"),
    [
        ("tools/list", replace_method),
        ("tools/list", replace_handler),
        ("server/discover", replace_discover),
        ("server/discover", replace_capabilities),
    ],
)
async def test_replaced_code_answers_each_caller_itself(method: str, replace: Any, is_late: bool) -> None:
    """Before `Live()`, and while responses are cached already."""
    server = example_server(**authentication())
    if not is_late:
        replace(server)
    async with serving(server, shared_lists=True if method == "server/discover" else None) as local:

        def send(who: str) -> Any:
            return local.send(lambda client: client.modern(method, Authorization=f"Bearer {who}"))

        for who in ("alice", "bob"):
            await send(who)
        if is_late:
            replace(server)
        for who, other in (("alice", "bob"), ("bob", "alice")) * 2:
            body = (await send(who)).body
            assert f"only for {who}".encode() in body
            assert f"only for {other}".encode() not in body


async def test_response_made_while_the_handler_is_replaced_is_not_cached() -> None:
    """The request starts with the SDK's handler, and the user's own responds."""
    server = example_server(**authentication())
    async with serving(server) as local:

        class Replacing:
            __module__ = "mcp.example"  # not the user's middleware, which would turn the cache off

            async def __call__(self, ctx: Any, call_next: Any) -> Any:
                if ctx.method == "tools/list" and ctx.request_id == 1:
                    replace_handler(server)
                return await call_next(ctx)

        server.middleware.append(Replacing())
        for who in ("alice", "bob"):
            answer = await local.send(changed(Authorization=f"Bearer {who}"))
            assert f"only for {who}".encode() in answer.body


async def test_no_list_is_sent_without_a_valid_token() -> None:
    async with serving(example_server(**authentication())) as local:
        for _ in range(3):
            assert b"200" in (await local.send(changed(Authorization="Bearer alice"))).status
        with sdk_requests(local, 0):
            assert b"200" in (await local.send(changed(Authorization="Bearer bob"))).status
            for token in (None, "Bearer nobody", "Bearer weak"):
                assert (await local.send(changed(Authorization=token))).status.split()[1] in (b"401", b"403")
