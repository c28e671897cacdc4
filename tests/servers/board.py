"""The server of the Live tests: one small board, as each kind of server, on either transport.

    python tests/servers/board.py KIND TRANSPORT [OPTIONS]

Clients change it through its tool `change`: `what` names a method below, `args` are its arguments, and `where` says
where it runs: in the request, on a worker thread of the request, later on the event loop, or on a thread that knows
nothing of any request. It answers with JSON: what the method returned, or the error by its class and text.

OPTIONS is a JSON object: `policy` (knobs), `deny` (topics refused by principal, "*" for nobody in particular),
`asks` ("sync" or "async": how `authorize` is written), `auth` (tokens are needed), `shared_lists`, `middleware` (the
server has one of its own), `only` (the features of a low-level server), `late`
(its tools are listed as they were before the next refresh), `terms` (by principal, "*" for nobody in
particular), `app` (options of the HTTP app) and `telemetry` (a mode of `tests/servers/watched.py`, or false for none).
On HTTP the first line of standard output is the port.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio.to_thread
import mcp_types as types
import uvicorn
from mcp.server import Server, ServerRequestContext
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer
from pydantic import AnyHttpUrl

from tidings import Feature, Filter, Live, Notification, Policy, Principal, Terms, Topic, live, seams
from tidings.history import as_json
from tidings.lanes.app import serve_app
from tidings.lanes.parked import Parked

TOKENS = {
    "alice": {"client_id": "alice", "scopes": ["read"]},
    "bob": {"client_id": "bob", "scopes": ["read"]},
    "weak": {"client_id": "weak", "scopes": []},
}
"""By the token itself; all but the last have the scope that is required."""

LOREM = "Unchanging."
CHANGE_SCHEMA = {
    "type": "object",
    "properties": {"what": {"type": "string"}, "where": {"type": "string"}, "args": {"type": "object"}},
    "required": ["what"],
}


def steady() -> str:
    """A tool that is always there."""
    return "steady"


def greet(name: str) -> str:
    """A prompt that is always there."""
    return f"Greet {name}."


def sprint() -> str:
    """A resource that is always there."""
    return LOREM


def card(number: str) -> str:
    """A template that is always there."""
    return f"card {number}"


class Board:
    """What can be changed on every kind of server."""

    live: Live

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.asked: list[list[str | None]] = []
        self.told: dict[str, list[Notification]] = {}
        self.outside: queue.Queue[Callable[[], object]] = queue.Queue()
        if options.get("telemetry"):
            from tests.servers.watched import set_up

            self.watched = set_up(options["telemetry"])
        threading.Thread(target=self._work, daemon=True).start()

    def make_live(self, server: Any) -> Live:
        authorize = {None: None, "sync": self._authorize, "async": self._authorize_later}[self.options.get("asks")]
        return Live(
            server,
            policy=Policy(**self.options.get("policy", {})),
            authorize=authorize,
            shared_lists=self.options.get("shared_lists"),
            terms=self._terms if "terms" in self.options else None,
            telemetry=self.options.get("telemetry") is not False,
        )

    def _terms(self, principal: Principal | None) -> Terms | None:
        """What a server's own code would build."""
        knobs = self.options["terms"].get(principal.client_id if principal else "*")
        return None if knobs is None else Terms(**knobs)

    def _authorize(self, principal: Principal | None, topic: Topic) -> bool:
        name = topic.value if isinstance(topic, Feature) else topic
        who = principal.client_id if principal else None
        self.asked.append([who, name])
        return name not in self.options.get("deny", {}).get(who or "*", ())

    async def _authorize_later(self, principal: Principal | None, topic: Topic) -> bool:
        await asyncio.sleep(0)
        return self._authorize(principal, topic)

    def _work(self) -> None:
        while True:
            try:
                self.outside.get()()
            except Exception:  # the next one may be fine
                logging.getLogger("board").exception("a change outside any request failed")

    async def change(self, what: str, where: str, args: dict[str, Any], ctx: Any) -> str:
        async_verb: Callable[..., Awaitable[object]] | None = getattr(self, f"async_{what}", None)
        try:
            if async_verb is not None:
                return json.dumps({"result": await async_verb(ctx=ctx, **args)})
            verb = getattr(self, what)
            if where == "request":
                return json.dumps({"result": verb(**args)})
            if where == "thread":
                return json.dumps({"result": await anyio.to_thread.run_sync(lambda: verb(**args))})
            if where == "loop":
                loop = asyncio.get_running_loop()
                loop.call_soon(lambda: verb(**args), context=contextvars.Context())
            else:
                self.outside.put(lambda: verb(**args))
            return json.dumps({"result": "later"})
        except Exception as error:  # the tests look at what a caller gets to see
            return json.dumps({"error": type(error).__name__, "text": str(error)})

    # Through Live

    def items(self, feature: str) -> Any:
        return {"tools": self.live.tools, "prompts": self.live.prompts}.get(feature, self.live.resources)

    def remove(self, feature: str, key: str) -> None:
        self.items(feature).remove(key)

    def update(self, feature: str, key: str, fields: dict[str, Any]) -> None:
        self.items(feature).update(key, fields)

    def updated(self, uri: str, etag: str | None = None, metadata: dict[str, Any] | None = None) -> int:
        return len(self.live.resources.updated(uri, etag=etag, **(metadata or {})))

    def deleted(self, uri: str) -> int:
        return len(self.live.resources.deleted(uri))

    def many(self, steps: list[dict[str, Any]]) -> None:
        """Several changes as one publication."""
        with self.live.catalog.batch():
            for step in steps:
                getattr(self, step["what"])(**step["args"])

    async def async_refresh(self, ctx: Any) -> None:
        await self.live.refresh()

    async def async_flood(self, ctx: Any, uri: str, count: int, size: int) -> None:
        """Go on updating a content after the answer, as fast as it goes."""

        async def flood() -> None:
            for number in range(count):
                self.live.resources.updated(uri, number=number, padding="x" * size)
                if number % 10 == 0:
                    await asyncio.sleep(0)

        self.flooding = asyncio.create_task(flood())

    def crowd(self, count: int) -> None:
        """Many tools."""
        for number in range(count):
            self.add("tools", f"tool-{number}", description=LOREM * 40)

    def noise(self) -> str:
        """What no tool should do, and many do."""
        print("noise")  # noqa: T201  # that is the point
        os.write(1, b"noise\n")
        subprocess.run(["sh", "-c", "echo noise"], check=True)
        return sys.stdin.read() + subprocess.run(["cat"], check=True, capture_output=True, text=True).stdout

    async def async_mutter(self, ctx: Any) -> None:
        """Print something from a thread, so late that the client has left."""

        def mutter() -> None:
            threading.Event().wait(0.5)
            print("noise", flush=True)  # noqa: T201  # that is the point

        asyncio.get_running_loop().run_in_executor(None, mutter)

    def present(self, **fields: Any) -> None:
        """Other instructions, other extensions."""
        for name, value in fields.items():
            setattr(self.live.lowlevel, name, value)

    def stop(self) -> None:
        """What a signal does, with the process left running."""
        self.live.stop()

    # Asking

    def history(self, **wanted: Any) -> dict[str, Any]:
        """`live.history()`, as clients see it."""
        is_full = wanted.pop("detail", None) == "full"
        past = self.live.history(**wanted)
        return {"changes": [as_json(each, is_full=is_full) for each in past.changes], "complete": past.complete}

    def hook(self, name: str, url: str) -> None:
        """A webhook of the server's own."""
        self.live.webhooks.put(name, url, "tools")

    def hooks(self) -> list[str]:
        return [each.name for each in self.live.durables.all() if each.webhook is not None]

    def state(self) -> dict[str, Any]:
        """Who listens, and what is kept for them."""
        live = self.live
        subscriptions = live.hub.subscriptions()
        return {
            "subscribers": len(live.hub),
            "watched": sorted(topic for topic, _ in subscriptions if isinstance(topic, str)),
            "labels": sorted({each.label for _, watchers in subscriptions for each in watchers}),
            "behind": {
                each.label: sorted(feature.value for feature in each.features if self._is_behind(each, feature))
                for _, watchers in subscriptions
                for each in watchers
            },
            "pending": sum(each.pending for _, watchers in subscriptions for each in watchers),
            "streams": live.gate.count,
            "parked": sum(type(each.channel) is Parked for streams in live.listen._streams for each in streams),
            "spliced": len(live.splice._sessions),
            "standing": len(live.splice),
            "asked": self.asked,
        }

    def hear(self, name: str, filter: dict[str, Any] | None = None, policy: dict[str, Any] | None = None) -> None:
        """Let somebody in this process watch the tools."""
        told: list[Notification] = self.told.setdefault(name, [])
        options: dict[str, Any] = {"filter": Filter(**filter) if filter else None, "policy": Policy(**(policy or {}))}
        self.live.hub.subscribe(partial(told.append), Feature.TOOLS, label=name, **options)

    def heard(self) -> dict[str, int]:
        return {name: len(told) for name, told in self.told.items()}

    def spans(self) -> list[dict[str, Any]]:
        return self.watched.spans()

    def readings(self) -> dict[str, Any]:
        return self.watched.readings()

    def _is_behind(self, subscriber: Any, feature: Feature) -> bool:
        """Whether a subscriber was last told something else than is true now."""
        told = self.live.hub.told(subscriber, feature)
        return told is None or told.digest != self.live.catalog.version(feature).digest

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        raise NotImplementedError


class MCPServerBoard(Board):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.server: MCPServer[Any] = MCPServer("board", **(authentication() if options.get("auth") else {}))
        server = self.server

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

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        add_function(self, feature, key, description, replace)

    # Behind Live's back

    def own_add_tool(self, key: str) -> None:
        self.server.add_tool(steady, name=key, description=LOREM)

    def own_tool(self, key: str) -> None:
        self.server.tool(name=key, description=LOREM)(steady)

    def own_remove_tool(self, key: str) -> None:
        self.server.remove_tool(key)

    def own_add_prompt(self, key: str) -> None:
        from mcp.server.mcpserver.prompts import Prompt

        self.server.add_prompt(Prompt.from_function(greet, name=key, description=LOREM))

    def own_prompt(self, key: str) -> None:
        self.server.prompt(name=key, description=LOREM)(greet)

    def own_remove_prompt(self, key: str) -> None:
        self.server.remove_prompt(key)

    def own_add_resource(self, key: str) -> None:
        from mcp.server.mcpserver.resources import TextResource

        self.server.add_resource(TextResource(uri=key, name=key, text=LOREM))

    def own_resource(self, key: str) -> None:
        self.server.resource(key, description=LOREM)(sprint)

    def own_template(self, key: str) -> None:
        self.server.resource(key, description=LOREM)(card)

    async def async_notify(self, ctx: Context[Any, Any], kind: str, uri: str = "") -> None:
        """`ctx.notify_*()`, as the SDK's users call it."""
        if kind == "resource":
            await ctx.notify_resource_updated(uri)
        else:
            await getattr(ctx, f"notify_{kind}_changed")()

    async def async_quietly_then_notify(self, ctx: Context[Any, Any], key: str) -> None:
        """A change that nothing notices but `ctx.notify_tools_changed()`."""
        seams.registries_of(self.server)["tools"][key].description = "Changed in place."
        await ctx.notify_tools_changed()

    def quietly(self, key: str, feature: str = "tools") -> None:
        """A change that nothing notices but `live.refresh()`."""
        seams.registries_of(self.server)[feature][key].description = "Changed without a word."


class FastMCPBoard(Board):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        from fastmcp import Context as FastContext
        from fastmcp import FastMCP
        from fastmcp.server.auth.providers.jwt import StaticTokenVerifier

        auth = StaticTokenVerifier(TOKENS, required_scopes=["read"]) if options.get("auth") else None
        self.server: FastMCP[Any] = FastMCP("board", auth=auth)
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

    def add(self, feature: str, key: str, description: str = LOREM, replace: bool = False) -> None:
        add_function(self, feature, key, description, replace)

    # Behind Live's back

    def own_add_tool(self, key: str) -> None:
        from fastmcp.tools import Tool

        self.server.add_tool(Tool.from_function(steady, name=key, description=LOREM))

    def own_tool(self, key: str) -> None:
        self.server.tool(name=key, description=LOREM)(steady)

    def own_remove_tool(self, key: str) -> None:
        self.server.local_provider.remove_tool(key)

    def own_add_prompt(self, key: str) -> None:
        from fastmcp.prompts import Prompt

        self.server.add_prompt(Prompt.from_function(greet, name=key, description=LOREM))

    def own_prompt(self, key: str) -> None:
        self.server.prompt(name=key, description=LOREM)(greet)

    def own_remove_prompt(self, key: str) -> None:
        self.server.local_provider.remove_prompt(key)

    def own_add_resource(self, key: str) -> None:
        from fastmcp.resources import Resource

        self.server.add_resource(Resource.from_function(sprint, uri=key, description=LOREM))

    def own_resource(self, key: str) -> None:
        self.server.resource(key, description=LOREM)(sprint)

    def own_remove_resource(self, key: str) -> None:
        self.server.local_provider.remove_resource(key)

    def own_add_template(self, key: str) -> None:
        from fastmcp.resources import ResourceTemplate

        self.server.add_template(ResourceTemplate.from_function(card, uri_template=key, description=LOREM))

    def own_template(self, key: str) -> None:
        self.server.resource(key, description=LOREM)(card)

    def own_remove_template(self, key: str) -> None:
        self.server.local_provider.remove_template(key)

    def quietly(self, key: str) -> None:
        """A change that nothing notices but `live.refresh()`."""
        registry = seams.fastmcp_registry(self.server)
        component = next(each for each in registry.values() if each.name == key)
        component.description = "Changed without a word."


class LowLevelBoard(Board):
    """Its handlers list `own`; what is done through Live lies over it."""

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
        handlers: dict[str, Any] = {"on_list_tools": self._list_tools, "on_call_tool": self._call_tool}
        if "prompts" in only:
            handlers |= {"on_list_prompts": self._list_prompts, "on_get_prompt": self._get_prompt}
        if "resources" in only:
            handlers |= {
                "on_list_resources": self._list_resources,
                "on_list_resource_templates": self._list_templates,
                "on_read_resource": self._read_resource,
            }
        self.server: Server[Any] = Server("board", **handlers)
        if options.get("middleware"):
            self.server.middleware.append(Own())
        self.live = self.make_live(self.server)

    async def _list_tools(self, ctx: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        listed = list(self.own["tools"].values())
        if self.options.get("late") and ctx.request_id != self.live.own_request_id:
            await self.refreshed.wait()
        if self.options.get("page"):
            start = int(params.cursor) if params and params.cursor else 0
            end = start + int(self.options["page"])
            following = str(end) if end < len(listed) else None
            return types.ListToolsResult.model_validate({"tools": listed[start:end], "nextCursor": following})
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
        """What the handlers list changes, and nobody is told so."""
        if item is None:
            del self.own[feature][key]
        else:
            self.own[feature][key] = item

    async def async_own_set_and_refresh(self, ctx: Any, **args: Any) -> None:
        self.own_set(**args)
        await self.live.refresh(Feature("resources" if args["feature"] == "templates" else args["feature"]))
        self.refreshed.set()


def add_function(board: Board, feature: str, key: str, description: str, replace: bool) -> None:
    """As the high-level servers' users do it."""
    if feature in ("resources", "templates"):
        function: Callable[..., Any] = card if feature == "templates" else sprint
        # A new name each time would be a change of its own.
        board.live.resources.add(function, uri=key, name="added", description=description, replace=replace)
    else:
        function = greet if feature == "prompts" else steady
        board.items(feature).add(function, name=key, description=description, replace=replace)


def authentication() -> dict[str, Any]:
    """What the SDK's servers need to ask for tokens."""
    settings = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"), resource_server_url=None, required_scopes=["read"]
    )
    return {"auth": settings, "token_verifier": Verifier()}


class Verifier:
    async def verify_token(self, token: str) -> AccessToken | None:
        known = TOKENS.get(token)
        return AccessToken.model_validate({"token": token, **known}) if known else None


class Own:
    """Middleware of the user's, which wants to see every message."""

    async def __call__(self, ctx: Any, call_next: Any) -> Any:
        return await call_next(ctx)


BOARDS: dict[str, type[Board]] = {"mcpserver": MCPServerBoard, "lowlevel": LowLevelBoard, "fastmcp": FastMCPBoard}


def main() -> None:
    # Nothing hangs here, so the lists are waited for, however long a busy machine takes to read them the first time.
    live._READING_TIME = 60.0
    kind, transport, *rest = sys.argv[1:]
    options: dict[str, Any] = json.loads(rest[0]) if rest else {}
    logging.basicConfig(level=options.get("log", "WARNING"), format="%(name)s %(levelname)s %(message)s")
    board = BOARDS[kind](options)
    if transport == "stdio":
        board.live.run("stdio")
        return
    listener = socket.create_server(("127.0.0.1", 0))
    # A low-level server is given its authentication together with the app.
    needs = authentication() if options.get("auth") and kind == "lowlevel" else {}
    app = board.live.http_app(**options.get("app", {}), **needs)
    # On the wire before anything is served: the backlog keeps whoever connects at once.
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    if options.get("own"):
        serve_app(app, sockets=[listener], log_level="warning")
        return
    # With this parser nothing is parked: as any ASGI server is to us.
    parser = options.get("parser", "h11")
    config = uvicorn.Config(app, http=parser, log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
