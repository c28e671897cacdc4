"""The bounded history of Changes: what changed since revision N, or that nobody knows any more.

Each feature has its own history, and all contents together have one: a storm of content updates must not push out what
a client that was away needs to know of the tools. Not a log for audits: it forgets, by count, by age and by size.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec import structs

from tidings.core.model import Change, Feature, Topic, operation
from tidings.policy import Policy

__all__ = ["Journal", "net"]


class _History:
    __slots__ = ("_filed", "_trails", "changes", "floor", "size")

    def __init__(self, floor: int) -> None:
        self.changes: deque[Change] = deque()
        self._trails: dict[str, list[Change]] = {}
        """The changes of each content by itself: a client that comes back may ask for thousands. What is forgotten may
        still be at the start of one."""
        self._filed = floor
        """The revision until which they are in there. Nearly all are forgotten before anybody asks."""
        self.floor = floor
        """Everything after this revision is still here."""
        self.size = 0

    def forget_oldest(self) -> None:
        change = self.changes.popleft()
        self.size -= _size(change)
        self.floor = change.revision
        trail = self._trails.get(change.key)
        if trail is not None and trail[-1] is change:
            del self._trails[change.key]

    def after(self, revision: int, topic: str | None = None) -> list[Change]:
        """What came after a revision, oldest first, of one content or of all."""
        # From the newest backwards: the answer is nearly always a few of many.
        found: list[Change] = []
        first = max(revision, self.floor)
        for change in reversed(self.changes if topic is None else self._trail(topic)):
            if change.revision <= first:
                break
            found.append(change)
        found.reverse()
        return found

    def _trail(self, uri: str) -> Sequence[Change]:
        for change in self.after(self._filed):
            trail = self._trails.setdefault(change.key, [])
            trail.append(change)
            # Only once half of it is forgotten, so that each change is moved a constant number of times.
            if trail[len(trail) // 2].revision <= self.floor:
                del trail[: len(trail) // 2]
            self._filed = change.revision
        return self._trails.get(uri, ())


class Journal:
    """Remembers at most `Policy.journal_changes` of each feature and `Policy.journal_bytes` of their definitions, none
    older than `Policy.journal_age`."""

    def __init__(self, policy: Policy | None = None, *, since: int = 0) -> None:
        """Of what was before the revision `since`, it knows nothing."""
        policy = policy or Policy()
        self._most = policy.journal_changes
        self._age = policy.journal_age
        self._bytes = policy.journal_bytes
        self._contents = _History(since)
        self._lists = {feature: _History(since) for feature in Feature}

    def append(self, changes: Iterable[Change]) -> None:
        """Take in changes, in the order of their revisions."""
        for change in changes:
            topic = change.topic
            history = self._contents if isinstance(topic, str) else self._lists[topic]
            remembered = history.changes
            remembered.append(change)
            if change.item or change.before or change.metadata:
                history.size += _size(change)
            oldest = change.time - self._age
            while len(remembered) > self._most or history.size > self._bytes or remembered[0].time < oldest:
                history.forget_oldest()
                if not remembered:
                    break

    def restore(self, changes: Iterable[Change], floors: Mapping[Feature | None, int]) -> None:
        """Begin with what an earlier life remembered, as far as the policy still allows."""
        for feature, floor in floors.items():
            (self._contents if feature is None else self._lists[feature]).floor = floor
        self.append(changes)

    def floors(self) -> dict[Feature | None, int]:
        """For each feature, and (None) for contents, the revision after which everything is still here."""
        found: dict[Feature | None, int] = {feature: history.floor for feature, history in self._lists.items()}
        return found | {None: self._contents.floor}

    def expire(self, now: float) -> None:
        """Forget what is older than the policy allows."""
        for history in self._histories():
            while history.changes and history.changes[0].time < now - self._age:
                history.forget_oldest()

    def since(self, revision: int, topic: Topic | None = None) -> list[Change] | None:
        """The changes after `revision`, oldest first, of one topic or of all; None if some of them are forgotten."""
        histories = self._histories() if topic is None else (self._history(topic),)
        if any(revision < history.floor for history in histories):
            return None
        return self.after(revision, topic)[0]

    def after(self, revision: int, topic: Topic | None = None) -> tuple[list[Change], bool]:
        """What is left of the changes after `revision`, oldest first, and whether that is all of them."""
        if topic is not None:
            history = self._history(topic)
            found = history.after(revision, None if isinstance(topic, Feature) else topic)
            return found, revision >= history.floor
        found_each = [history.after(revision) for history in self._histories()]
        merged = heapq.merge(*found_each, key=attrgetter("revision"))
        return list(merged), all(revision >= history.floor for history in self._histories())

    def contents_since(self, revision: int) -> list[Change] | None:
        """The changes of all contents after `revision`, oldest first; None if some of them are forgotten."""
        return None if revision < self._contents.floor else self._contents.after(revision)

    def __len__(self) -> int:
        return sum(len(history.changes) for history in self._histories())

    def _history(self, topic: Topic) -> _History:
        return self._lists[topic] if isinstance(topic, Feature) else self._contents

    def _histories(self) -> Iterable[_History]:
        return (*self._lists.values(), self._contents)


def net(changes: Iterable[Change]) -> tuple[Change, ...]:
    """What is left of changes of one list when they are seen at once: at most one per item, in order."""
    folded: dict[str, Change] = {}
    for change in changes:
        earlier = folded.pop(change.key, None)
        if earlier is not None:
            before, after = earlier.before, change.item
            if before is after or (before is not None and after is not None and before.hash == after.hash):
                continue
            change = structs.replace(change, operation=operation(before, after), before=before)
        folded[change.key] = change
    return tuple(folded.values())


def _size(change: Change) -> int:
    """Of what the change keeps alive, in bytes of JSON: its item's definition, or what was said of a content. The one
    before is most often that of an earlier change too."""
    item = change.item or change.before
    if item is not None:
        return len(item.json)
    return 0 if change.metadata is None else len(msgspec.json.encode(change.metadata))
