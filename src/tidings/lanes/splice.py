"""Legacy HTTP: our notifications on the standing `GET` stream, written between the SDK's own events.

Session, authentication and keep-alive stay the SDK's. The broadcaster never waits: a session whose stream is not open,
or not read, keeps its pending topics in its mailbox until it is.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from tidings.frames import render
from tidings.lanes.channel import Channel, Message, Receive, Scope, Send
from tidings.mailbox import IsMuted
from tidings.model import Notification
from tidings.subscriber import BUSY, Subscriber

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["SpliceLane", "SplicedSession"]

logger = logging.getLogger(__name__)


class SplicedSession:
    """A legacy HTTP session, with or without its stream: either may come first."""

    __slots__ = ("_live", "channel", "shape", "subscriber")

    def __init__(self, live: Live) -> None:
        self._live = live
        self.shape = live.shape(is_sse=True)
        self.channel: Channel | None = None
        self.subscriber: Subscriber | None = None

    def open(self, is_extended: bool, label: str, is_muted: IsMuted | None) -> Subscriber:
        """The handshake is over: from now on there is something to tell."""
        self.shape = self._live.shape(is_sse=True, is_extended=is_extended)
        self.subscriber = self._live.hub.open(self.deliver, label=label, is_muted=is_muted)
        self.subscriber.is_ready = self.channel is not None and not self.channel.is_busy
        self.subscriber.settle()
        return self.subscriber

    def deliver(self, notification: Notification) -> object:
        head, tail = notification.frames.get(self.shape) or render(notification, self.shape)
        if self.channel is None or not self.channel.write(head + tail):
            return BUSY
        return None

    def attach(self, channel: Channel) -> None:
        """The stream is open: tell what is pending."""
        self.channel = channel
        channel.on_free = self._on_free
        channel.on_slow = self._on_slow
        self._on_free()

    def detach(self, channel: Channel) -> None:
        """The stream is gone; the session may open another one."""
        if self.channel is channel:
            self.channel = None
            if self.subscriber is not None:
                self.subscriber.is_ready = self.subscriber.is_plain = False

    def _on_free(self) -> None:
        # Without a stream nothing may be handed over: it would count as told.
        if self.subscriber is not None and self.channel is not None and not self.channel.is_busy:
            self._live.hub.wake(self.subscriber)

    def _on_slow(self) -> None:
        logger.warning("a legacy stream was not read for %s s; cutting it off", self._live.policy.write_deadline)


class SpliceLane:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._sessions: dict[str, SplicedSession] = {}
        """By the SDK's session id."""
        self._ends: dict[Channel, asyncio.Event] = {}

    def session(self, session_id: str) -> SplicedSession:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = SplicedSession(self._live)
        return session

    def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    async def serve(self, app: Any, scope: Scope, receive: Receive, send: Send, session_id: str) -> None:
        """Let the SDK serve the `GET`, and write between its chunks once it has accepted it."""
        session = self.session(session_id)
        channel = Channel(send, receive, self._live.policy.write_deadline, asyncio.get_running_loop())
        end = asyncio.Event()
        is_open = False

        async def spliced_send(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.body" and is_open:
                if not message.get("more_body"):
                    channel.is_over = True
                    session.detach(channel)
                await channel.relay(send, message)
                return
            await send(message)
            if message["type"] == "http.response.start" and message["status"] == 200:
                is_open = True
                self._ends[channel] = end
                session.attach(channel)

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
            self._ends.pop(channel, None)
            if session.subscriber is None:
                self.forget(session_id)
            if is_open and not channel.is_over and not channel.is_busy:
                channel.write(b"", is_last=True)

    def stop(self) -> None:
        for end in self._ends.values():
            end.set()

    def __len__(self) -> int:
        return len(self._ends)
