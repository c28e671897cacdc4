"""The helpers of `tool-sdk.sh` for arguments, results and JSON."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import MCPError

from tests.support.bash_tools import BashTools
from tests.support.workspaces import DIFFICULT_STRINGS

pytestmark = pytest.mark.anyio


# Arguments


async def test_difficult_strings_pass_through_a_tool_unchanged(bash: BashTools) -> None:
    pairs = " ".join(f'{case} "$(mcp_args_require .{case})"' for case in DIFFICULT_STRINGS)
    result = await bash.call(f'mcp_result_success "$(mcp_json_obj {pairs})"', DIFFICULT_STRINGS)

    # $(…) drops line ends at the end of its output.
    assert result.structured_content["result"] == {
        case: value.rstrip("\n") for case, value in DIFFICULT_STRINGS.items()
    }
    assert not (bash.root / "owned").exists()


async def test_bash_parses_flat_objects_correctly(bash: BashTools) -> None:
    """Flat objects are parsed without jq."""
    chance = random.Random(4)
    letters = '\\"/bnut\n\t\x01\x7f{}[]:,0 ä🎉\u2028='
    texts = [
        *DIFFICULT_STRINGS.values(),
        *("".join(chance.choices(letters, k=chance.randrange(12))) for _ in range(30)),
    ]
    values = [*texts, 0, -1, 12345678901234567890, 1.5e300, True, False, "null", "true", "0"]
    objects = [{"a": "x", "v": value, "V": 1, "v2": text} for value, text in zip(values, reversed(values), strict=True)]
    lines = [json.dumps(given, ensure_ascii=number % 8 == 0) for number, given in enumerate(objects)]
    (bash.root / "lines").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    text = """
        while IFS= read -r MCP_TOOL_ARGS_JSON; do
            value="$(mcp_args_require .v; echo .)"
            mcp_json_escape "${value%$'\\n.'}"
        done <lines
    """
    received = [json.loads(line) for line in (await bash.text(text)).split("\n")]

    assert received == [value if isinstance(value, str) else json.dumps(value) for value in values]


async def test_megabyte_passes_through_a_tool_unchanged(bash: BashTools) -> None:
    value = '"ä\\\n' * 200_000 + "."
    result = await bash.call('mcp_result_success "$(mcp_json_obj v "$(mcp_args_require .value)")"', {"value": value})

    assert result.structured_content["result"] == {"v": value}
    assert isinstance(result.content[0], types.TextContent)
    assert len(result.content[0].text) < 200


async def test_arguments_are_read_by_filter_with_defaults(bash: BashTools) -> None:
    text = """
        mcp_args_get '.name // "World"'
        mcp_args_get '.absent' --default 'a default'
        mcp_args_get '.no' --default yes
        mcp_args_get '.list[1].x'
        mcp_args_get '.a.b // empty'
        mcp_meta_get '.user'
        mcp_args_raw
    """
    arguments = {"no": False, "list": [0, {"x": "deep"}]}
    lines = (await bash.text(text, arguments)).splitlines()

    assert lines[:5] == ["World", "a default", "false", "deep", "null"]
    assert json.loads(lines[5]) == arguments


@pytest.mark.parametrize("line", ["mcp_args_get '.list | length'", "mcp_args_require '.list | length'"])
async def test_filter_that_is_no_path_needs_jq(bash: BashTools, line: str) -> None:
    given = {"list": [0, 1]}
    if bash.env.get("MCPBASH_JSON_TOOL_BIN") is None and shutil.which("jq"):
        assert await bash.text(line, given) == "2"
        return
    with pytest.raises(MCPError) as caught:
        await bash.call(f'value="$({line})"; mcp_result_success "never"', given)

    assert caught.value.message == "the filter .list | length needs jq: install jq or gojq"


async def test_a_setting_that_cannot_be_read_is_the_default_and_a_missing_jq_is_an_error(
    bash: BashTools, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"  # a PATH without jq
    programs.mkdir()
    for name in ("bash", "cat"):
        (programs / name).symlink_to(shutil.which(name) or name)
    bash.env |= {"PATH": str(programs), "MCPBASH_JSON_TOOL_BIN": ""}
    unreadable = """
        export MCP_CONFIG_JSON='no JSON'
        mcp_config_get .a --default other 2>"{errors}"
        mcp_config_get .a 2>>"{errors}" || echo "status $?"
    """
    errors = tmp_path / "errors"
    assert await bash.text(unreadable.replace("{errors}", str(errors))) == "other\nstatus 1"
    assert errors.read_text().count("the input is not JSON") == 2
    with pytest.raises(MCPError, match=r"the filter .a \| length needs jq"):
        await bash.call("""export MCP_CONFIG_JSON='{"a": [1]}'; mcp_config_get '.a | length' --default never""")


async def test_booleans_and_integers_are_converted(bash: BashTools) -> None:
    text = """
        echo "$(mcp_args_bool .yes) $(mcp_args_bool .one) $(mcp_args_bool .no) $(mcp_args_bool .x --default true)"
        echo "$(mcp_args_int .n --min 1 --max 10) $(mcp_args_int .s) $(mcp_args_int .x --default 5)"
        mcp_args_int .m
    """
    given = {"yes": True, "one": 1, "no": False, "n": 10, "s": "007", "m": -3}

    assert await bash.text(text, given) == "true true false true\n10 7 5\n-3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mcp_args_require .x", ".x is required"),
        ("mcp_args_require .null 'give me that'", "give me that"),
        ("mcp_args_bool .x", ".x is required"),
        ("mcp_args_int .x", ".x is required"),
        ("mcp_args_int .word", ".word must be an integer"),
        ("mcp_args_int .half", ".half must be an integer"),
        ("mcp_args_int .n --min 6", ".n must be at least 6"),
        ("mcp_args_int .n --max 4", ".n must be at most 4"),
        ("mcp_require_path .outside", ".outside is outside the allowed roots"),
        ("mcp_require_path .up", ".up is outside the allowed roots"),
        ("mcp_require_path .x", ".x is required"),
        ("mcp_fail_invalid_args 'not so'", "not so"),
    ],
)
async def test_bad_arguments_are_invalid_params_inside_a_substitution(bash: BashTools, line: str, message: str) -> None:
    given = {"null": None, "word": "x", "half": 1.5, "n": 5, "outside": "/etc/passwd", "up": "a/../../b"}
    with pytest.raises(MCPError) as caught:
        await bash.call(f'value="$({line})"; mcp_result_success "never"', given)

    assert (caught.value.code, caught.value.message) == (-32602, message)


async def test_failure_has_code_message_and_data(bash: BashTools) -> None:
    with pytest.raises(MCPError) as caught:
        await bash.call("""mcp_fail -32001 'Cancelled "now"' '{"detail":[1]}'""")
    assert (caught.value.code, caught.value.message, caught.value.data) == (-32001, 'Cancelled "now"', {"detail": [1]})

    with pytest.raises(MCPError) as caught:
        await bash.call("mcp_fail 'no code'")
    assert (caught.value.code, caught.value.message) == (-32603, "no code")

    recovered = 'value="$(mcp_args_require .x)" || value=other; mcp_emit_text "$value"'
    assert await bash.text(recovered) == "other"


# Results


async def test_results_have_an_envelope_and_end_the_tool(bash: BashTools) -> None:
    good = await bash.call("""mcp_result_success '{"a": [1, null, "ä"]}'; echo never""")
    assert good.structured_content == {"success": True, "result": {"a": [1, None, "ä"]}}
    assert not good.is_error
    assert isinstance(good.content[0], types.TextContent)
    assert good.content[0].text == '{"success":true,"result":{"a":[1,null,"ä"]}}'
    assert await bash.text("""mcp_result_success '{"a":"b"}'""") == '{"success":true,"result":{"a":"b"}}'

    bad = await bash.call("""mcp_result_error '{"type": "not_found"}'; echo never""")
    assert bad.structured_content == {"success": False, "error": {"type": "not_found"}}
    assert bad.is_error

    words = await bash.text("""mcp_result_success 'plain "words" {'""")
    assert json.loads(words) == {"success": True, "result": 'plain "words" {'}
    assert await bash.text("mcp_result_text $'two\\nlines'; echo never") == "two\nlines"


async def test_error_has_type_hint_and_data(bash: BashTools) -> None:
    result = await bash.call("""
        trap 'touch trapped' EXIT
        mcp_error validation_error 'Bad "date"' --hint 'Use 2025-01-15' --data "$(mcp_json_obj received 'x"y')"
        echo never
    """)

    assert result.is_error
    assert isinstance(result.content[0], types.TextContent)
    assert result.content[0].text == 'Bad "date"'
    assert result.structured_content["error"] == {
        "type": "validation_error",
        "message": 'Bad "date"',
        "hint": "Use 2025-01-15",
        "data": {"received": 'x"y'},
    }
    assert (bash.root / "trapped").exists()


async def test_emitted_json_and_text_are_the_result(bash: BashTools) -> None:
    result = await bash.call("""mcp_emit_json '{"a": 1}'""")
    assert result.structured_content == {"a": 1}

    assert await bash.text("mcp_emit_text 'hi $(id)'") == "hi $(id)"


async def test_files_are_embedded_in_the_result(bash: BashTools) -> None:
    result = await bash.call("""
        printf 'a report' >report.txt
        printf '\\xff\\xfe' >image.bin
        mcp_result_text_with_resource "Report ready" --path "$PWD/report.txt" --mime text/x \\
            --path "$PWD/image.bin" --path /etc/passwd
    """)
    text, report, image = result.model_dump(by_alias=True)["content"]

    assert json.loads(text["text"])["result"] == "Report ready"
    assert (report["resource"]["text"], report["resource"]["mimeType"]) == ("a report", "text/x")
    assert image["resource"]["blob"]


async def test_json_is_built_and_checked(bash: BashTools) -> None:
    text = r"""
        mcp_json_arr; mcp_json_arr a 'b "c"' ''
        mcp_json_obj
        mcp_json_escape $'tab\t bell\a & \\& end'
        mcp_byte_length 'ä🎉'
        for json in false null '"x"' '[1]' '' '{} {}' '{a}'; do
            mcp_is_valid_json "$json" && echo yes || echo no
        done | tr '\n' ' '
    """
    lines = (await bash.text(text)).splitlines()

    assert [json.loads(line) for line in lines[:4]] == [[], ["a", 'b "c"', ""], {}, "tab\t bell\a & \\& end"]
    assert lines[4:] == ["6", "yes yes yes yes no no no "]
    with pytest.raises(MCPError, match="a value for every key"):
        await bash.call("mcp_json_obj only >/dev/null")


@pytest.mark.parametrize(
    ("value", "max_bytes", "path", "expected"),
    [
        ("[1,2,3]", 100, "", {"result": [1, 2, 3], "truncated": False, "kept": 3, "total": 3}),
        ("[1,2,3,4]", 5, "", {"result": [1, 2], "truncated": True, "kept": 2, "total": 4}),
        ('{"results":[1,2]}', 15, "", {"result": {"results": [1]}, "truncated": True, "kept": 1, "total": 2}),
        (
            '{"a":{"b":[1],"c":0}}',
            20,
            ".a.b",
            {"result": {"a": {"b": [], "c": 0}}, "truncated": True, "kept": 0, "total": 1},
        ),
    ],
)
async def test_array_is_truncated_to_size(
    bash: BashTools, value: str, max_bytes: int, path: str, expected: dict[str, Any]
) -> None:
    option = f"--array-path '{path}'" if path else ""
    result = await bash.call(f"mcp_json_truncate '{value}' {max_bytes} {option}")

    assert result.structured_content == expected


@pytest.mark.parametrize(
    ("value", "path", "error"),
    [
        ('{"a":1}', ".b", "path_not_found"),
        ('{"a":1}', ".a", "invalid_array_path"),
        ('{"a":1}', ".a[0]", "invalid_path_syntax"),
        ('{"a":[1],"b":"xxxxxxxxxxxxxxxxxxxxxxxxxx"}', ".a", "output_too_large"),
    ],
)
async def test_failed_truncation_has_a_reason(bash: BashTools, value: str, path: str, error: str) -> None:
    result = await bash.call(f"mcp_json_truncate '{value}' 20 --array-path '{path}'")

    assert result.structured_content["error"]["type"] == error


async def test_message_of_a_failed_command_is_extracted(bash: BashTools) -> None:
    text = """
        mcp_extract_cli_error '{"error":{"message":"one"}}' noise 1
        mcp_extract_cli_error '{"error":"two"}' noise 1
        mcp_extract_cli_error '{"success":false,"message":"three"}' noise 1
        mcp_extract_cli_error '{"errors":[{"message":"four"}]}' noise 1
        mcp_extract_cli_error 'not json' five 1
        mcp_extract_cli_error '' '' 6
    """
    assert (await bash.text(text)).splitlines() == [
        "one", "two", "three", "four", "five", "the command failed with exit status 6",
    ]  # fmt: skip
