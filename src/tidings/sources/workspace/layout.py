"""Which file of a workspace belongs to what.

Files that make up one thing (a script and its `.meta.json`, a folder with a tool in it) are one *unit*: it is loaded
and fails as a whole. A file that belongs to no unit is nobody's business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

__all__ = ["META", "TOPS", "Kind", "Unit", "stem_of", "unit_of", "walk"]

Kind = Literal["tools", "resources", "prompts", "register", "settings"]

META = ".meta.json"


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    kind: Kind
    key: str
    """The files' common path without their endings, relative to the workspace; a folder's ends with a slash."""


def unit_of(path: PurePosixPath) -> Unit | None:
    """The unit that a file belongs to, by its path relative to the workspace."""
    parts = path.parts
    if not parts or any(is_ignored(part) for part in parts):
        return None
    if len(parts) == 1:
        return Unit("settings", "tidings.toml") if parts[0] == "tidings.toml" else None
    top = parts[0]
    if top == "tools":
        return Unit("tools", f"tools/{stem_of(parts[1])}") if len(parts) == 2 else Unit("tools", f"tools/{parts[1]}/")
    if top in ("resources", "prompts"):
        kind: Kind = "resources" if top == "resources" else "prompts"
        return Unit(kind, "/".join((*parts[:-1], stem_of(parts[-1]))))
    if top == "server.d" and len(parts) == 2:
        if parts[1].startswith("register."):
            return Unit("register", "server.d/register")
        if parts[1] == "server.meta.json":
            return Unit("settings", "tidings.toml")
    return None


def stem_of(name: str) -> str:
    """`deploy.sh` and `deploy.meta.json` → `deploy`."""
    return name[: -len(META)].partition(".")[0] if name.endswith(META) else name.partition(".")[0]


def is_ignored(name: str) -> bool:
    """Hidden files, caches, what editors leave lying about while they save, and names that are no text."""
    return (
        name.startswith(".")
        or any("\udc80" <= character <= "\udcff" for character in name)
        or name == "__pycache__"
        or name.endswith(("~", ".swp", ".swx", ".tmp", ".bak", ".pyc", ".orig", ".rej"))
        or name == "4913"  # vim tries with it whether it may write
    )


def walk(root: Path, below: str = "") -> Iterator[tuple[PurePosixPath, os.stat_result]]:
    """Every file that may matter, relative to the workspace, with its state. Links are followed, but never outside."""
    start = root / below if below else root
    stack = [start] if start.is_dir() and start.resolve().is_relative_to(root) else []
    seen: set[tuple[int, int]] = set()
    while stack:
        folder = stack.pop()
        try:
            state = folder.stat()
        except OSError:
            continue
        if (state.st_dev, state.st_ino) in seen:
            continue  # a link in a circle, or a second one to the same place
        seen.add((state.st_dev, state.st_ino))
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue  # gone meanwhile, or not ours to read
        for entry in entries:
            if is_ignored(entry.name):
                continue
            path = Path(entry.path)
            relative = path.relative_to(root)
            if folder == root and entry.name not in TOPS:
                continue
            try:
                if entry.is_symlink() and not path.resolve().is_relative_to(root):
                    continue
                if entry.is_dir():
                    stack.append(path)
                elif entry.is_file():
                    yield PurePosixPath(relative.as_posix()), entry.stat()
            except (OSError, RuntimeError):
                continue  # a link to nowhere, or in a circle


TOPS = frozenset({"tools", "resources", "prompts", "server.d", "tidings.toml"})
"""What of a workspace's own folder is looked at."""
