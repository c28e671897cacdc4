"""The output of an executable becomes a tool result, and an error describes what to do."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.workspace.process import Outcome
from tidings.workspace.result import make_result, parse_progress, read_embedded_files, read_protocol_error

SCHEMA = {"type": "object", "required": ["count"], "properties": {"count": {"type": "integer"}}}


def convert(
    stdout: str = "",
    stderr: str = "",
    status: int | None = 0,
    *,
    schema: dict[str, Any] | None = None,
    hint: str | None = None,
    max_timeout: float | None = None,
    **flags: bool,
) -> types.CallToolResult:
    outcome = Outcome(status, stdout.encode(), stderr.encode(), **{"is_timeout": False, "is_truncated": False} | flags)
    return make_result(outcome, schema, 2.5, hint, max_timeout)


def text_of(result: types.CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text


# Text and structure


def test_text_loses_only_its_last_line_end() -> None:
    result = convert("two\nlines\n")

    assert (text_of(result), result.structured_content, result.is_error) == ("two\nlines", None, False)


@pytest.mark.parametrize("text", ["[1, 2]", "42", '"word"', "null", "{broken", "{} {}", '{"a": NaN}', "{" * 5000])
def test_output_that_is_not_one_object_is_text(text: str) -> None:
    result = convert(text)

    assert (text_of(result), result.structured_content) == (text, None)


def test_one_object_is_structured_output() -> None:
    result = convert('\n{"count": 3, "größe": "🎉"}\n')

    assert result.structured_content == {"count": 3, "größe": "🎉"}
    assert json.loads(text_of(result)) == result.structured_content


def test_structured_output_must_match_the_schema() -> None:
    assert convert('{"count": 3}', schema=SCHEMA).structured_content == {"count": 3}
    array = {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number"}}}
    assert convert("[1, 2]", schema=array).structured_content == [1, 2]
    for stdout, message in (
        ('{"count": "three"}', "count: 'three' is not of type 'integer'"),
        ("{}", "'count' is a required property"),
        ("three", "must print one JSON value, because it has an outputSchema; it printed: three"),
        ("", "it printed: nothing"),
    ):
        result = convert(stdout, schema=SCHEMA)
        assert result.is_error
        assert message in text_of(result)


@pytest.mark.parametrize("schema", [{"$ref": "https://127.0.0.1:1/x.json"}, {"type": "nonsense"}, {"pattern": "("}])
def test_unusable_schema_is_an_error_of_the_tool(schema: dict[str, Any]) -> None:
    result = convert('"text"', schema=schema)

    assert result.is_error
    assert "outputSchema" in text_of(result)


def test_object_with_the_shape_of_a_result_is_that_result() -> None:
    given = {
        "content": [{"type": "text", "text": "hi"}, {"type": "image", "data": "aGk=", "mimeType": "image/png"}],
        "structuredContent": {"count": 1},
        "isError": False,
        "_meta": {"a": 1},
    }
    result = convert(json.dumps(given), schema=SCHEMA)
    dumped = result.model_dump(by_alias=True, exclude_none=True)

    assert {key: dumped[key] for key in given} == given


def test_printed_result_must_match_the_schema_unless_it_is_an_error() -> None:
    given = {"content": [{"type": "text", "text": "x"}], "structuredContent": {"count": "?"}, "isError": False}
    assert convert(json.dumps(given), schema=SCHEMA).is_error

    error = convert(json.dumps(given | {"isError": True}), schema=SCHEMA)
    assert text_of(error) == "x"


@pytest.mark.parametrize(
    "given",
    [
        {"content": "text"},
        {"content": []},
        {"content": [{"type": "nonsense"}], "isError": False},
        {"content": [{"type": "text", "text": "x"}], "author": "ada"},
        {"structuredContent": {"a": 1}},
        {"isError": True},
    ],
)
def test_object_that_only_resembles_a_result_is_structured_output(given: dict[str, Any]) -> None:
    assert convert(json.dumps(given)).structured_content == given


def test_unpaired_surrogate_is_replaced() -> None:
    result = convert('{"a": "\\ud800 \\ud83c\\udf89"}')

    assert result.structured_content == {"a": "? 🎉"}
    assert "🎉" in result.model_dump_json()


# Errors


def test_failure_has_the_status_and_the_end_of_stderr() -> None:
    stderr = "".join(f"line {number}\n" for number in range(1000))
    result = convert("partial", stderr, status=3)
    text = text_of(result)

    assert result.is_error
    assert text.startswith("The tool failed with exit status 3.\nline ")
    assert text.endswith("line 999")
    assert "partial" not in text
    assert len(text) < 5000


@pytest.mark.parametrize(
    ("stdout", "status", "text"),
    [
        ("no such city\n", 1, "The tool failed with exit status 1.\nno such city"),
        ("", 1, "The tool failed with exit status 1."),
        ("", -11, "The tool was ended by SIGSEGV."),
    ],
)
def test_failure_without_stderr_has_the_output(stdout: str, status: int, text: str) -> None:
    assert text_of(convert(stdout, status=status)) == text


def test_failure_may_print_its_own_result() -> None:
    given = {"content": [{"type": "text", "text": "the city is unknown"}], "isError": True}

    assert text_of(convert(json.dumps(given), "noise", status=1)) == "the city is unknown"
    assert "exit status 1" in text_of(convert(json.dumps(given | {"isError": False}), status=1))


def test_timeout_has_its_limit_and_advice() -> None:
    result = convert("half", "waiting for the network", None, hint="Use limit=10.", is_timeout=True)

    assert result.is_error
    assert text_of(result) == (
        "The tool did not finish within 2.5 s and was stopped. Use limit=10.\nwaiting for the network"
    )
    assert result.structured_content["error"]["type"] == "timeout"
    assert result.structured_content["error"]["timeoutSecs"] == 2.5
    assert "raise its timeout" in text_of(convert(status=None, is_timeout=True))


@pytest.mark.parametrize(
    ("is_idle", "reason", "text"),
    [(True, "idle", "reported no progress for 2.5 s"), (False, "max_exceeded", "did not finish within 60 s")],
)
def test_timeout_that_progress_extends_has_its_reason(is_idle: bool, reason: str, text: str) -> None:
    result = convert(status=None, is_timeout=True, is_idle=is_idle, max_timeout=60.0)

    assert text in text_of(result)
    assert result.structured_content["error"]["reason"] == reason
    assert result.structured_content["error"]["maxTimeoutSecs"] == 60


def test_too_much_output_has_its_limit_and_advice() -> None:
    result = convert("x" * 1000, status=None, is_truncated=True)

    assert result.is_error
    assert "more than 1000 bytes" in text_of(result)
    assert "max_output" in text_of(result)


@given(st.binary() | st.text().map(str.encode), st.binary(), st.integers(-70, 255), st.booleans())
def test_any_output_can_be_sent(stdout: bytes, stderr: bytes, status: int, has_schema: bool) -> None:
    given = Outcome(status, stdout, stderr, is_timeout=False, is_truncated=False)
    result = make_result(given, SCHEMA if has_schema else None, timeout=1)

    assert json.loads(result.model_dump_json(by_alias=True))["content"]
    assert result.is_error or status == 0


RESULTS = st.fixed_dictionaries(
    {},
    optional={
        "content": st.lists(st.dictionaries(st.sampled_from(["type", "text"]), st.sampled_from(["text", "\ud800", 1]))),
        "structuredContent": st.none() | st.text() | st.dictionaries(st.text(), st.integers()),
        "isError": st.booleans() | st.text(),
        "_meta": st.none() | st.dictionaries(st.text(), st.floats()),
    },
)


@given(RESULTS)
def test_anything_like_a_result_can_be_sent(given: dict[str, Any]) -> None:
    assert json.loads(convert(json.dumps(given)).model_dump_json(by_alias=True))


# Files written by the helpers


def test_protocol_error_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_protocol_error(path) is None

    path.write_text('{"code": -32602, "message": "no", "data": {"a": 1}}')
    error = read_protocol_error(path)
    assert error is not None
    assert (error.code, error.message, error.data) == (-32602, "no", {"a": 1})

    path.write_text("{}")
    assert read_protocol_error(path) is None


def test_files_are_embedded_as_text_or_blob(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hällo", "utf-8")
    (tmp_path / "b.png").write_bytes(b"\x89PNG\xff")
    listing = tmp_path / "listing"
    listing.write_text(f"{tmp_path}/a.txt\n{tmp_path}/b.png\timage/x\tmem://b\n")
    text, blob = (found.resource for found in read_embedded_files(listing, [tmp_path], 1000))

    assert isinstance(text, types.TextResourceContents)
    assert (text.text, text.mime_type, text.uri) == ("hällo", "text/plain", (tmp_path / "a.txt").resolve().as_uri())
    assert isinstance(blob, types.BlobResourceContents)
    assert (base64.b64decode(blob.blob), blob.mime_type, blob.uri) == (b"\x89PNG\xff", "image/x", "mem://b")

    listing.write_text(json.dumps([{"path": f"{tmp_path}/a.txt", "mimeType": "text/x"}, "nonsense", {}]))
    (only,) = read_embedded_files(listing, [tmp_path], 1000)
    assert only.resource.mime_type == "text/x"


def test_files_outside_missing_or_too_large_are_omitted(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("s")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "large").write_text("x" * 11)
    (inside / "fits").write_text("x" * 6)
    (inside / "again").write_text("x" * 6)
    listing = tmp_path / "listing"
    names = ["../secret", "link", "absent", "", "large", "fits", "again"]
    listing.write_text("".join(f"{inside}/{name}\n" for name in names))

    (only,) = read_embedded_files(listing, [inside], 10)
    assert only.resource.uri.endswith("/fits")


# Progress


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ('{"progress": 3, "total": 10, "message": "half"}', (3, 10, "half")),
        ('{"progress": 0.5}', (0.5, None, None)),
        ('{"method": "notifications/progress", "params": {"progressToken": 1, "progress": 7}}', (7, None, None)),
        ("40% of it", (40, 100, "of it")),
        ("3/10", (3, 10, None)),
        ("12 done", (12, None, "done")),
    ],
)
def test_progress_line_is_parsed(line: str, parsed: tuple[float, float | None, str | None]) -> None:
    assert parse_progress(line) == dict(zip(("progress", "total", "message"), parsed, strict=True))


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ('{"level": "warn", "data": "careful", "logger": "x"}', ("warning", "careful", "x")),
        ('{"level": "info", "message": "hi"}', ("info", "hi", None)),
        ('{"level": "loud", "data": "{\\"a\\": 1}"}', ("info", {"a": 1}, None)),
        ('{"params": {"level": "error", "data": [1], "logger": "y"}}', ("error", [1], "y")),
    ],
)
def test_log_line_is_parsed(line: str, parsed: tuple[str, Any, str | None]) -> None:
    assert parse_progress(line) == dict(zip(("level", "data", "logger"), parsed, strict=True))


@pytest.mark.parametrize(
    "line", ["", "  ", "hello", "{broken", "{}", '{"progress": "x"}', '{"progress": true}', "{{{", "-1"]
)
def test_other_lines_are_ignored(line: str) -> None:
    assert parse_progress(line) is None


@given(st.text())
def test_any_line_can_be_parsed(line: str) -> None:
    parse_progress(line)
