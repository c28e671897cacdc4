"""A server that the user already has, as a source: what it lists, and how to change that.

Three kinds of server, one seam. Noticing a change is only a wake-up: the truth is what the server lists. An `MCPServer`
whose lists are the SDK's own can be asked at once and from any thread; the others answer only as they would answer a
client, which takes an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated, ServerEvent, ToolsListChanged
from mcp_types import Tool
from pydantic import AnyUrl, BaseModel
from pydantic_core import PydanticSerializationError

from tidings.core.catalog import Catalog
from tidings.core.model import Feature
from tidings.errors import AlreadyExists, InvalidItem, NotFound, TidingsError
from tidings.server import internals as seams
from tidings.server.code import LowLevelSource, has_own_middleware
from tidings.server.definitions import KEYS, dump, encode, key_of, shown

if TYPE_CHECKING:
    from fastmcp import FastMCP

__all__ = ["Attached", "attach"]

Wake = Callable[..., None]
"""Called with a feature that may have changed, and where it is known with the key of the one item that did."""

OnInvalid = Callable[[InvalidItem], None]
"""Called with what is wrong with an item that is left out."""


@runtime_checkable
class Attached(Protocol):
    """What `Live` needs of a server."""

    server: Any
    """What the user has, or what stands for it: it makes the ASGI app."""
    lowlevel: Server[Any]
    lists_are_shared: bool
    """Whether every caller is shown the same lists, as far as the kind of server tells."""

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        """Call `wake` when a list may have changed, and tell the catalog when the server says so of a content."""

    async def run(self) -> None:
        """Follow what can change by itself, for as long as the server runs."""

    def list_now(self, feature: Feature, on_invalid: OnInvalid) -> list[dict[str, Any]] | None:
        """What the server lists, but for items that have no JSON form; None if it can only be asked as a client
        asks."""

    def list_one(self, feature: Feature, key: str) -> bytes | None:
        """One item of what `list_now` says, as JSON; None if there is none of that key."""

    def has_own_middleware(self) -> bool:
        """Whether the user put middleware in, which must see every request."""

    def address(self, uri: str) -> str:
        """As the server lists the resource that its owner calls so."""

    # These four are called with the catalog's lock.

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None: ...

    def remove(self, feature: Feature, key: str) -> None: ...

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None: ...

    def delete(self, uri: str) -> None:
        """Take a listed resource that is gone off the list, as far as the list is ours to change."""


def attach(server: Any) -> Attached:
    if isinstance(server, Attached):
        return server  # a source of its own, as a workspace is
    if isinstance(server, MCPServer):
        return MCPServerSource(server)
    if isinstance(server, Server):
        return LowLevelSource(server)
    if any(kind.__name__ == "FastMCP" and kind.__module__.startswith("fastmcp.") for kind in type(server).__mro__):
        return FastMCPSource(server)
    raise TidingsError(
        f"Live() takes an MCPServer, a low-level Server, a FastMCP 4 or a Workspace, not {type(server).__module__}."
        f"{type(server).__name__}"
    )


_FIELDS = {"inputSchema": "parameters", "outputSchema": "output_schema", "mimeType": "mime_type", "_meta": "meta"}
"""The protocol's names of fields, where the high-level servers have others."""

_CHANGEABLE = frozenset(
    {
        *("name", "uri", "uri_template", "title", "description", "parameters", "output_schema"),
        *("arguments", "mime_type", "annotations", "icons", "meta", "tags"),
    }
)

_NAMES = {feature: feature.value for feature in Feature}
"""By which they are looked up at each change; an enum's own `value` takes two calls to read."""

_NOTHING = (None, b"")

_NO_JSON = (PydanticSerializationError, UnicodeError)
"""What pydantic raises for a value that JSON has no form for."""


class MCPServerSource:
    """The SDK's high-level server."""

    def __init__(self, server: MCPServer[Any]) -> None:
        self.server = server
        self.lowlevel = seams.lowlevel_of(server)
        # A method or handler of the user's own may look at who asks: it is asked as nobody then, and nobody is told of
        # what only some are shown.
        self.lists_are_shared = seams.lists_registries(server)
        self._made: tuple[BaseModel | None, bytes] = _NOTHING
        """What an update under way puts in, and its JSON, which was made to check it. Only the first reading may have
        it, which follows at once: whoever is told by that may change the item in place. Used with the catalog's lock
        alone."""

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        features = {name: feature for feature, name in _NAMES.items()}
        seams.watch_mcpserver(
            self.server,
            lambda name, key: wake(features[name], key if self.lists_are_shared else None),
            catalog.lock,
        )

        def on_event(event: ServerEvent) -> None:
            if isinstance(event, ResourceUpdated):
                catalog.resources.updated(event.uri)
            elif isinstance(event, ToolsListChanged):
                wake(Feature.TOOLS)
            else:
                wake(Feature.RESOURCES if isinstance(event, ResourcesListChanged) else Feature.PROMPTS)

        seams.bus_of(self.server).subscribe(on_event)

    async def run(self) -> None:
        return None

    def list_now(self, feature: Feature, on_invalid: OnInvalid) -> list[dict[str, Any]] | None:
        if not self.lists_are_shared:
            return None
        self._made = _NOTHING
        listed: list[BaseModel]
        match feature:
            case Feature.TOOLS:
                listed = _step(self.server.list_tools())
            case Feature.PROMPTS:
                listed = _step(self.server.list_prompts())
            case Feature.RESOURCES:
                listed = _step(self.server.list_resources()) + _step(self.server.list_resource_templates())
        return _dump(feature, listed, on_invalid)

    def list_one(self, feature: Feature, key: str) -> bytes | None:
        component = self._registry(feature, key).get(key)
        if component is None:
            return None
        made, text = self._made
        self._made = _NOTHING
        if component is made:
            return text
        try:
            return encode(shown(component))
        except _NO_JSON as error:
            raise _invalid(feature, key, error) from None

    def has_own_middleware(self) -> bool:
        return has_own_middleware(self.lowlevel)

    def address(self, uri: str) -> str:
        return uri

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None:
        item = _item(self._kinds(), feature, thing, options)
        key = key_of(item)
        registry = self._registry(feature, key)
        if key in registry and not replace:
            raise AlreadyExists(f"{feature.value}: {key!r} exists already; remove it first, or add with replace=True")
        self._put(registry, key, item, _text(feature, key, item, shown)[1])

    def remove(self, feature: Feature, key: str) -> None:
        registry = self._registry(feature, key)
        if key not in registry:
            raise NotFound(f"{feature.value}: there is no {key!r}")
        del registry[key]

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        registry = self._registry(feature, key)
        if key not in registry:
            raise NotFound(f"{feature.value}: there is no {key!r}")
        self._put(registry, key, *_copy(feature, key, registry[key], fields, shown))

    def delete(self, uri: str) -> None:
        with suppress(NotFound):
            self.remove(Feature.RESOURCES, uri)

    def _put(self, registry: dict[str, Any], key: str, item: BaseModel, text: bytes) -> None:
        self._made = item, text
        try:
            registry[key] = item
        finally:
            self._made = _NOTHING  # if nothing was read

    def _registry(self, feature: Feature, key: str) -> dict[str, Any]:
        if feature is Feature.RESOURCES and "{" in key and key not in seams.registry_of(self.server, "resources"):
            return seams.registry_of(self.server, "templates")
        return seams.registry_of(self.server, _NAMES[feature])

    @staticmethod
    def _kinds() -> _Kinds:
        from mcp.server.mcpserver.prompts.base import Prompt
        from mcp.server.mcpserver.resources import FunctionResource, Resource, ResourceTemplate
        from mcp.server.mcpserver.tools.base import Tool

        return _Kinds(Tool, Prompt, Resource, ResourceTemplate, FunctionResource)


class FastMCPSource:
    """FastMCP 4. What it lists depends on providers, transforms and the session, so it is asked as a client asks."""

    lists_are_shared = False

    def __init__(self, server: FastMCP[Any]) -> None:
        self.server = server
        self.lowlevel = seams.lowlevel_of(server)
        self._is_listed: Callable[[str], bool] = lambda uri: False

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        self._is_listed = catalog.resources.__contains__

        def wake_all() -> None:
            for feature in Feature:
                wake(feature)

        seams.watch_fastmcp(self.server, wake_all, catalog.lock)
        for name in ("add_provider", "mount", "add_transform", "enable", "disable", "add_middleware"):
            _wrap(self.server, name, wake_all)

    async def run(self) -> None:
        return None

    def list_now(self, feature: Feature, on_invalid: OnInvalid) -> None:
        return None

    def list_one(self, feature: Feature, key: str) -> None:
        return None

    def has_own_middleware(self) -> bool:
        from fastmcp.server.middleware.dereference import DereferenceRefsMiddleware

        inner = any(not isinstance(each, DereferenceRefsMiddleware) for each in self.server.middleware)
        return inner or has_own_middleware(self.lowlevel)

    def address(self, uri: str) -> str:
        listed = _normal(uri)
        return listed if self._is_listed(listed) and not self._is_listed(uri) else uri

    def add(self, feature: Feature, thing: Any, *, replace: bool, **options: Any) -> None:
        item = _item(self._kinds(), feature, thing, options)
        key = key_of(item)
        _text(feature, key, item, _shown_by_fastmcp)
        if self._find(feature, key):
            if not replace:
                raise AlreadyExists(
                    f"{feature.value}: {key!r} exists already; remove it first, or add with replace=True"
                )
            self.remove(feature, key)
        seams.add_to_fastmcp(self.server, item)

    def remove(self, feature: Feature, key: str) -> None:
        provider = self.server.local_provider
        found = self._find(feature, key)
        if not found:
            raise NotFound(f"{feature.value}: there is no {key!r} that was registered with this server itself")
        key = key_of(found[0])
        if feature is Feature.TOOLS:
            provider.remove_tool(key)
        elif feature is Feature.PROMPTS:
            provider.remove_prompt(key)
        elif getattr(found[0], "uri_template", None) is not None:
            provider.remove_template(key)
        else:
            provider.remove_resource(key)

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        found = self._find(feature, key)
        if not found:
            raise NotFound(f"{feature.value}: there is no {key!r} that was registered with this server itself")
        registry = seams.fastmcp_registry(self.server)
        made = [_copy(feature, key_of(each), each, fields, _shown_by_fastmcp)[0] for each in found]
        for component, copy in zip(found, made, strict=True):
            registry[component.key] = copy

    def delete(self, uri: str) -> None:
        with suppress(NotFound):  # what is mounted, say
            self.remove(Feature.RESOURCES, uri)

    def _find(self, feature: Feature, key: str) -> list[Any]:
        kinds = self._kinds().of(feature)
        components = [each for each in seams.fastmcp_registry(self.server).values() if isinstance(each, kinds)]
        found = [each for each in components if key_of(each) == key]
        if feature is Feature.RESOURCES and not found and (listed := _normal(key)) != key:
            found = [each for each in components if key_of(each) == listed]
        return found

    @staticmethod
    def _kinds() -> _Kinds:
        from fastmcp.prompts import Prompt
        from fastmcp.resources import Resource, ResourceTemplate
        from fastmcp.tools import Tool

        return _Kinds(Tool, Prompt, Resource, ResourceTemplate, Resource)


def _step(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    coroutine.close()
    raise TidingsError("the SDK's own lists are expected to be ready at once, and this one is not")


def _dump(feature: Feature, models: list[BaseModel], on_invalid: OnInvalid) -> list[dict[str, Any]]:
    try:
        return [dump(model) for model in models]
    except _NO_JSON:
        pass  # one of them, hardly ever: which one is worth looking for only then
    listed = []
    for model in models:
        try:
            listed.append(dump(model))
        except _NO_JSON as error:
            on_invalid(_invalid(feature, key_of(model), error))
    return listed


def _invalid(feature: Feature, key: str, error: Exception) -> InvalidItem:
    return InvalidItem(f"{feature.value}: {key!r} can't be written as JSON: {error}")


class _Kinds(NamedTuple):
    """The classes that a server has for its items, and the one for a resource that is a function."""

    tool: Any
    prompt: Any
    resource: Any
    template: Any
    function: Any

    def of(self, feature: Feature) -> tuple[type, ...]:
        if feature is Feature.RESOURCES:
            return (self.resource, self.template)
        return (self.tool if feature is Feature.TOOLS else self.prompt,)


def _item(kinds: _Kinds, feature: Feature, thing: Any, options: dict[str, Any]) -> BaseModel:
    """What is to be added: an item of the server's own, or one that is made of a function."""
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
        return _built(kinds, feature, thing, dict(options))
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidItem):
            raise
        raise InvalidItem(f"{feature.value}: {thing!r:.80} can't be added: {error}") from error


def _built(kinds: _Kinds, feature: Feature, function: Callable[..., Any], options: dict[str, Any]) -> BaseModel:
    item: BaseModel
    if feature is not Feature.RESOURCES:
        item = (kinds.tool if feature is Feature.TOOLS else kinds.prompt).from_function(function, **options)
    elif "{" in (uri := _uri(options)):
        item = kinds.template.from_function(function, uri_template=uri, **options)
    else:
        item = kinds.function.from_function(function, uri=uri, **options)
    return item


def _uri(options: dict[str, Any]) -> str:
    try:
        return str(options.pop("uri"))
    except KeyError:
        raise InvalidItem("resources: a function needs uri=… to be added as a resource or a template") from None


def _copy(
    feature: Feature, key: str, item: BaseModel, fields: Mapping[str, Any], show: Callable[[Any], BaseModel]
) -> tuple[BaseModel, bytes]:
    """The item with other fields, and as its server lists it, which checks it: a copy of a model checks nothing."""
    wanted = {_FIELDS.get(name, name): value for name, value in fields.items()}
    if not wanted.keys() <= (known := _changeable(type(item))):
        unknown = ", ".join(sorted(wanted.keys() - known))
        raise InvalidItem(f"{feature.value}: {key!r} has no field {unknown} that can be changed")
    copy = item.model_copy(update=wanted)
    if wanted.get("arguments"):  # whose class is the server's own: as the protocol has them, they are mappings
        try:
            copy.__pydantic_validator__.validate_assignment(copy, "arguments", wanted["arguments"])
        except ValueError as error:
            raise InvalidItem(f"{feature.value}: {key!r} would not be valid: {error}") from None
    listed, text = _text(feature, key, copy, show)
    if not wanted.keys().isdisjoint(KEYS) and key_of(copy) != key:
        raise InvalidItem(f"{feature.value}: an update can't rename {key!r} to {key_of(copy)!r}; remove and add")
    if isinstance(listed, Tool) and listed.input_schema.get("type") != "object":
        raise InvalidItem(f"{feature.value}: {key!r} needs an inputSchema of type object")
    return copy, text


def _text(feature: Feature, key: str, item: BaseModel, show: Callable[[Any], BaseModel]) -> tuple[BaseModel, bytes]:
    """An item as its server lists it, also as JSON: one that has no such form would fail the list for everybody."""
    try:
        listed = show(item)
        return listed, encode(listed)
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidItem(f"{feature.value}: {key!r} would not be valid: {error}") from None


def _normal(uri: str) -> str:
    """A URI as FastMCP writes it: `http://a` is `http://a/`, and what is not ASCII is escaped."""
    try:
        return str(AnyUrl(uri))
    except ValueError:
        return uri


@cache
def _changeable(kind: type[BaseModel]) -> frozenset[str]:
    """What of an item may be updated: what its definition says, and not the function behind it."""
    return _CHANGEABLE.intersection(kind.model_fields)


def _shown_by_fastmcp(component: Any) -> BaseModel:
    for name in ("to_mcp_tool", "to_mcp_prompt", "to_mcp_template", "to_mcp_resource"):
        if hasattr(component, name):
            listed: BaseModel = getattr(component, name)()
            return listed
    raise TypeError(f"{component!r:.80} is nothing that a FastMCP lists")


def _wrap(owner: Any, name: str, after: Callable[[], None]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            after()

    setattr(owner, name, wrapped)
