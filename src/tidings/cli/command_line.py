"""The command line that starts `tidings`, for the settings of a client and for hints to the user."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["absolute_command", "shell_command"]


def absolute_command() -> list[str]:
    """Return a command with an absolute path, because a client that runs it may have another PATH."""
    called = Path(sys.argv[0])
    sibling = Path(sys.executable).with_name("tidings")
    for path in (called, sibling):
        if path.stem == "tidings" and path.is_absolute() and path.is_file():
            return [str(path)]
    if called.stem == "tidings" and (found := shutil.which(str(called))):
        return [str(Path(found).absolute())]
    return [sys.executable, "-m", "tidings"]


def shell_command() -> str:
    """Return the shortest command that works in this shell and folder."""
    words = absolute_command()
    if len(words) == 1:
        found = shutil.which("tidings")
        if found is not None and Path(found).absolute() == Path(words[0]):
            return "tidings"
    relative = os.path.relpath(words[0])
    if len(relative) < len(words[0]) and not relative.startswith(".."):
        words[0] = relative
    return shlex.join(words)
