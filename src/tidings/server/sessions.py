"""Subscriptions on connections that the SDK serves: legacy sessions, and listen streams that the SDK writes.

A legacy session is subscribed to all lists at the handshake, and to URIs by `resources/subscribe`. The handler of a
listen request returns when its stream ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mcp_types as types
import msgspec
from mcp.server import ServerRequestContext
from mcp.server.context import HandlerResult
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel

from tidings.core.encoding import is_unicode
from tidings.core.frames import (
    ACKNOWLEDGED_METHOD,
    CURSOR_KEY,
    HEARTBEAT_METHOD,
    SUBSCRIPTION_KEY,
    encode_frame,
    encode_tag,
)
from tidings.core.mailbox import IsMuted
from tidings.core.model import Feature, Notification, Reason, Topic
from tidings.core.redact import short_id
from tidings.core.subscriber import BUSY, ConnectionKind, Subscriber
from tidings.errors import InvalidPattern, LimitReached, TooManyStreams
from tidings.sdk import internals
from tidings.sdk.definitions import with_meta
from tidings.server.authorization import caller_of
from tidings.server.client_identity import ClientIdentity, ClientObserver
from tidings.server.granted_topics import RequestedTopics
from tidings.server.heartbeat import Heartbeat
from tidings.server.subscribe import PreparedSubscription, Subscriptions
from tidings.wire.methods import LISTEN, SUBSCRIBE, UNSUBSCRIBE

if TYPE_CHECKING:
    from mcp.server import Server
    from mcp.server.connection import Connection

__all__ = ["LegacySession", "LegacySessions", "NotificationStream", "Sessions", "identity_of"]

logger = logging.getLogger(__name__)

Ctx = ServerRequestContext[Any, Any]

_SESSION, _REFUSAL = "dev.tidings/session", "dev.tidings/refused"
"""Keys in the state of a connection: its `_OpenSession`, or the reason why it has none."""


class LegacySession(Protocol):
    """How the notifications of a legacy session reach its client."""

    def open(self, prepared: PreparedSubscription, version: str, label: str, is_muted: IsMuted | None) -> Subscriber:
        """Subscribe at the handshake."""

    def start(self) -> None:
        """Start to notify the client, which has ended the handshake."""

    def send_heartbeat(self) -> None: ...

    async def finish_unsubscribe(self, uri: str) -> None:
        """Return when no notification of a URI can follow, after the client has unsubscribed from it."""


class LegacySessions(Protocol):
    """The legacy sessions over HTTP, by the SDK's session id."""

    def find_or_add(self, session_id: str) -> LegacySession: ...

    def forget(self, session_id: str) -> None: ...


class NotificationStream(ABC):
    """A write stream that accepts encoded notifications, beside the messages of the SDK."""

    write_notification: Callable[[bytes, Callable[[], None]], bool]
    """Write a notification with its newline. Return False if the stream is full now: before the next one, the caller
    must wait until the given function is called."""

    @abstractmethod
    def on_handshake(self) -> None:
        """Handle the start of a session. Its protocol version can differ from the one before."""


class _OpenSession(NamedTuple):
    """A legacy session that is subscribed."""

    session: LegacySession
    prepared: PreparedSubscription
    subscriber: Subscriber


class Sessions:
    """Opens and closes the subscriptions of connections that the SDK serves."""

    def __init__(self, server: Server[Any], subscriptions: Subscriptions, http_sessions: LegacySessions) -> None:
        self._subscriptions = subscriptions
        self._hub = subscriptions.hub
        self._heartbeat = Heartbeat(subscriptions.policy.keep_alive)
        self._http_sessions = http_sessions
        self._streams: dict[_ListenStream, None] = {}
        self._user_handlers = {method: server.get_request_handler(method) for method in (SUBSCRIBE, UNSUBSCRIBE)}
        """The user's own handlers, which may start and stop to watch a resource. Tidings calls them, too."""
        server.add_request_handler(SUBSCRIBE, types.SubscribeRequestParams, self._subscribe)
        server.add_request_handler(UNSUBSCRIBE, types.UnsubscribeRequestParams, self._unsubscribe)
        server.add_request_handler(LISTEN, types.SubscriptionsListenRequestParams, self.listen)

    @property
    def client_observer(self) -> ClientObserver | None:
        return self._subscriptions.client_observer

    def stop(self) -> None:
        """End every listen stream; its handler then returns the result."""
        for stream in list(self._streams):
            stream.end(Reason.SHUTDOWN)

    # Legacy sessions

    async def open(self, ctx: Ctx, version: str) -> dict[str, Any] | None:
        """Subscribe a legacy session to all lists during the handshake.

        Return the `_meta` of the response; None if the session can't be notified of anything. The session watches from
        here on, so that no change falls between the handshake and the client's first list request. It is notified only
        after the handshake."""
        connection = internals.connection_of(ctx.session)
        if not connection.has_standalone_channel:
            return None
        # A second handshake on the same connection replaces the first one.
        connection.state.pop(_REFUSAL, None)
        if (former := connection.state.pop(_SESSION, None)) is not None:
            self._close(former)
        params = ctx.params or {}
        try:
            prepared = await self._subscriptions.prepare(
                None,
                caller_of(ctx),
                meta=params.get("_meta"),
                capabilities=params.get("capabilities"),
                address=_address(ctx),
            )
        except LimitReached as error:
            logger.warning("a legacy session will not be told of changes: %s", error)
            connection.state[_REFUSAL] = str(error)
            return None
        session_id = connection.session_id
        session: LegacySession
        if session_id is None:
            session, label = _StdioSession(self._subscriptions, connection), "pipe"
        else:
            session, label = self._http_sessions.find_or_add(session_id), f"session {short_id(session_id)}"
        # If another connection takes over the durable subscription, the session goes on without it: a client that lost
        # its session would lose more.
        meta = prepared.acknowledge(lambda: None, is_session=True)
        is_muted = _is_feature if version in self._subscriptions.policy.mute_list_changed else None
        subscriber = session.open(prepared, version, label, is_muted)
        opened = connection.state[_SESSION] = _OpenSession(session, prepared, subscriber)
        if (observer := self.client_observer) is not None:
            info, address = params.get("clientInfo"), _address(ctx)
            client = ClientIdentity.of_session(session_id or "", info, version, prepared.principal, address)
            observer.client_connected(subscriber, client)
        connection.exit_stack.callback(self._close, opened)
        if session_id is not None:  # not in `_close`: a second handshake uses the stream that is open
            connection.exit_stack.callback(self._http_sessions.forget, session_id)
        if prepared.options.terms.bookmarks:
            self._heartbeat.add(session.send_heartbeat)
        return meta

    def is_refused(self, ctx: Ctx) -> bool:
        """Return whether a legacy session gets no notifications, because a limit was reached at its handshake."""
        return _REFUSAL in internals.connection_of(ctx.session).state

    def start(self, ctx: Ctx) -> None:
        """Start to notify a legacy session, whose client has ended the handshake."""
        opened = internals.connection_of(ctx.session).state.get(_SESSION)
        if opened is not None:
            opened.session.start()

    def _close(self, opened: _OpenSession) -> None:
        """Close the subscription of a legacy session. Closing twice has no effect."""
        self._heartbeat.remove(opened.session.send_heartbeat)
        opened.prepared.slot.release()
        self._hub.close(opened.subscriber, Reason.DISCONNECTED)

    async def _subscribe(self, ctx: Ctx, params: types.SubscribeRequestParams) -> HandlerResult:
        uri = str(params.uri)
        if not is_unicode(uri):
            raise MCPError(types.INVALID_PARAMS, "The URI contains an unpaired surrogate", {"uri": ascii(uri)})
        if not await self._subscriptions.allows_uri(caller_of(ctx), uri):
            raise MCPError(types.INVALID_PARAMS, "This caller may not watch that URI", {"uri": uri})
        state = internals.connection_of(ctx.session).state
        opened = state.get(_SESSION)
        if opened is None:
            if self._user_handlers[SUBSCRIBE] is not None:
                return await self._call_user(SUBSCRIBE, ctx, params)
            reason = state.get(_REFUSAL, "this connection has no stream for notifications")
            raise MCPError(types.INTERNAL_ERROR, f"No subscription: {reason}", {"uri": uri})
        was_watched = uri in (opened.subscriber.uris or ())
        try:
            meta = opened.prepared.add_uri(opened.subscriber, uri)
        except (InvalidPattern, LimitReached) as error:
            raise MCPError(types.INVALID_PARAMS, str(error), {"uri": uri}) from None
        try:
            return with_meta(await self._call_user(SUBSCRIBE, ctx, params), meta or {})
        except BaseException:  # the user refuses the subscription, or the client has cancelled its request
            if not was_watched:
                opened.prepared.remove_uri(opened.subscriber, uri)
            raise

    async def _unsubscribe(self, ctx: Ctx, params: types.UnsubscribeRequestParams) -> HandlerResult:
        opened = internals.connection_of(ctx.session).state.get(_SESSION)
        if opened is not None:
            opened.prepared.remove_uri(opened.subscriber, str(params.uri))
            await opened.session.finish_unsubscribe(str(params.uri))
        return await self._call_user(UNSUBSCRIBE, ctx, params)

    async def _call_user(self, method: str, ctx: Ctx, params: Any) -> HandlerResult:
        entry = self._user_handlers[method]
        return types.EmptyResult() if entry is None else await entry.handler(ctx, params)

    # Listen streams

    async def listen(self, ctx: Ctx, params: types.SubscriptionsListenRequestParams) -> types.SubscriptionsListenResult:
        """Serve a listen stream until it ends."""
        if ctx.request_id is None:
            raise MCPError(types.INVALID_REQUEST, f"{LISTEN} requires a request id")
        if isinstance(ctx.request_id, str) and not is_unicode(ctx.request_id):
            raise MCPError(types.INVALID_REQUEST, "The request id contains an unpaired surrogate")
        capabilities = ctx.session.client_capabilities
        try:
            prepared = await self._subscriptions.prepare(
                msgspec.convert(params.notifications, RequestedTopics, from_attributes=True),
                caller_of(ctx),
                meta=(ctx.params or {}).get("_meta"),
                capabilities=capabilities.model_dump(by_alias=True, exclude_none=True) if capabilities else None,
                address=_address(ctx),
            )
        except TooManyStreams as error:
            raise MCPError(types.INTERNAL_ERROR, str(error)) from None
        except LimitReached as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        stream = _ListenStream(self._subscriptions, ctx, prepared)
        meta: dict[str, Any] = {SUBSCRIPTION_KEY: ctx.request_id}
        self._streams[stream] = None
        try:
            acknowledgement = stream.open(prepared)
            if (observer := self.client_observer) is not None and stream.subscriber is not None:
                observer.client_connected(stream.subscriber, identity_of(ctx))
            if prepared.options.terms.bookmarks:
                self._heartbeat.add(stream.send_heartbeat)
            await stream.send(
                ACKNOWLEDGED_METHOD,
                {"notifications": prepared.granted.as_json(), "_meta": {**meta, **acknowledgement}},
            )
            if prepared.granted and not self._subscriptions.is_stopping:
                self._subscriptions.authorized_streams.add(stream, prepared.principal)
                await stream.run()
        finally:
            self._streams.pop(stream, None)
            self._subscriptions.authorized_streams.remove(stream)
            self._heartbeat.remove(stream.send_heartbeat)
            stream.end(Reason.DISCONNECTED)
            prepared.slot.release()
        return types.SubscriptionsListenResult(_meta=meta)


class _SDKDelivery(ABC):
    """Delivers notifications on a connection that the SDK writes.

    If its stream takes encoded notifications, they are written immediately; if not, the SDK sends one at a time."""

    def __init__(
        self, subscriptions: Subscriptions, connection: Connection, meta: dict[str, Any] | None = None
    ) -> None:
        """`meta` is the `_meta` of each notification."""
        self._meta = meta or {}
        self._subscriptions = subscriptions
        self._connection = connection
        stream = internals.write_stream_of(connection)
        self._stream = stream if isinstance(stream, NotificationStream) else None
        self._context = contextvars.copy_context()
        """The context in which notifications are sent. It must not be that of the request that changed something."""
        self._sending: asyncio.Task[None] | None = None
        self.subscriber: Subscriber | None = None

    @abstractmethod
    def _encode(self, notification: Notification) -> bytes: ...

    @abstractmethod
    async def send(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification through the SDK."""

    def start(self) -> None:
        """Deliver what is pending, unless a notification is being sent."""
        if self.subscriber is not None and self._sending is None:
            self._subscriptions.hub.wake(self.subscriber)

    def send_heartbeat(self) -> None:
        if self.subscriber is not None and self.subscriber.is_ready:
            self.subscriber.pause()
            cursor = self._subscriptions.cursor_of(self.subscriber).as_json()
            self._start_sending(HEARTBEAT_METHOD, {"_meta": {**self._meta, CURSOR_KEY: cursor}})

    def _deliver(self, notification: Notification) -> object:
        frame = self._encode(notification)
        self._subscriptions.hub.counts.bytes += len(frame)
        if self._stream is not None:
            return None if self._stream.write_notification(frame, self.start) else BUSY
        message = msgspec.json.decode(frame)
        self._start_sending(message["method"], message["params"])
        return BUSY

    def _start_sending(self, method: str, params: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        self._sending = loop.create_task(self._send(method, params), context=self._context)

    async def _send(self, method: str, params: dict[str, Any]) -> None:
        try:
            await self.send(method, params)
        except Exception as error:  # the connection broke, and the SDK ends it
            logger.debug("a client could not be notified through the SDK: %r", error)
            if self.subscriber is not None:
                self._subscriptions.hub.close(self.subscriber, Reason.DISCONNECTED)
            return
        self._sending = None
        self.start()


class _StdioSession(_SDKDelivery):
    """A legacy session on stdio, or on another pair of streams."""

    def open(self, prepared: PreparedSubscription, version: str, label: str, is_muted: IsMuted | None) -> Subscriber:
        self._format = prepared.frame_format()
        if self._stream is not None:
            self._stream.on_handshake()
        self.subscriber = prepared.subscribe(
            self._deliver,
            label=label,
            kind=ConnectionKind("legacy", "stdio"),
            is_muted=is_muted,
            is_ready=False,
            merges_on_overflow=True,
            announces=self._subscriptions.policy.announce,
        )
        return self.subscriber

    async def finish_unsubscribe(self, uri: str) -> None:
        if self._sending is not None:
            await asyncio.wait({self._sending})

    def _encode(self, notification: Notification) -> bytes:
        return encode_frame(notification, self._format)

    async def send(self, method: str, params: dict[str, Any]) -> None:
        await self._connection.outbound.notify(method, params)


class _RawNotification(BaseModel):
    """A notification that is encoded already."""

    method: str
    params: dict[str, Any]


class _ListenStream(_SDKDelivery):
    """A listen stream of the SDK, which lasts as long as its request."""

    def __init__(self, subscriptions: Subscriptions, ctx: Ctx, prepared: PreparedSubscription) -> None:
        super().__init__(subscriptions, internals.connection_of(ctx.session), {SUBSCRIPTION_KEY: ctx.request_id})
        self._ctx = ctx
        self._format = prepared.frame_format(is_tagged=True)
        self._tag = encode_tag(ctx.request_id if ctx.request_id is not None else "")
        self._end = asyncio.Event()

    def open(self, prepared: PreparedSubscription) -> dict[str, Any]:
        """Subscribe; return the `_meta` of the acknowledgement. Later changes are sent after it."""
        acknowledgement = prepared.acknowledge(partial(self.end, Reason.REPLACED))
        self.subscriber = prepared.subscribe(
            self._deliver,
            label=f"listen {self._ctx.request_id}",
            kind=ConnectionKind("modern", "stdio" if self._ctx.request is None else "http"),
            on_close=self.end,
            is_ready=False,
        )
        return acknowledgement

    def end(self, reason: Reason) -> None:
        if self.subscriber is not None:
            self._subscriptions.hub.close(self.subscriber, reason)
        self._end.set()

    async def run(self) -> None:
        """Deliver notifications until the stream is closed and the last one is sent."""
        self.start()
        try:
            await self._end.wait()
            if self._sending is not None:
                await asyncio.wait({self._sending})
        finally:
            if self._sending is not None:
                self._sending.cancel()  # the request was cancelled

    def _encode(self, notification: Notification) -> bytes:
        return encode_frame(notification, self._format, self._tag)

    async def send(self, method: str, params: dict[str, Any]) -> None:
        raw: Any = _RawNotification(method=method, params=params)
        await self._ctx.session.send_notification(raw, related_request_id=self._ctx.request_id)


def _is_feature(topic: Topic) -> bool:
    return isinstance(topic, Feature)


def identity_of(ctx: Ctx) -> ClientIdentity:
    """Return the client of a request that the SDK serves."""
    session_id = internals.connection_of(ctx.session).session_id
    if session_id is not None:
        return ClientIdentity(session=session_id)
    return ClientIdentity.of_modern((ctx.params or {}).get("_meta"), caller_of(ctx), _address(ctx))


def _address(ctx: Ctx) -> str | None:
    client = ctx.request.client if ctx.request is not None else None
    return client.host if client else None
