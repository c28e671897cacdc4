"""The limits of what is read from a server that decides what its pages are."""

from __future__ import annotations

from typing import Any

import pytest

from tidings import TidingsError
from tidings.wire import paging
from tidings.wire.paging import read_pages

pytestmark = pytest.mark.anyio


async def test_pages_that_never_end_are_an_error_and_an_empty_cursor_is_the_end() -> None:
    async def read(*cursors: str, limit: int = 10) -> int:
        following = iter(cursors)

        async def request(cursor: str | None) -> dict[str, Any]:
            return {"tools": [{}] * limit, "nextCursor": next(following)}

        return sum([len(page["tools"]) async for page in read_pages("tools/list", request)])

    assert await read("a", "b", "") == 30
    with pytest.raises(TidingsError, match="tools/list never ends; the server sent the cursor 'a' twice"):
        await read("a", "b", "a")
    with pytest.raises(TidingsError, match="more than"):
        await read(*map(str, range(paging.MAX_PAGES + 1)))
    with pytest.raises(TidingsError, match="more than"):
        await read("a", "b", limit=paging.MAX_ITEMS)


async def test_a_page_without_a_list_is_one_clear_error() -> None:
    async def request(cursor: str | None) -> dict[str, Any]:
        return {"tools": None}

    with pytest.raises(TidingsError, match="tools/list was answered with None as 'tools', not a list"):
        [page async for page in read_pages("tools/list", request)]
