"""A server on the standard input and output of its process.

The SDK uses a worker thread, a task and a queue for each direction. If both descriptors are pipes or sockets, this
module replaces its streams:

* Lines are read and written on the event loop.
* Notifications are written as encoded bytes.
* A list that has not changed is answered with the bytes of the SDK's last response.
* All other messages go through the SDK, in order.

The descriptors are claimed as the SDK claims them, so the output of a tool goes to standard error.

Files and terminals, and servers with their own stdio loop (FastMCP), use the streams of the SDK.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import mcp_types as types
import msgspec
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage

from tidings.core.frames import encode_tag
from tidings.server import internals
from tidings.server.garbage_collection import freeze_objects, restored_gc_settings
from tidings.server.list_cache import RESPONSE_HEAD, ListCache
from tidings.server.methods import DECODE_ERRORS, decode_request
from tidings.server.process_exit import exit_process
from tidings.server.sessions import NotificationStream
from tidings.stdio.lines import LineReader, LineWriter

__all__ = ["StdioConnection", "run_stdio"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_STREAM_TIMEOUT = 0.2
"""Seconds after a signal for the tasks that write the results of listen streams."""

_CLEANUP_TIMEOUT = 1.2
"""Seconds after a signal until the process exits. The SDK's thread that reads standard input can't be interrupted, and
would keep the process until the next line of the client."""

_MAX_LIST_REQUEST = 8192
"""Bytes. A longer line is not decoded twice, here and by the SDK; a typical list request has 300."""

_MAX_PENDING = 64
"""List requests whose response is awaited. A cancelled request never gets one."""

_MAX_TRIES = 3
"""Requests to the SDK for one list while it changes. After that, the client gets the last response."""


def run_stdio(
    server: Any, lowlevel: Server[Any], lists: ListCache, write_deadline: float, stop: Callable[[], None]
) -> None:
    """Serve one client on standard input and output. `stop` is called on SIGTERM and SIGINT."""
    with _claim_descriptors(server) as descriptors, restored_gc_settings():
        freeze_objects()

        async def serve() -> None:
            if descriptors is not None:
                await StdioConnection(lowlevel, lists, write_deadline, *descriptors).serve()
            elif hasattr(server, "run_stdio_async"):
                await server.run_stdio_async()
            else:
                async with stdio_server() as (read_stream, write_stream):
                    await lowlevel.run(read_stream, write_stream, lowlevel.create_initialization_options())

        try:
            anyio.run(_serve, serve, stop, backend_options={"use_uvloop": find_spec("uvloop") is not None})
        except KeyboardInterrupt:
            sys.exit(130)


async def _serve(serve: Callable[[], Any], stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        if signals:
            return
        signals.append(number)
        stop()
        if task is not None:
            loop.call_later(_STREAM_TIMEOUT, task.cancel)
        loop.call_later(_CLEANUP_TIMEOUT, exit_process, 128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await serve()
    except asyncio.CancelledError:
        if not signals:
            raise
        exit_process(128 + signals[0])


@contextmanager
def _claim_descriptors(server: Any) -> Iterator[tuple[int, int] | None]:
    """Return the descriptors to read and write lines on, or None if the SDK or the server has to do it.

    They are released after the event loop and its threads have ended, so that the last output of a thread does not
    reach the client.
    """
    run = getattr(type(server), "run_stdio_async", None)
    uses_sdk_stdio = run in (None, MCPServer.run_stdio_async)
    if uses_sdk_stdio and _can_be_polled(sys.stdin, 0) and _can_be_polled(sys.stdout, 1):
        with internals.claim_stdio() as (stdin, stdout), _non_blocking(stdin, stdout):
            yield stdin, stdout
    else:
        yield None


def _can_be_polled(stream: Any, descriptor: int) -> bool:
    """Return whether a standard stream was not replaced, and is a pipe or a socket.

    Other processes use the same terminal, so its mode must not change. A file is always ready.
    """
    try:
        mode = os.fstat(stream.buffer.fileno()).st_mode
        is_original = stream.buffer.fileno() == descriptor
    except (AttributeError, OSError, ValueError):
        return False
    return is_original and sys.platform != "win32" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))


@contextmanager
def _non_blocking(*descriptors: int) -> Iterator[None]:
    """Make descriptors non-blocking, and restore their mode: other processes share it."""
    before = [os.get_blocking(descriptor) for descriptor in descriptors]
    for descriptor in descriptors:
        os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        for descriptor, is_blocking in zip(descriptors, before, strict=True):
            with suppress(OSError):
                os.set_blocking(descriptor, is_blocking)


class _PendingList(NamedTuple):
    """A list request that the SDK is handling."""

    line: bytes
    key: tuple[str, str]
    state: Hashable
    tries: int


class StdioConnection(NotificationStream, ObjectSendStream[SessionMessage]):
    """The connection to one client. For the SDK it is the write stream."""

    def __init__(self, lowlevel: Server[Any], lists: ListCache, write_deadline: float, stdin: int, stdout: int) -> None:
        self._lowlevel = lowlevel
        self._lists = lists
        self._write_deadline = write_deadline
        self._writer = LineWriter(stdout, self._on_lost)
        self.write_notification = self._writer.write_batched
        self._reader = LineReader(stdin, self._answer, self._writer, self._on_end)
        self._handshakes = 0
        self._pending: dict[str | int, _PendingList] = {}
        """By request id."""

    async def serve(self) -> None:
        """Serve until the client closes its end."""
        options = self._lowlevel.create_initialization_options()
        try:
            await self._lowlevel.run(_ReadStream(self._reader, self._on_request), self, options)
            await self._writer.until_empty()
        finally:
            self._reader.close()
            self._writer.flush()
            self._writer.close()

    def on_handshake(self) -> None:
        self._handshakes += 1
        self._pending.clear()

    def _on_request(self, request_id: str | int, line: bytes) -> None:
        """Forget a pending list request with the same id, because the SDK now gets another request with this id."""
        pending = self._pending.get(request_id)
        if pending is not None and pending.line is not line:
            del self._pending[request_id]

    # The interface of a write stream

    async def send(self, item: SessionMessage) -> None:
        if self._writer.is_closed:
            raise anyio.BrokenResourceError
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        if isinstance(item.message, types.JSONRPCResponse) and self._ask_again(item.message, line):
            return
        if self._writer.write(line + b"\n"):
            await anyio.lowlevel.checkpoint()
        else:
            await self._writer.until_free()

    async def aclose(self) -> None:
        """Do nothing: unwritten lines must still be written."""

    # Lists

    def _answer(self, line: bytes) -> bool:
        """Answer a list request if its response is known. Otherwise remember it, to keep the response of the SDK."""
        if len(line) > _MAX_LIST_REQUEST:
            return False
        request = decode_request(line)
        if request is None or not self._lists.can_serve(request.method):
            return False
        # The same params as in a request that the SDK has answered have the same response.
        key = (request.method, f"stdio {self._handshakes} {bytes(request.params).hex()}")
        response = self._lists.find(*key)
        if response is not None:
            self._writer.write(response.head + encode_tag(request.id) + response.tail)
            return True
        if _has_only_meta(request.params):
            before = self._pending.pop(request.id, None)
            if len(self._pending) >= _MAX_PENDING:
                del self._pending[next(iter(self._pending))]
            tries = before.tries + 1 if before is not None and before.line is line else 1
            self._pending[request.id] = _PendingList(line, key, self._lists.state_of(request.method), tries)
        return False

    def _ask_again(self, response: types.JSONRPCResponse, line: bytes) -> bool:
        """Ask the SDK again for a list that has changed meanwhile, and return whether that was necessary.

        The client may already have the notification of the change, and would take this response for the new list. If
        the list has not changed, cache the response.
        """
        pending = self._pending.get(response.id)
        if pending is None:
            return False
        if self._lists.state_of(pending.key[0]) != pending.state:
            if pending.tries < _MAX_TRIES:
                self._reader.add(pending.line)
                return True
        elif "nextCursor" not in response.result:
            tag = msgspec.json.encode(response.id)
            if line.startswith(RESPONSE_HEAD + tag + b',"result":{'):
                tail = line[len(RESPONSE_HEAD) + len(tag) :] + b"\n"
                self._lists.store(pending.key, pending.state, RESPONSE_HEAD, tail, [])
        self._pending.pop(response.id, None)
        return False

    # The end of the connection

    def _on_lost(self) -> None:
        self._reader.end()

    def _on_end(self) -> None:
        # Responses are still written, but the process must not wait for a client that does not read them.
        self._writer.set_read_timeout(self._write_deadline)


def _has_only_meta(params: msgspec.Raw) -> bool:
    if not bytes(params):
        return True
    try:
        return set(msgspec.json.decode(params, type=dict[str, msgspec.Raw])) <= {"_meta"}
    except DECODE_ERRORS:
        return False


class _ReadStream(ObjectReceiveStream[SessionMessage | Exception]):
    """The read stream of the SDK."""

    def __init__(self, reader: LineReader, on_request: Callable[[str | int, bytes], None]) -> None:
        self._reader = reader
        self._on_request = on_request

    async def receive(self) -> SessionMessage | Exception:
        line = await self._reader.take()
        if line is None:
            raise anyio.EndOfStream
        try:
            message = types.jsonrpc_message_adapter.validate_json(line.decode(errors="replace"), by_name=False)
        except Exception as error:  # the SDK's own stream returns it, too, and continues
            return error
        if isinstance(message, types.JSONRPCRequest):
            self._on_request(message.id, line)
        return SessionMessage(message)

    async def aclose(self) -> None:
        self._reader.close()
