"""The parser of server-sent events: the rules of the HTML standard, whatever the chunks are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.sse import Event, read_events

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
