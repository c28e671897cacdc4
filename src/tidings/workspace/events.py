"""Event types of a workspace: `events/NAME.meta.json` declares the type NAME."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidings.errors import TidingsError
from tidings.events.types import EventType, EventTypes, make_type
from tidings.workspace.metadata import META_SUFFIX, read_meta
from tidings.workspace.problems import InvalidFile, invalid_field
from tidings.workspace.settings import Settings

__all__ = ["load_event"]


def load_event(root: Path, settings: Settings, path: Path) -> EventType:
    """Return the type that a file declares. Raise `InvalidFile` if it is invalid, or if the workspace has no events."""
    meta = read_meta(root, path)
    if not settings.events:
        raise InvalidFile(path, "this server has no events; add the section [events] to tidings.toml, and restart it")
    description = _member(meta, "description", str, path)
    arguments, payload = (_member(meta, name, dict, path) for name in ("inputSchema", "payloadSchema"))
    try:
        name = path.name.removesuffix(META_SUFFIX)
        event = make_type(name, description=description, arguments=arguments, payload=payload)
        EventTypes().declare(event)  # checks it
    except TidingsError as error:
        raise InvalidFile(path, str(error)) from None
    return event


def _member(meta: dict[str, Any], name: str, kind: type, path: Path) -> Any:
    value = meta.get(name)
    if value is not None and not isinstance(value, kind):
        expected = "a string" if kind is str else "an object"
        raise invalid_field(path, name, f"{name} is {value!r:.60}; it must be {expected}")
    return value
