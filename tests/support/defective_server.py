"""A live server of both eras, written by hand without an SDK, correct except for one defect to choose.

The name of a defect is that of the rule of `tidings check` that it breaks, with a variant after a slash if there are
several. Its tool `change` adds a tool and changes the text of its resource.

    python tests/support/defective_server.py [DEFECT]     # on stdio, modern era only
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["RESOURCE", "DefectiveServer"]

MODERN = "2026-07-28"
RESOURCE = "text://note"
SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
TOOLS_CHANGED = "notifications/tools/list_changed"
RESOURCES_CHANGED = "notifications/resources/list_changed"
FILTERS = {TOOLS_CHANGED: "toolsListChanged", RESOURCES_CHANGED: "resourcesListChanged"}


class Client:
    """A listen stream, or a legacy session."""

    def __init__(self, request_id: Any = None, requested: dict[str, Any] | None = None) -> None:
        self.request_id = request_id
        self.requested = requested
        self.uris: list[str] = (requested or {}).get("resourceSubscriptions", [])
        self.queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def put(self, method: str, **params: Any) -> None:
        if self.requested is not None:
            params["_meta"] = {SUBSCRIPTION: self.request_id}
        self.queue.put_nowait({"jsonrpc": "2.0", "method": method, "params": params})

    def wants(self, method: str, uri: str | None) -> bool:
        if uri is not None:
            return uri in self.uris
        return self.requested is None or bool(self.requested.get(FILTERS[method]))


class DefectiveServer:
    def __init__(self, defect: str = "", tokens: dict[str, float] | None = None) -> None:
        self.defect = defect
        self.tokens = tokens
        """The lifetime of each accepted token in seconds, or None to accept everyone."""
        self.tools = ["alpha", "beta", "change"]
        self.text = 0
        self.streams: list[Client] = []
        self.sessions: dict[str, Client] = {}
        self.started = time.monotonic()
        self.hang_after: int | None = None
        """The number of requests after which there are no more answers."""
        self.legacy_version = ""
        """The only version of a legacy session, or nothing to accept each."""
        self.errors: set[str] = set()
        """The methods that are answered with an internal error."""
        self.page: dict[str, Any] = {}
        """Further members of the list of resources."""
        self._lists = 0
        self._lock = asyncio.Lock()

    def has(self, defect: str) -> bool:
        return self.defect == defect

    # What both eras and both transports share

    def capabilities(self, *, is_modern: bool) -> dict[str, Any]:
        listed = not (is_modern and self.has("capability-advertised"))
        declared: dict[str, Any] = {
            "tools": {"listChanged": listed},
            "resources": {"listChanged": True, "subscribe": True},
        }
        return {**declared, "prompts": {}} if self.has("capability-served") else declared

    def answer(self, method: str, params: dict[str, Any], *, is_modern: bool, caller: str = "") -> dict[str, Any]:
        """Return the result or the error of a request."""
        if method in self.errors:
            return {"error": {"code": -32603, "message": "Internal error"}}
        result = self.result(method, params, is_modern=is_modern, caller=caller)
        if isinstance(result, str):
            code = -32602 if method == "tools/call" else -32601
            return {"error": {"code": code, "message": result}}
        if is_modern:
            result = {"resultType": "complete", **result}
            if method.endswith(("/list", "/read", "/discover")):
                result = {"ttlMs": 0, "cacheScope": "private", **result}
                if self.has("cache-hints") and method == "tools/list":
                    del result["ttlMs"]
        return {"result": result}

    def result(self, method: str, params: dict[str, Any], *, is_modern: bool, caller: str) -> dict[str, Any] | str:
        if method == "server/discover" and is_modern:
            return {
                "supportedVersions": [MODERN],
                "capabilities": self.capabilities(is_modern=True),
                "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "defective", "version": "1"}},
            }
        if method == "tools/list":
            return self.list_tools(caller)
        if method == "resources/list":
            return {"resources": [{"uri": RESOURCE, "name": "note"}], **self.page}
        if method == "resources/read":
            return {"contents": [{"uri": RESOURCE, "text": str(self.text)}]}
        if method == "tools/call":
            return self.call(params["name"])
        return {} if method == "ping" else f"unknown method {method}"

    def list_tools(self, caller: str) -> dict[str, Any]:
        self._lists += 1
        if self.has("unchanged/lists"):
            self.publish(TOOLS_CHANGED)
        names = self.tools[::-1] if self.has("list-order") and self._lists % 2 else self.tools
        description = f"A tool of {caller}." if self.has("cache-public") else "A tool."
        tools = [{"name": name, "description": description, "inputSchema": {"type": "object"}} for name in names]
        return {"tools": tools, **({"cacheScope": "public"} if self.has("cache-public") else {})}

    def call(self, name: str) -> dict[str, Any] | str:
        if name not in self.tools or (self.has("tool-callable") and name.startswith("added")):
            return f"Unknown tool: {name}"
        if name == "change":
            self.text += 1
            self.tools.append(f"added{self.text}")
            for _ in range(2 if self.has("told-once") else 1):
                self.publish(TOOLS_CHANGED)
                self.publish("notifications/resources/updated", RESOURCE)
            if self.has("not-requested/uri"):
                for client in self.sessions.values():
                    client.put("notifications/resources/updated", uri={"not": "a text"})
        return {"content": [{"type": "text", "text": "done"}]}

    def publish(self, method: str, uri: str | None = None) -> None:
        clients = [*self.streams, *self.sessions.values()]
        for client in clients[: 1 if self.has("told") else None]:
            if client.wants(method, uri):
                client.put(method, **({"uri": uri} if uri else {}))

    def listen(self, request_id: Any, requested: dict[str, Any]) -> Client:
        """Open a stream. Its first message is the acknowledgement."""
        client = Client(str(request_id) + "x" if self.has("frame-tag") else request_id, requested)
        names = [*FILTERS.values(), "resourceSubscriptions"]
        granted = {name: requested[name] for name in names if requested.get(name)}
        if self.has("ack-subset"):
            granted["resourcesListChanged"] = True
        if self.has("capability-granted"):
            granted.pop("toolsListChanged", None)
        if self.has("ack-first"):
            client.put(TOOLS_CHANGED)
        if not self.has("ack-received"):
            client.put("notifications/subscriptions/acknowledged", notifications=granted)
        if self.has("unchanged/connect") and client.wants(TOOLS_CHANGED, None):
            client.put(TOOLS_CHANGED)
        if self.has("not-requested") and not client.wants(RESOURCES_CHANGED, None):
            client.put(RESOURCES_CHANGED)
        self.streams.append(client)
        return client

    # HTTP

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        if scope["type"] != "http":
            return
        if self.hang_after is not None:
            self.hang_after -= 1
            if self.hang_after < 0:
                await asyncio.Event().wait()
        request = Request(scope, receive)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and self.remaining(token) <= 0:
            await self.respond(scope, receive, send, 401)
        elif request.headers.get("mcp-protocol-version") == MODERN:
            await self.serve_modern(scope, receive, send, await request.json(), token)
        else:
            await self.serve_legacy(scope, receive, send, request)

    def remaining(self, token: str) -> float:
        """Return how long a token is valid from now on."""
        lifetime = (self.tokens or {}).get(token, 0.0) if self.tokens is not None else float("inf")
        return lifetime - (time.monotonic() - self.started)

    async def serve_modern(self, scope: Any, receive: Any, send: Any, message: dict[str, Any], token: str) -> None:
        method, params = message["method"], message.get("params", {})
        if method == "subscriptions/listen":
            client = self.listen(message["id"], params["notifications"])
            await self.stream(scope, receive, send, client, self.remaining(token))
            self.streams.remove(client)
            return
        answer = self.answer(method, params, is_modern=True, caller=token)
        await self.respond(scope, receive, send, 200, {"jsonrpc": "2.0", "id": message["id"], **answer})

    async def serve_legacy(self, scope: Any, receive: Any, send: Any, request: Any) -> None:
        session_id = request.headers.get("mcp-session-id")
        client = self.sessions.get(session_id)
        if session_id is not None and client is None:
            await self.respond(scope, receive, send, 400 if self.has("unknown-session") else 404)
        elif session_id is not None and not self.accepts(request.headers.get("mcp-protocol-version")):
            await self.respond(scope, receive, send, 400)
        elif request.method == "GET":
            if client is None or self.has("get-stream"):
                await self.respond(scope, receive, send, 405)
                return
            if self.has("unchanged/reconnect"):
                client.put(TOOLS_CHANGED)
            await self.stream(scope, receive, send, client, float("inf"))
        elif request.method == "DELETE":
            self.sessions.pop(session_id, None)
            await self.respond(scope, receive, send, 204)
        else:
            await self.serve_message(scope, receive, send, await request.json(), client)

    def accepts(self, version: str | None) -> bool:
        return self.legacy_version in ("", version)

    async def serve_message(
        self, scope: Any, receive: Any, send: Any, message: dict[str, Any], client: Client | None
    ) -> None:
        method, params, headers = message["method"], message.get("params", {}), {}
        if "id" not in message:
            await self.respond(scope, receive, send, 202)
            return
        if method == "initialize":
            headers["mcp-session-id"] = uuid.uuid4().hex
            self.sessions[headers["mcp-session-id"]] = Client()
            info = {"name": "defective", "version": "1"}
            capabilities = self.capabilities(is_modern=False)
            version = self.legacy_version or params["protocolVersion"]
            answer: dict[str, Any] = {
                "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
            }
        elif client is not None and method == "resources/subscribe" and not self.has("subscribe-served"):
            client.uris.append(params["uri"])
            answer = {"result": {}}
        elif client is not None and method == "resources/unsubscribe":
            if not self.has("unsubscribe"):
                client.uris.remove(params["uri"])
            answer = {"result": {}}
        else:
            answer = self.answer(method, params, is_modern=False)
        await self.respond(scope, receive, send, 200, {"jsonrpc": "2.0", "id": message["id"], **answer}, headers)

    async def respond(
        self, scope: Any, receive: Any, send: Any, status: int, body: Any = None, headers: Any = None
    ) -> None:
        from starlette.responses import JSONResponse, Response

        response = Response(status_code=status) if body is None else JSONResponse(body, status, headers)
        if self.has("slow-reader"):
            async with self._lock:
                await response(scope, receive, send)
            return
        await response(scope, receive, send)

    async def stream(self, scope: Any, receive: Any, send: Any, client: Client, lifetime: float) -> None:
        from starlette.responses import StreamingResponse

        headers = {} if self.has("buffering") else {"X-Accel-Buffering": "no"}
        events = self.events(client, lifetime)
        await StreamingResponse(events, media_type="text/event-stream", headers=headers)(scope, receive, send)

    async def events(self, client: Client, lifetime: float) -> AsyncIterator[bytes]:
        yield b": open\n\n"
        deadline = None if lifetime == float("inf") or self.has("token-expiry") else lifetime
        idle = 0.05 if self.has("unchanged/idle") and client.wants(TOOLS_CHANGED, None) else None
        try:
            async with asyncio.timeout(deadline):
                while True:
                    try:
                        message = await asyncio.wait_for(client.queue.get(), idle)
                    except TimeoutError:
                        if idle is None:
                            raise
                        client.put(TOOLS_CHANGED)
                        continue
                    yield b"data: " + json.dumps(message).encode() + b"\n\n"
        except TimeoutError:
            return  # the token has expired

    # stdio

    async def run_stdio(self) -> None:
        loop = asyncio.get_running_loop()
        if self.has("sigterm"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif not self.has("graceful-end"):
            loop.add_signal_handler(signal.SIGTERM, self.end_streams)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            message = json.loads(line)
            method, params = message["method"], message.get("params", {})
            if method == "notifications/cancelled" and not self.has("unsubscribe"):
                self.streams = [each for each in self.streams if each.request_id != params["requestId"]]
            elif method == "subscriptions/listen":
                self.listen(message["id"], params["notifications"])
            elif "id" in message:
                is_modern = "io.modelcontextprotocol/protocolVersion" in params.get("_meta", {})
                answer = self.answer(method, params, is_modern=is_modern)
                self.write({"jsonrpc": "2.0", "id": message["id"], **answer})
            for client in self.streams:
                while not client.queue.empty():
                    self.write(client.queue.get_nowait())

    def end_streams(self) -> None:
        for client in self.streams:
            result = {"resultType": "complete", "_meta": {SUBSCRIPTION: client.request_id}}
            self.write({"jsonrpc": "2.0", "id": client.request_id, "result": result})
        os._exit(0)

    def write(self, message: Any) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(DefectiveServer((sys.argv[1:] or [""])[0]).run_stdio())
