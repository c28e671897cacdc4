"""The log and the counts of the events of a hub.

Log lines contain clients, lists, items and revisions, but neither item definitions nor the secret parts of URIs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidings.core.counts import Counts, SuppressionReason, topic_kind
from tidings.core.mailbox import NEVER, is_topic_muted
from tidings.core.model import CUT_OFF, Change, Feature, Notification, Reason, Topic, Version
from tidings.core.observer import Observer, subscribers_and_topics
from tidings.core.redact import MAX_LABEL, change_name, one_line, topic_name

if TYPE_CHECKING:
    from tidings.core.subscriber import Subscriber

__all__ = ["EventLog"]

logger = logging.getLogger("tidings.subscriptions")

_MAX_LOGGED_CHANGES = 4


class EventLog(Observer):
    """Counts the events of a hub and logs them."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.level_unwatched = logging.DEBUG
        """The level of the log line for a change of a list without subscribers."""

    def opened(self, subscriber: Subscriber) -> None:
        self._counts.open[subscriber.kind] += 1

    def subscribed(self, subscriber: Subscriber, topics: list[Topic], told: Mapping[Topic, Version | None]) -> None:
        # Not at INFO: most handlers take a millisecond per line, more than it takes to open a stream.
        if logger.isEnabledFor(logging.DEBUG):
            text = f"{_name(subscriber)} subscribed to {_summary(topics)}"
            _log(logging.DEBUG, "subscribed", text, subscriber, topics=topics)

    def unsubscribed(
        self, ended: list[tuple[Subscriber, Topic]], reason: Reason, cause: Notification | None = None
    ) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            subscribers, topics = subscribers_and_topics(ended)
            only = subscribers[0] if len(subscribers) == 1 else None
            name = _name(only) if only is not None else f"{len(subscribers)} clients"
            suffix = "" if reason is Reason.UNSUBSCRIBED else f" ({reason})"
            text = f"{name} unsubscribed from {_summary(topics)}{suffix}"
            _log(logging.DEBUG, "unsubscribed", text, only, topics=topics, reason=reason, clients=len(subscribers))

    def expired(self, name: str) -> None:
        name = one_line(name, MAX_LABEL)
        _log(logging.INFO, "expired", f"the durable subscription {name!r} has expired", None, name=name)

    def closed(self, subscriber: Subscriber, reason: Reason) -> None:
        counts, pending = self._counts, subscriber.pending
        counts.open[subscriber.kind] -= 1
        counts.closed[reason] += 1
        if reason in CUT_OFF:
            counts.cut_off[reason] += 1
        counts.suppress(SuppressionReason.UNSUBSCRIBED, pending)
        level = logging.INFO if reason in CUT_OFF else logging.DEBUG
        if logger.isEnabledFor(level):
            watched = len(subscriber.features) + len(subscriber.uris or ())
            text = f"{_name(subscriber)} is closed ({reason}); subscriptions: {watched}, pending topics: {pending}"
            _log(level, "gone", text, subscriber, reason=reason, cleaned=watched, pending=pending)

    def publishing(
        self,
        notification: Notification,
        changes: tuple[Change, ...],
        subscribers: tuple[Subscriber, ...],
        keys: list[Topic],
    ) -> None:
        kind = topic_kind(notification.topic)
        for change in changes:
            self._counts.changes[kind, change.operation] += 1

    def published(self, notification: Notification, subscribers: int) -> None:
        is_list = not isinstance(notification.topic, str)
        level = logging.DEBUG if not is_list else logging.INFO if subscribers else self.level_unwatched
        if logger.isEnabledFor(level):
            named = notification.changes[:_MAX_LOGGED_CHANGES]
            changes = [f"{change.operation} {change_name(change)}" for change in named]
            summary = ", ".join(changes) + (", …" if len(notification.changes) > _MAX_LOGGED_CHANGES else "")
            summary = summary or "changed (the list could not be read)"
            clients = "1 client" if subscribers == 1 else f"{subscribers or 'no'} clients"
            revision = notification.version.revision
            text = f"told {clients}: {topic_kind(notification.topic)} {summary} (revision {revision})"
            fields = {"clients": subscribers, "revision": revision, "changes": changes}
            _log(level, "told", text, None, topics=[notification.topic], **fields)

    def queued(self, subscriber: Subscriber, notification: Notification, due: float, *, was_pending: bool) -> None:
        assert subscriber.mailbox is not None
        counts, topic, filter = self._counts, notification.topic, subscriber.filter
        if due == NEVER:
            entry = subscriber.mailbox.entries.get(topic)
            is_known = entry is None or entry.awaited_revision or entry.is_told_current
            counts.suppress(SuppressionReason.SAME_DIGEST if is_known else SuppressionReason.FILTERED)
        elif is_topic_muted(subscriber.is_muted, topic):
            counts.suppress(SuppressionReason.MUTED)
        elif not was_pending:
            return
        elif filter and isinstance(topic, Feature) and not any(map(filter.passes, notification.changes)):
            counts.suppress(SuppressionReason.FILTERED)
        elif subscriber.is_ready and subscriber.settings.has_delays:
            counts.suppress(SuppressionReason.RATE)
        else:
            counts.coalesced += 1

    def overflowed(self, subscriber: Subscriber, merged: int, *, is_closed: bool) -> None:
        if is_closed:
            self._counts.suppress(SuppressionReason.UNSUBSCRIBED)
        else:
            self._counts.coalesced += merged
        consequence = "closing it" if is_closed else "it will be told to refetch all resources"
        _log(logging.WARNING, "overflow", f"{_name(subscriber)} has too many topics pending; {consequence}", subscriber)

    def failed(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        self._counts.failures["delivery"] += 1
        text = "%r raised an error on %r; delivery to the other subscribers continues"
        logger.error(text, subscriber, notification, exc_info=error)


def _summary(topics: Iterable[Topic]) -> str:
    """Return a text with the names of the lists and the number of URIs."""
    features = [topic.value for topic in topics if isinstance(topic, Feature)]
    uris = sum(not isinstance(topic, Feature) for topic in topics)
    return ", ".join([*features, *([f"{uris} {'URI' if uris == 1 else 'URIs'}"] if uris else [])]) or "nothing"


def _name(subscriber: Subscriber) -> str:
    return subscriber.label or "a subscriber"


def _log(level: int, event: str, text: str, subscriber: Subscriber | None, **fields: Any) -> None:
    """Log one line, with the same facts as fields for a JSON formatter."""
    if "topics" in fields:
        fields["topics"] = [topic_name(topic) for topic in fields["topics"]]
    if subscriber is not None:
        fields["client"] = subscriber.label
        fields["era"], fields["transport"] = subscriber.kind
    logger.log(level, "%s", text, extra={"tidings": {"event": event, **fields}})
