"""What the SDK's own checks say of a request's headers and params, remembered by their bytes.

The same bytes always get the same verdict, so every distinct form of a request is checked once, by the SDK's functions,
and found in a dict from then on. Nothing that depends on time, on the caller or on the connection takes part: who asks,
and for which session, is looked at each time. A verdict only ever says "as good as any", never "refused": whatever did
not pass is the SDK's to answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
from mcp.server.streamable_http import check_accept_headers
from mcp.server.transport_security import TransportSecurityMiddleware
from mcp.shared.inbound import InboundModernRoute, classify_inbound_request, find_duplicated_routing_header
from mcp_types.methods import validate_client_request
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel
from starlette.requests import Request

from tidings.server.granted_topics import RequestedTopics
from tidings.server.methods import LISTEN, SHARED_RESPONSES, UNREADABLE

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

__all__ = ["Claim", "ListenRequest", "Question", "Verdicts", "form_of", "tidied"]

Form = tuple[tuple[bytes, bytes], ...]
"""The headers that any of the checks looks at, as they came."""

_CHECKED: Final = frozenset(
    {b"host", b"origin", b"accept", b"content-type", b"mcp-protocol-version", b"mcp-method", b"mcp-name"}
)
_MODERN = frozenset(version.encode() for version in MODERN_PROTOCOL_VERSIONS)
_LEGACY = frozenset(version.encode() for version in HANDSHAKE_PROTOCOL_VERSIONS)
_OURS = frozenset(method.encode() for method in (*SHARED_RESPONSES, LISTEN))

_MOST = 1024
"""Of each kind that are remembered. Clients of one make send the same bytes, so there are dozens at most; past it
somebody varies theirs, and the oldest are forgotten."""
_LARGEST = 4096
"""Bytes of what is remembered, of headers and of params: nothing but the client's own description is in there."""

_PLAIN_ID: Final = re.compile(rb'0|-?[1-9][0-9]{0,17}|"[ !#-\[\]-~]{0,128}"')
"""Ids that look the same however they are encoded, so that they can be spliced in as they came."""


_TRACE: Final = {
    "traceparent": re.compile(rb'"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"'),
    "tracestate": re.compile(rb'"[ !#-\[\]-~]{0,512}"'),
}
"""Members of `_meta` that differ with every request of a client that is traced, and change nothing about the answer."""


class Claim(NamedTuple):
    """What the headers say that a POST is."""

    method: str
    """Empty in the legacy era, where it stands in the body alone."""
    version: str
    """The modern version; empty in the legacy era, where it is the session's."""
    is_clear: bool
    """Whether all checks of the headers passed."""


class Question(NamedTuple):
    """A list request without anything that would make its answer another one than everybody's."""

    method: str
    tag: bytes
    """The request id as it came."""


class ListenRequest(NamedTuple):
    """What a client wants to listen to, and says of itself."""

    id: str | int
    requested: RequestedTopics
    meta: dict[str, Any]
    """Shared by all who sent the same, as are the capabilities: only to be read."""
    capabilities: Any


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    jsonrpc: Literal["2.0"]
    id: msgspec.Raw
    method: str
    params: msgspec.Raw = msgspec.Raw(b"")


class _Request(msgspec.Struct):
    jsonrpc: Literal["2.0"]
    id: str | int
    method: str
    params: msgspec.Raw


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    meta: dict[str, msgspec.Raw] = msgspec.field(name="_meta")


_decoder = msgspec.json.Decoder(_Envelope)
_request_decoder = msgspec.json.Decoder(_Request)
_params_decoder = msgspec.json.Decoder(_Params)


def form_of(headers: Iterable[tuple[bytes, bytes]]) -> Form:
    return tuple([header for header in headers if header[0] in _CHECKED])


class Verdicts:
    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        self._manager = manager
        self._serves_sessions = manager.event_store is None
        self._rules: tuple[bool, list[str], list[str]] | None = None
        """The Host and Origin rules by which the claims were made."""
        self._claims: dict[Form, Claim] = {}
        self._plain: dict[tuple[str, str, Hashable], bool] = {}
        self._requested: dict[tuple[str, bytes], tuple[RequestedTopics, dict[str, Any], Any]] = {}

    def known(self, form: Form) -> Claim | None:
        """The claim, if these headers have been looked at before and the rules are still the same."""
        settings = self._manager.security_settings
        if settings is not None:
            hosts, origins = settings.allowed_hosts, settings.allowed_origins
            rules = (settings.enable_dns_rebinding_protection, hosts, origins)
            if rules != self._rules:
                self._claims.clear()
                self._rules = (settings.enable_dns_rebinding_protection, [*hosts], [*origins])
        elif self._rules is not None:
            self._claims.clear()
            self._rules = None
        return self._claims.get(form)

    async def examine(self, form: Form) -> Claim | None:
        """What a POST with these headers is, or None if it is nothing to us."""
        claim = await self._examine(form)
        if claim is not None and sum(len(value) for _, value in form) <= _LARGEST:
            _remember(self._claims, form, claim)
        return claim

    async def _examine(self, form: Form) -> Claim | None:
        headers = tidied(form)
        first = dict(reversed(headers))
        version, method = first.get(b"mcp-protocol-version"), first.get(b"mcp-method", b"")
        if version in _MODERN:
            if method not in _OURS:
                return None
            name = method.decode()
            is_clear = await self._passes(headers, is_stream=name == LISTEN)
            return Claim(name, version.decode(), is_clear)
        if (version is not None and version not in _LEGACY) or not self._serves_sessions:
            return None
        is_json = first.get(b"content-type", b"").partition(b";")[0].strip() == b"application/json"
        return Claim("", "", is_json and await self._passes(headers))

    async def _passes(self, headers: list[tuple[bytes, bytes]], *, is_stream: bool = False) -> bool:
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

    def question(self, method: str, version: str, body: bytes) -> Question | None:
        """The list that a body asks for, or None if the SDK should answer. `method` is what the headers say, if
        they do, and `version` the one that the answer is for."""
        try:
            envelope = _decoder.decode(body)
        except UNREADABLE:
            return None
        tag, asked = bytes(envelope.id), envelope.method
        if (asked != method if method else asked not in SHARED_RESPONSES) or _PLAIN_ID.fullmatch(tag) is None:
            return None
        handler = self._manager.app.get_request_handler(asked)  # which may come and go
        params = bytes(envelope.params)
        if handler is None or len(params) > _LARGEST:
            return None
        key = (asked, version, _untraced(params) if b'"traceparent"' in params else params)
        is_plain = self._plain.get(key)
        if is_plain is None:
            is_plain = _is_plain(handler.params_type, asked, version, params)
            _remember(self._plain, key, is_plain)
        return Question(asked, tag) if is_plain else None

    def listen_request(self, version: str, body: bytes) -> ListenRequest | None:
        """What a body asks to listen to, or None if the SDK should word the error."""
        try:
            request = _request_decoder.decode(str(body, "utf-8"))
            if request.method != LISTEN:
                return None
            params = bytes(request.params)
            known = self._requested.get((version, params))
            if known is None:
                known = _read_params(version, params)
                # What differs with every request would only drive out what is sent by many.
                if len(params) <= _LARGEST and b'"traceparent"' not in params:
                    _remember(self._requested, (version, params), known)
        except UNREADABLE:
            return None
        return ListenRequest(request.id, *known)


def _is_plain(params_type: type[BaseModel], method: str, version: str, raw: bytes) -> bool:
    """Whether the SDK would accept these params, and they ask for nothing in particular: no page, no progress."""
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
    except (ValueError, KeyError, RecursionError):  # the first is the root of JSON's and of pydantic's errors
        return False
    return "progressToken" not in ((params or {}).get("_meta") or {})


def _read_params(version: str, raw: bytes) -> tuple[RequestedTopics, dict[str, Any], Any]:
    """What listen params want, and what their client says of itself. Raises if the SDK would not take them."""
    params = msgspec.json.decode(raw, type=dict[str, Any])
    headers = {"mcp-protocol-version": version, "mcp-method": LISTEN}
    route = classify_inbound_request({"method": LISTEN, "params": params}, headers=headers)
    if not isinstance(route, InboundModernRoute):
        raise msgspec.ValidationError(route.message)
    return msgspec.convert(params.get("notifications"), RequestedTopics), params["_meta"], route.client_capabilities


def _untraced(params: bytes) -> Hashable:
    """Params but for their trace context, if it is one."""
    try:
        meta = _params_decoder.decode(params).meta
    except UNREADABLE:
        return params
    return tuple(
        [
            (name, bytes(value))
            for name, value in meta.items()
            if name not in _TRACE or _TRACE[name].fullmatch(value) is None
        ]
    )


def tidied(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """HTTP allows whitespace after a value; httptools, unlike h11, leaves it there, and the SDK compares."""
    return [(name, value.strip(b" \t")) for name, value in headers]


def _remember(memo: dict[Any, Any], key: object, value: object) -> None:
    if len(memo) >= _MOST:
        del memo[next(iter(memo))]
    memo[key] = value
