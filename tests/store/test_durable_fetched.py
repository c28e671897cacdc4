"""What was shown counts for those who were away too: what they were told is not what they hold, unless they say so."""

from __future__ import annotations

import pytest

from tests.support.durables import Client, Place
from tidings import Cursor, Feature, Version

TOOLS, URI = Feature.TOOLS, "a://b"


@pytest.fixture
def place() -> Place:
    """Somebody was told A and left; it was B for a while."""
    place = Place()
    client = Client(place, TOOLS, uris=URI)
    flip(place, "A")
    place.settle()
    client.leave()
    flip(place, "B")
    return place


def flip(place: Place, state: str) -> None:
    place.catalog.tools.replace([{"name": state}])
    place.catalog.resources.updated(URI, etag=state)


def show(place: Place) -> None:
    for topic in (TOOLS, URI):
        place.hub.notifications.fetched.record(topic, place.catalog.version(topic))


def heard(place: Place, **options: object) -> list[tuple[object, bool]]:
    told = Client(place, TOOLS, uris=URI, **options).heard
    return [(each.topic, each.complete) for each in told]


def test_who_may_have_looked_while_it_was_away_is_told_to_refetch(place: Place) -> None:
    show(place)
    flip(place, "A")

    assert heard(place) == [(TOOLS, False), (URI, False)]


def test_who_could_have_seen_nothing_else_is_told_nothing(place: Place) -> None:
    flip(place, "A")
    show(place)

    assert heard(place) == []


def test_what_an_earlier_life_has_shown_nobody_knows(place: Place) -> None:
    flip(place, "A")
    place.save()
    place.die()

    assert heard(place) == [(TOOLS, False), (URI, False)]


def test_a_restart_in_which_nothing_was_another_one_tells_nobody(place: Place) -> None:
    came = Client(place, TOOLS, uris=URI)
    place.settle()
    came.leave()
    place.save()
    place.die()

    assert heard(place) == []


def test_of_its_own_life_a_server_knows_what_was_shown(place: Place) -> None:
    client = Client(place, TOOLS, uris=URI)
    place.settle()
    client.leave()
    place.save()
    place.die()
    flip(place, "A")
    flip(place, "B")

    assert heard(place) == []


def test_who_says_what_it_holds_is_believed(place: Place) -> None:
    show(place)
    flip(place, "A")
    now = {topic: place.catalog.version(topic) for topic in (TOOLS, URI)}

    assert heard(place, resume=now) == []


def test_a_bookmark_behind_what_its_reader_has_looked_at_does_not_set_it_back() -> None:
    listed = Cursor("here", {TOOLS: Version(2, "B"), URI: Version(3, "C")})
    bookmark = Cursor("here", {TOOLS: Version(1, "A"), URI: Version(4, "D")}, as_of=4)

    assert listed.then(bookmark) == Cursor("here", {TOOLS: Version(2, "B"), URI: Version(4, "D")}, as_of=4)
    assert listed.then(Cursor("here", {TOOLS: None})).versions[TOOLS] is None
    assert listed.then(Cursor("there", {TOOLS: Version(1, "A")})).versions[TOOLS] == Version(1, "A")
