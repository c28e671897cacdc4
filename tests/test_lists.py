"""Lists over HTTP: every kept answer is the SDK's, byte for byte, and whatever is in doubt is the SDK's to answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import mcp_types as types
import pytest
from mcp.server import Server, ServerRequestContext
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http import EventStore
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Mount, Route

from tests.servers.board import Own, authentication
from tests.servers.door import FRONTS, META, Answer, Door, Line, modern, open_door, some_server
from tests.servers.ears import DEADLINE, LEGACY, MODERN
from tidings import Live, seams
from tidings.lanes import answers, verdicts
from tidings.lanes.shortcut import front_of

pytestmark = pytest.mark.anyio

LISTS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
Raw = Callable[[Line], bytes]


@pytest.fixture(params=FRONTS)
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with open_door(some_server(), request.param) as door:
        yield door


@contextmanager
def counted(door: Door, what: str, number: int) -> Iterator[None]:
    before = door.counts[what]
    yield
    assert door.counts[what] - before == number


async def warm(door: Door) -> None:
    """Let the bytes be made, and the request be seen."""
    for method in (*LISTS, "server/discover"):
        for _ in range(3):
            answer = await door.send(lambda line, method=method: line.asks(method))
            assert b"200" in answer.status


# Equality


@pytest.mark.parametrize("method", [*LISTS, "server/discover"])
async def test_a_kept_answer_is_the_sdks_byte_for_byte(door: Door, method: str) -> None:
    await warm(door)
    for request_id in (1, 0, -7, 10**17, "", "zwei", "a b/c"):
        said = await door.by_sdk(lambda line, each=request_id: line.asks(method, each))
        with counted(door, "sdk", 0):
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
                    with counted(door, "sdk", 0):
                        assert await line.send(raw) == said
                    assert (b"mcp-session-id", (named["Mcp_Session_Id"] or "").encode()) in said.headers
                    is_json = (b"content-type", b"application/json") in said.headers
                    assert is_json == json_response
        asked: list[dict[str, Any]] = [{}, {"_meta": {}}, {"_meta": {"dev.example/x": 1}}, {"cursor": "x"}]
        with counted(door, "sdk", len(LISTS)):
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


# What is the SDK's


def changed(**headers: str | None) -> Raw:
    return lambda line: line.asks("tools/list", **headers)


def posted(body: bytes) -> Raw:
    return lambda line: line.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list")


def doubled(name: bytes) -> Raw:
    def raw(line: Line) -> bytes:
        head, _, body = line.asks("tools/list").partition(b"\r\n\r\n")
        same = next(each for each in head.split(b"\r\n") if each.lower().startswith(name + b":"))
        return head + b"\r\n" + same + b"\r\n\r\n" + body

    return raw


LISTED = modern("tools/list")
ASIDE: dict[str, tuple[bytes, Raw]] = {
    "another host": (b"421", changed(Host="evil.example")),
    "another origin": (b"403", changed(Origin="http://evil.example")),
    "only JSON is accepted": (b"406", changed(Accept="application/json")),
    "no JSON is accepted": (b"406", changed(Accept="text/event-stream")),
    "nothing is accepted": (b"406", changed(Accept=None)),
    "another content type": (b"400", changed(Content_Type="text/plain")),
    "two methods": (b"400", doubled(b"mcp-method")),
    "two versions": (b"400", doubled(b"mcp-protocol-version")),
    "another method in the body": (b"400", posted(modern("prompts/list"))),
    "another version in the body": (
        b"400",
        posted(LISTED.replace(MODERN.encode(), b"2026-07-29")),
    ),
    "a version of nobody's": (b"400", changed(MCP_Protocol_Version="2031-01-01")),
    "a cursor": (b"200", posted(modern("tools/list", params={"cursor": "x"}))),
    "a progress token": (b"200", posted(modern("tools/list", params={"_meta": {**META, "progressToken": 1}}))),
    "a member that nobody knows": (b"200", posted(modern("tools/list", extra=1))),
    "an id that could be written otherwise": (b"200", posted(modern("tools/list", "grüße"))),
    "an id that is long": (b"200", posted(modern("tools/list", "x" * 1000))),
    "an id that is no integer": (b"400", posted(modern("tools/list", 1.0))),
    "an id that is null": (b"400", posted(modern("tools/list", None))),
    "no id": (b"202", posted(LISTED.replace(b'"id": 1, ', b""))),
    "a batch": (b"400", posted(b"[" + LISTED + b"]")),
    "something behind it": (b"400", posted(LISTED + b"x")),
    "half of it": (b"400", posted(LISTED[:-1])),
    "nothing": (b"400", posted(b"")),
    "no JSON-RPC": (b"400", posted(LISTED.replace(b'"2.0"', b'"1.0"'))),
    "what is no text": (b"400", posted(LISTED.replace(b'"1"', b'"\xff"'))),
    "capabilities that are none": (
        b"400",
        posted(modern("tools/list", params={"_meta": {**META, "io.modelcontextprotocol/clientCapabilities": 7}})),
    ),
    "no capabilities": (b"400", posted(LISTED.replace(b"clientCapabilities", b"clientIncapabilities"))),
    "no params": (b"400", posted(b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}')),
    "too deep": (b"400", posted(b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":' + b"[" * 5000)),
    "too large": (b"413", posted(modern("tools/list", params={"x": "x" * 5_000_000}))),
}


@pytest.mark.parametrize("case", ASIDE)
async def test_whatever_is_in_doubt_is_the_sdks(door: Door, case: str) -> None:
    """Twice, so that nothing that was refused once is remembered as good."""
    status, raw = ASIDE[case]
    await warm(door)
    said = await door.by_sdk(raw)
    assert status in said.status
    with counted(door, "sdk", 2), counted(door, "connection", 0):
        assert [await door.send(raw), await door.send(raw)] == [said, said]


async def test_whitespace_after_a_header_makes_no_difference(door: Door) -> None:
    await warm(door)
    said = await door.send(changed())
    with counted(door, "sdk", 0):
        assert (
            await door.send(changed(Accept="application/json, text/event-stream \t", Mcp_Method="tools/list ")) == said
        )


@pytest.mark.parametrize("path", ["/mcp?x=1", "/mcp/", "/%6dcp", "/other"])
async def test_another_path_goes_where_it_would_have_gone(door: Door, path: str) -> None:
    def raw(line: Line) -> bytes:
        return line.asks("tools/list").replace(b"/mcp", path.encode(), 1)

    await warm(door)
    said = await door.by_sdk(raw)
    with counted(door, "connection", 0):
        assert [await door.send(raw), await door.send(raw)] == [said, said]


@pytest.mark.parametrize("front", FRONTS)
async def test_middleware_of_the_users_sees_every_list(front: str) -> None:
    server = some_server()
    async with open_door(server, front) as door:
        await warm(door)
        with counted(door, "sdk", 0):
            await warm(door)
        own: Any = Own()
        server.middleware.append(own)  # which may come at any time
        with counted(door, "sdk", 15), counted(door, "connection", 0):
            await warm(door)


@pytest.mark.parametrize("front", FRONTS)
async def test_rules_for_hosts_may_change_at_any_time(front: str) -> None:
    async with open_door(some_server(), front) as door:
        await warm(door)
        settings = door.live.server.session_manager.security_settings
        settings.allowed_hosts.remove("127.0.0.1:*")
        with counted(door, "connection", 0):
            assert b"421" in (await door.send(changed())).status
        settings.allowed_hosts.append("127.0.0.1:*")
        assert b"200" in (await door.send(changed())).status
        settings.enable_dns_rebinding_protection = False
        assert b"200" in (await door.send(changed(Host="evil.example"))).status
        settings.enable_dns_rebinding_protection = True
        assert b"421" in (await door.send(changed(Host="evil.example"))).status


async def test_lists_that_each_caller_may_be_shown_otherwise_are_never_kept() -> None:
    async def list_tools(ctx: ServerRequestContext[Any, Any], params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[])

    server: Server[Any] = Server("each", on_list_tools=list_tools)
    async with open_door(server, "connection") as door:
        with counted(door, "sdk", 2), counted(door, "connection", 0):
            for _ in range(2):
                assert b"200" in (await door.send(changed())).status


# Authentication, and what else stands before the front


class PerCaller(MCPServer[Any]):
    """Shows a tool to alice alone, in a method that the SDK lets one override."""

    async def list_tools(self) -> list[types.Tool]:
        token = get_access_token()
        is_hers = token is not None and token.client_id == "alice"
        return [tool for tool in await super().list_tools() if is_hers or tool.name != "hers"]


@pytest.mark.parametrize("front", FRONTS)
async def test_a_method_of_the_users_that_lists_for_each_caller_is_asked_for_each(front: str) -> None:
    server = PerCaller("each", log_level="CRITICAL", **authentication())
    for name in ("hers", "everybodys"):
        server.add_tool(lambda: "", name=name)

    def names(answer: Answer) -> list[str]:
        text = answer.body.partition(b"data: ")[2] or answer.body
        return [tool["name"] for tool in json.loads(text)["result"]["tools"]]

    async with open_door(server, front) as door, door.line() as line:
        sessions = {who: await line.shake_hands(LEGACY[-1], Authorization=f"Bearer {who}") for who in ("alice", "bob")}
        for who in ("alice", "alice", "bob", "alice", "bob"):
            shown = ["everybodys", "hers"] if who == "alice" else ["everybodys"]
            assert names(await door.send(changed(Authorization=f"Bearer {who}"))) == shown
            assert names(await door.send(listed(**sessions[who]))) == shown

        # And nobody is told of what only she is shown.
        line.writer.write(line.listens(1, Authorization="Bearer bob"))
        with anyio.fail_after(DEADLINE):
            await line.reader.readuntil(b"acknowledged")
        server.remove_tool("hers")
        for name in ("hers", "new"):
            server.add_tool(lambda: "", name=name)
        with anyio.fail_after(DEADLINE):
            assert b"hers" not in await line.reader.readuntil(b'"name":"new"')


async def test_no_list_without_the_token_and_none_at_the_connection() -> None:
    async with open_door(some_server(**authentication()), "connection") as door:
        for _ in range(3):
            assert b"200" in (await door.send(changed(Authorization="Bearer alice"))).status
        with counted(door, "sdk", 0):
            assert b"200" in (await door.send(changed(Authorization="Bearer bob"))).status
            for token in (None, "Bearer nobody", "Bearer weak"):
                assert (await door.send(changed(Authorization=token))).status.split()[1] in (b"401", b"403")
        assert door.counts["connection"] == 0


def test_only_an_app_with_nothing_before_the_front_is_answered_at_the_connection() -> None:
    def app(**options: Any) -> Any:
        return Live(some_server(**options)).http_app()

    plain = app()
    found = front_of(plain)
    assert found is not None
    assert found[0] == "/mcp"
    assert front_of(Live(some_server()).http_app(streamable_http_path="/a/b")) is not None

    assert front_of(app(**authentication())) is None
    tokens = authentication()["token_verifier"]
    assert front_of(Live(Server("own")).http_app(token_verifier=tokens)) is None
    with_cors = app()
    with_cors.add_middleware(CORSMiddleware, allow_origins=["*"])
    assert front_of(with_cors) is None
    other = app()
    other.router.routes.insert(0, Route("/{path:path}", endpoint=lambda request: None))
    assert front_of(other) is None
    wrapped = app()
    endpoint = wrapped.routes[0].endpoint
    wrapped.router.routes[0] = Route("/mcp", endpoint=endpoint, middleware=[Middleware(CORSMiddleware)])
    assert front_of(wrapped) is None
    patterned = Live(some_server()).http_app(streamable_http_path="/{tenant}/mcp")
    assert front_of(patterned) is None
    assert front_of(some_server().streamable_http_app()) is None
    assert front_of(lambda scope, receive, send: None) is None
    from fastmcp import FastMCP

    assert front_of(Live(FastMCP("fast"), shared_lists=True).http_app()) is None


@pytest.mark.parametrize("front", FRONTS)
async def test_a_route_that_is_put_before_it_later_is_asked_first(front: str) -> None:
    async with open_door(some_server(), front) as door:
        await warm(door)

        async def refuse(request: Any) -> Response:
            return Response(status_code=418)

        async with door.line() as line:
            assert b"200" in (await line.send(line.asks("tools/list"))).status
            door.app.router.routes.insert(0, Route("/mcp", endpoint=refuse, methods=["POST"]))
            assert b"418" in (await door.send(changed())).status
            # On a connection that was open before, too: of a form that was seen, and of another.
            assert b"418" in (await line.send(line.asks("tools/list"))).status
            assert b"418" in (await line.send(line.asks("tools/list", X_New="yes"))).status


async def test_an_app_that_is_mounted_elsewhere_answers_there_alone() -> None:
    inner = Live(some_server()).http_app()
    outer = Starlette(routes=[Mount("/below", app=inner)])
    async with inner.router.lifespan_context(inner):
        transport = httpx2.ASGITransport(app=outer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:1") as http:
            headers = {
                "Accept": "application/json, text/event-stream",
                "Content-Type": "application/json",
                "MCP-Protocol-Version": MODERN,
                "Mcp-Method": "tools/list",
            }
            for path, status in (("/below/mcp", 200), ("/mcp", 404), ("/below/mcp", 200), ("/mcp", 404)):
                response = await http.post(path, content=modern("tools/list"), headers=headers)
                assert response.status_code == status


# Legacy sessions


def listed(**named: str | None) -> Raw:
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
    return lambda line: line.request(body, **named)


async def test_a_session_is_its_owners_until_it_ends() -> None:
    async with open_door(some_server(**authentication())) as door, door.line() as line:
        alice = await line.shake_hands(LEGACY[-1], Authorization="Bearer alice")
        for _ in range(2):
            assert b"200" in (await door.send(listed(**alice))).status
        for stranger in ({**alice, "Authorization": "Bearer bob"}, {**alice, "Mcp_Session_Id": "nobody"}):
            said = await door.by_sdk(listed(**stranger))
            assert b"404" in said.status
            with counted(door, "sdk", 1):
                assert await door.send(listed(**stranger)) == said
        assert b"401" in (await door.send(listed(**{**alice, "Authorization": None}))).status

        with counted(door, "sdk", 0):
            assert b"200" in (await door.send(listed(**alice))).status
        assert b"200" in (await line.send(line.request(b"", start="DELETE /mcp HTTP/1.1", **alice))).status
        with counted(door, "sdk", 1):
            assert b"404" in (await door.send(listed(**alice))).status


@pytest.mark.parametrize(
    "changes",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Accept": "application/json"},
        {"Content_Type": "application/jsonish"},
        {"MCP_Protocol_Version": "2031-01-01"},
        {"Mcp_Session_Id": None},
    ],
)
async def test_a_legacy_request_in_doubt_is_the_sdks(changes: dict[str, str | None]) -> None:
    async with open_door(some_server()) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        for _ in range(2):
            await line.send(listed(**named)(line))
        said = await door.by_sdk(listed(**(named | changes)))
        assert said.status.split()[1][:1] == b"4"
        with counted(door, "sdk", 2):
            for _ in range(2):
                again = await door.send(listed(**(named | changes)))
                assert (again.status, again.body) == (said.status, said.body)


async def test_a_version_that_the_session_did_not_agree_on_changes_nothing() -> None:
    """As with the SDK: the session's own version counts, whatever later headers say."""
    async with open_door(some_server()) as door, door.line() as line:
        named = await line.shake_hands("2024-11-05")
        newer = await line.shake_hands("2025-11-25")
        await door.send(listed(**named))
        await door.send(listed(**newer))
        for version in (None, "2025-11-25"):
            raw = listed(**(named | {"MCP_Protocol_Version": version}))
            with counted(door, "sdk", 0):
                assert await door.send(raw) == await door.send(listed(**named))
            assert await door.by_sdk(raw) == await door.send(raw)


class Store(EventStore):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        self.events.append((stream_id, message))
        return str(len(self.events))

    async def replay_events_after(self, last_event_id: str, send_callback: Any) -> str | None:
        return None


@pytest.mark.parametrize("json_response", [True, False])
async def test_a_server_that_stores_events_stores_those_of_every_list(json_response: bool) -> None:
    store = Store()
    options = {"event_store": store, "json_response": json_response}
    async with open_door(some_server(), app=options) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        before = len(store.events)
        with counted(door, "sdk", 3):
            for _ in range(3):
                assert (b"id: " in (await door.send(listed(**named))).body) != json_response
        assert len(store.events) - before == (3 if json_response else 6)


async def test_a_server_without_sessions_answers_by_itself() -> None:
    async with open_door(some_server(), app={"stateless_http": True}) as door:
        with counted(door, "sdk", 3):
            for _ in range(3):
                assert b"200" in (await door.send(listed(MCP_Protocol_Version=LEGACY[-1]))).status


async def test_a_list_that_is_kept_keeps_its_session_from_idling_out() -> None:
    async with open_door(some_server(), app={"session_idle_timeout": 60}) as door, door.line() as line:
        named = await line.shake_hands(LEGACY[-1])
        for _ in range(2):
            await line.send(listed(**named)(line))
        transport = seams.session_of(door.live.server.session_manager, named["Mcp_Session_Id"] or "", None)
        assert transport is not None
        assert transport.idle_scope is not None
        transport.idle_scope.deadline = before = anyio.current_time() + 30
        with counted(door, "sdk", 0):
            await line.send(listed(**named)(line))
        assert transport.idle_scope.deadline > before + 20

        # A session that is ending is not held up.
        transport.idle_scope.cancel()
        with counted(door, "sdk", 1):
            assert b"404" in (await line.send(listed(**named)(line))).status


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
        with counted(door, "sdk", 0):
            await door.send(changed())


async def test_a_list_that_is_served_no_longer_is_refused_as_by_the_sdk(door: Door) -> None:
    await warm(door)
    del door.live.lowlevel._request_handlers["tools/list"]
    with counted(door, "sdk", 1):
        assert b"404" in (await door.send(changed())).status


# Beforehand


@pytest.mark.parametrize("front", FRONTS)
async def test_where_a_herd_came_before_the_answer_is_there_before_the_next_one_asks(front: str) -> None:
    """And it is what the SDK would have said, cursor and all."""
    async with open_door(some_server(), front) as door:
        await warm(door)
        for number in range(3):
            for method in LISTS:
                assert b"200" in (await door.send(lambda line, method=method: line.asks(method))).status
            with counted(door, "sdk", 0), door.live.catalog.batch():  # many changes are one
                door.live.tools.add(lambda: "", name=f"new{number}", description="100 % — grüße")
                door.live.tools.add(lambda: "", name=f"other{number}", description="")
                door.live.resources.add(lambda: "", uri=f"door://new{number}", name="new", description=None)
            for method in LISTS:
                with counted(door, "sdk", 0):
                    told = await door.send(lambda line, method=method: line.asks(method))
                assert told == await door.by_sdk(lambda line, method=method: line.asks(method))
        assert b"new2" in (await door.send(changed())).body


async def test_where_nobody_asks_nothing_is_made() -> None:
    server = some_server()
    async with open_door(server) as door:
        await warm(door)
        made: list[str] = []
        original = door.live.answered

        async def answered(method: str, version: str) -> dict[str, Any]:
            made.append(method)
            return await original(method, version)

        door.live.answered = answered  # type: ignore[method-assign]
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
        original = door.live.answered

        async def answered(method: str, version: str) -> dict[str, Any]:
            made.append(len(door.live.catalog.tools))
            return await original(method, version)

        door.live.answered = answered  # type: ignore[method-assign]
        for number in range(5):
            door.live.tools.add(lambda: "", name=f"new{number}", description="")
        with counted(door, "sdk", 0):
            assert b"new4" in (await door.send(changed())).body
        assert made == [7]


async def test_what_can_not_be_made_beforehand_is_made_for_whoever_asks(caplog: pytest.LogCaptureFixture) -> None:
    async with open_door(some_server()) as door:
        await warm(door)

        async def answered(method: str, version: str) -> dict[str, Any]:
            raise RuntimeError("no")

        door.live.answered = answered  # type: ignore[method-assign]
        door.live.tools.add(lambda: "", name="new", description="")
        with counted(door, "sdk", 1):
            for _ in range(3):
                assert b"new" in (await door.send(changed())).body


# Requests that are the same but for their id

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
    with counted(door, "sdk", 0):
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


@pytest.mark.parametrize("front", FRONTS)
async def test_what_is_remembered_of_requests_is_bounded(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_MOST", 8)
    async with open_door(some_server(), front) as door:
        said = await door.send(changed())
        memos: list[dict[Any, Any]] = [
            door.front.verdicts._claims,
            door.front.verdicts._plain,
            door.front.verdicts._shapes,
        ]
        for number in range(30):
            info = {"name": f"client {number}", "version": "1" * number}
            params = {"_meta": {**META, "io.modelcontextprotocol/clientInfo": info}}

            def raw(line: Line, number: int = number, params: Any = params) -> bytes:
                accept = f"application/json, text/event-stream, x/{number}"
                body = modern("tools/list", params=params)
                return line.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list", Accept=accept)

            assert await door.send(raw) == await door.send(raw) == said
            assert all(0 < len(memo) <= 8 for memo in memos)
            if front == "connection":
                doors = [each for each in answers._doors.values() if each.front is door.front]
                assert len(doors) == 1
                assert len(doors[0]._seen) <= 8

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
