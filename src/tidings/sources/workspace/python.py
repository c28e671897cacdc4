"""Python tools: every public function with type hints is a tool, its docstring the description.

A file is run anew as a fresh module whenever it changed. What it starts (threads, connections) is its own to end.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.tools.base import Tool

from tidings.sources.workspace.pieces import Piece, piece_of
from tidings.sources.workspace.problems import Broken

__all__ = ["load_python"]


def load_python(path: Path, meta: dict[str, Any]) -> list[Piece]:
    module = _run(path)
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

            options["annotations"] = ToolAnnotations.model_validate(described["annotations"])
        try:
            tool = Tool.from_function(function, **options)
        except Exception as error:  # whatever pydantic or the SDK dislikes of a signature
            raise Broken(path, f"{function.__name__}: {error}", _line_of(function)) from error
        pieces.append(piece_of(tool))
    return pieces


def _run(path: Path) -> types.ModuleType:
    module = types.ModuleType(f"tidings_workspace.{path.stem}")
    module.__file__ = str(path)
    # Registered while it runs: dataclasses and pydantic look a class's module up by its name.
    sys.modules[module.__name__] = module
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)  # running the user's own files is what a workspace is for
    return module


def _is_tool(name: str, value: Any, module: types.ModuleType) -> bool:
    return inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__


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
