"""The SDK's high-level server, `MCPServer`, as a source."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from typing import Any

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.errors import NotFound, TidingsError
from tidings.sdk import internals
from tidings.sdk.components import (
    ENCODE_ERRORS,
    ComponentKinds,
    already_exists,
    check_component,
    copy_component,
    invalid_json,
    is_same_component,
    make_component,
)
from tidings.sdk.definitions import as_dict, encode, key_of, to_definition
from tidings.sdk.source import ItemChange, OnInvalid, Source, Wake
from tidings.wire.methods import list_methods

__all__ = ["MCPServerSource"]

_NOTHING = (None, b"")


class MCPServerSource(Source):
    """Reads items from the registries of an `MCPServer`.

    If the user has replaced a list method or its handler, each caller may get another list. Such a list is read with
    list requests, without authentication."""

    has_shared_lists = True

    def __init__(self, server: MCPServer[Any]) -> None:
        self.server = server
        self.lowlevel = internals.lowlevel_of(server)
        self._encoded: tuple[BaseModel | None, bytes] = _NOTHING
        """The item that is being put into a registry, and its JSON, which was made to check it. The read that follows
        uses it; a later read must not, because the user may have changed the item in place. Needs the catalog's
        lock."""

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        def on_change(feature: Feature, key: str | None, before: Any, after: Any) -> None:
            if self._is_readable(feature):
                wake(feature, key)
            else:
                is_same = is_same_component(before, after, to_definition)
                wake(feature, changed=None if is_same else ItemChange(key, before is not None, after is not None))

        internals.watch_mcpserver(self.server, on_change, catalog.lock)

    def is_list_shared(self, method: str) -> bool:
        return internals.has_standard_list(self.server, method)

    def _is_readable(self, feature: Feature) -> bool:
        """Return whether the items can be read without list requests."""
        return all(self.is_list_shared(method) for method in list_methods(feature))

    def read_items(self, feature: Feature, on_invalid: OnInvalid) -> list[dict[str, Any]] | None:
        if not self._is_readable(feature):
            return None
        self._encoded = _NOTHING
        listed: list[BaseModel] = []
        for method in list_methods(feature).values():
            listed += _run(getattr(self.server, method.function)())
        return list(_dump_all(feature, listed, on_invalid))

    def read_item(self, feature: Feature, key: str) -> bytes | None:
        component = self._registry(feature, key).get(key)
        if component is None:
            return None
        encoded, text = self._encoded
        self._encoded = _NOTHING
        if component is encoded:
            return text
        try:
            return encode(to_definition(component))
        except ENCODE_ERRORS as error:
            raise invalid_json(feature, key, error) from None

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None:
        component = make_component(self._kinds(), feature, thing, options)
        key = key_of(component)
        registry = self._registry(feature, key)
        if key in registry and not replace:
            raise already_exists(feature, key)
        self._put(registry, key, component, check_component(feature, key, component, to_definition)[1])

    def remove(self, feature: Feature, key: str) -> None:
        del self._find(feature, key)[key]

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        registry = self._find(feature, key)
        self._put(registry, key, *copy_component(feature, key, registry[key], fields, to_definition))

    def delete(self, uri: str) -> None:
        with suppress(NotFound):
            self.remove(Feature.RESOURCES, uri)

    def _put(self, registry: dict[str, Any], key: str, component: BaseModel, text: bytes) -> None:
        self._encoded = component, text
        try:
            registry[key] = component
        finally:
            self._encoded = _NOTHING

    def _find(self, feature: Feature, key: str) -> dict[str, Any]:
        """Return the registry that has the key."""
        registry = self._registry(feature, key)
        if key not in registry:
            raise NotFound(f"{feature.value}: there is no {key!r}")
        return registry

    def _registry(self, feature: Feature, key: str) -> dict[str, Any]:
        if feature is Feature.RESOURCES and "{" in key and key not in internals.registry_of(self.server, "resources"):
            return internals.registry_of(self.server, "templates")
        return internals.registry_of(self.server, feature.value)

    @staticmethod
    def _kinds() -> ComponentKinds:
        from mcp.server.mcpserver.prompts.base import Prompt
        from mcp.server.mcpserver.resources import FunctionResource, Resource, ResourceTemplate
        from mcp.server.mcpserver.tools.base import Tool

        return ComponentKinds(Tool, Prompt, Resource, ResourceTemplate, FunctionResource)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    coroutine.close()
    raise TidingsError("the SDK's own lists are expected to be ready immediately, and this one is not")


def _dump_all(feature: Feature, models: list[BaseModel], on_invalid: OnInvalid) -> Iterator[dict[str, Any]]:
    for model in models:
        try:
            yield as_dict(model)
        except ENCODE_ERRORS as error:
            on_invalid(invalid_json(feature, key_of(model), error))
