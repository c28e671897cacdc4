"""Lists asked for at a door: the requests, in all their forms, and who has answered them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.http_server import FRONTS, Answer, Door, Line, modern, open_door, some_server
from tests.support.sdk_clients import MODERN

LISTS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
LISTED = modern("tools/list")
Raw = Callable[[Line], bytes]


@pytest.fixture(params=FRONTS)
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with open_door(some_server(), request.param) as door:
        yield door


@pytest.fixture
async def quick_door() -> AsyncIterator[Door]:
    """Its lists are answered at the connection from the first one on."""
    async with open_door(some_server(), "connection") as door:
        await warm(door)
        yield door


@contextmanager
def counted(door: Door, what: str, number: int) -> Iterator[None]:
    """So many are answered meanwhile by the SDK, or at the connection."""
    before = door.counts[what]
    yield
    assert door.counts[what] - before == number


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


def ids(answers: list[Answer]) -> list[Any]:
    return [json.loads(answer.body)["id"] for answer in answers]
