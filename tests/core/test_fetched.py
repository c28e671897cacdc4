"""A client that was told A and may have fetched B is notified when the content is A again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from tests.support.promises.checks import check_all
from tests.support.promises.history import PromiseBroken
from tests.support.promises.machine import Machine
from tests.support.promises.recorder import Recorder
from tests.support.promises.strategies import URIS, topics
from tests.support.readers import Clock
from tests.support.stress import sized
from tidings import BUSY, Catalog, Feature, Filter, Hub, Notification, Policy, Topic, Version
from tidings.core import fetched as fetched_module
from tidings.core.fetched import FetchedVersions
from tidings.core.observer import Observer

pytestmark = pytest.mark.usefixtures("no_logs")

TOOLS, URI = Feature.TOOLS, "a://p"


class Place:
    """A hub, and a subscriber that is not notified immediately."""

    def __init__(self, kind: str = "slow", filter: Filter | None = None) -> None:
        self.clock = Clock()
        self.catalog = Catalog(clock=self.clock)
        self.catalog.tools.add({"name": "kept"})
        self.catalog.resources.updated(URI, etag="a")
        self.hub = Hub(self.catalog, clock=self.clock)
        self.recorder = Recorder(self.hub)
        self.shown = self.hub.notifications.fetched
        self.received: list[Notification] = []
        self.muted: set[Topic] = set()
        policies = {"quiet gap": Policy(quiet_gap=1.0, longest_wait=10.0), "rate": Policy(min_interval=1.0)}
        is_muted = self.muted.__contains__ if kind == "muted" else None
        self.reader = self.hub.open(
            self.deliver, settings=policies.get(kind, Policy()).delivery, filter=filter, is_muted=is_muted
        )
        self.is_busy = False
        self.reader.subscribe("tools", uris=[URI])
        if kind == "rate":
            self.flip(1)
            self.received.clear()
            self.flip(0)
        elif kind == "muted":
            self.muted |= {TOOLS, URI}
        elif kind == "slow":
            self.reader.pause()

    def deliver(self, notification: Notification) -> object:
        self.received.append(notification)
        return BUSY if self.is_busy else None

    def flip(self, state: int) -> None:
        """Make both topics B (1) or A (0)."""
        self.catalog.resources.updated(URI, etag="ab"[state])
        self.catalog.tools.replace([{"name": "kept"}, *([{"name": "new"}] if state else [])])

    def fetch(self, *, only: Topic | None = None) -> None:
        for topic in (TOOLS, URI) if only is None else (only,):
            self.shown.record(topic, self.catalog.version(topic))

    def settle(self) -> list[Topic]:
        """Deliver all that is due. Return the topics of the notifications since the last call."""
        self.muted.clear()
        self.hub.wake(self.reader)
        while (due := self.hub.next_due()) is not None:
            self.clock.now = due
            self.hub.tick()
        self.recorder.look()
        check_all(self.recorder.history)
        received, self.received = self.received, []
        return [notification.topic for notification in received]


KINDS = ["slow", "quiet gap", "muted"]


@pytest.mark.parametrize("kind", KINDS)
def test_fetched_intermediate_version_causes_a_notification(kind: str) -> None:
    place = Place(kind)
    place.flip(1)
    place.fetch()
    place.flip(0)

    assert place.settle() == [TOOLS, URI]
    assert place.settle() == [], "once"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["never", "before", "after", "before and after"])
def test_unfetched_intermediate_version_causes_none(kind: str, when: str) -> None:
    place = Place(kind)
    if "before" in when:
        place.fetch()
    place.flip(1)
    place.flip(0)
    if "after" in when:
        place.fetch()

    assert place.settle() == []


def test_rate_limited_topic_that_was_fetched_is_told() -> None:
    place = Place("rate")  # told B, and now A is pending
    place.fetch()
    place.flip(1)

    assert place.settle() == [TOOLS, URI]


def test_fetch_that_began_after_the_change_was_undone_does_not_count() -> None:
    place = Place()
    place.flip(1)
    place.flip(0)
    place.shown.begin_fetch(TOOLS, place.catalog.tools.version.revision)

    assert place.settle() == []


def test_list_must_be_refetched_and_content_has_its_last_change() -> None:
    place = Place()
    place.flip(1)
    place.fetch()
    place.flip(0)
    place.hub.wake(place.reader)

    content, tools = sorted(place.received, key=lambda each: isinstance(each.topic, Feature))
    assert (tools.complete, tools.changes, tools.version) == (False, (), place.catalog.tools.version)
    assert [change.version for change in content.changes] == [place.catalog.version(URI)]


def test_only_the_fetched_topic_is_notified() -> None:
    place = Place()
    place.flip(1)
    place.fetch(only=URI)
    place.flip(0)

    assert place.settle() == [URI]


def test_unfinished_fetch_may_return_any_version() -> None:
    place = Place()
    place.shown.begin_fetch(TOOLS, place.catalog.tools.version.revision)
    place.flip(1)
    place.flip(0)

    assert place.settle() == [TOOLS]
    place.shown.end_fetch(TOOLS, 1)
    place.reader.pause()
    place.flip(1)
    place.flip(0)

    assert place.settle() == [], "the fetch was never finished"


def test_fetch_of_an_unknown_version_counts() -> None:
    place = Place()
    place.flip(1)
    place.flip(0)
    place.shown.record(TOOLS, Version(place.catalog.tools.version.revision, ""))

    assert place.settle() == [TOOLS]


def test_version_that_a_client_names_is_believed() -> None:
    place = Place()
    known: dict[Topic, Version | None] = {TOOLS: place.catalog.tools.version}
    place.flip(1)
    place.fetch()
    place.flip(0)
    received: list[Notification] = []
    place.hub.subscribe(received.append, "tools", told=known)
    place.hub.subscribe(place.reader, told=known)

    assert received == []
    assert place.settle() == [URI], "also for a pending topic"


@pytest.mark.parametrize("kind", KINDS)
def test_filtered_change_that_was_undone_causes_a_refetch(kind: str) -> None:
    """A tool that passes the filter was added and removed; the tool that remains does not pass."""
    place = Place(kind, filter=Filter(names=["new"]))
    place.catalog.tools.add({"name": "new"})
    place.fetch()
    place.catalog.tools.add({"name": "other"})
    place.catalog.tools.remove("new")

    assert place.settle() == [TOOLS]


@pytest.mark.parametrize("kind", KINDS)
def test_changes_outside_the_filter_cause_no_refetch(kind: str) -> None:
    place = Place(kind, filter=Filter(names=["nothing"]))
    place.flip(1)
    place.fetch(only=TOOLS)
    place.flip(0)

    assert place.settle() == []


def test_subscriber_ahead_of_the_hub_is_notified() -> None:
    catalog = Catalog()
    hub = Hub(catalog)
    catalog.publisher = None
    commits: list[Any] = []
    catalog.follow(commits.append)
    received: list[Notification] = []
    catalog.tools.add({"name": "a"})
    cursor = catalog.tools.version
    catalog.tools.add({"name": "b"})
    catalog.tools.remove("b")
    hub.subscribe(received.append, "tools", told={TOOLS: cursor})
    hub.notifications.fetched.record(TOOLS, Version(2, "b"))
    for changes in commits:
        hub.delivery.publish(changes)

    assert [each.version.revision for each in received] == [3]


def test_fetched_contents_are_bounded_and_unknown_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_module, "_MAX_CONTENTS", 3)
    shown = FetchedVersions(Catalog().lock, {}, Observer())
    for revision in range(1, 8):
        shown.record(f"a://{revision}", Version(revision, str(revision)))
        shown.record(TOOLS, Version(revision, str(revision)))

    assert len(shown._contents) == 3
    assert shown.may_differ("a://1", Version(9, "x"), since=0)
    assert shown.may_differ("a://1", Version(9, "1"), since=3)
    assert not shown.may_differ("a://1", Version(9, "x"), since=4), "all dropped contents are older"
    assert not shown.may_differ("a://7", Version(9, "7"), since=4)
    assert shown.may_differ("a://7", Version(9, "x"), since=4)


def test_dropped_content_that_is_fetched_again_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_module, "_MAX_CONTENTS", 1)
    shown = FetchedVersions(Catalog().lock, {}, Observer())
    shown.record(URI, Version(5, "b"))
    shown.record("a://other", Version(6, "x"))
    shown.record(URI, Version(9, "a"))
    assert shown.may_differ(URI, Version(9, "a"), since=3)
    assert not shown.may_differ(URI, Version(9, "a"), since=6)


# The state machine


class FetchingMachine(Machine):
    """The same with fetches, fast and slow."""

    @rule(topic=topics)
    def fetch(self, topic: Topic) -> None:
        self.hub.notifications.fetched.record(topic, self.catalog.version(topic))

    @precondition(lambda self: self.watched & {*Feature, *URIS})
    @rule(
        choice=st.integers(0, 9),
        is_slow=st.booleans(),
        fetches=st.sampled_from(("fast", "fast, and after", "slowly", "never")),
    )
    def change_and_undo(self, choice: int, is_slow: bool, fetches: str) -> None:
        """Change a topic and change it back. All its readers may be busy meanwhile."""
        watched: list[Topic] = [topic for topic in (*Feature, *URIS) if topic in self.watched]
        topic = watched[choice % len(watched)]
        for reader in self.readers if is_slow else ():
            if reader.subscriber is not None and reader.closed is None:
                reader.is_busy = True
                reader.subscriber.pause()
        before = list(self.catalog.items(topic)) if isinstance(topic, Feature) else []
        self.put(topic, before, "1")
        if fetches == "slowly":
            self.begin_fetch(topic)
        self.put(topic, [*before, {"name": "passing", "uri": "a://passing"}], "2")
        if fetches.startswith("fast"):
            self.fetch(topic)
        self.put(topic, before, "1")
        if fetches.endswith("after"):
            self.fetch(topic)

    def put(self, topic: Topic, items: list[dict[str, Any]], etag: str) -> None:
        if isinstance(topic, Feature):
            self.catalog.items(topic).replace(items)
        else:
            self.catalog.resources.updated(topic, etag=etag)

    @rule(topic=topics)
    def begin_fetch(self, topic: Topic) -> None:
        before = self.catalog.version(topic)
        self.fetching = [*self.open_fetches, (topic, before)]
        self.hub.notifications.fetched.begin_fetch(topic, before.revision)

    @precondition(lambda self: self.open_fetches)
    @rule(is_answered=st.booleans())
    def end_fetch_of(self, is_answered: bool) -> None:
        topic, before = self.fetching.pop(0)
        after = self.catalog.version(topic)
        if is_answered:
            self.hub.notifications.fetched.record(topic, after if after == before else Version(after.revision, ""))
        self.hub.notifications.fetched.end_fetch(topic, before.revision)

    @property
    def open_fetches(self) -> list[tuple[Topic, Version]]:
        fetching: list[tuple[Topic, Version]] = getattr(self, "fetching", [])
        return fetching


@pytest.mark.stress
def test_core_keeps_its_promises_with_fetches() -> None:
    run_state_machine_as_test(FetchingMachine, settings=settings(max_examples=sized(40, 1_000), stateful_step_count=40))


def ignore_fetches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchedVersions, "may_differ", lambda self, topic, now, since: False)


def assume_fetches_everywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchedVersions, "may_differ", lambda self, topic, now, since: True)


def ignore_unfinished_fetches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchedVersions, "begin_fetch", lambda self, topic, revision: None)
    patch.setattr(FetchedVersions, "end_fetch", lambda self, topic, revision: None)


def keep_only_the_last_fetch(patch: pytest.MonkeyPatch) -> None:
    record = FetchedVersions.record

    def record_alone(self: FetchedVersions, topic: Topic, version: Version) -> None:
        self._lists.pop(topic, None)
        self._contents.pop(topic, None)
        record(self, topic, version)

    patch.setattr(FetchedVersions, "record", record_alone)


def play() -> None:
    """Run a short scenario that needs each part of the rule once, and check the promises."""
    place = Place()
    place.hub.wake(place.reader)
    place.reader.subscribe("prompts")
    place.catalog.prompts.add({"name": "told"})
    place.reader.pause()
    place.shown.begin_fetch(URI, place.catalog.version(URI).revision)
    place.flip(1)
    place.fetch(only=TOOLS)
    place.catalog.prompts.add({"name": "passing"})
    place.catalog.prompts.remove("passing")
    place.flip(0)
    place.fetch(only=TOOLS)
    place.settle()
    place.shown.record(URI, Version(place.catalog.version(URI).revision, ""))
    place.settle()


def test_correct_core_passes() -> None:
    play()


@pytest.mark.parametrize(
    ("promise", "defect"),
    [
        ("Reliable", ignore_fetches),
        ("Reliable", ignore_unfinished_fetches),
        ("Reliable", keep_only_the_last_fetch),
        ("Unique", assume_fetches_everywhere),
    ],
)
def test_core_that_ignores_fetches_is_detected(
    monkeypatch: pytest.MonkeyPatch, promise: str, defect: Callable[[pytest.MonkeyPatch], None]
) -> None:
    defect(monkeypatch)
    with pytest.raises(PromiseBroken, match=promise):
        play()


def test_state_machine_finds_a_core_that_ignores_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_fetches(monkeypatch)
    hunt = settings(max_examples=300, stateful_step_count=40, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises(PromiseBroken):
        run_state_machine_as_test(FetchingMachine, settings=hunt)
