"""A server process for the fault tests, with routes that show its internal state.

Started as `uvicorn tests.support.faults.app:app`, or `python -m tests.support.faults.app http` (or `stdio`). Each test
passes its settings as the JSON of `Settings` in the environment variable `TIDINGS_FAULTS`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import mcp_types as types
import msgspec
from mcp.server import Server, ServerRequestContext
from mcp.server.auth.provider import AccessToken
from mcp.server.mcpserver import MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.faults.wire import ENVIRONMENT, OPERATIONS, RECORD, STATE, WATCHED, Settings
from tests.support.kinds import Own
from tests.support.streams import QueueMiddleware
from tests.support.tokens import authentication
from tidings import Live, Policy
from tidings.cluster import Nats
from tidings.core.catalog import Catalog
from tidings.core.model import Change, Feature, Topic
from tidings.server.authorization import Principal


class Board:
    """One server, made live."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lists_fail = settings.lists_fail
        self._broken: set[str] = set()
        self.changed: list[tuple[int, Change]] = []
        """The committed changes, each with its monotonic time, before any notification was sent."""
        self._file: FileIO | None = None
        if settings.is_lowlevel:
            self.server: Any = Server("board", on_list_tools=self._list_tools, on_call_tool=self._call_tool)
            settings.options["custom_starlette_routes"] = self._routes()
        else:
            self.server = MCPServer("board", **(authentication(_AnyToken()) if settings.is_guarded else {}))
            self.server.add_tool(_echo, name="echo")
            self.server.add_tool(self.change, name="change")
            self.server.add_tool(self.record, name="record")
            for route in self._routes():
                self.server.custom_route(route.path, methods=["GET", "POST"])(route.endpoint)
        if settings.has_middleware:
            lowlevel = self.server if settings.is_lowlevel else self.server._lowlevel_server
            lowlevel.middleware.append(Own())
        self.live = Live(
            self.server,
            policy=Policy(**settings.policy),
            authorize=_broken_authorize if settings.is_broken else _authorize if settings.is_guarded else None,
            on_watched=_broken("the user's hook") if settings.is_broken else None,
            on_unwatched=_broken("the user's hook") if settings.is_broken else None,
            store=Path(settings.folder, STATE) if settings.folder and not settings.cluster else None,
            cluster=Nats(settings.cluster) if settings.cluster else None,
        )
        if not settings.lists_fail:
            self.live.list_reader.request_timeout = 60.0  # no list handler hangs, but the machine may be busy
        if settings.is_broken:
            self.live.catalog.follow(_broken("a sink of the catalog"))
            self.live.hub.subscribe(_broken("the user's callback"), *Feature)
        self.live.catalog._sinks = (self._note, *self.live.catalog._sinks)
        if settings.folder:
            self._file = FileIO(Path(settings.folder, RECORD), "ab")
            self._restore_items(Path(settings.folder, OPERATIONS))

    # Changes

    def change(self, operations: list[dict[str, Any]]) -> int:
        """Carry out operations such as `{"do": "update", "of": "tools", "key": "echo", "text": "…"}`."""
        for operation in operations:
            self._change(**operation)
        return self.live.catalog.revision

    def record(self, start: int = 0) -> list[Any]:
        """Return the changes from the nth on: the time, and the fields of `Changed`."""
        return [_row(at, change) for at, change in self.changed[start:]]

    def _restore_items(self, path: Path) -> None:
        """Restore the items and contents of earlier processes, before clients connect."""
        items: dict[tuple[str, str], dict[str, Any]] = {}
        contents: dict[str, dict[str, Any]] = {}
        for each in msgspec.json.decode(path.read_bytes()) if path.exists() else ():
            do, of, key = each["do"], each["of"], each["key"]
            if do in ("remove", "deleted"):
                items.pop((of, key), None)
            if do in ("add", "update"):
                items[of, key] = each | {"do": "add"}
            if do in ("updated", "deleted"):
                contents[key] = each
            elif do == "add" and contents.get(key, {}).get("do") == "deleted":
                del contents[key]
        for each in items.values():
            self._change(**each)
        for each in contents.values():
            # A content without an etag has no digest to restore.
            if each["text"] or each["do"] == "deleted":
                self._change(**each)

    def _change(self, do: str, of: str, key: str, text: str = "", size: int = 0) -> None:
        live = self.live
        if size:
            text = text.ljust(size, "x")
        if do == "cut":
            self._cut(int(text) if text else None)
        elif do == "fail":
            self.lists_fail = text
        elif do == "updated":
            live.resources.updated(key, etag=text or None)
        elif do == "deleted":
            live.resources.deleted(key)
        elif do == "remove":
            getattr(live, of).remove(key)
        elif do == "update":
            getattr(live, of).update(key, description=text)
        elif self.settings.is_lowlevel:
            getattr(live, of).add({"name": key, "description": text}, handler=_echo)
        else:
            options = {"uri": key, "name": key} if of == "resources" else {"name": key}
            getattr(live, of).add(_echo, description=text, **options)

    def _cut(self, number: int | None) -> None:
        """End a legacy stream, or all of them.

        The connection breaks, and everything written later is lost. The next time, the stream ends normally, because
        the client of the SDK gives up after two broken connections in a row.
        """
        splice = self.live.legacy_streams
        found = [(key, each) for key, each in splice._sessions.items() if each.response is not None]
        for session_id, session in found if number is None else found[number % (len(found) or 1) :][:1]:
            assert session.response is not None
            # A client that has read no event has no last event id.
            if session_id in self._broken or session._sent.count < 5:
                self._broken.discard(session_id)
                splice._open[session.response].requested.set()
            else:
                self._broken.add(session_id)
                assert session.response._transport is not None
                os_socket = socket.socket(fileno=os.dup(session.response._transport.get_extra_info("socket").fileno()))
                with os_socket:
                    os_socket.shutdown(socket.SHUT_WR)

    def _note(self, changes: tuple[Change, ...]) -> None:
        now = time.monotonic_ns()
        self.changed += [(now, change) for change in changes]
        if self._file is not None:
            self._file.write(b"".join(msgspec.json.encode(_row(now, change)) + b"\n" for change in changes))

    # Handlers of the low-level server

    async def _list_tools(
        self, ctx: ServerRequestContext[Any, Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        if self.lists_fail == "hang":
            await asyncio.Event().wait()
        elif self.lists_fail:
            raise RuntimeError("the user's list handler is broken")
        return types.ListToolsResult(tools=[types.Tool(name="echo", input_schema={"type": "object"})])

    async def _call_tool(
        self, ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        text = str((params.arguments or {}).get("text"))
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    # Internal state

    def _routes(self) -> list[Route]:
        async def state(request: Request) -> Response:
            return JSONResponse(self.state() | (self.objects() if "deep" in request.query_params else {}))

        async def change(request: Request) -> Response:
            return JSONResponse(self.change(await request.json()))

        async def record(request: Request) -> Response:
            return JSONResponse(self.record(int(request.query_params["start"])))

        async def replica(request: Request) -> Response:
            return JSONResponse(self.replica())

        return [
            Route("/state", state),
            Route("/replica", replica),
            Route("/change", change, methods=["POST"]),
            Route("/record", record),
        ]

    def replica(self) -> dict[str, Any]:
        """Return the state of this replica of a cluster."""
        live = self.live
        assert live.replica is not None
        contents = live.catalog.resources.contents()
        return {
            "id": live.replica.id,
            "replicas": sorted(live.replica.state.replicas),
            "lost": live.replica.lost_reason,
            "own": _digests(live.own_catalog),
            "lists": _digests(live.catalog),
            "digests": {feature.value: live.catalog.version(feature).digest for feature in Feature},
            "contents": {uri: version.digest for uri, version in sorted(contents.items())},
        }

    def state(self) -> dict[str, Any]:
        live = self.live
        found = {id(each): each for _, watching in live.hub.subscriptions() for each in watching}
        return {
            "subscribers": len(live.hub),
            "streams": live.subscriptions.limits.count,
            "listening": len(live.listen_streams),
            "legacy_streams": len(live.legacy_streams),
            "stuck": sum(not each.is_ready for each in found.values()),
            "pending": {each.label: each.mailbox_size for each in found.values()},
            "most_pending": max((each.mailbox_size for each in found.values()), default=0),
            "tasks": len(asyncio.all_tasks()),
        }

    @staticmethod
    def objects() -> dict[str, Any]:
        """Count the objects that are kept per client. This finds leaks that the memory size of the process hides."""
        gc.collect()
        kinds = Counter(type(each).__name__ for each in gc.get_objects())
        return {"objects": {kind: kinds[kind] for kind in _COUNTED}}


_COUNTED = (
    *("Subscriber", "Mailbox", "MailboxEntry", "HttpSession"),
    *("AsgiStream", "ParkedStream", "ListenStream", "RequestResponseCycle"),
)


def _digests(catalog: Catalog) -> dict[str, dict[str, str]]:
    return {feature.value: {item.key: item.digest for item in catalog.items(feature).snapshot()} for feature in Feature}


def _row(at: int, change: Change) -> list[Any]:
    return [
        at,
        change.topic.value if isinstance(change.topic, Feature) else None,
        *msgspec.to_builtins((change.key, change.version, change.previous, change.operation)),
        change.before.digest if change.before else None,
        change.item.digest if change.item else None,
    ]


def _echo(text: str = "") -> str:
    return text


class _AnyToken:
    async def verify_token(self, token: str) -> AccessToken:
        claims = {"sub": f"subject of {token}", "iss": "https://issuer.example"}
        return AccessToken(token=token, client_id=f"client of {token}", scopes=["read"], claims=claims)


def _authorize(principal: Principal | None, topic: Topic) -> bool:
    return principal is not None


def _broken(what: str) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError(f"{what} is broken")

    return fail


def _broken_authorize(principal: Principal | None, topic: Topic) -> bool:
    if topic == WATCHED or isinstance(topic, Feature):
        return True
    raise RuntimeError("the user's authorize is broken")


board = Board(msgspec.json.decode(os.environ.get(ENVIRONMENT, "{}"), type=Settings))
if __name__ != "__main__":
    app = board.live.http_app(**board.settings.options)
    if board.settings.is_wrapped:
        app.add_middleware(QueueMiddleware)
elif sys.argv[1] == "stdio":
    sys.stderr.write(f"Started server process [{os.getpid()}]\n")  # as uvicorn does
    board.live.run("stdio")
else:
    board.live.run("http", port=board.settings.port, **board.settings.options)
