"""Server processes, and clients that write HTTP themselves, so that they can misbehave."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from mcp.client.stdio import StdioServerParameters

from tests.support.forking import ENVIRONMENT as FORK_ENVIRONMENT
from tests.support.forking import ROOT, forked_command
from tests.support.messages import (
    ACCEPT_BOTH,
    INITIALIZED,
    LATEST_LEGACY,
    initialize,
    modern_headers,
    modern_message,
)
from tests.support.promises.history import Changed
from tests.support.waiting import DEADLINE
from tidings.core.model import Feature, Operation, Version

ENVIRONMENT = "TIDINGS_FAULTS"
WATCHED = "board://watched"
"""The only URI that a broken `authorize` lets through."""
TIMEOUT = DEADLINE
"""Seconds for one wait. Only a failure reaches it."""
START = 100.0
"""Seconds for the start of a process, which may be slow on a busy machine."""


class Settings(msgspec.Struct):
    policy: dict[str, Any] = {}
    options: dict[str, Any] = {}
    """Options of the HTTP app."""
    is_lowlevel: bool = False
    lists_fail: str = ""
    """The behaviour of `tools/list` of the low-level server: "hang", or any other text to raise."""
    is_broken: bool = False
    """Everything that the user passes to Tidings raises: authorize, hooks, callbacks and sinks."""
    has_middleware: bool = False
    """The user has a middleware in the SDK, so that every request must pass it."""
    is_guarded: bool = False
    """Each token is a different principal, and `authorize` is called for each topic."""
    is_wrapped: bool = False
    """The app is behind a middleware that replaces `receive`, as Starlette's `BaseHTTPMiddleware` does."""
    folder: str = ""
    """The folder of its state and of the `OPERATIONS` of earlier processes. Each change is written to `RECORD` there
    before any notification is sent."""
    cluster: str = ""
    """The URL of NATS, if the server is a replica. It has no store then."""
    port: int = 0


OPERATIONS, RECORD, STATE = "operations.json", "record.jsonl", "state.db"
"""Files of `Settings.folder`."""


How = Literal["asgi", "uvicorn", "run", "stdio"]
"""`asgi` is uvicorn with a parser under which no stream is parked, as with any other ASGI server."""
HTTP: tuple[How, ...] = ("asgi", "run")
"""The two ways to serve that the same tests run on."""
COMMANDS: dict[How, list[str]] = {
    "asgi": ["-m", "uvicorn", "--http", "h11", "--port", "0", "tests.support.faults.app:app"],
    "uvicorn": ["-m", "uvicorn", "--port", "0", "tests.support.faults.app:app"],
    "run": ["-m", "tests.support.faults.app", "http"],
    "stdio": ["-m", "tests.support.faults.app", "stdio"],
}


class Process:
    """A server in its own process, and its output on standard error."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        """The id of the server process. `process` may only start it and wait for it."""
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

    async def logged(self, pattern: str, times: int = 1, within: float = TIMEOUT) -> list[re.Match[str]]:
        """Wait until the log has this many lines that match."""

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

    async def record(self, start: int) -> list[Any]:
        """Return the changes from the nth on; `changed` reads a row."""
        _, _, body = await request(self.port, "GET", f"/record?start={start}")
        rows: list[Any] = json.loads(body)
        return rows

    async def change(self, *operations: dict[str, Any]) -> int:
        """Make these changes, and return the revision of the catalog."""
        status, _, body = await request(self.port, "POST", "/change", body=list(operations))
        assert status == 200, body
        return int(body)

    async def until(self, condition: Callable[[dict[str, Any]], bool], *, is_deep: bool = False) -> dict[str, Any]:
        """Request the state until it meets the condition. Each check is a request, so this loop does not spin."""
        deadline = time.monotonic() + TIMEOUT
        while not condition(state := await self.state(is_deep=is_deep)):
            assert time.monotonic() < deadline, f"still after {TIMEOUT} s: {state}\n" + "\n".join(self.log[-20:])
        return state

    def rss(self) -> int:
        """Return the resident memory of the process in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))  # noqa: PTH208  # a count, no paths

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def wait_for_exit(self, within: float) -> float:
        """Wait for the exit; return the seconds that the process waited without computing.

        Check also that the exit took less CPU time than everything before it, which holds on any machine.
        """
        watch, before = WaitMeter(self.pid), computed(self.pid)
        total = before
        async with asyncio.timeout(within):
            ending = asyncio.ensure_future(self.process.wait())
            while not (await asyncio.wait([ending], timeout=0.02))[0]:
                watch.sample()
                total = max(total, computed(self.pid))
        assert total - before <= before, f"it computed for {total - before:.2f} s, after {before:.2f} s until then"
        return watch.waited()


class WaitMeter:
    """Measures how long a process waits for timers, peers and locks from now on.

    The time in which it computes, or is ready but has no core, does not count: both depend on the machine.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = time.monotonic()
        self._before = self._busy = busy(pid)

    def sample(self) -> None:
        """Measure again. Call this repeatedly, because the times are lost when the process is gone."""
        self._busy = max(self._busy, busy(self._pid))

    def waited(self) -> float:
        return time.monotonic() - self._began - (self._busy - self._before)


def busy(pid: int) -> float:
    """Return the seconds in which the main thread of a process computed, or was ready but had no core.

    The event loop runs on the main thread. Return 0 if the process is gone.
    """
    seconds = computed(pid)
    with suppress(OSError, IndexError):
        seconds += int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    return seconds


def computed(pid: int) -> float:
    """Return the CPU seconds of the main thread of a process, or 0 if it is gone."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def environment(settings: Settings) -> dict[str, str]:
    # The SDK logs with Rich, which breaks lines at the width of the terminal.
    return {**os.environ, **FORK_ENVIRONMENT, "COLUMNS": "1000", ENVIRONMENT: msgspec.json.encode(settings).decode()}


def stdio_server(settings: Settings) -> StdioServerParameters:
    """Return the parameters with which a client of the SDK starts a server."""
    command, *arguments = forked_command(*COMMANDS["stdio"])
    return StdioServerParameters(command=command, args=arguments, env=environment(settings))


@asynccontextmanager
async def serve(how: How, settings: Settings | None = None) -> AsyncIterator[Process]:
    pipe = asyncio.subprocess.PIPE if how == "stdio" else asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(
        *forked_command(*COMMANDS[how]),
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
        (match, *_) = await process.logged(r"Started server process \[(\d+)\]", within=START)
        process.pid = int(match[1])
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
    """Send one request on a new connection."""
    async with asyncio.timeout(TIMEOUT):
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
    headers = more | modern_headers(method, params)
    return encode("POST", "/mcp", headers, modern_message(method, request_id, params, meta))


async def open_session(port: int) -> str:
    """Do the handshake of a legacy client; return the id of its session."""
    status, fields, body = await request(port, "POST", "/mcp", ACCEPT_BOTH, initialize())
    assert status == 200, body
    session_id = fields["mcp-session-id"]
    status, _, body = await request(port, "POST", "/mcp", ACCEPT_BOTH | session_headers(session_id), INITIALIZED)
    assert status == 202, body
    return session_id


async def close_session(port: int, session_id: str) -> None:
    status, _, body = await request(port, "DELETE", "/mcp", session_headers(session_id))
    assert status == 200, body


def session_headers(session_id: str) -> dict[str, str]:
    return {"mcp-session-id": session_id, "mcp-protocol-version": LATEST_LEGACY}


def get_request(session_id: str, last_event_id: str | None = None) -> bytes:
    headers = {"accept": "text/event-stream", **session_headers(session_id)}
    if last_event_id is not None:
        headers["last-event-id"] = last_event_id
    return encode("GET", "/mcp", headers)


_opened: dict[int, list[asyncio.StreamWriter]] = {}
"""The connections of streams, by the port of the server. They are closed with the server."""


class Stream:
    """A streamed response, read event by event."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._text = b""
        self.status = 0
        self.is_terminated = False
        """Whether the last chunk came, so that the response is complete."""

    @classmethod
    async def open(cls, port: int, sent: bytes) -> Stream:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        stream = cls(reader, writer)
        _opened.setdefault(port, []).append(writer)
        writer.write(sent)
        stream.status, _ = await _read_head(reader)
        return stream

    async def event(self) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the stream. Skip comments."""
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
    """Open a listen stream, and read its acknowledgement."""
    stream = await Stream.open(port, listen_request(request_id, wanted))
    assert stream.status == 200, stream.status
    acknowledged = await stream.event()
    assert acknowledged is not None
    assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
    return stream


# Clients that misbehave


def connect_unread(port: int, sent: bytes) -> socket.socket:
    """Connect a client that never reads. Its buffer is small, so that it is soon full."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(sent)
    return client


_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""The filter program `ret 0`."""


def drop_packets(client: socket.socket) -> None:
    """Drop all packets to the client, so that it does not even acknowledge them, as with a cut cable."""
    program = struct.pack("HP", 1, ctypes.addressof(_DROP_ALL))
    client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


async def is_cut(client: socket.socket) -> bool:
    """Read the rest, and return whether the connection ends or is reset before the deadline."""
    loop = asyncio.get_running_loop()
    client.setblocking(False)
    try:
        async with asyncio.timeout(TIMEOUT):
            while await loop.sock_recv(client, 1 << 20):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def changed(row: list[Any]) -> tuple[int, Changed]:
    """Return the time and the change of a row of the record."""
    at, feature, key, version, previous, operation, before, after = row
    topic = Feature(feature) if feature else key
    return at, Changed(topic, Version(*version), Version(*previous), Operation(operation), key, before, after)
