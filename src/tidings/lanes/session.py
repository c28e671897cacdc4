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
from pydantic import BaseModel

from tidings import seams
from tidings.errors import InvalidPattern, LimitReached
from tidings.frames import CURSOR_KEY, EXTENSION, SUBSCRIPTION_KEY, Shape, encode_tag, write
from tidings.gate import Principal
from tidings.lanes.front import declares_extension, principal_of
from tidings.lanes.listen import Wanted, honour
from tidings.lanes.splice import SplicedSession
from tidings.lanes.stdio import Wire
from tidings.mailbox import IsMuted
from tidings.model import Feature, Notification, Reason, Topic
from tidings.patterns import is_pattern
from tidings.subscriber import BUSY, Subscriber

if TYPE_CHECKING:
    from mcp.server.connection import Connection

    from tidings.live import Live

__all__ = ["SessionLane"]

logger = logging.getLogger(__name__)

Ctx = ServerRequestContext[Any, Any]

_STATE, _CLOSE, _REFUSED = "dev.tidings/session", "dev.tidings/close", "dev.tidings/refused"
"""In the scratch state of a connection: its session, how to end that, or why there is none."""
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
        # Before the answer is made: a cursor that is too old tells a client too much, one too new too little.
        cursor = live.cursor([_LISTS[ctx.method][0]]) if ctx.method in _LISTS else {}
        result = await call_next(ctx)
        try:
            return await self._after(ctx, result, cursor)
        except Exception:  # likewise
            live.failures["answering"] += 1
            logger.exception("%s was answered, but Tidings could not add to it", ctx.method)
            return result

    async def _after(self, ctx: Ctx, result: HandlerResult, cursor: dict[str, Any]) -> HandlerResult:
        if ctx.method in _LISTS:
            return self._with_cursor(ctx, _as_dict(result), cursor)
        if ctx.method == "server/discover":
            return self._with_capabilities(_as_dict(result), ctx.protocol_version, is_served=True)
        if ctx.method == "initialize":
            answer = _as_dict(result)
            is_served = await self._open(ctx, answer["protocolVersion"])
            return self._with_capabilities(answer, answer["protocolVersion"], is_served=is_served)
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
        if self._live.policy.list_ttl and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS and not result.get("ttlMs"):
            result["ttlMs"] = int(self._live.policy.list_ttl * 1000)
        return result

    # Legacy sessions

    async def _open(self, ctx: Ctx, version: str) -> bool:
        """Let a legacy session watch every list; whether it can be told of anything at all.

        From the handshake on, so that nothing falls between it and the client's first look; told only after it, since
        the client must not hear of anything before."""
        connection = seams.connection_of(ctx.session)
        if not connection.has_standalone_channel:
            return False
        if (close_former := connection.state.pop(_CLOSE, None)) is not None:
            close_former()  # a second handshake on the same connection begins anew
        live = self._live
        principal = _principal(ctx)
        features = [feature for feature in Feature if live.serves(feature)]
        allowed = await live.gate.allowed(principal, features)
        try:
            ticket = live.gate.enter(principal, _address(ctx))
        except LimitReached as error:
            logger.warning("a legacy session will not be told of changes: %s", error)
            connection.state[_REFUSED] = str(error)
            return False
        is_extended = declares_extension((ctx.params or {}).get("capabilities"))
        is_muted = _is_feature if version in live.policy.mute_list_changed else None
        session_id = connection.session_id
        session: _Pipe | SplicedSession
        if session_id is None:
            session = _Pipe(live, connection)
            subscriber = session.open(is_extended, "pipe", is_muted)
        else:
            session = live.splice.session(session_id)
            subscriber = session.open(is_extended, f"session {session_id}", is_muted)
        subscriber.collapses = True
        subscriber.may = live.gate.predicate(principal)
        connection.state[_STATE] = session

        def close() -> None:
            if not subscriber.is_closed:
                live.gate.leave(ticket)
                live.hub.close(subscriber, Reason.DISCONNECTED)
                if session_id is not None:
                    live.splice.forget(session_id)

        connection.state[_CLOSE] = close
        connection.exit_stack.callback(close)
        told = dict.fromkeys(allowed) if live.policy.announce else None
        live.hub.subscribe(subscriber, *[topic for topic in allowed if isinstance(topic, Feature)], told=told)
        return True

    async def _subscribe(self, ctx: Ctx, params: types.SubscribeRequestParams) -> types.EmptyResult:
        uri = str(params.uri)
        gate = self._live.gate
        if (is_pattern(uri) and not gate.knows_patterns) or not await gate.allowed(_principal(ctx), [uri]):
            raise MCPError(types.INVALID_PARAMS, "This caller may not watch that URI", {"uri": uri})
        state = seams.connection_of(ctx.session).state
        session = state.get(_STATE)
        if session is None:
            why = state.get(_REFUSED, "this connection has no stream on which it could be told")
            raise MCPError(types.INTERNAL_ERROR, f"No subscription: {why}", {"uri": uri})
        try:
            self._live.hub.subscribe(session.subscriber, uris=[uri])
        except (InvalidPattern, LimitReached) as error:
            raise MCPError(types.INVALID_PARAMS, str(error), {"uri": uri}) from None
        return types.EmptyResult()

    async def _unsubscribe(self, ctx: Ctx, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        session = seams.connection_of(ctx.session).state.get(_STATE)
        if session is not None:
            self._live.hub.unsubscribe(session.subscriber, uris=[str(params.uri)])
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
            params.notifications.model_dump(by_alias=True, include=_KNOWN_KINDS), Wanted, strict=False
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
            shape = live.shape(is_tagged=True, is_extended=declares_extension(declared))
            pump = _Pump(live, ctx, shape)
            # Open before the acknowledgement, so that what changes while it is written is told after it.
            pump.open(honoured.features, honoured.uris, live.gate.predicate(principal))
            self._listening[pump] = None
            try:
                cursor = live.cursor(honoured.features)
                await pump.send(
                    "notifications/subscriptions/acknowledged",
                    {"notifications": honoured.as_filter(), "_meta": {**meta, CURSOR_KEY: cursor}},
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

    __slots__ = ("_connection", "_live", "_shape", "_task", "_wire", "subscriber")

    def __init__(self, live: Live, connection: Connection) -> None:
        self._live = live
        self._connection = connection
        self._wire = _wire_of(connection)
        self._shape = live.shape()
        self._task: asyncio.Task[None] | None = None
        self.subscriber: Subscriber | None = None

    def open(self, is_extended: bool, label: str, is_muted: IsMuted | None) -> Subscriber:
        self._shape = self._live.shape(is_extended=is_extended)
        if self._wire is not None:
            self._wire.renew()
        self.subscriber = self._live.hub.open(self._deliver, label=label, is_muted=is_muted)
        self.subscriber.is_ready = False  # until the handshake is over
        self.subscriber.settle()
        return self.subscriber

    def start(self) -> None:
        if self.subscriber is not None and self._task is None:
            self._live.hub.wake(self.subscriber)

    async def unsubscribed(self, uri: str) -> None:
        """What is being written was told before the end of the subscription, and must not come after the answer."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def _deliver(self, notification: Notification) -> object:
        if self._wire is not None:
            return None if self._wire.write(write(notification, self._shape), self.start) else BUSY
        self._task = asyncio.get_running_loop().create_task(self._write(notification))
        return BUSY

    async def _write(self, notification: Notification) -> None:
        try:
            message = msgspec.json.decode(write(notification, self._shape))
            await self._connection.outbound.notify(message["method"], message["params"])
        except Exception as error:  # the pipe broke: the SDK ends the connection, and with it this subscriber
            logger.debug("a legacy session could not be written to: %r", error)
            return
        self._task = None
        self.start()


class _Pump:
    """One listen stream inside the SDK: its own request's task writes, and sleeps in between. Where the pipe is ours,
    that task writes only what comes first and last."""

    def __init__(self, live: Live, ctx: Ctx, shape: Shape) -> None:
        self._live = live
        self._ctx = ctx
        self._wire = _wire_of(seams.connection_of(ctx.session))
        self._shape = shape
        self._tag = encode_tag(ctx.request_id if ctx.request_id is not None else "")
        self._notification: Notification | None = None
        self._roused = asyncio.Event()
        self._is_closed = False
        self._subscriber: Subscriber | None = None

    def open(self, features: list[Feature], uris: list[str], may: Callable[[str], bool] | None) -> None:
        self._subscriber = self._live.hub.open(
            self._deliver, label=f"listen {self._ctx.request_id}", on_close=lambda reason: self.close()
        )
        self._subscriber.may = may
        self._subscriber.is_ready = False  # until the acknowledgement is written
        self._subscriber.settle()
        self._live.hub.subscribe(self._subscriber, *features, uris=uris)

    def close(self) -> None:
        self._is_closed = True
        if self._subscriber is not None:
            self._live.hub.close(self._subscriber, Reason.DISCONNECTED)
        self._roused.set()

    async def run(self) -> None:
        self._wake()
        while not self._is_closed:
            await self._roused.wait()
            self._roused.clear()
            if self._notification is not None:
                message = msgspec.json.decode(write(self._notification, self._shape, self._tag))
                self._notification = None
                await self.send(message["method"], message["params"])
                self._wake()

    async def send(self, method: str, params: dict[str, Any]) -> None:
        raw: Any = _Raw(method=method, params=params)
        await self._ctx.session.send_notification(raw, related_request_id=self._ctx.request_id)

    def _wake(self) -> None:
        if self._subscriber is not None:
            self._live.hub.wake(self._subscriber)

    def _deliver(self, notification: Notification) -> object:
        if self._wire is not None:
            return None if self._wire.write(write(notification, self._shape, self._tag), self._wake) else BUSY
        self._notification = notification
        self._roused.set()
        return BUSY


_KNOWN_KINDS = {"tools_list_changed", "prompts_list_changed", "resources_list_changed", "resource_subscriptions"}


def _wire_of(connection: Connection) -> Wire | None:
    """The lines of this process's standard output, if those are what this connection writes to and are ours."""
    stream = seams.write_stream_of(connection)
    return stream if isinstance(stream, Wire) else None


def _is_feature(topic: Topic) -> bool:
    return isinstance(topic, Feature)


def _as_dict(result: HandlerResult) -> dict[str, Any]:
    if isinstance(result, BaseModel):
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dict(result) if isinstance(result, Mapping) else {}


def _principal(ctx: Ctx) -> Principal | None:
    return principal_of(ctx.request.scope.get("user")) if ctx.request is not None else None


def _address(ctx: Ctx) -> str | None:
    client = ctx.request.client if ctx.request is not None else None
    return client.host if client else None
