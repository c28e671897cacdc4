"""How names are kept: given, limited, listed, changed, removed, forgotten in time, and written down."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from typing import Any

import pytest

from tests.support.durables import KEY, Client, Place, add
from tidings import Feature, LimitReached, TidingsError
from tidings.store.durable import SERVER, DurableSubscription, Owner, Webhook
from tidings.store.durable_registry import DurableSubscriptions

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
HALF = {"name": "\ud800"}  # half of a surrogate pair, which JSON can say and UTF-8 can't


@pytest.fixture
def place() -> Place:
    return Place()


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
    visit = place.durables.connect({"name": "laptop", "ttl": 10**400}, None, [TOOLS], [], {}, lambda: None)
    assert visit is not None
    assert visit.ack["ttl"] == place.policy.durable_ttl


@pytest.mark.parametrize("asked", [None, 3, "laptop", [], {}, {"name": ""}, {"name": 3}, {"name": "x" * 257}, HALF])
def test_what_is_no_name_makes_nothing_durable(place: Place, asked: Any) -> None:
    assert place.durables.connect(asked, None, [TOOLS], [], {}, lambda: None) is None
    assert place.durables.terms(asked, None) == {}
    assert len(place.durables) == 0


@pytest.mark.parametrize(
    ("uris", "terms"),
    [(["a://\ud800"], {}), ([], {"names": ["\ud800"]}), ([f"a://{number:0100}" for number in range(10_000)], {})],
    ids=["uri", "terms", "size"],
)
def test_what_could_not_be_written_down_makes_nothing_durable(place: Place, uris: list[str], terms: Any) -> None:
    assert place.durables.connect({"name": "laptop"}, None, [TOOLS], uris, terms, lambda: None) is None
    with pytest.raises(TidingsError):
        place.durables.put(DurableSubscription(name="laptop", uris=tuple(uris), terms=terms))
    assert len(place.durables) == 0


@pytest.mark.parametrize(
    ("name", "uris", "said"),
    [
        ("", (), "1 to 256 characters"),
        ("x" * 257, (), "1 to 256 characters"),
        ("\ud800", (), "half a character"),
        ("laptop", ("a://{",), "not a URI template"),
        ("laptop", ("a://\ud800*",), "half a surrogate pair"),
        ("laptop", tuple(f"a://{number}" for number in range(4)), r"Policy\.max_uris"),
    ],
)
def test_what_can_not_be_is_refused_in_words(name: str, uris: tuple[str, ...], said: str) -> None:
    place = Place(max_uris=3)
    with pytest.raises(TidingsError, match=said):
        place.durables.put(DurableSubscription(name=name, features=(TOOLS,), uris=uris))
    assert len(place.durables) == 0


def test_there_are_limits_in_all_and_for_each_owner() -> None:
    place = Place(max_durables=5, max_durables_per_principal=2)
    names = [Client(place, name=name, owner=("me", None)).visit for name in "abc"]
    assert [visit is not None for visit in names] == [True, True, False]
    others = [Client(place, name=name).visit for name in "abcd"]
    assert [visit is not None for visit in others] == [True, True, True, False]
    with pytest.raises(LimitReached, match=r"there are 5 durable subscriptions; Policy\.max_durables allows 5"):
        place.durables.put(DurableSubscription(name="z"))
    assert place.durables.remove((None, "a"))
    assert place.durables.put(DurableSubscription(name="z", features=(TOOLS,), ttl=5)).lists[
        TOOLS
    ] == place.catalog.version(TOOLS)
    assert Client(place, name="a", owner=("me", None)).visit is not None, "one that is there may come back"


def test_one_that_is_removed_is_ended_and_forgotten(place: Place) -> None:
    seen: list[Any] = []
    stop = place.durables.follow(lambda key, durable: seen.append((key, durable and durable.name)))
    client = Client(place)
    place.durables.put(DurableSubscription(name="other", ttl=9))

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
    place.durables.put(DurableSubscription(name="laptop", features=(TOOLS, PROMPTS), uris=("b://1",), ttl=9))
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
    place.durables.put(DurableSubscription(name="laptop", features=(PROMPTS, TOOLS), ttl=9))
    assert not client.is_ended
    assert place.durables.is_connected(KEY)
    client.leave()
    kept = place.durables.get(KEY)
    assert kept is not None
    assert kept.expires == place.now + 9


def test_contents_that_are_no_longer_watched_are_forgotten(place: Place) -> None:
    uris: tuple[str, ...] = ()
    kept = DurableSubscription(name="laptop")
    for number in range(3):
        uris = ("b://1", *(f"a://{number}/{each}" for each in range(50)))
        kept = place.durables.put(DurableSubscription(name="laptop", uris=uris, ttl=9, expires=place.now + 9))
        for uri in uris:
            place.catalog.resources.updated(uri)
    assert list(kept.contents) == ["b://1"]


def test_several_of_one_name_can_be_listed(place: Place) -> None:
    owners: list[Owner] = [("me", None), None, ("me", "x"), SERVER]
    for owner in owners:
        place.durables.put(DurableSubscription(name="laptop", owner=owner, ttl=9))
    assert {each.owner for each in place.durables.all()} == set(owners)


def test_without_a_store_nothing_is_noted_for_it(place: Place) -> None:
    durables = DurableSubscriptions(place.hub)
    durables.put(DurableSubscription(name="laptop", ttl=9))
    assert not durables.unsaved.has_records
    durables = DurableSubscriptions(place.hub, wake=lambda: False)
    durables.put(DurableSubscription(name="laptop", ttl=9))
    assert not durables.unsaved.has_records


@pytest.mark.parametrize("expires", [None, 1001.0])
def test_the_time_of_a_webhook_runs_only_when_it_was_given_up(place: Place, expires: float | None) -> None:
    tried = Webhook(url="https://a.example/", secret="s", attempts=3, next_attempt=9000.0)
    dead = Webhook(url="https://a.example/", secret="s", is_dead=True)
    kept = [DurableSubscription(name="tried", ttl=5, expires=expires, webhook=tried)]
    kept.append(DurableSubscription(name="dead", ttl=5, expires=expires, webhook=dead))
    place.now += 0.5
    durables = DurableSubscriptions(place.hub, kept)
    ends = {each.name: each.expires for each in durables.all()}
    assert ends == {"tried": None, "dead": 1005.5 if expires is None else expires}
    place.now += 10
    assert [each.name for each in durables.all()] == ["tried"]


def test_fields_can_be_changed_and_terms_are_kept(place: Place) -> None:
    place.durables.connect({"name": "laptop"}, None, [TOOLS], [], {"operations": ["added"]}, lambda: None)
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

    assert len(place.durables.unsaved.collect(lambda: pauses.append(1))) == 1000
    assert len(pauses) >= 2
    place.durables.unsaved.written()
    assert place.durables.unsaved.collect() == {}


def test_nobody_waits_long_for_those_who_watch_much(place: Place) -> None:
    uris = [f"file:///some/folder/of/a/project/{number}.md" for number in range(10_000)]
    for number in range(20):
        Client(place, name=str(number), uris=uris)
    add(place, "a")
    gc.collect()
    gc.disable()  # its pauses are nobody's here
    try:
        times = [time.thread_time()]
        assert len(place.durables.unsaved.collect(lambda: times.append(time.thread_time()))) == 20
        times.append(time.thread_time())
    finally:
        gc.enable()
    assert len(times) >= 10
    assert max(after - before for before, after in pairwise(times)) < (times[-1] - times[0]) / 2


def test_names_that_come_and_go_while_nothing_can_be_written_leave_nothing(place: Place) -> None:
    durables = place.durables
    durables.put(DurableSubscription(name="stays", ttl=9))
    durables.put(DurableSubscription(name="was written", ttl=9))
    place.save()
    durables.remove((None, "was written"))
    for number in range(100):
        durables.put(DurableSubscription(name=f"collected {number}", ttl=9))
        durables.unsaved.collect()
        durables.remove((None, f"collected {number}"))
        durables.put(DurableSubscription(name=f"marked {number}", ttl=9))
        durables.remove((None, f"marked {number}"))

    assert dict(durables.unsaved.collect()) == {(None, "was written"): None}
    place.save()
    place.die()
    assert [each.name for each in place.durables.all()] == ["stays"]


def test_a_name_that_is_removed_while_it_is_written_is_gone(place: Place) -> None:
    place.durables.put(DurableSubscription(name="laptop", ttl=9))
    place.batch.durables.update(place.durables.unsaved.collect())
    place.durables.remove(KEY)
    place.store.write(place.batch)
    place.batch.durables.clear()
    place.durables.unsaved.written()

    place.save()
    place.die()
    assert place.durables.all() == []
