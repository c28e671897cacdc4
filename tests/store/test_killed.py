"""Servers that are killed at random moments, and clients that resume by cursor or by name.

A real folder, processes of `tidings serve`, `kill -9` and SIGTERM, and real HTTP streams. In the end the copy of every
client is equal to the folder: it missed nothing. A client that resumes by cursor is never told what it knows. A client
that resumes by name is told again only of what it was told just before its connection broke, or after the last write.
`TIDINGS_SEED` repeats a run as far as processes allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from pathlib import Path

import httpx2
import pytest

from tests.support.folder import (
    URIS,
    Client,
    Folder,
    ResumeBy,
    Server,
    serve_folder,
    until_connected,
)
from tests.support.stress import sized
from tests.support.waiting import DEADLINE, until

pytestmark = pytest.mark.anyio

CONFIRMED_AFTER = 2 * (3 + 1) + 4
"""Seconds after which what a client was told is confirmed, with the policy below, and some for a busy machine."""


@pytest.mark.stress
@pytest.mark.parametrize("journal", [10_000, pytest.param(3, marks=pytest.mark.slow)])
async def test_clients_of_killed_servers_miss_nothing_and_are_told_nothing_twice(
    tmp_path: Path, journal: int, seed: int
) -> None:
    rng = random.Random(seed)
    folder = Folder(tmp_path, rng)
    folder.set_up(f"journal_changes = {journal}\nwrite_deadline = 3\nkeep_alive = 1")
    async with serve_folder(tmp_path) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        keys: list[ResumeBy] = ["cursor", "name", "cursor", "name"]
        clients = [Client(f"client {number} by {key}", key, http) for number, key in enumerate(keys)]
        for run in itertools.count():
            # How many notifications the clients get is random.
            if run >= sized(5, 20) and all(client.changes > 10 for client in clients):
                break
            assert run < sized(25, 40), "too few notifications"
            await start(server, clients)
            for _ in range(rng.randrange(5, 25)):
                folder.change()
                await act(rng, clients, server)
            number = signal.SIGKILL if run % 3 else signal.SIGTERM
            if number is signal.SIGKILL:
                # Immediately, or when a client is told of it: before, during or after its write.
                folder.change()
                if rng.random() < 0.7:
                    await wait_for_notification(clients)
            await server.stop(number)
            for client in clients:
                await client.disconnect()
            for _ in range(rng.choice([0, 0, 1, 4])):
                folder.change()
        await start(server, clients)
        folder.write("prompts/last.md", "---\ndescription: the end\n---\n")
        for uri in URIS:
            folder.write(f"resources/{uri.rpartition('/')[2]}", f"the end of {uri}")
        await assert_copies(clients, folder)
    for client in clients:
        if client.resume_by == "cursor":
            assert client.repeated == [], client.name
        for topic, when in client.repeated:
            assert any(0 <= end - when < CONFIRMED_AFTER for end in client.disconnected_at), (client.name, topic)


async def start(server: Server, clients: list[Client]) -> None:
    await server.start()
    for client in clients:
        client.connect(server.url)
    await until_connected(clients)


async def assert_copies(clients: list[Client], folder: Folder) -> None:
    """Wait until every client has a copy of the folder, and disconnect them."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: all(client.copy() == folder.copy() for client in clients), DEADLINE)
    for client in clients:
        assert (client.name, client.copy()) == (client.name, folder.copy())
        await client.disconnect()


async def act(rng: random.Random, clients: list[Client], server: Server) -> None:
    """Fetch a list, wait, or reconnect a client, at random."""
    client = rng.choice(clients)
    roll = rng.random()
    if roll < 0.3:
        await client.call(server.url, "prompts/list")
    elif roll < 0.45:
        await wait_for_notification(clients)
    elif roll < 0.6:
        await client.disconnect()
        client.connect(server.url)
        await until_connected([client])


async def wait_for_notification(clients: list[Client]) -> None:
    """Wait until one of the clients gets a notification. A change may have made no difference."""
    for client in clients:
        client.has_received.clear()
    waiting = [asyncio.create_task(client.has_received.wait()) for client in clients]
    await asyncio.wait(waiting, timeout=0.3, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
