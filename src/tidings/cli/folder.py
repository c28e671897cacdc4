"""The folder that a command is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.output import fail, stdout_is_set_aside
from tidings.cli.startup import made_to_stay

if TYPE_CHECKING:
    from tidings.workspace.source import Workspace

__all__ = ["check_folder", "open_workspace", "state_file"]


def check_folder(folder: Path) -> None:
    """Refuse what can't be a workspace, before anything slow is done for it."""
    if not folder.exists():
        fail(f"{folder} is not there; `tidings new {folder}` makes a workspace to begin with")
    if not folder.is_dir():
        fail(f"{folder} is not a folder; name the folder that tools/, resources/ and prompts/ are in")
    if not os.access(folder, os.R_OK | os.X_OK):
        fail(f"{folder} can't be read: permission denied")


def open_workspace(folder: Path, **options: float) -> Workspace:
    check_folder(folder)
    with made_to_stay(), stdout_is_set_aside():
        from tidings.workspace.source import Workspace

        return Workspace(folder, **options)


def state_file(folder: Path) -> Path:
    """Where the state of a workspace is kept unless somebody says otherwise."""
    return folder / ".tidings" / "state.db"
