"""The parser of server-sent events: the rules of the HTML standard, whatever the chunks are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.sse import MAX_MESSAGE, Event, EventTooLong, read_events

STREAM = b""": a comment
event: overview
id: 7
data: {"a":
data:  1}

data:no space

event: ignored without data

data:

data: last

data: has no end"""
EVENTS = [Event(b'{"a":\n 1}', "overview"), Event(b"no space"), Event(b""), Event(b"last")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_events_are_the_same_for_all_chunks_and_line_ends(end: bytes, data: st.DataObject) -> None:
    stream = STREAM.replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))

    async def chunks() -> AsyncIterator[bytes]:
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            yield stream[start:stop]

    async def read() -> list[Event]:
        return [event async for event in read_events(chunks())]

    assert asyncio.run(read()) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_byte_order_mark_at_the_start_is_ignored(size: int) -> None:
    stream = b"\xef\xbb\xbfdata: first\n\ndata: \xef\xbb\xbfsecond\n\n"

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    async def read() -> list[Event]:
        return [event async for event in read_events(chunks())]

    assert asyncio.run(read()) == [Event(b"first"), Event(b"\xef\xbb\xbfsecond")]


@pytest.mark.parametrize("chunk", [b"x" * (1 << 20), b"data: " + b"x" * (1 << 20) + b"\n"])
def test_an_event_that_does_not_end_is_an_error(chunk: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(2 * MAX_MESSAGE // len(chunk)):
            yield chunk

    async def read() -> list[Event]:
        return [event async for event in read_events(chunks())]

    with pytest.raises(EventTooLong, match="an event of more than 64 MB"):
        asyncio.run(read())
