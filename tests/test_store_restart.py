"""Servers that are killed at any moment, and clients that come back: by cursor, and by name.

A real folder, `tidings serve` in processes of its own, `kill -9` and SIGTERM, and real HTTP streams. Each client keeps
a copy of the lists by nothing but what it is told, and of the contents by reading what it is told of. In the end every
copy is what the folder is: nothing was missed. And no client that comes with a cursor is told what it knows; one that
comes by its name alone, only what it was told just before its connection broke.
`TIDINGS_SEED` repeats a run as far as processes allow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2
import pytest

from tests.servers.ears import MODERN, Stream, Wire, read_answer
from tidings.store.sqlite import peek

pytestmark = pytest.mark.anyio

DEADLINE = 60.0
CURSOR, RESUME, DURABLE, CHANGE = (f"dev.tidings/{name}" for name in ("cursor", "resume", "durable", "change"))
URIS = [f"workspace:///{number}.txt" for number in range(5)]
LISTS = {"prompts": ("prompt", "name"), "resources": ("resource", "uri")}
WANTED = {"promptsListChanged": True, "resourcesListChanged": True, "resourceSubscriptions": URIS}


# The folder


@dataclass
class Folder:
    """What there is to serve, and the truth about it."""

    root: Path
    dice: random.Random
    edition: int = 0

    def set_up(self, policy: str) -> None:
        for name in ("prompts", "resources"):
            (self.root / name).mkdir()
        (self.root / "tidings.toml").write_text(f'name = "restarts"\n[policy]\n{policy}\n')
        for number in range(len(URIS)):
            self.write(f"resources/{number}.txt", "0")
        self.write("prompts/first.md", "---\ndescription: first\n---\nHello")

    def write(self, name: str, text: str) -> None:
        """In one step, as an editor saves."""
        path = self.root / name
        spare = path.with_name(f".{path.name}.tmp")
        spare.write_text(text)
        spare.replace(path)

    def change(self) -> None:
        """Something, at random. Contents and lists may become what they were before."""
        self.edition += 1
        number = self.dice.randrange(4)
        match self.dice.randrange(5):
            case 0 | 1:
                self.write(f"resources/{self.dice.randrange(len(URIS))}.txt", str(self.dice.randrange(3)))
            case 2:
                self.write(f"prompts/p{number}.md", f"---\ndescription: edition {self.edition}\n---\nText")
            case 3:
                (self.root / f"prompts/p{number}.md").unlink(missing_ok=True)
            case 4:
                path = self.root / f"resources/more{number}.txt"
                path.unlink() if path.exists() else self.write(f"resources/more{number}.txt", "x")

    def contents(self) -> dict[str, str]:
        return {uri: (self.root / "resources" / uri.rpartition("/")[2]).read_text() for uri in URIS}

    def copy(self) -> dict[str, dict[str, Any]]:
        prompts = {
            path.stem: path.read_text().split("description: ")[1].split("\n")[0]
            for path in (self.root / "prompts").glob("[!.]*.md")
        }
        resources = [f"workspace:///{path.name}" for path in (self.root / "resources").glob("[!.]*.txt")]
        shown = dict.fromkeys([*resources, "tidings://errors"])
        return {"prompts": prompts, "resources": shown, "contents": self.contents()}


# The server


@dataclass
class Server:
    folder: Path
    options: tuple[str, ...] = ()
    process: asyncio.subprocess.Process | None = None
    url: str = ""

    async def start(self, **more: Any) -> None:
        command = [sys.executable, "-m", "tidings", "serve", str(self.folder), "--port", "0", "--json", "--poll", "0"]
        self.process = await asyncio.create_subprocess_exec(
            *command, *self.options, stdout=asyncio.subprocess.PIPE, stderr=more.pop("stderr", None), **more
        )
        assert self.process.stdout is not None
        with anyio.fail_after(DEADLINE):
            line = await self.process.stdout.readline()
        assert line, "the server did not start; what it said is above"
        self.url = json.loads(line)["url"]

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            with anyio.fail_after(DEADLINE):
                await process.wait()


@asynccontextmanager
async def on(folder: Path, *options: str) -> AsyncIterator[Server]:
    server = Server(folder, options)
    try:
        yield server
    finally:
        await server.end()


# The clients

Way = Literal["cursor", "name"]


@dataclass(eq=False)
class Client:
    """One that keeps a copy of everything, over as many connections as it takes."""

    name: str
    way: Way
    http: httpx2.AsyncClient
    told: dict[str, str] = field(default_factory=dict)
    """The digest that it was last told, or saw, by topic."""
    cursor: dict[str, Any] = field(default_factory=lambda: {"epoch": "", "topics": {}, "uris": {}})
    lists: dict[str, dict[str, Any]] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    """The revisions of the lists that it fetched last."""
    stands: dict[str, int] = field(default_factory=dict)
    """The revisions of the lists that it was told last."""
    when: dict[str, float] = field(default_factory=dict)
    repeats: list[tuple[str, float]] = field(default_factory=list)
    """What it was told although it knew it, and when it had been told it first."""
    ends: list[float] = field(default_factory=list)
    """When its connections ended."""
    refetches: int = 0
    changes: int = 0
    is_here: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def call(self, url: str, method: str, **params: Any) -> dict[str, Any]:
        headers = {"Mcp-Name": params["uri"]} if "uri" in params else {}
        with anyio.fail_after(DEADLINE):
            response = await Wire(url, self.http, headers).post(method, **params)
        result: dict[str, Any] = read_answer(response.text)["result"]
        return result

    def come(self, url: str) -> None:
        self.is_here.clear()
        self.task = asyncio.create_task(self._follow(url))

    async def leave(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() or task.exception() is None, task.exception()

    async def _follow(self, url: str) -> None:
        try:
            async with listening(Wire(url, self.http), self._asked()) as stream:
                await self._take_in(stream, url)
        except (httpx2.HTTPError, EOFError):
            pass  # the server was killed, in the middle of anything
        finally:
            self.ends.append(time.monotonic())

    def _asked(self) -> dict[str, Any]:
        if self.way == "name":
            return {DURABLE: {"name": self.name, "ttl": 600}}
        return {RESUME: self.cursor} if self.told else {}

    async def _take_in(self, stream: Stream, url: str) -> None:
        acknowledged = await next_message(stream)
        meta = acknowledged["params"]["_meta"]
        is_new = not self.told or meta.get(DURABLE, {}).get("isNew")
        # What it fetched by itself is in its cursor; who comes by name alone has to see to it.
        ahead = [name for name, revision in self.fetched.items() if revision > self.stands.get(name, -1)]
        self._stand(meta[CURSOR])
        for name in LISTS if is_new else ahead if self.way == "name" else []:
            await self._fetch(url, name)
        for uri in URIS if is_new else []:
            await self._read(url, uri)
        if is_new:
            self._learn({"uris": meta[CURSOR]["uris"]})
        self.stands |= {name: version["revision"] for name, version in meta[CURSOR]["topics"].items() if version}
        self.is_here.set()
        while True:
            message = await next_message(stream)
            if "result" in message:
                return  # the server was told to stop
            await self._hear(message, url)
            self.heard.set()

    async def _hear(self, message: dict[str, Any], url: str) -> None:
        method, params = message["method"], message["params"]
        meta = params["_meta"]
        self.changes += 1
        if method == "notifications/resources/updated":
            self._look_for_repeats(meta[CURSOR])
            await self._read(url, params["uri"])
            self._learn(meta[CURSOR])
            return
        name = method.split("/")[1]
        revision = meta[CURSOR]["topics"][name]["revision"]
        if revision <= self.fetched.get(name, -1):
            self.stands[name] = revision
            return  # it has seen that, or more, when it fetched the list
        self._look_for_repeats(meta[CURSOR])
        # What it has to fetch, it knows once it has it: it may have to leave before.
        if meta[CHANGE]["complete"]:
            self._apply(name, params)
            self._learn(meta[CURSOR])
        else:
            self.refetches += 1
            await self._fetch(url, name)
        self.stands[name] = revision

    def _look_for_repeats(self, cursor: dict[str, Any]) -> None:
        for topic, version in [*cursor.get("topics", {}).items(), *cursor.get("uris", {}).items()]:
            if self.told.get(topic) == version["digest"]:
                self.repeats.append((topic, self.when[topic]))

    def _learn(self, cursor: dict[str, Any]) -> None:
        for topic, version in [*cursor.get("topics", {}).items(), *cursor.get("uris", {}).items()]:
            self.told[topic] = version["digest"]
            self.when[topic] = time.monotonic()
        self._stand(cursor)

    def _stand(self, cursor: dict[str, Any]) -> None:
        """Go on from where the server says that we are."""
        self.cursor["epoch"] = cursor.get("epoch", self.cursor["epoch"])
        for kind in ("topics", "uris"):
            self.cursor[kind] |= cursor.get(kind, {})

    def _apply(self, name: str, params: dict[str, Any]) -> None:
        member, key = LISTS[name]
        for change in params.get("changes", [params]):
            item = change[member]
            if change["operation"] == "removed":
                self.lists[name].pop(item[key], None)
            else:
                self.lists[name][item[key]] = item.get("description")

    async def _fetch(self, url: str, name: str) -> None:
        _, key = LISTS[name]
        result = await self.call(url, f"{name}/list")
        while (version := result["_meta"][CURSOR]["topics"][name]) is None:  # it changed meanwhile
            result = await self.call(url, f"{name}/list")
        self.lists[name] = {item[key]: item.get("description") for item in result[name]}
        self.fetched[name] = version["revision"]
        self._learn(result["_meta"][CURSOR])

    async def _read(self, url: str, uri: str) -> None:
        result = await self.call(url, "resources/read", uri=uri)
        self.contents[uri] = result["contents"][0]["text"]

    def copy(self) -> dict[str, dict[str, Any]]:
        resources = dict.fromkeys(self.lists.get("resources", {}))
        return {"prompts": self.lists.get("prompts", {}), "resources": resources, "contents": self.contents}


@asynccontextmanager
async def listening(wire: Wire, asked: dict[str, Any], wanted: dict[str, Any] = WANTED) -> AsyncIterator[Stream]:
    method = "subscriptions/listen"
    message = wire.message(method, 1, {"notifications": wanted})
    message["params"]["_meta"] |= asked
    async with wire.http.stream("POST", wire.url, json=message, headers=wire._headers(method, {})) as response:
        stream = Stream(response, response.aiter_text())
        yield stream


async def next_message(stream: Stream) -> dict[str, Any]:
    """However long it takes: between two changes nothing comes."""
    while True:
        with contextlib.suppress(TimeoutError):
            event = await stream.event()
            if not event:
                raise EOFError
            for line in event.split("\r\n"):
                if line.startswith("data: {"):
                    message: dict[str, Any] = json.loads(line[6:])
                    return message


async def until(is_so: Callable[[], bool], what: str) -> None:
    with anyio.fail_after(DEADLINE):
        while not is_so():  # noqa: ASYNC110  # what another process writes down raises no event here
            await asyncio.sleep(0.01)
    assert is_so(), what


# At random

IN_DOUBT = 2 * (3 + 1) + 4
"""Seconds after which what was told is beyond doubt, with the policy below, and some for a busy machine."""


@pytest.mark.parametrize("seed", [int(os.environ.get("TIDINGS_SEED", random.randrange(10**6)))])
@pytest.mark.parametrize("journal", [10_000, 3])
async def test_clients_of_servers_that_are_killed_miss_nothing_and_are_told_nothing_twice(
    tmp_path: Path, journal: int, seed: int
) -> None:
    dice = random.Random(seed)
    folder = Folder(tmp_path, dice)
    folder.set_up(f"journal_changes = {journal}\nwrite_deadline = 3\nkeep_alive = 1")
    async with on(tmp_path) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        ways: list[Way] = ["cursor", "name", "cursor", "name"]
        clients = [Client(f"client {number} by {way}", way, http) for number, way in enumerate(ways)]
        for life in range(5):
            await server.start()
            for client in clients:
                client.come(server.url)
            await here(clients)
            for _ in range(dice.randrange(5, 25)):
                folder.change()
                await act(dice, clients, server)
            ends = signal.SIGKILL if life % 3 else signal.SIGTERM
            if ends is signal.SIGKILL:
                # At once, or at the moment when somebody hears of it: before, or while, or after it is written down.
                folder.change()
                if dice.random() < 0.7:
                    await heard_by_somebody(clients)
            await server.end(ends)
            for client in clients:
                await client.leave()
            for _ in range(dice.choice([0, 0, 1, 4])):
                folder.change()
        await server.start()
        for client in clients:
            client.come(server.url)
        await here(clients)
        folder.write("prompts/last.md", "---\ndescription: the end\n---\n")
        for uri in URIS:
            folder.write(f"resources/{uri.rpartition('/')[2]}", f"the end of {uri}")
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(client.copy() == folder.copy() for client in clients), "every copy")
        for client in clients:
            assert (client.name, client.copy()) == (client.name, folder.copy())
        for client in clients:
            await client.leave()
    for client in clients:
        if client.way == "cursor":
            assert client.repeats == [], client.name
        for topic, when in client.repeats:
            assert any(0 <= end - when < IN_DOUBT for end in client.ends), (client.name, topic)
        assert client.changes > 10


async def here(clients: list[Client]) -> None:
    with anyio.fail_after(DEADLINE):
        for client in clients:
            assert client.task is not None
            here = asyncio.create_task(client.is_here.wait())
            await asyncio.wait({here, client.task}, return_when=asyncio.FIRST_COMPLETED)
            if not here.done():
                here.cancel()
                client.task.result()
                raise AssertionError(f"{client.name} could not come")


async def act(dice: random.Random, clients: list[Client], server: Server) -> None:
    """Let something happen between two changes, or nothing."""
    client = dice.choice(clients)
    roll = dice.random()
    if roll < 0.3:
        await client.call(server.url, "prompts/list")
    elif roll < 0.45:
        await heard_by_somebody(clients)
    elif roll < 0.6:
        await client.leave()
        client.come(server.url)
        await here([client])


async def heard_by_somebody(clients: list[Client]) -> None:
    """Or by nobody, where a change made no difference."""
    for client in clients:
        client.heard.clear()
    waiting = [asyncio.create_task(client.heard.wait()) for client in clients]
    await asyncio.wait(waiting, timeout=0.3, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


# One thing at a time


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
async def test_journal_contents_and_names_survive_being_killed(folder: Folder, way: Way) -> None:
    """While its client is away: two prompts, two contents; while nobody is there, one more of each."""
    async with on(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        client = Client("laptop", way, http)
        client.come(server.url)
        await here([client])
        await client.leave()
        asked = client._asked() if way == "name" else {RESUME: client.cursor}
        prompt(folder, "a")
        folder.write("resources/0.txt", "new")
        folder.write("resources/1.txt", "new")
        await until(lambda: len(kept(folder, "a")) == 1 and len(state(folder).contents) >= len(URIS), "the change")
        prompt(folder, "b")
        await until(lambda: len(kept(folder, "b")) == 1, "the change")
        await until(lambda: len([each for each in state(folder).journal if each.topic in URIS[:2]]) == 4, "contents")
        epoch = state(folder).epoch
        await server.end(signal.SIGKILL)
        prompt(folder, "c")
        folder.write("resources/1.txt", "0")  # as the client knows it
        folder.write("resources/2.txt", "newer")

        await server.start()
        async with listening(Wire(server.url, http), asked) as stream:
            meta = (await stream.message())["params"]["_meta"]
            assert meta[CURSOR]["epoch"] == epoch
            if way == "name":
                assert meta[DURABLE] == {"name": "laptop", "ttl": 600.0, "isNew": False}
            told = [await next_change(stream) for _ in range(3)]
            assert told[0] == ("list", [("added", "a"), ("added", "b"), ("added", "c")], True)
            assert sorted(told[1:]) == [
                (URIS[0], [("updated", URIS[0])], True),
                (URIS[2], [("updated", URIS[2])], True),
            ]
            prompt(folder, "d")  # and nothing in between
            assert await next_change(stream) == ("list", [("added", "d")], True)


def kept(folder: Folder, name: str) -> list[Any]:
    return [change for change in state(folder).journal if change.key == name]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restart_with_the_same_content_tells_nobody_anything(folder: Folder, number: signal.Signals) -> None:
    async with on(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        clients = [Client("laptop", "cursor", http), Client("phone", "name", http)]
        await server.start()
        for client in clients:
            client.come(server.url)
        await here(clients)
        prompt(folder, "a")
        folder.write("resources/0.txt", "new")
        await until(lambda: all("a" in each.lists["prompts"] for each in clients), "the prompt")
        await until(lambda: all(each.contents[URIS[0]] == "new" for each in clients), "the content")
        life = state(folder).life
        await until(lambda: all(knows(folder, each) for each in clients), "its being written down")
        await server.end(number)
        for client in clients:
            await client.leave()
        heard = [client.changes for client in clients]

        await server.start()
        for client in clients:
            client.come(server.url)
        await here(clients)
        prompt(folder, "z")
        await until(lambda: all("z" in each.lists["prompts"] for each in clients), "the change after it")
        for client in clients:
            await client.leave()

        assert [client.changes for client in clients] == [before + 1 for before in heard]
        assert [client.repeats for client in clients] == [[], []]
        assert state(folder).life == life + 1


def knows(folder: Folder, client: Client) -> bool:
    """Whether the file has all that the client was told."""
    found = state(folder)
    if client.way == "cursor":
        return {each.digest for each in (*found.versions.values(), *found.contents.values())} >= set(
            client.told.values()
        )
    digests = {version.digest for durable in found.durables.values() for version in durable.told.values() if version}
    return digests >= set(client.told.values())


async def test_two_connections_under_one_name_and_the_newer_has_it(folder: Folder) -> None:
    async with on(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        wire = Wire(server.url, http)
        asked = {DURABLE: {"name": "laptop"}}
        async with listening(wire, asked) as older:
            assert (await older.message())["params"]["_meta"][DURABLE]["isNew"] is True
            prompt(folder, "a")
            assert (await next_change(older))[1] == [("added", "a")]
            async with listening(wire, asked) as newer:
                assert (await newer.message())["params"]["_meta"][DURABLE]["isNew"] is False
                assert "result" in await older.message(), "the older one ends with its result"
                assert await older.event() == ""
                assert await next_change(newer) == ("list", [], False), "what it was told last may not have been read"
                prompt(folder, "b")
                assert (await next_change(newer))[1] == [("added", "b")]


async def test_a_legacy_session_goes_on_under_its_name(folder: Folder) -> None:
    """With the contents that it subscribed to, and what it missed of them and of the lists."""
    async with on(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
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
            await until(lambda: is_settled(folder, URIS[0]), "its being beyond doubt")
        await server.end(signal.SIGKILL)
        folder.write("resources/0.txt", "newer")
        prompt(folder, "a")

        await server.start()
        again = Legacy(server.url, http)
        assert (await again.shake_hands())["isNew"] is False
        async with again.stream() as stream:
            told = [await next_change(stream) for _ in range(2)]
            assert told == [("list", [("added", "a")], True), (URIS[0], [("updated", URIS[0])], True)]


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

    async with on(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start(preexec_fn=limit, stderr=asyncio.subprocess.PIPE)
        assert server.process is not None
        assert server.process.stderr is not None
        async with listening(Wire(server.url, http), {}) as stream:
            await stream.message()
            for number in range(200):
                prompt(folder, f"large{number}", "x" * 3000)
            line = await line_with(server.process.stderr, "state.db")
            assert "What changes now is in memory only, until that is mended" in line
            await next_change(stream)
        client = Client("any", "cursor", http)
        await until_async(lambda: counts(client, server.url), 201)
        await server.end(signal.SIGKILL)
        before = state(folder)
        assert before.items

        await server.start()
        after = await client.call(server.url, "prompts/list")
        assert len(after["prompts"]) == 201
        await until(
            lambda: len([each for each in state(folder).items if each.feature.value == "prompts"]) == 201, "all"
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
    async with on(folder.root) as first, on(folder.root) as second, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await first.start()
        await second.start(stderr=asyncio.subprocess.PIPE)
        assert second.process is not None
        pipe = second.process.stderr
        assert pipe is not None
        line = await line_with(pipe, "state.db")
        assert "in use by another server" in line
        assert "warning" not in line
        async with listening(Wire(first.url, http), {}) as one, listening(Wire(second.url, http), {}) as two:
            cursors = [(await stream.message())["params"]["_meta"][CURSOR] for stream in (one, two)]
            assert cursors[0]["epoch"] != cursors[1]["epoch"]
            prompt(folder, "a")
            assert (await next_change(one))[1] == (await next_change(two))[1] == [("added", "a")]
        await second.end(signal.SIGTERM)
        assert "state.db" not in (await pipe.read()).decode()


@pytest.mark.parametrize("options", [("--state", "none"), ("--state", "elsewhere.db")])
async def test_the_state_is_where_it_was_asked_to_be(folder: Folder, options: tuple[str, str]) -> None:
    place = folder.root.parent / "elsewhere.db"
    options = (options[0], str(place) if options[1] != "none" else "none")
    async with on(folder.root, *options) as server:
        await server.start()
        await server.end(signal.SIGTERM)

    assert not (folder.root / ".tidings").exists()
    assert place.exists() == (options[1] != "none")
    if place.exists():
        assert len(peek(place).items) > 5


async def test_the_folder_of_the_state_is_no_content(folder: Folder) -> None:
    async with on(folder.root) as server, httpx2.AsyncClient(timeout=DEADLINE) as http:
        await server.start()
        async with listening(Wire(server.url, http), {}) as stream:
            await stream.message()
            (folder.root / ".tidings" / "more.txt").write_text("x")
            shutil.copy(folder.root / ".tidings" / "state.db", folder.root / ".tidings" / "copy.db")
            prompt(folder, "a")
            assert await next_change(stream) == ("list", [("added", "a")], True)
        listed = await Client("any", "cursor", http).call(server.url, "resources/list")
        assert not [each for each in listed["resources"] if "tidings/" in each["uri"].replace("tidings://", "")]


def test_the_protocol_version_is_the_one_meant() -> None:
    assert MODERN == "2026-07-28"
