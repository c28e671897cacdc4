"""One connection of a durable subscription, and the versions that its client has certainly received.

A notification that was written to a connection may be lost with it, without any error. So it counts as received only
if the connection then stays open for long enough to detect a lost client. A client that returns earlier is told to
refetch. It may get a notification twice, but never misses one; a client that returns with its cursor gets each once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import filterfalse, islice
from typing import TYPE_CHECKING

from msgspec import structs

from tidings.core.model import Feature, Notification, Topic, Version
from tidings.core.patterns import is_pattern
from tidings.core.redact import topic_name
from tidings.core.resume import Resumed
from tidings.core.subscriber import Subscriber
from tidings.store.durable import DurableSubscription

if TYPE_CHECKING:
    from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["MAX_CONTENTS", "DurableConnection"]

logger = logging.getLogger(__name__)

MAX_CONTENTS = 256
"""Watched URIs whose versions are stored one by one. For the others, `as_of` and the journal are enough; at worst the
client gets a notification for a content that has changed back."""


class DurableConnection:
    """One connection under the name of a durable subscription."""

    def __init__(
        self, durables: DurableSubscriptions, record: DurableSubscription, *, is_new: bool, end: Callable[[], None]
    ) -> None:
        self.key = record.key
        self.ack = {"name": record.name, "ttl": record.ttl, "isNew": is_new}
        self.end = end
        """Ends the connection, gracefully if its transport can."""
        self.confirms_receipt = False
        """Whether the transport knows what the client has received."""
        self._durables = durables
        self._hub = hub = durables.hub
        self._is_new = is_new
        self._subscriber: Subscriber | None = None
        self._confirm_after = hub.policy.write_deadline + hub.policy.keep_alive
        self._recent: set[Topic] = set()
        """Topics that the client was told of since `_period_start`."""
        self._older: set[Topic] = set()
        """Topics that it was told of in the period before. They are confirmed when this period is over."""
        self._period_start = hub.catalog.now()

    @property
    def confirmed_at(self) -> float | None:
        """When more of what the client was told counts as received, if the connection stays open until then; None if
        everything does."""
        return self._period_start + self._confirm_after if self._recent or self._older else None

    def attach(self, subscriber: Subscriber, *, confirms_receipt: bool = False) -> None:
        """Record from now on what this subscriber is told. Call it before the subscriber subscribes. With
        `confirms_receipt`, its transport is busy until the client has confirmed a notification, and calls `save`
        then."""
        self._subscriber = subscriber
        self.confirms_receipt = confirms_receipt
        subscriber.before_close = self._on_close
        subscriber.before_delivery(self._before_delivery)

    def save(self) -> None:
        """Write the record with the next batch: the client watches other topics, or has confirmed a notification."""
        if self._subscriber is not None:
            self._durables.save(self)

    def detach(self) -> None:
        """Stop recording: another connection has the name, or the subscription was removed."""
        if self._subscriber is not None:
            self._subscriber.before_close = None
            self._subscriber = None

    def resumed(self, is_authorized: Callable[[str], bool] | None = None) -> Resumed:
        """Return what the client has missed, according to its record."""
        return Resumed({}) if self._is_new else self._durables.missed(self.key, is_authorized)

    def told(self) -> dict[Topic, Version | None]:
        """Return the same for `hub.subscribe`, where no acknowledgement can tell the client to refetch."""
        told, refetch = self.resumed()
        if refetch:
            names = ", ".join(map(topic_name, refetch))
            logger.warning("%r was away for too long to be told what it missed of %s", self.key[1], names)
        return {**told, **dict.fromkeys(uri for uri in refetch if not is_pattern(uri))}

    def update(self, record: DurableSubscription) -> DurableSubscription:
        """Return `record` with the versions that the client has certainly received."""
        subscriber, hub = self._subscriber, self._hub
        if subscriber is None:
            return record
        if not subscriber.is_ready:
            if self.confirms_receipt:
                return record
            self._period_start = hub.catalog.now()  # the client has not read: nothing is confirmed meanwhile
        # Changes that its filter excluded count as known: they need no notification later either.
        pending = hub.pending_versions(subscriber)
        contents: dict[str, Version | None] = {}
        for uri in islice(filterfalse(is_pattern, subscriber.uris or ()), MAX_CONTENTS):
            if (version := pending.get(uri, hub.notifications.version(uri))) is None or version.revision > 0:
                contents[uri] = version
        contents |= {topic: version for topic, version in pending.items() if not isinstance(topic, Feature)}
        watched = [feature for feature in Feature if feature in subscriber.features]
        lists = {feature: pending.get(feature, hub.notifications.version(feature)) for feature in watched}
        self._start_period()
        unconfirmed = self._recent | self._older
        if (topic := hub.delivering_to(subscriber)) is not None:  # a callback closed this subscriber meanwhile
            unconfirmed.add(topic)
        uris = subscriber.uris or {}
        # A deletion ended these subscriptions, if the client received it.
        deleted = {topic for topic in unconfirmed if not isinstance(topic, Feature) and topic not in uris}
        for topic in unconfirmed:
            if not isinstance(topic, Feature):
                contents[topic] = None
            elif topic in lists:
                lists[topic] = None
        return structs.replace(
            record,
            features=tuple(lists),
            uris=(*uris, *(uri for uri in record.uris if uri in deleted)) if deleted else tuple(uris),
            as_of=hub.notifications.revision,
            lists=lists,
            contents=contents,
        )

    def _before_delivery(self, notification: Notification) -> None:
        if self._subscriber is None or self.confirms_receipt:
            return
        self._start_period()
        if not self._recent:
            self._durables.save(self, at=self._period_start + self._confirm_after)
        self._recent.add(notification.topic)

    def _start_period(self) -> None:
        """Start a new period if the present one is over."""
        now = self._hub.catalog.now()
        if now - self._period_start >= self._confirm_after:
            self._older = self._recent if now - self._period_start < 2 * self._confirm_after else set()
            self._recent, self._period_start = set(), now

    def _on_close(self, subscriber: Subscriber) -> None:
        self._durables.disconnect(self)
