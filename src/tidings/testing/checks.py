"""How the checks read a history: what a subscriber asked for, what it knows, and what a filter lets pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from tidings.core.mailbox import Filter
from tidings.core.model import Feature, Operation, Topic, Version
from tidings.testing.history import (
    Acknowledged,
    Changed,
    Closed,
    Event,
    Fetched,
    FetchEnded,
    FetchStarted,
    History,
    MailboxSize,
    Muted,
    OfTopic,
    PromiseBroken,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
)

__all__ = [
    "Ear",
    "Last",
    "Showings",
    "broken",
    "changes_since",
    "concerning",
    "is_deletion",
    "is_enough",
    "is_ruled_out",
    "knowledge",
    "net_operation",
    "passes",
    "ruled_out",
    "unwanted",
]


class Ear:
    """What one subscriber asked for, at one point of a history."""

    def __init__(self) -> None:
        self.asked: dict[Topic, int] = {}
        """Features, URIs and patterns, and where in the history each was last asked for."""
        self.filter: Filter | None = None
        self.is_closed = False
        self._subresources = True
        self._muted: set[Topic] = set()
        self._is_all_muted = False

    def follow(self, event: Event, index: int) -> None:
        match event:
            case Subscribed():
                self.asked |= dict.fromkeys(event.topics, index)
                self.filter = event.filter
                self._subresources = event.subresources
            case Unsubscribed():
                for topic in event.topics or tuple(self.asked):
                    self.asked.pop(topic, None)
            case Closed():
                self.is_closed = True
                self.asked.clear()
            case Muted() | Unmuted():
                is_muted = isinstance(event, Muted)
                if event.topics:
                    (self._muted.update if is_muted else self._muted.difference_update)(event.topics)
                else:
                    self._is_all_muted = is_muted
                    self._muted.clear()

    def end(self, topic: Topic, *, before: int | None = None) -> None:
        """A deletion was told: the subscription to just this URI is over, if it was asked for before that point."""
        if topic in self.asked and (before is None or self.asked[topic] < before):
            del self.asked[topic]

    def hears(self, topic: Topic, *, surely: bool = False) -> bool:
        if topic in self.asked:
            return True
        if isinstance(topic, Feature):
            return False
        return any(_covers(path, topic, self._subresources, surely) for path in self.asked if isinstance(path, str))

    def is_muted(self, topic: Topic) -> bool:
        return self._is_all_muted or topic in self._muted


class Last:
    """What a subscriber was told last of one topic."""

    __slots__ = ("at", "is_continuous", "is_cursor", "version")

    def __init__(self, version: Version | None, at: int, is_cursor: bool = False) -> None:
        self.version = version
        self.at = at
        """Where in the history."""
        self.is_cursor = is_cursor
        """Whether it only said so itself, which counts for as long as that subscription."""
        self.is_continuous = True
        """Whether it has been listening ever since."""

    def is_same(self, told: Told, index: int, showings: Showings) -> bool:
        if self.version is None or self.version == told.version or not self.is_continuous or told.version is None:
            return self.version == told.version
        is_equal = self.version.digest == told.version.digest
        return is_equal and not showings.has_other(told, index, self.version, self.at)


class Showings:
    """What was shown of each topic, and when it was not known what will be."""

    def __init__(self, history: History) -> None:
        self._shown: dict[Topic, list[tuple[int, Version | None]]] = {}
        self._answers: dict[Topic, list[_Answer]] = {}
        for index, event in enumerate(history):
            match event:
                case Fetched():
                    self._shown.setdefault(event.topic, []).append((index, event.version))
                case FetchStarted():
                    self._answers.setdefault(event.topic, []).append(_Answer(event.revision, index))
                case FetchEnded():
                    for answer in self._answers.get(event.topic, ()):
                        if answer.end is None and answer.revision == event.revision:
                            answer.end = index
                            break

    def has_other(self, told: Told, index: int, before: Version, since: int) -> bool:
        """Whether who knew a version since some point may have had to hear of the same content again."""
        now = told.version
        assert now is not None
        for at, version in self._shown.get(told.topic, ()):
            if version is None:
                if since < at < index:
                    return True
            elif at < index and before.revision < version.revision <= now.revision and version.digest != now.digest:
                return True
        return any(answer.is_under_way(index, now) for answer in self._answers.get(told.topic, ()))


@dataclass(slots=True)
class _Answer:
    revision: int
    begin: int
    end: int | None = None

    def is_under_way(self, index: int, now: Version) -> bool:
        """Whether it may still show something older than what is there now."""
        return self.revision < now.revision and self.begin < index and (self.end is None or index < self.end)


def unwanted(ear: Ear, told: Told) -> str:
    """Why a subscriber should not have been told, if so."""
    if ear.is_closed:
        return "it is closed"
    if not ear.hears(told.topic):
        return "it did not ask for this"
    if ear.is_muted(told.topic):
        return "it is muted"
    if ear.filter is not None and isinstance(told.topic, Feature) and told.changes is not None:
        if told.is_complete and not told.changes:
            return "nothing that changed passes its filter"
        for done, key in told.changes:
            if not passes(ear.filter, told.topic, done, key):
                return f"its filter rules out {done} {key!r}"
    return ""


def knowledge(
    history: History, subscriber: str, changes: Mapping[Topic, list[Changed]]
) -> tuple[Ear, dict[Topic, tuple[Version, ...]], dict[Topic, list[Version]]]:
    """What a subscriber knows in the end of all that it watches then and that ever changed; and what newer versions of
    that it may have been shown since.

    Several versions where the history can't tell which one it knows; none where it knows nothing.
    """
    ear = Ear()
    knows: dict[Topic, tuple[Version, ...]] = {}
    seen: dict[Topic, list[Version]] = {}
    asked_only: set[Topic] = set()
    """What is asked for and not granted yet."""
    granted = max((at for at, event in enumerate(history) if event == Acknowledged(subscriber)), default=-1)
    present = {topic: found[0].previous for topic, found in changes.items()}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            before = present[event.topic]
            present[event.topic] = event.version if before is None else max(before, event.version)
            if event.topic in asked_only:
                # It is taken to know what was there when its wish was granted: any of these.
                knows[event.topic] += (event.version,)
        elif isinstance(event, Fetched):
            if event.version is not None and event.topic in knows and event.topic not in asked_only:
                seen.setdefault(event.topic, []).append(event.version)
        elif isinstance(event, OfTopic) or event.subscriber != subscriber:
            continue
        elif isinstance(event, Told):
            version = event.version or present.get(event.topic)
            asked_only.discard(event.topic)
            knows[event.topic] = () if version is None else (version,)
            seen.pop(event.topic, None)
            if is_deletion(event):
                ear.end(event.topic)
        elif isinstance(event, Acknowledged):
            asked_only.clear()
        else:
            ear.follow(event, index)
        if isinstance(event, Subscribed):
            for topic in changes:
                if topic in event.told and ear.hears(topic, surely=True):
                    cursor, now = event.told[topic], present[topic]
                    if cursor is not None and now is not None and cursor.digest == now.digest:
                        cursor = now  # of another life, where the same list had another revision
                    asked_only.discard(topic)
                    knows[topic] = () if cursor is None else (cursor,)
                    seen.pop(topic, None)
                elif topic not in knows and ear.hears(topic, surely=True):
                    version = present[topic]
                    knows[topic] = () if version is None else (version,)
                    if index < granted:
                        asked_only.add(topic)
        elif not isinstance(event, OfTopic):
            for topic in [topic for topic in knows if topic not in changes or not ear.hears(topic, surely=True)]:
                asked_only.discard(topic)
                seen.pop(topic, None)
                del knows[topic]
    for topic, versions in seen.items():
        newest = max((version.revision for version in knows[topic]), default=-1)
        seen[topic] = [version for version in versions if version.revision > newest]
    return ear, knows, seen


def is_enough(version: Version, *, newest: Version, changes: list[Changed], chosen: Filter | None) -> bool:
    """Whether one who holds a version need not hear of the newest one."""
    if version.digest == newest.digest or chosen is None or not isinstance(changes[0].topic, Feature):
        return version.digest == newest.digest
    missed = changes_since(changes, version)
    # Of one that may have been any, the history does not tell what came after it.
    return not version.digest if missed is None else is_ruled_out(missed, chosen)


def changes_since(changes: list[Changed], version: Version) -> list[Changed] | None:
    """What came after a version; None if the history does not know that version."""
    if not any(version in (change.version, change.previous) for change in changes):
        return None
    missed = [change for change in changes if change.version.revision > version.revision]
    return sorted(missed, key=lambda change: change.version.revision)


def is_ruled_out(missed: list[Changed], chosen: Filter) -> bool:
    """Whether changes can be cut into stretches in each of which, seen at once, nothing passes a filter."""
    return ruled_out(missed, chosen)[-1]


def ruled_out(missed: list[Changed], chosen: Filter) -> list[bool]:
    """The same for the first none, one, two … of them.

    Where the cuts are is a matter of when the subscriber was looked at, and no history tells: so any will do.
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
            is_same = first == change.after
            if not is_same and passes(chosen, change.topic, net_operation(first, change.after), change.key):
                passing.add(change.key)
            else:
                passing.discard(change.key)
            reached[end + 1] |= not passing
    return reached


def net_operation(before: str | None, after: str | None) -> Operation:
    if before is None:
        return Operation.ADDED
    return Operation.REMOVED if after is None else Operation.UPDATED


def passes(chosen: Filter, topic: Topic, done: Operation, key: str) -> bool:
    if chosen.operations is not None and done not in chosen.operations:
        return False
    globs = chosen.uris if topic is Feature.RESOURCES else chosen.names
    if globs is not None and not any(glob == key or _glob(glob).fullmatch(key) for glob in globs):
        return False
    return chosen.also is None or passes(chosen.also, topic, done, key)


def _covers(path: str, uri: str, subresources: bool, surely: bool) -> bool:
    """Whether a subscription to `path` is one to `uri`. A template may be, but never is for sure."""
    if path == uri:
        return True
    if "{" in path:
        return not surely and _glob(re.sub(r"\{[^{}]*\}", "**", path)).fullmatch(uri) is not None
    if "*" in path:
        return _glob(path).fullmatch(uri) is not None
    folder = path.removesuffix("/")
    is_below_root = len(folder) > (uri.find("://") + 3 if "://" in uri else 0)
    return subresources and is_below_root and uri.startswith(folder + "/") and len(uri) > len(folder) + 1


@cache
def _glob(pattern: str) -> re.Pattern[str]:
    """`*` within a segment, `**` over all, `/**/` also for none. Plain on purpose: slow is fine here, wrong is not."""
    regex, at = "", 0
    for found in re.finditer(r"\*+", pattern):
        regex += re.escape(pattern[at : found.start()])
        at = found.end()
        is_whole = found.start() == 0 or pattern[found.start() - 1] == "/"
        if len(found[0]) == 1:
            regex += "[^/]*"
        elif is_whole and pattern[at : at + 1] == "/":
            regex += "(?:.*/)?"
            at += 1
        else:
            regex += ".*"
    return re.compile(regex + re.escape(pattern[at:]), re.DOTALL)


def is_deletion(told: Told) -> bool:
    return bool(told.changes) and told.changes is not None and told.changes[-1][0] is Operation.DELETED


def broken(promise: str, history: History, index: int, event: Told, why: str) -> None:
    shown = concerning(history, index + 1, event.subscriber, event.topic)
    raise PromiseBroken(promise, event.subscriber, event.topic, why, shown)


def concerning(history: History, end: int, subscriber: str, topic: Topic | None) -> Iterator[tuple[int, Event]]:
    """The part of a history, up to a point, that one subscriber (and one topic) has to do with."""
    for index, event in enumerate(history.events[:end]):
        is_noise = topic is not None and (isinstance(event, MailboxSize) or getattr(event, "topic", topic) != topic)
        if not is_noise and (isinstance(event, OfTopic) or event.subscriber == subscriber):
            yield index, event
