"""Server processes, and clients that speak HTTP by hand: what a well-behaved client never does, these can."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from tests.support.waiting import DEADLINE
from tidings.core.model import Feature, Operation, Version
from tidings.testing import Changed

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = "TIDINGS_FAULTS"
WATCHED = "board://watched"
"""The only URI that a broken `authorize` lets through."""
MODERN = "2026-07-28"
LEGACY = "2025-11-25"
PATIENCE = DEADLINE
"""Seconds that anything may take which is expected to happen soon: only a failure meets it."""
START = 100.0
"""Seconds that a process may take to start, which on a busy machine is no failure."""


class Settings(msgspec.Struct):
    policy: dict[str, Any] = {}
    options: dict[str, Any] = {}
    """Of the server's own app."""
    is_lowlevel: bool = False
    lists_fail: str = ""
    """"hang", or anything else to raise: what the low-level server does when it is asked for its tools."""
    is_broken: bool = False
    """Everything of the user's that Tidings calls raises: authorize, hooks, callbacks, sinks, and lists on demand."""
    has_middleware: bool = False
    """A middleware of the user's own in the SDK's chain, so that every request has to go through it."""
    is_guarded: bool = False
    """Every token is somebody else's, and `authorize` is asked for each of their topics."""
    is_wrapped: bool = False
    """Behind a middleware that gives the app a `receive` of its own, as Starlette's `BaseHTTPMiddleware` does."""
    folder: str = ""
    """Where it keeps its state, and finds the `OPERATIONS` that earlier processes carried out. Each change is in the
    `RECORD` there before anybody is told."""


OPERATIONS, RECORD, STATE = "operations.json", "record.jsonl", "state.db"
"""Files of `Settings.folder`."""


How = Literal["asgi", "uvicorn", "run", "stdio"]
"""`asgi` is uvicorn with another parser, under which nothing is parked: as any ASGI server is to us."""
HTTP: tuple[How, ...] = ("asgi", "run")
"""The two fronts that the same tests run over."""
COMMANDS: dict[How, list[str]] = {
    "asgi": ["-m", "uvicorn", "--http", "h11", "--port", "0", "tests.support.faults.app:app"],
    "uvicorn": ["-m", "uvicorn", "--port", "0", "tests.support.faults.app:app"],
    "run": ["-m", "tests.support.faults.app", "http"],
    "stdio": ["-m", "tests.support.faults.app", "stdio"],
}


class Process:
    """A server in a process of its own, with what it wrote to standard error."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.port = 0
        self.log: list[str] = []
        self._grew = asyncio.Condition()

    async def follow(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._grew:
                self.log.append(re.sub(r"\s+", " ", line.decode(errors="replace")))
                self._grew.notify_all()
        async with self._grew:
            self._grew.notify_all()

    async def logged(self, pattern: str, times: int = 1, within: float = PATIENCE) -> list[re.Match[str]]:
        """Wait until so many lines of the log match."""

        def found() -> list[re.Match[str]]:
            return [match for line in self.log if (match := re.search(pattern, line))]

        async with asyncio.timeout(within), self._grew:
            await self._grew.wait_for(lambda: len(found()) >= times)
        return found()

    def errors(self) -> list[str]:
        return [line for line in self.log if "Traceback" in line or "Exception in ASGI" in line or "ERROR" in line]

    async def state(self, *, is_deep: bool = False) -> dict[str, Any]:
        status, _, body = await request(self.port, "GET", "/state?deep" if is_deep else "/state")
        assert status == 200, body
        state: dict[str, Any] = json.loads(body)
        return state

    async def change(self, *operations: dict[str, Any]) -> None:
        status, _, body = await request(self.port, "POST", "/change", body=list(operations))
        assert status == 200, body

    async def until(self, is_so: Callable[[dict[str, Any]], bool], *, is_deep: bool = False) -> dict[str, Any]:
        """Look inside until it is as it should be. Each look is a request, so this never spins."""
        deadline = time.monotonic() + PATIENCE
        while not is_so(state := await self.state(is_deep=is_deep)):
            assert time.monotonic() < deadline, f"still after {PATIENCE} s: {state}\n" + "\n".join(self.log[-20:])
        return state

    def rss(self) -> int:
        """Bytes of the process that are in memory now."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208  # a count, no paths

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait_for_exit(self, within: float) -> float:
        """Seconds that the process waited for anything, until it is gone. To compute in the meantime takes it less
        than all that it has done before, on whatever machine."""
        watch, before = Watch(self.pid), computed(self.pid)
        total = before
        async with asyncio.timeout(within):
            ending = asyncio.ensure_future(self.process.wait())
            while not (await asyncio.wait([ending], timeout=0.02))[0]:
                watch.look()
                total = max(total, computed(self.pid))
        assert total - before <= before, f"it computed for {total - before:.2f} s, after {before:.2f} s until then"
        return watch.waited()


class Watch:
    """Tells how long a process waits, from now on: for a timer, a peer, a lock. The time in which it computes is not in
    it, nor that in which it has no core: both are the machine's."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self._before = self._busy = busy(pid)

    def look(self) -> None:
        """Again and again: what a process has done is no longer known when it is gone."""
        self._busy = max(self._busy, busy(self._pid))

    def waited(self) -> float:
        return time.monotonic() - self._began - (self._busy - self._before)


def busy(pid: int) -> float:
    """Seconds that the first thread of a process, where our event loops are, has computed or was ready to and had no
    core, as far as the system knows it; 0 once it is gone."""
    seconds = computed(pid)
    with suppress(OSError, IndexError):
        seconds += int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    return seconds


def computed(pid: int) -> float:
    """Seconds of CPU that this thread has taken; 0 once it is gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def environment(settings: Settings) -> dict[str, str]:
    # Rich, which the SDK logs with, would break lines at the width of a terminal.
    return {**os.environ, "COLUMNS": "1000", ENVIRONMENT: msgspec.json.encode(settings).decode()}


@asynccontextmanager
async def serve(how: How, settings: Settings | None = None) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE if how == "stdio" else asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *COMMANDS[how],
        cwd=ROOT,
        env=environment(settings or Settings()),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    process = Process(child)
    following = asyncio.create_task(process.follow())
    try:
        if how != "stdio":
            (match, *_) = await process.logged(r"running on http://127\.0\.0\.1:(\d+)", within=START)
            process.port = int(match[1])
        yield process
    finally:
        if child.returncode is None:
            child.kill()
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()
        await following
        for writer in _opened.pop(process.port, []):
            writer.close()
        child._transport.close()  # type: ignore[attr-defined]  # else it warns when it is collected


# HTTP by hand


def encode(method: str, path: str, headers: Mapping[str, str], body: Any = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    fields = {"host": "127.0.0.1:80", "content-length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def request(
    port: int, method: str, path: str, headers: Mapping[str, str] | None = None, body: Any = None
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(encode(method, path, {"connection": "close", **(headers or {})}, body))
            status, fields = await _read_head(reader)
            if "content-length" in fields:
                content = await reader.readexactly(int(fields["content-length"]))
            else:
                content = await reader.read()
            return status, fields, content
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), fields


def envelope(
    method: str, request_id: int | str, params: dict[str, Any] | None = None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A request of the modern protocol."""
    meta = {
        **(meta or {}),
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "by hand", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": {**(params or {}), "_meta": meta}}


ALL: dict[str, Any] = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}


def listen_request(
    request_id: int | str, wanted: Mapping[str, Any] = ALL, meta: Mapping[str, Any] | None = None, **headers: str
) -> bytes:
    return modern_request("subscriptions/listen", request_id, {"notifications": wanted}, meta, **headers)


def modern_request(
    method: str,
    request_id: int | str,
    params: dict[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    **more: str,
) -> bytes:
    headers = {
        **more,
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": MODERN,
        "mcp-method": method,
    }
    if params and "name" in params:
        headers["mcp-name"] = params["name"]
    return encode("POST", "/mcp", headers, envelope(method, request_id, params, meta))


async def open_session(port: int) -> str:
    """The handshake of a legacy client; returns the id of its session."""
    opening = {
        "jsonrpc": "2.0",
        "id": 0,
        "method": "initialize",
        "params": {
            "protocolVersion": LEGACY,
            "capabilities": {},
            "clientInfo": {"name": "by hand", "version": "1"},
        },
    }
    headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    status, fields, body = await request(port, "POST", "/mcp", headers, opening)
    assert status == 200, body
    session_id = fields["mcp-session-id"]
    headers |= {"mcp-session-id": session_id, "mcp-protocol-version": LEGACY}
    done = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    status, _, body = await request(port, "POST", "/mcp", headers, done)
    assert status == 202, body
    return session_id


async def close_session(port: int, session_id: str) -> None:
    headers = {"mcp-session-id": session_id, "mcp-protocol-version": LEGACY}
    status, _, body = await request(port, "DELETE", "/mcp", headers)
    assert status == 200, body


def get_request(session_id: str, last_event_id: str | None = None) -> bytes:
    headers = {"accept": "text/event-stream", "mcp-session-id": session_id, "mcp-protocol-version": LEGACY}
    if last_event_id is not None:
        headers["last-event-id"] = last_event_id
    return encode("GET", "/mcp", headers)


_opened: dict[int, list[asyncio.StreamWriter]] = {}
"""Connections of streams, by the server's port: whatever a test did, they are closed with its server."""


class Stream:
    """A streamed response, read event by event."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._text = b""
        self.status = 0
        self.is_terminated = False
        """Whether the last chunk came: the response ended as HTTP says it must."""

    @classmethod
    async def open(cls, port: int, sent: bytes) -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        stream = cls(reader, writer)
        _opened.setdefault(port, []).append(writer)
        writer.write(sent)
        stream.status, _ = await _read_head(reader)
        return stream

    async def event(self) -> dict[str, Any] | None:
        """The next message, or None at the end of the stream. Comments are passed over."""
        while True:
            while b"\r\n\r\n" in self._text:
                block, self._text = self._text.split(b"\r\n\r\n", 1)
                for line in block.split(b"\r\n"):
                    if line.startswith(b"data: {"):
                        message: dict[str, Any] = json.loads(line[6:])
                        return message
            size = await self._reader.readline()
            if not size:
                return None
            chunk = await self._reader.readexactly(int(size, 16) + 2)
            if len(chunk) == 2:
                self.is_terminated = True
                return None
            self._text += chunk[:-2]

    async def rest(self) -> list[dict[str, Any]]:
        events = []
        while (event := await self.event()) is not None:
            events.append(event)
        return events

    def half_close(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()


async def listen(port: int, request_id: int | str, wanted: Mapping[str, Any] = ALL) -> Stream:
    """A listen stream whose acknowledgement was read."""
    stream = await Stream.open(port, listen_request(request_id, wanted))
    assert stream.status == 200, stream.status
    acknowledged = await stream.event()
    assert acknowledged is not None
    assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
    return stream


# Clients that misbehave


def connect_unread(port: int, sent: bytes) -> socket.socket:
    """A client that never reads, with a small buffer, so that little has to be sent until it is full."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(sent)
    return client


_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""The filter program `ret 0`."""


def drop_packets(client: socket.socket) -> None:
    """From now on the client's machine does not answer at all, not even with an acknowledgement: a cut cable."""
    program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


async def is_cut(client: socket.socket) -> bool:
    """Read what is left, and wait for the end or the reset. False if the connection is still open after a while."""
    loop = asyncio.get_running_loop()
    client.setblocking(False)
    try:
        async with asyncio.timeout(PATIENCE):
            while await loop.sock_recv(client, 1 << 20):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def changed(row: list[Any]) -> tuple[int, Changed]:
    """A change as the server's record has it, and when it was made."""
    at, feature, key, version, previous, operation, before, after = row
    topic = Feature(feature) if feature else key
    return at, Changed(topic, Version(*version), Version(*previous), Operation(operation), key, before, after)
