"""Canonical JSON and digests, which decide whether two contents are the same.

*An item's hash* is BLAKE2b-256 over the item's canonical JSON, whatever its original format: UTF-8 without white
space, and object keys sorted by code points. In strings, only `"`, `\\` and control characters are escaped (`\\b`,
`\\f`, `\\n`, `\\r`, `\\t`, else `\\u001f`). An integer is its digits, and not the same as a number with a point or an
exponent (`1` is not `1.0`). Such a number has the fewest digits that identify it: with a point (`1.0`, `0.00001`) from
1e-5 to below 1e16, and otherwise with an exponent without a plus sign or leading zeros (`1e16`, `1.5e-6`). The
`size` of a resource is ignored: it belongs to the content, and is measured each time a file is listed.

*A list's digest* is over the set of its items' hashes: their sum modulo 2^256 (an additive multiset hash) and their
number, hashed once more to 128 bits. Adding, removing or replacing one item is one addition or subtraction, whatever
the length of the list, and the order of the items does not matter. If a list changed and could not be read, a point and
a second digest follow, which contains the revision of the last such change. So each such change makes a new digest.

*A content's digest* is over the etag that its server gave, or contains the revision if there is none.

Digests detect changes. They do not protect clients from a server that wants to deceive them.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from tidings.core.model import Feature

__all__ = [
    "DELETED",
    "EMPTY",
    "ListDigest",
    "canonical",
    "content_digest",
    "item_hash",
    "revision_digest",
    "split_digest",
]

_MODULUS = 1 << 256
_encode_sorted = msgspec.json.Encoder(order="sorted")


def canonical(value: Any) -> bytes:
    """Return JSON with sorted keys, for comparing."""
    return _encode_sorted.encode(value)


def item_hash(definition: Any, feature: Feature | None = None) -> bytes:
    if feature is Feature.RESOURCES and "size" in definition:
        definition = {name: value for name, value in definition.items() if name != "size"}
    return blake2b(canonical(definition), digest_size=32).digest()


class ListDigest:
    """The digest of a list, updated item by item."""

    __slots__ = ("_count", "_sum", "unknown")

    def __init__(self) -> None:
        self._sum = 0
        self._count = 0
        self.unknown = ""
        """The digest of the last change whose content is unknown; empty if there was none."""

    def add(self, item: bytes) -> None:
        self._sum = (self._sum + int.from_bytes(item, "big")) % _MODULUS
        self._count += 1

    def discard(self, item: bytes) -> None:
        self._sum = (self._sum - int.from_bytes(item, "big")) % _MODULUS
        self._count -= 1

    def include(self, other: ListDigest) -> None:
        """Add all items of another list."""
        self._sum = (self._sum + other._sum) % _MODULUS
        self._count += other._count

    def hexdigest(self) -> str:
        items = self._sum.to_bytes(32, "big") + self._count.to_bytes(8, "big")
        digest = blake2b(items, digest_size=16).hexdigest()
        return f"{digest}.{self.unknown}" if self.unknown else digest


def split_digest(digest: str) -> tuple[str, str]:
    """Return the two parts of a list's digest: of its items, and of the last change whose content is unknown."""
    items, _, unknown = digest.partition(".")
    return items, unknown


EMPTY = ListDigest().hexdigest()
"""The digest of a list without items."""


def content_digest(etag: str) -> str:
    return blake2b(b"etag:" + etag.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def revision_digest(revision: int, life: str) -> str:
    """Return the digest of a content without an etag. `life` identifies the server process: two processes that started
    with copies of one store would give different contents the same revision."""
    return f"{life}{revision:024x}"


DELETED = blake2b(b"deleted", digest_size=16).hexdigest()
"""The digest of a content that is gone."""
