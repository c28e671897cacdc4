"""A folder that `tidings serve` serves in its own process, which is killed, and clients that reconnect.

Each client keeps a copy of the lists from the notifications alone, and reads a resource when it is notified of it. In
the end, the copies must equal the folder.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2

from tests.support.command import TIDINGS
from tests.support.forking import KILL, forked_command
from tests.support.waiting import DEADLINE
from tests.support.wire_clients import Stream, Wire, read_answer

CURSOR, RESUME, DURABLE, CHANGE = (f"dev.tidings/{name}" for name in ("cursor", "resume", "durable", "change"))
URIS = [f"workspace:///{number}.txt" for number in range(5)]
LISTS = {"prompts": ("prompt", "name"), "resources": ("resource", "uri")}
SUBSCRIPTIONS = {"promptsListChanged": True, "resourcesListChanged": True, "resourceSubscriptions": URIS}


# The folder


@dataclass
class Folder:
    """The served files, which random changes are made to."""

    root: Path
    rng: random.Random
    change_count: int = 0

    def set_up(self, policy: str) -> None:
        for name in ("prompts", "resources"):
            (self.root / name).mkdir()
        (self.root / "tidings.toml").write_text(f'name = "restarts"\n[policy]\n{policy}\n')
        for number in range(len(URIS)):
            self.write(f"resources/{number}.txt", "0")
        self.write("prompts/first.md", "---\ndescription: first\n---\nHello")

    def write(self, name: str, text: str) -> None:
        """Write a file atomically, as an editor does."""
        path = self.root / name
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        temporary.replace(path)

    def change(self) -> None:
        """Make a random change. Contents and lists may return to an earlier state."""
        self.change_count += 1
        number = self.rng.randrange(4)
        match self.rng.randrange(5):
            case 0 | 1:
                self.write(f"resources/{self.rng.randrange(len(URIS))}.txt", str(self.rng.randrange(3)))
            case 2:
                self.write(f"prompts/p{number}.md", f"---\ndescription: change {self.change_count}\n---\nText")
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
        uris = dict.fromkeys([*resources, "tidings://errors"])
        return {"prompts": prompts, "resources": uris, "contents": self.contents()}


# The server


@dataclass
class Server:
    folder: Path
    options: tuple[str, ...] = ()
    is_forked: bool = True
    """Whether `forked_command` starts it, which is faster. If not, it has its own hash seed and resource limits."""
    process: asyncio.subprocess.Process | None = None
    url: str = ""

    async def start(self, **more: Any) -> None:
        program = forked_command(TIDINGS) if self.is_forked else [TIDINGS]
        command = [*program, "serve", str(self.folder), "--port", "0", "--json", "--poll", "0", *self.options]
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, **more)
        assert self.process.stdout is not None
        with anyio.fail_after(DEADLINE):
            line = await self.process.stdout.readline()
        assert line, "the server did not start; its output is above"
        self.url = json.loads(line)["url"]

    async def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(KILL if number is signal.SIGKILL and self.is_forked else number)
            with anyio.fail_after(DEADLINE):
                await process.wait()


@asynccontextmanager
async def serve_folder(folder: Path, *options: str, is_forked: bool = True) -> AsyncIterator[Server]:
    server = Server(folder, options, is_forked)
    try:
        yield server
    finally:
        await server.stop()


# The clients


ResumeBy = Literal["cursor", "name"]


@dataclass(eq=False)
class Client:
    """A client that keeps a copy of everything, over several connections."""

    name: str
    resume_by: ResumeBy
    http: httpx2.AsyncClient
    told: dict[str, str] = field(default_factory=dict)
    """The digest by topic that it was last told or has fetched."""
    cursor: dict[str, Any] = field(default_factory=lambda: {"epoch": "", "topics": {}, "uris": {}})
    lists: dict[str, dict[str, Any]] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    """The revision of each list that it last fetched."""
    told_revisions: dict[str, int] = field(default_factory=dict)
    """The revision of each list that it was last told."""
    told_at: dict[str, float] = field(default_factory=dict)
    repeated: list[tuple[str, float]] = field(default_factory=list)
    """The topics of repeated notifications, and the time of the first one."""
    disconnected_at: list[float] = field(default_factory=list)
    """The times at which its connections ended."""
    pending: set[str] = field(default_factory=set)
    """The topics that it was notified of, and has not fetched or read yet."""
    refetches: int = 0
    changes: int = 0
    is_connected: asyncio.Event = field(default_factory=asyncio.Event)
    has_received: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def call(self, url: str, method: str, **params: Any) -> dict[str, Any]:
        headers = {"Mcp-Name": params["uri"]} if "uri" in params else {}
        with anyio.fail_after(DEADLINE):
            response = await Wire(url, self.http, headers).post(method, **params)
        result: dict[str, Any] = read_answer(response.text)["result"]
        return result

    def connect(self, url: str) -> None:
        self.is_connected.clear()
        self.task = asyncio.create_task(self._follow(url))

    async def disconnect(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() or task.exception() is None, task.exception()

    async def _follow(self, url: str) -> None:
        try:
            async with open_listen(Wire(url, self.http), self.make_meta()) as stream:
                await self._receive_all(stream, url)
        except (httpx2.HTTPError, EOFError):
            pass  # the server was killed
        finally:
            self.disconnected_at.append(time.monotonic())

    def make_meta(self) -> dict[str, Any]:
        if self.resume_by == "name":
            return {DURABLE: {"name": self.name, "ttl": 600}}
        return {RESUME: self.cursor} if self.told else {}

    async def _receive_all(self, stream: Stream, url: str) -> None:
        acknowledgement = await stream.message()
        meta = acknowledgement["params"]["_meta"]
        is_new = not self.told or meta.get(DURABLE, {}).get("isNew")
        # A cursor contains what the client has fetched. A client that resumes by name must fetch those lists again.
        ahead = [name for name, revision in self.fetched.items() if revision > self.told_revisions.get(name, -1)]
        self._update_cursor(meta[CURSOR])
        if is_new:
            self.pending |= {*LISTS, *URIS}
        elif self.resume_by == "name":
            self.pending |= set(ahead)
        for topic in sorted(self.pending):
            await (self._fetch if topic in LISTS else self._read)(url, topic)
        if is_new:
            self._record_told({"uris": meta[CURSOR]["uris"]})
        self.told_revisions |= {
            name: version["revision"] for name, version in meta[CURSOR]["topics"].items() if version
        }
        self.is_connected.set()
        while True:
            message = await stream.message(deadline=None)  # there is none between two changes
            if "result" in message:
                return  # the server has stopped
            await self._receive(message, url)
            self.has_received.set()

    async def _receive(self, message: dict[str, Any], url: str) -> None:
        method, params = message["method"], message["params"]
        meta = params["_meta"]
        self.changes += 1
        if method == "notifications/resources/updated":
            self._find_repeated(meta[CURSOR])
            await self._read(url, params["uri"])
            self._record_told(meta[CURSOR])
            return
        name = method.split("/")[1]
        revision = meta[CURSOR]["topics"][name]["revision"]
        if revision <= self.fetched.get(name, -1):
            if revision == self.told_revisions.get(name):
                self._find_repeated(meta[CURSOR])
            self.told_revisions[name] = revision
            return  # the fetched list is at least as new
        self._find_repeated(meta[CURSOR])
        # If it must fetch the list, it records the version only after that: it may be disconnected before.
        if meta[CHANGE]["complete"]:
            self._apply(name, params)
            self._record_told(meta[CURSOR])
        else:
            self.refetches += 1
            await self._fetch(url, name)
        self.told_revisions[name] = revision

    def _find_repeated(self, cursor: dict[str, Any]) -> None:
        for topic, version in [*cursor.get("topics", {}).items(), *cursor.get("uris", {}).items()]:
            if self.told.get(topic) == version["digest"]:
                self.repeated.append((topic, self.told_at[topic]))

    def _record_told(self, cursor: dict[str, Any]) -> None:
        for topic, version in [*cursor.get("topics", {}).items(), *cursor.get("uris", {}).items()]:
            self.told[topic] = version["digest"]
            self.told_at[topic] = time.monotonic()
        self._update_cursor(cursor)

    def _update_cursor(self, cursor: dict[str, Any]) -> None:
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
        self.pending.add(name)
        result = await self.call(url, f"{name}/list")
        while (version := result["_meta"][CURSOR]["topics"][name]) is None:  # it changed meanwhile
            result = await self.call(url, f"{name}/list")
        self.lists[name] = {item[key]: item.get("description") for item in result[name]}
        self.fetched[name] = version["revision"]
        self.pending.discard(name)
        self._record_told(result["_meta"][CURSOR])

    async def _read(self, url: str, uri: str) -> None:
        self.pending.add(uri)
        result = await self.call(url, "resources/read", uri=uri)
        self.contents[uri] = result["contents"][0]["text"]
        self.pending.discard(uri)

    def copy(self) -> dict[str, dict[str, Any]]:
        resources = dict.fromkeys(self.lists.get("resources", {}))
        return {"prompts": self.lists.get("prompts", {}), "resources": resources, "contents": self.contents}


def open_listen(wire: Wire, meta: dict[str, Any]) -> AbstractAsyncContextManager[Stream]:
    return wire.listen(1, SUBSCRIPTIONS, meta)


async def until_connected(clients: list[Client]) -> None:
    with anyio.fail_after(DEADLINE):
        for client in clients:
            assert client.task is not None
            connecting = asyncio.create_task(client.is_connected.wait())
            await asyncio.wait({connecting, client.task}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                connecting.cancel()
                client.task.result()
                raise AssertionError(f"{client.name} could not connect")
