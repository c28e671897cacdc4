"""`values.py` reads JSON with the filters of jq that tools use most."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidings.workspace.sdk import values

FILTERS = [
    (".", {"a": 1}, '{"a":1}'),
    (".a.b", {"a": {"b": "x"}}, "x"),
    ('.["a b"].c', {"a b": {"c": 1}}, "1"),
    ('."a.[]b"', {"a.[]b": True}, "true"),
    (".a[-1]", {"a": [1, 2]}, "2"),
    (".[1].x[0]", [0, {"x": [[]]}], "[]"),
    (".a.b.c", {}, "null"),
    ('.a // "d // e"', {"a": False}, "d // e"),
    (".a // -1.5", {"a": None}, "-1.5"),
    (".a // empty", {}, ""),
    (".a // empty", {"a": 0}, "0"),
    (".a.b // 1", {"a": 3}, "1"),
]


@pytest.mark.parametrize(("text", "given", "expected"), FILTERS, ids=[text for text, _, _ in FILTERS])
def test_filter_has_the_result_of_jq(text: str, given: Any, expected: str) -> None:
    assert values.run("get", [text], json.dumps(given)) == (expected, 0)


NEED_JQ = ["", "a", ".a |", ".a[", ".a[]", "[0]", ".a // .b", ".a // NaN", ".a // ", ".a?", "map(.x)", ".a | length"]


@pytest.mark.parametrize("text", NEED_JQ)
def test_any_other_filter_needs_jq(text: str) -> None:
    with pytest.raises(values.NeedsJq):
        values.run("get", [text], "{}")
