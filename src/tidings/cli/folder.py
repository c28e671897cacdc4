"""The workspace folder of a command. `serve --stdio` uses this module, so it must not import Typer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.output import fail, redirect_stdout_to_stderr
from tidings.server.garbage_collection import without_gc

if TYPE_CHECKING:
    from tidings.workspace.source import Workspace

__all__ = ["check_folder", "open_workspace"]


def check_folder(folder: Path) -> None:
    """Exit with an error if `folder` can't be a workspace. Call this before anything slow."""
    if not folder.exists():
        fail(f"{folder} does not exist; `tidings new {folder}` creates a workspace")
    if not folder.is_dir():
        fail(f"{folder} is not a folder; give the folder that contains tools/, resources/ and prompts/")
    if not os.access(folder, os.R_OK | os.X_OK):
        fail(f"{folder} can't be read: permission denied")


def open_workspace(folder: Path, *, poll: float) -> Workspace:
    check_folder(folder)
    with without_gc(), redirect_stdout_to_stderr():
        from tidings.workspace.source import Workspace

        return Workspace(folder, poll=poll)
