"""The record of a hub: its last changes, which subscribers were told of each, and which clients fetched it.

The hub reports each publication, and each subscriber that is told later or not at all. The record keeps an outcome for
these only: all other subscribers that watch the topic were told immediately. Each subscription is stored with the
number of the last change before it. So the record can tell later whether the subscriber watched the topic of a change.

A client has *fetched* a change if it got the list or content, as of this change or later, within 30 seconds after the
notification.

The record is bounded: it drops the oldest changes and the oldest deliveries. The counts of a change stay exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Final

from tidings.console.change import FETCH_TIMEOUT, ClientOutcome, OutcomeState, PublishedChange
from tidings.console.client import MAX_FETCHES, RecordedClient, Watch, WatchedKey
from tidings.core.counts import SuppressionReason
from tidings.core.hub import Hub
from tidings.core.mailbox import NEVER, is_topic_muted
from tidings.core.model import Change, Feature, Notification, Reason, Topic, Version
from tidings.core.observer import Observer
from tidings.core.subscriber import Subscriber
from tidings.server.client_identity import ClientIdentity

__all__ = ["Record", "Updates"]

_MAX_CHANGES = 1000
_MAX_ITEMS = 64
"""Items of one change that are kept: a commit may change thousands."""
_MAX_BYTES = 16 << 20
"""Bytes of the definitions of all changes."""
_MAX_DELIVERIES = 50_000
"""Deliveries of all changes, some 200 bytes each."""
_MAX_CLOSED = 500
"""Closed clients that are kept."""
_MAX_JUST_CLOSED = 64
"""Subscribers in `Record._just_closed`."""
_MAX_REMOVED = 1000
"""Clients that opened and closed between two events for a page. The page gets their ids, because it may have requested
them in between."""
_MAX_TOPICS = 256
"""Topics of one client whose fetches are kept."""
_MAX_CANDIDATES = 64
"""Clients with the same identity that are searched for the one that fetches."""


class Updates:
    """Collects the ids of what to send to one page. Each id is stored once, so a slow page needs little memory."""

    __slots__ = ("changes", "clients", "last_change", "last_client", "removed")

    def __init__(self, last_change: int) -> None:
        self.last_change = last_change
        """The newest change that the page knows."""
        self.changes: dict[int, None] = {}
        """The changes that the page knows, and whose counts are different now."""
        self.clients: dict[int, None] = {}
        self.removed: dict[int, None] = {}
        """The clients that were closed."""
        self.last_client = 0
        """The newest client that the page knows."""


class Record(Observer):
    """Records what a hub reports, from `start` on.

    The caller of a method holds the lock of the hub, except for `start`, `client_connected` and `client_fetched`.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._now = hub.catalog.now
        self._ids = count(1)
        self.started = self._now()
        self.last_id = 0
        self.changes: deque[PublishedChange] = deque()
        self._by_id: dict[int, PublishedChange] = {}
        self._by_topic: dict[Topic, deque[PublishedChange]] = {}
        self._size = 0
        self._deliveries = 0
        self._current: PublishedChange | None = None
        self._reached: list[RecordedClient] = []
        """The clients that the current publication reaches, if its topic matches several keys."""
        self._deadlines: deque[tuple[float, PublishedChange]] = deque()
        self.clients: dict[int, RecordedClient] = {}
        """The open subscribers, and the last that were closed."""
        self._open: dict[Subscriber, RecordedClient] = {}
        self._closed: deque[RecordedClient] = deque()
        self._just_closed: dict[Subscriber, RecordedClient] = {}
        """The subscribers that were closed last. The hub may still report their part of the current publication."""
        self._keys: dict[Topic, WatchedKey] = {}
        self._by_identity: dict[Hashable, dict[RecordedClient, None]] = {}
        """The open clients by identity, ordered by their last fetch."""
        self.updates: set[Updates] = set()

    def start(self) -> None:
        """Add the record to the observers of the hub."""
        with self._hub.catalog.lock:
            for subscriber in self._hub:
                self.opened(subscriber)
                self.subscribed(subscriber, subscriber.watched, {})
            self._hub.observers.add(self)

    # Queries

    def change(self, id: int) -> PublishedChange | None:
        return self._by_id.get(id)

    def find_before(self, id: int) -> Iterator[PublishedChange]:
        """Yield the changes before a number, the newest first."""
        return (change for change in reversed(self.changes) if change.id < id)

    def client_of(self, subscriber: Subscriber) -> RecordedClient | None:
        return self._open.get(subscriber)

    def open_clients(self) -> Iterable[RecordedClient]:
        return self._open.values()

    def delivered_to(self, client: RecordedClient) -> int:
        """Return the number of notifications that a client got."""
        keys = self._keys
        return client.count_offset + sum(keys[topic].count - watch.count for topic, watch in client.watches.items())

    def last_told(self, client: RecordedClient) -> tuple[float, float] | None:
        """Return the time and latency of the newest notification that a client got."""
        newest = client.last
        for topic, watch in client.watches.items():
            newest = self._newer(client, self._keys[topic], watch, newest)
        return newest

    # Events of the hub: subscribers

    def opened(self, subscriber: Subscriber) -> None:
        client = RecordedClient(next(self._ids), subscriber, self._now())
        self.clients[client.id] = self._open[subscriber] = client
        self._touch_client(client)

    def client_connected(self, subscriber: Subscriber, client: ClientIdentity) -> None:
        with self._hub.catalog.lock:
            known = self._open.get(subscriber)
            if known is not None:
                known.identity = client
                self._by_identity.setdefault(client.key, {})[known] = None
                self._touch_client(known)

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        client = self._open[subscriber]
        client.is_authorized = subscriber.is_authorized
        for topic in topics:
            if topic not in client.watches:
                key = self._keys.get(topic)
                if key is None:
                    key = self._keys[topic] = WatchedKey()
                key.watchers += 1
                key.unable += not client.can_fetch
                client.watches[topic] = Watch(self.last_id, key.count)
        self._touch_client(client)

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        for subscriber, topic in ended:
            client = self._open.get(subscriber)
            if client is not None and topic in client.watches:
                self._unwatch(client, topic)
                self._touch_client(client)

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        client = self._open.pop(subscriber, None)
        if client is None:
            return
        self._just_closed[subscriber] = client
        if self._current is None and len(self._just_closed) > _MAX_JUST_CLOSED:
            del self._just_closed[next(iter(self._just_closed))]
        for topic in list(client.watches):
            self._unwatch(client, topic)
        for change, delivery in (*client.pending.values(), *client.sent.values()):
            if delivery.state is OutcomeState.PENDING:
                self._set_state(change, client, delivery, OutcomeState.CLOSED, reason.value)
        client.pending, client.sent = {}, {}
        client.subscriber, client.closed = None, reason.value
        same_identity = self._by_identity.get(client.identity.key)
        if same_identity is not None:
            same_identity.pop(client, None)
            if not same_identity:
                del self._by_identity[client.identity.key]
        self._closed.append(client)
        if len(self._closed) > _MAX_CLOSED:
            del self.clients[self._closed.popleft().id]
        for updates in self.updates:
            updates.clients.pop(client.id, None)
            if client.id <= updates.last_client or len(updates.removed) < _MAX_REMOVED:
                updates.removed[client.id] = None

    def _unwatch(self, client: RecordedClient, topic: Topic) -> None:
        watch, key = client.watches.pop(topic), self._keys[topic]
        client.count_offset += key.count - watch.count
        client.last = self._newer(client, key, watch, client.last)
        client.ended.append((topic, watch.since, self.last_id))
        key.watchers -= 1
        key.unable -= not client.can_fetch
        if not key.watchers:
            del self._keys[topic]

    @staticmethod
    def _newer(
        client: RecordedClient, key: WatchedKey, watch: Watch, known: tuple[float, float] | None
    ) -> tuple[float, float] | None:
        """Return the newer of `known` and the last publication of a key that the client was told immediately."""
        last = key.last
        if last is None or last.id <= watch.since or client.id in last.deliveries:
            return known
        return known if known is not None and known[0] > last.published else (last.published, last.latency)

    # Events of the hub: publications

    def publishing(
        self,
        notification: Notification,
        changes: tuple[Change, ...],
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
    ) -> None:
        self.last_id += 1
        is_truncated = len(changes) > _MAX_ITEMS
        kept = changes[:_MAX_ITEMS] if is_truncated else changes
        time = changes[0].time
        size = 0
        for each in kept:
            size += _size(each)
        change = self._current = PublishedChange(
            id=self.last_id,
            topic=notification.topic,
            version=notification.version,
            time=time,
            published=time,
            changes=kept,
            keys=keys,
            is_truncated=is_truncated,
            size=size,
            reached=len(subscribers),
        )
        self.changes.append(change)
        self._by_id[change.id] = change
        known = self._by_topic.get(change.topic)
        if known is None:
            self._by_topic[change.topic] = deque((change,))
        else:
            known.append(change)
        self._size += size
        if len(keys) == 1:
            key = self._keys.get(change.topic)
            if key is not None:
                key.count += 1
                change.unable = key.unable
        else:
            self._reached = [self._open[subscriber] for subscriber in subscribers]
            for client in self._reached:
                client.count_offset += 1
                change.unable += not client.can_fetch
        if len(self.changes) > _MAX_CHANGES or self._size > _MAX_BYTES:
            self._drop_oldest()

    def published(self, notification: Notification, subscribers: int) -> None:
        change, self._current = self._current, None
        if change is None:
            return
        if self._just_closed:
            self._just_closed.clear()
        now = change.published = self._now()
        change.latency = max(0.0, now - change.time)
        if change.told:
            change.max_latency = max(change.max_latency, change.latency)
            self._set_deadline(change, now)
        if len(change.keys) == 1:
            key = self._keys.get(change.topic)
            if key is not None:
                key.last = change
            return
        reached, self._reached = self._reached, []
        for client in reached:
            if client.id not in change.deliveries:
                client.last = (now, change.latency)

    def queued(self, subscriber: Subscriber, notification: Notification, due: float, *, was_pending: bool) -> None:
        client, change, topic = self._open[subscriber], self._current, notification.topic
        if change is None:
            return
        if due == NEVER:
            entry = subscriber.mailbox.entries.get(topic) if subscriber.mailbox is not None else None
            is_known = entry is None or entry.awaited_revision or entry.is_told_current
            reason = SuppressionReason.SAME_DIGEST if is_known else SuppressionReason.FILTERED
            self._add(change, client, OutcomeState.SUPPRESSED, _REASONS[reason])
            return
        earlier = client.pending.get(topic) if was_pending else None
        if earlier is not None and earlier[1].state is OutcomeState.PENDING:
            self._set_state(earlier[0], client, earlier[1], OutcomeState.SUPERSEDED)
        if is_topic_muted(subscriber.is_muted, topic):
            delivery = self._add(change, client, OutcomeState.SUPPRESSED, _REASONS[SuppressionReason.MUTED])
        else:
            delivery = self._add(change, client, OutcomeState.PENDING)
        client.pending[topic] = (change, delivery)

    def unconfirmed(self, subscriber: Subscriber, notification: Notification) -> None:
        client, topic = self._open.get(subscriber), notification.topic
        if client is None:
            return
        pending = client.pending.pop(topic, None)
        if pending is None:
            change = self._find(topic, notification.version.revision)
            if change is None:
                return
            delivery = change.deliveries.get(client.id) or self._add_late(change, client, OutcomeState.PENDING)
            pending = (change, delivery)
        client.sent[topic] = pending

    def delivered(self, subscriber: Subscriber, notification: Notification, seconds: float) -> None:
        client, topic = self._open.get(subscriber) or self._just_closed.get(subscriber), notification.topic
        if client is None:
            return
        sent = client.sent.pop(topic, None) or client.pending.pop(topic, None)
        change = self._find(topic, notification.version.revision)
        now = self._now()
        client.count_offset += 1
        client.last = (now, seconds)
        self._touch_client(client)
        if sent is not None and sent[0] is not change:
            self._set_state(sent[0], client, sent[1], OutcomeState.SUPERSEDED)
            sent = None
        if change is None:
            return
        delivery = sent[1] if sent is not None else change.deliveries.get(client.id)
        if delivery is not None:
            self._set_state(change, client, delivery, OutcomeState.TOLD)
        elif client.was_watching(change):
            return  # the hub repeats a notification that the client may not have read
        else:
            delivery = self._add_late(change, client, OutcomeState.TOLD)
        delivery.latency, delivery.time = seconds, now
        change.max_latency = max(change.max_latency, seconds)
        self._set_deadline(change, now)
        fetches = client.fetches.get(topic)
        if fetches and fetches[-1][1] >= change.version.revision and not delivery.is_fetched:
            delivery.is_fetched = True
            change.fetched += 1

    def suppressed(self, subscriber: Subscriber, topic: Topic, reason: SuppressionReason) -> None:
        client = self._open.get(subscriber) or self._just_closed.get(subscriber)
        if client is None:
            return
        is_ended = reason is SuppressionReason.UNSUBSCRIBED
        state = OutcomeState.CLOSED if is_ended else OutcomeState.SUPPRESSED
        pending, current = client.pending.pop(topic, None), self._current
        if pending is not None:
            if pending[1].state is OutcomeState.PENDING or not is_ended:
                self._set_state(pending[0], client, pending[1], state, _REASONS[reason])
        elif (
            is_ended
            and current is not None
            and current.topic == topic
            and client.id not in current.deliveries
            and client.was_watching(current)
        ):
            self._add(current, client, state, _REASONS[reason])

    def overflowed(self, subscriber: Subscriber, merged: int, *, is_closed: bool) -> None:
        client = self._open.get(subscriber)
        if client is None:
            return
        if not is_closed:
            for topic in [topic for topic in client.pending if isinstance(topic, str)]:
                change, delivery = client.pending.pop(topic)
                self._set_state(change, client, delivery, OutcomeState.SUPERSEDED, "overflow")
        if self._current is not None and client.id not in self._current.deliveries:
            self._add(self._current, client, OutcomeState.CLOSED if is_closed else OutcomeState.SUPERSEDED, "overflow")

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        client = self._open.get(subscriber) or self._just_closed.get(subscriber)
        if client is None:
            return
        pending = client.pending.pop(notification.topic, None)
        if pending is not None:
            self._set_state(pending[0], client, pending[1], OutcomeState.SUPPRESSED, "failed")
        elif self._current is not None and client.id not in self._current.deliveries:
            self._add(self._current, client, OutcomeState.SUPPRESSED, "failed")

    # Fetches

    def client_fetched(self, client: ClientIdentity, topic: Topic, revision: int) -> None:
        with self._hub.catalog.lock:
            known = self._find_fetcher(client, topic)
            if known is None or (topic not in known.fetches and len(known.fetches) >= _MAX_TOPICS):
                return
            now = self._now()
            known.last_fetched[topic] = now
            fetches = known.fetches.setdefault(topic, deque(maxlen=MAX_FETCHES))
            # Exclude changes that are not published yet: their clients are expected to fetch after the notification.
            revision = min(revision, self._hub.notifications.version(topic).revision)
            before = fetches[-1][1] if fetches else -1
            if revision > before:
                fetches.append((now, revision))
                self._count_fetch(known, topic, before, revision, now)
            self._touch_client(known)

    def _find_fetcher(self, identity: ClientIdentity, topic: Topic) -> RecordedClient | None:
        """Return the client that fetches.

        Several clients can have the same identity. All of them fetch after a notification, so return the one whose last
        fetch is the oldest.
        """
        candidates = self._by_identity.get(identity.key, {})
        for client in islice(candidates, _MAX_CANDIDATES):
            if not isinstance(topic, Feature) or topic in client.watches or len(candidates) == 1:
                del candidates[client]
                candidates[client] = None
                return client
        return None

    def _count_fetch(self, client: RecordedClient, topic: Topic, before: int, revision: int, now: float) -> None:
        """Count each change that a fetch returns, if the client was told of it and fetches in time."""
        for change in reversed(self._by_topic.get(topic, ())):
            if change.version.revision <= before or change.deadline < now:
                break
            delivery = change.deliveries.get(client.id)
            if change.version.revision > revision or (delivery is None and not client.was_watching(change)):
                continue
            if delivery is not None and delivery.state is not OutcomeState.TOLD:
                continue
            if now - (change.published if delivery is None else delivery.time) <= FETCH_TIMEOUT:
                change.fetched += 1
                if delivery is not None:
                    delivery.is_fetched = True
                self._touch(change)

    def expire_deadlines(self) -> None:
        """Mark the changes whose time to fetch is over as updated."""
        now = self._now()
        while self._deadlines and self._deadlines[0][0] < now:
            self._touch(self._deadlines.popleft()[1])

    # Parts

    def _add(
        self, change: PublishedChange, client: RecordedClient, state: OutcomeState, reason: str | None = None
    ) -> ClientOutcome:
        """Record that the current publication was not told to a subscriber immediately."""
        client.count_offset -= 1
        if len(change.keys) == 1 and (watch := client.watches.get(change.topic)) is not None:
            # `key.last` is still the previous publication: `published` sets it.
            client.last = self._newer(client, self._keys[change.topic], watch, client.last)
        return self._store(change, client, state, reason)

    def _add_late(self, change: PublishedChange, client: RecordedClient, state: OutcomeState) -> ClientOutcome:
        """Record the delivery of a change to a subscriber that may have subscribed after the publication."""
        if change is self._current or client.was_watching(change):
            return self._add(change, client, state)
        change.reached += 1
        change.unable += not client.can_fetch
        return self._store(change, client, state, None)

    def _store(
        self, change: PublishedChange, client: RecordedClient, state: OutcomeState, reason: str | None
    ) -> ClientOutcome:
        delivery = change.deliveries[client.id] = ClientOutcome(state, reason, self._now())
        change.counts[state] += 1
        client.suppressed += state is OutcomeState.SUPPRESSED
        self._deliveries += 1
        if self._deliveries > _MAX_DELIVERIES:
            self._drop_deliveries()
        self._touch(change)
        self._touch_client(client)
        return delivery

    def _set_state(
        self,
        change: PublishedChange,
        client: RecordedClient,
        delivery: ClientOutcome,
        state: OutcomeState,
        reason: str | None = None,
    ) -> None:
        if delivery.state is state:
            return
        change.counts[delivery.state] -= 1
        change.counts[state] += 1
        client.suppressed += (state is OutcomeState.SUPPRESSED) - (delivery.state is OutcomeState.SUPPRESSED)
        delivery.state, delivery.reason, delivery.time = state, reason, self._now()
        self._touch(change)
        self._touch_client(client)

    def _set_deadline(self, change: PublishedChange, now: float) -> None:
        deadline = now + FETCH_TIMEOUT
        if deadline > change.deadline + 1.0:  # at most one entry per second, however many clients are told
            self._deadlines.append((deadline, change))
        change.deadline = deadline

    def _find(self, topic: Topic, revision: int) -> PublishedChange | None:
        """Return the change that published a revision of a topic."""
        for change in reversed(self._by_topic.get(topic, ())):
            if change.version.revision <= revision:
                return change if change.version.revision == revision else None
        return None

    def _drop_oldest(self) -> None:
        while len(self.changes) > _MAX_CHANGES or (self._size > _MAX_BYTES and len(self.changes) > 1):
            oldest = self.changes.popleft()
            del self._by_id[oldest.id]
            self._size -= oldest.size
            self._deliveries -= len(oldest.deliveries)
            same_topic = self._by_topic[oldest.topic]
            same_topic.popleft()
            if not same_topic:
                del self._by_topic[oldest.topic]

    def _drop_deliveries(self) -> None:
        """Drop the deliveries of the oldest changes, until a tenth of the limit is free."""
        for change in self.changes:
            if self._deliveries <= _MAX_DELIVERIES * 0.9:
                return
            if change.deliveries:
                self._deliveries -= len(change.deliveries)
                change.deliveries = {}
                change.is_truncated = change.is_missing_deliveries = True

    def _touch(self, change: PublishedChange) -> None:
        for updates in self.updates:
            if change.id <= updates.last_change:
                updates.changes[change.id] = None

    def _touch_client(self, client: RecordedClient) -> None:
        for updates in self.updates:
            updates.clients[client.id] = None


_REASONS: Final = {
    SuppressionReason.SAME_DIGEST: "same version",
    SuppressionReason.MUTED: "muted",
    SuppressionReason.FILTERED: "filter",
    SuppressionReason.RATE: "rate",
    SuppressionReason.UNSUBSCRIBED: "unsubscribed",
}


def _size(change: Change) -> int:
    item, before = change.item, change.before
    return (0 if item is None else len(item.json)) + (0 if before is None else len(before.json))
