"""The shortest way for lines that are not pressing keeps all that the longer one promises."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator

import pytest

from tests.support.waiting import DEADLINE, until
from tidings.stdio.lines import LineWriter

pytestmark = pytest.mark.anyio


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def read_now(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return b""


def nobody() -> None:
    raise AssertionError("nobody waits in this test, and nothing is lost")


async def test_all_arrive_in_order_whichever_way_each_went(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    dice = random.Random(3)
    lines = [b"%d %s\n" % (number, b"y" * dice.choice((0, 300, 3000))) for number in range(2000)]
    writer = LineWriter(writing, nobody)
    found = bytearray()
    waits = 0

    def read() -> None:
        found.extend(read_now(reading))

    for line in lines:
        free = asyncio.Event()
        give = writer.put if dice.random() < 0.9 else writer.write
        has_room = give(line, free.set)
        assert has_room is not writer.is_full
        if not has_room:
            # As everybody does: nothing more until there is room.
            waits += 1
            await until(free.is_set, DEADLINE, doing=read)
        if dice.random() < 0.2:
            await asyncio.sleep(0)
        if dice.random() < 0.01:
            read()
    await until(lambda: len(found) == sum(map(len, lines)), DEADLINE, doing=read)
    assert found == b"".join(lines)
    assert waits, "it was never full"


async def test_who_does_not_read_is_waited_for_and_the_call_comes_later(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LineWriter(writing, nobody)
    freed: list[int] = []
    count = 0
    while writer.put(b"x" * 999 + b"\n", lambda: freed.append(1)):
        count += 1
        assert count < 1000, "a writer without a reader is full some time"
        await asyncio.sleep(0)
    assert not freed
    async with asyncio.timeout(DEADLINE):
        while not freed:
            read_now(reading)
            await asyncio.sleep(0)
    assert freed == [1]


async def test_who_writes_much_in_one_moment_is_told_as_well(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    writer = LineWriter(writing, nobody)
    writer.put(b"first\n", nobody)
    await writer.until_empty()
    count = 0
    while writer.put(b"x" * 999 + b"\n", lambda: None):
        count += 1
        assert count < 1000, "a writer without a reader is full some time"
    assert writer.is_full


async def test_a_closed_writer_keeps_nothing(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    writer = LineWriter(writing, nobody)
    for number in range(100):
        writer.put(b"%d\n" % number, nobody)
        await asyncio.sleep(0)
    writer.close()
    for number in range(100):
        assert writer.put(b"%d\n" % number, nobody)
        await asyncio.sleep(0)
    assert not writer._lines
    assert not writer._size
