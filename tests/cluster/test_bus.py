"""The SDK's subscription bus over NATS: plain SDK servers that share their events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import nats
import pytest
from mcp import Client
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)

from tests.support.waiting import until
from tidings.cluster import NatsSubscriptionBus
from tidings.cluster.embedded import EmbeddedNats

pytestmark = pytest.mark.anyio

URI = "board://ünïcode?x=1"
EVENTS: list[ServerEvent] = [ToolsListChanged(), PromptsListChanged(), ResourcesListChanged(), ResourceUpdated(URI)]


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats(token=False) as server:
        yield server


def make_server(bus: NatsSubscriptionBus) -> MCPServer:
    mcp = MCPServer("plain", subscriptions=bus)

    @mcp.tool()
    async def change(ctx: Context) -> str:
        await ctx.notify_tools_changed()
        await ctx.notify_resource_updated(URI)
        return "done"

    return mcp


async def test_a_client_of_one_server_gets_the_events_of_another(server: EmbeddedNats) -> None:
    async with (
        NatsSubscriptionBus(server.url, "plain") as first,
        NatsSubscriptionBus(server.url, "plain") as second,
        Client(make_server(first)) as caller,
        Client(make_server(second)) as listener,
        listener.listen(tools_list_changed=True, resource_subscriptions=[URI]) as events,
    ):
        await until(lambda: second.is_connected)
        await caller.call_tool("change")
        async with asyncio.timeout(30):
            assert [await anext(events), await anext(events)] == [ToolsListChanged(), ResourceUpdated(URI)]


async def test_every_listener_gets_each_event_once_and_in_order(server: EmbeddedNats) -> None:
    own: list[ServerEvent] = []
    far: list[ServerEvent] = []
    other: list[ServerEvent] = []
    async with (
        NatsSubscriptionBus(server.url, "x") as first,
        NatsSubscriptionBus(server.url, "x") as second,
        NatsSubscriptionBus(server.url, "y") as third,
    ):
        unsubscribe = first.subscribe(own.append)
        second.subscribe(far.append)
        third.subscribe(other.append)
        await until(lambda: first.is_connected and second.is_connected and third.is_connected)
        for event in EVENTS:
            await first.publish(event)
        await until(lambda: far == EVENTS)
        assert own == EVENTS
        unsubscribe()
        unsubscribe()
        await second.publish(ToolsListChanged())
        await third.publish(PromptsListChanged())
        await until(lambda: other == [PromptsListChanged()])
        assert own == EVENTS


async def test_a_bus_without_nats_delivers_locally_and_repairs_the_lists_later(
    server: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[ServerEvent] = []
    async with NatsSubscriptionBus(server.url, "x") as bus:
        bus.subscribe(got.append)
        await until(lambda: bus.is_connected)
        server.kill()
        await until(lambda: not bus.is_connected)
        await bus.publish(ResourceUpdated(URI))
        assert got == [ResourceUpdated(URI)]
        await asyncio.to_thread(server.start)
        await until(lambda: len(got) == 4)
        assert set(got) == set(EVENTS)
    assert {record.name for record in caplog.records if record.levelno >= logging.WARNING} == {"tidings.cluster.bus"}


async def test_an_event_that_cannot_be_decoded_is_counted_and_skipped(server: EmbeddedNats) -> None:
    got: list[ServerEvent] = []
    async with NatsSubscriptionBus(server.url, "x") as bus:
        bus.subscribe(got.append)
        await until(lambda: bus.is_connected)
        client = await nats.connect(server.url)
        for data in (
            b"",
            b"\xff",
            b"[]",
            b'{"changed": "nothing"}',
            b'{"updated": 1}',
            b'{"changed": []}',
            b'{"changed": "tools"}',
        ):
            await client.publish("tidings.x.event", data)
        await until(lambda: got == [ToolsListChanged()])
        await client.close()
        assert bus.undecodable == 6
