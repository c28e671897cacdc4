"""Registered items: `server.d/register.json`, or `register.sh` and executables `register.*` that print the same.

```json
{"tools": [{"name": "greet", "path": "scripts/greet.sh", "inputSchema": {…}}],
 "resources": [{"uri": "…", "path": "…"}], "resourceTemplates": […], "prompts": [{"name": "…", "path": "…"}]}
```

Paths are relative to the folder of their kind, or to the workspace. If the registration contains a kind, the server
serves only the registered items of that kind, and none for an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidings.errors import TidingsError
from tidings.workspace.files import find_inside
from tidings.workspace.items import LoadedItem, UnitContent
from tidings.workspace.metadata import parse_object
from tidings.workspace.problems import InvalidFile
from tidings.workspace.prompts import make_prompt
from tidings.workspace.resources import make_resource
from tidings.workspace.settings import Settings
from tidings.workspace.templates import make_template
from tidings.workspace.tools import load_registered_tool

__all__ = ["parse_registration"]

_REGISTRIES = {"tools": "tools", "resources": "resources", "resourceTemplates": "templates", "prompts": "prompts"}
"""The kinds of a registration, and the registries of `MCPServer` that they belong to."""

_KNOWN_MEMBERS = frozenset({*_REGISTRIES, "completions", "version", "_meta", "ui", "uiResources"})


def parse_registration(root: Path, settings: Settings, source: Path, text: bytes) -> UnitContent:
    """Return the items of a registration. One invalid item makes the whole registration invalid."""
    if not text.strip():
        return UnitContent()
    try:
        content = parse_object(source, text)
    except InvalidFile as error:
        if source.name == "register.json":
            raise
        # Omit the line, because it is a line of the output and not of the script.
        raise InvalidFile(source, f"the output is {error}") from None
    if unknown := sorted(content.keys() - _KNOWN_MEMBERS):
        raise InvalidFile(source, f"{', '.join(unknown)}: not a kind of item; use {', '.join(_REGISTRIES)}")
    makers: dict[str, Callable[[dict[str, Any]], LoadedItem]] = {
        "tools": lambda meta: load_registered_tool(root, settings, _find_file(root, source, "tools", meta), meta),
        "resources": lambda meta: make_resource(root, settings, _find_file(root, source, "resources", meta), meta),
        "resourceTemplates": lambda meta: make_template(root, settings, meta, source),
        "prompts": lambda meta: make_prompt(root, _find_file(root, source, "prompts", meta), meta),
    }
    items: list[LoadedItem] = []
    exclusive: set[str] = set()
    for kind, registry in _REGISTRIES.items():
        entries = content.get(kind)
        if entries is None:
            continue
        if not isinstance(entries, list):
            raise InvalidFile(source, f"{kind} is {entries!r:.60}; it must be a list")
        if kind != "resourceTemplates" or not entries:
            exclusive.add(registry)
        for number, meta in enumerate(entries, 1):
            if not isinstance(meta, dict):
                raise InvalidFile(source, f"{kind}, item {number}: {meta!r:.60} is not an object")
            try:
                items.append(makers[kind](meta))
            except (TidingsError, ValueError, KeyError, OSError) as error:
                raise InvalidFile(source, f"{kind}, item {number}: {error}") from None
    return UnitContent(items, frozenset(exclusive))


def _find_file(root: Path, source: Path, kind: str, meta: dict[str, Any]) -> Path:
    path = str(meta.get("path") or "")
    if not path:
        raise InvalidFile(source, f"{meta.get('name', 'an item')!r} needs a path")
    if (found := find_inside(root, root / kind / path, root / path)) is None:
        raise InvalidFile(source, f"path {path!r} is not a file in {kind}/ or in the workspace")
    return found
