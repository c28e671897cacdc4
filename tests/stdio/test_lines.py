"""Lines on real pipes and sockets: whole, in order, bounded, and never in anybody's way."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from typing import TypeAlias

import pytest

from tests.support.waiting import DEADLINE, until
from tidings.stdio.lines import _MOMENT, LineReader, LineWriter

pytestmark = pytest.mark.anyio
HELD = 1 << 21
"""Bytes: more than a writer, a reader or a pipe may ever hold."""

Ends: TypeAlias = tuple[int, int]
"""Where to read, and where to write."""


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
    """Write until the pipe takes no more."""
    written = 0
    while True:
        try:
            written += os.write(descriptor, b"x" * 4095 + b"\n")
        except BlockingIOError:
            return written


def nobody() -> None:
    """For what must not happen in this test."""
    raise AssertionError("it was lost")


# Writing


async def test_lines_arrive_whole_and_in_order_however_they_are_read(ends: Ends) -> None:
    reading, writing = ends
    dice = random.Random(7)
    lines = [b"%d %s\n" % (number, b"y" * dice.choice((0, 10, 3000, 100_000))) for number in range(300)]
    writer = LineWriter(writing, nobody)
    found = bytearray()

    async def read() -> None:
        while len(found) < sum(map(len, lines)):
            found.extend(read_now(reading, dice.choice((1, 100, 70_000))))
            await asyncio.sleep(0)

    async with asyncio.timeout(DEADLINE):
        reader = asyncio.create_task(read())
        for line in lines:
            writer.write(line)
            if dice.random() < 0.5:
                await writer.until_free()
        await writer.until_empty()
        await reader
    assert bytes(found) == b"".join(lines)


async def test_what_is_written_in_one_turn_of_the_loop_is_one_system_call() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps one write apart from the next
    with left, right:
        right.setblocking(False)
        writer = LineWriter(right.fileno(), nobody)
        for number in range(500):
            assert writer.write(b"%d\n" % number)
        left.setblocking(False)
        with pytest.raises(BlockingIOError):
            left.recv(1)  # nothing before the turn is over
        await writer.until_empty()
        assert left.recv(1 << 20) == b"".join(b"%d\n" % number for number in range(500))


async def test_what_is_not_pressing_goes_together_and_with_the_next_that_is() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        writer = LineWriter(right.fileno(), nobody)
        count = 3000
        found: list[bytes] = []
        began = time.monotonic()
        for number in range(count):
            writer.write(b"%d\n" % number, is_pressing=False)
            await asyncio.sleep(0)
            with suppress(BlockingIOError):
                found.append(left.recv(1 << 20))
            if number == 1:
                assert found[0] == b"0\n"  # the first of a moment does not wait
        writer.write(b"pressing\n")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found.append(left.recv(1 << 20))
        assert b"".join(found) == b"".join(b"%d\n" % number for number in range(count)) + b"pressing\n"
        # One write in each moment, at most: where the machine is fast, some fifty lines.
        assert len(found) <= (time.monotonic() - began) / _MOMENT + 2


async def test_what_is_not_pressing_does_not_wait_for_anybody() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        right.setblocking(False)
        writer = LineWriter(right.fileno(), nobody)
        for number in range(3):
            writer.write(b"%d\n" % number, is_pressing=False)
            async with asyncio.timeout(DEADLINE):
                await writer.until_empty()
            assert left.recv(100) == b"%d\n" % number


async def test_a_reader_who_does_not_read_costs_a_bounded_buffer_and_is_told_of_when_it_reads(ends: Ends) -> None:
    reading, writing = ends
    writer = LineWriter(writing, nobody)
    freed: list[str] = []
    line = b"z" * 999 + b"\n"
    count = 0
    while writer.write(line, lambda: freed.append("first")):
        count += 1
        assert count * len(line) < HELD, "it never says that it is full"
    assert writer.is_full
    assert not writer.write(line, lambda: freed.append("second"))
    await asyncio.sleep(0)
    assert not freed

    found = bytearray()
    await until(lambda: len(freed) == 2, doing=lambda: found.extend(read_now(reading, 500)))
    assert freed == ["first", "second"]
    assert not writer.is_full
    await until(lambda: len(found) == (count + 2) * len(line), doing=lambda: found.extend(read_now(reading)))
    assert bytes(found) == line * (count + 2)


async def test_who_waits_for_room_is_never_called_from_within_a_write(ends: Ends) -> None:
    reading, writing = ends
    writer = LineWriter(writing, nobody)
    is_writing = True
    called: list[bool] = []
    while writer.write(b"a" * 9_999 + b"\n", lambda: called.append(is_writing)):
        pass
    while read_now(reading):
        pass
    writer.write(b"a\n", lambda: called.append(is_writing))
    is_writing = False
    await until(lambda: called, doing=lambda: read_now(reading))
    assert called == [False] * len(called)


async def test_a_reader_that_is_gone_is_noticed_once_and_nobody_waits_for_it(ends: Ends) -> None:
    reading, writing = ends
    lost: list[str] = []
    writer = LineWriter(writing, lambda: lost.append("lost"))
    freed: list[str] = []
    while writer.write(b"b" * 9_999 + b"\n", lambda: freed.append("free")):
        pass
    waiting = asyncio.gather(writer.until_free(), writer.until_empty())
    os.close(reading)
    async with asyncio.timeout(DEADLINE):
        await waiting
    assert (lost, freed) == (["lost"], ["free"])
    assert writer.is_lost
    assert writer.write(b"more\n")
    assert not writer.is_full


async def test_a_reader_who_reads_nothing_at_the_end_is_given_up(ends: Ends) -> None:
    reading, writing = ends
    lost: list[str] = []
    writer = LineWriter(writing, lambda: lost.append("lost"))
    while writer.write(b"c" * 9_999 + b"\n"):
        pass
    writer.hurry(0.05)
    async with asyncio.timeout(DEADLINE):
        await writer.until_empty()
    assert lost == ["lost"]
    assert read_now(reading)


async def test_so_is_one_whose_pipe_was_full_when_nothing_waited_for_it_yet(ends: Ends) -> None:
    lost: list[str] = []
    writer = LineWriter(ends[1], lambda: lost.append("lost"))
    fill(ends[1])
    writer.hurry(0.05)
    writer.write(b"answer\n")
    async with asyncio.timeout(DEADLINE):
        await writer.until_empty()
    assert lost == ["lost"]


async def test_a_reader_who_reads_slowly_at_the_end_gets_it_all(ends: Ends) -> None:
    """However long all of it takes: whatever it reads gives it the whole time anew."""
    reading, writing = ends
    writer = LineWriter(writing, nobody)
    count = 2 * HELD // 10_000  # so much that it goes out in many parts
    for _ in range(count):
        writer.write(b"d" * 9_999 + b"\n")
    writer.hurry(DEADLINE)
    found, deadlines = 0, [when_given_up(writer)]
    async with asyncio.timeout(DEADLINE):
        while found < count * 10_000:
            unwritten = writer._size
            found += len(read_now(reading, 5_000))
            await asyncio.sleep(0)
            if 0 < writer._size < unwritten:
                deadlines.append(when_given_up(writer))
                assert deadlines[-1] > deadlines[-2]
    assert len(deadlines) > 1
    assert writer._deadline is None  # nothing is left to be read


def when_given_up(writer: LineWriter) -> float:
    assert writer._deadline is not None
    return writer._deadline.when()


# Reading


class Desk:
    """A reader whose lines of the form `answer …` are answered at once."""

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
async def desk(ends: Ends) -> Desk:
    return Desk(ends[0], LineWriter(os.open(os.devnull, os.O_WRONLY), nobody))


async def test_lines_are_taken_in_order_however_they_come(ends: Ends, desk: Desk) -> None:
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
        assert await desk.take() == line
    assert desk.ended == 1
    await writing


async def test_what_is_answered_at_once_is_not_taken(ends: Ends, desk: Desk) -> None:
    os.write(ends[1], b"one\nanswer two\nthree\nanswer four\n")
    os.close(ends[1])
    assert [await desk.take() for _ in range(3)] == [b"one", b"three", None]
    assert desk.answered == [b"answer two", b"answer four"]


async def test_lines_that_nobody_takes_are_left_where_they_are(ends: Ends, desk: Desk) -> None:
    written = 0
    for _ in range(1000):  # turns of the loop, in which it could go on reading
        written += fill(ends[1])
        await asyncio.sleep(0)
    assert written < 2 * HELD
    for _ in range(written // 4096):
        assert await desk.take() == b"x" * 4095


async def test_nothing_is_answered_while_the_answers_are_not_read(ends: Ends) -> None:
    unread, writing = os.pipe()
    os.set_blocking(unread, False)
    os.set_blocking(writing, False)
    writer = LineWriter(writing, nobody)
    desk = Desk(ends[0], writer)
    asked = b"answer " + b"f" * 1000
    written = 0
    for _ in range(3000):
        try:
            written += os.write(ends[1], asked + b"\n")
        except BlockingIOError:
            pass
        await asyncio.sleep(0)
    # No more than the pipes, the reader and the writer hold.
    assert len(desk.answered) * len(asked) < HELD
    assert written < 2 * HELD
    assert writer.is_full

    count = written // (len(asked) + 1)
    found = bytearray()
    await until(lambda: len(found) == count * (len(asked) + 1), doing=lambda: found.extend(read_now(unread)))
    assert len(desk.answered) == count
    os.close(writing)
    os.close(unread)


async def test_the_end_is_noticed_although_nothing_can_be_answered(ends: Ends) -> None:
    unread, writing = os.pipe()
    os.set_blocking(writing, False)
    writer = LineWriter(writing, lambda: None)
    while writer.write(b"g" * 9_999 + b"\n"):
        pass
    desk = Desk(ends[0], writer)
    os.write(ends[1], b"answer me\nand me\n")
    os.close(ends[1])
    await until(lambda: desk.ended)
    taking = asyncio.ensure_future(desk.take())
    await asyncio.sleep(0)
    assert not taking.done()

    writer.close()  # they will not be answered
    assert await taking == b"and me"
    assert await desk.take() is None
    os.close(writing)
    os.close(unread)
