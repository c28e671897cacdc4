"""What waits for one subscriber: a set of topics, not a queue of events.

A topic without an entry here needs none: its subscriber knows the newest version. So `told` is kept only where it
differs from what is true now, a subscriber that is up to date has no mailbox at all, and one that never reads again
costs no more than the topics it watches.

Time is passed in. The mailbox decides *when* a topic may be told and in which order, never what is said of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeAlias

from tidings.core.filters import Filter
from tidings.core.model import Feature, Notification, Priority, Topic, Version
from tidings.core.redact import topic_name
from tidings.policy import Policy

__all__ = ["NEVER", "Entry", "IsMuted", "Mailbox", "is_silent"]

logger = logging.getLogger(__name__)

NEVER = math.inf
IsMuted: TypeAlias = Callable[[Topic], bool]


class Entry:
    """One topic of which the subscriber may not know the newest version."""

    __slots__ = ("awaits", "content", "cooling_until", "due", "first", "latest", "since", "told")

    def __init__(self, told: Version | None, since: int, latest: Version) -> None:
        self.told = told
        """What the subscriber knows; None if it was never told anything."""
        self.since = since
        """Where there may be something to say begins: later than `told` once a filter has ruled changes out."""
        self.latest = latest
        self.content: Notification | None = None
        """What to say of a resource's content: always the newest change, so all who wait for it share one. What to say
        of a list depends on what its reader missed, and is found out when it is told."""
        self.first = NEVER
        """When the oldest of what is to be said came up; of what is being said, when the policy let it be."""
        self.due = NEVER
        """When it may be said; never, while there is nothing to say."""
        self.cooling_until = 0.0
        """The rate limit: not before this time."""
        self.awaits = 0
        """The subscriber is ahead of what was published: until this revision, nothing is news to it."""

    @property
    def is_up_to_date(self) -> bool:
        """Whether nothing is waiting, and what the subscriber was told last is the truth."""
        return self.due == NEVER and not self.awaits and self.is_true_still

    @property
    def is_true_still(self) -> bool:
        """Whether what the subscriber was told last is the truth (again)."""
        return self.told is not None and self.told.digest == self.latest.digest


class Mailbox:
    """The pending topics of one subscriber, in the order in which they are to be told."""

    __slots__ = ("_queues", "entries")

    def __init__(self) -> None:
        self.entries: dict[Topic, Entry] = {}
        self._queues: dict[Priority, dict[Topic, Entry]] = {}
        """The entries that have something to say; a topic that changes again keeps its place."""

    def add(
        self,
        notification: Notification,
        previous: Version,
        policy: Policy,
        filter: Filter | None,
        now: float,
        delay: float = 0.0,
    ) -> float:
        """Take in that a topic changed. Returns when there is something to say of it, which may be `NEVER`.

        `delay` is this subscriber's part of `Policy.spread`.
        """
        topic = notification.topic
        entry = self.entries.get(topic)
        if entry is None:
            entry = self.entries[topic] = Entry(previous, previous.revision, notification.version)
        elif entry.is_up_to_date:
            entry.told, entry.since = previous, previous.revision
        entry.latest = notification.version
        if entry.awaits:
            if notification.version.revision < entry.awaits:
                self.suppress(topic, entry, now)
                return NEVER
            entry.awaits, entry.since = 0, -1
        if not isinstance(topic, Feature):
            # Who was to be told to refetch still has to, and must not take the last change for all there was.
            entry.content = notification.incomplete() if entry.since < 0 else notification
        elif (
            filter is not None
            and entry.due == NEVER
            and entry.since >= 0  # else it has to refetch, whatever this change is
            and notification.complete  # likewise
            and not any(map(filter.passes, notification.changes))
        ):
            self.suppress(topic, entry, now)
            return NEVER
        return self._schedule(topic, entry, policy, now, delay)

    def add_missed(self, notification: Notification, told: Version | None, policy: Policy, now: float) -> None:
        """Note that the subscriber was last told something else than is true now. It came to hear just that, so nothing
        but the rate limit keeps it waiting."""
        topic = notification.topic
        before = self.entries.get(topic)
        entry = Entry(told, notification.since, notification.version)
        if before is not None:
            self.drop(topic)
            entry.cooling_until = before.cooling_until
        self.entries[topic] = entry
        if not isinstance(topic, Feature):
            entry.content = notification
        is_urgent = self._queue(topic, entry, policy, now) is Priority.URGENT
        entry.due = now if is_urgent else max(now, entry.cooling_until)

    def await_revision(self, topic: Topic, told: Version, revision: int) -> None:
        """The subscriber knows a version that is yet to be published, with this revision at the latest."""
        self.drop(topic)
        entry = self.entries[topic] = Entry(told, told.revision, told)
        entry.awaits = revision

    def collapse(self, notification: Notification, policy: Policy, now: float) -> None:
        """Forget which contents were pending, and owe the whole list instead."""
        for topic in [topic for topic in self.entries if not isinstance(topic, Feature)]:
            self.drop(topic)
        self.add_missed(notification, None, policy, now)

    def mark_current(self, topic: Topic, version: Version) -> None:
        """The subscriber says that it holds what this version is: what was to be told until then needs no telling."""
        entry = self.entries.get(topic)
        if entry is not None:
            entry.told = version

    def take(self, now: float, is_muted: IsMuted | None) -> tuple[Topic, Entry] | None:
        """The next topic to be told. The caller then either tells it or skips it."""
        for priority in sorted(self._queues):
            for topic, entry in self._queues[priority].items():
                if entry.due <= now and not is_silent(is_muted, topic):
                    entry.first = max(entry.first, entry.due)
                    self._unqueue(topic)
                    return topic, entry
        return None

    def mark_told(self, topic: Topic, entry: Entry, policy: Policy, now: float) -> None:
        """The subscriber knows the latest now: forget the topic, or keep it for as long as the rate limit needs it."""
        if policy.min_interval > 0:
            entry.told, entry.cooling_until = entry.latest, now + policy.min_interval
        else:
            del self.entries[topic]

    def suppress(self, topic: Topic, entry: Entry, now: float) -> None:
        """Nothing of it is to be said: `told` stays, and the next change is judged by itself."""
        entry.since = entry.latest.revision
        if entry.is_up_to_date and entry.cooling_until <= now:
            del self.entries[topic]

    def restart_latency(self, now: float) -> None:
        """Nothing of what waits could be said before this time."""
        for entry in self.entries.values():
            entry.first = max(entry.first, now)

    def has_room(self, topic: Topic, policy: Policy) -> bool:
        """Whether this topic may wait. What only the rate limit keeps gives way: its reader does keep up."""
        if topic in self.entries or len(self.entries) < policy.max_pending:
            return True
        kept = next((each for each, entry in self.entries.items() if entry.is_up_to_date), None)
        if kept is not None:
            del self.entries[kept]
        return kept is not None

    def is_waiting(self, topic: Topic, is_muted: IsMuted | None = None) -> bool:
        """Whether there is something to say of a topic, and no mute in the way."""
        entry = self.entries.get(topic)
        return entry is not None and entry.due != NEVER and not is_silent(is_muted, topic)

    def waiting(self, is_muted: IsMuted | None) -> int:
        """Of how many topics there is something to say."""
        return sum(self.is_waiting(topic, is_muted) for topic in tuple(self.entries))

    def drop(self, topic: Topic) -> None:
        """The subscriber no longer watches this topic."""
        if self.entries.pop(topic, None) is not None:
            self._unqueue(topic)

    def known_versions(self) -> dict[Topic, Version | None]:
        """What the subscriber would know if it left now: what it was told, and all that its filter ruled out."""
        return {
            topic: entry.told if entry.due != NEVER or entry.awaits else entry.latest
            for topic, entry in self.entries.items()
        }

    def next_due(self, now: float, is_muted: IsMuted | None) -> float:
        """When there will be something to do: tell a topic, or forget one that the rate limit kept."""
        soonest = NEVER
        for topic, entry in list(self.entries.items()):
            if entry.due != NEVER:
                if entry.due < soonest and not is_silent(is_muted, topic):
                    soonest = entry.due
            elif entry.is_up_to_date:
                if entry.cooling_until <= now:
                    del self.entries[topic]
                else:
                    soonest = min(soonest, entry.cooling_until)
        return soonest

    def _schedule(self, topic: Topic, entry: Entry, policy: Policy, now: float, delay: float) -> float:
        if self._queue(topic, entry, policy, now) is Priority.URGENT:
            entry.due = now
        else:
            # Without a gap nothing moves the time: else a busy source would, up to the longest wait.
            gap = min(now + policy.quiet_gap, entry.first + policy.longest_wait) if policy.quiet_gap else entry.first
            entry.due = max(gap + delay, entry.cooling_until)
        return entry.due

    def _queue(self, topic: Topic, entry: Entry, policy: Policy, now: float) -> Priority:
        priority = policy.priority(topic)
        self._queues.setdefault(priority, {})[topic] = entry
        entry.first = min(entry.first, now) if entry.due != NEVER else now
        return priority

    def _unqueue(self, topic: Topic) -> None:
        for priority, queue in self._queues.items():
            if (entry := queue.pop(topic, None)) is not None:
                entry.due = NEVER
                if not queue:
                    del self._queues[priority]
                return


def is_silent(is_muted: IsMuted | None, topic: Topic) -> bool:
    if is_muted is None:
        return False
    try:
        return is_muted(topic)
    except Exception:  # the user's function; in doubt nothing is said, and nothing is lost by that
        logger.exception("a mute predicate failed on %s; saying nothing for now", topic_name(topic))
        return True
