"""`subscriptions/listen` over HTTP: the response to the request is the stream.

The acknowledgement is the first event. It names only topics that this server can send and this caller may watch, and no
other is sent. A graceful end sends the result as the last event. The publisher writes to the stream directly. On plain
ASGI the task of the request waits for the end of the connection; under uvicorn the stream is parked, without a task.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import mcp_types as types

from tidings.core.frames import (
    KEEP_ALIVE,
    FrameEncoder,
    FrameFormat,
    acknowledgement,
    encode_tag,
    heartbeat,
    listen_result,
)
from tidings.core.hub import Hub
from tidings.core.model import Feature, Reason
from tidings.core.subscriber import ConnectionKind, Subscriber
from tidings.errors import LimitReached, TooManyStreams
from tidings.http.parking import buffer_response
from tidings.http.stream import NO_STREAM, AsgiStream, Receive, ResponseStream, Scope, Send, abort_unfinished
from tidings.policy import Policy
from tidings.server.authorization import Principal
from tidings.server.client_identity import ClientIdentity
from tidings.server.stream_limits import StreamSlot
from tidings.server.subscribe import PreparedSubscription, Subscriptions
from tidings.wire.envelope import error_response

if TYPE_CHECKING:
    from tidings.http.request_checks import ListenRequest

__all__ = ["ListenStream", "ListenStreams"]

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]

_KIND = ConnectionKind("modern", "http")

_GROUPS = 16
"""Streams get their keep-alives in this number of groups, so that no callback writes to all of them."""

_TAG_PLACEHOLDER = encode_tag(f"tag {secrets.token_hex(8)}")
"""In a cached acknowledgement, in place of the id of the stream."""


class ListenStreams:
    """All listen streams of one server over HTTP."""

    def __init__(
        self,
        subscriptions: Subscriptions,
        *,
        result_meta: Callable[[], dict[str, Any]],
        stop_server: Callable[[], None],
    ) -> None:
        """`result_meta` returns the `_meta` of the result that ends a stream."""
        self.subscriptions = subscriptions
        self.hub = subscriptions.hub
        self.policy = subscriptions.policy
        self.result_meta = result_meta
        self._stop_server = stop_server
        self._groups: list[dict[ListenStream, None]] = [{} for _ in range(_GROUPS)]
        self._next_group = cycle(range(_GROUPS))
        self._current_group = 0
        self._sdk_responses: dict[AsgiStream, None] = {}
        """The connections of the streams that the SDK writes."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._encoders: WeakValueDictionary[tuple[FrameFormat, int | None], FrameEncoder] = WeakValueDictionary()
        self._acknowledgements: dict[tuple[Feature, ...], tuple[Hashable, bytes, bytes]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __iter__(self) -> Iterator[ListenStream]:
        return (stream for group in self._groups for stream in tuple(group))

    @property
    def slow(self) -> int:
        """The number of streams that wait for their client."""
        own = sum(stream.response.is_busy for stream in self)
        return own + sum(response.is_busy for response in tuple(self._sdk_responses))

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, request: ListenRequest, principal: Principal | None
    ) -> ListenStream | None:
        """Open a stream. Return it if its request has to wait for the end: `await stream.wait_for_end(receive)`."""
        address = scope["client"][0] if scope.get("client") else None
        try:
            prepared = await self.subscriptions.prepare(
                request.requested,
                principal,
                meta=request.meta,
                capabilities=request.capabilities,
                address=address,
            )
        except TooManyStreams as error:
            await _refuse(send, request.id, str(error))
            return None
        except LimitReached as error:
            # 400, not 503: a retry would fail too.
            await _refuse(send, request.id, str(error), code=types.INVALID_PARAMS, status=400)
            return None
        tag = encode_tag(request.id)
        stream = ListenStream(self, prepared.slot, tag, has_heartbeats=prepared.options.terms.bookmarks)
        is_open = False
        try:
            is_open = await self._open(stream, scope, receive, send, prepared, str(request.id))
            observer = self.subscriptions.client_observer
            if observer is not None and stream.subscriber is not None:
                client = ClientIdentity.of_modern(request.meta, principal, address)
                observer.client_connected(stream.subscriber, client)
        finally:
            is_parked = not isinstance(stream.response, AsgiStream)
            if not is_open:
                if is_parked:
                    stream.response.abort()  # a parked connection has no request that would end it
                stream.on_disconnect()
        return None if is_parked or not is_open else stream

    async def _open(
        self,
        stream: ListenStream,
        scope: Scope,
        receive: Receive,
        send: Send,
        prepared: PreparedSubscription,
        request_id: str,
    ) -> bool:
        """Acknowledge, subscribe, and park the stream if the server allows it. Return False if it has ended already."""
        response = stream.response = AsgiStream(scope, receive, send, self.policy)
        response.callbacks = stream
        buffered = buffer_response(scope, response.request)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            # Nothing awaits from here to the subscription, so that no change can fall in between.
            event = self._acknowledge(prepared, stream)
            response.write(event)
            if not prepared.granted or self.subscriptions.is_stopping:
                stream.end()
                return response.is_busy
            if buffered is not None:
                stream.response = buffered.park(event, stream, self.policy.write_deadline) or response
        finally:
            if buffered is not None:
                buffered.flush()
        stream.subscribe(prepared, f"listen {request_id}")
        self._add(stream, prepared.principal)
        if stream.response is response:
            response.watch_connection(stream.end)
        return True

    def _acknowledge(self, prepared: PreparedSubscription, stream: ListenStream) -> bytes:
        """Return the event that acknowledges a subscription.

        It is encoded once for all clients that listen to the same lists without options, until a list changes."""
        prepared.publish_earlier()
        granted, end = prepared.granted, partial(stream.end, Reason.REPLACED)
        if granted.uris or prepared.options.uses_extension or prepared.expires_at is not None:
            return acknowledgement(granted.as_json(), prepared.acknowledge(end), stream.tag)
        features = tuple(granted.features)
        state = (self.subscriptions.epoch, *map(self.hub.notifications.version, features))
        cached = self._acknowledgements.get(features)
        if cached is None or cached[0] != state:
            event = acknowledgement(granted.as_json(), prepared.acknowledge(end), _TAG_PLACEHOLDER)
            head, _, tail = event.partition(_TAG_PLACEHOLDER)
            cached = self._acknowledgements[features] = (state, head, tail)
        return cached[1] + stream.tag + cached[2]

    async def serve_by_sdk(
        self, app: Any, scope: Scope, receive: Receive, send: Send, replayed: Receive | None = None
    ) -> None:
        """Let the SDK serve a stream, and abort it if its client does not read. `replayed` replaces `receive` for a
        request that was read already."""
        self._loop = asyncio.get_running_loop()
        response = AsgiStream(scope, receive, send, self.policy)
        response.callbacks = _SDKStreamCallbacks(self.hub, self.policy)
        self._sdk_responses[response] = None
        response.watch_connection(self._end_sdk_stream)
        try:
            await app(scope, replayed or receive, response.forward)
        finally:
            response.stop_watching()
            del self._sdk_responses[response]

    def _end_sdk_stream(self, reason: Reason) -> None:
        # The SDK has no way to end one stream.
        if reason is Reason.SHUTDOWN:
            self._stop_server()

    def stop(self) -> None:
        """End every stream with its result."""
        streams = list(self)
        responses: list[ResponseStream] = [stream.response for stream in streams]
        for stream in streams:
            stream.end()
        abort_unfinished([*responses, *self._sdk_responses], self._loop)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def encoder(self, frame_format: FrameFormat, tag_length: int | None) -> FrameEncoder:
        """Return the encoder that all streams with the same format share."""
        found = self._encoders.get((frame_format, tag_length))
        if found is None:
            found = self._encoders[frame_format, tag_length] = FrameEncoder(frame_format, tag_length)
        return found

    def remove(self, stream: ListenStream) -> None:
        self._groups[stream.group].pop(stream, None)
        self.subscriptions.authorized_streams.remove(stream)

    def _add(self, stream: ListenStream, principal: Principal | None) -> None:
        self._loop = asyncio.get_running_loop()
        stream.group = next(self._next_group)
        self._groups[stream.group][stream] = None
        self.subscriptions.authorized_streams.add(stream, principal)
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        # In an empty context: that of the first stream would be kept as long as there are any.
        self._timer = asyncio.get_running_loop().call_later(
            self.policy.keep_alive / _GROUPS, self._keep_alive, context=contextvars.Context()
        )

    def _keep_alive(self) -> None:
        self._timer = None
        self._current_group = (self._current_group + 1) % _GROUPS
        for stream in list(self._groups[self._current_group]):
            stream.keep_alive()
        if any(self._groups):
            self._start_timer()


class ListenStream:
    """One listen stream. Small on purpose: there may be tens of thousands."""

    __slots__ = ("_has_heartbeats", "_slot", "_streams", "group", "response", "subscriber", "tag")

    def __init__(self, streams: ListenStreams, slot: StreamSlot, tag: bytes, *, has_heartbeats: bool) -> None:
        self._streams = streams
        self._slot = slot
        self._has_heartbeats = has_heartbeats
        self.tag = tag
        self.group = 0
        self.response: ResponseStream = NO_STREAM
        self.subscriber: Subscriber | None = None

    def subscribe(self, prepared: PreparedSubscription, label: str) -> None:
        streams, tag, response = self._streams, self.tag, self.response
        frame_format = prepared.frame_format(is_sse=True, is_tagged=True)
        encoder = streams.encoder(frame_format, len(tag) if response.writes_chunk_sizes else None)
        subscriber = prepared.subscribe(
            response.deliverer(tag, encoder, streams.hub.counts),
            label=label,
            kind=_KIND,
            on_close=self._on_close,
            is_ready=not response.is_busy,
        )
        if not subscriber.is_closed:
            self.subscriber = subscriber

    async def wait_for_end(self, receive: Receive) -> None:
        """Wait for the end of the connection, or of the response."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self.on_disconnect()

    def keep_alive(self) -> None:
        if self.response.is_busy or self.subscriber is None:
            return
        event = KEEP_ALIVE
        if self._has_heartbeats:
            event = heartbeat(self._streams.subscriptions.cursor_of(self.subscriber), self.tag)
        if not self.response.write(event):
            self.subscriber.pause()

    def end(self, reason: Reason = Reason.SHUTDOWN) -> None:
        """Send the result, which completes the response. A busy stream ends when it is free."""
        if self.response.is_closed:
            return
        self._close(reason)
        if not self.response.is_busy:
            self.response.write(listen_result(self._streams.result_meta(), self.tag), is_last=True)
            self._slot.release()  # the connection may stay open for a while

    # Called by the response

    def on_writable(self) -> None:
        if self.subscriber is not None:
            self._streams.hub.wake(self.subscriber)
        elif not self.response.is_closed:
            self.end()

    def on_write_timeout(self) -> None:
        _log_slow(self._streams.policy)
        self._close(Reason.SLOW)

    def on_disconnect(self) -> None:
        """Clean up after the connection or the request has ended, and leave no reference cycles."""
        self._streams.remove(self)
        self._close(Reason.DISCONNECTED)
        self._slot.release()
        response, self.response = self.response, NO_STREAM
        if response.is_busy:
            response.abort()

    def _close(self, reason: Reason) -> None:
        subscriber, self.subscriber = self.subscriber, None
        if subscriber is not None:
            self._streams.hub.close(subscriber, reason)

    def _on_close(self, reason: Reason) -> None:
        if reason in (Reason.OVERFLOW, Reason.REVOKED):
            self.subscriber = None
            self.end()


class _SDKStreamCallbacks:
    """The callbacks of a stream that the SDK writes."""

    __slots__ = ("_hub", "_policy")

    def __init__(self, hub: Hub, policy: Policy) -> None:
        self._hub = hub
        self._policy = policy

    def on_writable(self) -> None:
        pass

    def on_write_timeout(self) -> None:
        self._hub.counts.cut_off[Reason.SLOW] += 1  # the SDK closes its subscriber later, with another reason
        _log_slow(self._policy)


def _log_slow(policy: Policy) -> None:
    logger.warning("a listen stream was not read for %s s; aborting it", policy.write_deadline)


async def _refuse(
    send: Send, request_id: str | int, message: str, *, code: int = types.INTERNAL_ERROR, status: int = 503
) -> None:
    """Respond with a JSON-RPC error. With status 503, the client may try again later."""
    body = error_response(request_id, code, message)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
