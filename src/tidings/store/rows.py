"""Changes as a store writes them: many of one history in one row of bytes.

What an item was before is most often what an earlier change of the same row made of it, and is then not written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import structs

from tidings.core.digest import json_value
from tidings.core.model import Change, Item, Operation, Version
from tidings.store import History

__all__ = ["packed", "unpacked"]

_CHUNK = 2048
"""Changes in a row: it is forgotten as a whole, and encoded without letting others run, in about half a millisecond."""


class _Kept(msgspec.Struct, array_like=True):
    """A `Change` as it is written: what kind of topic it has is the row's to say."""

    topic: str
    operation: Operation
    key: str
    version: Version
    previous: Version
    time: float
    origin: str
    item: Item | None
    before: Item | None
    metadata: dict[str, Any] | None
    trace: dict[str, str] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Kept]).decode


def packed(changes: Sequence[Change]) -> Iterator[tuple[int, bytes]]:
    """The rows of changes of one history, each with the last revision in it."""
    for start in range(0, len(changes), _CHUNK):
        chunk = changes[start : start + _CHUNK]
        thin = _thinned(chunk)
        try:
            row = _encode(thin)
        except OverflowError:  # metadata with an integer past 64 bits, which must not hold back all that comes after it
            row = _encode([structs.replace(change, metadata=json_value(change.metadata)) for change in thin])
        yield chunk[-1].revision, row


def unpacked(row: bytes, history: History) -> Iterator[Change]:
    """The changes in a row. Raises `LookupError` or a `MsgspecError` if it is damaged."""
    latest: dict[str, Item | None] = {}
    for kept in _decode(row):
        before = kept.before
        if history is not None:
            if before is None and kept.operation is not Operation.ADDED:
                before = latest[kept.key]
            latest[kept.key] = kept.item
        yield Change(
            kept.topic if history is None else history,
            kept.operation,
            kept.key,
            kept.version,
            kept.previous,
            kept.time,
            kept.origin,
            kept.item,
            before,
            kept.metadata,
            kept.trace,
        )


def _thinned(changes: Sequence[Change]) -> list[Change]:
    latest: dict[str, Item | None] = {}
    thin = []
    for change in changes:
        if change.before is not None and latest.get(change.key) is change.before:
            change = structs.replace(change, before=None)  # the same, but for what is known
        if change.item is not None or change.before is not None:
            latest[change.key] = change.item
        thin.append(change)
    return thin
