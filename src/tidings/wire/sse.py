"""Server-sent events, parsed."""

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final, NamedTuple

from tidings.errors import TidingsError

__all__ = ["MAX_MESSAGE", "Event", "EventTooLong", "read_events"]

MAX_MESSAGE: Final = 64 << 20
"""Bytes of an event, and of a line on stdio. Without a limit, one that does not end takes all memory."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLong(TidingsError):
    """An event has more than `MAX_MESSAGE` bytes."""

    def __init__(self) -> None:
        super().__init__(f"the server sent an event of more than {MAX_MESSAGE >> 20} MB")


class Event(NamedTuple):
    data: bytes
    """Empty in an event that only gives an id."""
    name: str = "message"


async def read_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Yield the events of the body of a response. Raise `EventTooLong` for one without an end."""
    name, data, size = "", list[bytes](), 0
    is_first = True
    async for line in _read_lines(chunks):
        if is_first:
            line, is_first = line.removeprefix(codecs.BOM_UTF8), False
        size = size + len(line) if line else 0
        if size > MAX_MESSAGE:
            raise EventTooLong
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
    size = 0
    ends_with_return = False
    async for chunk in chunks:
        first, *others = _LINE_END.split(chunk.removeprefix(b"\n") if ends_with_return else chunk)
        ends_with_return = chunk.endswith(b"\r") if chunk else ends_with_return
        unfinished.append(first)
        size += len(first)
        if size > MAX_MESSAGE:
            raise EventTooLong
        for line in others:
            yield b"".join(unfinished)
            unfinished, size = [line], len(line)
