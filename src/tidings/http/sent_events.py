"""The events that were sent to a legacy session, so that a client whose stream broke can name the last one it read.

This is not a queue, and no event is replayed. It keeps the last few versions of each topic. A client that
missed some is notified of the present version.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tidings.core.model import Notification, Operation, Topic, Version

__all__ = ["SentEvents"]

_PREFIX = b"tidings-"
"""The prefix of the event ids of Tidings. Others belong to the event store of the server, if it has one."""

_MAX_TOPICS = 1_000
"""Topics of one session. The topic unchanged for longest is removed first, and then counts as read. Only a
subscription to a pattern can reach this limit."""

_MAX_EVENTS_PER_TOPIC = 4
"""A client that missed more events of a topic must fetch it again."""


class _Event(NamedTuple):
    number: int
    version: Version
    """The version that the client knows after it has read this event."""
    is_end: bool
    """Whether a subscription to this URI ended with the event, because the resource was deleted."""


class SentEvents:
    """The events of one session, on all of its streams."""

    __slots__ = ("_events", "count")

    def __init__(self) -> None:
        self.count = 0
        self._events: dict[Topic, deque[_Event]] = {}

    def add(self, notification: Notification, *, is_watched: bool) -> bytes:
        """Add the event that is sent next, and return the line with its id.

        `is_watched` says that the session has a subscription to the URI itself, and not only to a pattern."""
        self.count += 1
        topic = notification.topic
        events = self._events.pop(topic, None) or deque(maxlen=_MAX_EVENTS_PER_TOPIC)
        if not events or events[-1].version.revision != notification.since:
            # The client knew a version that no event had: the one when it subscribed.
            events.append(_Event(events[-1].number if events else 0, _version_before(notification), False))
        is_deletion = bool(notification.changes) and notification.changes[-1].operation is Operation.DELETED
        events.append(_Event(self.count, notification.version, is_deletion and is_watched))
        self._events[topic] = events
        if len(self._events) > _MAX_TOPICS:
            del self._events[next(iter(self._events))]
        return self.id_line

    @property
    def id_line(self) -> bytes:
        """The line with the id of the last event."""
        return b"id: %s%d\r\n" % (_PREFIX, self.count)

    def missed(self, read: int) -> tuple[dict[Topic, Version | None], list[str]]:
        """Return what a client missed after the event with this number.

        The first value has the last version that the client knows of each topic, the second the URIs whose end it
        missed."""
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
        """Remove the events of a topic, because its subscription ended."""
        self._events.pop(topic, None)

    def forget_all(self) -> None:
        """Remove all events, for a new handshake. The numbers continue, because the client may still have one."""
        self._events.clear()

    def find(self, event_id: bytes) -> int | None:
        """Return the number of the event that a `Last-Event-ID` names; None if it is not one of this session."""
        number = event_id.removeprefix(_PREFIX)
        if number == event_id or not number.isdigit() or len(number) >= 20 or int(number) > self.count:
            return None
        return int(number)


def _version_before(notification: Notification) -> Version:
    for change in notification.changes:
        if change.previous.revision == notification.since:
            return change.previous
    return Version(notification.since, "")
