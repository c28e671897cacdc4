"""The MCP methods that Tidings serves or watches: one table of the list methods, and the others by name."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from tidings.core.model import Feature

__all__ = [
    "CACHEABLE_METHODS",
    "CALL_TOOL",
    "CANCELLED",
    "DECODE_ERRORS",
    "DISCOVER",
    "GET_PROMPT",
    "INITIALIZE",
    "INITIALIZED",
    "LISTEN",
    "LIST_METHODS",
    "READ_RESOURCE",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
    "ListMethod",
    "Request",
    "decode_meta",
    "decode_request",
    "list_methods",
]


class ListMethod(NamedTuple):
    feature: Feature
    member: str
    """The member of the result that holds the items."""
    key: str
    """The member that identifies an item."""
    function: str
    """The method of `MCPServer` that returns the items."""


LIST_METHODS: Final = {
    "tools/list": ListMethod(Feature.TOOLS, "tools", "name", "list_tools"),
    "prompts/list": ListMethod(Feature.PROMPTS, "prompts", "name", "list_prompts"),
    "resources/list": ListMethod(Feature.RESOURCES, "resources", "uri", "list_resources"),
    "resources/templates/list": ListMethod(
        Feature.RESOURCES, "resourceTemplates", "uriTemplate", "list_resource_templates"
    ),
}
DISCOVER: Final = "server/discover"
LISTEN: Final = "subscriptions/listen"
INITIALIZE: Final = "initialize"
INITIALIZED: Final = "notifications/initialized"
CANCELLED: Final = "notifications/cancelled"
CALL_TOOL: Final = "tools/call"
GET_PROMPT: Final = "prompts/get"
READ_RESOURCE: Final = "resources/read"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"

CACHEABLE_METHODS: Final = frozenset({*LIST_METHODS, DISCOVER})
"""Methods whose response can be the same for every client."""

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for a request that can't be decoded. Text that is not UTF-8 has no error of its own kind."""


def list_methods(feature: Feature) -> dict[str, ListMethod]:
    """Return the methods that list the items of a feature."""
    return {name: method for name, method in LIST_METHODS.items() if method.feature is feature}


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request with no unknown members."""

    jsonrpc: Literal["2.0"]
    id: int | str
    method: str
    params: msgspec.Raw = msgspec.Raw()


class _Params(msgspec.Struct):
    meta: dict[str, Any] = msgspec.field(name="_meta", default_factory=dict)


class _RequestWithMeta(msgspec.Struct):
    params: _Params = msgspec.field(default_factory=_Params)


_decoder = msgspec.json.Decoder(Request)
_meta_decoder = msgspec.json.Decoder(_RequestWithMeta)


def decode_meta(data: bytes) -> dict[str, Any]:
    """Return the `_meta` of the request in these bytes; an empty dict if it has none."""
    try:
        return _meta_decoder.decode(data).params.meta
    except DECODE_ERRORS:
        return {}


def decode_request(data: bytes) -> Request | None:
    """Return the request in these bytes, or None if the SDK has to handle them."""
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS:
        return None
