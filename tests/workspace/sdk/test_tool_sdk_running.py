"""The helpers of `tool-sdk.sh` for a running tool: progress, log, cancellation, retries, roots, configuration."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.bash_tools import BashTools
from tests.support.waiting import DEADLINE
from tidings.workspace import process

pytestmark = pytest.mark.anyio


# Progress, log, cancellation


async def test_progress_and_log_lines_are_sent(bash: BashTools) -> None:
    await bash.call("""
        mcp_progress 25 'a "quarter"' 50
        mcp_progress 250 'too much'
        mcp_progress oops ''
        mcp_log_info weather $'two\\nlines'
        mcp_log_warn weather '{"a": 1}'
        mcp_debug checkpoint one
    """)

    assert bash.progress == [
        {"progress": 25, "total": 50, "message": 'a "quarter"'},
        {"progress": 100, "total": 100, "message": "too much"},
        {"progress": 0, "total": 100, "message": ""},
        {"level": "info", "logger": "weather", "data": "two\nlines"},
        {"level": "warning", "logger": "weather", "data": {"a": 1}},
        {"level": "debug", "logger": "tool", "data": "checkpoint one"},
    ]


async def test_progress_of_a_command_is_forwarded(bash: BashTools) -> None:
    result = await bash.text(r"""
        noisy() { printf '10%%\r20%%\r' >&2; echo "trouble" >&2; echo '30%' >&2; echo output; return 7; }
        status=0
        output="$(mcp_run_with_progress --pattern '([0-9]+)%' --extract match1 --stderr-file errors -- noisy)" ||
            status=$?
        mcp_run_with_progress --pattern '\[([0-9]+)/([0-9]+)\]' --extract ratio --stdout out -- \
            bash -c 'echo "[1/4] a" >&2; echo written'
        mcp_run_with_progress --pattern '"progress"' --quiet -- \
            bash -c 'echo "{\"progress\": 60.5, \"message\": \"j\\\"s\"}" >&2; echo "{\"type\":\"progress\"}" >&2'
        mcp_run_with_progress --pattern '^t=([0-9]+)' --extract match1 \
            --total 200 --progress-file file --interval 0.01 -- \
            bash -c 'echo t=150 >>file; printf t=200 >>file; echo >>file'
        echo "$output $status $(cat errors) $(cat out)"
    """)

    assert result == "output 7 trouble written"
    assert [(line["progress"], line["message"]) for line in bash.progress] == [
        (10, "10%"), (20, "20%"), (30, "30%"), (25, "[1/4] a"), (60, 'j"s'), (75, "t=150"), (100, "t=200"),
    ]  # fmt: skip


async def test_cancelled_tool_is_informed(bash: BashTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", DEADLINE)  # it handles SIGTERM
    has_started = asyncio.Event()
    bash.on_progress = lambda line: has_started.set()
    task = asyncio.create_task(
        bash.call("""
            mcp_is_cancelled && exit 9
            trap 'mcp_is_cancelled && touch seen; exit' TERM
            mcp_progress 1 started
            while :; do sleep 0.01; done
        """)
    )
    async with asyncio.timeout(DEADLINE):
        await has_started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert (bash.root / "seen").exists()


async def test_transient_failure_is_retried(bash: BashTools) -> None:
    text = """
        try() { echo x >>"$1"; [ "$(wc -l <"$1")" -ge 3 ] || return "$2"; }
        status=0
        mcp_with_retry 5 0.001 -- try transient 3
        mcp_with_retry 5 0.001 -- try permanent 2 || status=$?
        mcp_with_retry 2 0 -- try exhausted 9 || status="$status $?"
        echo "$(wc -l <transient) $(wc -l <permanent) $(wc -l <exhausted) $status"
    """
    assert (await bash.text(text)).split() == ["3", "1", "2", "2", "9"]


# Roots, configuration, questions


async def test_paths_must_be_inside_the_roots(bash: BashTools) -> None:
    (bash.root / "in side").mkdir()
    (bash.root / "out").symlink_to("/etc")
    text = """
        mcp_roots_count; mcp_roots_list
        for path in . 'in side/x' absent/../y / .. out/passwd "${PWD}x"; do
            mcp_roots_contains "$path" && echo yes || echo no
        done
        mcp_require_path .path --default-to-single-root
        echo "[$(mcp_require_path .path --allow-empty)]"
        mcp_require_path .given
    """
    root = str(bash.root.resolve())
    lines = (await bash.text(text, {"given": "in side/../in side"})).splitlines()

    assert lines == ["1", root, "yes", "yes", "yes", "no", "no", "no", "no", root, "[]", f"{root}/in side"]


async def test_configuration_is_merged_by_precedence(bash: BashTools) -> None:
    (bash.root / "config.json").write_text('{"b": 2, "c": {"d": "file"}}')
    (bash.root / "example.json").write_text('{"a": 9, "b": 9}')
    (bash.root / "broken.json").write_text("{")
    text = """
        mcp_config_load --env CONFIG --file config.json --example example.json \\
            --defaults '{"a": 1, "z": false, "n": null}'
        for key in .a .b .c.d .e .z; do mcp_config_get "$key"; done
        mcp_config_get .n --default fallback
        mcp_config_get .absent.deep || echo none
        mcp_config_load --env ABSENT --file broken.json --example absent.json --defaults '{"only": 1}'
        mcp_emit_text "$MCP_CONFIG_JSON"
    """
    bash.env["CONFIG"] = '{"e": "env"}'
    lines = (await bash.text(text)).splitlines()

    assert lines == ["9", "2", "file", "env", "false", "fallback", "none", '{"only":1}']
    assert bash.progress[0]["data"] == "broken.json is not a JSON object, and is ignored"


async def test_questions_to_the_user_are_declined(bash: BashTools) -> None:
    text = """
        for ask in mcp_elicit mcp_elicit_string mcp_elicit_confirm mcp_elicit_choice mcp_elicit_titled_choice \\
            mcp_elicit_multi_choice mcp_elicit_titled_multi_choice mcp_elicit_url; do
            "$ask" "Really?" yes no
        done | sort -u
        echo "$MCP_ELICIT_SUPPORTED"
    """
    answer, supported = (await bash.text(text)).splitlines()

    assert (json.loads(answer), supported) == ({"action": "decline", "content": None}, "0")
