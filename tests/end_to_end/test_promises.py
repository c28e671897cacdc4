"""Check the promises with fifty real clients during two thousand changes.

Clients of both eras, over HTTP and stdio, connect, disconnect and change their subscriptions at random while the
catalog changes. The notifications are read from the wire, and the changes from the server. Both are ordered by the
monotonic clock, which all processes share. `TIDINGS_SEED` repeats a run as far as processes allow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryFile
from typing import Any, Literal, TypeAlias

import httpx2
import pytest
from mcp.client import Client
from mcp.client.session import MessageHandlerFnT
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel

from tests.support.faults.wire import Process, Settings, changed, serve, stdio_server
from tests.support.messages import MODERN
from tests.support.promises.checks import PROMISES
from tests.support.promises.history import (
    Acknowledged,
    Changed,
    Closed,
    Event,
    History,
    MailboxSize,
    Subscribed,
    Told,
    Unsubscribed,
)
from tests.support.stress import sized
from tidings.core.model import Feature, Topic, Version

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:(resources/.*subscribe|ping) is removed")]

EPOCHS = 4
"""After each epoch, changes stop until every client was told, so that the next change hides no loss."""
URIS = [f"board://{folder}/{number}" for folder in ("sprint", "notes") for number in range(6)]
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
QUIET_WITHIN = 60.0

ConnectionKind = Literal["legacy", "modern"]
MODES: dict[ConnectionKind, str] = {"legacy": "legacy", "modern": MODERN}
Note: TypeAlias = MessageHandlerFnT
Connection: TypeAlias = AbstractAsyncContextManager[Client]


def covered(path: Topic) -> list[Topic]:
    """Return the topics that a subscription to a path covers."""
    if isinstance(path, Feature) or path in URIS:
        return [path]
    return [uri for uri in URIS if uri.startswith(path.removesuffix("*"))]


@dataclass(eq=False)
class Subscription:
    """One subscriber, as its client saw it: a listen stream, or a legacy session."""

    name: str
    server: Server
    label: str | None = None
    """Its label on the server, if the client knows it."""
    paths: dict[Topic, int] = field(default_factory=dict)
    """The features, URIs and patterns that it watches, each with a time at which it is surely subscribed."""
    told: dict[Topic, Version] = field(default_factory=dict)
    events: list[tuple[int, Event]] = field(default_factory=list)
    lost: frozenset[tuple[Topic, Version]] = frozenset()
    """The versions that a killed server had not written, and that no longer existed when it connected."""
    is_closed: bool = False
    asked: Topic | None = None
    """The topic of a subscribe request without a response yet."""
    is_in_doubt: bool = False
    """Whether a deletion came during that request: it may have been before the subscription, or have ended it."""

    def record(self, event: Event, at: int | None = None) -> None:
        self.events.append((time.monotonic_ns() if at is None else at, event))

    def granted(self, paths: Sequence[Topic]) -> None:
        self.record(Acknowledged(self.name))
        watched = {topic for path in self.paths for topic in covered(path)}
        for topic in {topic for path in paths for topic in covered(path)} - watched:
            self.told.pop(topic, None)  # it counts as told the present version
        self.paths = dict.fromkeys(paths, time.monotonic_ns()) | self.paths

    def receive(self, message: dict[str, Any], at: int) -> None:
        told = Told.from_message(self.name, message)
        if told is None or self.is_closed:
            return
        self.record(told, at)
        assert told.version is not None, message
        self.told[told.topic] = told.version
        if any(operation == "deleted" for operation, _ in told.changes or ()):
            self.paths.pop(told.topic, None)
            if told.topic == self.asked:
                self.is_in_doubt = True
                self.record(Subscribed(self.name, (told.topic,)), at)
        self.server.received.set()

    def close(self) -> None:
        self.is_closed = True
        self.record(Closed(self.name))

    def is_owed(self) -> bool:
        """Return whether it has not been told the present versions. Used only to wait; the checks decide."""
        return any(self._is_owed(topic, since) for path, since in self.paths.items() for topic in covered(path))

    def _is_owed(self, topic: Topic, since: int) -> bool:
        rows = self._without_lost(self.server.changed.get(topic, []))
        known = self.told.get(topic) or next((change.previous for at, change in rows if at > since), None)
        return known is not None and bool(rows) and known.digest != rows[-1][1].version.digest

    def _without_lost(self, changes: list[tuple[int, Changed]]) -> list[tuple[int, Changed]]:
        return [(at, change) for at, change in changes if (change.topic, change.version) not in self.lost]

    def history(self, changes: list[tuple[int, Changed]]) -> History:
        """Return its events and all changes, in order.

        Over HTTP, the response to an unsubscribe request comes on another connection than the stream. Notifications of
        earlier changes may still be in transit, and count as told in time: before the subscription ended, or after the
        client has subscribed again.
        """
        changes = self._without_lost(changes)
        made = {(change.topic, change.version): at for at, change in changes}
        events = list(self.events)
        for index, (at, event) in enumerate(self.events):
            if isinstance(event, Unsubscribed) and self.server.has_streams:
                in_transit = [
                    when
                    for when, each in self.events[index:]
                    if isinstance(each, Told) and each.version is not None
                    if any(each.topic in covered(path) for path in event.topics)
                    if made.get((each.topic, each.version), at) < at
                ]
                end = max([at, *(when + 1 for when in in_transit)])
                subscribed_again = [
                    when
                    for when, each in self.events[index:]
                    if isinstance(each, Subscribed) and set(each.topics).intersection(event.topics)
                ]
                events[index] = (min([end, *subscribed_again]), event)
        merged: list[tuple[int, int, Event]] = [(at, 0, change) for at, change in changes]
        merged += [(at, 1, event) for at, event in sorted(events, key=lambda each: each[0])]
        return History(event for _, _, event in sorted(merged, key=lambda each: each[:2]))


class Server:
    """A server, its recorded changes, and the subscriptions of its clients."""

    def __init__(
        self,
        change: Callable[[list[dict[str, Any]]], Awaitable[object]],
        record: Callable[[int], Awaitable[list[Any]]],
        pending: Callable[[], Awaitable[dict[str, int]]] | None = None,
        *,
        has_streams: bool,
    ) -> None:
        self.has_streams = has_streams
        self.change = change
        self._record = record
        self._pending = pending
        self.subscriptions: list[Subscription] = []
        self.rows: list[tuple[int, Changed]] = []
        self.changed: dict[Topic, list[tuple[int, Changed]]] = {}
        self.received = asyncio.Event()
        self.lost: set[tuple[Topic, Version]] = set()

    def open(self, name: str) -> Subscription:
        subscription = Subscription(name, self, lost=frozenset(self.lost))
        self.subscriptions.append(subscription)
        return subscription

    async def catch_up(self) -> int:
        """Fetch the changes that the server recorded since last time."""
        for at, change in map(changed, await self._record(len(self.rows))):
            self.rows.append((at, change))
            self.changed.setdefault(change.topic, []).append((at, change))
        return len(self.rows)

    async def record_mailboxes(self) -> None:
        """Record the mailbox size of each subscriber."""
        pending = await self._pending() if self._pending is not None else {}
        for each in self.subscriptions:
            if each.label in pending and not each.is_closed:
                each.record(MailboxSize(each.name, pending[each.label]))

    async def wait_until_idle(self) -> None:
        """Wait until every client is told the present versions, or until the timeout. No change is made meanwhile."""
        await self.catch_up()
        try:
            async with asyncio.timeout(QUIET_WITHIN):
                while any(each.is_owed() for each in self.subscriptions if not each.is_closed):
                    self.received.clear()
                    await self.received.wait()
        except TimeoutError:
            pass  # the checks report the details

    def check(self, *promises: str) -> None:
        for subscription in self.subscriptions:
            if subscription.is_closed and promises:
                continue
            history = subscription.history(self.rows)
            for promise in promises or PROMISES:
                PROMISES[promise](history)


# Changes of the catalog


class Changes:
    """Random valid operations on the catalog of a server."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._items: dict[str, list[str]] = {"tools": [], "prompts": [], "resources": []}
        self._count = 0

    def next(self) -> dict[str, Any]:
        dice = self._dice
        self._count += 1
        if dice.random() < 0.65:
            # With few etags, a content often returns to an earlier version.
            uri, text = dice.choice(URIS), dice.choice(["a", "b", "c", ""])
            do = "deleted" if dice.random() < 0.03 else "updated"
            if do == "deleted" and uri in self._items["resources"]:
                self._items["resources"].remove(uri)
            return {"do": do, "of": "resources", "key": uri, "text": text}
        of = dice.choice(list(self._items))
        there = self._items[of]
        possible = URIS if of == "resources" else [f"{of}-{number}" for number in range(8)]
        missing = [key for key in possible if key not in there]
        do = dice.choice(["add"] * bool(missing) + ["remove", "update", "update"] * bool(there))
        key = dice.choice(missing if do == "add" else there)
        if do == "add":
            there.append(key)
        elif do == "remove":
            there.remove(key)
        return {"do": do, "of": of, "key": key, "text": dice.choice(["one", "two", str(self._count)])}


# Clients


class RandomClient:
    """A client that runs commands one after another, and records its notifications."""

    def __init__(
        self,
        name: str,
        kind: ConnectionKind,
        server: Server,
        connect: Callable[[Note], Connection],
        dice: random.Random,
    ) -> None:
        self.name = name
        self.kind = kind
        self.client: Client | None = None
        self._server = server
        self._connect = connect
        self._dice = dice
        self._lives = 0
        self._session: Subscription | None = None
        self._streams: dict[str, Subscription] = {}
        self._early: list[tuple[str, dict[str, Any], int]] = []
        """The messages of a stream that came before its id was known."""
        self._commands: asyncio.Queue[str | None] = asyncio.Queue()
        self._commands.put_nowait("drop")

    def command(self, what: str | None) -> None:
        """Queue a command: "drop" (reconnect), "change" (the subscriptions), or None (disconnect for good)."""
        self._commands.put_nowait(what)

    async def settled(self) -> None:
        """Wait until all commands are done. The first command is to connect."""
        await self._commands.join()

    async def run(self) -> None:
        assert await self._commands.get() == "drop"
        command: str | None = "drop"
        while command is not None:
            self._lives += 1
            command = await (self._run_legacy() if self.kind == "legacy" else self._run_modern())
        self._commands.task_done()

    async def _next_command(self) -> str | None:
        self._commands.task_done()
        return await self._commands.get()

    async def _note(self, message: Any) -> None:
        at = time.monotonic_ns()
        if not isinstance(message, BaseModel):
            return  # an error of the transport, which reconnects
        content = message.model_dump(by_alias=True, mode="json", exclude_none=True)
        if self._session is not None:
            self._session.receive(content, at)
            return
        stream_id = content["params"].get("_meta", {}).get(SUBSCRIPTION_ID)
        if stream_id in self._streams:
            self._streams[stream_id].receive(content, at)
        else:
            self._early.append((stream_id, content, at))

    async def _run_legacy(self) -> str | None:
        self._session = session = self._server.open(f"{self.name}.{self._lives}")
        session.record(Subscribed(session.name, tuple(Feature)))
        async with self._connect(self._note) as self.client:
            # The response comes after the handshake. A list request would be a fetch, which affects notifications.
            await self.client.send_ping()
            session.granted(list(Feature))
            command: str | None = "change"
            while command == "change":
                watched = [topic for topic in session.paths if not isinstance(topic, Feature)]
                for uri in self._dice.sample(watched, self._dice.randrange(len(watched) + 1)):
                    session.paths.pop(uri, None)  # a deletion may have ended it meanwhile
                    await self.client.unsubscribe_resource(uri)
                    session.record(Unsubscribed(session.name, (uri,)))
                for uri in self._some_uris():
                    session.asked, session.is_in_doubt = uri, False
                    session.record(Subscribed(session.name, (uri,)))
                    await self.client.subscribe_resource(uri)
                    session.asked = None
                    if session.is_in_doubt:
                        await self.client.unsubscribe_resource(uri)
                        session.record(Unsubscribed(session.name, (uri,)))
                    else:
                        session.granted([uri])
                command = await self._next_command()
            session.close()
        return command

    async def _run_modern(self) -> str | None:
        async with self._connect(self._note) as self.client:
            command: str | None = "change"
            while command == "change":
                stream = self._server.open(f"{self.name}.{self._lives}.{len(self._streams)}")
                features = self._dice.sample(list(Feature), self._dice.randrange(1, 3))
                uris = self._some_uris()
                stream.record(Subscribed(stream.name, (*features, *uris)))
                wanted: dict[str, Any] = {f"{feature.value}_list_changed": True for feature in features}
                async with self.client.listen(**wanted, resource_subscriptions=uris) as listening:
                    stream.granted([*features, *uris])
                    stream.label = f"listen {listening.subscription_id}"
                    self._streams[str(listening.subscription_id)] = stream
                    for stream_id, content, at in self._early:
                        if stream_id == listening.subscription_id:
                            stream.receive(content, at)
                    self._early.clear()
                    command = await self._next_command()
                    stream.close()
        return command

    def _some_uris(self) -> list[str]:
        chosen: list[str] = self._dice.sample(URIS, self._dice.randrange(4))
        return chosen + self._dice.choice([*[[]] * 8, ["board://notes/*"], ["board://sprint"]])


@asynccontextmanager
async def over_http(url: str, mode: str, dice: random.Random, note: Note) -> AsyncIterator[Client]:
    ends_session = dice.random() < 0.5
    # Without certificates: reading them takes longer than everything else here.
    async with httpx2.AsyncClient(verify=False, trust_env=False, timeout=httpx2.Timeout(30, read=300)) as http:
        transport = streamable_http_client(url, http_client=http, terminate_on_close=ends_session)
        async with Client(transport, mode=mode, message_handler=note, cache=None) as client:
            yield client


@asynccontextmanager
async def over_stdio(mode: str, note: Note) -> AsyncIterator[Client]:
    with TemporaryFile("w") as log:
        transport = stdio_client(stdio_server(Settings()), errlog=log)
        async with Client(transport, mode=mode, message_handler=note, cache=None) as client:
            # Fetch the list before the first change. Otherwise the client fetches it before its first tool call, and
            # the fetched version may cause more notifications.
            await client.list_tools()
            yield client


# The run


async def drive(
    server: Server, random_clients: list[RandomClient], dice: random.Random, least: int, at_once: int
) -> None:
    """Make at least this many changes while clients reconnect, and wait until every client is told."""
    changes = Changes(dice)
    await asyncio.gather(*(random_client.settled() for random_client in random_clients))
    for epoch in range(1, EPOCHS + 1):
        while await server.catch_up() < least * epoch // EPOCHS:
            for _ in range(25 // at_once):
                operations = [changes.next() for _ in range(at_once)]
                if server.has_streams and dice.random() < 0.02:
                    operations.insert(0, {"do": "cut", "of": "", "key": "", "text": str(dice.randrange(1_000))})
                await server.change(operations)
                if dice.random() < 0.15:
                    dice.choice(random_clients).command(
                        dice.choice(["drop", "change"]) if server.has_streams else "change"
                    )
            await server.record_mailboxes()
        await asyncio.gather(*(random_client.settled() for random_client in random_clients))
        if server.has_streams:
            # Many clients lose the last notification, and no later change replaces it.
            await server.wait_until_idle()
            await server.change([{"do": "cut", "of": "", "key": ""}, *(changes.next() for _ in range(10))])
        await server.wait_until_idle()
        server.check("Reliable")
    for random_client in random_clients:
        random_client.command(None)


@pytest.mark.stress
async def test_all_promises_hold_for_fifty_clients_during_random_changes(seed: int) -> None:
    changes = sized(200, 2_000)
    async with serve("uvicorn") as process, asyncio.TaskGroup() as tasks:
        servers = [run_over_http(process, random.Random(seed), changes, tasks)]
        for number in range(1, 5):
            kind: ConnectionKind = "modern" if number % 2 else "legacy"
            servers.append(run_over_stdio(kind, number, random.Random(seed + number), changes, tasks))
    for server in servers:
        server.check()
    assert all(len(server.rows) >= changes for server in servers)


def run_over_http(process: Process, dice: random.Random, least: int, tasks: asyncio.TaskGroup) -> Server:
    url = f"http://127.0.0.1:{process.port}/mcp"

    async def pending() -> dict[str, int]:
        found: dict[str, int] = (await process.state())["pending"]
        return found

    server = Server(lambda operations: process.change(*operations), process.record, pending, has_streams=True)
    random_clients: list[RandomClient] = []
    for number in range(46):
        kind: ConnectionKind = "modern" if number % 3 else "legacy"
        random_client = RandomClient(
            f"http-{kind}-{number}", kind, server, partial(over_http, url, MODES[kind], dice), dice
        )
        random_clients.append(random_client)
        tasks.create_task(random_client.run())
    tasks.create_task(drive(server, random_clients, dice, least, at_once=1))
    return server


def run_over_stdio(
    kind: ConnectionKind, number: int, dice: random.Random, least: int, tasks: asyncio.TaskGroup
) -> Server:
    async def change(operations: list[dict[str, Any]]) -> None:
        assert random_client.client is not None
        result = await random_client.client.call_tool("change", {"operations": operations})
        assert not result.is_error, result

    async def record(start: int) -> list[Any]:
        assert random_client.client is not None
        result = await random_client.client.call_tool("record", {"start": start})
        rows: list[Any] = (result.structured_content or {})["result"]
        return rows

    server = Server(change, record, has_streams=False)
    random_client = RandomClient(f"stdio-{kind}-{number}", kind, server, partial(over_stdio, MODES[kind]), dice)
    tasks.create_task(random_client.run())
    tasks.create_task(drive(server, [random_client], dice, least, at_once=5))
    return server
