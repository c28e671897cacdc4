"""One check per promise, each on its own reading of what a subscription covers: none asks the code that it judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tidings.core.model import Topic, Version
from tidings.testing.checks import (
    Ear,
    Last,
    Showings,
    broken,
    concerning,
    is_deletion,
    is_enough,
    knowledge,
    unwanted,
)
from tidings.testing.history import (
    Changed,
    Closed,
    History,
    MailboxSize,
    OfTopic,
    PromiseBroken,
    Subscribed,
    Told,
    Unsubscribed,
)
from tidings.testing.resumable import check_resumable

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
    """A subscriber gets nothing that it did not ask for, that its filter rules out, or that it is muted for."""
    ears: dict[str, Ear] = {}
    seen: dict[tuple[Topic, Version], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            seen[event.topic, event.version] = index
        if isinstance(event, OfTopic):
            continue
        ear = ears.setdefault(event.subscriber, Ear())
        if isinstance(event, Told):
            if why := unwanted(ear, event):
                broken("Filtered", history, index, event, why)
            if event.version is not None and is_deletion(event):
                # It ends the subscriptions of its time; one that was asked for after the deletion may go on.
                ear.end(event.topic, before=seen.get((event.topic, event.version)))
        else:
            ear.follow(event, index)


def check_ordered(history: History) -> None:
    """Revisions of a topic never go backwards for a subscriber."""
    known = {(event.topic, event.version) for event in history if isinstance(event, Changed)}
    ears: dict[str, Ear] = {}
    newest: dict[tuple[str, Topic], int] = {}
    cursors: dict[tuple[str, Topic], int] = {}
    for index, event in enumerate(history):
        if isinstance(event, OfTopic):
            continue
        who = event.subscriber
        is_new = who not in ears
        ear = ears.setdefault(who, Ear())
        if isinstance(event, Told):
            if event.version is not None:
                came_with = cursors.pop((who, event.topic), -1)
                before = max(came_with, newest.get((who, event.topic), -1))
                if event.version.revision < before:
                    broken("Ordered", history, index, event, f"revision {event.version.revision} came after {before}")
                newest[who, event.topic] = event.version.revision
            if is_deletion(event):
                ear.end(event.topic)
        else:
            ear.follow(event, index)
        if isinstance(event, Subscribed):
            for topic, version in event.told.items():
                # A cursor counts where a subscriber comes with it, for as long as it says nothing else and stays.
                # Where it already listens, older news may be under way.
                cursors.pop((who, topic), None)
                if is_new and version is not None and (topic, version) in known and ear.hears(topic):
                    cursors[who, topic] = version.revision
        for key in [key for key in cursors if key[0] == who and not ear.hears(key[1])]:
            del cursors[key]


def check_unique(history: History) -> None:
    """A subscriber is never told the same version of a topic twice in a row.

    The same means the same digest, and for one that ended its subscription in between, the same revision: it may have
    missed that the content was another one for a while. So too where another content was shown in between.
    """
    showings = Showings(history)
    ears: dict[str, Ear] = {}
    last: dict[tuple[str, Topic], Last] = {}
    for index, event in enumerate(history):
        if isinstance(event, OfTopic):
            continue
        who, ear = event.subscriber, ears.setdefault(event.subscriber, Ear())
        if isinstance(event, Told):
            if event.version is not None:
                before = last.get((who, event.topic))
                if before is not None and before.is_same(event, index, showings):
                    broken("Unique", history, index, event, f"it had been told {event.version.digest} already")
                last[who, event.topic] = Last(event.version, index)
            if is_deletion(event):
                ear.end(event.topic)
        else:
            ear.follow(event, index)
            if isinstance(event, Subscribed):
                for topic, version in event.told.items():
                    if ear.hears(topic):  # a cursor for anything else counts for nothing
                        last[who, topic] = Last(version, index, is_cursor=True)
        if isinstance(event, Told | Unsubscribed | Closed):
            for (subscriber, topic), told in list(last.items()):
                if subscriber == who and not ear.hears(topic):
                    told.is_continuous = False
                    if told.is_cursor:
                        del last[subscriber, topic]


def check_reliable(history: History) -> None:
    """Once changes stopped and everybody had the chance: every live subscriber was told the last version.

    It need not have been where the digest is the one it knew when it came or was told last, and no other was shown to
    anybody since. One with a filter need not have been told of a list if what it missed can be cut into stretches, each
    of which, seen at once, has no change that passes the filter.
    """
    changes: dict[Topic, list[Changed]] = {}
    for event in history:
        if isinstance(event, Changed):
            changes.setdefault(event.topic, []).append(event)
    latest = {topic: max(each.version for each in found) for topic, found in changes.items()}
    for subscriber in history.subscribers():
        ear, knows, seen = knowledge(history, subscriber, changes)
        for topic, known in knows.items():
            newest, may_hold = latest[topic], seen.get(topic, ())
            suffices = partial(is_enough, newest=newest, changes=changes[topic], chosen=ear.filter)
            if ear.is_muted(topic) or (any(map(suffices, known)) and all(map(suffices, may_hold))):
                continue
            knew = ", ".join(f"r{version.revision} {version.digest}" for version in known) or "nothing"
            may = "".join(f", and may have seen r{version.revision} {version.digest}" for version in may_hold)
            why = f"the last version is r{newest.revision} {newest.digest}, and it knows {knew}{may}"
            raise PromiseBroken(
                "Reliable", subscriber, topic, why, concerning(history, len(history), subscriber, topic)
            )


def check_bounded(history: History) -> None:
    """No reader, however slow, costs more than its mailbox: one entry for each topic that it watches, and that changed.

    That it delays nobody else is a matter of time, and no history shows it.
    """
    ears: dict[str, Ear] = {}
    topics: dict[Topic, None] = {}
    for index, event in enumerate(history):
        if isinstance(event, Changed):
            topics[event.topic] = None
        if isinstance(event, OfTopic):
            continue
        ear = ears.setdefault(event.subscriber, Ear())
        if isinstance(event, MailboxSize):
            most = sum(ear.hears(topic) for topic in topics)
            if event.pending > most or (event.most is not None and event.pending > event.most):
                allowed = most if event.most is None else min(most, event.most)
                why = f"{event.pending} topics are pending, and {allowed} is the most there may be"
                shown = concerning(history, index + 1, event.subscriber, None)
                raise PromiseBroken("Bounded", event.subscriber, None, why, shown)
        elif isinstance(event, Told):
            if is_deletion(event):
                ear.end(event.topic)
        else:
            if isinstance(event, Subscribed):
                topics |= dict.fromkeys(event.told)
            ear.follow(event, index)


PROMISES: Final[Mapping[str, Callable[[History], None]]] = {
    "Filtered": check_filtered,
    "Ordered": check_ordered,
    "Unique": check_unique,
    "Reliable": check_reliable,
    "Resumable": check_resumable,
    "Bounded": check_bounded,
}
"""The words of the design, and what shows that each is kept."""


def check_all(history: History) -> None:
    for check in PROMISES.values():
        check(history)
