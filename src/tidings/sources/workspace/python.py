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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from pydantic import ValidationError

from tidings.sources.workspace.pieces import Piece, piece_of
from tidings.sources.workspace.problems import Broken, broken_member

__all__ = ["load_python", "outdated"]

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
    files = (path, *_helpers_of(path.parent))
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
        pieces.append(piece_of(tool, files=files))
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
        _running[path] = _helpers[path.parent]
        exec(code, module.__dict__)  # running the user's own files is what a workspace is for
    return module


_helpers: dict[Path, dict[str, tuple[types.ModuleType, Path, int]]] = {}
"""Modules that tools have imported from beside them, by folder and name, each with the time of its file."""

_running: dict[Path, dict[str, tuple[types.ModuleType, Path, int]]] = {}
"""Those of its folder when a tool was run last: all tools there share them."""


def outdated(root: Path) -> set[PurePosixPath]:
    """The tools of a workspace that were run with helpers which those beside them share no more."""
    old = [path for path, helpers in list(_running.items()) if helpers and helpers is not _helpers[path.parent]]
    return {PurePosixPath(path.relative_to(root).as_posix()) for path in old if path.is_relative_to(root)}


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let what is imported meanwhile be found in a folder: its own modules and not those of other tools' folders, the
    ones that are there already, which those beside them share, unless any of them has changed since."""
    for known in _helpers.values():
        for name, (module, *_) in known.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    own = _helpers.setdefault(folder, {})
    if any(_time_of(file) != then for _, file, then in own.values()):
        own = _helpers[folder] = {}  # all of them, since any may use the one that changed
    sys.modules.update({name: module for name, (module, *_) in own.items()})
    others = [str(each) for each in _helpers if each != folder]
    meanwhile = _Meanwhile(others)
    sys.meta_path.append(meanwhile)
    sys.path[:] = [*(each for each in sys.path if each not in others and each != str(folder)), str(folder)]
    importlib.invalidate_caches()
    before, started = len(sys.modules), time.time_ns()
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # what is cached is told from what is new by whole seconds only
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        sys.meta_path.remove(meanwhile)
        for name, module in [*sys.modules.items()][before:]:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and _folder_of(Path(file)) == folder and not name.startswith("tidings_workspace."):
                then = _time_of(Path(file))
                own[name] = (module, Path(file), then if then < started else -1)  # which of both was read?
        for known in _helpers.values():
            for name, (module, *_) in known.items():
                sys.modules.setdefault(name, module)
        sys.path += [each for each in others if each not in sys.path]


class _Meanwhile(MetaPathFinder, Loader):
    """Finds what tools of other folders import while they run and another one is loaded, in its own thread."""

    def __init__(self, folders: list[str]) -> None:
        self._folders = folders
        self._loading = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if threading.get_ident() == self._loading:
            return None
        if _known(name) is not None:
            return ModuleSpec(name, self)
        return PathFinder.find_spec(name, self._folders) if path is None else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return _known(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It has been."""


def _known(name: str) -> types.ModuleType | None:
    return next((known[name][0] for known in list(_helpers.values()) if name in known), None)


def _folder_of(file: Path) -> Path | None:
    """The tools' folder that a module is from: one may lie in another."""
    return next((each for each in file.parents if each in _helpers), None)


def _helpers_of(folder: Path) -> tuple[Path, ...]:
    return tuple(file for _, file, _ in _helpers.get(folder, {}).values())


def _time_of(file: Path) -> int:
    try:
        return file.stat().st_ctime_ns
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
