"""One recorded client: the topics that it watches, and the notifications that it got and the fetches that it made."""

from __future__ import annotations

from collections import deque

from tidings.console.change import Delivery, PublishedChange
from tidings.core.model import Topic
from tidings.core.subscriber import ConnectionKind, Subscriber
from tidings.server.client_identity import ClientIdentity

__all__ = ["MAX_FETCHES", "RecordedClient", "Watch", "WatchedKey"]

_MAX_ENDED = 100
"""Subscriptions of one client that are kept after they have ended."""
MAX_FETCHES = 32
"""Fetches of one topic by one client."""


class WatchedKey:
    """A feature, URI or pattern that is watched."""

    __slots__ = ("count", "last", "unable", "watchers")

    def __init__(self) -> None:
        self.watchers = 0
        self.unable = 0
        """The watchers that fetch nothing."""
        self.count = 0
        """The publications that reached all watchers of this key, and only these."""
        self.last: PublishedChange | None = None
        """The last of them."""


class Watch:
    __slots__ = ("count", "since")

    def __init__(self, since: int, count: int) -> None:
        self.since = since
        """The number of the last change before the subscription."""
        self.count = count


class RecordedClient:
    """One subscriber: a client's stream or session, a webhook, or a callback."""

    __slots__ = (
        "base",
        "closed",
        "connected",
        "ended",
        "fetches",
        "id",
        "identity",
        "is_authorized",
        "kind",
        "label",
        "last",
        "last_fetched",
        "pending",
        "sent",
        "subscriber",
        "suppressed",
        "watches",
    )

    def __init__(self, id: int, subscriber: Subscriber, connected: float) -> None:
        self.id = id
        self.subscriber: Subscriber | None = subscriber
        """None after it was closed."""
        self.label = subscriber.label
        self.kind: ConnectionKind = subscriber.kind
        self.is_authorized = subscriber.is_authorized
        self.identity = ClientIdentity()
        self.connected = connected
        self.closed: str | None = None
        """The reason for which it was closed."""
        self.watches: dict[Topic, Watch] = {}
        self.ended: deque[tuple[Topic, int, int]] = deque(maxlen=_MAX_ENDED)
        """Subscriptions that have ended: the topic, and the numbers of the last changes before and in it."""
        self.base = 0
        """Notifications, beside those that the counts of the watched keys include."""
        self.suppressed = 0
        self.pending: dict[Topic, tuple[PublishedChange, Delivery]] = {}
        """The newest change of each topic that is in its mailbox."""
        self.sent: dict[Topic, tuple[PublishedChange, Delivery]] = {}
        """Those that were passed on and not confirmed yet."""
        self.last: tuple[float, float] | None = None
        """Time and latency of a notification, unless the last publication of a watched key is newer."""
        self.fetches: dict[Topic, deque[tuple[float, int]]] = {}
        """Time and revision of the fetches that got something new."""
        self.last_fetched: dict[Topic, float] = {}

    @property
    def can_fetch(self) -> bool:
        """Whether its fetches can be seen: it has requests of its own."""
        return self.kind.transport == "http"

    def was_watching(self, change: PublishedChange) -> bool:
        """Return whether the client had to be told of a change."""
        for key in change.keys:
            watch = self.watches.get(key)
            is_watched = watch is not None and watch.since < change.id
            if is_watched or any(topic == key and since < change.id <= until for topic, since, until in self.ended):
                is_exact = key == change.topic or self.is_authorized is None
                return is_exact or (self.is_authorized is not None and self.is_authorized(str(change.topic)))
        return False

    def first_fetch(self, change: PublishedChange) -> tuple[float, bool]:
        """Return when the client first got this change, and whether that is known. The time is 0 for never."""
        fetches = self.fetches.get(change.topic) or deque[tuple[float, int]]()
        found = next((time for time, revision in fetches if revision >= change.version.revision), 0.0)
        is_first = bool(fetches) and fetches[0][1] >= change.version.revision
        return found, not (is_first and len(fetches) == MAX_FETCHES)
