"""Asks a server what it lists, as a client would: through its own middleware and handlers, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import anyio
from mcp.server.connection import Connection
from mcp.server.runner import serve_one
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.transport_context import TransportContext
from mcp_types import CLIENT_CAPABILITIES_META_KEY, METHOD_NOT_FOUND, PROTOCOL_VERSION_META_KEY
from mcp_types.version import LATEST_MODERN_VERSION

from tidings.core.model import Feature
from tidings.errors import TidingsError

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["UNKNOWN", "answered", "listed"]

UNKNOWN: Final = object()
"""In place of a lifespan's state, before any client came through it."""

_METHODS = {
    Feature.TOOLS: (("tools/list", "tools"),),
    Feature.PROMPTS: (("prompts/list", "prompts"),),
    Feature.RESOURCES: (("resources/list", "resources"), ("resources/templates/list", "resourceTemplates")),
}

_MOST_PAGES = 10_000
"""A paginator that never ends must not become ours."""


async def answered(server: Server[Any], method: str, version: str, lifespan: Any, request_id: str) -> dict[str, Any]:
    """The result that a modern client without any capabilities gets."""
    params = {"_meta": {PROTOCOL_VERSION_META_KEY: version, CLIENT_CAPABILITIES_META_KEY: {}}}
    connection = Connection.from_envelope(version, None, {})
    return await serve_one(server, _Inquiry(request_id), method, params, connection=connection, lifespan_state=lifespan)


async def listed(server: Server[Any], feature: Feature, lifespan: Any, request_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for method, member in _METHODS[feature]:
        if server.get_request_handler(method) is not None:
            items += await _pages(server, method, member, lifespan, request_id)
    return items


async def _pages(server: Server[Any], method: str, member: str, lifespan: Any, request_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    params: dict[str, Any] = {
        "_meta": {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}
    }
    for _ in range(_MOST_PAGES):
        connection = Connection.from_envelope(LATEST_MODERN_VERSION, None, {})
        try:
            result = await serve_one(
                server, _Inquiry(request_id), method, dict(params), connection=connection, lifespan_state=lifespan
            )
        except MCPError as error:
            if error.code == METHOD_NOT_FOUND:
                return items
            raise
        items += result.get(member, [])
        if not result.get("nextCursor"):
            return items
        params["cursor"] = result["nextCursor"]
    raise TidingsError(f"{method} did not end after {_MOST_PAGES} pages")


class _Inquiry:
    """The SDK's `DispatchContext` of a request that nobody sent: no way back, and no one to tell of progress."""

    def __init__(self, request_id: str) -> None:
        self.transport = TransportContext(kind="tidings", can_send_request=False)
        self.request_id = request_id
        self.message_metadata = None
        self.can_send_request = False
        self.cancel_requested = anyio.Event()

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> None:
        return None

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        return None
