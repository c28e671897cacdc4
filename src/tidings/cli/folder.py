"""The workspace folder of a command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.output import fail, redirect_stdout_to_stderr
from tidings.server.garbage_collection import without_gc
from tidings.workspace import TOP_LEVEL

if TYPE_CHECKING:
    from tidings.workspace.source import Workspace

__all__ = ["PROJECT_VARIABLE", "check_folder", "check_workspace", "open_workspace"]


PROJECT_VARIABLE = "MCPBASH_PROJECT_ROOT"
"""The variable for the folder, if the command line has none. Client configurations for mcp-bash-framework set it."""


def check_folder(folder: Path) -> None:
    """Exit with an error if `folder` can't be a workspace. Call this before anything slow."""
    if not folder.exists():
        fail(f"{folder} does not exist; `tidings new {folder}` creates a workspace")
    if not folder.is_dir():
        fail(f"{folder} is not a folder; give the folder that contains tools/, resources/ and prompts/")
    if not os.access(folder, os.R_OK | os.X_OK):
        fail(f"{folder} can't be read: permission denied")


def check_workspace(folder: Path) -> None:
    """Exit with an error if `folder` can't be read, or if it is the current folder and contains no workspace.

    A user who gives no folder may be in the wrong one. Another folder may be empty: files can be added later."""
    check_folder(folder)
    if folder == Path() and not any((folder / name).exists() for name in TOP_LEVEL):
        fail(
            f"the current folder, {Path.cwd()}, is not a workspace: it contains none of "
            f"{', '.join(sorted(TOP_LEVEL))}; give the folder of one, or create one with `tidings new DIR`"
        )


def open_workspace(folder: Path, *, poll: float) -> Workspace:
    check_workspace(folder)
    with without_gc(), redirect_stdout_to_stderr():
        from tidings.workspace.source import Workspace

        return Workspace(folder, poll=poll)
