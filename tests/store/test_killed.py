"""Servers that are killed at any moment, and clients that come back: by cursor, and by name.

A real folder, `tidings serve` in processes of its own, `kill -9` and SIGTERM, and real HTTP streams. In the end every
client's copy is what the folder is: nothing was missed. And no client that comes with a cursor is told what it knows;
one that comes by its name alone, only what it was told just before its connection broke, or after the last write.
`TIDINGS_SEED` repeats a run as far as processes allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from tests.support.folder import (
    DEADLINE,
    URIS,
    Client,
    Folder,
    ForkedServer,
    ResumeBy,
    Server,
    serve_folder,
    stopping,
    until_connected,
)
from tests.support.waiting import until
from tidings.core.model import Feature
from tidings.store.sqlite import peek

pytestmark = pytest.mark.anyio

IN_DOUBT = 2 * (3 + 1) + 4
"""Seconds after which what was told is beyond doubt, with the policy below, and some for a busy machine."""


@pytest.mark.parametrize("journal", [10_000, pytest.param(3, marks=pytest.mark.slow)])
async def test_clients_of_servers_that_are_killed_miss_nothing_and_are_told_nothing_twice(
    tmp_path: Path, journal: int, seed: int
) -> None:
    rng = random.Random(seed)
    folder = Folder(tmp_path, rng)
    folder.set_up(f"journal_changes = {journal}\nwrite_deadline = 3\nkeep_alive = 1")
    async with serve_folder(tmp_path) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        ways: list[ResumeBy] = ["cursor", "name", "cursor", "name"]
        clients = [Client(f"client {number} by {way}", way, http) for number, way in enumerate(ways)]
        for life in itertools.count():
            # How much they hear meanwhile is chance's, and the machine's.
            if life >= 5 and all(client.changes > 10 for client in clients):
                break
            assert life < 25, "hardly anything is heard in this play"
            await server.start()
            for client in clients:
                client.connect(server.url)
            await until_connected(clients)
            for _ in range(rng.randrange(5, 25)):
                folder.change()
                await act(rng, clients, server)
            ends = signal.SIGKILL if life % 3 else signal.SIGTERM
            if ends is signal.SIGKILL:
                # At once, or at the moment when somebody hears of it: before, or while, or after it is written down.
                folder.change()
                if rng.random() < 0.7:
                    await heard_by_somebody(clients)
            await server.stop(ends)
            for client in clients:
                await client.disconnect()
            for _ in range(rng.choice([0, 0, 1, 4])):
                folder.change()
        await server.start()
        for client in clients:
            client.connect(server.url)
        await until_connected(clients)
        folder.write("prompts/last.md", "---\ndescription: the end\n---\n")
        for uri in URIS:
            folder.write(f"resources/{uri.rpartition('/')[2]}", f"the end of {uri}")
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(client.copy() == folder.copy() for client in clients), DEADLINE)
        for client in clients:
            assert (client.name, client.copy()) == (client.name, folder.copy())
        for client in clients:
            await client.disconnect()
    for client in clients:
        if client.resume_by == "cursor":
            assert client.repeated == [], client.name
        for topic, when in client.repeated:
            assert any(0 <= end - when < IN_DOUBT for end in client.disconnected_at), (client.name, topic)


@pytest.mark.slow
async def test_durable_clients_of_a_server_killed_at_100_moments_miss_nothing_and_repeat_only_what_was_not_written(
    tmp_path: Path, seed: int
) -> None:
    """The folder never becomes what it was before: the store can't know what a client holds that was never written."""
    rng = random.Random(seed)
    folder = Folder(tmp_path, rng)
    folder.set_up("write_deadline = 0.05\nkeep_alive = 0.05")  # so that much of what was delivered counts as told
    quiet = 0
    async with stopping(ForkedServer(tmp_path)) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        clients = [Client(f"client {number}", "name", http) for number in range(3)]
        written: dict[str, dict[str, str]] = {}
        """By client, the topics that are as it was told by the last write, with their digests."""
        for life in range(101):
            await server.start()
            repeats = {client.name: len(client.repeated) for client in clients}
            for client in clients:
                client.connect(server.url)
            if life == 100:
                break
            if rng.random() < 0.8:
                await until_connected(clients)
            for _ in range(rng.randrange(10)):
                folder.change_to_new_content()
                await heard_by_somebody(clients, within=rng.uniform(0, 0.05))
            await server.kill()
            for client in clients:
                await client.disconnect()
                for topic, _ in client.repeated[repeats[client.name] :]:
                    assert topic not in written.get(client.name, {}), f"{client.name} was told again of {topic}"
                written[client.name] = told_by_the_store(tmp_path, client)
                quiet += len(written[client.name])
            for _ in range(rng.choice([0, 0, 1, 4])):
                folder.change_to_new_content()
        await until_connected(clients)
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(client.copy() == folder.copy() for client in clients), DEADLINE)
        for client in clients:
            assert (client.name, client.copy()) == (client.name, folder.copy())
            await client.disconnect()
    sys.stdout.write(f"{folder.change_count} changes, {quiet} topics not to be repeated\n")
    assert quiet > 0, "nothing was ever written as told"


def told_by_the_store(folder: Path, client: Client) -> dict[str, str]:
    """The topics that the client knows and that, by the last write, it was told and are still the same."""
    state = peek(folder / ".tidings" / "state.db")
    durable = next((each for each in state.durables.values() if each.name == client.name), None)
    if durable is None:
        return {}
    found = {}
    for topic, digest in client.told.items():
        if topic in URIS:
            version = state.contents.get(topic)
            is_known = version is not None and (
                durable.contents[topic] == version if topic in durable.contents else version.revision <= durable.as_of
            )
        else:
            version = state.versions.get(Feature(topic))
            told = durable.lists.get(Feature(topic))
            is_known = version is not None and told is not None and told.digest == version.digest
        if is_known and version is not None and version.digest == digest:
            found[topic] = digest
    return found


async def act(rng: random.Random, clients: list[Client], server: Server) -> None:
    """Let something happen between two changes, or nothing."""
    client = rng.choice(clients)
    roll = rng.random()
    if roll < 0.3:
        await client.call(server.url, "prompts/list")
    elif roll < 0.45:
        await heard_by_somebody(clients)
    elif roll < 0.6:
        await client.disconnect()
        client.connect(server.url)
        await until_connected([client])


async def heard_by_somebody(clients: list[Client], within: float = 0.3) -> None:
    """Or by nobody, where a change made no difference."""
    for client in clients:
        client.has_received.clear()
    waiting = [asyncio.create_task(client.has_received.wait()) for client in clients]
    await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
