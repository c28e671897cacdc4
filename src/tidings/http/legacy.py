"""Legacy HTTP: our notifications on the standing `GET` stream, written between the SDK's own events.

Session, authentication and keep-alive stay the SDK's. The broadcaster never waits: a session whose stream is not open,
or not read, keeps its pending topics in its mailbox until it is.

What was written to a stream that broke may never have been read. So every event has an id, and a client that comes back
with the last one it read (`Last-Event-ID`, as the specification says) is told again what it missed. By that it says
as well that its former stream is gone, which nobody may have noticed here: the new one takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tidings.core.frames import FrameFormat, bookmark, render
from tidings.core.mailbox import IsMuted
from tidings.core.model import Notification, Reason
from tidings.core.subscriber import BUSY, ConnectionKind, Subscriber
from tidings.errors import LimitReached
from tidings.http.disconnects import mark_disconnected
from tidings.http.parking import direct_writer
from tidings.http.sent_events import Sent
from tidings.http.stream import AsgiStream, Message, Receive, Scope, Send, abort_unfinished
from tidings.server.listen_options import ListenOptions

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["LegacyStreams", "SplicedSession"]

logger = logging.getLogger(__name__)

_KIND = ConnectionKind("legacy", "http")

_PRIMED_SINCE = "2025-11-25"
"""Clients of older versions take an event without data for a broken message."""


_PATIENCE = 10.0
"""Seconds for the SDK to let go of a stream that is cut off."""


class SplicedSession:
    """A legacy HTTP session, with or without its stream: either may come first."""

    __slots__ = ("_live", "_read", "_sent", "_start", "channels", "shape", "subscriber", "version")

    def __init__(self, live: Live) -> None:
        self._live = live
        self._sent = Sent()
        self._start = 0
        """How many events there were when the newest stream began."""
        self._read: int | None = None
        """How many of them were read for sure, after a stream was cut off."""
        self.shape = FrameFormat(is_sse=True)
        self.channels: list[AsgiStream] = []
        """Its open streams; the last one is written to."""
        self.subscriber: Subscriber | None = None
        self.version = ""
        """Of the protocol, once the handshake is over."""

    @property
    def channel(self) -> AsgiStream | None:
        return self.channels[-1] if self.channels else None

    def open(self, wish: ListenOptions, label: str, is_muted: IsMuted | None) -> Subscriber:
        """The handshake is over: from now on there is something to tell."""
        self.shape = wish.shape(is_sse=True)
        self._sent.forget_all()  # this may be the second handshake, and what came before it is void
        self.subscriber = self._live.hub.open(
            self.deliver, label=label, kind=_KIND, policy=wish.policy, filter=wish.filter, is_muted=is_muted
        )
        if self.channel is None or self.channel.is_busy:
            self.subscriber.pause()
        return self.subscriber

    def deliver(self, notification: Notification) -> object:
        live, channel = self._live, self.channel
        frame, _ = notification.frames.get(self.shape) or render(notification, self.shape)
        if not live.splice.has_event_store:
            is_watched = self.subscriber is not None and notification.topic in (self.subscriber.uris or ())
            frame = self._sent.note(notification, is_watched=is_watched) + frame
        live.hub.counts.bytes += len(frame)
        return None if channel is not None and channel.write(frame) else BUSY

    def bookmark(self) -> None:
        channel, subscriber = self.channel, self.subscriber
        if subscriber is None or channel is None or channel.is_busy:
            return
        if not channel.write(bookmark(self._live.cursor_of(subscriber))):
            subscriber.pause()

    def attach(self, channel: AsgiStream, *, is_resumed: bool = False, read: int | None = None) -> None:
        """A stream is open: tell what is pending. A resumed one may be that of a request, where a server with an event
        store goes on with its answer: it is written to only while there is no other.

        `read` is the last event that the client has read, if it says so."""
        self.channels.insert(0 if is_resumed else len(self.channels), channel)
        channel.callbacks = self
        if read is None and self.version >= _PRIMED_SINCE and not self._live.splice.has_event_store:
            # So that it can say how far it has read, also if it is cut off from all that comes now.
            channel.write(self._sent.id_line + b"data: \r\n\r\n")
        read, self._read = self._read if read is None else read, None
        self._start = self._sent.count
        if read is not None and self.subscriber is not None:
            told, ended = self._sent.missed(read)
            try:
                # What it was told, and not what it holds: it may have looked while it could hear nothing.
                held = self._live.hub.notifications.without_outdated(told)
                self._live.hub.subscribe(self.subscriber, uris=ended, told=held)
            except LimitReached as error:  # its client has subscribed to others since
                logger.warning("a legacy session can't be told of what it missed: %s", error)
        self._wake(was_absent=True)

    def read(self, event_id: bytes) -> int | None:
        """Which of its events a `Last-Event-ID` names, if it does."""
        return self._sent.read(event_id)

    async def unsubscribed(self, uri: str) -> None:
        self._sent.forget(uri)

    def detach(self, channel: AsgiStream) -> None:
        """A stream is gone; the session may have another one, or open one."""
        if channel in self.channels:
            self.channels.remove(channel)
            if channel.is_aborted:
                self._read = self._start
            if self.subscriber is not None:
                self.subscriber.pause()
            self.on_writable()

    def on_writable(self) -> None:
        self._wake()

    def _wake(self, *, was_absent: bool = False) -> None:
        # Without a stream nothing may be handed over: it would count as told.
        if self.subscriber is not None and self.channel is not None and not self.channel.is_busy:
            self._live.hub.wake(self.subscriber, was_absent=was_absent)

    def on_write_timeout(self) -> None:
        self._live.hub.counts.cut_off[Reason.SLOW] += 1  # the stream alone: its session may open another one
        logger.warning("a legacy stream was not read for %s s; cutting it off", self._live.policy.write_deadline)


class LegacyStreams:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._sessions: dict[str, SplicedSession] = {}
        """By the SDK's session id."""
        self.has_event_store = False
        """Whether the SDK itself gives ids to events, and replays them."""
        self._ends: dict[AsgiStream, tuple[asyncio.Event, asyncio.Event]] = {}
        """How to end a stream, and when the SDK has let go of it."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def session(self, session_id: str) -> SplicedSession:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = SplicedSession(self._live)
        return session

    def version_of(self, session_id: str) -> str:
        """The protocol version that a session has agreed on; empty if there is no such session."""
        session = self._sessions.get(session_id)
        return session.version if session is not None else ""

    def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    async def serve(
        self, app: Any, scope: Scope, receive: Receive, send: Send, session_id: str, *, is_its_own: bool
    ) -> None:
        """Let the SDK serve the `GET`, and write between its chunks once it has accepted it. `is_its_own`: whether the
        session is there, and the caller's."""
        mark_disconnected(scope, receive)
        session = self.session(session_id)
        self._loop = asyncio.get_running_loop()
        channel = AsgiStream(send, receive, self._live.policy, self._loop)
        end, gone = asyncio.Event(), asyncio.Event()
        is_open = False
        event_id = next((value for name, value in scope["headers"] if name == b"last-event-id"), b"")
        # An event store has ids of its own making, and they may look like ours.
        read = session.read(event_id) if event_id and not self.has_event_store else None
        is_resumed = bool(event_id) and read is None and self.has_event_store
        if event_id and not is_resumed:
            # Without an event store the SDK has no answer to this header.
            scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"last-event-id"]}
            if read is not None and is_its_own:
                await self._make_way(session)
            read = read or 0  # an event that the session never had: of those it had, none was read

        async def spliced_send(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.body" and is_open:
                if not message.get("more_body"):
                    channel.is_closed = True
                    session.detach(channel)
                await channel.forward(send, _without_end(message))
                return
            await send(message)
            if message["type"] == "http.response.start" and message["status"] == 200:
                is_open = True
                self._ends[channel] = end, gone
                if self._live.is_stopping:
                    end.set()
                if (writer := direct_writer(scope, receive)) is not None:
                    channel.write_directly = writer.write
                session.attach(channel, is_resumed=is_resumed, read=read)
                channel.watch_connection(scope, receive, lambda reason: end.set())

        async def spliced_receive() -> Message:
            # The SDK's response goes on until its client is gone; on shutdown, we say so.
            waiting = [asyncio.ensure_future(receive()), asyncio.ensure_future(end.wait())]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                return waiting[0].result() if waiting[0].done() else {"type": "http.disconnect"}  # type: ignore[return-value]
            finally:
                for task in waiting:
                    task.cancel()

        try:
            await app(scope, spliced_receive, spliced_send)
        finally:
            session.detach(channel)
            gone.set()
            self._ends.pop(channel, None)
            if session.subscriber is None:
                self.forget(session_id)
        if is_open:
            await channel.wait_until_writable()
            channel.write(b"", is_last=True)
        while channel.is_aborted and (await receive())["type"] != "http.disconnect":
            pass  # a request that ends before its connection looks like a defect to the server

    async def _make_way(self, session: SplicedSession) -> None:
        """End the stream that a client has lost: while it is open, the SDK would refuse it another one."""
        for channel, (end, gone) in [(each, self._ends[each]) for each in session.channels]:
            end.set()
            channel.abort()
            with suppress(TimeoutError):  # then the SDK refuses the other one, as it would anyway
                async with asyncio.timeout(_PATIENCE):
                    await gone.wait()

    def stop(self) -> None:
        abort_unfinished(self._ends, self._loop)
        for end, _ in self._ends.values():
            end.set()

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def slow(self) -> int:
        """Streams whose reader has to be waited for just now."""
        return sum(channel.is_busy for channel in tuple(self._ends))


def _without_end(message: Message) -> Message:
    """A comment that ends no event. Clients of the Python SDK before 1.23 take one that does for an empty message, once
    they have read an event with an id, and hand their user an error with every keep-alive."""
    body = message.get("body", b"")
    is_comment = body.startswith(b":") and body.find(b"\r\n") == len(body) - 4 and body.endswith(b"\r\n\r\n")
    return {**message, "body": body[:-2]} if is_comment else message
