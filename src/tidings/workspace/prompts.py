"""Prompts: `review.md` with front matter, or `review.meta.json` beside a text.

```
---
description: Review a change
arguments:
  - name: diff
    description: The change
    required: true
---
Review this: {diff}
```

`{name}`, `{{name}}` and `${name}` stand for an argument; braces around anything else stay as they are. Without declared
arguments, every `{name}` of the text is one. A line that is only `@user` or `@assistant` begins a message of that role.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.prompts.base import AssistantMessage, Message, Prompt, PromptArgument, UserMessage
from pydantic import ValidationError

from tidings.workspace.loader import META
from tidings.workspace.metadata import read_meta
from tidings.workspace.problems import Broken, broken_by, broken_member
from tidings.workspace.units import Piece, piece_of

__all__ = ["load_prompts", "prompt_piece"]

_FRONT = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$\n?", re.DOTALL | re.MULTILINE)
_OPEN = re.compile(r"---[ \t]*\n[\w-]+:([ \t]|\n)")
_ROLE = re.compile(r"^@(user|assistant)[ \t]*$", re.MULTILINE)
_NAME = re.compile(r"\$\{(\w+)\}|\{\{\s*(\w+)\s*\}\}|\{(\w+)\}")


def load_prompts(root: Path, files: list[Path]) -> list[Piece]:
    """The prompts of one unit: its texts, with what its `.meta.json` says."""
    metas = [path for path in files if path.name.endswith(META)]
    texts = [path for path in files if not path.name.endswith(META)]
    meta = read_meta(metas[0]) if metas else {}
    if metas and "path" in meta:
        texts = [_inside(root, metas[0].parent / str(meta["path"]), metas[0])]
    elif metas and not texts:
        raise Broken(metas[0], "there is no text beside it, and no path to one in it")
    said_in = metas[0] if metas and len(texts) == 1 else None
    return [prompt_piece(path, meta if said_in else {}, said_in) for path in texts]


def prompt_piece(path: Path, meta: dict[str, Any], said_in: Path | None = None) -> Piece:
    """`said_in` is the file that `meta` stands in, unless it is the text's own."""
    try:
        text = path.read_text("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise Broken(path, f"not UTF-8: {error}") from None
    except OSError as error:
        raise Broken(path, f"can't be read: {error.strerror}") from None
    if not text:
        # Most often it is being written: who had a prompt by that name keeps it until it is.
        raise Broken(path, "the file is empty: there is nothing to say")
    said_in = said_in or path
    front = _FRONT.match(text)
    if front:
        meta = _front_matter(path, front[1]) | meta
        text = text[front.end() :]
    elif _OPEN.match(text):
        raise Broken(path, "front matter has no end: close it with a line that is only ---", 1)
    arguments = _arguments(said_in, meta.get("arguments"), text)
    role = str(meta.get("role") or "user")
    if role not in ("user", "assistant"):
        raise broken_member(said_in, "role", f"role is {role!r:.60}; it must be user or assistant")
    try:
        prompt = Prompt(
            name=str(meta.get("name") or path.stem),
            title=meta.get("title"),
            description=meta.get("description"),
            arguments=arguments,
            icons=meta.get("icons"),
            fn=_renderer(text, [argument.name for argument in arguments], role),
            context_kwarg=None,
        )
    except ValidationError as error:
        raise broken_by(error, said_in) from None
    return piece_of(prompt, files=(path,))


def _front_matter(path: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        front = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 2 if error.problem_mark else None
        raise Broken(path, f"front matter is not YAML: {error.problem}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 2
        raise Broken(path, f"front matter is not YAML: {error.reason}", line) from None
    except (ValueError, RecursionError) as error:  # a date that is none, or what is nested too deep
        raise Broken(path, f"front matter can't be read: {error}", 2) from None
    if front is None:
        return {}
    if not isinstance(front, dict):
        raise Broken(path, f"front matter is a {type(front).__name__}; it must be names and values", 2)
    return front


def _arguments(path: Path, declared: Any, text: str) -> list[PromptArgument]:
    if declared is None:
        names = dict.fromkeys(next(filter(None, found)) for found in _NAME.findall(text))
        return [PromptArgument(name=name, description=None, required=True) for name in names]
    if isinstance(declared, dict):  # as a JSON schema
        required, properties = declared.get("required") or [], declared.get("properties") or {}
        if not isinstance(required, list) or not isinstance(properties, dict):
            raise broken_member(path, "arguments", "arguments is not a JSON schema of an object, nor a list")
        declared = [{"name": name, "required": name in required, **_described(properties[name])} for name in properties]
    if not isinstance(declared, list):
        raise broken_member(
            path, "arguments", f"arguments is {declared!r:.60}; it must be a list, or a JSON schema of an object"
        )
    arguments: list[PromptArgument] = []
    for each in declared:
        given = {"name": each} if isinstance(each, str) else each
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise broken_member(path, "arguments", f"an argument needs a name; got {each!r:.60}")
        if any(given["name"] == other.name for other in arguments):
            raise broken_member(path, given["name"], f"argument {given['name']!r} is there twice")
        description = given.get("description")
        arguments.append(
            PromptArgument(
                name=given["name"],
                description=None if description is None else str(description),
                required=bool(given.get("required", False)),
            )
        )
    return arguments


def _described(schema: Any) -> dict[str, Any]:
    return {"description": schema["description"]} if isinstance(schema, dict) and "description" in schema else {}


def _renderer(text: str, names: list[str], role: str) -> Callable[..., list[Message]]:
    parts = _ROLE.split(text)
    messages = list(zip([role, *parts[1::2]], parts[0::2], strict=True))
    known = set(names)

    def render(**arguments: Any) -> list[Message]:
        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2] or found[3]
            return str(arguments.get(name, "")) if name in known else found[0]

        said = [(role, _NAME.sub(value, part).strip("\n")) for role, part in messages]
        return [
            AssistantMessage(part) if role == "assistant" else UserMessage(part)
            for role, part in said
            if part.strip() or len(said) == 1
        ]

    return render


def _inside(root: Path, path: Path, meta: Path) -> Path:
    resolved = path.resolve()
    if not resolved.is_relative_to(root):
        raise Broken(meta, f"path {path.name!r} leads out of the workspace")
    if not resolved.is_file():
        raise Broken(meta, f"path {path.name!r} leads to no file")
    return resolved
