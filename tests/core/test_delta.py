"""A delta leads exactly from one definition to another."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.delta import apply_patch, merge_patch
from tidings.core.digest import canonical

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
