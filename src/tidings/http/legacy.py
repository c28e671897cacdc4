"""Legacy sessions over HTTP: notifications on the standalone `GET` stream, between the events of the SDK.

The SDK is responsible for the session, authentication and keep-alives. If the stream of a session is not open, or not
read, its topics stay pending in its mailbox.

A client may not have read the last events of a stream that broke. So every event has an id, and a client that returns
with the last one that it read (`Last-Event-ID`, as in the specification) is notified again of what it missed. The
header also says that the former stream is lost, which the server may not have noticed: the new one replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from tidings.core.frames import FrameFormat, heartbeat, render
from tidings.core.mailbox import IsMuted
from tidings.core.model import Notification, Reason
from tidings.core.subscriber import BUSY, ConnectionKind, Subscriber
from tidings.errors import LimitReached
from tidings.http.parking import direct_writer
from tidings.http.sent_events import SentEvents
from tidings.http.stream import AsgiStream, Message, Receive, Scope, Send, abort_unfinished
from tidings.server.authorization import Principal, principal_of
from tidings.server.subscribe import PreparedSubscription, Subscriptions

__all__ = ["HttpSession", "LegacyStreams"]

logger = logging.getLogger(__name__)

_KIND = ConnectionKind("legacy", "http")

_EMPTY_EVENTS_SINCE = "2025-11-25"
"""The first version whose clients accept an event without data."""

_RELEASE_TIMEOUT = 10.0
"""Seconds that the SDK has to end a stream that was aborted."""


class HttpSession:
    """A legacy session over HTTP, with or without a stream. Either may come first."""

    __slots__ = (
        "_format",
        "_hub",
        "_prepared",
        "_read",
        "_sent",
        "_start",
        "_streams",
        "responses",
        "subscriber",
        "version",
    )

    def __init__(self, streams: LegacyStreams) -> None:
        self._streams = streams
        self._hub = streams.subscriptions.hub
        self._sent = SentEvents()
        self._start = 0
        """The number of events when the newest stream began."""
        self._read: int | None = None
        """The number of events that were certainly read, after a stream was aborted."""
        self._format = FrameFormat(is_sse=True)
        self._prepared: PreparedSubscription | None = None
        self.responses: list[AsgiStream] = []
        """The responses that are open streams. Notifications are written to the last one."""
        self.subscriber: Subscriber | None = None
        self.version = ""
        """The version of the protocol, after the handshake."""

    @property
    def response(self) -> AsgiStream | None:
        return self.responses[-1] if self.responses else None

    def open(self, prepared: PreparedSubscription, version: str, label: str, is_muted: IsMuted | None) -> Subscriber:
        """Subscribe at the handshake, which may be the second one of the session."""
        self._format = prepared.frame_format(is_sse=True)
        self._sent.forget_all()
        self.version = version
        self._prepared = prepared
        self.subscriber = prepared.subscribe(
            self._deliver,
            label=label,
            kind=_KIND,
            is_muted=is_muted,
            is_ready=False,
            merges_on_overflow=True,
            announces=self._hub.policy.announce,
        )
        self._wake()
        return self.subscriber

    def start(self) -> None:
        """Do nothing: notifications start with the stream."""

    def _deliver(self, notification: Notification) -> object:
        response = self.response
        frame, _ = render(notification, self._format)
        if not self._streams.has_event_store:
            is_watched = self.subscriber is not None and notification.topic in (self.subscriber.uris or ())
            frame = self._sent.add(notification, is_watched=is_watched) + frame
        self._hub.counts.bytes += len(frame)
        return None if response is not None and response.write(frame) else BUSY

    def send_heartbeat(self) -> None:
        response, subscriber = self.response, self.subscriber
        if subscriber is None or response is None or response.is_busy:
            return
        if not response.write(heartbeat(self._streams.subscriptions.cursor_of(subscriber))):
            subscriber.pause()

    def attach(self, response: AsgiStream, *, is_resumed: bool = False, read: int | None = None) -> None:
        """Add a stream that has opened, and deliver what is pending.

        A resumed stream may be that of a request, on which a server with an event store continues its response:
        notifications are written to it only while there is no other. `read` is the last event that the client read, if
        it named one."""
        self.responses.insert(0 if is_resumed else len(self.responses), response)
        response.callbacks = self
        if read is None and self.version >= _EMPTY_EVENTS_SINCE and not self._streams.has_event_store:
            # An event with an id, so that the client can name the last event even if it loses all that follow.
            response.write(self._sent.id_line + b"data: \r\n\r\n")
        read, self._read = self._read if read is None else read, None
        self._start = self._sent.count
        if read is not None and self.subscriber is not None and self._prepared is not None:
            try:
                self._prepared.notify_again(self.subscriber, *self._sent.missed(read))
            except LimitReached as error:  # the client has subscribed to other URIs since then
                logger.warning("a legacy session can't be told of what it missed: %s", error)
        self._wake(was_absent=True)

    async def renew_authorization(self, principal: Principal | None) -> None:
        """Use the rights of the token that opened a stream, which may be another one than that of the handshake."""
        if self.subscriber is not None and self._prepared is not None:
            await self._prepared.renew_authorization(self.subscriber, principal)

    def find_event(self, event_id: bytes) -> int | None:
        """Return the number of the event that a `Last-Event-ID` names, if it is one of this session."""
        return self._sent.find(event_id)

    async def finish_unsubscribe(self, uri: str) -> None:
        self._sent.forget(uri)

    def detach(self, response: AsgiStream) -> None:
        """Remove a stream that has ended. The session may have another one."""
        if response in self.responses:
            self.responses.remove(response)
            if response.is_aborted:
                self._read = self._start
            if self.subscriber is not None:
                self.subscriber.pause()
            self.on_writable()

    def on_writable(self) -> None:
        self._wake()

    def _wake(self, *, was_absent: bool = False) -> None:
        # Not without a stream: a notification that is delivered counts as told.
        if self.subscriber is not None and self.response is not None and not self.response.is_busy:
            self._hub.wake(self.subscriber, was_absent=was_absent)

    def on_write_timeout(self) -> None:
        self._hub.counts.cut_off[Reason.SLOW] += 1  # only the stream: the session may open another one
        logger.warning("a legacy stream was not read for %s s; aborting it", self._hub.policy.write_deadline)


class _StreamEnd(NamedTuple):
    """The end of one stream, which the SDK serves."""

    requested: asyncio.Event
    """Set it to have the SDK end the stream."""
    done: asyncio.Event
    """Set when the SDK has ended the stream."""
    detach: Callable[[], None]
    """Stop writing notifications to the stream."""

    def end(self, reason: Reason) -> None:
        self.detach()
        self.requested.set()


class LegacyStreams:
    """The legacy sessions of one server over HTTP, and their streams."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self.subscriptions = subscriptions
        self._sessions: dict[str, HttpSession] = {}
        """By the SDK's session id."""
        self.has_event_store = False
        """Whether the SDK itself gives ids to events, and replays them."""
        self._open: dict[AsgiStream, _StreamEnd] = {}
        """The open streams."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def find_or_add(self, session_id: str) -> HttpSession:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = HttpSession(self)
        return session

    def version_of(self, session_id: str) -> str:
        """Return the protocol version of a session; an empty string if there is no such session."""
        session = self._sessions.get(session_id)
        return session.version if session is not None else ""

    def forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    async def serve(
        self, app: Any, scope: Scope, receive: Receive, send: Send, session_id: str, *, is_owner: bool
    ) -> None:
        """Let the SDK serve the `GET`, and write between its chunks when it has accepted the request.

        `is_owner` says that the session exists and belongs to the caller."""
        session = self.find_or_add(session_id)
        self._loop = asyncio.get_running_loop()
        response = AsgiStream(scope, receive, send, self.subscriptions.policy)
        end = _StreamEnd(asyncio.Event(), asyncio.Event(), lambda: session.detach(response))
        is_open = False
        event_id = next((value for name, value in scope["headers"] if name == b"last-event-id"), b"")
        # The ids of an event store may look like those of `SentEvents`.
        read = session.find_event(event_id) if event_id and not self.has_event_store else None
        is_resumed = bool(event_id) and read is None and self.has_event_store
        if event_id and not is_resumed:
            # Without an event store, the SDK does not accept this header.
            scope = {**scope, "headers": [header for header in scope["headers"] if header[0] != b"last-event-id"]}
            if read is not None and is_owner:
                await self._end_streams(session)
            read = read or 0  # the session never sent that event: assume that none was read

        async def send_between(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.body" and is_open:
                if not message.get("more_body"):
                    response.is_closed = True
                    session.detach(response)
                await response.forward(_strip_event_end(message))
                return
            await send(message)
            if message["type"] == "http.response.start" and message["status"] == 200:
                is_open = True
                self._open[response] = end
                if self.subscriptions.is_stopping:
                    end.requested.set()
                principal = principal_of(scope.get("user"))
                await session.renew_authorization(principal)
                self.subscriptions.authorized_streams.add(end, principal)
                session.attach(response, is_resumed=is_resumed, read=read)
                response.write_directly = direct_writer(scope, response.request)
                response.watch_connection(lambda reason: end.requested.set())

        async def receive_until_end() -> Message:
            # The SDK's response lasts until the client disconnects. To end it, report a disconnect.
            waiting = [asyncio.ensure_future(receive()), asyncio.ensure_future(end.requested.wait())]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                return waiting[0].result() if waiting[0].done() else {"type": "http.disconnect"}  # type: ignore[return-value]
            finally:
                for task in waiting:
                    task.cancel()

        try:
            await app(scope, receive_until_end, send_between)
        finally:
            session.detach(response)
            end.done.set()
            self.subscriptions.authorized_streams.remove(end)
            self._open.pop(response, None)
            if session.subscriber is None:
                self.forget(session_id)
        if is_open:
            await response.wait_until_writable()
            response.write(b"", is_last=True)
        while response.is_aborted and (await receive())["type"] != "http.disconnect":
            pass  # the server would log a request that ends before its connection as an error

    def end_stream_of(self, subscriber: Subscriber) -> bool:
        """End the streams of a session. Its client may open another one. Return False if there is none."""
        sessions = [session for session in self._sessions.values() if session.subscriber is subscriber]
        responses = [response for session in sessions for response in session.responses]
        for response in responses:
            self._open[response].end(Reason.REVOKED)
        return bool(responses)

    async def _end_streams(self, session: HttpSession) -> None:
        """End the stream that a client has lost. While it is open, the SDK refuses another one."""
        for response, end in [(each, self._open[each]) for each in session.responses]:
            end.requested.set()
            response.abort()
            with suppress(TimeoutError):  # then the SDK refuses the new one
                async with asyncio.timeout(_RELEASE_TIMEOUT):
                    await end.done.wait()

    def stop(self) -> None:
        """End every stream."""
        abort_unfinished(self._open, self._loop)
        for end in self._open.values():
            end.requested.set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def slow(self) -> int:
        """The number of streams that wait for their client."""
        return sum(response.is_busy for response in tuple(self._open))


def _strip_event_end(message: Message) -> Message:
    """Return a comment without the empty line after it, which ends an event.

    After an event with an id, clients of the Python SDK before 1.23 take such a comment for an empty message, and
    report an error with every keep-alive."""
    body = message.get("body", b"")
    is_comment = body.startswith(b":") and body.find(b"\r\n") == len(body) - 4 and body.endswith(b"\r\n\r\n")
    return {**message, "body": body[:-2]} if is_comment else message
