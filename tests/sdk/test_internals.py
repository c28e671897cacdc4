"""The private parts of the SDK, FastMCP and OpenTelemetry that `tidings.sdk.internals` uses exist and are in use.

Each test uses the part for its purpose: a name can still exist and have no effect. The parts of uvicorn are in
`tests/http/test_internals_uvicorn.py`.

Covers `wire/methods.py`.
"""

from __future__ import annotations

import json
import math
import subprocess
import threading
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from fastmcp import FastMCP
from fastmcp.prompts import Prompt
from fastmcp.resources import Resource, ResourceTemplate
from fastmcp.server.auth.providers.jwt import StaticTokenVerifier
from fastmcp.tools import Tool
from mcp.client.client import Client
from mcp.server import Server, ServerRequestContext
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from mcp_types import CallToolResult, JSONRPCRequest, ListToolsResult, PaginatedRequestParams, TextContent
from pydantic import AnyHttpUrl

from tests.support.forking import forked_command
from tests.support.messages import META, initialize
from tests.support.waiting import until
from tidings.sdk import internals
from tidings.wire.methods import LIST_METHODS


def hello() -> str:
    return "hello"


def detail(number: str) -> str:
    return number


# stdio


@pytest.mark.anyio
async def test_write_stream_gets_all_messages_of_a_connection() -> None:
    """In both eras, and for a connection that has only streams."""
    found: list[object] = []

    async def call(ctx: ServerRequestContext[Any, Any], params: Any) -> CallToolResult:
        found.append(internals.write_stream_of(internals.connection_of(ctx.session)))
        return CallToolResult(content=[])

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[])

    server: Server[Any] = Server("board", on_call_tool=call, on_list_tools=list_tools)
    eras: list[list[tuple[str, dict[str, Any]]]] = [
        [("initialize", initialize()["params"]), ("tools/call", {"name": "t"})],
        [("tools/call", {"name": "t", "_meta": META})],
    ]
    for requests in eras:
        to_server, inbox = anyio.create_memory_object_stream[Any](8)
        outbox, from_server = anyio.create_memory_object_stream[Any](8)
        async with anyio.create_task_group() as tasks, to_server, from_server:
            tasks.start_soon(server.run, inbox, outbox, server.create_initialization_options())
            for number, (method, params) in enumerate(requests):
                request = JSONRPCRequest(jsonrpc="2.0", id=number, method=method, params=params)
                await to_server.send(SessionMessage(request))
                await from_server.receive()
            assert found.pop() is outbox
            tasks.cancel_scope.cancel()


def test_stdio_is_claimed_and_released() -> None:
    program = """
import os, subprocess, sys
from tidings.sdk import internals
with internals.claim_stdio() as (stdin, stdout):
    print("stray", flush=True)
    subprocess.run(["sh", "-c", "echo stray; cat"], check=True)
    os.write(stdout, os.read(stdin, 100).upper())
print("after", input(), flush=True)
"""
    command, pipe = forked_command("-c", program), subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"wire")
        process.stdin.flush()
        assert process.stdout.read(4) == b"WIRE"
        rest, said = process.communicate(b"line\n", timeout=60)
    assert rest == b"after line\n"
    assert said.count(b"stray") == 2


# Watching


def test_registry_of_a_fastmcp_is_watched_and_used() -> None:
    server = FastMCP("board")
    woken: list[Any] = []
    internals.watch_fastmcp(server, lambda *change: woken.append(change), lambda: woken.append(None), threading.RLock())
    provider = server.local_provider
    added: list[Any] = [
        provider.add_tool(Tool.from_function(hello, name="t")),
        provider.add_prompt(Prompt.from_function(hello, name="p")),
        provider.add_resource(Resource.from_function(hello, uri="a://r")),
        provider.add_template(ResourceTemplate.from_function(detail, uri_template="a://t/{number}")),
    ]
    assert woken == [(component.key, None, component) for component in added]
    assert [provider._components[each.key].key for each in added] == [each.key for each in added]

    for remove, key in (
        (provider.remove_tool, "t"),
        (provider.remove_prompt, "p"),
        (provider.remove_resource, "a://r"),
        (provider.remove_template, "a://t/{number}"),
    ):
        before = len(woken)
        remove(key)
        assert len(woken) > before
        assert woken[-1][2] is None
    assert not provider._components


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items.__setitem__("b", 2),
        lambda items: items.__delitem__("a"),
        lambda items: items.pop("a"),
        lambda items: items.pop("a", None),
        lambda items: items.popitem(),
        lambda items: items.clear(),
        lambda items: items.update({"b": 2}),
        lambda items: items.update(b=2),
        lambda items: items.setdefault("b", 2),
        lambda items: items.__ior__({"b": 2}),
    ],
)
def test_watched_dict_reports_every_kind_of_change(change: Any) -> None:
    calls: list[Any] = []
    watched = internals.WatchedDict({"a": 1}, lambda *change: calls.append(change), threading.RLock())
    plain = {"a": 1}

    change(watched)
    change(plain)

    assert calls
    assert watched == plain
    assert not [name for name in vars(dict) if name in MUTATORS and name not in vars(internals.WatchedDict)]


MUTATORS = {"__setitem__", "__delitem__", "__ior__", "pop", "popitem", "clear", "update", "setdefault"}


# Access


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_connection_has_state_and_an_exit_stack(mode: str) -> None:
    seen: list[Any] = []
    ended: list[str] = []

    async def list_tools(ctx: ServerRequestContext[Any, Any], params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[])

    async def call_tool(ctx: ServerRequestContext[Any, Any], params: Any) -> CallToolResult:
        connection = internals.connection_of(ctx.session)
        seen.append((connection.session_id, connection.state.setdefault("calls", [])))
        connection.state["calls"].append(params.name)
        if len(connection.state["calls"]) == 1:
            connection.exit_stack.callback(ended.append, params.name)
        return CallToolResult(content=[TextContent(type="text", text="")])

    server: Server[Any] = Server("board", on_list_tools=list_tools, on_call_tool=call_tool)
    async with Client(server, mode=mode) as client:
        await client.call_tool("first", {})
        await client.call_tool("second", {})
        assert ended == ([] if mode == "legacy" else ["first", "second"])

    # A legacy connection lasts for many requests, a modern one for one.
    assert seen[-1] == (None, ["first", "second"] if mode == "legacy" else ["second"])
    assert ended == (["first"] if mode == "legacy" else ["first", "second"])


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_any_notification_can_be_sent_on_the_channel_of_a_request(mode: Any) -> None:
    received: list[str] = []

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[])

    async def call_tool(ctx: ServerRequestContext[Any, Any], params: Any) -> CallToolResult:
        await internals.notify_request(ctx.session, "notifications/message", {"level": "info", "data": "hello"})
        return CallToolResult(content=[])

    async def on_log(params: Any) -> None:
        received.append(params.data)

    server: Server[Any] = Server("board", on_list_tools=list_tools, on_call_tool=call_tool)
    async with Client(server, mode=mode, logging_callback=on_log) as client:
        await client.call_tool("first", {})
        await until(lambda: received)

    assert received == ["hello"]


def test_lowlevel_server_handles_the_requests() -> None:
    for server in (MCPServer("board"), FastMCP("board")):
        lowlevel = internals.lowlevel_of(server)
        assert isinstance(lowlevel, Server)
        assert lowlevel.get_request_handler("tools/list") is not None
        assert isinstance(lowlevel.middleware, list)
        assert isinstance(lowlevel.extensions, dict)


@pytest.mark.anyio
async def test_replaced_list_methods_of_an_mcpserver_are_detected() -> None:
    """A list request goes through the handler and then the method. Replacing either is detected."""
    called: list[str] = []

    def noting(name: str) -> Any:
        async def note(self: Any, *args: Any) -> Any:
            called.append(name)
            return await getattr(MCPServer, name)(self, *args)

        return note

    names = ["list_tools", "list_prompts", "list_resources", "list_resource_templates"]
    every = [*names, *(f"_handle_{name}" for name in names)]

    def has_standard_lists(server: Any) -> bool:
        return all(internals.has_standard_list(server, path) for path in LIST_METHODS)

    assert has_standard_lists(MCPServer("board"))
    for name in every:
        overridden: Any = type("Overridden", (MCPServer,), {name: noting(name)})
        assert not has_standard_lists(overridden("board")), name
        assert has_standard_lists(type("Other", (MCPServer,), {"hello": hello})("board"))
        set_on_it: Any = MCPServer("board")
        setattr(set_on_it, name, hello)
        assert not has_standard_lists(set_on_it), name
        async with Client(overridden("board")) as client:
            for ask in names:
                await getattr(client, ask)()
        assert called == [name], "the SDK no longer lists by this method"
        called.clear()

    async def own(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[])

    server = MCPServer("board")
    internals.lowlevel_of(server).add_request_handler("tools/list", PaginatedRequestParams, own)
    assert not has_standard_lists(server)


@pytest.mark.anyio
async def test_session_manager_has_the_lifespan_state() -> None:
    server: Server[Any] = Server("board")
    server.streamable_http_app()
    assert internals.lifespan_state_of(server.session_manager) is None
    async with server.session_manager.run():
        assert internals.lifespan_state_of(server.session_manager) == {}


@pytest.mark.anyio
async def test_legacy_session_is_found_for_its_owner_and_its_idle_timeout_restarted() -> None:
    def user(name: str) -> AuthenticatedUser:
        return AuthenticatedUser(AccessToken(token=name, client_id=name, scopes=[]))

    server: Server[Any] = Server("board")
    server.streamable_http_app(session_idle_timeout=60)
    manager = server.session_manager
    async with manager.run():
        for owner, stranger in ((None, user("bob")), (user("alice"), user("bob")), (user("alice"), None)):
            session_id, idle_end = await open_session(manager, owner)
            transport = internals.session_of(manager, session_id, owner)
            assert transport is not None
            assert internals.session_of(manager, session_id, stranger) is None
            assert internals.session_of(manager, "another", owner) is None

            # Not while a request is in progress.
            internals.restart_idle_timeout(transport)
            assert transport.idle_scope is not None
            assert idle_end < transport.idle_scope.deadline <= anyio.current_time() + 60
            transport._requests_in_flight, transport.idle_scope.deadline = 1, math.inf
            internals.restart_idle_timeout(transport)
            assert transport.idle_scope.deadline == math.inf

            await transport.terminate()
            assert internals.session_of(manager, session_id, owner) is None


async def open_session(manager: StreamableHTTPSessionManager, user: Any) -> tuple[str, float]:
    """Return the id of a new legacy session, and the time of its idle timeout."""
    body = json.dumps(initialize()).encode()
    accept = (b"accept", b"application/json, text/event-stream")
    scope = {
        "type": "http",
        "method": "POST",
        "headers": [accept, (b"content-type", b"application/json"), (b"host", b"localhost:1")],
        "user": user,
    }
    messages = [{"type": "http.request", "body": body}]
    started: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else await anyio.sleep_forever()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            started.append(message)

    await manager.handle_request(scope, receive, send)
    session_id = dict(started[0]["headers"])[b"mcp-session-id"].decode()
    idle_scope = manager._server_instances[session_id].idle_scope
    assert idle_scope is not None
    return session_id, idle_scope.deadline


@pytest.mark.anyio
@pytest.mark.parametrize("auth", [None, StaticTokenVerifier({"t": {"client_id": "c"}})])
async def test_fastmcp_endpoint_is_found_inside_its_authentication(auth: Any) -> None:
    app = FastMCP("board", auth=auth).http_app()
    endpoint = internals.fastmcp_endpoint(app)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))
        assert callable(endpoint.session_manager.asgi_app)
        assert endpoint.session_manager.max_request_body_size > 0
        assert internals.lifespan_state_of(endpoint.session_manager) is not None


def test_app_without_a_fastmcp_endpoint_raises() -> None:
    with pytest.raises(LookupError, match="no streamable HTTP endpoint"):
        internals.fastmcp_endpoint(FastMCP("board").http_app(transport="sse"))


def test_set_auth_makes_an_mcpserver_require_a_token() -> None:
    class Verifier:
        async def verify_token(self, token: str) -> AccessToken | None:
            return None

    server = MCPServer("board")
    settings = AuthSettings(issuer_url=AnyHttpUrl("https://issuer.example"), resource_server_url=None)
    internals.set_auth(server, settings, Verifier())

    [route] = [each for each in server.streamable_http_app().routes if getattr(each, "path", "") == "/mcp"]
    assert type(getattr(route, "endpoint", None)).__name__ == "RequireAuthMiddleware"


# OpenTelemetry, in a process of its own, because a provider can be set only once

LATE = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from mcp.server.mcpserver import MCPServer
from tidings import Live
from tidings.sdk import internals

live = Live(MCPServer("late"))
live.resources.updated("x://before")
assert not internals.has_tracer()
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
assert internals.has_tracer()
live.resources.updated("x://after")
told = [span.attributes for span in exporter.get_finished_spans() if "x://" in str(span.attributes)]
assert len(told) == 1 and "x://after" in str(told[0]), told

# The attribute was renamed.
del trace._TRACER_PROVIDER
live.resources.updated("x://moved")
told = [span.attributes for span in exporter.get_finished_spans() if "x://" in str(span.attributes)]
assert "x://moved" in str(told[-1]), told
"""


def test_tracer_provider_set_later_is_used_even_if_the_private_attribute_is_missing() -> None:
    done = subprocess.run(forked_command("-c", LATE), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
