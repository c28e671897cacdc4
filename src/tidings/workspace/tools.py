"""The tools of one unit: Python functions, or an executable with what is said of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidings.workspace.executable import executable_piece
from tidings.workspace.loader import META, stem_of
from tidings.workspace.metadata import read_comment, read_meta
from tidings.workspace.problems import Broken
from tidings.workspace.python import load_python
from tidings.workspace.settings import Settings
from tidings.workspace.units import Piece

__all__ = ["load_tools", "tool_piece"]


def load_tools(root: Path, settings: Settings, files: list[Path], is_folder: bool) -> list[Piece]:
    metas = [path for path in files if path.name.endswith(META)]
    others = [path for path in files if not path.name.endswith(META)]
    if is_folder:
        # A folder per tool: `tool.*` is the tool, everything else is its own affair.
        folder = _folder(root, files)
        metas = [path for path in metas if stem_of(path.name) == "tool" and path.parent == folder]
        others = [path for path in others if stem_of(path.name) == "tool" and path.parent == folder]
    others = [path for path in others if _can_be_run(path, is_folder)]
    said_in = metas[0] if metas and len(others) == 1 else None
    meta = read_meta(metas[0]) if metas else {}
    pieces: list[Piece] = []
    for path in others:
        pieces += _load(root, settings, path, meta if said_in else {}, said_in, is_folder)
    if metas and not pieces:
        raise Broken(metas[0], "there is no script beside it that can be run (chmod +x), and no Python file")
    return pieces


def tool_piece(root: Path, settings: Settings, path: Path, meta: dict[str, Any]) -> Piece:
    """An executable that something else than its place in the folder makes a tool."""
    return executable_piece(root, settings, path, read_comment(path) | meta, path.stem)


def _can_be_run(path: Path, is_folder: bool) -> bool:
    """A file that can't be is no tool: a README, data, an editor's backup."""
    if os.access(path, os.X_OK):
        return True
    return not path.name.startswith("_") if path.suffix == ".py" else is_folder and path.suffix == ".sh"


def _load(
    root: Path, settings: Settings, path: Path, meta: dict[str, Any], said_in: Path | None, is_folder: bool
) -> list[Piece]:
    if path.suffix == ".py" and not os.access(path, os.X_OK):
        return load_python(path, meta, said_in)
    name = path.parent.name if is_folder else path.stem
    return [executable_piece(root, settings, path, read_comment(path) | meta, name, said_in)]


def _folder(root: Path, files: list[Path]) -> Path:
    relative = files[0].relative_to(root).parts
    return root / relative[0] / relative[1]
