"""JSON operations for tool-sdk.sh. Run as a script: OPERATION ARGUMENTS.

It reads standard input. `get` replaces jq where that is not installed. It supports the part of jq's language that is
needed to read arguments: paths, indices, `//`, `|`, `==`, `if … then … else … end`, literals, and a few functions.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any


class InvalidFilter(Exception):
    """An error in a filter, or a part of it that only jq supports."""


_TOKEN = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*")|(-?\d+(?:\.\d+)?)|([A-Za-z_]\w*)|(//|==|!=|[.|()\[\]?,+]))""")
Filter = Callable[[Any], Iterator[Any]]


class Parser:
    """A recursive descent parser. Each method returns a function from a value to its results."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                raise InvalidFilter(f"{text[position:]!r} is not supported without jq; install jq")
            self.tokens.append(found[0].strip())
            position = found.end()

    def parse(self) -> Filter:
        result = self.pipe()
        if self.tokens:
            raise InvalidFilter(f"{self.tokens[0]!r} is not supported here without jq; install jq")
        return result

    def accept(self, *expected: str) -> str | None:
        """Remove and return the next token if it is one of those expected, or else return None."""
        if self.tokens and self.tokens[0] in expected:
            return self.tokens.pop(0)
        return None

    def require(self, token: str) -> None:
        if self.accept(token) is None:
            raise InvalidFilter(f"{token!r} is missing")

    def pipe(self) -> Filter:
        left = self.alternative()
        while self.accept("|"):
            left = _pipe(left, self.alternative())
        return left

    def alternative(self) -> Filter:
        left = self.comparison()
        if self.accept("//"):
            return _alternative(left, self.alternative())
        return left

    def comparison(self) -> Filter:
        left = self.sum()
        if sign := self.accept("==", "!="):
            right = self.sum()
            return _combine(left, right, lambda a, b: (a == b) is (sign == "=="))
        return left

    def sum(self) -> Filter:
        left = self.term()
        while self.accept("+"):
            left = _combine(left, self.term(), lambda a, b: a + b)
        return left

    def term(self) -> Filter:
        if not self.tokens:
            raise InvalidFilter("the filter ends too early")
        token = self.tokens.pop(0)
        if token == ".":
            result = self.member() if self.tokens and re.match(r'[A-Za-z_"]', self.tokens[0]) else _identity
        elif token == "(":
            result = self.pipe()
            self.require(")")
        elif token == "if":
            result = self.condition()
        elif token[0] == '"' or token[0] == "-" or token[0].isdigit() or token in ("true", "false", "null"):
            result = _constant(json.loads(token))
        elif token == "empty":
            result = _constant()
        elif token == "[" and self.accept("]"):
            result = _constant([])
        elif token in _FUNCTIONS:
            result = _apply(_FUNCTIONS[token])
        else:
            raise InvalidFilter(f"{token!r} is not supported here without jq; install jq")
        return self.suffixes(result)

    def suffixes(self, result: Filter) -> Filter:
        while token := self.accept(".", "[", "?"):
            if token == "?":
                result = _optional(result)
            elif token == "[" or self.accept("["):
                result = _pipe(result, self.bracket())
            else:
                result = _pipe(result, self.member())
        return result

    def member(self) -> Filter:
        if not self.tokens:
            raise InvalidFilter("a name is missing after the last dot")
        key = self.tokens.pop(0)
        return _get_member(json.loads(key) if key.startswith('"') else key)

    def bracket(self) -> Filter:
        if self.accept("]"):
            return _iterate
        key = json.loads(self.tokens.pop(0))
        self.require("]")
        return _get_member(key)

    def condition(self) -> Filter:
        condition = self.pipe()
        self.require("then")
        then_filter = self.pipe()
        else_filter = self.pipe() if self.accept("else") else _identity
        self.require("end")

        def choose(value: Any) -> Iterator[Any]:
            for result in condition(value):
                yield from (else_filter if result is None or result is False else then_filter)(value)

        return choose


def _pipe(first: Filter, second: Filter) -> Filter:
    return lambda value: (result for between in first(value) for result in second(between))


def _combine(left: Filter, right: Filter, operation: Callable[[Any, Any], Any]) -> Filter:
    return lambda value: (operation(a, b) for a in left(value) for b in right(value))


def _identity(value: Any) -> Iterator[Any]:
    return iter([value])


def _constant(*results: Any) -> Filter:
    return lambda value: iter(results)


def _apply(function: Callable[[Any], Any]) -> Filter:
    return lambda value: iter([function(value)])


def _get_member(key: str | int) -> Filter:
    def get(value: Any) -> Iterator[Any]:
        if value is None:
            yield None
        elif isinstance(value, dict) and isinstance(key, str):
            yield value.get(key)
        elif isinstance(value, list) and isinstance(key, int):
            yield value[key] if -len(value) <= key < len(value) else None
        else:
            raise TypeError(f"no {key!r} in {_get_type(value)}")

    return get


def _iterate(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict | list):
        raise TypeError(f"{_get_type(value)} has no members")
    return iter(list(value.values()) if isinstance(value, dict) else value)


def _optional(inner: Filter) -> Filter:
    def optional(value: Any) -> Iterator[Any]:
        try:
            yield from inner(value)
        except (TypeError, ValueError):
            return

    return optional


def _alternative(left: Filter, right: Filter) -> Filter:
    def alternative(value: Any) -> Iterator[Any]:
        try:
            found = [result for result in left(value) if result is not None and result is not False]
        except (TypeError, ValueError):
            found = []
        return iter(found) if found else right(value)

    return alternative


def _get_type(value: Any) -> str:
    kinds: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "length": lambda value: 0 if value is None else abs(value) if isinstance(value, int | float) else len(value),
    "keys": lambda value: sorted(value) if isinstance(value, dict) else list(range(len(value))),
    "type": _get_type,
    "tostring": _format_value,
    "tojson": dump,
    "tonumber": lambda value: json.loads(value) if isinstance(value, str) else value,
    "not": lambda value: value is None or value is False,
}


def count_bytes(value: Any) -> int:
    return len(dump(value).encode("utf-8", "replace"))


def make_envelope(kind: str, max_bytes: int, value: Any) -> dict[str, Any]:
    """Return a tool result with a value as structured content.

    The text of a success is the structured content as JSON, or a summary if that has more than `max_bytes`. The text of
    an error is its message.
    """
    if kind == "error":
        text = value.get("message", dump(value)) if isinstance(value, dict) else value
        return _make_result(_format_value(text), {"success": False, "error": value}, is_error=True)
    envelope = {"success": True, "result": value}
    text = dump(envelope)
    if len(text.encode("utf-8", "replace")) > max_bytes:
        if isinstance(value, dict | list):
            kind, unit = ("object", "keys") if isinstance(value, dict) else ("array", "items")
            text = f"Success: {kind} with {len(value)} {unit}"
        else:
            text = f"Success: {_format_value(value)[:100]}"
    return _make_result(text, envelope, is_error=False)


def _make_result(text: str, structured: dict[str, Any], *, is_error: bool) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "structuredContent": structured, "isError": is_error}


def truncate(value: Any, max_bytes: int, path: str) -> dict[str, Any]:
    """Return the value with as many items of its array as fit into `max_bytes`. Change the value itself."""
    keys = path.split(".")[1:]
    if path and not re.fullmatch(r"(\.[A-Za-z_]\w*)+", path):
        return _make_error("invalid_path_syntax", f"{path!r} is not of the form .key or .key.nested")
    if not path and isinstance(value, dict) and isinstance(value.get("results"), list):
        keys = ["results"]
    parent, items = None, value
    for key in keys:
        if not isinstance(items, dict) or key not in items:
            return _make_error("path_not_found", f"{path} does not exist")
        parent, items = items, items[key]
    if not isinstance(items, list):
        if path:
            return _make_error("invalid_array_path", f"{path} is not an array")
        if count_bytes(value) > max_bytes:
            return _make_error(
                "output_too_large", f"the value is larger than {max_bytes} bytes, and has no array to truncate"
            )
        return {"result": value, "truncated": False, "kept": 0, "total": 0}

    def truncate_to(kept: int) -> Any:
        if parent is None:
            return items[:kept]
        parent[keys[-1]] = items[:kept]
        return value

    def fits(kept: int) -> bool:
        return count_bytes(truncate_to(kept)) <= max_bytes

    low, high = 0, len(items)
    if fits(high):
        low = high
    elif not fits(0):
        return _make_error("output_too_large", f"the value is larger than {max_bytes} bytes even with an empty array")
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"result": truncate_to(low), "truncated": low < len(items), "kept": low, "total": len(items)}


def _make_error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


def find_cli_error(value: Any) -> str:
    """Return the error message in the JSON output of a program."""
    if not isinstance(value, dict):
        return ""
    error, errors = value.get("error"), value.get("errors")
    candidates = [
        error.get("message") if isinstance(error, dict) else error,
        value.get("message") if value.get("success") is False or value.get("status") in ("error", "failed") else None,
        errors[0].get("message") if isinstance(errors, list) and errors and isinstance(errors[0], dict) else None,
    ]
    return next((text for text in candidates if isinstance(text, str) and text), "")


def merge(text: str) -> dict[str, Any]:
    """Return one object with the members of all objects in `text`, one per line. Later lines take precedence."""
    merged: dict[str, Any] = {}
    for line in text.split("\n"):  # not splitlines, which also splits at line ends that JSON permits
        if line.strip():
            merged |= json.loads(line)
    return merged


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def run(operation: str, arguments: list[str], text: str) -> tuple[str, int]:
    """Run an operation on `text`. Return the output and the exit status."""
    if operation == "realpath":
        return os.path.realpath(arguments[0]), 0
    if operation == "quote":
        return dump(text), 0
    if operation == "merge":
        return dump(merge(text)), 0
    try:
        value, is_json = json.loads(text, parse_constant=_reject_constant), True
    except ValueError:
        value, is_json = text.removesuffix("\n"), False
    if operation in ("success", "error"):
        return dump(make_envelope(operation, int(arguments[0]), value)), 0
    if operation == "cli-error":
        return find_cli_error(value if is_json else None), 0
    if operation == "valid" or not is_json:
        return "", 0 if is_json else 1
    if operation == "object":
        return (dump(value), 0) if isinstance(value, dict) else ("", 1)
    if operation == "truncate":
        return dump(truncate(value, int(arguments[0]), arguments[1])), 0
    return "\n".join(map(_format_value, Parser(arguments[0]).parse()(value))), 0


def main() -> int:
    operation, *arguments = sys.argv[1:]
    text = "" if operation == "realpath" else sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        output, status = run(operation, arguments, text)
    except (InvalidFilter, TypeError, ValueError, LookupError, RecursionError) as error:
        sys.stderr.write(f"{operation}: {error}\n")
        return 5
    if output:
        sys.stdout.buffer.write(output.encode("utf-8", "replace") + b"\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
