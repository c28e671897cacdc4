"""Whoever comes back under its name is told what differs from what it was last told, and nothing else."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.durables import KEY, Client, Place, add
from tidings import Feature, Policy
from tidings.core.filters import Filter

TOOLS, PROMPTS, RESOURCES = Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES


@pytest.fixture
def place() -> Place:
    return Place()


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


def test_who_missed_nothing_is_told_nothing(place: Place) -> None:
    client = Client(place, TOOLS, RESOURCES, uris="a://b")
    add(place, "a")
    place.catalog.resources.updated("a://b", etag="1")
    place.settle()
    client.leave()
    place.catalog.resources.updated("a://b", etag="2")
    place.catalog.resources.updated("a://b", etag="1")
    add(place, "b")
    place.catalog.tools.remove("b")

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
