"""The board as each kind of server: the SDK's high-level one, its low-level one, and FastMCP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, PromptsListChanged, ResourceUpdated

from tests.support.board_actions import CHANGE_SCHEMA, LOREM, UNNOTICED, Board, card, greet, sprint, steady
from tests.support.tokens import TOKENS, authentication
from tidings import Feature
from tidings.sdk import internals


class HighLevelBoard(Board):
    """The methods that `MCPServer` and `FastMCP` share."""

    server: Any

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        if feature in ("resources", "templates"):
            function: Callable[..., Any] = card if feature == "templates" else sprint
            # A new name each time would be another change.
            self.live.resources.add(function, uri=key, name="added", description=description, replace=replace)
        else:
            function = greet if feature == "prompts" else steady
            self.items(feature).add(function, name=key, description=description, replace=replace)

    # Changes without Live, through the methods of the server itself

    def own_tool(self, key: str) -> None:
        self.server.tool(name=key, description=LOREM)(steady)

    def own_prompt(self, key: str) -> None:
        self.server.prompt(name=key, description=LOREM)(greet)

    def own_resource(self, key: str) -> None:
        self.server.resource(key, description=LOREM)(sprint)

    def own_template(self, key: str) -> None:
        self.server.resource(key, description=LOREM)(card)


class MCPServerBoard(HighLevelBoard):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        server: MCPServer[Any] = MCPServer("board", **(authentication() if options.get("auth") else {}))
        self.server = server

        @server.tool()
        async def change(
            ctx: Context[Any, Any], what: str, where: str = "request", args: dict[str, Any] | None = None
        ) -> str:
            return await self.change(what, where, args or {}, ctx)

        server.tool()(steady)
        server.prompt()(greet)
        server.resource("board://sprint")(sprint)
        server.resource("board://card/{number}")(card)
        if options.get("middleware"):
            server.middleware.append(Own())
        self.live = self.make_live(server)

    def own_add_tool(self, key: str) -> None:
        self.server.add_tool(steady, name=key, description=LOREM)

    def own_remove_tool(self, key: str) -> None:
        self.server.remove_tool(key)

    def own_add_prompt(self, key: str) -> None:
        from mcp.server.mcpserver.prompts import Prompt

        self.server.add_prompt(Prompt.from_function(greet, name=key, description=LOREM))

    def own_remove_prompt(self, key: str) -> None:
        self.server.remove_prompt(key)

    def own_add_resource(self, key: str) -> None:
        from mcp.server.mcpserver.resources import TextResource

        self.server.add_resource(TextResource(uri=key, name=key, text=LOREM))

    async def async_notify(self, ctx: Context[Any, Any], kind: str, uri: str = "") -> None:
        """Call `ctx.notify_*()`, as users of the SDK do."""
        if kind == "resource":
            await ctx.notify_resource_updated(uri)
        else:
            await getattr(ctx, f"notify_{kind}_changed")()

    async def async_quietly_then_notify(self, ctx: Context[Any, Any], key: str) -> None:
        """Make a change that only `ctx.notify_tools_changed()` detects."""
        internals.registry_of(self.server, "tools")[key].description = "Changed in place."
        await ctx.notify_tools_changed()

    def quietly(self, key: str) -> None:
        """Make a change that only `live.refresh()` detects."""
        internals.registry_of(self.server, "tools")[key].description = UNNOTICED


class FastMCPBoard(HighLevelBoard):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        from fastmcp import Context as FastContext
        from fastmcp import FastMCP
        from fastmcp.server.auth.providers.jwt import StaticTokenVerifier

        auth = StaticTokenVerifier(TOKENS, required_scopes=["read"]) if options.get("auth") else None
        self.server = FastMCP("board", auth=auth)
        server = self.server

        async def change(
            ctx: FastContext, what: str, where: str = "request", args: dict[str, Any] | None = None
        ) -> str:
            return await self.change(what, where, args or {}, ctx)

        change.__annotations__["ctx"] = FastContext  # a local name, which FastMCP could not look up
        server.tool(change)
        server.tool(steady)
        server.prompt(greet)
        server.resource("board://sprint")(sprint)
        server.resource("board://card/{number}")(card)
        if options.get("middleware"):
            from fastmcp.server.middleware import Middleware

            server.add_middleware(Middleware())
        self.live = self.make_live(server)

    def own_add_tool(self, key: str) -> None:
        from fastmcp.tools import Tool

        self.server.add_tool(Tool.from_function(steady, name=key, description=LOREM))

    def own_remove_tool(self, key: str) -> None:
        self.server.local_provider.remove_tool(key)

    def own_add_prompt(self, key: str) -> None:
        from fastmcp.prompts import Prompt

        self.server.add_prompt(Prompt.from_function(greet, name=key, description=LOREM))

    def own_remove_prompt(self, key: str) -> None:
        self.server.local_provider.remove_prompt(key)

    def own_add_resource(self, key: str) -> None:
        from fastmcp.resources import Resource

        self.server.add_resource(Resource.from_function(sprint, uri=key, description=LOREM))

    def own_remove_resource(self, key: str) -> None:
        self.server.local_provider.remove_resource(key)

    def own_add_template(self, key: str) -> None:
        from fastmcp.resources import ResourceTemplate

        self.server.add_template(ResourceTemplate.from_function(card, uri_template=key, description=LOREM))

    def own_remove_template(self, key: str) -> None:
        self.server.local_provider.remove_template(key)

    def quietly(self, key: str) -> None:
        """Make a change that only `live.refresh()` detects."""
        registry = self.server.local_provider._components
        component = next(each for each in registry.values() if each.name == key)
        component.description = UNNOTICED


class LowLevelBoard(Board):
    """A board whose handlers list `own`. Changes through Live are applied on top of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.refreshed = asyncio.Event()
        self.own: dict[str, dict[str, dict[str, Any]]] = {
            "tools": {
                "change": {"name": "change", "inputSchema": CHANGE_SCHEMA},
                "steady": {"name": "steady", "inputSchema": {"type": "object"}},
            },
            "prompts": {"greet": {"name": "greet", "arguments": [{"name": "name", "required": True}]}},
            "resources": {"board://sprint": {"uri": "board://sprint", "name": "sprint"}},
            "templates": {"board://card/{number}": {"uriTemplate": "board://card/{number}", "name": "card"}},
        }
        only = options.get("only", ["tools", "prompts", "resources"])
        self.bus = InMemorySubscriptionBus()
        handlers: dict[str, Any] = {
            "on_list_tools": self._list_tools,
            "on_call_tool": self._call_tool,
            "on_subscriptions_listen": ListenHandler(self.bus),  # as the SDK documents it
        }
        if "prompts" in only:
            handlers |= {"on_list_prompts": self._list_prompts, "on_get_prompt": self._get_prompt}
        if "resources" in only:
            handlers |= {
                "on_list_resources": self._list_resources,
                "on_list_resource_templates": self._list_templates,
                "on_read_resource": self._read_resource,
            }
        if "contents" in only:
            handlers["on_read_resource"] = self._read_resource
        self.server: Server[Any] = Server("board", **handlers)
        if options.get("middleware"):
            self.server.middleware.append(Own())
        self.live = self.make_live(self.server)

    async def _list_tools(self, ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        listed = list(self.own["tools"].values())
        if self.options.get("late") and ctx.request_id != self.live.list_reader.request_id:
            await self.refreshed.wait()
        return types.ListToolsResult.model_validate({"tools": listed})

    async def _call_tool(self, ctx: ServerRequestContext[Any, Any], params: Any) -> types.CallToolResult:
        if params.name == "change":
            given = {"where": "request", "args": {}, **(params.arguments or {})}
            text = await self.change(given["what"], given["where"], given["args"], ctx)
        else:
            text = steady()
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    async def _list_prompts(self, ctx: Any, params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult.model_validate({"prompts": list(self.own["prompts"].values())})

    async def _get_prompt(self, ctx: Any, params: Any) -> types.GetPromptResult:
        message = {"role": "user", "content": {"type": "text", "text": greet("you")}}
        return types.GetPromptResult.model_validate({"messages": [message]})

    async def _list_resources(self, ctx: Any, params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult.model_validate({"resources": list(self.own["resources"].values())})

    async def _list_templates(self, ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult.model_validate(
            {"resourceTemplates": list(self.own["templates"].values())}
        )

    async def _read_resource(self, ctx: Any, params: Any) -> types.ReadResourceResult:
        return types.ReadResourceResult.model_validate({"contents": [{"uri": str(params.uri), "text": LOREM}]})

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        if feature == "templates":
            definition = {"uriTemplate": key, "name": "added", "description": description}
            self.live.resources.add(definition, handler=card, replace=replace)
        elif feature == "resources":
            definition = {"uri": key, "name": "added", "description": description}
            self.live.resources.add(definition, handler=sprint, replace=replace)
        elif feature == "prompts":
            self.live.prompts.add({"name": key, "description": description}, handler=greet, replace=replace)
        else:
            self.live.tools.add({"name": key, "description": description}, handler=steady, replace=replace)

    def own_set(self, feature: str, key: str, item: dict[str, Any] | None) -> None:
        """Change the lists of the handlers without a notification."""
        if item is None:
            del self.own[feature][key]
        else:
            self.own[feature][key] = item

    async def async_own_set_and_refresh(self, ctx: Any, **args: Any) -> None:
        self.own_set(**args)
        await self.live.refresh(Feature("resources" if args["feature"] == "templates" else args["feature"]))
        self.refreshed.set()

    async def async_own_set_and_send(self, ctx: Any, **args: Any) -> None:
        self.own_set(**args)
        await ctx.session.send_prompt_list_changed()

    async def async_own_set_and_publish(self, ctx: Any, **args: Any) -> None:
        self.own_set(**args)
        await self.bus.publish(PromptsListChanged())

    async def async_publish_update(self, ctx: Any, uri: str) -> None:
        await self.bus.publish(ResourceUpdated(uri=uri))


class Own:
    """Middleware of the user, which must get every message."""

    async def __call__(self, ctx: Any, call_next: Any) -> Any:
        return await call_next(ctx)


BOARDS: dict[str, type[Board]] = {"mcpserver": MCPServerBoard, "lowlevel": LowLevelBoard, "fastmcp": FastMCPBoard}
