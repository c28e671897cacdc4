"""Modern HTTP: `subscriptions/listen`, whose response is the stream.

The acknowledgement is the first event and names only what this server can ever send and this caller may watch; nothing
else is ever sent; an end on purpose sends the result as the last event. One task per stream, asleep until the client is
gone: whoever publishes writes to the stream directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.errors import InvalidPattern, LimitReached
from tidings.frames import KEEP_ALIVE, acknowledgement, bookmark, encode_tag, listen_result, render
from tidings.gate import Principal
from tidings.index import check_limit
from tidings.lanes.channel import Channel, Receive, Scope, Send, dismiss
from tidings.lanes.wish import Wish
from tidings.model import Feature, Notification, Reason, Topic
from tidings.patterns import compile_pattern, is_pattern
from tidings.policy import Policy
from tidings.subscriber import BUSY, Subscriber

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Honoured", "ListenLane", "Wanted", "honour"]

logger = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),
]

_SLOTS = 16
"""Streams get their keep-alives in so many groups, one after the other, so that nobody waits for all of them."""


class Wanted(msgspec.Struct, rename="camel"):
    """What a client asks for, and in the acknowledgement what it gets."""

    tools_list_changed: bool | None = None
    prompts_list_changed: bool | None = None
    resources_list_changed: bool | None = None
    resource_subscriptions: list[str] | None = None

    @property
    def features(self) -> list[Feature]:
        chosen = {
            Feature.TOOLS: self.tools_list_changed,
            Feature.PROMPTS: self.prompts_list_changed,
            Feature.RESOURCES: self.resources_list_changed,
        }
        return [feature for feature, is_chosen in chosen.items() if is_chosen]


class Honoured:
    """What of a listen request is served."""

    __slots__ = ("features", "uris")

    def __init__(self, topics: list[Topic]) -> None:
        self.features = [topic for topic in topics if isinstance(topic, Feature)]
        self.uris = [topic for topic in topics if not isinstance(topic, Feature)]

    @property
    def topics(self) -> list[Topic]:
        return [*self.features, *self.uris]

    def __bool__(self) -> bool:
        return bool(self.features or self.uris)

    def as_filter(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {f"{feature.value}ListChanged": True for feature in self.features}
        return chosen | ({"resourceSubscriptions": self.uris} if self.uris else {})


async def honour(live: Live, wanted: Wanted, principal: Principal | None) -> Honoured:
    """What this server can send of what is wanted, and this caller may watch."""
    uris = list(dict.fromkeys(wanted.resource_subscriptions or ()))
    # Before anything is sent: a response that has begun as a stream can no longer be an error.
    check_limit(live.policy, None, uris)
    topics: list[Topic] = [feature for feature in wanted.features if live.serves(feature)]
    if live.serves(Feature.RESOURCES):
        topics += [uri for uri in uris if _can_be_matched(uri, live)]
    return Honoured(await live.gate.allowed(principal, topics))


def _can_be_matched(uri: str, live: Live) -> bool:
    try:
        if is_pattern(uri):
            compile_pattern(uri, live.templates)
            return live.gate.knows_patterns
    except InvalidPattern:
        return False
    return True


class ListenLane:
    """All listen streams of one server over HTTP."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._streams: list[dict[_Stream, None]] = [{} for _ in range(_SLOTS)]
        self._carried: dict[Channel, None] = {}
        """The connections of the streams that the SDK carries."""
        self._slot = 0
        self._timer: asyncio.TimerHandle | None = None

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        request_id: str | int,
        wanted: Wanted,
        principal: Principal | None,
        wish: Wish,
    ) -> None:
        live = self._live
        address = scope["client"][0] if scope.get("client") else None
        try:
            ticket = live.gate.enter(principal, address)
        except LimitReached as error:
            await refuse(send, request_id, str(error))
            return
        try:
            honoured = await honour(live, wanted, principal)
            may = live.gate.predicate(principal)
            await self._stream(receive, send, encode_tag(request_id), honoured, wish, str(request_id), may)
        except LimitReached as error:
            # More than anybody may ask for, so there is no use in asking again.
            await refuse(send, request_id, str(error), code=-32602, status=400)
        finally:
            live.gate.leave(ticket)

    async def _stream(
        self,
        receive: Receive,
        send: Send,
        tag: bytes,
        honoured: Honoured,
        wish: Wish,
        label: str,
        may: Callable[[str], bool] | None,
    ) -> None:
        live = self._live
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        stream = _Stream(live, send, receive, tag, wish)
        # From here to the subscription nothing waits: no change can fall in between, and the ack is first.
        if honoured:
            wish.enter(honoured.topics, stream.end)
        stream.channel.write(acknowledgement(honoured.as_filter(), wish.acknowledged(honoured.topics), tag))
        if not honoured or live.is_stopping:
            stream.end()
            return
        stream.open(honoured, wish, label, may)
        slot = self._join(stream)
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self._streams[slot].pop(stream, None)
            if stream.channel.is_busy:
                stream.channel.abort()
            stream.channel.is_over = True
            if stream.subscriber is not None:
                live.hub.close(stream.subscriber, Reason.DISCONNECTED)

    async def carry(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the SDK carry a stream, and see to it that a reader who does not read is cut off here too."""
        channel = Channel(send, receive, self._live.policy, asyncio.get_running_loop())
        channel.on_slow = partial(_log_slow, self._live.policy)
        self._carried[channel] = None
        try:
            await app(scope, receive, partial(channel.relay, send))
        finally:
            del self._carried[channel]

    def stop(self) -> None:
        """End every stream with its result."""
        ending = [stream for streams in self._streams for stream in streams]
        for stream in ending:
            stream.end()
        dismiss([*(stream.channel for stream in ending), *self._carried])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __len__(self) -> int:
        return sum(map(len, self._streams))

    def _join(self, stream: _Stream) -> int:
        slot = min(range(_SLOTS), key=lambda index: len(self._streams[index]))
        self._streams[slot][stream] = None
        if self._timer is None:
            self._arm()
        return slot

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._live.policy.keep_alive / _SLOTS, self._keep_alive)

    def _keep_alive(self) -> None:
        self._timer = None
        self._slot = (self._slot + 1) % _SLOTS
        for stream in list(self._streams[self._slot]):
            stream.keep_alive()
        if any(self._streams):
            self._arm()


class _Stream:
    """One listen stream."""

    __slots__ = ("_has_bookmarks", "_live", "_shape", "_tag", "channel", "subscriber")

    def __init__(self, live: Live, send: Send, receive: Receive, tag: bytes, wish: Wish) -> None:
        self._live = live
        self._tag = tag
        self._shape = wish.shape(is_sse=True, is_tagged=True)
        self._has_bookmarks = wish.terms.bookmarks
        self.channel = Channel(send, receive, live.policy, asyncio.get_running_loop())
        self.channel.on_free = self._on_free
        self.channel.on_slow = self._on_slow
        self.subscriber: Subscriber | None = None

    def open(self, honoured: Honoured, wish: Wish, label: str, may: Callable[[str], bool] | None) -> None:
        hub = self._live.hub
        self.subscriber = hub.open(
            self.deliver, label=f"listen {label}", policy=wish.policy, filter=wish.filter, on_close=self._on_close
        )
        self.subscriber.may = may
        self.subscriber.is_ready = not self.channel.is_busy
        self.subscriber.settle()
        wish.watch(self.subscriber)
        hub.subscribe(self.subscriber, *honoured.features, uris=honoured.uris, told=wish.told(honoured.topics))

    def deliver(self, notification: Notification) -> object:
        head, tail = notification.frames.get(self._shape) or render(notification, self._shape)
        return None if self.channel.write(head + self._tag + tail) else BUSY

    def keep_alive(self) -> None:
        if self.channel.is_busy or self.subscriber is None:
            return
        beat = bookmark(self._live.cursor_of(self.subscriber), self._tag) if self._has_bookmarks else KEEP_ALIVE
        if not self.channel.write(beat):
            self.subscriber.is_ready = self.subscriber.is_plain = False

    def end(self) -> None:
        """Send the result; the request's task then sees its response complete. A busy stream ends when it is free."""
        if self.channel.is_over:
            return
        if self.subscriber is not None:
            subscriber, self.subscriber = self.subscriber, None
            self._live.hub.close(subscriber, Reason.SHUTDOWN)
        if not self.channel.is_busy:
            self.channel.write(listen_result(self._live.result_meta, self._tag), is_last=True)

    def _on_free(self) -> None:
        if self.subscriber is not None:
            self._live.hub.wake(self.subscriber)
        elif not self.channel.is_over:
            self.end()

    def _on_slow(self) -> None:
        _log_slow(self._live.policy)
        if self.subscriber is not None:
            self._live.hub.close(self.subscriber, Reason.SLOW)

    def _on_close(self, reason: Reason) -> None:
        if reason is Reason.OVERFLOW:
            self.subscriber = None
            self.end()


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
