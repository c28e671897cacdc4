"""Digests depend on the content only."""

from decimal import Decimal
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from tidings.core.digest import (
    DELETED,
    EMPTY,
    ListDigest,
    canonical,
    content_digest,
    item_hash,
    revision_digest,
)

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
definitions = st.dictionaries(texts, values, max_size=5)
hashes = st.lists(st.integers(0, 20).map(lambda number: item_hash({"name": str(number)})), max_size=8)


def digest_of(items: list[bytes]) -> str:
    listed = ListDigest()
    for item in items:
        listed.add(item)
    return listed.hexdigest()


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(inner) for key, inner in reversed(value.items())}
    return [reversed_keys(inner) for inner in value] if isinstance(value, list) else value


@given(definitions)
def test_key_order_is_ignored(definition: dict[str, Any]) -> None:
    assert item_hash(reversed_keys(definition)) == item_hash(definition)


def documented_json(value: Any) -> str:
    """Encode canonical JSON as the module documents it."""
    match value:
        case dict():
            return (
                "{" + ",".join(f"{documented_json(key)}:{documented_json(value[key])}" for key in sorted(value)) + "}"
            )
        case list():
            return "[" + ",".join(map(documented_json, value)) + "]"
        case str():
            short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
            return '"' + "".join(short.get(c, f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'
        case float() if value and not 1e-5 <= abs(value) < 1e16:
            digits, exponent = f"{Decimal(repr(value)).normalize():e}".split("e")
            return f"{digits}e{int(exponent)}"
        case float():
            plainly = f"{Decimal(repr(value)):f}"
            return plainly if "." in plainly else f"{plainly}.0"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@given(values)
@example(
    [1e16, 9999999999999998.0, 1e-5, 1.5e-6, -0.0, 1e22, 5e-324, 1.7976931348623157e308, 123456789.125, 1.0, 1, True]
)
@example({"é\u2028\U0001f600\x7f": "\x1f\b", "\uffff": 1, "\U00010000": 2})
def test_canonical_json_is_as_documented(value: Any) -> None:
    assert canonical(value).decode() == documented_json(value)


@given(definitions, definitions)
def test_different_items_have_different_hashes(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (item_hash(one) == item_hash(other)) == (canonical(one) == canonical(other))


@given(hashes, st.randoms())
def test_insertion_order_is_ignored(items: list[bytes], random: Any) -> None:
    shuffled = list(items)
    random.shuffle(shuffled)

    assert digest_of(shuffled) == digest_of(items)


@given(hashes, hashes)
def test_updated_digest_equals_a_new_one(kept: list[bytes], passing: list[bytes]) -> None:
    listed = ListDigest()
    for item in passing + kept:
        listed.add(item)
    for item in passing:
        listed.discard(item)

    assert listed.hexdigest() == digest_of(kept)


@given(hashes, hashes)
def test_different_lists_have_different_digests(one: list[bytes], other: list[bytes]) -> None:
    assume(sorted(one) != sorted(other))

    assert digest_of(one) != digest_of(other)


def test_empty_list_has_its_own_digest() -> None:
    assert ListDigest().hexdigest() == EMPTY
    assert digest_of([bytes(32)]) != EMPTY, "an item whose hash is zero still counts"


@given(texts, texts, st.integers(0, 1 << 62))
def test_contents_differ_by_etag_or_revision(one: str, other: str, revision: int) -> None:
    assert (content_digest(one) == content_digest(other)) == (one == other)
    assert (
        len({content_digest(one), revision_digest(revision, ""), revision_digest(revision + 1, ""), DELETED, EMPTY})
        == 5
    )
