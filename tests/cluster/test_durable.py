"""Durable subscriptions and webhooks of several replicas: resumed, delivered and changed on any of them.

Covers `shared_durables.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
from mcp.server.mcpserver import MCPServer

from tests.conftest import SEED
from tests.support.hooks import nothing
from tests.support.receiver import Receiver, receiving, verify
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE, until
from tests.support.wire_clients import LegacyWire, Stream, Wire, http
from tidings import Feature, Live, Policy
from tidings.cluster import MemoryBackend, Nats
from tidings.cluster.backend import Backend, Write
from tidings.cluster.embedded import EmbeddedNats
from tidings.cluster.memory import MemoryTable
from tidings.core.frames import CURSOR_KEY, DURABLE_KEY, RESUME_KEY
from tidings.store.durable import SERVER, DurableSubscription, Key

__all__ = ["http"]

pytestmark = pytest.mark.anyio

Join = Callable[[], Backend]

NUMBERS = itertools.count()
HOOK = (SERVER, "hook")
LAPTOP = (None, "laptop")
NONE = DurableSubscription(name="none")
NAMED = {DURABLE_KEY: {"name": "laptop"}}


@pytest.fixture(params=["memory", "nats"])
def join(request: pytest.FixtureRequest) -> Join:
    """Return a function that makes a backend for one more replica."""
    if request.param == "memory":
        return MemoryTable().backend
    url, prefix = request.getfixturevalue("nats_url"), f"test{next(NUMBERS)}"
    return lambda: Nats(url, prefix=prefix)


@asynccontextmanager
async def replica(backend: Backend, **policy: Any) -> AsyncIterator[Live]:
    """Run one replica. It leaves at the end."""
    policy = {"webhook_backoff": 0.05, "webhook_timeout": DEADLINE, "webhook_private": True, **policy}
    live = Live(MCPServer("board", log_level="CRITICAL"), policy=Policy(**policy), cluster=backend)
    await live.list_reader.ensure_loaded()
    try:
        await until(lambda: is_member(live))
        yield live
    finally:
        await leave(live)


@asynccontextmanager
async def replicas(join: Join, number: int = 3, **policy: Any) -> AsyncIterator[list[Live]]:
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(replica(join(), **policy)) for _ in range(number)]
        await until(lambda: all(len(live.replica.state.replicas) == number for live in lives))  # type: ignore[union-attr]
        yield lives


async def leave(live: Live) -> None:
    live.stop()
    await until(lambda: live.replica is not None and not live.replica.is_running)


def is_member(live: Live) -> bool:
    return live.replica is not None and live.replica.id in live.replica.state.replicas


@asynccontextmanager
async def serving(live: Live, http: httpx2.AsyncClient) -> AsyncIterator[Wire]:
    async with run_uvicorn(live.http_app()) as server:
        yield Wire(f"http://127.0.0.1:{address_of(server)[1]}/mcp", http)


def deliverers(lives: list[Live], key: Key = HOOK) -> list[Live]:
    """Return the replicas that have a webhook open."""
    return [live for live in lives if live.durables.is_connected_here(key)]


async def until_delivered_by_one(lives: list[Live], key: Key = HOOK) -> Live:
    """Wait until one replica has a webhook open, and all know it."""
    await until(lambda: len(deliverers(lives, key)) == 1 and all(live.durables.is_connected(key) for live in lives))
    return deliverers(lives, key)[0]


async def until_equal(lives: list[Live], key: Key = HOOK) -> DurableSubscription | None:
    """Wait until all replicas have the same record of a subscription: so it was written."""
    await until(lambda: all(live.durables.get(key) == lives[0].durables.get(key) for live in lives))
    return lives[0].durables.get(key)


async def until_told(lives: list[Live], key: Key = HOOK) -> None:
    """Wait until all replicas know that a subscription was told the present list of tools, and all its contents."""

    def is_told(live: Live) -> bool:
        record = live.durables.get(key)
        if record is None or None in record.contents.values():
            return False
        return record.lists[Feature.TOOLS] == live.catalog.version(Feature.TOOLS)

    await until(lambda: all(map(is_told, lives)))


def add(live: Live, name: str) -> None:
    live.tools.add(nothing, name=name)


async def until_listed(lives: list[Live], *names: str) -> None:
    await until(lambda: all({item.key for item in live.catalog.tools.snapshot()} == {*names} for live in lives))


async def next_summary(receiver: Receiver) -> str:
    return (await receiver.next()).summary


async def acknowledgement(stream: Stream) -> dict[str, Any]:
    meta: dict[str, Any] = (await stream.message())["params"]["_meta"]
    return meta


async def next_change(stream: Stream) -> tuple[str, list[str], bool]:
    """Return what a notification is about, its operations, and whether it is complete."""
    message = await stream.message()
    meta = message["params"]["_meta"]["dev.tidings/change"]
    changes = meta.get("changes") or ([meta] if "operation" in meta else [])
    named = [f"{each['operation']} {each.get('name') or each.get('uri')}" for each in changes]
    return message["method"].removeprefix("notifications/"), named, meta["complete"]


TOOLS = {"toolsListChanged": True, "resourceSubscriptions": ["board://**"]}


# Durable subscriptions


async def test_subscription_of_a_client_continues_on_another_replica(join: Join, http: httpx2.AsyncClient) -> None:
    async with AsyncExitStack() as stack:
        # What was sent counts as received after a short time.
        here, there = await stack.enter_async_context(replicas(join, 2, write_deadline=0.05, keep_alive=0.05))
        one, other = [await stack.enter_async_context(serving(live, http)) for live in (here, there)]
        async with one.listen(1, TOOLS, NAMED) as stream:
            assert (await acknowledgement(stream))[DURABLE_KEY]["isNew"]
            await until(lambda: there.durables.is_connected(LAPTOP))
        await until(lambda: not there.durables.is_connected(LAPTOP))
        add(here, "deploy")
        there.resources.updated("board://sprint")
        await until_listed([here, there], "deploy")
        async with other.listen(1, TOOLS, NAMED) as stream:
            assert not (await acknowledgement(stream))[DURABLE_KEY]["isNew"]
            told = [await next_change(stream) for _ in range(2)]
            assert sorted(told) == [
                ("resources/updated", ["updated board://sprint"], True),
                ("tools/list_changed", ["added deploy"], True),
            ]
            await until_told([here, there], LAPTOP)
        await until(lambda: not here.durables.is_connected(LAPTOP))
        async with one.listen(1, TOOLS, NAMED) as stream:  # what the other replica has told is known here
            await acknowledgement(stream)
            add(there, "last")
            assert await next_change(stream) == ("tools/list_changed", ["added last"], True)


async def test_legacy_session_continues_on_another_replica_with_its_uris(http: httpx2.AsyncClient) -> None:
    async with AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(replicas(MemoryTable().backend, 2))
        one, other = [await stack.enter_async_context(serving(live, http)) for live in (here, there)]
        session = LegacyWire(one.url, http)
        assert (await session.shake_hands(NAMED))["_meta"][DURABLE_KEY]["isNew"]
        await session.post("resources/subscribe", uri="board://sprint")
        await until(lambda: (there.durables.get(LAPTOP) or NONE).uris == ("board://sprint",))
        await session.end()
        await until(lambda: not there.durables.is_connected(LAPTOP))
        here.resources.updated("board://sprint")
        await until(lambda: there.catalog.version("board://sprint").digest)
        session = LegacyWire(other.url, http)
        assert not (await session.shake_hands(NAMED))["_meta"][DURABLE_KEY]["isNew"]
        async with session.stream() as stream:
            assert await next_change(stream) == ("resources/updated", ["updated board://sprint"], True)


async def test_newer_connection_on_another_replica_replaces_the_older_one(join: Join, http: httpx2.AsyncClient) -> None:
    async with AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(replicas(join, 2))
        one, other = [await stack.enter_async_context(serving(live, http)) for live in (here, there)]
        first = await stack.enter_async_context(one.listen(1, TOOLS, NAMED))
        await acknowledgement(first)
        await until(lambda: there.durables.is_connected(LAPTOP))
        second = await stack.enter_async_context(other.listen(2, TOOLS, NAMED))
        assert not (await acknowledgement(second))[DURABLE_KEY]["isNew"]
        assert "result" in await first.message()
        assert await first.event() == ""
        add(here, "deploy")
        assert await next_change(second) == ("tools/list_changed", ["added deploy"], True)
        third = await stack.enter_async_context(one.listen(3, TOOLS, NAMED))
        assert not (await acknowledgement(third))[DURABLE_KEY]["isNew"]
        assert "result" in await second.message()


async def test_client_of_a_lost_replica_misses_nothing(http: httpx2.AsyncClient) -> None:
    """The client has read a change that its replica could not write. The change is lost, so the client must refetch."""
    table = MemoryTable()
    backend = MemoryBackend(table)
    async with AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(replicas(iter([backend, table.backend()]).__next__, 2))
        one, other = [await stack.enter_async_context(serving(live, http)) for live in (here, there)]
        async with one.listen(1, TOOLS, NAMED) as stream:
            await acknowledgement(stream)
            await until(lambda: there.durables.is_connected(LAPTOP))
            add(there, "deploy")
            assert await next_change(stream) == ("tools/list_changed", ["added deploy"], True)
            backend.disconnect()
        there.tools.remove("deploy")
        add(there, "test")
        await until_listed([there], "test")
        async with other.listen(1, TOOLS, NAMED) as stream:
            assert not (await acknowledgement(stream))[DURABLE_KEY]["isNew"]
            assert await next_change(stream) == ("tools/list_changed", [], False)


async def test_deletion_is_notified_on_all_replicas_and_to_clients_with_older_cursors(
    join: Join, http: httpx2.AsyncClient
) -> None:
    async with AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(replicas(join, 2))
        one, other = [await stack.enter_async_context(serving(live, http)) for live in (here, there)]
        here.resources.updated("board://sprint", etag="1")
        await until(lambda: there.catalog.version("board://sprint").digest)
        async with one.listen(1, TOOLS) as first, other.listen(1, TOOLS) as second:
            cursor = (await acknowledgement(first))[CURSOR_KEY]
            await acknowledgement(second)
            here.resources.deleted("board://sprint")
            for stream in (first, second):
                assert await next_change(stream) == ("resources/updated", ["deleted board://sprint"], True)
        new = await stack.enter_async_context(replica(join()))
        later = await stack.enter_async_context(serving(new, http))
        for wire in (other, later):  # the last one has joined after the deletion
            async with wire.listen(1, TOOLS, {RESUME_KEY: cursor}) as stream:
                await acknowledgement(stream)
                assert await next_change(stream) == ("resources/updated", ["deleted board://sprint"], True)


async def test_subscription_expires_whose_client_was_connected_to_a_lost_replica(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.cluster.shared_durables._CLIENT_TIME", 0.0)
    table = MemoryTable()
    backend = table.backend()
    async with AsyncExitStack() as stack:
        here, there = await stack.enter_async_context(replicas(iter([backend, table.backend()]).__next__, 2))
        wire = await stack.enter_async_context(serving(here, http))
        meta = {DURABLE_KEY: {"name": "laptop", "ttl": 0.5}}
        stream = await stack.enter_async_context(wire.listen(1, TOOLS, meta))
        await acknowledgement(stream)
        await until(lambda: there.durables.is_connected(LAPTOP))
        backend.disconnect()
        await until(lambda: there.durables.get(LAPTOP) is None)
        assert here.durables.is_connected(LAPTOP)
        backend.reconnect()  # it was only unreachable
        assert "result" in await stream.message()
        assert here.durables.get(LAPTOP) is None


# Webhooks


async def test_webhook_is_known_on_all_replicas_and_delivered_by_one(join: Join) -> None:
    async with receiving() as receiver, replicas(join) as lives:
        secret = lives[0].webhooks.put("hook", receiver.url, "tools").webhook.secret  # type: ignore[union-attr]
        await until_delivered_by_one(lives)
        for number, live in enumerate(lives * 2):
            add(live, f"t{number}")
            delivery = await receiver.next()
            assert delivery.summary == f"tools.list_changed added t{number}"
            verify(delivery, secret, now=live.catalog.now())
        assert receiver.came.empty()
        assert len(deliverers(lives)) == 1


async def test_webhook_is_changed_and_removed_on_any_replica(join: Join) -> None:
    async with receiving() as receiver, receiving() as newer, replicas(join) as lives:
        lives[0].webhooks.put("hook", receiver.url, "tools")
        deliverer = await until_delivered_by_one(lives)
        one, other = (live for live in lives if live is not deliverer)
        add(one, "a")
        assert await next_summary(receiver) == "tools.list_changed added a"

        one.webhooks.put("hook", newer.url, "tools", "prompts")
        await until(lambda: all(Feature.PROMPTS in (live.durables.get(HOOK) or NONE).features for live in lives))
        assert await until_delivered_by_one(lives) is deliverer
        add(other, "b")  # and nothing of `a`, which the deliverer knows was delivered
        assert await next_summary(newer) == "tools.list_changed added b"

        newer.answers(410)
        add(other, "c")
        await newer.next()
        await until(lambda: all(is_dead(live) for live in lives))
        assert not deliverers(lives)
        newer.answers(200)
        assert other.webhooks.revive("hook") is not None
        assert await next_summary(newer) == "tools.list_changed added c"

        assert one.webhooks.remove("hook")
        await until(lambda: not any(live.durables.get(HOOK) for live in lives))
        assert not deliverers(lives)


def is_dead(live: Live) -> bool:
    record = live.durables.get(HOOK)
    return record is not None and record.webhook is not None and record.webhook.is_dead


async def test_another_replica_delivers_when_the_deliverer_leaves(join: Join) -> None:
    async with receiving() as receiver, replicas(join) as lives:
        lives[0].webhooks.put("hook", receiver.url, "tools")
        first = await until_delivered_by_one(lives)
        others = [live for live in lives if live is not first]
        for live in lives:
            add(live, "base")
        assert await next_summary(receiver) == "tools.list_changed added base"
        await until_told(lives)
        await leave(first)
        second = await until_delivered_by_one(others)
        last = next(live for live in others if live is not second)
        add(second, "a")
        assert await next_summary(receiver) == "tools.list_changed added a"
        await until_told(others)
        add(last, "b")
        assert await next_summary(receiver) == "tools.list_changed added b"
        await leave(second)  # perhaps before it has processed the answer
        while not (summary := await next_summary(receiver)).endswith("removed a"):
            assert summary == "tools.list_changed added b"


async def test_unreachable_deliverer_stops_and_another_one_takes_over() -> None:
    table = MemoryTable()
    backends = [table.backend() for _ in range(2)]
    async with receiving() as receiver, replicas(iter(backends).__next__, 2) as lives:
        lives[0].webhooks.put("hook", receiver.url, "tools")
        deliverer = await until_delivered_by_one(lives)
        other = next(live for live in lives if live is not deliverer)
        await until_equal(lives)
        backend = backends[lives.index(deliverer)]
        backend.disconnect()
        add(other, "a")
        assert await next_summary(receiver) == "tools.list_changed added a"
        assert deliverers(lives) == [other]
        backend.reconnect()
        await until(lambda: is_member(deliverer) and is_member(other))
        add(deliverer, "b")
        assert await next_summary(receiver) == "tools.list_changed added b"
        assert deliverers(lives) == [other]


async def test_put_while_the_cluster_cannot_be_reached_is_delivered_later() -> None:
    table = MemoryTable()
    backend = table.backend()
    async with receiving() as receiver, replica(backend) as live:
        backend.disconnect()
        await until(live.find_degraded)
        live.webhooks.put("hook", receiver.url, "tools")
        add(live, "a")
        backend.reconnect()
        assert await next_summary(receiver) == "tools.list_changed added a"


async def test_emptied_table_gets_all_subscriptions_again(http: httpx2.AsyncClient) -> None:
    table = MemoryTable()
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        lives = await stack.enter_async_context(replicas(table.backend))
        wire = await stack.enter_async_context(serving(lives[0], http))
        lives[0].webhooks.put("hook", receiver.url, "tools")
        deliverer = await until_delivered_by_one(lives)
        stream = await stack.enter_async_context(wire.listen(1, TOOLS, NAMED))
        await acknowledgement(stream)
        await until(lambda: all(live.durables.is_connected(LAPTOP) for live in lives))
        away = DurableSubscription(name="away", uris=("board://x",), ttl=600.0)
        lives[1].durables.put(away)
        await until_equal(lives, away.key)

        epoch = lives[0].epoch
        table.clear()
        await until(lambda: all(live.epoch != epoch and is_member(live) for live in lives))
        assert await until_delivered_by_one(lives) is deliverer
        add(lives[0], "a")
        assert await next_change(stream) == ("tools/list_changed", ["added a"], True)
        assert await next_summary(receiver) == "tools.list_changed added a"
        async with replica(table.backend()) as new:
            await until(lambda: len(new.durables) == 3)
            await until_equal([*lives, new])
        assert receiver.came.empty()


async def test_subscriptions_survive_the_end_of_all_replicas_with_the_told_versions(join: Join) -> None:
    async with receiving() as receiver:
        async with replicas(join, 2) as lives:
            for live in lives:
                add(live, "a")
            await until_listed(lives, "a")
            lives[0].webhooks.put("hook", receiver.url, "tools")
            await until_delivered_by_one(lives)
        async with replica(join()) as live:
            add(live, "a")
            add(live, "b")
            delivery = await receiver.next()  # without details, because this replica does not have the history
            assert delivery.envelope["data"]["_meta"]["dev.tidings/change"]["complete"] is False
            await until_told([live])
            add(live, "c")
            assert await next_summary(receiver) == "tools.list_changed added c"


async def test_same_put_at_the_start_of_each_replica_keeps_secret_and_told_versions() -> None:
    table = MemoryTable()
    async with receiving() as receiver, replica(table.backend()) as first:
        secret = first.webhooks.put("hook", receiver.url, "tools").webhook.secret  # type: ignore[union-attr]
        await until_delivered_by_one([first])
        backend = table.backend()
        live = Live(
            MCPServer("board", log_level="CRITICAL"), policy=Policy(webhook_backoff=0.05), cluster=backend
        )  # puts before it knows the cluster
        live.webhooks.put("hook", receiver.url, "tools")
        await live.list_reader.ensure_loaded()
        await until(lambda: is_member(live))
        await until_delivered_by_one([first, live])
        add(first, "a")
        delivery = await receiver.next()
        verify(delivery, secret, now=first.catalog.now())
        record = await until_equal([first, live])
        assert record is not None
        assert record.webhook is not None
        assert record.webhook.secret == secret
        await leave(live)


async def test_busy_webhook_is_written_at_most_once_per_second() -> None:
    table = MemoryTable()
    backend = CountingBackend(table)
    async with receiving() as receiver, replica(backend) as live:
        live.webhooks.put("hook", receiver.url, uris=["board://x"])
        await until_delivered_by_one([live])
        backend.durable_writes = 0
        start = live.catalog.now()
        for _ in range(200):
            live.resources.updated("board://x")
            await receiver.next()
        assert backend.durable_writes <= 2 + (live.catalog.now() - start)


async def test_subscription_that_is_too_large_for_the_table_does_not_delay_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = MemoryTable(max_size=2000)
    async with receiving() as receiver, replicas(table.backend, 2) as (here, there):
        uris = [f"board://{number}/{'x' * 100}" for number in range(20)]
        here.durables.put(DurableSubscription(name="laptop", uris=tuple(uris), ttl=60.0))
        here.webhooks.put("hook", receiver.url, "tools")
        await until(lambda: there.durables.get(HOOK))
        await until_delivered_by_one([here, there])
        assert there.durables.get(LAPTOP) is None
        assert "other replicas will not have a durable subscription: durable/" in caplog.text


class CountingBackend(MemoryBackend):
    durable_writes = 0

    async def write(self, writes: Any) -> list[int | None]:
        self.durable_writes += sum(isinstance(each, Write) and each.key.startswith("durable/") for each in writes)
        return await super().write(writes)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
async def test_after_random_faults_each_webhook_is_delivered_once_by_one_replica(number: int) -> None:
    """Replicas lose the table, leave and join, and the table is lost, while webhooks are put and removed."""
    random = Random(f"{SEED} {number}")
    table = MemoryTable()
    backends: dict[Live, MemoryBackend] = {}
    async with receiving() as receiver, AsyncExitStack() as stack:

        async def join() -> None:
            backend = table.backend()
            backends[await stack.enter_async_context(replica(backend))] = backend

        def are_equal() -> bool:
            connected = [live.replica for live in backends if live.replica and live.replica.lost_reason is None]
            return len({each.state.order for each in connected}) <= 1

        for _ in range(3):
            await join()
        for step in range(80):
            live = random.choice(list(backends))
            name = random.choice("ab")
            action = random.randrange(12)
            if action < 2:
                live.webhooks.put(name, f"{receiver.url}&name={name}&{step}", uris=["board://*"])
            elif action == 2:
                live.webhooks.remove(name)
            elif action == 3:
                backends[live].disconnect()
            elif action == 4:
                backends[live].reconnect()
            elif action == 5 and random.random() < 0.3:
                table.clear()
            elif action == 6 and random.random() < 0.3:
                del backends[live]
                await leave(live)
                await join()
            else:
                live.resources.updated(f"board://{random.randrange(3)}")
            if random.random() < 0.7:
                await until(are_equal)
        lives = list(backends)
        for backend in backends.values():
            backend.reconnect()
        lives[0].webhooks.put("a", receiver.url, uris=["board://*"])
        await until(lambda: all(is_member(live) for live in lives))
        await until(lambda: all(len(live.replica.state.replicas) == len(lives) for live in lives))  # type: ignore[union-attr]

        def is_settled() -> bool:
            keys = {tuple(record.key for record in live.durables.all()) for live in lives}
            return len(keys) == 1 and all(
                len(deliverers(lives, key)) == 1
                and all(live.durables.get(key) == lives[0].durables.get(key) for live in lives)
                for key in next(iter(keys))
            )

        await until(is_settled)
        lives[1].resources.updated("board://last")
        expected = len(lives[0].durables)
        told: list[str] = []
        # A request that was sent before the faults were over may arrive after the last change.
        while len(told) < expected or not receiver.came.empty():
            delivery = await receiver.next()
            if b"board://last" in delivery.body:
                told.append(delivery.path)
        assert len(told) == len(set(told)) == expected


# A real NATS server


async def test_webhook_survives_a_restart_of_nats_with_and_without_its_data(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path / "store") as server:
        async with receiving() as receiver, replicas(lambda: Nats(server.url)) as lives:
            lives[0].webhooks.put("hook", receiver.url, "tools")
            await until_delivered_by_one(lives)
            add(lives[0], "a")
            assert await next_summary(receiver) == "tools.list_changed added a"
            await until_equal(lives)
            for number, is_emptied in enumerate([False, True]):
                await asyncio.to_thread(server.stop)
                await until(lambda: all(live.find_degraded() for live in lives) and not deliverers(lives))
                if is_emptied:
                    (tmp_path / "store").rename(tmp_path / "old")
                await asyncio.to_thread(server.start)
                await until(lambda: all(is_member(live) and not live.find_degraded() for live in lives))
                await until_delivered_by_one(lives)
                add(lives[1], f"b{number}")
                while f"added b{number}" not in await next_summary(receiver):
                    pass  # the items of a replica come back one after the other
                await until_equal(lives)
