"""Delivery of changes to subscribers: publish commits, deliver what is due in mailboxes, keep timers.

One rule: if the digest of a topic differs from the digest that a subscriber was told, deliver one notification. A
subscriber that is ready gets it immediately. For any other subscriber, it is added to the mailbox and delivered later.

Delivery never waits. `deliver` returns `BUSY` if it accepts no more, and the transport calls `wake` later. The owner of
the hub calls `tick` at `next_due()`.

Delivery does not open or close subscribers: it asks the hub. The index finds the subscribers of a topic, and
`Notifications` builds what they get.

All methods take the lock of the catalog, except those that say that their caller holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tidings.core.counts import SuppressionReason, batches
from tidings.core.index import WatchedUris, WatchIndex
from tidings.core.mailbox import NEVER, Mailbox, MailboxEntry
from tidings.core.model import UNKNOWN_REVISION, Change, Feature, Notification, Reason, Topic, Version
from tidings.core.notifications import by_topic
from tidings.core.subscriber import Busy, Subscriber
from tidings.core.timers import Timers

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["Delivery"]

_MAX_AT_ONCE = 250
"""Notifications that one subscriber gets before others have their turn: some 5 ms. A client that returns chooses how
many it has missed."""


class Delivery:
    """Use it as a context manager around a call that may deliver: it holds the lock, and at the end of the outermost
    block it raises the `KeyboardInterrupt` or `SystemExit` that a callback raised."""

    def __init__(self, hub: Hub, index: WatchIndex, clock: Callable[[], float]) -> None:
        self.counts = hub.counts
        self.observers = hub.observers
        self.topic: Topic | None = None
        """The topic that is being delivered. Some of its subscribers have not been told the newest version yet."""
        self._hub = hub
        self._catalog = hub.catalog
        self._lock = hub.catalog.lock
        self._notifications = hub.notifications
        self._index = index
        self._clock = clock
        self._timers = Timers()
        self._queue: list[Change] = []
        self._is_publishing = False
        self._woken: dict[Subscriber, None] = {}
        """The subscribers with deliveries due after the present change has been delivered to all."""
        self._depth = 0
        self._exit: BaseException | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        try:
            # Raised earlier, it would prevent other deliveries, or interrupt a callback that made a change.
            if self._exit is not None and not self._depth:
                error, self._exit = self._exit, None
                raise error
        finally:
            self._lock.release()

    # Publishing

    def publish(self, changes: tuple[Change, ...]) -> None:
        """Deliver one commit of the catalog, together with those that are queued."""
        self.enqueue(changes)
        self.publish_queued()

    def enqueue(self, changes: tuple[Change, ...]) -> None:
        """Add one commit to the journal and queue it. The caller holds the lock. It then has `publish_queued` called on
        the thread of its choice."""
        self._notifications.record(changes)
        self._queue += changes

    def publish_queued(self) -> None:
        """Deliver the queued changes: one notification per topic. A commit that a callback makes is delivered after the
        present ones."""
        with self:
            if self._is_publishing:
                return
            self._is_publishing = True
            try:
                while self._queue:
                    queued, self._queue = tuple(self._queue), []
                    for changes in by_topic(queued):
                        self._publish_topic(changes)
                        self._deliver_to_woken()
            finally:
                self._is_publishing = False

    def _publish_topic(self, changes: tuple[Change, ...]) -> None:
        """Deliver changes of one topic. The caller holds the lock."""
        notification, may_be_undone = self._notifications.publish(changes)
        keys = self._index.keys(notification.topic)
        subscribers = tuple(self._index.subscribers(keys))
        self.observers.publishing(notification, changes, subscribers, keys)
        self.topic = notification.topic
        try:
            notified = self._deliver_to_all(notification, changes[0], subscribers, keys, may_be_undone=may_be_undone)
        finally:
            self.topic = None
        self.observers.published(notification, len(subscribers))
        if notified:  # of a deletion, which ends the subscriptions to this URI
            self._hub.end_subscriptions(notified, [notification.topic], Reason.DELETED, notification)

    def _deliver_to_all(
        self,
        notification: Notification,
        first: Change,
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
        *,
        may_be_undone: bool,
    ) -> list[Subscriber]:
        """Return the subscribers that were notified of a deletion.

        `first` is the oldest change. If the changes `may_be_undone`, the mailbox of each subscriber decides what it
        gets."""
        index, now, removals = self._index, self._clock(), self._index.removals
        notified: list[Subscriber] = []
        is_deletion = notification.is_deletion
        for batch in batches(subscribers):
            skipped = self.counts.skipped
            for subscriber in batch:
                # A callback may have closed or unsubscribed others.
                if removals != index.removals and not index.is_watching(subscriber, keys):
                    self.counts.skip(SuppressionReason.UNSUBSCRIBED)
                    self.observers.suppressed(subscriber, notification.topic, SuppressionReason.UNSUBSCRIBED)
                    continue
                message, deliver = notification, subscriber.deliver
                if may_be_undone or not subscriber.is_direct:
                    immediate = None if may_be_undone else self._immediate_notification(subscriber, notification)
                    if immediate is None:
                        self.counts.skip()
                        self._add(subscriber, notification, first.previous, now)
                        continue
                    message, deliver = immediate, subscriber.call_deliver
                try:
                    result = deliver(message)
                    if result is not None and isinstance(result, Busy):
                        subscriber.pause()
                        if not result.is_told:
                            self.counts.skip()
                            self.observers.unconfirmed(subscriber, message)
                except BaseException as error:  # one bad subscriber must affect neither another nor the publisher
                    self.counts.skip()
                    self._fail(subscriber, message, error)
                if is_deletion:
                    notified.append(subscriber)
            latency = self._catalog.now() - first.time
            self.counts.add_sent(notification.topic, latency, len(batch) - (self.counts.skipped - skipped))
        return notified

    def _immediate_notification(self, subscriber: Subscriber, notification: Notification) -> Notification | None:
        """Return what to deliver immediately, or None if it has to go through the mailbox."""
        if not subscriber.bypasses_mailbox:
            return None
        topic = notification.topic
        if subscriber.filter is None or not isinstance(topic, Feature):  # filters apply to lists
            return notification
        filtered = self._notifications.since_revision(topic, notification.since, subscriber.filter)
        return filtered if filtered.changes else None

    def _fail(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._exit = error
        else:
            self.observers.failed(subscriber, notification, error)

    # Mailboxes

    def wake(self, subscriber: Subscriber, *, was_absent: bool = False) -> None:
        """Deliver what is pending: the subscriber is ready again, or no longer muted."""
        with self:
            if subscriber.is_closed:
                return
            subscriber.mark_ready()
            now = self._clock()
            if was_absent and subscriber.mailbox is not None:
                subscriber.mailbox.restart_latency(now)
            self.deliver_due(subscriber, now)

    def deliver_due(self, subscriber: Subscriber, now: float) -> None:
        """Deliver what is due. While a change is being published, do so afterwards, because the change would deliver
        the same version again. The caller holds the lock."""
        if self._is_publishing:
            self._woken[subscriber] = None
        else:
            self._deliver_now(subscriber, now)

    def add_missed(self, subscriber: Subscriber, told: Mapping[Topic, Version | None], now: float) -> None:
        """Add what differs between the versions that a subscriber was told and the present ones. The caller holds the
        lock."""
        watched = self._index.watched(subscriber.uris or {}, subscriber.is_authorized)
        for topic, version in told.items():
            if subscriber.mailbox and not subscriber.mailbox.has_room(topic, subscriber.settings):
                # Otherwise a subscriber that missed much would be closed at each return.
                self.deliver_due(subscriber, now)
            if subscriber.is_closed:
                return
            if not _watches(subscriber, topic, watched):
                continue
            mailbox = subscriber.mailbox = subscriber.mailbox or Mailbox()
            if not mailbox.has_room(topic, subscriber.settings):
                self._overflow(subscriber, mailbox)
                return
            published, current = self._notifications.version(topic), self._catalog.version(topic)
            if version is not None and version.revision > published.revision and current != published:
                mailbox.wait_for_revision(topic, version, current.revision)
            elif version is not None and version.digest == published.digest:
                mailbox.mark_current(topic, published)
            else:
                missed = self._notifications.since_version(topic, version)
                mailbox.add_missed(missed, version, subscriber.settings, now)
        subscriber.update_is_direct()

    def drop_unwatched(self, subscriber: Subscriber) -> None:
        """Remove topics from a mailbox that its subscriber no longer watches. The caller holds the lock."""
        mailbox = subscriber.mailbox
        if mailbox is not None:
            watched = self._index.watched(subscriber.uris or {}, subscriber.is_authorized)
            for topic in list(mailbox.entries):
                if not _watches(subscriber, topic, watched):
                    is_pending = mailbox.is_pending(topic, subscriber.is_muted)
                    self.counts.suppress(SuppressionReason.UNSUBSCRIBED, is_pending)
                    self.observers.suppressed(subscriber, topic, SuppressionReason.UNSUBSCRIBED)
                    mailbox.drop(topic)
            if not mailbox.entries:
                subscriber.mailbox = None
        subscriber.update_is_direct()

    def _add(self, subscriber: Subscriber, notification: Notification, previous: Version, now: float) -> None:
        if subscriber.is_closed:
            return
        mailbox, topic = subscriber.mailbox, notification.topic
        if mailbox is None:
            mailbox = subscriber.mailbox = Mailbox()
        elif not mailbox.has_room(topic, subscriber.settings):
            self._overflow(subscriber, mailbox)
            return
        was_pending = mailbox.is_pending(topic)
        due = mailbox.add(notification, previous, subscriber.settings, subscriber.filter, now)
        self.observers.queued(subscriber, notification, due, was_pending=was_pending)
        if not subscriber.is_ready:
            return
        if due <= now or due == NEVER:
            self._deliver_now(subscriber, now)
        else:
            self.set_timer(subscriber, due)

    def _overflow(self, subscriber: Subscriber, mailbox: Mailbox) -> None:
        merges = subscriber.merges_on_overflow and Feature.RESOURCES in subscriber.features
        pending = subscriber.pending + 1
        if merges:
            refetch = self._notifications.since_revision(Feature.RESOURCES, UNKNOWN_REVISION)
            mailbox.merge_contents(refetch, subscriber.settings, self._clock())
        self.observers.overflowed(subscriber, pending - subscriber.pending, is_closed=not merges)
        if not merges:
            self._hub.close(subscriber, Reason.OVERFLOW)

    def _deliver_to_woken(self) -> None:
        while self._woken:
            subscriber = next(iter(self._woken))
            del self._woken[subscriber]
            if subscriber.is_ready:
                self._deliver_now(subscriber, self._clock())

    def _deliver_now(self, subscriber: Subscriber, now: float) -> None:
        """Deliver what is due, for as long as the subscriber is ready. A timer delivers what is more than the limit."""
        if subscriber.expiries is not None:
            self._hub.end_subscriptions([subscriber], subscriber.expired(now), Reason.EXPIRED)
        for _ in range(_MAX_AT_ONCE):
            if not subscriber.is_ready or subscriber.mailbox is None:
                break
            taken = subscriber.mailbox.take(now, subscriber.is_muted)
            if taken is None:
                break
            self._deliver_entry(subscriber, subscriber.mailbox, *taken, now)
        if subscriber.is_closed:
            return
        if subscriber.mailbox is not None:
            if subscriber.is_ready and (due := subscriber.mailbox.next_due(now, subscriber.is_muted)) != NEVER:
                self.set_timer(subscriber, due)
            if not subscriber.mailbox.entries:
                subscriber.mailbox = None
        if subscriber.expiries:
            self.set_timer(subscriber, min(subscriber.expiries.values()))
        subscriber.update_is_direct()

    def _deliver_entry(
        self, subscriber: Subscriber, mailbox: Mailbox, topic: Topic, entry: MailboxEntry, now: float
    ) -> None:
        notification = self._notifications.of_entry(topic, entry, subscriber.filter)
        if isinstance(notification, SuppressionReason):
            self.counts.suppress(notification)
            self.observers.suppressed(subscriber, topic, notification)
            mailbox.suppress(topic, entry, now)
            return
        # Before the delivery, because `deliver` may call the hub.
        mailbox.mark_told(topic, entry, subscriber.settings, now)
        tracer = self._hub.tracer
        try:
            entered = tracer.enter(notification)
            try:
                result = subscriber.call_deliver(notification)
            finally:
                tracer.leave(entered)
            if isinstance(result, Busy):
                subscriber.pause()
            if not isinstance(result, Busy) or result.is_told:
                # Measured from `pending_since`, because a returning subscriber gets changes older than its return.
                seconds = max(self._clock(), now) - entry.pending_since
                self.counts.add_sent(topic, seconds)
                self.observers.delivered(subscriber, notification, seconds)
            else:
                self.observers.unconfirmed(subscriber, notification)
        except BaseException as error:  # as in `_deliver_to_all`
            self._fail(subscriber, notification, error)
        if notification.is_deletion:
            self._hub.end_subscriptions([subscriber], [topic], Reason.DELETED, notification)

    # Timers

    def next_due(self) -> float | None:
        """Return when `tick` is needed."""
        with self._lock:
            return self._timers.next()

    def tick(self, now: float | None = None) -> None:
        """Deliver what has become due, and end the subscriptions whose time to live is over."""
        with self:
            now = self._clock() if now is None else now
            for subscriber in self._timers.pop_due(now):
                if not subscriber.is_closed:
                    self.deliver_due(subscriber, now)

    def set_timer(self, subscriber: Subscriber, when: float) -> None:
        """Deliver what is due to a subscriber at this time at the latest. The caller holds the lock."""
        if subscriber.timer is not None:
            if subscriber.timer.when <= when:
                return
            self._timers.cancel(subscriber.timer)
        soonest = self._timers.next()
        subscriber.timer = self._timers.add(when, subscriber)
        if soonest is None or when < soonest:
            self._hub.timer_changed(when)

    def forget(self, subscriber: Subscriber) -> None:
        """Deliver nothing more to a closed subscriber. The caller holds the lock."""
        if subscriber.timer is not None:
            self._timers.cancel(subscriber.timer)
            subscriber.timer = None
        self._woken.pop(subscriber, None)


def _watches(subscriber: Subscriber, topic: Topic, watched: WatchedUris) -> bool:
    """Return whether a subscriber watches a topic, in a time that does not depend on the patterns of others."""
    return topic in subscriber.features if isinstance(topic, Feature) else topic in watched
