"""The events of a hub, for counting, logs, traces and tests.

The hub calls each observer with its lock held. An observer must not wait and must not raise. There is no event for a
subscriber that gets a change immediately, because there may be thousands: all subscribers of a publication got it,
except those with an event of their own in between. An observer that needs an event per delivery adds
`Subscriber.before_delivery` when the subscriber is opened.

`tidings.core.event_log` counts and logs the events, `tidings.telemetry.tracing` creates spans for them, and
`tidings.testing` records them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidings.core.model import Change, Notification, Reason, Topic, Version

if TYPE_CHECKING:
    from tidings.core.counts import SuppressionReason
    from tidings.core.subscriber import Subscriber

__all__ = ["Observer", "Observers", "subscribers_and_topics"]


class Observer:
    """Receives the events of a hub, in order. This base class ignores them."""

    def opened(self, subscriber: Subscriber) -> None: ...

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        """Called before anything of these topics is delivered."""

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        """Called after subscriptions ended: those of one subscriber, or, if `cause` deleted a resource, of several."""

    def expired(self, name: str) -> None:
        """Called when a durable subscription ends because its client was away for too long."""

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        """Called before a subscriber is closed, while its subscriptions and mailbox still exist."""

    def publishing(
        self,
        notification: Notification,
        changes: tuple[Change, ...],
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
    ) -> None:
        """Called before the changes of one topic are delivered to its subscribers. The notification of a content has
        only the last of its changes. `keys` are the subscriptions that match: the topic itself, patterns and parent
        resources."""

    def published(self, notification: Notification, subscribers: int) -> None:
        """Called after the changes were delivered to all subscribers that are ready."""

    def queued(self, subscriber: Subscriber, notification: Notification, due: float, *, was_pending: bool) -> None:
        """Called after a change was added to a mailbox. `due` is `NEVER` if it needs no notification. `was_pending`:
        an earlier change of the topic was pending."""

    def unconfirmed(self, subscriber: Subscriber, notification: Notification) -> None:
        """Called after a notification was passed to a subscriber that learns later whether it has arrived. `delivered`
        is called when it has."""

    def delivered(self, subscriber: Subscriber, notification: Notification, seconds: float) -> None:
        """Called after a notification was delivered from a mailbox, or has arrived. `seconds` is its latency."""

    def suppressed(self, subscriber: Subscriber, topic: Topic, reason: SuppressionReason) -> None:
        """Called if a subscriber gets no notification of a change that is being published, or of what was pending."""

    def overflowed(self, subscriber: Subscriber, merged: int, *, is_closed: bool) -> None:
        """Called if more topics are pending than the policy allows. The subscriber is closed, or the pending contents
        are `merged` into one notification to refetch all resources."""

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        """Called if `deliver` raised."""

    def fetched(self, topic: Topic, version: Version) -> None:
        """Called when a client fetched a version, for the checks of the promises."""


class Observers(Observer):
    """Passes each event to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def add(self, observer: Observer) -> None:
        self._observers += (observer,)

    def opened(self, subscriber: Subscriber) -> None:
        for observer in self._observers:
            observer.opened(subscriber)

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        for observer in self._observers:
            observer.subscribed(subscriber, topics, told)

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        for observer in self._observers:
            observer.unsubscribed(ended, reason, cause)

    def expired(self, name: str) -> None:
        for observer in self._observers:
            observer.expired(name)

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        for observer in self._observers:
            observer.closed(subscriber, reason)

    def publishing(
        self,
        notification: Notification,
        changes: tuple[Change, ...],
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
    ) -> None:
        for observer in self._observers:
            observer.publishing(notification, changes, subscribers, keys)

    def published(self, notification: Notification, subscribers: int) -> None:
        for observer in self._observers:
            observer.published(notification, subscribers)

    def queued(self, subscriber: Subscriber, notification: Notification, due: float, *, was_pending: bool) -> None:
        for observer in self._observers:
            observer.queued(subscriber, notification, due, was_pending=was_pending)

    def unconfirmed(self, subscriber: Subscriber, notification: Notification) -> None:
        for observer in self._observers:
            observer.unconfirmed(subscriber, notification)

    def delivered(self, subscriber: Subscriber, notification: Notification, seconds: float) -> None:
        for observer in self._observers:
            observer.delivered(subscriber, notification, seconds)

    def suppressed(self, subscriber: Subscriber, topic: Topic, reason: SuppressionReason) -> None:
        for observer in self._observers:
            observer.suppressed(subscriber, topic, reason)

    def overflowed(self, subscriber: Subscriber, merged: int, *, is_closed: bool) -> None:
        for observer in self._observers:
            observer.overflowed(subscriber, merged, is_closed=is_closed)

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        for observer in self._observers:
            observer.failed(subscriber, notification, error)

    def fetched(self, topic: Topic, version: Version) -> None:
        for observer in self._observers:
            observer.fetched(topic, version)


def subscribers_and_topics(ended: list[tuple[Subscriber, Topic]]) -> tuple[list[Subscriber], list[Topic]]:
    """Return the different subscribers and the different topics of subscriptions that ended."""
    return list(dict.fromkeys(subscriber for subscriber, _ in ended)), list(dict.fromkeys(topic for _, topic in ended))
