"""Several servers with one shared table: what their clients see and are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest
from mcp.client.client import Client
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette

from tests.support.telemetry import RecordedTelemetry
from tests.support.waiting import until
from tidings import Live
from tidings.cluster.backend import CallHandler, Entry, Watcher, Write
from tidings.cluster.memory import MemoryBackend, MemoryTable
from tidings.cluster.replica import Replica
from tidings.cluster.shared_state import item_write
from tidings.core.model import Feature, Notification
from tidings.telemetry import Telemetry

pytestmark = pytest.mark.anyio


class HeldBackend(MemoryBackend):
    """Holds writes back while `passes` is not set, and their acknowledgements while `acknowledges` is not set."""

    def __init__(self, table: MemoryTable) -> None:
        super().__init__(table)
        self.passes, self.acknowledges = asyncio.Event(), asyncio.Event()
        self.passes.set()
        self.acknowledges.set()
        self.held: set[str] = set()
        """The keys of the writes that wait."""
        self.stored: list[str] = []
        """The keys of the writes that were acknowledged."""
        self.entries = HeldEntries()

    async def run(self, name: str, replica: str, watcher: Watcher, handler: CallHandler) -> None:
        self.entries.watcher = watcher
        await super().run(name, replica, self.entries, handler)

    async def write(self, writes: Sequence[Write]) -> list[int | None]:
        keys = [write.key for write in writes]
        self.held.update(keys)
        await self.passes.wait()
        self.held.difference_update(keys)
        orders = await super().write(writes)
        await self.acknowledges.wait()
        self.stored += keys
        return orders


class HeldEntries:
    """Gives a watcher the entries of the table, later if they are held."""

    def __init__(self) -> None:
        self.watcher: Watcher
        self.is_holding = False
        self._held: list[Entry] = []

    def load(self, epoch: str, entries: Sequence[Entry], order: int) -> None:
        self.watcher.load(epoch, entries, order)

    def apply(self, entries: Sequence[Entry]) -> None:
        self._held += entries
        if not self.is_holding:
            self.release()

    def lose(self, reason: str) -> None:
        self._held.clear()  # a connection that is lost delivers nothing more
        self.watcher.lose(reason)

    def release(self) -> None:
        self.is_holding = False
        held, self._held = self._held, []
        self.watcher.apply(held)


class Member:
    """One replica, with a client and a record of what a listener in its process was told."""

    def __init__(self, table: MemoryTable, telemetry: bool | Telemetry = True) -> None:
        self.server = MCPServer("board", log_level="CRITICAL")
        self.backend = HeldBackend(table)
        self.live = Live(self.server, cluster=self.backend, telemetry=telemetry)
        self.told: list[Notification] = []
        self.client = Client(self.server)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Member]:
        async with self.client:
            await self.client.list_tools()
            self.live.hub.subscribe(self._record, "tools", uris=["board://**"])
            await until(lambda: self.is_member)
            yield self
        self.live.stop()

    def _record(self, notification: Notification) -> None:
        self.told.append(notification)

    @property
    def replica(self) -> Replica:
        assert self.live.replica is not None
        return self.live.replica

    @property
    def is_member(self) -> bool:
        return self.replica.id in self.replica.state.replicas

    async def tools(self) -> list[str]:
        return [tool.name for tool in (await self.client.list_tools()).tools]

    @property
    def digest(self) -> str:
        return self.live.catalog.version(Feature.TOOLS).digest


def add(member: Member, name: str, description: str = "") -> None:
    def function() -> str:
        return name

    member.live.tools.add(function, name=name, description=description, replace=True)


@asynccontextmanager
async def members(number: int) -> AsyncIterator[list[Member]]:
    table = MemoryTable()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Member(table).serve()) for _ in range(number)]


async def settle(replicas: list[Member], *tools: str) -> None:
    """Wait until all replicas have these tools, and check that their clients see the same version."""
    expected = set(tools)
    await until(lambda: all({item.key for item in each.live.catalog.tools.snapshot()} == expected for each in replicas))
    for member in replicas:
        assert await member.tools() == sorted(tools)
    assert len({member.digest for member in replicas}) == 1


async def test_tool_that_is_added_on_one_replica_is_listed_and_notified_on_all() -> None:
    async with members(3) as replicas:
        add(replicas[1], "deploy")
        await settle(replicas, "deploy")
        assert [len(member.told) for member in replicas] == [1, 1, 1]
        assert len({member.live.catalog.version(Feature.TOOLS) for member in replicas}) == 1


async def test_same_change_on_all_replicas_is_notified_once() -> None:
    async with members(3) as replicas:
        for member in replicas:
            add(member, "deploy")
        await settle(replicas, "deploy")
        add(replicas[0], "last")
        await settle(replicas, "deploy", "last")
        for member in replicas:
            assert len({notification.version.digest for notification in member.told}) == len(member.told) == 2


async def test_item_is_removed_with_its_last_owner() -> None:
    async with members(2) as replicas, Member(replicas[0].backend.table).serve() as third:
        add(third, "alone")
        add(third, "both")
        add(replicas[0], "both")
        await settle([*replicas, third], "alone", "both")
        third.live.stop()
        await settle(replicas, "both")


async def test_items_of_a_new_replica_appear_in_one_notification() -> None:
    async with members(1) as (first,):
        new = Member(first.backend.table)
        for name in "abc":
            add(new, name)
        async with new.serve():
            await settle([first, new], "a", "b", "c")
            assert len(first.told) == 1


async def test_newest_definition_counts_and_the_older_one_returns_when_its_replica_leaves() -> None:
    async with members(2) as (old, new):
        add(old, "deploy", "version 1")
        await settle([old, new], "deploy")
        add(new, "deploy", "version 2")
        await until(lambda: (old.live.catalog.tools.get("deploy") or {})["description"] == "version 2")
        assert (await old.client.list_tools()).tools[0].description == "version 2"
        new.live.stop()
        await until(lambda: (old.live.catalog.tools.get("deploy") or {})["description"] == "version 1")


async def test_newest_definition_counts_after_its_older_owner_was_disconnected() -> None:
    async with members(2) as (old, new):
        add(old, "deploy", "version 1")
        await settle([old, new], "deploy")
        add(new, "deploy", "version 2")
        await until(lambda: (old.live.catalog.tools.get("deploy") or {})["description"] == "version 2")
        old.backend.disconnect()
        await until(old.live.find_degraded)
        old.backend.reconnect()
        add(old, "last")
        await settle([old, new], "deploy", "last")
        assert (await old.client.list_tools()).tools[0].description == "version 2"


async def test_item_that_is_removed_while_its_addition_is_not_stored_is_gone_everywhere() -> None:
    async with members(2) as (here, there):
        here.backend.passes.clear()
        add(here, "short")
        await until(lambda: f"item/{here.replica.id}/tools/short" in here.backend.held)
        here.live.tools.remove("short")
        here.backend.disconnect()
        await until(here.live.find_degraded)
        here.backend.passes.set()
        await until(lambda: not here.backend.held)
        add(here, "last")
        here.backend.reconnect()
        await settle([here, there], "last")


def write_of(member: Member, name: str) -> Write:
    """Return the write of a tool of a replica, or of its removal."""
    return item_write(member.replica.id, Feature.TOOLS, name, member.live.own_catalog.tools.item(name))


async def until_described(replicas: list[Member], description: str | None) -> None:
    def descriptions() -> set[str | None]:
        return {(member.live.catalog.tools.get("deploy") or {}).get("description") for member in replicas}

    await until(lambda: descriptions() == {description})


async def write_late(replicas: list[Member], write: Write) -> None:
    """Store a write like a network that has held it since a connection was lost, and wait until all have applied it."""
    (order,) = await replicas[-1].backend.write([write])
    assert order is not None
    await until(lambda: all(member.replica.state.order >= order for member in replicas))


async def test_write_that_is_stored_after_newer_ones_does_not_count() -> None:
    async with members(2) as replicas:
        here = replicas[0]
        absent = write_of(here, "deploy")
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        await write_late(replicas, absent)
        await until_described(replicas, "version 1")
        version_1 = write_of(here, "deploy")
        add(here, "deploy", "version 2")
        await until_described(replicas, "version 2")
        await write_late(replicas, version_1)
        await until_described(replicas, "version 2")
        here.live.tools.remove("deploy")
        await until_described(replicas, None)
        await write_late(replicas, version_1)
        await settle(replicas)


async def test_late_write_that_comes_before_the_acknowledgement_of_a_newer_one_does_not_count() -> None:
    async with members(2) as replicas:
        here = replicas[0]
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        version_1 = write_of(here, "deploy")
        here.backend.acknowledges.clear()
        add(here, "deploy", "version 2")
        await until_described(replicas, "version 2")
        await write_late(replicas, version_1)
        here.backend.acknowledges.set()
        await until_described(replicas, "version 2")


async def test_late_write_before_a_newer_one_is_stored_causes_no_other_write() -> None:
    async with members(2) as replicas:
        here = replicas[0]
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        version_1 = write_of(here, "deploy")
        here.backend.passes.clear()
        add(here, "deploy", "version 2")
        await until(lambda: version_1.key in here.backend.held)
        await write_late(replicas, version_1)
        here.backend.passes.set()
        await until_described(replicas, "version 2")
        add(here, "last")
        await settle(replicas, "deploy", "last")
        assert here.backend.stored.count(version_1.key) == 2


async def test_entries_that_come_after_the_acknowledgement_of_newer_writes_cause_no_other_write() -> None:
    async with members(2) as replicas:
        here, there = replicas
        key = write_of(here, "deploy").key
        here.backend.entries.is_holding = True
        for number in (1, 2, 3):
            add(here, "deploy", f"version {number}")
            await until_described([there], f"version {number}")
            await until(lambda: key not in here.backend.held)
        add(there, "deploy", "the newest")
        await until_described([there], "the newest")
        here.backend.entries.release()
        add(here, "last")
        await settle(replicas, "deploy", "last")
        await until_described(replicas, "the newest")
        assert here.backend.stored.count(key) == 3


async def test_item_that_returns_to_a_value_before_its_removal_came_back_is_kept() -> None:
    async with members(2) as replicas:
        here, there = replicas
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        here.backend.entries.is_holding = True
        here.live.tools.remove("deploy")
        await until_described([there], None)
        add(here, "deploy", "version 1")
        add(here, "last")  # is written with it
        await until(lambda: "last" in there.live.catalog.tools)
        here.backend.entries.release()
        await settle(replicas, "deploy", "last")


async def test_acknowledged_write_that_did_not_come_back_before_a_loss_counts() -> None:
    async with members(2) as replicas:
        here, there = replicas
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        here.backend.entries.is_holding = True
        add(here, "deploy", "version 2")
        await until_described([there], "version 2")
        await until(lambda: here.backend.stored.count(write_of(here, "deploy").key) == 2)
        here.backend.disconnect()
        await until(here.live.find_degraded)
        await until_described(replicas, "version 2")
        here.backend.entries.is_holding = False
        here.backend.reconnect()
        add(here, "last")
        await settle(replicas, "deploy", "last")
        await until_described(replicas, "version 2")


async def test_late_write_of_an_item_that_is_now_too_large_does_not_count_on_its_replica() -> None:
    async with members(2) as replicas:
        here = replicas[0]
        large = "x" * 10_000
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        version_1 = write_of(here, "deploy")
        here.backend.table.max_size = 5_000
        add(here, "deploy", large)
        await until_described([here], large)
        await write_late(replicas, version_1)
        await until_described([here], large)
        add(here, "last")
        await until(lambda: all("last" in member.live.catalog.tools for member in replicas))
        assert here.live.hub.counts.failures["items left out"] == 2


async def test_item_that_was_too_large_returns_to_the_table_and_is_removed() -> None:
    async with members(2) as replicas:
        here = replicas[0]
        here.backend.table.max_size = 5_000
        add(here, "deploy", "version 1")
        await until_described(replicas, "version 1")
        add(here, "deploy", "x" * 10_000)
        await until_described([here], "x" * 10_000)
        add(here, "deploy", "version 1")  # as the table still has it
        await until_described(replicas, "version 1")
        add(here, "large", "x" * 10_000)
        await until(lambda: "large" in here.live.catalog.tools)
        here.live.tools.remove("large")  # the table never had it
        await settle(replicas, "deploy")


async def test_offline_changes_that_are_undone_before_they_are_written_have_no_effect() -> None:
    async with members(2) as replicas:
        here, there = replicas
        add(here, "deploy", "version 1")
        here.live.resources.updated("board://x", etag="1")
        await until_described(replicas, "version 1")
        await until(lambda: there.live.catalog.version("board://x").digest)
        first = there.live.catalog.version("board://x").digest
        here.backend.disconnect()
        add(here, "deploy", "version 2")
        add(here, "offline")
        here.live.resources.updated("board://x", etag="2")
        await until_described([here], "version 2")
        await until(lambda: here.live.catalog.version("board://x").digest != first)
        here.backend.reconnect()
        # With an action, this checks after each step of the event loop: before the changes are written.
        await until(lambda: here.replica.lost_reason is None, action=lambda: None)
        add(here, "deploy", "version 1")
        here.live.tools.remove("offline")
        here.live.resources.updated("board://x", etag="1")
        add(there, "last")
        await settle(replicas, "deploy", "last")
        await until_described(replicas, "version 1")
        await until(lambda: here.live.catalog.version("board://x").digest == first)


async def test_items_go_when_the_lease_expires_and_return_with_their_replica() -> None:
    async with members(2) as (here, there):
        add(here, "a")
        add(there, "b")
        await settle([here, there], "a", "b")
        there.backend.disconnect()  # as a paused process: it writes nothing, and does not leave
        await until(lambda: "b" not in here.live.catalog.tools)
        assert await here.tools() == ["a"]
        there.backend.reconnect()
        await settle([here, there], "a", "b")


async def test_entries_that_cannot_be_decoded_are_counted_and_skipped() -> None:
    async with members(2) as (here, there):
        broken = {"item/x/tools/y": b"?", "item/x": b"{}", "replica/x": b"?", "content/board://x": b"?"}
        broken |= {"item/x/tools/w": b'{"item":5}', "item/x/tools/z": b'{"item":{}}'}
        broken |= {f"item/{there.replica.id}": b"{}", "unknown/x": b"1", "of a newer version/x": b"?"}
        await here.backend.write([Write(key, value) for key, value in broken.items()])
        add(here, "deploy")
        await settle([here, there], "deploy")
        assert there.replica.state.undecodable == 8
        there.backend.disconnect()
        await until(there.live.find_degraded)
        there.backend.reconnect()  # the snapshot has them too
        add(here, "last")
        await settle([here, there], "deploy", "last")
        assert there.replica.state.undecodable == 16


async def test_notification_of_another_replica_continues_the_trace_of_the_change() -> None:
    recorded = RecordedTelemetry()
    telemetry = Telemetry(tracer_provider=recorded.tracer_provider, meter_provider=recorded.meter_provider)
    table = MemoryTable()
    async with Member(table, telemetry).serve() as here, Member(table, telemetry).serve() as there:
        with recorded.tracer.start_as_current_span("change") as span:
            add(here, "deploy")
        await settle([here, there], "deploy")
        (notification,) = there.told
        assert notification.trace is not None
        assert notification.trace["traceparent"].split("-")[1] == f"{span.get_span_context().trace_id:032x}"


async def test_change_without_the_table_applies_locally_and_reaches_the_others_later() -> None:
    async with members(2) as (here, there):
        add(here, "before")
        await settle([here, there], "before")
        here.backend.disconnect()
        add(here, "offline")
        here.live.tools.remove("before")
        add(there, "elsewhere")
        await until(lambda: "offline" in here.live.catalog.tools and "before" not in here.live.catalog.tools)
        assert await here.tools() == ["offline"]
        here.backend.reconnect()
        await settle([here, there], "offline", "elsewhere")


async def test_emptied_table_is_filled_again() -> None:
    async with members(2) as replicas:
        add(replicas[0], "a")
        add(replicas[1], "b")
        replicas[0].live.resources.updated("board://x", etag="1")
        replicas[0].live.own_catalog.tools.mark_changed()
        await settle(replicas, "a", "b")
        await until(lambda: replicas[1].live.catalog.version("board://x").digest)
        epoch = replicas[0].live.epoch
        told = [len(member.told) for member in replicas]
        replicas[0].backend.table.clear()
        await until(lambda: all(member.live.epoch != epoch and member.is_member for member in replicas))
        add(replicas[0], "c")
        async with Member(replicas[0].backend.table).serve() as new:
            await settle([*replicas, new], "a", "b", "c")
        assert len({member.live.catalog.version("board://x").digest for member in replicas}) == 1
        for member in replicas:
            revisions = [each.version.revision for each in member.told if each.topic is Feature.TOOLS]
            assert revisions == sorted(revisions)
        assert [len(member.told) for member in replicas] != told


async def test_late_replica_does_not_replace_newer_contents_in_a_new_table() -> None:
    async with members(2) as replicas:
        here, late = replicas
        here.live.resources.updated("board://x", etag="1")
        await until(lambda: late.live.catalog.version("board://x").digest)
        late.backend.disconnect()
        here.backend.table.clear()
        here.live.resources.updated("board://x", etag="2")
        await until(lambda: here.told[1:])
        late.backend.reconnect()
        add(late, "last")
        await settle(replicas, "last")
        assert [each.topic for each in here.told] == ["board://x", "board://x", Feature.TOOLS]
        assert len({member.live.catalog.version("board://x").digest for member in replicas}) == 1


async def test_content_is_notified_once_on_each_replica_whoever_noticed_it() -> None:
    async with members(2) as replicas:
        for member in replicas:
            member.live.resources.updated("board://sprint", etag="1")
        await until(lambda: all(member.told for member in replicas))
        replicas[1].live.resources.updated("board://sprint", etag="2")
        await until(lambda: all(len(member.told) == 2 for member in replicas))
        replicas[0].live.resources.updated("board://sprint", etag="2")  # known here from the other replica
        replicas[0].live.resources.deleted("board://sprint")
        await until(lambda: all(len(member.told) == 3 for member in replicas))
        assert all(member.told[-1].is_deletion for member in replicas)


async def test_change_that_cannot_be_read_is_notified_everywhere_without_details() -> None:
    async with members(2) as replicas:
        replicas[0].live.own_catalog.tools.mark_changed()
        await until(lambda: all(len(member.told) == 1 for member in replicas))
        assert not any(member.told[0].complete for member in replicas)
        assert len({member.digest for member in replicas}) == 1


async def test_items_of_another_replica_can_be_called_read_and_got() -> None:
    async with members(2) as (here, there):

        @there.server.tool()
        def double(number: int) -> int:
            return 2 * number

        @there.server.prompt()
        def greet(name: str) -> str:
            return f"Hello {name}"

        @there.server.resource("board://sprint")
        def sprint() -> str:
            return "sprint 1"

        @there.server.resource("board://cards/{number}")
        def card(number: str) -> str:
            return f"card {number}"

        await until(lambda: "board://cards/{number}" in here.live.catalog.resources)
        result = await here.client.call_tool("double", {"number": 21})
        assert result.structured_content == {"result": 42}
        prompt = await here.client.get_prompt("greet", {"name": "Ada"})
        assert prompt.messages[0].content.text == "Hello Ada"  # type: ignore[union-attr]  # it is a text
        for uri, text in {"board://sprint": "sprint 1", "board://cards/7": "card 7"}.items():
            assert (await here.client.read_resource(uri)).contents[0].text == text  # type: ignore[union-attr]  # the same


async def test_lost_cluster_is_reported_and_recovers() -> None:
    async with members(2) as (here, there):
        assert here.live.find_degraded() == []
        here.backend.disconnect("no route")
        await until(lambda: here.live.find_degraded() == ["the cluster can't be reached: no route"])
        app = Starlette(routes=here.live.health_routes())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as http:
            answer = await http.get("/health/ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        add(there, "meanwhile")
        here.backend.reconnect()
        await settle([here, there], "meanwhile")
        assert here.live.find_degraded() == []


def test_replica_runs_again_on_another_event_loop() -> None:
    table = MemoryTable()
    here, there = Member(table), Member(table)

    async def run(*tools: str) -> None:
        for member in (here, there):
            member.client = Client(member.server)
        async with here.serve(), there.serve():
            add(here, tools[-1])
            await settle([here, there], *tools)
            add(there, "last")
            await settle([here, there], *tools, "last")
            there.live.tools.remove("last")
            await settle([here, there], *tools)
        await until(lambda: not (here.replica.is_running or there.replica.is_running))

    asyncio.run(run("a"))
    asyncio.run(run("a", "b"))
