"""A change is told to all who watch it.

Who keeps up is handed the notification there and then. For those that are told only of what is written down it is held,
and handed round in the same way when it is. For any other one it is noted in its mailbox, and the rest is the hub's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidings.counts import Why, batches
from tidings.index import WatchIndex
from tidings.mailbox import Entry
from tidings.model import Change, Feature, Notification, Operation, Reason, Topic, Version
from tidings.subscriber import Busy, Subscriber

if TYPE_CHECKING:
    from tidings.hub import Hub

__all__ = ["FanOut"]


class FanOut:
    """A part of its hub, which holds the lock and sees to it that one is over before the next begins.

    `with` it, the hub tells what waits for some: a round as well, and callbacks may begin others within either.
    """

    def __init__(self, hub: Hub, index: WatchIndex) -> None:
        self._hub = hub
        self._index = index
        self._ending: BaseException | None = None
        self._rounds = 0

    def __enter__(self) -> None:
        self._rounds += 1

    def __exit__(self, *exception: object) -> None:
        self._rounds -= 1
        self.hand_on()

    def publish(self, changes: tuple[Change, ...]) -> None:
        """Tell some changes of one topic."""
        hub = self._hub
        notification, previous = hub.news.publish(changes), changes[0].previous
        paths = self._index.paths(notification.topic)
        asked = tuple(self._index.watching(paths))
        telling = hub.observer.telling(notification, len(asked))
        edits, was_empty = self._index.edits, not hub.hold
        patient, told = self._hand_round(notification, previous, asked, paths, changes[0].time)
        if edits != self._index.edits:
            stay = [each for each in patient if self._index.is_watching(each, paths)]
            hub.counts.suppress(Why.UNSUBSCRIBED, len(patient) - len(stay))
            patient = stay
        if patient:  # before anybody else is called: whoever leaves from now on is found there
            hub.counts.coalesced += hub.hold.add(notification, previous, patient, hub._clock())
        hub.observer.told(telling, notification, len(asked))
        self._end_deleted(notification, told)
        if patient:
            self._tell_held(notification.topic)  # it may be written down by now
            if was_empty:
                hub.hold.go_on()

    def release(self) -> Iterable[Subscriber]:
        """Tell what need be held no longer; returns those who wait for the same with something in their mailbox."""
        # In the order in which a mailbox would give it out.
        for topic in sorted(self._hub.hold.topics, key=self._hub.policy.priority):
            self._tell_held(topic)
        return self._hub.hold.take_others()

    def _tell_held(self, topic: Topic) -> None:
        hub = self._hub
        for held in hub.hold.over(topic, hub._clock()):
            entry = held.entry
            notification = hub.news.owed(topic, entry, None)
            if isinstance(notification, Why):
                hub.counts.suppress(notification, len(hub.hold.take(topic, held)))
                continue
            paths = self._index.paths(topic)
            began = hub.catalog.now() - (hub._clock() - held.began)
            entered = hub.observer.enter(notification)
            try:
                # Each crowd in its turn: until then, who leaves because of what another one is told leaves the hold.
                asked = hub.hold.take(topic, held)
                _, told = self._hand_round(notification, held.previous, asked, paths, began, entry)
            finally:
                hub.observer.leave(entered)
            self._end_deleted(notification, told)

    def _hand_round(
        self,
        notification: Notification,
        previous: Version,
        asked: tuple[Subscriber, ...],
        paths: list[Topic],
        began: float,
        held: Entry | None = None,
    ) -> tuple[list[Subscriber], list[Subscriber]]:
        """Returns those for whom it has to be held, unless it was, and those who were told."""
        hub, index = self._hub, self._index
        topic, now, edits = notification.topic, hub._clock(), index.edits
        patient: list[Subscriber] = []
        told: list[Subscriber] = []
        is_deletion = _is_deletion(notification)
        for batch in batches(asked):
            aside = hub.counts.aside
            for subscriber in batch:
                # A callback may have closed or unsubscribed others meanwhile.
                if edits != index.edits and not index.is_watching(subscriber, paths):
                    hub.counts.set_aside(Why.UNSUBSCRIBED)
                    continue
                said = notification
                if not subscriber.is_plain:
                    if subscriber.is_patient and held is None:
                        hub.counts.aside += 1
                        patient.append(subscriber)
                        continue
                    if (found := self._said_at_once(subscriber, notification, held)) is None:
                        hub.counts.set_aside()
                        hub._note(subscriber, notification, previous, now, was_held=held is not None)
                        continue
                    said = found
                try:
                    taken = subscriber.deliver(said)
                    if taken is not None and isinstance(taken, Busy):
                        subscriber.pause()
                        hub.counts.aside += not taken.is_told
                except BaseException as error:  # one bad subscriber must not affect another, nor the publisher
                    hub.counts.set_aside()
                    self.fail(subscriber, said, error)
                if is_deletion:
                    told.append(subscriber)
            hub.counts.tell(topic, hub.catalog.now() - began, len(batch) - (hub.counts.aside - aside))
        return patient, told

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

    def _said_at_once(
        self, subscriber: Subscriber, notification: Notification, held: Entry | None
    ) -> Notification | None:
        """What is handed over to one that is not plain; None if its mailbox has to decide."""
        if subscriber.filter is None:
            return notification if subscriber.is_patient else None
        if not subscriber.is_only_picky:
            return None
        if not isinstance(notification.topic, Feature):
            return notification  # filters are of lists
        news, topic = self._hub.news, notification.topic
        if held is not None:
            said = news.owed(topic, held, subscriber.filter)
            return None if isinstance(said, Why) else said
        said = news.missed(topic, notification.since, subscriber.filter)
        return said if said.changes else None

    def _end_deleted(self, notification: Notification, told: list[Subscriber]) -> None:
        """The resource is gone, and these know: their subscriptions to just this URI are over."""
        if told:
            self._hub._unwatch(told, [notification.topic], Reason.DELETED, notification)


def _is_deletion(notification: Notification) -> bool:
    return bool(notification.changes) and notification.changes[-1].operation is Operation.DELETED
