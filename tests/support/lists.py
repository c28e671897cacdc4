"""List requests in all their forms, and a count of those that reach the SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.http_server import LocalServer, RawClient, example_server, modern_body, serving
from tests.support.sdk_clients import MODERN

LISTS = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
LISTED = modern_body("tools/list")
Raw = Callable[[RawClient], bytes]


@pytest.fixture
async def local() -> AsyncIterator[LocalServer]:
    async with serving(example_server()) as local:
        yield local


@contextmanager
def sdk_requests(local: LocalServer, number: int) -> Iterator[None]:
    """Check how many requests reach the SDK meanwhile."""
    before = local.sdk_requests
    yield
    assert local.sdk_requests - before == number


async def fill_cache(local: LocalServer) -> None:
    """Send each list request often enough that its response is cached."""
    for method in (*LISTS, "server/discover"):
        for _ in range(3):
            answer = await local.send(lambda client, method=method: client.modern(method))
            assert b"200" in answer.status


def changed(**headers: str | None) -> Raw:
    """Return a modern request with other headers."""
    return lambda client: client.modern("tools/list", **headers)


def posted(body: bytes) -> Raw:
    """Return a modern request with another body."""
    return lambda client: client.request(body, MCP_Protocol_Version=MODERN, Mcp_Method="tools/list")


def listed(**named: str | None) -> Raw:
    """Return a request in the legacy session that these headers name."""
    body = b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}'
    return lambda client: client.request(body, **named)
