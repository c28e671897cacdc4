"""Any JSON value is a cursor or unknown, and never an error."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.catalog import Catalog
from tidings.core.cursor import Cursor
from tidings.core.hub import Hub
from tidings.core.model import Feature, Notification, Topic, Version
from tidings.core.resume import resume

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS

anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
versions = st.builds(Version, st.integers(0, 2**63 - 1), st.text(max_size=40))
nearly = st.fixed_dictionaries(
    {},
    optional={
        "epoch": st.text() | anything,
        "asOf": anything,
        "topics": anything | st.dictionaries(st.sampled_from(["tools", "prompts", "x"]), anything),
        "uris": anything
        | st.dictionaries(st.text(), st.fixed_dictionaries({"revision": anything, "digest": anything})),
    },
)


@given(
    st.text(),
    st.dictionaries(st.sampled_from(list(Feature)) | st.text(), st.none() | versions),
    st.none() | st.integers(0, 2**63 - 1),
)
def test_cursor_survives_encoding(epoch: str, known: dict[Feature | str, Version | None], as_of: int | None) -> None:
    assert Cursor.parse(Cursor(epoch, known, as_of).as_json()) == Cursor(epoch, known, as_of)


@given(anything | nearly)
def test_any_json_is_accepted_as_a_cursor(garbage: Any) -> None:
    hub = Hub(Catalog())
    received: list[Any] = []
    told, refetch = resume(garbage, "here", hub, [TOOLS, "file:///a", "board://*"])

    hub.subscribe(received.append, "tools", uris=["file:///a"], told=told)

    cursor = Cursor.parse(garbage)
    if cursor is None:
        assert told == {TOOLS: None, "file:///a": None}
        assert refetch == ("board://*",)
        assert [(each.topic, each.complete) for each in received] == [(TOOLS, False), ("file:///a", False)]
    else:
        assert told.keys() <= cursor.versions.keys()
        assert bool(refetch) == (cursor.as_of is not None and (cursor.epoch != "here" or cursor.as_of != 0))


@pytest.mark.parametrize(
    "version",
    [None, 7, "7", [], {}, {"revision": 1}, {"digest": "a"}, {"revision": -1, "digest": "a"},
     {"revision": True, "digest": "a"}, {"revision": 1.0, "digest": "a"}, {"revision": 2**63, "digest": "a"},
     {"revision": 1, "digest": 5}, {"revision": 1, "digest": "a" * 129}, {"revision": 1, "digest": "\ud800"}],
)  # fmt: skip
def test_invalid_version_is_unknown_and_others_count(version: Any) -> None:
    good = {"revision": 3, "digest": "abc"}

    cursor = Cursor.parse({"epoch": "e", "topics": {"tools": version, "prompts": good, "others": good}})

    assert cursor == Cursor("e", {TOOLS: None, PROMPTS: Version(3, "abc")})


def test_cursor_with_too_many_uris_is_unknown() -> None:
    version = {"revision": 1, "digest": "a"}
    assert Cursor.parse({"epoch": "e", "uris": {f"a:{number}": version for number in range(10_000)}}) is not None
    assert Cursor.parse({"epoch": "e", "uris": {f"a:{number}": version for number in range(10_001)}}) is None


def test_only_digests_of_lists_are_valid_in_another_epoch() -> None:
    cursor = Cursor("then", {TOOLS: Version(7, "abc"), PROMPTS: None, "file:///a": Version(8, "def")})

    assert cursor.told("then") == cursor.versions
    assert cursor.told("now") == {TOOLS: Version(-1, "abc"), PROMPTS: None, "file:///a": None}


def test_newer_cursor_updates_the_older_one() -> None:
    first = Cursor("e", {TOOLS: Version(1, "a"), PROMPTS: Version(2, "b")})

    assert first.merge(Cursor("e", {TOOLS: Version(3, "c")})).versions == {TOOLS: (3, "c"), PROMPTS: (2, "b")}
    watcher = first.merge(Cursor("e", {}, 5))
    assert watcher == Cursor("e", first.versions, 5)
    assert watcher.merge(Cursor("e", {"file:///a": Version(6, "d")})).as_of == 5, (
        "one notification says nothing of others"
    )
    assert watcher.merge(Cursor("e", {}, 9)).as_of == 9


def test_older_cursor_does_not_replace_newer_versions() -> None:
    listed = Cursor("here", {TOOLS: Version(2, "B"), "a://b": Version(3, "C")})
    heartbeat = Cursor("here", {TOOLS: Version(1, "A"), "a://b": Version(4, "D")}, as_of=4)

    assert listed.merge(heartbeat) == Cursor("here", {TOOLS: Version(2, "B"), "a://b": Version(4, "D")}, as_of=4)
    assert listed.merge(Cursor("here", {TOOLS: None})).versions[TOOLS] is None
    assert listed.merge(Cursor("there", {TOOLS: Version(1, "A")})).versions[TOOLS] == Version(1, "A")


def test_version_that_a_client_has_just_read_replaces_a_newer_one() -> None:
    """It has read the list of a replica that is behind."""
    known = Cursor("e", {TOOLS: Version(2, "B"), PROMPTS: Version(2, "P")}, as_of=2)

    read = known.merge(Cursor("e", {TOOLS: Version(1, "A")}), is_read=True)

    assert read == Cursor("e", {TOOLS: Version(1, "A"), PROMPTS: Version(2, "P")}, as_of=2)


def test_versions_of_an_earlier_epoch_are_not_taken_as_current() -> None:
    """The client has fetched one list since a restart; its other versions are from before it."""
    catalog = Catalog()
    catalog.tools.add({"name": "a"})
    catalog.prompts.add({"name": "same"})
    catalog.resources.updated("file:///a", etag="1")
    topics: list[Topic] = [TOOLS, PROMPTS, Feature.RESOURCES, "file:///a"]
    held = Cursor("before", {topic: catalog.version(topic) for topic in topics}, as_of=3)
    catalog.resources.add({"uri": "file:///a", "name": "new"})
    catalog.tools.add({"name": "b"})
    hub = Hub(catalog)

    cursor = held.merge(Cursor("after", {TOOLS: catalog.version(TOOLS)}))
    told, refetch = resume(cursor.as_json(), "after", hub, [*topics, "board://*"])
    received: list[Notification] = []
    hub.subscribe(received.append, *Feature, uris=["file:///a"], told=told)

    assert [(each.topic, each.complete) for each in received] == [(Feature.RESOURCES, False), ("file:///a", False)]
    assert refetch == ("board://*",)
    assert cursor.merge(Cursor("after", {"file:///a": Version(9, "c")}, 9)).as_of == 9


def test_uri_that_is_not_encodable_is_ignored() -> None:
    version = {"revision": 1, "digest": "a"}

    cursor = Cursor.parse({"epoch": "e", "uris": {"a://\ud800": version, "a://b": version}})

    assert cursor == Cursor("e", {"a://b": Version(1, "a")})
