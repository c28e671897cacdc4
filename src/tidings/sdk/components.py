"""The items of the high-level servers, `MCPServer` and FastMCP: made from functions, checked, copied and encoded.

Both keep their items as pydantic models, with the same names of fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from mcp_types import Tool
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from tidings.core.model import Feature
from tidings.errors import AlreadyExists, InvalidItem
from tidings.sdk.definitions import KEYS, encode, key_of

__all__ = [
    "ENCODE_ERRORS",
    "ComponentKinds",
    "already_exists",
    "check_component",
    "copy_component",
    "invalid_json",
    "is_same_component",
    "make_component",
]

ENCODE_ERRORS = (PydanticSerializationError, UnicodeError)
"""The errors of pydantic for a value without a JSON form."""

_FIELDS = {"inputSchema": "parameters", "outputSchema": "output_schema", "mimeType": "mime_type", "_meta": "meta"}
"""The fields of the protocol that have another name in the high-level servers."""

_CHANGEABLE = frozenset(
    {
        *("name", "uri", "uri_template", "title", "description", "parameters", "output_schema"),
        *("arguments", "mime_type", "annotations", "icons", "meta", "tags"),
    }
)


class ComponentKinds(NamedTuple):
    """The classes of a server's items, and the class of a resource that is made from a function."""

    tool: Any
    prompt: Any
    resource: Any
    template: Any
    function: Any

    def of(self, feature: Feature) -> tuple[type, ...]:
        if feature is Feature.RESOURCES:
            return (self.resource, self.template)
        return (self.tool if feature is Feature.TOOLS else self.prompt,)


def make_component(kinds: ComponentKinds, feature: Feature, thing: Any, options: dict[str, Any]) -> BaseModel:
    """Return the item to add: the given one, or one made from a function."""
    if isinstance(thing, kinds.of(feature)) and isinstance(thing, BaseModel):
        if options:
            raise InvalidItem(
                f"{feature.value}: {key_of(thing)!r} is an item already, and takes no {', '.join(options)}; "
                "add it and update it, or add a function"
            )
        return thing
    if isinstance(thing, BaseModel) or not callable(thing):
        names = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds.of(feature))
        raise InvalidItem(f"{feature.value}: this server takes a function or a {names}, not {thing!r:.80}")
    try:
        return _from_function(kinds, feature, thing, dict(options))
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidItem):
            raise
        raise InvalidItem(f"{feature.value}: {thing!r:.80} can't be added: {error}") from error


def _from_function(
    kinds: ComponentKinds, feature: Feature, function: Callable[..., Any], options: dict[str, Any]
) -> BaseModel:
    component: BaseModel
    if feature is not Feature.RESOURCES:
        kind = kinds.tool if feature is Feature.TOOLS else kinds.prompt
        component = kind.from_function(function, **options)
    elif "uri" not in options:
        raise InvalidItem("resources: a function needs uri=… to be added as a resource or a template")
    elif "{" in (uri := str(options.pop("uri"))):
        component = kinds.template.from_function(function, uri_template=uri, **options)
    else:
        component = kinds.function.from_function(function, uri=uri, **options)
    return component


def copy_component(
    feature: Feature,
    key: str,
    component: BaseModel,
    fields: Mapping[str, Any],
    to_definition: Callable[[Any], BaseModel],
) -> tuple[BaseModel, bytes]:
    """Return the item with changed fields, and its JSON. Raise `InvalidItem` if it would not be valid."""
    changed = {_FIELDS.get(name, name): value for name, value in fields.items()}
    if not changed.keys() <= (known := _changeable_fields(type(component))):
        unknown = ", ".join(sorted(changed.keys() - known))
        raise InvalidItem(f"{feature.value}: {key!r} has no field {unknown} that can be changed")
    copy = component.model_copy(update=changed)  # this validates nothing
    if changed.get("arguments"):  # the server has a class for them, the protocol has mappings
        try:
            copy.__pydantic_validator__.validate_assignment(copy, "arguments", changed["arguments"])
        except ValueError as error:
            raise InvalidItem(f"{feature.value}: {key!r} would not be valid: {error}") from None
    definition, text = check_component(feature, key, copy, to_definition)
    if not changed.keys().isdisjoint(KEYS) and key_of(copy) != key:
        raise InvalidItem(f"{feature.value}: an update can't rename {key!r} to {key_of(copy)!r}; remove and add")
    if isinstance(definition, Tool) and definition.input_schema.get("type") != "object":
        raise InvalidItem(f"{feature.value}: {key!r} needs an inputSchema of type object")
    return copy, text


def check_component(
    feature: Feature, key: str, component: BaseModel, to_definition: Callable[[Any], BaseModel]
) -> tuple[BaseModel, bytes]:
    """Return the definition of an item, and its JSON. An item without one would make the whole list fail."""
    try:
        definition = to_definition(component)
        return definition, encode(definition)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidItem(f"{feature.value}: {key!r} would not be valid: {error}") from None


@cache
def _changeable_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields that an update may change: those of the definition, not the function."""
    return _CHANGEABLE.intersection(kind.model_fields)


def is_same_component(before: Any, after: Any, to_definition: Callable[[Any], BaseModel]) -> bool:
    """Return whether two items have the same definition and the same authorization, so that no caller sees a change."""
    if before is None or after is None or getattr(before, "auth", None) is not getattr(after, "auth", None):
        return False
    try:
        return encode(to_definition(before)) == encode(to_definition(after))
    except (ValueError, TypeError, AttributeError):  # an invalid item
        return False


def already_exists(feature: Feature, key: str) -> AlreadyExists:
    return AlreadyExists(f"{feature.value}: {key!r} exists already; remove it first, or add with replace=True")


def invalid_json(feature: Feature, key: str, error: Exception) -> InvalidItem:
    return InvalidItem(f"{feature.value}: {key!r} can't be written as JSON: {error}")
