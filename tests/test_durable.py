"""Whoever comes back under its name is told what differs from what it was last told, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from tidings import BUSY, Catalog, Feature, Hub, Journal, LimitReached, Notification, Policy, TidingsError, Version
from tidings.durable import SERVER, Durable, Durables, Key, Owner, Webhook
from tidings.hold import LONGEST_HOLD
from tidings.lanes.templates import read_template
from tidings.mailbox import Filter
from tidings.store import Batch
from tidings.store.memory import MemoryStore
from tidings.subscriber import Subscriber
from tidings.visit import Visit

TOOLS, PROMPTS, RESOURCES = Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES
KEY = (None, "laptop")
HALF = {"name": "\ud800"}  # half of a surrogate pair, which JSON can say and UTF-8 can't
EXAMPLES = 150


class Place:
    """A server in memory, which may be started again from what it kept."""

    def __init__(self, **knobs: Any) -> None:
        self.policy = Policy(**knobs)
        self.now = 1000.0
        self.store = MemoryStore()
        self.start()

    def start(self) -> None:
        state = self.store.open()
        self.catalog = Catalog(self.policy, clock=lambda: self.now)
        self.catalog.restore(state.items, state.versions, state.contents, state.life << 32)
        journal = Journal(self.policy)
        journal.restore(state.journal, state.floors)
        self.batch = Batch()
        self.catalog.follow(self.batch.take)
        self.hub = Hub(self.catalog, journal=journal, clock=lambda: self.now, templates=read_template)
        self.durables = Durables(self.hub, state.durables.values(), rouse=lambda: True)
        self.saved = self.catalog.revision

    def hold(self) -> None:
        """Tell nobody of what is not saved."""
        self.hub.hold.is_saved = lambda revision: revision <= self.saved
        self.durables.written()

    def collect(self) -> Mapping[Key, Durable | None]:
        """What there is to write, written."""
        found = self.durables.collect()
        self.durables.written()
        return found

    def save(self) -> None:
        self.batch.durables.update(self.durables.collect())
        self.batch.forget(self.hub.journal.floors(), self.catalog.resources.forgotten)
        self.store.write(self.batch)
        self.batch.__init__()  # type: ignore[misc]
        self.saved = self.catalog.revision
        self.durables.written()
        self.hub.release()

    def settle(self) -> None:
        """Let so much time pass that what was told before is beyond doubt."""
        self.now += 2 * (self.policy.write_deadline + self.policy.keep_alive)

    def die(self) -> None:
        """What was not saved is lost."""
        self.store.close()
        self.start()


class Client:
    """What came over its connection, and how to hold it up."""

    def __init__(self, place: Place, *features: Feature, uris: Any = (), name: Any = "laptop", **more: Any) -> None:
        self.place = place
        self.heard: list[Notification] = []
        self.answer: object = None
        self.is_ended = False
        self.subscriber: Subscriber | None = None
        self.visit = self._enter(features or (TOOLS,), [uris] if isinstance(uris, str) else list(uris), name, **more)

    def _enter(
        self,
        features: tuple[Feature, ...],
        uris: list[str],
        name: Any,
        *,
        owner: Owner = None,
        ttl: Any = None,
        resume: dict[Any, Version | None] | None = None,
        **options: Any,
    ) -> Visit | None:
        hub, durables = self.place.hub, self.place.durables
        visit = durables.enter({"name": name, "ttl": ttl}, owner, features, uris, {}, self._end)
        self.subscriber = hub.open(self._deliver, **options)
        told: dict[Any, Version | None] = resume or {}
        if visit is not None:
            visit.watch(self.subscriber)
            told = {**visit.told(), **told}
        hub.subscribe(self.subscriber, *features, uris=uris, told=told)
        return visit

    def _deliver(self, notification: Notification) -> object:
        self.heard.append(notification)
        return self.answer

    def _end(self) -> None:
        self.is_ended = True
        self.leave()

    def leave(self) -> None:
        assert self.subscriber is not None
        self.subscriber.close()

    @property
    def keys(self) -> list[tuple[str, str]]:
        return [(change.operation.value, change.key) for each in self.heard for change in each.changes]


@pytest.fixture
def place() -> Place:
    return Place()


def add(place: Place, *names: str) -> None:
    for name in names:
        place.catalog.tools.add({"name": name})


def test_a_new_name_knows_everything_as_of_now(place: Place) -> None:
    add(place, "a")
    client = Client(place)

    assert client.visit is not None
    assert client.visit.ack == {"name": "laptop", "ttl": Policy().durable_ttl, "isNew": True}
    assert client.heard == []


def test_who_comes_back_is_told_exactly_what_differs(place: Place) -> None:
    client = Client(place, TOOLS, PROMPTS)
    add(place, "a")
    place.settle()
    client.leave()
    add(place, "b", "c")
    place.catalog.tools.remove("c")

    again = Client(place, TOOLS, PROMPTS)

    assert again.visit is not None
    assert again.visit.ack["isNew"] is False
    assert again.keys == [("added", "b")]
    assert again.heard[0].complete
    add(place, "d")
    assert again.keys == [("added", "b"), ("added", "d")]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_who_missed_nothing_is_told_nothing(place: Place, is_restarted: bool) -> None:
    client = Client(place, TOOLS, RESOURCES, uris="a://b")
    add(place, "a")
    place.catalog.resources.updated("a://b", etag="1")
    place.settle()
    client.leave()
    place.catalog.resources.updated("a://b", etag="2")
    place.catalog.resources.updated("a://b", etag="1")
    add(place, "b")
    place.catalog.tools.remove("b")
    if is_restarted:
        place.save()
        place.die()

    assert Client(place, TOOLS, RESOURCES, uris="a://b").heard == []


def test_a_name_lives_on_in_the_next_life_of_the_server(place: Place) -> None:
    Client(place, TOOLS, uris=["a://b", "a://c"])
    add(place, "a")
    place.catalog.resources.updated("a://b")
    place.settle()
    place.save()
    add(place, "b")
    place.catalog.resources.updated("a://c")
    place.batch.durables.clear()
    place.batch.forget({}, 0)
    place.store.write(place.batch)  # the changes are saved, what the client was told is not
    place.die()
    add(place, "c")

    again = Client(place, TOOLS, uris=["a://b", "a://c"])

    assert again.visit is not None
    assert again.visit.ack["isNew"] is False
    # It may have heard of them before the server died, or not: so it is told to look.
    assert [(each.topic, each.complete) for each in again.heard] == [(TOOLS, False), ("a://c", False)]


def test_who_was_away_when_the_server_died_is_told_the_changes(place: Place) -> None:
    client = Client(place, TOOLS, uris=["a://b", "a://c"])
    client.leave()
    place.save()
    add(place, "b")
    place.catalog.resources.updated("a://c")
    place.save()
    place.die()
    add(place, "c")

    again = Client(place, TOOLS, uris=["a://b", "a://c"])
    assert again.keys == [("added", "b"), ("added", "c"), ("updated", "a://c")]
    assert all(each.complete for each in again.heard)


def test_what_the_journal_has_forgotten_is_to_be_refetched() -> None:
    place = Place(journal_changes=1)
    client = Client(place, TOOLS, uris="a://{+path}")
    client.leave()
    add(place, "a", "b")
    place.catalog.resources.updated("a://1")
    place.catalog.resources.updated("a://2")

    again = Client(place, TOOLS, uris="a://{+path}")

    assert {(each.topic, each.complete) for each in again.heard} == {
        (TOOLS, False),
        ("a://1", False),
        ("a://2", False),
    }


def test_what_was_on_its_way_when_the_connection_broke_is_told_again(place: Place) -> None:
    client = Client(place, TOOLS, uris="a://b")
    client.answer = BUSY
    add(place, "a")
    assert place.durables.collect()[KEY] is not None
    assert place.durables.is_waiting
    client.leave()

    assert [each.topic for each in Client(place, TOOLS, uris="a://b").heard] == [TOOLS]


def test_a_deletion_that_was_on_its_way_is_told_again_though_it_ended_the_subscription(place: Place) -> None:
    place.catalog.resources.updated("a://b")
    client = Client(place, TOOLS, uris="a://b")
    client.answer = BUSY
    place.catalog.resources.deleted("a://b")
    client.leave()
    kept = place.durables.get(KEY)

    assert kept is not None
    assert kept.uris == ("a://b",)
    assert [each.topic for each in Client(place, TOOLS, uris=kept.uris).heard] == ["a://b"]


def test_what_a_lane_knows_not_to_have_been_read_is_told_again_as_it_was(place: Place) -> None:
    """As a webhook does, which closes its subscriber until it tries again."""
    place.catalog.resources.updated("a://b")
    for expected in ([], [("added", "a"), ("deleted", "a://b")], [("added", "a"), ("deleted", "a://b")]):
        visit = place.durables.enter({"name": "hook"}, None, [TOOLS], ["a://b"], {}, lambda: None)
        assert visit is not None
        heard: list[Any] = []
        subscriber = place.hub.open(lambda notification, heard=heard: heard.append(notification) or BUSY)  # type: ignore[misc]
        visit.watch(subscriber, is_sure=True)
        place.hub.subscribe(subscriber, TOOLS, uris=["a://b"], told=visit.told())
        if not expected:
            add(place, "a")
            place.catalog.resources.deleted("a://b")
        while len(heard) < 2 and expected and not subscriber.is_ready:
            place.hub.wake(subscriber)
        assert [(change.operation, change.key) for each in heard for change in each.changes] == (
            expected or [("added", "a")]
        )
        subscriber.is_ready = False
        subscriber.close()


def test_what_was_read_later_counts_as_told(place: Place) -> None:
    client = Client(place)
    client.answer = BUSY
    add(place, "a")
    place.durables.collect()
    assert client.subscriber is not None
    client.answer = None
    place.hub.wake(client.subscriber)
    place.settle()
    place.save()
    place.die()

    assert Client(place).heard == []


def test_what_waits_for_a_slow_reader_is_not_told_yet(place: Place) -> None:
    client = Client(place, TOOLS, policy=Policy(min_interval=10))
    add(place, "a")
    add(place, "b")
    assert client.keys == [("added", "a")]
    place.settle()
    client.leave()
    place.save()
    place.die()

    assert Client(place).keys == [("added", "b")]


def test_what_was_told_after_the_last_saving_is_not_forgotten(place: Place) -> None:
    place.hold()
    client = Client(place)
    add(place, "a")
    place.save()
    assert client.keys == [("added", "a")], "when it was written down"
    place.die()
    place.catalog.tools.remove("a")

    again = Client(place)
    assert [(each.topic, each.complete) for each in again.heard] == [(TOOLS, False)]


def test_what_was_told_just_before_a_connection_broke_is_told_again(place: Place) -> None:
    """The reader may have vanished long before anybody noticed."""
    client = Client(place, TOOLS, uris="a://{+path}")
    add(place, "a")
    place.catalog.resources.updated("a://1", etag="1")
    place.settle()
    add(place, "b")
    place.catalog.resources.updated("a://1", etag="2")
    place.catalog.resources.updated("a://2")
    place.now += place.policy.write_deadline
    add(place, "c")
    assert place.durables.is_waiting
    client.leave()

    again = Client(place, TOOLS, uris="a://{+path}")
    assert {each.topic for each in again.heard} == {TOOLS, "a://1", "a://2"}
    assert not any(each.complete for each in again.heard), "what it knows is not known"
    place.settle()
    again.leave()
    assert Client(place, TOOLS, uris="a://{+path}").heard == []


def test_what_came_back_to_what_it_was_before_the_doubt_is_told_all_the_same(place: Place) -> None:
    """If it heard of the tool, it must hear that it is gone."""
    client = Client(place)
    add(place, "a")
    client.leave()
    place.catalog.tools.remove("a")
    assert [each.complete for each in Client(place).heard] == [False]


def test_a_lane_that_knows_what_was_read_is_believed(place: Place) -> None:
    visit = place.durables.enter({"name": "hook"}, None, [TOOLS], [], {}, lambda: None)
    assert visit is not None
    heard: list[Notification] = []
    subscriber = place.hub.open(heard.append)
    visit.watch(subscriber, is_sure=True)
    place.hub.subscribe(subscriber, TOOLS, told=visit.told())
    add(place, "a")
    subscriber.close()

    assert Client(place, name="hook").heard == []


def test_what_is_settled_is_written_once_more_and_then_no_more(place: Place) -> None:
    Client(place)
    add(place, "a")
    assert place.collect()[KEY] is not None
    assert place.collect() == {}
    assert place.durables.is_waiting
    place.settle()
    settled = place.collect()[KEY]
    assert settled is not None
    assert settled.lists == {TOOLS: place.catalog.version(TOOLS)}
    assert not place.durables.is_waiting


def test_a_cursor_wins_over_what_the_server_remembers(place: Place) -> None:
    add(place, "a")
    version = place.catalog.version(TOOLS)
    client = Client(place, TOOLS, PROMPTS)
    add(place, "b")
    place.settle()
    client.leave()
    place.catalog.prompts.add({"name": "p"})

    again = Client(place, TOOLS, PROMPTS, resume={TOOLS: version})

    assert again.keys == [("added", "b"), ("added", "p")]


def test_the_newer_connection_has_the_name_and_the_older_one_ends(place: Place) -> None:
    older = Client(place)
    add(place, "a")
    place.settle()
    newer = Client(place)
    add(place, "b")

    assert older.is_ended
    assert older.keys == [("added", "a")]
    assert newer.keys == [("added", "b")]
    place.settle()
    newer.leave()
    assert not newer.is_ended
    add(place, "c")
    assert Client(place).keys == [("added", "c")]


def test_a_name_is_its_owners_own(place: Place) -> None:
    mine = Client(place, owner=("me", None))
    yours = Client(place, owner=("you", None))
    nobodys = Client(place)

    assert not mine.is_ended
    assert all(each.visit is not None and each.visit.ack["isNew"] for each in (mine, yours, nobodys))
    assert [each.owner for each in place.durables.all()] == [None, ("me", None), ("you", None)]
    assert [each.owner for each in place.durables.all(("me", None))] == [("me", None)]


def test_what_was_not_watched_before_is_known_as_of_now(place: Place) -> None:
    client = Client(place, TOOLS, uris=["a://1", "b://{+path}"])
    client.leave()
    place.catalog.prompts.add({"name": "p"})
    for uri in ("a://1", "a://2", "b://1", "c://1"):
        place.catalog.resources.updated(uri)

    again = Client(place, TOOLS, PROMPTS, uris=["a://1", "a://2", "b://{+path}", "c://{+path}"])

    assert again.keys == [("updated", "a://1"), ("updated", "b://1")]
    again.leave()
    place.catalog.resources.updated("a://2")
    assert Client(place, PROMPTS, uris=["a://2"]).keys == [("updated", "a://2")]


def test_more_contents_than_are_kept_one_by_one_are_known_all_the_same(place: Place) -> None:
    uris = [f"a://{number}" for number in range(1000)]
    for uri in uris:
        place.catalog.resources.updated(uri)
    client = Client(place, uris=uris)
    client.leave()
    place.catalog.resources.updated("a://999")
    place.catalog.resources.updated("a://5")
    place.save()
    place.die()
    kept = place.durables.get(KEY)
    assert kept is not None
    assert len(kept.contents) < 300

    assert sorted(Client(place, uris=uris).keys) == [("updated", "a://5"), ("updated", "a://999")]


def test_of_more_than_may_wait_it_is_told_to_refetch() -> None:
    place = Place(max_pending=10)
    client = Client(place, TOOLS, uris="a://{+path}")
    client.leave()
    for number in range(50):
        place.catalog.resources.updated(f"a://{number}")

    again = Client(place, TOOLS, uris="a://{+path}")
    assert again.subscriber is not None
    assert not again.subscriber.is_closed, "it would come back to the same"
    assert again.keys == []
    assert again.visit is not None
    assert again.visit.resumed().refetch == ("a://{+path}",), "for the acknowledgement"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [(60, 60.0), (1.5, 1.5), (None, 1000.0), (10**9, 1000.0), (-1, 1000.0), (True, 1000.0), ("x", 1000.0)],
)
def test_a_name_is_forgotten_a_while_after_its_client_left(asked: Any, kept: float) -> None:
    place = Place(durable_ttl=1000)
    client = Client(place, ttl=asked)
    assert client.visit is not None
    assert client.visit.ack["ttl"] == kept
    place.now += 5000
    assert len(place.durables.all()) == 1, "not while it is there"
    client.leave()
    place.now += kept - 0.5
    assert len(place.durables.all()) == 1
    place.now += 1

    assert place.durables.all() == []
    assert place.durables.get(KEY) is None
    add(place, "a")
    again = Client(place)
    assert again.visit is not None
    assert again.visit.ack["isNew"] is True
    assert again.heard == []


def test_whose_client_was_there_when_the_server_died_has_its_time_to_come_back() -> None:
    place = Place(durable_ttl=1000)
    Client(place)
    place.save()
    place.now += 5000
    place.die()
    assert len(place.durables.all()) == 1
    place.now += 1001
    assert place.durables.all() == []
    place.save()
    place.die()
    assert len(place.durables) == 0, "in the store, too"


def test_a_time_beyond_all_numbers_is_the_longest(place: Place) -> None:
    visit = place.durables.enter({"name": "laptop", "ttl": 10**400}, None, [TOOLS], [], {}, lambda: None)
    assert visit is not None
    assert visit.ack["ttl"] == place.policy.durable_ttl


@pytest.mark.parametrize("asked", [None, 3, "laptop", [], {}, {"name": ""}, {"name": 3}, {"name": "x" * 257}, HALF])
def test_what_is_no_name_makes_nothing_durable(place: Place, asked: Any) -> None:
    assert place.durables.enter(asked, None, [TOOLS], [], {}, lambda: None) is None
    assert place.durables.terms(asked, None) == {}
    assert len(place.durables) == 0


@pytest.mark.parametrize(
    ("uris", "terms"),
    [(["a://\ud800"], {}), ([], {"names": ["\ud800"]}), ([f"a://{number:0100}" for number in range(10_000)], {})],
    ids=["uri", "terms", "size"],
)
def test_what_could_not_be_written_down_makes_nothing_durable(place: Place, uris: list[str], terms: Any) -> None:
    assert place.durables.enter({"name": "laptop"}, None, [TOOLS], uris, terms, lambda: None) is None
    with pytest.raises(TidingsError):
        place.durables.put(Durable(name="laptop", uris=tuple(uris), terms=terms))
    assert len(place.durables) == 0


@pytest.mark.parametrize(
    ("name", "uris", "said"),
    [
        ("", (), "1 to 256 characters"),
        ("x" * 257, (), "1 to 256 characters"),
        ("\ud800", (), "half a character"),
        ("laptop", ("a://{",), "not a URI template"),
        ("laptop", ("a://\ud800*",), "half a character"),
        ("laptop", tuple(f"a://{number}" for number in range(4)), r"Policy\.max_uris"),
    ],
)
def test_what_can_not_be_is_refused_in_words(name: str, uris: tuple[str, ...], said: str) -> None:
    place = Place(max_uris=3)
    with pytest.raises(TidingsError, match=said):
        place.durables.put(Durable(name=name, features=(TOOLS,), uris=uris))
    assert len(place.durables) == 0


def test_there_are_limits_in_all_and_for_each_owner() -> None:
    place = Place(max_durables=5, max_durables_per_principal=2)
    names = [Client(place, name=name, owner=("me", None)).visit for name in "abc"]
    assert [visit is not None for visit in names] == [True, True, False]
    others = [Client(place, name=name).visit for name in "abcd"]
    assert [visit is not None for visit in others] == [True, True, True, False]
    with pytest.raises(LimitReached, match=r"there are 5 durable subscriptions; Policy\.max_durables allows 5"):
        place.durables.put(Durable(name="z"))
    assert place.durables.remove((None, "a"))
    assert place.durables.put(Durable(name="z", features=(TOOLS,), ttl=5)).lists[TOOLS] == place.catalog.version(TOOLS)
    assert Client(place, name="a", owner=("me", None)).visit is not None, "one that is there may come back"


def test_one_that_is_removed_is_ended_and_forgotten(place: Place) -> None:
    seen: list[Any] = []
    stop = place.durables.follow(lambda key, durable: seen.append((key, durable and durable.name)))
    client = Client(place)
    place.durables.put(Durable(name="other", ttl=9))

    assert place.durables.remove(KEY)
    assert not place.durables.remove(KEY)
    assert client.is_ended
    assert [each.name for each in place.durables.all()] == ["other"]
    assert seen == [((None, "other"), "other"), (KEY, None)]
    stop()
    place.save()
    place.die()
    assert [each.name for each in place.durables.all()] == ["other"]


def test_who_watches_something_else_than_what_is_put_is_ended_and_does_not_undo_it(place: Place) -> None:
    client = Client(place, TOOLS, uris="a://1")
    place.settle()
    add(place, "a")
    place.settle()
    place.durables.put(Durable(name="laptop", features=(TOOLS, PROMPTS), uris=("b://1",), ttl=9))
    assert client.is_ended
    client.leave()
    place.save()
    place.die()

    kept = place.durables.get(KEY)
    assert kept is not None
    assert (kept.features, kept.uris, kept.expires) == ((TOOLS, PROMPTS), ("b://1",), place.now + 9)
    again = Client(place, TOOLS, PROMPTS, uris="b://1")
    assert again.keys == [], "what the former one was told counts"


def test_who_watches_what_is_put_stays(place: Place) -> None:
    client = Client(place, TOOLS, PROMPTS)
    place.durables.put(Durable(name="laptop", features=(PROMPTS, TOOLS), ttl=9))
    assert not client.is_ended
    assert place.durables.is_connected(KEY)
    client.leave()
    kept = place.durables.get(KEY)
    assert kept is not None
    assert kept.expires == place.now + 9


def test_contents_that_are_no_longer_watched_are_forgotten(place: Place) -> None:
    uris: tuple[str, ...] = ()
    kept = Durable(name="laptop")
    for number in range(3):
        uris = ("b://1", *(f"a://{number}/{each}" for each in range(50)))
        kept = place.durables.put(Durable(name="laptop", uris=uris, ttl=9, expires=place.now + 9))
        for uri in uris:
            place.catalog.resources.updated(uri)
    assert list(kept.contents) == ["b://1"]


def test_several_of_one_name_can_be_listed(place: Place) -> None:
    owners: list[Owner] = [("me", None), None, ("me", "x"), SERVER]
    for owner in owners:
        place.durables.put(Durable(name="laptop", owner=owner, ttl=9))
    assert {each.owner for each in place.durables.all()} == set(owners)


def test_without_a_store_nothing_is_noted_for_it(place: Place) -> None:
    durables = Durables(place.hub)
    durables.put(Durable(name="laptop", ttl=9))
    assert not durables.is_waiting
    durables = Durables(place.hub, rouse=lambda: False)
    durables.put(Durable(name="laptop", ttl=9))
    assert not durables.is_waiting


@pytest.mark.parametrize("expires", [None, 1001.0])
def test_the_time_of_a_webhook_runs_only_when_it_was_given_up(place: Place, expires: float | None) -> None:
    tried = Webhook(url="https://a.example/", secret="s", attempts=3, next_attempt=9000.0)
    dead = Webhook(url="https://a.example/", secret="s", is_dead=True)
    kept = [Durable(name="tried", ttl=5, expires=expires, webhook=tried)]
    kept.append(Durable(name="dead", ttl=5, expires=expires, webhook=dead))
    place.now += 0.5
    durables = Durables(place.hub, kept)
    ends = {each.name: each.expires for each in durables.all()}
    assert ends == {"tried": None, "dead": 1005.5 if expires is None else expires}
    place.now += 10
    assert [each.name for each in durables.all()] == ["tried"]


def test_fields_can_be_changed_and_terms_are_kept(place: Place) -> None:
    place.durables.enter({"name": "laptop"}, None, [TOOLS], [], {"operations": ["added"]}, lambda: None)
    place.durables.change(KEY, ttl=7.0)
    assert place.durables.change((None, "nobody"), ttl=7.0) is None
    place.save()
    place.die()

    kept = place.durables.get(KEY)
    assert kept is not None
    assert kept.ttl == 7.0
    assert place.durables.terms({"name": "laptop"}, None) == {"operations": ["added"]}


def test_many_are_collected_in_slices_that_let_others_at_the_hub(place: Place) -> None:
    for number in range(1000):
        Client(place, name=str(number))
    place.collect()
    add(place, "a")
    place.settle()
    pauses = []

    assert len(place.durables.collect(lambda: pauses.append(1))) == 1000
    assert len(pauses) >= 2
    place.durables.written()
    assert place.durables.collect() == {}


def test_nobody_waits_long_for_those_who_watch_much(place: Place) -> None:
    uris = [f"file:///some/folder/of/a/project/{number}.md" for number in range(10_000)]
    for number in range(20):
        Client(place, name=str(number), uris=uris)
    add(place, "a")
    times = [time.thread_time()]

    assert len(place.durables.collect(lambda: times.append(time.thread_time()))) == 20
    times.append(time.thread_time())
    assert len(times) >= 10
    assert max(after - before for before, after in pairwise(times)) < 0.01


def test_names_that_come_and_go_while_nothing_can_be_written_leave_nothing(place: Place) -> None:
    durables = place.durables
    durables.put(Durable(name="stays", ttl=9))
    durables.put(Durable(name="was written", ttl=9))
    place.save()
    durables.remove((None, "was written"))
    for number in range(100):
        durables.put(Durable(name=f"collected {number}", ttl=9))
        durables.collect()
        durables.remove((None, f"collected {number}"))
        durables.put(Durable(name=f"marked {number}", ttl=9))
        durables.remove((None, f"marked {number}"))

    assert dict(durables.collect()) == {(None, "was written"): None}
    place.save()
    place.die()
    assert [each.name for each in place.durables.all()] == ["stays"]


def test_a_name_that_is_removed_while_it_is_written_is_gone(place: Place) -> None:
    place.durables.put(Durable(name="laptop", ttl=9))
    place.batch.durables.update(place.durables.collect())
    place.durables.remove(KEY)
    place.store.write(place.batch)
    place.batch.durables.clear()
    place.durables.written()

    place.save()
    place.die()
    assert place.durables.all() == []


def test_nobody_is_told_of_what_would_be_forgotten_with_the_server(place: Place) -> None:
    place.hold()
    client = Client(place, TOOLS, PROMPTS)
    add(place, "a")
    assert client.heard == []
    place.hub.release()
    assert client.heard == []
    place.catalog.tools.remove("a")
    add(place, "b")
    place.save()
    assert client.keys == [("added", "b")]
    counts = place.hub.counts
    assert (counts.sent["tools"], counts.coalesced, dict(counts.suppressed)) == (1, 2, {}), "held is not muted"
    add(place, "c")
    place.now += LONGEST_HOLD
    place.hub.release()
    assert client.keys == [("added", "b"), ("added", "c")], "a disk that hangs silences nobody"


def test_one_that_is_busy_is_told_when_it_is_ready(place: Place) -> None:
    place.hold()
    client = Client(place)
    client.answer = BUSY
    add(place, "a")
    place.save()
    add(place, "b")
    place.save()
    assert client.keys == [("added", "a")]
    assert client.subscriber is not None
    place.hub.wake(client.subscriber)
    assert client.keys == [("added", "a"), ("added", "b")]


class Comings(RuleBasedStateMachine):
    """A client that comes and goes, a server that is saved, ended and killed: told of all, and of nothing twice."""

    URIS = ("a://1", "a://2", "b://1")

    @initialize(most=st.sampled_from([0, 1, 3, 1000]), uris=st.sampled_from([URIS, ("a://{+path}", "b://1")]))
    def begin(self, most: int, uris: tuple[str, ...]) -> None:
        self.place = Place(journal_changes=most)
        self.place.hold()
        self.uris = uris
        self.is_exact = uris == self.URIS or most == 1000
        """Where patterns meet a journal that is too short, a content that came back to what it was is told."""
        self.client: Client | None = None
        self.knows: dict[Any, str] = {}
        self.lately: dict[Any, str] = {}
        """What it was told of lately, and what it knew of that before."""
        self.may_repeat: set[Any] = set()
        self.enter()

    def topics(self) -> list[Any]:
        return [TOOLS, *self.URIS]

    def enter(self) -> None:
        self.client = Client(self.place, TOOLS, uris=self.uris)
        assert self.client.visit is not None
        if self.client.visit.ack["isNew"]:  # then it looks at everything itself
            self.knows = {topic: self.place.catalog.version(topic).digest for topic in self.topics()}
            self.lately.clear()
        self.hear()

    def hear(self) -> None:
        assert self.client is not None
        for each in self.client.heard:
            if self.is_exact and each.topic not in self.may_repeat:
                assert each.version.digest != self.knows[each.topic], f"told again of {each.topic}"
            self.may_repeat.discard(each.topic)
            self.lately.setdefault(each.topic, self.knows[each.topic])
            self.knows[each.topic] = each.version.digest
        self.client.heard.clear()

    @rule(name=st.sampled_from("ab"), title=st.sampled_from([None, "1", "2"]))
    def change_tool(self, name: str, title: str | None) -> None:
        tools = self.place.catalog.tools
        if title is not None:
            tools.add({"name": name, "title": title}, replace=True)
        elif name in tools:
            tools.remove(name)

    @rule(uri=st.sampled_from(URIS), etag=st.sampled_from([None, "1", "2"]))
    def change_content(self, uri: str, etag: str | None) -> None:
        self.place.catalog.resources.updated(uri, etag=etag)

    @rule()
    def settle(self) -> None:
        self.place.settle()
        self.place.save()
        if self.client is not None:
            heard = {each.topic for each in self.client.heard}
            self.hear()
            self.lately = {topic: before for topic, before in self.lately.items() if topic in heard}

    @precondition(lambda self: self.client is not None)
    @rule(is_heard=st.booleans())
    def leave(self, is_heard: bool) -> None:
        """Having heard everything, or nothing of what came lately."""
        assert self.client is not None
        self.hear()
        self.may_repeat |= self.lately.keys()
        if not is_heard:
            self.knows |= self.lately
        self.client.leave()
        self.client = None

    @precondition(lambda self: self.client is None)
    @rule()
    def come(self) -> None:
        self.enter()

    @rule()
    def take_over(self) -> None:
        if self.client is not None:
            self.hear()
        self.may_repeat |= self.lately.keys()
        self.enter()

    @rule(is_saved=st.booleans())
    def end_server(self, is_saved: bool) -> None:
        """With what was saved a moment ago, or without what happened since, which the sources then say again."""
        if self.client is not None:
            self.hear()
            assert self.client.subscriber is not None
            mailbox = self.client.subscriber.mailbox
            self.may_repeat |= mailbox.entries.keys() if mailbox else set()  # nobody knows whether that was sent yet
        self.may_repeat |= self.lately.keys()
        if is_saved:
            self.place.save()
        kept = self.place.store._state.durables.get(KEY)
        if kept is not None and self.client is not None:
            # It may have been told of what changed after this was written, for all that the next server knows.
            for topic in self.topics():
                version = self.place.catalog.version(topic)
                if version.revision > kept.as_of or kept.told.get(topic, version) != version:
                    self.may_repeat.add(topic)
        self.client = None
        items = list(self.place.catalog.tools)
        contents = self.place.catalog.resources.contents()
        self.place.die()
        self.place.hold()
        self.place.catalog.tools.replace(items)
        for uri, version in contents.items():
            if self.place.catalog.version(uri).digest != version.digest:
                self.place.catalog.resources.updated(uri, etag=f"again {version}")

    @rule()
    def look(self) -> None:
        """Once everything is saved, it has been told everything."""
        if getattr(self, "client", None) is None:
            return
        self.place.save()
        self.hear()
        self.may_repeat.clear()
        for topic in self.topics():
            assert self.knows[topic] == self.place.catalog.version(topic).digest, f"never told of {topic}"


def test_whatever_happens_a_name_is_told_of_all_and_never_twice() -> None:
    run_state_machine_as_test(Comings, settings=settings(max_examples=EXAMPLES, stateful_step_count=25))


def test_what_only_the_filter_ruled_out_is_no_reason_to_refetch() -> None:
    place = Place(journal_changes=1)
    wanted = Filter(names=["keep*"])
    client = Client(place, filter=wanted)
    for name in ("other1", "other2", "other3"):
        add(place, name)
    client.leave()

    again = Client(place, filter=wanted)

    assert (client.heard, again.heard) == ([], [])
    add(place, "keep")
    assert again.keys == [("added", "keep")]


def test_a_new_pattern_is_known_as_of_when_it_was_put_and_not_as_of_when_somebody_comes(place: Place) -> None:
    Client(place, uris="a://{+path}").leave()
    for uri in ("a://1", "b://1"):
        place.catalog.resources.updated(uri)
    kept = place.durables.get(KEY)
    assert kept is not None
    place.durables.put(structs.replace(kept, uris=("a://{+path}", "b://{+path}")))
    for uri in ("a://2", "b://2"):
        place.catalog.resources.updated(uri)

    client = Client(place, uris=["a://{+path}", "b://{+path}"])

    assert sorted(client.keys) == [("updated", "a://1"), ("updated", "a://2"), ("updated", "b://2")]
