"""Counts and traces calls of tools.

The innermost middleware of the server: inside the SDK's own span of the request, around the tool.
"""

from __future__ import annotations

from typing import Any

from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp_types import CallToolResult

from tidings.core.hub import Hub
from tidings.core.observer import RUN_TOOL

__all__ = ["ToolCallMiddleware"]


class ToolCallMiddleware:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        if ctx.method != "tools/call":
            return await call_next(ctx)
        name = (ctx.params or {}).get("name")
        outcome = "error"
        try:
            with self._hub.tracer.span(RUN_TOOL, tool=name if isinstance(name, str) else "") as span:
                result = await call_next(ctx)
                outcome = "tool_error" if _is_error(result) else "ok"
                span.set(outcome, is_error=outcome != "ok")
            return result
        finally:
            self._hub.counts.runs[outcome] += 1


def _is_error(result: HandlerResult) -> bool:
    match result:
        case CallToolResult(is_error=True) | {"isError": True}:
            return True
    return False
