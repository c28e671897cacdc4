"""Calls of tools, counted and traced, whoever carries them out.

The innermost of the server's middleware as far as we know: inside the SDK's own span of the request, around the tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp_types import CallToolResult

from tidings.core.observer import RUN_TOOL

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["ToolCallMiddleware"]


class ToolCallMiddleware:
    def __init__(self, live: Live) -> None:
        self._live = live
        live.lowlevel.middleware.append(self._middleware)

    async def _middleware(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.method != "tools/call":
            return await call_next(ctx)
        hub = self._live.hub
        name = (ctx.params or {}).get("name")
        outcome = "error"
        try:
            with hub.tracer.span(RUN_TOOL, tool=name if isinstance(name, str) else "") as run:
                result = await call_next(ctx)
                outcome = "tool_error" if _has_failed(result) else "ok"
                run.set(outcome, is_error=outcome != "ok")
            return result
        finally:
            hub.counts.runs[outcome] += 1


def _has_failed(result: HandlerResult) -> bool:
    """Whether the tool says so itself, in a result that is otherwise in order."""
    match result:
        case CallToolResult(is_error=True) | {"isError": True}:
            return True
    return False
