"""What is wrong with a file of a workspace, said so that its author can mend it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from tidings.errors import TidingsError

__all__ = ["Broken", "Problem", "problem_of"]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    path: str
    """Relative to the workspace."""
    line: int | None
    message: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: {self.message}"


class Broken(TidingsError):
    """A file of the workspace can't be used."""

    def __init__(self, path: Path, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


def problem_of(error: BaseException, path: Path, root: Path) -> Problem:
    """The problem behind an exception that came up while `path` was loaded."""
    line: int | None = None
    message = str(error) or type(error).__name__
    if isinstance(error, Broken):
        path, line = error.path, error.line
    elif isinstance(error, SyntaxError):
        line = error.lineno
        message = f"{error.msg} (Python)"
    else:
        # The last line of the user's own file on the way to the error.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = frames[-1].lineno if frames else None
        message = f"{type(error).__name__}: {message}"
    try:
        shown = path.relative_to(root).as_posix()
    except ValueError:
        shown = path.name
    return Problem(shown, line, message)
