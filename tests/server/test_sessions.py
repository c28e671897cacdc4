"""Legacy sessions: subscribing, streams that open late or again, announcements, and the extension."""

from __future__ import annotations

import json
import subprocess
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client import Client
from mcp.server import Server
from mcp.shared.exceptions import MCPError
from mcp_types import EmptyResult, ListResourcesResult

from tests.support.forking import forked_command
from tests.support.messages import INITIALIZED, initialize
from tests.support.sdk_clients import (
    DEADLINE,
    KINDS,
    LEGACY,
    MARKER,
    MODERN,
    MUTED,
    RecordingClient,
    listening,
    open_client,
    serving,
    stdio_server,
)
from tests.support.waiting import until
from tests.support.wire_clients import LegacyWire
from tidings import Live

pytestmark = pytest.mark.anyio

VERSION = "2025-11-25"
IDLE = 2.0
"""Seconds until the SDK ends a session without an open request, which is how it notices a client that was killed."""


SERVERS: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize("kind", KINDS)
async def test_subscribe_and_unsubscribe_respond_as_specified(kind: str, transport: str, urls: dict[str, str]) -> None:
    server = urls[kind] if transport == "http" else stdio_server(kind)
    async with open_client(server, VERSION) as client:
        for method in ("resources/subscribe", "resources/unsubscribe"):
            with pytest.raises(MCPError) as missing:
                await client.request(method)
            assert missing.value.error.code == -32602
            for uri in ("board://sprint", "board://sprint", "board://nobody-knows-it", "board://glob/*"):
                assert await client.request(method, uri=uri) == {}
        await client.until_state(watched=[])

        # A double subscription is notified once, and unsubscribing ends it.
        for uri in (MARKER, "board://sprint", "board://sprint", "board://glob/*", "board://tpl/{name}"):
            await client.subscribe(uri)
        for uri in ("board://sprint", "board://glob/x", "board://tpl/x"):
            await client.step("updated", f"content updated {uri}", uri=uri)
        await client.unsubscribe("board://sprint")
        await client.step("updated", uri="board://sprint")
        await client.step("updated", "content updated board://glob/y", uri="board://glob/y")
        for uri in ("board://glob/*", "board://tpl/{name}"):
            await client.unsubscribe(uri)
        for uri in ("board://glob/z", "board://tpl/z"):
            await client.step("updated", uri=uri)
        await client.until_state(watched=[MARKER], pending=0)


@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
async def test_handlers_of_the_user_are_called_for_each_subscription_and_may_refuse_it() -> None:
    called: list[tuple[str, str]] = []

    async def list_resources(ctx: Any, params: Any) -> ListResourcesResult:
        return ListResourcesResult(resources=[])

    async def subscribe(ctx: Any, params: Any) -> EmptyResult:
        is_new = ("subscribe", params.uri) not in called
        called.append(("subscribe", params.uri))
        if not is_new:
            raise MCPError(-32002, "subscribed already")
        if params.uri == "board://closed":
            raise MCPError(-32002, "the board is closed")
        return EmptyResult(_meta={"example.org/by": "user"})

    async def unsubscribe(ctx: Any, params: Any) -> EmptyResult:
        called.append(("unsubscribe", params.uri))
        return EmptyResult()

    live = Live(
        Server(
            "board",
            on_list_resources=list_resources,
            on_subscribe_resource=subscribe,
            on_unsubscribe_resource=unsubscribe,
        )
    )
    heard: list[str] = []

    async def record(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/resources/updated":
            heard.append(message.params.uri)

    async with Client(live.lowlevel, mode="legacy", message_handler=record) as client:
        result = await client.subscribe_resource("board://sprint")
        assert result.meta == {"example.org/by": "user"}
        with pytest.raises(MCPError, match="the board is closed"):
            await client.subscribe_resource("board://closed")
        with pytest.raises(MCPError, match="subscribed already"):
            await client.subscribe_resource("board://sprint")
        live.resources.updated("board://closed")
        live.resources.updated("board://sprint")
        await until(lambda: heard == ["board://sprint"])
        await client.unsubscribe_resource("board://sprint")
        live.resources.updated("board://sprint")
        await client.subscribe_resource("board://end")
        live.resources.updated("board://end")
        await until(lambda: heard == ["board://sprint", "board://end"])
    assert called == [
        ("subscribe", "board://sprint"),
        ("subscribe", "board://closed"),
        ("subscribe", "board://sprint"),
        ("unsubscribe", "board://sprint"),
        ("subscribe", "board://end"),
    ]


async def test_invalid_pattern_is_refused(url: str) -> None:
    async with open_client(url, VERSION) as client:
        with pytest.raises(MCPError) as refused:
            await client.subscribe("board://{unclosed")
    assert refused.value.error.code == -32602
    assert "board://{unclosed" in str(refused.value)


async def mark(*clients: RecordingClient) -> None:
    """Update the marker, and wait until each client is notified of it."""
    await clients[0].mark()
    for client in clients:
        await client.until(lambda client=client: f"content updated {MARKER}" in client.summaries, "the marker")  # type: ignore[misc]


async def test_only_subscribers_of_a_resource_are_notified(url: str) -> None:
    async with (
        open_client(url, "2025-06-18") as first,
        open_client(url, MUTED) as second,
        open_client(url, MODERN) as third,
        listening(first, "board://a", "board://both"),
        listening(second, "board://b", "board://both"),
        listening(third, "board://c"),
    ):
        clients = (first, second, third)
        for uri in ("board://a", "board://b", "board://c", "board://both", "board://nobody"):
            await first.change("updated", uri=uri)
        await mark(*clients)
        told = [[gist.removeprefix("content updated board://") for gist in client.summaries] for client in clients]
        assert told == [["a", "both", "marker"], ["b", "both", "marker"], ["c", "marker"]]


async def test_one_change_reaches_clients_of_every_version(url: str) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(open_client(url, version)) for version in (*LEGACY, MODERN)]
        for client in clients:
            await stack.enter_async_context(listening(client))
        # A session without a stream would get the net change, which is none.
        await clients[0].until_state(legacy_streams=len(LEGACY))
        await clients[0].change("add", feature="prompts", key="all")
        await clients[0].change("remove", feature="prompts", key="all")
        await mark(*clients)
        for client in clients:
            lists = [] if client.version == MUTED else ["prompts added all", "prompts removed all"]
            assert client.summaries == [*lists, f"content updated {MARKER}"]


async def test_end_of_a_session_removes_its_subscriptions(url: str) -> None:
    async with open_client(url, MODERN) as witness:
        await witness.until_state(subscribers=0)
        async with open_client(url, VERSION) as client, listening(client, "board://sprint", "board://glob/*"):
            await client.settle()
            state = await witness.change("state")
            assert (state["subscribers"], state["legacy_sessions"], state["streams"]) == (1, 1, 1)
            assert state["watched"] == ["board://glob/*", MARKER, "board://sprint"]
        await witness.until_state(subscribers=0, watched=[], streams=0, legacy_sessions=0, pending=0)


async def test_remaining_clients_are_notified_after_one_has_left(url: str) -> None:
    async with open_client(url, VERSION) as staying, listening(staying, "board://sprint"):
        async with open_client(url, "2025-06-18") as leaving, listening(leaving, "board://sprint"):
            await staying.change("updated", uri="board://sprint")
            await staying.settle("content updated board://sprint", among=[leaving])
        await staying.until_state(subscribers=1, watched=[MARKER, "board://sprint"])
        await staying.step("updated", "content updated board://sprint", uri="board://sprint")
        await staying.step("add", "tools added still", feature="tools", key="still")
        await staying.step("remove", "tools removed still", feature="tools", key="still")


CLIENTS = """
import asyncio, sys
from tests.support.sdk_clients import listening, open_client

async def main():
    _, url, legacy, modern = sys.argv
    async with open_client(url, legacy) as one, open_client(url, modern) as other:
        async with listening(one, "board://sprint", "board://glob/*"), listening(other, "board://sprint"):
            await one.settle(among=[other])
            print("ready", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_client_leaves_no_subscriptions(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "clients.py"
    program.write_text(CLIENTS)
    with serving(kind, app={"session_idle_timeout": IDLE}) as url:
        async with open_client(url, MODERN) as witness:
            async with await anyio.open_process(forked_command(program, url, VERSION, MODERN), stderr=None) as process:
                assert process.stdout is not None
                with anyio.fail_after(DEADLINE):
                    assert (await process.stdout.receive()).startswith(b"ready")
                state = await witness.change("state")
                assert (state["subscribers"], state["streams"], state["legacy_sessions"]) == (2, 2, 1)
                process.kill()
            await witness.until_state(subscribers=0, watched=[], streams=0, legacy_sessions=0, pending=0)


@pytest.mark.parametrize("kind", KINDS)
def test_stdio_server_ends_with_its_client(kind: str) -> None:
    server = stdio_server(kind)
    command = [server.command, *server.args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{json.dumps(initialize(VERSION))}\n{json.dumps(INITIALIZED)}\n")
        process.stdin.flush()
        assert '"id":1' in process.stdout.readline()
        process.stdin.close()
        assert process.wait(DEADLINE) == 0


# Streams


async def test_session_is_notified_when_its_stream_opens(url: str, http: httpx2.AsyncClient) -> None:
    async with open_client(url, MODERN) as other:
        session = LegacyWire(url, http)
        await session.shake_hands()
        await session.post("resources/subscribe", uri="board://sprint")
        await other.change("add", feature="tools", key="late")
        await other.change("add", feature="tools", key="later")
        await other.change("updated", uri="board://sprint", metadata={"version": 1})
        await other.change("updated", uri="board://sprint", metadata={"version": 2})

        async with session.stream() as stream:
            # One notification for each topic, with all missed changes.
            assert (await stream.received()).summary == "tools added late, tools added later"
            updated = (await stream.message())["params"]
            assert (updated["uri"], updated["metadata"]) == ("board://sprint", {"version": 2})
            await other.change("remove", feature="tools", key="late")
            assert (await stream.received()).summary == "tools removed late"
        await other.change("remove", feature="tools", key="later")
        await session.end()


async def test_reconnected_stream_gets_only_what_it_missed(url: str, http: httpx2.AsyncClient) -> None:
    async with open_client(url, MODERN) as other:
        session = LegacyWire(url, http)
        await session.shake_hands()
        await session.post("resources/subscribe", uri=MARKER)
        async with session.stream() as stream:
            await other.change("add", feature="tools", key="heard")
            assert (await stream.received()).summary == "tools added heard"
        await other.until_state(legacy_streams=0)
        # Without a stream, an item is added and removed, and no client fetches it.
        await other.change("add", feature="prompts", key="passing")
        await other.change("remove", feature="prompts", key="passing")
        await other.change("remove", feature="tools", key="heard")
        async with session.stream() as stream:
            assert (await stream.received()).summary == "tools removed heard"
            await other.change("updated", uri=MARKER)
            assert (await stream.received()).summary == f"content updated {MARKER}"
        await session.end()


async def test_change_between_handshake_and_stream_is_not_lost(url: str, http: httpx2.AsyncClient) -> None:
    async with open_client(url, MODERN) as other:
        session = LegacyWire(url, http)
        await session.post("initialize", **initialize(VERSION)["params"])
        await other.change("add", feature="tools", key="between")
        await session.post("notifications/initialized", None)
        async with session.stream() as stream:
            assert (await stream.received()).summary == "tools added between"
            await other.change("remove", feature="tools", key="between")
            assert (await stream.received()).summary == "tools removed between"
        await session.end()


# Announcements


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_announce_notifies_a_new_legacy_session_of_every_list_once(transport: str) -> None:
    options: dict[str, Any] = {"policy": {"announce": True}}
    with ExitStack() as stack:
        server = stack.enter_context(serving("lowlevel", **options)) if transport == "http" else None
        for version, kinds in [(VERSION, ["prompts", "resources", "tools"]), (MUTED, []), (MODERN, [])]:
            async with open_client(server or stdio_server("lowlevel", **options), version) as client, listening(client):
                await client.until(lambda client=client, kinds=kinds: len(client.received) >= len(kinds), "the lists")  # type: ignore[misc]
                announced, client.received[:] = sorted(each.method for each in client.received), []
                assert announced == [f"notifications/{kind}/list_changed" for kind in kinds]
                for feature in ("tools", "prompts", "resources"):
                    await client.names(feature)
                await client.settle()


# The extension


@pytest.mark.parametrize(
    ("transport", "version", "where"),
    [("stdio", VERSION, "extensions"), ("http", VERSION, "experimental"), ("http", MODERN, "extensions")],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_extension_adds_items_deltas_and_deletions(
    kind: str, transport: str, version: str, where: str, urls: dict[str, str]
) -> None:
    server = urls[kind] if transport == "http" else stdio_server(kind)
    gone = f"board://gone/{version}"
    async with open_client(server, version, extended=where) as client, listening(client, gone):
        [added] = await client.step("add", "tools added ext", feature="tools", key="ext")
        items, _ = await client.listed("tools")
        assert added.change["item"] == next(item for item in items if item["name"] == "ext")

        fields = {"description": "Another one."}
        [updated] = await client.step("update", "tools updated ext", feature="tools", key="ext", fields=fields)
        assert updated.change["delta"] == fields
        assert updated.change["before"] != updated.change["after"]
        [removed] = await client.step("remove", "tools removed ext", feature="tools", key="ext")
        assert "item" not in removed.change

        await client.step("add", f"resources added {gone}", feature="resources", key=gone)
        await client.change("deleted", uri=gone)
        await client.until(lambda: len(client.received) == 2, "the deletion")
        deleted = [(each.method, each.uri) for each in client.received if each.uri]
        assert deleted == [("notifications/resources/deleted", gone)]
        assert f"resources removed {gone}" in client.summaries
