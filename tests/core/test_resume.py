"""A returning client gets what it missed through patterns and folders, or must refetch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tidings.core.catalog import Catalog
from tidings.core.cursor import Cursor
from tidings.core.hub import Hub
from tidings.core.model import Feature, Notification, Topic, Version
from tidings.core.patterns import Match, is_pattern
from tidings.core.resume import _MAX_WORK, Resumed, contents_changed, resume, watched_among
from tidings.policy import Policy
from tidings.sdk.uri_templates import read_template

EPOCH = "here"
PATTERNS = ["board://*", "board://{number}", "board://7"]


class Server:
    def __init__(self, **policy: Any) -> None:
        self.catalog = Catalog(Policy(**policy))
        self.hub = Hub(self.catalog, templates=read_template)

    def change(self, *uris: str, etag: str | None = None) -> None:
        for uri in uris:
            self.catalog.resources.updated(uri, etag=etag)

    def cursor(self, versions: dict[Topic, Version | None] | None = None, epoch: str = EPOCH) -> dict[str, Any]:
        """Return the cursor of a client that knows everything."""
        return Cursor(epoch, versions or {}, self.hub.notifications.revision).as_json()

    def resume(self, cursor: Any, *topics: Topic, is_authorized: Callable[[str], bool] | None = None) -> Resumed:
        return resume(cursor, EPOCH, self.hub, topics, is_authorized)

    def told(self, cursor: Any, *topics: Topic) -> list[Notification]:
        received: list[Notification] = []
        features = [topic for topic in topics if isinstance(topic, Feature)]
        uris = [topic for topic in topics if not isinstance(topic, Feature)]
        self.hub.subscribe(received.append, *features, uris=uris, told=self.resume(cursor, *topics).told)
        return received


@pytest.mark.parametrize("watched", ["board://*", "board://{number}", "board://**"])
def test_pattern_subscription_resumes(watched: str) -> None:
    server = Server()
    server.change("board://1", "board://2", "file:///a")
    cursor = server.cursor()
    server.change("board://2", "file:///a", "board://3", "board://3")

    told = server.told(cursor, watched)

    assert [(each.topic, each.complete) for each in told] == [("board://2", True), ("board://3", True)]
    assert server.told(server.cursor(), watched) == []


def test_folder_subscription_resumes_if_subresources_count() -> None:
    for subresources in (True, False):
        server = Server(subresources=subresources)
        cursor = server.cursor({"file:///dir": Version(0, "")})
        server.change("file:///dir/a", "file:///dirt")

        assert [each.topic for each in server.told(cursor, "file:///dir")] == ["file:///dir/a"] * subresources


def test_version_in_the_cursor_overrides_its_revision() -> None:
    server = Server()
    server.change("board://1", "board://2", "board://3")
    cursor = Cursor.parse(server.cursor())
    assert cursor is not None
    server.change("board://1", "board://2")
    received = cursor.merge(Cursor(EPOCH, {"board://1": server.hub.notifications.version("board://1")}))

    assert [each.topic for each in server.told(received.as_json(), "board://*")] == ["board://2"]


def test_unwatched_lists_and_resources_are_ignored() -> None:
    server = Server()
    cursor = server.cursor({Feature.TOOLS: None, "secret://1": None})
    server.change("secret://1", "board://1", "board://2")

    assert server.resume(cursor, "board://*").told.keys() == {"board://1", "board://2"}
    assert server.resume(cursor, "board://*", is_authorized=lambda uri: uri != "board://2").told.keys() == {"board://1"}
    assert server.resume(cursor, "board://2", is_authorized=lambda uri: False).told.keys() == {"board://2"}, (
        "named by the client itself"
    )


def test_cursor_without_revision_takes_patterns_as_current() -> None:
    server = Server()
    server.change("board://1")

    assert server.resume(Cursor(EPOCH).as_json(), *PATTERNS) == ({}, ())


@pytest.mark.parametrize("as_of", [-1, "7", True, 1.0, 1 << 63, 1 << 62, None])
def test_invalid_or_future_revision_means_refetch(as_of: Any) -> None:
    server = Server()
    server.change("board://1")

    told, refetch = server.resume({"epoch": EPOCH, "asOf": as_of}, Feature.TOOLS, *PATTERNS)

    assert told == {}
    assert refetch == (() if as_of is None else tuple(PATTERNS))


def test_other_epoch_or_invalid_cursor_means_refetch() -> None:
    server = Server()
    server.change("board://7")
    known: dict[Topic, Version | None] = {"board://7": server.hub.notifications.version("board://7")}

    for cursor in ("garbage", server.cursor(known, epoch="elsewhere")):
        assert server.resume(cursor, *PATTERNS) == ({"board://7": None}, ("board://*", "board://{number}"))
        assert [(each.topic, each.complete) for each in server.told(cursor, *PATTERNS)] == [("board://7", False)]
    assert server.resume({"epoch": EPOCH, "uris": {"board://*": None}}, *PATTERNS).told == {}


def test_dropped_contents_mean_refetch() -> None:
    server = Server(max_contents=2)
    server.change("board://1")
    before, after = server.cursor(), server.cursor()
    server.change("board://2", "board://3", "board://4")
    after["asOf"] = before["asOf"] + 1

    assert server.resume(before, "board://*").refetch == ("board://*",), (
        "1 is dropped, and so is 2, which changed later"
    )
    assert server.resume(after, "board://*") == ({"board://3": (0, ""), "board://4": (0, "")}, ())


def test_content_unknown_before_and_after_a_drop_means_refetch() -> None:
    server = Server(max_contents=2)
    unknown = server.hub.notifications.version("board://1")
    cursor = server.cursor({"board://1": unknown})
    server.change("board://5", "board://6")
    assert server.told(cursor, "board://1") == [], "nothing is dropped yet"
    server.change("board://1", "board://2", "board://3")

    for watched in ("board://1", "board://*"):
        received = server.told({**cursor, "asOf": server.hub.notifications.revision}, watched)
        assert [(each.topic, each.complete) for each in received] == [("board://1", False)]
        assert server.told(server.cursor({"board://1": received[0].version}), watched) == [], "once"


def test_more_contents_than_may_be_pending_mean_refetch() -> None:
    server = Server(max_pending=3)
    cursor = server.cursor()
    server.change("board://1", "board://2", "board://3")
    assert len(server.resume(cursor, "board://*").told) == 3
    server.change("board://4")

    assert server.resume(cursor, "board://*") == ({}, ("board://*",))
    assert contents_changed(server.hub, ["board://*"], 0) is None


HOSTILE = {
    "ambiguous globs": [f"board://*{one}{two}*" for one in "0123456789" for two in "0123456789abcdefghijklmnopqrst"],
    "ambiguous templates": [f"board://{{x{number}}}" for number in range(300)],
    "folders of many lengths": ["board://" + "a" * number for number in range(1_000)],
}
"""Topics that are all tried for each of `SEEN`."""
SEEN = ["board://" + "0123456789" * 9 + str(number) for number in range(5_000)]


@pytest.mark.parametrize("topics", HOSTILE.values(), ids=HOSTILE)
def test_cursor_that_takes_too_long_to_compare_means_refetch(topics: list[str]) -> None:
    server = Server(max_uris=20_000)
    server.change(*SEEN[:100])
    watched = server.hub.index.watched(topics)
    assert watched_among(SEEN, watched) is None
    assert watched.work < 2 * _MAX_WORK, "it stops soon after the limit"

    known = server.cursor(dict.fromkeys(SEEN))
    told, refetch = server.resume(known, *topics)

    patterns = [topic for topic in topics if is_pattern(topic)]
    assert (set(told), set(refetch)) == (set(topics) - set(patterns), set(patterns))


def test_work_of_a_cursor_does_not_depend_on_patterns_that_differ_in_literal_text() -> None:
    server = Server()
    few, many = (server.hub.index.watched([f"board://b{n}/*" for n in range(size)]) for size in (10, 1_000))
    uris = [f"board://b{number}/x" for number in range(10)] * 50

    assert watched_among(uris, few) == watched_among(uris, many) == uris

    assert many.work < 2 * few.work < _MAX_WORK


def test_nothing_is_compiled_without_a_cursor() -> None:
    server, compiled = Server(), []

    def count(template: str) -> Match:
        compiled.append(template)
        return read_template(template)

    server.hub = Hub(server.catalog, templates=count)

    for cursor in (None, server.cursor(), server.cursor({Feature.TOOLS: None})):
        server.resume(cursor, Feature.TOOLS, "board://{x}")

    assert compiled == []


def test_priorities_that_take_too_long_for_a_cursor_mean_refetch() -> None:
    server, uris = Server(), [f"board://{number}" for number in range(2_000)]
    server.change(*uris)
    cursor = server.cursor(dict.fromkeys(uris))

    assert not resume(cursor, EPOCH, server.hub, uris, priorities=1).refetch
    for given in (cursor, None):
        told, refetch = resume(given, EPOCH, server.hub, uris, priorities=64)
        assert (told, refetch) == ({}, tuple(uris)), "they would be tried for each notification"


def test_more_missed_contents_than_are_told_one_by_one_mean_refetch() -> None:
    server, uris = Server(), [f"board://{number}" for number in range(2_001)]
    server.change(*uris)
    known: dict[Topic, Version | None] = {uri: server.hub.notifications.version(uri) for uri in uris}
    cursor = server.cursor(dict.fromkeys(uris))

    assert server.resume(cursor, *uris[1:]).refetch == ()
    for invalid_or_old in (cursor, None):
        resumed = server.resume(invalid_or_old, Feature.TOOLS, *uris)
        assert set(resumed.told) <= {Feature.TOOLS}
        assert resumed.refetch == tuple(uris)
    assert server.resume(server.cursor(known), *uris).refetch == (), "all are current"


def test_many_missed_contents_are_told_in_several_turns() -> None:
    """Otherwise all other clients would wait for one that returns."""
    server, uris = Server(), [f"board://{number}" for number in range(600)]
    received: list[Notification] = []

    server.hub.subscribe(server.hub.open(received.append), uris=uris, told=dict.fromkeys(uris))
    counts = [len(received)]
    server.change("board://599")
    while (due := server.hub.next_due()) is not None:
        server.hub.tick(due)
        counts.append(len(received))

    assert max(after - before for before, after in pairwise([0, *counts])) < len(uris)
    assert [each.topic for each in received] == uris, "each once, and in order"
    assert received[-1].version == server.hub.notifications.version("board://599")


def test_named_contents_are_told_beyond_the_pending_limit() -> None:
    """Otherwise it would be closed each time it returns."""
    server = Server(max_pending=10)
    uris = [f"a://{number}" for number in range(25)]
    received: list[Notification] = []
    subscriber = server.hub.open(received.append)

    server.hub.subscribe(subscriber, uris=uris, told=dict.fromkeys(uris))

    assert [each.topic for each in received] == uris
    assert not subscriber.is_closed
