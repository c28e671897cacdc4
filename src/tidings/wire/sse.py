"""Server-sent events, parsed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import NamedTuple

__all__ = ["Event", "EventParser", "read_events"]

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    data: bytes
    """Empty in an event that only gives an id."""
    name: str = "message"
    id: str = ""
    """The id of this event, or else of the last one before it that has an id."""


class EventParser:
    """Collects the chunks of one stream."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """The parts of the line that has not ended yet."""
        self._ends_with_return = False
        """Whether the last chunk ended with a carriage return. A newline that follows belongs to it."""
        self._data: list[bytes] = []
        self._name = ""
        self._id = ""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that end in this chunk."""
        if not chunk:
            return
        if self._ends_with_return:
            chunk = chunk.removeprefix(b"\n")
        self._ends_with_return = chunk.endswith(b"\r")
        first, *others = _LINE_END.split(chunk)
        self._line.append(first)
        for part in others:
            line, self._line = b"".join(self._line), [part]
            if line:
                self._add_field(line)
            else:
                yield from self._end()

    def _add_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has an empty name
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value.decode(errors="replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode(errors="replace")

    def _end(self) -> Iterator[Event]:
        data, name, self._data, self._name = self._data, self._name, [], ""
        if data:
            yield Event(b"\n".join(data), name or "message", self._id)


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Yield the events of the body of a response."""
    parser = EventParser()
    async for chunk in chunks:
        for event in parser.feed(chunk):
            yield event
