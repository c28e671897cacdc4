"""The state that the checks of the promises derive from a history: subscriptions, known versions, net changes.

This module does not use the code that it checks. It has its own simple implementation of patterns, filters and net
changes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tests.support.promises.history import (
    Acknowledged,
    Changed,
    Closed,
    Event,
    Fetched,
    FetchEnded,
    FetchStarted,
    History,
    Muted,
    Subscribed,
    Told,
    TopicEvent,
    Unmuted,
    Unsubscribed,
)
from tidings.core.filters import Filter
from tidings.core.model import Feature, Operation, Topic, Version


class Subscriptions:
    """The subscriptions of one subscriber at one point of a history."""

    def __init__(self) -> None:
        self.requested: dict[Topic, int] = {}
        """Features, URIs and patterns, each with the index of the event that requested it last."""
        self.filter: Filter | None = None
        self.is_closed = False
        self._has_subresources = True
        self._muted: set[Topic] = set()
        self._is_all_muted = False

    def apply(self, event: Event, index: int) -> None:
        """Update the subscriptions with an event of the subscriber."""
        match event:
            case Subscribed():
                self.requested |= dict.fromkeys(event.topics, index)
                self.filter = event.filter
                self._has_subresources = event.subresources
            case Unsubscribed():
                for topic in event.topics or tuple(self.requested):
                    self.requested.pop(topic, None)
            case Told() if is_deletion(event):
                self.end(event.topic)
            case Closed():
                self.is_closed = True
                self.requested.clear()
            case Muted() | Unmuted():
                is_muted = isinstance(event, Muted)
                if event.topics:
                    (self._muted.update if is_muted else self._muted.difference_update)(event.topics)
                else:
                    self._is_all_muted = is_muted
                    self._muted.clear()

    def end(self, uri: Topic, *, before: int | None = None) -> None:
        """End the subscription to a deleted URI, if it was requested before an event. Patterns stay."""
        if uri in self.requested and (before is None or self.requested[uri] < before):
            del self.requested[uri]

    def covers(self, topic: Topic, *, allow_templates: bool = True) -> bool:
        """Return whether a request covers a topic. A URI template covers more URIs here than on the server."""
        if topic in self.requested:
            return True
        if isinstance(topic, Feature):
            return False
        return any(
            _covers(path, topic, self._has_subresources, allow_templates)
            for path in self.requested
            if isinstance(path, str)
        )

    def not_covered(self, topics: Iterable[Topic]) -> list[Topic]:
        """Return the topics that no request covers."""
        return [topic for topic in topics if not self.covers(topic)]

    def is_muted(self, topic: Topic) -> bool:
        return self._is_all_muted or topic in self._muted


@dataclass(slots=True)
class LastTold:
    """The version of one topic that a subscriber was told last."""

    version: Version | None
    index: int
    """The index of the event."""
    is_cursor: bool = False
    """Whether the version comes from a cursor of the subscriber. A cursor is valid only during its subscription."""
    is_continuous: bool = True
    """Whether the subscriber has been subscribed since that event."""

    def is_repeated_by(self, told: Told, index: int, fetches: Fetches) -> bool:
        """Return whether a notification tells the subscriber nothing new."""
        if self.version is None or self.version == told.version or not self.is_continuous or told.version is None:
            return self.version == told.version
        is_equal = self.version.digest == told.version.digest
        return is_equal and not fetches.has_other_content(told, index, self.version, self.index)


@dataclass(slots=True)
class _Fetch:
    revision: int
    start: int
    end: int | None = None

    def can_return_older(self, index: int, current: Version) -> bool:
        return self.revision < current.revision and self.start < index and (self.end is None or index < self.end)


class Fetches:
    """The versions of each topic that clients fetched, and the fetches in progress."""

    def __init__(self, history: History) -> None:
        self._fetched: dict[Topic, list[tuple[int, Version | None]]] = {}
        self._in_progress: dict[Topic, list[_Fetch]] = {}
        for index, event in enumerate(history):
            match event:
                case Fetched():
                    self._fetched.setdefault(event.topic, []).append((index, event.version))
                case FetchStarted():
                    self._in_progress.setdefault(event.topic, []).append(_Fetch(event.revision, index))
                case FetchEnded():
                    for fetch in self._in_progress.get(event.topic, ()):
                        if fetch.end is None and fetch.revision == event.revision:
                            fetch.end = index
                            break

    def has_other_content(self, told: Told, index: int, known: Version, since: int) -> bool:
        """Return whether a client may have fetched another content since the event at which it was told `known`."""
        current = told.version
        assert current is not None
        for at, version in self._fetched.get(told.topic, ()):
            if version is None:
                if since < at < index:
                    return True
            elif (
                at < index
                and known.revision < version.revision <= current.revision
                and version.digest != current.digest
            ):
                return True
        return any(fetch.can_return_older(index, current) for fetch in self._in_progress.get(told.topic, ()))


def explain_unwanted(subscriptions: Subscriptions, told: Told) -> str:
    """Return why a subscriber must not get this notification, or an empty string."""
    if subscriptions.is_closed:
        return "it is closed"
    if not subscriptions.covers(told.topic):
        return "it did not request this"
    if subscriptions.is_muted(told.topic):
        return "it is muted"
    if subscriptions.filter is not None and isinstance(told.topic, Feature) and told.changes is not None:
        if told.is_complete and not told.changes:
            return "no change passes its filter"
        for operation, key in told.changes:
            if not _passes(subscriptions.filter, told.topic, operation, key):
                return f"its filter excludes {operation} {key!r}"
    return ""


def find_known_versions(
    history: History, subscriber: str, changes: Mapping[Topic, list[Changed]]
) -> tuple[Subscriptions, dict[Topic, tuple[Version, ...]], dict[Topic, list[Version]]]:
    """Return the final subscriptions of a subscriber, the versions that it knows, and newer ones it may have fetched.

    The versions are those of the topics that it watches and that changed. A topic has several versions if the history
    does not show which of them the subscriber knows, and none if it knows no version.
    """
    subscriptions = Subscriptions()
    known: dict[Topic, tuple[Version, ...]] = {}
    fetched: dict[Topic, list[Version]] = {}
    not_granted: set[Topic] = set()
    granted = max((at for at, event in enumerate(history) if event == Acknowledged(subscriber)), default=-1)
    current = {topic: found[0].previous for topic, found in changes.items()}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            previous = current[event.topic]
            current[event.topic] = event.version if previous is None else max(previous, event.version)
            if event.topic in not_granted:
                # The subscriber knows the version at the time of the grant, which may be any of these.
                known[event.topic] += (event.version,)
        elif isinstance(event, Fetched):
            if event.version is not None and event.topic in known and event.topic not in not_granted:
                fetched.setdefault(event.topic, []).append(event.version)
        elif isinstance(event, TopicEvent) or event.subscriber != subscriber:
            continue
        else:
            subscriptions.apply(event, index)
            if isinstance(event, Told):
                version = event.version or current.get(event.topic)
                not_granted.discard(event.topic)
                known[event.topic] = () if version is None else (version,)
                fetched.pop(event.topic, None)
            elif isinstance(event, Acknowledged):
                not_granted.clear()
        if isinstance(event, Subscribed):
            for topic in changes:
                if topic in event.told and subscriptions.covers(topic, allow_templates=False):
                    cursor, now = event.told[topic], current[topic]
                    if cursor is not None and now is not None and cursor.digest == now.digest:
                        cursor = now  # the same content had another revision before a restart
                    not_granted.discard(topic)
                    known[topic] = () if cursor is None else (cursor,)
                    fetched.pop(topic, None)
                elif topic not in known and subscriptions.covers(topic, allow_templates=False):
                    version = current[topic]
                    known[topic] = () if version is None else (version,)
                    if index < granted:
                        not_granted.add(topic)
        elif not isinstance(event, TopicEvent):
            for topic in list(known):
                if topic not in changes or not subscriptions.covers(topic, allow_templates=False):
                    not_granted.discard(topic)
                    fetched.pop(topic, None)
                    del known[topic]
    for topic, versions in fetched.items():
        newest = max((version.revision for version in known[topic]), default=-1)
        fetched[topic] = [version for version in versions if version.revision > newest]
    return subscriptions, known, fetched


def is_up_to_date(version: Version, *, newest: Version, changes: list[Changed], filter: Filter | None) -> bool:
    """Return whether a subscriber that knows a version does not need a notification of the newest one."""
    if version.digest == newest.digest or filter is None or not isinstance(changes[0].topic, Feature):
        return version.digest == newest.digest
    missed = changes_since(changes, version)
    # An empty digest means any version, so the changes after it are unknown.
    return not version.digest if missed is None else is_excluded(missed, filter)


def changes_since(changes: list[Changed], version: Version) -> list[Changed] | None:
    """Return the changes of one topic after a version, or None if the history does not contain that version."""
    if not any(version in (change.version, change.previous) for change in changes):
        return None
    missed = [change for change in changes if change.version.revision > version.revision]
    return sorted(missed, key=lambda change: change.version.revision)


def is_excluded(missed: list[Changed], filter: Filter) -> bool:
    """Return whether a subscriber with this filter needs no notification of these changes."""
    return _excluded_prefixes(missed, filter)[-1]


class RecordedChanges:
    """The changes of a history by topic, to check the changes that a notification contains."""

    def __init__(self, history: History) -> None:
        self._fetches = Fetches(history)
        self._changes: dict[Topic, list[tuple[int, Changed]]] = {}
        self._first_index: dict[tuple[Topic, Version], int] = {}
        self._digests: set[tuple[Topic, str]] = set()
        for index, event in enumerate(history):
            if isinstance(event, Changed):
                for version in (event.previous, event.version):
                    if version is not None:
                        self._first_index.setdefault((event.topic, version), index)
                        self._digests.add((event.topic, version.digest))
                if event.operation is not None:
                    self._changes.setdefault(event.topic, []).append((index, event))
        for found in self._changes.values():
            found.sort(key=_revision)

    def has(self, topic: Topic, version: Version) -> bool:
        return (topic, version) in self._first_index

    def is_ambiguous(self, topic: Topic, version: Version | None, index: int) -> bool:
        """Return whether a cursor is newer than the published version, or may be from before a restart."""
        if version is None:
            return False
        if self.has(topic, version):
            return self._first_index[topic, version] > index
        return (topic, version.digest) in self._digests

    def explain_mismatch(
        self, told: Told, index: int, known: Version | None, since: int, filter: Filter | None, journal: int | None
    ) -> str:
        """Return why a subscriber that knew a version must not get this notification, or an empty string."""
        assert told.version is not None
        if told.changes is None:
            return ""  # the notification does not contain them
        if known is None or not self.has(told.topic, known):
            return "its cursor is unknown, and it was not told to refetch" if told.is_complete else ""
        changes = self._changes.get(told.topic, [])
        start, end = (bisect_right(changes, each.revision, key=_revision) for each in (known, told.version))
        missed = [change for _, change in changes[start:end]]
        if isinstance(told.topic, Feature) and any(change.before is change.after is None for change in missed):
            return ""  # the history does not contain the items
        if not told.is_complete and not told.changes:
            count = self._count_since(told.topic, known.revision, index)
            if journal is None or count > journal or self._fetches.has_other_content(told, index, known, since):
                return ""
            return f"it was told to refetch, with {count} changes since, and {journal} are kept"
        actual = {key: operation for operation, key in told.changes}
        if not isinstance(told.topic, Feature):
            expected = {change.key: change.operation for change in missed[-1:]}
            return "" if actual == expected else f"it was told {actual}, and the last change was {expected}"
        # The notification may omit earlier changes if the filter excludes all of them.
        may_start = [True] if filter is None else _excluded_prefixes(missed, filter)
        for start, is_possible in enumerate(may_start):
            net = _net_changes(missed[start:], filter)
            if is_possible and (actual == net or (not told.is_complete and actual.items() < net.items())):
                return ""
        return f"it was told {actual}, and the difference is {_net_changes(missed, filter)}"

    def _count_since(self, topic: Topic, revision: int, index: int) -> int:
        """Count the changes after a revision in the journal of a topic. All contents share one journal."""
        return sum(
            change.version.revision > revision and at < index
            for each, found in self._changes.items()
            if each == topic or (isinstance(each, str) and isinstance(topic, str))
            for at, change in found
        )


def _revision(recorded: tuple[int, Changed]) -> int:
    return recorded[1].version.revision


def _excluded_prefixes(missed: list[Changed], filter: Filter) -> list[bool]:
    """Return for the first 0, 1, 2 … changes whether they split into parts whose net changes the filter excludes.

    The hub applies the filter to the changes since its last delivery attempt. A history does not contain those
    attempts, so any split is possible.
    """
    reached = [True] + [False] * len(missed)
    for start in range(len(missed)):
        if not reached[start]:
            continue
        passing: set[str] = set()
        before: dict[str, str | None] = {}
        for end in range(start, len(missed)):
            change = missed[end]
            first = before.setdefault(change.key, change.before)
            operation = _net_operation(first, change.after)
            if operation is not None and _passes(filter, change.topic, operation, change.key):
                passing.add(change.key)
            else:
                passing.discard(change.key)
            reached[end + 1] |= not passing
    return reached


def _net_changes(changes: list[Changed], filter: Filter | None) -> dict[str, Operation]:
    """Return the net operation on each item, if there is one and it passes the filter."""
    before: dict[str, str | None] = {}
    last: dict[str, Changed] = {}
    for change in changes:
        before.setdefault(change.key, change.before)
        last[change.key] = change
    net = {}
    for key, change in last.items():
        operation = _net_operation(before[key], change.after)
        if operation is not None and (filter is None or _passes(filter, change.topic, operation, key)):
            net[key] = operation
    return net


def _net_operation(before: str | None, after: str | None) -> Operation | None:
    if before == after:
        return None
    if before is None:
        return Operation.ADDED
    return Operation.REMOVED if after is None else Operation.UPDATED


def _passes(filter: Filter, topic: Topic, operation: Operation, key: str) -> bool:
    if filter.operations is not None and operation not in filter.operations:
        return False
    globs = filter.uris if topic is Feature.RESOURCES else filter.names
    if globs is not None and not any(glob == key or _compile(glob).fullmatch(key) for glob in globs):
        return False
    return filter.also is None or _passes(filter.also, topic, operation, key)


def _covers(path: str, uri: str, has_subresources: bool, allow_templates: bool) -> bool:
    """Return whether a subscription to `path` covers `uri`. A template covers all URIs that it could expand to."""
    if path == uri:
        return True
    if "{" in path:
        return allow_templates and _compile(re.sub(r"\{[^{}]*\}", "**", path)).fullmatch(uri) is not None
    if "*" in path:
        return _compile(path).fullmatch(uri) is not None
    folder = path.removesuffix("/")
    is_below_root = len(folder) > (uri.find("://") + 3 if "://" in uri else 0)
    return has_subresources and is_below_root and uri.startswith(folder + "/") and len(uri) > len(folder) + 1


@cache
def _compile(glob: str) -> re.Pattern[str]:
    """Compile a glob: `*` matches within a segment, `**` across segments, and `/**/` also a single slash."""
    regex, position = "", 0
    for found in re.finditer(r"\*+", glob):
        regex += re.escape(glob[position : found.start()])
        position = found.end()
        starts_segment = found.start() == 0 or glob[found.start() - 1] == "/"
        if len(found[0]) == 1:
            regex += "[^/]*"
        elif starts_segment and glob[position : position + 1] == "/":
            regex += "(?:.*/)?"
            position += 1
        else:
            regex += ".*"
    return re.compile(regex + re.escape(glob[position:]), re.DOTALL)


def is_deletion(told: Told) -> bool:
    return bool(told.changes) and told.changes is not None and told.changes[-1][0] is Operation.DELETED
