"""Modern HTTP: `subscriptions/listen`, whose response is the stream.

The acknowledgement is the first event and names only what this server can ever send and this caller may watch; nothing
else is ever sent; an end on purpose sends the result as the last event. Whoever publishes writes to the stream
directly. On plain ASGI there is a task per stream, asleep until the client is gone; under uvicorn, there is not.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Hashable
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from tidings.core.frames import (
    KEEP_ALIVE,
    FrameEncoder,
    FrameFormat,
    acknowledgement,
    bookmark,
    encode_tag,
    listen_result,
)
from tidings.core.model import Feature, Reason
from tidings.core.subscriber import ConnectionKind, Subscriber
from tidings.errors import LimitReached
from tidings.http.disconnects import mark_disconnected
from tidings.http.parking import buffer_response
from tidings.http.stream import NO_STREAM, AsgiStream, Receive, ResponseStream, Scope, Send, abort_unfinished
from tidings.policy import Policy
from tidings.server.authorization import Principal, Ticket
from tidings.server.granted_topics import GrantedTopics, honour
from tidings.server.listen_options import ListenOptions

if TYPE_CHECKING:
    from tidings.http.request_checks import ListenRequest
    from tidings.live import Live

__all__ = ["ListenStream", "ListenStreams"]

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]

_KIND = ConnectionKind("modern", "http")

_SLOTS = 16
"""Streams get their keep-alives in so many groups, one after the other, so that nobody waits for all of them."""


_MARK = encode_tag(f"tag {secrets.token_hex(8)}")
"""Stands where a stream's own id will be."""


class ListenStreams:
    """All listen streams of one server over HTTP."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._streams: list[dict[ListenStream, None]] = [{} for _ in range(_SLOTS)]
        self._carried: dict[AsgiStream, None] = {}
        """The connections of the streams that the SDK carries."""
        self._turns = cycle(range(_SLOTS))
        self._slot = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._presses: WeakValueDictionary[tuple[FrameFormat, int | None], FrameEncoder] = WeakValueDictionary()
        self._acknowledged: dict[tuple[Feature, ...], tuple[Hashable, bytes, bytes]] = {}

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, request: ListenRequest, principal: Principal | None
    ) -> ListenStream | None:
        """Open a stream. Returns it if the request has to wait for its end: `await stream.until_lost(receive)`."""
        live = self.live
        address = scope["client"][0] if scope.get("client") else None
        wish = ListenOptions(live, request.meta, request.capabilities, principal)
        try:
            ticket = live.gate.enter(principal, address)
        except LimitReached as error:
            await refuse(send, request.id, str(error))
            return None
        stream = ListenStream(self, ticket, encode_tag(request.id), has_bookmarks=wish.terms.bookmarks)
        is_open = False
        try:
            honoured = await honour(live, request.wanted, principal)
            is_open = await self._open(stream, scope, receive, send, honoured, wish, str(request.id))
        except LimitReached as error:
            # More than anybody may ask for, so there is no use in asking again.
            await refuse(send, request.id, str(error), code=-32602, status=400)
        finally:
            is_parked = not isinstance(stream.channel, AsgiStream)
            if not is_open:
                if is_parked:
                    stream.channel.abort()  # nobody else would
                stream.on_disconnect()
        return None if is_parked or not is_open else stream

    async def _open(
        self,
        stream: ListenStream,
        scope: Scope,
        receive: Receive,
        send: Send,
        honoured: GrantedTopics,
        wish: ListenOptions,
        label: str,
    ) -> bool:
        """Acknowledge, subscribe, and park the stream where that is offered. False if it is over already."""
        live = self.live
        mark_disconnected(scope, receive)
        channel = stream.channel = AsgiStream(send, receive, live.policy, asyncio.get_running_loop())
        channel.callbacks = stream
        buffered = buffer_response(scope, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            # From here to the subscription nothing waits: no change can fall in between.
            if honoured:
                wish.enter(honoured.topics, stream.give_way)
            acknowledged = self._acknowledgement(honoured, wish, stream.tag)
            channel.write(acknowledged)
            if not honoured or live.is_stopping:
                stream.end()
                return channel.is_busy
            if buffered is not None:
                stream.channel = buffered.park(acknowledged, stream, live.policy.write_deadline) or channel
        finally:
            if buffered is not None:
                buffered.flush()
        stream.listen(honoured, wish, label)
        self._join(stream)
        if stream.channel is channel:
            channel.watch_connection(scope, receive, stream.end)
        return True

    def _acknowledgement(self, honoured: GrantedTopics, wish: ListenOptions, tag: bytes) -> bytes:
        """Encoded once for all who ask for the same lists and for nothing else, as long as nothing changes."""
        if honoured.uris or wish.is_special:
            return acknowledgement(honoured.as_filter(), wish.acknowledged(honoured.topics), tag)
        features, notifications = tuple(honoured.features), self.live.hub.notifications
        state = (self.live.epoch, *map(notifications.version, features))
        kept = self._acknowledged.get(features)
        if kept is None or kept[0] != state:
            whole = acknowledgement(honoured.as_filter(), wish.acknowledged(features), _MARK)
            head, _, tail = whole.partition(_MARK)
            kept = self._acknowledged[features] = (state, head, tail)
        return kept[1] + tag + kept[2]

    async def carry(
        self, app: Any, scope: Scope, receive: Receive, send: Send, replayed: Receive | None = None
    ) -> None:
        """Let the SDK carry a stream, and see to it that a reader who does not read is cut off here too. `replayed` is
        for a request that has been read."""
        mark_disconnected(scope, receive)
        self._loop = asyncio.get_running_loop()
        channel = AsgiStream(send, receive, self.live.policy, self._loop)
        channel.callbacks = _Carried(self.live)
        self._carried[channel] = None
        channel.watch_connection(scope, receive, self._end_carried)
        try:
            await app(scope, replayed or receive, partial(channel.forward, send))
        finally:
            channel.stop_watching()
            del self._carried[channel]

    def _end_carried(self, reason: Reason) -> None:
        # The SDK has no way to end one stream.
        if reason is Reason.SHUTDOWN:
            self.live.stop()

    def stop(self) -> None:
        """End every stream with its result."""
        ending = [stream for streams in self._streams for stream in streams]
        outlets: list[ResponseStream] = [stream.channel for stream in ending]
        for stream in ending:
            stream.end()
        abort_unfinished([*outlets, *self._carried], self._loop)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __len__(self) -> int:
        return sum(map(len, self._streams))

    @property
    def slow(self) -> int:
        """Streams whose reader has to be waited for just now."""
        ours = sum(stream.channel.is_busy for streams in self._streams for stream in tuple(streams))
        return ours + sum(channel.is_busy for channel in tuple(self._carried))

    def press(self, shape: FrameFormat, tag_length: int | None = None) -> FrameEncoder:
        """One for all who are told the same."""
        found = self._presses.get((shape, tag_length))
        if found is None:
            found = self._presses[shape, tag_length] = FrameEncoder(shape, tag_length)
        return found

    def leave(self, stream: ListenStream) -> None:
        self._streams[stream.slot].pop(stream, None)

    def _join(self, stream: ListenStream) -> None:
        self._loop = asyncio.get_running_loop()
        stream.slot = next(self._turns)
        self._streams[stream.slot][stream] = None
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        # In nobody's context: the first stream's would be kept as long as there are any.
        self._timer = asyncio.get_running_loop().call_later(
            self.live.policy.keep_alive / _SLOTS, self._keep_alive, context=contextvars.Context()
        )

    def _keep_alive(self) -> None:
        self._timer = None
        self._slot = (self._slot + 1) % _SLOTS
        for stream in list(self._streams[self._slot]):
            stream.keep_alive()
        if any(self._streams):
            self._arm()


class ListenStream:
    """One listen stream, for as long as its connection. Small on purpose: there may be tens of thousands."""

    __slots__ = ("_has_bookmarks", "_lane", "_ticket", "channel", "slot", "subscriber", "tag")

    def __init__(self, lane: ListenStreams, ticket: Ticket, tag: bytes, *, has_bookmarks: bool) -> None:
        self._lane = lane
        self._ticket: Ticket | None = ticket
        self._has_bookmarks = has_bookmarks
        self.tag = tag
        self.slot = 0
        self.channel: ResponseStream = NO_STREAM
        self.subscriber: Subscriber | None = None

    def listen(self, honoured: GrantedTopics, wish: ListenOptions, label: str) -> None:
        hub, tag, channel = self._lane.live.hub, self.tag, self.channel
        shape = wish.shape(is_sse=True, is_tagged=True)
        press = self._lane.press(shape, len(tag) if channel.writes_chunk_sizes else None)
        self.subscriber = hub.open(
            channel.deliverer(tag, press, hub.counts),
            label=f"listen {label}",
            kind=_KIND,
            policy=wish.policy,
            filter=wish.filter,
            on_close=self._on_close,
        )
        self.subscriber.is_authorized = wish.may
        if channel.is_busy:
            self.subscriber.pause()
        wish.watch(self.subscriber)
        hub.subscribe(self.subscriber, *honoured.features, uris=honoured.uris, told=wish.told(honoured.topics))

    async def until_lost(self, receive: Receive) -> None:
        """Wait for the end of the connection, or of the response."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self.on_disconnect()

    def keep_alive(self) -> None:
        if self.channel.is_busy or self.subscriber is None:
            return
        beat = bookmark(self._lane.live.cursor_of(self.subscriber), self.tag) if self._has_bookmarks else KEEP_ALIVE
        if not self.channel.write(beat):
            self.subscriber.pause()

    def end(self, reason: Reason = Reason.SHUTDOWN) -> None:
        """Send the result, which completes the response. A busy stream ends when it is free."""
        if self.channel.is_closed:
            return
        self._close(reason)
        if not self.channel.is_busy:
            self.channel.write(listen_result(self._lane.live.result_meta, self.tag), is_last=True)
            self._make_room()  # its connection may be there for a while

    def give_way(self) -> None:
        """Its client has something else in its place."""
        self.end(Reason.REPLACED)

    # What the channel calls

    def on_writable(self) -> None:
        if self.subscriber is not None:
            self._lane.live.hub.wake(self.subscriber)
        elif not self.channel.is_closed:
            self.end()

    def on_write_timeout(self) -> None:
        _log_slow(self._lane.live.policy)
        self._close(Reason.SLOW)

    def on_disconnect(self) -> None:
        """The connection is gone, or the request: leave nothing behind, not even for the garbage collector."""
        self._lane.leave(self)
        self._close(Reason.DISCONNECTED)
        self._make_room()
        channel, self.channel = self.channel, NO_STREAM
        if channel.is_busy:
            channel.abort()

    def _make_room(self) -> None:
        """For another stream."""
        if self._ticket is not None:
            self._lane.live.gate.leave(self._ticket)
            self._ticket = None

    def _close(self, reason: Reason) -> None:
        subscriber, self.subscriber = self.subscriber, None
        if subscriber is not None:
            self._lane.live.hub.close(subscriber, reason)

    def _on_close(self, reason: Reason) -> None:
        if reason is Reason.OVERFLOW:
            self.subscriber = None
            self.end()


class _Carried:
    """Whose stream it is, when the SDK carries it."""

    __slots__ = ("_live",)

    def __init__(self, live: Live) -> None:
        self._live = live

    def on_writable(self) -> None:
        pass

    def on_write_timeout(self) -> None:
        self._live.hub.counts.cut_off[Reason.SLOW] += 1  # its subscriber is closed later, when the SDK hears of it
        _log_slow(self._live.policy)


def _log_slow(policy: Policy) -> None:
    logger.warning("a listen stream was not read for %s s; cutting it off", policy.write_deadline)


async def refuse(send: Send, request_id: str | int, message: str, *, code: int = -32603, status: int = 503) -> None:
    """A JSON-RPC error in place of the stream. By default, one that may go away when others have gone."""
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
