"""Changes the items of the high-level servers, `MCPServer` and FastMCP.

Both keep their items as pydantic models, with the same names of fields.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from mcp_types import Tool
from pydantic import BaseModel

from tidings.core.model import Feature
from tidings.errors import InvalidItem, NotFound
from tidings.sdk.definitions import already_exists, check_key, encode, invalid, key_of
from tidings.sdk.source import Editor, RegistryChange

__all__ = ["ComponentEditor", "ComponentKinds"]

_FIELDS = {"inputSchema": "parameters", "outputSchema": "output_schema", "mimeType": "mime_type", "_meta": "meta"}
"""The fields of the protocol that have another name in the high-level servers."""

_CHANGEABLE = frozenset(
    {
        *("name", "uri", "uri_template", "title", "description", "parameters", "output_schema"),
        *("arguments", "mime_type", "annotations", "icons", "meta", "tags"),
    }
)

_NOTHING = (None, b"")

_INVALID = (ValueError, TypeError, AttributeError)
"""The errors of pydantic, the SDK and FastMCP for an item that can't be made, listed or encoded."""


class ComponentKinds(NamedTuple):
    """The classes of a server's items, and the class of a resource that is made from a function."""

    tool: Any
    prompt: Any
    resource: Any
    template: Any
    function: Any
    to_definition: Callable[[Any], BaseModel]
    """Returns an item as the server lists it. Raises one of several errors if it is invalid."""

    def of(self, feature: Feature) -> tuple[type, ...]:
        if feature is Feature.RESOURCES:
            return (self.resource, self.template)
        return (self.tool if feature is Feature.TOOLS else self.prompt,)

    def find_change(self, key: str | None, before: Any, after: Any) -> RegistryChange | None:
        """Return the change of an item in a registry, or of an unknown one. None if no caller sees a change, because
        the definition and the authorization are the same."""
        if key is None:
            return RegistryChange()
        change = RegistryChange(key, before is not None, after is not None)
        if before is None or after is None or getattr(before, "auth", None) is not getattr(after, "auth", None):
            return change
        try:
            is_same = encode(self.to_definition(before)) == encode(self.to_definition(after))
        except _INVALID:
            return change
        return None if is_same else change


class ComponentEditor(Editor):
    def __init__(self, kinds: ComponentKinds) -> None:
        self._kinds = kinds
        self.checked: tuple[Any, bytes] = _NOTHING
        """The item that was checked last, and its JSON. Only the read that its insertion causes may use it: the user
        may change the item in place afterwards."""

    @abstractmethod
    def _find(self, feature: Feature, key: str) -> list[Any]:
        """Return the item that was registered with the server itself, in all its versions."""

    @abstractmethod
    def _insert(self, feature: Feature, component: Any, replaced: list[Any]) -> None:
        """Put an item in the place of those that it replaces, if there are any."""

    @abstractmethod
    def _replace(self, feature: Feature, copies: list[Any]) -> None:
        """Put copies of all versions of an item in its place."""

    @abstractmethod
    def _remove(self, feature: Feature, component: Any) -> None:
        """Remove all versions of an item."""

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None:
        component = self._make(feature, thing, options)
        key = key_of(component)
        self._check(feature, key, component)
        if (found := self._find(feature, key)) and not replace:
            raise already_exists(feature, key)
        try:
            self._insert(feature, component, found)
        finally:
            self.checked = _NOTHING

    def remove(self, feature: Feature, key: str) -> None:
        self._remove(feature, self._find_known(feature, key)[0])

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        copies = [self._copy(feature, each, fields) for each in self._find_known(feature, key)]
        try:
            self._replace(feature, copies)
        finally:
            self.checked = _NOTHING

    def delete(self, uri: str) -> None:
        with suppress(NotFound):  # a mounted one, for example
            self.remove(Feature.RESOURCES, uri)

    def _find_known(self, feature: Feature, key: str) -> list[Any]:
        if found := self._find(feature, key):
            return found
        raise NotFound(f"{feature.value}: there is no {key!r} that was registered with this server itself")

    def _make(self, feature: Feature, thing: Any, options: Mapping[str, Any]) -> Any:
        """Return the item to add: the given one, or one made from a function."""
        kinds = self._kinds.of(feature)
        if isinstance(thing, kinds) and isinstance(thing, BaseModel):
            if options:
                raise InvalidItem(
                    f"{feature.value}: {key_of(thing)!r} is an item already, and takes no {', '.join(options)}; "
                    "add it and update it, or add a function"
                )
            return thing
        if isinstance(thing, BaseModel) or not callable(thing):
            names = " or ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
            raise InvalidItem(f"{feature.value}: this server takes a function or a {names}, not {thing!r:.80}")
        try:
            return self._from_function(feature, thing, **options)
        except InvalidItem:
            raise
        except _INVALID as error:
            raise InvalidItem(f"{feature.value}: {thing!r:.80} can't be added: {error}") from error

    def _from_function(self, feature: Feature, function: Callable[..., Any], **options: Any) -> Any:
        if feature is not Feature.RESOURCES:
            kind: Any = self._kinds.of(feature)[0]
            return kind.from_function(function, **options)
        if "uri" not in options:
            raise InvalidItem("resources: a function needs uri=… to be added as a resource or a template")
        if "{" in (uri := str(options.pop("uri"))):
            return self._kinds.template.from_function(function, uri_template=uri, **options)
        return self._kinds.function.from_function(function, uri=uri, **options)

    def _copy(self, feature: Feature, component: BaseModel, fields: Mapping[str, Any]) -> BaseModel:
        """Return the item with changed fields. Raise `InvalidItem` if it would not be valid."""
        key = key_of(component)
        changed = {_FIELDS.get(name, name): value for name, value in fields.items()}
        if not changed.keys() <= (known := _changeable_fields(type(component))):
            unknown = ", ".join(sorted(changed.keys() - known))
            raise InvalidItem(f"{feature.value}: {key!r} has no field {unknown} that can be changed")
        copy = component.model_copy(update=changed)  # this validates nothing
        if changed.get("arguments"):  # the server has a class for them, the protocol has mappings
            try:
                copy.__pydantic_validator__.validate_assignment(copy, "arguments", changed["arguments"])
            except ValueError as error:
                raise invalid(feature, key, error) from None
        definition = self._check(feature, key, copy)
        check_key(feature, key, key_of(copy))
        if isinstance(definition, Tool) and definition.input_schema.get("type") != "object":
            raise InvalidItem(f"{feature.value}: {key!r} needs an inputSchema of type object")
        return copy

    def _check(self, feature: Feature, key: str, component: Any) -> BaseModel:
        """Return the definition of an item. An item without one, or without JSON, would make the whole list fail."""
        try:
            definition = self._kinds.to_definition(component)
            self.checked = component, encode(definition)
        except _INVALID as error:
            raise invalid(feature, key, error) from None
        return definition


@cache
def _changeable_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields that an update may change: those of the definition, not the function."""
    return _CHANGEABLE.intersection(kind.model_fields)
