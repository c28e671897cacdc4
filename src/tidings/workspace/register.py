"""Dynamic registration: `server.d/register.json`, or executables `server.d/register.*` that print the same.

```json
{"tools": [{"name": "greet", "path": "scripts/greet.sh", "inputSchema": {…}}],
 "resources": [{"uri": "…", "path": "…"}], "resourceTemplates": […], "prompts": [{"name": "…", "path": "…"}]}
```

Paths are relative to the folder of their kind, or to the workspace. What is registered wins over what is found in the
folders. A kind that is named with no items is served none at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidings.errors import TidingsError
from tidings.workspace.executable import run_register
from tidings.workspace.files import resource_piece, template_piece
from tidings.workspace.metadata import read_object
from tidings.workspace.problems import Broken
from tidings.workspace.prompts import prompt_piece
from tidings.workspace.settings import Settings
from tidings.workspace.tools import tool_piece
from tidings.workspace.units import Piece

__all__ = ["Registered", "Scripts", "read_registered", "scripts_of"]

_KINDS = ("tools", "resources", "resourceTemplates", "prompts")
_KNOWN = frozenset({*_KINDS, "completions", "version", "_meta", "ui", "uiResources"})


@dataclass(frozen=True, slots=True)
class Registered:
    pieces: list[Piece] = field(default_factory=list)
    only: frozenset[str] = frozenset()
    """The kinds of which nothing else is served."""


def scripts_of(files: list[Path]) -> list[Path]:
    """The executables among the unit's files, unless a `register.json` stands in their place."""
    if any(path.name == "register.json" for path in files):
        return []
    return [path for path in files if os.access(path, os.X_OK)]


class Scripts:
    """The registrations that are run, and what each of them printed last."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._printed: dict[Path, bytes | Broken] = {}
        self.ran: object = None
        """The state of the scripts when they were run, and of no other file: they may write some beside them."""
        self._end: Callable[[], None] | None = None
        self._is_over = False

    def run(self, settings: Settings, files: list[Path], state: object) -> None:
        printed: dict[Path, bytes | Broken] = {}
        for path in scripts_of(files):
            try:
                printed[path] = run_register(self._root, settings, path, self._begin)
            except Broken as error:
                printed[path] = error
        if not self._is_over:
            self._printed, self.ran = printed, state

    def are_due(self, files: list[Path]) -> bool:
        """Whether there is one that was never run, of which nobody knows what it registers."""
        return any(path not in self._printed for path in scripts_of(files))

    def end(self) -> None:
        """End the one that runs, and each that is started from now on."""
        self._is_over = True
        if self._end is not None:
            self._end()

    def _begin(self, end: Callable[[], None]) -> None:
        self._end = end
        if self._is_over:
            end()

    def read(self, settings: Settings, files: list[Path]) -> Registered:
        pieces: list[Piece] = []
        only: frozenset[str] = frozenset()
        for path in files:
            if path.name == "register.json":
                return read_registered(self._root, settings, path, path.read_bytes())
        for path in scripts_of(files):
            printed = self._printed.get(path, b"")
            if isinstance(printed, Broken):
                raise printed
            registered = read_registered(self._root, settings, path, printed)
            pieces += registered.pieces
            only |= registered.only
        return Registered(pieces, only)


def read_registered(root: Path, settings: Settings, source: Path, text: bytes) -> Registered:
    """What a registration says, checked whole: a mistake in one item refuses all of it, so that nothing is half."""
    if not text.strip():
        return Registered()
    try:
        given = read_object(source, text)
    except Broken as error:
        if source.name == "register.json":
            raise
        raise Broken(source, f"printed what is {error}") from None  # its lines are not the script's
    if unknown := sorted(given.keys() - _KNOWN):
        raise Broken(source, f"{', '.join(unknown)} is not known here; there are {', '.join(_KINDS)}")
    builders: dict[str, Callable[[dict[str, Any]], Piece]] = {
        "tools": lambda meta: tool_piece(root, settings, _file(root, source, "tools", meta), meta),
        "resources": lambda meta: resource_piece(root, _file(root, source, "resources", meta), meta),
        "resourceTemplates": lambda meta: template_piece(root, meta, source),
        "prompts": lambda meta: prompt_piece(_file(root, source, "prompts", meta), meta),
    }
    pieces: list[Piece] = []
    only: set[str] = set()
    for kind in _KINDS:
        items = given.get(kind)
        if items is None:
            continue
        if not isinstance(items, list):
            raise Broken(source, f"{kind} is {items!r:.60}; it must be a list")
        if kind != "resourceTemplates" or not items:
            only.add(kind)
        for number, meta in enumerate(items, 1):
            if not isinstance(meta, dict):
                raise Broken(source, f"{kind}, item {number}: {meta!r:.60} is not an object")
            try:
                pieces.append(builders[kind](meta))
            except (TidingsError, ValueError, KeyError, OSError) as error:
                raise Broken(source, f"{kind}, item {number}: {error}") from None
    return Registered(pieces, frozenset(only))


def _file(root: Path, source: Path, kind: str, meta: dict[str, Any]) -> Path:
    path = str(meta.get("path") or "")
    if not path:
        raise Broken(source, f"{meta.get('name', 'an item')!r} needs a path")
    for candidate in ((root / kind / path).resolve(), (root / path).resolve()):
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate
    raise Broken(source, f"path {path!r} leads to no file of the workspace")
