"""Check the promises with sixty clients of four replicas, while replicas, NATS and the network fail.

Replicas are killed, paused, ended and started again; NATS is killed, started again with and without its data; its
connections are cut or silent. A modern client connects to any replica, and resumes with its cursor on another one. A
legacy client stays with its replica. The history of each process is checked for each of its clients. After the last
fault, the lists of all replicas and of all clients must become equal.

All operations are chosen by `TIDINGS_SEED`. `make stress` makes 2,000 changes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_promises import URIS, Subscription
from tests.end_to_end.test_resume import Reader
from tests.support.faults.cluster import Cluster, Fault, Replica, run_cluster
from tests.support.faults.wire import Stream, get_request, open_session, request, session_headers
from tests.support.list_copy import Copy
from tests.support.messages import ACCEPT_BOTH
from tests.support.promises.checks import PROMISES
from tests.support.promises.history import Changed, Fetched, History, Subscribed
from tests.support.stress import sized
from tests.support.waiting import until
from tests.support.wire_clients import read_answer
from tidings.core.cursor import Cursor
from tidings.core.digest import split_digest
from tidings.core.model import Feature, Topic, Version

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.stress]

CHANGES = sized(120, 2_000)
REPLICAS = 4
MODERN, LEGACY = 40, 20
EPOCHS = 4
"""After each epoch, there is no fault until all replicas and clients are equal."""
CONVERGED_WITHIN = 120.0
"""Seconds. It takes about one on an idle machine."""


class ModernClient(Reader):
    """A client that keeps its lists by deltas, and connects to any replica."""

    def __init__(self, name: str, cluster: Cluster, dice: random.Random) -> None:
        replica = cluster.replicas[0]
        super().__init__(name, replica.server, replica, dice, uses_sdk=False)
        self._cluster = cluster
        self._resumed: Cursor | None = None

    def _resume(self) -> tuple[Any, dict[Topic, Version | None]]:
        resume, known = super()._resume()
        self._resumed = Cursor.parse(resume)
        return resume, known

    def _learn(self, message: Mapping[str, Any]) -> None:
        super()._learn(message)
        assert self._cursor is not None
        is_acknowledgement = message.get("method") == "notifications/subscriptions/acknowledged"
        if is_acknowledgement and self._resumed is not None and self._resumed.epoch != self._cursor.epoch:
            # The table was created again, or the other replica had not reached it: the versions count as unknown.
            assert self.subscription is not None
            at, subscribed = self.subscription.events[0]
            assert isinstance(subscribed, Subscribed)
            versions = self._resumed.told(self._cursor.epoch)
            told = {topic: versions[topic] for topic in subscribed.told}
            self.subscription.events[0] = (at, replace(subscribed, told=told))

    async def live(self) -> None:
        while not self._leaves:
            replica = await self._cluster.any_up(self._dice)
            self._place, self._server = replica, replica.server
            try:
                await self._refetch(*(feature for feature in self._features if feature not in self.copies))
                await self._be_connected()
            except (OSError, EOFError):
                pass
            except Exception:  # such as a response of a server that ends
                if replica.server is self._server and replica.is_up.is_set():
                    raise


class LegacyClient:
    """A client that fetches each list that it is told of, on the replica that has its session."""

    def __init__(self, name: str, replica: Replica, dice: random.Random) -> None:
        self.copies: dict[Feature, Copy] = {}
        self._name = name
        self._replica = replica
        self._dice = dice
        self._sessions = 0
        self._uris: list[str] = dice.sample(URIS, dice.randrange(4))
        self._stays = self._leaves = False
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def stay(self) -> None:
        self._stays = True

    def leave(self) -> None:
        self._leaves = True
        self._messages.put_nowait(None)

    async def live(self) -> None:
        while not self._leaves:
            await self._replica.is_up.wait()
            self._sessions += 1
            session = self._replica.server.open(f"{self._name}.{self._sessions}")
            try:
                await self._be_connected(session)
            except (OSError, EOFError):
                pass
            finally:
                if not self._leaves:
                    session.close()

    async def _be_connected(self, session: Subscription) -> None:
        port = self._replica.process.port
        session.record(Subscribed(session.name, tuple(Feature)))
        session_id = await open_session(port)
        await self._post(session_id, "ping")
        session.granted(list(Feature))
        for uri in self._uris:
            session.record(Subscribed(session.name, (uri,)))
            await self._post(session_id, "resources/subscribe", uri=uri)
            session.granted([uri])
        stream = await Stream.open(port, get_request(session_id))
        self._messages = asyncio.Queue()
        reading = asyncio.create_task(read(stream, self._messages))
        try:
            changed = set(Feature)
            while not self._leaves:
                for feature in changed:
                    result = await self._post(session_id, f"{feature.value}/list")
                    self.copies[feature] = Copy(feature, result[feature.value])
                changed = set()
                while not changed or not self._messages.empty():
                    message = await self._messages.get()
                    if message is None or (not self._stays and self._dice.random() < 0.005):
                        return
                    session.receive(message, time.monotonic_ns())
                    changed |= {feature for feature in Feature if message["method"] == feature.method}
        finally:
            reading.cancel()
            stream.close()

    async def _post(self, session_id: str, method: str, **params: Any) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        headers = ACCEPT_BOTH | session_headers(session_id)
        status, _, body = await request(self._replica.process.port, "POST", "/mcp", headers, message)
        if status == 404 or (status == 200 and b'"jsonrpc"' not in body):
            raise EOFError("the process has ended")
        assert status == 200, body
        answer = read_answer(body.decode())
        if "error" in answer:
            raise EOFError(f"the process ends: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result


async def read(stream: Stream, messages: asyncio.Queue[dict[str, Any] | None]) -> None:
    with suppress(OSError, EOFError):
        while (event := await stream.event()) is not None:
            messages.put_nowait(event)
    messages.put_nowait(None)


Client = ModernClient | LegacyClient


class Run:
    """The changes and faults of one run."""

    def __init__(self, cluster: Cluster, clients: list[Client], dice: random.Random) -> None:
        self.count = 0
        self.faults: list[str] = []
        self.times: list[str] = []
        """For each epoch, how long it took from the end of its last faults until all were equal."""
        self._latest = ""
        self._healed = 0.0
        self._cluster = cluster
        self._clients = clients
        self._dice = dice
        self._bag = self._shuffled()

    def _shuffled(self) -> Iterator[tuple[str, Replica | None]]:
        kinds = ["killed", "stopped", "paused", "partitioned", "disconnected"]
        kinds += ["nats_killed", "nats_stopped", "nats_emptied"]
        while True:
            for kind in self._dice.sample(kinds, len(kinds)):
                yield kind, None if kind.startswith("nats") else self._dice.choice(self._cluster.replicas)

    async def change(self, number: int) -> None:
        for _ in range(number):
            replica = self._dice.choice(self._cluster.reachable())
            await replica.change([replica.changes.next()])
        self.count += number

    async def fail(self) -> None:
        """Let one or two faults happen, with changes before, during and after them."""
        dice = self._dice
        most = max(8, CHANGES // 40)
        before = len(self.faults)
        async with AsyncExitStack() as stack:
            kind, replica = next(self._bag)
            await self._enter(stack, kind, replica)
            await self.change(dice.randrange(2, most))
            second, other = next(self._bag)
            if dice.random() < 0.4 and other is not replica:
                await self._enter(stack, second, other)
                await self.change(dice.randrange(2, most))
            elif dice.random() < 0.5:
                await self._until_noticed(kind, replica)
                await self.change(dice.randrange(2, most))
        self._healed = time.monotonic()
        self._latest = " and ".join(self.faults[before:])
        await self.change(dice.randrange(1, 4))

    async def _enter(self, stack: AsyncExitStack, kind: str, replica: Replica | None) -> None:
        self.faults.append(kind if replica is None else f"{kind} {replica.number}")
        fault: Fault = getattr(replica or self._cluster, kind)
        await stack.enter_async_context(fault())

    async def _until_noticed(self, kind: str, replica: Replica | None) -> None:
        """Wait until a fault that leaves its trace in the cluster has been noticed."""
        observers = self._cluster.reachable()
        if kind == "partitioned" and replica is not None:
            await replica.until(lambda state: state["lost"] is not None)
        elif kind == "paused" and replica is not None:
            await observers[0].until(lambda state: len(state["replicas"]) < REPLICAS)
        elif kind.startswith("nats"):
            await observers[0].until(lambda state: state["lost"] is not None)

    async def converge(self) -> None:
        """Wait until all replicas and clients are equal, and measure how long it takes."""
        epoch = str(len(self.times))
        do = "update" if self.times else "add"
        for replica in self._cluster.replicas:
            keys = {feature.value: marker(feature, replica) for feature in Feature}
            await replica.change([{"do": do, "of": of, "key": key, "text": epoch} for of, key in keys.items()])
        try:
            async with asyncio.timeout(CONVERGED_WITHIN):
                while differs(await self._cluster.states(), []):
                    pass
                replicas = time.monotonic() - self._healed
                # The markers come last, so this is false until each client is told of them.
                await until(lambda: all(self._has_markers(each, epoch) for each in self._clients), None)
                while differs(await self._cluster.states(), self._clients):
                    pass
        except TimeoutError:
            late = sum(not self._has_markers(each, epoch) for each in self._clients)
            reason = differs(await self._cluster.states(), self._clients)
            raise AssertionError(f"{reason}; {late} clients without a marker; {self.faults[-8:]}") from None
        seconds = time.monotonic() - self._healed
        self.times.append(f"{seconds:.2f} s (replicas {replicas:.2f} s) after {self._latest}")

    def _has_markers(self, client: Client, epoch: str) -> bool:
        return all(
            copy.items.get(marker(feature, replica), {}).get("description") == epoch
            for feature, copy in client.copies.items()
            for replica in self._cluster.replicas
        )


def marker(feature: Feature, replica: Replica) -> str:
    return f"board://marker/{replica.number}" if feature is Feature.RESOURCES else f"marker-{replica.number}"


def differs(states: list[dict[str, Any]], clients: list[Client]) -> str:
    """Return what is not equal yet, or an empty string."""
    for part in ("tools", "prompts", "resources", "contents"):
        found = [state["contents"] if part == "contents" else state["lists"][part] for state in states]
        if keys := {key for each in found for key in each if any(other.get(key) != each[key] for other in found)}:
            different = {key: [each.get(key) for each in found] for key in sorted(keys)}
            return f"the replicas have different {part}: {different}"
    if any(state["digests"] != states[0]["digests"] for state in states):
        return f"the replicas have different digests: {[state['digests'] for state in states]}"
    for feature in Feature:
        listed, own = states[0]["lists"][feature.value], [state["own"][feature.value] for state in states]
        if listed.keys() != {key for items in own for key in items}:
            return f"the {feature.value} are not those of the replicas"
        if any(digest not in [items.get(key) for items in own] for key, digest in listed.items()):
            return f"a definition in {feature.value} is not that of any replica"
        digest = split_digest(states[0]["digests"][feature.value])[0]
        behind = sum(client.copies[feature].digest != digest for client in clients if feature in client.copies)
        if behind:
            return f"{behind} clients have other {feature.value}"
    return ""


def check(cluster: Cluster) -> None:
    """Check the promises of each subscription to each process."""
    for replica in cluster.replicas:
        for server in replica.servers:
            for subscription in server.subscriptions:
                history = History()
                for event in subscription.history(server.rows):
                    history.record(event)
                    if isinstance(event, Changed):  # a client may have fetched it from another replica
                        history.record(Fetched(event.topic, event.version))
                for promise in PROMISES.values():
                    promise(history)


async def test_all_promises_hold_while_replicas_nats_and_the_network_fail(tmp_path: Path, seed: int) -> None:
    dice, clients_dice = random.Random(seed), random.Random(seed)
    async with run_cluster(tmp_path, REPLICAS, dice) as cluster:
        clients: list[Client] = [ModernClient(f"modern-{number}", cluster, clients_dice) for number in range(MODERN)]
        clients += [
            LegacyClient(f"legacy-{number}", cluster.replicas[number % REPLICAS], clients_dice)
            for number in range(LEGACY)
        ]
        run = Run(cluster, clients, dice)
        async with asyncio.TaskGroup() as tasks:
            living = [tasks.create_task(client.live()) for client in clients]
            for epoch in range(1, EPOCHS + 1):
                while run.count < CHANGES * epoch // EPOCHS:
                    await run.fail()
                    assert not any(task.done() for task in living)
                if epoch == EPOCHS:
                    for client in clients:
                        client.stay()
                await run.converge()
            for replica in cluster.replicas:
                await replica.server.wait_until_idle()
            for client in clients:
                client.leave()
        for replica in cluster.replicas:
            for server in replica.servers:
                await server.catch_up()
        check(cluster)
        lives = sum(len(replica.servers) for replica in cluster.replicas)
        subscriptions = sum(len(server.subscriptions) for replica in cluster.replicas for server in replica.servers)
    # Printed for `pytest -s`: the figures of docs/performance.md.
    print(f"{run.count} changes, {len(run.faults)} faults, {lives} processes, {subscriptions} subscriptions")  # noqa: T201
    print("all are equal:", *run.times, sep="\n  ")  # noqa: T201
