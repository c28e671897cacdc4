"""What Tidings promises, as checks over a recorded history, for the tests of Tidings and of its users.

A `History` is what happened, in the order in which it was seen: who asked for what, what changed, who was told. It may
come from inside (`Recorder(hub)`) or from clients of a real server (`Told.from_message`), which know only what is on
the wire. So the checks take a client's time for what it is: a notification may arrive from the moment a subscription
is asked for until its end is answered. Record a change before its effects can be seen, and before whoever is to know
it already subscribes.

One check per promise, each on its own reading of what a subscription covers: nothing here asks the code it judges. No
check waits: `check_reliable` is for a history in which everybody was given the chance to be told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

from tidings.catalog import Catalog
from tidings.errors import TidingsError
from tidings.hub import Hub
from tidings.mailbox import Filter
from tidings.model import Change, Feature, Notification, Operation, Reason, Topic, Version
from tidings.subscriber import Subscriber, identity

__all__ = [
    "PROMISES",
    "Acknowledged",
    "Changed",
    "Closed",
    "Event",
    "Held",
    "History",
    "Muted",
    "PromiseBroken",
    "Recorder",
    "Subscribed",
    "Told",
    "Unmuted",
    "Unsubscribed",
    "check_all",
    "check_bounded",
    "check_filtered",
    "check_ordered",
    "check_reliable",
    "check_unique",
]

_CHANGE_KEY: Final = "dev.tidings/change"
"""Said again, and not imported from `tidings.frames`: a check must notice when the wire says something else."""

_SHOWN_EVENTS: Final = 20
"""How much of a history a failure shows: what led to it is nearly always among the last few that concern it."""


# What happens


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A subscriber asked for features, URIs and patterns. It may be told of them from now on."""

    subscriber: str
    topics: tuple[Topic, ...]
    told: Mapping[Topic, Version | None] = field(default_factory=dict)
    """The cursors it came with: the version it was told last, None for never."""
    filter: Filter | None = None
    subresources: bool = True
    """`Policy.subresources` of the server."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a subscriber asked for until now was granted: from now on it must be told.

    Without this event, a subscription counts as granted when it was asked for, as it is inside a process.
    """

    subscriber: str


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    """Some subscriptions are over, or all of them: the end was answered, and nothing may come any more."""

    subscriber: str
    topics: tuple[Topic, ...] = ()
    """None named means all."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A topic has a new version. What was there when the history begins is recorded in the same way."""

    topic: Topic
    version: Version
    previous: Version | None = None
    operation: Operation | None = None
    key: str = ""
    before: str | None = None
    """The digest of the list's item before, None if there was none. Only filtered subscribers need it."""
    after: str | None = None

    @classmethod
    def from_change(cls, change: Change) -> Changed:
        return cls(
            change.topic,
            change.version,
            change.previous,
            change.operation,
            change.key,
            change.before.digest if change.before else None,
            change.item.digest if change.item else None,
        )


@dataclass(frozen=True, slots=True)
class Told:
    """A notification reached a subscriber."""

    subscriber: str
    topic: Topic
    version: Version | None = None
    """None where the wire did not say (`Policy.detail` is "none"): it then counts as the newest recorded so far."""
    changes: tuple[tuple[Operation, str], ...] | None = None
    """Operations and keys, None where unknown."""
    is_complete: bool = True
    """False where the server said that it no longer knew all changes."""

    @classmethod
    def from_message(cls, subscriber: str, message: Mapping[str, Any]) -> Told | None:
        """From a JSON-RPC message as it came over the wire; None if it is no notification of a change."""
        params: Mapping[str, Any] = message.get("params") or {}
        topic = _topic_of(message.get("method"), params)
        if topic is None:
            return None
        summary = (params.get("_meta") or {}).get(_CHANGE_KEY)
        if summary is None:
            return cls(subscriber, topic)
        version = Version(summary["revision"], summary["digest"])
        listed = [summary] if "operation" in summary else summary.get("changes", ())
        changes = tuple((Operation(each["operation"]), each.get("name", each.get("uri", ""))) for each in listed)
        return cls(subscriber, topic, version, changes, summary.get("complete", True))


@dataclass(frozen=True, slots=True)
class Muted:
    """A subscriber is not to be told, of some topics or of any: the protocol guard."""

    subscriber: str
    topics: tuple[Topic, ...] = ()
    """None named means all."""


@dataclass(frozen=True, slots=True)
class Unmuted:
    """The end of `Muted`."""

    subscriber: str
    topics: tuple[Topic, ...] = ()
    """None named means all."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A subscriber is gone, whoever ended it."""

    subscriber: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """What a subscriber cost at that moment: the topics in its mailbox."""

    subscriber: str
    pending: int
    most: int | None = None
    """`Policy.max_pending`, where it is known."""


Event: TypeAlias = Subscribed | Acknowledged | Unsubscribed | Changed | Told | Muted | Unmuted | Closed | Held


class History:
    """Events in the order in which they were seen."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def record(self, event: Event) -> None:
        self.events.append(event)

    def subscribers(self) -> list[str]:
        """In the order of their first mention."""
        return list(dict.fromkeys(event.subscriber for event in self.events if not isinstance(event, Changed)))

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


class PromiseBroken(TidingsError, AssertionError):
    """A history that must not be: which promise, for whom, on what topic, and the events that show it."""

    def __init__(
        self, promise: str, subscriber: str, topic: Topic | None, why: str, events: Iterable[tuple[int, Event]]
    ) -> None:
        self.promise = promise
        self.subscriber = subscriber
        self.topic = topic
        self.events = tuple(events)
        name = topic.value if isinstance(topic, Feature) else topic
        shown = [f"  {index:>5}  {event}" for index, event in self.events[-_SHOWN_EVENTS:]]
        head = f"{promise}: {subscriber}" + (f", {name}" if name is not None else "") + f": {why}"
        super().__init__("\n".join([head, *shown]))


# The checks


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
            if not _passes(ear.filter, done, key):
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
            if not is_same and _passes(chosen, _net_operation(first, change.after), change.key):
                passing.add(change.key)
            else:
                passing.discard(change.key)
            reached[end + 1] |= not passing
    return reached[-1]


def _net_operation(before: str | None, after: str | None) -> Operation:
    if before is None:
        return Operation.ADDED
    return Operation.REMOVED if after is None else Operation.UPDATED


def _passes(chosen: Filter, done: Operation, key: str) -> bool:
    if chosen.operations is not None and done not in chosen.operations:
        return False
    return chosen.names is None or any(name == key or _glob(name).fullmatch(key) for name in chosen.names)


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


def _topic_of(method: object, params: Mapping[str, Any]) -> Topic | None:
    if method in ("notifications/resources/updated", "notifications/resources/deleted"):
        return str(params["uri"])
    return next((feature for feature in Feature if method == f"notifications/{feature.value}/list_changed"), None)


def _broken(promise: str, history: History, index: int, event: Told, why: str) -> None:
    shown = _concerning(history, index + 1, event.subscriber, event.topic)
    raise PromiseBroken(promise, event.subscriber, event.topic, why, shown)


def _concerning(history: History, end: int, subscriber: str, topic: Topic | None) -> Iterator[tuple[int, Event]]:
    """The part of a history, up to a point, that one subscriber (and one topic) has to do with."""
    for index, event in enumerate(history.events[:end]):
        is_noise = topic is not None and (isinstance(event, Held) or getattr(event, "topic", topic) != topic)
        if not is_noise and (isinstance(event, Changed) or event.subscriber == subscriber):
            yield index, event


# Recording inside a process


class Recorder:
    """Writes down all that happens at a hub, from now on. Call `look()` before the checks, and as often as you like."""

    def __init__(self, hub: Hub, history: History | None = None) -> None:
        self.history = History() if history is None else history
        self._hub = hub
        self._names: dict[Subscriber, str] = {}
        self._asked: dict[Subscriber, set[Topic]] = {}
        self._muted: dict[Subscriber, set[Topic]] = {}
        self._topics: dict[Topic, None] = {}
        self._count = 0
        self._first_wish: tuple[tuple[Topic, ...], Mapping[Topic, Version | None]] | None = None
        """What a callback asked for that has no subscriber yet."""
        with hub.catalog.lock:
            self._begin(hub.catalog)
            self._hub_open, self._hub_subscribe = hub.open, hub.subscribe
            self._hub_unsubscribe, self._hub_close = hub.unsubscribe, hub.close
            hub.open, hub.subscribe = self._open, self._subscribe  # type: ignore[method-assign]
            hub.unsubscribe, hub.close = self._unsubscribe, self._close  # type: ignore[method-assign]
            self._journal_append = hub.journal.append
            hub.journal.append = self._append  # type: ignore[method-assign]
            for subscriber in hub._subscribers:
                self._adopt(subscriber)
                self._wish(subscriber, tuple(subscriber.watched), {})

    def name(self, subscriber: Subscriber) -> str:
        """By which name the history knows an open subscriber."""
        return self._names[subscriber]

    def look(self) -> None:
        """Write down what makes no noise: subscriptions that ran out, who is muted, and what each mailbox holds."""
        with self._hub.catalog.lock:
            for subscriber, name in self._names.items():
                self._look_at(subscriber)
                for topic in self._topics:
                    self._look_whether_muted(subscriber, name, topic)
                self.history.record(Held(name, subscriber.pending, subscriber.policy.max_pending))

    def _begin(self, catalog: Catalog) -> None:
        for topic in (*Feature, *catalog.resources._contents):
            self._topics[topic] = None
            self.history.record(Changed(topic, catalog.version(topic)))

    def _adopt(self, subscriber: Subscriber) -> str:
        self._count += 1
        name = f"{subscriber.label or 'subscriber'}-{self._count}"
        self._names[subscriber] = name
        self._asked[subscriber] = set()
        self._muted[subscriber] = set()
        subscriber.deliver = _Tap(subscriber.deliver, lambda notification: self._told(subscriber, name, notification))
        return name

    def _append(self, changes: Iterable[Change]) -> None:
        # Here, and not as a sink of the catalog: a change counts from when the hub hears of it, before anybody is told.
        changes = tuple(changes)
        for change in changes:
            self._topics[change.topic] = None
            self.history.record(Changed.from_change(change))
        self._journal_append(changes)

    def _told(self, subscriber: Subscriber, name: str, notification: Notification) -> None:
        if subscriber in self._names:
            self._look_at(subscriber)
            self._look_whether_muted(subscriber, name, notification.topic)
        changes = tuple((change.operation, change.key) for change in notification.changes)
        self.history.record(Told(name, notification.topic, notification.version, changes, notification.complete))

    def _wish(self, subscriber: Subscriber, topics: tuple[Topic, ...], told: Mapping[Topic, Version | None]) -> None:
        if subscriber in self._names:
            self._look_at(subscriber)
            self._asked[subscriber].update(topics)
            subresources = self._hub.policy.subresources
            self.history.record(Subscribed(self._names[subscriber], topics, told, subscriber.filter, subresources))

    def _look_at(self, subscriber: Subscriber) -> None:
        asked = self._asked.get(subscriber, set())
        if gone := tuple(topic for topic in asked if topic not in subscriber.watched):
            asked.difference_update(gone)
            self.history.record(Unsubscribed(self._names[subscriber], gone))

    def _look_whether_muted(self, subscriber: Subscriber, name: str, topic: Topic) -> None:
        muted = self._muted[subscriber]
        try:
            is_muted = subscriber.is_muted is not None and subscriber.is_muted(topic)
        except Exception:  # the user's; one that fails is taken as muted
            is_muted = True
        if is_muted and topic not in muted:
            muted.add(topic)
            self.history.record(Muted(name, (topic,)))
        elif not is_muted and topic in muted:
            muted.remove(topic)
            self.history.record(Unmuted(name, (topic,)))

    def _open(self, *args: Any, **options: Any) -> Subscriber:
        with self._hub.catalog.lock:
            subscriber = self._hub_open(*args, **options)
            self._adopt(subscriber)
            if self._first_wish is not None:
                wish, self._first_wish = self._first_wish, None
                self._wish(subscriber, *wish)
            return subscriber

    def _subscribe(
        self,
        who: Subscriber | Callable[[Notification], object],
        *features: Feature | str,
        uris: Iterable[str] = (),
        told: Mapping[Topic, Version | None] | None = None,
        **options: Any,
    ) -> Subscriber:
        paths = [uris] if isinstance(uris, str) else list(uris)
        topics: tuple[Topic, ...] = (*map(Feature, features), *paths)
        with self._hub.catalog.lock:
            # Before the hub acts: it may tell at once.
            known = self._hub._find(who)
            if known is None:
                self._first_wish = (topics, told or {})
            else:
                self._wish(known, topics, told or {})
            try:
                return self._hub_subscribe(who, *features, uris=paths, told=told, **options)
            finally:
                self._first_wish = None
                # What was refused was never subscribed.
                if (subscriber := self._hub._find(who)) in self._names:
                    self._look_at(subscriber)

    def _unsubscribe(self, who: Subscriber | Callable[[Notification], object], *args: Any, **options: Any) -> None:
        with self._hub.catalog.lock:
            subscriber = self._hub._find(who)
            self._hub_unsubscribe(who, *args, **options)
            if subscriber in self._names:
                self._look_at(subscriber)

    def _close(self, who: Subscriber | Callable[[Notification], object], reason: Reason = Reason.UNSUBSCRIBED) -> None:
        with self._hub.catalog.lock:
            subscriber = self._hub._find(who)
            if subscriber in self._names:
                self.history.record(Closed(self._names.pop(subscriber), reason.value))
                del self._asked[subscriber], self._muted[subscriber]
            self._hub_close(who, reason)


class _Tap:
    """Stands for a subscriber's `deliver`, and is equal to it: by that the hub finds the subscriber of a callback."""

    __slots__ = ("_deliver", "_identity", "_record")

    def __init__(self, deliver: Callable[[Notification], object], record: Callable[[Notification], None]) -> None:
        self._deliver = deliver
        self._identity = identity(deliver)
        self._record = record

    def __call__(self, notification: Notification) -> object:
        self._record(notification)
        return self._deliver(notification)

    def __eq__(self, other: object) -> bool:
        return bool(self._identity == (other._identity if isinstance(other, _Tap) else other))

    def __hash__(self) -> int:
        return hash(self._identity)
