"""Problems in the files of a workspace, described so that the author of the file can fix them."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tidings.core.digest import canonical
from tidings.errors import TidingsError
from tidings.workspace.reading import read_inside

__all__ = ["ERRORS", "InvalidFile", "Problem", "digest_problems", "find_problem", "invalid_field", "make_model"]

ERRORS = "tidings://errors"
"""The resource that contains the problems."""


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    path: str
    """Relative to the workspace."""
    line: int | None
    message: str

    def __str__(self) -> str:
        location = self.path if self.line is None else f"{self.path}:{self.line}"
        # `tidings://errors` has one problem per line, so line breaks and control characters are replaced.
        text = " ".join(f"{location}: {self.message}".splitlines())
        return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class InvalidFile(TidingsError):
    """A file of the workspace can't be loaded."""

    def __init__(self, path: Path, message: str, line: int | None = None, field: str = "") -> None:
        """Create the error for `path`. Without `line`, the problem is in the first line that contains `field`."""
        super().__init__(message)
        self.path = path
        self.line = line
        self.field = field


def invalid_field(path: Path, field: str, message: str) -> InvalidFile:
    """Return the error for a field in `path`."""
    return InvalidFile(path, message, field=field)


def make_model(model: type[Model], meta_path: Path, **fields: Any) -> Model:
    """Return a model of the SDK. Raise `InvalidFile` if it rejects a field, which `meta_path` contains."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    raise invalid_field(meta_path, str(first["loc"][0]) if field else "", f"{field or 'metadata'}: {first['msg']}")


def find_problem(error: BaseException, path: Path, root: Path) -> Problem:
    """Return the problem for an exception that was raised while `path` was loaded."""
    line: int | None = None
    message = str(error)
    if isinstance(error, InvalidFile):
        path, line = error.path, error.line
        if line is None and error.field:
            line = _find_line(root, path, error.field)
    elif isinstance(error, SyntaxError):
        line = error.lineno
        if error.filename and Path(error.filename).is_relative_to(root):
            path = Path(error.filename)  # a module that this file imports
        message = f"{error.msg} (Python)"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = frames[-1].lineno if frames else None
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return Problem(name, line, message)


def _find_line(root: Path, path: Path, field: str) -> int | None:
    """Return the first line that contains the name of a field."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(field)}(?![\w-])")
    with suppress(OSError, UnicodeDecodeError):
        lines = read_inside(root, path).decode("utf-8-sig").splitlines()
        return next((number for number, text in enumerate(lines, 1) if pattern.search(text)), None)
    return None


def digest_problems(problems: tuple[Problem, ...]) -> str:
    return canonical([str(problem) for problem in problems]).hex()
