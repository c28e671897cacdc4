"""The record of a hub: its last changes, which subscribers were told of each, and which clients fetched it.

The hub reports each publication and the exceptions: subscribers that were told later, or not. All others that watched
the topic were told immediately, so nothing is recorded for them. A subscription is stored with the number of the last
change before it, which shows later whether its subscriber had to be told of a change.

A change is *fetched* by a client that gets its list or content, as of this change or later, within 30 seconds after it
was told.

The record is bounded: the oldest changes, and the oldest exceptions, are dropped. The counts of a change stay exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import count
from typing import Final

from tidings.console.change import FETCH_TIMEOUT, Delivery, PublishedChange, State
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
"""Exceptions of all changes, some 200 bytes each."""
_MAX_CLOSED = 500
"""Clients that are kept after they have left."""
_MAX_LEFT = 64
"""Subscribers that were just closed."""
_MAX_REMOVED = 1000
"""Clients that came and left since a page was told last. It is told of them in case that it requested them."""
_MAX_TOPICS = 256
"""Topics of one client whose fetches are kept."""
_MAX_SAME = 64
"""Clients with the same identity among which the one that fetches is searched."""


class Updates:
    """What changed in a record since a page was told last. A set, so that a slow page costs no memory."""

    __slots__ = ("changes", "clients", "last_change", "last_client", "removed")

    def __init__(self, last_change: int) -> None:
        self.last_change = last_change
        """The newest change that the page knows."""
        self.changes: dict[int, None] = {}
        """The changes, known to the page, whose counts differ."""
        self.clients: dict[int, None] = {}
        self.removed: dict[int, None] = {}
        self.last_client = 0
        """The newest client when the page was told last. It does not know later ones."""


class Record(Observer):
    """Add it to the observers of a hub with `start`. All methods need the hub's lock, except those for clients."""

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
        self._audience: list[RecordedClient] = []
        """The clients of the present publication, if it reaches the watchers of several keys."""
        self._deadlines: deque[tuple[float, PublishedChange]] = deque()
        self.clients: dict[int, RecordedClient] = {}
        """The open subscribers, and the last that were closed."""
        self._open: dict[Subscriber, RecordedClient] = {}
        self._closed: deque[RecordedClient] = deque()
        self._left: dict[Subscriber, RecordedClient] = {}
        """The subscribers that were closed last: their turn in the present publication may still come, or they were
        closed by what they were told."""
        self._keys: dict[Topic, WatchedKey] = {}
        self._same: dict[Hashable, dict[RecordedClient, None]] = {}
        """The open clients by their identity; the one that fetched last is the last."""
        self.updates: set[Updates] = set()

    def start(self) -> None:
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
        """Return the number of notifications that a client was told."""
        keys = self._keys
        return client.base + sum(keys[topic].count - watch.count for topic, watch in client.watches.items())

    def last_told(self, client: RecordedClient) -> tuple[float, float] | None:
        """Return time and latency of the newest notification that a client was told."""
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
                self._same.setdefault(client.key, {})[known] = None
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
        self._left[subscriber] = client
        if self._current is None and len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]
        for topic in list(client.watches):
            self._unwatch(client, topic)
        for change, delivery in (*client.pending.values(), *client.sent.values()):
            if delivery.state is State.PENDING:
                self._set_state(change, client, delivery, State.CLOSED, reason.value)
        client.pending, client.sent = {}, {}
        client.subscriber, client.closed = None, reason.value
        same = self._same.get(client.identity.key)
        if same is not None:
            same.pop(client, None)
            if not same:
                del self._same[client.identity.key]
        self._closed.append(client)
        if len(self._closed) > _MAX_CLOSED:
            del self.clients[self._closed.popleft().id]
        for updates in self.updates:
            updates.clients.pop(client.id, None)
            if client.id <= updates.last_client or len(updates.removed) < _MAX_REMOVED:
                updates.removed[client.id] = None

    def _unwatch(self, client: RecordedClient, topic: Topic) -> None:
        watch, key = client.watches.pop(topic), self._keys[topic]
        client.base += key.count - watch.count
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
        """Return time and latency of the last publication of a key, if the client was told and it is newer."""
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
            self._audience = [self._open[subscriber] for subscriber in subscribers]
            for client in self._audience:
                client.base += 1
                change.unable += not client.can_fetch
        if len(self.changes) > _MAX_CHANGES or self._size > _MAX_BYTES:
            self._drop_oldest()

    def published(self, notification: Notification, subscribers: int) -> None:
        change, self._current = self._current, None
        if change is None:
            return
        if self._left:
            self._left.clear()
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
        audience, self._audience = self._audience, []
        for client in audience:
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
            self._add(change, client, State.SUPPRESSED, _REASONS[reason])
            return
        earlier = client.pending.get(topic) if was_pending else None
        if earlier is not None and earlier[1].state is State.PENDING:
            self._set_state(earlier[0], client, earlier[1], State.SUPERSEDED)
        if is_topic_muted(subscriber.is_muted, topic):
            delivery = self._add(change, client, State.SUPPRESSED, _REASONS[SuppressionReason.MUTED])
        else:
            delivery = self._add(change, client, State.PENDING)
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
            delivery = change.deliveries.get(client.id) or self._add_late(change, client, State.PENDING)
            pending = (change, delivery)
        client.sent[topic] = pending

    def delivered(self, subscriber: Subscriber, notification: Notification, seconds: float) -> None:
        client, topic = self._open.get(subscriber) or self._left.get(subscriber), notification.topic
        if client is None:
            return
        sent = client.sent.pop(topic, None) or client.pending.pop(topic, None)
        change = self._find(topic, notification.version.revision)
        now = self._now()
        client.base += 1
        client.last = (now, seconds)
        self._touch_client(client)
        if sent is not None and sent[0] is not change:
            self._set_state(sent[0], client, sent[1], State.SUPERSEDED)
            sent = None
        if change is None:
            return
        delivery = sent[1] if sent is not None else change.deliveries.get(client.id)
        if delivery is not None:
            self._set_state(change, client, delivery, State.TOLD)
        elif client.was_watching(change):
            return  # it was told again, because it may not have read the first notification
        else:
            delivery = self._add_late(change, client, State.TOLD)
        delivery.latency, delivery.time = seconds, now
        change.max_latency = max(change.max_latency, seconds)
        self._set_deadline(change, now)
        fetches = client.fetches.get(topic)
        if fetches and fetches[-1][1] >= change.version.revision and not delivery.is_fetched:
            delivery.is_fetched = True
            change.fetched += 1

    def suppressed(self, subscriber: Subscriber, topic: Topic, reason: SuppressionReason) -> None:
        client = self._open.get(subscriber) or self._left.get(subscriber)
        if client is None:
            return
        is_ended = reason is SuppressionReason.UNSUBSCRIBED
        state = State.CLOSED if is_ended else State.SUPPRESSED
        pending, current = client.pending.pop(topic, None), self._current
        if pending is not None:
            if pending[1].state is State.PENDING or not is_ended:
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
                self._set_state(change, client, delivery, State.SUPERSEDED, "overflow")
        if self._current is not None and client.id not in self._current.deliveries:
            self._add(self._current, client, State.CLOSED if is_closed else State.SUPERSEDED, "overflow")

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        client = self._open.get(subscriber) or self._left.get(subscriber)
        if client is None:
            return
        pending = client.pending.pop(notification.topic, None)
        if pending is not None:
            self._set_state(pending[0], client, pending[1], State.SUPPRESSED, "failed")
        elif self._current is not None and client.id not in self._current.deliveries:
            self._add(self._current, client, State.SUPPRESSED, "failed")

    # Fetches

    def client_fetched(self, client: ClientIdentity, topic: Topic, revision: int) -> None:
        with self._hub.catalog.lock:
            known = self._find_fetcher(client, topic)
            if known is None or (topic not in known.fetches and len(known.fetches) >= _MAX_TOPICS):
                return
            now = self._now()
            known.last_fetched[topic] = now
            fetches = known.fetches.setdefault(topic, deque(maxlen=MAX_FETCHES))
            # Not a change that is not published yet: its notification will be another reason to fetch.
            revision = min(revision, self._hub.notifications.version(topic).revision)
            before = fetches[-1][1] if fetches else -1
            if revision > before:
                fetches.append((now, revision))
                self._count_fetch(known, topic, before, revision, now)
            self._touch_client(known)

    def _find_fetcher(self, identity: ClientIdentity, topic: Topic) -> RecordedClient | None:
        """Return the client that fetches. Of several with one identity, the one that has not fetched for the longest
        time, because all of them fetch after a notification."""
        same = self._same.get(identity.key, {})
        for client, _ in zip(same, range(_MAX_SAME), strict=False):
            if not isinstance(topic, Feature) or topic in client.watches or len(same) == 1:
                del same[client]
                same[client] = None
                return client
        return None

    def _count_fetch(self, client: RecordedClient, topic: Topic, before: int, revision: int, now: float) -> None:
        """Count the changes that a client was told in time and gets with this fetch."""
        for change in reversed(self._by_topic.get(topic, ())):
            if change.version.revision <= before or change.deadline < now:
                break
            delivery = change.deliveries.get(client.id)
            if change.version.revision > revision or (delivery is None and not client.was_watching(change)):
                continue
            if delivery is not None and delivery.state is not State.TOLD:
                continue
            if now - (change.published if delivery is None else delivery.time) <= FETCH_TIMEOUT:
                change.fetched += 1
                if delivery is not None:
                    delivery.is_fetched = True
                self._touch(change)

    def settle(self) -> None:
        """Mark the changes as updated whose clients had to fetch until now."""
        now = self._now()
        while self._deadlines and self._deadlines[0][0] < now:
            self._touch(self._deadlines.popleft()[1])

    # Parts

    def _add(
        self, change: PublishedChange, client: RecordedClient, state: State, reason: str | None = None
    ) -> Delivery:
        """Record an exception of the present publication."""
        client.base -= 1
        if len(change.keys) == 1 and (watch := client.watches.get(change.topic)) is not None:
            # The last publication of the key is still the one before.
            client.last = self._newer(client, self._keys[change.topic], watch, client.last)
        return self._store(change, client, state, reason)

    def _add_late(self, change: PublishedChange, client: RecordedClient, state: State) -> Delivery:
        """Record a subscriber that came after the publication, or that is told of it again."""
        if change is self._current or client.was_watching(change):
            return self._add(change, client, state)
        change.reached += 1
        change.unable += not client.can_fetch
        return self._store(change, client, state, None)

    def _store(self, change: PublishedChange, client: RecordedClient, state: State, reason: str | None) -> Delivery:
        delivery = change.deliveries[client.id] = Delivery(state, reason, self._now())
        change.counts[state] += 1
        client.suppressed += state is State.SUPPRESSED
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
        delivery: Delivery,
        state: State,
        reason: str | None = None,
    ) -> None:
        if delivery.state is state:
            return
        change.counts[delivery.state] -= 1
        change.counts[state] += 1
        client.suppressed += (state is State.SUPPRESSED) - (delivery.state is State.SUPPRESSED)
        delivery.state, delivery.reason, delivery.time = state, reason, self._now()
        self._touch(change)
        self._touch_client(client)

    def _set_deadline(self, change: PublishedChange, now: float) -> None:
        deadline = now + FETCH_TIMEOUT
        if deadline > change.deadline + 1.0:  # a change may be told to thousands of clients, one after the other
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
        """Drop the exceptions of the oldest changes, a tenth at once."""
        for change in self.changes:
            if self._deliveries <= _MAX_DELIVERIES * 0.9:
                return
            if change.deliveries:
                self._deliveries -= len(change.deliveries)
                change.deliveries = {}
                change.is_truncated = change.is_missing_exceptions = True

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
