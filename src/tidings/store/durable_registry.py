"""The registry of durable subscriptions: which exist, which of them are connected, and when they expire.

A client that returns under the name of its subscription gets a notification for each topic that differs from the
version that it was last told. A subscription expires if its client is absent for its `ttl`.

The store's writer collects the records that changed, writes them, and confirms that. A record that changes while it is
being written is collected again. While a client is connected, its record is not collected with each notification, but
when the told versions count as received. To write it earlier would not help: after a crash, everything that changed
since the last write counts as unconfirmed.

In a cluster, each replica has the records of all. A subscription is served by one replica at a time (see `Sharing`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from tidings.core.index import check_limit
from tidings.core.model import UNKNOWN_REVISION, Feature, Version
from tidings.core.patterns import is_pattern
from tidings.core.resume import Resumed, contents_changed, resume_from_store, watched_among
from tidings.errors import LimitReached, TidingsError
from tidings.store.durable import MAX_NAME_LENGTH, DurableSubscription, Key, Owner, Webhook, reason_not_storable
from tidings.store.durable_connection import DurableConnection

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["DurableSubscriptions", "Sharing"]

logger = logging.getLogger(__name__)

_SLICE = 20_000
"""Topics of subscriptions that are collected without releasing the lock: about a millisecond."""


class Sharing(Protocol):
    """The other replicas of a cluster. A replica serves a subscription if its client is connected there, or if the
    replica delivers its webhook. All methods are called in any thread, with the lock of the hub."""

    def mark_changed(self, key: Key) -> None:
        """The subscription was put or removed here, or its client has connected here."""

    def is_here(self, key: Key) -> bool:
        """Return whether this replica serves a subscription."""

    def is_elsewhere(self, key: Key) -> bool:
        """Return whether another replica serves a subscription, or did so until it was killed."""


class DurableSubscriptions:
    """The durable subscriptions of one hub. Shares the hub's lock, so that it may be used from any thread."""

    def __init__(self, hub: Hub, records: Iterable[DurableSubscription] = ()) -> None:
        """`records` are those that the store has."""
        self.hub = hub
        self._lock = hub.catalog.lock
        self._now = hub.catalog.now
        self._records: dict[Key, DurableSubscription] = {}
        self._owned: Counter[Owner] = Counter()
        self._bytes = 0
        """The sum of the `_size` of all records."""
        self._connections: dict[Key, DurableConnection] = {}
        self._listeners: list[Callable[[Key], None]] = []
        self._next_expiry = 0.0
        self.sharing: Sharing | None = None
        self._wake_writer: Callable[[], bool] | None = None
        self._save_delay = 0.0
        self._saved: set[Key] = set()
        """The keys of the records that the store has."""
        self._due: dict[Key, float] = {}
        """The keys of the records to collect for the store, and when."""
        self._collected: dict[Key, DurableSubscription | None] = {}
        """The records that were collected since the last confirmed write."""
        self._writing: dict[Key, DurableSubscription | None] = {}
        for record in records:
            self._saved.add(record.key)
            if record.expires is None:
                self._due[record.key] = 0.0  # it may get a time of expiry now
            self._set(self._restored(record))

    # Queries

    def all(self, owner: Owner | EllipsisType = ...) -> list[DurableSubscription]:
        """Return the subscriptions of one owner, or of all, in the order of their names."""
        with self._lock:
            self.expire()
            found = [record for record in self._records.values() if owner is ... or record.owner == owner]
            return sorted(found, key=lambda record: (record.name, record.owner is not None, repr(record.owner)))

    def get(self, key: Key) -> DurableSubscription | None:
        with self._lock:
            self.expire()
            return self._records.get(key)

    def is_connected(self, key: Key) -> bool:
        """Return whether the client of a subscription is connected, here or to another replica. The receiver of a
        webhook is connected while deliveries do not fail."""
        with self._lock:
            return key in self._connections or (self.sharing is not None and self.sharing.is_elsewhere(key))

    def is_connected_here(self, key: Key) -> bool:
        with self._lock:
            return key in self._connections

    def may_deliver(self, key: Key) -> bool:
        """Return whether this replica delivers the webhook of a subscription."""
        return self.sharing is None or self.sharing.is_here(key)

    def __len__(self) -> int:
        return len(self._records)

    def expiry(self, record: DurableSubscription) -> float | None:
        """Return when a subscription expires if its client disconnects now. An active webhook does not expire. That of
        an event expires at its own time, connected or not."""
        if record.event is not None:
            return record.event.expires
        is_active = record.webhook is not None and not record.webhook.is_dead
        return None if is_active else self._now() + record.ttl

    def missed(self, key: Key, is_authorized: Callable[[str], bool] | None = None) -> Resumed:
        """Return what the client of a subscription has missed since its record was updated.

        `is_authorized` says whether it may see a resource that it did not name."""
        with self._lock:
            record = self._records.get(key) or DurableSubscription(name=key[1])
            return resume_from_store(self.hub, record.told, record.uris, record.as_of, is_authorized)

    # Changes

    def follow(self, listener: Callable[[Key], None]) -> None:
        """Call `listener` with the key of each record that is put or removed."""
        self._listeners.append(listener)

    def put(self, record: DurableSubscription) -> DurableSubscription:
        """Create or replace a subscription. The client of a new subscription is taken to know the present versions. If
        a connection under this name watches something else, end it. Raises `TidingsError` for an invalid record."""
        with self._lock:
            self.expire()
            self._check(record)
            previous = self._records.get(record.key)
            self._check_size(record, previous)
            if previous is None:
                self._check_limits(record.owner)
            record, replaced = self._put(previous, record)
            self._mark_changed(record.key)
        if replaced is not None:
            replaced.end()
        return record

    def _put(
        self, previous: DurableSubscription | None, record: DurableSubscription
    ) -> tuple[DurableSubscription, DurableConnection | None]:
        """Set a record with the told versions of the previous one. Return it, and the connection that ends."""
        replaced = None
        if previous is None:
            record = self._as_of_now(record)
        else:
            replaced, previous = self._replaced_connection(previous, record)
            record = self._continued(previous, record)
        if replaced is not None and record.expires is None:
            record = structs.replace(record, expires=self.expiry(record))
        self._set(record)
        self._mark_unsaved(record.key)
        self.notify(record.key)
        return record, replaced

    def change(self, key: Key, **fields: Any) -> DurableSubscription | None:
        """Change some fields of an existing subscription."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return None
            record = structs.replace(record, **fields)
            self._set(record)
            self._mark_unsaved(key, self._now() + self._save_delay)
            return record

    def change_webhook(self, key: Key, webhook: Webhook) -> None:
        """Change the webhook of a subscription. An active webhook does not expire, a dead one does."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self.change(key, webhook=webhook, expires=self.expiry(structs.replace(record, webhook=webhook)))

    def mark_refetch_sent(self, key: Key, as_of: int) -> None:
        """Record that the client was told, as of a revision, what to refetch. Other changes may still be pending."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                pending = {uri: None for uri, version in record.contents.items() if version is None}
                self.change(key, as_of=as_of, contents=pending)

    def remove(self, key: Key) -> bool:
        """Remove a subscription and end its connection; return whether it existed."""
        with self._lock:
            if key not in self._records:
                return False
            connection = self._drop(key)
            self._mark_changed(key)
        if connection is not None:
            connection.end()
        return True

    def _drop(self, key: Key) -> DurableConnection | None:
        """Remove a subscription. Return its connection, which ends."""
        connection = self._connections.pop(key, None)
        if connection is not None:
            connection.detach()
        self._bytes -= _size(self._records.pop(key))
        self._owned[key[0]] -= 1
        if key in self._saved:
            self._mark_unsaved(key)
        else:
            # Names that are created and removed while the store is unavailable must not fill the memory.
            self._due.pop(key, None)
            self._collected.pop(key, None)
        self.notify(key)
        return connection

    def expire(self) -> None:
        """Remove the subscriptions that have expired."""
        now = self._now()
        if not self._next_expiry or now < self._next_expiry:
            return
        for key, record in list(self._records.items()):
            if record.expires is not None and record.expires <= now:
                self.hub.observers.expired(record.name)
                if (connection := self._drop(key)) is not None:
                    connection.end()
        ends = [record.expires for record in self._records.values() if record.expires is not None]
        self._next_expiry = min(ends, default=0.0)

    # Connections

    def connect(
        self,
        requested: Any,
        owner: Owner,
        features: Iterable[Feature],
        uris: Iterable[str],
        terms: Mapping[str, Any],
        end: Callable[[], None],
    ) -> DurableConnection | None:
        """Connect a client that requests (`{"name": …, "ttl": …}`, or any JSON) its durable subscription; return None
        if it cannot have one. An older connection under the same name is ended."""
        name = requested.get("name") if isinstance(requested, Mapping) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
            return None
        longest = self.hub.policy.durable_ttl
        ttl = requested.get("ttl")
        is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool) and ttl >= 0
        fields: dict[str, Any] = {
            "features": tuple(features),
            "uris": tuple(uris),
            "terms": dict(terms),
            "ttl": float(min(ttl, longest)) if is_number else longest,
            "expires": None,
        }
        key = (owner, name)
        if (reason := reason_not_storable(DurableSubscription(name=name, owner=owner, **fields))) is not None:
            logger.warning("%r is not made durable: %s", name, reason)
            return None
        with self._lock:
            self.expire()
            previous = self._records.get(key)
            try:
                self._check_size(DurableSubscription(name=name, owner=owner, **fields), previous)
                if previous is None:
                    self._check_limits(owner)
            except LimitReached as error:
                logger.warning("%r is not made durable: %s", name, error)
                return None
            replaced = self._connections.pop(key, None)
            if replaced is not None:
                self._update(replaced)
                replaced.detach()
                previous = self._records.get(key)
            elif previous is not None and self.sharing is not None and self.sharing.is_elsewhere(key):
                previous = self._interrupted(previous)
            if previous is None:
                record = self._as_of_now(DurableSubscription(name=name, owner=owner, **fields))
            else:
                record = self._continued(previous, structs.replace(previous, **fields))
            if record.event is not None:
                record = structs.replace(record, expires=record.event.expires)
            self._set(record)
            connection = self._connections[key] = DurableConnection(self, record, is_new=previous is None, end=end)
            self._mark_unsaved(key)
            if not self.may_deliver(key):
                self._mark_changed(key)
        if replaced is not None:
            replaced.end()
        return connection

    def save(self, connection: DurableConnection, at: float = 0.0) -> None:
        """Write the record of a connection with the next batch, or with the first one after a time."""
        with self._lock:
            if connection.confirms_receipt:
                self._update(connection)  # now, because the next delivery is not confirmed
            self._mark_unsaved(connection.key, max(at, self._now() + self._save_delay))

    def disconnect(self, connection: DurableConnection) -> None:
        """Save the record of a connection whose subscriber is being closed and still has its topics."""
        self._update(connection)
        connection.detach()
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            record = self._records.get(connection.key)
            if record is not None:
                self.change(connection.key, expires=self.expiry(record))
                self._mark_unsaved(connection.key)

    def _update(self, connection: DurableConnection) -> None:
        if (record := self._records.get(connection.key)) is not None:
            self._set(connection.update(record))

    def _replaced_connection(
        self, previous: DurableSubscription, record: DurableSubscription
    ) -> tuple[DurableConnection | None, DurableSubscription]:
        """Return the connection that ends because its subscription changes, and the record with what it was told."""
        connection = self._connections.get(previous.key)
        if connection is None:
            return None, previous
        self._update(connection)
        previous = self._records[previous.key]
        is_same = set(previous.features) == set(record.features) and set(previous.uris) == set(record.uris)
        if is_same and previous.terms == record.terms:
            return None, previous
        connection.detach()
        return self._connections.pop(previous.key), previous

    # For the other replicas of a cluster

    def replace(self, key: Key, record: DurableSubscription | None) -> None:
        """Set a record as another replica has written it, or None if it was removed there. End the connection here."""
        with self._lock:
            connection = self._connections.get(key)
            if record is not None:
                if connection is not None:
                    del self._connections[key]
                    connection.detach()
                self._set(record)
                self._saved.add(key)
            elif key in self._records:
                connection = self._drop(key)
                self._saved.discard(key)
            self._due.pop(key, None)
            self._collected.pop(key, None)
        if connection is not None:
            connection.end()

    def merge(self, record: DurableSubscription) -> None:
        """Set a record that another replica has put, although the subscription is served here: the told versions are
        known here."""
        with self._lock:
            _, replaced = self._put(self._records.get(record.key), record)
        if replaced is not None:
            replaced.end()

    def put_again(self, other: DurableSubscription) -> None:
        """Repeat a put of this replica after another replica has written its record: the told versions are known
        there."""
        with self._lock:
            record = self._records[other.key]
            webhook = record.webhook
            if webhook is not None and webhook.is_secret_new and other.webhook is not None:
                record = structs.replace(record, webhook=structs.replace(webhook, secret=other.webhook.secret))
            self.replace(record.key, self._continued(other, record))
            self._mark_unsaved(record.key)
            self.notify(record.key)

    def interrupt(self, key: Key) -> None:
        """Let a subscription expire whose client was connected to a replica that was killed."""
        with self._lock:
            if (record := self._records.get(key)) is not None and key not in self._connections:
                self._set(self._interrupted(record))
                self._mark_unsaved(key)

    def mark_unsaved(self, key: Key) -> None:
        """Write a record with the next batch."""
        with self._lock:
            self._mark_unsaved(key)

    def notify(self, key: Key) -> None:
        """Call the listeners: the subscription was put or removed, or another replica serves it from now on."""
        for listener in self._listeners:
            listener(key)

    def _mark_changed(self, key: Key) -> None:
        if self.sharing is not None:
            self.sharing.mark_changed(key)

    # For the writer of the store, on its own thread, or of a replica

    def on_unsaved(self, wake: Callable[[], bool], *, delay: float = 0.0) -> None:
        """Call `wake` when there is something to write. It returns whether it will be written. Told versions and the
        state of webhooks are collected `delay` seconds after they have changed."""
        self._wake_writer = wake
        self._save_delay = delay

    @property
    def has_unsaved(self) -> bool:
        """Whether there is, or will be, something to collect."""
        return bool(self._due)

    def collect_unsaved(self, pause: Callable[[], object] | None = None) -> Mapping[Key, DurableSubscription | None]:
        """Return the records that changed since the last confirmed write; None for those that were removed.

        Never holds the lock for long: `pause` is called in between, for threads that wait for it.
        """
        with self._lock:
            self.expire()
            now = self._now()
            due = iter([key for key, at in self._due.items() if at <= now])
        while self._collect_slice(due):
            if pause is not None:
                pause()
        with self._lock:
            self._writing = dict(self._collected)
        return self._writing

    def confirm_written(self) -> None:
        """Confirm that the records of the last `collect_unsaved` were written."""
        written, self._writing = self._writing, {}
        with self._lock:
            for key, record in written.items():
                if self._collected.get(key, ...) is record:
                    del self._collected[key]
                (self._saved.discard if record is None else self._saved.add)(key)
                if record is not None and key not in self._records:  # removed while it was being written
                    self._mark_unsaved(key)

    def _collect_slice(self, due: Iterator[Key]) -> bool:
        """Collect some of the due records; return whether there may be more."""
        left = _SLICE
        with self._lock:
            for key in due:
                if self._due.pop(key, None) is None:
                    continue  # created and removed in the meantime
                if (connection := self._connections.get(key)) is not None:
                    self._update(connection)
                    if (confirmed_at := connection.confirmed_at) is not None:
                        self._due[key] = confirmed_at
                record = self._collected[key] = self._records.get(key)
                left -= 64 + (len(record.uris) + len(record.contents) if record is not None else 0)
                if left <= 0:
                    return True
        return False

    def _mark_unsaved(self, key: Key, at: float = 0.0) -> None:
        if self._wake_writer is not None and self._wake_writer():
            self._due[key] = min(at, self._due.get(key, at))

    # Records

    def _as_of_now(self, record: DurableSubscription) -> DurableSubscription:
        """Return a record whose client knows the present versions."""
        notifications = self.hub.notifications
        return structs.replace(
            record,
            as_of=notifications.revision,
            lists={feature: notifications.version(feature) for feature in record.features},
            contents={},
            created=record.created or self._now(),
        )

    def _restored(self, record: DurableSubscription) -> DurableSubscription:
        """Return a record of the store as it is after a restart."""
        if record.webhook is None:
            return record if record.expires is not None else self._interrupted(record)
        if record.webhook.is_dead and record.expires is not None:
            return record
        # Its receiver has confirmed every version that it was told.
        return structs.replace(record, expires=self.expiry(record))

    def _interrupted(self, record: DurableSubscription) -> DurableSubscription:
        """Return the record of a client that was connected when the server was killed, with its whole `ttl` left.

        The client may have been told versions that were never written. So it must refetch everything that changed after
        the record was written, even if the content is now the same as then, and it gets no deltas.
        """
        notifications = self.hub.notifications
        lists: dict[Feature, Version | None] = {}
        for feature, told in record.lists.items():
            current = notifications.version(feature)
            is_current = told is not None and told.digest == current.digest and told.revision >= current.revision
            # No change starts from the present revision, so no delta applies to it.
            lists[feature] = Version(notifications.revision, current.digest) if is_current else None
        contents = {
            uri: version if version == notifications.version(uri) else None for uri, version in record.contents.items()
        }
        as_of = record.as_of
        if record.uris:
            changed = watched_among(notifications.contents_since(as_of), self.hub.index.watched(record.uris))
            if changed is None:
                as_of = UNKNOWN_REVISION
            contents |= dict.fromkeys(changed or ())
        return structs.replace(record, as_of=as_of, lists=lists, contents=contents, expires=self.expiry(record))

    def _continued(self, previous: DurableSubscription, record: DurableSubscription) -> DurableSubscription:
        """Return `record` with what `previous` was told. The client knows the present versions of new
        topics."""
        notifications = self.hub.notifications
        lists = {feature: previous.lists.get(feature, notifications.version(feature)) for feature in record.features}
        as_of, contents = previous.as_of, previous.contents
        if not set(record.uris) <= set(previous.uris):
            changed = contents_changed(self.hub, previous.uris, as_of)
            if changed is not None:  # otherwise the client has to refetch in any case
                as_of, contents = notifications.revision, {**changed, **contents}
        watched = watched_among(contents, self.hub.index.watched(record.uris))
        if watched is None:
            as_of = UNKNOWN_REVISION  # the client has to refetch
        contents = {uri: contents[uri] for uri in watched or ()}
        return structs.replace(record, as_of=as_of, lists=lists, contents=contents, created=previous.created)

    def _set(self, record: DurableSubscription) -> None:
        if record.key not in self._records:
            self._owned[record.owner] += 1
        self._bytes += _size(record) - _size(self._records.get(record.key))
        self._records[record.key] = record
        if record.expires is not None:
            self._next_expiry = min(self._next_expiry or record.expires, record.expires)

    def _check(self, record: DurableSubscription) -> None:
        if not 0 < len(record.name) <= MAX_NAME_LENGTH:
            length = len(record.name)
            raise TidingsError(f"the name of a subscription has 1 to {MAX_NAME_LENGTH} characters, not {length}")
        check_limit(self.hub.policy, None, list(record.uris))
        for uri in filter(is_pattern, record.uris):
            self.hub.index.compile_pattern(uri)
        if (reason := reason_not_storable(record)) is not None:
            raise TidingsError(f"the subscription {record.name!r:.80} can't be kept: {reason}")

    def _check_size(self, record: DurableSubscription, previous: DurableSubscription | None) -> None:
        """Raise `LimitReached` if a record would exceed the limit. Over the limit, for example after it was lowered, a
        record may still be replaced by one that is not larger."""
        size, limit = self._bytes + _size(record) - _size(previous), self.hub.policy.max_durable_bytes
        if size > max(limit, self._bytes):
            raise LimitReached(
                f"durable subscriptions would need {size} bytes; Policy.max_durable_bytes allows {limit}"
            )

    def _check_limits(self, owner: Owner) -> None:
        policy = self.hub.policy
        counts = {"max_durables": len(self._records)}
        if owner is not None:
            counts["max_durables_per_principal"] = self._owned[owner]
        for name, count in counts.items():
            if count >= getattr(policy, name):
                raise LimitReached(
                    f"there are {count} durable subscriptions; Policy.{name} allows {getattr(policy, name)}"
                )


def _size(record: DurableSubscription | None) -> int:
    """Return about how many bytes the URIs of a record need, each with a version of 40 bytes."""
    return 0 if record is None else sum(len(uri) + 40 for uri in record.uris)
