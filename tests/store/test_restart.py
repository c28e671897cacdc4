"""Restarts of `tidings serve`: what its clients are told afterwards, and what happens if the file cannot be used."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.support.command import line_with
from tests.support.folder import (
    CHANGE,
    CURSOR,
    DURABLE,
    RESUME,
    URIS,
    Client,
    Folder,
    ResumeBy,
    Server,
    open_listen,
    serve_folder,
    until_connected,
)
from tests.support.waiting import DEADLINE, until
from tests.support.wire_clients import LegacyWire, Stream, Wire
from tidings import Feature
from tidings.store import State
from tidings.store.sqlite import peek

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path, random.Random(1))
    folder.set_up("write_deadline = 0.3\nkeep_alive = 0.2")
    return folder


@pytest.fixture
async def server(folder: Folder) -> AsyncIterator[Server]:
    async with serve_folder(folder.root) as server:
        await server.start()
        yield server


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=DEADLINE) as http:
        yield http


def read_state(folder: Folder) -> State:
    return peek(folder.root / ".tidings" / "state.db")


def write_prompt(folder: Folder, name: str, description: str = "one") -> None:
    folder.write(f"prompts/{name}.md", f"---\ndescription: {description}\n---\nText")


async def connect(server: Server, *clients: Client) -> None:
    for client in clients:
        client.connect(server.url)
    await until_connected(list(clients))


async def next_change(stream: Stream) -> tuple[str, list[tuple[str, str]], bool]:
    """Return the URI or "list", the operations with their keys, and whether the notification is complete."""
    params = (await stream.message())["params"]
    meta = params["_meta"][CHANGE]
    changes = meta.get("changes") or ([meta] if "operation" in meta else [])
    topic = params.get("uri") if "uri" in params and "operation" not in params else "list"
    return str(topic), [(each["operation"], each.get("name") or each.get("uri")) for each in changes], meta["complete"]


@pytest.mark.parametrize("resume_by", ["cursor", "name"])
async def test_journal_contents_and_durable_subscriptions_survive_a_kill(
    folder: Folder, server: Server, http: httpx2.AsyncClient, resume_by: ResumeBy
) -> None:
    """Prompts and contents change while the client is away, before the kill and while no server runs."""
    client = Client("laptop", resume_by, http)
    await connect(server, client)
    await client.disconnect()
    meta = client.make_meta() if resume_by == "name" else {RESUME: client.cursor}
    write_prompt(folder, "a")
    folder.write("resources/0.txt", "new")
    folder.write("resources/1.txt", "new")
    await until(lambda: journal_keys(folder).count("a") == 1 and len(read_state(folder).contents) >= len(URIS))
    write_prompt(folder, "b")
    await until(lambda: journal_keys(folder).count("b") == 1)
    await until(lambda: len([each for each in read_state(folder).journal if each.topic in URIS[:2]]) == 4)
    epoch = read_state(folder).epoch
    await server.stop(signal.SIGKILL)
    write_prompt(folder, "c")
    folder.write("resources/1.txt", "0")  # as the client knows it
    folder.write("resources/2.txt", "newer")

    await server.start()
    async with open_listen(Wire(server.url, http), meta) as stream:
        ack = (await stream.message())["params"]["_meta"]
        assert ack[CURSOR]["epoch"] == epoch
        # The killed server does not know whether the client fetched the content that is as before.
        refetch: list[Any] = []
        if resume_by == "name":
            assert ack[DURABLE] == {"name": "laptop", "ttl": 600.0, "isNew": False}
            refetch = [(URIS[1], [], False)]
        told = [await next_change(stream) for _ in range(3 + len(refetch))]
        assert told[0] == ("list", [("added", "a"), ("added", "b"), ("added", "c")], True)
        assert sorted(told[1:]) == [
            (URIS[0], [("updated", URIS[0])], True),
            *refetch,
            (URIS[2], [("updated", URIS[2])], True),
        ]
        write_prompt(folder, "d")  # and nothing in between
        assert await next_change(stream) == ("list", [("added", "d")], True)


def journal_keys(folder: Folder) -> list[str]:
    return [change.key for change in read_state(folder).journal]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_restart_with_the_same_content_sends_no_notification(
    folder: Folder, server: Server, http: httpx2.AsyncClient, number: signal.Signals
) -> None:
    clients = [Client("laptop", "cursor", http), Client("phone", "name", http)]
    await connect(server, *clients)
    write_prompt(folder, "a")
    folder.write("resources/0.txt", "new")
    await until(lambda: all("a" in each.lists["prompts"] for each in clients))
    await until(lambda: all(each.contents[URIS[0]] == "new" for each in clients))
    await until(lambda: all(is_written(folder, each) for each in clients))
    run = read_state(folder).run
    await server.stop(number)
    for client in clients:
        await client.disconnect()
    counts = [client.changes for client in clients]

    server.is_forked = False  # a new process hashes strings differently
    await server.start()
    await connect(server, *clients)
    write_prompt(folder, "z")
    await until(lambda: all("z" in each.lists["prompts"] for each in clients))
    for client in clients:
        await client.disconnect()

    assert [client.changes for client in clients] == [count + 1 for count in counts]
    assert [client.repeated for client in clients] == [[], []]
    assert read_state(folder).run == run + 1


def is_written(folder: Folder, client: Client) -> bool:
    """Return whether the file has every version that the client was told."""
    state = read_state(folder)
    if client.resume_by == "cursor":
        versions = [*state.versions.values(), *state.contents.values()]
    else:
        versions = [version for record in state.durables.values() for version in record.told.values() if version]
    return {version.digest for version in versions} >= set(client.told.values())


async def test_newer_connection_has_the_name_and_the_older_one_ends_with_its_result(
    folder: Folder, server: Server, http: httpx2.AsyncClient
) -> None:
    wire = Wire(server.url, http)
    meta = {DURABLE: {"name": "laptop"}}
    async with open_listen(wire, meta) as older:
        assert (await older.message())["params"]["_meta"][DURABLE]["isNew"] is True
        write_prompt(folder, "a")
        assert (await next_change(older))[1] == [("added", "a")]
        async with open_listen(wire, meta) as newer:
            assert (await newer.message())["params"]["_meta"][DURABLE]["isNew"] is False
            assert "result" in await older.message()
            assert await older.event() == ""
            assert await next_change(newer) == ("list", [], False), "the last notification is unconfirmed"
            write_prompt(folder, "b")
            assert (await next_change(newer))[1] == [("added", "b")]


async def test_legacy_session_resumes_by_name_with_its_uris(
    folder: Folder, server: Server, http: httpx2.AsyncClient
) -> None:
    meta = {DURABLE: {"name": "old laptop", "ttl": 600}}
    session = LegacyWire(server.url, http)
    ack = (await session.shake_hands(meta))["_meta"][DURABLE]
    assert ack == {"name": "old laptop", "ttl": 600.0, "isNew": True}
    async with session.stream() as stream:
        assert {(await stream.message())["method"] for _ in range(3)} == {
            f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources")
        }, "as every new session of a folder gets"
        for uris, method in (([URIS[0]], "subscribe"), ([], "unsubscribe"), ([URIS[0]], "subscribe")):
            await session.post(f"resources/{method}", uri=URIS[0])
            await until(lambda uris=uris: [list(each.uris) for each in read_state(folder).durables.values()] == [uris])  # type: ignore[misc]
        folder.write("resources/0.txt", "new")
        assert (await next_change(stream))[0] == URIS[0]
        await until(lambda: is_confirmed(folder, URIS[0]))
    await server.stop(signal.SIGKILL)
    folder.write("resources/0.txt", "newer")
    write_prompt(folder, "a")

    await server.start()
    session = LegacyWire(server.url, http)
    assert (await session.shake_hands(meta))["_meta"][DURABLE]["isNew"] is False
    async with session.stream() as stream:
        told = [await next_change(stream) for _ in range(2)]
        # No delta of the list: a killed server may have told the client of a version that it did not write.
        assert told == [("list", [], False), (URIS[0], [("updated", URIS[0])], True)]


def is_confirmed(folder: Folder, uri: str) -> bool:
    """Return whether the file has all lists and this content as received by the client."""
    state = read_state(folder)
    return all(
        record.contents.get(uri) == state.contents[uri] and None not in record.lists.values()
        for record in state.durables.values()
    )


# The file


@pytest.mark.slow
async def test_server_with_a_full_disk_continues_and_loses_nothing_that_was_written(
    folder: Folder, http: httpx2.AsyncClient
) -> None:
    resource = pytest.importorskip("resource")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    async with serve_folder(folder.root, is_forked=False) as server:
        await server.start(preexec_fn=limit, stderr=asyncio.subprocess.PIPE)
        assert server.process is not None
        for number in range(200):
            write_prompt(folder, f"large{number}", "x" * 3000)
        line = await line_with(server.process.stderr, "state.db")
        assert "Until that is fixed, changes are kept in memory only" in line
        # Only now: a client that does not read all of the above within 0.3 s is disconnected.
        async with open_listen(Wire(server.url, http), {}) as stream:
            await stream.message()
            write_prompt(folder, "last")
            await next_change(stream)
        client = Client("any", "cursor", http)
        with anyio.fail_after(DEADLINE):
            while len((await client.call(server.url, "prompts/list"))["prompts"]) < 202:
                pass
        await server.stop(signal.SIGKILL)
        before = read_state(folder)
        assert before.items

        await server.start()
        assert len((await client.call(server.url, "prompts/list"))["prompts"]) == 202
        await until(lambda: sum(item.feature is Feature.PROMPTS for item in read_state(folder).items) == 202)
        assert read_state(folder).epoch == before.epoch


async def test_second_server_of_one_folder_logs_one_line_and_serves(
    folder: Folder, server: Server, http: httpx2.AsyncClient
) -> None:
    """Each client on stdio starts its own server."""
    async with serve_folder(folder.root) as second:
        await second.start(stderr=asyncio.subprocess.PIPE)
        assert second.process is not None
        log = second.process.stderr
        assert log is not None
        line = await line_with(log, "state.db")
        assert "in use by another server" in line
        assert "warning" not in line
        async with open_listen(Wire(server.url, http), {}) as one, open_listen(Wire(second.url, http), {}) as two:
            cursors = [(await stream.message())["params"]["_meta"][CURSOR] for stream in (one, two)]
            assert cursors[0]["epoch"] != cursors[1]["epoch"]
            write_prompt(folder, "a")
            assert (await next_change(one))[1] == (await next_change(two))[1] == [("added", "a")]
        await second.stop(signal.SIGTERM)
        assert "state.db" not in (await log.read()).decode()


@pytest.mark.parametrize("name", ["none", "elsewhere.db"])
async def test_state_option_sets_the_file(folder: Folder, name: str) -> None:
    path = folder.root.parent / "elsewhere.db"
    async with serve_folder(folder.root, "--state", "none" if name == "none" else str(path)) as server:
        await server.start()
        await server.stop(signal.SIGTERM)

    assert not (folder.root / ".tidings").exists()
    assert path.exists() == (name != "none")
    if path.exists():
        assert len(peek(path).items) > 5


async def test_folder_of_the_state_file_is_not_served(folder: Folder, server: Server, http: httpx2.AsyncClient) -> None:
    async with open_listen(Wire(server.url, http), {}) as stream:
        await stream.message()
        (folder.root / ".tidings" / "more.txt").write_text("x")
        shutil.copy(folder.root / ".tidings" / "state.db", folder.root / ".tidings" / "copy.db")
        write_prompt(folder, "a")
        assert await next_change(stream) == ("list", [("added", "a")], True)
    listed = await Client("any", "cursor", http).call(server.url, "resources/list")
    assert not [each for each in listed["resources"] if "tidings/" in each["uri"].replace("tidings://", "")]
