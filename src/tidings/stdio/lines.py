"""Lines on two descriptors, read and written on the event loop without ever waiting.

Written lines go out whole and in order, all those of one turn of the loop in one system call, and those that are not
pressing once in a moment. What the other side does not read is bounded: a writer that is full says so, and tells when
it no longer is; meanwhile nothing is answered, and who goes on asking waits in its own pipe. Nobody is cut off: on a
pipe, the other side owns the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable

__all__ = ["LineReader", "LineWriter"]

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
"""Bytes to read at once: what a pipe holds by default."""

_MOST_UNREAD = 1 << 16
"""Bytes that may wait to be written before a writer is full: as much again as the pipe itself holds."""

_MOMENT = 0.001
"""Seconds between two writes of lines that may wait for others to go with them."""

_MOST_HELD = 1 << 20
"""Bytes of lines that may wait to be looked at. Far more than the pipe holds: a client that asks for a thousand things
before it reads the first answer must not be stuck with us waiting for each other."""

_MOST_UNTAKEN = 64
"""Lines that may wait to be taken: whoever takes them starts a task for each, and must not be far behind."""


class LineWriter:
    """Takes every line, and says when it should be given no more for a while."""

    def __init__(self, descriptor: int, on_lost: Callable[[], None]) -> None:
        """`descriptor` must not block. `on_lost` is called once, when nobody can read any more."""
        self._descriptor = descriptor
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._lines: list[bytes] = []
        self._rest = memoryview(b"")
        """What of the lines before was not taken by the pipe."""
        self._size = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._emptied: asyncio.Future[None] | None = None
        self._patience: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_due = False
        self._flushed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_blocked = False
        self.is_lost = False

    @property
    def is_full(self) -> bool:
        return self._size >= _MOST_UNREAD

    def write(self, line: bytes, on_free: Callable[[], None] | None = None, *, is_pressing: bool = True) -> bool:
        """Write a line that ends with its newline: in this turn of the loop, or with others of the same moment if it is
        not pressing. False if the writer is full now: `on_free` is called once it is not, never from within this
        call."""
        if self.is_lost:
            return True
        self._lines.append(line)
        self._size += len(line)
        if self._size < _MOST_UNREAD:
            if is_pressing or self._timer is None:
                self._plan(is_pressing=is_pressing)
            return True
        # Who writes much in one turn of the loop must not wait for the next one.
        if not self._is_blocked:
            self._push()
            if self._size < _MOST_UNREAD:
                return True
        if on_free is not None:
            self.when_free(on_free)
        return False

    def put(self, line: bytes, on_free: Callable[[], None]) -> bool:
        """`write` for a line that is not pressing: the shortest way where it follows another of the same moment."""
        size = self._size + len(line)
        if self._timer is None or size >= _MOST_UNREAD:
            return self.write(line, on_free, is_pressing=False)
        self._lines.append(line)
        self._size = size
        return True

    def when_free(self, callback: Callable[[], None]) -> None:
        """Call back as soon as there is room, after all who asked before."""
        self._waiting.append(callback)
        if not self._is_blocked:
            self._plan()

    async def until_free(self) -> None:
        if self.is_full:
            future: asyncio.Future[None] = self._loop.create_future()
            self.when_free(lambda: None if future.done() else future.set_result(None))
            await future

    async def until_empty(self) -> None:
        if self._size:
            self._emptied = self._loop.create_future()
            await self._emptied

    def hurry(self, patience: float) -> None:
        """From now on, give up on a reader that reads nothing for so many seconds."""
        self._patience = patience
        self._set_deadline()

    def flush(self) -> None:
        """Write what can be written now."""
        self._is_due = False
        self._stop_timer()
        self._flushed = self._loop.time()
        if self._size and not self.is_lost:
            self._push()
        while self._waiting and not self.is_full:
            self._waiting.popleft()()

    def close(self) -> None:
        """Stop, whatever was not written."""
        self.is_lost = True
        self._stop_timer()
        self._lines.clear()
        self._rest = memoryview(b"")
        self._size = 0
        self._push()
        self._set_deadline()
        self._plan()

    def _lose(self) -> None:
        self.close()
        self._on_lost()

    def _set_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._patience is not None and self._size:
            self._deadline = self._loop.call_later(self._patience, self._lose)

    def _plan(self, *, is_pressing: bool = True) -> None:
        if self._is_blocked or self._is_due:
            return
        wait = 0.0 if is_pressing else self._flushed + _MOMENT - self._loop.time()
        if wait > 0:
            self._timer = self._loop.call_later(wait, self.flush)
        else:
            self._is_due = True
            self._loop.call_soon(self.flush)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _push(self) -> None:
        while self._size:
            if not self._rest:
                self._rest = memoryview(b"".join(self._lines))
                self._lines.clear()
            try:
                written = os.write(self._descriptor, self._rest)
            except BlockingIOError:
                self._block(True)
                if self._deadline is None:  # nothing waited when the hurry began
                    self._set_deadline()
                return
            except OSError as error:  # the reader is gone, or the connection
                logger.debug("standard output can't be written to any more: %r", error)
                self._lose()
                return
            self._rest = self._rest[written:]
            self._size -= written
            self._set_deadline()
        self._block(False)
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _block(self, is_blocked: bool) -> None:
        if is_blocked is not self._is_blocked:
            self._is_blocked = is_blocked
            if is_blocked:
                self._loop.add_writer(self._descriptor, self.flush)
            else:
                self._loop.remove_writer(self._descriptor)


class LineReader:
    """Offers each line to `answer` first, and keeps those that it does not take for `take()`."""

    def __init__(
        self, descriptor: int, answer: Callable[[bytes], bool], writer: LineWriter, on_end: Callable[[], None]
    ) -> None:
        """`descriptor` must not block. While `writer` is full, no line is looked at. `on_end` is called once, when the
        other side will write no more."""
        self._descriptor = descriptor
        self._answer = answer
        self._writer = writer
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        """The line that has not ended yet."""
        self._lines: deque[bytes] = deque()
        """Those that nobody has looked at yet."""
        self._size = 0
        self._untaken: deque[bytes] = deque()
        self._taker: asyncio.Future[None] | None = None
        self._is_reading = False
        self._is_waiting = False
        self._is_over = False
        self._go_on()

    async def take(self) -> bytes | None:
        """The next line that was not answered; None when there will be none."""
        while not self._untaken:
            if self._is_over and not self._lines:
                return None
            self._taker = self._loop.create_future()
            try:
                await self._taker
            finally:
                self._taker = None
        line = self._untaken.popleft()
        if self._lines and not self._is_waiting:
            self._go_on()
        return line

    def put(self, line: bytes) -> None:
        """Take a line as if it had just been read."""
        if not self._answer(line):
            self._untaken.append(line)
            self._rouse()

    def end(self) -> None:
        """Read no more, as if the other side had closed."""
        if not self._is_over:
            self._is_over = True
            self._set_reading(False)
            self._rouse()
            self._on_end()

    def close(self) -> None:
        """Read no more, and forget what was."""
        self._lines.clear()
        self._untaken.clear()
        self.end()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:  # a socket that was reset
            logger.debug("standard input can't be read any more: %r", error)
            data = b""
        if not data:
            # A last line may lack its newline.
            self._lines.extend([b"".join(self._pieces)] if self._pieces else [])
            self.end()
        else:
            *lines, rest = data.split(b"\n")
            if lines and self._pieces:
                lines[0] = b"".join((*self._pieces, lines[0]))
                self._pieces.clear()
            if rest:
                self._pieces.append(rest)
            self._lines.extend(lines)
            self._size += sum(map(len, lines))
        if not self._is_waiting:
            self._go_on()
        elif self._size >= _MOST_HELD:
            self._set_reading(False)

    def _go_on(self) -> None:
        """Look at lines for as long as their answers can be written, and those without one are taken."""
        self._is_waiting = False
        while self._lines and len(self._untaken) < _MOST_UNTAKEN:
            if self._writer.is_full:
                self._is_waiting = True
                self._writer.when_free(self._go_on)
                break
            line = self._lines.popleft()
            self._size -= len(line)
            self.put(line)
        self._rouse()
        self._set_reading(not self._is_over and self._size < _MOST_HELD)

    def _set_reading(self, is_reading: bool) -> None:
        if is_reading is not self._is_reading:
            self._is_reading = is_reading
            if is_reading:
                self._loop.add_reader(self._descriptor, self._read)
            else:
                self._loop.remove_reader(self._descriptor)

    def _rouse(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)
