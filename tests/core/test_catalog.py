"""Operations on items make exactly the changes that happened, and an error changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.definitions import PROMPT, RESOURCE, TEMPLATE, TOOL, names
from tests.support.published import Published, state, summary
from tidings import AlreadyExists, Catalog, Feature, InvalidItem, NotFound, Operation, Policy, TidingsError
from tidings.core.catalog import Items
from tidings.core.digest import EMPTY

ADDED, REMOVED, UPDATED, DELETED = Operation
TOOLS, PROMPTS, RESOURCES = Feature

ITEMS = [(TOOLS, TOOL, "add"), (PROMPTS, PROMPT, "review"), (RESOURCES, RESOURCE, "file:///ä b"),
         (RESOURCES, TEMPLATE, "board://{sprint}")]  # fmt: skip

KNOT: dict[str, Any] = {"name": "knot"}
"""An item that contains itself."""
KNOT["self"] = KNOT


# Items


@pytest.mark.parametrize(("feature", "definition", "key"), ITEMS)
def test_add_update_and_remove_make_one_change_each(
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
def test_definition_is_kept_unchanged(catalog: Catalog, feature: Feature, definition: dict[str, Any], key: str) -> None:
    items = catalog.items(feature)
    items.add(definition)

    assert items.get(key) == definition
    assert list(items.get(key) or ()) == list(definition), "even the order of the fields"
    assert list(items) == [definition]
    assert key in items
    assert len(items) == 1


def test_missing_and_empty_description_differ(catalog: Catalog) -> None:
    catalog.prompts.add({"name": "missing"})
    catalog.prompts.add({"name": "empty", "description": ""})

    assert catalog.prompts.get("missing") == {"name": "missing"}
    assert catalog.prompts.get("empty") == {"name": "empty", "description": ""}
    assert catalog.prompts.update("missing", description="") != []


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_any_unicode_is_kept(name: str, description: str) -> None:
    catalog = Catalog()
    [change] = catalog.prompts.add({"name": name, "description": description})

    assert change.key == name
    assert catalog.prompts.get(name) == {"name": name, "description": description}


def test_later_change_of_the_given_object_has_no_effect(catalog: Catalog) -> None:
    mine: dict[str, Any] = {"name": "a", "inputSchema": {"type": "object"}}
    catalog.tools.add(mine)
    mine["inputSchema"]["type"] = "array"
    copy = catalog.tools.get("a")
    assert copy is not None
    copy["inputSchema"]["type"] = "string"

    assert catalog.tools.get("a") == {"name": "a", "inputSchema": {"type": "object"}}


def test_update_changes_given_fields_and_none_removes_one(catalog: Catalog) -> None:
    catalog.prompts.add(PROMPT)
    catalog.prompts.update("review", {"title": "Check", "_meta": None}, description="New")

    expected = PROMPT | {"title": "Check", "description": "New"}
    del expected["_meta"]
    assert catalog.prompts.get("review") == expected


def test_update_keeps_fields_that_are_null(catalog: Catalog) -> None:
    catalog.tools.add({"name": "a", "extra": None})
    catalog.tools.update("a", title="A")

    assert catalog.tools.get("a") == {"name": "a", "extra": None, "title": "A"}


def test_add_with_replace_adds_or_updates(catalog: Catalog) -> None:
    assert summary(list(catalog.tools.add(TOOL, replace=True))) == [(ADDED, "add")]
    assert summary(list(catalog.tools.add(TOOL | {"title": "Add"}, replace=True))) == [(UPDATED, "add")]
    assert list(catalog.tools.add(TOOL | {"title": "Add"}, replace=True)) == []


contents = st.dictionaries(names, st.sampled_from(["1", "2"]))


@given(contents, contents)
def test_replace_changes_only_items_that_differ(before: dict[str, str], after: dict[str, str]) -> None:
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
def test_operation_without_effect_makes_no_change_and_no_revision(
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
def test_wrong_key_is_named_in_the_error_and_changes_nothing(
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
        (TOOLS, {"title": "a"}, "tools: the name of an item must be a string"),
        (PROMPTS, {"name": 7}, "prompts: the name of an item must be a string"),
        (PROMPTS, {"name": b"a"}, "prompts: the name of an item must be a string"),
        (RESOURCES, {"name": "a"}, "resources: the uri or uriTemplate of an item must be a string"),
        (TOOLS, {"name": "a", "x": object()}, "tools: 'a' can't be written as JSON"),
        (TOOLS, {"name": "a", "x": "\ud800"}, "tools: 'a' can't be written as JSON"),
        (TOOLS, KNOT, "tools: 'knot' can't be written as JSON"),
        (TOOLS, {"name": "\ud800"}, r"tools: '\\ud800' can't be written as JSON"),
        (TOOLS, {"name": "a", "x": "y" * 1000}, "tools: 'a' has 1019 bytes of JSON; Policy.max_item_bytes allows 100"),
    ],
)
def test_invalid_item_is_refused_with_its_reason_and_changes_nothing(
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


def test_item_size_is_limited_by_the_policy() -> None:
    catalog = Catalog(Policy(max_item_bytes=len(b'{"name":"a"}')))

    catalog.tools.add({"name": "a"})
    with pytest.raises(InvalidItem):
        catalog.tools.add({"name": "ab"})


def test_update_cannot_rename_or_break_an_item(catalog: Catalog) -> None:
    catalog.tools.add({"name": "a"})
    for fields in ({"name": "b"}, {"name": None}, {"x": object()}):
        with pytest.raises(InvalidItem, match=r"^tools: "):
            catalog.tools.update("a", fields)

    assert list(catalog.tools) == [{"name": "a"}]
    assert catalog.revision == 1


def test_replace_refuses_duplicate_keys(catalog: Catalog) -> None:
    catalog.tools.add({"name": "a"})
    with pytest.raises(InvalidItem, match="tools: 'b' occurs twice"):
        catalog.tools.replace([{"name": "b"}, {"name": "b", "title": "B"}])

    assert list(catalog.tools) == [{"name": "a"}]
