"""The value types of Tidings. They do no I/O and read no clock.

A *topic* is either a `Feature` (a list) or the URI of a resource (its content). The two never compare equal, not even
for a resource whose URI is the text "tools": for this reason, `Feature` is not a `str`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tidings.core.redact import change_name
from tidings.errors import InvalidFeature, InvalidItem

__all__ = [
    "CUT_OFF",
    "UNKNOWN_REVISION",
    "UPDATED_METHOD",
    "Change",
    "Feature",
    "Item",
    "Notification",
    "Operation",
    "Priority",
    "Reason",
    "Topic",
    "Version",
    "item_key",
    "operation_between",
    "topic_named",
    "topics_json",
]

UNKNOWN_REVISION = -1
"""The revision of a client about which nothing is known. It must refetch."""

UPDATED_METHOD = "notifications/resources/updated"
"""The notification of a content. That of a list is `Feature.method`."""


class Feature(Enum):
    """A list of a server. Resource templates belong to `RESOURCES`."""

    TOOLS = "tools"
    PROMPTS = "prompts"
    RESOURCES = "resources"

    def __init__(self, name: Any) -> None:
        self.singular = name[:-1]
        """The name of one item in the params of a notification: `tool`, `prompt` or `resource`."""
        self.method = f"notifications/{name}/list_changed"
        self.key_field = "uri" if name == "resources" else "name"
        """The field that identifies an item of this list on the wire."""

    # Faster than the hash of Enum, which calls Python code; topics are hashed for every delivery.
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> Feature:
        raise InvalidFeature(f"there is no feature {value!r}; there are {', '.join(feature.value for feature in cls)}")


Topic: TypeAlias = Feature | str


def topics_json(features: Iterable[Feature], uris: Iterable[str]) -> dict[str, Any]:
    """Return topics as in the `notifications` member of a listen request and of its acknowledgement."""
    topics: dict[str, Any] = {f"{feature.value}ListChanged": True for feature in features}
    if watched := list(uris):
        topics["resourceSubscriptions"] = watched
    return topics


def topic_named(name: Topic) -> Topic:
    """Return the feature with a name, or else the name itself, which is a URI."""
    return next((feature for feature in Feature if feature.value == name), name)


def item_key(feature: Feature, definition: Mapping[str, Any]) -> str:
    """Return the value that identifies an item of a list: its name, or the URI or URI template of a resource."""
    key = definition.get(feature.key_field)
    if key is None and feature is Feature.RESOURCES:
        key = definition.get("uriTemplate")
    if not isinstance(key, str):
        fields = "uri or uriTemplate" if feature is Feature.RESOURCES else "name"
        raise InvalidItem(f"{feature.value}: the {fields} of an item must be a string; got {definition!r:.80}")
    return key


class Operation(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    UPDATED = "updated"
    DELETED = "deleted"
    """Only of the content of a resource: the resource is gone, whether or not it was listed."""


class Priority(IntEnum):
    """The order in which the pending topics of a subscriber are delivered. Smaller goes first."""

    URGENT = 0
    """Ignores the minimal interval and the quiet gap."""
    HIGH = 1
    NORMAL = 2
    LOW = 3


class Reason(StrEnum):
    """The reason for which a subscriber was closed or a subscription ended."""

    UNSUBSCRIBED = "unsubscribed"
    EXPIRED = "expired"
    """Its time to live was over, or the token that opened its stream expired."""
    DELETED = "deleted"
    """The resource is gone, and the subscriber was told."""
    DISCONNECTED = "disconnected"
    COLLECTED = "collected"
    """The listener of an in-process subscriber was garbage-collected."""
    OVERFLOW = "overflow"
    """More topics were pending than `Policy.max_pending` allows. The client must reconnect and refetch."""
    REPLACED = "replaced"
    """Its client replaced it by another connection of the same durable subscription or by another request, or removed
    the durable subscription."""
    REVOKED = "revoked"
    """Its client may no longer watch a topic, or the server ended its streams with `live.end_streams()`."""
    SLOW = "slow"
    SHUTDOWN = "shutdown"


CUT_OFF = frozenset({Reason.OVERFLOW, Reason.SLOW})
"""The reasons for which the server closes a subscriber that its client did not close."""


class Version(NamedTuple):
    """The version of a topic: a revision that only grows, and the digest of the content."""

    revision: int
    digest: str


class Item(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The definition of a tool, prompt, resource or template, as JSON.

    Bytes and not a dict, so that it cannot be changed, and frames can copy it.
    """

    feature: Feature
    key: str
    json: bytes
    hash: bytes

    @property
    def definition(self) -> dict[str, Any]:
        """A new copy of the definition."""
        decoded: dict[str, Any] = msgspec.json.decode(self.json)
        return decoded

    @property
    def digest(self) -> str:
        return self.hash[:16].hex()


class Change(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One operation on one item, or on the content of one resource, and the resulting version of the topic.

    A change of a list without any item says only that the list differs: see `is_unknown`."""

    topic: Topic
    operation: Operation
    key: str
    version: Version
    previous: Version
    time: float
    item: Item | None = None
    """The item afterwards; None when it was removed, and for changes of content."""
    before: Item | None = None
    """The item before; None when it was added, and for changes of content."""
    metadata: Mapping[str, Any] | None = None
    """The metadata that the server passed to `resources.updated()`."""
    trace: Mapping[str, str] | None = None
    """The W3C trace context of the call that caused it: `traceparent`, and `tracestate` if there is one."""

    @property
    def revision(self) -> int:
        return self.version.revision

    @property
    def digest(self) -> str:
        return self.version.digest

    @property
    def is_unknown(self) -> bool:
        """Whether a list changed to a content that the server could not read."""
        return self.item is None and self.before is None and isinstance(self.topic, Feature)


def operation_between(before: Item | None, after: Item | None) -> Operation:
    """Return the operation that leads from one state of an item to another."""
    if before is None:
        return Operation.ADDED
    return Operation.REMOVED if after is None else Operation.UPDATED


class Notification(msgspec.Struct, eq=False):
    """The changes of one topic between the version that a subscriber knew and the present one.

    Subscribers that missed the same changes share one object and its encoded frames.
    """

    topic: Topic
    version: Version
    changes: tuple[Change, ...]
    """The net changes: an item that was added and removed is not included."""
    since: int
    """The revision after which the changes begin."""
    complete: bool = True
    """False if the journal no longer had all changes: the client must refetch."""
    trace: Mapping[str, str] | None = None
    """The trace of its last change."""
    frames: dict[Any, tuple[bytes, bytes]] = msgspec.field(default_factory=dict)
    """The encoded frames by format; see `tidings.core.frames`."""

    def __post_init__(self) -> None:
        if self.changes:
            self.trace = self.changes[-1].trace

    @property
    def method(self) -> str:
        return self.topic.method if isinstance(self.topic, Feature) else UPDATED_METHOD

    @property
    def is_deletion(self) -> bool:
        """Whether it says that a resource is gone."""
        return bool(self.changes) and self.changes[-1].operation is Operation.DELETED

    def as_incomplete(self) -> Notification:
        """Return the same notification for a subscriber that missed more than the journal has."""
        return Notification(self.topic, self.version, self.changes, since=UNKNOWN_REVISION, complete=False)

    def __repr__(self) -> str:
        operations = ", ".join(f"{change.operation} {change_name(change)!r}" for change in self.changes[:4])
        return f"<Notification {self.method} r{self.version.revision}: {operations or 'refetch'}>"
