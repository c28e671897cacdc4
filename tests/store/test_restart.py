"""What a restart keeps, one thing at a time: journal, contents and names; and what can go wrong with their file."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.support.folder import (
    CHANGE,
    CURSOR,
    DEADLINE,
    DURABLE,
    RESUME,
    URIS,
    Client,
    Folder,
    ResumeBy,
    open_listen,
    serve_folder,
    until_connected,
)
from tests.support.sdk_clients import MODERN
from tests.support.waiting import until
from tests.support.wire_clients import Stream, Wire, read_answer
from tidings.store.sqlite import peek

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path, random.Random(1))
    made.set_up("write_deadline = 0.3\nkeep_alive = 0.2")
    return made


def state(folder: Folder) -> Any:
    return peek(folder.root / ".tidings" / "state.db")


def prompt(folder: Folder, name: str, description: str = "one") -> None:
    folder.write(f"prompts/{name}.md", f"---\ndescription: {description}\n---\nText")


async def next_change(stream: Stream) -> tuple[str, list[tuple[str, str]], bool]:
    """What it is about, what was done to what, and whether that is all."""
    params = (await stream.message())["params"]
    said = params["_meta"][CHANGE]
    changes = said.get("changes") or ([said] if "operation" in said else [])
    about = params.get("uri") if "uri" in params and "operation" not in params else "list"
    return str(about), [(each["operation"], each.get("name") or each.get("uri")) for each in changes], said["complete"]


@pytest.mark.parametrize("way", ["cursor", "name"])
async def test_journal_contents_and_names_survive_being_killed(folder: Folder, way: ResumeBy) -> None:
    """While its client is away: two prompts, two contents; while nobody is there, one more of each."""
    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        client = Client("laptop", way, http)
        client.connect(server.url)
        await until_connected([client])
        await client.disconnect()
        asked = client.make_meta() if way == "name" else {RESUME: client.cursor}
        prompt(folder, "a")
        folder.write("resources/0.txt", "new")
        folder.write("resources/1.txt", "new")
        await until(lambda: len(kept(folder, "a")) == 1 and len(state(folder).contents) >= len(URIS), DEADLINE)
        prompt(folder, "b")
        await until(lambda: len(kept(folder, "b")) == 1, DEADLINE)
        await until(lambda: len([each for each in state(folder).journal if each.topic in URIS[:2]]) == 4, DEADLINE)
        epoch = state(folder).epoch
        await server.stop(signal.SIGKILL)
        prompt(folder, "c")
        folder.write("resources/1.txt", "0")  # as the client knows it
        folder.write("resources/2.txt", "newer")

        await server.start()
        async with open_listen(Wire(server.url, http), asked) as stream:
            meta = (await stream.message())["params"]["_meta"]
            assert meta[CURSOR]["epoch"] == epoch
            if way == "name":
                assert meta[DURABLE] == {"name": "laptop", "ttl": 600.0, "isNew": False}
            # What was shown of the one that is as it was, before the server was killed, nobody knows.
            doubted: list[Any] = [(URIS[1], [], False)] if way == "name" else []
            told = [await next_change(stream) for _ in range(3 + len(doubted))]
            assert told[0] == ("list", [("added", "a"), ("added", "b"), ("added", "c")], True)
            assert sorted(told[1:]) == [
                (URIS[0], [("updated", URIS[0])], True),
                *doubted,
                (URIS[2], [("updated", URIS[2])], True),
            ]
            prompt(folder, "d")  # and nothing in between
            assert await next_change(stream) == ("list", [("added", "d")], True)


def kept(folder: Folder, name: str) -> list[Any]:
    return [change for change in state(folder).journal if change.key == name]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restart_with_the_same_content_tells_nobody_anything(folder: Folder, number: signal.Signals) -> None:
    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        clients = [Client("laptop", "cursor", http), Client("phone", "name", http)]
        await server.start()
        for client in clients:
            client.connect(server.url)
        await until_connected(clients)
        prompt(folder, "a")
        folder.write("resources/0.txt", "new")
        await until(lambda: all("a" in each.lists["prompts"] for each in clients), DEADLINE)
        await until(lambda: all(each.contents[URIS[0]] == "new" for each in clients), DEADLINE)
        life = state(folder).run
        await until(lambda: all(knows(folder, each) for each in clients), DEADLINE)
        await server.stop(number)
        for client in clients:
            await client.disconnect()
        heard = [client.changes for client in clients]

        await server.start()
        for client in clients:
            client.connect(server.url)
        await until_connected(clients)
        prompt(folder, "z")
        await until(lambda: all("z" in each.lists["prompts"] for each in clients), DEADLINE)
        for client in clients:
            await client.disconnect()

        assert [client.changes for client in clients] == [before + 1 for before in heard]
        assert [client.repeated for client in clients] == [[], []]
        assert state(folder).run == life + 1


def knows(folder: Folder, client: Client) -> bool:
    """Whether the file has all that the client was told."""
    found = state(folder)
    if client.resume_by == "cursor":
        return {each.digest for each in (*found.versions.values(), *found.contents.values())} >= set(
            client.told.values()
        )
    digests = {version.digest for durable in found.durables.values() for version in durable.told.values() if version}
    return digests >= set(client.told.values())


async def test_two_connections_under_one_name_and_the_newer_has_it(folder: Folder) -> None:
    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        wire = Wire(server.url, http)
        asked = {DURABLE: {"name": "laptop"}}
        async with open_listen(wire, asked) as older:
            assert (await older.message())["params"]["_meta"][DURABLE]["isNew"] is True
            prompt(folder, "a")
            assert (await next_change(older))[1] == [("added", "a")]
            async with open_listen(wire, asked) as newer:
                assert (await newer.message())["params"]["_meta"][DURABLE]["isNew"] is False
                assert "result" in await older.message(), "the older one ends with its result"
                assert await older.event() == ""
                assert await next_change(newer) == ("list", [], False), "what it was told last may not have been read"
                prompt(folder, "b")
                assert (await next_change(newer))[1] == [("added", "b")]


async def test_a_legacy_session_goes_on_under_its_name(folder: Folder) -> None:
    """With the contents that it subscribed to, and what it missed of them and of the lists."""
    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        first = Legacy(server.url, http)
        assert await first.shake_hands() == {"name": "old laptop", "ttl": 600.0, "isNew": True}
        async with first.stream() as stream:
            assert {(await stream.message())["method"] for _ in range(3)} == {
                f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources")
            }, "as every new session of a folder is told"
            await first.post("resources/subscribe", uri=URIS[0])
            folder.write("resources/0.txt", "new")
            assert (await next_change(stream))[0] == URIS[0]
            await until(lambda: is_settled(folder, URIS[0]), DEADLINE)
        await server.stop(signal.SIGKILL)
        folder.write("resources/0.txt", "newer")
        prompt(folder, "a")

        await server.start()
        again = Legacy(server.url, http)
        assert (await again.shake_hands())["isNew"] is False
        async with again.stream() as stream:
            told = [await next_change(stream) for _ in range(2)]
            # No delta of the list: a killed server may have told the client of a version that it did not write.
            assert told == [("list", [], False), (URIS[0], [("updated", URIS[0])], True)]


async def test_uris_that_a_legacy_session_subscribes_to_are_written_immediately(folder: Folder) -> None:
    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        session = Legacy(server.url, http)
        await session.shake_hands()

        async def until_written(*uris: str) -> None:
            await until(lambda: [each.uris for each in state(folder).durables.values()] == [uris])

        await until_written()
        await session.post("resources/subscribe", uri=URIS[0])
        await until_written(URIS[0])
        await session.post("resources/unsubscribe", uri=URIS[0])
        await until_written()


def is_settled(folder: Folder, uri: str) -> bool:
    """Whether everything that was told is written down as told."""
    found = state(folder)
    durables = found.durables.values()
    return bool(durables) and all(
        each.contents.get(uri) == found.contents[uri] and None not in each.lists.values() for each in durables
    )


@dataclass
class Legacy:
    url: str
    http: httpx2.AsyncClient
    session: str = ""

    @property
    def headers(self) -> dict[str, str]:
        named = {"Mcp-Session-Id": self.session, "MCP-Protocol-Version": "2025-11-25"} if self.session else {}
        return {"Accept": "application/json, text/event-stream", **named}

    async def post(self, method: str, number: int | None = 1, **params: Any) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if number is None else {"id": number})
        response = await self.http.post(self.url, json=message, headers=self.headers)
        self.session = response.headers.get("mcp-session-id", self.session)
        return read_answer(response.text) if number is not None else {}

    async def shake_hands(self) -> Any:
        answer = await self.post(
            "initialize",
            protocolVersion="2025-11-25",
            capabilities={},
            clientInfo={"name": "old", "version": "1"},
            _meta={DURABLE: {"name": "old laptop", "ttl": 600}},
        )
        await self.post("notifications/initialized", None)
        return answer["result"]["_meta"][DURABLE]

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        async with self.http.stream("GET", self.url, headers=self.headers) as response:
            stream = Stream(response, response.aiter_text())
            yield stream


# What can go wrong with the file


async def test_a_server_whose_disk_is_full_goes_on_and_loses_nothing_that_was_written(folder: Folder) -> None:
    resource = pytest.importorskip("resource")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start(preexec_fn=limit, stderr=asyncio.subprocess.PIPE)
        assert server.process is not None
        assert server.process.stderr is not None
        for number in range(200):
            prompt(folder, f"large{number}", "x" * 3000)
        line = await line_with(server.process.stderr, "state.db")
        assert "Until that is fixed, changes are kept in memory only" in line
        # Not before: who does not read all of the above for 0.3 s is cut off.
        async with open_listen(Wire(server.url, http), {}) as stream:
            await stream.message()
            prompt(folder, "last")
            await next_change(stream)
        client = Client("any", "cursor", http)
        await until_async(lambda: counts(client, server.url), 202)
        await server.stop(signal.SIGKILL)
        before = state(folder)
        assert before.items

        await server.start()
        after = await client.call(server.url, "prompts/list")
        assert len(after["prompts"]) == 202
        await until(
            lambda: len([each for each in state(folder).items if each.feature.value == "prompts"]) == 202,
            DEADLINE,
        )
        assert state(folder).epoch == before.epoch


async def counts(client: Client, url: str) -> int:
    return len((await client.call(url, "prompts/list"))["prompts"])


async def until_async(count: Callable[[], Any], expected: int) -> None:
    with anyio.fail_after(DEADLINE):
        while await count() != expected:
            pass


async def line_with(pipe: asyncio.StreamReader, text: str) -> str:
    with anyio.fail_after(DEADLINE):
        while line := (await pipe.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"nothing was said of {text}")


async def test_a_second_server_of_one_folder_says_one_line_and_serves(folder: Folder) -> None:
    """As every client on stdio starts its own."""
    async with (
        serve_folder(folder.root) as first,
        serve_folder(folder.root) as second,
        httpx2.AsyncClient(timeout=DEADLINE) as http,
    ):
        await first.start()
        await second.start(stderr=asyncio.subprocess.PIPE)
        assert second.process is not None
        pipe = second.process.stderr
        assert pipe is not None
        line = await line_with(pipe, "state.db")
        assert "in use by another server" in line
        assert "warning" not in line
        async with open_listen(Wire(first.url, http), {}) as one, open_listen(Wire(second.url, http), {}) as two:
            cursors = [(await stream.message())["params"]["_meta"][CURSOR] for stream in (one, two)]
            assert cursors[0]["epoch"] != cursors[1]["epoch"]
            prompt(folder, "a")
            assert (await next_change(one))[1] == (await next_change(two))[1] == [("added", "a")]
        await second.stop(signal.SIGTERM)
        assert "state.db" not in (await pipe.read()).decode()


@pytest.mark.parametrize("options", [("--state", "none"), ("--state", "elsewhere.db")])
async def test_the_state_is_where_it_was_asked_to_be(folder: Folder, options: tuple[str, str]) -> None:
    place = folder.root.parent / "elsewhere.db"
    options = (options[0], str(place) if options[1] != "none" else "none")
    async with serve_folder(folder.root, *options) as server:
        await server.start()
        await server.stop(signal.SIGTERM)

    assert not (folder.root / ".tidings").exists()
    assert place.exists() == (options[1] != "none")
    if place.exists():
        assert len(peek(place).items) > 5


async def test_the_folder_of_the_state_is_no_content(folder: Folder) -> None:
    async with serve_folder(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        async with open_listen(Wire(server.url, http), {}) as stream:
            await stream.message()
            (folder.root / ".tidings" / "more.txt").write_text("x")
            shutil.copy(folder.root / ".tidings" / "state.db", folder.root / ".tidings" / "copy.db")
            prompt(folder, "a")
            assert await next_change(stream) == ("list", [("added", "a")], True)
        listed = await Client("any", "cursor", http).call(server.url, "resources/list")
        assert not [each for each in listed["resources"] if "tidings/" in each["uri"].replace("tidings://", "")]


def test_the_protocol_version_is_the_one_meant() -> None:
    assert MODERN == "2026-07-28"
