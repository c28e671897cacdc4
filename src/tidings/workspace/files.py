"""The files of a workspace: listing them, and detecting changes.

Hidden files, caches, temporary files of editors and files that `.gitignore` or `.tidingsignore` names are ignored. No
link is followed out of the workspace.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from tidings.workspace import TOP_LEVEL
from tidings.workspace.reading import read_inside, resolve_links

__all__ = [
    "IGNORE_FILES",
    "FileChecker",
    "find_inside",
    "is_ignored",
    "list_inodes",
    "load_ignore_rules",
    "read_state",
    "walk",
]

_IGNORED_SUFFIXES = ("~", ".swp", ".swx", ".tmp", ".bak", ".pyc", ".orig", ".rej", "___jb_tmp___", "___jb_old___")


IGNORE_FILES = (".gitignore", ".tidingsignore")
"""Files in the workspace folder that name the files to ignore. The second can include files that the first excludes."""


def is_ignored(name: str) -> bool:
    """Return whether every file and folder of this name is ignored."""
    return (
        name.startswith(".")
        or any("\udc80" <= character <= "\udcff" for character in name)  # not valid UTF-8
        or name in ("__pycache__", "node_modules")
        or name.endswith(_IGNORED_SUFFIXES)
        or (name.startswith("#") and name.endswith("#"))  # Emacs: automatic save
        or name == "4913"  # vim: test whether the folder is writable
    )


def load_ignore_rules(root: Path) -> Callable[[str], bool]:
    """Return a function that tells whether `IGNORE_FILES`, read as git does, exclude a path relative to `root`."""
    return _parse_ignore_files(root, *(read_state(root / name) for name in IGNORE_FILES))


@lru_cache(maxsize=16)
def _parse_ignore_files(root: Path, *states: tuple[Any, ...]) -> Callable[[str], bool]:
    lines: list[str] = []
    for name in IGNORE_FILES:
        with suppress(OSError):
            lines += read_inside(root, root / name).decode("utf-8", "replace").splitlines()
    if not lines:
        return lambda path: False
    from pathspec import GitIgnoreSpec  # here, because most workspaces start without it

    def is_valid(line: str) -> bool:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:  # git ignores it, too
            return False
        return True

    return GitIgnoreSpec.from_lines(filter(is_valid, lines)).match_file


def walk(root: Path, below: str = "", *, top_level: frozenset[str] | None = TOP_LEVEL) -> Iterator[PurePosixPath]:
    """Yield every file that is not ignored, relative to `root`. `top_level` limits the entries of `root` itself.

    Links are followed, but never out of the workspace. Inside a linked folder, links to further folders are not
    followed: packages that link to each other (`node_modules`) would have exponentially many paths.
    """
    rules = load_ignore_rules(root)
    start = root / below if below else root
    ancestors = frozenset(map(_identify, start.parents[: len(start.relative_to(root).parts)]))
    target = resolve_links(start)
    stack = [(start, ancestors, target != start)] if start.is_dir() and target.is_relative_to(root) else []
    while stack:
        folder, ancestors, is_linked = stack.pop()
        identity = _identify(folder)
        if identity in ancestors:
            continue  # a cycle of links
        ancestors |= {identity}
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue  # removed in the meantime, or not readable
        for entry in entries:
            if is_ignored(entry.name) or (folder == root and top_level is not None and entry.name not in top_level):
                continue
            path = Path(entry.path)
            try:
                is_link = entry.is_symlink()
                if is_link and not resolve_links(path).is_relative_to(root):
                    continue
                relative = path.relative_to(root).as_posix()
                if entry.is_dir():
                    if not (is_link and is_linked) and not rules(f"{relative}/"):
                        stack.append((path, ancestors, is_link or is_linked))
                elif entry.is_file() and not rules(relative):
                    yield PurePosixPath(relative)
            except OSError:
                continue  # removed in the meantime


class FileChecker:
    """A check that a path is a file inside the workspace, also after its links are resolved, and is not ignored.

    It caches resolved folders, so use a new instance for each scan.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rules = load_ignore_rules(root)
        self._folders: dict[Path, Path] = {}

    def is_inside(self, path: Path) -> bool:
        try:
            is_link = stat.S_ISLNK(mode := os.lstat(path).st_mode)
            is_file = path.is_file() if is_link else stat.S_ISREG(mode)
            if not is_file or not self.resolve(path).is_relative_to(self._root):
                return False
            return not self._rules(path.relative_to(self._root).as_posix())
        except OSError:
            return False  # removed in the meantime

    def resolve(self, path: Path) -> Path:
        if path.is_symlink():
            return resolve_links(path)
        folder = self._folders.get(path.parent)
        if folder is None:
            folder = self._folders[path.parent] = resolve_links(path.parent)
        return folder / path.name


def find_inside(root: Path, *candidates: Path) -> Path | None:
    """Return the first candidate that is a file inside the workspace, with links resolved."""
    for candidate in candidates:
        path = resolve_links(candidate)
        if path.is_file() and path.is_relative_to(root):
            return path
    return None


def read_state(path: Path) -> tuple[Any, ...]:
    """Return a value that differs if the file may have changed, without reading the file.

    It includes the inode's change time, which no program can set, so it also differs after an edit that restores the
    modification time.
    """
    try:
        state = path.stat()
    except OSError:
        return (path.name,)
    return (path.name, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_mode)


def list_inodes(states: Iterable[tuple[Any, ...]]) -> set[int]:
    """Return the inode numbers in results of `read_state`."""
    return {state[1] for state in states if len(state) > 1}


def _identify(folder: Path) -> tuple[int, int]:
    try:
        state = folder.stat()
    except OSError:
        return (0, 0)  # removed in the meantime
    return (state.st_dev, state.st_ino)
