"""The result of an executable tool, from its output.

A JSON object on standard output becomes structured output, unless it has the members of a tool result: then it is
returned as the result. Any other output becomes text. Errors are tool errors, which the model reads, so each describes
the cause and a solution.
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

from tidings.server.schema import find_violation
from tidings.workspace.process import Outcome
from tidings.workspace.reading import read_inside

__all__ = ["LOG_LEVELS", "make_result", "parse_progress", "read_embedded_files", "read_protocol_error"]

_MAX_STDERR = 4 * 1024
"""Bytes of the end of stderr in an error: about a page, so that it does not fill the context of a model."""

_RESULT_KEYS = frozenset({"content", "structuredContent", "isError", "_meta", "resultType"})
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PLAIN_PROGRESS = re.compile(
    r"(?P<progress>\d+(?:\.\d+)?)\s*(?:(?P<percent>%)|/\s*(?P<total>\d+(?:\.\d+)?))?(?:\s+(?P<message>.*))?"
)


def make_result(
    outcome: Outcome,
    output_schema: Mapping[str, Any] | None,
    timeout: float,
    hint: str | None = None,
    max_timeout: float | None = None,
) -> types.CallToolResult:
    """Return the result of a run. The error after a timeout contains `timeout`, `max_timeout` and `hint`."""
    if outcome.is_timeout:
        return _make_timeout(outcome, timeout, hint, max_timeout)
    if outcome.is_truncated:
        message = (
            f"The tool printed more than {len(outcome.stdout)} bytes and was stopped. "
            "Ask it for less, or raise its output limit (max_output in tidings.toml)."
        )
        return _make_error("output_too_large", message, outcome)
    text = outcome.stdout.decode("utf-8", "replace")
    value, is_json = _parse_json(text)
    result = _parse_result(value) if isinstance(value, dict) else None
    if outcome.status != 0:
        return result if result is not None and result.is_error else _make_failure(outcome, text)
    if result is None:
        if output_schema is None and not isinstance(value, dict):
            return types.CallToolResult(content=[types.TextContent(text=text.removesuffix("\n"))])
        if not is_json:
            message = "The tool must print one JSON value, because it has an outputSchema; it printed: "
            return _make_error("invalid_output", message + (_shorten(text.strip(), 300) or "nothing"), outcome)
        result = types.CallToolResult(content=[types.TextContent(text=text.strip())], structured_content=value)
    if output_schema is not None and not result.is_error:
        try:
            violation = find_violation(result.structured_content, output_schema)
        except ValueError as error:
            return _make_error("invalid_output", f"The tool's outputSchema can't be used: {error}", outcome)
        if violation is not None:
            message = f"The tool's output does not match its outputSchema: {violation}"
            return _make_error("invalid_output", message, outcome)
    return result


def read_protocol_error(path: Path) -> MCPError | None:
    """Return the protocol error that `mcp_fail` has written to its file, or None."""
    try:
        error = json.loads(read_inside(path.parent.resolve(), path).decode("utf-8", "replace"))
        return MCPError(int(error["code"]), str(error["message"]), error.get("data"))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_embedded_files(listing: Path, folders: Iterable[Path], max_bytes: int) -> list[types.EmbeddedResource]:
    """Return the files that a tool embeds in its result.

    `listing` has lines of `path<TAB>type<TAB>uri`, or a JSON array of objects. A file is omitted if it is outside
    `folders`, can't be read, or would exceed `max_bytes` in total.
    """
    try:
        text = read_inside(listing.parent.resolve(), listing).decode("utf-8", "replace")
    except OSError:
        return []
    folders = [folder.resolve() for folder in folders]
    resources = []
    for path, mime_type, uri in _parse_listing(text):
        try:
            file = Path(path).resolve()
            folder = next((folder for folder in folders if file.is_relative_to(folder)), None)
            if folder is None:
                continue
            data = read_inside(folder, file, max_bytes)
        except (OSError, ValueError):
            continue
        max_bytes -= len(data)
        uri = uri or file.as_uri()
        mime_type = mime_type or mimetypes.guess_type(file.name)[0] or ""
        contents: types.TextResourceContents | types.BlobResourceContents
        try:
            contents = types.TextResourceContents(uri=uri, mime_type=mime_type or "text/plain", text=data.decode())
        except UnicodeDecodeError:
            blob = base64.b64encode(data).decode()
            contents = types.BlobResourceContents(uri=uri, mime_type=mime_type or "application/octet-stream", blob=blob)
        resources.append(types.EmbeddedResource(resource=contents))
    return resources


def parse_progress(line: str) -> dict[str, Any] | None:
    """Return the content of a line of the progress channel, or None for any other line.

    Progress is `{"progress": 3, "total": 10, "message": "…"}`, `30% …` or `3/10 …`. A log line is
    `{"level": "info", "data": …, "logger": "…"}`. Both may be the `params` of a JSON-RPC notification. The returned
    dictionary has `progress`, `total` and `message`, or `level`, `data` and `logger`. A line `{"question": {…}}` is
    returned as it is.
    """
    line = line.strip()
    if not line:
        return None
    if not line.startswith("{"):
        return _parse_plain_progress(line)
    value, is_json = _parse_json(line)
    if not is_json:
        return None
    if isinstance(value.get("params"), dict):
        value = value["params"]
    if isinstance(value.get("question"), dict):
        return {"question": value["question"]}
    progress = _parse_number(value.get("progress"))
    if progress is not None:
        message = value.get("message")
        return {
            "progress": progress,
            "total": _parse_number(value.get("total")),
            "message": None if message is None else str(message),
        }
    if "level" not in value or not ("data" in value or "message" in value):
        return None
    level = str(value["level"]).lower()
    level = {"warn": "warning", "fatal": "critical"}.get(level, level)
    data = value.get("data", value.get("message"))
    if isinstance(data, str) and data.startswith(("{", "[")):
        parsed, is_json = _parse_json(data)
        data = parsed if is_json else data
    logger = value.get("logger")
    return {
        "level": level if level in LOG_LEVELS else "info",
        "data": data,
        "logger": None if logger is None else str(logger),
    }


def _parse_json(text: str) -> tuple[Any, bool]:
    """Return the value, and whether the text is standard JSON. Unpaired surrogates are replaced."""
    try:
        value = json.loads(text, parse_constant=_reject_constant)
        if _SURROGATE.search(text):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None, False
    return value, True


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parse_result(value: dict[str, Any]) -> types.CallToolResult | None:
    """Return an object as a tool result, or None if it only has some members with the same names."""
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


def _make_timeout(
    outcome: Outcome, timeout: float, hint: str | None, max_timeout: float | None
) -> types.CallToolResult:
    if max_timeout is None:
        reason, message = "fixed", f"The tool did not finish within {timeout:g} s"
    elif outcome.is_idle:
        reason, message = "idle", f"The tool reported no progress for {timeout:g} s"
    else:
        reason, message = "max_exceeded", f"The tool did not finish within {max_timeout:g} s"
    message += f" and was stopped. {hint or 'Ask it for less, or raise its timeout.'}"
    return _make_error(
        "timeout", message, outcome, reason=reason, timeoutSecs=timeout, maxTimeoutSecs=max_timeout, hint=hint
    )


def _make_failure(outcome: Outcome, text: str) -> types.CallToolResult:
    assert outcome.status is not None
    if outcome.status < 0:
        try:
            reason = f"was ended by {signal.Signals(-outcome.status).name}"
        except ValueError:
            reason = f"was ended by signal {-outcome.status}"
    else:
        reason = f"failed with exit status {outcome.status}"
    output = "" if outcome.stderr.strip() or not text.strip() else f"\n{_shorten(text.strip(), _MAX_STDERR)}"
    return _make_error("exit_status", f"The tool {reason}.{output}", outcome, exitCode=outcome.status)


def _make_error(kind: str, message: str, outcome: Outcome, **details: Any) -> types.CallToolResult:
    stderr = _get_tail(outcome.stderr)
    error = {"type": kind, "message": message, **{key: value for key, value in details.items() if value is not None}}
    if stderr:
        error["stderr"] = stderr
    return types.CallToolResult(
        content=[types.TextContent(text=f"{message}\n{stderr}" if stderr else message)],
        structured_content={"success": False, "error": error},
        is_error=True,
    )


def _get_tail(stderr: bytes) -> str:
    """Return the end of stderr, starting with a whole line if possible."""
    tail = stderr[-_MAX_STDERR:]
    if len(stderr) > len(tail) and b"\n" in tail[:-1]:
        tail = tail.split(b"\n", 1)[1]
    return tail.decode("utf-8", "replace").strip()


def _shorten(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]}…"


def _parse_number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None


def _parse_plain_progress(line: str) -> dict[str, Any] | None:
    found = _PLAIN_PROGRESS.fullmatch(line)
    if found is None:
        return None
    total = found["total"] or ("100" if found["percent"] else None)
    return {
        "progress": float(found["progress"]),
        "total": None if total is None else float(total),
        "message": found["message"] or None,
    }


def _parse_listing(text: str) -> Iterable[tuple[str, str, str]]:
    if text.lstrip().startswith("["):
        entries, is_json = _parse_json(text)
        for entry in entries if is_json else ():
            if isinstance(entry, dict) and entry.get("path"):
                yield str(entry["path"]), str(entry.get("mimeType") or ""), str(entry.get("uri") or "")
        return
    for line in text.split("\n"):
        path, mime_type, uri, *_ = [*line.split("\t"), "", "", ""]
        if path:
            yield path, mime_type, uri
