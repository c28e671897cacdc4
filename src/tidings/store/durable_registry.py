"""The registry of durable subscriptions: which exist, which of them are connected, and when they expire.

A client that returns under the name of its subscription gets a notification for each topic that differs from the
version that it was last told. A subscription expires if its client is absent for its `ttl`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tidings.core.index import check_limit
from tidings.core.model import Feature, Version
from tidings.core.patterns import compile_pattern, is_pattern
from tidings.core.resume import Resumed, contents_changed, resume_from_store, watch_predicate
from tidings.errors import LimitReached, TidingsError
from tidings.store.durable import MAX_NAME_LENGTH, DurableSubscription, Key, Owner, reason_not_storable
from tidings.store.durable_connection import DurableConnection
from tidings.store.unsaved import UnsavedSubscriptions

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["DurableSubscriptions"]

logger = logging.getLogger(__name__)


class DurableSubscriptions:
    """The durable subscriptions of one hub. Shares the hub's lock, so that it may be used from any thread."""

    def __init__(
        self, hub: Hub, records: Iterable[DurableSubscription] = (), *, wake: Callable[[], bool] | None = None
    ) -> None:
        """`records` are those that the store has; `wake` tells the store's writer that there is something to write, and
        returns whether it will be written."""
        self.hub = hub
        self._lock = hub.catalog.lock
        self._now = hub.catalog.now
        self._records: dict[Key, DurableSubscription] = {}
        self._owned: Counter[Owner] = Counter()
        self._connections: dict[Key, DurableConnection] = {}
        self._listeners: list[Callable[[Key], None]] = []
        self._next_expiry = 0.0
        stored = list(records)
        self.unsaved = UnsavedSubscriptions(
            self._lock,
            self._now,
            wake,
            self._records,
            refresh=self._refresh,
            expire=self.expire,
            stored=stored,
        )
        """The records that the store has not written yet."""
        for record in stored:
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
        with self._lock:
            return key in self._connections

    def __len__(self) -> int:
        return len(self._records)

    def expiry(self, record: DurableSubscription) -> float | None:
        """Return when a subscription expires if its client disconnects now. An active webhook does not expire."""
        is_active = record.webhook is not None and not record.webhook.is_dead
        return None if is_active else self._now() + record.ttl

    def missed(self, key: Key) -> Resumed:
        """Return what a subscription without a connection has missed."""
        with self._lock:
            record = self._records.get(key) or DurableSubscription(name=key[1])
            return resume_from_store(self.hub, record.told, record.uris, record.as_of)

    # Changes

    def follow(self, listener: Callable[[Key], None]) -> None:
        """Call `listener` with the key of each record that is put or removed."""
        self._listeners.append(listener)

    def put(self, record: DurableSubscription) -> DurableSubscription:
        """Create or replace a subscription. A new one counts as up to date. If a connection under this name watches
        something else, end it. Raises `TidingsError` for an invalid record."""
        with self._lock:
            self.expire()
            self._check(record)
            previous = self._records.get(record.key)
            replaced = None
            if previous is None:
                self._check_limits(record.owner)
                record = self._as_of_now(record)
            else:
                replaced, previous = self._replaced_connection(previous, record)
                record = self._continued(previous, record)
            if replaced is not None and record.expires is None:
                record = structs.replace(record, expires=self.expiry(record))
            self._set(record)
            self.unsaved.mark(record.key)
            self._notify(record.key)
        if replaced is not None:
            replaced.end()
        return record

    def change(self, key: Key, **fields: Any) -> DurableSubscription | None:
        """Change some fields of an existing subscription."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return None
            record = structs.replace(record, **fields)
            self._set(record)
            self.unsaved.mark(key)
            return record

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
            connection = self._connections.pop(key, None)
            if connection is not None:
                connection.detach()
            if self._records.pop(key, None) is None:
                return False
            self._owned[key[0]] -= 1
            self.unsaved.remove(key)
            self._notify(key)
        if connection is not None:
            connection.end()
        return True

    def expire(self) -> None:
        """Remove the subscriptions that have expired."""
        now = self._now()
        if not self._next_expiry or now < self._next_expiry:
            return
        for key, record in list(self._records.items()):
            if record.expires is not None and record.expires <= now:
                self.hub.observers.expired(record.name)
                self.remove(key)
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
            replaced = self._connections.pop(key, None)
            if replaced is not None:
                self._update(replaced)
                replaced.detach()
            previous = self._records.get(key)
            if previous is None:
                try:
                    self._check_limits(owner)
                except LimitReached as error:
                    logger.warning("%r is not made durable: %s", name, error)
                    return None
                record = self._as_of_now(DurableSubscription(name=name, owner=owner, **fields))
            else:
                record = self._continued(previous, structs.replace(previous, **fields))
            self._set(record)
            connection = self._connections[key] = DurableConnection(
                self.hub, self._records, record, self.unsaved, is_new=previous is None, end=end, on_close=self._on_close
            )
            self.unsaved.mark(key)
        if replaced is not None:
            replaced.end()
        return connection

    def save_told(self, connection: DurableConnection) -> None:
        """Write what the client has confirmed until now with the next batch."""
        with self._lock:
            if connection.key in self._records:
                self._update(connection)
                self.unsaved.mark(connection.key)

    def _update(self, connection: DurableConnection) -> None:
        if (record := self._records.get(connection.key)) is not None:
            self._set(connection.update(record))

    def _refresh(self, key: Key) -> tuple[DurableSubscription | None, float | None]:
        connection = self._connections.get(key)
        if connection is None:
            return self._records.get(key), None
        self._update(connection)
        return self._records.get(key), connection.confirmed_at

    def _on_close(self, connection: DurableConnection) -> None:
        """Save the record of a connection whose subscriber is being closed."""
        self._update(connection)
        connection.detach()
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            record = self._records.get(connection.key)
            if record is not None:
                self.change(connection.key, expires=self.expiry(record))

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
        if record.uris:
            is_watched = watch_predicate(record.uris, self.hub)
            contents |= dict.fromkeys(filter(is_watched, notifications.contents_since(record.as_of)))
        return structs.replace(record, lists=lists, contents=contents, expires=self.expiry(record))

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
        is_watched = watch_predicate(record.uris, self.hub)
        contents = {uri: version for uri, version in contents.items() if is_watched(uri)}
        return structs.replace(record, as_of=as_of, lists=lists, contents=contents, created=previous.created)

    def _set(self, record: DurableSubscription) -> None:
        if record.key not in self._records:
            self._owned[record.owner] += 1
        self._records[record.key] = record
        if record.expires is not None:
            self._next_expiry = min(self._next_expiry or record.expires, record.expires)

    def _notify(self, key: Key) -> None:
        for listener in self._listeners:
            listener(key)

    def _check(self, record: DurableSubscription) -> None:
        if not 0 < len(record.name) <= MAX_NAME_LENGTH:
            length = len(record.name)
            raise TidingsError(f"the name of a subscription has 1 to {MAX_NAME_LENGTH} characters, not {length}")
        check_limit(self.hub.policy, None, list(record.uris))
        for uri in filter(is_pattern, record.uris):
            compile_pattern(uri, self.hub.templates)
        if (reason := reason_not_storable(record)) is not None:
            raise TidingsError(f"the subscription {record.name!r:.80} can't be kept: {reason}")

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
