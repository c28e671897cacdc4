"""Replicas in processes of their own, one NATS server, and the faults that happen to them.

Each replica reaches NATS through a proxy of its own. A fault is an async context manager: it lasts as long as the
context is entered.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.end_to_end.test_promises import Changes, Server
from tests.end_to_end.test_resume import Place
from tests.support.faults.wire import OPERATIONS, RECORD, TIMEOUT, Settings, request, serve
from tests.support.tcp_proxy import TcpProxy, tcp_proxy
from tidings.cluster.embedded import EmbeddedNats

__all__ = ["Cluster", "Fault", "Replica", "run_cluster"]

Fault = Callable[[], AbstractAsyncContextManager[None]]


class Replica(Place):
    """One replica: a process, and after its end another one at the same port with the same items."""

    def __init__(self, number: int, folder: Path, proxy: TcpProxy, dice: random.Random) -> None:
        self.number = number
        self.is_up = asyncio.Event()
        """Whether its process runs."""
        self.is_paused = False
        self.server: Server
        """The history of the present process."""
        self.servers: list[Server] = []
        """The histories of all its processes."""
        self.changes = Changes(dice)
        self._done: list[dict[str, Any]] = []
        self._folder = folder
        self._proxy = proxy
        self._port = 0
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        folder = self._folder / f"{self.number}-{len(self.servers)}"
        folder.mkdir()
        (folder / OPERATIONS).write_bytes(msgspec.json.encode(self._done))
        url = f"nats://127.0.0.1:{self._proxy.port}"
        settings = Settings(folder=str(folder), cluster=url, port=self._port)
        self.process = await self._stack.enter_async_context(serve("run", settings))
        self._port = self.process.port

        async def record(start: int) -> list[Any]:
            lines = (folder / RECORD).read_bytes().splitlines()
            return [msgspec.json.decode(line) for line in lines[start:]]

        self.server = Server(self.change, record, has_streams=True)
        self.servers.append(self.server)
        self.is_up.set()

    async def end(self, number: signal.Signals) -> None:
        self.is_up.clear()
        self.process.send_signal(number)
        async with asyncio.timeout(TIMEOUT):
            await self.process.process.wait()
        await self.close()

    async def close(self) -> None:
        await self._stack.aclose()

    async def change(self, operations: list[dict[str, Any]]) -> None:
        self._done += operations  # before the response, because a killed process may have made them
        await self.process.change(*operations)

    async def state(self) -> dict[str, Any]:
        status, _, body = await request(self.process.port, "GET", "/replica")
        assert status == 200, body
        state: dict[str, Any] = json.loads(body)
        return state

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Request the state until it meets the condition."""
        async with asyncio.timeout(TIMEOUT):
            while not condition(await self.state()):
                pass

    # Faults

    @asynccontextmanager
    async def killed(self) -> AsyncIterator[None]:
        async def change() -> None:
            with suppress(OSError, EOFError):
                await self.change([self.changes.next()])

        changing = asyncio.create_task(change())
        await self.end(signal.SIGKILL)
        await changing
        yield
        await self.start()

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """End it gracefully."""
        await self.end(signal.SIGTERM)
        yield
        await self.start()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self.is_paused = True
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)
            self.is_paused = False

    @asynccontextmanager
    async def partitioned(self) -> AsyncIterator[None]:
        """Keep its connections to NATS open, and transfer nothing."""
        self._proxy.silence()
        yield
        self._proxy.resume()

    @asynccontextmanager
    async def disconnected(self) -> AsyncIterator[None]:
        self._proxy.cut()
        yield


class Cluster:
    def __init__(self, nats: EmbeddedNats, store: Path, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self._nats = nats
        self._store = store

    def reachable(self) -> list[Replica]:
        """Return the replicas that respond, those without NATS too."""
        return [replica for replica in self.replicas if replica.is_up.is_set() and not replica.is_paused]

    async def any_up(self, dice: random.Random) -> Replica:
        """Return a replica whose process runs. A client cannot know whether it is paused."""
        while not (found := [replica for replica in self.replicas if replica.is_up.is_set()]):
            await asyncio.wait(
                [asyncio.ensure_future(replica.is_up.wait()) for replica in self.replicas],
                return_when=asyncio.FIRST_COMPLETED,
            )
        return dice.choice(found)

    async def states(self) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(replica.state() for replica in self.replicas)))

    # Faults

    @asynccontextmanager
    async def nats_killed(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._nats.kill)
        yield
        await asyncio.to_thread(self._nats.start)

    @asynccontextmanager
    async def nats_stopped(self) -> AsyncIterator[None]:
        """End it gracefully."""
        await asyncio.to_thread(self._nats.stop)
        yield
        await asyncio.to_thread(self._nats.start)

    @asynccontextmanager
    async def nats_emptied(self) -> AsyncIterator[None]:
        """Start it without its data."""
        await asyncio.to_thread(self._nats.kill)
        shutil.rmtree(self._store)
        yield
        await asyncio.to_thread(self._nats.start)


@asynccontextmanager
async def run_cluster(folder: Path, number: int, dice: random.Random) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        store = folder / "nats"
        nats = stack.enter_context(EmbeddedNats(store, token=False))
        replicas = []
        for each in range(number):
            proxy = await stack.enter_async_context(tcp_proxy(nats.port))
            replica = Replica(each, folder, proxy, dice)
            stack.push_async_callback(replica.close)
            replicas.append(replica)
        await asyncio.gather(*(replica.start() for replica in replicas))
        yield Cluster(nats, store, replicas)
