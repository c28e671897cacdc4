"""A change is told to all who watch it.

Deliver the notification immediately to subscribers that are ready. For the others, note it in their mailbox; the hub
delivers it later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidings.core.counts import SuppressionReason, batches
from tidings.core.index import WatchIndex
from tidings.core.model import Change, Feature, Notification, Operation, Reason, Topic, Version
from tidings.core.subscriber import Busy, Subscriber

if TYPE_CHECKING:
    from tidings.core.hub import Hub

__all__ = ["Delivery"]


class Delivery:
    """A part of its hub, which holds the lock and sees to it that one is over before the next begins.

    `with` it, the hub tells what waits for some: a round as well, and callbacks may begin others within either.
    """

    def __init__(self, hub: Hub, index: WatchIndex) -> None:
        self._hub = hub
        self._index = index
        self._ending: BaseException | None = None
        self._rounds = 0
        self.topic: Topic | None = None
        """The topic whose delivery is under way: some of its subscribers have not been told its newest version yet."""

    def __enter__(self) -> None:
        self._rounds += 1

    def __exit__(self, *exception: object) -> None:
        self._rounds -= 1
        self.hand_on()

    def publish(self, changes: tuple[Change, ...]) -> None:
        """Tell some changes of one topic."""
        hub = self._hub
        notification, previous = hub.notifications.publish(changes), changes[0].previous
        paths = self._index.paths(notification.topic)
        asked = tuple(self._index.watching(paths))
        if hub.events is not None:
            hub.events.published(changes)
        telling = hub.observer.telling(notification, len(asked))
        self.topic = notification.topic
        try:
            told = self._hand_round(notification, previous, asked, paths, changes[0].time)
        finally:
            self.topic = None
        hub.observer.told(telling, notification, len(asked))
        if told:  # the resource is gone, and these know: their subscriptions to just this URI are over
            hub._unwatch(told, [notification.topic], Reason.DELETED, notification)

    def _hand_round(
        self,
        notification: Notification,
        previous: Version,
        asked: tuple[Subscriber, ...],
        paths: list[Topic],
        began: float,
    ) -> list[Subscriber]:
        """Return the subscribers that were told of a deletion."""
        hub, index, events = self._hub, self._index, self._hub.events
        topic, now, edits = notification.topic, hub._clock(), index.edits
        told: list[Subscriber] = []
        is_deletion = _is_deletion(notification)
        for batch in batches(asked):
            skipped = hub.counts.skipped
            for subscriber in batch:
                # A callback may have closed or unsubscribed others meanwhile.
                if edits != index.edits and not index.is_watching(subscriber, paths):
                    hub.counts.skip(SuppressionReason.UNSUBSCRIBED)
                    continue
                said = notification
                if not subscriber.is_plain:
                    if (found := self._said_at_once(subscriber, notification)) is None:
                        hub.counts.skip()
                        hub._note(subscriber, notification, previous, now)
                        continue
                    said = found
                if events is not None:
                    events.delivering(subscriber, said)
                try:
                    taken = subscriber.deliver(said)
                    if taken is not None and isinstance(taken, Busy):
                        subscriber.pause()
                        hub.counts.skipped += not taken.is_told
                except BaseException as error:  # one bad subscriber must not affect another, nor the publisher
                    hub.counts.skip()
                    self.fail(subscriber, said, error)
                if is_deletion:
                    told.append(subscriber)
            hub.counts.add_sent(topic, hub.catalog.now() - began, len(batch) - (hub.counts.skipped - skipped))
        return told

    def fail(self, subscriber: Subscriber, notification: Notification, error: BaseException) -> None:
        """A subscriber raised. What is to end the program does so, but only when all others have been told."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._ending = error
        else:
            self._hub.observer.failed(subscriber, notification, error)

    def hand_on(self) -> None:
        """Raise what a subscriber raised to end the program. When the outermost round is over: sooner, it would keep
        others from being told, or cut short a callback that made a change of its own."""
        if self._ending is not None and not self._rounds and not self._hub._publishing:
            ending, self._ending = self._ending, None
            raise ending

    def _said_at_once(self, subscriber: Subscriber, notification: Notification) -> Notification | None:
        """Return what to deliver to a subscriber that is not plain; None if its mailbox has to decide."""
        if not subscriber.is_only_picky:
            return None
        if not isinstance(notification.topic, Feature):
            return notification  # filters are of lists
        said = self._hub.notifications.missed(notification.topic, notification.since, subscriber.filter)
        return said if said.changes else None


def _is_deletion(notification: Notification) -> bool:
    return bool(notification.changes) and notification.changes[-1].operation is Operation.DELETED
