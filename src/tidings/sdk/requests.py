"""Requests that no transport has received: those of Tidings itself, and those that another replica forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from mcp.server import Server
from mcp.server.connection import Connection
from mcp.server.runner import serve_one
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from starlette.requests import Request

__all__ = ["RequestContext", "request"]


class RequestContext:
    """The SDK's `DispatchContext` of a request without a client: nothing can be sent back."""

    def __init__(self, request_id: int | str, request: Request | None = None) -> None:
        self.transport = TransportContext(kind="tidings", can_send_request=False)
        self.request_id = request_id
        self.message_metadata = ServerMessageMetadata(request_context=request)
        self.can_send_request = False
        self.cancel_requested = anyio.Event()

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> None:
        return None

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        return None


async def request(
    server: Server[Any], lifespan: Any, request_id: str, method: str, version: str, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of a request by a modern client without capabilities.

    `lifespan` is what the lifespan of the server yielded."""
    meta: dict[str, Any] = {PROTOCOL_VERSION_META_KEY: version, CLIENT_CAPABILITIES_META_KEY: {}}
    return await serve_one(
        server,
        RequestContext(request_id),
        method,
        {"_meta": meta, **params},
        connection=Connection.from_envelope(version, None, {}),
        lifespan_state=lifespan,
    )
