"""Subscriptions that outlive their connection, and with a store their server.

A durable subscription has a name that its client chose, bound to the client's principal. It keeps what it watches, on
which terms, and what it was last told; whoever comes back under its name is told what differs. It is forgotten after a
time without its client. Not a queue: like every subscriber it remembers versions, and no events.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from tidings.model import Feature, Topic, Version

__all__ = ["Durable", "Key", "Owner", "Webhook"]

Owner: TypeAlias = tuple[str, str | None] | None
"""Whose it is: `Principal.who`, or None where nobody has to say who they are."""

Key: TypeAlias = tuple[Owner, str]
"""Owner and name."""


class Webhook(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a durable subscription is delivered to without a stream, and how that goes."""

    url: str
    secret: str
    attempts: int = 0
    """How many in a row have failed."""
    next_attempt: float | None = None
    last_success: float | None = None
    last_error: str | None = None
    is_dead: bool = False
    """Given up: nothing is sent until somebody puts the subscription anew."""


class Durable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One durable subscription as it is kept. Times are the catalog's, in seconds since 1970."""

    name: str
    owner: Owner = None
    features: tuple[Feature, ...] = ()
    uris: tuple[str, ...] = ()
    """URIs and patterns."""
    terms: dict[str, Any] = {}
    """What was honoured of `dev.tidings/filter`, in the wire's own words."""
    as_of: int = 0
    """The revision as of which it knows everything that it watches, but for what `told` says otherwise."""
    told: dict[Topic, Version | None] = {}
    """What it was last told of a topic; None for never. Always there for the lists, so that they compare by digest."""
    ttl: float = 0.0
    created: float = 0.0
    expires: float | None = None
    """None while its client is there."""
    webhook: Webhook | None = None

    @property
    def key(self) -> Key:
        return (self.owner, self.name)
