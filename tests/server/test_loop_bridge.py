"""The changes of one turn of the event loop are published together, at its end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.client import Client
from mcp.server.mcpserver import MCPServer

from tests.support.faults.wire import listen_request
from tests.support.streams import SendMiddleware, connected, read_event, serving
from tidings import Live, Notification
from tidings.core.frames import FILTER_KEY, FrameFormat, encode_frame

pytestmark = pytest.mark.anyio


def hello() -> str:
    return "hello"


@asynccontextmanager
async def bound(*tools: str) -> AsyncIterator[tuple[Live, list[Notification]]]:
    """Yield a server that is bound to the event loop, and the notifications of all its lists and of `a://b`."""
    server: MCPServer[Any] = MCPServer("board")
    for name in tools:
        server.add_tool(hello, name=name)
    live = Live(server)
    told: list[Notification] = []
    await live.list_reader.ensure_loaded(None)
    live.hub.subscribe(told.append, "tools", "prompts", "resources", uris=["a://b"])
    yield live, told


async def end_of_turn() -> None:
    await asyncio.sleep(0)


async def test_many_changes_of_one_turn_are_one_notification_per_topic() -> None:
    async with bound() as (live, told):
        for number in range(200):
            live.tools.add(hello, name=f"tool{number}")
            live.resources.updated("a://b", number=number)
        assert told == []
        await end_of_turn()
        tools, content = sorted(told, key=lambda notification: len(notification.changes), reverse=True)
        assert [change.key for change in tools.changes] == [f"tool{number}" for number in range(200)]
        (last,) = content.changes
        assert last.metadata == {"number": 199}
        params = json.loads(encode_frame(tools, FrameFormat()))["params"]
        assert (len(params["changes"]), params["truncated"]) == (64, True)
        assert len(live.history("tools").changes) == 200
        # After a pause, a change needs no more than the end of its own turn.
        live.tools.remove("tool7")
        await end_of_turn()
        assert [change.key for change in told[-1].changes] == ["tool7"]


async def test_changes_of_threads_during_one_turn_are_one_notification() -> None:
    async with bound() as (live, told):
        threads = [
            threading.Thread(target=lambda number=number: live.tools.add(hello, name=f"tool{number}"))
            for number in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        await end_of_turn()
        (notification,) = told
        assert {change.key for change in notification.changes} == {f"tool{number}" for number in range(20)}


async def test_change_that_is_undone_in_the_same_turn_needs_no_notification() -> None:
    async with bound("kept") as (live, told):
        live.tools.add(hello, name="gone")
        live.tools.remove("gone")
        live.resources.updated("a://b", etag="1")
        await end_of_turn()
        (content,) = told
        live.resources.updated("a://b", etag="2")
        live.resources.updated("a://b", etag="1")
        live.tools.update("kept", description="other")
        live.tools.update("kept", description="")
        await end_of_turn()
        assert told == [content]


async def test_client_that_fetched_an_undone_change_is_told_to_refetch() -> None:
    async with bound("kept") as (live, told), Client(live.lowlevel) as client:
        # A request during which the list changes twice may return any version.
        started = live.catalog.tools.version.revision
        live.hub.notifications.fetched.begin_fetch(live.catalog.tools.feature, started)
        live.tools.add(hello, name="gone")
        live.tools.remove("gone")
        await end_of_turn()
        live.hub.notifications.fetched.end_fetch(live.catalog.tools.feature, started)
        (notification,) = told
        assert not notification.complete
        assert [tool.name for tool in (await client.list_tools()).tools] == ["kept"]


async def test_subscriber_gets_no_earlier_change_of_its_first_turn() -> None:
    async with bound() as (live, _):
        live.tools.add(hello, name="before")
        async with live.listen("tools") as changes:
            live.tools.add(hello, name="after")
            assert (await anext(changes)).key == "after"


@pytest.mark.parametrize("options", [{}, {FILTER_KEY: {}}], ids=["cached", "own"])
async def test_change_of_a_thread_right_after_the_acknowledgement_is_notified(options: dict[str, Any]) -> None:
    class ChangingMiddleware(SendMiddleware):
        """Lets a thread make a change after the acknowledgement was written, and before anything else happens."""

        def change(self, message: Any) -> Any:
            if b"acknowledged" in message.get("body", b""):
                thread = threading.Thread(target=server.change, args=("new",))
                thread.start()
                thread.join()
            return message

    request = listen_request(1, meta=options)
    async with serving(ChangingMiddleware) as server, connected(server, request) as (stream, _):
        await read_event(stream)
        assert (await read_event(stream))["params"]["tool"]["description"] == "new"


async def test_stop_sends_the_changes_of_its_turn() -> None:
    async with serving() as server, connected(server, listen_request(1)) as (stream, _):
        assert (await read_event(stream))["method"] == "notifications/subscriptions/acknowledged"
        server.change("new")
        server.live.stop()
        assert (await read_event(stream))["method"] == "notifications/tools/list_changed"
        assert "result" in await read_event(stream)
