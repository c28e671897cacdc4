"""The state file of a workspace, for commands that read or edit it without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidings.cli.folder import check_folder
from tidings.cli.output import fail

if TYPE_CHECKING:
    from tidings.store import State

__all__ = ["look", "state_file"]


def state_file(target: Path) -> Path:
    """The file itself if it is named, else the one of a workspace."""
    if target.is_file():
        return target
    check_folder(target)
    from tidings.store.sqlite import default_state

    path = default_state(target)
    if not path.exists():
        fail(f"{target} remembers nothing yet: {path} is not there; `tidings serve {target}` begins it")
    return path


def look(path: Path) -> State:
    from tidings.store.sqlite import peek

    return peek(path)
