"""Everything that goes through the SDK: the handshake, stdio in both eras, legacy subscriptions, and truthful answers.

One MCP middleware and three request handlers. The middleware makes capabilities true and puts cursors on lists; the
handlers serve `resources/subscribe`, `resources/unsubscribe` and, where no faster lane does, `subscriptions/listen`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import mcp_types as types
import msgspec
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ValidationError

from tidings.core.frames import (
    BOOKMARK_METHOD,
    CURSOR_KEY,
    EXTENSION,
    REFETCH_KEY,
    SUBSCRIPTION_KEY,
    FrameFormat,
    encode_tag,
    write,
    write_alone,
)
from tidings.core.mailbox import IsMuted
from tidings.core.model import Feature, Notification, Reason, Topic, Version, is_unicode
from tidings.core.patterns import is_pattern
from tidings.core.redact import short_id
from tidings.core.subscriber import BUSY, ConnectionKind, Subscriber
from tidings.errors import InvalidPattern, LimitReached
from tidings.http.legacy import SplicedSession
from tidings.http.router import principal_of
from tidings.server import internals as seams
from tidings.server.authorization import Principal
from tidings.server.granted_topics import GrantedTopics, RequestedTopics, honour
from tidings.server.listen_options import ListenOptions
from tidings.server.notification_stream import NotificationStream
from tidings.server.response_cursor import Sight

if TYPE_CHECKING:
    from mcp.server.connection import Connection

    from tidings.live import Live

__all__ = ["SessionLane"]

logger = logging.getLogger(__name__)

Ctx = ServerRequestContext[Any, Any]

_STATE, _CLOSE, _REFUSED = "dev.tidings/session", "dev.tidings/close", "dev.tidings/refused"
"""In the scratch state of a connection: its session, how to end that, or why there is none."""
_WISH = "dev.tidings/wish"
"""Likewise: what its client asked for beyond the specification."""
_LISTS = {
    "tools/list": (Feature.TOOLS, "tools", "name"),
    "prompts/list": (Feature.PROMPTS, "prompts", "name"),
    "resources/list": (Feature.RESOURCES, "resources", "uri"),
    "resources/templates/list": (Feature.RESOURCES, "resourceTemplates", "uriTemplate"),
}


class _Raw(BaseModel):
    """A notification that is already in the wire's terms."""

    method: str
    params: dict[str, Any]


class SessionLane:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._listening: dict[_Pump, None] = {}
        server = live.lowlevel
        server.middleware.insert(0, self._middleware)
        server.extensions.setdefault(EXTENSION, {})
        server.add_request_handler("resources/subscribe", types.SubscribeRequestParams, self._subscribe)
        server.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, self._unsubscribe)
        server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, self._listen)

    def stop(self) -> None:
        """End every listen stream that the SDK carries; its handler then returns the result."""
        for pump in list(self._listening):
            pump.close()

    # The middleware

    async def _middleware(self, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        live = self._live
        if ctx.request_id == live.own_request_id:
            return await call_next(ctx)
        try:
            await live.attend(ctx.lifespan_context)
        except Exception:  # our trouble must not become the client's
            live.failures["reading"] += 1
            logger.exception("reading the server's lists failed; going on with what was known")
        if ctx.method == "subscriptions/listen" and not live.steps_aside and (wanted := _listen_params(ctx)):
            # Past the SDK's span of the request, which would live as long as the stream.
            live.hub.tracer.continue_trace(ctx.meta)
            over = await self._listen(ctx, wanted)
            return {"resultType": "complete", "_meta": {**live.result_meta, **(over.meta or {})}}
        with Sight(live, _shown(ctx), is_for_us=ctx.request_id == live.own_list_id) as sight:
            result = await call_next(ctx)
            try:
                return await self._after(ctx, result, sight)
            except Exception:  # likewise
                live.failures["answering"] += 1
                logger.exception("%s was answered, but Tidings could not add to it", ctx.method)
                return result

    async def _after(self, ctx: Ctx, result: HandlerResult, sight: Sight) -> HandlerResult:
        if ctx.method in _LISTS:
            return self._with_cursor(ctx, _as_dict(result), sight.cursor())
        if ctx.method == "resources/read":
            return _with_meta(result, {CURSOR_KEY: sight.cursor()})
        if ctx.method == "server/discover":
            return self._with_capabilities(_as_dict(result), ctx.protocol_version, is_served=True)
        if ctx.method == "initialize":
            answer = _as_dict(result)
            self._live.hub.tracer.continue_trace(ctx.meta)
            acknowledged = await self._open(ctx, answer["protocolVersion"])
            if acknowledged:
                answer["_meta"] = {**(answer.get("_meta") or {}), **acknowledged}
            return self._with_capabilities(answer, answer["protocolVersion"], is_served=acknowledged is not None)
        if ctx.method == "notifications/initialized":
            session = seams.connection_of(ctx.session).state.get(_STATE)
            if isinstance(session, _Pipe):
                session.start()
        return result

    def _with_capabilities(self, result: dict[str, Any], version: str, *, is_served: bool) -> dict[str, Any]:
        """Advertise exactly what is served: nothing, where there is no way to tell anything."""
        is_told = is_served and version not in self._live.policy.mute_list_changed
        capabilities = dict(result.get("capabilities") or {})
        for feature in Feature:
            if isinstance(capabilities.get(feature.value), dict):
                capabilities[feature.value] = {**capabilities[feature.value], "listChanged": is_told}
        if isinstance(capabilities.get("resources"), dict):
            capabilities["resources"]["subscribe"] = is_served
        return result | {"capabilities": capabilities}

    def _with_cursor(self, ctx: Ctx, result: dict[str, Any], cursor: dict[str, Any]) -> dict[str, Any]:
        _, member, key = _LISTS[ctx.method]
        meta = {**(result.get("_meta") or {}), CURSOR_KEY: cursor}
        result = result | {"_meta": meta}
        if not result.get("nextCursor") and not (ctx.params or {}).get("cursor"):
            # However the list came about, it looks the same: clients key their caches on the text of it.
            result[member] = sorted(result.get(member, []), key=lambda item: str(item.get(key)))
        if (ttl := self._live.policy.ttl_ms(result.get("ttlMs"))) and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
            result["ttlMs"] = ttl
        return result

    # Legacy sessions

    async def _open(self, ctx: Ctx, version: str) -> dict[str, Any] | None:
        """Let a legacy session watch every list; None if it can't be told of anything at all, else what its client is
        told about that, if it asked.

        From the handshake on, so that nothing falls between it and the client's first look; told only after it, since
        the client must not hear of anything before."""
        connection = seams.connection_of(ctx.session)
        if not connection.has_standalone_channel:
            return None
        if (close_former := connection.state.pop(_CLOSE, None)) is not None:
            close_former()  # a second handshake on the same connection begins anew
        live = self._live
        principal = _principal(ctx)
        params = ctx.params or {}
        wish = ListenOptions(live, params.get("_meta"), params.get("capabilities"), principal)
        features = [feature for feature in Feature if live.serves(feature)]
        allowed = await live.gate.allowed(principal, [*features, *wish.kept_uris])
        try:
            ticket = live.gate.enter(principal, _address(ctx))
        except LimitReached as error:
            logger.warning("a legacy session will not be told of changes: %s", error)
            connection.state[_REFUSED] = str(error)
            return None
        is_muted = _is_feature if version in live.policy.mute_list_changed else None
        session_id = connection.session_id
        session: _Pipe | SplicedSession
        if session_id is None:
            session = _Pipe(live, connection)
            subscriber = session.open(wish, "pipe", is_muted)
        else:
            session = live.splice.session(session_id)
            subscriber = session.open(wish, f"session {short_id(session_id)}", is_muted)
            session.version = version
        subscriber.merges_on_overflow = True
        subscriber.is_authorized = live.gate.predicate(principal)
        connection.state[_STATE] = session
        connection.state[_WISH] = wish
        if wish.terms.bookmarks:
            live.bookmarks.join(session.bookmark)

        def close() -> None:
            live.bookmarks.leave(session.bookmark)
            if not subscriber.is_closed:
                live.gate.leave(ticket)
                live.hub.close(subscriber, Reason.DISCONNECTED)

        connection.state[_CLOSE] = close
        connection.exit_stack.callback(close)
        if session_id is not None:  # only at the end: a second handshake finds the stream that is open
            connection.exit_stack.callback(live.splice.forget, session_id)
        # A session can't be ended without its client's losing more than that: it goes on, by no name.
        wish.enter(allowed, lambda: None)
        wish.watch(subscriber)
        acknowledged = wish.acknowledged(allowed, is_session=True) if wish.is_special else {}
        told = wish.told(allowed)
        chosen = GrantedTopics(allowed)
        if live.policy.announce:
            announced: dict[Topic, Version | None] = dict.fromkeys(chosen.features)
            told = announced | (told or {})
        live.hub.subscribe(subscriber, *chosen.features, uris=chosen.uris, told=told)
        return acknowledged

    async def _subscribe(self, ctx: Ctx, params: types.SubscribeRequestParams) -> types.EmptyResult:
        uri = str(params.uri)
        gate = self._live.gate
        if not is_unicode(uri):
            raise MCPError(types.INVALID_PARAMS, "A URI is a text of whole characters", {"uri": ascii(uri)})
        if (is_pattern(uri) and not gate.knows_patterns) or not await gate.allowed(_principal(ctx), [uri]):
            raise MCPError(types.INVALID_PARAMS, "This caller may not watch that URI", {"uri": uri})
        state = seams.connection_of(ctx.session).state
        session = state.get(_STATE)
        if session is None:
            why = state.get(_REFUSED, "this connection has no stream on which it could be told")
            raise MCPError(types.INTERNAL_ERROR, f"No subscription: {why}", {"uri": uri})
        wish: ListenOptions = state[_WISH]
        told, refetch = wish.told_once(uri, session.subscriber)
        said: dict[str, Any] = {CURSOR_KEY: self._live.cursor([uri], told)}
        if refetch:
            said[REFETCH_KEY] = refetch
        try:
            self._live.hub.subscribe(session.subscriber, uris=[uri], told=told)
        except (InvalidPattern, LimitReached) as error:
            raise MCPError(types.INVALID_PARAMS, str(error), {"uri": uri}) from None
        wish.keep()
        return types.EmptyResult(_meta=said if wish.is_special else None)

    async def _unsubscribe(self, ctx: Ctx, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        state = seams.connection_of(ctx.session).state
        session = state.get(_STATE)
        if session is not None:
            self._live.hub.unsubscribe(session.subscriber, uris=[str(params.uri)])
            state[_WISH].keep()
            await session.unsubscribed(str(params.uri))
        return types.EmptyResult()

    # Modern streams that the SDK carries

    async def _listen(
        self, ctx: Ctx, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        live = self._live
        if ctx.request_id is None:
            raise MCPError(types.INVALID_REQUEST, "subscriptions/listen requires a request id")
        wanted = msgspec.convert(
            params.notifications.model_dump(by_alias=True, include=_KNOWN_KINDS), RequestedTopics, strict=False
        )
        meta: dict[str, Any] = {SUBSCRIPTION_KEY: ctx.request_id}
        principal = _principal(ctx)
        try:
            ticket = live.gate.enter(principal, _address(ctx))
        except LimitReached as error:
            raise MCPError(types.INTERNAL_ERROR, str(error)) from None
        try:
            honoured = await honour(live, wanted, principal)
            capabilities = ctx.session.client_capabilities
            declared = capabilities.model_dump(by_alias=True, exclude_none=True) if capabilities else None
            wish = ListenOptions(live, (ctx.params or {}).get("_meta"), declared, principal)
            pump = _Pump(live, ctx, wish)
            if honoured:
                wish.enter(honoured.topics, pump.close)
            acknowledged = wish.acknowledged(honoured.topics)
            # Open before the acknowledgement, so that what changes while it is written is told after it.
            pump.open(honoured, wish, live.gate.predicate(principal))
            self._listening[pump] = None
            try:
                await pump.send(
                    "notifications/subscriptions/acknowledged",
                    {"notifications": honoured.as_filter(), "_meta": {**meta, **acknowledged}},
                )
                if honoured and not live.is_stopping:
                    await pump.run()
            finally:
                self._listening.pop(pump, None)
                pump.close()
        except LimitReached as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        finally:
            live.gate.leave(ticket)
        return types.SubscriptionsListenResult(_meta=meta)


class _Pipe:
    """A legacy session on a duplex pipe: as many notifications as it takes, or through the SDK one at a time; the rest
    waits in the mailbox."""

    __slots__ = ("_connection", "_counts", "_live", "_shape", "_task", "_wire", "subscriber")

    def __init__(self, live: Live, connection: Connection) -> None:
        self._live = live
        self._counts = live.hub.counts
        self._connection = connection
        self._wire = _wire_of(connection)
        self._shape = FrameFormat()
        self._task: asyncio.Task[None] | None = None
        self.subscriber: Subscriber | None = None

    def open(self, wish: ListenOptions, label: str, is_muted: IsMuted | None) -> Subscriber:
        self._shape = wish.shape()
        if self._wire is not None:
            self._wire.on_handshake()
        kind = ConnectionKind("legacy", "stdio")
        self.subscriber = self._live.hub.open(
            self._deliver, label=label, kind=kind, policy=wish.policy, filter=wish.filter, is_muted=is_muted
        )
        self.subscriber.pause()  # until the handshake is over
        return self.subscriber

    def start(self) -> None:
        if self.subscriber is not None and self._task is None:
            self._live.hub.wake(self.subscriber)

    async def unsubscribed(self, uri: str) -> None:
        """What is being written was told before the end of the subscription, and must not come after the answer."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def bookmark(self) -> None:
        if self.subscriber is not None and self.subscriber.is_ready:
            self.subscriber.pause()
            meta = {CURSOR_KEY: self._live.cursor_of(self.subscriber).as_json()}
            self._begin(BOOKMARK_METHOD, {"_meta": meta})

    def _deliver(self, notification: Notification) -> object:
        frame = write_alone(notification, self._shape)
        self._counts.bytes += len(frame)
        if self._wire is not None:
            return None if self._wire.write_notification(frame, self.start) else BUSY
        message = msgspec.json.decode(frame)
        self._begin(message["method"], message["params"])
        return BUSY

    def _begin(self, method: str, params: dict[str, Any]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write(method, params))

    async def _write(self, method: str, params: dict[str, Any]) -> None:
        try:
            await self._connection.outbound.notify(method, params)
        except Exception as error:  # the pipe broke: the SDK ends the connection, and with it this subscriber
            logger.debug("a legacy session could not be written to: %r", error)
            return
        self._task = None
        self.start()


class _Pump:
    """One listen stream inside the SDK: its own request's task writes, and sleeps in between. Where the pipe is ours,
    notifications need no task."""

    def __init__(self, live: Live, ctx: Ctx, wish: ListenOptions) -> None:
        self._live = live
        self._ctx = ctx
        self._wire = _wire_of(seams.connection_of(ctx.session))
        self._shape = wish.shape(is_tagged=True)
        self._tag = encode_tag(ctx.request_id if ctx.request_id is not None else "")
        self._notification: Notification | None = None
        self._roused = asyncio.Event()
        self._is_closed = False
        self._owes_bookmark = False
        self._subscriber: Subscriber | None = None

    def open(self, honoured: GrantedTopics, wish: ListenOptions, may: Callable[[str], bool] | None) -> None:
        self._subscriber = self._live.hub.open(
            self._deliver,
            label=f"listen {self._ctx.request_id}",
            kind=ConnectionKind("modern", "stdio" if self._ctx.request is None else "http"),
            policy=wish.policy,
            filter=wish.filter,
            on_close=lambda reason: self.close(),
        )
        self._subscriber.is_authorized = may
        self._subscriber.pause()  # until the acknowledgement is written
        wish.watch(self._subscriber)
        told = wish.told(honoured.topics)
        self._live.hub.subscribe(self._subscriber, *honoured.features, uris=honoured.uris, told=told)
        if wish.terms.bookmarks:
            self._live.bookmarks.join(self._bookmark)

    def close(self) -> None:
        self._is_closed = True
        self._live.bookmarks.leave(self._bookmark)
        if self._subscriber is not None:
            self._live.hub.close(self._subscriber, Reason.DISCONNECTED)
        self._roused.set()

    async def run(self) -> None:
        self._wake()
        while not self._is_closed:
            await self._roused.wait()
            self._roused.clear()
            if self._notification is not None:
                frame = write(self._notification, self._shape, self._tag)
                self._notification = None
                self._live.hub.counts.bytes += len(frame)
                message = msgspec.json.decode(frame)
                await self.send(message["method"], message["params"])
                self._wake()
            elif self._owes_bookmark and self._subscriber is not None:
                cursor = self._live.cursor_of(self._subscriber).as_json()
                await self.send(
                    BOOKMARK_METHOD, {"_meta": {SUBSCRIPTION_KEY: self._ctx.request_id, CURSOR_KEY: cursor}}
                )
            self._owes_bookmark = False

    async def send(self, method: str, params: dict[str, Any]) -> None:
        raw: Any = _Raw(method=method, params=params)
        await self._ctx.session.send_notification(raw, related_request_id=self._ctx.request_id)

    def _wake(self) -> None:
        if self._subscriber is not None:
            self._live.hub.wake(self._subscriber)

    def _deliver(self, notification: Notification) -> object:
        if self._wire is not None:
            frame = write(notification, self._shape, self._tag)
            self._live.hub.counts.bytes += len(frame)
            return None if self._wire.write_notification(frame, self._wake) else BUSY
        self._notification = notification
        self._roused.set()
        return BUSY

    def _bookmark(self) -> None:
        self._owes_bookmark = True
        self._roused.set()


def _wire_of(connection: Connection) -> NotificationStream | None:
    """The lines of this process's standard output, if those are what this connection writes to and are ours."""
    stream = seams.write_stream_of(connection)
    return stream if isinstance(stream, NotificationStream) else None


def _listen_params(ctx: Ctx) -> types.SubscriptionsListenRequestParams | None:
    """What a listen request asks for; None for one that the SDK should word the error of."""
    if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return None
    try:
        return types.SubscriptionsListenRequestParams.model_validate(ctx.params or {}, by_name=False)
    except ValidationError:
        return None


_KNOWN_KINDS = {"tools_list_changed", "prompts_list_changed", "resources_list_changed", "resource_subscriptions"}


def _is_feature(topic: Topic) -> bool:
    return isinstance(topic, Feature)


def _shown(ctx: Ctx) -> list[Topic]:
    """Of which topics the answer shows what they are now."""
    if ctx.method in _LISTS:
        return [_LISTS[ctx.method][0]]
    uri = (ctx.params or {}).get("uri") if ctx.method == "resources/read" else None
    return [uri] if isinstance(uri, str) else []


def _with_meta(result: HandlerResult, meta: dict[str, Any]) -> HandlerResult:
    if isinstance(result, types.Result):
        # Not as a dict: what was read may be large.
        return result.model_copy(update={"meta": {**(result.meta or {}), **meta}})
    return {**result, "_meta": {**(result.get("_meta") or {}), **meta}} if isinstance(result, dict) else result


def _as_dict(result: HandlerResult) -> dict[str, Any]:
    if isinstance(result, BaseModel):
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dict(result) if isinstance(result, Mapping) else {}


def _principal(ctx: Ctx) -> Principal | None:
    return principal_of(ctx.request.scope.get("user")) if ctx.request is not None else None


def _address(ctx: Ctx) -> str | None:
    client = ctx.request.client if ctx.request is not None else None
    return client.host if client else None
