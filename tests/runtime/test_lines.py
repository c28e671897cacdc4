"""Lines on real pipes and sockets: whole, in order, and with bounded buffers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

import pytest

from tests.support.waiting import DEADLINE, until
from tidings.runtime import lines
from tidings.runtime.lines import BATCH_INTERVAL, LineReader, LineWriter

pytestmark = pytest.mark.anyio
BUFFERS = 1 << 21
"""Bytes: more than a writer, a reader and a pipe can hold."""

Ends: TypeAlias = tuple[int, int]
"""The descriptors to read from and to write to."""


@pytest.fixture(params=["pipe", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "pipe":
        reading, writing = os.pipe()
    else:
        left, right = socket.socketpair()
        reading, writing = left.detach(), right.detach()
    for end in (reading, writing):
        os.set_blocking(end, False)
    try:
        yield reading, writing
    finally:
        for end in (reading, writing):
            with suppress(OSError):  # the test closed it
                os.close(end)


def read_now(descriptor: int, most: int = 1 << 20) -> bytes:
    try:
        return os.read(descriptor, most)
    except BlockingIOError:
        return b""


def fill(descriptor: int) -> int:
    """Write until the pipe is full."""
    written = 0
    while True:
        try:
            written += os.write(descriptor, b"x" * 4095 + b"\n")
        except BlockingIOError:
            return written


def unexpected() -> None:
    raise AssertionError("this callback must not be called")


# Writing


@pytest.mark.parametrize("batched", [0.0, 0.9])
async def test_lines_arrive_whole_and_in_order(ends: Ends, batched: float) -> None:
    """`batched` is the share of batched lines."""
    reading, writing = ends
    dice = random.Random(7)
    lines = [b"%d %s\n" % (number, b"y" * dice.choice((0, 300, 3000, 100_000))) for number in range(500)]
    writer = LineWriter(writing, unexpected)
    found = bytearray()
    waits = 0

    def read() -> None:
        found.extend(read_now(reading, dice.choice((1, 100, 70_000))))

    for line in lines:
        free = asyncio.Event()
        if dice.random() < batched:
            has_room = writer.write_batched(line, free.set)
        elif not (has_room := writer.write(line)):
            writer.call_when_free(free.set)
        assert has_room is not writer.is_full
        if not has_room:
            waits += 1
            await until(free.is_set, action=read)
        if dice.random() < 0.2:
            await asyncio.sleep(0)
    await until(lambda: len(found) == sum(map(len, lines)), action=read)
    assert bytes(found) == b"".join(lines)
    assert waits, "the writer was never full"


@pytest.fixture
def packets() -> Iterator[tuple[socket.socket, int]]:
    """A socket that keeps the data of each system call separate, and the descriptor to write to."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right.fileno()


async def test_lines_of_one_turn_of_the_loop_are_written_with_one_system_call(
    packets: tuple[socket.socket, int],
) -> None:
    left, writing = packets
    writer = LineWriter(writing, unexpected)
    for number in range(500):
        assert writer.write(b"%d\n" % number)
    with pytest.raises(BlockingIOError):
        left.recv(1)  # nothing before the end of the turn
    await writer.until_empty()
    assert left.recv(1 << 20) == b"".join(b"%d\n" % number for number in range(500))


async def test_batched_lines_are_written_together_or_with_the_next_other_line(
    packets: tuple[socket.socket, int],
) -> None:
    left, writing = packets
    writer = LineWriter(writing, unexpected)
    count = 3000
    found: list[bytes] = []

    def read() -> None:
        with suppress(BlockingIOError):
            found.append(left.recv(1 << 20))

    start = time.monotonic()
    for number in range(count):
        writer.write_batched(b"%d\n" % number, unexpected)
        await asyncio.sleep(0)
        read()
        if number == 1:
            assert found[0] == b"0\n"  # the first line does not wait
    writer.write(b"not batched\n")
    await until(lambda: found[-1].endswith(b"not batched\n"), action=read)
    assert b"".join(found) == b"".join(b"%d\n" % number for number in range(count)) + b"not batched\n"
    assert len(found) <= (time.monotonic() - start) / BATCH_INTERVAL + 2


async def test_writer_is_full_if_the_other_side_does_not_read_and_calls_back_later(ends: Ends) -> None:
    reading, writing = ends
    writer = LineWriter(writing, unexpected)
    freed: list[str] = []
    line = b"z" * 999 + b"\n"
    count = 0
    while writer.write_batched(line, lambda: freed.append("first")):
        count += 1
        assert count * len(line) < BUFFERS, "the writer is never full"
    assert writer.is_full
    assert not writer.write_batched(line, lambda: freed.append("second"))
    await asyncio.sleep(0)
    assert not freed

    found = bytearray()
    await until(lambda: len(freed) == 2, action=lambda: found.extend(read_now(reading, 500)))
    assert freed == ["first", "second"]
    assert not writer.is_full
    await until(lambda: len(found) == (count + 2) * len(line), action=lambda: found.extend(read_now(reading)))
    assert bytes(found) == line * (count + 2)


async def test_each_read_of_the_other_side_restarts_the_read_timeout(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, timeout = asyncio.get_running_loop(), 1234.5
    call_later = loop.call_later
    timers: list[asyncio.TimerHandle] = []

    def spy(delay: float, *args: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *args)
        timers.extend([timer] if delay == timeout else [])
        return timer

    monkeypatch.setattr(loop, "call_later", spy)
    reading, writing = ends
    writer = LineWriter(writing, unexpected)
    size = 2 * BUFFERS
    for _ in range(size // 10_000 + 1):
        writer.write(b"d" * 9_999 + b"\n")
    writer.set_read_timeout(timeout)
    await until(lambda: not writer.is_full, action=lambda: read_now(reading, 5_000))
    assert len(timers) > 10
    assert [timer.cancelled() for timer in timers[:-1]] == [True] * (len(timers) - 1)
    await until(lambda: all(timer.cancelled() for timer in timers), action=lambda: read_now(reading))


# Reading


class Server:
    """Answers each line that starts with `answer`, and leaves the others for `take()`."""

    def __init__(self, reading: int, writer: LineWriter) -> None:
        self.answered: list[bytes] = []
        self.ended = 0
        self.writer = writer
        self.reader = LineReader(reading, self._answer, writer, self._on_end)

    def _answer(self, line: bytes) -> bool:
        if line.startswith(b"answer"):
            self.answered.append(line)
            self.writer.write(line + b"\n")
            return True
        return False

    def _on_end(self) -> None:
        self.ended += 1

    def take(self) -> Awaitable[bytes | None]:
        return asyncio.wait_for(self.reader.take(), DEADLINE)


@pytest.fixture
async def server(ends: Ends) -> Server:
    return Server(ends[0], LineWriter(os.open(os.devnull, os.O_WRONLY), unexpected))


async def test_lines_are_taken_whole_and_in_order(ends: Ends, server: Server) -> None:
    dice = random.Random(11)
    lines = [b"%d %s" % (number, b"e" * dice.choice((0, 5, 200_000))) for number in range(60)] + [b"", b"end\r"]
    text = b"\n".join(lines) + b"\nunfinished"

    async def write() -> None:
        rest = memoryview(text)
        while rest:
            try:
                rest = rest[os.write(ends[1], rest[: dice.choice((1, 7, 100_000))]) :]
            except BlockingIOError:
                pass
            await asyncio.sleep(0)
        os.close(ends[1])

    writing = asyncio.create_task(write())
    for line in (*lines, b"unfinished", None, None):
        assert await server.take() == line
    assert server.ended == 1
    await writing


async def test_line_that_is_too_long_is_refused_and_the_next_one_is_read(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 100_000)
    unread, writing = os.pipe()
    writer = LineWriter(writing, unexpected)
    server = Server(ends[0], writer)
    rest = memoryview(b"g" * 100_000 + b"\n" + b"h" * 1_000_000 + b"\nnext\n")

    async def write(rest: memoryview) -> None:
        while rest:
            with suppress(BlockingIOError):
                rest = rest[os.write(ends[1], rest) :]
            await asyncio.sleep(0)

    writing_task = asyncio.create_task(write(rest))
    assert await server.take() == b"g" * 100_000
    assert await server.take() == b"next"
    await writing_task
    await writer.until_empty()
    answer = json.loads(os.read(unread, 1 << 16))
    assert answer["error"]["code"] == -32600
    assert "more than 100000 bytes" in answer["error"]["message"]
    for end in (unread, writing):
        os.close(end)


async def test_answered_line_is_not_taken(ends: Ends, server: Server) -> None:
    os.write(ends[1], b"one\nanswer two\nthree\nanswer four\n")
    os.close(ends[1])
    assert [await server.take() for _ in range(3)] == [b"one", b"three", None]
    assert server.answered == [b"answer two", b"answer four"]


async def test_reader_stops_reading_while_its_lines_are_not_taken(ends: Ends, server: Server) -> None:
    written = 0
    for _ in range(1000):
        written += fill(ends[1])
        await asyncio.sleep(0)
    assert written < 2 * BUFFERS
    for _ in range(written // 4096):
        assert await server.take() == b"x" * 4095


async def test_reader_answers_nothing_while_the_writer_is_full(ends: Ends) -> None:
    unread, writing = os.pipe()
    os.set_blocking(unread, False)
    os.set_blocking(writing, False)
    writer = LineWriter(writing, unexpected)
    server = Server(ends[0], writer)
    request = b"answer " + b"f" * 1000
    written = 0
    for _ in range(3000):
        try:
            written += os.write(ends[1], request + b"\n")
        except BlockingIOError:
            pass
        await asyncio.sleep(0)
    assert len(server.answered) * len(request) < BUFFERS
    assert written < 2 * BUFFERS
    assert writer.is_full

    count = written // (len(request) + 1)
    found = bytearray()
    await until(lambda: len(found) == count * (len(request) + 1), action=lambda: found.extend(read_now(unread)))
    assert len(server.answered) == count
    os.close(writing)
    os.close(unread)
