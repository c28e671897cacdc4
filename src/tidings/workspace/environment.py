"""The environment of an executable tool.

A tool gets only allowed variables of the server's environment, because a server has secrets that its tools don't need.
It also gets its arguments and its location. `build_environment` sets the variables of Tidings and those that the
documentation of mcp-bash-framework names, so that tools written for that framework run unchanged. `sdk/tool-sdk.sh`
reads both.
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

from tidings.core.encoding import is_unicode
from tidings.errors import InvalidItem
from tidings.workspace.files import find_inside
from tidings.workspace.reading import read_inside

__all__ = [
    "SDK",
    "add_env_script",
    "build_environment",
    "check_variables",
    "encode_json",
    "find_json_tool",
    "list_roots",
]

SDK = Path(__file__).parent / "sdk"

_ALLOWED = ("PATH", "HOME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM", "USER", "LOGNAME", "SHELL")
"""The variables that a program needs to start. None of them contains a secret."""

_ALLOWED_MCPBASH = ("MCPBASH_HTTPS_*", "MCPBASH_LOG_LEVEL", "MCPBASH_MAX_TEXT_BYTES", "MCPBASH_DEBUG_LOG")
"""Settings for the helpers in `sdk/`. Not `MCPBASH_*`, because one of those may be a token."""

_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"

_MAX_VARIABLE = 128 * 1024
"""Bytes of `NAME=value` and its final NUL. Linux starts no process with a longer variable (MAX_ARG_STRLEN)."""

_MAX_ARGUMENTS = 256 * 1024
"""Bytes of all arguments together: half of the limit of macOS for the whole environment."""

_RUN_AFTER_SCRIPT = """\
source "$0" </dev/null >&2 || { status=$?; echo "server.d/env.sh failed with status ${status}" >&2; exit 1; }
exec "$@"
"""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARGUMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def build_environment(
    root: Path,
    arguments: Mapping[str, Any],
    *,
    name: str = "",
    allowed: Iterable[str] = (),
    variables: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    request_meta: Mapping[str, Any] | None = None,
    can_ask: bool = False,
    scratch: Path | None = None,
) -> dict[str, str]:
    """Return the environment for a tool of the workspace at `root`.

    `allowed` has the names or patterns of further variables of the server that the tool may see. `variables` are set
    as they are. `metadata` is that of the tool, `request_meta` that of the call.

    A value that is too large for a variable is written to a file in `scratch`; without one, it is omitted.
    """
    env = _inherit((*_ALLOWED, *_ALLOWED_MCPBASH, *allowed))
    env.setdefault("PATH", _DEFAULT_PATH)
    env |= check_variables(variables or {})
    json_tool = find_json_tool(env["PATH"])
    env |= _make_argument_variables(arguments)
    _set_json(env, ("TIDINGS_ARGS", "MCP_TOOL_ARGS"), encode_json(arguments), scratch)
    if metadata:
        _set_json(env, ("MCP_TOOL_METADATA",), encode_json(metadata), None)
    _set_json(env, ("MCP_TOOL_META",), encode_json(request_meta or {}), scratch)
    roots = list_roots(root)
    env |= {
        "TIDINGS_WORKSPACE": str(root),
        "TIDINGS_TOOL_NAME": name,
        "TIDINGS_PYTHON": sys.executable,
        "MCP_SDK": str(SDK),
        "MCP_TOOL_NAME": name,
        "MCP_ROOTS_PATHS": "\n".join(map(str, roots)),
        "MCP_ROOTS_COUNT": str(len(roots)),
        "MCP_ROOTS_JSON": json.dumps([{"uri": path.as_uri(), "name": path.name, "path": str(path)} for path in roots]),
        "MCP_ELICIT_SUPPORTED": "1" if can_ask else "0",
        "MCPBASH_PROJECT_ROOT": str(root),
        "MCPBASH_TOOLS_DIR": str(root / "tools"),
        "MCPBASH_RESOURCES_DIR": str(root / "resources"),
        "MCPBASH_PROMPTS_DIR": str(root / "prompts"),
        "MCPBASH_SERVER_DIR": str(root / "server.d"),
        "MCPBASH_MODE": "full",
    }
    if json_tool:
        env |= {"MCPBASH_JSON_TOOL": Path(json_tool).name, "MCPBASH_JSON_TOOL_BIN": json_tool}
    if scratch is not None:
        env |= {
            "MCP_CANCEL_FILE": str(scratch / "cancelled"),
            "MCP_ELICIT_RESPONSE_FILE": str(scratch / "answer"),
            "MCP_TOOL_ERROR_FILE": str(scratch / "error.json"),
            "MCP_TOOL_RESOURCES_FILE": str(scratch / "resources"),
        }
    return env


def add_env_script(root: Path, command: Sequence[str]) -> Sequence[str]:
    """Return the command preceded by `server.d/env.sh`, if there is one. The variables that it exports are set."""
    path = find_inside(root, root / "server.d" / "env.sh")
    return command if path is None else ["bash", "-c", _RUN_AFTER_SCRIPT, str(path), *command]


def encode_json(value: Any) -> str:
    """Return JSON that can be encoded as UTF-8. Escape non-ASCII characters only if there is an unpaired surrogate."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if is_unicode(text) else json.dumps(value, separators=(",", ":"))


def list_roots(root: Path) -> list[Path]:
    """Return the folders that a tool may work in: `MCPBASH_ROOTS`, `config/roots.json`, or else the workspace.

    Folders that don't exist are omitted.
    """
    names = [path for path in os.environ.get("MCPBASH_ROOTS", "").split(":") if path]
    if not names:
        try:
            entries = json.loads(read_inside(root, root / "config" / "roots.json"))["roots"]
            names = [entry["path"] for entry in entries]
        except (OSError, ValueError, LookupError, TypeError):
            pass
    paths = [(root / str(path)).resolve() for path in names if "\0" not in str(path)]
    return [path for path in dict.fromkeys(paths) if path.is_dir()] or [root.resolve()]


@lru_cache(maxsize=8)
def find_json_tool(path: str) -> str | None:
    return shutil.which("jq", path=path) or shutil.which("gojq", path=path)


def check_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables. Raises `InvalidItem` if a name or value can't be in an environment."""
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise InvalidItem(f"env: {name!r} is not a valid name of a variable; use letters, digits and _")
        if "\0" in value or not is_unicode(value) or _get_size(name, value) > _MAX_VARIABLE:
            raise InvalidItem(f"env: the value of {name} is not valid; use text without NUL, up to 128 KiB")
    return dict(variables)


def _inherit(patterns: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if any(name == pattern or ("*" in pattern and fnmatchcase(name, pattern)) for pattern in patterns)
    }


def _make_argument_variables(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return `TIDINGS_ARG_<NAME>` for each string, number and boolean.

    If two arguments have the same variable name (`a.b` and `a-b`), neither is set: one must not replace the other.
    """
    variables: dict[str, str] = {}
    duplicates: set[str] = set()
    remaining = _MAX_ARGUMENTS
    for key, value in arguments.items():
        if not _ARGUMENT.fullmatch(key) or not isinstance(value, str | int | float):
            continue
        name = f"TIDINGS_ARG_{re.sub('[.-]', '_', key).upper()}"
        text = value if isinstance(value, str) else json.dumps(value)
        if name in variables:
            duplicates.add(name)
        elif "\0" not in text and is_unicode(text) and (size := _get_size(name, text)) <= min(remaining, _MAX_VARIABLE):
            variables[name] = text
            remaining -= size
    return {name: text for name, text in variables.items() if name not in duplicates}


def _set_json(env: dict[str, str], names: Sequence[str], text: str, scratch: Path | None) -> None:
    """Set `<NAME>_JSON` for each name, or, if the text is too large, `<NAME>_FILE` with the path of a file."""
    if all(_get_size(f"{name}_JSON", text) <= _MAX_VARIABLE for name in names):
        env |= {f"{name}_JSON": text for name in names}
    elif scratch is not None:
        file = scratch / f"{names[-1].lower()}.json"
        file.write_text(text, "utf-8")
        env |= {f"{name}_FILE": str(file) for name in names}


def _get_size(name: str, value: str) -> int:
    return len(name) + len(value.encode("utf-8", "surrogateescape")) + 2
