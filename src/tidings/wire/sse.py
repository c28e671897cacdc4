"""Server-sent events, parsed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple

__all__ = ["Event", "read_events"]

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    data: bytes
    """Empty in an event that only gives an id."""
    name: str = "message"


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Yield the events of the body of a response."""
    name, data = "", list[bytes]()
    async for line in _read_lines(chunks):
        field, _, value = line.partition(b":")  # a comment has an empty field
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").decode(errors="replace")
        elif not line:
            if data:
                yield Event(b"\n".join(data), name or "message")
            name, data = "", []


async def _read_lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    unfinished: list[bytes] = []
    ends_with_return = False
    async for chunk in chunks:
        first, *others = _LINE_END.split(chunk.removeprefix(b"\n") if ends_with_return else chunk)
        ends_with_return = chunk.endswith(b"\r") if chunk else ends_with_return
        unfinished.append(first)
        for line in others:
            yield b"".join(unfinished)
            unfinished = [line]
