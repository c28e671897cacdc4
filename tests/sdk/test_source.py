"""Properties of the user's server that a source finds out. Covers `fastmcp.py`, `lowlevel.py` and `mcpserver.py`."""

from __future__ import annotations

from typing import Any

import pytest
from fastmcp import FastMCP
from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from tidings import Live
from tidings.sdk import fastmcp


async def own(ctx: Any, call_next: Any) -> Any:
    return await call_next(ctx)


class Own:
    async def __call__(self, ctx: Any, call_next: Any) -> Any:
        return await call_next(ctx)


@pytest.mark.parametrize(
    "server", [MCPServer("a"), Server("b"), FastMCP("c")], ids=lambda server: type(server).__name__
)
def test_own_middleware_does_not_count_as_user_middleware(server: Any) -> None:
    assert not Live(server).source.has_user_middleware()


@pytest.mark.parametrize("middleware", [own, Own()], ids=["function", "object"])
def test_user_middleware_is_detected(middleware: Any) -> None:
    assert Live(MCPServer("a", middleware=[middleware])).source.has_user_middleware()


def test_adding_a_resource_parses_one_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing is slow, and holds the lock of the catalog."""
    parsed: list[str] = []
    normal = fastmcp._normalize

    def parse(uri: str) -> str:
        parsed.append(uri)
        return normal(uri)

    monkeypatch.setattr(fastmcp, "_normalize", parse)
    live = Live(FastMCP("c"))
    for number in range(20):
        live.resources.add(lambda: "text", uri=f"board://{number}", name=str(number))
    assert len(parsed) <= 20
