"""Who listens to what, and the fan-out.

One rule: if a topic's digest differs from what a subscriber was told, tell it, and remember. So too if it differed and
somebody was shown it then. A subscriber that keeps up is told at once and costs no memory per topic; for any other one
the change is noted in its mailbox.

The hub writes to nobody. It calls each subscriber's `deliver`, which must not wait: one that can take no more for now
returns `BUSY` and calls `hub.wake(subscriber)` later. It never sleeps either: whoever owns the hub calls `tick(now)`
at `next_due()`, and is told through `on_timer_change` when that comes nearer. Not a queue: what happened in between is
in the journal, if it still is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from tidings.core.catalog import Catalog
from tidings.core.counts import Counts, SuppressionReason
from tidings.core.cursor import Cursor
from tidings.core.delivery import Delivery
from tidings.core.filters import Filter
from tidings.core.index import WatchIndex, check_limit
from tidings.core.journal import ChangeHistory, Journal, changes_since_told
from tidings.core.mailbox import NEVER, Entry, IsMuted, Mailbox
from tidings.core.model import Change, Feature, Notification, Operation, Reason, Topic, Version, topic_named
from tidings.core.notifications import Notifications, by_topic
from tidings.core.observer import EventSink, Observer
from tidings.core.patterns import Templates, is_pattern
from tidings.core.redact import redact_uri
from tidings.core.subscriber import BUSY, LOCAL, Callbacks, ConnectionKind, Deliver, OnClose, Subscriber, check_callback
from tidings.core.timers import Timers
from tidings.policy import Policy

if TYPE_CHECKING:
    from tidings.server.local import Listener

__all__ = ["BUSY", "Hub", "Subscriber"]

logger = logging.getLogger(__name__)


class Hub:
    """The subscribers of one catalog. Shares the catalog's lock, so that both may be used from any thread."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        policy: Policy | None = None,
        journal: Journal | None = None,
        templates: Templates | None = None,
        clock: Callable[[], float] = time.monotonic,
        first: Callable[[Topic], None] | None = None,
        last: Callable[[Topic], None] | None = None,
        on_timer_change: Callable[[float], None] | None = None,
    ) -> None:
        """Every commit of the catalog is published immediately, in the thread that made it, unless the catalog is given
        another `publisher` afterwards."""
        self.catalog = catalog
        self.policy = policy or catalog.policy
        self.notifications = Notifications(catalog, self.policy, journal)
        self.counts: Counts = Counts()
        self.observer: Observer = Observer(self.counts)
        self.events: EventSink | None = None
        """Set by `record`."""
        self.failures = self.counts.failures
        """How often something of a subscriber's or a user's failed, by what it was."""
        self.first = first
        """Called with a feature, URI or pattern when its first subscriber comes: the place to start a watcher."""
        self.last = last
        """Called when its last subscriber is gone: the place to stop the watcher."""
        self.on_timer_change = on_timer_change
        """Called with a time when `tick` is needed then, and was not needed so early before."""
        self._clock = clock
        self._lock = catalog.lock
        self._subscribers: dict[Subscriber, None] = {}
        self._serials = count()
        self._callbacks = Callbacks()
        self.templates = templates
        self._index = WatchIndex(templates, self.policy.subresources)
        self._timers = Timers()
        self._outbox: deque[tuple[Change, ...]] = deque()
        self._publishing = False
        self._started: set[Topic] = set()
        """What `first` was called for, and `last` not yet."""
        self._woken: dict[Subscriber, None] = {}
        """Who can be told again, but only when all have heard of the change that is being told."""
        self._delivery = Delivery(self, self._index)
        catalog.publisher = self.publish

    # Subscribing

    def open(
        self,
        deliver: Deliver,
        *,
        label: str = "",
        kind: ConnectionKind = LOCAL,
        policy: Policy | None = None,
        filter: Filter | None = None,
        is_muted: IsMuted | None = None,
        on_close: OnClose | None = None,
    ) -> Subscriber:
        """A new subscriber that watches nothing yet."""
        with self._lock:
            self._sweep()
            own, serial = policy or self.policy, next(self._serials)
            subscriber = Subscriber(
                self, deliver, own, serial, label=label, kind=kind, filter=filter, is_muted=is_muted, on_close=on_close
            )
            self._subscribers[subscriber] = None
            self.observer.opened(subscriber)
            if self.events is not None:
                self.events.opened(subscriber)
            return subscriber

    def subscribe(
        self,
        who: Subscriber | Callable[[Notification], object],
        *features: Feature | str,
        uris: Iterable[str] = (),
        told: Mapping[Topic, Version | None] | None = None,
        ttl: float | None = None,
        **options: Any,
    ) -> Subscriber:
        """Let a subscriber, or a callback, watch features, URIs and URI patterns too.

        A callback is subscribed once, however often it is named; `options` are those of `open()` and count the first
        time. A bound method does not keep its object alive: with the object goes the subscription.

        Who subscribes is taken to know the present version of what it watches, unless `told` says otherwise: the
        version it was told last, or None for never. After `ttl` seconds, the subscriptions named here end.
        """
        chosen = [Feature(feature) for feature in features]
        paths = [uris] if isinstance(uris, str) else list(uris)
        with self._lock, self._delivery:
            self._sweep()
            # Before anything is changed: a bad one must leave no half.
            matches = self._index.compiled(paths)
            known = self._find(who)
            check_limit(known.policy if known else options.get("policy") or self.policy, known, paths)
            subscriber = who if isinstance(who, Subscriber) else self._callback(who, options)
            if subscriber.is_closed:
                return subscriber
            topics: list[Topic] = [*chosen, *paths]
            started = [topic for topic in topics if self._index.add(subscriber, topic, matches)]
            self.observer.subscribed(subscriber, topics)
            if self.events is not None:
                self.events.subscribed(subscriber, topics, told or {})
            now = self._clock()
            subscriber.end_at(topics, None if ttl is None else now + ttl)
            if ttl is not None:
                self._arm(subscriber, now + ttl)
            self._add_missed(subscriber, told or {}, now)
            # Last, since whatever a hook changes is then told as to anybody else.
            for topic in started:
                self._start(topic)
            if told and not subscriber.is_closed:
                self._serve_in_turn(subscriber, now)
            return subscriber

    def unsubscribe(
        self,
        who: Subscriber | Callable[[Notification], object],
        *features: Feature | str,
        uris: Iterable[str] = (),
    ) -> None:
        """End some subscriptions, or all when none is named. Ending what never was is fine."""
        chosen = [Feature(feature) for feature in features]
        paths = [uris] if isinstance(uris, str) else list(uris)
        with self._lock:
            subscriber = self._find(who)
            if subscriber is None:
                return
            self._unwatch([subscriber], [*chosen, *paths] or subscriber.watched, Reason.UNSUBSCRIBED)

    def close(self, who: Subscriber | Callable[[Notification], object], reason: Reason = Reason.UNSUBSCRIBED) -> None:
        """Remove every trace of a subscriber. Closing twice is fine."""
        with self._lock:
            subscriber = self._find(who)
            if subscriber is None or subscriber.is_closed:
                return
            self.observer.closed(subscriber, reason)
            if self.events is not None:
                self.events.closed(subscriber, reason)
            if subscriber.before_close is not None:
                self._guarded(subscriber.before_close, subscriber)
            subscriber.is_closed = True
            subscriber.settle()
            for topic in self._index.remove(subscriber):
                self._stop(topic)
            subscriber.mailbox = None
            subscriber.expiries = None
            if subscriber.date is not None:
                self._timers.cancel(subscriber.date)
                subscriber.date = None
            self._subscribers.pop(subscriber, None)
            self._woken.pop(subscriber, None)
            self._callbacks.discard(subscriber)
            if subscriber.on_close is not None:
                self._guarded(subscriber.on_close, reason)

    def listen(self, *features: Feature | str, uris: Iterable[str] = (), **options: Any) -> Listener:
        """`async with hub.listen("prompts") as changes: async for change in changes: …`"""
        from tidings.server.local import Listener  # the core itself knows nothing that awaits

        return Listener(self, features, uris, options)

    def record(self, events: EventSink) -> None:
        """Send every event from now on to a sink. There is one sink at a time."""
        with self._lock:
            self.events = events
            self.notifications.fetched.send_events_to(events)

    @property
    def journal(self) -> Journal:
        return self.notifications.journal

    # Asking

    def subscribers(self, topic: Feature | str) -> list[Subscriber]:
        """Who is told when this changes: a feature by its name, or the URI of a resource."""
        with self._lock:
            self._sweep()
            return list(self._index.watching(self._index.paths(topic_named(topic))))

    def subscriptions(self) -> list[tuple[Topic, list[Subscriber]]]:
        """Every feature, URI and pattern that is watched, and by whom."""
        with self._lock:
            self._sweep()
            return [(topic, list(watchers)) for topic, watchers in self._index.watchers.items()]

    def watching(self) -> list[tuple[Topic, int]]:
        """The same by how many, for whoever asks often: without the lock."""
        return [(topic, len(watchers)) for topic, watchers in list(self._index.watchers.items())]

    def told(self, subscriber: Subscriber, topic: Topic) -> Version | None:
        """The version that a subscriber was last told, or knew when it came; None if it was never told."""
        entry = subscriber.mailbox.entries.get(topic) if subscriber.mailbox else None
        return entry.told if entry else self.notifications.version(topic)

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(tuple(self._subscribers))

    def known_versions(self, subscriber: Subscriber) -> dict[Topic, Version | None]:
        """Where a subscriber stands: if it came back with just this, it would be told all that it has not heard yet.
        Patterns have no version; what they match is in it while it waits."""
        with self._lock:
            exact = (topic for topic in subscriber.watched if isinstance(topic, Feature) or not is_pattern(topic))
            known: dict[Topic, Version | None] = {topic: self.notifications.version(topic) for topic in exact}
            return known | self.pending_versions(subscriber)

    def pending_versions(self, subscriber: Subscriber) -> dict[Topic, Version | None]:
        """The part of that which is not the newest, or may not be."""
        return subscriber.mailbox.known_versions() if subscriber.mailbox else {}

    def history(self, topic: Topic | None, since: int | Cursor | None, epoch: str) -> ChangeHistory:
        """Return the changes of one topic, or of all, after a revision or since a cursor of this `epoch`."""
        with self._lock:
            self.journal.expire(self.catalog.now())
            if isinstance(since, Cursor):
                return changes_since_told(
                    self.journal.after(0)[0], self.notifications.version, since.told(epoch), topic
                )
            changes, is_complete = self.journal.after(since or 0, topic)
            return ChangeHistory(tuple(changes), is_complete)

    def delivering_to(self, subscriber: Subscriber) -> Topic | None:
        """Return the topic whose delivery is under way, if the subscriber watches it and may not have been told yet."""
        topic = self._delivery.topic
        return topic if topic and self._index.is_watching(subscriber, self._index.paths(topic)) else None

    def __len__(self) -> int:
        with self._lock:
            self._sweep()
            return len(self._subscribers)

    # Telling

    def publish(self, changes: tuple[Change, ...]) -> None:
        """Deliver one commit of the catalog, after those that are queued."""
        self.enqueue(changes)
        self.publish_queued()

    def enqueue(self, changes: tuple[Change, ...]) -> None:
        """Queue one commit of the catalog. The caller then has `publish_queued` called on the thread of its choice."""
        self._outbox.append(changes)

    def publish_queued(self) -> None:
        """Deliver the queued commits in order. Commits made by a subscriber meanwhile wait until all subscribers have
        been notified of the present one."""
        with self._lock:
            if self._publishing:
                return
            self._publishing = True
            try:
                while self._outbox:
                    self._sweep()
                    for group in by_topic(self._outbox.popleft()):
                        self._delivery.publish(group)
                        self._serve_woken()
            finally:
                self._publishing = False
            self._delivery.hand_on()

    def wake(self, subscriber: Subscriber) -> None:
        """The subscriber can take notifications again, or is muted no longer."""
        with self._lock, self._delivery:
            if subscriber.is_closed:
                return
            subscriber.is_ready = True
            self._serve_in_turn(subscriber, self._clock())

    def next_due(self) -> float | None:
        """When `tick` has something to do."""
        with self._lock:
            return self._timers.next()

    def tick(self, now: float | None = None) -> None:
        """Tell what has become due, and end the subscriptions that have run out."""
        with self._lock, self._delivery:
            self._sweep()
            now = self._clock() if now is None else now
            while (subscriber := self._timers.pop(now)) is not None:
                subscriber.date = None
                self._serve_in_turn(subscriber, now)

    def _serve_in_turn(self, subscriber: Subscriber, now: float) -> None:
        """At once, or after the fan-out under way, which would tell the same version again."""
        if self._publishing:
            self._woken[subscriber] = None
        else:
            self._serve(subscriber, now)

    def _serve_woken(self) -> None:
        while self._woken:
            subscriber = next(iter(self._woken))
            del self._woken[subscriber]
            if not subscriber.is_closed and subscriber.is_ready:
                self._serve(subscriber, self._clock())

    def _note(self, subscriber: Subscriber, notification: Notification, previous: Version, now: float) -> None:
        if subscriber.is_closed:
            return
        mailbox, topic = subscriber.mailbox, notification.topic
        if mailbox is None:
            mailbox = subscriber.mailbox = Mailbox()
        elif not mailbox.has_room(topic, subscriber.policy):
            self._overflow(subscriber, mailbox)
            return
        was_waiting = mailbox.is_waiting(topic)
        due = mailbox.add(notification, previous, subscriber.policy, subscriber.filter, now, subscriber.delay)
        self.observer.noted(subscriber, notification, due, was_waiting=was_waiting)
        if not subscriber.is_ready:
            return
        if due <= now or due == NEVER:
            self._serve(subscriber, now)
        else:
            self._arm(subscriber, due)

    def _overflow(self, subscriber: Subscriber, mailbox: Mailbox) -> None:
        merges_on_overflow = subscriber.merges_on_overflow and Feature.RESOURCES in subscriber.features
        waiting = subscriber.waiting + 1
        if merges_on_overflow:
            mailbox.collapse(self.notifications.missed(Feature.RESOURCES, -1), subscriber.policy, self._clock())
        self.observer.overflowed(subscriber, waiting - subscriber.waiting, is_closed=not merges_on_overflow)
        if not merges_on_overflow:
            self.close(subscriber, Reason.OVERFLOW)

    def _serve(self, subscriber: Subscriber, now: float) -> None:
        """Hand over whatever is due, for as long as the subscriber takes it."""
        if subscriber.expiries is not None:
            self._unwatch([subscriber], subscriber.expired(now), Reason.EXPIRED)
        while subscriber.is_ready and subscriber.mailbox is not None:
            taken = subscriber.mailbox.take(now, subscriber.is_muted)
            if taken is None:
                break
            self._tell(subscriber, *taken, now)
        if subscriber.is_closed:
            return
        if subscriber.mailbox is not None:
            if subscriber.is_ready and (due := subscriber.mailbox.next_due(now, subscriber.is_muted)) != NEVER:
                self._arm(subscriber, due)
            if not subscriber.mailbox.entries:
                subscriber.mailbox = None
        if subscriber.expiries:
            self._arm(subscriber, min(subscriber.expiries.values()))
        subscriber.settle()

    def _tell(self, subscriber: Subscriber, topic: Topic, entry: Entry, now: float) -> None:
        mailbox = subscriber.mailbox
        assert mailbox is not None
        notification = self.notifications.pending(topic, entry, subscriber.filter)
        if isinstance(notification, SuppressionReason):
            self.counts.suppress(notification)
            mailbox.suppress(topic, entry, now)
            return
        # Remember before delivering: whatever `deliver` does, it does to a subscriber that has been told.
        mailbox.mark_told(topic, entry, subscriber.policy, now)
        if self.events is not None:
            self.events.delivering(subscriber, notification)
        try:
            is_told = subscriber.hand(notification)
        except BaseException as error:  # as in the fan-out
            self._delivery.fail(subscriber, notification, error)
        else:
            if is_told:
                # Not from the change: one that came back is owed changes older than its coming.
                self.counts.add_sent(topic, max(self._clock(), now) - entry.first)
        if any(change.operation is Operation.DELETED for change in notification.changes):
            self._unwatch([subscriber], [topic], Reason.DELETED, notification)

    def _add_missed(self, subscriber: Subscriber, told: Mapping[Topic, Version | None], now: float) -> None:
        """Note what differs between what the subscriber was told last and what is true now."""
        for topic, version in told.items():
            if subscriber.mailbox and not subscriber.mailbox.has_room(topic, subscriber.policy):
                self._serve_in_turn(subscriber, now)  # who is owed more than may wait must not be closed each time
            if not self._index.is_watching(subscriber, self._index.paths(topic)):
                continue
            mailbox = subscriber.mailbox = subscriber.mailbox or Mailbox()
            if not mailbox.has_room(topic, subscriber.policy):
                self._overflow(subscriber, mailbox)
                return
            published, current = self.notifications.version(topic), self.catalog.version(topic)
            if version is not None and version.revision > published.revision and current != published:
                mailbox.await_revision(topic, version, current.revision)
            elif version is not None and version.digest == published.digest:
                mailbox.mark_current(topic, published)
            else:
                mailbox.add_missed(self.notifications.since(topic, version), version, subscriber.policy, now)
        subscriber.settle()

    # Keeping the index

    def _start(self, topic: Topic) -> None:
        if topic in self._index.watchers and topic not in self._started:
            self._started.add(topic)
            if self.first is not None:
                self._guarded(self.first, topic)

    def _unwatch(
        self, who: list[Subscriber], topics: list[Topic], reason: Reason, cause: Notification | None = None
    ) -> None:
        ended = [(each, topic) for each in who for topic in topics if self._index.discard(each, topic)]
        for subscriber, topic in ended:
            subscriber.end_at([topic], None)
            if self.events is not None:
                self.events.unsubscribed(subscriber, topic)
            self._stop(topic)
        if ended:
            self.observer.unsubscribed(ended, reason, cause)
        for subscriber in who:
            self._forget_unwatched(subscriber)
            # A callback that watches nothing is done; a lane's subscriber stays open for what it may watch later.
            if subscriber.is_idle and subscriber in self._callbacks:
                self.close(subscriber, reason)

    def _stop(self, topic: Topic) -> None:
        if topic in self._started and topic not in self._index.watchers:
            self._started.remove(topic)
            if self.last is not None:
                self._guarded(self.last, topic)

    def _forget_unwatched(self, subscriber: Subscriber) -> None:
        if subscriber.mailbox is not None:
            for topic in list(subscriber.mailbox.entries):
                if not self._index.is_watching(subscriber, self._index.paths(topic)):
                    self.counts.suppress(
                        SuppressionReason.UNSUBSCRIBED, subscriber.mailbox.is_waiting(topic, subscriber.is_muted)
                    )
                    subscriber.mailbox.drop(topic)
            if not subscriber.mailbox.entries:
                subscriber.mailbox = None
        subscriber.settle()

    def _callback(self, callback: Callable[[Notification], object], options: Mapping[str, Any]) -> Subscriber:
        check_callback(callback)
        subscriber = self._callbacks.find(callback)
        if subscriber is None:
            options = {"label": getattr(callback, "__qualname__", ""), **options}
            subscriber = self.open(self._callbacks.reference(callback), **options)
            self._callbacks.add(subscriber)
        return subscriber

    def _find(self, who: Subscriber | Callable[[Notification], object]) -> Subscriber | None:
        return who if isinstance(who, Subscriber) else self._callbacks.find(who)

    def _sweep(self) -> None:
        for subscriber in self._callbacks.collected():
            self.close(subscriber, Reason.COLLECTED)

    def _arm(self, subscriber: Subscriber, when: float) -> None:
        """See to it that the subscriber is looked at by then."""
        if subscriber.date is not None:
            if subscriber.date.when <= when:
                return
            self._timers.cancel(subscriber.date)
        soonest = self._timers.next()
        subscriber.date = self._timers.add(when, subscriber)
        if self.on_timer_change is not None and (soonest is None or when < soonest):
            self._guarded(self.on_timer_change, when)

    def _guarded(self, hook: Callable[[Any], object], argument: object) -> None:
        try:
            hook(argument)
        except Exception:  # a hook is the user's; the hub must stay whole
            self.failures["hook"] += 1
            what = redact_uri(argument) if isinstance(argument, str) else argument
            logger.exception("a hook of the hub failed on %r; going on", what)
