"""The record of a durable subscription: a subscription that outlives its connection and, with a store, its server.

A record has a name that its client chose, bound to the client's principal. It holds the topics that are watched, the
options, and the versions that the client was last told. It is not a queue: it holds versions, not events.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import structs

from tidings.core.encoding import iso_time
from tidings.core.model import Feature, Topic, Version, topics_json

__all__ = [
    "MAX_NAME_LENGTH",
    "SERVER",
    "DurableSubscription",
    "EventTarget",
    "Key",
    "Owner",
    "Webhook",
    "as_json",
    "reason_not_storable",
]

Owner: TypeAlias = tuple[str, str | None] | None
"""The principal that a subscription belongs to (`Principal.identity`); None for callers without authentication."""

SERVER: Owner = ("", "")
"""The owner of subscriptions made by the server's own code or its operator. No caller can have it."""

Key: TypeAlias = tuple[Owner, str]
"""Owner and name."""

MAX_NAME_LENGTH = 256
"""Characters. Clients choose the names."""

_MAX_RECORD_SIZE = 1 << 20
"""Bytes of an encoded record. Clients choose what they watch."""


class Webhook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The URL that a durable subscription is delivered to, and the state of its deliveries."""

    url: str
    secret: str
    """One secret, or several separated by spaces while one replaces another."""
    is_secret_new: bool = False
    """Whether the secret was created with the webhook. If a replica finds that another one has created the webhook
    before, the older secret counts."""
    scopes: tuple[str, ...] = ()
    """The scopes of its owner's token when it was created. The server calls `authorize` again at every start."""
    attempts: int = 0
    """Failed attempts in a row."""
    next_attempt: float | None = None
    last_success: float | None = None
    last_error: str | None = None
    is_dead: bool = False
    """Whether the server gave up after too many failures. Nothing is sent until the subscription is put again."""
    refetch: tuple[str, ...] = ()
    """URIs and patterns whose missed changes are unknown. The receiver must still be told to refetch them."""
    last_refetch: float | None = None


class EventTarget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The event that a subscription of MCP Events watches, where it is delivered, and the state of its deliveries."""

    name: str
    arguments: dict[str, Any] = {}
    url: str
    secret: str
    old_secret: str = ""
    """The secret before, which signs as well until `old_until`."""
    old_until: float = 0.0
    scopes: tuple[str, ...] = ()
    """The scopes of its principal's token when it was put last."""
    expires: float
    """When it ends, whether or not it is delivered."""
    attempts: int = 0
    """Failed attempts in a row."""
    next_attempt: float | None = None
    last_success: float | None = None
    last_error: str | None = None
    failed_since: float | None = None
    is_suspended: bool = False
    """Whether the server gave up after too many failures. Nothing is sent until the client renews it."""

    def signing_secrets(self, now: float) -> str:
        return f"{self.secret} {self.old_secret}" if self.old_secret and now < self.old_until else self.secret


class DurableSubscription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One durable subscription as it is stored. Times are those of the catalog, in seconds since 1970."""

    name: str
    owner: Owner = None
    features: tuple[Feature, ...] = ()
    uris: tuple[str, ...] = ()
    """URIs and patterns."""
    terms: dict[str, Any] = {}
    """The granted part of `dev.tidings/filter`, as it is on the wire."""
    as_of: int = 0
    """The client knows every topic that it watches as of this revision, except those below."""
    lists: dict[Feature, Version | None] = {}
    """The version of each list that the client was last told; None for never."""
    contents: dict[str, Version | None] = {}
    """The same for contents that differ from `as_of`."""
    ttl: float = 0.0
    created: float = 0.0
    expires: float | None = None
    """None while its client is connected."""
    webhook: Webhook | None = None
    event: EventTarget | None = None

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes of its owner when it was created, if it is delivered while its owner is not connected."""
        target = self.webhook or self.event
        return () if target is None else target.scopes

    @property
    def told(self) -> dict[Topic, Version | None]:
        told: dict[Topic, Version | None] = {}
        told.update(self.lists.items())
        told.update(self.contents.items())
        return told

    @property
    def key(self) -> Key:
        return (self.owner, self.name)

    def revived(self) -> DurableSubscription:
        """Return the subscription to be delivered now, whether or not the server had given up."""
        if self.event is not None:
            event = structs.replace(self.event, attempts=0, next_attempt=None, is_suspended=False)
            return structs.replace(self, event=event)
        assert self.webhook is not None
        webhook = structs.replace(self.webhook, attempts=0, next_attempt=None, is_dead=False)
        return structs.replace(self, expires=None, webhook=webhook)


def reason_not_storable(record: DurableSubscription) -> str | None:
    """Return why a store could not write a record, or None if it could. Clients choose its contents."""
    try:
        size = len(msgspec.json.encode(record))
    except UnicodeEncodeError:
        return "its name, a URI or a pattern contains an unpaired surrogate, which UTF-8 can't encode"
    return (
        f"it has {size} bytes, and {_MAX_RECORD_SIZE} are allowed; watch fewer URIs"
        if size > _MAX_RECORD_SIZE
        else None
    )


def as_json(durable: DurableSubscription, *, is_connected: bool = False) -> dict[str, Any]:
    """Return a record as clients and scripts read it, without its secret."""
    described: dict[str, Any] = {
        "name": durable.name,
        "notifications": topics_json(durable.features, durable.uris),
        "ttl": durable.ttl,
        "created": iso_time(durable.created),
        "expires": None if durable.expires is None else iso_time(durable.expires),
        "connected": is_connected,
    }
    if durable.terms:
        described["filter"] = durable.terms
    if durable.webhook is not None:
        described["webhook"] = _webhook(durable.webhook)
    if durable.event is not None:
        described["event"] = _event(durable.event)
    return described


def _webhook(webhook: Webhook) -> dict[str, Any]:
    state = "dead" if webhook.is_dead else "retrying" if webhook.attempts else "active"
    described: dict[str, Any] = {"url": webhook.url, "state": state, "attempts": webhook.attempts}
    if webhook.next_attempt is not None:
        described["nextAttempt"] = iso_time(webhook.next_attempt)
    if webhook.last_success is not None:
        described["lastSuccess"] = iso_time(webhook.last_success)
    if webhook.last_error is not None:
        described["lastError"] = webhook.last_error
    if webhook.refetch:
        described["refetch"] = list(webhook.refetch)
    if webhook.last_refetch is not None:
        described["lastRefetch"] = iso_time(webhook.last_refetch)
    return described


def _event(event: EventTarget) -> dict[str, Any]:
    state = "suspended" if event.is_suspended else "retrying" if event.attempts else "active"
    described: dict[str, Any] = {"name": event.name, "url": event.url, "state": state, "attempts": event.attempts}
    if event.arguments:
        described["arguments"] = event.arguments
    if event.next_attempt is not None:
        described["nextAttempt"] = iso_time(event.next_attempt)
    if event.last_success is not None:
        described["lastSuccess"] = iso_time(event.last_success)
    if event.last_error is not None:
        described["lastError"] = event.last_error
    return described
