"""From what an executable printed to what a client is told.

stdout is the answer: a JSON object is structured output, one that has the shape of a tool result is that result, and
anything else is text. An error is told to the model, which can often do better at once, so each says what happened
and what to do.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import pydantic
from mcp import MCPError

from tidings.workspace.process import Outcome

__all__ = ["embedded_resources", "failure", "progress_line", "tool_result"]

_MOST_STDERR = 4 * 1024
"""Bytes of the end of stderr in an error: a page, which a model reads without losing its thread."""

_RESULT_KEYS = frozenset({"content", "structuredContent", "isError", "_meta", "resultType"})
_LEVELS = frozenset({"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"})
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PLAIN_PROGRESS = re.compile(
    r"(?P<progress>\d+(?:\.\d+)?)\s*(?:(?P<percent>%)|/\s*(?P<total>\d+(?:\.\d+)?))?(?:\s+(?P<message>.*))?"
)


def tool_result(
    outcome: Outcome,
    output_schema: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    hint: str | None = None,
) -> types.CallToolResult:
    """`timeout` and `hint` (what to try instead) are for the wording of an error."""
    if outcome.is_timeout:
        return _timed_out(outcome, timeout, hint)
    if outcome.is_truncated:
        size = len(outcome.stdout)
        return _error(
            "output_too_large",
            f"The tool printed more than {size} bytes and was stopped. Ask it for less, or raise its output limit "
            "(max_output in tidings.toml).",
            outcome,
        )
    text = outcome.stdout.decode("utf-8", "replace")
    value, is_json = _parse(text)
    result = _as_result(value) if is_json and isinstance(value, dict) else None
    if outcome.status != 0:
        return result if result is not None and result.is_error else _failed(outcome, text)
    if result is None:
        if output_schema is None and not isinstance(value, dict):
            return types.CallToolResult(content=[types.TextContent(text=text.removesuffix("\n"))])
        if not is_json:
            message = "The tool must print one JSON value, because it has an outputSchema; it printed: "
            return _error("invalid_output", message + (_shorten(text.strip()) or "nothing"), outcome)
        result = types.CallToolResult(content=[types.TextContent(text=text.strip())], structured_content=value)
    problem = None
    if output_schema is not None and not result.is_error:
        problem = _problem(result.structured_content, output_schema)
    return result if problem is None else _error("invalid_output", problem, outcome)


def failure(path: Path) -> MCPError | None:
    """The protocol error that `mcp_fail` has left in its file, if it has."""
    try:
        given = json.loads(path.read_bytes().decode("utf-8", "replace"))
        return MCPError(int(given["code"]), str(given["message"]), given.get("data"))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def embedded_resources(listing: Path, within: Iterable[Path], most_bytes: int) -> list[types.EmbeddedResource]:
    """The files that a tool wants in its result: lines of `path<TAB>type<TAB>uri`, or a JSON array of objects.

    Only what lies `within` one of these directories. What can't be read, or would make it too much, is left out.
    """
    try:
        text = listing.read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    places = [place.resolve() for place in within]
    found = []
    for path, mime_type, uri in _listed(text):
        try:
            file = Path(path).resolve()
            if not any(file.is_relative_to(place) for place in places) or file.stat().st_size > most_bytes:
                continue
            data = file.read_bytes()
        except (OSError, ValueError):
            continue
        most_bytes -= len(data)
        uri = uri or file.as_uri()
        mime_type = mime_type or mimetypes.guess_type(file.name)[0] or ""
        contents: types.TextResourceContents | types.BlobResourceContents
        try:
            contents = types.TextResourceContents(uri=uri, mime_type=mime_type or "text/plain", text=data.decode())
        except UnicodeDecodeError:
            blob = base64.b64encode(data).decode()
            contents = types.BlobResourceContents(uri=uri, mime_type=mime_type or "application/octet-stream", blob=blob)
        found.append(types.EmbeddedResource(resource=contents))
    return found


def progress_line(line: str) -> dict[str, Any] | None:
    """What a line of the progress channel says; None if it says nothing.

    Progress is `{"progress": 3, "total": 10, "message": "…"}`, or `30% …`, or `3/10 …`; a log line is
    `{"level": "info", "data": …, "logger": "…"}`. The same inside a JSON-RPC notification is taken too. The answer has
    `progress`, `total` and `message`, or `level`, `data` and `logger`.
    """
    line = line.strip()
    if not line:
        return None
    if not line.startswith("{"):
        return _plain_progress(line)
    value, is_json = _parse(line)
    if not is_json:
        return None
    if isinstance(value.get("params"), dict):
        value = value["params"]
    progress = _number(value.get("progress"))
    if progress is not None:
        message = value.get("message")
        return {
            "progress": progress,
            "total": _number(value.get("total")),
            "message": None if message is None else str(message),
        }
    if "level" not in value or not ("data" in value or "message" in value):
        return None
    level = {"warn": "warning", "fatal": "critical"}.get(str(value["level"]).lower(), str(value["level"]).lower())
    data = value.get("data", value.get("message"))
    if isinstance(data, str) and data.startswith(("{", "[")):
        parsed, is_json = _parse(data)
        data = parsed if is_json else data
    logger = value.get("logger")
    return {
        "level": level if level in _LEVELS else "info",
        "data": data,
        "logger": None if logger is None else str(logger),
    }


def _parse(text: str) -> tuple[Any, bool]:
    """The value, and whether the text is JSON at all: standard JSON, with nothing that can't be sent on."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if _SURROGATE.search(text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None, False
    return value, True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _as_result(value: dict[str, Any]) -> types.CallToolResult | None:
    """The tool result that an object is, if it is one and not just has a member of that name."""
    if not value.keys() <= _RESULT_KEYS or not value.keys() & {"content", "structuredContent"}:
        return None
    content = value.get("content")
    if content is None:
        if "isError" not in value:
            return None
        content = [{"type": "text", "text": json.dumps(value["structuredContent"], ensure_ascii=False)}]
    elif not isinstance(content, list) or not (content or value.keys() & {"isError", "structuredContent"}):
        return None
    try:
        return types.CallToolResult.model_validate({**value, "content": content})
    except pydantic.ValidationError:
        return None


def _problem(value: Any, schema: Mapping[str, Any]) -> str | None:
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    # A registry without retrieval: a reference in a schema must not make this process open a URL.
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema, registry=EMPTY_REGISTRY)
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except Exception as trouble:  # a schema is the workspace's, and the library answers a bad one in many ways
        return f"The tool's outputSchema can't be used: {trouble}"
    if error is None:
        return None
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"The tool's output does not fit its outputSchema: {place or 'the whole'}: {_shorten(error.message)}"


def _timed_out(outcome: Outcome, timeout: float | None, hint: str | None) -> types.CallToolResult:
    limit = "its time limit" if timeout is None else f"{timeout:g} s"
    message = f"The tool did not finish within {limit} and was stopped. "
    message += hint or "Ask it for less, or raise its timeout."
    return _error("timeout", message, outcome, reason="fixed", timeoutSecs=timeout, hint=hint)


def _failed(outcome: Outcome, text: str) -> types.CallToolResult:
    assert outcome.status is not None
    if outcome.status < 0:
        try:
            end = f"was ended by {signal.Signals(-outcome.status).name}"
        except ValueError:
            end = f"was ended by signal {-outcome.status}"
    else:
        end = f"failed with exit status {outcome.status}"
    said = "" if outcome.stderr.strip() or not text.strip() else f"\n{_shorten(text.strip(), _MOST_STDERR)}"
    return _error("exit_status", f"The tool {end}.{said}", outcome, exitCode=outcome.status)


def _error(kind: str, message: str, outcome: Outcome, **details: Any) -> types.CallToolResult:
    tail = _tail(outcome.stderr)
    error = {"type": kind, "message": message, **{key: value for key, value in details.items() if value is not None}}
    if tail:
        error["stderr"] = tail
    return types.CallToolResult(
        content=[types.TextContent(text=f"{message}\n{tail}" if tail else message)],
        structured_content={"success": False, "error": error},
        is_error=True,
    )


def _tail(stderr: bytes) -> str:
    """The last lines, whole ones if there is a line's end among them."""
    text = stderr[-_MOST_STDERR:]
    if len(stderr) > len(text) and b"\n" in text[:-1]:
        text = text.split(b"\n", 1)[1]
    return text.decode("utf-8", "replace").strip()


def _shorten(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def _plain_progress(line: str) -> dict[str, Any] | None:
    found = _PLAIN_PROGRESS.fullmatch(line)
    if found is None:
        return None
    total = found["total"] or ("100" if found["percent"] else None)
    return {
        "progress": float(found["progress"]),
        "total": None if total is None else float(total),
        "message": found["message"] or None,
    }


def _listed(text: str) -> Iterable[tuple[str, str, str]]:
    if text.lstrip().startswith("["):
        entries, is_json = _parse(text)
        for entry in entries if is_json else ():
            if isinstance(entry, dict) and entry.get("path"):
                yield str(entry["path"]), str(entry.get("mimeType") or ""), str(entry.get("uri") or "")
        return
    for line in text.split("\n"):
        path, mime_type, uri, *_ = [*line.split("\t"), "", "", ""]
        if path:
            yield path, mime_type, uri
