"""Check resumption with clients that lose their connection at random points of two thousand changes.

Each client keeps a cursor, and a copy of every list that it watches, which it updates by deltas alone. It disconnects
at random: before the acknowledgement, between two notifications, or with some unread. It reconnects with its cursor, an
older one or an unknown one, and must be told exactly what differs, or to refetch. The checks are those of
`test_promises.py`; in the end, each copy must equal the list.

In the last test the server has a store, and is killed before, during and after the write of the told versions.
`TIDINGS_SEED` repeats a run as far as processes allow.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import msgspec
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel

from tests.end_to_end.test_promises import URIS, Changes, Server, Subscription
from tests.support.faults.wire import (
    OPERATIONS,
    RECORD,
    STATE,
    TIMEOUT,
    How,
    Process,
    Settings,
    Stream,
    listen_request,
    request,
    serve,
)
from tests.support.list_copy import Copy
from tests.support.messages import modern_headers, modern_message
from tests.support.promises.checks import check_resumable
from tests.support.promises.history import Acknowledged, Subscribed, Told
from tests.support.sdk_clients import ChangesExtension, DeletedParams
from tests.support.stress import sized
from tidings.core.cursor import Cursor
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, DELETED_METHOD, FILTER_KEY, RESUME_KEY
from tidings.core.model import Feature, Topic, Version
from tidings.store.sqlite import peek

pytestmark = pytest.mark.anyio

CLIENTS = 20
SDK_CLIENTS = 4
MAX_CHANGES = 50_000
"""Far more than a slow machine needs. Only a run without reconnections or restarts reaches it."""


class Place:
    """The running server process, which may be replaced."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.is_up = asyncio.Event()
        self.is_up.set()

    async def record(self, start: int) -> list[Any]:
        """Return the changes from the nth on."""
        return await self.process.record(start)

    async def fetch(self, feature: Feature) -> dict[str, Any]:
        """Fetch a list."""
        method = f"{feature.value}/list"
        _, _, body = await request(self.process.port, "POST", "/mcp", modern_headers(method), modern_message(method))
        result: dict[str, Any] = msgspec.json.decode(body)["result"]
        return result


class KilledServer(Place):
    """A server with a store, which is killed and restarted."""

    def __init__(self, process: Process, start: Callable[[], Awaitable[Process]], folder: Path) -> None:
        super().__init__(process)
        self.starts = 1
        self._start = start
        self._folder = folder

    async def record(self, start: int) -> list[Any]:
        """Return the changes of all processes, from the nth on."""
        lines = (self._folder / RECORD).read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines[start:]]

    async def kill(self, server: Server) -> None:
        """Kill the process, and record the versions that it had not written."""
        self.is_up.clear()
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait_for_exit(TIMEOUT)
        await server.catch_up()
        kept = peek(self._folder / STATE)
        for _, change in server.rows:
            topic = change.topic
            known = kept.versions.get(topic) if isinstance(topic, Feature) else kept.contents.get(topic)
            if known is None or change.version.revision > known.revision:
                server.lost.add((topic, change.version))

    async def restart(self, operations: list[dict[str, Any]]) -> None:
        """Start a new process with all operations that were sent to earlier ones."""
        (self._folder / OPERATIONS).write_bytes(msgspec.json.encode(operations))
        self.process = await self._start()
        self.starts += 1
        self.is_up.set()


class Reader:
    """One client, over several connections."""

    def __init__(self, name: str, server: Server, place: Place, dice: random.Random, *, uses_sdk: bool) -> None:
        self.name = name
        self.connections = self.refetches = 0
        self.subscription: Subscription | None = None
        self.copies: dict[Feature, Copy] = {}
        self._server = server
        self._place = place
        self._dice = dice
        self._connect = self._by_sdk if uses_sdk else self._by_hand
        self._features = dice.sample(list(Feature), dice.randrange(1, 4))
        self._uris: list[str] = dice.sample(URIS, dice.randrange(4))
        self._cursor: Cursor | None = None
        self._cursors: list[Cursor] = []
        """The cursors that contain all its lists. A list that a cursor does not contain would not be told."""
        self._stays = self._leaves = False
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        """The messages of the connection; None at its end."""
        self.is_settled = asyncio.Event()

    def stay(self) -> None:
        """Keep the connection from now on."""
        self._stays = True

    def leave(self) -> None:
        self._leaves = True
        self._messages.put_nowait(None)

    def drop(self) -> None:
        """End the connection, because the server was killed."""
        self._messages.put_nowait(None)

    async def live(self) -> None:
        while not self._leaves:
            await self._place.is_up.wait()
            process = self._place.process
            try:
                await self._refetch(*(feature for feature in self._features if feature not in self.copies))
                await self._be_connected()
            except OSError:
                pass
            except Exception:  # the SDK raises various errors when the server is killed
                if process is self._place.process and self._place.is_up.is_set():
                    raise

    async def _be_connected(self) -> None:
        self.connections += 1
        self._messages = asyncio.Queue()
        self.subscription = subscription = self._server.open(f"{self.name}.{self.connections}")
        resume, known = self._resume()
        topics: list[Topic] = [*self._features, *self._uris]
        subscription.record(Subscribed(subscription.name, tuple(topics), known))
        try:
            async with self._connect(resume):
                if self._is_cut(0.05):
                    return  # before the acknowledgement is read
                while (message := await self._next()) is not None:
                    if message["method"].endswith("/acknowledged"):
                        subscription.record(Acknowledged(subscription.name))
                        subscription.granted(topics)
                        subscription.told |= {topic: known[topic] or Version(-1, "") for topic in known}
                        self._learn(message)
                        if self._stays:
                            self.is_settled.set()
                    else:
                        subscription.receive(message, time.monotonic_ns())
                        await self._take(message)
                    if self._is_cut(0.03):
                        return
        finally:
            if not self._leaves:
                subscription.close()

    def _is_cut(self, chance: float) -> bool:
        return not self._stays and self._dice.random() < chance

    async def _next(self) -> dict[str, Any] | None:
        """Return the next message, or None if the connection ends, or at random after a pause without messages."""
        while not self._stays:
            try:
                async with asyncio.timeout(self._dice.choice([0.2, 1.0])):
                    return await self._messages.get()
            except TimeoutError:
                if self._is_cut(0.3):
                    return None
        if self.subscription is not None and self.subscription.paths:
            self.is_settled.set()
        return await self._messages.get()

    def _resume(self) -> tuple[Any, dict[Topic, Version | None]]:
        """Return the cursor to resume from, and its versions of the watched topics."""
        cursor = self._cursors[-1]
        chance = self._dice.random()
        if chance < 0.1:
            cursor = self._dice.choice(self._cursors)
        elif chance < 0.13:
            return "garbage", dict.fromkeys([*self._features, *self._uris])
        elif chance < 0.16:
            versions: dict[Topic, Version | None] = {topic: Version(3, "of another epoch") for topic in self._features}
            return Cursor("elsewhere", versions).as_json(), versions
        watched = {*self._features, *self._uris}
        return cursor.as_json(), {topic: version for topic, version in cursor.versions.items() if topic in watched}

    async def _take(self, message: dict[str, Any]) -> None:
        told = Told.from_message(self.name, message)
        assert told is not None
        assert told.version is not None
        if isinstance(told.topic, Feature):
            copy = self.copies[told.topic]
            if copy.digest != told.version.digest and not copy.apply(message["params"]["_meta"][CHANGE_KEY]):
                await self._refetch(told.topic)
                return
        self._learn(message)

    def _learn(self, message: Mapping[str, Any]) -> None:
        meta = (message.get("params") or message)["_meta"]
        cursor = Cursor.parse(meta[CURSOR_KEY])
        assert cursor is not None
        is_read = not str(message.get("method")).endswith("/acknowledged")
        self._cursor = self._cursor.merge(cursor, is_read=is_read) if self._cursor is not None else cursor
        if self._cursor.versions.keys() >= set(self._features):
            self._cursors.append(self._cursor)

    async def _refetch(self, *features: Feature) -> None:
        for feature in features:
            self.refetches += 1
            result = await self._place.fetch(feature)
            self.copies[feature] = Copy(feature, result[feature.value])
            self._learn(result)

    @asynccontextmanager
    async def _by_hand(self, resume: Any) -> AsyncIterator[None]:
        wanted: dict[str, Any] = {f"{feature.value}ListChanged": True for feature in self._features}
        meta = {RESUME_KEY: resume, FILTER_KEY: {"detail": "delta"}}
        sent = listen_request(self.connections, wanted | {"resourceSubscriptions": self._uris}, meta)
        stream = await Stream.open(self._place.process.port, sent)

        async def read(messages: asyncio.Queue[dict[str, Any] | None]) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                # A graceful end is announced by the result of the request, which has no method.
                while (event := await stream.event()) is not None and "method" in event:
                    messages.put_nowait(event)
            messages.put_nowait(None)

        reading = asyncio.create_task(read(self._messages))
        try:
            yield
        finally:
            reading.cancel()
            stream.close()

    @asynccontextmanager
    async def _by_sdk(self, resume: Any) -> AsyncIterator[None]:
        """Connect the client of the SDK. It sends the cursor in its settings, and does not show acknowledgements."""
        messages, early = self._messages, list[dict[str, Any]]()
        is_granted = False

        def keep(content: dict[str, Any]) -> None:
            messages.put_nowait(content) if is_granted else early.append(content)

        async def note(message: Any) -> None:
            if isinstance(message, BaseModel):
                keep(message.model_dump(by_alias=True, mode="json", exclude_none=True))

        async def note_deleted(params: DeletedParams) -> None:
            keep({"method": DELETED_METHOD, "params": params.model_dump(by_alias=True, mode="json")})

        url = f"http://127.0.0.1:{self._place.process.port}/mcp"
        extension = ChangesExtension({"resume": resume, "filter": {"detail": "delta"}}, note_deleted)
        async with httpx2.AsyncClient(verify=False, trust_env=False, timeout=httpx2.Timeout(30, read=300)) as http:
            transport = streamable_http_client(url, http_client=http)
            async with Client(transport, message_handler=note, cache=None, extensions=[extension]) as client:
                wanted: dict[str, Any] = {f"{feature.value}_list_changed": True for feature in self._features}
                async with client.listen(**wanted, resource_subscriptions=self._uris):
                    known = self._cursors[-1].as_json()
                    messages.put_nowait({"method": "…/acknowledged", "params": {"_meta": {CURSOR_KEY: known}}})
                    for content in early:
                        messages.put_nowait(content)
                    is_granted = True
                    yield


Condition: TypeAlias = Callable[[Server, list[Reader]], bool]


async def run(
    place: Place, dice: random.Random, is_eventful: Condition, least: int, clients: int = CLIENTS
) -> tuple[Server, list[Reader]]:
    """Make changes while clients reconnect and the server restarts, and then wait until every client is told.

    The changes end after `least` of them, as soon as `is_eventful` returns true. A slow machine may need more changes.
    """
    done: list[dict[str, Any]] = []

    async def change(operations: list[dict[str, Any]]) -> None:
        done.extend(operations)
        await place.process.change(*operations)

    async def change_while_killed(operations: Iterable[dict[str, Any]]) -> None:
        with suppress(OSError, EOFError):
            await change(list(operations))

    server = Server(change, place.record, has_streams=True)
    sdk_clients = clients * SDK_CLIENTS // CLIENTS
    readers = [
        Reader(f"reader-{number}", server, place, dice, uses_sdk=number < sdk_clients) for number in range(clients)
    ]
    changes = Changes(dice)
    async with asyncio.TaskGroup() as tasks:
        living = [tasks.create_task(reader.live()) for reader in readers]
        rounds = 0
        while (count := await server.catch_up()) < least or not is_eventful(server, readers):
            assert count < MAX_CHANGES, "too few reconnections or restarts in this run"
            rounds += 1
            for _ in range(10):
                await server.change([changes.next() for _ in range(dice.choice([1, 1, 1, 5]))])
            if isinstance(place, KilledServer) and rounds % 4 == 0:
                server.received.clear()
                async with asyncio.TaskGroup() as last:
                    last.create_task(change_while_killed(changes.next() for _ in range(5)))
                    if dice.random() < 0.7:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(0.2):
                                await server.received.wait()
                    await place.kill(server)
                for reader in readers:
                    reader.drop()
                await place.restart(done)
            assert not any(task.done() for task in living), f"a client ended after {count} changes"
        for reader in readers:
            reader.stay()
        await asyncio.gather(*(reader.is_settled.wait() for reader in readers))
        await server.wait_until_idle()
        for reader in readers:
            reader.leave()
    return server, readers


async def check_clients(place: Place, server: Server, readers: list[Reader], journal: int) -> None:
    """Check the notifications and the copies of the clients against the changes and the lists."""
    current = {feature: Copy(feature, (await place.fetch(feature))[feature.value]) for feature in Feature}
    for subscription in server.subscriptions:
        check_resumable(subscription.history(server.rows), journal=journal)
    server.check()
    for reader in readers:
        for feature, copy in reader.copies.items():
            assert copy.items == current[feature].items, f"{reader.name} holds other {feature.value}"


@pytest.mark.stress
@pytest.mark.parametrize("journal", [20, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_clients_that_return_with_a_cursor_get_exactly_what_differs(journal: int, seed: int) -> None:
    def is_eventful(server: Server, readers: list[Reader]) -> bool:
        told = [event for one in server.subscriptions for _, event in one.events if isinstance(event, Told)]
        return all(reader.connections > 3 for reader in readers) and not all(each.is_complete for each in told)

    async with serve("uvicorn", Settings(policy={"journal_changes": journal})) as process:
        place = Place(process)
        server, readers = await run(place, random.Random(seed), is_eventful, sized(300, 2_000))
        await check_clients(place, server, readers, journal)


@pytest.mark.stress
@pytest.mark.parametrize(("how", "journal"), [("run", 10_000), pytest.param("uvicorn", 20, marks=pytest.mark.slow)])
async def test_clients_of_killed_servers_get_exactly_what_differs(
    tmp_path: Path, how: How, journal: int, seed: int
) -> None:
    """A client is told to refetch if, and only if, the killed server had not written what it told last."""
    settings = Settings(policy={"journal_changes": journal}, folder=str(tmp_path))
    async with AsyncExitStack() as processes:

        def start() -> Awaitable[Process]:
            return processes.enter_async_context(serve(how, settings))

        place = KilledServer(await start(), start, tmp_path)
        server, readers = await run(
            place,
            random.Random(seed),
            lambda server, _: place.starts > 2 and bool(server.lost),
            sized(250, 2_000),
            sized(10, 20),
        )
        await check_clients(place, server, readers, journal)
