"""JSON operations for tool-sdk.sh. Run as a script: OPERATION ARGUMENTS.

It reads standard input. `get` replaces jq where that is not installed, for the filters that read arguments.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

NEEDS_JQ = 3
"""The exit status for a filter that only jq can apply."""
_FAILED = 5
"""The exit status for other errors. `mcp_fail` has 1."""


class NeedsJq(Exception):
    """A filter that only jq can apply."""


_TEXT = r'"(?:[^"\\]|\\.)*"'
_STEP = rf"\.[A-Za-z_]\w*|\.{_TEXT}|\.?\[(?:-?\d+|{_TEXT})\]"
_FILTER = re.compile(rf"\s*(\.|(?=\.)(?:{_STEP})+)\s*(?://\s*(.*?)\s*)?", re.DOTALL)


def apply_filter(text: str, value: Any) -> list[Any]:
    """Return the results of a path such as `.a.b[0]`, which may have `// literal` or `// empty` behind it."""
    found = _FILTER.fullmatch(text)
    if found is None:
        raise NeedsJq
    path, other = found[1], found[2]
    try:
        default = [] if other in (None, "empty") else [json.loads(other, parse_constant=_reject_constant)]
    except ValueError:
        raise NeedsJq from None
    try:
        for step in re.findall(_STEP, path):
            key = step.strip(".[]")
            value = _get_member(value, key if key[0].isalpha() or key[0] == "_" else json.loads(key))
    except TypeError:
        if other is None:
            raise
        return default
    return default if other is not None and (value is None or value is False) else [value]


def _get_member(value: Any, key: str | int) -> Any:
    if value is None:
        return None
    if isinstance(value, dict) and isinstance(key, str):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int):
        return value[key] if -len(value) <= key < len(value) else None
    raise TypeError(f"no {key!r} in {dump(value):.80}")


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


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
    if operation == "valid" or (operation == "object" and not is_json):
        return "", 0 if is_json else 1
    if not is_json:
        raise ValueError("the input is not JSON")
    if operation == "object":
        return (dump(value), 0) if isinstance(value, dict) else ("", 1)
    if operation == "truncate":
        return dump(truncate(value, int(arguments[0]), arguments[1])), 0
    results = apply_filter(arguments[0], value)
    if arguments[1:] == ["mark"]:
        return "".join(f"={_format_value(each)}=" for each in results if each is not None), 0
    return "\n".join(map(_format_value, results)), 0


def main() -> int:
    operation, *arguments = sys.argv[1:]
    text = "" if operation == "realpath" else sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        output, status = run(operation, arguments, text)
    except NeedsJq:
        return NEEDS_JQ
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        sys.stderr.write(f"{operation}: {error}\n")
        return _FAILED
    if output:
        sys.stdout.buffer.write(output.encode("utf-8", "replace") + b"\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
