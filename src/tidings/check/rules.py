"""The rules of `tidings check`. `docs/rules.md` has a section for each, which a test compares with this table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["RULES", "Rule", "Severity"]

_SPECIFICATION = "https://modelcontextprotocol.io/specification/"
_SUBSCRIPTIONS = "2026-07-28/basic/patterns/subscriptions"
_HTTP = "2026-07-28/basic/transports/streamable-http"
_LEGACY_HTTP = "2025-11-25/basic/transports"
_CACHING = "2026-07-28/server/utilities/caching"
_TOOLS = "2026-07-28/server/tools"


class Severity(StrEnum):
    ERROR = "error"
    """The server breaks a MUST, or makes a client rely on something that is not true."""
    WARNING = "warning"
    """The server ignores a SHOULD."""


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    title: str
    clause: str
    """The page and section of the specification."""
    remedy: str

    @property
    def clause_url(self) -> str:
        return _SPECIFICATION + self.clause

    @property
    def help_url(self) -> str:
        """Where this rule is documented, relative to the repository."""
        return f"docs/rules.md#{self.id}"


_ERROR, _WARNING = Severity.ERROR, Severity.WARNING

_TABLE = (
    Rule(
        "capability-served",
        _ERROR,
        "The server answers the list requests of each feature that it declares.",
        f"{_TOOLS}#capabilities",
        "Declare a feature only if its list request is served, or serve it; an empty list is a valid answer.",
    ),
    Rule(
        "capability-granted",
        _ERROR,
        "The acknowledgement grants the notifications that the server advertises.",
        f"{_SUBSCRIPTIONS}#acknowledgment",
        "Grant each notification that the capabilities promise, or do not set listChanged and subscribe.",
    ),
    Rule(
        "capability-advertised",
        _WARNING,
        "The server advertises the notifications that its acknowledgement grants.",
        f"{_SUBSCRIPTIONS}#acknowledgment",
        "Set listChanged and subscribe in server/discover: clients that read them never open a stream otherwise. Leave "
        "notifications that the server never sends out of the acknowledgement.",
    ),
    Rule(
        "subscribe-served",
        _ERROR,
        "A legacy server that advertises subscribe accepts resources/subscribe.",
        "2025-11-25/server/resources#subscriptions",
        "Handle resources/subscribe, or do not advertise subscribe.",
    ),
    Rule(
        "get-stream",
        _ERROR,
        "A legacy server that promises notifications opens the GET stream.",
        f"{_LEGACY_HTTP}#listening-for-messages-from-the-server",
        "Answer GET with text/event-stream, or do not advertise listChanged and subscribe. Stateless servers often "
        "lack the stream.",
    ),
    Rule(
        "ack-received",
        _ERROR,
        "A listen request is acknowledged on its own response.",
        f"{_SUBSCRIPTIONS}#acknowledgment",
        "Send notifications/subscriptions/acknowledged as soon as the request is accepted, and flush it. If the server "
        "sends it, a proxy in between buffers the response.",
    ),
    Rule(
        "ack-first",
        _ERROR,
        "The acknowledgement is the first message of a subscription.",
        f"{_SUBSCRIPTIONS}#acknowledgment",
        "Register the subscriber after the acknowledgement was sent, or hold its notifications back until then.",
    ),
    Rule(
        "ack-subset",
        _ERROR,
        "The acknowledgement grants nothing that the client has not requested.",
        f"{_SUBSCRIPTIONS}#acknowledgment",
        "Grant the intersection of what is requested and what is supported.",
    ),
    Rule(
        "frame-tag",
        _ERROR,
        "Each message of a subscription carries the id of its listen request.",
        f"{_SUBSCRIPTIONS}#receiving-notifications",
        "Put the JSON-RPC id of the request, as the number or the string that it is, into "
        '_meta["io.modelcontextprotocol/subscriptionId"].',
    ),
    Rule(
        "not-requested",
        _ERROR,
        "A client gets only the notifications that it has asked for.",
        f"{_SUBSCRIPTIONS}#opening-a-stream",
        "Compare each notification with the filter of the stream, and each updated URI with the subscriptions of the "
        "session.",
    ),
    Rule(
        "unchanged",
        _ERROR,
        "There is no notification while nothing changes.",
        f"{_TOOLS}#list-changed-notification",
        "Notify only if the content differs from what the client was last told, and not on connect, on a list request "
        "or at an interval. Each needless one makes every client fetch the list.",
    ),
    Rule(
        "list-order",
        _WARNING,
        "A list has the same order in each session, after a restart and on each replica.",
        f"{_TOOLS}#capabilities",
        "Return lists in a fixed order, for example by name: another order invalidates the prompt cache of a model.",
    ),
    Rule(
        "cache-hints",
        _ERROR,
        "Results that can be cached have ttlMs and cacheScope.",
        f"{_CACHING}#cacheable-results",
        'Set ttlMs to 0 or more and cacheScope to "public" or "private" in the result. 0 and "private" always fit.',
    ),
    Rule(
        "cache-public",
        _ERROR,
        "A public result is the same for every token.",
        f"{_CACHING}#cache-scope-field",
        'Set cacheScope to "private" for what depends on the caller: a shared cache serves a public result to anyone.',
    ),
    Rule(
        "token-expiry",
        _ERROR,
        "A stream ends when the token that opened it expires.",
        "2026-07-28/basic/authorization#token-handling",
        "Remember when the token of a stream expires, and end the stream then.",
    ),
    Rule(
        "unknown-session",
        _ERROR,
        "A request with an unknown session id is answered with 404.",
        f"{_LEGACY_HTTP}#session-management",
        "Answer 404, also after DELETE and after a restart: clients start a new session only then.",
    ),
    Rule(
        "buffering",
        _WARNING,
        "Streams are sent so that proxies do not buffer them.",
        f"{_HTTP}#receiving-messages",
        "Send the header `X-Accel-Buffering: no` with each text/event-stream response, and do not compress it.",
    ),
    Rule(
        "slow-reader",
        _ERROR,
        "A client that does not read does not stop the server.",
        "2026-07-28/basic/transports",
        "Do not wait for one client while others are served: bound what is queued for each, and close those that do "
        "not read.",
    ),
    Rule(
        "sigterm",
        _ERROR,
        "The process exits on SIGTERM while a stream is open.",
        "2026-07-28/basic/transports/stdio#shutdown",
        "End the open streams on the signal itself; do not wait for the client to close them.",
    ),
    Rule(
        "graceful-end",
        _WARNING,
        "On SIGTERM, each subscription ends with the result of its listen request.",
        f"{_SUBSCRIPTIONS}#cancellation",
        "Handle SIGTERM: send the result of each open listen request, then exit.",
    ),
    Rule(
        "told",
        _ERROR,
        "Each session is told of a change.",
        f"{_TOOLS}#list-changed-notification",
        "Notify every session and stream that was promised it, whoever made the change; a session without an open "
        "request too.",
    ),
    Rule(
        "told-once",
        _ERROR,
        "Each session is told of a change once.",
        f"{_LEGACY_HTTP}#multiple-connections",
        "Send one notification for one change, on one stream of the session.",
    ),
    Rule(
        "tool-callable",
        _ERROR,
        "A tool that is listed after a notification can be called at once.",
        f"{_TOOLS}#list-changed-notification",
        "Register the handler before the tool is listed and notified, on every replica.",
    ),
    Rule(
        "unsubscribe",
        _ERROR,
        "After unsubscribing, a client is told no more of the resource.",
        "2025-11-25/server/resources#subscriptions",
        "Handle resources/unsubscribe and notifications/cancelled: forget the subscription at once.",
    ),
)

RULES = {rule.id: rule for rule in _TABLE}
