"""Which file of a workspace belongs to what.

Files that make up one thing (a script and its `.meta.json`, a folder with a tool in it) are one *unit*: it is loaded
and fails as a whole. A file that belongs to no unit is nobody's business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

__all__ = [
    "META",
    "REGISTER",
    "TOPS",
    "Inside",
    "Kind",
    "Unit",
    "is_ignored",
    "is_python",
    "parents_of",
    "state_of",
    "stem_of",
    "unit_of",
    "walk",
]

Kind = Literal["tools", "resources", "prompts", "register", "settings"]

META = ".meta.json"


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    kind: Kind
    key: str
    """The files' common path without their endings, relative to the workspace; a folder's ends with a slash."""

    @property
    def place(self) -> str:
        """The folder that its files are in, and for a helper the one that it is there for."""
        return (self.key.rstrip("/") if self.is_helper else self.key).rpartition("/")[0]

    @property
    def is_helper(self) -> bool:
        """Whether it is no tool, but there for the Python tools beside it."""
        return self.kind == "tools" and self.key.rstrip("/").rpartition("/")[2].startswith("_")


REGISTER = Unit("register", "server.d/register")


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
            return REGISTER
        if parts[1] == "server.meta.json":
            return Unit("settings", "tidings.toml")
    return None


def is_python(files: Iterable[Path]) -> bool:
    return any(path.suffix == ".py" for path in files)


def parents_of(key: str) -> list[str]:
    """The folders that a path lies in, and a unit that is a folder."""
    parts = key.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


def stem_of(name: str) -> str:
    """`deploy.sh` and `deploy.meta.json` → `deploy`."""
    return name[: -len(META)].partition(".")[0] if name.endswith(META) else name.partition(".")[0]


def is_ignored(name: str) -> bool:
    """Hidden files, caches, what editors leave lying about while they save, and names that are no text."""
    return (
        name.startswith(".")
        or any("\udc80" <= character <= "\udcff" for character in name)
        or name == "__pycache__"
        or name.endswith(("~", ".swp", ".swx", ".tmp", ".bak", ".pyc", ".orig", ".rej", "___jb_tmp___", "___jb_old___"))
        or (name.startswith("#") and name.endswith("#"))  # what Emacs saves by itself
        or name == "4913"  # vim tries with it whether it may write
    )


def walk(root: Path, below: str = "") -> Iterator[tuple[PurePosixPath, os.stat_result]]:
    """Every file that may matter, relative to the workspace, with its state. Links are followed, but never outside.

    In a folder that a link led to, no link to a further one is followed: where packages link each other, the ways
    through them are more than anyone can walk, and all that lies there is found without.
    """
    start = root / below if below else root
    above = frozenset(map(_identity, start.parents[: len(start.relative_to(root).parts)]))
    real = start.resolve()
    stack = [(start, above, real != start)] if start.is_dir() and real.is_relative_to(root) else []
    while stack:
        folder, above, is_linked = stack.pop()
        identity = _identity(folder)
        if identity in above:
            continue  # a link in a circle
        above |= {identity}
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
                is_link = entry.is_symlink()
                if is_link and not path.resolve().is_relative_to(root):
                    continue
                if entry.is_dir():
                    if not (is_link and is_linked):
                        stack.append((path, above, is_link or is_linked))
                elif entry.is_file():
                    yield PurePosixPath(relative.as_posix()), entry.stat()
            except (OSError, RuntimeError):
                continue  # a link to nowhere, or in a circle


class Inside:
    """Whether files are the workspace's own, wherever links lead. Remembers folders: make a new one for each look."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[Path, Path] = {}

    def has(self, path: Path) -> bool:
        try:
            is_link = stat.S_ISLNK(mode := os.lstat(path).st_mode)
            is_file = path.is_file() if is_link else stat.S_ISREG(mode)
            return is_file and self.real(path, is_link).is_relative_to(self._root)
        except (OSError, RuntimeError):
            return False  # gone, or a link in a circle

    def real(self, path: Path, is_link: bool | None = None) -> Path:
        if path.is_symlink() if is_link is None else is_link:
            return path.resolve()
        folder = self._folders.get(path.parent)
        if folder is None:
            folder = self._folders[path.parent] = path.parent.resolve()
        return folder / path.name


def state_of(path: Path) -> tuple[Any, ...]:
    """What tells without reading it that a file may be another one. The time of the inode can't be set by hand."""
    try:
        state = path.stat()
    except OSError:
        return (path.name,)
    return (path.name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_mode)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        state = folder.stat()
    except OSError:
        return (0, 0)  # gone meanwhile: there is nothing in it
    return (state.st_dev, state.st_ino)


TOPS = frozenset({"tools", "resources", "prompts", "server.d", "tidings.toml"})
"""What of a workspace's own folder is looked at."""
