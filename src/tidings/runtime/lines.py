"""Lines on two file descriptors (pipes, sockets or files), read and written on the event loop without blocking.

Lines are written whole and in order, with one system call per turn of the event loop; notifications are collected for a
millisecond. Buffers are bounded: if the other side does not read, the writer is full and calls back when it has room
again. Meanwhile no request is answered, and further requests wait in the pipe. A slow reader is never disconnected,
because on a pipe the other side owns the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections import deque
from collections.abc import Callable

__all__ = ["MAX_LINE", "LineReader", "LineWriter"]

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
"""Bytes per read: the default size of a pipe."""

_MAX_UNWRITTEN = 1 << 16
"""Bytes that can wait before a writer is full: as much as the pipe itself holds."""

BATCH_INTERVAL = 0.001
"""Seconds between two writes of batched lines."""

_MAX_UNHANDLED = 1 << 20
"""Bytes of lines that can wait to be handled. This is much more than a pipe holds: if the other side sends a
thousand requests before it reads the first response, the two must not wait for each other."""

MAX_LINE = 16 << 20
"""Bytes of a line: four times what the SDK accepts over HTTP. Without a limit, an unfinished line takes all memory."""

_MAX_UNTAKEN = 64
"""Lines that can wait for `take()`. The caller starts a task for each one."""


class LineWriter:
    """Accepts every line, and reports when it is full."""

    def __init__(self, descriptor: int, on_lost: Callable[[], None]) -> None:
        """`descriptor` must be non-blocking. `on_lost` is called once, when the other side can no longer read."""
        self._descriptor = descriptor
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._lines: list[bytes] = []
        self._unwritten = memoryview(b"")
        """The rest of earlier lines that the pipe did not accept."""
        self._size = 0
        self._callbacks: deque[Callable[[], None]] = deque()
        self._empty: asyncio.Future[None] | None = None
        self._read_timeout: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_flush_scheduled = False
        self._flushed_at = 0.0
        self._batch_timer: asyncio.TimerHandle | None = None
        self._is_blocked = False
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        return self._size >= _MAX_UNWRITTEN

    def write(self, line: bytes) -> bool:
        """Write a line, with its newline, in this turn of the event loop. Return False if the writer is full now."""
        has_room = self._add(line)
        if has_room:
            self._schedule_flush()
        return has_room

    def write_batched(self, line: bytes, on_free: Callable[[], None]) -> bool:
        """Write a line together with the others of `BATCH_INTERVAL`, with one system call.

        Return False if the writer is full now. `on_free` is then called when it has room, never from within this call.
        """
        if not self._add(line):
            self.call_when_free(on_free)
            return False
        if self._batch_timer is None:
            self._schedule_flush(self._flushed_at + BATCH_INTERVAL - self._loop.time())
        return True

    def _add(self, line: bytes) -> bool:
        if self.is_closed:
            return True
        self._lines.append(line)
        self._size += len(line)
        if self._size >= _MAX_UNWRITTEN and not self._is_blocked:
            # Without waiting for the next turn of the loop, since much was written in this one.
            self._write_lines()
        return self._size < _MAX_UNWRITTEN

    def call_when_free(self, callback: Callable[[], None]) -> None:
        """Call back when there is room, in the order of these calls."""
        self._callbacks.append(callback)
        if not self._is_blocked:
            self._schedule_flush()

    async def until_free(self) -> None:
        if self.is_full:
            future: asyncio.Future[None] = self._loop.create_future()
            self.call_when_free(lambda: None if future.done() else future.set_result(None))
            await future

    async def until_empty(self) -> None:
        if self._size:
            self._empty = self._loop.create_future()
            await self._empty

    def set_read_timeout(self, seconds: float) -> None:
        """From now on, close if the other side reads nothing for this time."""
        self._read_timeout = seconds
        self._reset_deadline()

    def flush(self) -> None:
        """Write as much as possible now."""
        self._is_flush_scheduled = False
        self._cancel_batch_timer()
        self._flushed_at = self._loop.time()
        if self._size and not self.is_closed:
            self._write_lines()
        while self._callbacks and not self.is_full:
            self._callbacks.popleft()()

    def close(self) -> None:
        """Stop, and discard unwritten lines."""
        self.is_closed = True
        self._cancel_batch_timer()
        self._lines.clear()
        self._unwritten = memoryview(b"")
        self._size = 0
        self._write_lines()
        self._reset_deadline()
        self._schedule_flush()

    def _close_lost(self) -> None:
        self.close()
        self._on_lost()

    def _reset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._read_timeout is not None and self._size:
            self._deadline = self._loop.call_later(self._read_timeout, self._close_lost)

    def _schedule_flush(self, delay: float = 0.0) -> None:
        if self._is_blocked or self._is_flush_scheduled:
            return
        if delay > 0:
            self._batch_timer = self._loop.call_later(delay, self.flush)
        else:
            self._is_flush_scheduled = True
            self._loop.call_soon(self.flush)

    def _cancel_batch_timer(self) -> None:
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None

    def _write_lines(self) -> None:
        while self._size:
            if not self._unwritten:
                self._unwritten = memoryview(b"".join(self._lines))
                self._lines.clear()
            try:
                written = os.write(self._descriptor, self._unwritten)
            except BlockingIOError:
                self._set_blocked(True)
                if self._deadline is None:
                    self._reset_deadline()
                return
            except OSError as error:
                logger.debug("can't write to standard output: %r", error)
                self._close_lost()
                return
            self._unwritten = self._unwritten[written:]
            self._size -= written
            self._reset_deadline()
        self._set_blocked(False)
        if self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def _set_blocked(self, is_blocked: bool) -> None:
        if is_blocked is not self._is_blocked:
            self._is_blocked = is_blocked
            if is_blocked:
                self._loop.add_writer(self._descriptor, self.flush)
            else:
                self._loop.remove_writer(self._descriptor)


class LineReader:
    """Passes each line to `handle`, and keeps those that it does not handle for `take()`."""

    def __init__(
        self, descriptor: int, handle: Callable[[bytes], bool], writer: LineWriter, on_end: Callable[[], None]
    ) -> None:
        """`descriptor` must be non-blocking, or a file or terminal. While `writer` is full, no line is handled.
        `on_end` is called once, when the other side will write no more."""
        self._descriptor = descriptor
        self._can_be_polled = _can_be_polled(descriptor)
        self._next_read: asyncio.Handle | None = None
        """The next read of a descriptor that can't be polled."""
        self._handle = handle
        self._writer = writer
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._incomplete: list[bytes] = []
        """The parts of a line without its end."""
        self._incomplete_size = 0
        self._is_too_long = False
        """Whether the rest of the line is skipped, because it is longer than `MAX_LINE`."""
        self._lines: deque[bytes] = deque()
        """Lines that were not handled yet."""
        self._size = 0
        self._untaken: deque[bytes] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._is_reading = False
        self._is_waiting = False
        """Whether the writer is full."""
        self._is_ended = False
        self._handle_lines()

    async def take(self) -> bytes | None:
        """Return the next line that was not handled; None at the end."""
        while not self._untaken:
            if self._is_ended and not self._lines:
                return None
            self._taker = self._loop.create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        line = self._untaken.popleft()
        if self._lines and not self._is_waiting:
            self._handle_lines()
        return line

    def add(self, line: bytes) -> None:
        """Handle a line as if it had just been read."""
        if not self._handle(line):
            self._untaken.append(line)
            self._wake_taker()

    def end(self) -> None:
        """Stop reading, as if the other side had closed."""
        if not self._is_ended:
            self._is_ended = True
            self._set_reading(False)
            self._wake_taker()
            self._on_end()

    def close(self) -> None:
        """Stop reading, and discard all lines."""
        self._lines.clear()
        self._untaken.clear()
        self.end()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:  # for example a connection reset
            logger.debug("can't read from standard input: %r", error)
            data = b""
        if not data:
            # The last line can lack its newline.
            self._lines.extend([b"".join(self._incomplete)] if self._incomplete else [])
            self.end()
        else:
            *lines, rest = data.split(b"\n")
            if lines and self._is_too_long:
                del lines[0]  # the end of the line that was refused
                self._is_too_long = False
            elif lines and self._incomplete:
                lines[0] = b"".join((*self._incomplete, lines[0]))
                self._incomplete.clear()
            if rest and not self._is_too_long:
                self._incomplete_size = self._incomplete_size + len(rest) if self._incomplete else len(rest)
                self._incomplete.append(rest)
                if self._incomplete_size > MAX_LINE:
                    self._refuse_line()
            self._lines.extend(lines)
            self._size += sum(map(len, lines))
        if not self._is_waiting:
            self._handle_lines()
        elif self._size >= _MAX_UNHANDLED:
            self._set_reading(False)

    def _refuse_line(self) -> None:
        """Answer a line that is too long with an error. Its request id is unknown, because it was not parsed."""
        self._incomplete.clear()
        self._is_too_long = True
        logger.warning("refused a line on standard input with more than %d bytes", MAX_LINE)
        self._writer.write(
            b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":'
            b'"A message has more than %d bytes, the limit on stdio; send less in one message"}}\n' % MAX_LINE
        )

    def _handle_lines(self) -> None:
        """Handle lines while the responses can be written and the other lines are taken."""
        self._is_waiting = False
        while self._lines and len(self._untaken) < _MAX_UNTAKEN:
            if self._writer.is_full:
                self._is_waiting = True
                self._writer.call_when_free(self._handle_lines)
                break
            line = self._lines.popleft()
            self._size -= len(line)
            self.add(line)
        self._wake_taker()
        self._set_reading(not self._is_ended and self._size < _MAX_UNHANDLED)

    def _set_reading(self, is_reading: bool) -> None:
        if is_reading is not self._is_reading:
            self._is_reading = is_reading
            if not self._can_be_polled:
                if self._next_read is not None:
                    self._next_read.cancel()
                self._next_read = self._loop.call_soon(self._read_file) if is_reading else None
            elif is_reading:
                self._loop.add_reader(self._descriptor, self._read)
            else:
                self._loop.remove_reader(self._descriptor)

    def _read_file(self) -> None:
        self._is_reading = False
        self._read()

    def _wake_taker(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)


def _can_be_polled(descriptor: int) -> bool:
    """Return whether the event loop can wait for data. It can't for files and `/dev/null`: a read never waits."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)
