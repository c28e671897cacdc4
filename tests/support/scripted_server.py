"""A low-level server of the SDK whose lists, pages and notifications a test controls.

It changes nothing and sends nothing by itself. It counts the list requests that it gets.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)

from tests.support.uvicorn_server import address_of, run_uvicorn
from tidings import Live

__all__ = ["ScriptedServer"]

_EVENTS: dict[str, Any] = {"tools": ToolsListChanged, "prompts": PromptsListChanged, "resources": ResourcesListChanged}
_NOTIFICATIONS: dict[str, Any] = {
    "tools": types.ToolListChangedNotification,
    "prompts": types.PromptListChangedNotification,
    "resources": types.ResourceListChangedNotification,
}
_KEYS = {"tools": "name", "prompts": "name", "resources": "uri", "templates": "uriTemplate"}


class _Server(Server[Any]):
    """Announces the changes of its lists in both eras."""

    def create_initialization_options(self, *_: Any, **__: Any) -> Any:
        return super().create_initialization_options(NotificationOptions(True, True, True))


class ScriptedServer:
    def __init__(self, *, page_size: int = 1000, listens: bool = True, ttl: float = 0.0) -> None:
        self.lists: dict[str, dict[str, str]] = {name: {} for name in _KEYS}
        """The description of each item, by list and key."""
        self.page_size = page_size
        self.ttl = ttl
        self.meta: dict[str, Any] = {}
        """The `_meta` of list results."""
        self.requests: Counter[str] = Counter()
        self.between_pages: Callable[[str], Any] | None = None
        """Called before each page after the first one, with the name of the list."""
        self.release: asyncio.Event | None = None
        """If set, list requests wait for it."""
        self.sessions: dict[str, Any] = {}
        """The sessions of legacy clients that have listed something, by id."""
        self._listens = listens
        self.bus = InMemorySubscriptionBus()
        self.server = self._make_server()

    def _make_server(self) -> Server[Any]:
        handlers: dict[str, Any] = {}
        if self._listens:
            handlers["on_subscriptions_listen"] = ListenHandler(self.bus)
            handlers |= dict.fromkeys(("on_subscribe_resource", "on_unsubscribe_resource"), self._subscribe)
        make = _Server if self._listens else Server
        templates = self._lister("templates", types.ListResourceTemplatesResult, "resourceTemplates")
        return make(
            "scripted",
            on_list_tools=self._lister("tools", types.ListToolsResult, "tools"),
            on_list_prompts=self._lister("prompts", types.ListPromptsResult, "prompts"),
            on_list_resources=self._lister("resources", types.ListResourcesResult, "resources"),
            on_list_resource_templates=templates,
            on_call_tool=self._call,
            **handlers,
        )

    def names(self, name: str) -> list[str]:
        return sorted(self.lists[name])

    async def changed(self) -> None:
        """A subclass takes over the changed `lists` here."""

    async def drop(self, server: Any) -> None:
        """Close every connection without a last message."""
        self.drop_connections(server)

    async def notify(self, feature: str, meta: dict[str, Any] | None = None) -> None:
        """Notify of a list; only legacy sessions get `meta`."""
        await self.bus.publish(_EVENTS[feature]())
        params = types.NotificationParams.model_validate({"_meta": meta}) if meta else None
        for session in self.sessions.values():
            await session.send_notification(_NOTIFICATIONS[feature](params=params))

    async def notify_content(self, uri: str) -> None:
        """Notify of a content, in the legacy era also sessions that have not subscribed to it."""
        await self.bus.publish(ResourceUpdated(uri=uri))
        for session in self.sessions.values():
            await session.send_resource_updated(uri)

    def _lister(self, name: str, result: Any, member: str) -> Any:
        async def list_items(ctx: Any, params: types.PaginatedRequestParams | None) -> Any:
            self.requests[name] += 1
            if session_id := getattr(ctx.request, "headers", {}).get("mcp-session-id"):
                self.sessions[session_id] = ctx.session
            start = int(params.cursor) if params and params.cursor else 0
            if self.release is not None:
                await self.release.wait()
            if start and self.between_pages is not None:
                await self.between_pages(name)
            # In the order of insertion, which is not that of the names.
            items = [self._item(name, key, text) for key, text in self.lists[name].items()]
            page: dict[str, Any] = {member: items[start : start + self.page_size], "_meta": self.meta}
            if start + self.page_size < len(items):
                page["nextCursor"] = str(start + self.page_size)
            if self.ttl:
                page["ttlMs"] = int(self.ttl * 1000)
            return result.model_validate(page)

        return list_items

    def _item(self, name: str, key: str, text: str) -> dict[str, Any]:
        item = {_KEYS[name]: key, "name": key, "description": text}
        return {**item, "inputSchema": {"type": "object"}} if name == "tools" else item

    async def _subscribe(self, ctx: Any, params: Any) -> types.EmptyResult:
        return types.EmptyResult()

    async def _call(self, ctx: Any, params: Any) -> types.CallToolResult:
        return types.CallToolResult(content=[types.TextContent(text=f"{params.name} ran")])

    @asynccontextmanager
    async def serving(self, port: int = 0, *, live: bool = False) -> AsyncIterator[Any]:
        """Serve on HTTP, with Tidings if `live`; yield the uvicorn server."""
        self.sessions.clear()
        self.bus = InMemorySubscriptionBus()
        self.server = self._make_server()
        app = Live(self.server).http_app() if live else self.server.streamable_http_app()
        # With this parser no stream of Tidings is parked, so `drop_connections` finds them all.
        async with run_uvicorn(app, port=port, http="h11") as server:
            yield server

    @staticmethod
    def url(server: Any) -> str:
        return f"http://127.0.0.1:{address_of(server)[1]}/mcp"

    @staticmethod
    def drop_connections(server: Any) -> None:
        """Close every connection without a last message."""
        for connection in list(server.server_state.connections):
            # Tidings puts an object of its own in the place of a protocol whose response is a stream.
            transport = connection.transport if hasattr(connection, "transport") else connection._transport
            transport.abort()
