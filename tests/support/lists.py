"""Lists asked for at a door: the requests, in all their forms, and who has answered them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.http_server import Door, Line, modern, open_door, some_server
from tests.support.sdk_clients import MODERN

LISTS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
LISTED = modern("tools/list")
Raw = Callable[[Line], bytes]


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with open_door(some_server()) as door:
        yield door


@contextmanager
def sdk_requests(door: Door, number: int) -> Iterator[None]:
    """Check how many requests reach the SDK meanwhile."""
    before = door.sdk_requests
    yield
    assert door.sdk_requests - before == number


async def warm(door: Door) -> None:
    """Let the bytes be made, and the request be seen."""
    for method in (*LISTS, "server/discover"):
        for _ in range(3):
            answer = await door.send(lambda line, method=method: line.asks(method))
            assert b"200" in answer.status


def changed(**headers: str | None) -> Raw:
    """A modern request, with other headers."""
    return lambda line: line.asks("tools/list", **headers)


def posted(body: bytes) -> Raw:
    """A modern request, with another body."""
    return lambda line: line.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list")


def listed(**named: str | None) -> Raw:
    """A request in the legacy session that these headers name."""
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
    return lambda line: line.request(body, **named)
