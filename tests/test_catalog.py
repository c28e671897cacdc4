"""Operations in, Changes out: exactly those that happened, in one order, and none for what changed nothing."""

import logging
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings import AlreadyExists, Catalog, Change, Feature, InvalidItem, NotFound, Operation, Policy, TidingsError
from tidings.catalog import Items
from tidings.digest import EMPTY

ADDED, REMOVED, UPDATED, DELETED = Operation
TOOLS, PROMPTS, RESOURCES = Feature

PROMPT = {
    "name": "review",
    "title": "Review",
    "description": "",
    "arguments": [
        {"name": "diff", "required": True, "description": "A unified diff"},
        {"name": "tone", "required": False},
    ],
    "icons": [{"src": "data:image/png;base64,aGk=", "mimeType": "image/png", "sizes": ["48x48"]}],
    "_meta": {"com.example/owner": "ädä 🦊"},
}
TOOL = {
    "name": "add",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "number", "default": None}}, "required": ["a"]},
    "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True},
    "execution": {"taskSupport": "optional"},
}
RESOURCE = {
    "uri": "file:///ä b",
    "name": "notes",
    "mimeType": "text/plain",
    "size": 12,
    "annotations": {"audience": ["user"], "priority": 0.5, "lastModified": "2026-07-28T00:00:00Z"},
}
TEMPLATE = {"uriTemplate": "board://{sprint}", "name": "sprint", "description": "One sprint"}
ITEMS = [(TOOLS, TOOL, "add"), (PROMPTS, PROMPT, "review"), (RESOURCES, RESOURCE, "file:///ä b"),
         (RESOURCES, TEMPLATE, "board://{sprint}")]  # fmt: skip

Published = list[tuple[Change, ...]]


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def published(catalog: Catalog) -> Published:
    published: Published = []
    catalog.follow(published.append)
    return published


def summary(changes: tuple[Change, ...] | list[Change]) -> list[tuple[Operation, str]]:
    return [(change.operation, change.key) for change in changes]


def state(catalog: Catalog) -> object:
    return [
        (catalog.version(feature), [item.json for item in catalog.items(feature).snapshot()]) for feature in Feature
    ]


# Items


@pytest.mark.parametrize(("feature", "definition", "key"), ITEMS)
def test_an_item_comes_changes_and_goes_with_one_change_each(
    catalog: Catalog, published: Published, feature: Feature, definition: dict[str, Any], key: str
) -> None:
    items = catalog.items(feature)
    items.add(definition)
    items.update(key, title="Another")
    items.remove(key)

    assert [summary(changes) for changes in published] == [[(ADDED, key)], [(UPDATED, key)], [(REMOVED, key)]]
    added, updated, removed = (changes[0] for changes in published)
    assert all(change.topic is feature for change in (added, updated, removed))
    assert [added.revision, updated.revision, removed.revision] == [1, 2, 3]
    assert added.item is not None
    assert updated.item is not None
    assert added.item.definition == definition
    assert updated.item.definition == definition | {"title": "Another"}
    assert added.before is None
    assert updated.before is added.item
    assert removed.before is updated.item
    assert removed.item is None
    assert updated.previous == added.version
    assert catalog.version(feature) == removed.version
    assert removed.digest == EMPTY


@pytest.mark.parametrize(("feature", "definition", "key"), ITEMS)
def test_definitions_are_kept_whole_and_as_they_are(
    catalog: Catalog, feature: Feature, definition: dict[str, Any], key: str
) -> None:
    items = catalog.items(feature)
    items.add(definition)

    assert items.get(key) == definition
    assert list(items.get(key) or ()) == list(definition), "even the order of the fields"
    assert list(items) == [definition]
    assert key in items
    assert len(items) == 1


def test_missing_and_empty_descriptions_are_two_different_things(catalog: Catalog) -> None:
    catalog.prompts.add({"name": "missing"})
    catalog.prompts.add({"name": "empty", "description": ""})

    assert catalog.prompts.get("missing") == {"name": "missing"}
    assert catalog.prompts.get("empty") == {"name": "empty", "description": ""}
    assert catalog.prompts.update("missing", description="") != []


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_any_unicode_survives(name: str, description: str) -> None:
    catalog = Catalog()
    [change] = catalog.prompts.add({"name": name, "description": description})

    assert change.key == name
    assert catalog.prompts.get(name) == {"name": name, "description": description}


def test_what_the_caller_does_later_to_its_definition_changes_nothing(catalog: Catalog) -> None:
    mine: dict[str, Any] = {"name": "a", "inputSchema": {"type": "object"}}
    catalog.tools.add(mine)
    mine["inputSchema"]["type"] = "array"
    copy = catalog.tools.get("a")
    assert copy is not None
    copy["inputSchema"]["type"] = "string"

    assert catalog.tools.get("a") == {"name": "a", "inputSchema": {"type": "object"}}


def test_an_update_changes_only_the_fields_given_and_none_takes_one_away(catalog: Catalog) -> None:
    catalog.prompts.add(PROMPT)
    catalog.prompts.update("review", {"title": "Check", "_meta": None}, description="New")

    expected = PROMPT | {"title": "Check", "description": "New"}
    del expected["_meta"]
    assert catalog.prompts.get("review") == expected


def test_an_update_leaves_alone_a_field_that_is_null(catalog: Catalog) -> None:
    catalog.tools.add({"name": "a", "extra": None})
    catalog.tools.update("a", title="A")

    assert catalog.tools.get("a") == {"name": "a", "extra": None, "title": "A"}


def test_add_with_replace_is_an_upsert(catalog: Catalog) -> None:
    assert summary(list(catalog.tools.add(TOOL, replace=True))) == [(ADDED, "add")]
    assert summary(list(catalog.tools.add(TOOL | {"title": "Add"}, replace=True))) == [(UPDATED, "add")]
    assert list(catalog.tools.add(TOOL | {"title": "Add"}, replace=True)) == []


def test_replace_yields_exactly_the_operations_that_happened(catalog: Catalog, published: Published) -> None:
    catalog.tools.replace([{"name": "a"}, {"name": "b"}, {"name": "c"}])
    published.clear()

    catalog.tools.replace([{"name": "d"}, {"name": "c", "title": "C"}, {"name": "a"}])

    [changes] = published
    assert sorted(summary(changes)) == [(ADDED, "d"), (REMOVED, "b"), (UPDATED, "c")]
    assert [item.key for item in catalog.tools.snapshot()] == ["a", "c", "d"]


names = st.sampled_from(["a", "b", "c", "d"])
contents = st.dictionaries(names, st.sampled_from(["1", "2"]))


@given(contents, contents)
def test_replace_leads_from_any_list_to_any_other_and_touches_what_differs_only(
    before: dict[str, str], after: dict[str, str]
) -> None:
    catalog = Catalog()
    catalog.tools.replace({"name": name, "title": title} for name, title in before.items())
    start = catalog.revision

    changes = catalog.tools.replace({"title": title, "name": name} for name, title in after.items())

    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {change.key for change in changes} == differing
    assert len(changes) == len(differing)
    assert catalog.revision == start + len(differing)
    scratch = Catalog()
    scratch.tools.replace({"name": name, "title": after[name]} for name in sorted(after, reverse=True))
    assert catalog.version(TOOLS).digest == scratch.version(TOOLS).digest


@pytest.mark.parametrize(
    "again",
    [
        lambda tools: tools.add(dict(reversed(TOOL.items())), replace=True),
        lambda tools: tools.update("add", annotations={"readOnlyHint": True}),
        lambda tools: tools.update("add", nothing=None),
        lambda tools: tools.update("add"),
        lambda tools: tools.replace([TOOL]),
    ],
    ids=["add", "update", "remove-missing-field", "update-nothing", "replace"],
)
def test_an_operation_that_changes_nothing_has_no_change_and_no_revision(
    catalog: Catalog, published: Published, again: Callable[[Items], object]
) -> None:
    catalog.tools.add(TOOL)
    published.clear()
    before = state(catalog)

    assert again(catalog.tools) == []

    assert published == []
    assert state(catalog) == before
    assert catalog.revision == 1


# Errors


@pytest.mark.parametrize(("feature", "definition", "key"), ITEMS)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda items, definition, key: items.add(definition), AlreadyExists),
        (lambda items, definition, key: items.remove(key + "?"), NotFound),
        (lambda items, definition, key: items.update(key + "?", title="x"), NotFound),
    ],
    ids=["add", "remove", "update"],
)
def test_an_operation_on_the_wrong_key_names_feature_and_key_and_leaves_the_catalog_untouched(
    catalog: Catalog,
    published: Published,
    feature: Feature,
    definition: dict[str, Any],
    key: str,
    wrong: Callable[[Items, dict[str, Any], str], object],
    error: type[TidingsError],
) -> None:
    items = catalog.items(feature)
    items.add(definition)
    published.clear()
    before = state(catalog)

    with pytest.raises(error) as caught:
        wrong(items, definition, key)

    message = str(caught.value)
    assert message.startswith(feature.value + ": ")
    assert repr(key)[:-1] in message
    assert published == []
    assert state(catalog) == before


@pytest.mark.parametrize(
    ("feature", "definition", "complaint"),
    [
        (TOOLS, b"add", "tools: an item is a mapping, not b'add'"),
        (TOOLS, {"title": "a"}, "tools: an item needs a name"),
        (PROMPTS, {"name": 7}, "prompts: an item needs a name"),
        (PROMPTS, {"name": b"a"}, "prompts: an item needs a name"),
        (RESOURCES, {"name": "a"}, "resources: an item needs a uri or a uriTemplate"),
        (TOOLS, {"name": "a", "x": object()}, "tools: 'a' can't be written as JSON"),
        (TOOLS, {"name": "a", "x": "\ud800"}, "tools: 'a' can't be written as JSON"),
        (TOOLS, {"name": "\ud800"}, r"tools: '\\ud800' can't be written as JSON"),
        (TOOLS, {"name": "a", "x": "y" * 1000}, "tools: 'a' has 1019 bytes of JSON; Policy.max_item_bytes allows 100"),
    ],
)
def test_an_invalid_item_is_refused_with_the_reason_and_leaves_the_catalog_untouched(
    feature: Feature, definition: Any, complaint: str
) -> None:
    catalog = Catalog(Policy(max_item_bytes=100))
    items = catalog.items(feature)
    items.add({"name": "kept", "uri": "kept://"})
    before = state(catalog)

    with pytest.raises(InvalidItem, match=complaint):
        items.add(definition)
    with pytest.raises(InvalidItem, match=complaint):
        items.add(definition, replace=True)
    with pytest.raises(InvalidItem, match=complaint):
        items.replace([{"name": "new", "uri": "new://"}, definition])

    assert state(catalog) == before


def test_a_structure_that_contains_itself_is_an_invalid_item(catalog: Catalog) -> None:
    knot: dict[str, Any] = {"name": "knot"}
    knot["self"] = knot

    with pytest.raises(InvalidItem, match="'knot' can't be written as JSON"):
        catalog.tools.add(knot)


def test_an_item_may_be_exactly_as_large_as_the_policy_allows() -> None:
    catalog = Catalog(Policy(max_item_bytes=len(b'{"name":"a"}')))

    catalog.tools.add({"name": "a"})
    with pytest.raises(InvalidItem):
        catalog.tools.add({"name": "ab"})


def test_an_update_can_not_rename_nor_break_an_item(catalog: Catalog) -> None:
    catalog.tools.add({"name": "a"})
    for fields in ({"name": "b"}, {"name": None}, {"x": object()}):
        with pytest.raises(InvalidItem, match=r"^tools: "):
            catalog.tools.update("a", fields)

    assert list(catalog.tools) == [{"name": "a"}]
    assert catalog.revision == 1


def test_replace_refuses_a_key_that_is_there_twice(catalog: Catalog) -> None:
    catalog.tools.add({"name": "a"})
    with pytest.raises(InvalidItem, match="tools: 'b' is there twice"):
        catalog.tools.replace([{"name": "b"}, {"name": "b", "title": "B"}])

    assert list(catalog.tools) == [{"name": "a"}]


# Contents


def test_each_update_without_an_etag_is_a_new_version(catalog: Catalog, published: Published) -> None:
    digests = {catalog.version("a://b").digest}
    for revision in (1, 2, 3):
        catalog.resources.updated("a://b")
        assert catalog.version("a://b").revision == revision
        digests.add(catalog.version("a://b").digest)

    assert len(digests) == 4
    assert [summary(changes) for changes in published] == [[(UPDATED, "a://b")]] * 3


def test_the_same_etag_twice_for_one_uri_is_no_change(catalog: Catalog, published: Published) -> None:
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


def test_metadata_is_passed_on_as_it_was_said(catalog: Catalog) -> None:
    authors = ["ada"]
    [change] = catalog.resources.updated("a://b", etag="1", version=2, author=authors, updated_at="2026-07-28")
    authors.append("somebody else")

    assert change.metadata == {"version": 2, "author": ["ada"], "updated_at": "2026-07-28"}


def test_metadata_without_a_json_form_is_no_reason_to_lose_the_change(catalog: Catalog) -> None:
    [change] = catalog.resources.updated("a://b", author=object(), note="half \ud800")

    assert isinstance(change.metadata, Mapping)
    assert "object object" in change.metadata["author"]
    assert change.metadata["note"] == "half ?"


def test_a_deleted_resource_is_told_as_content_first_and_then_leaves_the_list(
    catalog: Catalog, published: Published
) -> None:
    catalog.resources.add(RESOURCE)
    uri = str(RESOURCE["uri"])
    published.clear()

    catalog.resources.deleted(uri)
    assert catalog.resources.deleted(uri) == [], "gone is gone"

    [changes] = published
    assert [(change.topic, change.operation) for change in changes] == [(uri, DELETED), (RESOURCES, REMOVED)]
    assert uri not in catalog.resources


def test_a_resource_that_was_never_listed_may_be_deleted_and_come_back(catalog: Catalog, published: Published) -> None:
    catalog.resources.updated("a://b", etag="1")
    catalog.resources.deleted("a://b")
    catalog.resources.updated("a://b", etag="1")

    assert [summary(changes) for changes in published] == [
        [(UPDATED, "a://b")],
        [(DELETED, "a://b")],
        [(UPDATED, "a://b")],
    ]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_listed_resource_that_comes_back_can_be_deleted_again(
    catalog: Catalog, published: Published, at_once: bool
) -> None:
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
def test_a_uri_is_a_text_of_whole_characters(catalog: Catalog, uri: Any) -> None:
    for say in (catalog.resources.updated, catalog.resources.deleted):
        with pytest.raises(InvalidItem, match="resources: a URI is a text"):
            say(uri)

    assert catalog.revision == 0


def test_the_content_longest_unchanged_is_forgotten_first() -> None:
    catalog = Catalog(Policy(max_contents=2))
    for uri in ("a://1", "a://2", "a://1", "a://3"):
        catalog.resources.updated(uri)

    known = [uri for uri in ("a://1", "a://2", "a://3") if catalog.version(uri).revision]
    assert known == ["a://1", "a://3"]


# Batches


def test_a_batch_is_one_publication_of_the_net_changes(catalog: Catalog, published: Published) -> None:
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
        assert "new" in catalog.tools, "the batch itself sees what it did"
        assert catalog.version(TOOLS).revision == 2, "and nobody else, yet"

    [commit] = published
    assert list(commit) == changes
    assert summary(commit) == [(ADDED, "new"), (REMOVED, "old"), (ADDED, "review"), (UPDATED, "a://b")]
    assert [change.revision for change in commit] == [3, 4, 5, 6]
    assert commit[0].item is not None
    assert commit[0].item.definition == {"name": "new", "title": "New"}
    assert commit[3].metadata == {"author": "ada"}


def test_a_batch_that_ends_where_it_began_publishes_nothing(catalog: Catalog, published: Published) -> None:
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


def test_a_batch_that_raises_publishes_what_it_did_until_then(catalog: Catalog, published: Published) -> None:
    def half_done() -> None:
        with catalog.batch():
            catalog.tools.add({"name": "a"})
            catalog.tools.remove("unknown")

    with pytest.raises(NotFound):
        half_done()
    catalog.tools.add({"name": "b"})

    assert [summary(changes) for changes in published] == [[(ADDED, "a")], [(ADDED, "b")]]


@given(st.lists(st.tuples(names, st.sampled_from(["1", "2", None])), max_size=8), st.booleans())
def test_revisions_grow_by_one_and_digests_depend_on_content_alone(
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


def test_a_sink_that_fails_is_logged_and_harms_neither_the_others_nor_the_caller(
    catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    heard: Published = []

    def broken(changes: tuple[Change, ...]) -> None:
        raise RuntimeError("broken sink")

    catalog.follow(broken)
    catalog.follow(heard.append)
    with caplog.at_level(logging.ERROR, "tidings"):
        catalog.tools.add({"name": "a"})

    assert [summary(changes) for changes in heard] == [[(ADDED, "a")]]
    assert "broken sink" in caplog.text


def test_a_sink_that_changes_the_catalog_is_heard_by_all_in_the_same_order(catalog: Catalog) -> None:
    before: Published = []
    after: Published = []

    def meddler(changes: tuple[Change, ...]) -> None:
        if changes[0].key == "a":
            catalog.tools.add({"name": "b"})

    catalog.follow(before.append)
    catalog.follow(meddler)
    catalog.follow(after.append)
    catalog.tools.add({"name": "a"})

    assert before == after
    assert [summary(changes) for changes in after] == [[(ADDED, "a")], [(ADDED, "b")]]


def test_a_sink_that_was_stopped_hears_nothing_more(catalog: Catalog) -> None:
    heard: Published = []
    stop = catalog.follow(heard.append)
    catalog.tools.add({"name": "a"})
    stop()
    stop()
    catalog.tools.add({"name": "b"})

    assert len(heard) == 1


def test_many_threads_may_change_the_catalog_at_once(catalog: Catalog) -> None:
    workers, each = 10, 100
    heard: list[Change] = []
    catalog.follow(heard.extend)
    start = threading.Barrier(workers)

    def work(worker: int) -> None:
        start.wait(timeout=10)
        for number in range(each):
            catalog.prompts.add({"name": f"{worker}-{number}"})

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert [change.revision for change in heard] == list(range(1, workers * each + 1))
    for change in heard:
        assert change.item is not None
        assert change.item.definition == {"name": change.key}
    assert {change.key for change in heard} == {f"{one}-{other}" for one in range(workers) for other in range(each)}
    assert all(later.previous == earlier.version for earlier, later in pairwise(heard))


def test_copies_of_one_state_that_go_on_apart_never_give_two_contents_one_version() -> None:
    """As a backup that was restored, beside the server that went on."""
    first, second = Catalog(life="a"), Catalog(life="b")
    for catalog in (first, second):
        catalog.restore((), {}, {}, 7 << 32)
        catalog.resources.updated("file:///a")

    one, other = first.resources.content("file:///a"), second.resources.content("file:///a")
    assert one.revision == other.revision
    assert one.digest != other.digest
