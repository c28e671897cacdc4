"""Values that users and clients chose, encoded without errors: any value as JSON, texts as UTF-8, times as ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

__all__ = ["is_unicode", "iso_time", "json_value", "safe_json"]

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def safe_json(value: Any) -> bytes:
    """Encode any value. A value without a JSON form is written as text, because odd metadata must not raise."""
    try:
        return msgspec.json.encode(value)
    except Exception:  # any value is possible here; the slow path handles all
        return msgspec.json.encode(json_value(value))


def json_value(value: Any, parents: tuple[int, ...] = ()) -> Any:
    """Convert a value into one that every format can write."""
    if id(value) in parents or len(parents) > 64:  # it contains itself, or is deeper than any metadata
        return "…"
    if value is None or isinstance(value, bool | int | float):
        return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)
    if isinstance(value, dict):
        return {_text(key): json_value(inner, (*parents, id(value))) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(inner, (*parents, id(value))) for inner in value]
    return _text(value)


def _text(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # the user's __str__ fails, which is no reason to lose the notification
        text = object.__repr__(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. An unpaired surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def iso_time(time: float) -> str:
    """Format a Unix time as ISO 8601, in UTC."""
    return (_UNIX_EPOCH + timedelta(seconds=time)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
