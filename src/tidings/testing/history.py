"""What happened, in the order in which it was seen: the events, and the failure that shows some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from tidings.core.mailbox import Filter
from tidings.core.model import Change, Feature, Operation, Topic, Version
from tidings.errors import TidingsError

__all__ = [
    "Acknowledged",
    "Changed",
    "Closed",
    "Event",
    "FetchEnded",
    "FetchStarted",
    "Fetched",
    "History",
    "MailboxSize",
    "Muted",
    "OfTopic",
    "PromiseBroken",
    "Subscribed",
    "Told",
    "Unmuted",
    "Unsubscribed",
]

_CHANGE_KEY: Final = "dev.tidings/change"
"""Said again, and not imported from `tidings.core.frames`: a check must notice when the wire says something else."""

_SHOWN_EVENTS: Final = 20
"""How much of a history a failure shows: what led to it is nearly always among the last few that concern it."""


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
class Fetched:
    """Somebody was shown a version of a topic: in a list, or in what was read of a resource. Who does not matter: any
    subscriber may hold it from then on, and is then told of the last version, even if that is what it was told before.
    """

    topic: Topic
    version: Version | None = None
    """With an empty digest where it may have been any one until that revision. None where it is not known at all: then
    everybody who was told before may be told once more, and nobody need be."""


@dataclass(frozen=True, slots=True)
class FetchStarted:
    """A fetch of a topic has started. Until `FetchEnded` it may return any version from this one on. The version that
    it returned in the end is recorded as `Fetched` before that."""

    topic: Topic
    revision: int = 0
    """At which it was begun, 0 where that is not known. Of answers that begin at the same one, any may end first."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """The end of `FetchStarted`, given or not. Then only what was recorded as `Fetched` counts; so a client, whom news
    may reach later than an answer that was given after them, records this when all that was told meanwhile has come."""

    topic: Topic
    revision: int = 0


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
class MailboxSize:
    """What a subscriber cost at that moment: the topics in its mailbox."""

    subscriber: str
    pending: int
    most: int | None = None
    """`Policy.max_pending`, where it is known."""


OfTopic: TypeAlias = Changed | Fetched | FetchStarted | FetchEnded
"""What happens to a topic, and to no subscriber."""

Event: TypeAlias = OfTopic | Subscribed | Acknowledged | Unsubscribed | Told | Muted | Unmuted | Closed | MailboxSize


class History:
    """Events in the order in which they were seen."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def record(self, event: Event) -> None:
        self.events.append(event)

    def subscribers(self) -> list[str]:
        """In the order of their first mention."""
        found = (event.subscriber for event in self.events if not isinstance(event, OfTopic))
        return list(dict.fromkeys(found))

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


def _topic_of(method: object, params: Mapping[str, Any]) -> Topic | None:
    if method in ("notifications/resources/updated", "notifications/resources/deleted"):
        return str(params["uri"])
    return next((feature for feature in Feature if method == f"notifications/{feature.value}/list_changed"), None)
