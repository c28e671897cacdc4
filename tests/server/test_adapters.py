"""What the sources know of the servers that they are attached to."""

from __future__ import annotations

from typing import Any

import pytest
from fastmcp import FastMCP
from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from tidings import Live
from tidings.server import adapters as attached


async def own(ctx: Any, call_next: Any) -> Any:
    return await call_next(ctx)


class Own:
    async def __call__(self, ctx: Any, call_next: Any) -> Any:
        return await call_next(ctx)


@pytest.mark.parametrize(
    "server", [MCPServer("a"), Server("b"), FastMCP("c")], ids=lambda server: type(server).__name__
)
def test_no_request_goes_the_slow_way_because_of_our_own_middleware(server: Any) -> None:
    assert not Live(server).steps_aside


@pytest.mark.parametrize("middleware", [own, Own()], ids=["function", "object"])
def test_every_request_goes_past_the_users_own_middleware(middleware: Any) -> None:
    assert Live(MCPServer("a", middleware=[middleware])).steps_aside


def test_a_uri_is_parsed_once_however_many_resources_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is slow, and done while the catalog is locked."""
    parsed: list[str] = []
    normal = attached._normal

    def parse(uri: str) -> str:
        parsed.append(uri)
        return normal(uri)

    monkeypatch.setattr(attached, "_normal", parse)
    live = Live(FastMCP("c"))
    for number in range(20):
        live.resources.add(lambda: "text", uri=f"board://{number}", name=str(number))
    assert len(parsed) <= 20
