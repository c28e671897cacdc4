"""A low-level `Server` as a source. It has handlers, and no registry of items.

The items that the user's handlers list are kept. Items that are added, removed and updated through `Live` override
them: the source wraps the user's handlers for that.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp.shared.uri_template import UriTemplate
from mcp_types.methods import MONOLITH_RESULTS
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from tidings.core.catalog import Catalog
from tidings.core.encoding import safe_json
from tidings.core.model import Feature, item_key
from tidings.errors import InvalidItem, NotFound
from tidings.sdk.definitions import already_exists, as_dict, check_key, invalid
from tidings.sdk.source import Editor, Source, Wake
from tidings.wire.methods import CALL_TOOL, GET_PROMPT, READ_RESOURCE, list_methods

__all__ = ["LowLevelSource"]


class LowLevelSource(Source):
    def __init__(self, server: Server[Any]) -> None:
        self.server = self.lowlevel = server

    def watch(self, catalog: Catalog, wake: Wake) -> None:
        self.editor = LowLevelEditor(self.lowlevel, catalog, wake)


class LowLevelEditor(Editor):
    """`live.tools.add({"name": …, "inputSchema": …}, handler=function)`: the handler gets the arguments by name."""

    def __init__(self, server: Server[Any], catalog: Catalog, wake: Wake) -> None:
        self._server = server
        self._catalog = catalog
        self._wake = wake
        self._added: dict[Feature, dict[str, dict[str, Any]]] = {feature: {} for feature in Feature}
        self._handlers: dict[tuple[Feature, str], Callable[..., Any]] = {}
        self._changed: dict[Feature, dict[str, dict[str, Any] | None]] = {feature: {} for feature in Feature}
        """Changes of items that the user's handlers list: other fields, or None for an item that is hidden."""
        self._covered: dict[Feature, set[str]] = {feature: set() for feature in Feature}
        """Added items that replace an item of the user's handlers, or may do so if the list was not read yet."""
        self._dropped: dict[Feature, set[str]] = {feature: set() for feature in Feature}
        """Removed items that the user's handlers do not list. The catalog has them until the list is read again."""
        self._deleted: set[str] = set()
        """Deleted resources, until the user's handlers have left them out once."""
        self._paginations: dict[str, tuple[str, set[str]]] = {}
        """By method: the next page of the last list request, and the keys on the pages before it."""
        self._installed: set[Feature] = set()

    def add(
        self, feature: Feature, thing: Any, *, replace: bool, handler: Callable[..., Any] | None = None, **options: Any
    ) -> None:
        definition = _checked(feature, _definition(feature, thing, options))
        key = item_key(feature, definition)
        if handler is not None and not callable(handler):
            raise InvalidItem(f"{feature.value}: the handler of {key!r} must be a function, not {handler!r:.80}")
        is_hidden = self._is_hidden(feature, key)
        is_listed = self._is_listed(feature, key) and key not in self._dropped[feature]
        is_taken = key in self._added[feature] or (is_listed and not is_hidden)
        if is_taken and not replace:
            raise already_exists(feature, key)
        self._install(feature)
        if key not in self._added[feature] and self._may_be_listed(feature, key):
            self._covered[feature].add(key)
        self._added[feature][key] = definition
        if handler is not None:
            self._handlers[feature, key] = handler
        self._wake(feature)

    def remove(self, feature: Feature, key: str) -> None:
        if self._added[feature].pop(key, None) is not None:
            self._handlers.pop((feature, key), None)
            if key in self._covered[feature]:
                self._covered[feature].discard(key)
                self._changed[feature][key] = None
            else:
                self._dropped[feature].add(key)
        else:
            self._check_listed(feature, key)
            self._install(feature)
            self._changed[feature][key] = None
        self._wake(feature)

    def update(self, feature: Feature, key: str, fields: Mapping[str, Any]) -> None:
        added = self._added[feature].get(key)
        if added is None:
            self._check_listed(feature, key)
        # The definition that the handlers list is not known here; a minimal one is enough to check the fields.
        merged = _checked(feature, _merged(_minimal(feature, key) if added is None else added, fields))
        check_key(feature, key, item_key(feature, merged))
        if added is not None:
            self._added[feature][key] = merged
        else:
            self._install(feature)
            changes = {name: merged.get(name) for name in fields}
            self._changed[feature][key] = (self._changed[feature].get(key) or {}) | changes
        self._wake(feature)

    def delete(self, uri: str) -> None:
        if uri in self._added[Feature.RESOURCES]:
            self.remove(Feature.RESOURCES, uri)
        else:
            self._install(Feature.RESOURCES)
            self._deleted.add(uri)  # the handlers may list it for a while, and later again
            self._wake(Feature.RESOURCES)

    def _check_listed(self, feature: Feature, key: str) -> None:
        if self._is_hidden(feature, key) or not self._may_be_listed(feature, key):
            raise NotFound(f"{feature.value}: there is no {key!r}")

    def _is_hidden(self, feature: Feature, key: str) -> bool:
        return key in self._changed[feature] and self._changed[feature][key] is None

    def _is_listed(self, feature: Feature, key: str) -> bool:
        """Return whether the list was read and has the item. Before, the catalog has only what the store remembers."""
        items = self._catalog.items(feature)
        return items.was_read and key in items

    def _may_be_listed(self, feature: Feature, key: str) -> bool:
        """Return whether the user's handlers list the item, as far as is known."""
        items = self._catalog.items(feature)
        return key not in self._dropped[feature] and (not items.was_read or key in items)

    def _install(self, feature: Feature) -> None:
        """Wrap the user's handlers, once for each feature that is changed."""
        if feature in self._installed:
            return
        self._installed.add(feature)
        for name, method in list_methods(feature).items():
            self._install_list(name, feature, method.member)
        self._install_call(feature)

    def _install_list(self, method: str, feature: Feature, member: str) -> None:
        inner = self._server.get_request_handler(method)
        result_type: Any = MONOLITH_RESULTS[method]
        empty = result_type.model_validate({member: []})  # with all members that the protocol requires

        async def handle(ctx: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams) -> dict[str, Any]:
            result = as_dict(empty if inner is None else await inner.handler(ctx, params))
            keys = self._all_listed(method, params.cursor, result.get("nextCursor"), feature, result.get(member, []))
            is_template = member == "resourceTemplates"
            if keys is not None:
                for key in self._covered[feature] - keys:
                    if ("uriTemplate" in self._added[feature].get(key, ())) == is_template:
                        self._covered[feature].discard(key)
                if member == "resources":
                    self._deleted &= keys
            for key in list(self._dropped[feature]):
                if not self._is_listed(feature, key):
                    self._dropped[feature].discard(key)
            listed = [self._with_changes(feature, item) for item in result.get(member, [])]
            items = [item for item in listed if item is not None]
            if not result.get("nextCursor"):
                added = self._added[feature].values()
                items += [item for item in added if ("uriTemplate" in item) == is_template]
            return result | {member: items}

        self._server.add_request_handler(method, types.PaginatedRequestParams, handle)

    def _all_listed(
        self, method: str, cursor: str | None, following: str | None, feature: Feature, items: list[dict[str, Any]]
    ) -> set[str] | None:
        """Return the keys of this page and of those before it, if it is the last page.

        None if it is not, or if another client requested a page in between."""
        expected, keys = self._paginations.pop(method, ("", set())) if cursor else (cursor, set())
        if expected != cursor:
            return None
        keys = keys | {item_key(feature, item) for item in items}
        if not following:
            return keys
        self._paginations[method] = following, keys
        return None

    def _with_changes(self, feature: Feature, item: dict[str, Any]) -> dict[str, Any] | None:
        """Return an item of the user's handlers with its changes; None if it is hidden, deleted or replaced."""
        key = item_key(feature, item)
        self._dropped[feature].discard(key)
        if key in self._added[feature]:
            self._covered[feature].add(key)
            return None
        if feature is Feature.RESOURCES and key in self._deleted:
            return None
        changed = self._changed[feature].get(key, {})
        return None if changed is None else _merged(item, changed)

    def _install_call(self, feature: Feature) -> None:
        method, params_type, to_result = _CALLS[feature]
        inner = self._server.get_request_handler(method)

        async def handle(ctx: ServerRequestContext[Any, Any], params: Any) -> Any:
            key = str(getattr(params, feature.key_field))
            found = self._handler(feature, key)
            if found is not None:
                handler, arguments = found
                value = handler(**(arguments or getattr(params, "arguments", None) or {}))
                return to_result(key, await value if inspect.isawaitable(value) else value)
            if inner is None or self._is_hidden(feature, key):
                raise MCPError(types.INVALID_PARAMS, f"Unknown {feature.singular}: {key}")
            return await inner.handler(ctx, params)

        self._server.add_request_handler(method, params_type, handle)

    def _handler(self, feature: Feature, key: str) -> tuple[Callable[..., Any], dict[str, Any]] | None:
        if (feature, key) in self._handlers:
            return self._handlers[feature, key], {}
        if feature is Feature.RESOURCES:
            for template in self._added[feature]:
                matched = UriTemplate.parse(template).match(key) if "{" in template else None
                if matched is not None and (feature, template) in self._handlers:
                    return self._handlers[feature, template], dict(matched)
        return None


def _definition(feature: Feature, thing: Any, options: dict[str, Any]) -> dict[str, Any]:
    if isinstance(thing, types.Tool | types.Prompt | types.Resource | types.ResourceTemplate):
        thing = as_dict(thing)
    if not isinstance(thing, Mapping):
        raise InvalidItem(f"{feature.value}: a low-level server takes a definition and handler=…, not {thing!r:.80}")
    definition = {**thing, **options}
    if feature is Feature.TOOLS:
        definition.setdefault("inputSchema", {"type": "object"})
    return definition


def _checked(feature: Feature, definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a valid definition. An invalid item would make the whole list fail."""
    key = item_key(feature, definition)
    try:
        copy: dict[str, Any] = from_json(to_json(definition))
        _kind(feature, copy).model_validate(copy, by_name=False)
        if "uriTemplate" in copy:
            UriTemplate.parse(copy["uriTemplate"])
    except (ValueError, TypeError) as error:
        raise invalid(feature, key, error) from None
    return copy


def _kind(feature: Feature, definition: Mapping[str, Any]) -> type[BaseModel]:
    if feature is Feature.RESOURCES:
        return types.ResourceTemplate if "uriTemplate" in definition else types.Resource
    return types.Tool if feature is Feature.TOOLS else types.Prompt


def _minimal(feature: Feature, key: str) -> dict[str, Any]:
    if feature is Feature.RESOURCES:
        return {"uriTemplate" if "{" in key else "uri": key, "name": key}
    return {"name": key, "inputSchema": {"type": "object"}}


def _merged(item: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**item, **fields}.items() if value is not None}


def _tool_result(name: str, value: Any) -> Any:
    if isinstance(value, types.CallToolResult | types.InputRequiredResult):
        return value
    structured = value if isinstance(value, dict) else None
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=value if isinstance(value, str) else safe_json(value).decode())],
        structured_content=structured,
    )


def _prompt_result(name: str, value: Any) -> Any:
    if isinstance(value, str):
        message = types.PromptMessage(role="user", content=types.TextContent(type="text", text=value))
        return types.GetPromptResult(messages=[message])
    return value


def _read_result(uri: str, value: Any) -> Any:
    if isinstance(value, str):
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, text=value)])
    if isinstance(value, bytes):
        blob = base64.b64encode(value).decode()
        return types.ReadResourceResult(contents=[types.BlobResourceContents(uri=uri, blob=blob)])
    return value


_CALLS: dict[Feature, tuple[str, Any, Callable[[str, Any], Any]]] = {
    Feature.TOOLS: (CALL_TOOL, types.CallToolRequestParams, _tool_result),
    Feature.PROMPTS: (GET_PROMPT, types.GetPromptRequestParams, _prompt_result),
    Feature.RESOURCES: (READ_RESOURCE, types.ReadResourceRequestParams, _read_result),
}
