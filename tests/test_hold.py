"""Durable readers wait for the store together, are told as any other one is, and only of what is written down."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support import durables
from tidings import BUSY, Feature, Notification, Policy, Reason
from tidings.counts import Why
from tidings.hold import LONGEST_HOLD
from tidings.mailbox import Filter
from tidings.model import Priority
from tidings.visit import Visit

TOOLS = Feature.TOOLS


class Place(durables.Place):
    """A server in memory whose store is as slow as the test wants it to be."""

    def start(self) -> None:
        super().start()
        self.alarms = 0
        self.hold()
        self.hub.hold.on_hold = self.alarm

    def alarm(self) -> None:
        self.alarms += 1

    def add(self, *names: str) -> None:
        durables.add(self, *names)


class Client:
    def __init__(self, place: Place, name: str, *uris: str, **options: Any) -> None:
        self.place = place
        self.heard: list[Notification] = []
        self.answer: object = None
        visit = place.durables.enter({"name": name}, None, [TOOLS], uris, {}, self.close)
        assert visit is not None
        self.visit: Visit = visit
        self.subscriber = place.hub.open(self._deliver, **options)
        visit.watch(self.subscriber)
        place.hub.subscribe(self.subscriber, TOOLS, uris=uris, told=visit.told())

    def _deliver(self, notification: Notification) -> object:
        self.heard.append(notification)
        return self.answer

    def close(self) -> None:
        self.subscriber.close(Reason.DISCONNECTED)

    @property
    def keys(self) -> list[tuple[str, str]]:
        return [(change.operation.value, change.key) for each in self.heard for change in each.changes]


def here(place: Place, *names: str, uris: Iterable[str] = (), **options: Any) -> list[Client]:
    """Clients of whom it is written down that they are here."""
    clients = [Client(place, name, *uris, **options) for name in names]
    place.save()
    assert all(each.subscriber.is_patient for each in clients)
    return clients


@pytest.fixture
def place() -> Place:
    return Place()


def test_all_who_wait_for_the_same_change_share_what_is_said_and_need_no_mailbox(place: Place) -> None:
    clients = here(place, "a", "b", "c")
    place.add("x")

    assert [each.heard for each in clients] == [[], [], []]
    assert [each.subscriber.mailbox for each in clients] == [None, None, None]
    assert [each.subscriber.waiting for each in clients] == [1, 1, 1]
    assert place.alarms == 1, "whoever owns the hub is asked once to come back in time"
    place.save()
    assert [each.keys for each in clients] == [[("added", "x")]] * 3
    assert len({id(each.heard[0]) for each in clients}) == 1
    assert [each.subscriber.waiting for each in clients] == [0, 0, 0]
    assert not place.hub.hold
    assert place.hub.counts.sent["tools"] == 3


def test_what_is_written_down_by_the_time_it_is_told_waits_for_nothing(place: Place) -> None:
    """As where a change is made on another thread than the one that tells it."""
    (client,) = here(place, "a")
    place.saved += 1
    place.add("x")
    assert client.keys == [("added", "x")]
    assert (bool(place.hub.hold), place.alarms) == (False, 0)


def test_several_changes_are_told_as_one_and_those_that_undo_each_other_not_at_all(place: Place) -> None:
    clients = here(place, "a", "b", uris=["a://1", "a://2"])
    resources = place.catalog.resources
    resources.updated("a://1", etag="0")
    place.save()
    for each in clients:
        each.heard.clear()
    place.add("x", "y")
    place.catalog.tools.remove("x")
    for uri, etag in (("a://1", "1"), ("a://2", "1"), ("a://1", "0"), ("a://2", "2")):
        resources.updated(uri, etag=etag)
    coalesced = place.hub.counts.coalesced
    assert coalesced == 2 * 4
    place.save()

    for each in clients:
        assert [(said.topic, said.version) for said in each.heard] == [
            (topic, place.catalog.version(topic)) for topic in (TOOLS, "a://2")
        ]
        assert each.keys == [("added", "y"), ("updated", "a://2")]
    assert place.hub.counts.suppressed[Why.SAME_DIGEST] == 2


def test_a_change_that_is_not_written_down_is_held_when_others_are_released(place: Place) -> None:
    (client,) = here(place, "a", uris=["a://1"])
    place.add("x")
    place.saved = place.catalog.revision
    place.catalog.resources.updated("a://1")
    place.hub.release()
    assert client.keys == [("added", "x")]
    assert place.alarms == 2, "there is still something to come back for"
    place.now += LONGEST_HOLD
    place.hub.release()
    assert client.keys == [("added", "x"), ("updated", "a://1")], "a disk that hangs silences nobody"
    place.catalog.resources.updated("a://1")
    place.hub.release()
    assert len(client.heard) == 2, "the next one waits as long again"


def test_who_is_told_in_an_order_of_its_own_waits_as_long_in_its_mailbox(place: Place) -> None:
    client = Client(place, "a", "a://1", policy=Policy(priorities=(("a://1", Priority.URGENT),)))
    place.save()
    assert not client.subscriber.is_patient
    for _ in range(2):
        place.add("x")
        place.catalog.resources.updated("a://1")
        place.hub.release()
        assert client.heard == []
        place.now += LONGEST_HOLD
        place.hub.release()
        assert [each.topic for each in client.heard] == ["a://1", TOOLS]
        place.catalog.tools.remove("x")
        place.save()
        client.heard.clear()


def test_who_was_noted_before_it_has_a_stream_waits_as_all_others_do(place: Place) -> None:
    visit = place.durables.enter({"name": "a"}, None, [TOOLS], [], {}, lambda: None)
    place.save()
    assert visit is not None
    subscriber = place.hub.open(lambda _: None)
    visit.watch(subscriber)
    assert subscriber.is_patient


def test_who_comes_while_others_wait_is_not_told_what_it_has_seen(place: Place) -> None:
    (first,) = here(place, "a")
    place.add("x")
    late = Client(place, "b")
    late.visit.note_presence()
    place.add("y")
    assert late.subscriber.is_patient
    place.add("z")
    place.save()

    assert first.keys == [("added", "x"), ("added", "y"), ("added", "z")]
    assert late.keys == [("added", "y"), ("added", "z")]


def test_who_leaves_or_unsubscribes_while_it_waits_is_told_nothing_and_leaves_nothing(place: Place) -> None:
    stays, goes, ends = here(place, "a", "b", "c", uris=["a://1"])
    place.add("x")
    place.catalog.resources.updated("a://1")
    goes.close()
    ends.subscriber.unsubscribe(uris=["a://1"])
    assert place.hub.counts.suppressed[Why.UNSUBSCRIBED] == 3
    ends.subscriber.subscribe(uris=["a://1"])
    place.save()

    assert (len(stays.heard), goes.heard, ends.keys) == (2, [], [("added", "x")])
    assert not place.hub.hold._crowds


def test_who_falls_behind_while_it_waits_is_told_all_of_it_later(place: Place) -> None:
    keeps_up, falls_behind = here(place, "a", "b", uris=["a://1"])
    picky = here(place, "c", filter=Filter(names=["x"]))[0]
    place.add("x")
    place.catalog.resources.updated("a://1")
    for each in (falls_behind, picky):
        each.subscriber.pause()
    place.add("y")
    assert place.hub.owed(falls_behind.subscriber).keys() == {TOOLS, "a://1"}
    place.save()
    assert falls_behind.heard == []
    place.add("z")
    for each in (falls_behind, picky):
        place.hub.wake(each.subscriber)
    place.save()

    assert sorted(falls_behind.keys) == sorted(keeps_up.keys)
    assert len(falls_behind.heard) == 2
    assert picky.keys == [("added", "x")]
    assert all(each.complete for each in falls_behind.heard)


def test_who_is_busy_with_the_first_of_several_is_told_the_rest_when_it_is_ready(place: Place) -> None:
    (client,) = here(place, "a", uris=["a://1"])
    client.answer = BUSY
    place.catalog.resources.updated("a://1")
    place.add("x")
    place.save()
    assert client.keys == [("added", "x")], "a list comes first, as from a mailbox"
    client.answer = None
    place.hub.wake(client.subscriber)
    assert client.keys == [("added", "x"), ("updated", "a://1")]
    assert client.subscriber.is_patient


def test_a_filter_counts_after_the_hold_as_before(place: Place) -> None:
    wanted, other = Filter(names=["x*"]), Filter(names=["y*"])
    (first,), (second,) = here(place, "a", uris=["a://1"], filter=wanted), here(place, "b", filter=other)
    place.add("x1", "x2")
    place.catalog.resources.updated("a://1")
    place.save()
    place.add("y1")
    place.save()

    assert first.keys == [("added", "x1"), ("added", "x2"), ("updated", "a://1")]
    assert second.keys == [("added", "y1")]


@pytest.mark.parametrize("is_paused", [False, True])
def test_what_the_journal_forgot_meanwhile_is_to_be_refetched(is_paused: bool) -> None:
    place = Place(journal_changes=1)
    client, picky = here(place, "a")[0], here(place, "b", filter=Filter(names=["z"]))[0]
    place.add("x", "y")
    if is_paused:
        for each in (client, picky):
            each.subscriber.pause()
    place.save()
    for each in (client, picky):
        place.hub.wake(each.subscriber)
    assert [(each.complete, each.changes) for each in client.heard + picky.heard] == [(False, ())] * 2


def test_a_deletion_ends_the_subscription_when_it_is_told(place: Place) -> None:
    place.catalog.resources.updated("a://1")
    (client,) = here(place, "a", uris=["a://1"])
    place.catalog.resources.deleted("a://1")
    assert client.subscriber.uris == {"a://1": None}
    place.save()
    assert client.keys == [("deleted", "a://1")]
    assert client.subscriber.uris is None


def test_more_topics_than_may_wait_for_a_reader_that_is_slow_end_nobody_who_keeps_up() -> None:
    place = Place(max_pending=3)
    (client,) = here(place, "a", uris=["a://**"])
    uris = [f"a://{number}" for number in range(10)]
    for uri in uris:
        place.catalog.resources.updated(uri)
    place.save()
    assert not client.subscriber.is_closed
    assert client.keys == [("updated", uri) for uri in uris]


def test_where_it_stands_is_said_as_of_what_it_was_told(place: Place) -> None:
    """To a bookmark, and to its own durable subscription."""
    (client,) = here(place, "a", uris=["a://**"])
    before = place.catalog.version(TOOLS)
    place.add("x")
    place.catalog.resources.updated("a://1", etag="1")
    known = place.hub.known(client.subscriber)
    assert known == {TOOLS: before, "a://1": place.hub.told(client.subscriber, "a://1")}
    assert known["a://1"] != place.catalog.version("a://1")
    client.close()

    again = Client(place, "a", "a://**")
    place.save()
    assert again.keys == [("added", "x"), ("updated", "a://1")]


def test_what_it_says_itself_counts_over_what_it_is_owed(place: Place) -> None:
    (client,) = here(place, "a")
    place.add("x")
    place.hub.subscribe(client.subscriber, TOOLS, told={TOOLS: place.catalog.version(TOOLS)})
    place.save()
    assert client.heard == []


def test_what_a_reader_changes_when_it_is_told_is_told_after_all_have_heard_of_the_first(place: Place) -> None:
    first, second = here(place, "a", "b")
    heard = first._deliver

    def change(notification: Notification) -> None:
        heard(notification)
        if len(first.heard) == 1:
            place.add("y")
            place.saved = place.catalog.revision

    first.subscriber.deliver = change
    place.add("x")
    place.save()
    place.hub.release()
    assert first.keys == second.keys == [("added", "x"), ("added", "y")]
    assert [each.version.revision for each in second.heard] == sorted(each.version.revision for each in second.heard)


def test_what_readers_were_told_is_written_when_it_is_beyond_doubt_and_not_with_every_batch(place: Place) -> None:
    here(place, *map(str, range(20)))
    written = 0
    for number in range(50):
        place.add(f"t{number}")
        written += len(place.durables.collect())
        place.save()
        place.now += 0.05
    assert written == 0
    place.settle()
    assert len(place.durables.collect()) == 20
    place.save()
    assert not place.durables.is_waiting
    kept = place.durables.all()
    assert {each.lists[TOOLS] for each in kept} == {place.catalog.version(TOOLS)}


def test_under_steady_changes_what_was_told_long_ago_is_written_all_the_same(place: Place) -> None:
    here(place, "a", uris=["a://1"])
    place.catalog.resources.updated("a://1")
    for number in range(40):
        place.add(f"t{number}")
        place.save()
        place.now += 2.0
    kept = place.store._state.durables[None, "a"]
    assert kept.contents == {"a://1": place.catalog.version("a://1")}
    assert kept.lists == {TOOLS: None}


def test_a_server_that_dies_before_that_tells_who_comes_back_to_refetch(place: Place) -> None:
    (client,) = here(place, "a", uris=["a://1"])
    place.add("x")
    place.catalog.resources.updated("a://1", etag="1")
    place.save()
    assert len(client.heard) == 2
    place.die()

    again = Client(place, "a", "a://1")
    place.save()
    assert [(each.topic, each.complete) for each in again.heard] == [(TOOLS, False), ("a://1", False)]
