"""A state machine that drives the catalog and the hub through whatever may happen, and the validators as its judges.

Time is a number that the machine moves. What callbacks do while they are told is drawn beforehand, since nothing can
be drawn in the middle of a step. Beside the validators stand a few oracles that look inside: a copy of each list, kept
up to date with nothing but what was told; the subscriptions as they should be; and that no trace is left of anyone.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tidings import (
    BUSY,
    Catalog,
    Change,
    Feature,
    Filter,
    Hub,
    LimitReached,
    Notification,
    Operation,
    Policy,
    Priority,
    Reason,
    Subscriber,
    TidingsError,
    Topic,
    Version,
)
from tidings.cursor import Cursor
from tidings.digest import EMPTY, ListDigest
from tidings.index import WatchIndex
from tidings.journal import Journal
from tidings.mailbox import Entry, Mailbox
from tidings.news import News
from tidings.resume import resumed
from tidings.testing import PROMISES, Changed, Closed, History, PromiseBroken, Recorder, check_all, check_reliable
from tidings.testing.reading import changes_since, is_ruled_out

URIS = ("a://p", "a://p/1", "a://p/1/k", "a://q", "a://q/1", "b://p/1")
PATTERNS = ("a://*", "a://p/*", "a://**", "**/1", "a://*/1", "*://p/**", "a://p/**/k")
NAMES = ("p", "pq", "q")
NAME_FILTERS = (None, ("p",), ("p*",), ("*q", "x"))
URI_FILTERS = (None, ("a://p",), ("a://**",))
MOST_URIS = len(URIS) + len(PATTERNS)
ALIEN = "of another life"
"""The digest in the cursor of a client that comes from before a restart."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks that raise are logged, and here they do so on purpose."""
    caplog.set_level(logging.CRITICAL + 1, "tidings")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# What is drawn


@dataclass(frozen=True)
class Step:
    """Something that may be done to a catalog."""

    kind: str
    feature: Feature
    name: str
    text: str
    uri: str
    etag: str | None
    others: tuple[tuple[str, str], ...]

    def do(self, catalog: Catalog) -> None:
        items, resources = catalog.items(self.feature), catalog.resources
        key = f"a://{self.name}" if self.feature is Feature.RESOURCES else self.name
        try:
            match self.kind:
                case "add":
                    items.add(self.define(self.name, self.text))
                case "put":
                    items.add(self.define(self.name, self.text), replace=True)
                case "remove":
                    items.remove(key)
                case "update":
                    items.update(key, description=self.text)
                case "replace":
                    items.replace([self.define(name, text) for name, text in self.others])
                case "template":
                    definition = {"uriTemplate": f"a://{self.name}/{{id}}", "name": self.name, "title": self.text}
                    resources.add(definition, replace=True)
                case "updated":
                    resources.updated(self.uri, etag=self.etag)
                case "deleted":
                    resources.deleted(self.uri)
        except TidingsError:
            pass  # what can't be done is refused, and must change nothing

    def define(self, name: str, text: str) -> dict[str, Any]:
        if self.feature is Feature.RESOURCES:
            return {"uri": f"a://{name}", "name": name, "description": text}
        return {"name": name, "description": text}


@dataclass(frozen=True)
class Wish:
    """What to watch, for how long, and with which cursors."""

    topics: tuple[Topic, ...]
    ttl: float | None
    cursors: tuple[tuple[Topic, str, int], ...]


@dataclass(frozen=True)
class Plan:
    """What a reader does while it is told."""

    kind: str
    step: Step
    wish: Wish
    other: int


texts = st.sampled_from(("", "one", "two"))
topics = st.sampled_from((*Feature, *URIS))
seconds = st.sampled_from((0.1, 0.5, 1.0, 3.0))
steps = st.builds(
    Step,
    kind=st.sampled_from(("add", "put", "remove", "update", "replace", "template", "updated", "updated", "deleted")),
    feature=st.sampled_from(Feature),
    name=st.sampled_from(NAMES),
    text=texts,
    uri=st.sampled_from(URIS),
    etag=st.sampled_from((None, "1", "2")),
    others=st.lists(st.tuples(st.sampled_from(NAMES), texts), max_size=3, unique_by=lambda other: other[0]).map(tuple),
)
wishes = st.builds(
    Wish,
    topics=st.lists(st.sampled_from((*Feature, *URIS, *PATTERNS)), min_size=1, max_size=4, unique=True).map(tuple),
    ttl=st.none() | seconds,
    cursors=st.lists(
        st.tuples(topics, st.sampled_from(("none", "past", "present", "alien")), st.integers(0, 9)),
        max_size=3,
        unique_by=lambda cursor: cursor[0],
    ).map(tuple),
)
plans = st.builds(
    Plan,
    kind=st.sampled_from(
        (
            *("busy", "busy", "raise", "change", "batch", "close", "unsubscribe", "tick"),
            *("close other", "unsubscribe other", "subscribe other", "wake other"),
        )
    ),
    step=steps,
    wish=wishes,
    other=st.integers(0, 9),
)
policies = st.builds(
    Policy,
    quiet_gap=st.sampled_from((0.0, 0.0, 0.5)),
    longest_wait=st.sampled_from((0.5, 1.0)),
    max_uris=st.just(MOST_URIS),
    min_interval=st.sampled_from((0.0, 0.0, 1.0)),
    spread=st.sampled_from((0.0, 0.0, 2.0)),
    max_pending=st.sampled_from((1, 2, 4, 10_000)),
    priorities=st.lists(st.tuples(st.sampled_from((*URIS, *PATTERNS)), st.sampled_from(Priority)), max_size=2).map(
        tuple
    ),
)
filters = st.none() | st.builds(
    Filter,
    operations=st.none() | st.sets(st.sampled_from(("added", "removed", "updated")), min_size=1),
    names=st.sampled_from(NAME_FILTERS),
    uris=st.sampled_from(URI_FILTERS),
    also=st.none() | st.just(Filter(names=["p*"])),
)


# Who is told


class Owner:
    """Has the method that a subscription must not keep alive."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def deliver(self, notification: Notification) -> object:
        return self.reader.deliver(notification)


class Reader:
    """One subscriber: what it will do, and what it should know by now."""

    def __init__(self, machine: Machine, kind: str, policy: Policy, filter: Filter | None) -> None:
        self.machine = machine
        self.policy = policy
        self.filter = filter
        self.owner: Owner | None = Owner(self) if kind == "method" else None
        self.callback = partial(Reader.deliver, self) if kind == "function" else None
        self.subscriber: Subscriber | None = None
        self.plans: deque[Plan] = deque()
        self.is_busy = False
        self.muted: set[Topic] = set()
        self.is_guard_broken = False
        self.paths: dict[Topic, float | None] = {}
        """What it watches, and until when."""
        self.lists: dict[Feature, dict[str, bytes] | None] = {}
        """Each list as it was told; None where it can't know."""
        self.closed: Reason | None = None
        options: dict[str, Any] = {"label": kind, "policy": policy, "filter": filter, "on_close": self.on_close}
        if filter is not None or policy.paces or kind == "method":  # the others are as plain as can be
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
            machine.faults.append(f"a closed one was told {notification}")
        if self.is_busy:
            machine.faults.append(f"{self.subscriber} is busy, and was told {notification}")
        if isinstance(notification.topic, Feature) and self.filter is None:
            self.keep_up(notification.topic, notification)
        if any(change.operation is Operation.DELETED for change in notification.changes):
            machine.ended.append((self, notification.topic))
        return machine.act(self, self.plans.popleft()) if self.plans else None

    def keep_up(self, feature: Feature, notification: Notification) -> None:
        held = self.lists.get(feature)
        if not notification.complete:
            self.lists[feature] = dict(self.machine.snapshots[notification.version.digest])
        elif held is None:
            self.machine.faults.append(f"{self.subscriber} knew nothing, and {notification} calls itself complete")
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


# The machine


class Machine(RuleBasedStateMachine):
    clock: Clock
    catalog: Catalog
    hub: Hub
    recorder: Recorder

    @initialize(
        journal=st.sampled_from((0, 1, 2, 5, 1000)),
        age=st.sampled_from((0.5, 1000.0)),
        subresources=st.booleans(),
        follows=st.booleans(),
        is_curious=st.booleans(),
    )
    def begin(self, journal: int, age: float, subresources: bool, follows: bool, is_curious: bool) -> None:
        self.clock = Clock()
        policy = Policy(journal_changes=journal, journal_age=age, subresources=subresources)
        self.catalog = Catalog(policy, clock=self.clock)
        self.readers: list[Reader] = []
        self.faults: list[str] = []
        self.ended: list[tuple[Reader, Topic]] = []
        """Who was told in this step that a resource is gone."""
        self.backlog: deque[tuple[Change, ...]] = deque()
        """What the catalog committed and the hub has not heard of, if the hub does not follow it."""
        self.follows = follows
        self.is_curious = is_curious
        self.items: dict[Feature, dict[str, bytes]] = {feature: {} for feature in Feature}
        self.snapshots: dict[str, dict[str, bytes]] = {EMPTY: {}}
        self.versions: dict[Topic, list[Version]] = {feature: [self.catalog.version(feature)] for feature in Feature}
        self.watched: set[Topic] = set()
        self.is_late = False
        """Whether time passed without a tick."""
        self.catalog.follow(self.committed)
        self.hub = Hub(self.catalog, clock=self.clock, follow=follows, first=self.first, last=self.last)
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
        # As a source does that looks at a file for the first time.
        if self.is_curious and topic in URIS:
            self.catalog.resources.updated(str(topic), etag="1")

    def last(self, topic: Topic) -> None:
        if topic not in self.watched:
            self.faults.append(f"last({topic!r}) without a first")
        self.watched.discard(topic)

    # What a step is made of

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
                self.unsubscribe(other, plan.wish.topics)
            case "subscribe other":
                gone = {topic for ended, topic in self.ended if ended is other}
                topics = tuple(topic for topic in plan.wish.topics if topic not in gone)
                self.subscribe(other, Wish(topics, plan.wish.ttl, plan.wish.cursors))
            case "wake other":
                self.wake(other)
            case "tick":
                self.hub.tick()
        return None

    def subscribe(self, reader: Reader, wish: Wish, cursor: Mapping[Topic, Version | None] | None = None) -> None:
        if reader.closed is not None:
            return
        told = dict(cursor or {})
        watching = set(reader.subscriber.watched) if reader.subscriber else set()
        for topic, kind, number in wish.cursors:
            told[topic] = self.cursor(topic, kind, number)
        for feature in Feature:
            version = told.get(feature)
            if feature in told and (feature in wish.topics or feature in watching):
                known = version is not None and version.digest in self.snapshots
                reader.lists[feature] = dict(self.snapshots[version.digest]) if version is not None and known else None
            elif feature in wish.topics and feature not in watching:
                reader.lists[feature] = dict(self.snapshots[self.hub.news.version(feature).digest])
        for topic in wish.topics:
            reader.paths[topic] = None if wish.ttl is None else self.clock.now + wish.ttl
        features = [topic for topic in wish.topics if isinstance(topic, Feature)]
        uris = [topic for topic in wish.topics if isinstance(topic, str)]
        if reader.subscriber is not None:
            self.hub.subscribe(reader.subscriber, *features, uris=uris, told=told, ttl=wish.ttl)
        else:
            callback = reader.owner.deliver if reader.owner else reader.callback
            assert callback is not None
            reader.subscriber = self.hub.subscribe(
                callback, *features, uris=uris, told=told, ttl=wish.ttl, **reader.options
            )

    def cursor(self, topic: Topic, kind: str, number: int) -> Version | None:
        versions = self.versions.get(topic, [])
        if kind == "alien":
            return Version(number, ALIEN)
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
        while self.backlog and most:
            self.hub.publish(self.backlog.popleft())
            most -= 1

    # The rules

    @rule(step=steps)
    def change(self, step: Step) -> None:
        step.do(self.catalog)

    @rule(several=st.lists(steps, min_size=2, max_size=6))
    def change_at_once(self, several: list[Step]) -> None:
        with self.catalog.batch():
            for step in several:
                step.do(self.catalog)

    @precondition(lambda self: self.backlog)
    @rule(most=st.integers(1, 3))
    def catch_up(self, most: int) -> None:
        self.publish(most)

    @precondition(lambda self: len(self.readers) < 8)
    @rule(kind=st.sampled_from(("open", "function", "method")), policy=policies, filter=filters, wish=wishes)
    def come(self, kind: str, policy: Policy, filter: Filter | None, wish: Wish) -> None:
        reader = Reader(self, kind, policy, filter)
        self.readers.append(reader)
        self.subscribe(reader, wish)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), wish=wishes)
    def ask_for_more(self, number: int, wish: Wish) -> None:
        self.subscribe(self.reader(number), wish)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), topics=st.lists(st.sampled_from((*Feature, *URIS, *PATTERNS)), max_size=3))
    def ask_for_less(self, number: int, topics: list[Topic]) -> None:
        self.unsubscribe(self.reader(number), tuple(topics))

    @rule(number=st.integers(0, 9))
    def ask_for_too_much(self, number: int) -> None:
        before = len(self.hub)
        reader = self.reader(number) if self.readers else None
        who = reader.subscriber if reader else None
        too_many = [f"c://{each}" for each in range(MOST_URIS + 1)]
        if who is None or who.is_closed:
            ask = partial(self.hub.subscribe, lambda _: None, policy=Policy(max_uris=MOST_URIS))
        else:
            ask = partial(self.hub.subscribe, who)
        with pytest.raises(LimitReached):
            ask(uris=too_many)
        assert len(self.hub) == before

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), plan=plans)
    def plan(self, number: int, plan: Plan) -> None:
        self.reader(number).plans.append(plan)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9))
    def read_on(self, number: int) -> None:
        self.wake(self.reader(number))

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), topics=st.sets(topics, min_size=1, max_size=4))
    def mute(self, number: int, topics: set[Topic]) -> None:
        if self.reader(number).can_be_muted:
            self.reader(number).muted |= topics

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9))
    def break_guard(self, number: int) -> None:
        self.reader(number).is_guard_broken = self.reader(number).can_be_muted

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9))
    def unmute(self, number: int) -> None:
        reader = self.reader(number)
        reader.muted.clear()
        reader.is_guard_broken = False
        if not reader.is_busy:
            self.wake(reader)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        self.close(self.reader(number))

    @precondition(lambda self: self.readers)
    @rule(
        number=st.integers(0, 9),
        epoch=st.sampled_from(("here", "here", "elsewhere")),
        meanwhile=st.lists(steps, max_size=3),
    )
    def come_back(self, number: int, epoch: str, meanwhile: list[Step]) -> None:
        """It had a bookmark, lost its connection, and goes on from there: in this life of the server, or the next."""
        reader = self.reader(number)
        if reader.subscriber is None or reader.closed is not None:
            return
        known = self.hub.known(reader.subscriber)
        self.a_bookmark_is_what_its_reader_knows(reader, known)
        cursor = Cursor("here", known, self.hub.news.revision)
        assert Cursor.parse(cursor.as_json()) == cursor
        held = {uri: known.get(uri, self.hub.news.version(uri)) for uri in URIS}
        paths = tuple(reader.paths)
        self.close(reader)
        for step in meanwhile:
            step.do(self.catalog)
        told, refetch = resumed(cursor.as_json(), epoch, self.hub, paths)
        self.nothing_is_missed(paths, held, told, refetch if epoch == "here" else URIS)
        successor = Reader(self, "open", reader.policy, reader.filter)
        self.readers.append(successor)
        self.subscribe(successor, Wish(paths, None, ()), told)

    def nothing_is_missed(
        self,
        paths: tuple[Topic, ...],
        held: Mapping[str, Version | None],
        told: Mapping[Topic, Version | None],
        refetch: tuple[str, ...],
    ) -> None:
        """Of all that it covers, by the index, and that is another than it held, it is told or has to refetch it."""
        index, anyone = WatchIndex(None, self.hub.policy.subresources), Subscriber(self.hub, print, self.hub.policy)
        for path in paths:
            index.add(anyone, path, index.compiled([path] if isinstance(path, str) else []))
        for uri, version in held.items():
            differs = version is None or version.digest != self.hub.news.version(uri).digest
            if differs and not refetch and index.is_watching(anyone, index.paths(uri)):
                assert uri in told, f"{uri} changed, and it is not told"
                assert told[uri] is None or version is None or told[uri].digest == version.digest  # type: ignore[union-attr]

    def a_bookmark_is_what_its_reader_knows(self, reader: Reader, known: Mapping[Topic, Version | None]) -> None:
        assert reader.subscriber is not None
        assert known.keys() >= {path for path in reader.subscriber.watched if path not in PATTERNS}
        for feature in reader.subscriber.features:
            version, held = known[feature], reader.lists.get(feature)
            if reader.filter is None:
                assert (version is None or version.digest not in self.snapshots) == (held is None)
                assert held is None or version is None or digest_of(held) == version.digest
            elif version != (told := self.hub.told(reader.subscriber, feature)):
                assert version is not None
                assert told is not None
                changes = [each for each in self.recorder.history if isinstance(each, Changed)]
                since = changes_since([each for each in changes if each.topic is feature], told)
                assert told.digest == version.digest or since is None or is_ruled_out(since, reader.filter)

    @precondition(lambda self: any(reader.owner for reader in self.readers))
    @rule()
    def lose(self) -> None:
        reader = next(reader for reader in self.readers if reader.owner)
        reader.owner = None
        assert reader.subscriber is not None
        assert reader.subscriber not in self.hub.subscribers("tools")
        assert reader.closed is not None

    @precondition(lambda self: any(reader.closed for reader in self.readers))
    @rule()
    def make_room(self) -> None:
        self.readers = [reader for reader in self.readers if reader.closed is None]

    @rule(seconds=seconds, ticks=st.booleans())
    def wait(self, seconds: float, ticks: bool) -> None:
        self.clock.now += seconds
        self.is_late = not ticks
        if ticks:
            self.hub.tick()

    def reader(self, number: int) -> Reader:
        return self.readers[number % len(self.readers)]

    # What always holds

    @invariant()
    def all_is_well(self) -> None:
        self.nothing_odd_was_seen()
        self.the_subscriptions_are_those_asked_for()
        self.nobody_is_kept_who_left()
        self.nothing_is_overdue()
        self.who_keeps_up_is_told_at_once()

    def nothing_odd_was_seen(self) -> None:
        assert not self.faults, self.faults

    def the_subscriptions_are_those_asked_for(self) -> None:
        for reader, topic in self.ended:
            reader.paths.pop(topic, None)
        self.ended.clear()
        now = self.clock.now
        for reader in self.readers:
            if reader.subscriber is None:
                continue
            assert reader.subscriber.is_closed == (reader.closed is not None)
            watched = set(reader.subscriber.watched)
            lasting = {path for path, end in reader.paths.items() if end is None or end > now}
            assert lasting <= watched <= reader.paths.keys()
            assert self.is_late or watched == lasting
            for path in reader.paths.keys() - watched:
                del reader.paths[path]
        assert self.watched == set().union(*(reader.paths for reader in self.readers))
        assert self.watched == {topic for topic, _ in self.hub.subscriptions()}

    def nobody_is_kept_who_left(self) -> None:
        assert not any(subscriber.is_closed for subscriber in self.hub._subscribers)
        assert not any(subscriber.is_closed for _, watchers in self.hub.subscriptions() for subscriber in watchers)
        assert len(self.hub) == sum(reader.closed is None for reader in self.readers)
        assert len(self.hub._agenda) <= len(self.hub)

    def nothing_is_overdue(self) -> None:
        due = self.hub.next_due()
        assert due is None or due > self.clock.now or self.is_late

    def who_keeps_up_is_told_at_once(self) -> None:
        """However slow, silent or broken the others are."""
        self.recorder.look()
        if self.backlog:
            return
        slow = [reader for reader in self.readers if reader.is_busy or reader.muted or reader.is_guard_broken]
        excused = {*slow, *(reader for reader in self.readers if reader.policy.paces)}
        others = [
            Closed(self.recorder.name(reader.subscriber))
            for reader in excused
            if reader.subscriber is not None and reader.closed is None
        ]
        check_reliable(History([*self.recorder.history, *others]))

    def teardown(self) -> None:
        if not hasattr(self, "hub"):
            return
        self.nothing_odd_was_seen()
        for reader in self.readers:
            reader.plans.clear()
            reader.muted.clear()
            reader.is_guard_broken = False
        self.publish()
        for reader in self.readers:
            self.wake(reader)
        self.hub.tick()
        for _ in range(100):
            if (due := self.hub.next_due()) is None:
                break
            self.clock.now = due
            self.hub.tick()
        assert self.hub.next_due() is None
        self.nothing_odd_was_seen()
        self.recorder.look()
        check_all(self.recorder.history)
        for reader in self.readers:
            self.close(reader)
        assert_nothing_is_left(self.hub)
        assert not self.watched


def assert_nothing_is_left(hub: Hub) -> None:
    assert len(hub) == 0
    assert hub.subscriptions() == []
    assert not hub._subscribers
    assert not hub._callbacks
    assert not hub._index.watchers
    assert not hub._callbacks._lost
    assert not hub._outbox
    assert hub._index.patterns._root.is_empty()
    assert len(hub._index.patterns) == 0
    assert hub._agenda._heap == []
    assert hub.next_due() is None


def test_the_core_keeps_its_promises() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=150, stateful_step_count=40))


class Passerby:
    """Has a method that is subscribed, and goes without a word."""

    def deliver(self, _: Notification) -> None: ...


def test_after_100_000_random_openings_and_closings_nothing_is_left() -> None:
    chance = random.Random(2)
    clock = Clock()
    catalog = Catalog(clock=clock)
    watched: set[Topic] = set()
    hub = Hub(catalog, clock=clock, first=watched.add, last=watched.remove)
    options: list[dict[str, Any]] = [
        {},
        {"policy": Policy(quiet_gap=0.5, min_interval=1.0)},
        {"filter": Filter(["added"])},
        {"policy": Policy(max_pending=4), "is_muted": lambda topic: topic == "a://p"},
    ]
    wanted = [
        (chance.sample(tuple(Feature), chance.randrange(1, 3)), chance.sample((*URIS, *PATTERNS), chance.randrange(3)))
        for _ in range(1000)
    ]
    passersby: deque[Passerby] = deque(maxlen=20)
    guests: deque[Subscriber] = deque()
    for cycle in range(100_000):
        features, uris = chance.choice(wanted)
        ttl = None if cycle % 3 else 1.0
        if cycle % 5 == 0:
            passersby.append(Passerby())  # whoever came twenty before is lost, and its id is free
            hub.subscribe(passersby[-1].deliver, *features, uris=uris, ttl=ttl, **options[cycle % 4])
        else:
            guest = hub.open(lambda _: BUSY, **options[cycle % 4])
            guest.subscribe(*features, uris=uris, ttl=ttl)
            guests.append(guest)
        if len(guests) > 20:
            guest = guests.popleft()
            if cycle % 7 == 0:
                guest.unsubscribe()
            guest.close(Reason.DISCONNECTED)
        if cycle % 100 == 0:
            catalog.tools.add({"name": "p", "description": str(cycle)}, replace=True)
            catalog.resources.updated(chance.choice(URIS))
            clock.now += 0.3
            hub.tick()
    assert len(hub) <= 40
    assert len(hub._agenda._heap) <= 2 * len(hub)
    passersby.clear()
    for guest in guests:
        guest.close()
    assert_nothing_is_left(hub)
    assert not watched


# Each judge is shown a core that breaks its promise


def play() -> History:
    """One short run in which each rule of the core is needed once."""
    clock = Clock()
    catalog = Catalog(clock=clock)
    hub = Hub(catalog, clock=clock)
    recorder = Recorder(hub)
    muted: set[Topic] = set()

    def meddle(notification: Notification) -> None:
        if any(change.key == "first" for change in notification.changes):
            catalog.resources.updated("a://p")
            catalog.resources.updated("a://p")

    meddler = hub.subscribe(meddle, "tools", label="meddler")
    picky = hub.open(lambda _: None, label="picky", filter=Filter(["added"], ["p*"]))
    silent = hub.open(lambda _: None, label="silent", is_muted=muted.__contains__)
    slow = hub.open(lambda _: BUSY, label="slow")
    paced = hub.open(lambda _: None, label="paced", policy=Policy(quiet_gap=1.0, min_interval=2.0))
    for subscriber in (picky, silent, slow, paced):
        subscriber.subscribe("tools", uris=["a://p", "b://**"])
    muted.add(Feature.TOOLS)
    for name in ("first", "p1", "q1", "p2"):
        catalog.tools.add({"name": name})
    recorder.look()
    catalog.tools.remove("p2")
    for etag in ("1", "2", "1", "2"):
        catalog.resources.updated("b://p/1", etag=etag)
        recorder.look()
        clock.now += 0.4
        hub.tick()
    catalog.resources.updated("a://p")
    paced.unsubscribe(uris=["a://p"])
    silent.unsubscribe(uris=["b://**"])
    catalog.resources.updated("a://p")
    catalog.resources.updated("b://p/1", etag="1")
    catalog.resources.updated("b://p/1", etag="2")
    muted.clear()
    hub.wake(silent)
    for _ in range(3):
        hub.wake(slow)
    for etag in ("1", "2", "1"):  # it is told the first, and the others while it is busy
        catalog.resources.updated("b://p/1", etag=etag)
    known = hub.known(slow)
    catalog.tools.remove("p1")
    catalog.tools.update("q1", title="Q")
    hub.subscribe(lambda _: None, "tools", uris=["b://**"], told=known, label="back")
    hub.subscribe(lambda _: None, "tools", told={Feature.TOOLS: Version(9, ALIEN)}, label="lost")
    for _ in range(10):
        for subscriber in (meddler, picky, silent, slow, paced):
            hub.wake(subscriber)
        clock.now += 1.0
        hub.tick()
    recorder.look()
    return recorder.history


def filter_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Filter, "passes", lambda self, change: True)


def ignore_mutes(patch: pytest.MonkeyPatch) -> None:
    take = Mailbox.take
    patch.setattr(Mailbox, "take", lambda self, now, is_muted: take(self, now, None))


def keep_what_is_no_longer_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hub, "_forget_unwatched", lambda self, subscriber: None)


def tell_everybody(patch: pytest.MonkeyPatch) -> None:
    def everybody(self: WatchIndex, paths: list[Topic]) -> dict[Subscriber, None]:
        return {subscriber: None for watchers in self.watchers.values() for subscriber in watchers}

    patch.setattr(WatchIndex, "watching", everybody)


def tell_the_newest_commit_first(patch: pytest.MonkeyPatch) -> None:
    class Stack(deque[Any]):
        def popleft(self) -> Any:
            return self.pop()

    begin = Catalog.__init__

    def begin_with_a_stack(self: Catalog, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._outbox = Stack()

    patch.setattr(Catalog, "__init__", begin_with_a_stack)


def not_remember_what_was_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "is_true_still", property(lambda self: False))


def forget_what_is_taken(patch: pytest.MonkeyPatch) -> None:
    take = Mailbox.take

    def take_and_forget(self: Mailbox, now: float, is_muted: Any) -> Any:
        taken = take(self, now, is_muted)
        if taken is not None:
            del self.entries[taken[0]]
        return None

    patch.setattr(Mailbox, "take", take_and_forget)


def never_wake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hub, "wake", lambda self, subscriber: None)


def never_arm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hub, "_arm", lambda self, subscriber, when: None)
    patch.setattr(Hub, "wake", lambda self, subscriber: None)


def move_told_of_the_muted(patch: pytest.MonkeyPatch) -> None:
    note = Mailbox.note

    def note_and_move(self: Mailbox, notification: Notification, *args: Any) -> float:
        due = note(self, notification, *args)
        if due < float("inf"):
            self.entries[notification.topic].told = notification.version
        return due

    patch.setattr(Mailbox, "note", note_and_move)


def keep_a_list(patch: pytest.MonkeyPatch) -> None:
    note = Mailbox.note

    def note_each(self: Mailbox, notification: Notification, *args: Any) -> float:
        due = note(self, notification, *args)
        version = notification.version
        self.entries[f"{notification.topic}#{version.revision}"] = Entry(version, version.revision, Version(0, ""))
        return due

    patch.setattr(Mailbox, "note", note_each)


def resume_from_the_last_change_only(patch: pytest.MonkeyPatch) -> None:
    since = Journal.since

    def only_the_last(self: Journal, revision: int, topic: Topic | None = None) -> list[Change] | None:
        found = since(self, revision, topic)
        return found[-1:] if found else found

    patch.setattr(Journal, "since", only_the_last)
    patch.setattr(News, "since", lambda self, topic, version: self.missed(topic, version.revision))


def believe_any_cursor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(News, "since", lambda self, topic, version: self.missed(topic, version.revision))


def test_a_sound_core_passes() -> None:
    check_all(play())


@pytest.mark.parametrize(
    ("promise", "harm"),
    [
        ("Filtered", filter_nothing),
        ("Filtered", ignore_mutes),
        ("Filtered", keep_what_is_no_longer_watched),
        ("Filtered", tell_everybody),
        ("Ordered", tell_the_newest_commit_first),
        ("Unique", not_remember_what_was_told),
        ("Reliable", forget_what_is_taken),
        ("Reliable", never_wake),
        ("Reliable", never_arm),
        ("Reliable", move_told_of_the_muted),
        ("Resumable", resume_from_the_last_change_only),
        ("Resumable", believe_any_cursor),
        ("Bounded", keep_a_list),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_core_that_breaks_a_promise_is_caught(
    monkeypatch: pytest.MonkeyPatch, promise: str, harm: Callable[[pytest.MonkeyPatch], None]
) -> None:
    harm(monkeypatch)
    with pytest.raises(PromiseBroken) as caught:
        PROMISES[promise](play())
    assert caught.value.promise == promise
    assert caught.value.events


def test_the_machine_finds_a_broken_core_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_what_is_taken(monkeypatch)
    hunt = settings(max_examples=200, stateful_step_count=40, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises(AssertionError):  # a promise is broken, or a bookmark says what its reader never heard
        run_state_machine_as_test(Machine, settings=hunt)
