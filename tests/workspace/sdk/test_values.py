"""`values.py` reads JSON with a subset of the language of jq."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidings.workspace.sdk import values

FILTERS = [
    (".", {"a": 1}, '{"a":1}'),
    (".a.b", {"a": {"b": "x"}}, "x"),
    ('.["a b"].c', {"a b": {"c": 1}}, "1"),
    ('."a b"', {"a b": True}, "true"),
    (".a[-1]", {"a": [1, 2]}, "2"),
    (".a[]", {"a": [1, "x"]}, "1\nx"),
    (".a.b.c", {}, "null"),
    (".a // .b // 5", {"b": False}, "5"),
    ('.a // "d"', {"a": False}, "d"),
    (".a // empty", {}, ""),
    (".a.b? // 1", {"a": 3}, "1"),
    ('if .a == "x" then 1 else .b end', {"a": "y", "b": 2}, "2"),
    ('(.a | tostring) + "!"', {"a": [1]}, "[1]!"),
    (".a | keys | length", {"a": {"x": 1, "y": 2}}, "2"),
    (".a | type", {"a": 1.5}, "number"),
    (".a | not", {"a": None}, "true"),
    ('.a != "x"', {"a": "x"}, "false"),
]


@pytest.mark.parametrize(("text", "given", "expected"), FILTERS, ids=[text for text, _, _ in FILTERS])
def test_filter_has_the_result_of_jq(text: str, given: Any, expected: str) -> None:
    assert values.run("get", [text], json.dumps(given)) == (expected, 0)


@pytest.mark.parametrize("text", ["", ".a |", ".a[", "map(.x)", ".a as $x | $x", "@tsv", "(.a", "if .a then 1"])
def test_unsupported_filter_is_rejected(text: str) -> None:
    with pytest.raises((values.InvalidFilter, IndexError)):
        values.run("get", [text], "{}")
