"""The handlers of a workspace for list and prompt requests, around those of the SDK.

Lists come in pages, in the order of their keys. The SDK has no pages, ignores an unknown cursor, and answers a mistake
in a prompt request with an internal error. Here each mistake of a client gets -32602 and the reason, and the log has no
traceback. A resource that is a file has its size.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import mcp_types as types
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError

from tidings.sdk import internals
from tidings.sdk.definitions import key_of
from tidings.wire.methods import GET_PROMPT, LIST_METHODS
from tidings.workspace.resources import FileResource

__all__ = ["wrap_handlers"]

Handler = Callable[..., Any]

_PAGE = 1_000
"""Items of one page. Most clients request only the first page of a list, and few workspaces have more items."""


def wrap_handlers(server: MCPServer[Any]) -> dict[str, Handler]:
    """Replace the list and prompt handlers of the server, and return the new ones by method."""
    lowlevel = internals.lowlevel_of(server)
    wrapped: dict[str, Handler] = {}
    for method in (*LIST_METHODS, GET_PROMPT):
        entry = lowlevel.get_request_handler(method)
        assert entry is not None
        wrapped[method] = (
            _add_pages(server, method, entry.handler) if method in LIST_METHODS else _add_check(server, entry.handler)
        )
        lowlevel.add_request_handler(method, entry.params_type, wrapped[method])
    return wrapped


def _add_pages(server: MCPServer[Any], method: str, handler: Handler) -> Handler:
    member = LIST_METHODS[method].attribute
    components = internals.registry_of(server, "resources")

    async def handle(ctx: Any, params: types.PaginatedRequestParams) -> Any:
        after = _decode_cursor(params.cursor) if params.cursor is not None else None
        result = await handler(ctx, params)
        items = sorted(getattr(result, member), key=key_of)
        start = 0 if after is None else bisect_right(items, after, key=key_of)
        page = items[start : start + _PAGE]
        for item in page:
            # A size is not part of the definition, because a new size must not count as a change of the list.
            if isinstance(item, types.Resource) and isinstance(file := components.get(item.uri), FileResource):
                item.size = file.size
        following = _encode_cursor(key_of(page[-1])) if start + _PAGE < len(items) else None
        return result.model_copy(update={member: page, "next_cursor": following})

    return handle


def _encode_cursor(key: str) -> str:
    """Return a cursor for the items after a key. It stays valid if items are added or removed."""
    return base64.urlsafe_b64encode(b"after " + key.encode()).decode()


def _decode_cursor(cursor: str) -> str:
    try:
        prefix, _, key = base64.b64decode(cursor, altchars=b"-_", validate=True).decode().partition(" ")
    except (binascii.Error, ValueError):
        prefix = key = ""
    if prefix != "after":
        raise MCPError(types.INVALID_PARAMS, f"Unknown cursor: {cursor:.80}")
    return key


def _add_check(server: MCPServer[Any], handler: Handler) -> Handler:
    async def handle(ctx: Any, params: types.GetPromptRequestParams) -> Any:
        prompt = internals.registry_of(server, "prompts").get(params.name)
        if prompt is None:
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {params.name:.80}")
        required = [argument.name for argument in prompt.arguments or () if argument.required]
        if missing := [name for name in required if name not in (params.arguments or {})]:
            raise MCPError(types.INVALID_PARAMS, f"{params.name}: missing arguments: {', '.join(missing)}")
        return await handler(ctx, params)

    return handle
