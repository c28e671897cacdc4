"""A folder that `tidings serve` serves in a process of its own, until it is killed; and clients that come back.

Each client keeps a copy of the lists by nothing but what it is told, and of the contents by reading what it is told of.
The folder is the truth that the copies are held against.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import httpx2

from tests.support.wire_clients import Stream, Wire, read_answer

S = TypeVar("S", bound="Server")

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

    def change_to_new(self) -> None:
        """Something, at random, that never was before."""
        self.edition += 1
        match self.dice.randrange(10):
            case 0:
                self.write(f"resources/new{self.edition}.txt", "x")
            case 1 | 2 | 3:
                name = f"prompts/p{self.dice.randrange(4)}.md"
                self.write(name, f"---\ndescription: edition {self.edition}\n---\nText")
            case _:
                self.write(f"resources/{self.dice.randrange(len(URIS))}.txt", str(self.edition))

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


class ForkedServer(Server):
    """The same in a process that is forked from one that has imported everything: it starts several times as fast."""

    FORK = """
import os, sys
import tidings.cli.commands, tidings.cli.serve, tidings.live, tidings.workspace.source, uvicorn
for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        tidings.cli.main()
    print('{"pid": %d}' % pid, flush=True)
    os.waitpid(pid, 0)
    print('{"ended": %d}' % pid, flush=True)
"""
    pid: int | None = None

    async def start(self, **more: Any) -> None:
        if self.process is None:
            options = ["serve", str(self.folder), "--port", "0", "--json", "--poll", "0", *self.options]
            pipe = asyncio.subprocess.PIPE
            command = [sys.executable, "-c", self.FORK, *options]
            self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, **more)
        assert self.process.stdin is not None
        self.process.stdin.write(b"start\n")
        first, second = await self._line(), await self._line()  # in any order
        self.pid, self.url = (first | second)["pid"], (first | second)["url"]

    async def kill(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        while await self._line() != {"ended": self.pid}:
            pass
        self.pid = None

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.pid is not None:
            await self.kill()
        await super().end(number)

    async def _line(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        with anyio.fail_after(DEADLINE):
            line = await self.process.stdout.readline()
        assert line, "the server did not start; what it said is above"
        said: dict[str, Any] = json.loads(line)
        return said


@asynccontextmanager
async def on(folder: Path, *options: str) -> AsyncIterator[Server]:
    async with ending(Server(folder, options)) as server:
        yield server


@asynccontextmanager
async def ending(server: S) -> AsyncIterator[S]:
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
    due: set[str] = field(default_factory=set)
    """What it was told of and has not fetched or read yet."""
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
        if is_new:
            self.due |= {*LISTS, *URIS}
        elif self.way == "name":
            self.due |= set(ahead)
        for topic in sorted(self.due):
            await (self._fetch if topic in LISTS else self._read)(url, topic)
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
            if revision == self.stands.get(name):
                self._look_for_repeats(meta[CURSOR])
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
        self.due.add(name)
        result = await self.call(url, f"{name}/list")
        while (version := result["_meta"][CURSOR]["topics"][name]) is None:  # it changed meanwhile
            result = await self.call(url, f"{name}/list")
        self.lists[name] = {item[key]: item.get("description") for item in result[name]}
        self.fetched[name] = version["revision"]
        self.due.discard(name)
        self._learn(result["_meta"][CURSOR])

    async def _read(self, url: str, uri: str) -> None:
        self.due.add(uri)
        result = await self.call(url, "resources/read", uri=uri)
        self.contents[uri] = result["contents"][0]["text"]
        self.due.discard(uri)

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
