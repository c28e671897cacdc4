"""FastMCP 4 as a source. Its lists depend on providers, transforms and the session, so it is read with list
requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import AnyUrl, BaseModel

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.errors import NotFound
from tidings.sdk import internals
from tidings.sdk.components import (
    ComponentKinds,
    already_exists,
    check_component,
    copy_component,
    is_same_component,
    make_component,
)
from tidings.sdk.definitions import key_of
from tidings.sdk.source import ItemChange, Source, Wake

if TYPE_CHECKING:
    from fastmcp import FastMCP

__all__ = ["FastMCPSource"]


class FastMCPSource(Source):
    def __init__(self, server: FastMCP[Any]) -> None:
        internals.check_fastmcp(server)
        self.server = server
        self.lowlevel = internals.lowlevel_of(server)

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        self._resources = catalog.resources

        def on_change(key: str | None, before: Any, after: Any) -> None:
            component = before if after is None else after
            features = [each for each in Feature if key is None or isinstance(component, self._kinds().of(each))]
            changed: ItemChange | None = ItemChange()
            if key is not None:
                is_same = is_same_component(before, after, _to_definition)
                changed = None if is_same else ItemChange(key_of(component), before is not None, after is not None)
            for feature in features:
                wake(feature, changed=changed)

        def wake_all() -> None:
            for feature in Feature:
                wake(feature)

        internals.watch_fastmcp(self.server, on_change, wake_all, catalog.lock)

    def has_user_middleware(self) -> bool:
        from fastmcp.server.middleware.dereference import DereferenceRefsMiddleware

        has_own = any(not isinstance(each, DereferenceRefsMiddleware) for each in self.server.middleware)
        return has_own or super().has_user_middleware()

    def normalize_uri(self, uri: str) -> str:
        normal = _normalize(uri)
        return normal if normal in self._resources and uri not in self._resources else uri

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None:
        component = make_component(self._kinds(), feature, thing, options)
        key = key_of(component)
        check_component(feature, key, component, _to_definition)
        if self._find(feature, key):
            if not replace:
                raise already_exists(feature, key)
            self.remove(feature, key)
        self._method("add", feature, component)(component)

    def remove(self, feature: Feature, key: str) -> None:
        component = self._find_registered(feature, key)[0]
        self._method("remove", feature, component)(key_of(component))  # all its versions

    def _method(self, verb: str, feature: Feature, component: Any) -> Callable[[Any], object]:
        """Return a method of FastMCP, such as `add_tool` or `remove_template`."""
        kind = "template" if isinstance(component, self._kinds().template) else feature.singular
        method: Callable[[Any], object] = getattr(self.server.local_provider, f"{verb}_{kind}")
        return method

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        found = self._find_registered(feature, key)
        copies = [copy_component(feature, key_of(each), each, fields, _to_definition)[0] for each in found]
        internals.replace_in_fastmcp(self.server, feature, copies)

    def delete(self, uri: str) -> None:
        with suppress(NotFound):  # a mounted one, for example
            self.remove(Feature.RESOURCES, uri)

    def _find_registered(self, feature: Feature, key: str) -> list[Any]:
        found = self._find(feature, key)
        if not found:
            raise NotFound(f"{feature.value}: there is no {key!r} that was registered with this server itself")
        return found

    def _find(self, feature: Feature, key: str) -> list[Any]:
        kinds = self._kinds().of(feature)
        components = [each for each in internals.fastmcp_registry(self.server).values() if isinstance(each, kinds)]
        found = [each for each in components if key_of(each) == key]
        if feature is Feature.RESOURCES and not found and (normal := _normalize(key)) != key:
            found = [each for each in components if key_of(each) == normal]
        return found

    @staticmethod
    def _kinds() -> ComponentKinds:
        from fastmcp.prompts import Prompt
        from fastmcp.resources import Resource, ResourceTemplate
        from fastmcp.tools import Tool

        return ComponentKinds(Tool, Prompt, Resource, ResourceTemplate, Resource)


def _to_definition(component: Any) -> BaseModel:
    for name in ("to_mcp_tool", "to_mcp_prompt", "to_mcp_template", "to_mcp_resource"):
        if hasattr(component, name):
            definition: BaseModel = getattr(component, name)()
            return definition
    raise TypeError(f"{component!r:.80} is nothing that a FastMCP lists")


def _normalize(uri: str) -> str:
    """Return a URI as FastMCP writes it: `http://a` is `http://a/`, and characters outside ASCII are escaped."""
    try:
        return str(AnyUrl(uri))
    except ValueError:
        return uri
