"""The checks of a recorded history, one per promise of Tidings. Each raises `PromiseBroken`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tests.support.promises.history import (
    Changed,
    Closed,
    History,
    MailboxSize,
    PromiseBroken,
    Subscribed,
    Told,
    Unsubscribed,
)
from tests.support.promises.state import (
    Fetches,
    LastTold,
    RecordedChanges,
    Subscriptions,
    explain_unwanted,
    find_known_versions,
    is_deletion,
    is_up_to_date,
)
from tidings.core.model import Topic, Version


def check_filtered(history: History) -> None:
    """Check that a subscriber gets nothing that it did not request, that its filter excludes, or that is muted."""
    published = {
        (event.topic, event.version): index for index, event in enumerate(history) if isinstance(event, Changed)
    }
    for events in history.by_subscriber().values():
        subscriptions = Subscriptions()
        for index, event in events:
            if not isinstance(event, Told):
                subscriptions.apply(event, index)
                continue
            if reason := explain_unwanted(subscriptions, event):
                raise PromiseBroken("Filtered", history, event.subscriber, event.topic, reason, index)
            if event.version is not None and is_deletion(event):
                # A subscription that was requested after the deletion does not end with it.
                subscriptions.end(event.topic, before=published.get((event.topic, event.version)))


def check_ordered(history: History) -> None:
    """Check that the revisions of a topic never decrease for a subscriber."""
    published: dict[tuple[Topic, Version], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            published.setdefault((event.topic, event.version), index)
    for events in history.by_subscriber().values():
        subscriptions = Subscriptions()
        newest: dict[Topic, int] = {}
        cursors: dict[Topic, int] = {}
        for position, (index, event) in enumerate(events):
            subscriptions.apply(event, index)
            if isinstance(event, Told) and event.version is not None:
                revision = event.version.revision
                previous = max(cursors.pop(event.topic, -1), newest.get(event.topic, -1))
                if revision < previous:
                    reason = f"revision {revision} came after {previous}"
                    raise PromiseBroken("Ordered", history, event.subscriber, event.topic, reason, index)
                newest[event.topic] = revision
            if isinstance(event, Subscribed):
                for topic, version in event.told.items():
                    # Only the first cursor counts. Later, notifications that were sent earlier may still arrive. A
                    # version that is published later comes from a replica that is ahead of this one.
                    cursors.pop(topic, None)
                    if position == 0 and version is not None and published.get((topic, version), index) < index:
                        cursors[topic] = version.revision
            for topic in subscriptions.not_covered(cursors):
                del cursors[topic]


def check_unique(history: History) -> None:
    """Check that a subscriber is never told the same version of a topic twice in a row.

    Two versions are the same if their digests are equal. Their revisions must be equal too if the subscriber was not
    subscribed in between, or if a client fetched another content in between.
    """
    fetches = Fetches(history)
    for events in history.by_subscriber().values():
        subscriptions = Subscriptions()
        last: dict[Topic, LastTold] = {}
        for index, event in events:
            subscriptions.apply(event, index)
            if isinstance(event, Told) and event.version is not None:
                previous = last.get(event.topic)
                if previous is not None and previous.is_repeated_by(event, index, fetches):
                    reason = f"it was told {event.version.digest} before"
                    raise PromiseBroken("Unique", history, event.subscriber, event.topic, reason, index)
                last[event.topic] = LastTold(event.version, index)
            if isinstance(event, Subscribed):
                for topic, version in event.told.items():
                    if subscriptions.covers(topic):
                        last[topic] = LastTold(version, index, is_cursor=True)
            if isinstance(event, Told | Unsubscribed | Closed):
                for topic in subscriptions.not_covered(last):
                    last[topic].is_continuous = False
                    if last[topic].is_cursor:
                        del last[topic]


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
    for subscriber in history.by_subscriber():
        subscriptions, known, fetched = find_known_versions(history, subscriber, changes)
        for topic, versions in known.items():
            newest, maybe_fetched = latest[topic], fetched.get(topic, ())
            is_enough = partial(is_up_to_date, newest=newest, changes=changes[topic], filter=subscriptions.filter)
            if subscriptions.is_muted(topic) or (any(map(is_enough, versions)) and all(map(is_enough, maybe_fetched))):
                continue
            known_text = ", ".join(map(_format, versions)) or "nothing"
            fetched_text = "".join(f", and may have fetched {_format(version)}" for version in maybe_fetched)
            reason = f"the last version is {_format(newest)}, and it knows {known_text}{fetched_text}"
            raise PromiseBroken("Reliable", history, subscriber, topic, reason)


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
    for events in history.by_subscriber().values():
        subscriptions = Subscriptions()
        known: dict[Topic, tuple[Version | None, int]] = {}
        """The version that the subscriber knows, and the index of the event that told it."""
        for index, event in events:
            if isinstance(event, Told) and event.version is not None:
                if event.topic in known:
                    since = known.pop(event.topic)
                    if reason := record.explain_mismatch(event, index, *since, subscriptions.filter, journal):
                        raise PromiseBroken("Resumable", history, event.subscriber, event.topic, reason, index)
                if record.has(event.topic, event.version):
                    known[event.topic] = (event.version, index)
            cursors = event.told if isinstance(event, Subscribed) else {}
            # A subscriber that was subscribed before may still receive notifications that were sent earlier.
            new = subscriptions.not_covered(cursors)
            subscriptions.apply(event, index)
            for topic, version in cursors.items():
                known.pop(topic, None)
                if topic in new and not record.is_ambiguous(topic, version, index):
                    known[topic] = (version, index)
            if isinstance(event, Subscribed | Told | Unsubscribed | Closed):
                for topic in subscriptions.not_covered(known):
                    del known[topic]


def check_bounded(history: History) -> None:
    """Check that a mailbox has at most one entry for each topic that its subscriber watches and that changed.

    A slow subscriber must also not delay others. This is not checked, because a history contains no times.
    """
    topics: dict[Topic, int] = {}
    """The topics of changes and cursors, each with the index of the first one."""
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            topics.setdefault(event.topic, index)
        elif isinstance(event, Subscribed):
            topics = dict.fromkeys(event.told, index) | topics
    for events in history.by_subscriber().values():
        subscriptions = Subscriptions()
        for index, event in events:
            subscriptions.apply(event, index)
            if isinstance(event, MailboxSize):
                allowed = sum(first < index and subscriptions.covers(topic) for topic, first in topics.items())
                if event.max_pending is not None:
                    allowed = min(allowed, event.max_pending)
                if event.pending > allowed:
                    reason = f"{event.pending} topics are pending, and at most {allowed} may be"
                    raise PromiseBroken("Bounded", history, event.subscriber, None, reason, index)


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
