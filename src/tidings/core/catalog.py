"""The items of every feature, with revision and digest.

Operations change the catalog; each commit passes its changes to the sinks and the publisher, in order. An operation
without an effect makes no commit. An operation outside `batch()` is a batch of one, and a batch publishes the *net*
difference between its start and its end.

The catalog does no I/O and knows no subscribers. It can be used from any thread: it has one lock, shared with the hub.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tidings.core import digest
from tidings.core.encoding import is_unicode, safe_json
from tidings.core.model import Change, Feature, Item, Operation, Topic, Version, item_key, operation_between
from tidings.errors import AlreadyExists, InvalidItem, NotFound
from tidings.policy import Policy

__all__ = ["UNKNOWN_VERSION", "Catalog", "Items", "Resources", "Sink"]

logger = logging.getLogger(__name__)

Sink = Callable[[tuple[Change, ...]], None]

UNKNOWN_VERSION = Version(0, "")
"""The version of a content that the catalog does not know."""

# Looked up once, because access to an Enum member is slow and contents change often.
_DELETED, _UPDATED = Operation.DELETED, Operation.UPDATED


class Catalog:
    """The `tools`, `prompts` and `resources` of a server, and the versions of the contents of resources."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        clock: Callable[[], float] = time.time,
        life: str = "",
        epoch: str = "",
    ) -> None:
        """`life` identifies this run of the server: two processes that start with copies of one store use the same
        revisions for different contents."""
        self.policy = policy or Policy()
        self.life = life
        self.epoch = epoch
        """Identifies the revisions: those of the store, of the cluster or of this process. Those of another epoch are
        unknown here."""
        self.trace: Callable[[], Mapping[str, str] | None] | None = None
        """Called for each commit to get the trace context of the call that made it. It must not raise."""
        self.publisher: Sink | None = None
        """Called with each commit after all sinks: the hub, or the bridge that calls the hub on the event loop. Unlike
        a sink, it may change the catalog; it queues the commits that result."""
        self.lock = threading.RLock()
        self.tools = Items(self, Feature.TOOLS)
        self.prompts = Items(self, Feature.PROMPTS)
        self.resources = Resources(self)
        self._clock = clock
        self._revision = 0
        self._sinks: tuple[Sink, ...] = ()
        self._features: dict[Feature, Items] = {
            each.feature: each for each in (self.tools, self.prompts, self.resources)
        }
        self._batch = CatalogBatch(self)
        self._cause: Mapping[str, str] | None = None
        self._given_cause: Mapping[str, str] | None = None

    @property
    def revision(self) -> int:
        return self._revision

    def items(self, feature: Feature | str) -> Items:
        return self._features[feature if isinstance(feature, Feature) else Feature(feature)]

    def version(self, topic: Topic) -> Version:
        """Return the version of a list, or of the content of a resource (`UNKNOWN_VERSION` if it is unknown)."""
        return self.items(topic).version if isinstance(topic, Feature) else self.resources.content(topic)

    def now(self) -> float:
        """Return the time for new changes."""
        return self._clock()

    def follow(self, sink: Sink) -> Callable[[], None]:
        """Call `sink` with the changes of every commit from now on; return a function that stops this.

        A sink must not change the catalog."""
        with self.lock:
            self._sinks += (sink,)

        def stop() -> None:
            with self.lock:
                if sink in self._sinks:
                    at = self._sinks.index(sink)
                    self._sinks = self._sinks[:at] + self._sinks[at + 1 :]

        return stop

    def restore(
        self,
        items: Iterable[Item],
        versions: Mapping[Feature, Version],
        contents: Mapping[str, Version],
        revision: int,
        forgotten: int = 0,
    ) -> None:
        """Start with the state before a restart. Call this before any other operation. The sources then list their
        items, and only the differences become changes. Revisions continue after `revision`."""
        with self.lock:
            for item in items:
                self.items(item.feature)._restore(item)
            for feature, version in versions.items():
                self.items(feature)._restore_version(version)
            self.resources._contents.update(contents)
            self.resources.forgotten = forgotten
            self._revision = revision

    def batch(self) -> CatalogBatch:
        """Publish many operations as one commit: `with catalog.batch() as changes: …`. After the block, the list
        contains the published changes.

        Not a transaction: if the block raises, the operations until then are published, because they did happen. Don't
        await inside: the block holds the lock of the catalog.
        """
        return self._batch

    def batch_at(self, revision: int, cause: Mapping[str, str] | None = None) -> CatalogBatch:
        """Begin a batch whose changes have revisions above `revision`, and the trace context of `cause`.

        For changes that another replica made, and that all replicas number in the same way."""
        with self.lock:
            self._revision = max(self._revision, revision)
            self._given_cause = cause
        return self._batch

    def _commit(self, changes: list[Change]) -> None:
        now = self._clock()
        self._cause = self._given_cause or (self.trace() if self.trace is not None else None)
        self._given_cause = None
        for items in self._features.values():
            if items.is_touched:
                items._add_net_changes(now, changes)
        if not changes:
            return
        published = tuple(changes)
        for sink in self._sinks if self.publisher is None else (*self._sinks, self.publisher):
            try:
                sink(published)
            except Exception:  # a defect of a sink must not fail the call that changed the catalog
                logger.exception("a sink of the catalog failed; the other sinks are still called")


class CatalogBatch:
    """The context manager of `Catalog.batch()`. There is one object for all batches, because the lock prevents
    two batches from overlapping, and a nested batch is part of the outer one."""

    __slots__ = ("_catalog", "_changes", "_depth")

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._changes: list[Change] = []
        self._depth = 0

    def __enter__(self) -> list[Change]:
        self._catalog.lock.acquire()
        self._depth += 1
        return self._changes

    def __exit__(self, *exception: object) -> None:
        try:
            self._depth -= 1
            if self._depth == 0:
                changes, self._changes = self._changes, []
                self._catalog._commit(changes)
        finally:
            self._catalog.lock.release()


class Items:
    """The items of one feature. Definitions are mappings with the field names of the protocol (`inputSchema`, …).

    Every operation returns the changes that it published: none if nothing changed, and none inside a batch.
    """

    def __init__(self, catalog: Catalog, feature: Feature) -> None:
        self.feature = feature
        self._catalog = catalog
        self._items: dict[str, Item] = {}
        self._list_digest = digest.ListDigest()
        self._version = Version(0, digest.EMPTY)
        self.was_read = False
        """Whether the items were read from the server since it started. Until then they are those from before the
        restart."""
        self.is_touched = False
        """Whether the present batch changed something here."""
        self._touched: dict[str, Item | None] = {}
        """The items before the batch, by key."""
        self._has_unknown_change = False
        """Whether the present batch has a change that could not be read."""
        self._unknown_digest = ""
        """The digest of that change; empty for a new one."""

    @property
    def is_restored(self) -> bool:
        """Whether these are the items from before a restart, and the present ones were not read yet."""
        return not self.was_read and bool(self._items)

    @property
    def version(self) -> Version:
        """The version of the last commit. It does not include the present batch."""
        return self._version

    def add(self, definition: Mapping[str, Any], *, replace: bool = False) -> Sequence[Change]:
        """Add an item. With `replace`, it replaces the item with the same key."""
        item = self._item(definition)
        with self._catalog.batch() as changes:
            if not replace and item.key in self._items:
                raise AlreadyExists(
                    f"{self.feature.value}: {item.key!r} exists already; remove it first, or add it with replace=True"
                )
            self._put(item.key, item)
        return changes

    def put(self, text: bytes) -> Sequence[Change]:
        """Add an item that is already JSON, or replace the item with the same key."""
        item = self._decode_limited(text)
        with self._catalog.batch() as changes:
            self._put(item.key, item)
        return changes

    def put_shared(self, text: bytes) -> Sequence[Change]:
        """Add or replace an item that comes from the table of a cluster. Its size is not checked here: the replica that
        serves the item does that."""
        item = self._decode(text)
        with self._catalog.batch() as changes:
            # Not `self._put`: that of `Resources` may change the version of the content, which is in the table too.
            Items._put(self, item.key, item)
        return changes

    def remove(self, key: str) -> Sequence[Change]:
        with self._catalog.batch() as changes:
            self._known(key)
            self._put(key, None)
        return changes

    def update(self, key: str, fields: Mapping[str, Any] | None = None, /, **more: Any) -> Sequence[Change]:
        """Change only the given fields. None removes a field."""
        with self._catalog.batch() as changes:
            given = {**(fields or {}), **more}
            merged = self._known(key).definition | given
            item = self._item({name: value for name, value in merged.items() if name not in given or value is not None})
            if item.key != key:
                raise InvalidItem(
                    f"{self.feature.value}: an update can't rename {key!r} to {item.key!r}; remove and add"
                )
            self._put(key, item)
        return changes

    def replace(
        self,
        definitions: Iterable[Mapping[str, Any]],
        *,
        on_invalid: Callable[[InvalidItem], None] | None = None,
        remove_others: bool = True,
    ) -> Sequence[Change]:
        """Replace all items by these. Equal items make no change. Without `remove_others`, other items stay.

        With `on_invalid`, an invalid item is reported and left out. Without it, it raises.
        """
        items: dict[str, Item] = {}
        for definition in definitions:
            try:
                item = self._item(definition)
            except InvalidItem as error:
                if on_invalid is None:
                    raise
                on_invalid(error)
                continue
            if item.key in items:
                raise InvalidItem(f"{self.feature.value}: {item.key!r} occurs twice; give each item its own key")
            items[item.key] = item
        with self._catalog.batch() as changes:
            self.was_read = self.was_read or remove_others
            for key in [key for key in self._items if key not in items] if remove_others else ():
                self._put(key, None)
            for key, item in items.items():
                self._put(key, item)
        return changes

    def mark_changed(self, digest: str = "") -> Sequence[Change]:
        """Publish that the list has changed to a content that could not be read, or that only some callers see.

        Every subscriber gets one notification without details. `digest` is that of the change, if another replica made
        it."""
        with self._catalog.batch() as changes:
            if not digest or digest != self.unknown_digest:
                self.is_touched = self._has_unknown_change = True
                self._unknown_digest = digest
        return changes

    @property
    def unknown_digest(self) -> str:
        """The digest of the last change that could not be read; empty if there was none."""
        return self._list_digest.unknown

    def item(self, key: str) -> Item | None:
        return self._items.get(key)

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a copy of the definition of an item."""
        item = self._items.get(key)
        return item.definition if item else None

    def has(self, key: object, definition: Mapping[str, Any]) -> bool:
        """Return whether there is an item with this key and definition."""
        item = self._items.get(key) if isinstance(key, str) else None
        return item is not None and item.hash == digest.item_hash(definition, self.feature)

    def snapshot(self) -> tuple[Item, ...]:
        """Return all items, ordered by key, so that equal lists have equal order."""
        with self._catalog.lock:
            return tuple(self._items[key] for key in sorted(self._items))

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (item.definition for item in self.snapshot())

    def _known(self, key: str) -> Item:
        item = self._items.get(key)
        if item is None:
            raise NotFound(f"{self.feature.value}: there is no {key!r}")
        return item

    def _restore(self, item: Item) -> None:
        self._items[item.key] = item
        self._list_digest.add(item.hash)

    def _restore_version(self, version: Version) -> None:
        self._version = version
        self._list_digest.unknown = digest.split_digest(version.digest)[1]

    def _put(self, key: str, item: Item | None) -> None:
        """Set or remove an item, and keep the item before for the commit."""
        before = self._items.get(key)
        self.is_touched = True
        self._touched.setdefault(key, before)
        if item is None:
            self._items.pop(key, None)
        else:
            # An equal item keeps its object, so that a re-scan makes no copies.
            self._items[key] = before if before is not None and before.hash == item.hash else item

    def _item(self, definition: Mapping[str, Any]) -> Item:
        feature = self.feature
        if not isinstance(definition, Mapping):
            raise InvalidItem(f"{feature.value}: an item is a mapping, not {definition!r:.80}")
        key = item_key(feature, definition)
        try:
            text = msgspec.json.encode(definition if isinstance(definition, dict) else dict(definition))
        except Exception as error:  # any value is possible here; the message names the item
            raise InvalidItem(f"{feature.value}: {key!r} can't be written as JSON: {error}") from None
        return self._decode_limited(text)

    def _decode_limited(self, text: bytes) -> Item:
        item = self._decode(text)
        limit = self._catalog.policy.max_item_bytes
        if len(text) > limit:
            raise InvalidItem(
                f"{self.feature.value}: {item.key!r} has {len(text)} bytes of JSON;"
                f" Policy.max_item_bytes allows {limit}"
            )
        return item

    def _decode(self, text: bytes) -> Item:
        # The hash is that of the decoded text and not of the given object, because clients hash what they decode.
        definition = msgspec.json.decode(text)
        return Item(self.feature, item_key(self.feature, definition), text, digest.item_hash(definition, self.feature))

    def _add_net_changes(self, now: float, changes: list[Change]) -> None:
        """Add the net changes of the batch, each with a new version."""
        self.is_touched = False
        for key, before in self._touched.items():
            after = self._items.get(key)
            if after is before:
                continue
            if before is not None:
                if after is not None and after.hash == before.hash:
                    continue
                self._list_digest.discard(before.hash)
            if after is not None:
                self._list_digest.add(after.hash)
            self._catalog._revision += 1
            changes.append(self._next_change(operation_between(before, after), key, now, after, before))
        self._touched.clear()
        if self._has_unknown_change:
            self._has_unknown_change = False
            self._catalog._revision += 1
            self._list_digest.unknown = self._unknown_digest or digest.revision_digest(
                self._catalog._revision, self._catalog.life
            )
            changes.append(self._next_change(Operation.UPDATED, "", now, None, None))

    def _next_change(
        self, operation: Operation, key: str, now: float, item: Item | None, before: Item | None
    ) -> Change:
        """Return the change that leads to the present items and revision, and set the version to its own."""
        previous, self._version = self._version, Version(self._catalog._revision, self._list_digest.hexdigest())
        return Change(
            topic=self.feature,
            operation=operation,
            key=key,
            version=self._version,
            previous=previous,
            time=now,
            trace=self._catalog._cause,
            item=item,
            before=before,
        )


class Resources(Items):
    """Resources and resource templates, and the versions of the contents of resources, listed or not."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog, Feature.RESOURCES)
        self._contents: dict[str, Version] = {}
        """Ordered by their last change; the oldest is forgotten first."""
        self.forgotten = 0
        """The revision up to which contents may have been forgotten."""
        self._updates: dict[str, tuple[str | None, Mapping[str, Any] | None]] = {}
        """The contents changed in the present batch: digest (None for a new one) and metadata."""

    def updated(self, uri: str, *, etag: str | None = None, **metadata: Any) -> Sequence[Change]:
        """Publish that the content of a resource changed.

        With an `etag`, publish only if it differs from the last one. Without one, publish always. The resource need not
        be listed.
        """
        return self._update(uri, None if etag is None else digest.content_digest(str(etag)), metadata or None)

    def deleted(self, uri: str) -> Sequence[Change]:
        """Publish that a resource is gone. Its subscribers get a notification, their subscriptions end, and
        the list no longer contains it."""
        with self._catalog.batch() as changes:
            self._update(uri, digest.DELETED, None)
            if uri in self._items:
                self._put(uri, None)
        return changes

    def put_content(
        self, uri: str, digest: str, metadata: Mapping[str, Any] | None = None, *, is_silent: bool = False
    ) -> Sequence[Change]:
        """Set the digest of a content, as another replica knows it. With `is_silent`, publish nothing."""
        if is_silent:
            with self._catalog.lock:
                self._contents.pop(uri, None)  # move it to the end: the first is forgotten first
                self._contents[uri] = Version(self._catalog.revision, digest)
                self._forget_oldest()
            return ()
        return self._update(uri, digest, metadata)

    def content(self, uri: str) -> Version:
        return self._contents.get(uri, UNKNOWN_VERSION)

    def contents(self) -> dict[str, Version]:
        """Return the versions of all known contents, the one unchanged for longest first."""
        with self._catalog.lock:
            return dict(self._contents)

    def _put(self, key: str, item: Item | None) -> None:
        if item is not None and key not in self._items:
            # A deleted resource that is added again can be deleted again.
            content, _ = self._updates.get(key, (self.content(key).digest, None))
            if content == digest.DELETED:
                self._updates[key] = (None, None)  # `_put` sets `is_touched`
        super()._put(key, item)

    def _update(self, uri: str, content: str | None, metadata: Mapping[str, Any] | None) -> Sequence[Change]:
        if not isinstance(uri, str) or not (uri.isascii() or is_unicode(uri)):
            raise InvalidItem(f"resources: a URI must be a string that can be encoded as UTF-8, not {uri!r:.80}")
        if metadata is not None:
            # A copy, because the caller may change its objects before a slow subscriber gets them.
            metadata = msgspec.json.decode(safe_json(metadata))
        with self._catalog.batch() as changes:
            self.is_touched = True
            self._updates[uri] = (content, metadata)
        return changes

    def _add_net_changes(self, now: float, changes: list[Change]) -> None:
        catalog, contents = self._catalog, self._contents
        # Contents first, so that a subscriber learns of a deletion before the resource leaves the list.
        for uri, (content, metadata) in self._updates.items():
            previous = contents.get(uri, UNKNOWN_VERSION)
            if content == previous.digest:
                continue
            catalog._revision = revision = catalog._revision + 1
            version = Version(revision, digest.revision_digest(revision, catalog.life) if content is None else content)
            contents.pop(uri, None)
            contents[uri] = version
            changes.append(
                Change(
                    topic=uri,
                    operation=_DELETED if content == digest.DELETED else _UPDATED,
                    key=uri,
                    version=version,
                    previous=previous,
                    time=now,
                    trace=catalog._cause,
                    metadata=metadata,
                )
            )
        self._updates.clear()
        self._forget_oldest()
        if self._touched or self._has_unknown_change:
            super()._add_net_changes(now, changes)
        self.is_touched = False

    def _forget_oldest(self) -> None:
        while len(self._contents) > self._catalog.policy.max_contents:
            self.forgotten = self._contents.pop(next(iter(self._contents))).revision
