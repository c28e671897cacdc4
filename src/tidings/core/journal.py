"""The bounded history of changes.

The journal answers two questions: which changes came after a revision, and are these all of them? Each feature has its
own history, and the contents of all resources share one. So many content updates cannot displace the changes of tools.

Not an audit log: the journal discards old changes by count, age and size, and its answers say so.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from tidings.core.encoding import iso_time
from tidings.core.model import Change, Feature, Topic, Version, operation_between
from tidings.errors import TidingsError
from tidings.policy import Policy

__all__ = ["ChangeHistory", "Journal", "change_json", "changes_since_told", "history_topic", "net_changes"]


class ChangeHistory(NamedTuple):
    """Changes, the oldest first."""

    changes: tuple[Change, ...]
    complete: bool
    """False if the journal has discarded some of the changes, or a limit cut them off."""

    def newest(self, limit: int) -> ChangeHistory:
        if len(self.changes) <= limit:
            return self
        return ChangeHistory(self.changes[len(self.changes) - limit :], complete=False)


def history_topic(feature: Feature | str | None, uri: str | None) -> Topic | None:
    """Return the topic of a history: a list, the content of a resource, or None for all."""
    if feature is not None and uri is not None:
        raise TidingsError("history is of a feature or of a URI; name one of them, or neither for all")
    return uri if feature is None else Feature(feature)


class Journal:
    """Keeps at most `Policy.journal_changes` changes of each feature, at most `Policy.journal_bytes` of their
    definitions, and no change older than `Policy.journal_age`."""

    def __init__(self, policy: Policy | None = None, *, since: int = 0) -> None:
        """Start without the changes up to the revision `since`."""
        policy = policy or Policy()
        self._max_changes = policy.journal_changes
        self._max_age = policy.journal_age
        self._max_bytes = policy.journal_bytes
        self._contents = _Part(since)
        self._lists = {feature: _Part(since) for feature in Feature}

    def append(self, changes: Iterable[Change]) -> None:
        """Add changes, in the order of their revisions."""
        for change in changes:
            topic = change.topic
            part = self._contents if isinstance(topic, str) else self._lists[topic]
            kept = part.changes
            kept.append(change)
            if change.item or change.before or change.metadata:
                part.size += _size(change)
            oldest = change.time - self._max_age
            while len(kept) > self._max_changes or part.size > self._max_bytes or kept[0].time < oldest:
                part.discard_oldest()
                if not kept:
                    break

    def restore(self, changes: Iterable[Change], floors: Mapping[Feature | None, int]) -> None:
        """Start with the journal of the server before its restart, as far as the policy still allows."""
        for feature, floor in floors.items():
            (self._contents if feature is None else self._lists[feature]).floor = floor
        self.append(changes)

    def floors(self) -> dict[Feature | None, int]:
        """Return for each feature, and for contents (None), the revision after which no change is discarded."""
        floors: dict[Feature | None, int] = {feature: part.floor for feature, part in self._lists.items()}
        return floors | {None: self._contents.floor}

    def forget(self, feature: Feature, revision: int) -> None:
        """Discard the changes of a list up to a revision, which is its newest."""
        self._lists[feature] = _Part(revision)

    def expire(self, now: float) -> None:
        """Discard the changes that are older than the policy allows."""
        for part in self._parts():
            while part.changes and part.changes[0].time < now - self._max_age:
                part.discard_oldest()

    def since(self, revision: int, topic: Topic | None = None) -> list[Change] | None:
        """Return the changes of one topic, or of all, after `revision`, oldest first; None if some are discarded."""
        parts = self._parts() if topic is None else (self._part(topic),)
        if any(revision < part.floor for part in parts):
            return None
        return self.kept_since(revision, topic)[0]

    def kept_since(self, revision: int, topic: Topic | None = None) -> tuple[list[Change], bool]:
        """Return the changes after `revision` that are not discarded, oldest first, and whether these are all."""
        if topic is not None:
            part = self._part(topic)
            found = part.after(revision, None if isinstance(topic, Feature) else topic)
            return found, revision >= part.floor
        changes = [part.after(revision) for part in self._parts()]
        merged = heapq.merge(*changes, key=attrgetter("revision"))
        return list(merged), all(revision >= part.floor for part in self._parts())

    def contents_since(self, revision: int) -> list[Change] | None:
        """Return the changes of all contents after `revision`, oldest first; None if some are discarded."""
        return None if revision < self._contents.floor else self._contents.after(revision)

    def __len__(self) -> int:
        return sum(len(part.changes) for part in self._parts())

    def _part(self, topic: Topic) -> _Part:
        return self._lists[topic] if isinstance(topic, Feature) else self._contents

    def _parts(self) -> Iterable[_Part]:
        return (*self._lists.values(), self._contents)


class _Part:
    """The part of a journal with the changes of one feature, or of all contents."""

    __slots__ = ("_by_uri", "_indexed", "changes", "floor", "size")

    def __init__(self, floor: int) -> None:
        self.changes: deque[Change] = deque()
        self._by_uri: dict[str, list[Change]] = {}
        """The changes of each content, because a client that reconnects may ask for thousands of URIs. Discarded
        changes may still be at the start of a list."""
        self._indexed = floor
        """The revision up to which `_by_uri` is filled. It is filled on demand: most changes are never requested."""
        self.floor = floor
        """No change after this revision is discarded."""
        self.size = 0

    def discard_oldest(self) -> None:
        change = self.changes.popleft()
        self.size -= _size(change)
        self.floor = change.revision
        changes_of_uri = self._by_uri.get(change.key)
        if changes_of_uri is not None and changes_of_uri[-1] is change:
            del self._by_uri[change.key]

    def after(self, revision: int, uri: str | None = None) -> list[Change]:
        """Return the changes after a revision, oldest first, of one content or of all."""
        # Search from the newest backwards: the answer is usually a few of many.
        found: list[Change] = []
        first = max(revision, self.floor)
        for change in reversed(self.changes if uri is None else self._of_uri(uri)):
            if change.revision <= first:
                break
            found.append(change)
        found.reverse()
        return found

    def _of_uri(self, uri: str) -> Sequence[Change]:
        for change in self.after(self._indexed):
            changes = self._by_uri.setdefault(change.key, [])
            changes.append(change)
            # Only when half of the list is discarded, so that each change is moved a constant number of times.
            if changes[len(changes) // 2].revision <= self.floor:
                del changes[: len(changes) // 2]
            self._indexed = change.revision
        return self._by_uri.get(uri, ())


def net_changes(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Merge successive changes of one list: at most one per item, in order."""
    merged: dict[str, Change] = {}
    for change in changes:
        earlier = merged.pop(change.key, None)
        if earlier is not None:
            before, after = earlier.before, change.item
            if before is after or (before is not None and after is not None and before.hash == after.hash):
                continue
            change = structs.replace(change, operation=operation_between(before, after), before=before)
        merged[change.key] = change
    return tuple(merged.values())


def changes_since_told(
    journal: Iterable[Change],
    current: Callable[[Topic], Version],
    told: Mapping[Topic, Version | None],
    topic: Topic | None,
) -> ChangeHistory:
    """Return the changes of one topic, or of all topics in `told`, after the version that a client was told.

    `current` returns the present version of a topic. A told version of None is unknown.
    """
    requested = {each: version for each, version in told.items() if topic is None or each == topic}
    starts = {each: _first_revision(version, current(each)) for each, version in requested.items()}
    changes = tuple(change for change in journal if change.revision > starts.get(change.topic, math.inf))
    # Reversed, so that the first change of each topic remains.
    known = {change.topic: change.previous for change in reversed(changes)}
    complete = all(
        version is not None and version.digest == known.get(each, current(each)).digest
        for each, version in requested.items()
    )
    return ChangeHistory(changes, complete)


def _first_revision(told: Version | None, current: Version) -> float:
    if told is None:
        return 0
    if told.revision < 0:  # of another epoch, whose revisions mean something else
        return math.inf if told.digest == current.digest else 0
    return told.revision


def change_json(change: Change, *, is_full: bool = False) -> dict[str, Any]:
    """Return a change as clients and scripts read it. A change of content has a URI and no feature."""
    written: dict[str, Any] = {"operation": change.operation.value}
    if isinstance(change.topic, Feature):
        written |= {"feature": change.topic.value, change.topic.key_field: change.key}
    else:
        written["uri"] = change.topic
    written |= {
        "revision": change.revision,
        "digest": change.digest,
        "time": iso_time(change.time),
        "origin": "local",  # a member of the format, which had the name of the process
    }
    if is_full:
        if (item := change.item or change.before) is not None:
            written["item"] = item.definition
        if change.metadata:
            written["metadata"] = dict(change.metadata)
    return written


def _size(change: Change) -> int:
    """Return the bytes of JSON that a change keeps in memory: the definition of its item, or the metadata of a content.

    The definition before the change usually belongs to an earlier change too, so it is not counted.
    """
    item = change.item or change.before
    if item is not None:
        return len(item.json)
    return 0 if change.metadata is None else len(msgspec.json.encode(change.metadata))
