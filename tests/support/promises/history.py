"""A recorded history: the events of topics and subscribers in the order observed, and the error for a broken promise.

`Recorder(hub)` records a history inside a process; clients of a real server record it from messages
(`Told.from_message`). A client can receive notifications from the request of a subscription until the server confirms
its end. Record a change before its effects can be observed, and before the request of a subscriber that already knows
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from tidings.core.filters import Filter
from tidings.core.model import Change, Feature, Operation, Topic, Version
from tidings.errors import TidingsError

_CHANGE_KEY: Final = "dev.tidings/change"
"""A copy of the constant in `tidings.core.frames`, so that the checks fail if the wire format changes."""

_MAX_SHOWN_EVENTS: Final = 20
"""The number of events that a failure shows. The cause is nearly always among the last ones."""


@dataclass(frozen=True, slots=True)
class Subscribed:
    """A subscriber requested features, URIs and patterns. Notifications of them are permitted from now on."""

    subscriber: str
    topics: tuple[Topic, ...]
    told: Mapping[Topic, Version | None] = field(default_factory=dict)
    """The cursor: the version of each topic that the subscriber was told last, None for never."""
    filter: Filter | None = None
    subresources: bool = True
    """`Policy.subresources` of the server."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The server granted all requests so far. Notifications of them are required from now on.

    Without this event, a request counts as granted immediately, as it is inside a process.
    """

    subscriber: str


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    """The server confirmed the end of subscriptions. No notification of them may follow."""

    subscriber: str
    topics: tuple[Topic, ...] = ()
    """Empty for all topics."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A topic has a new version. The versions at the start of a history are recorded in the same way."""

    topic: Topic
    version: Version
    previous: Version | None = None
    operation: Operation | None = None
    key: str = ""
    before: str | None = None
    """The digest of the item before the change, None if there was none. The checks need it only for filters."""
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
class Fetched:
    """A client fetched a version of a topic: a list, or the content of a resource.

    The server does not know which client fetched it. So any subscriber may have this version, and the server may send
    it the last version again.
    """

    topic: Topic
    version: Version | None = None
    """A version with an empty digest means any version up to that revision. None means that the version is unknown:
    then the server may send each subscriber one more notification, but need not."""


@dataclass(frozen=True, slots=True)
class FetchStarted:
    """A fetch of a topic has started. It may return this version or any later one until `FetchEnded`.

    Record the returned version as `Fetched` before `FetchEnded`.
    """

    topic: Topic
    revision: int = 0
    """The revision at the start, 0 if unknown. Several fetches with the same revision may end in any order."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A fetch has ended, with or without a result.

    A client may receive a result before notifications that were sent earlier. It records this event when it has
    received all notifications that were sent during the fetch.
    """

    topic: Topic
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """A subscriber received a notification."""

    subscriber: str
    topic: Topic
    version: Version | None = None
    """None if the notification has no version (`Policy.detail` is "none"). It counts as the newest version so far."""
    changes: tuple[tuple[Operation, str], ...] | None = None
    """Operations and keys, None if unknown."""
    is_complete: bool = True
    """False if the notification does not contain all changes, because the server no longer has them."""

    @classmethod
    def from_message(cls, subscriber: str, message: Mapping[str, Any]) -> Told | None:
        """Read a JSON-RPC message. Return None if it is not a notification of a change."""
        params: Mapping[str, Any] = message.get("params") or {}
        topic = _topic_of(message.get("method"), params)
        if topic is None:
            return None
        summary = (params.get("_meta") or {}).get(_CHANGE_KEY)
        if summary is None:
            return cls(subscriber, topic)
        version = Version(summary["revision"], summary["digest"])
        entries = [summary] if "operation" in summary else summary.get("changes", ())
        changes = tuple((Operation(entry["operation"]), entry.get("name", entry.get("uri", ""))) for entry in entries)
        return cls(subscriber, topic, version, changes, summary.get("complete", True))


@dataclass(frozen=True, slots=True)
class Muted:
    """A subscriber must not be notified of these topics, for example because of its protocol version."""

    subscriber: str
    topics: tuple[Topic, ...] = ()
    """Empty for all topics."""


@dataclass(frozen=True, slots=True)
class Unmuted:
    """The end of `Muted`."""

    subscriber: str
    topics: tuple[Topic, ...] = ()
    """Empty for all topics."""


@dataclass(frozen=True, slots=True)
class Closed:
    subscriber: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MailboxSize:
    """The number of pending topics of a subscriber at this moment."""

    subscriber: str
    pending: int
    max_pending: int | None = None
    """`Policy.max_pending`, if known."""


TopicEvent: TypeAlias = Changed | Fetched | FetchStarted | FetchEnded
"""An event of a topic, which has no subscriber."""

SubscriberEvent: TypeAlias = Subscribed | Acknowledged | Unsubscribed | Told | Muted | Unmuted | Closed | MailboxSize

Event: TypeAlias = TopicEvent | SubscriberEvent


class History:
    """Events in the order in which they were observed."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def record(self, event: Event) -> None:
        self.events.append(event)

    def by_subscriber(self) -> dict[str, list[tuple[int, SubscriberEvent]]]:
        """Return the events of each subscriber, with their indexes, in the order of the first events."""
        found: dict[str, list[tuple[int, SubscriberEvent]]] = {}
        for index, event in enumerate(self.events):
            if not isinstance(event, TopicEvent):
                found.setdefault(event.subscriber, []).append((index, event))
        return found

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


class PromiseBroken(TidingsError, AssertionError):
    """A history breaks a promise. The message names promise, subscriber and topic, and shows the last events."""

    def __init__(
        self,
        promise: str,
        history: History,
        subscriber: str,
        topic: Topic | None,
        reason: str,
        last: int | None = None,
    ) -> None:
        """`last` is the index of the event that breaks the promise; None if the end of the history does."""
        self.promise = promise
        self.subscriber = subscriber
        self.topic = topic
        end = len(history) if last is None else last + 1
        self.events = tuple((index, event) for index, event in enumerate(history.events[:end]) if self._concerns(event))
        name = topic.value if isinstance(topic, Feature) else topic
        lines = [f"  {index:>5}  {event}" for index, event in self.events[-_MAX_SHOWN_EVENTS:]]
        heading = f"{promise}: {subscriber}" + (f", {name}" if name is not None else "") + f": {reason}"
        super().__init__("\n".join([heading, *lines]))

    def _concerns(self, event: Event) -> bool:
        """Return whether an event concerns the subscriber, and the topic if there is one."""
        topic = self.topic
        if topic is not None and (isinstance(event, MailboxSize) or getattr(event, "topic", topic) != topic):
            return False
        return isinstance(event, TopicEvent) or event.subscriber == self.subscriber


def _topic_of(method: object, params: Mapping[str, Any]) -> Topic | None:
    if method in ("notifications/resources/updated", "notifications/resources/deleted"):
        return str(params["uri"])
    return next((feature for feature in Feature if method == f"notifications/{feature.value}/list_changed"), None)
