"""The differences between two definitions, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from tidings.core.field_diff import compare_fields


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, []),
        ({"a": 1}, {"a": True}, [{"field": "a", "before": 1, "after": True}]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "d": None}}, ["a.b", "a.c", "a.d"]),
        ({"a": 1}, {"b": None}, [{"field": "a", "before": 1}, {"field": "b", "after": None}]),
        ({"a": {"b": 1}}, {"a": 1}, [{"field": "a", "before": {"b": 1}, "after": 1}]),
        ({"required": ["x"]}, {"required": ["x", "y"]}, [{"field": "required", "before": ["x"], "after": ["x", "y"]}]),
        (
            {"arguments": [{"name": "x"}, {"name": "y"}]},
            {"arguments": [{"name": "y", "required": True}, {"name": "z"}]},
            ["arguments[x]", "arguments[y].required", "arguments[z]"],
        ),
        ({"arguments": [{"name": "x"}, {"name": "y"}]}, {"arguments": [{"name": "y"}, {"name": "x"}]}, ["arguments"]),
        ({"arguments": [{"name": "x"}, {"name": "x"}]}, {"arguments": [{"name": "x"}]}, ["arguments"]),
        ({"_meta": {"a.b": 1, "": 2}}, {"_meta": {}}, ['_meta["a.b"]', '_meta[""]']),
    ],
)
def test_differences_are_named_by_the_path_of_the_field(before: Any, after: Any, expected: list[Any]) -> None:
    found = [each.as_json() for each in compare_fields(before, after)]
    assert [
        each if isinstance(wanted, dict) else each["field"] for each, wanted in zip(found, expected, strict=True)
    ] == (expected)
