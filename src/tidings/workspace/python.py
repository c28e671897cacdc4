"""Python tools: every public function with type hints is a tool, and its docstring is the description.

A file runs as a new module each time it has changed. It can import the modules beside it, whose names usually start
with `_`; all tools of a folder share them. Tidings does not close the threads and connections of the previous module.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from mcp_types import ToolAnnotations
from pydantic import ValidationError

from tidings.workspace.items import LoadedItem, make_item
from tidings.workspace.problems import InvalidFile, find_problem, invalid_field

__all__ = ["load_python", "unload_modules"]

_LOAD_TIMEOUT = 10.0
"""Seconds that a file may run when it is loaded. No other file is loaded in that time."""

_PACKAGE = "tidings_workspace."


class PythonTool(Tool):
    """A Python function as a tool. If it calls `sys.exit()`, the call fails, and the server continues."""

    async def run(self, arguments: dict[str, Any], context: Any, convert_result: bool = False) -> Any:
        try:
            return await super().run(arguments, context, convert_result=convert_result)
        except (SystemExit, KeyboardInterrupt) as error:
            raise ToolError(f"{self.name} ended with {error!r}") from None


def load_python(path: Path, meta: dict[str, Any], meta_path: Path | None = None) -> list[LoadedItem]:
    """Return the tools of a Python file. `meta` describes the tool if there is only one."""
    module = _run_with_timeout(path)
    functions = [value for name, value in vars(module).items() if _is_tool(name, value, module)]
    if not functions:
        raise InvalidFile(path, "contains no tool; a tool is a public function whose parameters have type hints")
    options = _parse_options(meta_path or path, meta) if len(functions) == 1 else {}
    items = []
    for function in functions:
        _check_hints(path, function)
        try:
            tool = PythonTool.from_function(function, **options)
        except Exception as error:  # pydantic and the SDK raise many types for a bad signature
            raise InvalidFile(path, f"{function.__name__}: {error}", function.__code__.co_firstlineno) from error
        items.append(make_item(tool))
    return items


def unload_modules(files: Iterable[Path]) -> None:
    """Remove all modules of a folder from `sys.modules` if one of them was imported from `files`.

    The others are removed too, because they may use the one that changed. The next import loads them again.
    """
    changed = {str(path) for path in files if path.suffix == ".py"}
    for folder in {str(parent) for path in changed for parent in Path(path).parents}.intersection(_folders):
        modules = {name: file for name, file, parent in _list_imported() if parent == folder}
        if not changed.isdisjoint(modules.values()):
            for name in modules:
                sys.modules.pop(name, None)


def _parse_options(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    options = {name: meta[name] for name in ("name", "title", "description") if meta.get(name)}
    for name, value in options.items():
        if not isinstance(value, str):
            raise invalid_field(path, name, f"{name} is {value!r:.60}; it must be a string")
    if meta.get("annotations"):
        try:
            options["annotations"] = ToolAnnotations.model_validate(meta["annotations"])
        except ValidationError as error:
            raise invalid_field(path, "annotations", f"annotations: {error.errors()[0]['msg']}") from None
    return options


def _run_with_timeout(path: Path) -> types.ModuleType:
    """Run a file in its own thread, because a file that never ends must not prevent the loading of others."""
    outcome: list[types.ModuleType | BaseException] = []

    def run() -> None:
        try:
            outcome.append(_run(path))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=f"loading {path.name}", daemon=True)
    thread.start()
    thread.join(_LOAD_TIMEOUT)
    if not outcome:
        message = f"still running after {_LOAD_TIMEOUT:g} s; loading runs it, so move slow code into a function"
        raise InvalidFile(path, message)
    [result] = outcome
    if isinstance(result, Exception):
        raise result
    if isinstance(result, BaseException):
        # For example SystemExit or CancelledError, which must not stop the server or its watcher.
        problem = find_problem(result, path, path.parent)
        raise InvalidFile(path, problem.message, problem.line)
    return result


def _run(path: Path) -> types.ModuleType:
    module = types.ModuleType(f"{_PACKAGE}{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up the module of a class by its name
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    with _importing_from(path.parent):
        exec(code, module.__dict__)
    return module


_folders: list[str] = []
"""The folders of all loaded Python tools. They stay on `sys.path`, because functions may import when called."""


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let imports find the modules of `folder` before those of other tools' folders."""
    for name, _, parent in _list_imported():
        # A module of the same name from another folder would be found in `sys.modules`.
        if parent in _folders and parent != str(folder) and _has_module(folder, name):
            sys.modules.pop(name, None)
    if str(folder) not in _folders:
        _folders.append(str(folder))
    others = [other for other in _folders if other != str(folder)]
    sys.path[:] = [*(entry for entry in sys.path if entry not in _folders), str(folder), *others]
    importlib.invalidate_caches()
    # Python matches a .pyc file to its source by size and whole seconds, and could miss an edit.
    dont_write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = dont_write


def _list_imported() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the file and the import folder of each imported module, except for the tools themselves."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not name.startswith(_PACKAGE):
            depth = name.count(".") + file.endswith("/__init__.py")
            yield name, file, file.rsplit("/", depth + 1)[0]


def _has_module(folder: Path, name: str) -> bool:
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _is_tool(name: str, value: Any, module: types.ModuleType) -> bool:
    is_public = not name.startswith("_") and getattr(value, "__name__", "") != "<lambda>"
    return inspect.isfunction(value) and is_public and value.__module__ == module.__name__


def _check_hints(path: Path, function: types.FunctionType) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is inspect.Parameter.empty:
            message = (
                f"{function.__name__}: parameter {parameter.name!r} has no type hint; "
                "add one, or start the function's name with _ if it is not a tool"
            )
            raise InvalidFile(path, message, function.__code__.co_firstlineno)
