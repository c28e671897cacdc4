"""The binary format of the journal in a store: many changes of one part of the journal in one row.

The definition of an item before a change is usually that after an earlier change in the same row. It is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from tidings.core.encoding import json_value
from tidings.core.model import Change, Item, Operation, Version
from tidings.store import JournalPart

__all__ = ["decode_row", "encode_rows"]

_MAX_CHANGES = 2048
"""Changes in a row. A row is removed as a whole, and encoding one blocks other threads for about half a millisecond."""


_ORIGIN = "local"
"""The member `origin` of the format, which had the name of the process."""


class _StoredChange(msgspec.Struct, array_like=True):
    """A `Change` as it is written. Whether its topic is a feature or a URI depends on the row."""

    # The order of the fields is the format.

    topic: Any
    operation: Operation
    key: str
    version: Version
    previous: Version
    time: float
    origin: str
    item: Item | None
    before: Item | None
    metadata: Mapping[str, Any] | None
    trace: Mapping[str, str] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_StoredChange]).decode


def encode_rows(changes: Sequence[Change]) -> Iterator[tuple[int, bytes]]:
    """Yield the rows for changes of one part of the journal, each with its last revision."""
    for start in range(0, len(changes), _MAX_CHANGES):
        chunk = changes[start : start + _MAX_CHANGES]
        stored = _without_repeated_items(chunk)
        try:
            row = _encode(stored)
        except OverflowError:  # metadata with an integer beyond 64 bits, which must not prevent all later writes
            row = _encode([structs.replace(change, metadata=json_value(change.metadata)) for change in stored])
        yield chunk[-1].revision, row


def decode_row(row: bytes, part: JournalPart) -> Iterator[Change]:
    """Yield the changes in a row. Raises `LookupError` or `MsgspecError` if it is damaged."""
    latest: dict[str, Item | None] = {}
    for stored in _decode(row):
        before = stored.before
        if part is not None:
            if before is None and stored.operation is not Operation.ADDED:
                before = latest[stored.key]
            latest[stored.key] = stored.item
        yield Change(
            stored.topic if part is None else part,
            stored.operation,
            stored.key,
            stored.version,
            stored.previous,
            stored.time,
            stored.item,
            before,
            stored.metadata,
            stored.trace,
        )


def _without_repeated_items(changes: Sequence[Change]) -> list[_StoredChange]:
    """Return the changes without `before` where an earlier change has that definition."""
    latest: dict[str, Item | None] = {}
    stored = []
    for change in changes:
        before = change.before
        if before is not None and latest.get(change.key) is before:
            before = None
        if change.item is not None or change.before is not None:
            latest[change.key] = change.item
        stored.append(
            _StoredChange(
                change.topic,
                change.operation,
                change.key,
                change.version,
                change.previous,
                change.time,
                _ORIGIN,
                change.item,
                before,
                change.metadata,
                change.trace,
            )
        )
    return stored
