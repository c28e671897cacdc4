"""Ends streams whose authorization is over.

A stream ends with its graceful result when the token that opened it expires, when the server calls
`live.end_streams(principal)`, and when `authorize` refuses a topic that it allowed before. The client can then open
another stream, with the rights that it has by then.

A legacy session stays open. When the token expires, only its stream ends. When `authorize` refuses a topic, the session
loses that topic, because no message could tell the client what it may still watch. A webhook has no token: its delivery
fails when a topic is refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from typing import NamedTuple, Protocol

from tidings.core.hub import Hub
from tidings.core.model import Feature, Reason
from tidings.core.redact import topic_name
from tidings.core.subscriber import Subscriber
from tidings.server.authorization import Authorization, MayWatch, Principal
from tidings.server.loop_bridge import LoopBridge

__all__ = ["AuthorizedStream", "AuthorizedStreams"]

logger = logging.getLogger(__name__)

_MAX_DELAY = 60.0
"""The longest delay of the timer, in seconds. The system time may be set, and the clock of the event loop stops while
the machine is suspended."""


class AuthorizedStream(Protocol):
    """An open stream of an authenticated caller."""

    def end(self, reason: Reason) -> None:
        """Send nothing more but the graceful result, if the stream has one."""


class _Caller(NamedTuple):
    """The part of a `Principal` that is needed for its streams. It has no claims: there may be thousands of streams."""

    identity: tuple[str, str | None]
    expires_at: int | None


class AuthorizedStreams:
    """The open streams of authenticated callers, on all transports."""

    def __init__(self, hub: Hub, bridge: LoopBridge, authorization: Authorization) -> None:
        self._hub = hub
        self._bridge = bridge
        self._authorization = authorization
        self._callers: dict[AuthorizedStream, _Caller] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_end = 0.0
        """The time of the clock at which the timer ends, if there is one."""
        bridge.on_bind(self._reset)

    def add(self, stream: AuthorizedStream, principal: Principal | None) -> None:
        """Add a stream that has opened. Without a principal do nothing, because there is no authorization to end."""
        if principal is not None:
            self._callers[stream] = _Caller(principal.identity, principal.expires_at)
            self._set_timer(principal.expires_at)

    def remove(self, stream: AuthorizedStream) -> None:
        """Remove a stream that has ended. Do nothing if it was not added."""
        self._callers.pop(stream, None)

    def end_all_of(self, principal: Principal) -> int:
        """End all streams of a principal, found by its identity. Return their number. Can be called in any thread."""
        streams = [stream for stream, caller in list(self._callers.items()) if caller.identity == principal.identity]
        for stream in streams:
            self._bridge.call(self._end, stream, Reason.REVOKED)
        return len(streams)

    async def run(self) -> None:
        """Call `authorize` again for all subscribers at the interval of the policy, until cancelled."""
        interval = self._hub.policy.authorize_interval
        while interval and self._authorization.is_restricted:
            await asyncio.sleep(interval)
            for subscriber in self._hub:
                await self.check(subscriber)
                await asyncio.sleep(0)  # there may be thousands, and a synchronous `authorize` does not yield

    async def check(self, subscriber: Subscriber) -> None:
        """Call `authorize` for all topics of one subscriber. If it refuses one, end the stream, or for a legacy session
        the subscription to that topic."""
        if not isinstance(subscriber.is_authorized, MayWatch):
            return  # not a client
        watched = list(subscriber.watched)  # the client may add others meanwhile
        allowed = set(await self._authorization.filter(subscriber.is_authorized.principal, watched))
        refused = [topic for topic in watched if topic not in allowed]
        if not refused or subscriber.is_closed:
            return
        logger.info("%s may no longer watch %s", subscriber.label, ", ".join(map(topic_name, refused[:3])))
        if subscriber.kind.era == "legacy":
            features = [topic for topic in refused if isinstance(topic, Feature)]
            self._hub.unsubscribe(subscriber, *features, uris=[topic for topic in refused if isinstance(topic, str)])
        else:
            self._hub.close(subscriber, Reason.REVOKED)

    # One timer for all streams. Tokens expire at full seconds, so it ends at most once a second.

    def _reset(self) -> None:
        """Forget the timer of another event loop."""
        self._timer = None

    def _set_timer(self, expires_at: float | None) -> None:
        if expires_at is None or (self._timer is not None and self._timer_end <= expires_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        now = time.time()
        delay = max(0.0, min(expires_at - now, _MAX_DELAY))
        self._timer_end = now + delay
        # In an empty context: that of a request would be kept.
        self._timer = asyncio.get_running_loop().call_later(delay, self._end_expired, context=contextvars.Context())

    def _end_expired(self) -> None:
        self._timer = None
        now = time.time()
        times = {stream: each.expires_at for stream, each in self._callers.items() if each.expires_at is not None}
        for stream, expires_at in times.items():
            if expires_at <= now:
                self._end(stream, Reason.EXPIRED)
        self._set_timer(min((expires_at for expires_at in times.values() if expires_at > now), default=None))

    def _end(self, stream: AuthorizedStream, reason: Reason) -> None:
        if self._callers.pop(stream, None) is None:
            return  # it has ended meanwhile
        try:
            stream.end(reason)
        except Exception:  # an error of one stream must not keep the others open
            self._hub.counts.failures["ending"] += 1
            logger.exception("a stream could not be ended; ending the others")
