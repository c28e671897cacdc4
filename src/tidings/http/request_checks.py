"""Check requests with the SDK's own functions, and cache the results by the bytes of headers and params.

The same bytes always get the same result, so each distinct request is checked once. Nothing that depends on time, on
the caller or on the connection is cached. A result only says that Tidings may serve the request. Requests that fail a
check go to the SDK, which responds with the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from mcp.server.streamable_http import check_accept_headers
from mcp.server.transport_security import TransportSecurityMiddleware
from mcp.shared.inbound import InboundModernRoute, classify_inbound_request, find_duplicated_routing_header
from mcp_types.methods import validate_client_request
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel
from starlette.requests import Request

from tidings.server.granted_topics import RequestedTopics
from tidings.wire.envelope import DECODE_ERRORS, decode_request
from tidings.wire.methods import CACHEABLE_METHODS, LISTEN

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

__all__ = ["CheckedHeaders", "ListenRequest", "RequestChecks", "relevant_headers", "strip_values"]

RelevantHeaders = tuple[tuple[bytes, bytes], ...]

_RELEVANT: Final = frozenset(
    {b"host", b"origin", b"accept", b"content-type", b"mcp-protocol-version", b"mcp-method", b"mcp-name"}
)
_MODERN = frozenset(version.encode() for version in MODERN_PROTOCOL_VERSIONS)
_LEGACY = frozenset(version.encode() for version in HANDSHAKE_PROTOCOL_VERSIONS)
_METHODS = frozenset(method.encode() for method in (*CACHEABLE_METHODS, LISTEN))

_MAX_CACHED = 1024
"""Entries of each cache. Clients of the same program send the same bytes, so a few dozen are used. A client that varies
its bytes evicts the oldest entries."""
_MAX_BYTES = 4096
"""Size of headers and of params that are cached. They contain only the client's description of itself."""

_TRACE: Final = re.compile(rb'"trace(parent|state)" ?: ?"[ !#-\[\]-~]*"')
"""Members of `_meta` that differ in every request of a traced client, and do not affect the response."""


class CheckedHeaders(NamedTuple):
    """The result of checking the headers of a POST."""

    method: str
    """Empty for legacy clients, which send it only in the body."""
    version: str
    """The modern version; empty for legacy clients, whose session has it."""
    is_valid: bool
    """Whether all checks passed."""


class ListenRequest(NamedTuple):
    id: str | int
    requested: RequestedTopics
    meta: dict[str, Any]
    """Shared by all clients that sent the same, as the capabilities are: do not change them."""
    capabilities: Any


def relevant_headers(headers: Iterable[tuple[bytes, bytes]]) -> RelevantHeaders:
    """Return the headers that the checks depend on."""
    return tuple([header for header in headers if header[0] in _RELEVANT])


class RequestChecks:
    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        self._manager = manager
        self._serves_sessions = manager.event_store is None
        self._security: dict[str, Any] | None = None
        """The Host and Origin rules with which the cached headers were checked."""
        self._headers: dict[RelevantHeaders, CheckedHeaders] = {}
        self._list_params: dict[tuple[str, str, bytes], bool] = {}
        self._listen_params: dict[tuple[str, bytes], tuple[RequestedTopics, dict[str, Any], Any]] = {}

    async def check_headers(self, headers: RelevantHeaders) -> CheckedHeaders | None:
        """Check the headers of a POST. Return None if it is not a request that Tidings serves."""
        settings = self._manager.security_settings
        security = vars(settings) if settings is not None else None
        if security != self._security:  # the user may change them at any time
            self._security = deepcopy(security)
            self._headers.clear()
        checked = self._headers.get(headers)
        if checked is None:
            checked = await self._check_headers(headers)
            if checked is not None and sum(len(value) for _, value in headers) <= _MAX_BYTES:
                _cache(self._headers, headers, checked)
        return checked

    async def _check_headers(self, relevant: RelevantHeaders) -> CheckedHeaders | None:
        headers = strip_values(relevant)
        first = dict(reversed(headers))
        version, method = first.get(b"mcp-protocol-version"), first.get(b"mcp-method", b"")
        if version in _MODERN:
            if method not in _METHODS:
                return None
            name = method.decode()
            is_valid = await self._is_valid(headers, is_stream=name == LISTEN)
            return CheckedHeaders(name, version.decode(), is_valid)
        if (version is not None and version not in _LEGACY) or not self._serves_sessions:
            return None
        is_json = first.get(b"content-type", b"").partition(b";")[0].strip() == b"application/json"
        return CheckedHeaders("", "", is_json and await self._is_valid(headers))

    async def _is_valid(self, headers: list[tuple[bytes, bytes]], *, is_stream: bool = False) -> bool:
        manager = self._manager
        request = Request({"type": "http", "method": "POST", "headers": headers})
        has_json, has_sse = check_accept_headers(request)
        security = TransportSecurityMiddleware(manager.security_settings)
        return (
            has_json
            and (has_sse or (manager.json_response and not is_stream))
            and find_duplicated_routing_header(request.headers.items()) is None
            and await security.validate_request(request, is_post=True) is None
        )

    def list_request(self, method: str, version: str, body: bytes) -> tuple[str, bytes] | None:
        """Return method and encoded id of a list request whose response is the same for every client.

        Return None if the SDK should respond. `method` is that of the headers, or empty. `version` is that of the
        response."""
        request = decode_request(body)
        if request is None or (request.method != method if method else request.method not in CACHEABLE_METHODS):
            return None
        if isinstance(request.id, str) and not (request.id.isascii() and request.id.isprintable()):
            return None  # the SDK may encode the same id differently
        handler = self._manager.app.get_request_handler(request.method)  # the user may add and remove it
        params = bytes(request.params)
        if handler is None or len(params) > _MAX_BYTES:
            return None
        key = (request.method, version, _TRACE.sub(rb"\1", params) if b'"traceparent"' in params else params)
        is_shared = self._list_params.get(key)
        if is_shared is None:
            is_shared = _is_shared(handler.params_type, request.method, version, params)
            _cache(self._list_params, key, is_shared)
        return (request.method, msgspec.json.encode(request.id)) if is_shared else None

    def listen_request(self, version: str, body: bytes) -> ListenRequest | None:
        """Return the listen request in a body, or None if the SDK should respond."""
        request = decode_request(body)
        if request is None or request.method != LISTEN:
            return None
        params = bytes(request.params)
        decoded = self._listen_params.get((version, params))
        if decoded is None:
            try:
                decoded = _decode_listen_params(version, params)
            except (*DECODE_ERRORS, KeyError):  # ValueError includes the errors of pydantic
                return None
            # Traced clients send different bytes each time. These would only evict the entries of other clients.
            if len(params) <= _MAX_BYTES and b'"traceparent"' not in params:
                _cache(self._listen_params, (version, params), decoded)
        return ListenRequest(request.id, *decoded)


def _is_shared(params_type: type[BaseModel], method: str, version: str, raw: bytes) -> bool:
    """Return whether the SDK would accept these params, and they request neither a page nor progress."""
    try:
        params = json.loads(raw) if raw else None
        if not (params is None or (isinstance(params, dict) and params.keys() <= {"_meta"})):
            return False
        if version in MODERN_PROTOCOL_VERSIONS:
            body = {"method": method, "params": params}
            headers = {"mcp-protocol-version": version, "mcp-method": method}
            if not isinstance(classify_inbound_request(body, headers=headers), InboundModernRoute):
                return False
        validate_client_request(method, version, params)
        params_type.model_validate(params or {}, by_name=False)
    except (ValueError, KeyError, RecursionError):  # ValueError includes the errors of json and pydantic
        return False
    meta = (params or {}).get("_meta") or {}
    return "progressToken" not in meta and _has_valid_trace_context(meta)


def _has_valid_trace_context(meta: dict[str, Any]) -> bool:
    """Return whether the trace context has only strings. With other values, the SDK fails with an internal error."""
    return all(isinstance(meta.get(key, ""), str) for key in ("traceparent", "tracestate", "baggage"))


def _decode_listen_params(version: str, raw: bytes) -> tuple[RequestedTopics, dict[str, Any], Any]:
    """Return the requested topics, `_meta` and the client's capabilities. Raise if the SDK would refuse them."""
    params = msgspec.json.decode(raw, type=dict[str, Any])
    headers = {"mcp-protocol-version": version, "mcp-method": LISTEN}
    route = classify_inbound_request({"method": LISTEN, "params": params}, headers=headers)
    if not isinstance(route, InboundModernRoute):
        raise msgspec.ValidationError(route.message)
    validate_client_request(LISTEN, version, params)
    if not _has_valid_trace_context(params["_meta"]):
        raise msgspec.ValidationError("the trace context has other values than strings")
    return msgspec.convert(params.get("notifications"), RequestedTopics), params["_meta"], route.client_capabilities


def strip_values(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Remove whitespace around header values, which httptools keeps and the SDK would compare."""
    return [(name, value.strip(b" \t")) for name, value in headers]


def _cache(cache: dict[Any, Any], key: object, value: object) -> None:
    if len(cache) >= _MAX_CACHED:
        del cache[next(iter(cache))]
    cache[key] = value
