"""Records a history inside a process, at the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidings.core.catalog import Catalog
from tidings.core.hub import Hub
from tidings.core.model import Change, Feature, Notification, Reason, Topic, Version
from tidings.core.subscriber import Subscriber, identity
from tidings.testing.history import (
    Answered,
    Answering,
    Changed,
    Closed,
    Fetched,
    Held,
    History,
    Muted,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
)

__all__ = ["Recorder"]


class Recorder:
    """Writes down all that happens at a hub, from now on. Call `look()` before the checks, and as often as you like."""

    def __init__(self, hub: Hub, history: History | None = None) -> None:
        self.history = History() if history is None else history
        self._hub = hub
        self._names: dict[Subscriber, str] = {}
        self._asked: dict[Subscriber, set[Topic]] = {}
        self._muted: dict[Subscriber, set[Topic]] = {}
        self._topics: dict[Topic, None] = {}
        self._count = 0
        self._first_wish: tuple[tuple[Topic, ...], Mapping[Topic, Version | None]] | None = None
        """What a callback asked for that has no subscriber yet."""
        with hub.catalog.lock:
            self._begin(hub.catalog)
            self._hub_open, self._hub_subscribe = hub.open, hub.subscribe
            self._hub_unsubscribe, self._hub_close = hub.unsubscribe, hub.close
            hub.open, hub.subscribe = self._open, self._subscribe  # type: ignore[method-assign]
            hub.unsubscribe, hub.close = self._unsubscribe, self._close  # type: ignore[method-assign]
            self._journal_append = hub.journal.append
            hub.journal.append = self._append  # type: ignore[method-assign]
            shown = hub.notifications.fetched
            for topic, revisions in shown._under_way.items():
                for revision in revisions:
                    self.history.record(Answering(topic, revision))
            self._shown_begin, self._shown_end, self._shown_note = shown.begin, shown.end, shown.note
            shown.begin, shown.end = self._begin_showing, self._end_showing  # type: ignore[method-assign]
            shown.note = self._show  # type: ignore[method-assign]
            for subscriber in hub._subscribers:
                self._adopt(subscriber)
                self._wish(subscriber, tuple(subscriber.watched), {})

    def name(self, subscriber: Subscriber) -> str:
        """By which name the history knows an open subscriber."""
        return self._names[subscriber]

    def look(self) -> None:
        """Write down what makes no noise: subscriptions that ran out, who is muted, and what each mailbox holds."""
        with self._hub.catalog.lock:
            for subscriber, name in self._names.items():
                self._look_at(subscriber)
                for topic in self._topics:
                    self._look_whether_muted(subscriber, name, topic)
                self.history.record(Held(name, subscriber.pending, subscriber.policy.max_pending))

    def _begin(self, catalog: Catalog) -> None:
        for topic in (*Feature, *catalog.resources._contents):
            self._topics[topic] = None
            self.history.record(Changed(topic, catalog.version(topic)))

    def _adopt(self, subscriber: Subscriber) -> str:
        self._count += 1
        name = f"{subscriber.label or 'subscriber'}-{self._count}"
        self._names[subscriber] = name
        self._asked[subscriber] = set()
        self._muted[subscriber] = set()
        subscriber.deliver = _Tap(subscriber.deliver, lambda notification: self._told(subscriber, name, notification))
        return name

    def _append(self, changes: Iterable[Change]) -> None:
        # Here, and not as a sink of the catalog: a change counts from when the hub hears of it, before anybody is told.
        changes = tuple(changes)
        for change in changes:
            self._topics[change.topic] = None
            self.history.record(Changed.from_change(change))
        self._journal_append(changes)

    def _begin_showing(self, topic: Topic, revision: int) -> None:
        self.history.record(Answering(topic, revision))
        self._shown_begin(topic, revision)

    def _end_showing(self, topic: Topic, revision: int) -> None:
        self._shown_end(topic, revision)
        self.history.record(Answered(topic, revision))

    def _show(self, topic: Topic, version: Version) -> None:
        self.history.record(Fetched(topic, version))
        self._shown_note(topic, version)

    def _told(self, subscriber: Subscriber, name: str, notification: Notification) -> None:
        if subscriber in self._names:
            self._look_at(subscriber)
            self._look_whether_muted(subscriber, name, notification.topic)
        changes = tuple((change.operation, change.key) for change in notification.changes)
        self.history.record(Told(name, notification.topic, notification.version, changes, notification.complete))

    def _wish(self, subscriber: Subscriber, topics: tuple[Topic, ...], told: Mapping[Topic, Version | None]) -> None:
        if subscriber in self._names:
            self._look_at(subscriber)
            self._asked[subscriber].update(topics)
            subresources = self._hub.policy.subresources
            self.history.record(Subscribed(self._names[subscriber], topics, told, subscriber.filter, subresources))

    def _look_at(self, subscriber: Subscriber) -> None:
        asked = self._asked.get(subscriber, set())
        if gone := tuple(topic for topic in asked if topic not in subscriber.watched):
            asked.difference_update(gone)
            self.history.record(Unsubscribed(self._names[subscriber], gone))

    def _look_whether_muted(self, subscriber: Subscriber, name: str, topic: Topic) -> None:
        muted = self._muted[subscriber]
        try:
            silent = subscriber.is_muted
            is_muted = silent is not None and silent(topic)
        except Exception:  # the user's; one that fails is taken as muted
            is_muted = True
        if is_muted and topic not in muted:
            muted.add(topic)
            self.history.record(Muted(name, (topic,)))
        elif not is_muted and topic in muted:
            muted.remove(topic)
            self.history.record(Unmuted(name, (topic,)))

    def _open(self, *args: Any, **options: Any) -> Subscriber:
        with self._hub.catalog.lock:
            subscriber = self._hub_open(*args, **options)
            self._adopt(subscriber)
            if self._first_wish is not None:
                wish, self._first_wish = self._first_wish, None
                self._wish(subscriber, *wish)
            return subscriber

    def _subscribe(
        self,
        who: Subscriber | Callable[[Notification], object],
        *features: Feature | str,
        uris: Iterable[str] = (),
        told: Mapping[Topic, Version | None] | None = None,
        **options: Any,
    ) -> Subscriber:
        paths = [uris] if isinstance(uris, str) else list(uris)
        topics: tuple[Topic, ...] = (*map(Feature, features), *paths)
        with self._hub.catalog.lock:
            # Before the hub acts: it may tell at once.
            known = self._hub._find(who)
            if known is None:
                self._first_wish = (topics, told or {})
            else:
                self._wish(known, topics, told or {})
            try:
                return self._hub_subscribe(who, *features, uris=paths, told=told, **options)
            finally:
                self._first_wish = None
                # What was refused was never subscribed.
                if (subscriber := self._hub._find(who)) in self._names:
                    self._look_at(subscriber)

    def _unsubscribe(self, who: Subscriber | Callable[[Notification], object], *args: Any, **options: Any) -> None:
        with self._hub.catalog.lock:
            subscriber = self._hub._find(who)
            self._hub_unsubscribe(who, *args, **options)
            if subscriber in self._names:
                self._look_at(subscriber)

    def _close(self, who: Subscriber | Callable[[Notification], object], reason: Reason = Reason.UNSUBSCRIBED) -> None:
        with self._hub.catalog.lock:
            subscriber = self._hub._find(who)
            if subscriber in self._names:
                self.history.record(Closed(self._names.pop(subscriber), reason.value))
                del self._asked[subscriber], self._muted[subscriber]
            self._hub_close(who, reason)


class _Tap:
    """Stands for a subscriber's `deliver`, and is equal to it: by that the hub finds the subscriber of a callback."""

    __slots__ = ("_deliver", "_identity", "_record")

    def __init__(self, deliver: Callable[[Notification], object], record: Callable[[Notification], None]) -> None:
        self._deliver = deliver
        self._identity = identity(deliver)
        self._record = record

    def __call__(self, notification: Notification) -> object:
        self._record(notification)
        return self._deliver(notification)

    def __eq__(self, other: object) -> bool:
        return bool(self._identity == (other._identity if isinstance(other, _Tap) else other))

    def __hash__(self) -> int:
        return hash(self._identity)
