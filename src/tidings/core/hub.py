"""The registry of the subscribers of one catalog.

Subscribers are opened, subscribe to topics, and are closed here. `tidings.core.delivery` delivers to them; the hub
passes commits, wake-ups and ticks on to it. A callback that the hub calls must not wait.

The hub has no queue of notifications: past changes are in the journal, as far as it reaches. It never sleeps: its owner
calls `tick(now)` at `next_due()`, and `on_timer_change` says when that becomes earlier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from tidings.core.catalog import Catalog
from tidings.core.counts import Counts
from tidings.core.cursor import Cursor
from tidings.core.delivery import Delivery
from tidings.core.delivery_settings import DeliverySettings
from tidings.core.event_log import EventLog
from tidings.core.filters import Filter
from tidings.core.index import WatchIndex, check_limit
from tidings.core.journal import ChangeHistory, Journal, changes_since_told
from tidings.core.mailbox import IsMuted
from tidings.core.model import Feature, Notification, Reason, Topic, Version, topic_named
from tidings.core.notifications import Notifications
from tidings.core.observer import Observers
from tidings.core.patterns import Match, Templates, is_pattern
from tidings.core.redact import redact_uri
from tidings.core.subscriber import BUSY, LOCAL, ConnectionKind, Deliver, OnClose, Subscriber, check_callback
from tidings.core.tracer import Tracer
from tidings.policy import Policy

__all__ = ["BUSY", "Hub", "Subscriber"]

logger = logging.getLogger(__name__)


class Hub:
    """The subscribers of one catalog. It shares the lock of the catalog, so both can be used from any thread."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        policy: Policy | None = None,
        journal: Journal | None = None,
        templates: Templates | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_watched: Callable[[Topic], None] | None = None,
        on_unwatched: Callable[[Topic], None] | None = None,
    ) -> None:
        """Every commit of the catalog is published immediately, in the thread that made it, unless the catalog is given
        another `publisher` afterwards."""
        self.catalog = catalog
        self.policy = policy or catalog.policy
        self.settings = self.policy.delivery
        """Those of the subscribers without settings of their own."""
        self.counts = Counts()
        self.log = EventLog(self.counts)
        self.observers = Observers(self.log)
        """Add an observer with `hub.observers.add(…)`."""
        self.tracer = Tracer()
        self.notifications = Notifications(catalog, self.policy, journal, self.observers)
        self.journal = self.notifications.journal
        self.on_watched = on_watched
        """Called with a feature, URI or pattern when it gets its first subscriber, for example to start polling it."""
        self.on_unwatched = on_unwatched
        """Called when its last subscriber is gone."""
        self.on_timer_change: Callable[[float], None] | None = None
        """Called with a time when `tick` is needed then, earlier than before."""
        self._clock = clock
        self._lock = catalog.lock
        self._subscribers: dict[Subscriber, None] = {}
        self._callbacks: dict[object, Subscriber] = {}
        """The subscribers that are callbacks. Each callback has one subscriber, however often it subscribes."""
        self.index = WatchIndex(templates, self.policy.subresources)
        self._started: set[Topic] = set()
        """The topics for which `on_watched` was called, and `on_unwatched` was not."""
        self.delivery = Delivery(self, self.index, clock)
        catalog.publisher = self.delivery.publish

    # Subscribing

    def open(
        self,
        deliver: Deliver,
        *,
        label: str = "",
        kind: ConnectionKind = LOCAL,
        settings: DeliverySettings | None = None,
        filter: Filter | None = None,
        is_muted: IsMuted | None = None,
        on_close: OnClose | None = None,
    ) -> Subscriber:
        """Return a new subscriber that watches nothing yet. `settings` are those of a `Policy(…).delivery`."""
        with self._lock:
            subscriber = Subscriber(
                self,
                deliver,
                settings or self.settings,
                label=label,
                kind=kind,
                filter=filter,
                is_muted=is_muted,
                on_close=on_close,
            )
            self._subscribers[subscriber] = None
            self.observers.opened(subscriber)
            return subscriber

    def subscribe(
        self,
        subscriber: Subscriber | Callable[[Notification], object],
        *features: Feature | str,
        uris: Iterable[str] = (),
        told: Mapping[Topic, Version | None] | None = None,
        ttl: float | None = None,
        matches: Mapping[str, Match] | None = None,
        **options: Any,
    ) -> Subscriber:
        """Subscribe a subscriber, or a callback, to further features, URIs and URI patterns.

        A callback has one subscriber, however often it subscribes. `options` are those of `open()`, and are ignored
        after the first time.

        A subscriber is taken to know the present version of what it watches, unless `told` has another version, or None
        for none. After `ttl` seconds, the subscriptions named here end. `matches` has patterns that are compiled
        already.
        """
        requested_features = [Feature(feature) for feature in features]
        requested_uris = [uris] if isinstance(uris, str) else list(uris)
        with self.delivery:
            # Check everything before anything is changed.
            known = self._find(subscriber)
            check_limit(self.policy, known, requested_uris)
            known_matches = matches or {}
            matches = {
                uri: known_matches.get(uri) or self.index.compile_pattern(uri)
                for uri in filter(is_pattern, requested_uris)
            }
            if not isinstance(subscriber, Subscriber):
                subscriber = known or self._open_callback(subscriber, options)
            if subscriber.is_closed:
                return subscriber
            topics: list[Topic] = [*requested_features, *requested_uris]
            newly_watched = [topic for topic in topics if self.index.add(subscriber, topic, matches)]
            told = told or {}
            self.observers.subscribed(subscriber, topics, told)
            now = self._clock()
            subscriber.set_expiry(topics, None if ttl is None else now + ttl)
            if ttl is not None:
                self.delivery.set_timer(subscriber, now + ttl)
            self.delivery.add_missed(subscriber, told, now)
            # Last, because a hook may make changes, and this subscriber gets them like any other.
            for topic in newly_watched:
                self._start(topic)
            if told and not subscriber.is_closed:
                self.delivery.deliver_due(subscriber, now)
            return subscriber

    def unsubscribe(
        self,
        subscriber: Subscriber | Callable[[Notification], object],
        *features: Feature | str,
        uris: Iterable[str] = (),
    ) -> None:
        """End the named subscriptions, or all if none is named. Those that do not exist are ignored."""
        requested_features = [Feature(feature) for feature in features]
        requested_uris = [uris] if isinstance(uris, str) else list(uris)
        with self._lock:
            known = self._find(subscriber)
            if known is not None:
                self.end_subscriptions(
                    [known], [*requested_features, *requested_uris] or known.watched, Reason.UNSUBSCRIBED
                )

    def close(
        self, subscriber: Subscriber | Callable[[Notification], object], reason: Reason = Reason.UNSUBSCRIBED
    ) -> None:
        """Remove a subscriber. Closing it again does nothing."""
        with self._lock:
            known = self._find(subscriber)
            if known is None or known.is_closed:
                return
            self.observers.closed(known, reason)
            if known.before_close is not None:
                self._call_hook(known.before_close, known)
            known.mark_closed()
            for topic in self.index.remove(known):
                self._stop(topic)
            self.delivery.forget(known)
            self._subscribers.pop(known, None)
            if self._is_callback(known):
                del self._callbacks[_identity(known.deliver)]
            if known.on_close is not None:
                self._call_hook(known.on_close, reason)

    def end_subscriptions(
        self, subscribers: list[Subscriber], topics: list[Topic], reason: Reason, cause: Notification | None = None
    ) -> None:
        """End the subscriptions of each subscriber to each topic. The caller holds the lock."""
        ended = [
            (subscriber, topic)
            for subscriber in subscribers
            for topic in topics
            if self.index.discard(subscriber, topic)
        ]
        for subscriber, topic in ended:
            subscriber.set_expiry([topic], None)
            self._stop(topic)
        if ended:
            self.observers.unsubscribed(ended, reason, cause)
        for subscriber in subscribers:
            self.delivery.drop_unwatched(subscriber)
            # A callback without subscriptions is closed. A connection stays open: it may subscribe again.
            if subscriber.is_idle and self._is_callback(subscriber):
                self.close(subscriber, reason)

    # Queries

    def subscribers(self, topic: Feature | str) -> list[Subscriber]:
        """Return the subscribers that get the changes of a topic: a feature by its name, or the URI of a resource."""
        with self._lock:
            return list(self.index.subscribers(self.index.keys(topic_named(topic))))

    def subscriptions(self) -> list[tuple[Topic, list[Subscriber]]]:
        """Return every feature, URI and pattern that is watched, with its subscribers."""
        with self._lock:
            return [(topic, list(subscribers)) for topic, subscribers in self.index.by_topic.items()]

    def count_subscriptions(self) -> list[tuple[Topic, int]]:
        """Return the same with the number of subscribers, and without the lock, because metrics ask often."""
        return [(topic, len(subscribers)) for topic, subscribers in list(self.index.by_topic.items())]

    def told(self, subscriber: Subscriber, topic: Topic) -> Version | None:
        """Return the version that a subscriber was told, or knew when it subscribed; None for none."""
        entry = subscriber.mailbox.entries.get(topic) if subscriber.mailbox else None
        return entry.told if entry else self.notifications.version(topic)

    def known_versions(self, subscriber: Subscriber) -> dict[Topic, Version | None]:
        """Return the versions from which a subscriber can resume: with these as `told`, it gets all that it has not
        been told. Patterns have no version; the URIs that they match are included while they are pending."""
        with self._lock:
            exact = (topic for topic in subscriber.watched if not is_pattern(topic))
            known: dict[Topic, Version | None] = {topic: self.notifications.version(topic) for topic in exact}
            return known | self.pending_versions(subscriber)

    def pending_versions(self, subscriber: Subscriber) -> dict[Topic, Version | None]:
        """Return the part of `known_versions` that is not the newest version, or may not be."""
        return subscriber.mailbox.known_versions() if subscriber.mailbox else {}

    def delivering_to(self, subscriber: Subscriber) -> Topic | None:
        """Return the topic that is being delivered, if the subscriber watches it and may not have been told yet."""
        topic = self.delivery.topic
        return topic if topic and self.index.is_watching(subscriber, self.index.keys(topic)) else None

    def history(self, topic: Topic | None, since: int | Cursor | None, epoch: str) -> ChangeHistory:
        """Return the changes of one topic, or of all, after a revision or since a cursor of this `epoch`."""
        with self._lock:
            self.journal.expire(self.catalog.now())
            if isinstance(since, Cursor):
                changes, _ = self.journal.kept_since(0)
                return changes_since_told(changes, self.notifications.version, since.told(epoch), topic)
            changes, is_complete = self.journal.kept_since(since or 0, topic)
            return ChangeHistory(tuple(changes), is_complete)

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(tuple(self._subscribers))

    def __len__(self) -> int:
        with self._lock:
            return len(self._subscribers)

    # Delivery

    def wake(self, subscriber: Subscriber, *, was_absent: bool = False) -> None:
        """Deliver what is pending for a subscriber that accepts notifications again, or is no longer muted.

        `was_absent`: its client was away, so its latency counts from now on.
        """
        self.delivery.wake(subscriber, was_absent=was_absent)

    def next_due(self) -> float | None:
        """Return when `tick` is needed."""
        return self.delivery.next_due()

    def tick(self, now: float | None = None) -> None:
        """Deliver what has become due, and end the subscriptions whose time to live is over."""
        self.delivery.tick(now)

    def timer_changed(self, when: float) -> None:
        if self.on_timer_change is not None:
            self._call_hook(self.on_timer_change, when)

    # Hooks

    def _start(self, topic: Topic) -> None:
        if topic in self.index.by_topic and topic not in self._started:
            self._started.add(topic)
            if self.on_watched is not None:
                self._call_hook(self.on_watched, topic)

    def _stop(self, topic: Topic) -> None:
        if topic in self._started and topic not in self.index.by_topic:
            self._started.remove(topic)
            if self.on_unwatched is not None:
                self._call_hook(self.on_unwatched, topic)

    def _call_hook(self, hook: Callable[[Any], object], argument: object) -> None:
        try:
            hook(argument)
        except Exception:  # the user's function must not leave the hub inconsistent
            self.counts.failures["hook"] += 1
            name = redact_uri(argument) if isinstance(argument, str) else argument
            logger.exception("a hook of the hub failed on %r; the hub continues without it", name)

    def _open_callback(self, callback: Callable[[Notification], object], options: Mapping[str, Any]) -> Subscriber:
        check_callback(callback)
        options = {"label": getattr(callback, "__qualname__", ""), **options}
        subscriber = self._callbacks[_identity(callback)] = self.open(callback, **options)
        return subscriber

    def _is_callback(self, subscriber: Subscriber) -> bool:
        return self._callbacks.get(_identity(subscriber.deliver)) is subscriber

    def _find(self, subscriber: Subscriber | Callable[[Notification], object]) -> Subscriber | None:
        return subscriber if isinstance(subscriber, Subscriber) else self._callbacks.get(_identity(subscriber))


def _identity(callback: object) -> object:
    """Return a key that is equal for two references to the same callback."""
    return callback if isinstance(callback, Hashable) else id(callback)
