"""What is wrong with a file of a workspace, said so that its author can mend it."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from tidings.digest import canonical
from tidings.errors import TidingsError

__all__ = ["Broken", "Problem", "broken_by", "broken_member", "etag_of", "problem_of"]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    path: str
    """Relative to the workspace."""
    line: int | None
    message: str

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        # One line, whatever a name or an error holds: who reads them takes each for one problem.
        text = " ".join(f"{place}: {self.message}".splitlines())
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Broken(TidingsError):
    """A file of the workspace can't be used."""

    def __init__(self, path: Path, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


def broken_by(error: ValidationError, path: Path) -> Broken:
    """What the SDK's models dislike of a member that `path` gives."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return broken_member(path, str(first["loc"][0]) if place else "", f"{place or 'it'}: {first['msg']}")


def broken_member(path: Path, member: str, message: str) -> Broken:
    """Something is wrong with what `path` says under a name; with the line where that stands, if it can be found."""
    line = None
    with suppress(OSError, UnicodeDecodeError):
        pattern = re.compile(rf"(?<![\w-]){re.escape(member)}(?![\w-])")
        lines = path.read_text("utf-8-sig").splitlines() if member else []
        line = next((number for number, text in enumerate(lines, 1) if pattern.search(text)), None)
    return Broken(path, message, line)


def problem_of(error: BaseException, path: Path, root: Path) -> Problem:
    """The problem behind an exception that came up while `path` was loaded."""
    line: int | None = None
    message = str(error) or type(error).__name__
    if isinstance(error, Broken):
        path, line = error.path, error.line
    elif isinstance(error, SyntaxError):
        line = error.lineno
        if error.filename and Path(error.filename).is_relative_to(root):
            path = Path(error.filename)  # a file that this one imports
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


def etag_of(problems: tuple[Problem, ...]) -> str:
    return canonical([str(each) for each in problems]).hex()
