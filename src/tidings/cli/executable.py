"""The command itself, as others may call it: a client that starts it, or a person who types it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["as_called", "command"]


def command() -> list[str]:
    """What starts `tidings` from anywhere, by absolute paths: a client has a PATH of its own."""
    called = Path(sys.argv[0])
    beside = Path(sys.executable).with_name("tidings")
    for path in (called, beside):
        if path.stem == "tidings" and path.is_absolute() and path.is_file():
            return [str(path)]
    if called.stem == "tidings" and (found := shutil.which(str(called))):
        return [str(Path(found).absolute())]
    return [sys.executable, "-m", "tidings"]


def as_called() -> str:
    """What to type here, in the shell's terms and as short as it works."""
    words = command()
    if len(words) == 1:
        found = shutil.which("tidings")
        if found is not None and Path(found).absolute() == Path(words[0]):
            return "tidings"
    relative = os.path.relpath(words[0])
    words[0] = relative if len(relative) < len(words[0]) and not relative.startswith("..") else words[0]
    return shlex.join(words)
