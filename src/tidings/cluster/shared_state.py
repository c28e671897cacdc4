"""The state that all replicas share, merged from the entries of the table into a catalog. It does no I/O.

| key | value |
|---|---|
| `item/REPLICA/FEATURE/KEY` | the definition of an item that a replica serves |
| `replica/REPLICA` | a replica that is alive, with a time to live |
| `content/URI` | the digest of the content of a resource |
| `unknown/FEATURE` | the digest of a change of a list that could not be read |

Clients see the items of all replicas that are alive. If several replicas define one item, the newest definition counts.
The items of a replica appear with its `replica` entry and disappear with it, all in one commit. Each replica applies
the same entries in the same order, so all get the same digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidings.cluster.backend import Entry, Write
from tidings.core.catalog import Catalog
from tidings.core.model import Feature, Item
from tidings.core.model import item_key as key_of_definition

__all__ = [
    "ItemKey",
    "ReplicaInfo",
    "SharedState",
    "content_write",
    "item_write",
    "leave_write",
    "replica_write",
    "unknown_write",
]

ItemKey = tuple[Feature, str]

_T = TypeVar("_T")

_ORDER_BITS = 12
"""The revision of a change is the order of its entry, shifted by this, plus a number within the entry. Revisions stay
below 2^53, the largest integer that JSON clients in JavaScript read exactly."""


class _ItemValue(msgspec.Struct, omit_defaults=True):
    item: msgspec.Raw
    trace: dict[str, str] | None = None


class _ContentValue(msgspec.Struct, omit_defaults=True):
    digest: str
    metadata: Any = None
    trace: dict[str, str] | None = None


class ReplicaInfo(msgspec.Struct, omit_defaults=True):
    """The description of a replica that it writes to the table, for `tidings cluster status`."""

    started: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    digests: dict[str, str] = {}
    applied: int = 0
    """The order of the last entry that it has applied."""
    streams: int = 0


class _Definition(NamedTuple):
    order: int
    item: bytes
    trace: Mapping[str, str] | None = None


def item_write(
    replica: str, feature: Feature, key: str, item: Item | None, trace: Mapping[str, str] | None = None
) -> Write:
    name = f"item/{replica}/{feature.value}/{key}"
    if item is None:
        return Write(name, None)
    return Write(name, msgspec.json.encode(_ItemValue(msgspec.Raw(item.json), _plain(trace))))


def content_write(uri: str, digest: str, metadata: Any = None, trace: Mapping[str, str] | None = None) -> Write:
    return Write(f"content/{uri}", msgspec.json.encode(_ContentValue(digest, metadata, _plain(trace))))


def unknown_write(feature: Feature, digest: str) -> Write:
    return Write(f"unknown/{feature.value}", digest.encode())


def replica_write(replica: str, info: ReplicaInfo, ttl: float) -> Write:
    return Write(f"replica/{replica}", msgspec.json.encode(info), ttl)


def leave_write(replica: str) -> Write:
    return Write(f"replica/{replica}", None)


class SharedState:
    """The entries of the table, and the catalog that results from them."""

    def __init__(self, catalog: Catalog, replica: str) -> None:
        """`replica` is this process: its own items count even if the table does not have its entry."""
        self._catalog = catalog
        self._replica = replica
        self._definitions: dict[str, dict[ItemKey, _Definition]] = {replica: {}}
        """By replica. Those that are not alive are kept, because they may only be paused."""
        self.replicas: dict[str, ReplicaInfo] = {}
        """The replicas that are alive, as far as the table says."""
        self.reported: dict[str, int] = {}
        """The order of the last entry of each replica."""
        self._written: dict[str, bytes] = {}
        """The values of this replica's items and of all contents, as they were last seen in the table."""
        self.order = 0
        """The order of the last applied entry."""
        self.undecodable = 0
        """Entries that could not be decoded. Each counts as a deletion."""

    def is_written(self, write: Write) -> bool:
        """Return whether a write is needless: the table has this value already, as far as it was seen, and so does the
        catalog. They differ after a change that was only applied locally. Traces are not compared."""
        value = _compared_part(write.key, write.value)
        if value != self._written.get(write.key):
            return False
        kind, _, name = write.key.partition("/")
        if kind == "content":
            known = self._catalog.resources.content(name).digest
            return not known or known.encode() == value
        if kind == "item":
            with suppress(ValueError):  # not a key that a replica writes
                definition = self._definitions[self._replica].get(_split(name)[1])
                return value == (None if definition is None else definition.item)
        return True

    def own_keys(self) -> list[str]:
        """Return the keys of the items of this replica that the table has."""
        return [key for key in self._written if key.startswith(f"item/{self._replica}/")]

    def owners(self, feature: Feature, key: str) -> list[str]:
        """Return the other replicas that serve an item and are alive, the one with the newest definition first."""
        found = {
            replica: definition.order
            for replica, definitions in self._definitions.items()
            if replica in self.replicas and replica != self._replica
            if (definition := definitions.get((feature, key))) is not None
        }
        return sorted(found, key=found.__getitem__, reverse=True)

    def dead_replicas(self) -> set[str]:
        """Return the replicas whose items are in the table although they are not alive."""
        return {replica for replica, items in self._definitions.items() if items} - {*self.replicas, self._replica}

    def removals(self, replica: str) -> list[Write]:
        """Return the writes that remove the items of a replica from the table."""
        return [item_write(replica, feature, key, None) for feature, key in self._definitions.get(replica, ())]

    def version_writes(self) -> list[Write]:
        """Return the writes of the digests that do not follow from the items: those of contents, and of changes that
        could not be read."""
        contents = self._catalog.resources.contents()
        lists = {feature: self._catalog.items(feature).unknown_digest for feature in Feature}
        return [
            *(content_write(uri, version.digest) for uri, version in contents.items()),
            *(unknown_write(feature, digest) for feature, digest in lists.items() if digest),
        ]

    def templates(self) -> list[str]:
        """Return the URI templates that other replicas serve."""
        others = sorted(self.replicas.keys() - {self._replica})
        return [
            key
            for replica in others
            for feature, key in self._definitions.get(replica, ())
            if feature is Feature.RESOURCES and "{" in key
        ]

    # Applying

    def load(self, entries: Sequence[Entry], order: int, pending: Mapping[str, Write]) -> None:
        """Replace the entries of the other replicas and the contents by a snapshot of the table.

        `pending` are the changes that this replica has not written yet, by key: its own values count."""
        own = self._definitions[self._replica]
        self._definitions = {self._replica: {item_key: each._replace(order=order) for item_key, each in own.items()}}
        self.replicas = {}
        self._written = {}
        touched: set[ItemKey] = {
            (feature, item.key) for feature in Feature for item in self._catalog.items(feature).snapshot()
        }
        entries = [entry for entry in entries if entry.value is not None]
        for entry in sorted(entries, key=lambda entry: entry.order):
            kind, _, name = entry.key.partition("/")
            self._remember(entry)
            if kind == "item" and name.startswith(f"{self._replica}/"):
                self._order_own(name, entry)
            elif kind in ("item", "replica"):
                touched |= self._store(kind, name, entry)
            elif (write := pending.get(entry.key)) is None or self.is_written(write):
                self._apply_other(kind, name, entry)  # in order, so that contents keep their revisions
        self._update_items(touched, order, None)
        self._advance(order)

    def apply(self, entry: Entry) -> None:
        """Apply one write to the table."""
        kind, _, name = entry.key.partition("/")
        self._remember(entry)
        if kind in ("item", "replica"):
            self._update_items(self._store(kind, name, entry), entry.order, _trace_of(entry))
        else:
            self._apply_other(kind, name, entry)
        self._advance(entry.order)

    def apply_locally(self, write: Write) -> None:
        """Apply a write of this replica that the table cannot take now."""
        kind, _, name = write.key.partition("/")
        entry = Entry(write.key, write.value, self.order)
        if kind == "item":
            self._update_items(self._store(kind, name, entry), entry.order, _trace_of(entry))
        else:
            self._apply_other(kind, name, entry)

    def _remember(self, entry: Entry) -> None:
        """Remember a value in the table, so that it is not written again."""
        if entry.key.startswith(("content/", "unknown/", f"item/{self._replica}/")):
            value = _compared_part(entry.key, entry.value)
            if value is None:
                self._written.pop(entry.key, None)
            else:
                self._written[entry.key] = value

    def _order_own(self, name: str, entry: Entry) -> None:
        """Give an item of this replica the order that it has in the table.

        If the table has another definition, this replica writes its own again, which is then the newest."""
        own = self._definitions[self._replica]
        try:
            item_key = _split(name)[1]
        except ValueError:
            self.undecodable += 1
            return
        definition = own.get(item_key)
        if definition is not None and definition.item == self._written.get(entry.key):
            own[item_key] = definition._replace(order=entry.order)

    def _advance(self, order: int) -> None:
        self.order = max(self.order, order)
        with self._catalog.batch_at(order << _ORDER_BITS):
            pass

    def _store(self, kind: str, name: str, entry: Entry) -> set[ItemKey]:
        """Store an entry. Return the items that it may change.

        A value that cannot be decoded counts as a deletion: a replica that loads the table has no earlier value to
        keep, and all replicas must get the same result."""
        if kind == "replica":
            was_alive, info = name in self.replicas, self._decode(entry.value, ReplicaInfo)
            if info is None:
                self.replicas.pop(name, None)
                self.reported.pop(name, None)
            else:
                self.replicas[name] = info
                self.reported[name] = entry.order
            return set(self._definitions.get(name, ())) if was_alive != (info is not None) else set()
        try:
            replica, item_key = _split(name)
        except ValueError:
            self.undecodable += 1
            return set()
        definitions = self._definitions.setdefault(replica, {})
        value = self._decode(entry.value, _ItemValue)
        if value is not None and not _has_key(value.item, item_key):
            self.undecodable += 1
            value = None
        if value is None:
            definitions.pop(item_key, None)
        else:
            definitions[item_key] = _Definition(entry.order, bytes(value.item), value.trace)
        return {item_key}

    def _decode(self, value: bytes | None, target: type[_T]) -> _T | None:
        """Decode a value. Return None for a deletion, and for a value that cannot be decoded, which is counted."""
        try:
            return None if value is None else msgspec.json.decode(value, type=target)
        except msgspec.DecodeError:
            self.undecodable += 1
            return None

    def _update_items(self, touched: Iterable[ItemKey], order: int, trace: Mapping[str, str] | None) -> None:
        """Put the newest definition of each item into the catalog, in one commit."""
        alive = [
            definitions
            for replica, definitions in self._definitions.items()
            if replica == self._replica or replica in self.replicas
        ]
        # Sorted, so that all replicas number the changes of a commit in the same way.
        ordered = sorted(touched, key=lambda item_key: (item_key[0].value, item_key[1]))
        with self._catalog.batch_at(order << _ORDER_BITS, trace):
            for item_key in ordered:
                feature, key = item_key
                items = self._catalog.items(feature)
                found = [definitions[item_key] for definitions in alive if item_key in definitions]
                if found:
                    newest = max(found, key=lambda definition: definition.order)
                    known = items.item(key)
                    if known is None or known.json != newest.item:
                        items.put_shared(newest.item)
                elif key in items:
                    items.remove(key)

    def _apply_other(self, kind: str, name: str, entry: Entry) -> None:
        """Apply the entry of a content, or of a change that could not be read. Unknown kinds belong to a newer
        version."""
        if entry.value is None:
            return
        try:
            if kind == "content":
                value = msgspec.json.decode(entry.value, type=_ContentValue)
                with self._catalog.batch_at(entry.order << _ORDER_BITS, value.trace):
                    self._catalog.resources.put_content(name, value.digest, value.metadata)
            elif kind == "unknown":
                items = self._catalog.items(Feature(name))
                with self._catalog.batch_at(entry.order << _ORDER_BITS):
                    items.mark_changed(entry.value.decode())
        except (msgspec.DecodeError, ValueError):
            self.undecodable += 1


def _has_key(text: msgspec.Raw, item_key: ItemKey) -> bool:
    feature, key = item_key
    try:
        return key_of_definition(feature, msgspec.json.decode(text, type=dict[str, Any])) == key
    except (msgspec.DecodeError, ValueError):
        return False


def _split(name: str) -> tuple[str, ItemKey]:
    replica, feature, key = name.split("/", 2)
    return replica, (Feature(feature), key)


def _compared_part(key: str, value: bytes | None) -> bytes | None:
    """Return the part of a value that decides whether two values are the same; None if there is no valid value."""
    try:
        if value is not None and key.startswith("item/"):
            return bytes(msgspec.json.decode(value, type=_ItemValue).item)
        if value is not None and key.startswith("content/"):
            return msgspec.json.decode(value, type=_ContentValue).digest.encode()
    except msgspec.DecodeError:
        return None
    return value


def _trace_of(entry: Entry) -> Mapping[str, str] | None:
    try:
        is_item = entry.value is not None and entry.key.startswith("item/")
        return msgspec.json.decode(entry.value, type=_ItemValue).trace if is_item and entry.value else None
    except msgspec.DecodeError:
        return None


def _plain(trace: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if trace is None else dict(trace)
