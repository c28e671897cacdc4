"""The wire format of MCP Events: the names, codes and limits of the draft (SEP-3415).

The draft is `docs/design-sketch-proposal.md` of `modelcontextprotocol/experimental-ext-triggers-events`. If the draft
changes, only this module changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import mcp_types as types
import msgspec
from mcp.shared.exceptions import MCPError
from msgspec import UNSET, UnsetType

from tidings.core.encoding import iso_time
from tidings.errors import TidingsError

__all__ = [
    "CAPABILITIES",
    "LIST",
    "MAX_BODY",
    "NO_RETRY",
    "SUBSCRIBE",
    "SUBSCRIPTION_HEADER",
    "UNSUBSCRIBE",
    "DeliveryStatus",
    "DeliveryTarget",
    "Event",
    "ListParams",
    "Reason",
    "SubscribeParams",
    "UnsubscribeParams",
    "callback_failed",
    "encode_event",
    "encode_termination",
    "encode_verification",
    "event_type",
    "find_challenge",
    "forbidden",
    "invalid",
    "normalized_json",
    "not_found",
    "subscribed",
    "subscription_id",
    "too_many",
    "unsupported",
]

CAPABILITIES: dict[str, dict[str, Any]] = {"events": {}}
"""There is no `listChanged`: the server does not notify clients of new event types."""

LIST = "events/list"
SUBSCRIBE = "events/subscribe"
UNSUBSCRIBE = "events/unsubscribe"

SUBSCRIPTION_HEADER = "x-mcp-subscription-id"
MAX_BODY = 256 * 1024
"""Bytes of one request to a receiver."""
NO_RETRY = frozenset({410, 413})
"""Statuses after which the same event is not sent again: the receiver is gone, or the body is too large."""

Reason: TypeAlias = Literal["connection_refused", "timeout", "tls_error", "http_4xx", "http_5xx", "challenge_failed"]
"""Why a request failed, as the client gets it. It contains nothing of the response, which may be confidential."""


# Params. Unknown members are ignored, because a draft gets new ones.


class ListParams(msgspec.Struct):
    cursor: str | None = None


class DeliveryTarget(msgspec.Struct):
    url: str
    mode: str = "webhook"
    secret: str | None = None


class UnsubscribeParams(msgspec.Struct):
    name: str
    delivery: DeliveryTarget
    arguments: dict[str, Any] | None = None


class SubscribeParams(UnsubscribeParams, rename="camel"):
    """`cursor` and `maxAgeMs` are ignored: no event type supports replay."""

    ttl_ms: float | UnsetType | None = UNSET
    """None requests a subscription that does not expire."""


def normalized_json(value: Any) -> str:
    """Return the canonical JSON of a value: with sorted members, and 1.0 as 1.

    Raise `TidingsError` for a value that can't be encoded, such as a text with an unpaired surrogate.
    """
    try:
        return msgspec.json.encode(_normalized(value), order="sorted").decode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TidingsError(f"the arguments have no JSON form: {error}") from None


def _normalized(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _normalized(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_normalized(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def subscription_id(owner: object, url: str, name: str, arguments: Mapping[str, Any]) -> str:
    """Return the id of a subscription, derived from its key: principal, URL, event name and arguments."""
    return f"sub_{hashlib.sha256(normalized_json([owner, url, name, arguments]).encode()).hexdigest()[:32]}"


# Results


def event_type(
    name: str, description: str | None, arguments: Mapping[str, Any], payload: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an event type in the form of `events/list`."""
    described = {} if description is None else {"description": description}
    return {"name": name, **described, "delivery": ["webhook"], "inputSchema": arguments, "payloadSchema": payload}


class DeliveryStatus(NamedTuple):
    """The state of the deliveries when a subscription is renewed."""

    is_active: bool
    last_success: float | None
    last_error: str | None
    failed_since: float | None


def subscribed(key: str, expires: float, status: DeliveryStatus | None) -> dict[str, Any]:
    """Return the result of `events/subscribe`, with the state of the deliveries if the subscription was renewed."""
    result: dict[str, Any] = {"id": key, "refreshBefore": iso_time(expires), "cursor": None, "truncated": False}
    if status is not None:
        last = None if status.last_success is None else iso_time(status.last_success)
        state = {"active": status.is_active, "lastDeliveryAt": last, "lastError": status.last_error}
        if status.failed_since is not None:
            state["failedSince"] = iso_time(status.failed_since)
        result["deliveryStatus"] = state
    return result


# Bodies of requests to a receiver


class Event(msgspec.Struct, frozen=True):
    """The id and the body of one request."""

    id: str
    body: bytes


class _Body(msgspec.Struct, rename="camel"):
    event_id: str
    name: str
    timestamp: str
    data: Any
    cursor: None = None


def encode_event(event_id: str, name: str, time: float, data: Any) -> Event:
    return Event(event_id, msgspec.json.encode(_Body(event_id, name, iso_time(time), data)))


def encode_verification(challenge: str, nonce: str) -> Event:
    """Return a verification request. A receiver that wants the events must send the challenge back."""
    return Event(f"msg_verification_{nonce}", msgspec.json.encode({"type": "verification", "challenge": challenge}))


def find_challenge(answer: bytes) -> str | None:
    """Return the challenge in the body of a response, if it has one."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    challenge = found.get("challenge") if isinstance(found, dict) else None
    return challenge if isinstance(challenge, str) else None


def encode_termination(nonce: str) -> Event:
    """Return the message that a subscription has ended, because its principal lost its rights."""
    error = {"code": _FORBIDDEN, "message": "Forbidden"}
    return Event(f"msg_terminated_{nonce}", msgspec.json.encode({"type": "terminated", "error": error}))


# Errors

_NOT_FOUND, _FORBIDDEN, _EXHAUSTED, _UNSUPPORTED, _CALLBACK = -32011, -32012, -32013, -32014, -32015


def invalid(text: str) -> MCPError:
    return MCPError(types.INVALID_PARAMS, text)


def not_found(kind: Literal["event", "subscription"], text: str) -> MCPError:
    return MCPError(_NOT_FOUND, text, {"kind": kind})


def forbidden(text: str) -> MCPError:
    return MCPError(_FORBIDDEN, text)


def too_many(limit: str, text: str) -> MCPError:
    return MCPError(_EXHAUSTED, text, {"limit": limit})


def unsupported(feature: str, value: str) -> MCPError:
    return MCPError(_UNSUPPORTED, f"{feature} {value!r} is not supported", {"feature": feature, "value": value})


def callback_failed(reason: Reason) -> MCPError:
    return MCPError(_CALLBACK, f"the callback endpoint failed verification: {reason}", {"reason": reason})
