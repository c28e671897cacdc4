"""One connection under a durable name: what its client knows for sure.

What was written to a connection may be lost with it, and nobody says so. So it counts as told only when the connection
has lasted for as long after it as a reader that vanished may go unnoticed. Whoever comes back before that may know the
one thing or the other, and is told to refetch. Better twice than never: a client that wants neither comes back with its
cursor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import filterfalse, islice

from msgspec import structs

from tidings.core.model import Feature, Notification, Topic, Version
from tidings.core.patterns import is_pattern
from tidings.core.redact import topic_name
from tidings.core.resume import Resumed, resume_from_store
from tidings.core.subscriber import Subscriber
from tidings.store.durable import MOST_CONTENTS, DurableSubscription, DurableSubscriptions

__all__ = ["DurableConnection"]

logger = logging.getLogger(__name__)


class DurableConnection:
    """One connection under a durable name."""

    def __init__(
        self,
        durables: DurableSubscriptions,
        durable: DurableSubscription,
        known: DurableSubscription | None,
        end: Callable[[], None],
    ) -> None:
        self.key = durable.key
        self.ack = {"name": durable.name, "ttl": durable.ttl, "isNew": known is None}
        self.end = end
        """Ends the connection, gracefully where its lane can."""
        self._durables = durables
        self._former = known
        self._subscriber: Subscriber | None = None
        policy = durables.hub.policy
        self._doubt = policy.write_deadline + policy.keep_alive
        self._doubted: set[Topic] = set()
        """What it was told of lately."""
        self._older: set[Topic] = set()
        """The same of the time before. After as long again, it is beyond doubt."""
        self._turned = durables._now()
        self._is_sure = False

    @property
    def turns_at(self) -> float:
        """When there is something new to `remember`, if nothing happens before."""
        return self._turned + self._doubt

    def watch(self, subscriber: Subscriber, *, is_sure: bool = False) -> None:
        """Remember from now on what this subscriber is told. Before it subscribes, so that nothing is missed. With
        `is_sure`, its lane knows what was read, and is busy until then: there is no doubt."""
        self._subscriber = subscriber
        self._is_sure = is_sure
        subscriber.before_close = self._leave
        deliver, durables = subscriber.deliver, self._durables

        def deliver_and_remember(notification: Notification) -> object:
            topic = notification.topic
            if is_sure:
                durables._mark(self.key)
            else:
                self._turn()
                if not self._doubted:
                    durables._expect(self)
                self._doubted.add(topic)
            return deliver(notification)

        subscriber.deliver = deliver_and_remember

    def mark(self) -> None:
        """There is something to write down at once."""
        with self._durables._lock:
            if self._subscriber is not None:
                self._durables._mark(self.key)

    def _turn(self) -> None:
        now = self._durables._now()
        if now - self._turned >= self._doubt:
            self._older = self._doubted if now - self._turned < 2 * self._doubt else set()
            self._doubted, self._turned = set(), now
            if self in self._durables._expected:
                self._durables._marked.setdefault(self.key, False)  # what it was told before may be beyond doubt

    def resumed(self, may: Callable[[str], bool] | None = None) -> Resumed:
        """Where the client stands, by what is remembered of it."""
        durables = self._durables
        with durables._lock:
            durable = durables._kept.get(self.key)
            if durable is None or self._former is None:
                return Resumed({})
            return resume_from_store(durables.hub, durable.told, durable.uris, durable.as_of, may)

    def told(self) -> dict[Topic, Version | None]:
        """The same for `hub.subscribe`, where there is no acknowledgement that could say more."""
        told, refetch = self.resumed()
        if refetch:
            names = ", ".join(map(topic_name, refetch))
            logger.warning("%r was away for too long to be told what it missed of %s", self.key[1], names)
        return {**told, **dict.fromkeys(uri for uri in refetch if not is_pattern(uri))}

    def remember(self) -> bool:
        """Take in what the subscriber knows for sure now. False if there will be more to take in when it has read, or
        surely has, what it was told last."""
        durables, subscriber = self._durables, self._subscriber
        durable = durables._kept.get(self.key)
        if subscriber is None or durable is None:
            return True
        if not subscriber.is_ready:
            self._turned = durables._now()  # it has not read even that; whatever is in doubt stays so
        if self._is_sure and not subscriber.is_ready:
            return False
        hub = durables.hub
        # Not what it was told: what its filter ruled out needs no telling when it comes back either.
        waiting = hub.pending_versions(subscriber)
        contents: dict[str, Version | None] = {}
        for uri in islice(filterfalse(is_pattern, subscriber.uris or ()), MOST_CONTENTS):
            if (version := waiting.get(uri, hub.notifications.version(uri))) is None or version.revision > 0:
                contents[uri] = version
        contents |= {topic: version for topic, version in waiting.items() if not isinstance(topic, Feature)}
        watched = [feature for feature in Feature if feature in subscriber.features]
        lists = {feature: waiting.get(feature, hub.notifications.version(feature)) for feature in watched}
        self._turn()
        doubted = self._doubted | self._older
        if (topic := hub.delivering_to(subscriber)) is not None:  # a callback ended this subscription meanwhile
            doubted.add(topic)
        uris = subscriber.uris or {}
        # A deletion ended the subscription, if it was heard.
        gone = {topic for topic in doubted if not isinstance(topic, Feature) and topic not in uris}
        for topic in doubted:
            if not isinstance(topic, Feature):
                contents[topic] = None
            elif topic in lists:
                lists[topic] = None
        durables._set(
            structs.replace(
                durable,
                features=tuple(lists),
                uris=(*uris, *(uri for uri in durable.uris if uri in gone)) if gone else tuple(uris),
                as_of=hub.notifications.revision,
                lists=lists,
                contents=contents,
            )
        )
        if not doubted:
            durables._expected.pop(self, None)
        return not doubted

    def let_go(self) -> None:
        """The name is somebody else's now, or nobody's."""
        self._durables._expected.pop(self, None)
        if self._subscriber is not None:
            self._subscriber.before_close = None
            self._subscriber = None

    def _leave(self, subscriber: Subscriber) -> None:
        """The connection ends."""
        self.remember()
        self.let_go()
        durables = self._durables
        if durables._visits.get(self.key) is self:
            del durables._visits[self.key]
            durable = durables._kept.get(self.key)
            if durable is not None:
                durables.change(self.key, expires=durables.expiry(durable))
