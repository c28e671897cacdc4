"""Prompts: `review.md` with front matter, or a text with `review.meta.json` beside it.

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

`{name}`, `{{name}}` and `${name}` are replaced by an argument; other braces are kept. Without declared arguments,
every `{name}` in the text is a required argument. A line with only `@user` or `@assistant` starts a message of that
role.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcp.server.mcpserver.prompts.base import AssistantMessage, Message, Prompt, PromptArgument, UserMessage

from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import read_meta, read_text, require_inside, split_meta
from tidings.workspace.problems import InvalidFile, invalid_field, make_model

__all__ = ["load_prompts", "make_prompt"]

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$\n?", re.DOTALL | re.MULTILINE)
_UNCLOSED_FRONT_MATTER = re.compile(r"---[ \t]*\n[\w-]+:([ \t]|\n)")
_ROLE = re.compile(r"^@(user|assistant)[ \t]*$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}|\{\{\s*(\w+)\s*\}\}|\{(\w+)\}")


def load_prompts(root: Path, files: list[Path]) -> list[LoadedItem]:
    metas, texts = split_meta(files)
    texts = [path for path in texts if path.stem.upper() != "README"]  # it describes the prompts beside it
    meta = read_meta(root, metas[0]) if metas else {}
    if metas and "path" in meta:
        texts = [require_inside(root, str(meta["path"]), metas[0])]
    elif metas and not texts:
        raise InvalidFile(metas[0], "describes no text; name one in path, or put one of the same name beside it")
    meta_path = metas[0] if metas and len(texts) == 1 else None
    return [make_prompt(root, path, meta if meta_path else {}, meta_path) for path in texts]


def make_prompt(root: Path, path: Path, meta: dict[str, Any], meta_path: Path | None = None) -> LoadedItem:
    """Return the prompt in `path`. `meta_path` is the file that contains `meta`, if it is another file."""
    text = read_text(root, path)
    if not text:
        # An editor is probably writing it. The error makes the server keep the last good version.
        raise InvalidFile(path, "the file is empty; write a prompt into it, or remove it")
    meta_path = meta_path or path
    front_matter = _FRONT_MATTER.match(text)
    if front_matter:
        meta = _parse_front_matter(path, front_matter[1]) | meta
        text = text[front_matter.end() :]
    elif _UNCLOSED_FRONT_MATTER.match(text):
        raise InvalidFile(path, "front matter has no end; close it with a line that is only ---", 1)
    arguments = _parse_arguments(meta_path, meta.get("arguments"), text)
    role = str(meta.get("role") or "user")
    if role not in ("user", "assistant"):
        raise invalid_field(meta_path, "role", f"role is {role!r:.60}; it must be user or assistant")
    prompt = make_model(
        Prompt,
        meta_path,
        name=str(meta.get("name") or path.stem),
        title=meta.get("title"),
        description=meta.get("description"),
        arguments=arguments,
        icons=meta.get("icons"),
        fn=_make_renderer(text, {argument.name for argument in arguments}, role),
        context_kwarg=None,
    )
    return LoadedItem(prompt, files=(path,))


def _parse_front_matter(path: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 2 if error.problem_mark else None
        raise InvalidFile(path, f"front matter is not YAML: {error.problem}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 2
        raise InvalidFile(path, f"front matter is not YAML: {error.reason}", line) from None
    except (ValueError, RecursionError) as error:  # an impossible date, or too deep nesting
        raise InvalidFile(path, f"front matter can't be read: {error}", 2) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidFile(path, f"front matter is a {type(values).__name__}; it must be names and values", 2)
    return values


def _parse_arguments(path: Path, declared: Any, text: str) -> list[PromptArgument]:
    if declared is None:
        names = dict.fromkeys(next(filter(None, groups)) for groups in _PLACEHOLDER.findall(text))
        return [PromptArgument(name=name, description=None, required=True) for name in names]
    if isinstance(declared, dict):  # a JSON schema
        required, properties = declared.get("required") or [], declared.get("properties") or {}
        if not isinstance(required, list) or not isinstance(properties, dict):
            raise invalid_field(path, "arguments", "arguments must be a list, or a JSON schema of an object")
        declared = [
            {**(schema if isinstance(schema, dict) else {}), "name": name, "required": name in required}
            for name, schema in properties.items()
        ]
    if not isinstance(declared, list):
        message = f"arguments is {declared!r:.60}; it must be a list, or a JSON schema of an object"
        raise invalid_field(path, "arguments", message)
    arguments: dict[str, PromptArgument] = {}
    for value in declared:
        argument = {"name": value} if isinstance(value, str) else value
        if not isinstance(argument, dict) or not isinstance(name := argument.get("name"), str):
            raise invalid_field(path, "arguments", f"an argument needs a name; got {value!r:.60}")
        if name in arguments:
            raise invalid_field(path, name, f"argument {name!r} is declared twice")
        description = argument.get("description")
        arguments[name] = PromptArgument(
            name=name,
            description=None if description is None else str(description),
            required=bool(argument.get("required", False)),
        )
    return list(arguments.values())


def _make_renderer(text: str, names: set[str], role: str) -> Callable[..., list[Message]]:
    parts = _ROLE.split(text)
    templates = list(zip([role, *parts[1::2]], parts[0::2], strict=True))

    def render(**arguments: Any) -> list[Message]:
        def replace(found: re.Match[str]) -> str:
            name = found[1] or found[2] or found[3]
            return str(arguments.get(name, "")) if name in names else found[0]

        messages = [(role, _PLACEHOLDER.sub(replace, template).strip("\n")) for role, template in templates]
        return [
            AssistantMessage(message) if role == "assistant" else UserMessage(message)
            for role, message in messages
            if message.strip() or len(messages) == 1
        ]

    return render
