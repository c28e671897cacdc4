"""The SDK's high-level server, `MCPServer`, as a source."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.prompts.base import Prompt
from mcp.server.mcpserver.resources import FunctionResource, Resource, ResourceTemplate
from mcp.server.mcpserver.tools.base import Tool
from pydantic_core import PydanticSerializationError

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.errors import InvalidItem, TidingsError
from tidings.sdk import internals
from tidings.sdk.components import ComponentEditor, ComponentKinds
from tidings.sdk.definitions import as_dict, encode, key_of, to_definition
from tidings.sdk.source import OnInvalid, Source, Wake
from tidings.wire.methods import list_methods

__all__ = ["MCPServerSource"]

_KINDS = ComponentKinds(Tool, Prompt, Resource, ResourceTemplate, FunctionResource, to_definition)
_ENCODE_ERRORS = (PydanticSerializationError, UnicodeError)
"""The errors of pydantic for a value without a JSON form."""


class MCPServerSource(Source):
    """Reads items from the registries of an `MCPServer`.

    If the user has replaced a list method or its handler, each caller may get another list. Such a list is read with
    list requests, without authentication."""

    has_shared_lists = True

    def __init__(self, server: MCPServer[Any]) -> None:
        self.server = server
        self.lowlevel = internals.lowlevel_of(server)
        self.editor: MCPServerEditor = MCPServerEditor(server)

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        def on_change(feature: Feature, key: str | None, before: Any, after: Any) -> None:
            if self._is_readable(feature):
                wake(feature, key)
            else:
                wake(feature, changed=_KINDS.find_change(key, before, after))

        internals.watch_mcpserver(self.server, on_change, catalog.lock)

    def is_list_shared(self, method: str) -> bool:
        return internals.has_standard_list(self.server, method)

    def _is_readable(self, feature: Feature) -> bool:
        """Return whether the items can be read without list requests."""
        return all(self.is_list_shared(method) for method in list_methods(feature))

    def read_items(self, feature: Feature, on_invalid: OnInvalid) -> list[dict[str, Any]] | None:
        if not self._is_readable(feature):
            return None
        listed: list[dict[str, Any]] = []
        for method in list_methods(feature).values():
            for model in _run(getattr(self.server, method.function)()):
                try:
                    listed.append(as_dict(model))
                except _ENCODE_ERRORS as error:
                    on_invalid(_invalid_json(feature, key_of(model), error))
        return listed

    def read_item(self, feature: Feature, key: str) -> bytes | None:
        component = _registry(self.server, feature, key).get(key)
        if component is None:
            return None
        checked, text = self.editor.checked
        if component is checked:
            return text
        try:
            return encode(to_definition(component))
        except _ENCODE_ERRORS as error:
            raise _invalid_json(feature, key, error) from None


class MCPServerEditor(ComponentEditor):
    def __init__(self, server: MCPServer[Any]) -> None:
        super().__init__(_KINDS)
        self._server = server

    def _find(self, feature: Feature, key: str) -> list[Any]:
        component = _registry(self._server, feature, key).get(key)
        return [] if component is None else [component]

    def _insert(self, feature: Feature, component: Any, replaced: list[Any]) -> None:
        key = key_of(component)
        _registry(self._server, feature, key)[key] = component

    def _replace(self, feature: Feature, copies: list[Any]) -> None:
        self._insert(feature, copies[0], [])

    def _remove(self, feature: Feature, component: Any) -> None:
        key = key_of(component)
        del _registry(self._server, feature, key)[key]


def _registry(server: MCPServer[Any], feature: Feature, key: str) -> dict[str, Any]:
    """Return the registry that has the key, or would have it."""
    if feature is Feature.RESOURCES and "{" in key and key not in internals.registry_of(server, "resources"):
        return internals.registry_of(server, "templates")
    return internals.registry_of(server, feature.value)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    coroutine.close()
    raise TidingsError("the SDK's own lists are expected to be ready immediately, and this one is not")


def _invalid_json(feature: Feature, key: str, error: Exception) -> InvalidItem:
    return InvalidItem(f"{feature.value}: {key!r} can't be written as JSON: {error}")
