"""What was shown counts: who was told A and may have looked at B is told when A is there again, and nobody else is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from tests.support.promises.draws import URIS, topics
from tests.support.promises.machine import Machine
from tests.support.readers import Clock
from tidings import BUSY, Catalog, Feature, Filter, Hub, Notification, Policy, Topic, Version
from tidings.core import fetched as shown_module
from tidings.core.fetched import FetchedVersions
from tidings.testing import (
    Changed,
    Event,
    History,
    PromiseBroken,
    Recorder,
    Subscribed,
    Told,
    check_all,
    check_reliable,
    check_resumable,
    check_unique,
)
from tidings.testing import Fetched as ShownEvent

TOOLS, URI = Feature.TOOLS, "a://p"
A, B, A_AGAIN = Version(1, "a"), Version(2, "b"), Version(3, "a")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Callbacks that raise are logged, and here they do so on purpose."""
    caplog.set_level(logging.CRITICAL + 1, "tidings")


class Place:
    """A hub, a subscriber that is not told at once, and what it was told."""

    def __init__(self, kind: str = "slow", filter: Filter | None = None) -> None:
        self.clock = Clock()
        self.catalog = Catalog(clock=self.clock)
        self.catalog.tools.add({"name": "kept"})
        self.catalog.resources.updated(URI, etag="a")
        self.hub = Hub(self.catalog, clock=self.clock)
        self.recorder = Recorder(self.hub)
        self.shown = self.hub.notifications.fetched
        self.heard: list[Notification] = []
        self.muted: set[Topic] = set()
        policies = {"quiet gap": Policy(quiet_gap=1.0, longest_wait=10.0), "rate": Policy(min_interval=1.0)}
        is_muted = self.muted.__contains__ if kind == "muted" else None
        self.reader = self.hub.open(self.deliver, policy=policies.get(kind), filter=filter, is_muted=is_muted)
        self.is_busy = False
        self.reader.subscribe("tools", uris=[URI])
        if kind == "rate":
            self.flip(1)
            self.heard.clear()
            self.flip(0)
        elif kind == "muted":
            self.muted |= {TOOLS, URI}
        elif kind == "slow":
            self.reader.pause()

    def deliver(self, notification: Notification) -> object:
        self.heard.append(notification)
        return BUSY if self.is_busy else None

    def flip(self, state: int) -> None:
        """Make both topics B (1) or A (0)."""
        self.catalog.resources.updated(URI, etag="ab"[state])
        self.catalog.tools.replace([{"name": "kept"}, *([{"name": "new"}] if state else [])])

    def show(self, *, only: Topic | None = None) -> None:
        for topic in (TOOLS, URI) if only is None else (only,):
            self.shown.record(topic, self.catalog.version(topic))

    def settle(self) -> list[Topic]:
        """Let it be told all that is due; of what it was told since the last time."""
        self.muted.clear()
        self.hub.wake(self.reader)
        while (due := self.hub.next_due()) is not None:
            self.clock.now = due
            self.hub.tick()
        self.recorder.look()
        check_all(self.recorder.history)
        heard, self.heard = self.heard, []
        return [notification.topic for notification in heard]


KINDS = ["slow", "quiet gap", "muted"]


@pytest.mark.parametrize("kind", KINDS)
def test_fetched_intermediate_version_causes_a_notification(kind: str) -> None:
    place = Place(kind)
    place.flip(1)
    place.show()
    place.flip(0)

    assert place.settle() == [TOOLS, URI]
    assert place.settle() == [], "once"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["never", "before", "after", "before and after"])
def test_unfetched_intermediate_version_causes_none(kind: str, when: str) -> None:
    place = Place(kind)
    if "before" in when:
        place.show()
    place.flip(1)
    place.flip(0)
    if "after" in when:
        place.show()

    assert place.settle() == []


def test_list_must_be_refetched_and_content_has_its_last_change() -> None:
    place = Place()
    place.flip(1)
    place.show()
    place.flip(0)
    place.hub.wake(place.reader)

    content, tools = sorted(place.heard, key=lambda each: isinstance(each.topic, Feature))
    assert (tools.complete, tools.changes, tools.version) == (False, (), place.catalog.tools.version)
    assert [change.version for change in content.changes] == [place.catalog.version(URI)]


def test_only_the_fetched_topic_is_notified() -> None:
    place = Place()
    place.flip(1)
    place.show(only=URI)
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

    assert place.settle() == [], "it was never given"


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
    place.show()
    place.flip(0)
    heard: list[Notification] = []
    place.hub.subscribe(heard.append, "tools", told=known)
    place.hub.subscribe(place.reader, told=known)

    assert heard == []
    assert place.settle() == [URI], "and so is one that was about to be told"


@pytest.mark.parametrize("kind", KINDS)
def test_filtered_change_that_was_undone_causes_a_refetch(kind: str) -> None:
    """A tool that it wants to hear of came and went; what remains is another one, which it does not."""
    place = Place(kind, filter=Filter(names=["new"]))
    place.catalog.tools.add({"name": "new"})
    place.show()
    place.catalog.tools.add({"name": "other"})
    place.catalog.tools.remove("new")

    assert place.settle() == [TOOLS]


@pytest.mark.parametrize("kind", KINDS)
def test_changes_outside_the_filter_cause_no_refetch(kind: str) -> None:
    place = Place(kind, filter=Filter(names=["nothing"]))
    place.flip(1)
    place.show(only=TOOLS)
    place.flip(0)

    assert place.settle() == []


def test_subscriber_ahead_of_the_hub_is_notified() -> None:
    catalog = Catalog()
    hub = Hub(catalog)
    catalog.publisher = None
    commits: list[Any] = []
    catalog.follow(commits.append)
    heard: list[Notification] = []
    catalog.tools.add({"name": "a"})
    cursor = catalog.tools.version
    catalog.tools.add({"name": "b"})
    catalog.tools.remove("b")
    hub.subscribe(heard.append, "tools", told={TOOLS: cursor})
    hub.notifications.fetched.record(TOOLS, Version(2, "b"))
    for changes in commits:
        hub.publish(changes)

    assert [each.version.revision for each in heard] == [3]


def test_fetched_contents_are_bounded_and_unknown_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_module, "_MAX_CONTENTS", 3)
    catalog = Catalog()
    shown = FetchedVersions(catalog.lock)
    for revision in range(1, 8):
        shown.record(f"a://{revision}", Version(revision, str(revision)))
        shown.record(TOOLS, Version(revision, str(revision)))

    assert len(shown._contents) == 3
    assert shown.may_differ("a://1", Version(9, "x"), since=0)
    assert shown.may_differ("a://1", Version(9, "1"), since=3)
    assert not shown.may_differ("a://1", Version(9, "x"), since=4), "all that was forgotten was older"
    assert not shown.may_differ("a://7", Version(9, "7"), since=4)
    assert shown.may_differ("a://7", Version(9, "x"), since=4)


def test_dropped_content_that_is_fetched_again_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_module, "_MAX_CONTENTS", 1)
    shown = FetchedVersions(Catalog().lock)
    shown.record(URI, Version(5, "b"))
    shown.record("a://other", Version(6, "x"))
    shown.record(URI, Version(9, "a"))
    assert shown.may_differ(URI, Version(9, "a"), since=3)
    assert not shown.may_differ(URI, Version(9, "a"), since=6)


# The validators


def history(*events: Event) -> History:
    start: list[Event] = [Changed(TOOLS, A), Subscribed("s", (TOOLS,)), Changed(TOOLS, B)]
    return History([*start, *events])


def told(version: Version) -> Told:
    return Told("s", TOOLS, version, (), is_complete=False)


AGAIN = Changed(TOOLS, A_AGAIN)


def test_checks_require_a_notification_after_a_fetch() -> None:
    good = history(ShownEvent(TOOLS, B), AGAIN, told(A_AGAIN))
    check_all(good)
    check_resumable(good, journal=1000)
    with pytest.raises(PromiseBroken, match="may have fetched r2 b"):
        check_reliable(history(ShownEvent(TOOLS, B), AGAIN))


def test_checks_forbid_a_notification_without_a_fetch() -> None:
    check_all(history(AGAIN))
    check_all(history(ShownEvent(TOOLS, A), AGAIN))
    check_all(history(AGAIN, ShownEvent(TOOLS, A_AGAIN)))
    came_to_know = history(told(B), AGAIN, told(A_AGAIN))
    check_all(came_to_know)
    with pytest.raises(PromiseBroken, match="Unique"):
        check_unique(history(told(B), told(Version(4, "b"))))
    with pytest.raises(PromiseBroken, match="Unique"):
        check_unique(history(ShownEvent(TOOLS, A), told(B), ShownEvent(TOOLS, B), told(Version(4, "b"))))


# The machine


class Curious(Machine):
    """The same, with somebody who looks at what is there: at once, or slowly."""

    @rule(topic=topics)
    def look(self, topic: Topic) -> None:
        self.hub.notifications.fetched.record(topic, self.catalog.version(topic))

    @precondition(lambda self: self.watched & {*Feature, *URIS})
    @rule(
        choice=st.integers(0, 9),
        is_slow=st.booleans(),
        looks=st.sampled_from(("at once", "at once, and after", "slowly", "never")),
    )
    def come_and_go(self, choice: int, is_slow: bool, looks: str) -> None:
        """Something is another one for a moment, in which all its readers may be slow."""
        watched: list[Topic] = [topic for topic in (*Feature, *URIS) if topic in self.watched]
        topic = watched[choice % len(watched)]
        for reader in self.readers if is_slow else ():
            if reader.subscriber is not None and reader.closed is None:
                reader.is_busy = True
                reader.subscriber.pause()
        before = list(self.catalog.items(topic)) if isinstance(topic, Feature) else []
        self.put(topic, before, "1")
        if looks == "slowly":
            self.begin_to_look(topic)
        self.put(topic, [*before, {"name": "passing", "uri": "a://passing"}], "2")
        if looks.startswith("at once"):
            self.look(topic)
        self.put(topic, before, "1")
        if looks.endswith("after"):
            self.look(topic)

    def put(self, topic: Topic, items: list[dict[str, Any]], etag: str) -> None:
        if isinstance(topic, Feature):
            self.catalog.items(topic).replace(items)
        else:
            self.catalog.resources.updated(topic, etag=etag)

    @rule(topic=topics)
    def begin_to_look(self, topic: Topic) -> None:
        before = self.catalog.version(topic)
        self.looking = [*self.being_looked_at, (topic, before)]
        self.hub.notifications.fetched.begin_fetch(topic, before.revision)

    @precondition(lambda self: self.being_looked_at)
    @rule(is_answered=st.booleans())
    def end_to_look(self, is_answered: bool) -> None:
        topic, before = self.looking.pop(0)
        after = self.catalog.version(topic)
        if is_answered:
            self.hub.notifications.fetched.record(topic, after if after == before else Version(after.revision, ""))
        self.hub.notifications.fetched.end_fetch(topic, before.revision)

    @property
    def being_looked_at(self) -> list[tuple[Topic, Version]]:
        looking: list[tuple[Topic, Version]] = getattr(self, "looking", [])
        return looking


def test_core_keeps_its_promises_with_fetches() -> None:
    run_state_machine_as_test(Curious, settings=settings(max_examples=100, stateful_step_count=40))


def look_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchedVersions, "may_differ", lambda self, topic, now, since: False)


def see_other_things_everywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchedVersions, "may_differ", lambda self, topic, now, since: True)


def forget_who_is_being_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FetchedVersions, "begin_fetch", lambda self, topic, revision: None)
    patch.setattr(FetchedVersions, "end_fetch", lambda self, topic, revision: None)


def remember_only_the_last_that_was_shown(patch: pytest.MonkeyPatch) -> None:
    note = FetchedVersions.record

    def note_alone(self: FetchedVersions, topic: Topic, version: Version) -> None:
        self._lists.pop(topic, None)
        self._contents.pop(topic, None)
        note(self, topic, version)

    patch.setattr(FetchedVersions, "record", note_alone)


def play() -> History:
    """One short run in which each part of it is needed once."""
    catalog = Catalog()
    catalog.tools.add({"name": "kept"})
    catalog.resources.updated(URI, etag="1")
    hub = Hub(catalog)
    recorder = Recorder(hub)
    shown = hub.notifications.fetched
    slow = hub.open(lambda _: BUSY, label="slow")
    slow.subscribe("tools", "prompts", uris=[URI])
    catalog.prompts.add({"name": "told of, and busy since"})
    catalog.tools.add({"name": "new"})
    shown.record(TOOLS, catalog.tools.version)
    catalog.tools.remove("new")
    shown.record(TOOLS, catalog.tools.version)
    shown.begin_fetch(URI, catalog.version(URI).revision)
    catalog.resources.updated(URI, etag="2")
    catalog.prompts.add({"name": "of no interest"})
    catalog.prompts.remove("of no interest")
    catalog.resources.updated(URI, etag="1")
    for _ in range(4):
        hub.wake(slow)
    shown.record(URI, Version(catalog.version(URI).revision, ""))
    recorder.look()
    return recorder.history


def test_correct_core_passes() -> None:
    check_all(play())


@pytest.mark.parametrize(
    ("promise", "harm"),
    [
        ("Reliable", look_away),
        ("Reliable", forget_who_is_being_answered),
        ("Reliable", remember_only_the_last_that_was_shown),
        ("Unique", see_other_things_everywhere),
    ],
)
def test_core_that_ignores_fetches_is_detected(
    monkeypatch: pytest.MonkeyPatch, promise: str, harm: Callable[[pytest.MonkeyPatch], None]
) -> None:
    harm(monkeypatch)
    with pytest.raises(PromiseBroken, match=promise):
        check_all(play())


def test_state_machine_finds_a_core_that_ignores_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    look_away(monkeypatch)
    hunt = settings(max_examples=300, stateful_step_count=40, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises(PromiseBroken):
        run_state_machine_as_test(Curious, settings=hunt)
