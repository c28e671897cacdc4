"""Checks of the files of a workspace without running them, for `tidings validate`.

Loading stops at the first fault of a unit, and ignores what it does not need. These checks find all faults of a file,
mistakes that only show in a call, and parts of mcp-bash-framework that are not supported.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidings.server.schema import find_schema_error
from tidings.workspace import TOP_LEVEL
from tidings.workspace.files import is_ignored, walk
from tidings.workspace.metadata import META_SUFFIX, read_file, read_meta
from tidings.workspace.problems import InvalidFile, Problem, find_problem, invalid_field
from tidings.workspace.settings import list_faults, suggest
from tidings.workspace.tools import looks_like_script
from tidings.workspace.units import get_stem

__all__ = ["check_files"]

_COMMON: dict[str, type] = {"name": str, "title": str, "description": str, "icons": list, "_meta": dict}

_KEYS: dict[str, dict[str, type]] = {
    "tools": _COMMON
    | {"inputSchema": dict, "arguments": dict, "outputSchema": dict, "annotations": dict, "env": dict, "path": str}
    | {"timeout": float, "timeoutSecs": float, "timeoutHint": str, "maxTimeoutSecs": float}
    | {"progressExtendsTimeout": bool},
    "resources": _COMMON
    | {"uri": str, "uriTemplate": str, "path": str, "mimeType": str, "provider": str, "annotations": dict}
    | {"arguments": dict},
    "prompts": _COMMON | {"path": str, "arguments": object, "role": str, "metadata": dict, "annotations": dict},
    "events": {"description": str, "inputSchema": dict, "payloadSchema": dict, "_meta": dict},
    "ui": _COMMON | {"meta": dict, "entrypoint": str, "template": str, "config": dict},
}
"""The keys of a `.meta.json`, and the type of each value. `float` stands for any number."""

_TYPE_NAMES = {str: "a string", dict: "an object", list: "a list", bool: "true or false", float: "a number"}

_BINARIES = (b"\x7fELF", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe", b"MZ")
"""The first bytes of compiled programs, on Linux, macOS and Windows."""

_UNSUPPORTED = {
    "completions": "completions are not supported; clients get no suggestions",
    "providers": "providers other than 'file' are not supported",
    "server.d/policy.sh": "policy.sh is not supported and does not run; use MCPBASH_TOOL_ALLOWLIST",
    "server.d/health-checks.sh": "health-checks.sh is not supported and does not run",
}
"""Files and folders of mcp-bash-framework, and the message for each."""


def check_files(root: Path) -> list[Problem]:
    """Return the problems of all files. Loading reports the files that can't be read at all."""
    found = [Problem(name, None, message) for name, message in _UNSUPPORTED.items() if (root / name).exists()]
    faults = [*list_faults(root), *_check_links(root), *_check_folder_names(root)]
    for relative in walk(root):
        path = root / relative
        try:
            if path.name.endswith(META_SUFFIX) and relative.parts[0] in _KEYS:
                kind = "ui" if path.name == "ui.meta.json" else relative.parts[0]
                if kind == "tools" and len(relative.parts) > 2 and path.name != "tool.meta.json":
                    message = "describes no tool: in a folder, only tool.* is one; rename it and its script"
                    faults.append(InvalidFile(path, message))
                else:
                    faults += _check_keys(path, read_meta(root, path), kind)
            elif relative.as_posix() == "server.d/register.json":
                faults += _check_registration(path, read_meta(root, path))
            elif relative.parts[0] == "tools" or path.name.startswith("register."):
                faults += _check_script(root, path)
        except InvalidFile:
            pass  # loading reports it
    return sorted(found + [find_problem(fault, fault.path, root) for fault in faults], key=str)


def _check_folder_names(root: Path) -> Iterator[InvalidFile]:
    for path in root.iterdir():
        meant = {path.name.lower(), f"{path.name.lower()}s"} & TOP_LEVEL
        if meant and path.name not in TOP_LEVEL and path.is_dir():
            yield InvalidFile(path, f"is not read; did you mean {meant.pop()}?")


def _check_links(root: Path) -> Iterator[InvalidFile]:
    paths = [root / name for name in sorted(TOP_LEVEL)]
    for path in paths:
        if path.is_symlink() and not path.exists():
            yield InvalidFile(path, "is a link to a file that does not exist; it is not served")
        elif path.parent == root and not path.is_dir():
            continue  # loading reports a link of tidings.toml
        elif path.is_symlink() and not path.resolve().is_relative_to(root):
            yield InvalidFile(path, "is a link out of the workspace, and not served; replace it by a copy")
        elif path.is_dir() and (path.parent == root or not path.is_symlink()):
            with suppress(OSError):  # not readable
                paths += [each for each in path.iterdir() if not is_ignored(each.name)]


def _check_keys(path: Path, meta: dict[str, Any], kind: str, place: str = "") -> Iterator[InvalidFile]:
    """Check the metadata of one item. `place` names the item in a file with several."""
    keys = _KEYS[kind]
    for key, value in meta.items():
        if key not in keys:
            if not key.startswith("_"):  # a comment, in mcp-bash-framework
                message = f"{place}{key} is not a known key, and has no effect; {suggest(key, list(keys))}"
                yield invalid_field(path, key, message)
        elif value is not None and not _has_type(value, keys[key]):
            yield invalid_field(path, key, f"{place}{key} is {value!r:.60}; it must be {_TYPE_NAMES[keys[key]]}")
        elif key in ("inputSchema", "outputSchema") and value and (error := find_schema_error(value)) is not None:
            yield invalid_field(path, key, f"{place}{key} is not a JSON schema: {error}")
    if (provider := meta.get("provider", "file")) != "file":
        yield invalid_field(path, "provider", f"{place}provider {provider!r} is not supported; only 'file' is")
    scheme, _, _ = str(meta.get("uriTemplate", "")).partition("://")
    if "path" not in meta and scheme.startswith(("git", "http")):
        message = f"{place}{scheme} URIs can't be read: only files are served; add a path"
        yield invalid_field(path, "uriTemplate", message)
    for icon in meta["icons"] if isinstance(meta.get("icons"), list) else ():
        source = icon.get("src") if isinstance(icon, dict) else None
        if isinstance(source, str) and not re.match(r"(https?|data):", source):
            message = (
                f"{place}the icon {source!r:.60} is a local file, which clients can't read; give a https: or data: URI"
            )
            yield invalid_field(path, "icons", message)
    if "template" in meta and kind == "ui" and not (path.parent / str(meta.get("entrypoint") or "index.html")).exists():
        yield invalid_field(path, "template", "pages from a template are not supported; write index.html")


def _has_type(value: Any, expected: type) -> bool:
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, expected)


def _check_registration(path: Path, content: dict[str, Any]) -> Iterator[InvalidFile]:
    kinds = {"tools": "tools", "resources": "resources", "resourceTemplates": "resources", "prompts": "prompts"}
    if content.get("completions"):
        yield invalid_field(path, "completions", _UNSUPPORTED["completions"])
    for member, kind in kinds.items():
        entries = content.get(member)
        for number, meta in enumerate(entries if isinstance(entries, list) else (), 1):
            if isinstance(meta, dict):
                yield from _check_keys(path, meta, kind, f"{member}, item {number}: ")


def _check_script(root: Path, path: Path) -> Iterator[InvalidFile]:
    """Check a file that runs, or that its author may expect to run."""
    content = read_file(root, path)
    has_mark = content.startswith(codecs.BOM_UTF8 + b"#!")
    content = content.removeprefix(codecs.BOM_UTF8)
    first, _, rest = content.partition(b"\n")
    is_executable, is_script = os.access(path, os.X_OK), content.startswith(b"#!")
    is_sourced = path.name == "register.sh"
    # Other files in the folder of a tool are for its own use.
    is_tool = path.parent == root / "tools" or get_stem(path.name) == "tool"
    # An executable Python file without a shebang is a Python tool.
    needs_shebang = not is_sourced and not (is_tool and path.suffix == ".py")
    is_started = is_tool or path.parent == root / "server.d"
    if not (is_executable or is_script or is_sourced) or content.startswith(_BINARIES):
        return
    if has_mark:
        yield InvalidFile(path, "starts with a byte order mark (BOM), and can't be started; save it without BOM", 1)
    if b"\r\n" in content and (path.suffix != ".py" or (is_executable and is_script and first.endswith(b"\r"))):
        line = content.count(b"\n", 0, content.index(b"\r\n")) + 1
        yield InvalidFile(path, "has Windows line ends (CRLF), with which a script does not run; save it with LF", line)
    if is_script:
        yield from _check_interpreter(path, first.decode("utf-8", "replace"))
    elif is_executable and is_started and needs_shebang and looks_like_script(root, path):
        yield InvalidFile(path, "has no first line like #!/bin/sh, so it can't be started", 1)
    if is_sourced and b"mcp_completion_register_manual" in rest:
        yield invalid_field(path, "mcp_completion_register_manual", _UNSUPPORTED["completions"])


def _check_interpreter(path: Path, line: str) -> Iterator[InvalidFile]:
    words = line.removeprefix("#!").split()
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if not words:
        yield InvalidFile(path, "its first line names no interpreter; write for example #!/usr/bin/env bash", 1)
    elif shutil.which(words[0]) is None:
        yield InvalidFile(path, f"its interpreter {words[0]!r} does not exist on this machine", 1)
