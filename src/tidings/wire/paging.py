"""Reads all pages of a list. The server decides how many there are, so there are limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.wire.methods import LIST_METHODS

__all__ = ["EndlessPages", "read_pages"]

MAX_PAGES: Final = 10_000
MAX_ITEMS: Final = 1_000_000


class EndlessPages(TidingsError):
    """A list has no end, or more pages or items than the limits."""


async def read_pages(name: str, request: Callable[..., Awaitable[Any]]) -> AsyncIterator[Any]:
    """Yield the result of each page of a list. `request(cursor=…)` returns one, as a dict or as a model of the SDK."""
    method = LIST_METHODS[name]
    cursor: str | None = None
    cursors: set[str | None] = set()
    items = 0
    while True:
        result = await request(cursor=cursor)
        if isinstance(result, dict):
            found, cursor = result.get(method.member, []), result.get("nextCursor")
            if not isinstance(found, list):
                raise TidingsError(
                    f"{name} was answered with {one_line(str(found), 80)} as {method.member!r}, not a list"
                )
        else:
            found, cursor = getattr(result, method.attribute), result.next_cursor
        yield result
        items += len(found)
        if not cursor or not isinstance(cursor, str):
            return
        if cursor in cursors:
            raise EndlessPages(f"{name} never ends; the server sent the cursor {cursor!r:.80} twice")
        cursors.add(cursor)
        if items > MAX_ITEMS or len(cursors) > MAX_PAGES:
            raise EndlessPages(f"{name} has more than {MAX_ITEMS:,} items or {MAX_PAGES:,} pages")
