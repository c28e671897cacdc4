"""`tidings serve` over HTTP: as a process with real clients, its exit on a signal, and the options that it refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from typer.main import get_command

from tests.support.command import (
    DEADLINE,
    GRACE,
    HELLO,
    INITIALIZE,
    ROOT,
    TOKEN,
    Notifications,
    replace_file,
    run_command,
    serving,
    start_command,
    start_process,
    tidings,
)
from tests.support.waiting import free_port, until, until_served
from tidings.cli.commands import make_app

pytestmark = pytest.mark.anyio


def test_default_address_is_local() -> None:
    command = getattr(get_command(make_app()), "commands")["serve"]  # noqa: B009  # typer does not declare it
    defaults = {parameter.name: parameter.default for parameter in command.params}
    assert (defaults["host"], defaults["port"], defaults["path"]) == ("127.0.0.1", 8765, "/mcp")


def test_make_run_serves_a_copy_of_the_example() -> None:
    plan = subprocess.run(["make", "-n", "run"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert "cp -R examples/workspace .run/workspace" in plan.stdout
    assert "tidings serve .run/workspace" in plan.stdout
    assert "/.run/" in (ROOT / ".gitignore").read_text()


async def test_new_file_reaches_clients_of_both_eras_and_ctrl_c_ends_their_streams(board: Path) -> None:
    async with serving(board) as server:
        assert "2 tools" in server.greeting or "3 tools" in server.greeting
        assert f"config {board} --client" in server.greeting
        modern, legacy = Notifications(), Notifications()
        async with (
            Client(server.url, message_handler=modern) as first,
            Client(server.url, mode="legacy", message_handler=legacy) as second,
        ):
            assert first.protocol_version == "2026-07-28"
            for feature in ("tools", "prompts", "resources"):  # a workspace announces its lists to a legacy session
                await legacy.until(f"notifications/{feature}/list_changed")
            with pytest.warns(match="resources/subscribe is removed"):
                await second.session.subscribe_resource("workspace:///sprint.md")
            async with first.listen(tools_list_changed=True, resource_subscriptions=["workspace:///sprint.md"]) as told:
                (board / "tools" / "hello.py").write_text(HELLO)
                for notifications in (modern, legacy):
                    await notifications.until("notifications/tools/list_changed")
                await server.line_with("tool hello added")
                result = await first.call_tool("add_task", {"title": "Ship it"})
                assert getattr(result.content[0], "text", None) == "2 tasks"
                for notifications in (modern, legacy):
                    await notifications.until("notifications/resources/updated")
                server.process.send_signal(signal.SIGINT)
                async for _ in told:
                    pass  # the server ends the stream; a connection that is cut off would raise
                await asyncio.wait_for(server.process.wait(), GRACE)
        await server.stop()
        assert server.process.stdout is not None
        assert await server.process.stdout.read() == b""


@pytest.mark.parametrize("given", ["variable", "file"])
async def test_only_callers_with_the_token_are_accepted(board: Path, tmp_path: Path, given: str) -> None:
    (board / "tools" / "leak.sh").write_text("#!/bin/sh\nenv | grep -c '^TIDINGS_AUTH' || true\n")
    (board / "tools" / "leak.sh").chmod(0o755)
    (board / "tidings.toml").write_text('[tools]\nenv = ["TIDINGS_*"]\n')
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    options = ["--auth-token-file", file] if given == "file" else []
    env = {"TIDINGS_AUTH_TOKEN": TOKEN} if given == "variable" else {}
    async with serving(board, "--host", "0.0.0.0", "--log-level", "warning", *options, env=env) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert TOKEN not in server.greeting
        for headers in ({}, bearer("wrong"), bearer(TOKEN[:-1]), bearer(f"{TOKEN}x"), {"Authorization": TOKEN}):
            async with httpx2.AsyncClient(headers=headers, timeout=DEADLINE) as http:
                for answer in (await http.post(server.url, json={}), await http.get(server.url)):
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"].startswith("Bearer")
        async with httpx2.AsyncClient(headers=bearer(TOKEN), timeout=DEADLINE) as http:
            for mode in ("legacy", "2026-07-28"):
                async with Client(streamable_http_client(server.url, http_client=http), mode=mode) as client:
                    result = await client.call_tool("leak")
                    assert getattr(result.content[0], "text", "").strip() == "0"
        replace_file(board / "tools" / "hello.py", HELLO)
        replace_file(board / "tools" / "broken.py", "def (")
        assert server.process.stderr is not None
        first = (await server.process.stderr.readline()).decode()
        assert "warning: tools/broken.py:1: " in first  # and no line about the new tool, which has the level info
        await server.stop()


async def test_each_problem_and_each_new_resource_has_one_line_in_the_log_and_the_history(board: Path) -> None:
    (board / "tools" / "broken.py").write_text("def (")
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--port", 0) as process:
        lines: list[str] = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append((await process.stderr.readline()).decode())
        replace_file(board / "resources" / "new.txt", "new")
        while "content of workspace:///last.txt" not in lines[-1]:
            lines.append((await process.stderr.readline()).decode())
            if "resource workspace:///new.txt added" in lines[-1]:
                replace_file(board / "resources" / "last.txt", "first")
            if "resource workspace:///last.txt added" in lines[-1]:
                replace_file(board / "resources" / "last.txt", "second")
        process.send_signal(signal.SIGTERM)
        await process.wait()
    log = "".join(lines)
    assert log.count("broken.py") == 1
    assert log.count("new.txt") == 1
    assert (await run_command("history", board, "--limit", 0)).stdout.count("new.txt") == 1


@pytest.mark.parametrize("options", [[], ["--stdio"]])
def test_current_folder_that_is_no_workspace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tidings("serve", *options).check_error("is not a workspace", "tools", "tidings new DIR")


def test_state_file_in_a_missing_folder_is_refused(board: Path, tmp_path: Path) -> None:
    refused = tidings("serve", board, "--port", 0, "--state", tmp_path / "missing" / "state.db")
    refused.check_error("--state", "missing does not exist; create it")
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel shows environments only on Linux")
@pytest.mark.parametrize("options", [["--port", "0", "--quiet", "--json"], ["--stdio"]], ids=["http", "stdio"])
async def test_token_is_not_in_the_environment_that_the_kernel_shows(board: Path, options: list[str]) -> None:
    command = (sys.executable, "-m", "tidings", "serve", board, *options)
    env = {"TIDINGS_AUTH_TOKEN": TOKEN, "TIDINGS_OTHER": "kept"}
    async with asyncio.timeout(DEADLINE), start_process(*command, env=env, stdin=subprocess.PIPE) as process:
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")  # HTTP ignores it
        first = json.loads(await process.stdout.readline())
        environment = await asyncio.to_thread(Path(f"/proc/{process.pid}/environ").read_bytes)
        assert TOKEN.encode() not in environment
        assert b"TIDINGS_OTHER=kept" in environment
        if "--stdio" not in options:
            async with httpx2.AsyncClient(timeout=DEADLINE) as http:
                assert (await http.post(first["url"], json={})).status_code == 401


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_address_that_is_not_local_requires_a_token(board: Path, host: str) -> None:
    refused = tidings("serve", board, "--host", host, "--port", 0)
    refused.check_error("runs the tools", "--auth-token-file", "--insecure")


@pytest.mark.parametrize("host", ["127.0.0.2", "0:0:0:0:0:0:0:1", "::1", "localhost", "127.1"])
async def test_local_address_in_any_notation_accepts_only_local_hosts_and_origins(board: Path, host: str) -> None:
    headers = {"Accept": "application/json, text/event-stream"}
    async with serving(board, "--host", host) as server, httpx2.AsyncClient(timeout=DEADLINE, headers=headers) as http:
        cases: list[tuple[dict[str, str], int]] = [
            ({}, 200),
            ({"Host": "localhost:1"}, 200),
            ({"Host": "evil.example.com"}, 421),
            ({"Origin": "https://evil.example.com"}, 403),
        ]
        for given, status in cases:
            answer = await http.post(server.url, json=INITIALIZE, headers=given)
            assert answer.status_code == status, given
        await server.stop()


async def test_control_characters_in_the_name_of_the_server_are_escaped(board: Path) -> None:
    (board / "tidings.toml").write_text('name = "a\\u001b[2J\\nb"\n')
    async with serving(board) as server:
        assert r"Serving a\x1b[2J\nb on http" in server.greeting
        await server.stop()


async def test_allowed_hosts_and_origins_are_accepted_and_quiet_prints_only_warnings(board: Path) -> None:
    options = ["--allow-host", "board.example.com", "--allow-origin", "https://app.example.com", "--path", "/board"]
    async with (
        asyncio.timeout(DEADLINE),
        start_command("serve", board, "--port", 0, "--quiet", "--json", *options) as process,
        httpx2.AsyncClient(timeout=DEADLINE) as http,
    ):
        printed = json.loads(await process.stdout.readline())
        url = printed["url"]
        assert printed == {"name": "board", "workspace": str(board), "url": url}
        port = httpx2.URL(url).port
        assert url == f"http://127.0.0.1:{port}/board"
        cases: list[tuple[dict[str, str], int]] = [
            ({"Host": "board.example.com"}, 200),
            ({"Host": f"board.example.com:{port}"}, 200),
            ({"Origin": "https://app.example.com"}, 200),
            ({"Origin": f"http://localhost:{port}"}, 200),
            ({"Host": "evil.example.com"}, 421),
            ({"Host": "board.example.com.evil.com"}, 421),
            ({"Origin": "https://evil.example.com"}, 403),
        ]
        for headers, status in cases:
            answer = await http.post(
                url, json=INITIALIZE, headers={"Accept": "application/json, text/event-stream", **headers}
            )
            assert answer.status_code == status, headers
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, is_allowed in (("https://app.example.com", True), ("https://evil.example.com", False)):
            answer = await http.options(url, headers={"Origin": origin, **preflight})
            assert (answer.headers.get("access-control-allow-origin") == origin) is is_allowed
        replace_file(board / "tools" / "broken.py", "def (")
        first = (await process.stderr.readline()).decode()
        while "Invalid" in first:  # the SDK's warnings about the requests above
            first = (await process.stderr.readline()).decode()
        assert "warning: tools/broken.py:1: " in first
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        assert b"Traceback" not in await process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_during_start_ends_the_server_with_status_0(board: Path, number: signal.Signals) -> None:
    port = free_port()
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--port", port) as process:
        await until_served(port)  # the port is bound before the slow part of the start
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        assert b"Traceback" not in await process.stderr.read()


async def test_second_ctrl_c_prints_no_traceback(board: Path) -> None:
    started, may_end = board / "started", board / "may_end"
    (board / "tools" / "slow.py").write_text(
        "import pathlib, threading\ndef slow() -> str:\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        f"    while not pathlib.Path({str(may_end)!r}).exists():\n        threading.Event().wait(0.01)\n"
        "    return 'done'\n"
    )
    async with serving(board) as server:

        async def call() -> None:
            async with Client(server.url) as client:
                await client.call_tool("slow")

        calling = asyncio.create_task(call())
        await until(started.exists)
        server.process.send_signal(signal.SIGINT)
        await server.line_with("stopping")
        server.process.send_signal(signal.SIGINT)
        await server.stop()  # checks that there is no traceback
        may_end.touch()
        await asyncio.gather(calling, return_exceptions=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_port_in_use_is_a_one_line_error(board: Path, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tidings("serve", board, "--host", host, "--port", port).check_error(f"port {port} of 127.0.0.1 is in use; ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "mcp"], "must start with a slash"),
        *((["--path", path], "must not contain") for path in ("/mcp?x=1", "/{x}", "/a b", "/a#b", "/%20")),
        (["--auth-token", "two words"], "one word"),
        (["--auth-token", ""], "one word"),
        (["--auth-token-file", "/nowhere"], "can't be read"),
        (["--auth-token", "a", "--auth-token-file", "/dev/null"], "exclude each other"),
        (["--allow-origin", "*"], "--allow-origin"),
        (["--allow-host", "http://x"], "--allow-host"),
        (["--host", "no.such.host.invalid", "--insecure"], "not an address"),
        (["--stdio"], "--port is for HTTP"),
    ],
)
def test_invalid_option_is_a_one_line_error(board: Path, options: list[str], message: str) -> None:
    tidings("serve", board, "--port", "0", *options).check_error(message)
