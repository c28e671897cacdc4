"""One recorded client: the topics that it watches, its notifications and its fetches."""

from __future__ import annotations

from collections import deque

from tidings.console.change import ClientOutcome, PublishedChange
from tidings.core.model import Topic
from tidings.core.subscriber import ConnectionKind, Subscriber
from tidings.server.client_identity import ClientIdentity

__all__ = ["MAX_FETCHES", "RecordedClient", "Watch", "WatchedKey"]

_MAX_ENDED = 100
"""Ended subscriptions of one client that are kept."""
MAX_FETCHES = 32
"""Fetches of one topic by one client."""


class WatchedKey:
    """A feature, URI or pattern that is watched."""

    __slots__ = ("count", "last", "unable", "watchers")

    def __init__(self) -> None:
        self.watchers = 0
        self.unable = 0
        """The number of watchers whose fetches can't be seen."""
        self.count = 0
        """The number of publications that matched this key and no other one."""
        self.last: PublishedChange | None = None
        """The last of these publications."""


class Watch:
    """The subscription of one client to one key."""

    __slots__ = ("count", "since")

    def __init__(self, since: int, count: int) -> None:
        self.since = since
        """The number of the last change before the subscription."""
        self.count = count
        """The `WatchedKey.count` when the subscription began."""


class RecordedClient:
    """One subscriber: a client's stream or session, a webhook, or a callback."""

    __slots__ = (
        "closed",
        "connected",
        "count_offset",
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
        """Why it was closed; None while it is open."""
        self.watches: dict[Topic, Watch] = {}
        self.ended: deque[tuple[Topic, int, int]] = deque(maxlen=_MAX_ENDED)
        """Ended subscriptions: the key, the last change before the subscription, and the last change during it."""
        self.count_offset = 0
        """The difference between the notifications of this client and the counts of its watched keys."""
        self.suppressed = 0
        self.pending: dict[Topic, tuple[PublishedChange, ClientOutcome]] = {}
        """For each topic in its mailbox, the newest change."""
        self.sent: dict[Topic, tuple[PublishedChange, ClientOutcome]] = {}
        """For each topic, the change that was sent and that the receiver has not confirmed."""
        self.last: tuple[float, float] | None = None
        """The time and latency of its last notification. The last publication of a watched key may be newer."""
        self.fetches: dict[Topic, deque[tuple[float, int]]] = {}
        """The time and revision of each fetch that returned a newer revision than the one before."""
        self.last_fetched: dict[Topic, float] = {}

    @property
    def can_fetch(self) -> bool:
        """Whether the server can recognise the fetches of this client."""
        return self.kind.transport == "http"

    def was_watching(self, change: PublishedChange) -> bool:
        """Return whether the client watched the topic of a change when it was published."""
        for key in change.keys:
            watch = self.watches.get(key)
            is_watched = watch is not None and watch.since < change.id
            if is_watched or any(topic == key and since < change.id <= until for topic, since, until in self.ended):
                is_exact = key == change.topic or self.is_authorized is None
                return is_exact or (self.is_authorized is not None and self.is_authorized(str(change.topic)))
        return False

    def first_fetch(self, change: PublishedChange) -> tuple[float, bool]:
        """Return when the client first fetched this change (0 for never), and whether that is known.

        It is not known if older fetches were dropped.
        """
        fetches = self.fetches.get(change.topic) or deque[tuple[float, int]]()
        found = next((time for time, revision in fetches if revision >= change.version.revision), 0.0)
        is_first = bool(fetches) and fetches[0][1] >= change.version.revision
        return found, not (is_first and len(fetches) == MAX_FETCHES)
