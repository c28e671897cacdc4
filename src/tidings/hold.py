"""What is not told yet because it is not written down: kept once for all who wait for the same.

A durable reader is told only of what would still be known if the server died in this moment. Those that keep up wait
for nothing else, and all of them for the same. So what they are owed is one entry per topic, whoever they are, and none
in the mailbox of each. Who falls behind, or is told in its own way, waits in its mailbox as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tidings.mailbox import Entry
from tidings.model import Feature, Notification, Topic, Version

if TYPE_CHECKING:
    from tidings.subscriber import Subscriber

__all__ = ["LONGEST_HOLD", "Held", "Hold"]

LONGEST_HOLD = 0.5
"""Seconds that a change is not told because it is not written down yet: ten times what that takes. A disk that hangs,
or changes that come faster than they can be written, must silence nobody."""

_SHORTEST_PATIENCE = LONGEST_HOLD / 10


class Crowd(dict["Subscriber", None]):
    """Some who wait for the same, in the order in which they are told. Shared by topics, and so never changed."""

    __slots__ = ("__weakref__",)


class Held:
    """One topic, and those who all know it as it was before."""

    __slots__ = ("_crowd", "_gone", "began", "latest", "previous")

    def __init__(self, latest: Notification, previous: Version, crowd: Crowd, began: float) -> None:
        self.latest = latest
        self.previous = previous
        """What they know."""
        self.began = began
        """When the first of what they don't know came."""
        self._crowd = crowd
        self._gone: set[Subscriber] = set()

    def __contains__(self, subscriber: Subscriber) -> bool:
        return subscriber in self._crowd and subscriber not in self._gone

    def __iter__(self) -> Iterator[Subscriber]:
        return (each for each in self._crowd if each not in self._gone) if self._gone else iter(self._crowd)

    def __len__(self) -> int:
        return len(self._crowd) - len(self._gone)

    @property
    def entry(self) -> Entry:
        """As it would wait in the mailbox of each."""
        entry = Entry(self.previous, self.previous.revision, self.latest.version)
        if not isinstance(self.latest.topic, Feature):
            entry.content = self.latest
        return entry

    def drop(self, subscriber: Subscriber) -> None:
        self._gone.add(subscriber)


class Hold:
    """What is held of one hub. Whoever calls has the hub's lock."""

    def __init__(self) -> None:
        self.is_saved: Callable[[int], bool] | None = None
        """Whether a revision is written down, or (of any at all) there is no use in waiting for that. Without it,
        nobody waits."""
        self.on_hold: Callable[[], None] | None = None
        """Called when somebody waits, so that `hub.release` is called in time."""
        self._held: dict[Topic, list[Held]] = {}
        """Several for a topic only where some came while others were waiting already."""
        self._crowds: WeakValueDictionary[int, Crowd] = WeakValueDictionary()
        """Those that something is held for, by a hash: most often, the next topic is held for one of them."""
        self._others: dict[Subscriber, float] = {}
        """Who waits with something in its own mailbox, and since when."""

    def __bool__(self) -> bool:
        return bool(self._held or self._others)

    @property
    def topics(self) -> list[Topic]:
        return list(self._held)

    def is_over(self, revision: int, began: float, now: float) -> bool:
        """Whether a version may be told that somebody has not been told since a time."""
        return self.is_saved is None or self.is_saved(revision) or now - began >= LONGEST_HOLD

    def add(self, notification: Notification, previous: Version, who: list[Subscriber], now: float) -> int:
        """Hold a change for some. Returns how many of them wait for an earlier one of the topic, and will be told of
        both at once."""
        new = self._shared(who)
        before = self._held.setdefault(notification.topic, [])
        for held in before:
            held.latest = notification
            if new is not held._crowd or held._gone:
                new = self._shared([each for each in new if each not in held])
            else:
                new = Crowd()
        if new:
            before.append(Held(notification, previous, new, now))
        return len(who) - len(new)

    def _shared(self, who: list[Subscriber]) -> Crowd:
        key = hash(tuple(who))
        crowd = self._crowds.get(key)
        if crowd is None or list(crowd) != who:
            crowd = self._crowds[key] = Crowd(dict.fromkeys(who))
        return crowd

    def add_other(self, subscriber: Subscriber, began: float) -> None:
        """Wake this one, whatever it waits for, when something is written down."""
        was_empty = not self
        self._others[subscriber] = min(began, self._others.get(subscriber, began))
        if was_empty:
            self.go_on()

    def over(self, topic: Topic, now: float) -> list[Held]:
        """What need be held no longer of a topic. Each is held all the same until it is taken."""
        found = self._held.get(topic, ())
        return [held for held in found if self.is_over(held.latest.version.revision, held.began, now)]

    def take(self, topic: Topic, held: Held) -> tuple[Subscriber, ...]:
        """Those who are now told of it, one way or another."""
        found = self._held[topic]
        found.remove(held)
        if not found:
            del self._held[topic]
        return tuple(held)

    def take_others(self) -> Iterable[Subscriber]:
        others, self._others = self._others, {}
        return others

    def patience(self, now: float) -> float:
        """Seconds until something was held for too long."""
        began = [held.began for found in self._held.values() for held in found]
        waited = now - min([*began, *self._others.values()], default=now)
        return max(LONGEST_HOLD - waited, _SHORTEST_PATIENCE)

    def go_on(self) -> None:
        """See to it that what is held is released in time."""
        if self and self.on_hold is not None:
            self.on_hold()

    def known(self, subscriber: Subscriber) -> dict[Topic, Version | None]:
        """The topics that are held for it, and what it knows of each."""
        if not subscriber.joins_hold:
            return {}
        return {
            topic: held.previous for topic, found in tuple(self._held.items()) for held in found if subscriber in held
        }

    def drop(self, subscriber: Subscriber, topic: Topic) -> Version | None:
        """Hold it for this one no longer, if it was; returns what it knows in that case."""
        for held in self._held.get(topic, ()):
            if subscriber in held:
                held.drop(subscriber)
                return held.previous
        return None
