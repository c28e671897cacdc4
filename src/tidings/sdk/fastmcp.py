"""FastMCP 4 as a source. Its lists depend on providers, transforms and the session, so it is read with list
requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import AnyUrl, BaseModel

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.dependencies import missing_extra
from tidings.sdk import internals
from tidings.sdk.components import ComponentEditor, ComponentKinds
from tidings.sdk.definitions import key_of
from tidings.sdk.source import Source, Wake

try:
    from fastmcp.prompts import Prompt
    from fastmcp.resources import Resource, ResourceTemplate
    from fastmcp.tools import Tool
except ImportError as error:
    raise missing_extra("Live for a server of FastMCP", "fastmcp") from error

if TYPE_CHECKING:
    from fastmcp import FastMCP

__all__ = ["FastMCPSource"]


class FastMCPSource(Source):
    def __init__(self, server: FastMCP[Any]) -> None:
        internals.check_fastmcp(server)
        self.server = server
        self.lowlevel = internals.lowlevel_of(server)
        self.editor = FastMCPEditor(server)

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        self._resources = catalog.resources

        def on_change(key: str | None, before: Any, after: Any) -> None:
            component = before if after is None else after
            changed = _KINDS.find_change(None if key is None else key_of(component), before, after)
            for feature in Feature:
                if key is None or isinstance(component, _KINDS.of(feature)):
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


class FastMCPEditor(ComponentEditor):
    def __init__(self, server: FastMCP[Any]) -> None:
        super().__init__(_KINDS)
        self._server = server

    def _find(self, feature: Feature, key: str) -> list[Any]:
        registered = self._server.local_provider._components.values()
        components = [each for each in registered if isinstance(each, _KINDS.of(feature))]
        found = [each for each in components if key_of(each) == key]
        if feature is Feature.RESOURCES and not found and (normal := _normalize(key)) != key:
            found = [each for each in components if key_of(each) == normal]
        return found

    def _insert(self, feature: Feature, component: Any, replaced: list[Any]) -> None:
        if replaced:
            self._remove(feature, replaced[0])
        self._method("add", feature, component)(component)

    def _replace(self, feature: Feature, copies: list[Any]) -> None:
        # Directly: the public method that adds an item may refuse one that exists, and an item that is removed first
        # goes to the end of its list.
        provider: Any = self._server.local_provider
        for copy in copies:
            provider._components[copy.key] = copy
        if feature is Feature.TOOLS and internals.has_input_schemas(internals.lowlevel_of(self._server)):
            provider._seed_schema(copies[0].name, copies)

    def _remove(self, feature: Feature, component: Any) -> None:
        self._method("remove", feature, component)(key_of(component))

    def _method(self, verb: str, feature: Feature, component: Any) -> Callable[[Any], object]:
        """Return a method of FastMCP, such as `add_tool` or `remove_template`."""
        kind = "template" if isinstance(component, ResourceTemplate) else feature.singular
        method: Callable[[Any], object] = getattr(self._server.local_provider, f"{verb}_{kind}")
        return method


def _to_definition(component: Any) -> BaseModel:
    for name in ("to_mcp_tool", "to_mcp_prompt", "to_mcp_template", "to_mcp_resource"):
        if hasattr(component, name):
            definition: BaseModel = getattr(component, name)()
            return definition
    raise TypeError(f"{component!r:.80} is nothing that a FastMCP lists")


_KINDS = ComponentKinds(Tool, Prompt, Resource, ResourceTemplate, Resource, _to_definition)


def _normalize(uri: str) -> str:
    """Return a URI as FastMCP writes it: `http://a` is `http://a/`, and characters outside ASCII are escaped."""
    try:
        return str(AnyUrl(uri))
    except ValueError:
        return uri
