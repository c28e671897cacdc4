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

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from mcp.server.mcpserver.prompts.base import AssistantMessage, Message, Prompt, PromptArgument, UserMessage

from tidings.sources.workspace.layout import META
from tidings.sources.workspace.pieces import Piece, piece_of
from tidings.sources.workspace.problems import Broken

__all__ = ["load_prompts", "prompt_piece"]

_FRONT = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$\n?", re.DOTALL | re.MULTILINE)
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
    return [prompt_piece(path, meta if len(texts) == 1 else {}) for path in texts]


def prompt_piece(path: Path, meta: dict[str, Any]) -> Piece:
    try:
        text = path.read_text("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise Broken(path, f"not UTF-8: {error}") from None
    except OSError as error:
        raise Broken(path, f"can't be read: {error.strerror}") from None
    front = _FRONT.match(text)
    if front:
        meta = _front_matter(path, front[1]) | meta
        text = text[front.end() :]
    arguments = _arguments(path, meta.get("arguments"), text)
    prompt = Prompt(
        name=str(meta.get("name") or path.stem),
        title=meta.get("title"),
        description=meta.get("description"),
        arguments=arguments,
        icons=meta.get("icons"),
        fn=_renderer(text, [argument.name for argument in arguments], str(meta.get("role") or "user")),
        context_kwarg=None,
    )
    return piece_of(prompt)


def read_meta(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Broken(path, f"not a JSON object: {error}") from None
    except OSError as error:
        raise Broken(path, f"can't be read: {error.strerror}") from None


def _front_matter(path: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        front = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 2 if error.problem_mark else None
        raise Broken(path, f"front matter is not YAML: {error.problem}", line) from None
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
        required = declared.get("required") or ()
        properties = declared.get("properties") or {}
        declared = [{"name": name, "required": name in required, **_described(properties[name])} for name in properties]
    if not isinstance(declared, list):
        raise Broken(path, f"arguments is {declared!r:.60}; it must be a list, or a JSON schema of an object")
    arguments = []
    for each in declared:
        given = {"name": each} if isinstance(each, str) else each
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise Broken(path, f"an argument needs a name; got {each!r:.60}")
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
