"""Which events told a legacy session of what, so that one whose stream broke can say how far it has read.

Not a queue, and nothing is replayed: of each topic only the last few versions that were written are kept. What a client
missed is told as it is now.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tidings.core.model import Notification, Operation, Topic, Version

__all__ = ["Sent"]

_PREFIX = b"tidings-"
"""What our event ids start with. Others are an event store's, if there is one, and then its own business."""

_MOST_TOPICS = 1_000
"""Of one session; the one longest unchanged is forgotten first, and then counts as read. Only a subscription to a
pattern can reach it."""

_MOST_EVENTS = 4
"""Of one topic. A client that missed more of it is told all there is to know."""


class _Event(NamedTuple):
    number: int
    version: Version
    """What the client knows once it has read this event."""
    is_end: bool
    """Whether a subscription to just this URI ended with it, because the resource is gone."""


class Sent:
    """The events of one session, on however many streams."""

    __slots__ = ("_events", "count")

    def __init__(self) -> None:
        self.count = 0
        self._events: dict[Topic, deque[_Event]] = {}

    def note(self, notification: Notification, *, is_watched: bool) -> bytes:
        """The line with the id of the event that is about to be written. `is_watched`: by a subscription to just it."""
        self.count += 1
        topic = notification.topic
        events = self._events.pop(topic, None) or deque(maxlen=_MOST_EVENTS)
        if not events or events[-1].version.revision != notification.since:
            # It knew something that no event said: what was there when it subscribed.
            events.append(_Event(events[-1].number if events else 0, _version_before(notification), False))
        is_deletion = bool(notification.changes) and notification.changes[-1].operation is Operation.DELETED
        events.append(_Event(self.count, notification.version, is_deletion and is_watched))
        self._events[topic] = events
        if len(self._events) > _MOST_TOPICS:
            del self._events[next(iter(self._events))]
        return self.id_line

    @property
    def id_line(self) -> bytes:
        """Of the last event, as it stands in one."""
        return b"id: %s%d\r\n" % (_PREFIX, self.count)

    def missed(self, read: int) -> tuple[dict[Topic, Version | None], list[str]]:
        """For a client that has read no further than an event: what it knows of the topics that it missed something
        of, and the URIs whose end it has missed."""
        told: dict[Topic, Version | None] = {}
        ended: list[str] = []
        for topic, events in self._events.items():
            if events[-1].number > read:
                told[topic] = next((event.version for event in reversed(events) if event.number <= read), None)
                if not isinstance(topic, str) or not any(event.is_end for event in events if event.number > read):
                    continue
                ended.append(topic)
        return told, ended

    def forget(self, topic: Topic) -> None:
        """The client no longer wants to know."""
        self._events.pop(topic, None)

    def forget_all(self) -> None:
        """The client begins anew. The numbers go on: it may still hold one."""
        self._events.clear()

    def read(self, event_id: bytes) -> int | None:
        """The event that a `Last-Event-ID` names; None if that is none of this session's."""
        number = event_id.removeprefix(_PREFIX)
        if number == event_id or not number.isdigit() or len(number) >= 20 or int(number) > self.count:
            return None
        return int(number)


def _version_before(notification: Notification) -> Version:
    for change in notification.changes:
        if change.previous.revision == notification.since:
            return change.previous
    return Version(notification.since, "")
