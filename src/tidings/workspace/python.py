"""Python tools: every public function with type hints is a tool, its docstring the description.

A file is run anew as a fresh module whenever it changed, with its own folder on the path, for helpers beside it whose
names begin with `_`. What it starts (threads, connections) is its own to end.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from pydantic import ValidationError

from tidings.workspace.problems import Broken, broken_member
from tidings.workspace.units import Piece, piece_of

__all__ = ["load_python"]

_LOADING_TIME = 10.0
"""Seconds that a file may take to be run; nothing else of the workspace is read meanwhile."""


class PythonTool(Tool):
    """A function. One that calls `sys.exit()` ends its call, and not the server of everybody else."""

    async def run(self, arguments: dict[str, Any], context: Any, convert_result: bool = False) -> Any:
        try:
            return await super().run(arguments, context, convert_result=convert_result)
        except (SystemExit, KeyboardInterrupt) as error:
            raise ToolError(f"{self.name} ended with {error!r}") from None


def load_python(path: Path, meta: dict[str, Any], said_in: Path | None = None) -> list[Piece]:
    module = _run_in_time(path)
    functions = [value for name, value in vars(module).items() if _is_tool(name, value, module)]
    if not functions:
        raise Broken(path, "no tool in it: a tool is a public function whose parameters have type hints")
    described = meta if len(functions) == 1 else {}
    pieces = []
    for function in functions:
        _check_hints(path, function)
        options = {name: described[name] for name in ("name", "title", "description") if described.get(name)}
        if described.get("annotations"):
            from mcp_types import ToolAnnotations

            try:
                options["annotations"] = ToolAnnotations.model_validate(described["annotations"])
            except ValidationError as error:
                message = f"annotations: {error.errors()[0]['msg']}"
                raise broken_member(said_in or path, "annotations", message) from None
        for name, value in options.items():
            if name != "annotations" and not isinstance(value, str):
                raise broken_member(said_in or path, name, f"{name} is {value!r:.60}; it must be a text")
        try:
            tool = PythonTool.from_function(function, **options)
        except Exception as error:  # whatever pydantic or the SDK dislikes of a signature
            raise Broken(path, f"{function.__name__}: {error}", _line_of(function)) from error
        pieces.append(piece_of(tool))
    return pieces


def _run_in_time(path: Path) -> types.ModuleType:
    """In a thread of its own: a file that never ends must not end the reading of all others."""
    outcome: list[types.ModuleType | BaseException] = []

    def run() -> None:
        try:
            outcome.append(_run(path))
        except BaseException as error:  # SystemExit too: it is the file's mistake, and not the server's end
            outcome.append(error)

    thread = threading.Thread(target=run, name=f"loading {path.name}", daemon=True)
    thread.start()
    thread.join(_LOADING_TIME)
    if not outcome:
        raise Broken(path, f"still running after {_LOADING_TIME:g} s; a tool file is run to its end when it is loaded")
    [result] = outcome
    if isinstance(result, SystemExit):
        raise Broken(path, f"calls sys.exit({result.code!r}) when it is loaded")
    if isinstance(result, BaseException):
        raise result
    return result


def _run(path: Path) -> types.ModuleType:
    module = types.ModuleType(f"tidings_workspace.{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    # Registered while it runs: dataclasses and pydantic look a class's module up by its name.
    sys.modules[module.__name__] = module
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    with _beside(path.parent):
        exec(code, module.__dict__)  # running the user's own files is what a workspace is for
    return module


_times: dict[str, int] = {}
"""Of the modules that tools have imported from beside them: when each file was written last."""

_folders: list[str] = []
"""Those that tools are in."""


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let what is imported meanwhile be found in a folder first. What was imported there before is shared, unless any
    of it has changed since."""
    known = _helpers_in(folder)
    if any(_time_of(file) != _times.get(file) for file in known.values()):
        for name in known:  # all of them, since any may use the one that changed
            sys.modules.pop(name, None)
        known = {}
    for name, module in list(sys.modules.items()):
        # That of another folder, by a name that this one has too.
        if name not in known and getattr(module, "__file__", None) in _times and _has(folder, name):
            del sys.modules[name]
    if str(folder) not in _folders:
        _folders.append(str(folder))
    others = [each for each in _folders if each != str(folder)]
    sys.path[:] = [*(each for each in sys.path if each not in _folders), str(folder), *others]
    importlib.invalidate_caches()
    started = time.time_ns()
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it tells old from new by whole seconds only
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        for name, file in _helpers_in(folder).items():
            if name not in known:
                then = _time_of(file)
                _times[file] = then if then < started else -1  # which of both was read?


def _helpers_in(folder: Path) -> dict[str, str]:
    """The names and files of the modules that are from a folder, packages and what is in them included."""
    place = f"{folder}/"
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(place) and not name.startswith("tidings_workspace."):
            inner = file.removeprefix(place).split("/")
            if len(inner) == 1 or inner[0] == name.partition(".")[0]:
                found[name] = file
    return found


def _has(folder: Path, name: str) -> bool:
    first = name.partition(".")[0]
    return (folder / f"{first}.py").is_file() or (folder / first / "__init__.py").is_file()


def _time_of(file: str) -> int:
    try:
        return Path(file).stat().st_ctime_ns
    except OSError:
        return 0


def _is_tool(name: str, value: Any, module: types.ModuleType) -> bool:
    is_named = not name.startswith("_") and getattr(value, "__name__", "") != "<lambda>"
    return inspect.isfunction(value) and is_named and value.__module__ == module.__name__


def _check_hints(path: Path, function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is inspect.Parameter.empty:
            raise Broken(
                path,
                f"{function.__name__}: parameter {parameter.name!r} has no type hint; "
                "give it one, or begin the function's name with _ if it is no tool",
                _line_of(function),
            )


def _line_of(function: Callable[..., Any]) -> int | None:
    code = getattr(function, "__code__", None)
    return code.co_firstlineno if code else None
