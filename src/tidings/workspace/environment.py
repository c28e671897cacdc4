"""The environment of an executable tool: what it is allowed of the server's own, its arguments, and where it is.

A tool gets nothing of the server's environment that is not on the list: a server holds secrets that its tools don't
need. The variables of mcp-bash-framework that its documentation names are set beside our own, so that a tool written
for it finds what it looks for; `sdk/tool-sdk.sh` reads them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from tidings.errors import InvalidItem

__all__ = ["PROGRESS_FD", "SDK", "arguments_json", "environment", "roots_of"]

PROGRESS_FD = "TIDINGS_PROGRESS_FD"
"""Names the pipe to which a tool writes progress and log lines; `run_process` sets it."""

SDK = Path(__file__).parent / "sdk"

_ALLOWED = ("PATH", "HOME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM", "USER", "LOGNAME", "SHELL")
"""Where things are, who runs them and in which language: what a program needs to start, and no secret."""

_ALLOWED_MCPBASH = ("MCPBASH_HTTPS_*", "MCPBASH_LOG_LEVEL", "MCPBASH_MAX_TEXT_BYTES", "MCPBASH_DEBUG_LOG")
"""What an operator sets for the helpers in `sdk/`; not `MCPBASH_*`, under which a token may stand."""

_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"

_MOST_VARIABLE = 128 * 1024
"""Linux's own limit of `NAME=value` with its final NUL (MAX_ARG_STRLEN): one byte more, and nothing starts."""

_MOST_ARGUMENTS = 256 * 1024
"""Of all arguments together: half of what macOS takes for the whole environment, a quarter of Linux's least usual."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARGUMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def environment(
    root: Path,
    arguments: Mapping[str, Any],
    *,
    name: str = "",
    allowed: Iterable[str] = (),
    own: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    request_meta: Mapping[str, Any] | None = None,
    roots: Sequence[Path] | None = None,
    scratch: Path | None = None,
) -> dict[str, str]:
    """What a tool of the workspace at `root` finds in its environment.

    `allowed` are further variables of the server's that it may see, by name or pattern; `own` those that the workspace
    sets for it. What is too large for a variable is written to a file in `scratch`, and left out if there is none.
    """
    found = _inherited((*_ALLOWED, *_ALLOWED_MCPBASH, *allowed))
    found.setdefault("PATH", _DEFAULT_PATH)
    found |= _checked(own or {})
    path = json_tool(found["PATH"])
    text = arguments_json(arguments)
    found |= _of_arguments(arguments)
    _put_json(found, ("TIDINGS_ARGS", "MCP_TOOL_ARGS"), text, scratch)
    if request_meta:
        _put_json(found, ("MCP_TOOL_META",), arguments_json(request_meta), scratch)
    if metadata:
        _put_json(found, ("MCP_TOOL_METADATA",), arguments_json(metadata), None)
    places = [str(place) for place in (roots_of(root) if roots is None else roots)]
    found |= {
        "TIDINGS_WORKSPACE": str(root),
        "TIDINGS_TOOL_NAME": name,
        "TIDINGS_PYTHON": sys.executable,
        "MCP_SDK": str(SDK),
        "MCP_TOOL_NAME": name,
        "MCP_ROOTS_PATHS": "\n".join(places),
        "MCP_ROOTS_COUNT": str(len(places)),
        "MCP_ROOTS_JSON": json.dumps(
            [{"uri": Path(place).as_uri(), "name": Path(place).name, "path": place} for place in places]
        ),
        "MCP_ELICIT_SUPPORTED": "0",
        "MCPBASH_PROJECT_ROOT": str(root),
        "MCPBASH_TOOLS_DIR": str(root / "tools"),
        "MCPBASH_RESOURCES_DIR": str(root / "resources"),
        "MCPBASH_PROMPTS_DIR": str(root / "prompts"),
        "MCPBASH_SERVER_DIR": str(root / "server.d"),
        "MCPBASH_MODE": "full",
        "MCPBASH_ENABLE_LIVE_PROGRESS": "true",
    }
    if path:
        found |= {"MCPBASH_JSON_TOOL": Path(path).name, "MCPBASH_JSON_TOOL_BIN": path}
    if scratch is not None:
        found |= {
            "MCP_CANCEL_FILE": str(scratch / "cancelled"),
            "MCP_TOOL_ERROR_FILE": str(scratch / "error.json"),
            "MCP_TOOL_RESOURCES_FILE": str(scratch / "resources"),
        }
    return found


def arguments_json(arguments: Any) -> str:
    """As JSON that any encoder takes: readable as it is, and with escapes where half a surrogate pair stands in it."""
    text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return text if _is_text(text) else json.dumps(arguments, separators=(",", ":"))


def roots_of(root: Path) -> list[Path]:
    """The directories that a tool may work in when no client has named any: `MCPBASH_ROOTS`, `config/roots.json`, or
    the workspace. A path that leads nowhere is left out."""
    named = [path for path in os.environ.get("MCPBASH_ROOTS", "").split(":") if path]
    if not named:
        try:
            listed = json.loads((root / "config" / "roots.json").read_bytes())["roots"]
            named = [entry["path"] for entry in listed]
        except (OSError, ValueError, LookupError, TypeError):
            pass
    places = [(root / str(path)).resolve() for path in named if "\0" not in str(path)]
    return [place for place in dict.fromkeys(places) if place.is_dir()] or [root.resolve()]


@lru_cache(maxsize=8)
def json_tool(path: str) -> str | None:
    return shutil.which("jq", path=path) or shutil.which("gojq", path=path)


def _inherited(patterns: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if any(name == pattern or ("*" in pattern and fnmatchcase(name, pattern)) for pattern in patterns)
    }


def _checked(own: Mapping[str, str]) -> dict[str, str]:
    for name, value in own.items():
        if not _NAME.fullmatch(name):
            raise InvalidItem(f"env: {name!r} can't be the name of a variable; use letters, digits and _")
        if "\0" in str(value) or not _is_text(str(value)) or _size(name, str(value)) > _MOST_VARIABLE:
            raise InvalidItem(f"env: the value of {name} can't be one of a variable: text without NUL, up to 128 KiB")
    return {name: str(value) for name, value in own.items()}


def _of_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """`TIDINGS_ARG_<NAME>` for each simple value. Two names that would become the same one become none: a caller must
    not be able to replace one argument by another."""
    found: dict[str, str] = {}
    twice: set[str] = set()
    left = _MOST_ARGUMENTS
    for key, value in arguments.items():
        if not _ARGUMENT.fullmatch(key) or not isinstance(value, str | int | float):
            continue
        name = f"TIDINGS_ARG_{re.sub('[.-]', '_', key).upper()}"
        text = value if isinstance(value, str) else json.dumps(value)
        if name in found:
            twice.add(name)
        elif "\0" not in text and _is_text(text) and (size := _size(name, text)) <= min(left, _MOST_VARIABLE):
            found[name] = text
            left -= size
    return {name: text for name, text in found.items() if name not in twice}


def _put_json(found: dict[str, str], names: Sequence[str], text: str, scratch: Path | None) -> None:
    """In `<NAME>_JSON` for each of the names, or where it is too large for one, in a file that `<NAME>_FILE` names."""
    if all(_size(f"{name}_JSON", text) <= _MOST_VARIABLE for name in names):
        found |= {f"{name}_JSON": text for name in names}
    elif scratch is not None:
        file = scratch / f"{names[-1].lower()}.json"
        file.write_text(text, "utf-8")
        found |= {f"{name}_FILE": str(file) for name in names}


def _size(name: str, value: str) -> int:
    return len(name) + len(value.encode("utf-8", "surrogateescape")) + 2


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
