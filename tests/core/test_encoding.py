"""Any value is encoded, and nothing raises."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.encoding import is_unicode, safe_json

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(("text", "expected"), [("", True), ("ü 🙂", True), ("\ud83d", False)])
def test_unpaired_surrogate_is_not_unicode(text: str, expected: bool) -> None:
    assert is_unicode(text) is expected


@given(values)
def test_safe_json_encodes_json_values_unchanged(value: Any) -> None:
    assert msgspec.json.decode(safe_json(value)) == value


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd:
    def __str__(self) -> str:
        return "odd \ud800"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": Odd(), "b": [1, (2, None)]}, {"a": "odd ?", "b": [1, [2, None]]}),
        ({"text": "half \ud83d"}, {"text": "half ?"}),
        ({Odd(): 1, "b": {2.5}}, {"odd ?": 1, "b": [2.5]}),
        ({"big": 1 << 80, "odd": Odd()}, {"big": str(1 << 80), "odd": "odd ?"}),
        ({"flag": True, "odd": Odd()}, {"flag": True, "odd": "odd ?"}),
    ],
)
def test_value_without_json_form_becomes_text(value: object, expected: object) -> None:
    assert msgspec.json.decode(safe_json(value)) == expected


def test_object_without_text_form_is_encoded() -> None:
    assert "Broken" in msgspec.json.decode(safe_json([Broken()]))[0]


class Knot(list[object]):
    """A list that fails if it is iterated endlessly."""

    iterations = 0

    def __iter__(self) -> Iterator[object]:
        self.iterations += 1
        if self.iterations > 1000:
            pytest.fail("endless iteration")
        return super().__iter__()


def test_structure_that_contains_itself_is_encoded() -> None:
    knot = Knot(["knot"])
    knot += [knot, {"again": knot}]

    assert msgspec.json.decode(safe_json(knot))[0] == "knot"
