"""Event types: the changes of topics, which every server has, and the types that the server's own code declares."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError

from tidings.core.model import Feature, Topic
from tidings.errors import AlreadyExists, NotFound, TidingsError
from tidings.events import draft
from tidings.server.schema import find_schema_error, find_violation

__all__ = ["RESOURCE_UPDATED", "EventHook", "EventTopic", "EventType", "EventTypes", "feature_of", "make_type"]

EventHook: TypeAlias = Callable[[dict[str, Any]], Awaitable[None] | None]
"""Called with the arguments of a subscription."""

Payload = TypeVar("Payload", bound=type)

RESOURCE_UPDATED = "resource.updated"
_LIST_CHANGED = {f"{feature.value}.list_changed": feature for feature in Feature}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)

_CHANGE: dict[str, Any] = {
    "operation": {"enum": ["added", "removed", "updated", "deleted"]},
    "changes": {"type": "array", "items": {"type": "object"}, "description": "Several changes at once."},
    "truncated": {"type": "boolean", "description": "There were more changes: read the list again."},
    "_meta": {"type": "object", "description": "The names, revision and digest of the change: dev.tidings/change."},
}


class EventTopic(str):
    """The topic that `authorize` gets for an emitted event: its name, and the arguments of the subscription.

    Its text is `event:` and the name. So an `authorize` function that knows only URIs refuses it.
    """

    __slots__ = ("arguments", "name")

    name: str
    arguments: dict[str, Any]

    def __new__(cls, name: str, arguments: dict[str, Any]) -> EventTopic:
        topic = super().__new__(cls, f"event:{name}")
        topic.name, topic.arguments = name, arguments
        return topic


@dataclasses.dataclass(frozen=True, slots=True)
class EventType:
    name: str
    description: str | None
    arguments: Mapping[str, Any]
    """The JSON schema of the arguments of a subscription."""
    payload: Mapping[str, Any]
    """The JSON schema of the data of an event."""
    on_first: EventHook | None = None
    """Called when the first client subscribes with these arguments."""
    on_last: EventHook | None = None
    """Called when the last subscription with these arguments ends."""

    @property
    def is_topic(self) -> bool:
        """Whether it reports the change of a topic. Otherwise, the server's own code emits it."""
        return self.name == RESOURCE_UPDATED or self.name in _LIST_CHANGED

    def topic(self, arguments: dict[str, Any]) -> Topic:
        """Return the topic that `authorize` gets."""
        if self.name == RESOURCE_UPDATED:
            return str(arguments["uri"])
        return _LIST_CHANGED.get(self.name) or EventTopic(self.name, arguments)

    def as_json(self) -> dict[str, Any]:
        return draft.event_type(self.name, self.description, self.arguments, self.payload)


def feature_of(name: str) -> Feature | None:
    """Return the list whose changes an event type reports."""
    return _LIST_CHANGED.get(name)


class EventTypes:
    """The event types of one server."""

    def __init__(self) -> None:
        self._types = {each.name: each for each in _topic_types()}

    def __iter__(self) -> Any:
        return iter(list(self._types.values()))

    def get(self, name: str) -> EventType | None:
        return self._types.get(name)

    def own(self, name: str) -> EventType:
        """Return a declared type. Raise if there is none."""
        found = self._types.get(name)
        if found is None:
            hint = 'declare it with live.event("…"), or in events/NAME.meta.json of a workspace'
            raise NotFound(f"there is no event type {name!r} to emit: {hint}")
        if found.is_topic:
            raise NotFound(f"there is no event type {name!r} to emit: the server emits it by itself")
        return found

    def declare(self, event: EventType, *, replaces: bool = False) -> None:
        """Add a type. Raise `TidingsError` if its name or a schema is invalid."""
        if not _NAME.fullmatch(event.name):
            raise TidingsError(
                f"{event.name!r:.140} is not the name of an event: it has 1 to 128 letters, digits and . _ / -"
            )
        if event.name in self._types and not (replaces and not self._types[event.name].is_topic):
            raise AlreadyExists(f"there is an event type {event.name!r} already; choose another name")
        for part, schema in (("arguments", event.arguments), ("payload", event.payload)):
            if (error := find_schema_error(schema)) is not None:
                raise TidingsError(f"the schema of the {part} of the event {event.name!r} is invalid: {error}")
            if schema.get("type") != "object":
                raise TidingsError(f"the {part} of the event {event.name!r} must be an object: set its type to object")
        try:
            msgspec.json.encode(event.as_json())
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise TidingsError(f"the type of the event {event.name!r} has no JSON form: {error}") from None
        self._types[event.name] = event

    def remove(self, name: str) -> None:
        """Remove a declared type. Its subscriptions stay, and get events again if the type is declared again."""
        if (found := self._types.get(name)) is not None and not found.is_topic:
            del self._types[name]


def make_type(
    name: str,
    *,
    description: str | None = None,
    arguments: Mapping[str, Any] | type | None = None,
    payload: Mapping[str, Any] | type | None = None,
    on_first: EventHook | None = None,
    on_last: EventHook | None = None,
) -> EventType:
    """Return a declared type. If `payload` is a class, its docstring is the default description."""
    if description is None and isinstance(payload, type):
        description = description_of(payload)
    return EventType(
        name,
        description,
        schema_of(arguments, NO_ARGUMENTS),
        schema_of(payload, ANY_PAYLOAD),
        on_first,
        on_last,
    )


def schema_of(given: Mapping[str, Any] | type | None, default: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a JSON schema: the given one, or the schema of a dataclass, a TypedDict or a pydantic model."""
    if given is None:
        return default
    if isinstance(given, Mapping):
        return given
    try:
        return TypeAdapter(given).json_schema(mode="serialization")
    except PydanticSchemaGenerationError as error:
        raise TidingsError(f"{given!r} has no JSON schema: {error}") from None


def description_of(payload: type) -> str | None:
    """Return the docstring of a class, unless `dataclass` generated it."""
    text = inspect.cleandoc(payload.__doc__ or "")
    return None if not text or text.startswith(f"{payload.__name__}(") else text


def check(value: Any, schema: Mapping[str, Any], what: str) -> None:
    """Raise `TidingsError` if a value violates a schema."""
    try:
        violation = find_violation(value, schema)
    except ValueError as error:
        raise TidingsError(f"{what}: the schema can't be used: {error}") from None
    if violation is not None:
        raise TidingsError(f"{what}: {violation}")


NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PAYLOAD: Mapping[str, Any] = {"type": "object"}


def _topic_types() -> list[EventType]:
    types = [
        EventType(
            name,
            f"The list of {feature.value} has changed.",
            NO_ARGUMENTS,
            {"type": "object", "properties": {**_CHANGE, feature.singular: {"type": "object"}}},
        )
        for name, feature in _LIST_CHANGED.items()
    ]
    uri = {"type": "string", "description": "The URI of a resource, or a pattern such as docs://*."}
    arguments = {"type": "object", "properties": {"uri": uri}, "required": ["uri"], "additionalProperties": False}
    content = {"uri": {"type": "string"}, "metadata": {"type": "object"}}
    payload = {"type": "object", "properties": {**_CHANGE, **content}, "required": ["uri"]}
    return [*types, EventType(RESOURCE_UPDATED, "The content of a resource has changed.", arguments, payload)]
