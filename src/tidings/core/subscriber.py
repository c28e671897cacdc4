"""One open ear: what it watches, how it wants to be told, and how it is reached."""

from __future__ import annotations

import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tidings.core.filters import Filter
from tidings.core.mailbox import IsMuted, Mailbox
from tidings.core.model import Feature, Notification, Reason, Topic
from tidings.core.redact import LONGEST, one_line, topic_name
from tidings.policy import Policy

if TYPE_CHECKING:
    from tidings.core.hub import Hub
    from tidings.core.timers import Timer

__all__ = [
    "BUSY",
    "LOCAL",
    "PENDING",
    "Busy",
    "Callbacks",
    "ConnectionKind",
    "Deliver",
    "OnClose",
    "Subscriber",
    "WeakMethod",
    "check_callback",
    "identity",
]


class Busy:
    __slots__ = ("is_told",)

    def __init__(self, is_told: bool) -> None:
        self.is_told = is_told

    def __repr__(self) -> str:
        return "BUSY" if self.is_told else "PENDING"


BUSY: Final = Busy(is_told=True)
"""What `deliver` returns when it took the notification but can take no further one until `hub.wake(subscriber)`.

An object of its own: a callback that happens to return False or None must not fall silent for it.
"""


PENDING: Final = Busy(is_told=False)
"""The same of one that learns later whether what it took has arrived, and counts it then."""


class ConnectionKind(NamedTuple):
    """How a subscriber is connected."""

    era: str
    """`modern`, `legacy`, or `none` for one that speaks no protocol."""
    transport: str
    """`http`, `stdio`, `webhook`, or `process` for one in this very process."""


LOCAL: Final = ConnectionKind("none", "process")

Deliver: TypeAlias = Callable[[Notification], object]
OnClose: TypeAlias = Callable[[Reason], None]

_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, lie evenly however many there are: nobody draws the same place twice."""

_NO_FEATURES: frozenset[Feature] = frozenset()


class Subscriber:
    """Made by `hub.open()` or `hub.subscribe()`. Small on purpose: there may be tens of thousands."""

    __slots__ = (
        "__weakref__",
        "before_close",
        "date",
        "delay",
        "deliver",
        "expiries",
        "features",
        "filter",
        "hub",
        "is_authorized",
        "is_closed",
        "is_muted",
        "is_plain",
        "is_ready",
        "kind",
        "label",
        "mailbox",
        "merges_on_overflow",
        "on_close",
        "policy",
        "uris",
    )

    def __init__(
        self,
        hub: Hub,
        deliver: Deliver,
        policy: Policy,
        serial: int = 0,
        *,
        label: str = "",
        kind: ConnectionKind = LOCAL,
        filter: Filter | None = None,
        is_muted: IsMuted | None = None,
        on_close: OnClose | None = None,
    ) -> None:
        self.hub = hub
        self.deliver = deliver
        self.policy = policy
        self.label = one_line(label, LONGEST)
        """What it is called in logs and traces: never a secret, as a session's id is one."""
        self.kind = kind
        self.filter = filter
        self.is_muted = is_muted
        self.on_close = on_close
        self.is_authorized: Callable[[str], bool] | None = None
        """Whether it may be told of a resource that it did not name itself, but by a pattern or as part of another."""
        self.before_close: Callable[[Subscriber], None] | None = None
        """Called before it is closed, while all that it watches and waits for is still there: for a durable
        subscription, which keeps what it was told."""
        self.merges_on_overflow = False
        """Whether too many pending contents are told as one change of the list, in place of closing it. For sessions,
        which can't be ended without their client's losing more than that."""
        self.delay = policy.spread * (serial * _GOLDEN % 1.0) if policy.spread else 0.0
        """Its own place in `Policy.spread`."""
        self.features = _NO_FEATURES
        self.uris: dict[str, None] | None = None
        """The URIs and patterns that it watches."""
        self.expiries: dict[Topic, float] | None = None
        self.mailbox: Mailbox | None = None
        """None while it knows the newest version of all that it watches."""
        self.date: Timer | None = None
        self.is_ready = True
        self.is_closed = False
        self.is_plain = True
        self.settle()

    @property
    def is_only_picky(self) -> bool:
        """Whether a change that passes its filter can be delivered immediately."""
        return self.filter is not None and self._is_free

    @property
    def _is_free(self) -> bool:
        """Whether it keeps up, and nobody sets when it is told."""
        return (
            self.is_ready
            and self.mailbox is None
            and self.is_muted is None
            and not self.policy.has_delays
            and not self.is_closed
        )

    def settle(self) -> None:
        """Decide whether every change can be delivered immediately, without looking at anything else."""
        self.is_plain = self._is_free and self.filter is None

    def hand(self, notification: Notification) -> bool:
        """Tell it; whether that can be counted as told by now."""
        observer = self.hub.observer
        entered = observer.enter(notification)
        try:
            taken = self.deliver(notification)
        finally:
            observer.leave(entered)
        if not isinstance(taken, Busy):
            return True
        self.pause()
        return taken.is_told

    def before_delivery(self, callback: Callable[[Notification], None]) -> None:
        """Call `callback` with each notification before it is delivered."""
        deliver = self.deliver

        def call_and_deliver(notification: Notification) -> object:
            callback(notification)
            return deliver(notification)

        self.deliver = call_and_deliver

    def end_at(self, topics: Iterable[Topic], end: float | None) -> None:
        """Let subscriptions run out at a time, or never."""
        expiries = self.expiries or {}
        for topic in topics:
            if end is None:
                expiries.pop(topic, None)
            else:
                expiries[topic] = end
        self.expiries = expiries or None

    def expired(self, now: float) -> list[Topic]:
        """The subscriptions that have run out."""
        return [topic for topic, end in (self.expiries or {}).items() if end <= now]

    def pause(self) -> None:
        """It can be told nothing until `hub.wake(subscriber)`."""
        self.is_ready = self.is_plain = False

    def restart_latency(self) -> None:
        """It was away by itself: what it is told now is late only from now on."""
        with self.hub.catalog.lock:
            if self.mailbox is not None:
                self.mailbox.restart_latency(self.hub._clock())

    def subscribe(self, *features: Feature | str, uris: Iterable[str] = (), ttl: float | None = None) -> None:
        self.hub.subscribe(self, *features, uris=uris, ttl=ttl)

    def unsubscribe(self, *features: Feature | str, uris: Iterable[str] = ()) -> None:
        self.hub.unsubscribe(self, *features, uris=uris)

    def close(self, reason: Reason = Reason.UNSUBSCRIBED) -> None:
        self.hub.close(self, reason)

    @property
    def watched(self) -> list[Topic]:
        """The features, URIs and patterns that it subscribed to."""
        return [*self.features, *(self.uris or ())]

    @property
    def is_idle(self) -> bool:
        """Whether it watches nothing."""
        return not self.features and not self.uris

    @property
    def pending(self) -> int:
        """How many topics are kept for it."""
        return len(self.mailbox.entries) if self.mailbox else 0

    @property
    def waiting(self) -> int:
        """Of how many topics it will be told, as things are."""
        return self.mailbox.waiting(self.is_muted) if self.mailbox else 0

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        watched = self.watched
        shown = ", ".join(map(topic_name, watched[:4])) + (", …" if len(watched) > 4 else "")
        state = ", closed" if self.is_closed else ""
        return f"<Subscriber {self.label or hex(id(self))} of {shown or 'nothing'}{state}>"


class WeakMethod:
    """Calls a method without keeping its object alive. Lighter than `weakref.WeakMethod`, which is built to compare."""

    __slots__ = ("_function", "_owner", "identity")

    def __init__(self, method: types.MethodType, on_lost: Callable[[object], None]) -> None:
        self.identity = key = identity(method)
        self._function = method.__func__
        self._owner = weakref.ref(method.__self__, lambda _: on_lost(key))

    def __call__(self, notification: Notification) -> object:
        owner = self._owner()
        return None if owner is None else self._function(owner, notification)


def identity(callback: object) -> object:
    """What makes two mentions of a callback the same subscriber."""
    if isinstance(callback, WeakMethod):
        return callback.identity
    if isinstance(callback, types.MethodType):
        return (id(callback.__self__), callback.__func__)
    return callback if isinstance(callback, Hashable) else id(callback)


class Callbacks:
    """The subscribers that are callbacks: one each, however often it is named."""

    def __init__(self) -> None:
        self._subscribers: dict[object, Subscriber] = {}
        self._lost: deque[object] = deque()
        """The methods whose owner was collected. A collection may strike anywhere, so it only leaves a note here."""

    def find(self, callback: object) -> Subscriber | None:
        return self._subscribers.get(identity(callback))

    def reference(self, callback: Deliver) -> Deliver:
        """What to call in its place: a bound method's object is not kept alive."""
        return WeakMethod(callback, self._lost.append) if isinstance(callback, types.MethodType) else callback

    def add(self, subscriber: Subscriber) -> None:
        self._subscribers[identity(subscriber.deliver)] = subscriber

    def discard(self, subscriber: Subscriber) -> None:
        if subscriber in self:
            del self._subscribers[identity(subscriber.deliver)]

    def __len__(self) -> int:
        return len(self._subscribers)

    def __contains__(self, subscriber: Subscriber) -> bool:
        return self.find(subscriber.deliver) is subscriber

    def collected(self) -> Iterable[Subscriber]:
        """Those whose object is gone."""
        return self._collected() if self._lost else ()

    def _collected(self) -> Iterator[Subscriber]:
        while self._lost:
            if (subscriber := self._subscribers.get(self._lost.popleft())) is not None:
                yield subscriber


def check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"a subscriber is a function of one notification, not {callback!r:.80}")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(
            f"{getattr(callback, '__qualname__', callback)} is a coroutine function, and the hub does not wait; "
            "use `async with hub.listen(…) as changes`"
        )
