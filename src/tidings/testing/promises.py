"""The checks of a recorded history, one per promise of Tidings. Each raises `PromiseBroken`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tidings.core.model import Topic, Version
from tidings.testing.checks import (
    Fetches,
    LastTold,
    RecordedChanges,
    Subscriptions,
    explain_unwanted,
    fail,
    find_known_versions,
    is_deletion,
    is_up_to_date,
    relevant_events,
)
from tidings.testing.history import (
    Changed,
    Closed,
    History,
    MailboxSize,
    PromiseBroken,
    Subscribed,
    Told,
    TopicEvent,
    Unsubscribed,
)

__all__ = [
    "PROMISES",
    "check_all",
    "check_bounded",
    "check_filtered",
    "check_ordered",
    "check_reliable",
    "check_resumable",
    "check_unique",
]


def check_filtered(history: History) -> None:
    """Check that a subscriber gets nothing that it did not request, that its filter excludes, or that is muted."""
    subscribers: dict[str, Subscriptions] = defaultdict(Subscriptions)
    published: dict[tuple[Topic, Version], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            published[event.topic, event.version] = index
        if isinstance(event, TopicEvent):
            continue
        subscriptions = subscribers[event.subscriber]
        if not isinstance(event, Told):
            subscriptions.apply(event, index)
            continue
        if reason := explain_unwanted(subscriptions, event):
            fail("Filtered", history, index, event, reason)
        if event.version is not None and is_deletion(event):
            # A subscription that was requested after the deletion does not end with it.
            subscriptions.end(event.topic, before=published.get((event.topic, event.version)))


def check_ordered(history: History) -> None:
    """Check that the revisions of a topic never decrease for a subscriber."""
    known = {(event.topic, event.version) for event in history if isinstance(event, Changed)}
    subscribers: dict[str, Subscriptions] = {}
    newest: dict[tuple[str, Topic], int] = {}
    cursors: dict[tuple[str, Topic], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, TopicEvent):
            continue
        name = event.subscriber
        is_new = name not in subscribers
        subscriptions = subscribers.setdefault(name, Subscriptions())
        subscriptions.apply(event, index)
        if isinstance(event, Told) and event.version is not None:
            revision = event.version.revision
            previous = max(cursors.pop((name, event.topic), -1), newest.get((name, event.topic), -1))
            if revision < previous:
                fail("Ordered", history, index, event, f"revision {revision} came after {previous}")
            newest[name, event.topic] = revision
        if isinstance(event, Subscribed):
            for topic, version in event.told.items():
                # Only the cursor of a new subscriber counts. Others may still get notifications that were sent earlier.
                cursors.pop((name, topic), None)
                if is_new and version is not None and (topic, version) in known and subscriptions.covers(topic):
                    cursors[name, topic] = version.revision
        for key in [key for key in cursors if key[0] == name and not subscriptions.covers(key[1])]:
            del cursors[key]


def check_unique(history: History) -> None:
    """Check that a subscriber is never told the same version of a topic twice in a row.

    Two versions are the same if their digests are equal. Their revisions must be equal too if the subscriber was not
    subscribed in between, or if a client fetched another content in between.
    """
    fetches = Fetches(history)
    subscribers: dict[str, Subscriptions] = defaultdict(Subscriptions)
    last: dict[tuple[str, Topic], LastTold] = {}
    for index, event in enumerate(history):
        if isinstance(event, TopicEvent):
            continue
        name, subscriptions = event.subscriber, subscribers[event.subscriber]
        subscriptions.apply(event, index)
        if isinstance(event, Told) and event.version is not None:
            previous = last.get((name, event.topic))
            if previous is not None and previous.is_repeated_by(event, index, fetches):
                fail("Unique", history, index, event, f"it was told {event.version.digest} before")
            last[name, event.topic] = LastTold(event.version, index)
        if isinstance(event, Subscribed):
            for topic, version in event.told.items():
                if subscriptions.covers(topic):
                    last[name, topic] = LastTold(version, index, is_cursor=True)
        if isinstance(event, Told | Unsubscribed | Closed):
            for (subscriber, topic), told in list(last.items()):
                if subscriber == name and not subscriptions.covers(topic):
                    told.is_continuous = False
                    if told.is_cursor:
                        del last[subscriber, topic]


def check_reliable(history: History) -> None:
    """Check that every open subscriber has been told the last version of each topic.

    A subscriber needs no notification of a digest that it knows, unless a client has fetched another one since. A
    subscriber with a filter needs no notification of a list if its missed changes can be split into parts, each without
    a net change that passes the filter.
    """
    changes: dict[Topic, list[Changed]] = {}
    for event in history:
        if isinstance(event, Changed):
            changes.setdefault(event.topic, []).append(event)
    latest = {topic: max(change.version for change in found) for topic, found in changes.items()}
    for subscriber in history.subscribers():
        subscriptions, known, fetched = find_known_versions(history, subscriber, changes)
        for topic, versions in known.items():
            newest, maybe_fetched = latest[topic], fetched.get(topic, ())
            is_enough = partial(is_up_to_date, newest=newest, changes=changes[topic], filter=subscriptions.filter)
            if subscriptions.is_muted(topic) or (any(map(is_enough, versions)) and all(map(is_enough, maybe_fetched))):
                continue
            known_text = ", ".join(map(_format, versions)) or "nothing"
            fetched_text = "".join(f", and may have fetched {_format(version)}" for version in maybe_fetched)
            reason = f"the last version is {_format(newest)}, and it knows {known_text}{fetched_text}"
            events = relevant_events(history, len(history), subscriber, topic)
            raise PromiseBroken("Reliable", subscriber, topic, reason, events)


def _format(version: Version) -> str:
    return f"r{version.revision} {version.digest}"


def check_resumable(history: History, *, journal: int | None = None) -> None:
    """Check that a client that resumes with a cursor gets all changes since then, or is told to refetch.

    Each notification after the cursor contains all changes since the last one, or tells the client to refetch. With an
    unknown cursor, it must tell the client to refetch. Otherwise it may do so only in two cases: there were more than
    `journal` changes (of one feature, or of all contents together), or the client may have fetched another content.
    Without `journal`, the first case is not checked.
    """
    record = RecordedChanges(history)
    subscribers: dict[str, Subscriptions] = defaultdict(Subscriptions)
    known: dict[tuple[str, Topic], tuple[Version | None, int]] = {}
    """The version that each subscriber knows, and the index of the event that told it."""
    for index, event in enumerate(history):
        if isinstance(event, TopicEvent):
            continue
        name, subscriptions = event.subscriber, subscribers[event.subscriber]
        if isinstance(event, Told) and event.version is not None:
            key = (name, event.topic)
            if key in known:
                reason = record.explain_mismatch(event, index, *known.pop(key), subscriptions.filter, journal)
                if reason:
                    fail("Resumable", history, index, event, reason)
            if record.has(event.topic, event.version):
                known[key] = (event.version, index)
        cursors = event.told if isinstance(event, Subscribed) else {}
        covered_before = {topic for topic in cursors if subscriptions.covers(topic)}
        subscriptions.apply(event, index)
        for topic, version in cursors.items():
            known.pop((name, topic), None)
            # A subscriber that was subscribed before may still receive notifications that were sent earlier.
            is_new = topic not in covered_before and subscriptions.covers(topic)
            if is_new and not record.is_ambiguous(topic, version, index):
                known[name, topic] = (version, index)
        if isinstance(event, Unsubscribed | Closed | Told):
            for key in [key for key in known if key[0] == name and not subscriptions.covers(key[1])]:
                del known[key]


def check_bounded(history: History) -> None:
    """Check that a mailbox has at most one entry for each topic that its subscriber watches and that changed.

    A slow subscriber must also not delay others. This is not checked, because a history contains no times.
    """
    subscribers: dict[str, Subscriptions] = defaultdict(Subscriptions)
    topics: dict[Topic, None] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            topics[event.topic] = None
        if isinstance(event, TopicEvent):
            continue
        subscriptions = subscribers[event.subscriber]
        subscriptions.apply(event, index)
        if isinstance(event, Subscribed):
            topics |= dict.fromkeys(event.told)
        elif isinstance(event, MailboxSize):
            allowed = sum(map(subscriptions.covers, topics))
            if event.max_pending is not None:
                allowed = min(allowed, event.max_pending)
            if event.pending > allowed:
                reason = f"{event.pending} topics are pending, and at most {allowed} may be"
                events = relevant_events(history, index + 1, event.subscriber, None)
                raise PromiseBroken("Bounded", event.subscriber, None, reason, events)


PROMISES: Final[Mapping[str, Callable[[History], None]]] = {
    "Filtered": check_filtered,
    "Ordered": check_ordered,
    "Unique": check_unique,
    "Reliable": check_reliable,
    "Resumable": check_resumable,
    "Bounded": check_bounded,
}
"""The check of each promise."""


def check_all(history: History) -> None:
    """Check all promises."""
    for check in PROMISES.values():
        check(history)
