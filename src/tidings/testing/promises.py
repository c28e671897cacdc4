"""One check per promise, each on its own reading of what a subscription covers: none asks the code that it judges."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Final

from tidings.mailbox import Filter
from tidings.model import Feature, Operation, Topic, Version
from tidings.testing.history import (
    Acknowledged,
    Changed,
    Closed,
    Event,
    Held,
    History,
    Muted,
    PromiseBroken,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
)

__all__ = [
    "PROMISES",
    "check_all",
    "check_bounded",
    "check_filtered",
    "check_ordered",
    "check_reliable",
    "check_unique",
]


def check_filtered(history: History) -> None:
    """A subscriber gets nothing that it did not ask for, that its filter rules out, or that it is muted for."""
    ears: dict[str, _Ear] = {}
    seen: dict[tuple[Topic, Version], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            seen[event.topic, event.version] = index
            continue
        ear = ears.setdefault(event.subscriber, _Ear())
        if isinstance(event, Told):
            if why := _unwanted(ear, event):
                _broken("Filtered", history, index, event, why)
            if event.version is not None and _is_deletion(event):
                # It ends the subscriptions of its time; one that was asked for after the deletion may go on.
                ear.end(event.topic, before=seen.get((event.topic, event.version)))
        else:
            ear.follow(event, index)


def check_ordered(history: History) -> None:
    """Revisions of a topic never go backwards for a subscriber."""
    known = {(event.topic, event.version) for event in history if isinstance(event, Changed)}
    ears: dict[str, _Ear] = {}
    newest: dict[tuple[str, Topic], int] = {}
    cursors: dict[tuple[str, Topic], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            continue
        who = event.subscriber
        is_new = who not in ears
        ear = ears.setdefault(who, _Ear())
        if isinstance(event, Told):
            if event.version is not None:
                came_with = cursors.pop((who, event.topic), -1)
                before = max(came_with, newest.get((who, event.topic), -1))
                if event.version.revision < before:
                    _broken("Ordered", history, index, event, f"revision {event.version.revision} came after {before}")
                newest[who, event.topic] = event.version.revision
            if _is_deletion(event):
                ear.end(event.topic)
        else:
            ear.follow(event, index)
        if isinstance(event, Subscribed):
            for topic, version in event.told.items():
                # A cursor counts where a subscriber comes with it, for as long as it says nothing else and stays.
                # Where it already listens, older news may be under way.
                cursors.pop((who, topic), None)
                if is_new and version is not None and (topic, version) in known and ear.hears(topic):
                    cursors[who, topic] = version.revision
        for key in [key for key in cursors if key[0] == who and not ear.hears(key[1])]:
            del cursors[key]


def check_unique(history: History) -> None:
    """A subscriber is never told the same version of a topic twice in a row.

    The same means the same digest, and for one that ended its subscription in between, the same revision: it may have
    missed that the content was another one for a while.
    """
    ears: dict[str, _Ear] = {}
    last: dict[tuple[str, Topic], _Last] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            continue
        who, ear = event.subscriber, ears.setdefault(event.subscriber, _Ear())
        if isinstance(event, Told):
            if event.version is not None:
                before = last.get((who, event.topic))
                if before is not None and before.is_same(event.version):
                    _broken("Unique", history, index, event, f"it had been told {event.version.digest} already")
                last[who, event.topic] = _Last(event.version)
            if _is_deletion(event):
                ear.end(event.topic)
        else:
            ear.follow(event, index)
            if isinstance(event, Subscribed):
                for topic, version in event.told.items():
                    if ear.hears(topic):  # a cursor for anything else counts for nothing
                        last[who, topic] = _Last(version, is_cursor=True)
        if isinstance(event, Told | Unsubscribed | Closed):
            for (subscriber, topic), told in list(last.items()):
                if subscriber == who and not ear.hears(topic):
                    told.is_continuous = False
                    if told.is_cursor:
                        del last[subscriber, topic]


def check_reliable(history: History) -> None:
    """Once changes stopped and everybody had the chance: every live subscriber was told the last version.

    It need not have been where the digest is the one it knew when it came or was told last. One with a filter need not
    have been told of a list if what it missed can be cut into stretches, each of which, seen at once, has no change
    that passes the filter.
    """
    changes: dict[Topic, list[Changed]] = {}
    for event in history:
        if isinstance(event, Changed):
            changes.setdefault(event.topic, []).append(event)
    latest = {topic: max(each.version for each in found) for topic, found in changes.items()}
    for subscriber in history.subscribers():
        ear, knows = _knowledge(history, subscriber, changes)
        for topic, known in knows.items():
            newest = latest[topic]
            if ear.is_muted(topic) or any(version.digest == newest.digest for version in known):
                continue
            if isinstance(topic, Feature) and ear.filter is not None:
                missed = (_since(changes[topic], version) for version in known)
                if any(found is not None and _is_ruled_out(found, ear.filter) for found in missed):
                    continue
            knew = ", ".join(f"r{version.revision} {version.digest}" for version in known) or "nothing"
            why = f"the last version is r{newest.revision} {newest.digest}, and it knows {knew}"
            raise PromiseBroken(
                "Reliable", subscriber, topic, why, _concerning(history, len(history), subscriber, topic)
            )


def check_bounded(history: History) -> None:
    """No reader, however slow, costs more than its mailbox: one entry for each topic that it watches, and that changed.

    That it delays nobody else is a matter of time, and no history shows it.
    """
    ears: dict[str, _Ear] = {}
    topics: dict[Topic, None] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            topics[event.topic] = None
            continue
        ear = ears.setdefault(event.subscriber, _Ear())
        if isinstance(event, Held):
            most = sum(ear.hears(topic) for topic in topics)
            if event.pending > most or (event.most is not None and event.pending > event.most):
                allowed = most if event.most is None else min(most, event.most)
                why = f"{event.pending} topics are pending, and {allowed} is the most there may be"
                shown = _concerning(history, index + 1, event.subscriber, None)
                raise PromiseBroken("Bounded", event.subscriber, None, why, shown)
        elif isinstance(event, Told):
            if _is_deletion(event):
                ear.end(event.topic)
        else:
            if isinstance(event, Subscribed):
                topics |= dict.fromkeys(event.told)
            ear.follow(event, index)


PROMISES: Final[Mapping[str, Callable[[History], None]]] = {
    "Filtered": check_filtered,
    "Ordered": check_ordered,
    "Unique": check_unique,
    "Reliable": check_reliable,
    "Bounded": check_bounded,
}
"""The words of the design, and what shows that each is kept."""


def check_all(history: History) -> None:
    for check in PROMISES.values():
        check(history)


# What the checks share


class _Ear:
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


class _Last:
    """What a subscriber was told last of one topic."""

    __slots__ = ("is_continuous", "is_cursor", "version")

    def __init__(self, version: Version | None, is_cursor: bool = False) -> None:
        self.version = version
        self.is_cursor = is_cursor
        """Whether it only said so itself, which counts for as long as that subscription."""
        self.is_continuous = True
        """Whether it has been listening ever since."""

    def is_same(self, version: Version) -> bool:
        if self.version is None:
            return False
        return self.version.digest == version.digest if self.is_continuous else self.version == version


def _unwanted(ear: _Ear, told: Told) -> str:
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
            if not _passes(ear.filter, told.topic, done, key):
                return f"its filter rules out {done} {key!r}"
    return ""


def _knowledge(
    history: History, subscriber: str, changes: Mapping[Topic, list[Changed]]
) -> tuple[_Ear, dict[Topic, tuple[Version, ...]]]:
    """What a subscriber knows in the end of all that it watches then and that ever changed.

    Several versions where the history can't tell which one it knows; none where it knows nothing.
    """
    ear = _Ear()
    knows: dict[Topic, tuple[Version, ...]] = {}
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
        elif event.subscriber != subscriber:
            continue
        elif isinstance(event, Told):
            version = event.version or present.get(event.topic)
            asked_only.discard(event.topic)
            knows[event.topic] = () if version is None else (version,)
            if _is_deletion(event):
                ear.end(event.topic)
        elif isinstance(event, Acknowledged):
            asked_only.clear()
        else:
            ear.follow(event, index)
        if isinstance(event, Subscribed):
            for topic in changes:
                if topic in event.told and ear.hears(topic, surely=True):
                    cursor = event.told[topic]
                    asked_only.discard(topic)
                    knows[topic] = () if cursor is None else (cursor,)
                elif topic not in knows and ear.hears(topic, surely=True):
                    version = present[topic]
                    knows[topic] = () if version is None else (version,)
                    if index < granted:
                        asked_only.add(topic)
        elif not isinstance(event, Changed):
            for topic in [topic for topic in knows if topic not in changes or not ear.hears(topic, surely=True)]:
                asked_only.discard(topic)
                del knows[topic]
    return ear, knows


def _since(changes: list[Changed], version: Version) -> list[Changed] | None:
    """What came after a version; None if the history does not know that version."""
    if not any(version in (change.version, change.previous) for change in changes):
        return None
    missed = [change for change in changes if change.version.revision > version.revision]
    return sorted(missed, key=lambda change: change.version.revision)


def _is_ruled_out(missed: list[Changed], chosen: Filter) -> bool:
    """Whether changes can be cut into stretches in each of which, seen at once, nothing passes a filter.

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
            if not is_same and _passes(chosen, change.topic, _net_operation(first, change.after), change.key):
                passing.add(change.key)
            else:
                passing.discard(change.key)
            reached[end + 1] |= not passing
    return reached[-1]


def _net_operation(before: str | None, after: str | None) -> Operation:
    if before is None:
        return Operation.ADDED
    return Operation.REMOVED if after is None else Operation.UPDATED


def _passes(chosen: Filter, topic: Topic, done: Operation, key: str) -> bool:
    if chosen.operations is not None and done not in chosen.operations:
        return False
    globs = chosen.uris if topic is Feature.RESOURCES else chosen.names
    if globs is not None and not any(glob == key or _glob(glob).fullmatch(key) for glob in globs):
        return False
    return chosen.also is None or _passes(chosen.also, topic, done, key)


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


def _is_deletion(told: Told) -> bool:
    return bool(told.changes) and told.changes is not None and told.changes[-1][0] is Operation.DELETED


def _broken(promise: str, history: History, index: int, event: Told, why: str) -> None:
    shown = _concerning(history, index + 1, event.subscriber, event.topic)
    raise PromiseBroken(promise, event.subscriber, event.topic, why, shown)


def _concerning(history: History, end: int, subscriber: str, topic: Topic | None) -> Iterator[tuple[int, Event]]:
    """The part of a history, up to a point, that one subscriber (and one topic) has to do with."""
    for index, event in enumerate(history.events[:end]):
        is_noise = topic is not None and (isinstance(event, Held) or getattr(event, "topic", topic) != topic)
        if not is_noise and (isinstance(event, Changed) or event.subscriber == subscriber):
            yield index, event
