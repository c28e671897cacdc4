"""The tools of one unit: Python functions, or an executable and its metadata."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidings.workspace.executable import make_executable
from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import read_comment, read_meta, split_meta
from tidings.workspace.problems import InvalidFile
from tidings.workspace.python import load_python
from tidings.workspace.reading import open_inside
from tidings.workspace.settings import Settings
from tidings.workspace.ui import link_page, load_page
from tidings.workspace.units import Unit, get_stem

__all__ = ["load_registered_tool", "load_tools"]


_DOCUMENTS = frozenset({".md", ".txt", ".rst", ".html", ".json", ".yaml", ".yml", ".toml", ".ini", ".csv", ".xml"})
"""Suffixes of files that are no tools although they are executable, as all files are on some file systems."""


def load_tools(root: Path, settings: Settings, unit: Unit, files: list[Path]) -> list[LoadedItem]:
    if not unit.is_folder:
        return _load_tool(root, settings, files, None)
    items: list[LoadedItem] = []
    for folder, tool_files in _find_tool_folders(files).items():
        page = load_page(root, settings, folder / "ui", files, folder.name)
        items += _load_tool(root, settings, tool_files, folder, page)
        items += [page] if page else []
    return items


def _find_tool_folders(files: list[Path]) -> dict[Path, list[Path]]:
    """Return the folders that contain `tool.*`, and these files. The folders below them are for the tool's own use."""
    found: dict[Path, list[Path]] = {}
    for path in sorted(files, key=lambda path: len(path.parts)):
        if get_stem(path.name) == "tool" and found.keys().isdisjoint(path.parent.parents):
            found.setdefault(path.parent, []).append(path)
    return found


def _load_tool(
    root: Path, settings: Settings, files: list[Path], folder: Path | None, page: LoadedItem | None = None
) -> list[LoadedItem]:
    metas, others = split_meta(files)
    scripts = [path for path in others if _is_tool(root, path, folder is not None)]
    meta_path = metas[0] if metas and len(scripts) == 1 else None
    meta = read_meta(root, metas[0]) if metas else {}
    items: list[LoadedItem] = []
    for path in scripts:
        described = meta if meta_path else {}
        if path.suffix == ".py" and not os.access(path, os.X_OK):
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
    if os.access(path, os.X_OK):
        return path.suffix not in _DOCUMENTS or _has_shebang(root, path)
    return not path.name.startswith("_") if path.suffix == ".py" else is_folder and path.suffix == ".sh"


def _has_shebang(root: Path, path: Path) -> bool:
    with open_inside(root, path) as file:
        return file.read(2) == b"#!"
