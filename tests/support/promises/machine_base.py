"""A catalog, a hub, and readers that act during deliveries and track the state that they should know.

Time is a number that the rules advance. The actions of callbacks are drawn in advance as plans, because Hypothesis
cannot draw in the middle of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from tests.support.promises.recorder import Recorder
from tests.support.promises.strategies import MAX_URIS, OTHER_EPOCH, URIS, Plan, Subscription
from tests.support.readers import Clock
from tidings import (
    BUSY,
    Catalog,
    Change,
    Feature,
    Filter,
    Hub,
    Notification,
    Operation,
    Policy,
    Reason,
    Subscriber,
    Topic,
    Version,
)
from tidings.core.digest import EMPTY, ListDigest


class Reader:
    """One subscriber, its plans, and the state that it should know."""

    def __init__(self, machine: MachineBase, kind: str, policy: Policy, filter: Filter | None) -> None:
        self.machine = machine
        self.policy = policy
        self.filter = filter
        self.callback = partial(Reader.deliver, self) if kind != "open" else None
        self.subscriber: Subscriber | None = None
        self.plans: deque[Plan] = deque()
        self.is_busy = False
        self.muted: set[Topic] = set()
        self.is_guard_broken = False
        self.paths: dict[Topic, float | None] = {}
        """The watched topics, and when their subscriptions end."""
        self.lists: dict[Feature, dict[str, bytes] | None] = {}
        """The copy of each list from its notifications; None if it is unknown."""
        self.closed: Reason | None = None
        options: dict[str, Any] = {
            "label": kind,
            "settings": policy.delivery,
            "filter": filter,
            "on_close": self.on_close,
        }
        if filter is not None or policy.delivery.has_delays or kind == "guarded":  # the others have no options
            options["is_muted"] = self.is_muted
        self.options = options
        if kind == "open":
            self.subscriber = machine.hub.open(self.deliver, **options)

    @property
    def can_be_muted(self) -> bool:
        return "is_muted" in self.options

    def is_muted(self, topic: Topic) -> bool:
        if self.is_guard_broken:
            raise RuntimeError("a guard that fails")
        return topic in self.muted

    def deliver(self, notification: Notification) -> object:
        machine = self.machine
        if self.closed is not None:
            machine.faults.append(f"a closed reader was told {notification}")
        if self.is_busy:
            machine.faults.append(f"{self.subscriber} is busy, and was told {notification}")
        if isinstance(notification.topic, Feature) and self.filter is None:
            self.apply(notification.topic, notification)
        if any(change.operation is Operation.DELETED for change in notification.changes):
            machine.ended.append((self, notification.topic))
        return machine.act(self, self.plans.popleft()) if self.plans else None

    def apply(self, feature: Feature, notification: Notification) -> None:
        held = self.lists.get(feature)
        if not notification.complete:
            self.lists[feature] = dict(self.machine.snapshots[notification.version.digest])
        elif held is None:
            self.machine.faults.append(f"{self.subscriber} had no list, but {notification} is marked complete")
        else:
            for change in notification.changes:
                if change.item is None:
                    held.pop(change.key, None)
                else:
                    held[change.key] = change.item.hash
            if digest_of(held) != notification.version.digest:
                self.machine.faults.append(f"{self.subscriber} holds another list after {notification}")

    def on_close(self, reason: Reason) -> None:
        self.closed = reason
        self.paths.clear()
        self.is_busy = False


def digest_of(items: Mapping[str, bytes]) -> str:
    total = ListDigest()
    for each in items.values():
        total.add(each)
    return total.hexdigest()


class MachineBase(RuleBasedStateMachine):
    """A catalog, a hub and readers, a record of the events, and the actions of the rules."""

    clock: Clock
    catalog: Catalog
    hub: Hub
    recorder: Recorder

    @initialize(
        journal=st.sampled_from((0, 1, 2, 5, 1000)),
        age=st.sampled_from((0.5, 1000.0)),
        subresources=st.booleans(),
        follows=st.booleans(),
        has_updating_hook=st.booleans(),
    )
    def begin(self, journal: int, age: float, subresources: bool, follows: bool, has_updating_hook: bool) -> None:
        self.clock = Clock()
        policy = Policy(max_uris=MAX_URIS, journal_changes=journal, journal_age=age, subresources=subresources)
        self.catalog = Catalog(policy, clock=self.clock)
        self.readers: list[Reader] = []
        self.faults: list[str] = []
        self.ended: list[tuple[Reader, Topic]] = []
        """The readers that were told of a deletion in this step."""
        self.backlog: deque[tuple[Change, ...]] = deque()
        """The commits that are not published yet, if the hub does not publish them itself."""
        self.follows = follows
        self.has_updating_hook = has_updating_hook
        self.items: dict[Feature, dict[str, bytes]] = {feature: {} for feature in Feature}
        self.snapshots: dict[str, dict[str, bytes]] = {EMPTY: {}}
        self.versions: dict[Topic, list[Version]] = {feature: [self.catalog.version(feature)] for feature in Feature}
        self.watched: set[Topic] = set()
        self.is_late = False
        """Whether time passed without a tick."""
        self.catalog.follow(self.committed)
        self.hub = Hub(self.catalog, clock=self.clock, on_watched=self.first, on_unwatched=self.last)
        if not follows:
            self.catalog.publisher = None
        self.record_events()

    def record_events(self) -> None:
        """Start to record the events of the new hub."""
        self.recorder = Recorder(self.hub)

    def committed(self, changes: tuple[Change, ...]) -> None:
        ends: dict[Topic, Version] = {}
        for change in changes:
            ends[change.topic] = change.version
            if isinstance(change.topic, Feature):
                if change.item is None:
                    del self.items[change.topic][change.key]
                else:
                    self.items[change.topic][change.key] = change.item.hash
        for topic, version in ends.items():
            self.versions.setdefault(topic, []).append(version)
            if isinstance(topic, Feature):
                self.snapshots[version.digest] = dict(self.items[topic])
                if digest_of(self.items[topic]) != version.digest:
                    self.faults.append(f"the digest of {topic} is not that of its items")
        if not self.follows:
            self.backlog.append(changes)

    def first(self, topic: Topic) -> None:
        if topic in self.watched:
            self.faults.append(f"first({topic!r}) twice")
        self.watched.add(topic)
        # A source that reads a file for the first time does the same.
        if self.has_updating_hook and topic in URIS:
            self.catalog.resources.updated(str(topic), etag="1")

    def last(self, topic: Topic) -> None:
        if topic not in self.watched:
            self.faults.append(f"last({topic!r}) without a first")
        self.watched.discard(topic)

    # Actions

    def act(self, reader: Reader, plan: Plan) -> object:
        other = self.readers[plan.other % len(self.readers)]
        match plan.kind:
            case "busy":
                reader.is_busy = reader.closed is None
                return BUSY
            case "raise":
                raise RuntimeError("a callback that fails")
            case "change":
                plan.step.do(self.catalog)
            case "batch":
                with self.catalog.batch():
                    plan.step.do(self.catalog)
                    self.catalog.resources.updated(plan.step.uri, etag=plan.step.etag)
            case "close":
                self.close(reader)
            case "close other":
                self.close(other)
            case "unsubscribe":
                self.unsubscribe(reader, ())
            case "unsubscribe other":
                self.unsubscribe(other, plan.subscription.topics)
            case "subscribe other":
                gone = {topic for ended, topic in self.ended if ended is other}
                topics = tuple(topic for topic in plan.subscription.topics if topic not in gone)
                self.subscribe(other, Subscription(topics, plan.subscription.ttl, plan.subscription.cursors))
            case "wake other":
                self.wake(other)
            case "tick":
                self.hub.tick()
        return None

    def subscribe(
        self, reader: Reader, subscription: Subscription, cursor: Mapping[Topic, Version | None] | None = None
    ) -> None:
        if reader.closed is not None:
            return
        told = dict(cursor or {})
        watching = set(reader.subscriber.watched) if reader.subscriber else set()
        for topic, kind, number in subscription.cursors:
            told[topic] = self.cursor(topic, kind, number)
        for feature in Feature:
            version = told.get(feature)
            if feature in told and (feature in subscription.topics or feature in watching):
                known = version is not None and version.digest in self.snapshots
                reader.lists[feature] = dict(self.snapshots[version.digest]) if version is not None and known else None
            elif feature in subscription.topics and feature not in watching:
                reader.lists[feature] = dict(self.snapshots[self.hub.notifications.version(feature).digest])
        for topic in subscription.topics:
            reader.paths[topic] = None if subscription.ttl is None else self.clock.now + subscription.ttl
        features = [topic for topic in subscription.topics if isinstance(topic, Feature)]
        uris = [topic for topic in subscription.topics if isinstance(topic, str)]
        if reader.subscriber is not None:
            self.hub.subscribe(reader.subscriber, *features, uris=uris, told=told, ttl=subscription.ttl)
        else:
            callback = reader.callback
            assert callback is not None
            reader.subscriber = self.hub.subscribe(
                callback, *features, uris=uris, told=told, ttl=subscription.ttl, **reader.options
            )

    def cursor(self, topic: Topic, kind: str, number: int) -> Version | None:
        versions = self.versions.get(topic, [])
        if kind == "other epoch":
            return Version(number, OTHER_EPOCH)
        if kind == "none" or not versions:
            return None
        return versions[-1] if kind == "present" else versions[number % len(versions)]

    def unsubscribe(self, reader: Reader, topics: tuple[Topic, ...]) -> None:
        if reader.subscriber is None:
            return
        for topic in topics or tuple(reader.paths):
            reader.paths.pop(topic, None)
        features = [topic for topic in topics if isinstance(topic, Feature)]
        self.hub.unsubscribe(reader.subscriber, *features, uris=[topic for topic in topics if isinstance(topic, str)])

    def close(self, reader: Reader) -> None:
        if reader.subscriber is not None:
            self.hub.close(reader.subscriber, Reason.DISCONNECTED)

    def wake(self, reader: Reader) -> None:
        reader.is_busy = False
        if reader.subscriber is not None:
            self.hub.wake(reader.subscriber)

    def publish(self, most: int = 1_000_000) -> None:
        """Publish the oldest commits together, as those of one turn of the event loop."""
        while self.backlog and most:
            self.hub.delivery.enqueue(self.backlog.popleft())
            most -= 1
        self.hub.delivery.publish_queued()
