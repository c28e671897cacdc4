"""The topics that are pending for one subscriber: a set of topics, not a queue of events.

A topic without an entry needs none: the subscriber was told its newest version. So `told` is stored only where it
differs from the present version, a subscriber that keeps up has no mailbox, and a subscriber that never reads again
costs no more than the topics it watches.

The mailbox decides when a topic may be delivered, and in which order. It does not decide the content of a notification.
It has no clock: the caller passes the time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeAlias

from tidings.core.delivery_settings import DeliverySettings
from tidings.core.filters import Filter
from tidings.core.model import UNKNOWN_REVISION, Feature, Notification, Priority, Topic, Version
from tidings.core.redact import topic_name

__all__ = ["NEVER", "IsMuted", "Mailbox", "MailboxEntry", "is_topic_muted"]

logger = logging.getLogger(__name__)

NEVER = math.inf
IsMuted: TypeAlias = Callable[[Topic], bool]


class MailboxEntry:
    """One topic of which the subscriber may not know the newest version."""

    __slots__ = ("awaited_revision", "due", "latest", "not_before", "notification", "pending_since", "since", "told")

    def __init__(self, told: Version | None, since: int, latest: Version) -> None:
        self.told = told
        """The version that the subscriber was told; None for none."""
        self.since = since
        """The revision after which there may be something to tell. Later than `told` if a filter excluded changes."""
        self.latest = latest
        self.notification: Notification | None = None
        """The notification of a resource's content: always the newest change, shared by all subscribers. The
        notification of a list depends on what its subscriber missed, and is built when it is delivered."""
        self.pending_since = NEVER
        """When the oldest pending change was added. `take` replaces it by `due` if that is later."""
        self.due = NEVER
        """When the topic may be delivered; `NEVER` while there is nothing to tell."""
        self.not_before = 0.0
        """The end of the minimal interval since the last notification."""
        self.awaited_revision = 0
        """If not 0, the subscriber knows a version that is not published yet, so changes before this revision need no
        notification."""

    @property
    def is_up_to_date(self) -> bool:
        """Whether nothing is pending and the told version is the present one."""
        return self.due == NEVER and not self.awaited_revision and self.is_told_current

    @property
    def is_told_current(self) -> bool:
        """Whether the told version and the latest one have the same digest. There may have been others in between."""
        return self.told is not None and self.told.digest == self.latest.digest


class Mailbox:
    """The entries of one subscriber, and the order of those that are pending."""

    __slots__ = ("_queues", "entries")

    def __init__(self) -> None:
        self.entries: dict[Topic, MailboxEntry] = {}
        self._queues: dict[Priority, dict[Topic, MailboxEntry]] = {}
        """The pending entries. A topic that changes again keeps its place."""

    def add(
        self,
        notification: Notification,
        previous: Version,
        settings: DeliverySettings,
        filter: Filter | None,
        now: float,
    ) -> float:
        """Add a change of a topic. Return when the topic is due, or `NEVER`."""
        topic = notification.topic
        entry = self.entries.get(topic)
        if entry is None:
            entry = self.entries[topic] = MailboxEntry(previous, previous.revision, notification.version)
        elif entry.is_up_to_date:
            entry.told, entry.since = previous, previous.revision
        entry.latest = notification.version
        if entry.awaited_revision:
            if notification.version.revision < entry.awaited_revision:
                self.suppress(topic, entry, now)
                return NEVER
            entry.awaited_revision, entry.since = 0, UNKNOWN_REVISION
        if not isinstance(topic, Feature):
            # A subscriber that has to refetch must not take the last change for all changes.
            entry.notification = notification.as_incomplete() if entry.since < 0 else notification
        elif (
            filter is not None
            and entry.due == NEVER
            and entry.since >= 0  # otherwise it has to refetch, whatever this change is
            and notification.complete  # likewise
            and not any(map(filter.passes, notification.changes))
        ):
            self.suppress(topic, entry, now)
            return NEVER
        return self._schedule(topic, entry, settings, now)

    def add_missed(
        self, notification: Notification, told: Version | None, settings: DeliverySettings, now: float
    ) -> None:
        """Add a topic that a returning subscriber has missed. Only the minimal interval delays it."""
        topic = notification.topic
        before = self.entries.get(topic)
        entry = MailboxEntry(told, notification.since, notification.version)
        if before is not None:
            self.drop(topic)
            entry.not_before = before.not_before
        self.entries[topic] = entry
        if not isinstance(topic, Feature):
            entry.notification = notification
        is_urgent = self._queue(topic, entry, settings, now) is Priority.URGENT
        entry.due = now if is_urgent else max(now, entry.not_before)

    def wait_for_revision(self, topic: Topic, told: Version, revision: int) -> None:
        """Ignore the changes before a revision, because the subscriber knows a version that is not published yet."""
        self.drop(topic)
        entry = self.entries[topic] = MailboxEntry(told, told.revision, told)
        entry.awaited_revision = revision

    def merge_contents(self, notification: Notification, settings: DeliverySettings, now: float) -> None:
        """Replace all pending contents by one notification of the list of resources."""
        for topic in [topic for topic in self.entries if not isinstance(topic, Feature)]:
            self.drop(topic)
        self.add_missed(notification, None, settings, now)

    def mark_current(self, topic: Topic, version: Version) -> None:
        """Record that the subscriber has this version."""
        entry = self.entries.get(topic)
        if entry is not None:
            entry.told = version

    def take(self, now: float, is_muted: IsMuted | None) -> tuple[Topic, MailboxEntry] | None:
        """Return the next topic that is due. The caller then calls `mark_told` or `suppress`."""
        for priority in sorted(self._queues):
            for topic, entry in self._queues[priority].items():
                if entry.due <= now and not is_topic_muted(is_muted, topic):
                    entry.pending_since = max(entry.pending_since, entry.due)
                    self._unqueue(topic)
                    return topic, entry
        return None

    def mark_told(self, topic: Topic, entry: MailboxEntry, settings: DeliverySettings, now: float) -> None:
        """Drop a topic whose latest version was delivered, or keep it until its minimal interval is over."""
        if settings.min_interval > 0:
            entry.told, entry.not_before = entry.latest, now + settings.min_interval
        else:
            del self.entries[topic]

    def suppress(self, topic: Topic, entry: MailboxEntry, now: float) -> None:
        """Skip the changes so far without a notification. `told` stays the same, and only later changes count."""
        entry.since = entry.latest.revision
        if entry.is_up_to_date and entry.not_before <= now:
            del self.entries[topic]

    def restart_latency(self, now: float) -> None:
        """Measure the latency of pending topics from now on, because the subscriber was absent until now."""
        for entry in self.entries.values():
            entry.pending_since = max(entry.pending_since, now)

    def has_room(self, topic: Topic, settings: DeliverySettings) -> bool:
        """Return whether a topic can be added. If needed, drop an entry that only the minimal interval keeps."""
        if topic in self.entries or len(self.entries) < settings.max_pending:
            return True
        kept = next((topic for topic, entry in self.entries.items() if entry.is_up_to_date), None)
        if kept is not None:
            del self.entries[kept]
        return kept is not None

    def is_pending(self, topic: Topic, is_muted: IsMuted | None = None) -> bool:
        entry = self.entries.get(topic)
        return entry is not None and entry.due != NEVER and not is_topic_muted(is_muted, topic)

    def count_pending(self, is_muted: IsMuted | None) -> int:
        return sum(self.is_pending(topic, is_muted) for topic in tuple(self.entries))

    def drop(self, topic: Topic) -> None:
        if self.entries.pop(topic, None) is not None:
            self._unqueue(topic)

    def known_versions(self) -> dict[Topic, Version | None]:
        """Return for each entry the version from which the subscriber can resume: the told version, or the latest if
        its filter excluded the changes since."""
        return {
            topic: entry.told if entry.due != NEVER or entry.awaited_revision else entry.latest
            for topic, entry in self.entries.items()
        }

    def next_due(self, now: float, is_muted: IsMuted | None) -> float:
        """Return when the next topic is due, or an entry can be dropped because its minimal interval is over."""
        soonest = NEVER
        for topic, entry in list(self.entries.items()):
            if entry.due != NEVER:
                if entry.due < soonest and not is_topic_muted(is_muted, topic):
                    soonest = entry.due
            elif entry.is_up_to_date:
                if entry.not_before <= now:
                    del self.entries[topic]
                else:
                    soonest = min(soonest, entry.not_before)
        return soonest

    def _schedule(self, topic: Topic, entry: MailboxEntry, settings: DeliverySettings, now: float) -> float:
        if self._queue(topic, entry, settings, now) is Priority.URGENT:
            entry.due = now
        elif settings.quiet_gap:
            due = min(now + settings.quiet_gap, entry.pending_since + settings.longest_wait)
            entry.due = max(due, entry.not_before)
        else:
            # From the oldest change: without a gap, further changes must not postpone the delivery.
            entry.due = max(entry.pending_since, entry.not_before)
        return entry.due

    def _queue(self, topic: Topic, entry: MailboxEntry, settings: DeliverySettings, now: float) -> Priority:
        priority = settings.priority(topic)
        self._queues.setdefault(priority, {})[topic] = entry
        entry.pending_since = min(entry.pending_since, now) if entry.due != NEVER else now
        return priority

    def _unqueue(self, topic: Topic) -> None:
        for priority, queue in self._queues.items():
            if (entry := queue.pop(topic, None)) is not None:
                entry.due = NEVER
                if not queue:
                    del self._queues[priority]
                return


def is_topic_muted(is_muted: IsMuted | None, topic: Topic) -> bool:
    """Call a mute predicate. If it fails, the topic is muted for now; it stays pending, so nothing is lost."""
    if is_muted is None:
        return False
    try:
        return is_muted(topic)
    except Exception:  # the user's function
        logger.exception("a mute predicate failed on %s; the topic is muted for now", topic_name(topic))
        return True
