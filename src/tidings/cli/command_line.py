"""The command line that starts `tidings`, for the settings of a client and for hints to the user."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["absolute_command", "shell_command"]


def absolute_command() -> list[str]:
    """Return a command with an absolute path, because a client that runs it may have another PATH."""
    called = shutil.which(sys.argv[0])
    if called is not None and Path(called).stem == "tidings":
        return [str(Path(called).absolute())]
    return [sys.executable, "-m", "tidings"]


def shell_command() -> str:
    """Return the command that works in this shell and folder: `tidings`, or the command as the user gave it."""
    words = absolute_command()
    if len(words) > 1:
        return shlex.join(words)
    found = shutil.which("tidings")
    return "tidings" if found and str(Path(found).absolute()) == words[0] else shlex.quote(sys.argv[0])
