"""What the hub tells of the life of its subscribers: one seam, for counting, logs and traces.

The hub calls these methods with its lock held, and not for each delivery. They must not wait and must not raise. This
class counts and writes log lines; `tidings.telemetry.tracing` adds spans.

A log line names clients, lists, items and revisions. What an item says, and what may be a secret in a URI, stays out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from tidings.core.counts import Counts, SuppressionReason, kind_of
from tidings.core.mailbox import NEVER, is_silent
from tidings.core.model import Change, Feature, Notification, Reason, Topic, Version
from tidings.core.redact import LONGEST, change_name, one_line, topic_name

if TYPE_CHECKING:
    from tidings.core.subscriber import Subscriber

__all__ = ["CUT_OFF", "READ_LIST", "RUN_TOOL", "SCAN", "SPANS", "WRITE", "EventSink", "Observer", "Outcome", "distinct"]

logger = logging.getLogger("tidings.subscriptions")

CUT_OFF = frozenset({Reason.OVERFLOW, Reason.SLOW})
"""Why a subscriber is closed that did nothing to be closed, and would be told more otherwise."""

_MOST_SHOWN = 4

# Names of spans; docs/telemetry.md describes them.
SUBSCRIBE = "change_notifier.subscribe"
UNSUBSCRIBE = "change_notifier.unsubscribe"
CLEANUP = "change_notifier.cleanup_client"
NOTIFY_LIST = "change_notifier.notify_list_changed"
NOTIFY_CONTENT = "change_notifier.notify_resource_updated"
SEND = {feature: f"{feature.singular}_list_changed.send" for feature in Feature}
READ_LIST = "source.read_list"
SCAN = "workspace.scan"
RUN_TOOL = "source.run_tool"
WRITE = "store.write"
SPANS = frozenset(
    {SUBSCRIBE, UNSUBSCRIBE, CLEANUP, NOTIFY_LIST, NOTIFY_CONTENT, *SEND.values(), READ_LIST, SCAN, RUN_TOOL, WRITE}
)


class EventSink(Protocol):
    """Receives every event of a hub, in order. The hub calls it with its lock held; it must not raise."""

    def opened(self, subscriber: Subscriber) -> None: ...

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        """Called before anything of these topics is delivered."""

    def unsubscribed(self, subscriber: Subscriber, topic: Topic) -> None: ...

    def closed(self, subscriber: Subscriber, reason: Reason) -> None: ...

    def published(self, changes: tuple[Change, ...]) -> None:
        """Called with the changes of one topic, before they are delivered."""

    def delivering(self, subscriber: Subscriber, notification: Notification) -> None:
        """Called before each delivery."""

    def fetch_started(self, topic: Topic, revision: int) -> None: ...

    def fetched(self, topic: Topic, version: Version) -> None: ...

    def fetch_ended(self, topic: Topic, revision: int) -> None: ...


class Outcome:
    """How a piece of work ended."""

    __slots__ = ("is_error", "text")

    def __init__(self) -> None:
        self.text = "ok"
        self.is_error = False

    def set(self, text: str, *, is_error: bool = True) -> None:
        self.text, self.is_error = text, is_error


class Observer:
    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.level_unwatched = logging.DEBUG
        """At which a change of a list is logged that nobody watches."""

    # What sources and lanes use

    def span(
        self, name: str, *, cause: Mapping[str, str] | None = None, **attributes: Any
    ) -> AbstractContextManager[Outcome]:
        """Around a piece of work that may be worth a span, of which `cause` is the trace that led to it."""
        return nullcontext(Outcome())

    def current_trace(self) -> Mapping[str, str] | None:
        """The trace of whoever does something just now."""
        return None

    def continue_trace(self, meta: object) -> None:
        """Go on with the trace that a request's `_meta` carries, for as long as the present task runs."""

    # What the hub tells

    def opened(self, subscriber: Subscriber) -> None:
        self.counts.open[subscriber.kind] += 1

    def subscribed(self, subscriber: Subscriber, topics: list[Topic]) -> None:
        """It watches these too."""
        # A line at info for each stream would cost more than the stream: most handlers take a millisecond for one.
        if logger.isEnabledFor(logging.DEBUG):
            said = f"{_who(subscriber)} subscribed to {summary(topics)}"
            _log(logging.DEBUG, "subscribed", said, subscriber, topics=topics)

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        """Subscriptions have ended of those who stay: some of one subscriber's, or those of all who watched a resource
        that is gone, as `cause` has told them."""
        if logger.isEnabledFor(logging.DEBUG):
            who, topics = distinct(ended)
            name = _who(who[0]) if len(who) == 1 else f"{len(who)} clients"
            why = "" if reason is Reason.UNSUBSCRIBED else f" ({reason})"
            said = f"{name} unsubscribed from {summary(topics)}{why}"
            one = who[0] if len(who) == 1 else None
            _log(logging.DEBUG, "unsubscribed", said, one, topics=topics, reason=reason, clients=len(who))

    def expired(self, name: str) -> None:
        """A durable subscription has not seen its client for too long."""
        said = f"the durable subscription {one_line(name, LONGEST)!r} has expired"
        _log(logging.INFO, "expired", said, None, name=one_line(name, LONGEST))

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        """It is about to go: what it watches, and what waits for it, is still there."""
        counts = self.counts
        counts.open[subscriber.kind] -= 1
        counts.closed[reason] += 1
        if reason in CUT_OFF:
            counts.cut_off[reason] += 1
        waiting = subscriber.waiting
        counts.suppress(SuppressionReason.UNSUBSCRIBED, waiting)
        level = logging.INFO if reason in CUT_OFF else logging.DEBUG
        if logger.isEnabledFor(level):
            watched = len(subscriber.features) + len(subscriber.uris or ())
            said = f"{_who(subscriber)} is gone ({reason}): cleaned {watched} subscriptions and {waiting} pending"
            _log(level, "gone", said, subscriber, reason=reason, cleaned=watched, pending=waiting)

    def noted(self, subscriber: Subscriber, notification: Notification, due: float, *, was_waiting: bool) -> None:
        """A change waits in its mailbox, or needs no telling. `was_waiting`: as an earlier one of the topic did."""
        assert subscriber.mailbox is not None
        counts, topic, filter = self.counts, notification.topic, subscriber.filter
        if due == NEVER:
            entry = subscriber.mailbox.entries.get(topic)
            is_known = entry is None or entry.awaits or entry.is_true_still
            counts.suppress(SuppressionReason.SAME_DIGEST if is_known else SuppressionReason.FILTERED)
        elif is_silent(subscriber.is_muted, topic):
            counts.suppress(SuppressionReason.MUTED)
        elif (
            was_waiting and filter and isinstance(topic, Feature) and not any(map(filter.passes, notification.changes))
        ):
            counts.suppress(SuppressionReason.FILTERED)
        elif was_waiting and subscriber.is_ready and subscriber.policy.has_delays:
            counts.suppress(SuppressionReason.RATE)
        elif was_waiting:
            counts.coalesced += 1

    def overflowed(self, subscriber: Subscriber, merged: int, *, is_closed: bool) -> None:
        """More topics wait for it than the policy allows. It is closed for it, or told to refetch all resources, which
        says as much as so many notifications more."""
        if is_closed:
            self.counts.suppress(SuppressionReason.UNSUBSCRIBED)
        else:
            self.counts.coalesced += merged
        what = "closing it" if is_closed else "it will be told to refetch all resources"
        _log(logging.WARNING, "overflow", f"{_who(subscriber)} has too many topics pending; {what}", subscriber)

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        """It raised, in place of taking what it was told."""
        self.counts.failures["delivery"] += 1
        logger.error("%r failed to take %r; going on", subscriber, notification, exc_info=error)

    def enter(self, notification: Notification) -> object:
        """One is about to be told by itself, by nobody in particular. What this returns is given to `leave`."""
        return None

    def leave(self, entered: object) -> None:
        pass

    def telling(self, notification: Notification, watching: int) -> object:
        """A change is about to be told. What this returns is given back to `told`."""
        kind = kind_of(notification.topic)
        for change in notification.changes:
            self.counts.changes[kind, change.operation] += 1
        return self._begin(notification, watching)

    def told(self, telling: object, notification: Notification, watching: int) -> None:
        """All have heard of it who could."""
        is_list = not isinstance(notification.topic, str)
        level = logging.DEBUG if not is_list else logging.INFO if watching else self.level_unwatched
        if logger.isEnabledFor(level):
            changes = [f"{change.operation} {change_name(change)}" for change in notification.changes[:_MOST_SHOWN]]
            what = ", ".join(changes) + (", …" if len(notification.changes) > _MOST_SHOWN else "")
            who = f"told {watching} {'client' if watching == 1 else 'clients'}" if watching else "nobody to tell"
            said = f"{who}: {kind_of(notification.topic)} {what} (revision {notification.version.revision})"
            fields = {"clients": watching, "revision": notification.version.revision, "changes": changes}
            _log(level, "told", said, None, topics=[notification.topic], **fields)
        if telling is not None:
            self._finish(telling, notification, watching)

    # What may be added to that

    def _begin(self, notification: Notification, watching: int) -> object:
        """A change is about to be told. None if nothing is to be finished afterwards."""
        return None

    def _finish(self, telling: Any, notification: Notification, watching: int) -> None:
        pass


def distinct(ended: list[tuple[Subscriber, Topic]]) -> tuple[list[Subscriber], list[Topic]]:
    """Who has lost subscriptions, and which."""
    return list(dict.fromkeys(each for each, _ in ended)), list(dict.fromkeys(topic for _, topic in ended))


def summary(topics: Iterable[Topic]) -> str:
    """Lists by name and URIs by number."""
    features = [topic.value for topic in topics if isinstance(topic, Feature)]
    uris = sum(not isinstance(topic, Feature) for topic in topics)
    return ", ".join([*features, *([f"{uris} {'URI' if uris == 1 else 'URIs'}"] if uris else [])]) or "nothing"


def _who(subscriber: Subscriber) -> str:
    return subscriber.label or "a subscriber"


def _log(level: int, event: str, said: str, subscriber: Subscriber | None, **fields: Any) -> None:
    """One line; the same in parts for whoever logs JSON."""
    if "topics" in fields:
        fields["topics"] = [topic_name(topic) for topic in fields["topics"]]
    if subscriber is not None:
        fields["client"] = subscriber.label
        fields["era"], fields["transport"] = subscriber.kind
    logger.log(level, "%s", said, extra={"tidings": {"event": event, **fields}})
