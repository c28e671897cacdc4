"""`Mirror` with real servers of both eras: current lists, few requests, reconnects, subscriptions.

Covers `connection.py`, `lists.py`, `refresher.py`, `snapshot.py` and `transport.py`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mcp_types as types
import msgspec
import pytest
from mcp.client._memory import InMemoryTransport
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.server.streamable_http import EventMessage, EventStore
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPError

from tests.support.forking import ENVIRONMENT, forked_command
from tests.support.scripted_server import ScriptedServer
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, free_port, until
from tidings import (
    Disconnected,
    Feature,
    Live,
    Mirror,
    NotFound,
    NotSupported,
    Policy,
    Terms,
    TidingsError,
    Version,
)
from tidings.client import Timing
from tidings.core.cursor import cursor_json
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY
from tidings.wire.methods import LIST_METHODS

pytestmark = pytest.mark.anyio

QUICK = Timing(min_interval=0, first_retry=0.005, longest_retry=0.05, first_poll=0.05, random=lambda: 0.5)
ERAS = {"modern": "auto", "legacy": "legacy"}


def plain_server(*tools: str) -> MCPServer[Any]:
    """A server of the SDK that notifies its clients as the SDK documents it. It has these tools, too."""
    server: MCPServer[Any] = MCPServer("plain", log_level="CRITICAL")

    @server.tool()
    async def add(ctx: Context[Any, Any], name: str) -> str:
        server.add_tool(lambda: name, name=name)
        await ctx.notify_tools_changed()
        return "added"

    for tool in tools:
        server.add_tool(lambda: "", name=tool)
    server.resource("plain://one", name="one")(lambda: "1")
    server.resource("plain://each/{name}", name="each")(lambda name: name)
    server.prompt(name="greet")(lambda: "Hello")
    return server


def fast_server() -> Any:
    fastmcp = pytest.importorskip("fastmcp")
    server = fastmcp.FastMCP("fast")

    async def add(name: str) -> str:
        server.add_tool(fastmcp.tools.Tool.from_function(lambda: name, name=name))
        return "added"

    server.tool(add)
    server.resource("plain://one", name="one")(lambda: "1")
    server.resource("plain://each/{name}", name="each")(lambda name: name)
    server.prompt(name="greet")(lambda: "Hello")
    return server


APPS: dict[str, Any] = {
    "tidings": lambda: Live(plain_server()).http_app(),
    "sdk": lambda: plain_server().streamable_http_app(),
    "fastmcp": lambda: fast_server().http_app(),
}


def timing_for(kind: str) -> Timing:
    """FastMCP announces list changes to legacy clients, but sends nothing after `add_tool()`."""
    return replace(QUICK, recheck=0.05) if kind == "fastmcp" else QUICK


@asynccontextmanager
async def mirroring(server: ScriptedServer, era: str = "modern", **options: Any) -> AsyncIterator[tuple[Any, Mirror]]:
    """Serve, and connect a mirror; yield the uvicorn server and the mirror."""
    async with server.serving() as running:
        target = Client(server.url(running), mode=ERAS[era])
        async with Mirror(target, timing=options.pop("timing", QUICK), **options) as mirror:
            yield running, mirror


async def current(mirror: Mirror, *states: str) -> None:
    while (status := mirror.status).state not in (states or ("fresh",)):
        await mirror.next_status(status)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", APPS)
async def test_a_tool_that_a_call_adds_appears_over_http(kind: str, era: str) -> None:
    async with asyncio.timeout(DEADLINE), run_uvicorn(APPS[kind]()) as server:
        url = f"http://127.0.0.1:{address_of(server)[1]}/mcp"
        async with Mirror(Client(url, mode=ERAS[era]), timing=timing_for(kind)) as mirror:
            assert list(mirror.tools) == ["add"]
            assert list(mirror.prompts) == ["greet"]
            assert list(mirror.resources) == ["plain://one"]
            assert list(mirror.templates) == ["plain://each/{name}"]
            before, digest, changes = mirror.snapshot(), mirror.digest, mirror.changes()
            assert not (await mirror.call("add", {"name": "Added"})).is_error
            change = await anext(changes)
            assert change[:3] == ("added", "tools", "Added")
            assert await mirror.wait_for("Added") is change.item
            assert list(mirror.tools) == ["Added", "add"]  # sorted
            assert (list(before.tools), before.digest) == (["add"], digest)
            assert mirror.digest != digest
            assert mirror.snapshot().is_superset_of(before)
            assert not before.is_superset_of(mirror.snapshot())


STDIO = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.client.test_mirror import fast_server, plain_server
from tidings import Live
if sys.argv[2] == "tidings":
    Live(plain_server()).run("stdio")
else:
    {"sdk": plain_server, "fastmcp": fast_server}[sys.argv[2]]().run("stdio")
"""


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("kind", APPS)
async def test_a_tool_that_a_call_adds_appears_over_stdio(kind: str, era: str, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(STDIO)
    command, *arguments = forked_command(script, Path(__file__).parents[2], kind)
    target = Client(StdioServerParameters(command=command, args=arguments, env=ENVIRONMENT), mode=ERAS[era])
    async with asyncio.timeout(DEADLINE), Mirror(target, timing=timing_for(kind)) as mirror:
        assert list(mirror.tools) == ["add"]
        await mirror.call("add", {"name": "Added"})
        await mirror.wait_for("Added")
        assert list(mirror.templates) == ["plain://each/{name}"]


@pytest.mark.parametrize("era", ERAS)
async def test_200_notifications_cost_two_fetches(era: str) -> None:
    server = ScriptedServer()
    timing = replace(QUICK, first_poll=3600.0)  # a poll that is due before a legacy stream is open would be counted
    async with asyncio.timeout(DEADLINE), mirroring(server, era, timing=timing) as (_, mirror):
        await current(mirror)
        server.requests.clear()
        server.release = asyncio.Event()
        server.lists["tools"]["first"] = ""
        await server.notify("tools")
        await until(lambda: server.requests["tools"] == 1)
        received = 0

        def count(notification: Any) -> None:
            nonlocal received
            received += 1

        mirror.set_notification_handler("notifications/tools/list_changed", count)
        for number in range(199):
            server.lists["tools"][f"tool {number}"] = ""
            await server.notify("tools")
            await until(lambda number=number: received > number)  # type: ignore[misc]
        server.release.set()
        await until(lambda: len(mirror.tools) == 200)
        await current(mirror)
        assert server.requests == {"tools": 2}


async def test_nothing_changes_if_the_lists_are_the_same() -> None:
    server = ScriptedServer()
    server.lists["tools"] = {"b": "", "a": ""}
    async with asyncio.timeout(DEADLINE), mirroring(server) as (_, mirror):
        snapshot, tools = mirror.snapshot(), mirror.tools
        server.lists["tools"] = {"a": "", "b": ""}  # another order
        count = server.requests["tools"]
        await server.notify("tools")
        await until(lambda: server.requests["tools"] > count)
        await current(mirror)
        assert mirror.snapshot() is snapshot
        assert mirror.tools is tools
        with pytest.raises(TypeError):
            mirror.tools["c"] = mirror.tools["a"]  # type: ignore[index]


async def test_callbacks_get_what_differs() -> None:
    server = ScriptedServer()
    server.lists["prompts"] = {"kept": "", "changed": "old", "gone": ""}
    async with asyncio.timeout(DEADLINE), mirroring(server) as (_, mirror):
        seen: list[tuple[str, str]] = []

        @mirror.on_added
        def added(change: Any) -> None:
            seen.append(("added", change.name))
            raise ValueError("a callback that fails does not stop the others")

        @mirror.on_removed
        async def removed(change: Any) -> None:
            seen.append(("removed", change.name))

        @mirror.on_updated
        def updated(change: Any) -> None:
            seen.append((change.before.description, change.item.description))

        kept = mirror.prompts["kept"]
        server.lists["prompts"] = {"kept": "", "changed": "new", "Added": ""}
        await server.notify("prompts")
        await until(lambda: len(seen) == 3)
        assert seen == [("added", "Added"), ("old", "new"), ("removed", "gone")]
        assert mirror.prompts["kept"] is kept


async def test_pages_of_two_versions_are_not_combined() -> None:
    server = ScriptedServer(page_size=2)
    server.lists["tools"] = dict.fromkeys("abcd", "old")
    # In the same process, a notification arrives before the answer that follows it.
    async with asyncio.timeout(DEADLINE), Mirror(server.server, timing=QUICK) as mirror:
        found = [mirror.snapshot()]

        async def follow() -> None:
            async for change in mirror.changes():
                assert change.list == "tools"
                found.append(mirror.snapshot())

        following = asyncio.create_task(follow())

        async def change(name: str) -> None:
            server.between_pages = None
            server.lists["tools"] = dict.fromkeys("xbcd", "newest")
            await server.notify("tools")

        server.between_pages = change
        server.lists["tools"] = dict.fromkeys("abcd", "new")
        await server.notify("tools")
        await until(lambda: "x" in found[-1].tools)
        following.cancel()
        versions = [{name: tool.description for name, tool in each.tools.items()} for each in found]
        allowed = [dict.fromkeys("abcd", "old"), dict.fromkeys("abcd", "new"), dict.fromkeys("bcdx", "newest")]
        assert all(version in allowed for version in versions)
        assert versions[-1] == allowed[-1]


@pytest.mark.parametrize("era", ERAS)
async def test_a_restarted_server_is_mirrored_again(era: str) -> None:
    server = ScriptedServer()
    server.lists["tools"]["before"] = ""
    async with asyncio.timeout(DEADLINE), AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        running = await first.enter_async_context(server.serving())
        port = address_of(running)[1]
        mirror = await stack.enter_async_context(Mirror(Client(server.url(running), mode=ERAS[era]), timing=QUICK))
        await current(mirror)
        await first.aclose()
        await current(mirror, "reconnecting")
        assert mirror.status.stale_since is not None
        assert list(mirror.tools) == ["before"]  # the last known lists
        with pytest.raises(Disconnected, match="not connected"):
            await mirror.call("before")
        server.lists["tools"] = {"after": ""}
        await stack.enter_async_context(server.serving(port))
        await mirror.wait_for("after")
        await current(mirror)
        assert list(mirror.tools) == ["after"]


async def test_a_change_that_is_not_notified_while_a_legacy_stream_is_away_is_found_when_it_is_back() -> None:
    server = ScriptedServer()
    timing = replace(QUICK, first_poll=1000, recheck=1000)  # only the stream can tell
    async with asyncio.timeout(DEADLINE), mirroring(server, "legacy", timing=timing) as (running, mirror):
        await current(mirror)
        server.drop_connections(running)
        server.lists["tools"]["meanwhile"] = ""
        await mirror.wait_for("meanwhile")


async def test_a_session_that_the_server_has_forgotten_is_initialized_again() -> None:
    server = ScriptedServer()
    app, initialized, forgotten = server.server.streamable_http_app(), 0, set[bytes]()

    async def forgetful(scope: Any, receive: Any, send: Any) -> None:
        nonlocal initialized
        session = dict(scope.get("headers", ())).get(b"mcp-session-id")
        if scope["type"] == "http" and scope["method"] == "POST":
            initialized += session is None
            if session in forgotten:
                await send({"type": "http.response.start", "status": 404, "headers": []})
                await send({"type": "http.response.body"})
                return
        await app(scope, receive, send)

    async with asyncio.timeout(DEADLINE), run_uvicorn(forgetful) as running:
        target = Client(server.url(running), mode="legacy")
        async with Mirror(target, timing=replace(QUICK, first_poll=1000, recheck=1000)) as mirror:
            await current(mirror)
            forgotten.update(session.encode() for session in server.sessions)
            server.lists["tools"]["new"] = ""
            await server.notify("tools")  # on the stream, which is still open
            await mirror.wait_for("new")
            await current(mirror)
            assert initialized == 2


class Events(EventStore):
    """Keeps the messages of all streams. A position in the list is the id of an event."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        self.stored.append((stream_id, message))
        return str(len(self.stored) - 1)

    async def replay_events_after(self, last_event_id: str, send_callback: Any) -> str:
        last = int(last_event_id)
        stream_id = self.stored[last][0]
        for position, (found, message) in enumerate(self.stored):
            if position > last and found == stream_id and message is not None:
                await send_callback(EventMessage(message, str(position)))
        return stream_id


async def test_a_response_that_is_resumed_does_not_end_the_connection() -> None:
    async def close_stream(ctx: Any, params: Any) -> types.CallToolResult:
        await ctx.close_sse_stream()
        return types.CallToolResult(content=[])

    server = ScriptedServer()
    server.server.add_request_handler("tools/call", types.CallToolRequestParams, close_stream)
    app = server.server.streamable_http_app(event_store=Events(), retry_interval=50)
    async with asyncio.timeout(DEADLINE), run_uvicorn(app) as running:
        target = Client(server.url(running), mode="legacy")
        async with Mirror(target, timing=replace(QUICK, first_poll=0.005)) as mirror:
            await current(mirror)
            client = mirror.client
            for _ in range(3):  # at each call, the stream of the call before has ended
                await mirror.call("any")
            assert mirror.client is client


async def test_lists_are_fetched_after_the_acknowledgement() -> None:
    server = ScriptedServer()
    listen = ListenHandler(server.bus)

    async def acknowledge(ctx: Any, params: Any) -> Any:
        server.lists["tools"]["just before"] = ""  # without a notification, because nobody listens yet
        return await listen(ctx, params)

    server.server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, acknowledge)
    async with asyncio.timeout(DEADLINE), Mirror(server.server, timing=QUICK) as mirror:
        assert list(mirror.tools) == ["just before"]


async def test_a_process_that_ends_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import os, sys\n"
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('p', log_level='CRITICAL')\n"
        "server.tool(name=f'tool-{os.getpid()}')(lambda: os._exit(1))\n"
        "server.run('stdio')\n"
    )
    async with asyncio.timeout(DEADLINE), Mirror([*forked_command(script)], timing=QUICK) as mirror:
        (name,) = mirror.tools
        with pytest.raises(Disconnected, match="may have run"):
            await mirror.call(name)
        await until(lambda: name not in mirror.tools)
        assert len(mirror.tools) == 1


async def test_a_mirror_can_be_entered_only_once() -> None:
    mirror, failed = Mirror(plain_server()), Mirror("no-such-command")
    async with asyncio.timeout(DEADLINE), mirror:
        with pytest.raises(TidingsError, match="the mirror of MCPServer was used before; create another one"):
            await mirror.__aenter__()
    with pytest.raises(Disconnected):
        await failed.__aenter__()
    for used in (mirror, failed):
        with pytest.raises(TidingsError, match="create another one"):
            async with asyncio.timeout(DEADLINE), used:
                pass


class CountingApp:
    """An ASGI app that counts the requests of each method to the app behind it, which a test can replace."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.requests: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        request = await receive()
        self.requests[msgspec.json.decode(request.get("body") or b"{}").get("method", "")] += 1
        messages = iter([request])

        async def received() -> Any:
            return next(messages, None) or await receive()

        await self.app(scope, received, send)


async def test_a_resumed_list_is_not_fetched_again() -> None:
    counting = CountingApp(Live(plain_server()).http_app())
    async with asyncio.timeout(DEADLINE), AsyncExitStack() as stack:
        port = free_port()
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(run_uvicorn(counting, port=port))
        target = f"http://127.0.0.1:{port}/mcp"
        mirror = await stack.enter_async_context(Mirror(target, timing=QUICK))
        await first.aclose()
        await current(mirror, "reconnecting")
        counting.requests.clear()
        counting.app = Live(plain_server("meanwhile")).http_app()
        await stack.enter_async_context(run_uvicorn(counting, port=port))
        await mirror.wait_for("meanwhile")
        await current(mirror)
        assert counting.requests["tools/list"] == 1
        assert counting.requests["prompts/list"] == counting.requests["resources/list"] == 0


@asynccontextmanager
async def mirroring_live(live: Live, era: str = "modern") -> AsyncIterator[tuple[Counter[str], Mirror]]:
    """Serve with Tidings, and connect a mirror; yield the counted requests and the mirror."""
    counting = CountingApp(live.http_app())
    async with asyncio.timeout(DEADLINE), run_uvicorn(counting) as server:
        url = f"http://127.0.0.1:{address_of(server)[1]}/mcp"
        async with Mirror(Client(url, mode=ERAS[era]), timing=QUICK) as mirror:
            await current(mirror)
            counting.requests.clear()
            yield counting.requests, mirror


@pytest.mark.parametrize("era", ERAS)
async def test_changes_of_a_tidings_server_are_applied_without_a_list_request(era: str) -> None:
    server = plain_server(*(f"tool{number}" for number in range(100)))
    live = Live(server)
    async with mirroring_live(live, era) as (requests, mirror):
        changes, kept = mirror.changes(), mirror.tools["tool7"]
        server.add_tool(lambda: "", name="first", description="a")
        added = await anext(changes)
        assert (added[:3], added.item.description) == (("added", "tools", "first"), "a")
        live.tools.update("first", description="b")
        updated = await anext(changes)
        assert (updated[:3], updated.item.description) == (("updated", "tools", "first"), "b")
        server.remove_tool("first")
        assert (await anext(changes))[:3] == ("removed", "tools", "first")
        server.resource("plain://two", name="two")(lambda: "2")
        assert (await anext(changes))[:3] == ("added", "resources", "plain://two")
        server.resource("plain://some/{name}", name="some")(lambda name: name)
        assert (await anext(changes))[:3] == ("added", "templates", "plain://some/{name}")
        server.prompt(name="bye")(lambda: "Bye")
        assert (await anext(changes))[:3] == ("added", "prompts", "bye")
        assert mirror.tools["tool7"] is kept
        assert list(mirror.tools) == sorted(mirror.tools)
        assert mirror.status.state == "fresh"
        assert not any(requests[method] for method in LIST_METHODS)
        async with Mirror(server) as other:
            assert other.digest == mirror.digest


@pytest.mark.parametrize(
    "options",
    [
        {"policy": Policy(max_changes_per_frame=1)},
        {"terms": lambda principal: Terms(detail="summary")},
        {"terms": lambda principal: Terms(names=("tool*",))},
    ],
    ids=["truncated", "without items", "filtered"],
)
async def test_a_list_is_fetched_if_a_notification_has_not_all_changes(options: dict[str, Any]) -> None:
    server = plain_server()
    live = Live(server, **options)
    async with mirroring_live(live) as (requests, mirror):
        for name in ("other", "tool1", "tool2"):  # in one turn of the event loop, so in one notification
            server.add_tool(lambda: "", name=name)
        await mirror.wait_for("tool2")
        await current(mirror)
        assert list(mirror.tools) == ["add", "other", "tool1", "tool2"]
        assert requests["tools/list"] >= 1
        assert requests["prompts/list"] == requests["resources/list"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "added", "name": "b", "item": {"name": "b", "inputSchema": {}}, "complete": False},
        {"operation": "added", "name": "b", "item": {"name": "b", "inputSchema": {"type": "object"}}, "complete": True},
        {"operation": "added", "name": "b", "item": {"name": 5}, "complete": True},
        {"operation": "updated", "name": "c", "delta": {"title": "C"}, "complete": True},
        {"operation": "removed", "complete": True},
        {"operation": "removed", "name": "a"},
        {"changes": 5, "complete": True},
        [],
        None,
    ],
)
async def test_a_change_that_does_not_fit_is_not_applied(change: Any) -> None:
    server = ScriptedServer()
    server.lists["tools"] = {"a": ""}
    server.meta = {CURSOR_KEY: cursor_json("epoch", {Feature.TOOLS: Version(1, "one")})}
    timing = replace(QUICK, first_poll=1000, recheck=1000)
    async with asyncio.timeout(DEADLINE), mirroring(server, "legacy", timing=timing) as (_, mirror):
        await current(mirror)
        found, requests = mirror.snapshot(), server.requests["tools"]
        cursor = cursor_json("epoch", {Feature.TOOLS: Version(2, "two")})
        await server.notify("tools", {CHANGE_KEY: change, CURSOR_KEY: cursor})
        await until(lambda: server.requests["tools"] > requests)
        await current(mirror)
        assert mirror.snapshot() is found


@dataclass(frozen=True)
class Impatient(Timing):
    """Records how long a poll would wait, and waits for a moment only."""

    asked: set[float] = field(default_factory=set)

    def poll_delay(self, planned: float) -> float:
        self.asked.add(planned)
        return 0.005


async def test_a_server_that_does_not_notify_is_polled_less_and_less() -> None:
    server, timing = ScriptedServer(listens=False), Impatient(min_interval=0, first_poll=10, longest_poll=20)
    async with asyncio.timeout(DEADLINE), Mirror(server.server, timing=timing) as mirror:
        assert mirror.status.state == "polling"
        await until(lambda: timing.asked == {10, 15, 20})
        server.lists["tools"]["new"] = ""
        await mirror.wait_for("new")


async def test_a_server_that_announces_changes_and_refuses_to_listen_is_polled() -> None:
    async def refuse(ctx: Any, params: Any) -> Any:
        raise MCPError(types.METHOD_NOT_FOUND, "no streams")

    server = ScriptedServer()
    server.server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, refuse)
    async with asyncio.timeout(DEADLINE), Mirror(server.server, timing=QUICK) as mirror:
        assert mirror.status.state == "polling"
        server.lists["tools"]["new"] = ""
        await mirror.wait_for("new")


async def test_a_server_that_never_acknowledges_a_listen_stream_is_polled() -> None:
    """As it looks behind a proxy that buffers events."""

    async def hold(ctx: Any, params: Any) -> Any:
        await asyncio.Event().wait()

    server = ScriptedServer()
    server.server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, hold)
    timing = replace(QUICK, acknowledgement=0.01)
    async with asyncio.timeout(DEADLINE), Mirror(server.server, timing=timing) as mirror:
        assert mirror.status.state == "polling"
        server.lists["tools"]["new"] = ""
        await mirror.wait_for("new")


async def test_ttl_is_the_time_between_two_polls() -> None:
    server, timing = ScriptedServer(listens=False, ttl=120), Impatient(min_interval=0)
    async with asyncio.timeout(DEADLINE), Mirror(server.server, timing=timing):
        await until(lambda: 120 in timing.asked)


async def test_reconnects_wait_longer_and_longer_and_not_all_the_same_time() -> None:
    chances = iter([0.0, 1.0] * 20)
    timing = Timing(random=lambda: next(chances))
    assert [timing.retry_delay(failures) for failures in range(8)] == [0.25, 1, 1, 4, 4, 15, 7.5, 15]


async def test_the_first_connection_must_succeed() -> None:
    with pytest.raises(Disconnected, match=r"http://127.0.0.1:\d+/mcp can't be reached"):
        async with asyncio.timeout(DEADLINE), Mirror(f"http://127.0.0.1:{free_port()}/mcp"):
            pytest.fail("there is no server")
    with pytest.raises(Disconnected, match="no-such-command can't be reached"):
        async with asyncio.timeout(DEADLINE), Mirror("no-such-command"):
            pytest.fail("there is no such command")


async def test_a_command_is_a_target() -> None:
    program = "from tests.client.test_mirror import plain_server; plain_server().run('stdio')"
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {program}"]
    async with asyncio.timeout(DEADLINE), Mirror(command) as mirror:
        assert list(mirror.tools) == ["add"]


async def test_a_transport_that_fails_while_it_is_closed_does_not_keep_the_mirror_open() -> None:
    server, clients = plain_server(), []

    @asynccontextmanager
    async def transport() -> AsyncIterator[Any]:
        async with InMemoryTransport(server) as streams:
            try:
                yield streams
            finally:
                raise RuntimeError("closed badly")

    def make() -> Client:
        clients.append(Client(transport(), mode="legacy"))
        return clients[-1]

    async with asyncio.timeout(DEADLINE):
        async with Mirror(make, timing=QUICK) as mirror:
            assert list(mirror.tools) == ["add"]
            changes = mirror.changes()
        assert [change async for change in changes] == []
    assert mirror.status.state == "closed"
    assert len(clients) == 1


# Subscriptions and handlers


@pytest.mark.parametrize("era", ERAS)
async def test_a_handler_gets_the_subscribed_contents_only(era: str) -> None:
    live = Live(plain_server())
    async with asyncio.timeout(DEADLINE), run_uvicorn(live.http_app()) as server:
        url = f"http://127.0.0.1:{address_of(server)[1]}/mcp"
        async with Mirror(Client(url, mode=ERAS[era]), timing=QUICK) as mirror:
            await until(lambda: mirror.status.state == "fresh")
            updated: list[str] = []
            mirror.set_notification_handler(
                "notifications/resources/updated", lambda notification: updated.append(str(notification.params.uri))
            )
            await mirror.subscribe("plain://one")
            await mirror.subscribe("plain://each/**")
            live.resources.updated("plain://other")
            live.resources.updated("plain://one")
            await until(lambda: updated)
            live.resources.updated("plain://each/x")
            await until(lambda: updated[-1] == "plain://each/x")
            await mirror.unsubscribe("plain://one")
            assert mirror.subscribed == {"plain://each/**"}
            live.resources.updated("plain://one")
            live.resources.updated("plain://each/y")
            await until(lambda: updated[-1] == "plain://each/y")
            # For a moment after a subscription, a modern client has two streams.
            assert list(dict.fromkeys(updated)) == ["plain://one", "plain://each/x", "plain://each/y"]


async def test_notifications_without_a_subscription_are_dropped() -> None:
    server = ScriptedServer()
    # A legacy session gets whatever the server sends, asked for or not.
    async with asyncio.timeout(DEADLINE), mirroring(server, "legacy") as (_, mirror):
        await current(mirror)
        updated: list[str] = []
        mirror.set_notification_handler(
            "notifications/resources/updated", lambda notification: updated.append(str(notification.params.uri))
        )
        await mirror.subscribe("a://b")
        for uri in ("a://other", "a://bc", "a://b/below", "a://b"):
            await server.notify_content(uri)
        await until(lambda: "a://b" in updated)
        assert updated == ["a://b/below", "a://b"]


async def test_a_handler_is_set_and_removed_per_method() -> None:
    server = ScriptedServer()
    async with asyncio.timeout(DEADLINE), mirroring(server) as (_, mirror):
        got: list[str] = []

        async def fail(notification: Any) -> None:
            got.append(notification.method)
            raise ValueError("a handler that fails does not stop the mirror")

        mirror.set_notification_handler("notifications/tools/list_changed", fail)
        await server.notify("prompts")
        await server.notify("tools")
        await until(lambda: got == ["notifications/tools/list_changed"])
        mirror.set_notification_handler("notifications/tools/list_changed", None)
        server.lists["tools"]["later"] = ""
        await server.notify("tools")
        await mirror.wait_for("later")
        assert len(got) == 1


@pytest.mark.parametrize(("kind", "era"), [("sdk", "legacy"), ("fastmcp", "modern")])
async def test_a_subscription_is_refused_if_the_server_does_not_support_it(kind: str, era: str) -> None:
    async with asyncio.timeout(DEADLINE), run_uvicorn(APPS[kind]()) as server:
        url = f"http://127.0.0.1:{address_of(server)[1]}/mcp"
        async with Mirror(Client(url, mode=ERAS[era]), timing=QUICK) as mirror:
            with pytest.raises(NotSupported, match="does not support subscriptions to resources"):
                await mirror.subscribe("plain://one")
            assert mirror.subscribed == set()


async def test_subscriptions_are_renewed_after_a_reconnect() -> None:
    server = ScriptedServer()
    async with asyncio.timeout(DEADLINE), mirroring(server) as (running, mirror):
        updated: list[str] = []
        mirror.set_notification_handler(
            "notifications/resources/updated", lambda notification: updated.append(str(notification.params.uri))
        )
        await mirror.subscribe("a://b")
        server.drop_connections(running)
        await until(lambda: updated == ["a://b"])  # it may have changed meanwhile
        await current(mirror)
        await server.notify_content("a://b")
        await until(lambda: updated == ["a://b", "a://b"])


@pytest.mark.parametrize("era", ERAS)
async def test_a_subscription_that_is_refused_after_a_reconnect_does_not_end_the_others(era: str) -> None:
    port = free_port()
    granted = ["plain://one", "plain://two"]

    def app() -> Any:
        return Live(plain_server(), authorize=lambda principal, topic: isinstance(topic, Feature) or topic in granted)

    async with asyncio.timeout(DEADLINE), AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(run_uvicorn(app().http_app(), port=port))
        target = Client(f"http://127.0.0.1:{port}/mcp", mode=ERAS[era])
        mirror = await stack.enter_async_context(Mirror(target, timing=QUICK))
        with pytest.raises(NotSupported, match="refuses a subscription to plain://three"):
            await mirror.subscribe("plain://three")
        for uri in granted:
            await mirror.subscribe(uri)
        await first.aclose()
        await current(mirror, "reconnecting")
        granted.remove("plain://one")
        live = app()
        await stack.enter_async_context(run_uvicorn(live.http_app(), port=port))
        await current(mirror)
        updated = asyncio.Event()
        mirror.set_notification_handler("notifications/resources/updated", lambda notification: updated.set())
        live.resources.updated("plain://two")
        await updated.wait()


def counting_server() -> tuple[MCPServer[Any], dict[str, str], list[str]]:
    """A server, the texts of its resources `count://NAME`, and the URIs that were read."""
    server: MCPServer[Any] = MCPServer("counting", log_level="CRITICAL")
    texts = {"a": "0", "b": "0"}
    read: list[str] = []

    @server.resource("count://{name}")
    def content(name: str) -> str:
        read.append(name)
        if name not in texts:
            raise ResourceNotFoundError(f"count://{name}")
        return texts[name]

    return server, texts, read


def text_of(mirror: Mirror, uri: str) -> str | None:
    content: Any = mirror.contents.get(uri)
    return None if content is None else content.contents[0].text


@pytest.mark.parametrize("era", ERAS)
async def test_a_watched_content_is_always_current(era: str) -> None:
    server, texts, read = counting_server()
    live = Live(server)
    async with asyncio.timeout(DEADLINE), run_uvicorn(live.http_app()) as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        async with Mirror(Client(url, mode=ERAS[era]), timing=QUICK) as mirror:
            await current(mirror)
            await mirror.watch("count://b")
            first: Any = await mirror.watch("count://a")
            assert first.contents[0].text == text_of(mirror, "count://a") == "0"
            pinned, changes = mirror.snapshot(), mirror.changes()
            texts["a"] = "1"
            live.resources.updated("count://a")
            assert (await anext(changes))[:3] == ("updated", "contents", "count://a")
            assert text_of(mirror, "count://a") == "1"
            assert pinned.contents["count://a"] == first
            assert read.count("b") == 1
            await mirror.unwatch("count://a")
            assert set(mirror.contents) == {"count://b"} == mirror.subscribed


async def test_a_watched_content_is_read_again_after_a_reconnect() -> None:
    server, texts, _ = counting_server()
    # With this parser no stream of Tidings is parked, so `drop_connections` finds them all.
    async with (
        asyncio.timeout(DEADLINE),
        run_uvicorn(Live(server).http_app(), http="h11") as running,
        Mirror(ScriptedServer.url(running), timing=QUICK) as mirror,
    ):
        await mirror.watch("count://a")
        texts["a"] = "new"  # without a notification
        ScriptedServer.drop_connections(running)
        await until(lambda: text_of(mirror, "count://a") == "new")


async def test_a_watched_content_is_polled_if_a_legacy_server_has_no_stream() -> None:
    server, texts, _ = counting_server()
    app = Live(server).http_app()

    async def without_stream(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("method") == "GET":
            await send({"type": "http.response.start", "status": 405, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await app(scope, receive, send)

    async with asyncio.timeout(DEADLINE), run_uvicorn(without_stream) as running:
        target = Client(ScriptedServer.url(running), mode="legacy")
        async with Mirror(target, timing=replace(QUICK, recheck=0.05)) as mirror:
            await mirror.watch("count://a")
            texts["a"] = "new"
            await until(lambda: text_of(mirror, "count://a") == "new")


async def test_200_updates_during_a_read_of_a_watched_content_cost_one_more_read() -> None:
    server: MCPServer[Any] = MCPServer("gated", log_level="CRITICAL")
    live = Live(server)
    gate = asyncio.Event()
    gate.set()
    text = ""
    reads = told = 0

    @server.resource("count://a")
    async def content() -> str:
        nonlocal reads
        reads += 1
        present = text
        await gate.wait()
        return present

    def count(notification: Any) -> None:
        nonlocal told
        told += 1

    async with asyncio.timeout(DEADLINE), Mirror(server) as mirror:
        mirror.set_notification_handler("notifications/resources/updated", count)
        await mirror.watch("count://a")
        gate.clear()
        for number in range(200):
            text = str(number)
            live.resources.updated("count://a")
            await until(lambda number=number: told == number + 1 and reads == 2)  # type: ignore[misc]
        gate.set()
        await until(lambda: text_of(mirror, "count://a") == "199" and mirror.status.state == "fresh")
        assert reads == 3


async def test_a_content_that_is_deleted_and_comes_back_is_watched_again() -> None:
    server, texts, _ = counting_server()
    live = Live(server)
    live.resources.add(lambda: texts["a"], uri="count://a", name="a")
    async with asyncio.timeout(DEADLINE), Mirror(server, timing=QUICK) as mirror:
        await mirror.watch("count://a")
        del texts["a"]
        live.resources.remove("count://a")
        live.resources.deleted("count://a")
        await until(lambda: not mirror.contents)
        texts["a"] = "back"
        live.resources.add(lambda: texts["a"], uri="count://a", name="a")
        await until(lambda: text_of(mirror, "count://a") == "back")
        texts["a"] = "more"
        live.resources.updated("count://a")
        await until(lambda: text_of(mirror, "count://a") == "more")


async def test_only_a_single_resource_that_exists_can_be_watched() -> None:
    server, _, _ = counting_server()
    Live(server)
    async with asyncio.timeout(DEADLINE), Mirror(server) as mirror:
        with pytest.raises(TidingsError, match="is a pattern; watch"):
            await mirror.watch("count://*")
        with pytest.raises(NotFound, match="has no resource count://none"):
            await mirror.watch("count://none")
        both = await asyncio.gather(*[mirror.watch("count://none") for _ in range(2)], return_exceptions=True)
        assert [type(error) for error in both] == [NotFound, NotFound]
        assert mirror.subscribed == set()
        assert mirror.status.state == "fresh"
