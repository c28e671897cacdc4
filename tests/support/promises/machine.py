"""A state machine that drives a catalog and a hub through random steps, checked by the promise checkers.

Further checks look inside. The machine keeps a copy of each list from the notifications alone, and the expected
subscriptions. At the end, the hub must keep nothing of a closed subscriber.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.support.promises.checks import check_all, check_reliable
from tests.support.promises.history import Changed, Closed, History
from tests.support.promises.machine_base import MachineBase, Reader, digest_of
from tests.support.promises.state import changes_since, is_excluded
from tests.support.promises.strategies import (
    MAX_URIS,
    PATTERNS,
    URIS,
    Plan,
    Step,
    Subscription,
    filters,
    plans,
    policies,
    seconds,
    steps,
    subscriptions,
    topics,
)
from tidings import Feature, Filter, Hub, LimitReached, Policy, Topic, Version
from tidings.core.catalog import Catalog
from tidings.core.cursor import Cursor
from tidings.core.index import WatchIndex
from tidings.core.resume import resume


class Machine(MachineBase):
    """The rules and the invariants."""

    # Rules

    @rule(step=steps)
    def change(self, step: Step) -> None:
        step.do(self.catalog)

    @rule(several=st.lists(steps, min_size=2, max_size=6))
    def change_in_batch(self, several: list[Step]) -> None:
        with self.catalog.batch():
            for step in several:
                step.do(self.catalog)

    @precondition(lambda self: self.backlog)
    @rule(most=st.integers(1, 3))
    def publish_backlog(self, most: int) -> None:
        self.publish(most)

    @precondition(lambda self: len(self.readers) < 8)
    @rule(
        kind=st.sampled_from(("open", "function", "guarded")),
        policy=policies,
        filter=filters,
        subscription=subscriptions,
    )
    def open_reader(self, kind: str, policy: Policy, filter: Filter | None, subscription: Subscription) -> None:
        reader = Reader(self, kind, policy, filter)
        self.readers.append(reader)
        self.subscribe(reader, subscription)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), subscription=subscriptions)
    def subscribe_more(self, number: int, subscription: Subscription) -> None:
        self.subscribe(self.reader(number), subscription)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), topics=st.lists(st.sampled_from((*Feature, *URIS, *PATTERNS)), max_size=3))
    def unsubscribe_some(self, number: int, topics: list[Topic]) -> None:
        self.unsubscribe(self.reader(number), tuple(topics))

    @rule(number=st.integers(0, 9))
    def exceed_uri_limit(self, number: int) -> None:
        before = len(self.hub)
        reader = self.reader(number) if self.readers else None
        subscriber = reader.subscriber if reader else None
        too_many = [f"c://{each}" for each in range(MAX_URIS + 1)]
        if subscriber is None or subscriber.is_closed:
            subscribe = partial(self.hub.subscribe, lambda _: None)
        else:
            subscribe = partial(self.hub.subscribe, subscriber)
        with pytest.raises(LimitReached):
            subscribe(uris=too_many)
        assert len(self.hub) == before

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9), plan=plans)
    def plan(self, number: int, plan: Plan) -> None:
        self.reader(number).plans.append(plan)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 9))
    def wake_reader(self, number: int) -> None:
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
    def close_reader(self, number: int) -> None:
        self.close(self.reader(number))

    @precondition(lambda self: self.readers)
    @rule(
        number=st.integers(0, 9),
        epoch=st.sampled_from(("here", "here", "elsewhere")),
        meanwhile=st.lists(steps, max_size=3),
    )
    def reconnect(self, number: int, epoch: str, meanwhile: list[Step]) -> None:
        """A reader loses its connection and resumes from a cursor, in the same epoch or in another."""
        reader = self.reader(number)
        if reader.subscriber is None or reader.closed is not None:
            return
        known = self.hub.known_versions(reader.subscriber)
        self.check_known_versions(reader, known)
        cursor = Cursor("here", known, self.hub.notifications.revision)
        assert Cursor.parse(cursor.as_json()) == cursor
        held = {uri: known.get(uri, self.hub.notifications.version(uri)) for uri in URIS}
        paths = tuple(reader.paths)
        self.close(reader)
        for step in meanwhile:
            step.do(self.catalog)
        told, refetch = resume(cursor.as_json(), epoch, self.hub, paths)
        self.check_nothing_is_missed(paths, held, told, refetch if epoch == "here" else URIS)
        successor = Reader(self, "open", reader.policy, reader.filter)
        self.readers.append(successor)
        self.subscribe(successor, Subscription(paths, None, ()), told)

    def check_nothing_is_missed(
        self,
        paths: tuple[Topic, ...],
        held: Mapping[str, Version | None],
        told: Mapping[Topic, Version | None],
        refetch: tuple[str, ...],
    ) -> None:
        """Check that each watched topic that changed is told, or must be refetched."""
        index, subscriber = WatchIndex(None, self.hub.policy.subresources), Hub(Catalog()).open(print)
        for path in paths:
            index.add(subscriber, path)
        for uri, version in held.items():
            differs = version is None or version.digest != self.hub.notifications.version(uri).digest
            if differs and not refetch and index.is_watching(subscriber, index.keys(uri)):
                assert uri in told, f"{uri} changed, and it is not told"
                assert told[uri] is None or version is None or told[uri].digest == version.digest  # type: ignore[union-attr]

    def check_known_versions(self, reader: Reader, known: Mapping[Topic, Version | None]) -> None:
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
                assert told.digest == version.digest or since is None or is_excluded(since, reader.filter)

    @precondition(lambda self: any(reader.closed for reader in self.readers))
    @rule()
    def forget_closed_readers(self) -> None:
        self.readers = [reader for reader in self.readers if reader.closed is None]

    @rule(seconds=seconds, ticks=st.booleans())
    def wait(self, seconds: float, ticks: bool) -> None:
        self.clock.now += seconds
        self.is_late = not ticks
        if ticks:
            self.hub.tick()

    def reader(self, number: int) -> Reader:
        return self.readers[number % len(self.readers)]

    # Invariants

    @invariant()
    def check_state(self) -> None:
        self.check_no_faults()
        self.check_subscriptions()
        self.check_closed_are_removed()
        self.check_nothing_is_overdue()
        self.check_ready_readers_are_notified()

    def check_no_faults(self) -> None:
        assert not self.faults, self.faults

    def check_subscriptions(self) -> None:
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

    def check_closed_are_removed(self) -> None:
        subscribed = [subscriber for _, subscribers in self.hub.subscriptions() for subscriber in subscribers]
        assert not any(subscriber.is_closed for subscriber in [*self.hub, *subscribed])
        assert len(self.hub) == sum(reader.closed is None for reader in self.readers)

    def check_nothing_is_overdue(self) -> None:
        due = self.hub.next_due()
        assert due is None or due > self.clock.now or self.is_late

    def check_ready_readers_are_notified(self) -> None:
        """Check that slow, muted or failing readers delay no notification of the others."""
        self.recorder.look()
        if self.backlog:
            return
        slow = [reader for reader in self.readers if reader.is_busy or reader.muted or reader.is_guard_broken]
        excused = {*slow, *(reader for reader in self.readers if reader.policy.delivery.has_delays)}
        others = [
            Closed(self.recorder.name(reader.subscriber))
            for reader in excused
            if reader.subscriber is not None and reader.closed is None
        ]
        check_reliable(History([*self.recorder.history, *others]))

    def teardown(self) -> None:
        if not hasattr(self, "hub"):
            return
        self.check_no_faults()
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
        self.check_no_faults()
        self.recorder.look()
        check_all(self.recorder.history)
        for reader in self.readers:
            self.close(reader)
        assert_nothing_is_left(self.hub)
        assert not self.watched


def assert_nothing_is_left(hub: Hub) -> None:
    assert len(hub) == 0
    assert hub.subscriptions() == []
    assert not hub._callbacks
    assert not hub.delivery._queue
    assert not hub.index.patterns.matches
    assert hub.next_due() is None
