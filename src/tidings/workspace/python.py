"""Python tools: every public function with type hints is a tool, and its docstring is the description.

A file runs as a new module each time it has changed. It can import the modules beside it, whose names usually start
with `_`; all tools of a folder share them. Tidings does not close the threads and connections of the previous module.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools.base import Tool
from mcp_types import ToolAnnotations
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from tidings.workspace.files import read_state
from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import read_file
from tidings.workspace.problems import InvalidFile, find_problem, invalid_field

__all__ = ["StillLoading", "load_python", "unload_modules", "wait_for_loading"]

_LOAD_TIMEOUT = 10.0
"""Seconds that a file may run when it is loaded."""

_FIRST_WAIT = 0.5
"""Seconds that other files wait for one that is being loaded: longer than most imports take."""

_PACKAGE = "tidings_workspace."


class StillLoading(Exception):
    """A file is still being loaded in the background. Load it again later to get its tools."""


class PythonTool(Tool):
    """A Python function as a tool. The caller gets the type and the message of an exception."""

    async def run(self, arguments: dict[str, Any], context: Any, convert_result: bool = False) -> Any:
        try:
            result = await super().run(arguments, context, convert_result=convert_result)
            if convert_result:
                to_json(result)
            return result
        except PydanticSerializationError:  # for example a file name from `os.listdir` that is not UTF-8
            raise ToolError(f"{self.name}: the result contains text that UTF-8 can't encode") from None
        except UnexpectedToolError as error:
            raise UnexpectedToolError(f"{self.name}: {_describe(error.__cause__ or error)}") from error.__cause__
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            raise ToolError(f"{self.name}: {_describe(error.__cause__)}") from error.__cause__
        except (Exception, GeneratorExit):
            raise
        except BaseException as error:  # for example SystemExit: the server must continue
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this call is cancelled, and not a task that the tool made
            raise ToolError(f"{self.name} ended with {error!r}") from None


def _describe(error: BaseException) -> str:
    """Return the type and the message of an exception; for invalid arguments, what is wrong with each of them."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def load_python(root: Path, path: Path, meta: dict[str, Any], meta_path: Path | None = None) -> list[LoadedItem]:
    """Return the tools of a Python file. `meta` describes the tool if there is only one.

    Raise `StillLoading` if the file takes longer than other files should wait."""
    module = _load_module(root, path)
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
        items.append(LoadedItem(tool))
    return items


def unload_modules(files: Iterable[Path]) -> None:
    """Remove all modules of a folder from `sys.modules` if one of them was imported from `files`.

    The others are removed too, because they may use the one that changed. The next import loads them again. A file that
    is being loaded is abandoned.
    """
    files = list(files)
    for path in files:
        _abandon_older(path, read_state(path))
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


class _Abandoned(BaseException):
    """Raised inside a file whose loading is abandoned."""


class _Loading:
    """One file that runs in a thread of its own, because it may be slow or never end."""

    def __init__(self, path: Path, version: tuple[Any, ...], source: bytes) -> None:
        self.path = path
        self.version = version
        self._source = source
        self._outcome: types.ModuleType | BaseException | None = None
        self._deadline = time.monotonic() + _LOAD_TIMEOUT
        self._thread = threading.Thread(target=self._run, name=f"loading {path.name}", daemon=True)
        self._thread.start()
        self.wait(_FIRST_WAIT)

    def _run(self) -> None:
        try:
            self._outcome = _run(self.path, self._source)
        except BaseException as error:
            self._outcome = error

    @property
    def is_running(self) -> bool:
        """Whether the file is not loaded yet, and may still take some time."""
        return self._outcome is None and time.monotonic() < self._deadline

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the file is loaded, for at most `timeout` seconds, and not longer than it may take."""
        left = max(0.0, self._deadline - time.monotonic())
        self._thread.join(left if timeout is None else min(left, timeout))

    def abandon(self) -> None:
        """Raise an exception in the file, so that an endless loop ends. Code that waits in C ends when it returns."""
        import ctypes  # here, because it is rarely needed

        if self._thread.is_alive() and self._thread.ident is not None:
            thread_id = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(_Abandoned))

    def result(self) -> types.ModuleType:
        """Return the module, or raise what the file raised."""
        if isinstance(self._outcome, types.ModuleType):
            return self._outcome
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is not None:
            # For example SystemExit or CancelledError, which must not stop the server or its watcher.
            problem = find_problem(self._outcome, self.path, self.path.parent)
            raise InvalidFile(self.path, problem.message, problem.line)
        self.abandon()
        message = f"still running after {_LOAD_TIMEOUT:g} s; loading runs it, so move slow code into a function"
        raise InvalidFile(self.path, message)


_loadings: dict[Path, _Loading] = {}
"""The files that are being loaded."""


def _load_module(root: Path, path: Path) -> types.ModuleType:
    version = read_state(path)  # before the source: an edit in between must not get this version
    _abandon_older(path, version)
    loading = _loadings.get(path)
    if loading is None:
        loading = _loadings[path] = _Loading(path, version, read_file(root, path))
    if loading.is_running:
        raise StillLoading(path)
    del _loadings[path]
    return loading.result()


def _abandon_older(path: Path, version: tuple[Any, ...]) -> None:
    """Abandon the loading of another version of a file."""
    if (loading := _loadings.get(path)) is not None and loading.version != version:
        del _loadings[path]
        loading.abandon()


def wait_for_loading(paths: Iterable[Path]) -> None:
    """Wait until files are loaded, or have taken too long."""
    for loading in [_loadings[path] for path in paths if path in _loadings]:
        loading.wait()


def _run(path: Path, source: bytes) -> types.ModuleType:
    module = types.ModuleType(f"{_PACKAGE}{path.parent.name}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look up the module of a class by its name
    code = compile(source, str(path), "exec", dont_inherit=True)
    with _importing_from(path.parent):
        exec(code, module.__dict__)
    return module


_folders: list[str] = []
"""The folders of all loaded Python tools. They stay on `sys.path`, because functions may import when called."""

_importing: list[int] = []
"""The threads in which files are being loaded."""

_DONT_WRITE_BYTECODE = sys.dont_write_bytecode


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Let imports find the modules of `folder` before those of other tools' folders.

    `sys.path` is shared: if a slow file imports a module while another file is loaded, and both folders have a module
    of this name, it may get the other one."""
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
    sys.dont_write_bytecode = True
    _importing.append(threading.get_ident())
    try:
        yield
    finally:
        _importing.remove(threading.get_ident())
        sys.dont_write_bytecode = bool(_importing) or _DONT_WRITE_BYTECODE


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
