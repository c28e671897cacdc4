"""Contents, batches and sinks of the catalog."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.definitions import PROMPT, RESOURCE, TOOL, names
from tests.support.published import Published, state, summary
from tidings import Catalog, Change, Feature, InvalidItem, NotFound, Operation, Policy

ADDED, REMOVED, UPDATED, DELETED = Operation
TOOLS, PROMPTS, RESOURCES = Feature


# Contents


def test_update_without_etag_is_always_a_new_version(catalog: Catalog, published: Published) -> None:
    digests = {catalog.version("a://b").digest}
    for revision in (1, 2, 3):
        catalog.resources.updated("a://b")
        assert catalog.version("a://b").revision == revision
        digests.add(catalog.version("a://b").digest)

    assert len(digests) == 4
    assert [summary(changes) for changes in published] == [[(UPDATED, "a://b")]] * 3


def test_same_etag_is_no_change(catalog: Catalog, published: Published) -> None:
    for etag in ("1", "1", "2", "2", "1"):
        catalog.resources.updated("a://b", etag=etag)
    catalog.resources.updated("a://c", etag="1")

    assert [(changes[0].key, changes[0].revision) for changes in published] == [
        ("a://b", 1),
        ("a://b", 2),
        ("a://b", 3),
        ("a://c", 4),
    ]
    assert published[0][0].digest == published[2][0].digest == published[3][0].digest


def test_metadata_is_copied_into_the_change(catalog: Catalog) -> None:
    authors = ["ada"]
    [change] = catalog.resources.updated("a://b", etag="1", version=2, author=authors, updated_at="2026-07-28")
    authors.append("somebody else")

    assert change.metadata == {"version": 2, "author": ["ada"], "updated_at": "2026-07-28"}


def test_metadata_without_json_form_becomes_text(catalog: Catalog) -> None:
    [change] = catalog.resources.updated("a://b", author=object(), note="half \ud800")

    assert isinstance(change.metadata, Mapping)
    assert "object object" in change.metadata["author"]
    assert change.metadata["note"] == "half ?"


def test_deletion_of_the_content_comes_before_removal_from_the_list(catalog: Catalog, published: Published) -> None:
    catalog.resources.add(RESOURCE)
    uri = str(RESOURCE["uri"])
    published.clear()

    catalog.resources.deleted(uri)
    assert catalog.resources.deleted(uri) == [], "already deleted"

    [changes] = published
    assert [(change.topic, change.operation) for change in changes] == [(uri, DELETED), (RESOURCES, REMOVED)]
    assert uri not in catalog.resources


def test_unlisted_resource_can_be_deleted_and_updated_again(catalog: Catalog, published: Published) -> None:
    catalog.resources.updated("a://b", etag="1")
    catalog.resources.deleted("a://b")
    catalog.resources.updated("a://b", etag="1")

    assert [summary(changes) for changes in published] == [
        [(UPDATED, "a://b")],
        [(DELETED, "a://b")],
        [(UPDATED, "a://b")],
    ]


@pytest.mark.parametrize("at_once", [False, True])
def test_listed_resource_can_be_deleted_again(catalog: Catalog, published: Published, at_once: bool) -> None:
    uri = str(RESOURCE["uri"])
    for _ in range(2):
        catalog.resources.add(RESOURCE)
        if at_once:
            with catalog.batch():
                catalog.resources.deleted(uri)
                catalog.resources.add(RESOURCE)
        catalog.resources.deleted(uri)

    told = [change.operation for changes in published for change in changes if change.topic == uri]
    assert told.count(DELETED) == 2
    assert uri not in catalog.resources


@pytest.mark.parametrize("uri", [b"a://b", None, "half \ud800"])
def test_uri_must_be_encodable_text(catalog: Catalog, uri: Any) -> None:
    for publish in (catalog.resources.updated, catalog.resources.deleted):
        with pytest.raises(InvalidItem, match="resources: a URI must be a string"):
            publish(uri)

    assert catalog.revision == 0


def test_content_unchanged_for_longest_is_dropped_first() -> None:
    catalog = Catalog(Policy(max_contents=2))
    for uri in ("a://1", "a://2", "a://1", "a://3"):
        catalog.resources.updated(uri)

    known = [uri for uri in ("a://1", "a://2", "a://3") if catalog.version(uri).revision]
    assert known == ["a://1", "a://3"]
    catalog.resources.put_content("a://4", "of another replica", is_silent=True)
    assert [*catalog.resources.contents()] == ["a://3", "a://4"]


# Batches


def test_batch_publishes_net_changes_in_one_commit(catalog: Catalog, published: Published) -> None:
    catalog.tools.replace([{"name": "old"}, {"name": "kept"}])
    published.clear()

    with catalog.batch() as changes:
        catalog.tools.add({"name": "new"})
        catalog.tools.update("new", title="New")
        catalog.tools.add({"name": "passing"})
        catalog.tools.remove("passing")
        catalog.tools.remove("old")
        catalog.prompts.add(PROMPT)
        with catalog.batch():
            catalog.resources.updated("a://b", etag="1")
            catalog.resources.updated("a://b", etag="2", author="ada")
        assert published == []
        assert "new" in catalog.tools, "visible inside the batch"
        assert catalog.version(TOOLS).revision == 2, "not committed yet"

    [commit] = published
    assert list(commit) == changes
    assert summary(commit) == [(ADDED, "new"), (REMOVED, "old"), (ADDED, "review"), (UPDATED, "a://b")]
    assert [change.revision for change in commit] == [3, 4, 5, 6]
    assert commit[0].item is not None
    assert commit[0].item.definition == {"name": "new", "title": "New"}
    assert commit[3].metadata == {"author": "ada"}


def test_batch_without_net_change_publishes_nothing(catalog: Catalog, published: Published) -> None:
    catalog.tools.add(TOOL)
    catalog.resources.updated("a://b", etag="1")
    published.clear()
    before = state(catalog)

    with catalog.batch() as changes:
        catalog.tools.remove("add")
        catalog.tools.add({"name": "add"})
        catalog.tools.add(dict(TOOL), replace=True)
        catalog.prompts.add(PROMPT)
        catalog.prompts.replace([])
        catalog.resources.updated("a://b", etag="2")
        catalog.resources.updated("a://b", etag="1")

    assert (published, changes) == ([], [])
    assert state(catalog) == before
    assert catalog.revision == 2


def test_failed_batch_publishes_its_changes_so_far(catalog: Catalog, published: Published) -> None:
    def half_done() -> None:
        with catalog.batch():
            catalog.tools.add({"name": "a"})
            catalog.tools.remove("unknown")

    with pytest.raises(NotFound):
        half_done()
    catalog.tools.add({"name": "b"})

    assert [summary(changes) for changes in published] == [[(ADDED, "a")], [(ADDED, "b")]]


@given(st.lists(st.tuples(names, st.sampled_from(["1", "2", None])), max_size=8), st.booleans())
def test_revisions_grow_by_one_and_digests_depend_only_on_content(
    steps: list[tuple[str, str | None]], together: bool
) -> None:
    def play(catalog: Catalog) -> None:
        for name, title in steps:
            if title is not None:
                catalog.tools.add({"name": name, "title": title}, replace=True)
            elif name in catalog.tools:
                catalog.tools.remove(name)

    catalog = Catalog()
    changes: list[Change] = []
    catalog.follow(changes.extend)
    if together:
        with catalog.batch():
            play(catalog)
    else:
        play(catalog)

    assert [change.revision for change in changes] == list(range(1, catalog.revision + 1))
    for change in changes:
        assert change.digest != change.previous.digest
    scratch = Catalog()
    scratch.tools.replace(list(catalog.tools)[::-1])
    assert catalog.version(TOOLS).digest == scratch.version(TOOLS).digest


# Sinks and threads


def test_failing_sink_is_logged_and_other_sinks_are_called(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    received: Published = []

    def broken(changes: tuple[Change, ...]) -> None:
        raise RuntimeError("broken sink")

    catalog.follow(broken)
    catalog.follow(received.append)
    with caplog.at_level(logging.ERROR, "tidings"):
        catalog.tools.add({"name": "a"})

    assert [summary(changes) for changes in received] == [[(ADDED, "a")]]
    assert "broken sink" in caplog.text


def test_stopped_sink_gets_nothing(catalog: Catalog) -> None:
    received: Published = []
    stop = catalog.follow(received.append)
    catalog.tools.add({"name": "a"})
    stop()
    stop()
    catalog.tools.add({"name": "b"})

    assert len(received) == 1


def test_copies_of_one_state_never_give_two_contents_one_version() -> None:
    """A restored backup may run beside the server that it was made from."""
    first, second = Catalog(life="a"), Catalog(life="b")
    for catalog in (first, second):
        catalog.restore((), {}, {}, 7 << 32)
        catalog.resources.updated("file:///a")

    one, other = first.resources.content("file:///a"), second.resources.content("file:///a")
    assert one.revision == other.revision
    assert one.digest != other.digest
