"""The command `tidings check`: its output, status and errors. Covers `check_output.py`."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import DEADLINE, Result, run_command, start_command, tidings
from tests.support.defective_server import DefectiveServer
from tests.support.forking import forked_command
from tests.support.terminal import Screen
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import until
from tidings.check.rules import RULES

pytestmark = pytest.mark.anyio

QUICK = ("--quiet-time", 0.3)
GARBAGE = """sh -c 'while read line; do echo garbage; echo "{\\"id\\": [1]}"; echo "[]"; echo 7; done'"""
"""A program that answers with lines that are no messages."""
DEEP = """python3 -c 'import sys; [print("[" * 100000, "{\\"id\\": 1}", sep="\\n", flush=True) for _ in sys.stdin]'"""
"""A program that answers with JSON that is nested too deeply."""
EVIL = "\x1b[31mred\nerror"


@asynccontextmanager
async def defective(defect: str = "", tokens: dict[str, float] | None = None) -> AsyncIterator[str]:
    async with run_uvicorn(DefectiveServer(defect, tokens), http="h11") as server:
        yield f"http://127.0.0.1:{address_of(server)[1]}/mcp"


async def check(*arguments: object, token: str | None = None) -> Result:
    return await run_command("check", *arguments, *QUICK, token=token)


async def test_a_correct_server_has_status_0() -> None:
    async with defective() as url:
        result = await check(url, "--trigger", "change")
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Checked {url}: defective\n2026-07-28 and 2025-11-25, HTTP\n")
    assert "skipped  sigterm, graceful-end: the check has not started the server\n" in result.stdout
    assert "told     modern: " in result.stdout
    assert result.stdout.endswith("\n0 errors, 0 warnings; 20 rules passed, 0 failed, 4 skipped.\n")


async def test_an_error_has_status_1_and_a_warning_0() -> None:
    async with defective("get-stream") as url:
        result = await check(url, "--only", "get-stream", "--only", "buffering")
    assert (result.status, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    first = lines.index(f"error    get-stream  {RULES['get-stream'].title}")
    assert lines[first + 1].endswith("(tools, resources, subscriptions), and GET is answered with 405")
    assert lines[first + 3].endswith("legacy session 1  → GET")
    assert lines[first + 4].endswith("legacy session 1  ← HTTP 405 {}")
    assert f"    remedy: {RULES['get-stream'].remedy}" in lines
    assert f"    clause: {RULES['get-stream'].clause_url}" in lines
    assert lines[-1] == "1 error, 0 warnings; 1 rule passed, 1 failed, 0 skipped."
    async with defective("buffering") as url:
        result = await check(url, "--only", "buffering")
    assert result.status == 0
    assert result.stdout.endswith("\n0 errors, 1 warning; 0 rules passed, 1 failed, 0 skipped.\n")


async def test_json_has_one_object_per_finding_and_a_summary(tmp_path: Path) -> None:
    sarif = tmp_path / "report.sarif"
    async with defective("cache-hints") as url:
        result = await check(url, "--json", "--sarif", sarif, "--skip", "slow-reader")
    assert (result.status, result.stderr) == (1, "")
    finding, summary = result.json_lines()
    assert (finding["type"], finding["rule"], finding["severity"]) == ("finding", "cache-hints", "error")
    assert finding["message"] == "the result of tools/list has no ttlMs"
    assert "ttlMs" not in finding["evidence"][0]["content"]["result"]
    assert summary["type"] == "summary"
    assert (summary["target"], summary["server"], summary["transport"]) == (url, "defective", "http")
    assert summary["failed"] == ["cache-hints"]
    assert {*summary["passed"], *summary["failed"], *summary["skipped"]} == RULES.keys() - {"slow-reader"}
    assert json.loads(sarif.read_text())["runs"][0]["results"][0]["ruleId"] == "cache-hints"


def test_the_rules_are_listed() -> None:
    lines = tidings("check", "--rules").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[rule.severity, rule.id] for rule in RULES.values()]
    (rule,) = tidings("check", "--rules", "--json", "--only", "told").json_lines()
    assert rule["clause"] == RULES["told"].clause_url
    assert rule["help"] == "docs/rules.md#told"


async def test_tokens_open_a_protected_server_and_are_never_printed(tmp_path: Path) -> None:
    (second := tmp_path / "second").write_text("bob-secret")
    tokens = {"alice-secret": 3600.0, "bob-secret": 3600.0}
    async with defective("cache-public", tokens) as url:
        result = await check(url, "--second-auth-token-file", second, "--json", token="alice-secret")
        header = await check(url, "--header", "Authorization: Bearer alice-secret", "--only", "cache-hints")
        refused = await check(url.replace("//", "//user:hunter2@"))
    assert result.status == 1
    finding, _ = result.json_lines()
    assert finding["message"] == "tools/list is public, and the two tokens get different results"
    assert "Authorization" not in result.stdout
    assert header.status == 0
    assert "hunter2" not in refused.stderr
    refused.check_error("can't be checked", "HTTP 401; give a token with --auth-token-file")


async def test_a_command_causes_the_change(tmp_path: Path) -> None:
    """The trigger is a command that changes the server through another client."""
    async with defective("told") as url:
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "change"}})
        (script := tmp_path / "change.py").write_text(
            f"import urllib.request as u; u.urlopen(u.Request({url!r}, {body!r}.encode()))"
        )
        result = await check(url, "--trigger", f"python3 {script}", "--json", "--timeout", 5, "--only", "told")
        failed = await check(url, "--trigger", "exit 3")
        unknown = await check(url, "--trigger", 'no-such-tool {"a": 1} 2>/dev/null', "--only", "told")
        unchanged = await check(url, "--trigger", "true", "--timeout", 1, "--only", "told")
    assert {finding["rule"] for finding in result.json_lines()[:-1]} == {"told"}
    failed.check_error("--trigger: the command ended with status 3")
    unknown.check_error("--trigger: the command ended with status 127; the server has no tool no-such-tool")
    assert "skipped  told: the trigger changed no list and no watched resource; see --uri" in unchanged.stdout


async def test_output_has_no_control_characters_of_the_server() -> None:
    server = DefectiveServer("list-order")
    server.tools += [EVIL]
    async with run_uvicorn(server, http="h11") as running:
        result = await check(f"http://127.0.0.1:{address_of(running)[1]}/mcp", "--only", "list-order")
    assert "has another order" in result.stdout
    assert "\x1b" not in result.stdout
    assert "\nerror\n" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the URL of a server, or a command"),
        (["http://127.0.0.1:1/mcp"], "http://127.0.0.1:1/mcp can't be checked: "),
        (["http://127.0.0.1:99999/mcp"], "is not a URL"),
        (["http://127.0.0.1:1/mcp", "--only", "tolled"], "there is no rule tolled; `tidings check --rules` lists them"),
        (["true", "--replica", "http://127.0.0.1:1/mcp"], "tokens and replicas are for a URL"),
        (["http://127.0.0.1:1/mcp", "--timeout", "0"], "Invalid value for '--timeout'"),
        (["true"], "true can't be checked: the process ended"),
        ([GARBAGE, "--timeout", "1"], "initialize was not answered within 1 s"),
        ([DEEP], 'it answered {"id": 1}'),
        (["true", "--only", "told", "--skip", "told"], "no rule is left; --only and --skip name the same"),
        (["true", "--trigger", " "], "--trigger: give a command, or the name of a tool of the server"),
        (["no-such-command"], "there is no command no-such-command"),
        (["/"], "tidings check 'tidings serve / --stdio'"),
    ],
)
async def test_a_target_that_cannot_be_checked_has_status_2(arguments: list[str], message: str) -> None:
    (await run_command("check", *arguments)).check_error(message)


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (
            307,
            {"Location": "https://user:hunter2@host/mcp?key=hunter2"},
            b"",
            "a redirect to https://host/mcp; check that",
        ),
        (
            200,
            {"Mcp-Session-Id": "\xe9"},
            b'{"id": 1, "result": {}}',
            "the Mcp-Session-Id of the server has characters",
        ),
        (200, {}, b"[" * 100_000, "initialize was answered with HTTP 200 [[[["),
        (200, {}, b'{"id": 1, "result": []}', 'it answered {"id": 1, "result": []}'),
        (200, {}, b'{"id": 1, "result": {"capabilities": {"tools": {}}}}', "can't be checked: tools/list was answered"),
        (500, {}, b"\x1b[31moops", "initialize was answered with HTTP 500 \\x1b[31moops"),
    ],
)
async def test_an_answer_that_is_none_of_mcp_has_status_2(
    status: int, headers: dict[str, str], body: bytes, message: str
) -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            is_modern = "mcp-method" in Request(scope).headers
            response = Response(status_code=404) if is_modern else Response(body, status, headers)
            await response(scope, receive, send)

    async with run_uvicorn(answer, http="h11") as running:
        result = await check(f"http://127.0.0.1:{address_of(running)[1]}/mcp")
    result.check_error(message)
    assert "hunter2" not in result.stderr


async def test_a_server_that_stops_answering_has_status_2() -> None:
    server = DefectiveServer()
    async with run_uvicorn(server, http="h11") as running:
        url = f"http://127.0.0.1:{address_of(running)[1]}/mcp"
        server.hang_after = 25
        result = await check(url, "--timeout", 1)
    assert result.status == 2
    assert "skipped" in result.stdout
    assert "tidings: not checked completely: " in result.stderr


async def test_ctrl_c_ends_the_check_and_its_server() -> None:
    target = forked_command("tests/support/defective_server.py")
    async with asyncio.timeout(DEADLINE), start_progress("--quiet-time", 600, "--", *target) as (process, screen):
        await screen.shows("Checking: silence while nothing changes")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert "Traceback" not in screen.raw
        assert await process.stdout.read() == b""


async def test_a_second_ctrl_c_kills_a_server_that_ignores_the_end_of_its_input_and_sigterm(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")  # each process holds it open
    ended = tmp_path / "ended"
    (script := tmp_path / "stubborn.sh").write_text(
        f"exec 9>{fifo}; trap '' TERM; \"$@\"; echo >> {ended}; while :; do sleep 1; done"
    )
    target = ("sh", script, *forked_command("tests/support/defective_server.py"))
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with asyncio.timeout(DEADLINE), start_progress("--quiet-time", 600, "--", *target) as (process, screen):
            await screen.shows("Checking: silence while nothing changes")
            process.send_signal(signal.SIGINT)
            await until(lambda: ended.exists() and ended.read_text() == "\n\n")  # the process of each era
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
            await until(lambda: not is_held_open(reading))
    finally:
        os.close(reading)


def is_held_open(fifo: int) -> bool:
    """Return whether a process can still write."""
    try:
        return os.read(fifo, 1) != b""
    except BlockingIOError:
        return True


@asynccontextmanager
async def start_progress(*arguments: object) -> AsyncIterator[Any]:
    """Start the command with a terminal as its standard error."""
    master, slave = pty.openpty()
    async with start_command("check", *arguments, stderr=slave, env={"TERM": "xterm-256color"}) as process:
        os.close(slave)
        screen = Screen(master)
        try:
            yield process, screen
        finally:
            screen.close()
