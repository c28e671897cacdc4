"""Resumable: a client that comes back with a cursor is told exactly what differs, or that it must refetch."""

from __future__ import annotations

from bisect import bisect_right

from tidings.core.mailbox import Filter
from tidings.core.model import Feature, Operation, Topic, Version
from tidings.testing.checks import Ear, Showings, broken, is_deletion, net_operation, passes, ruled_out
from tidings.testing.history import Changed, Closed, History, OfTopic, Subscribed, Told, Unsubscribed

__all__ = ["check_resumable"]


def check_resumable(history: History, *, journal: int | None = None) -> None:
    """A client that comes back with a cursor is told exactly what differs, or that it must refetch.

    From its cursor on, every notification says all that differs from what it knew before, unless it says that it does
    not: that it must where nobody knows the cursor, and may only where more was forgotten than the `journal` keeps (if
    that is given: changes of one feature, and of all contents together), or where it may hold what somebody was shown.
    """
    record = _Record(history)
    ears: dict[str, Ear] = {}
    knows: dict[tuple[str, Topic], tuple[Version | None, int]] = {}
    """And where in the history it came to know that."""
    for index, event in enumerate(history):
        if isinstance(event, OfTopic):
            continue
        who, ear = event.subscriber, ears.setdefault(event.subscriber, Ear())
        if isinstance(event, Told):
            if event.version is not None:
                key = (who, event.topic)
                why = record.misinformed(event, index, *knows.pop(key), ear.filter, journal) if key in knows else ""
                if why:
                    broken("Resumable", history, index, event, why)
                if record.has(event.topic, event.version):
                    knows[key] = (event.version, index)
            if is_deletion(event):
                ear.end(event.topic)
        elif isinstance(event, Subscribed):
            heard = {topic for topic in event.told if ear.hears(topic)}
            ear.follow(event, index)
            for topic, version in event.told.items():
                knows.pop((who, topic), None)
                # Where it already listens, older news may be under way.
                if topic not in heard and ear.hears(topic) and not record.is_ambiguous(topic, version, index):
                    knows[who, topic] = (version, index)
        else:
            ear.follow(event, index)
        if isinstance(event, Unsubscribed | Closed) or (isinstance(event, Told) and is_deletion(event)):
            for lost in [each for each in knows if each[0] == who and not ear.hears(each[1])]:
                del knows[lost]


class _Record:
    """What changed, as a history has it."""

    def __init__(self, history: History) -> None:
        self._showings = Showings(history)
        self._changes: dict[Topic, list[tuple[int, Changed]]] = {}
        self._seen: dict[tuple[Topic, Version], int] = {}
        """Where in the history each version was first known."""
        self._digests: set[tuple[Topic, str]] = set()
        for index, event in enumerate(history):
            if isinstance(event, Changed):
                if event.previous is not None:
                    self._seen.setdefault((event.topic, event.previous), index)
                    self._digests.add((event.topic, event.previous.digest))
                self._seen.setdefault((event.topic, event.version), index)
                self._digests.add((event.topic, event.version.digest))
                if event.operation is not None:
                    self._changes.setdefault(event.topic, []).append((index, event))
        for found in self._changes.values():
            found.sort(key=_revision)

    def has(self, topic: Topic, version: Version) -> bool:
        return (topic, version) in self._seen

    def is_ambiguous(self, topic: Topic, version: Version | None, index: int) -> bool:
        """Whether a cursor is ahead of what was published, or of another life and maybe the same list."""
        if version is None:
            return False
        if self.has(topic, version):
            return self._seen[topic, version] > index
        return (topic, version.digest) in self._digests

    def misinformed(
        self, told: Told, index: int, known: Version | None, since: int, chosen: Filter | None, journal: int | None
    ) -> str:
        """Why one who knew a version should have been told otherwise, if so."""
        assert told.version is not None
        if told.changes is None:
            return ""  # the wire does not say
        if known is None or not self.has(told.topic, known):
            return "nobody knows its cursor, and it was not told to refetch" if told.is_complete else ""
        changes = self._changes.get(told.topic, [])
        start, end = (bisect_right(changes, each.revision, key=_revision) for each in (known, told.version))
        missed = [change for _, change in changes[start:end]]
        if isinstance(told.topic, Feature) and any(change.before is change.after is None for change in missed):
            return ""  # the history does not say enough
        if not told.is_complete and not told.changes:
            kept = self._since(told.topic, known.revision, index)
            is_forgotten = journal is None or kept > journal
            is_forgotten |= self._showings.has_other(told, index, known, since)
            return "" if is_forgotten else f"it was told to refetch, with {kept} changes since, and {journal} are kept"
        said = {key: done for done, key in told.changes}
        if not isinstance(told.topic, Feature):
            true = {change.key: change.operation for change in missed[-1:]}
            return "" if said == true else f"it was told {said}, and the last change was {true}"
        for start in _starts(missed, chosen):
            true = _net(missed[start:], chosen)
            if said == true or (not told.is_complete and said.items() < true.items()):
                return ""
        return f"it was told {said}, and what differs is {_net(missed, chosen)}"

    def _since(self, topic: Topic, revision: int, index: int) -> int:
        """How many changes that share a journal with this topic there were after a revision."""
        return sum(
            change.version.revision > revision and at < index
            for each, found in self._changes.items()
            if each == topic or (isinstance(each, str) and isinstance(topic, str))
            for at, change in found
        )


def _revision(recorded: tuple[int, Changed]) -> int:
    return recorded[1].version.revision


def _starts(missed: list[Changed], chosen: Filter | None) -> list[int]:
    """Where what is said may begin: at the start, or where a filter had ruled out all until then."""
    if chosen is None:
        return [0]
    return [start for start, is_reached in enumerate(ruled_out(missed, chosen)) if is_reached]


def _net(changes: list[Changed], chosen: Filter | None) -> dict[str, Operation | None]:
    """What is left of changes that are seen at once, by item."""
    before: dict[str, str | None] = {}
    after: dict[str, Changed] = {}
    for change in changes:
        before.setdefault(change.key, change.before)
        after[change.key] = change
    found: dict[str, Operation | None] = {}
    for key, last in after.items():
        if before[key] != last.after:
            done = net_operation(before[key], last.after)
            if chosen is None or passes(chosen, last.topic, done, key):
                found[key] = done
    return found
