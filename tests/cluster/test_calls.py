"""Calls that arrive at a replica without the handler: real clients and servers, and a backend in memory.

The tests add `Forwarding`, a middleware that forwards what its server does not have.

Covers `middleware.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any, cast

import anyio
import httpx2
import mcp_types as types
import pytest
from fastmcp import FastMCP
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import ServerRequestContext
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken
from mcp.server.context import CallNext, HandlerResult
from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve
from mcp.server.mcpserver.prompts import Prompt
from mcp.shared.exceptions import MCPError
from opentelemetry import trace
from pydantic import BaseModel

from tests.support.messages import ACCEPT_BOTH, LATEST_LEGACY, MODERN
from tests.support.telemetry import RecordedTelemetry
from tests.support.tokens import authentication
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tidings.cluster.backend import Backend, CallHandler, NotDelivered, OnProgress
from tidings.cluster.calls import IDLE_TIMEOUT, forward, handle, is_forwarded
from tidings.cluster.memory import MemoryBackend, MemoryTable
from tidings.cluster.nats import Nats
from tidings.core.counts import Counts
from tidings.core.tracer import Tracer
from tidings.sdk.internals import lowlevel_of
from tidings.server.authorization import caller_of
from tidings.telemetry.tracing import TracingObserver

MODES = ("legacy", MODERN)
FORWARDED = {"tools/call", "prompts/get", "resources/read"}
NAME = "cluster"
MakeBackend = Callable[[], Backend]


class Forwarding:
    """Forwards every call: the replica of the client has no items of its own."""

    def __init__(self, backend: Backend, owners: Sequence[str], idle_timeout: float = IDLE_TIMEOUT) -> None:
        self.backend = backend
        self.owners = owners
        self.idle_timeout = idle_timeout
        self.tracer = Tracer()
        self.counts = Counts()
        self.span: trace.Span | None = None

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.method not in FORWARDED or is_forwarded(ctx):
            return await call_next(ctx)
        with trace.use_span(self.span) if self.span else nullcontext():
            return await forward(
                self.backend, self.owners, ctx, self.tracer, self.counts, idle_timeout=self.idle_timeout
            )


class Watcher:
    is_connected = False

    def load(self, epoch: str, entries: Any, order: int) -> None:
        self.is_connected = True

    def apply(self, entries: Any) -> None: ...

    def lose(self, reason: str) -> None: ...


class Replicas:
    """One replica for the client, without items, and the owners."""

    def __init__(self, make_backend: MakeBackend) -> None:
        self.make_backend = make_backend
        self.backends: dict[str, Backend] = {}
        self.running: dict[str, asyncio.Task[None]] = {}

    async def add(self, name: str, server: Any) -> Backend:
        lowlevel = lowlevel_of(server)

        async def handler(request: bytes, on_progress: OnProgress) -> bytes:
            return await handle(lowlevel, {}, Counts(), request, on_progress)

        return await self.add_handler(name, handler)

    async def add_handler(self, name: str, handler: CallHandler) -> Backend:
        backend, watcher = self.make_backend(), Watcher()
        self.backends[name] = backend
        self.running[name] = asyncio.create_task(backend.run(NAME, name, watcher, handler))
        await until(lambda: watcher.is_connected)
        return backend

    async def stop(self, name: str) -> None:
        running = self.running.pop(name)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(params=["memory", "nats"])
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    """Return a function that makes the backend of one more replica."""
    if request.param == "memory":
        return MemoryTable().backend
    url = request.getfixturevalue("nats_url")
    return lambda: Nats(url)


@asynccontextmanager
async def replicas(
    owner: Any,
    owners: Sequence[str] = ("owner",),
    idle_timeout: float = IDLE_TIMEOUT,
    make_backend: MakeBackend | None = None,
    **options: Any,
) -> AsyncIterator[tuple[MCPServer[Any], Forwarding, Replicas]]:
    """Yield a server that forwards every call, its middleware, and the replicas. One of them is `owner`."""
    cluster = Replicas(make_backend or MemoryTable().backend)
    front: MCPServer[Any] = MCPServer(NAME, log_level="CRITICAL", **options)
    forwarding = Forwarding(await cluster.add("front", front), owners, idle_timeout)
    lowlevel_of(front).middleware.append(forwarding)
    await cluster.add("owner", owner)
    try:
        with anyio.fail_after(DEADLINE):
            yield front, forwarding, cluster
    finally:
        for name in list(cluster.running):
            await cluster.stop(name)


class Weather(BaseModel):
    city: str
    degrees: float | None
    days: list[int]


def owner_server() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(NAME, log_level="CRITICAL")

    @server.tool()
    def weather(city: str, days: list[int], degrees: float | None = 1.5) -> Weather:
        return Weather(city=city, degrees=degrees, days=days)

    @server.tool()
    def number(value: Any) -> Any:
        return {"value": value}

    @server.tool()
    def fail() -> str:
        raise ValueError("out of order")

    @server.tool()
    def refuse() -> str:
        raise MCPError(-32010, "not today", {"until": "tomorrow"})

    @server.tool()
    async def who(ctx: Context[Any, Any]) -> dict[str, Any]:
        request = ctx.request_context
        client, token = request.session.client_params, get_access_token()
        return {
            "client": client.client_info.name if client else None,
            "elicits": bool(client and client.capabilities.elicitation),
            "version": request.protocol_version,
            "meta": {key: value for key, value in (request.meta or {}).items() if "/" not in key},
            "is_http": request.request is not None,
            "token": token.model_dump() if token else None,
            "principal": repr(caller_of(request)),
        }

    server.add_prompt(Prompt.from_function(lambda topic: f"About {topic}", name="about"))

    def broken() -> str:
        raise ValueError("no prompt")

    server.add_prompt(Prompt.from_function(broken, name="broken"))
    server.resource("board://one", name="one", mime_type="text/plain")(lambda: "first — erste")
    server.resource("board://binary", name="binary", mime_type="image/png")(lambda: b"\x00\xff")
    server.resource("board://items/{number}", name="item")(lambda number: f"item {number}")

    return server


Call = Callable[[Client], Awaitable[BaseModel]]

CALLS: dict[str, Call] = {
    "arguments": lambda client: client.call_tool("weather", {"city": "Zürich", "days": [1], "degrees": None}),
    "large integers": lambda client: client.call_tool("number", {"value": [2**80, -(2**63), 0.1, None, {"a": None}]}),
    "an invalid argument": lambda client: client.call_tool("weather", {"city": 1}),
    "a tool error": lambda client: client.call_tool("fail", {}),
    "an MCP error": lambda client: client.call_tool("refuse", {}),
    "an unknown tool": lambda client: client.call_tool("missing", {}),
    "a prompt": lambda client: client.get_prompt("about", {"topic": "x"}),
    "a prompt without its argument": lambda client: client.get_prompt("about"),
    "a prompt that fails": lambda client: client.get_prompt("broken"),
    "an unknown prompt": lambda client: client.get_prompt("missing"),
    "a resource": lambda client: client.read_resource("board://one"),
    "a binary resource": lambda client: client.read_resource("board://binary"),
    "a resource of a template": lambda client: client.read_resource("board://items/7%20a"),
    "an unknown resource": lambda client: client.read_resource("board://missing"),
}


def meta(**members: Any) -> types.RequestParamsMeta:
    return cast(types.RequestParamsMeta, members)


async def outcome(call: Call, client: Client) -> Any:
    try:
        return (await call(client)).model_dump(mode="json")
    except MCPError as error:
        return error.error.model_dump()


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
async def test_a_forwarded_call_has_the_outcome_of_a_local_one(mode: str, make_backend: MakeBackend) -> None:
    owner = owner_server()
    async with (
        replicas(owner, make_backend=make_backend) as (front, _, _),
        Client(front, mode=mode) as far,
        Client(owner, mode=mode) as near,
    ):
        for name, call in CALLS.items():
            assert (name, await outcome(call, far)) == (name, await outcome(call, near))

        result = await far.call_tool("weather", {"city": "Bern", "days": []})
        assert result.structured_content == {"city": "Bern", "degrees": 1.5, "days": []}
        assert await outcome(CALLS["an MCP error"], far) == {
            "code": -32010,
            "message": "not today",
            "data": {"until": "tomorrow"},
        }


# The caller


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_the_handler_sees_the_client_and_the_metadata_of_its_request(mode: str) -> None:
    async def elicit(context: Any, params: Any) -> types.ElicitResult:
        raise AssertionError

    info = types.Implementation(name="visitor", version="3")
    async with (
        replicas(owner_server()) as (front, _, _),
        Client(front, mode=mode, client_info=info, elicitation_callback=elicit) as client,
    ):
        seen = (await client.call_tool("who", {}, meta=meta(note={"x": 1}))).structured_content

    assert seen is not None
    assert (seen["client"], seen["elicits"], seen["is_http"], seen["token"]) == ("visitor", True, False, None)
    assert seen["version"] == (LATEST_LEGACY if mode == "legacy" else MODERN)
    assert seen["meta"] == {"note": {"x": 1}}


class Verifier:
    async def verify_token(self, token: str) -> AccessToken | None:
        return AccessToken(
            token=token,
            client_id="app",
            scopes=["read", "write"],
            expires_at=4_000_000_000,
            resource="https://tidings.example",
            subject="alice",
            claims={"iss": "https://issuer.example", "tenant": {"id": 7}, "odd": object},
        )


class RecordingBackend:
    """Records the requests, and passes them on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.requests: list[bytes] = []

    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109 – as in the protocol
        self.requests.append(request)
        return await self._backend.call(replica, request, on_progress, timeout)


@asynccontextmanager
async def http_client(front: MCPServer[Any], mode: str, token: str | None = None) -> AsyncIterator[Client]:
    async with run_uvicorn(front.streamable_http_app()) as server:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(DEADLINE), verify=False) as http:
            transport = streamable_http_client(f"http://127.0.0.1:{address_of(server)[1]}/mcp", http_client=http)
            async with Client(transport, mode=mode) as client:
                yield client


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_the_handler_sees_the_principal_of_the_caller_and_not_its_token(mode: str) -> None:
    async with replicas(owner_server(), **authentication(Verifier())) as (front, forwarding, _):
        backend = RecordingBackend(forwarding.backend)
        forwarding.backend = backend  # type: ignore[assignment]  # it has the method that is used here
        async with http_client(front, mode, token="very-secret") as client:
            seen = (await client.call_tool("who", {})).structured_content

    assert seen is not None
    assert seen["is_http"]
    assert seen["token"] == {
        "token": "",
        "client_id": "app",
        "scopes": ["read", "write"],
        "expires_at": 4_000_000_000,
        "resource": "https://tidings.example",
        "subject": "alice",
        "claims": {"iss": "https://issuer.example", "tenant": {"id": 7}, "odd": str(object)},
    }
    assert (
        seen["principal"]
        == "Principal(client_id='app', subject='alice', scopes=('read', 'write'), expires_at=4000000000)"
    )
    assert backend.requests
    assert not any(b"very-secret" in request for request in backend.requests)


@pytest.mark.anyio
async def test_an_anonymous_caller_over_http_is_not_a_local_one() -> None:
    async with replicas(owner_server()) as (front, _, _), http_client(front, MODERN) as client:
        seen = (await client.call_tool("who", {})).structured_content

    assert seen is not None
    assert (seen["is_http"], seen["token"], seen["principal"]) == (True, None, "None")


@pytest.mark.anyio
async def test_the_trace_of_the_forwarding_span_continues_at_the_owner() -> None:
    telemetry = RecordedTelemetry()
    incoming = {"traceparent": f"00-{1:032x}-{2:016x}-01", "tracestate": "a=b"}
    async with replicas(owner_server()) as (front, forwarding, _), Client(front, mode=MODERN) as client:
        kept = (await client.call_tool("who", {}, meta=meta(**incoming))).structured_content
        forwarding.tracer = TracingObserver(Counts(), NAME)
        forwarding.span = telemetry.tracer.start_span("forwarding")
        replaced = (await client.call_tool("who", {}, meta=meta(**incoming))).structured_content

    assert kept is not None
    assert replaced is not None
    context = forwarding.span.get_span_context()
    assert kept["meta"] == incoming
    assert replaced["meta"] == {
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    }


# Before the result


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
async def test_progress_and_log_messages_reach_the_client_in_order_before_the_result(
    mode: str, make_backend: MakeBackend
) -> None:
    owner = MCPServer[Any](NAME, log_level="CRITICAL")
    received: list[Any] = []

    @owner.tool()
    async def work(ctx: Context[Any, Any]) -> str:
        for number in range(20):
            await ctx.report_progress(number, 20, f"step {number}")
        await ctx.info("almost")
        return "done"

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        received.append((progress, total, message))

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        received.append(params.data)

    async with (
        replicas(owner, make_backend=make_backend) as (front, _, _),
        Client(front, mode=mode, logging_callback=on_log, log_level="info") as client,
    ):
        result = await client.call_tool("work", {}, progress_callback=on_progress)
        await until(lambda: len(received) == 21)
        assert received[:20] == [(number, 20, f"step {number}") for number in range(20)]
        assert received[20] == "almost"
        without_token = await client.call_tool("work", {})

    assert result.structured_content == without_token.structured_content == {"result": "done"}


class Hanging:
    """A server whose tool never returns by itself."""

    def __init__(self) -> None:
        self.server: MCPServer[Any] = MCPServer(NAME, log_level="CRITICAL")
        self.server.add_tool(self.hang)
        self.started = anyio.Event()
        self.calls = 0
        self.cancelled = anyio.Event()

    async def hang(self) -> str:
        self.calls += 1
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled.set()
        return ""


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["in process", "HTTP"])
async def test_the_handler_is_cancelled_when_the_client_cancels(
    mode: str, transport: str, make_backend: MakeBackend
) -> None:
    """A modern client over HTTP cancels by closing its connection."""
    owner = Hanging()
    async with (
        replicas(owner.server, make_backend=make_backend) as (front, _, _),
        http_client(front, mode) if transport == "HTTP" else Client(front, mode=mode) as client,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "hang", {})
            await owner.started.wait()
            assert not owner.cancelled.is_set()
            tasks.cancel_scope.cancel()
        await owner.cancelled.wait()


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_a_call_without_progress_ends_with_an_error_after_the_timeout(mode: str) -> None:
    owner = Hanging()
    async with replicas(owner.server, idle_timeout=0.05) as (front, _, _), Client(front, mode=mode) as client:
        with pytest.raises(MCPError) as raised:
            await client.call_tool("hang", {})
        await owner.cancelled.wait()

    assert raised.value.code == types.REQUEST_TIMEOUT
    assert raised.value.message == (
        "tools/call 'hang' runs on another replica, and was cancelled after 0.05 s without progress or a result"
    )


@pytest.mark.anyio
async def test_a_call_to_an_owner_that_hangs_ends_after_the_timeout() -> None:
    async def freeze(request: bytes, on_progress: OnProgress) -> bytes:
        await anyio.sleep_forever()
        return b""

    async with (
        replicas(owner_server(), ["frozen", "owner"], idle_timeout=0.05) as (front, forwarding, cluster),
        Client(front) as client,
    ):
        await cluster.add_handler("frozen", freeze)
        with pytest.raises(MCPError, match="tools/call 'who' runs on another replica, and was cancelled after"):
            await client.call_tool("who", {})
    assert forwarding.counts.failures["forwarding"] == 1


@pytest.mark.anyio
async def test_progress_extends_the_timeout_also_without_a_token() -> None:
    owner = MCPServer[Any](NAME, log_level="CRITICAL")
    idle_timeout = 1.0
    sent = received = 0

    class CountingBackend(MemoryBackend):
        async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109 – as in the protocol
            def count(message: bytes) -> None:
                nonlocal received
                on_progress(message)
                received += 1

            return await super().call(replica, request, count, timeout)

    def has_arrived() -> bool:
        return received == sent

    @owner.tool()
    async def work(ctx: Context[Any, Any]) -> str:
        nonlocal sent
        end = time.monotonic() + 1.2 * idle_timeout
        while time.monotonic() < end:
            await ctx.report_progress(1)
            sent += 1
            await until(has_arrived)
        return "done"

    table = MemoryTable()
    running = replicas(owner, idle_timeout=idle_timeout, make_backend=lambda: CountingBackend(table))
    async with running as (front, _, _), Client(front) as client:
        assert (await client.call_tool("work", {})).structured_content == {"result": "done"}


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_another_owner_is_called_if_the_first_never_got_the_call(mode: str, make_backend: MakeBackend) -> None:
    async with (
        replicas(owner_server(), ["gone", "owner"], make_backend=make_backend) as (front, _, cluster),
        Client(front, mode=mode) as client,
    ):
        assert not (await client.call_tool("weather", {"city": "Bern", "days": []})).is_error
        await cluster.stop("owner")
        with pytest.raises(MCPError, match="was not run: no replica that has it can be reached; try again"):
            await client.call_tool("weather", {"city": "Bern", "days": []})


@pytest.mark.anyio
async def test_a_call_is_not_repeated_if_its_owner_leaves_while_it_runs(make_backend: MakeBackend) -> None:
    first, second = Hanging(), Hanging()
    async with (
        replicas(first.server, ["owner", "other"], make_backend=make_backend) as (front, forwarding, cluster),
        Client(front, mode="legacy") as client,
    ):
        await cluster.add("other", second.server)

        async def leave() -> None:
            await first.started.wait()
            await cluster.stop("owner")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            with pytest.raises(MCPError) as raised:
                await client.call_tool("hang", {})
        await first.cancelled.wait()

    assert "tools/call 'hang' was forwarded to another replica, and may have run, but has no" in raised.value.message
    assert (first.calls, second.calls) == (1, 0)
    assert forwarding.counts.failures["forwarding"] == 1


@pytest.mark.anyio
async def test_the_client_learns_what_is_too_large_for_nats(nats_url: str) -> None:
    owner = MCPServer[Any](NAME, log_level="CRITICAL")
    owner.add_tool(lambda size: "x" * size, name="text")
    async with replicas(owner, make_backend=lambda: Nats(nats_url)) as (front, _, _), Client(front) as client:
        with pytest.raises(MCPError, match=r"may have run, but has no result: .* more than NATS accepts"):
            await client.call_tool("text", {"size": 2_000_000})
        with pytest.raises(MCPError, match=r"'text' was not run: the request has 2,\d+,\d+ bytes, more than the NATS"):
            await client.call_tool("text", {"size": "1" * 2_000_000})
        assert not (await client.call_tool("text", {"size": 2_000})).is_error


@pytest.mark.anyio
async def test_a_call_is_forwarded_once_only() -> None:
    """If each of two replicas regards the other as the owner, the second one answers with the error of the SDK."""
    second: MCPServer[Any] = MCPServer(NAME, log_level="CRITICAL")
    async with replicas(second) as (front, _, cluster), Client(front, mode="legacy") as client:
        back = Forwarding(cluster.backends["owner"], ["front"])
        lowlevel_of(second).middleware.append(back)
        result = await client.call_tool("missing", {})

    assert result.is_error
    assert result.content == [types.TextContent(text="Unknown tool: missing")]


# Requests to the client


class Answer(BaseModel):
    color: str


async def choose() -> Elicit[Answer]:
    return Elicit("Which color?", Answer)


async def answer(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content={"color": "blue"})


@pytest.mark.anyio
async def test_a_legacy_client_of_another_replica_cannot_be_asked() -> None:
    owner = MCPServer[Any](NAME, log_level="CRITICAL")

    @owner.tool()
    async def ask(ctx: Context[Any, Any]) -> str:
        return str(await ctx.elicit("Which color?", Answer))

    async with (
        replicas(owner) as (front, _, _),
        Client(front, mode="legacy", elicitation_callback=answer) as client,
    ):
        with pytest.raises(MCPError, match="Cannot send 'elicitation/create': the client is connected to another rep"):
            await client.call_tool("ask", {})


@pytest.mark.anyio
async def test_a_modern_client_of_another_replica_can_be_asked() -> None:
    owner = MCPServer[Any](NAME, log_level="CRITICAL")

    @owner.tool()
    async def paint(answer: Annotated[Answer, Resolve(choose)]) -> str:
        return answer.color

    async with (
        replicas(owner) as (front, _, _),
        Client(front, mode=MODERN, elicitation_callback=answer) as client,
    ):
        assert (await client.call_tool("paint", {})).structured_content == {"result": "blue"}


@pytest.mark.anyio
async def test_a_call_with_invalid_metadata_is_refused_as_by_the_sdk() -> None:
    """The SDK's client cannot send it."""

    async def outcome_of(server: MCPServer[Any]) -> Any:
        params = {"name": "who", "_meta": [1]}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        app = server.streamable_http_app(stateless_http=True, json_response=True)
        async with run_uvicorn(app) as running, httpx2.AsyncClient(verify=False) as http:
            url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
            return (await http.post(url, json=message, headers=ACCEPT_BOTH, timeout=DEADLINE)).json()

    owner = owner_server()
    async with replicas(owner) as (front, forwarding, _):
        forwarding.tracer = TracingObserver(Counts(), NAME)
        forwarding.span = RecordedTelemetry().tracer.start_span("forwarding")
        local = await outcome_of(owner)
        assert local["error"]["code"] == types.INVALID_PARAMS
        assert await outcome_of(front) == local


# Other servers, other versions


@pytest.mark.anyio
@pytest.mark.parametrize("mode", MODES)
async def test_the_owner_may_be_a_fastmcp_server(mode: str) -> None:
    owner: FastMCP[Any] = FastMCP(NAME)
    owner.tool(lambda a: {"sum": a + 1}, name="add")
    async with replicas(owner) as (front, _, _), Client(front, mode=mode) as client:
        assert (await client.call_tool("add", {"a": 1})).structured_content == {"sum": 2}


class Capturing:
    """A backend that reaches no replica."""

    request = b""

    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109 – as in the protocol
        self.request = request
        raise NotDelivered(replica)


async def captured(name: str, idle_timeout: float = IDLE_TIMEOUT) -> dict[str, Any]:
    """Return the request to an owner."""
    front: MCPServer[Any] = MCPServer(NAME, log_level="CRITICAL")
    backend = Capturing()
    lowlevel_of(front).middleware.append(Forwarding(backend, ["owner"], idle_timeout))  # type: ignore[arg-type]
    async with Client(front, mode=MODERN) as client:
        with pytest.raises(MCPError):
            await client.call_tool(name, {"city": "Bern", "days": []})
    request: dict[str, Any] = json.loads(backend.request)
    return request


@pytest.mark.anyio
async def test_a_handler_whose_caller_is_gone_is_cancelled_after_the_timeout() -> None:
    owner = Hanging()
    request = json.dumps(await captured("hang", idle_timeout=0.05)).encode()

    reply = json.loads(await handle(lowlevel_of(owner.server), {}, Counts(), request, lambda message: None))

    assert reply["error"]["code"] == types.REQUEST_TIMEOUT
    assert owner.cancelled.is_set()


@pytest.mark.anyio
async def test_a_request_with_unknown_members_is_handled_and_an_unknown_version_is_refused() -> None:
    request = await captured("weather")
    lowlevel, counts = lowlevel_of(owner_server()), Counts()

    async def reply_to(request: Any) -> Any:
        return json.loads(await handle(lowlevel, {}, counts, json.dumps(request).encode(), lambda _: None))

    newer = await reply_to({**request, "new": 1, "client_info": {**request["client_info"], "new": 1}})
    assert newer["result"]["structuredContent"]["city"] == "Bern"
    assert "version 2 " in (await reply_to({**request, "version": 2}))["refusal"]
    assert "2030-01-01" in (await reply_to({**request, "protocol_version": "2030-01-01"}))["refusal"]
    assert not counts.failures
    assert (await reply_to([]))["refusal"] == "the request cannot be decoded"
    assert counts.failures["forwarding"] == 1


@pytest.mark.anyio
async def test_another_owner_is_called_if_the_first_refuses_the_call() -> None:
    async with replicas(owner_server(), ["newer", "owner"]) as (front, forwarding, cluster), Client(front) as client:

        async def refuse(request: bytes, on_progress: OnProgress) -> bytes:
            on_progress(b"not a message")
            return b'{"version": 2, "refusal": "too old", "new": 1}'

        await cluster.add_handler("newer", refuse)
        assert not (await client.call_tool("weather", {"city": "Bern", "days": []})).is_error
    assert forwarding.counts.failures["forwarding"] == 1  # the message that cannot be decoded


@pytest.mark.anyio
async def test_a_reply_that_cannot_be_decoded_is_an_error() -> None:
    async with (
        replicas(owner_server(), ["newer", "owner"]) as (front, forwarding, cluster),
        Client(front) as client,
    ):

        async def reply(request: bytes, on_progress: OnProgress) -> bytes:
            return b"?"

        await cluster.add_handler("newer", reply)
        with pytest.raises(MCPError, match="whose reply cannot be decoded"):
            await client.call_tool("weather", {"city": "Bern", "days": []})
    assert forwarding.counts.failures["forwarding"] == 1
