"""A server on the standard input and output of its process.

The SDK uses a worker thread, a task and a queue for each direction. This module replaces its streams:

* Lines are read and written on the event loop.
* Notifications are written as encoded bytes.
* A list that has not changed is answered with the bytes of the SDK's last response.
* A line that is not a JSON-RPC message is answered with an error.
* All other messages go through the SDK, in order.
* When the input ends, everything that was read is answered before the process exits.

The descriptors are claimed as the SDK claims them, so the output of a tool goes to standard error.

Windows, and servers with their own stdio loop (FastMCP), use the streams of the SDK.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import mcp_types as types
import msgspec
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from pydantic_core import from_json

from tidings.core.frames import ACKNOWLEDGED_METHOD, SUBSCRIPTION_KEY, encode_tag
from tidings.runtime.lines import LineReader, LineWriter
from tidings.runtime.shutdown import ANSWER_REST, END_STREAMS, STDIO_DEADLINE, exit_process, on_signals
from tidings.sdk import internals
from tidings.server.garbage_collection import freeze_objects, restored_gc_settings
from tidings.server.list_cache import ListCache
from tidings.server.sessions import NotificationStream
from tidings.wire.envelope import DECODE_ERRORS, RESPONSE_HEAD, decode_request, error_response, tail_of_response
from tidings.wire.methods import CANCELLED

__all__ = ["StdioConnection", "run_stdio"]

logger = logging.getLogger(__name__)

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

        run = _Run(serve, stop)
        # The handlers stay until the threads of tools have ended: the exit functions may be running meanwhile.
        with on_signals(run.on_signal):
            try:
                anyio.run(run.run, backend_options={"use_uvloop": find_spec("uvloop") is not None})
            except KeyboardInterrupt:
                sys.exit(130)


class _Run:
    """The event loop of the server, which the first signal ends."""

    def __init__(self, serve: Callable[[], Any], stop: Callable[[], None]) -> None:
        self._serve = serve
        self._stop = stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._signal: int | None = None
        self._is_ending = False

    def on_signal(self, number: int) -> None:
        self._signal = self._signal or number
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._signal is not None:  # before the loop ran
            self._end()
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            exit_process(128 + self._signal)

    def _end(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        assert self._loop is not None
        assert self._task is not None
        assert self._signal is not None
        self._stop()
        self._loop.call_later(END_STREAMS, self._task.cancel)
        self._loop.call_later(STDIO_DEADLINE, exit_process, 128 + self._signal)


@contextmanager
def _claim_descriptors(server: Any) -> Iterator[tuple[int, int] | None]:
    """Return the descriptors to read and write lines on, or None if the SDK or the server has to do it.

    They are released after the event loop and its threads have ended, so that the last output of a thread does not
    reach the client.
    """
    run = getattr(type(server), "run_stdio_async", None)
    uses_sdk_stdio = run in (None, MCPServer.run_stdio_async)
    if uses_sdk_stdio and sys.platform != "win32" and _is_original(sys.stdin, 0) and _is_original(sys.stdout, 1):
        with internals.claim_stdio() as (stdin, stdout), _non_blocking(stdin, stdout):
            yield stdin, stdout
    else:
        yield None


def _is_original(stream: Any, descriptor: int) -> bool:
    """Return whether a standard stream was not replaced."""
    try:
        return bool(stream.buffer.fileno() == descriptor)
    except (AttributeError, OSError, ValueError):
        return False


@contextmanager
def _non_blocking(*descriptors: int) -> Iterator[None]:
    """Make descriptors non-blocking, and restore their mode: other processes share it.

    Terminals stay as they are, because the shell and others use the same one at the same time."""
    before = {each: os.get_blocking(each) for each in descriptors if not os.isatty(each)}
    for descriptor in before:
        os.set_blocking(descriptor, False)
    try:
        yield
    finally:
        for descriptor, is_blocking in before.items():
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
        self._unanswered: Counter[str | int] = Counter()
        """The requests that the SDK is handling, by id: a client may use one twice."""
        self._unhandled = 0
        """The number of notifications that the SDK is handling."""
        self._progress = asyncio.Event()
        """Set when a message was handled."""
        self._exit_timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Serve until the client closes its end and everything that it sent is answered."""
        options = self._lowlevel.create_initialization_options()
        self._lowlevel.middleware.insert(0, self._count_notifications)
        try:
            await self._lowlevel.run(_ReadStream(self), self, options)
            if self._exit_timer is not None:
                self._exit_timer.cancel()
            await self._writer.until_empty()
        finally:
            self._lowlevel.middleware.remove(self._count_notifications)
            self._reader.close()
            self._writer.flush()
            self._writer.close()

    def on_handshake(self) -> None:
        self._handshakes += 1
        self._pending.clear()

    # The messages of the client

    async def receive(self) -> SessionMessage | None:
        """Return the next message for the SDK; None after the end of the input, when all messages are handled."""
        while True:
            line = await self._reader.take()
            if line is None:
                if await self._wait_for_progress():
                    continue
                self._exit_timer = asyncio.get_running_loop().call_later(STDIO_DEADLINE, self._exit)
                return None
            text = line.decode(errors="replace")
            try:
                message = types.jsonrpc_message_adapter.validate_json(text, by_name=False)
            except ValueError:
                self._refuse(text)
                continue
            if isinstance(message, types.JSONRPCRequest):
                self._unanswered[message.id] += 1
                pending = self._pending.get(message.id)
                if pending is not None and pending.line is not line:
                    del self._pending[message.id]  # the SDK now gets another request with this id
            elif isinstance(message, types.JSONRPCNotification):
                if '"id"' in text and "id" in from_json(text):  # an invalid id, for example null or 1.5
                    self._refuse(text)
                    continue
                self._unhandled += 1
                cancelled = (message.params or {}).get("requestId") if message.method == CANCELLED else None
                if isinstance(cancelled, str | int):
                    self._unanswered.pop(cancelled, None)
            return SessionMessage(message)

    async def _count_notifications(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Count the notifications that are handled, as MCP middleware: the SDK does not answer them."""
        try:
            return await call_next(ctx)
        finally:
            if ctx.request_id is None:
                self._unhandled -= 1
                self._progress.set()

    async def _wait_for_progress(self) -> bool:
        """Wait until a message was handled. Return False if all are, or the rest takes too long."""
        if self._writer.is_closed or not (self._unhandled or self._unanswered):
            return False
        self._progress.clear()
        try:
            async with asyncio.timeout(ANSWER_REST):
                await self._progress.wait()
        except TimeoutError:
            return False
        return True

    def _exit(self) -> None:
        """Answer the calls that still run with an error, and exit."""
        logger.warning("standard input has ended, but calls still run; exiting without them")
        for request_id in self._unanswered:
            self._write_error(request_id, types.CONNECTION_CLOSED, "The input ended before the call did")
        self._writer.flush()
        exit_process(0)

    def _refuse(self, text: str) -> None:
        """Answer a line that is not a JSON-RPC message, unless it is blank, a response or a notification."""
        if not text.strip():
            return
        request_id: Any = None
        code = types.INVALID_REQUEST
        reason = "Invalid request: not a message of JSON-RPC 2.0"
        is_answered = True
        try:
            value = from_json(text)
        except ValueError as error:
            code, reason = types.PARSE_ERROR, f"Parse error: {error}"
        else:
            if isinstance(value, list):
                reason = "Invalid request: batches are not supported; write each message on its own line"
            elif isinstance(value, dict):
                request_id = value.get("id")
                is_answered = "id" in value if "method" in value else not value.keys() & {"result", "error"}
        logger.warning("a line of standard input was refused: %s: %.200r", reason, text)
        if is_answered:
            is_id = isinstance(request_id, str | int) and not isinstance(request_id, bool)
            self._write_error(request_id if is_id else None, code, reason)

    def _write_error(self, request_id: str | int | None, code: int, reason: str) -> None:
        self._writer.write(error_response(request_id, code, reason) + b"\n")

    # The interface of a write stream

    async def send(self, item: SessionMessage) -> None:
        if self._writer.is_closed:
            raise anyio.BrokenResourceError
        message = item.message
        line = _encode(message)
        self._count_answer(message)
        if isinstance(message, types.JSONRPCResponse) and self._ask_again(message, line):
            return
        if self._writer.write(line):
            await anyio.lowlevel.checkpoint()
        else:
            await self._writer.until_free()

    async def aclose(self) -> None:
        """Do nothing: unwritten lines must still be written."""

    def _count_answer(self, message: types.JSONRPCMessage) -> None:
        """Count a request as answered, if the message answers one."""
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            request_id: Any = message.id
        elif isinstance(message, types.JSONRPCNotification) and message.method == ACKNOWLEDGED_METHOD:
            request_id = (message.params or {})["_meta"][SUBSCRIPTION_KEY]  # the end of the stream is not awaited
        else:
            return
        self._unanswered[request_id] -= 1
        if self._unanswered[request_id] <= 0:
            del self._unanswered[request_id]
        self._progress.set()

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
        elif "nextCursor" not in response.result and (tail := tail_of_response(line, encode_tag(response.id))):
            self._lists.store(pending.key, pending.state, RESPONSE_HEAD, tail, [], response.result)
        self._pending.pop(response.id, None)
        return False

    # The end of the connection

    def _on_lost(self) -> None:
        self._reader.end()
        self._progress.set()

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


def _encode(message: types.JSONRPCMessage) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"


class _ReadStream(ObjectReceiveStream[SessionMessage]):
    """The read stream of the SDK."""

    def __init__(self, connection: StdioConnection) -> None:
        self._connection = connection

    async def receive(self) -> SessionMessage:
        message = await self._connection.receive()
        if message is None:
            raise anyio.EndOfStream
        return message

    async def aclose(self) -> None:
        """Do nothing: the connection stops reading when the SDK returns."""
