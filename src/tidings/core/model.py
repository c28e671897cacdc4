"""The words of Tidings as values: frozen, without I/O and without behaviour that needs a clock.

A *topic* is either a `Feature` (a list) or the URI of a resource (its content). The two never compare equal, not even
for a resource whose URI is the text "tools": `Feature` is deliberately no `str`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tidings.core.redact import change_name
from tidings.errors import InvalidFeature

__all__ = [
    "Change",
    "Feature",
    "Item",
    "Notification",
    "Operation",
    "Priority",
    "Reason",
    "Topic",
    "Version",
    "is_unicode",
    "operation",
    "topic_named",
]


class Feature(Enum):
    """A list that a server offers. Resource templates belong to `RESOURCES`."""

    TOOLS = "tools"
    PROMPTS = "prompts"
    RESOURCES = "resources"

    def __init__(self, name: Any) -> None:
        self.singular = name[:-1]
        """The member of a notification's params that holds one item: `tool`, `prompt` or `resource`."""
        self.method = f"notifications/{name}/list_changed"
        self.key_field = "uri" if name == "resources" else "name"
        """What tells the items of this list apart on the wire."""

    # Enum hashes by name through a Python call; members are singletons, and topics are hashed on every fan-out.
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> Feature:
        raise InvalidFeature(f"there is no feature {value!r}; there are {', '.join(each.value for each in cls)}")


Topic: TypeAlias = Feature | str


def topic_named(name: Topic) -> Topic:
    """The feature of that name, if there is one."""
    return next((feature for feature in Feature if feature.value == name), name)


class Operation(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    UPDATED = "updated"
    DELETED = "deleted"
    """Of a resource's content only: the resource is gone, whether or not it was listed."""


class Priority(IntEnum):
    """The order in which one subscriber's pending topics are told. Smaller goes first."""

    URGENT = 0
    """Passes the rate limit and the quiet gap too."""
    HIGH = 1
    NORMAL = 2
    LOW = 3


class Reason(StrEnum):
    """Why a subscriber was closed, or a subscription ended."""

    UNSUBSCRIBED = "unsubscribed"
    EXPIRED = "expired"
    """Its time to live was over."""
    DELETED = "deleted"
    """The resource is gone, and the subscriber was told so."""
    DISCONNECTED = "disconnected"
    COLLECTED = "collected"
    """Nobody refers to the in-process subscriber any more."""
    OVERFLOW = "overflow"
    """More topics were pending than `Policy.max_pending` allows: the client must come back and refetch."""
    REPLACED = "replaced"
    """Its client put something else in its place: another connection of the same durable subscription, or another
    request on this one. Or it removed that subscription."""
    SLOW = "slow"
    SHUTDOWN = "shutdown"


class Version(NamedTuple):
    """What a topic is now: a revision that only grows, and the digest of the content."""

    revision: int
    digest: str


class Item(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One definition of the protocol (a tool, a prompt, a resource, a template) as its JSON text.

    Bytes rather than a dict: nobody can change an item behind the catalog's back, and frames copy it as it stands.
    """

    feature: Feature
    key: str
    json: bytes
    hash: bytes

    @property
    def definition(self) -> dict[str, Any]:
        """A fresh copy of the definition."""
        decoded: dict[str, Any] = msgspec.json.decode(self.json)
        return decoded

    @property
    def digest(self) -> str:
        return self.hash[:16].hex()


class Change(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One operation on one item (or on one resource's content), and the version of the topic that it led to."""

    topic: Topic
    operation: Operation
    key: str
    version: Version
    previous: Version
    time: float
    origin: str
    item: Item | None = None
    """The item afterwards; None when it was removed, and for changes of content."""
    before: Item | None = None
    """The item before; None when it was added, and for changes of content."""
    metadata: Mapping[str, Any] | None = None
    """What the server passed to `resources.updated()`; it means nothing to Tidings."""
    trace: Mapping[str, str] | None = None
    """The trace of the call that caused it, in W3C's words: `traceparent`, and `tracestate` if there is one."""

    @property
    def revision(self) -> int:
        return self.version.revision

    @property
    def digest(self) -> str:
        return self.version.digest


def operation(before: Item | None, after: Item | None) -> Operation:
    """What leads from one state of an item to the other."""
    if before is None:
        return Operation.ADDED
    return Operation.REMOVED if after is None else Operation.UPDATED


class Notification(msgspec.Struct, eq=False):
    """What a subscriber is told of one topic: all that differs between the version it knew and the one that is now.

    Subscribers that missed the same share one object, and with it the encoded frames.
    """

    topic: Topic
    version: Version
    changes: tuple[Change, ...]
    """The net changes: an item that came and went within one notification is not in it."""
    since: int
    """The revision after which the changes begin."""
    complete: bool = True
    """False when the journal no longer knew all changes: refetch."""
    trace: Mapping[str, str] | None = None
    """The trace that goes on in it: that of its last change."""
    frames: dict[Any, tuple[bytes, bytes]] = msgspec.field(default_factory=dict)
    """Encoded once per shape, by `tidings.core.frames`."""

    def __post_init__(self) -> None:
        if self.changes:
            self.trace = self.changes[-1].trace

    @property
    def method(self) -> str:
        return self.topic.method if isinstance(self.topic, Feature) else "notifications/resources/updated"

    def incomplete(self) -> Notification:
        """The same for one who missed more than is known."""
        return Notification(self.topic, self.version, self.changes, since=-1, complete=False)

    def __repr__(self) -> str:
        operations = ", ".join(f"{change.operation} {change_name(change)!r}" for change in self.changes[:4])
        return f"<Notification {self.method} r{self.version.revision}: {operations or 'refetch'}>"


def is_unicode(text: str) -> bool:
    """Whether there is a UTF-8 form: half of a surrogate pair has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
