"""The metadata of a script: in `NAME.meta.json` beside it, or in its leading comment.

```sh
#!/bin/sh
# @describe Deploy the site
# @arg target:string! The environment to deploy to
# @arg dry_run:boolean Only print the steps
# @timeout 120
```

The comment ends at the first line that is not a comment. `# mcp: {"description": …}` is the same in JSON.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidings.workspace.files import find_inside
from tidings.workspace.problems import InvalidFile
from tidings.workspace.reading import open_inside, read_inside, resolve_links

__all__ = [
    "META_SUFFIX",
    "get_display_fields",
    "parse_object",
    "read_comment",
    "read_file",
    "read_meta",
    "read_text",
    "require_inside",
    "split_meta",
]

META_SUFFIX = ".meta.json"

_COMMENT = re.compile(r"^\s*(?:#|//|--|;)+\s?(.*)$")
_TAG = re.compile(r"@(\w+)\s*(.*)")
_ARGUMENT = re.compile(r"(?P<name>[\w-]+)(?::(?P<type>\w+))?(?P<required>!)?\s*(?P<description>.*)")
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object"})
_MAX_COMMENT_LINES = 100


def get_display_fields(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optional fields that clients show, as the models of the SDK name them."""
    names = ("title", "description", "annotations", "icons", "_meta")
    return {name.lstrip("_"): meta[name] for name in names if meta.get(name) is not None}


def split_meta(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Split the files of a unit into its `.meta.json` files and the others."""
    metas: list[Path] = []
    others: list[Path] = []
    for path in files:
        (metas if path.name.endswith(META_SUFFIX) else others).append(path)
    return metas, others


def require_inside(root: Path, path: Path | str, meta_path: Path) -> Path:
    """Return the file that a `.meta.json` names, with links resolved.

    The path is relative to the folder of the `.meta.json`, to the folder of its kind (`prompts/`), or to the workspace.
    """
    folders = (meta_path.parent, root / meta_path.relative_to(root).parts[0], root)
    found = find_inside(root, *(folder / path for folder in folders))
    if found is None:
        is_inside = resolve_links(meta_path.parent / path).is_relative_to(root)
        raise InvalidFile(
            meta_path, f"the file {str(path)!r} {'does not exist' if is_inside else 'is outside the workspace'}"
        )
    return found


def read_file(root: Path, path: Path) -> bytes:
    try:
        return read_inside(root, path)
    except OSError as error:
        raise InvalidFile(path, f"can't be read: {error.strerror}") from None


def read_text(root: Path, path: Path) -> str:
    try:
        text = read_file(root, path).decode("utf-8-sig")  # some editors start a file with a byte order mark
    except UnicodeDecodeError as error:
        raise InvalidFile(path, f"not UTF-8: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_meta(root: Path, path: Path) -> dict[str, Any]:
    return parse_object(path, read_file(root, path))


def parse_object(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object that a file contains or a script has printed; the error names `path`."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise InvalidFile(path, "the file is empty; write a JSON object into it, or remove it")
    try:
        return msgspec.json.decode(data.decode("utf-8"), type=dict[str, Any])
    except UnicodeDecodeError as error:
        position, message = error.start, f"not UTF-8: {error.reason}"
    except msgspec.DecodeError as error:
        found = re.search(r"\(byte (\d+)\)", str(error))
        position, message = int(found[1]) if found else 0, f"not a JSON object: {error}"
    except RecursionError:
        position, message = 0, "not a JSON object: it is nested too deeply"
    raise InvalidFile(path, message, data.count(b"\n", 0, position) + 1)


def read_comment(root: Path, path: Path) -> dict[str, Any]:
    """Return the metadata in the leading comment of a script. It is empty for a binary or without a comment."""
    with open_inside(root, path) as file:
        start = file.read(64 << 10)
    if not start:
        # An editor is probably writing it. The error makes the server keep the last good version.
        raise InvalidFile(path, "the file is empty; write a script into it, or remove it")
    try:
        lines = start.decode("utf-8").splitlines()[:_MAX_COMMENT_LINES]
    except UnicodeDecodeError:
        return {}
    meta: dict[str, Any] = {}
    schema: dict[str, Any] = {"type": "object", "properties": {}}
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
            try:
                meta |= msgspec.json.decode(text[4:], type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise InvalidFile(path, f"mcp: must be followed by a JSON object: {error}", number) from None
        elif tag := _TAG.fullmatch(text):
            _apply_tag(path, number, tag[1], tag[2].strip(), meta, schema)
    if schema["properties"]:
        meta.setdefault("inputSchema", schema)
    return meta


def _apply_tag(path: Path, line: int, tag: str, text: str, meta: dict[str, Any], schema: dict[str, Any]) -> None:
    """Add the content of `@tag text` to `meta`, or to the schema of the arguments. Ignore unknown tags."""
    if tag in ("describe", "description"):
        meta["description"] = f"{meta['description']}\n{text}" if "description" in meta else text
    elif tag in ("name", "title"):
        meta[tag] = text
    elif tag == "timeout":
        try:
            meta["timeout"] = float(text)
        except ValueError:
            raise InvalidFile(path, f"@timeout is {text!r}; it must be a number of seconds", line) from None
    elif tag in ("arg", "param"):
        found = _ARGUMENT.fullmatch(text)
        if found is None or (found["type"] or "string") not in _TYPES:
            types = ", ".join(sorted(_TYPES))
            raise InvalidFile(path, f"@{tag} {text!r} must be NAME:TYPE DESCRIPTION; the types are {types}", line)
        argument = schema["properties"][found["name"]] = {"type": found["type"] or "string"}
        if found["description"]:
            argument["description"] = found["description"]
        if found["required"]:
            schema.setdefault("required", []).append(found["name"])
