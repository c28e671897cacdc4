"""The definitions of the items of an `MCPServer`, one at a time: the same as in its own lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mcp_types as types
from mcp.server.context import HandlerResult
from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.resources import Resource, ResourceTemplate
from mcp.server.mcpserver.tools.base import Tool
from pydantic import BaseModel
from pydantic_core import to_json

from tidings.core.model import Feature
from tidings.errors import AlreadyExists, InvalidItem

__all__ = [
    "already_exists",
    "as_dict",
    "check_key",
    "distinct",
    "encode",
    "invalid",
    "key_of",
    "to_definition",
    "with_meta",
]


def to_definition(component: Any) -> BaseModel:
    """Return an item as the server lists it. Raise `ValueError` if it is invalid."""
    shared = {"title": component.title, "description": component.description, "icons": component.icons}
    if isinstance(component, Prompt):
        arguments = [
            types.PromptArgument(name=each.name, description=each.description, required=each.required)
            for each in component.arguments or ()
        ]
        return types.Prompt(name=component.name, arguments=arguments, **shared)
    shared |= {"annotations": component.annotations, "_meta": component.meta}
    if isinstance(component, Tool):
        return types.Tool(
            name=component.name,
            input_schema=component.parameters,
            output_schema=component.output_schema,
            **shared,
        )
    shared |= {"mime_type": component.mime_type}
    if isinstance(component, ResourceTemplate):
        return types.ResourceTemplate(uri_template=component.uri_template, name=component.name, **shared)
    assert isinstance(component, Resource)
    return types.Resource(uri=component.uri, name=component.name or "", **shared)


def key_of(item: Any) -> str:
    """Return the key of an item of a high-level server."""
    fields = vars(item)  # an item is a model, and an attribute that a model lacks is slow to look for
    for name in ("uri_template", "uri", "name"):
        if (value := fields.get(name)) is not None:
            return str(value)
    raise InvalidItem(f"{item!r:.80} has neither a name nor a URI")


def as_dict(value: object) -> dict[str, Any]:
    """Return a definition or a result of the SDK as on the wire. A handler may return it as a mapping already."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dict(value) if isinstance(value, Mapping) else {}


def with_meta(result: HandlerResult, meta: Mapping[str, Any]) -> HandlerResult:
    """Return the result of a handler with more members in its `_meta`."""
    if not meta:
        return result
    if isinstance(result, types.Result):
        # Not as a dict: the contents may be large.
        return result.model_copy(update={"meta": {**(result.meta or {}), **meta}})
    return {**result, "_meta": {**(result.get("_meta") or {}), **meta}} if isinstance(result, dict) else result


def encode(model: BaseModel) -> bytes:
    """Return the definition as JSON."""
    return to_json(model, by_alias=True, exclude_none=True)


def distinct(feature: Feature, listed: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Return the first item of each key. A server may list an item twice, and clients use the first."""
    seen: dict[Any, dict[str, Any]] = {}
    for definition in listed:
        seen.setdefault(definition.get(feature.key_field, definition.get("uriTemplate")), definition)
    return seen.values()


def already_exists(feature: Feature, key: str) -> AlreadyExists:
    return AlreadyExists(f"{feature.value}: {key!r} exists already; remove it first, or add with replace=True")


def invalid(feature: Feature, key: str, error: Exception) -> InvalidItem:
    return InvalidItem(f"{feature.value}: {key!r} would not be valid: {error}")


def check_key(feature: Feature, key: str, updated: str) -> None:
    """Raise `InvalidItem` if an update has changed the key of an item."""
    if updated != key:
        raise InvalidItem(f"{feature.value}: an update can't rename {key!r} to {updated!r}; remove and add")
