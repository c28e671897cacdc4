"""The durable subscriptions and webhooks of a cluster: one entry `durable/[OWNER, NAME]` of the table for each.

An entry has the record of a subscription, and its holder: the replica that the client is connected to, or that
delivers the webhook. When the client connects to another replica, that becomes the holder. An active webhook always has
a holder. If the holder leaves, all others choose the same successor, because they see the same replicas.

Each write is a compare-and-set. If a replica finds another entry than it expected, it merges both and writes again: the
told versions come from the holder, the other fields from the later put or connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from tidings.cluster.backend import Backend, Entry, TooLarge, Unavailable, Write
from tidings.server.loop_bridge import LoopBridge
from tidings.store.durable import DurableSubscription, Key
from tidings.store.durable_registry import DurableSubscriptions

__all__ = ["KIND", "SharedDurables"]

logger = logging.getLogger(__name__)

KIND = "durable/"
"""The start of the keys."""

_BATCH_DELAY = 0.05
"""Seconds between two batches, so that many changes need few requests."""

_BATCH_SIZE = 200
"""Subscriptions that are encoded without a pause, which takes a few milliseconds."""

_LOCK_PAUSE = 0.0005
"""Seconds for which the catalog's lock is free between two slices of durable subscriptions."""

_PROGRESS_DELAY = 1.0
"""Seconds between two writes of the told versions of a busy webhook. After a crash, the next holder may repeat the
deliveries since the last write."""

_SETTLE_TIME = 3.0
"""Seconds after the table was loaded in which no replica counts as gone: NATS may have restarted, and the others write
their entries again."""

_CLIENT_TIME = 60.0
"""Seconds after which the clients of a replica that is gone count as disconnected. It may come back before."""

_RETRY_DELAY = 1.0


class _Value(msgspec.Struct, omit_defaults=True):
    record: DurableSubscription
    holder: str | None = None
    writer: str = ""
    """The replica that has written the entry."""


class _Seen(NamedTuple):
    """The entry of a subscription as it was last seen, or as this replica has written it."""

    order: int
    record: DurableSubscription | None
    """None if this replica has removed the entry, and has not seen the removal."""
    holder: str | None


class _Pending(NamedTuple):
    key: Key
    write: Write
    seen: _Seen
    """The entry that results from the write. Its order is 0 until the write is stored."""
    change: int | None


_decode_key = msgspec.json.Decoder(tuple[tuple[str, str | None] | None, str]).decode
_decode_value = msgspec.json.Decoder(_Value).decode


class SharedDurables:
    """Synchronize the durable subscriptions of one replica with the table. The registry calls it as its `sharing`."""

    def __init__(
        self,
        durables: DurableSubscriptions,
        backend: Backend,
        bridge: LoopBridge,
        replica: str,
        alive: Callable[[], Collection[str]],
    ) -> None:
        """`alive` returns the replicas that are alive, as all replicas see it."""
        self._durables = durables
        self._backend = backend
        self._bridge = bridge
        self._replica = replica
        self._alive = alive
        self._failures = durables.hub.counts.failures
        self._lock = durables.hub.catalog.lock
        self._seen: dict[Key, _Seen] = {}
        self._lost: dict[Key, str | None] = {}
        """The holders of the subscriptions that were lost with the table, and are to be written again."""
        self._changed: dict[Key, int] = {}
        """The subscriptions whose put, removal or connection here is not written yet, with the number of the change."""
        self._changes = 0
        self._gone: dict[str, float] = {}
        """The holders that are gone, and since when."""
        self._is_reachable = False
        self._settled_at = 0.0
        self._loads = 0
        self._deferred: list[Entry] | None = None
        """The entries that came while a write of this replica has no order yet; None if there is no such write."""
        self._has_work = asyncio.Event()
        self._is_woken = False
        """Whether `_has_work` is set, or will be soon."""
        self._pause = partial(threading.Event().wait, _LOCK_PAUSE)
        durables.sharing = self
        durables.on_unsaved(self._wake, delay=_PROGRESS_DELAY)

    # Called by the registry, in any thread, with the lock

    def mark_changed(self, key: Key) -> None:
        self._changes += 1
        self._changed[key] = self._changes
        self._wake()

    def is_here(self, key: Key) -> bool:
        # Another replica may take over what an unreachable one serves.
        return self._is_reachable and (seen := self._seen.get(key)) is not None and seen.holder == self._replica

    def is_elsewhere(self, key: Key) -> bool:
        return self._holder(key) not in (None, self._replica)

    def _holder(self, key: Key) -> str | None:
        seen = self._seen.get(key)
        return seen.holder if seen is not None else self._lost.get(key)

    def _wake(self) -> bool:
        if not self._is_woken:  # once, because a change may be delivered to thousands of clients
            self._is_woken = True
            self._bridge.call_soon(self._has_work.set)
        return True

    # Writing, on the event loop

    async def run(self) -> None:
        """Write what has changed, until cancelled."""
        self._has_work = asyncio.Event()
        self._has_work.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROGRESS_DELAY if self._durables.has_unsaved else None):
                    await self._has_work.wait()
            self._is_woken = False
            self._has_work.clear()
            delay = _BATCH_DELAY
            if self._is_reachable:
                try:
                    # In a thread, because thousands of clients may be connected.
                    await asyncio.to_thread(self._durables.collect_unsaved, self._pause)
                    await self.write()
                except Unavailable as error:
                    logger.debug("durable subscriptions could not be written: %s", error)
                    self._has_work.set()
                    delay = _RETRY_DELAY
            await asyncio.sleep(delay)

    async def write(self) -> None:
        """Write the changed subscriptions. Raise `Unavailable` if some may not be stored."""
        with self._lock:
            due = list(dict.fromkeys([*self._durables.collect_unsaved(), *self._changed]))
        for start in range(0, len(due), _BATCH_SIZE):
            await self._write_batch(due[start : start + _BATCH_SIZE])
        self._durables.confirm_written()

    async def _write_batch(self, keys: Sequence[Key]) -> None:
        with self._lock:
            pending = [each for key in keys if (each := self._make_write(key)) is not None]
        loads = self._loads
        self._deferred = []
        try:
            orders = await self._store([each.write for each in pending])
            if loads == self._loads:
                for each, order in zip(pending, orders, strict=True):
                    if order is not None:  # otherwise another replica was first, and its entry follows
                        self._set_written(each, order)
        finally:
            deferred, self._deferred = self._deferred, None
            for entry in deferred:
                self.apply(entry)

    def _make_write(self, key: Key) -> _Pending | None:
        """Return the write of a subscription as it is now; None if the table has it."""
        record, seen, change = self._durables.get(key), self._seen.get(key), self._changed.get(key)
        holder = None if record is None else self._choose_holder(record)
        is_same = seen.record == record and seen.holder == holder if seen is not None else record is None
        if is_same:
            self._changed.pop(key, None)
            return None
        value = None if record is None else msgspec.json.encode(_Value(record, holder, self._replica))
        # A removal here is final. An expiry is not: the client may have connected to another replica meanwhile.
        is_removal = record is None and change is not None
        expected = None if is_removal or seen is None or seen.record is None else seen.order
        return _Pending(key, Write(_name(key), value, expected=expected), _Seen(0, record, holder), change)

    def _choose_holder(self, record: DurableSubscription) -> str | None:
        key, current = record.key, self._holder(record.key)
        if self._durables.is_connected_here(key):
            return self._replica
        if record.webhook is not None and not record.webhook.is_dead:
            is_alive = current is not None and (current == self._replica or current in self._alive())
            return current if is_alive else self._successor(key)
        return None if record.expires is not None or current == self._replica else current

    def _successor(self, key: Key) -> str:
        """Return the replica that delivers a webhook without a holder: the same on each replica."""
        name = _name(key)
        candidates = self._alive() or [self._replica]
        return max(candidates, key=lambda replica: hashlib.sha256(f"{replica} {name}".encode()).digest())

    async def _store(self, writes: Sequence[Write]) -> list[int | None]:
        """Write to the table. Leave out what is too large for it."""
        try:
            return await self._backend.write(writes) if writes else []
        except TooLarge:
            orders: list[int | None] = []
            for write in writes:
                try:
                    orders += await self._backend.write([write])
                except TooLarge as error:
                    self._failures["subscriptions left out"] += 1
                    logger.error("other replicas will not have a durable subscription: %s", error)
                    self._changed.pop(_decode_key(write.key.removeprefix(KIND)), None)
                    orders.append(None)
            return orders

    def _set_written(self, written: _Pending, order: int) -> None:
        key = written.key
        with self._lock:
            was_here = self.is_here(key)
            self._seen[key] = written.seen._replace(order=order)
            self._lost.pop(key, None)
            if self._changed.get(key) == written.change:
                self._changed.pop(key, None)
            if was_here != self.is_here(key):
                self._durables.notify(key)

    # Reading, on the event loop

    def load(self, entries: Sequence[Entry], *, is_new_table: bool) -> None:
        """Replace what was seen by a snapshot of the table."""
        self._loads += 1
        self._is_reachable = True
        self._settled_at = time.monotonic() + _SETTLE_TIME
        if self._deferred is not None:
            self._deferred.clear()
        deferred, self._deferred = self._deferred, None
        with self._lock:
            before, self._seen = self._seen, {}
            if is_new_table:
                self._lost |= {key: seen.holder for key, seen in before.items() if seen.record is not None}
                before = {}
            for entry in entries:
                if entry.key.startswith(KIND) and (key := self._key_of(entry)) is not None:
                    if (seen := before.pop(key, None)) is not None:
                        self._seen[key] = seen
                    self.apply(entry)
            for key, seen in before.items():  # removed meanwhile
                self._merge(key, None, was_holder=seen.holder == self._replica)
            for key, holder in self._lost.items():
                if holder == self._replica:  # the others write theirs
                    self._durables.mark_unsaved(key)
            self._notify_held()
        self._deferred = deferred
        self._has_work.set()

    def lose(self) -> None:
        """Deliver no webhook while the table cannot be reached: another replica may do it."""
        with self._lock:
            self._is_reachable = False
            self._notify_held()

    def resume(self) -> None:
        """Continue after `lose`, because the table can be reached and nothing was missed."""
        with self._lock:
            self._is_reachable = True
            self._notify_held()
        self._has_work.set()

    def _notify_held(self) -> None:
        for key, seen in self._seen.items():
            if seen.holder == self._replica:
                self._durables.notify(key)

    def apply(self, entry: Entry) -> None:
        """Apply one write to the table."""
        if self._deferred is not None:
            self._deferred.append(entry)
            return
        if (key := self._key_of(entry)) is None:
            return
        with self._lock:
            seen = self._seen.get(key)
            if seen is not None and entry.order <= seen.order:
                if seen.record is None and entry.order == seen.order:
                    del self._seen[key]
                return
            try:
                value = _decode_value(entry.value) if entry.value is not None else None
            except msgspec.DecodeError:
                logger.warning("the entry of a durable subscription cannot be decoded, and is ignored")
                return
            was_holder, was_here = self._holder(key) == self._replica, self.is_here(key)
            self._lost.pop(key, None)
            if value is None:
                self._seen.pop(key, None)
            else:
                self._seen[key] = _Seen(entry.order, value.record, value.holder)
            if value is None or value.writer != self._replica:
                self._merge(key, value, was_holder=was_holder)
            if was_here or self.is_here(key):
                self._durables.notify(key)

    def _merge(self, key: Key, value: _Value | None, *, was_holder: bool) -> None:
        """Merge the entry of another replica, or its removal, with what has changed here."""
        durables, own = self._durables, self._durables.get(key)
        is_changed = key in self._changed
        if value is None:
            if is_changed and own is not None:
                durables.mark_unsaved(key)  # it was put here after the removal
            else:
                durables.replace(key, None)
        elif is_changed and own is None:
            self._wake()  # it was removed here after that entry was written
        elif was_holder and value.holder == self._replica:
            # Another replica has put it. Only this replica knows the told versions.
            durables.merge(value.record) if not is_changed else durables.mark_unsaved(key)
        elif not is_changed:
            durables.replace(key, value.record)
        elif durables.is_connected_here(key) and not was_holder:
            # Its client has connected here after that entry was written.
            durables.change(key, webhook=value.record.webhook)
            durables.mark_unsaved(key)
        else:
            durables.put_again(value.record)

    def _key_of(self, entry: Entry) -> Key | None:
        try:
            return _decode_key(entry.key.removeprefix(KIND))
        except msgspec.DecodeError:
            logger.warning("the key %.200r is not that of a durable subscription, and is ignored", entry.key)
            return None

    # Replicas that are gone

    def check_holders(self) -> None:
        """Take over from the replicas that are gone. Call this when one leaves, and every few seconds."""
        now = time.monotonic()
        if not self._is_reachable or now < self._settled_at:
            return
        with self._lock:
            for key in self._lost:
                self._durables.mark_unsaved(key)
            alive = self._alive()
            holders = {seen.holder for seen in self._seen.values() if seen.holder is not None}
            self._gone = {holder: self._gone.get(holder, now) for holder in holders.difference(alive)}
            for key, seen in self._seen.items() if self._gone else ():
                since = None if seen.holder is None else self._gone.get(seen.holder)
                if since is None or self._successor(key) != self._replica:
                    continue
                webhook = seen.record.webhook if seen.record is not None else None
                if webhook is not None and not webhook.is_dead:
                    self._durables.mark_unsaved(key)
                elif now - since >= _CLIENT_TIME:
                    self._durables.interrupt(key)


def _name(key: Key) -> str:
    return KIND + msgspec.json.encode(key).decode()
