"""The MCP middleware, at both ends of the chain.

`NotificationMiddleware` is the outermost: it advertises the capabilities that are served, and adds cursors to lists and
contents. Before a request is handled, it reads lists that are stale, and adds missing members to `initialize` requests
if the source allows that. It opens the subscription of a legacy session during the handshake, passes listen requests to
`sessions`, and takes the change notifications of a handler as wake-ups. An error here never fails a request.

`ToolCallMiddleware` is the innermost: inside the SDK's own span of the request, around the tool.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.shared.exceptions import MCPError
from mcp_types import SERVER_INFO_META_KEY
from mcp_types.methods import validate_client_request
from mcp_types.version import LATEST_HANDSHAKE_VERSION, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from tidings.core.frames import CURSOR_KEY
from tidings.core.hub import Hub
from tidings.core.model import Feature, Topic
from tidings.core.tracer import RUN_TOOL
from tidings.errors import UnsupportedEventLoop
from tidings.sdk.change_events import ChangeEvents
from tidings.sdk.definitions import as_dict, with_meta
from tidings.sdk.source import Source
from tidings.server.list_reader import ListReader
from tidings.server.response_cursor import ResponseCursor
from tidings.server.sessions import Sessions, identity_of
from tidings.wire.methods import CALL_TOOL, DISCOVER, INITIALIZE, INITIALIZED, LIST_METHODS, LISTEN, READ_RESOURCE

__all__ = ["NotificationMiddleware", "ToolCallMiddleware", "server_info_meta"]

logger = logging.getLogger(__name__)

Ctx = ServerRequestContext[Any, Any]


def server_info_meta(server: Server[Any]) -> dict[str, Any]:
    """Return the `_meta` that names the server in the result of a listen request."""
    return {SERVER_INFO_META_KEY: server.server_info_stamp}


class NotificationMiddleware:
    def __init__(self, source: Source, hub: Hub, reader: ListReader, sessions: Sessions, events: ChangeEvents) -> None:
        self._source = source
        self._hub = hub
        self._policy = hub.policy
        self._reader = reader
        self._sessions = sessions
        self._events = events
        self.more_capabilities: dict[str, Any] = {}
        """Capabilities that the SDK does not know."""

    async def __call__(self, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        if ctx.request_id == self._reader.request_id:
            return await call_next(ctx)
        if ctx.request_id is not None:  # a notification does not wait, because others must not overtake it
            try:
                await self._reader.ensure_loaded(ctx.lifespan_context)
            except UnsupportedEventLoop:
                raise  # no client could be notified
            except Exception:
                self._hub.counts.failures["reading"] += 1
                logger.exception("reading the server's lists failed; handling the request with the lists read before")
        if ctx.method == LISTEN and not self._source.has_user_middleware() and (params := _listen_params(ctx)):
            # Not through the SDK's span of the request, which would last as long as the stream.
            self._hub.tracer.continue_trace(ctx.meta)
            ended = await self._sessions.listen(ctx, params)
            meta = {**server_info_meta(self._source.lowlevel), **(ended.meta or {})}
            return {"resultType": "complete", "_meta": meta}
        if ctx.method == INITIALIZE and self._source.completes_handshakes:
            _complete_handshake(ctx)
        session = self._events.watch_session(ctx.session, is_notified=not self._sessions.is_refused(ctx))
        ctx = replace(ctx, session=session)
        is_internal = ctx.request_id == self._reader.cache_request_id
        with ResponseCursor(self._hub, self._reader, _topics(ctx), is_internal=is_internal) as cursor:
            result = await call_next(ctx)
            try:
                return await self._complete(ctx, result, cursor)
            except Exception:
                self._hub.counts.failures["answering"] += 1
                logger.exception("%s was answered, but Tidings could not add to it", ctx.method)
                return result

    async def _complete(self, ctx: Ctx, result: HandlerResult, cursor: ResponseCursor) -> HandlerResult:
        if ctx.method == INITIALIZED:
            self._sessions.start(ctx)
        if isinstance(result, types.ErrorData) or not isinstance(result, BaseModel | dict):
            return result  # the user's middleware may return an error, or something that the SDK refuses
        if ctx.method in LIST_METHODS:
            self._report_fetch(ctx, cursor)
            return self._with_cursor(ctx, as_dict(result), cursor.as_json())
        if ctx.method == READ_RESOURCE:
            self._report_fetch(ctx, cursor)
            return with_meta(result, {CURSOR_KEY: cursor.as_json()})
        if ctx.method == DISCOVER:
            return self._with_capabilities(as_dict(result), ctx.protocol_version, is_served=True)
        if ctx.method == INITIALIZE:
            response = as_dict(result)
            version = response["protocolVersion"]
            self._hub.tracer.continue_trace(ctx.meta)
            meta = await self._sessions.open(ctx, version)
            if meta:
                response["_meta"] = {**(response.get("_meta") or {}), **meta}
            return self._with_capabilities(response, version, is_served=meta is not None)
        return result

    def _report_fetch(self, ctx: Ctx, cursor: ResponseCursor) -> None:
        observer = self._sessions.client_observer
        if observer is None or ctx.request_id == self._reader.cache_request_id:
            return
        for topic, revision in cursor.revisions.items():
            observer.client_fetched(identity_of(ctx), topic, revision)

    def _with_capabilities(self, result: dict[str, Any], version: str, *, is_served: bool) -> dict[str, Any]:
        """Advertise exactly what is served: nothing if the connection can't be notified."""
        if not isinstance(result.get("capabilities"), dict):
            return result  # the user's middleware may respond by itself
        sends_lists = is_served and version not in self._policy.mute_list_changed
        capabilities = dict(result["capabilities"]) | self.more_capabilities
        for feature in Feature:
            if isinstance(capabilities.get(feature.value), dict):
                capabilities[feature.value] = {**capabilities[feature.value], "listChanged": sends_lists}
        if isinstance(capabilities.get("resources"), dict):
            capabilities["resources"]["subscribe"] = is_served
        elif is_served and self._reader.serves_contents():
            capabilities["resources"] = {"subscribe": True, "listChanged": False}
        return result | {"capabilities": capabilities}

    def _with_cursor(self, ctx: Ctx, result: dict[str, Any], cursor: dict[str, Any]) -> dict[str, Any]:
        method = LIST_METHODS[ctx.method]
        result = result | {"_meta": {**(result.get("_meta") or {}), CURSOR_KEY: cursor}}
        is_whole = not result.get("nextCursor") and not (ctx.params or {}).get("cursor")
        if is_whole and self._policy.list_order == "name":
            items = result.get(method.member, [])
            result[method.member] = sorted(items, key=lambda item: str(item.get(method.key)))
        if (ttl := self._policy.ttl_ms(result.get("ttlMs"))) and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            result["ttlMs"] = ttl
        return result


def _complete_handshake(ctx: Ctx) -> None:
    """Add the required members that the client has left out of its `initialize` request."""
    if not isinstance(ctx.params, dict):
        raise MCPError(types.INVALID_PARAMS, 'initialize has no params; send at least "params":{}')
    # In place: after the middleware, the SDK reads the params of the message again.
    ctx.params.setdefault("protocolVersion", LATEST_HANDSHAKE_VERSION)
    ctx.params.setdefault("capabilities", {})
    ctx.params.setdefault("clientInfo", {"name": "unknown", "version": "unknown"})


def _listen_params(ctx: Ctx) -> types.SubscriptionsListenRequestParams | None:
    """Return the params of a listen request; None if they are invalid: the SDK then responds with the error."""
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return None
    try:
        validate_client_request(LISTEN, ctx.protocol_version, ctx.params)
        return types.SubscriptionsListenRequestParams.model_validate(ctx.params or {}, by_name=False)
    except ValidationError:
        return None


def _topics(ctx: Ctx) -> list[Topic]:
    """Return the topics whose present version is in the response."""
    if ctx.method in LIST_METHODS:
        return [LIST_METHODS[ctx.method].feature]
    uri = (ctx.params or {}).get("uri") if ctx.method == READ_RESOURCE else None
    return [uri] if isinstance(uri, str) else []


class ToolCallMiddleware:
    """Counts and traces calls of tools."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def __call__(self, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        if ctx.method != CALL_TOOL:
            return await call_next(ctx)
        name = (ctx.params or {}).get("name")
        outcome = "error"
        try:
            with self._hub.tracer.span(RUN_TOOL, tool=name if isinstance(name, str) else "") as span:
                result = await call_next(ctx)
                outcome = "tool_error" if _is_error(result) else "ok"
                span.set(outcome, is_error=outcome != "ok")
            return result
        finally:
            self._hub.counts.runs[outcome] += 1


def _is_error(result: HandlerResult) -> bool:
    match result:
        case types.CallToolResult(is_error=True) | {"isError": True}:
            return True
    return False
