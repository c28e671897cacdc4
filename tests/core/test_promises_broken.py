"""Each promise checker detects a core with a seeded defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.promises.checks import PROMISES, check_all
from tests.support.promises.history import History, PromiseBroken
from tests.support.promises.machine import Machine
from tests.support.promises.recorder import Recorder
from tests.support.promises.strategies import OTHER_EPOCH
from tests.support.readers import Clock
from tidings import BUSY, Catalog, Change, Feature, Filter, Hub, Notification, Policy, Subscriber, Topic, Version
from tidings.core import delivery
from tidings.core.delivery import Delivery
from tidings.core.index import WatchIndex
from tidings.core.journal import Journal
from tidings.core.mailbox import Mailbox, MailboxEntry
from tidings.core.notifications import Notifications

pytestmark = pytest.mark.usefixtures("no_logs")


def play() -> History:
    """Run a short scenario that needs each rule of the core once."""
    clock = Clock()
    catalog = Catalog(clock=clock)
    hub = Hub(catalog, clock=clock)
    recorder = Recorder(hub)
    muted: set[Topic] = set()

    def make_changes(notification: Notification) -> None:
        if any(change.key == "first" for change in notification.changes):
            catalog.resources.updated("a://p")
            catalog.resources.updated("a://p")
        if any(change.key == "p2" for change in notification.changes):
            hub.wake(slow)

    changer = hub.subscribe(make_changes, "tools", label="changer")
    filtered = hub.open(lambda _: None, label="filtered", filter=Filter(["added"], ["p*"]))
    silent = hub.open(lambda _: None, label="silent", is_muted=muted.__contains__)
    slow = hub.open(lambda _: BUSY, label="slow")
    paced = hub.open(lambda _: None, label="paced", settings=Policy(quiet_gap=1.0, min_interval=2.0).delivery)
    for subscriber in (filtered, silent, slow, paced):
        subscriber.subscribe("tools", uris=["a://p", "b://**"])
    muted.add(Feature.TOOLS)
    for name in ("first", "p1", "q1", "p2"):
        catalog.tools.add({"name": name})
    hub.wake(slow)
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
    known = hub.known_versions(slow)
    catalog.tools.remove("p1")
    catalog.tools.update("q1", title="Q")
    hub.subscribe(lambda _: None, "tools", uris=["b://**"], told=known, label="back")
    hub.subscribe(lambda _: None, "tools", told={Feature.TOOLS: Version(9, OTHER_EPOCH)}, label="lost")
    for _ in range(10):
        for subscriber in (changer, filtered, silent, slow, paced):
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
    patch.setattr(Delivery, "drop_unwatched", lambda self, subscriber: None)


def tell_everybody(patch: pytest.MonkeyPatch) -> None:
    def everybody(self: WatchIndex, keys: list[Topic]) -> dict[Subscriber, None]:
        return {subscriber: None for subscribers in self.by_topic.values() for subscriber in subscribers}

    patch.setattr(WatchIndex, "subscribers", everybody)


def tell_the_newest_commit_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delivery, "by_topic", lambda changes: [(change,) for change in reversed(changes)])


def not_remember_what_was_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MailboxEntry, "is_told_current", property(lambda self: False))


def deliver_due_during_a_delivery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Delivery, "deliver_due", Delivery._deliver_now)


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
    patch.setattr(Delivery, "set_timer", lambda self, subscriber, when: None)
    patch.setattr(Hub, "wake", lambda self, subscriber: None)


def move_told_of_the_muted(patch: pytest.MonkeyPatch) -> None:
    add = Mailbox.add

    def add_and_move(self: Mailbox, notification: Notification, *args: Any) -> float:
        due = add(self, notification, *args)
        if due < float("inf"):
            self.entries[notification.topic].told = notification.version
        return due

    patch.setattr(Mailbox, "add", add_and_move)


def keep_a_list(patch: pytest.MonkeyPatch) -> None:
    add = Mailbox.add

    def add_each(self: Mailbox, notification: Notification, *args: Any) -> float:
        due = add(self, notification, *args)
        version = notification.version
        self.entries[f"{notification.topic}#{version.revision}"] = MailboxEntry(
            version, version.revision, Version(0, "")
        )
        return due

    patch.setattr(Mailbox, "add", add_each)


def resume_from_the_last_change_only(patch: pytest.MonkeyPatch) -> None:
    since = Journal.since

    def only_the_last(self: Journal, revision: int, topic: Topic | None = None) -> list[Change] | None:
        found = since(self, revision, topic)
        return found[-1:] if found else found

    patch.setattr(Journal, "since", only_the_last)
    believe_any_cursor(patch)


def believe_any_cursor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Notifications, "since_version", lambda self, topic, version: self.since_revision(topic, version.revision)
    )


def test_correct_core_passes() -> None:
    check_all(play())


@pytest.mark.parametrize(
    ("promise", "defect"),
    [
        ("Filtered", filter_nothing),
        ("Filtered", ignore_mutes),
        ("Filtered", keep_what_is_no_longer_watched),
        ("Filtered", tell_everybody),
        ("Ordered", tell_the_newest_commit_first),
        ("Unique", not_remember_what_was_told),
        ("Unique", deliver_due_during_a_delivery),
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
def test_core_that_breaks_a_promise_is_detected(
    monkeypatch: pytest.MonkeyPatch, promise: str, defect: Callable[[pytest.MonkeyPatch], None]
) -> None:
    defect(monkeypatch)
    with pytest.raises(PromiseBroken) as caught:
        PROMISES[promise](play())
    assert caught.value.promise == promise
    assert caught.value.events


def test_state_machine_finds_a_broken_core(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_what_is_taken(monkeypatch)
    hunt = settings(max_examples=200, stateful_step_count=40, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises(AssertionError):  # a promise is broken, or a bookmark says what its reader never received
        run_state_machine_as_test(Machine, settings=hunt)
