"""One receiver of notifications: the topics it watches, its settings and its state.

A subscriber is data for the hub and for delivery, which change it under the hub's lock. It decides nothing itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tidings.core.delivery_settings import DeliverySettings
from tidings.core.filters import Filter
from tidings.core.mailbox import IsMuted, Mailbox
from tidings.core.model import Feature, Notification, Reason, Topic
from tidings.core.redact import MAX_LABEL, one_line, topic_name

if TYPE_CHECKING:
    from tidings.core.hub import Hub
    from tidings.core.timers import Timer

__all__ = [
    "BUSY",
    "LOCAL",
    "UNCONFIRMED",
    "Busy",
    "ConnectionKind",
    "Deliver",
    "OnClose",
    "Subscriber",
    "check_callback",
]


class Busy:
    """A result of `deliver`: `BUSY` or `UNCONFIRMED`."""

    __slots__ = ("is_told",)

    def __init__(self, is_told: bool) -> None:
        self.is_told = is_told

    def __repr__(self) -> str:
        return "BUSY" if self.is_told else "UNCONFIRMED"


BUSY: Final = Busy(is_told=True)
"""`deliver` returns this if it accepted the notification, but accepts no other one until `hub.wake(subscriber)`.

An object of its own, because a callback that happens to return False or None must not be paused.
"""

UNCONFIRMED: Final = Busy(is_told=False)
"""The same for a subscriber that learns later whether the notification has arrived, and counts it then."""


class SubscriberState(Enum):
    READY = "ready"
    """It accepts notifications."""
    BUSY = "busy"
    """It accepts no notification until `hub.wake(subscriber)`. Changes wait in its mailbox."""
    CLOSED = "closed"
    """It gets nothing any more."""

    __hash__ = object.__hash__


class ConnectionKind(NamedTuple):
    """How a subscriber is connected."""

    era: str
    """`modern`, `legacy`, or `none` for a subscriber that speaks no protocol."""
    transport: str
    """`http`, `stdio`, `webhook`, or `process` for a subscriber in this process."""


LOCAL: Final = ConnectionKind("none", "process")

Deliver: TypeAlias = Callable[[Notification], object]
OnClose: TypeAlias = Callable[[Reason], None]

_NO_FEATURES: frozenset[Feature] = frozenset()


class Subscriber:
    """Created by `hub.open()` or `hub.subscribe()`. Small, because there may be tens of thousands."""

    __slots__ = (
        "__weakref__",
        "_before_delivery",
        "before_close",
        "deliver",
        "expiries",
        "features",
        "filter",
        "hub",
        "is_authorized",
        "is_direct",
        "is_muted",
        "kind",
        "label",
        "mailbox",
        "merges_on_overflow",
        "on_close",
        "settings",
        "state",
        "timer",
        "uris",
    )

    def __init__(
        self,
        hub: Hub,
        deliver: Deliver,
        settings: DeliverySettings,
        *,
        label: str,
        kind: ConnectionKind,
        filter: Filter | None,
        is_muted: IsMuted | None,
        on_close: OnClose | None,
    ) -> None:
        self.hub = hub
        self.deliver = deliver
        self.settings = settings
        self.label = one_line(label, MAX_LABEL)
        """Its name in logs and traces. Never a secret such as a session id."""
        self.kind = kind
        self.filter = filter
        self.is_muted = is_muted
        self.on_close = on_close
        self.is_authorized: Callable[[str], bool] | None = None
        """Whether it may see a resource that it watches through a pattern or a parent resource, not by name."""
        self.before_close: Callable[[Subscriber], None] | None = None
        """Called before it is closed, while its subscriptions and mailbox still exist."""
        self.merges_on_overflow = False
        """Whether too many pending contents are replaced by one change of the list, instead of closing it. For legacy
        sessions, whose clients would lose more than this subscription."""
        self.features = _NO_FEATURES
        self.uris: dict[str, None] | None = None
        """The URIs and patterns that it watches, in order."""
        self.expiries: dict[Topic, float] | None = None
        """When subscriptions with a time to live end."""
        self.mailbox: Mailbox | None = None
        """None while it has been told the newest version of everything that it watches."""
        self.timer: Timer | None = None
        self.state = SubscriberState.READY
        self._before_delivery: tuple[Callable[[Notification], None], ...] = ()
        self.is_direct = True
        """Whether a change can be passed to `deliver` without looking at anything else. This is cached, because it is
        the one question that is asked for each subscriber and change."""
        self.update_is_direct()

    @property
    def is_ready(self) -> bool:
        return self.state is SubscriberState.READY

    @property
    def is_closed(self) -> bool:
        return self.state is SubscriberState.CLOSED

    @property
    def bypasses_mailbox(self) -> bool:
        """Whether a change that passes its filter can be delivered immediately."""
        return (
            self.state is SubscriberState.READY
            and self.mailbox is None
            and self.is_muted is None
            and not self.settings.has_delays
        )

    def update_is_direct(self) -> None:
        self.is_direct = self.filter is None and not self._before_delivery and self.bypasses_mailbox

    def before_delivery(self, hook: Callable[[Notification], None]) -> None:
        """Call a function with each notification, before it is delivered."""
        self._before_delivery += (hook,)
        self.is_direct = False

    def call_deliver(self, notification: Notification) -> object:
        """Call the hooks and then `deliver`."""
        for hook in self._before_delivery:
            hook(notification)
        return self.deliver(notification)

    def pause(self) -> None:
        """Deliver nothing until `hub.wake(subscriber)`."""
        if self.state is SubscriberState.READY:
            self.state = SubscriberState.BUSY
            self.is_direct = False

    def mark_ready(self) -> None:
        """End a pause without delivering anything. Only `hub.wake(subscriber)` delivers what is pending."""
        if self.state is SubscriberState.BUSY:
            self.state = SubscriberState.READY

    def mark_closed(self) -> None:
        self.state = SubscriberState.CLOSED
        self.is_direct = False
        self.mailbox = None
        self.expiries = None

    def set_expiry(self, topics: Iterable[Topic], end: float | None) -> None:
        """Let subscriptions end at a time, or never."""
        expiries = self.expiries or {}
        for topic in topics:
            if end is None:
                expiries.pop(topic, None)
            else:
                expiries[topic] = end
        self.expiries = expiries or None

    def expired(self, now: float) -> list[Topic]:
        return [topic for topic, end in (self.expiries or {}).items() if end <= now]

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
    def mailbox_size(self) -> int:
        """The number of topics in its mailbox, including those that it needs no notification of."""
        return len(self.mailbox.entries) if self.mailbox else 0

    @property
    def pending(self) -> int:
        """The number of topics that it will be told of."""
        return self.mailbox.count_pending(self.is_muted) if self.mailbox else 0

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        watched = self.watched
        topics = ", ".join(map(topic_name, watched[:4])) + (", …" if len(watched) > 4 else "")
        state = ", closed" if self.is_closed else ""
        return f"<Subscriber {self.label or hex(id(self))} of {topics or 'nothing'}{state}>"


def check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"a subscriber is a function of one notification, not {callback!r:.80}")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(
            f"{getattr(callback, '__qualname__', callback)} is a coroutine function, and the hub does not wait; "
            "use `async with live.listen(…) as changes`"
        )
