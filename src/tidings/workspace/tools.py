"""The tools of one unit: Python functions, or an executable and its metadata."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tidings.workspace.executable import make_executable
from tidings.workspace.items import LoadedItem, UnitContent
from tidings.workspace.metadata import read_comment, read_meta, split_meta
from tidings.workspace.problems import InvalidFile, Problem
from tidings.workspace.python import load_python
from tidings.workspace.reading import open_inside
from tidings.workspace.settings import Settings
from tidings.workspace.ui import link_page, load_page
from tidings.workspace.units import Unit, get_stem

__all__ = ["find_unstarted", "load_registered_tool", "load_tools", "looks_like_script"]

_DOCUMENTS = frozenset(
    {".adoc", ".cfg", ".conf", ".css", ".csv", ".html", ".ini", ".json", ".jsonl", ".lock", ".log", ".md", ".rst"}
    | {".sql", ".svg", ".toml", ".tsv", ".txt", ".xml", ".yaml", ".yml"}
    | {"AUTHORS", "CHANGELOG", "COPYING", "Dockerfile", "LICENSE", "Makefile", "NOTICE", "README"}
)
"""The suffixes, and the names without a suffix, of documents and data. Only with a first line like `#!` can one run."""

_START_BYTES = 1024
"""The bytes of a file in which a zero byte shows that it is not text."""


def load_tools(root: Path, settings: Settings, unit: Unit, files: list[Path]) -> UnitContent:
    items: list[LoadedItem] = []
    problems: tuple[Problem, ...] = ()
    folders = _find_tool_folders(files) if unit.is_folder else {None: files}
    for folder, tool_files in folders.items():
        page = load_page(root, settings, folder / "ui", files, folder.name) if folder else None
        items += _load_tool(root, settings, tool_files, folder, page)
        items += [page] if page else []
        problems += _find_unstarted_tools(root, tool_files, folder is not None)
    if not folders and not unit.is_helper:
        problems = _find_misnamed(root, root / unit.key, files)
    return UnitContent(items, problems=problems)


def _find_tool_folders(files: list[Path]) -> dict[Path | None, list[Path]]:
    """Return the folders that contain `tool.*`, and these files. The folders below them are for the tool's own use."""
    found: dict[Path | None, list[Path]] = {}
    for path in sorted(files, key=lambda path: len(path.parts)):
        if get_stem(path.name) == "tool" and found.keys().isdisjoint(path.parent.parents):
            found.setdefault(path.parent, []).append(path)
    return found


def _load_tool(
    root: Path, settings: Settings, files: list[Path], folder: Path | None, page: LoadedItem | None
) -> list[LoadedItem]:
    metas, others = split_meta(files)
    scripts = [path for path in others if _is_tool(root, path, folder is not None)]
    meta_path = metas[0] if metas and len(scripts) == 1 else None
    meta = read_meta(root, metas[0]) if metas else {}
    items: list[LoadedItem] = []
    for path in scripts:
        described = meta if meta_path else {}
        if path.suffix == ".py" and not _is_executable(root, path):
            items += load_python(root, path, described, meta_path)
        else:
            described = read_comment(root, path) | described
            if page is not None:
                described = link_page(described, page)
            name = folder.name if folder is not None else path.stem
            items.append(make_executable(root, settings, path, described, name, meta_path))
    if metas and not items:
        raise InvalidFile(metas[0], "no tool beside it: add a Python file, or make the script executable (chmod +x)")
    return items


def load_registered_tool(root: Path, settings: Settings, path: Path, meta: dict[str, Any]) -> LoadedItem:
    return make_executable(root, settings, path, read_comment(root, path) | meta, path.stem)


def _is_tool(root: Path, path: Path, is_folder: bool) -> bool:
    """Return whether a file is a tool. A README, data or a helper module is not."""
    if _is_executable(root, path):
        return True
    return not path.name.startswith("_") if path.suffix == ".py" else is_folder and path.suffix == ".sh"


def _is_executable(root: Path, path: Path) -> bool:
    """Return whether a file is started as a program.

    A Python file also needs `#!`, because some file systems mark all files as executable. So does a document.
    """
    needs_shebang = path.suffix == ".py" or _is_document(path)
    return os.access(path, os.X_OK) and (not needs_shebang or _read_start(root, path).startswith(b"#!"))


def _is_document(path: Path) -> bool:
    return (path.suffix or path.name) in _DOCUMENTS


def looks_like_script(root: Path, path: Path) -> bool:
    """Return whether a file starts with `#!`, or is text and, by its name, neither a document nor data."""
    start = _read_start(root, path)
    return start.startswith(b"#!") or (b"\0" not in start and not _is_document(path))


def _find_unstarted_tools(root: Path, files: list[Path], is_folder: bool) -> tuple[Problem, ...]:
    others = [path for path in files if not path.name.startswith("_") and not _is_tool(root, path, is_folder)]
    return find_unstarted(root, others, "is not a tool")


def find_unstarted(root: Path, files: list[Path], effect: str) -> tuple[Problem, ...]:
    """Return a problem for each script among files that are not executable."""
    found: list[Problem] = []
    for path in filter(partial(looks_like_script, root), files):
        if _read_start(root, path).startswith(b"#!"):
            message = f"is not executable, so it {effect}; make it executable with `chmod +x`"
        else:
            message = (
                f"is not executable and has no first line like #!/bin/sh, so it {effect}; "
                "add both, or start its name with _ if it is not a script"
            )
        found.append(Problem(path.relative_to(root).as_posix(), None, message))
    return tuple(found)


def _find_misnamed(root: Path, folder: Path, files: list[Path]) -> tuple[Problem, ...]:
    """Return a problem for each script of a folder without a tool."""
    if folder / "__init__.py" in files:
        return ()  # a package that tools import
    message = "is not a tool: in a folder, only tool.* is one; rename it, or start the folder's name with _"
    return tuple(
        Problem(path.relative_to(root).as_posix(), None, message)
        for path in files
        if path.parent == folder and not path.name.startswith("_") and looks_like_script(root, path)
    )


def _read_start(root: Path, path: Path) -> bytes:
    with suppress(OSError), open_inside(root, path) as file:
        return file.read(_START_BYTES)
    return b""  # not readable: if it is a tool, loading it reports the reason
