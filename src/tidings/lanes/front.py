"""The ASGI front: which request is ours, and which is the SDK's.

It stands where the SDK's session manager is called, inside the server's authentication. Keyed on the routing headers;
in any doubt the body is replayed into the SDK, so that the SDK words the error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.streamable_http import check_accept_headers
from mcp.server.transport_security import TransportSecurityMiddleware
from mcp.shared.inbound import InboundModernRoute, classify_inbound_request, find_duplicated_routing_header
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.requests import Request

from tidings.gate import Principal
from tidings.lanes.channel import Message, Receive, Scope, Send
from tidings.lanes.listen import ListenStream, Wanted
from tidings.lanes.lists import LISTS
from tidings.lanes.wish import Wish

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from tidings.live import Live

__all__ = ["Front", "principal_of"]

_MODERN = frozenset(version.encode() for version in MODERN_PROTOCOL_VERSIONS)
_OURS = frozenset(method.encode() for method in (*LISTS, "subscriptions/listen"))


class Front:
    def __init__(self, live: Live, manager: StreamableHTTPSessionManager) -> None:
        self._live = live
        self._app = manager.asgi_app
        self._most = manager.max_request_body_size
        live.splice.has_event_store = manager.event_store is not None
        self._security = TransportSecurityMiddleware(manager.security_settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.strip(b" \t") for name, value in scope["headers"]}
            if any(value[-1:] in (b" ", b"\t") for _, value in scope["headers"]):
                # HTTP allows whitespace after a value; httptools, unlike h11, leaves it there, and the SDK compares.
                scope = {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}
            if scope["method"] == "POST":
                if headers.get(b"mcp-protocol-version") in _MODERN and headers.get(b"mcp-method") in _OURS:
                    stream = await self._modern(scope, receive, send, headers[b"mcp-method"].decode())
                    if stream is not None:
                        # Here, where nothing of the request is held any more but what its server keeps.
                        del headers
                        await stream.until_lost(receive)
                    return
            elif scope["method"] == "GET":
                session_id = headers.get(b"mcp-session-id")
                if session_id is not None:
                    await self._live.splice.serve(self._app, scope, receive, send, session_id.decode("latin-1"))
                    return
        await self._app(scope, receive, send)

    async def _modern(self, scope: Scope, receive: Receive, send: Send, method: str) -> ListenStream | None:
        """Answer a request. A listen stream that its request has to wait for is returned."""
        request = Request(scope)
        is_list = method in LISTS
        if (
            self._live.steps_aside
            or (is_list and not self._live.shares_lists)
            or not all(check_accept_headers(request))
            or find_duplicated_routing_header(request.headers.items()) is not None
            or await self._security.validate_request(request, is_post=True) is not None
        ):
            if is_list:
                await self._app(scope, receive, send)
            else:
                await self._live.listen.carry(self._app, scope, receive, send)
            return None
        messages, body = await self._read(receive)
        if messages[-1]["type"] == "http.disconnect":
            return None  # nobody is there any more; the SDK would raise
        replayed = _replay(messages, receive)
        envelope = _decode(body)
        route = classify_inbound_request(envelope, headers=dict(request.headers)) if envelope else None
        if envelope is None or not isinstance(route, InboundModernRoute):
            await self._app(scope, replayed, send)
            return None
        request_id, params = envelope["id"], envelope["params"]
        await self._live.attend()
        if is_list:
            if params.keys() == {"_meta"}:
                await self._live.lists.serve(
                    self._app, scope, replayed, send, request_id, method, route.protocol_version
                )
            else:
                await self._app(scope, replayed, send)
            return None
        try:
            wanted = msgspec.convert(params.get("notifications"), Wanted)
        except msgspec.ValidationError:
            await self._app(scope, replayed, send)
            return None
        principal = principal_of(scope.get("user"))
        wish = Wish(self._live, params.get("_meta"), route.client_capabilities, principal)
        return await self._live.listen.serve(scope, receive, send, request_id, wanted, principal, wish)

    async def _read(self, receive: Receive) -> tuple[list[Message], bytes]:
        """The messages of a request, and its body if all of it came and is no larger than the SDK allows."""
        messages: list[Message] = []
        body = b""
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return messages, b""
            body += message.get("body", b"")
            if len(body) > self._most:
                return messages, b""
            if not message.get("more_body"):
                return messages, body


def _replay(messages: list[Message], receive: Receive) -> Receive:
    kept = iter(messages)

    async def replayed() -> Message:
        for message in kept:
            return message
        return await receive()

    return replayed


def _decode(body: bytes) -> dict[str, Any] | None:
    """A request, or None for whatever the SDK should answer."""
    try:
        envelope = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if (
        not isinstance(envelope, dict)
        or envelope.get("jsonrpc") != "2.0"
        or not isinstance(envelope.get("params"), dict)
    ):
        return None
    request_id = envelope.get("id")
    is_request = isinstance(request_id, str | int) and not isinstance(request_id, bool)
    return envelope if is_request else None


def principal_of(user: object) -> Principal | None:
    """Who the server's authentication says this is."""
    if not isinstance(user, AuthenticatedUser):
        return None
    token = user.access_token
    return Principal(token.client_id, token.subject, tuple(token.scopes), token.claims or {})
