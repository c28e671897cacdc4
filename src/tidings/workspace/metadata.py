"""What a script says of itself: in `NAME.meta.json` beside it, or in its leading comment.

```sh
#!/bin/sh
# @describe Deploy the site
# @arg target:string! Where to
# @arg dry_run:boolean Only say what would be done
# @timeout 120
```

The comment ends with the first line that is none. `# mcp: {"description": …}` gives the same as JSON.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any

import msgspec

from tidings.workspace.problems import Broken

__all__ = ["read_comment", "read_meta", "read_object"]

_COMMENT = re.compile(r"^\s*(?:#|//|--|;)+\s?(.*)$")
_TAG = re.compile(r"@(\w+)\s*(.*)")
_ARGUMENT = re.compile(r"(?P<name>[\w-]+)(?::(?P<type>\w+))?(?P<required>!)?\s*(?P<description>.*)")
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object"})
_MOST_LINES = 100


def read_meta(path: Path) -> dict[str, Any]:
    try:
        return read_object(path, path.read_bytes())
    except OSError as error:
        raise Broken(path, f"can't be read: {error.strerror}") from None


def read_object(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object that a file holds, or that a script has printed."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return msgspec.json.decode(data.decode("utf-8"), type=dict[str, Any])
    except UnicodeDecodeError as error:
        place, message = error.start, f"not UTF-8: {error.reason}"
    except msgspec.DecodeError as error:
        found = re.search(r"\(byte (\d+)\)", str(error))
        place, message = int(found[1]) if found else 0, f"not a JSON object: {error}"
    except RecursionError:
        place, message = 0, "not a JSON object that can be read: it is nested too deep"
    raise Broken(path, message, data.count(b"\n", 0, place) + 1)


def read_comment(path: Path) -> dict[str, Any]:
    """The metadata in the leading comment of a script; empty for a binary, or when there is none."""
    with path.open("rb") as file:
        start = file.read(64 << 10)
    if not start:
        # Most often it is being written: who had a tool by that name keeps it until it is.
        raise Broken(path, "the file is empty: there is nothing to run")
    try:
        lines = start.decode("utf-8").splitlines()[:_MOST_LINES]
    except UnicodeDecodeError:
        return {}
    meta: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith("#!"):
            continue
        comment = _COMMENT.match(line)
        if comment is None:
            if line.strip():
                break
            continue
        text = comment[1].strip()
        if text.startswith("mcp:"):
            meta |= _json(path, text[4:], number)
        elif tag := _TAG.fullmatch(text):
            _take(path, number, tag[1], tag[2].strip(), meta, properties, required)
    if properties:
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        meta.setdefault("inputSchema", schema | ({"required": required} if required else {}))
    return meta


def _take(
    path: Path, line: int, tag: str, text: str, meta: dict[str, Any], properties: dict[str, Any], required: list[str]
) -> None:
    if tag in ("describe", "description"):
        meta["description"] = f"{meta['description']}\n{text}" if "description" in meta else text
    elif tag in ("name", "title"):
        meta[tag] = text
    elif tag == "timeout":
        try:
            meta["timeout"] = float(text)
        except ValueError:
            raise Broken(path, f"@timeout is {text!r}; it must be a number of seconds", line) from None
    elif tag in ("arg", "param"):
        found = _ARGUMENT.fullmatch(text)
        if found is None or (found["type"] or "string") not in _TYPES:
            kinds = ", ".join(sorted(_TYPES))
            raise Broken(path, f"@{tag} {text!r} is not NAME:TYPE DESCRIPTION with a type of {kinds}", line)
        properties[found["name"]] = {"type": found["type"] or "string"}
        if found["description"]:
            properties[found["name"]]["description"] = found["description"]
        if found["required"]:
            required.append(found["name"])


def _json(path: Path, text: str, line: int) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Broken(path, f"mcp: is not followed by a JSON object: {error}", line) from None
