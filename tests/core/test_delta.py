"""A delta leads exactly from one definition to another."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.list_copy import Copy
from tidings.core.catalog import Catalog
from tidings.core.delta import apply_patch, merge_patch
from tidings.core.digest import canonical
from tidings.core.frames import CHANGE_KEY, FrameFormat, encode_frame
from tidings.core.hub import Hub
from tidings.core.model import Feature

leaves = st.none() | st.booleans() | st.sampled_from([0, 1, 1.0, "", "a"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
definitions = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


@given(definitions, definitions)
def test_patch_leads_from_before_to_after_or_is_none(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)

    if patch is None:
        assert b"null" in canonical(after), "only null cannot be set by a patch"
    else:
        assert canonical(apply_patch(before, patch)) == canonical(after)


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"name": "a", "title": "x"}, {"name": "a", "title": "y"}, {"title": "y"}),
        ({"name": "a"}, {"name": "a", "title": "y"}, {"title": "y"}),
        ({"name": "a", "title": "x"}, {"name": "a"}, {"title": None}),
        ({"name": "a"}, {"name": "a"}, {}),
        ({"s": {"type": "object", "x": 1}}, {"s": {"type": "object", "x": 2}}, {"s": {"x": 2}}),
        ({"s": {"x": [1, 2]}}, {"s": {"x": [1, 3]}}, {"s": {"x": [1, 3]}}),
        ({"s": {"x": 1}}, {"s": {"x": True}}, {"s": {"x": True}}),
        ({"s": [1]}, {"s": [1.0]}, {"s": [1.0]}),
        ({"s": 0.0}, {"s": -0.0}, {"s": -0.0}),
        ({"s": [{"x": -0.0}]}, {"s": [{"x": 0.0}]}, {"s": [{"x": 0.0}]}),
        ({"s": 1}, {"s": {"x": 1}}, {"s": {"x": 1}}),
        ({"s": [{"x": 1}]}, {"s": [{"x": 1}, {"x": 2}]}, {"s": [{"x": 1}, {"x": 2}]}),
    ],
)
def test_patch_contains_only_differences(before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]) -> None:
    assert canonical(merge_patch(before, after)) == canonical(patch)


def test_field_that_becomes_null_has_no_patch() -> None:
    assert merge_patch({"default": 1}, {"default": None}) is None
    assert merge_patch({}, {"schema": {"default": None}}) is None


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # from the appendix of RFC 7396
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_patches_are_applied_as_in_the_rfc(target: object, patch: object, result: object) -> None:
    assert apply_patch(target, patch) == result


# A client's copy


def summary_of(notification: Any) -> dict[str, Any]:
    """Return the `dev.tidings/change` of a notification with deltas."""
    params = msgspec.json.decode(encode_frame(notification, FrameFormat(detail="delta", max_changes=1_000)))["params"]
    assert params.keys() == {"_meta"}, "no second copy of the item"
    summary: dict[str, Any] = params["_meta"][CHANGE_KEY]
    return summary


@given(st.data())
def test_copy_updated_by_deltas_equals_the_list(data: st.DataObject) -> None:
    catalog = Catalog()
    items = catalog.items(data.draw(st.sampled_from(Feature)))
    has_uris = items.feature is Feature.RESOURCES
    hub = Hub(catalog)
    copy = Copy(items.feature)
    told: list[Any] = []
    hub.subscribe(told.append, items.feature)
    fields = st.dictionaries(st.sampled_from(["title", "x", "y"]), st.none() | st.integers() | definitions, max_size=3)
    for _ in range(data.draw(st.integers(1, 8))):
        with catalog.batch():
            for name in data.draw(st.lists(st.sampled_from("pqr"), min_size=1, max_size=3)):
                key = f"a:{name}" if has_uris else name
                if key in items and data.draw(st.booleans()):
                    items.remove(key)
                else:
                    located = {"uri": key} if has_uris else {}
                    items.add({"name": name, **located, **data.draw(fields)}, replace=True)
        for notification in told:
            assert copy.apply(summary_of(notification))
        told.clear()
        assert copy.digest == items.version.digest
        assert copy.items == {key: items.get(key) for key in copy.items}
        assert copy.digest == Copy(items.feature, iter(items)).digest


def test_copy_detects_a_delta_for_another_state() -> None:
    catalog = Catalog()
    catalog.tools.add({"name": "p", "title": "One"})
    hub = Hub(catalog)
    told: list[Any] = []
    hub.subscribe(told.append, "tools")
    catalog.tools.update("p", title="Two")
    summary = summary_of(told.pop())

    assert summary["delta"] == {"title": "Two"}
    assert Copy("tools", [{"name": "p", "title": "One"}]).apply(summary)
    assert not Copy("tools", [{"name": "p", "title": "Another"}]).apply(summary), "another item before"
    assert not Copy("tools", []).apply(summary), "no item before"
    assert not Copy("tools", [{"name": "p", "title": "One"}, {"name": "q"}]).apply(summary), "another list"
    assert not Copy("tools", [{"name": "p", "title": "One"}]).apply({**summary, "after": "0" * 32}), "another result"
    assert not Copy("tools", [{"name": "p", "title": "Two"}]).apply({**summary, "complete": False}), "refetch"
