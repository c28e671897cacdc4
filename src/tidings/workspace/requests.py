"""Checks of requests that the SDK answers with the wrong error, or accepts.

Each of them is the fault of the client, so it gets -32602 and the reason, and the log has no traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mcp_types as types
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError

from tidings.server import internals
from tidings.server.methods import GET_PROMPT, LIST_METHODS

__all__ = ["check_requests"]


def check_requests(server: MCPServer[Any]) -> None:
    """Check prompt and list requests before the present handlers of the server get them."""
    lowlevel = internals.lowlevel_of(server)
    checks: dict[str, Callable[[Any], None]] = dict.fromkeys(LIST_METHODS, _check_cursor)
    checks[GET_PROMPT] = partial(_check_prompt, server)
    for method, check in checks.items():
        entry = lowlevel.get_request_handler(method)
        assert entry is not None
        lowlevel.add_request_handler(method, entry.params_type, _checked(check, entry.handler))


def _checked(check: Callable[[Any], None], handler: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(ctx: Any, params: Any) -> Any:
        check(params)
        return await handler(ctx, params)

    return handle


def _check_cursor(params: types.PaginatedRequestParams) -> None:
    if params.cursor:  # a workspace lists all items on one page
        raise MCPError(types.INVALID_PARAMS, f"Unknown cursor: {params.cursor:.80}")


def _check_prompt(server: MCPServer[Any], params: types.GetPromptRequestParams) -> None:
    prompt = internals.registry_of(server, "prompts").get(params.name)
    if prompt is None:
        raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {params.name:.80}")
    required = [argument.name for argument in prompt.arguments or () if argument.required]
    if missing := [name for name in required if name not in (params.arguments or {})]:
        raise MCPError(types.INVALID_PARAMS, f"{params.name}: missing arguments: {', '.join(missing)}")
