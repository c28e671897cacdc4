"""The parser of server-sent events: the rules of the HTML standard, whatever the chunks are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.wire.sse import Event, EventParser

STREAM = """: a comment
event: overview
id: 7
data: {"a":
data:  1}

data:no space

event: ignored without data

retry: 5
id: 8
data:

data: last

data: has no end"""
EVENTS = [
    Event(b'{"a":\n 1}', "overview", "7"),
    Event(b"no space", "message", "7"),
    Event(b"", "message", "8"),
    Event(b"last", "message", "8"),
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_events_are_the_same_for_all_chunks_and_line_ends(end: bytes, data: st.DataObject) -> None:
    stream = STREAM.encode().replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    parser = EventParser()

    chunks = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert [event for chunk in chunks for event in parser.feed(chunk)] == EVENTS
