"""stdio: a server on the standard input and output of its process.

The SDK reads and writes through a worker thread, a task and a queue each way. Where both descriptors are pipes or
sockets, its streams here are lines on the event loop instead. Notifications go out as ready bytes, and a list that the
SDK has answered since the last change is answered from what it said then; everything else goes through the SDK, in
order. The descriptors are claimed as the SDK claims them: what a tool prints goes to standard error.

Not for a server with a way of its own to run on stdio, as FastMCP has, nor for a file or a terminal: those run on the
SDK's own streams, and their notifications through its outbound queue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import anyio
import anyio.lowlevel
import mcp_types as types
import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage

from tidings.core.frames import encode_tag
from tidings.http.request_checks import LISTS, UNREADABLE
from tidings.server import internals as seams
from tidings.server.garbage_collection import spare, sparing
from tidings.stdio.lines import LineReader, LineWriter
from tidings.stdio.process_exit import leave

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Wire", "run_stdio"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_HEAD = b'{"jsonrpc":"2.0","id":'

_LONGEST_LIST_REQUEST = 8192
"""Bytes. Longer ones are not worth a look; the usual one has 300."""

_MOST_ASKED = 64
"""List requests whose answer is looked out for. One that its client cancels never gets any."""

_MOST_TRIES = 3
"""How often the SDK is asked for one list. One that changes all the time has to be answered as it was, once."""


def run_stdio(live: Live) -> None:
    """Serve one client on standard input and output."""
    with _lines_of(live) as lines, sparing():
        spare()
        try:
            anyio.run(_serve, live, lines, backend_options={"use_uvloop": find_spec("uvloop") is not None})
        except KeyboardInterrupt:
            sys.exit(130)


async def _serve(live: Live, lines: tuple[int, int] | None) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stopped: list[int] = []

    def stop(number: int) -> None:
        if stopped:
            return
        stopped.append(number)
        live.stop()
        # The results of the streams are written by their own tasks: a moment for those, then for what the server wants
        # to clean up. The SDK's thread that reads standard input can't be interrupted, and would keep the process until
        # the client's next line.
        if task is not None:
            loop.call_later(0.2, task.cancel)
        loop.call_later(1.2, leave, 128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        if lines is not None:
            await Wire(live, *lines).serve()
        elif hasattr(live.server, "run_stdio_async"):
            await live.server.run_stdio_async()
        else:
            async with stdio_server() as (read_stream, write_stream):
                await live.lowlevel.run(read_stream, write_stream, live.lowlevel.create_initialization_options())
    except asyncio.CancelledError:
        if not stopped:
            raise
        leave(128 + stopped[0])


@contextmanager
def _lines_of(live: Live) -> Iterator[tuple[int, int] | None]:
    """The descriptors to read and write lines on, if that is for us to do. They are given back when the event loop has
    ended with all its threads, so that the last word of none of those goes to the client."""
    own_way = getattr(type(live.server), "run_stdio_async", None)
    is_ours = own_way in (None, MCPServer.run_stdio_async)
    if is_ours and _can_be_polled(sys.stdin, 0) and _can_be_polled(sys.stdout, 1):
        with seams.claimed_stdio() as (stdin, stdout), _not_blocking(stdin, stdout):
            yield stdin, stdout
    else:
        yield None


def _can_be_polled(stream: Any, descriptor: int) -> bool:
    """Whether a standard stream is what the process was given, and a pipe or a socket. A terminal is shared with
    whoever else uses it, and must keep its mode; a file is always ready."""
    try:
        mode = os.fstat(stream.buffer.fileno()).st_mode
        is_its_own = stream.buffer.fileno() == descriptor
    except (AttributeError, OSError, ValueError):
        return False
    return is_its_own and sys.platform != "win32" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


@contextmanager
def _not_blocking(*descriptors: int) -> Iterator[None]:
    """The mode belongs to the pipe's end and not to us: a shell that started us would find it changed."""
    before = [os.get_blocking(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        for descriptor, is_blocking in zip(descriptors, before, strict=True):
            with suppress(OSError):
                os.set_blocking(descriptor, is_blocking)


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request as every client writes it. Any other goes to the SDK, to be refused or not."""

    jsonrpc: Literal["2.0"]
    id: int | str
    method: str
    params: msgspec.Raw = msgspec.Raw()


class _Asked(NamedTuple):
    """A list that the SDK was asked for."""

    line: bytes
    key: tuple[str, str]
    state: Hashable
    tries: int


class Wire:
    """One client's connection: what the SDK calls its write stream, and the lines behind it."""

    def __init__(self, live: Live, stdin: int, stdout: int) -> None:
        self._live = live
        self._writer = LineWriter(stdout, self._on_lost)
        self.put = self._writer.put
        """Write a notification; False if what is given to be called then has to be waited for before the next one."""
        self._reader = LineReader(stdin, self._answer, self._writer, self._on_end)
        self._handshakes = 0
        self._asked: dict[str | int, _Asked] = {}
        """By the request's id."""

    async def serve(self) -> None:
        """Until the client closes its end."""
        lowlevel = self._live.lowlevel
        try:
            await lowlevel.run(_Requests(self._reader, self), self, lowlevel.create_initialization_options())
            await self._writer.until_empty()
        finally:
            self._reader.close()
            self._writer.flush()
            self._writer.close()

    def renew(self) -> None:
        """A handshake: what was answered before it may have been in another version."""
        self._handshakes += 1
        self._asked.clear()

    def expect(self, request_id: str | int, line: bytes) -> None:
        """A request goes to the SDK. Its answer must not be taken for that of another one with the same id."""
        asked = self._asked.get(request_id)
        if asked is not None and asked.line is not line:
            del self._asked[request_id]

    # What the SDK calls

    async def send(self, item: SessionMessage) -> None:
        if self._writer.is_lost:
            raise anyio.BrokenResourceError
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        if isinstance(item.message, types.JSONRPCResponse) and not self._learn(item.message, line):
            return
        if self._writer.write(line + b"\n"):
            await anyio.lowlevel.checkpoint()
        else:
            await self._writer.until_free()

    async def aclose(self) -> None:
        """What was written is still on its way."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    # Lists

    def _answer(self, line: bytes) -> bool:
        """Answer a request whose answer is known; otherwise take note of it, if it is one to learn from."""
        if (b'/list"' not in line and b"server/discover" not in line) or len(line) > _LONGEST_LIST_REQUEST:
            return False
        live = self._live
        if live.steps_aside or not live.shares_lists:
            return False
        try:
            request = msgspec.json.decode(line, type=_Request)
        except UNREADABLE:
            return False
        if request.method not in LISTS:
            return False
        # The bytes of the params say it all: the same request as one that the SDK has answered gets the same answer.
        key = (request.method, f"stdio {self._handshakes} {bytes(request.params).hex()}")
        kept = live.lists.find(*key) if live.is_attended else None
        if kept is not None:
            self._writer.write(kept.head + encode_tag(request.id) + kept.tail)
            return True
        if _is_whole(request.params):
            before = self._asked.pop(request.id, None)
            if len(self._asked) >= _MOST_ASKED:
                del self._asked[next(iter(self._asked))]
            tries = before.tries + 1 if before is not None and before.line is line else 1
            self._asked[request.id] = _Asked(line, key, live.state_of(request.method), tries)
        return False

    def _learn(self, response: types.JSONRPCResponse, line: bytes) -> bool:
        """Keep what the SDK says of a list. False if that is no longer true, and it is asked again: the client may have
        been told of the change already, and would take this for the list after it."""
        asked = self._asked.get(response.id)
        if asked is None:
            return True
        if self._live.state_of(asked.key[0]) != asked.state:
            if asked.tries < _MOST_TRIES:
                self._reader.put(asked.line)
                return False
        elif "nextCursor" not in response.result:
            tag = msgspec.json.encode(response.id)
            if line.startswith(_HEAD + tag + b',"result":{'):
                self._live.lists.keep(asked.key, asked.state, _HEAD, line[len(_HEAD) + len(tag) :] + b"\n", [])
        self._asked.pop(response.id, None)
        return True

    # The ends

    def _on_lost(self) -> None:
        self._reader.end()

    def _on_end(self) -> None:
        # What is answered still goes out, but the process must not stay for somebody who has left without reading it.
        self._writer.hurry(self._live.policy.write_deadline)


def _is_whole(params: msgspec.Raw) -> bool:
    """Whether a list is asked for as a whole, and nothing else about it."""
    if not bytes(params):
        return True
    try:
        return set(msgspec.json.decode(params, type=dict[str, msgspec.Raw])) <= {"_meta"}
    except UNREADABLE:
        return False


class _Requests:
    """What the SDK calls its read stream."""

    def __init__(self, reader: LineReader, wire: Wire) -> None:
        self._reader = reader
        self._wire = wire

    async def receive(self) -> SessionMessage | Exception:
        line = await self._reader.take()
        if line is None:
            raise anyio.EndOfStream
        try:
            message = types.jsonrpc_message_adapter.validate_json(line.decode(errors="replace"), by_name=False)
        except Exception as error:  # as the SDK's own stream does it: the connection goes on
            return error
        if isinstance(message, types.JSONRPCRequest):
            self._wire.expect(message.id, line)
        return SessionMessage(message)

    async def aclose(self) -> None:
        self._reader.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
