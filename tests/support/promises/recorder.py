"""The recorder of a hub's history in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tests.support.promises.history import (
    Changed,
    Closed,
    Event,
    Fetched,
    FetchEnded,
    FetchStarted,
    History,
    MailboxSize,
    Muted,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
)
from tidings.core.hub import Hub
from tidings.core.model import Change, Feature, Notification, Operation, Reason, Topic, Version
from tidings.core.observer import Observer
from tidings.core.subscriber import Subscriber


class Recorder(Observer):
    """A recorder of all events of a hub, from its construction on.

    Call `look()` at least once before the checks.
    """

    def __init__(self, hub: Hub, history: History | None = None) -> None:
        self.history = History() if history is None else history
        self._hub = hub
        self._fetches: Counter[tuple[Topic, int]] = Counter()
        """The fetches in progress when the last event was recorded."""
        self._names: dict[Subscriber, str] = {}
        self._muted: dict[Subscriber, set[Topic]] = {}
        """The muted topics of each open subscriber."""
        self._topics: dict[Topic, None] = {}
        with hub.catalog.lock:
            self._record_present()
            hub.observers.add(self)

    def _record_present(self) -> None:
        """Record the versions, subscribers and fetches that exist already."""
        catalog = self._hub.catalog
        for topic in (*Feature, *catalog.resources.contents()):
            self._topics[topic] = None
            self._record(Changed(topic, catalog.version(topic)))
        for subscriber in self._hub:
            self.opened(subscriber)
            self.subscribed(subscriber, subscriber.watched, {})
        self._record_fetches()

    def name(self, subscriber: Subscriber) -> str:
        """Return the name of a subscriber in the history."""
        return self._names[subscriber]

    def look(self) -> None:
        """Record the state that causes no event: fetches, muted topics, and the size of each mailbox."""
        with self._hub.catalog.lock:
            self._record_fetches()
            for subscriber in self._muted:
                for topic in self._topics:
                    self._record_muting(subscriber, topic)
                size, limit = subscriber.mailbox_size, subscriber.settings.max_pending
                self._record(MailboxSize(self._names[subscriber], size, limit))

    def _record_muting(self, subscriber: Subscriber, topic: Topic) -> None:
        muted = self._muted[subscriber]
        try:
            is_muted = subscriber.is_muted is not None and subscriber.is_muted(topic)
        except Exception:  # a user's function; the hub treats an error as muted
            is_muted = True
        if is_muted != (topic in muted):
            muted ^= {topic}
            event: Event = (Muted if is_muted else Unmuted)(self._names[subscriber], (topic,))
            self._record(event)

    def opened(self, subscriber: Subscriber) -> None:
        self._names[subscriber] = f"{subscriber.label or 'subscriber'}-{len(self._names) + 1}"
        self._muted[subscriber] = set()
        subscriber.before_delivery(lambda notification: self._delivering(subscriber, notification))

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        name, subresources = self._names[subscriber], self._hub.policy.subresources
        self._record(Subscribed(name, tuple(topics), told, subscriber.filter, subresources))

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        for subscriber, topic in ended:
            self._record(Unsubscribed(self._names[subscriber], (topic,)))

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        del self._muted[subscriber]
        self._record(Closed(self._names[subscriber], reason.value))

    def publishing(
        self,
        notification: Notification,
        changes: tuple[Change, ...],
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
    ) -> None:
        for change in changes:
            self._topics[change.topic] = None
            if change.is_unknown:
                self._record(Changed(change.topic, change.version, operation=Operation.UPDATED))
            else:
                self._record(Changed.from_change(change))

    def _delivering(self, subscriber: Subscriber, notification: Notification) -> None:
        if subscriber in self._muted:
            self._record_muting(subscriber, notification.topic)
        name, topic = self._names[subscriber], notification.topic
        changes = tuple((change.operation, change.key) for change in notification.changes)
        self._record(Told(name, topic, notification.version, changes, notification.complete))

    def fetched(self, topic: Topic, version: Version) -> None:
        self._record(Fetched(topic, version))

    def _record(self, event: Event) -> None:
        self._record_fetches()
        self.history.record(event)

    def _record_fetches(self) -> None:
        """Record the fetches that have started or ended since the last event."""
        before, self._fetches = self._fetches, Counter(self._hub.notifications.fetched.in_progress())
        for topic, revision in (self._fetches - before).elements():
            self.history.record(FetchStarted(topic, revision))
        for topic, revision in (before - self._fetches).elements():
            self.history.record(FetchEnded(topic, revision))
