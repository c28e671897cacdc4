"""`tidings serve`, as its users meet it: a process that real clients talk to, over HTTP and on stdio, its status on a
terminal, its end on a signal, and what it refuses to begin with.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.support.command import (
    DEADLINE,
    GRACE,
    HELLO,
    INITIALIZE,
    ROOT,
    TIDINGS,
    TOKEN,
    Told,
    board,
    drop,
    serving,
    started,
    tidings,
)
from tests.support.waiting import until_served
from tidings.cli import main
from tidings.cli.commands import app

__all__ = ["board"]

pytestmark = pytest.mark.anyio


# serve, over HTTP


def test_it_is_served_locally_unless_told_otherwise() -> None:
    from typer.main import get_command

    command = getattr(get_command(app), "commands")["serve"]  # noqa: B009  # typer's classes don't say
    defaults = {parameter.name: parameter.default for parameter in command.params}
    assert (defaults["host"], defaults["port"], defaults["path"]) == ("127.0.0.1", 8765, "/mcp")


def test_make_run_serves_the_example_and_leaves_the_checkout_as_it_is() -> None:
    said = subprocess.run(["make", "-n", "run"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert "cp -R examples/workspace .run/workspace" in said.stdout
    assert "tidings serve .run/workspace" in said.stdout
    assert "/.run/" in (ROOT / ".gitignore").read_text()


async def test_a_dropped_file_reaches_clients_of_both_eras_and_ctrl_c_ends_their_streams(board: Path) -> None:
    async with serving(board) as server:
        assert "2 tools" in server.greeting or "3 tools" in server.greeting
        assert f"config {board} --client" in server.greeting
        modern, legacy = Told(), Told()
        async with (
            Client(server.url, message_handler=modern) as first,
            Client(server.url, mode="legacy", message_handler=legacy) as second,
        ):
            assert first.protocol_version == "2026-07-28"
            for feature in ("tools", "prompts", "resources"):  # a workspace announces itself to a legacy session
                await legacy.until(f"notifications/{feature}/list_changed")
            with pytest.warns(match="resources/subscribe is removed"):
                await second.session.subscribe_resource("workspace:///sprint.md")
            async with first.listen(tools_list_changed=True, resource_subscriptions=["workspace:///sprint.md"]) as told:
                (board / "tools" / "hello.py").write_text(HELLO)
                for ear in (modern, legacy):
                    await ear.until("notifications/tools/list_changed")
                await server.line_with("tool hello added")
                result = await first.call_tool("add_task", {"title": "Ship it"})
                assert getattr(result.content[0], "text", None) == "2 tasks"
                for ear in (modern, legacy):
                    await ear.until("notifications/resources/updated")
                server.process.send_signal(signal.SIGINT)
                async for _ in told:
                    pass  # until the server ends the stream: were it cut off, this would raise
                assert await asyncio.wait_for(server.process.wait(), GRACE) == 0
        rest = (await server.process.stderr.read()).decode() if server.process.stderr else ""
        assert "Traceback" not in rest
        assert server.process.stdout is not None
        assert await server.process.stdout.read() == b""


@pytest.mark.parametrize("given", ["variable", "file"])
async def test_a_token_lets_in_who_has_it_and_nobody_else(board: Path, tmp_path: Path, given: str) -> None:
    (board / "tools" / "leak.sh").write_text("#!/bin/sh\nenv | grep -c '^TIDINGS_AUTH' || true\n")
    (board / "tools" / "leak.sh").chmod(0o755)
    (board / "tidings.toml").write_text('[tools]\nenv = ["TIDINGS_*"]\n')
    secret = tmp_path / "token"
    secret.write_text(f"{TOKEN}\n")
    options = ["--auth-token-file", secret] if given == "file" else []
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
        drop(board / "tools" / "hello.py", HELLO)
        drop(board / "tools" / "broken.py", "def (")
        assert server.process.stderr is not None
        first = (await server.process.stderr.readline()).decode()
        assert "warning: tools/broken.py:1: " in first  # and not that a tool was added, which is information
        assert await server.end(signal.SIGTERM) == 0


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_an_address_that_others_can_reach_needs_a_token(board: Path, host: str) -> None:
    refused = tidings("serve", board, "--host", host, "--port", 0)

    assert refused.exit_code == 2
    assert refused.stderr.count("\n") == 1
    for word in ("runs its tools", "--auth-token-file", "--insecure"):
        assert word in refused.stderr


async def test_hosts_and_origins_are_let_in_by_name_and_quiet_says_nothing(board: Path) -> None:
    options = ["--allow-host", "board.example.com", "--allow-origin", "https://app.example.com", "--path", "/board"]
    async with (
        asyncio.timeout(DEADLINE),
        started("serve", board, "--port", 0, "--quiet", "--json", *options) as process,
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
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, is_let_in in (("https://app.example.com", True), ("https://evil.example.com", False)):
            answer = await http.options(url, headers={"Origin": origin, **asked})
            assert (answer.headers.get("access-control-allow-origin") == origin) is is_let_in
        drop(board / "tools" / "broken.py", "def (")
        first = (await process.stderr.readline()).decode()
        while "Invalid" in first:  # the SDK's own warnings of the requests above
            first = (await process.stderr.readline()).decode()
        assert "warning: tools/broken.py:1: " in first
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        assert b"Traceback" not in await process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_it_still_starts_ends_it_as_cleanly(board: Path, number: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with asyncio.timeout(DEADLINE), started("serve", board, "--port", port) as process:
        await until_served(port)  # the port is bound before anything slow is done
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        assert b"Traceback" not in await process.stderr.read()


async def test_a_tool_that_nothing_can_interrupt_does_not_keep_the_server(board: Path) -> None:
    begun = "print('begun', file=sys.stderr, flush=True)"
    stuck = f"import sys, time\n\ndef stuck() -> None:\n    {begun}\n    time.sleep(600)\n"
    (board / "tools" / "stuck.py").write_text(stuck)
    async with serving(board) as server, Client(server.url) as client:
        call = asyncio.create_task(client.call_tool("stuck"))
        await server.line_with("begun")
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.process.wait(), GRACE) == 0
        assert server.process.stderr is not None
        assert b"Traceback" not in await server.process.stderr.read()
        call.cancel()


@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_a_port_in_use_is_one_clear_line(board: Path, host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = tidings("serve", board, "--host", host, "--port", taken.getsockname()[1])

    assert refused.exit_code == 2
    assert re.fullmatch(r"tidings: port \d+ of 127.0.0.1 is in use; [^\n]+\n", refused.stderr)


def test_a_folder_that_may_not_be_read_is_one_clear_line(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything, and tests may run as root: so the system's answer is put in its mouth.
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    refused = tidings("serve", board)

    assert refused.exit_code == 2
    assert re.fullmatch(r"tidings: \S+ can't be read: permission denied\n", refused.stderr)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--path", "mcp"], "begin with a slash"),
        *((["--path", path], "no request") for path in ("/mcp?x=1", "/{x}", "/a b", "/a#b", "/%20")),
        (["--auth-token", "two words"], "one word"),
        (["--auth-token", ""], "one word"),
        (["--auth-token-file", "/nowhere"], "can't be read"),
        (["--auth-token", "a", "--auth-token-file", "/dev/null"], "two tokens"),
        (["--allow-origin", "*"], "--allow-origin"),
        (["--allow-host", "http://x"], "--allow-host"),
        (["--host", "no.such.host.invalid", "--insecure"], "no address"),
        (["--stdio"], "--port is for HTTP"),
    ],
)
def test_an_option_that_cannot_be_meant_is_one_clear_line(
    board: Path, options: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [TIDINGS, "serve", str(board), "--port", "0", *options])

    with pytest.raises(SystemExit) as refused:
        main()

    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert word in said
    assert re.fullmatch(r"tidings: [^\n]+\n", said)


# serve, on standard input and output


async def test_on_stdio_nothing_but_the_protocol_is_on_stdout(board: Path) -> None:
    noise = 'import os\nprint("noise")\nos.write(1, b"noise")\nos.system("echo noise")\n'
    (board / "tools" / "noisy.py").write_text(noise + HELLO.replace("return", 'print("noise"); return'))
    async with (
        asyncio.timeout(DEADLINE),
        started("serve", board, "--stdio", stdin=subprocess.PIPE) as process,
    ):
        requests = [
            INITIALIZE,
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "hello", "arguments": {}}},
        ]
        for request in requests:
            process.stdin.write(json.dumps(request).encode() + b"\n")
        answers: list[dict[str, Any]] = []
        while not any(answer.get("id") == 2 for answer in answers):
            answers.append(json.loads(await process.stdout.readline()))
        assert [answer["result"] for answer in answers if "id" in answer][1]["content"][0]["text"] == "hello"
        drop(board / "tools" / "noisy.py", noise + HELLO.replace("hello", "hi"))
        while True:
            answer = json.loads(await process.stdout.readline())
            changes = answer.get("params", {}).get("changes", [])
            if {change["tool"]["name"]: change["operation"] for change in changes} == {
                "hello": "removed",
                "hi": "added",
            }:
                break
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        assert await process.stdout.read() == b""
        said = (await process.stderr.read()).decode()
        assert "noise" in said
        assert "tool hi added" in said


# The status on a terminal


async def test_on_a_terminal_the_status_shows_items_clients_changes_and_problems(board: Path) -> None:
    master, slave = pty.openpty()
    env = {"TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "120", "LINES": "40"}
    async with asyncio.timeout(DEADLINE), started("serve", board, "--port", 0, stderr=slave, env=env) as process:
        os.close(slave)
        screen = Screen(master)
        try:
            url = (await screen.shows(r"Serving board on (http://\S+)"))[1]
            await screen.shows(r"items +3 tools, 1 prompt, 1 resource\b")
            await screen.shows(r"clients +0 modern streams, 0 legacy sessions")
            (board / "tools" / "hello.py").write_text(HELLO)
            await screen.shows(r"items +4 tools")
            await screen.shows(r"changes +\d\d:\d\d:\d\d  tool hello added")
            (board / "tools" / "hello.py").write_text("def (")
            await screen.shows(r"problems +tools/hello.py:1: ")
            async with Client(url) as client, client.listen(tools_list_changed=True):
                await screen.shows(r"1 modern stream,")
                async with Client(url, mode="legacy"):
                    await screen.shows(r"1 modern stream, 1 legacy session\b")
            await screen.shows(r"0 modern streams,")
            assert not re.search(r"\x1b\[([0-9;]*;)?[349][0-9]m", screen.raw)  # NO_COLOR
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), GRACE) == 0
            assert "Traceback" not in screen.text
            assert "\x1b[?25h" in await screen.rest()  # the cursor is there again
        finally:
            screen.close()


class Screen:
    """What a program writes to its terminal, and the text of it without control sequences."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._seen = 0
        self._more = asyncio.Event()
        self._is_over = False
        self.raw = ""
        self.text = ""
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is gone
            chunk = b""
        if not chunk:
            self._is_over = True
            asyncio.get_running_loop().remove_reader(self._master)
        self.raw += chunk.decode("utf-8", "replace")
        self.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)
        self._more.set()

    async def shows(self, pattern: str) -> re.Match[str]:
        """Wait until this is drawn, after what was waited for before."""
        while not (found := re.compile(pattern).search(self.text, self._seen)):
            assert not self._is_over, self.text
            self._more.clear()
            await self._more.wait()
        self._seen = found.start()
        return found

    async def rest(self) -> str:
        while not self._is_over:
            self._more.clear()
            await self._more.wait()
        return self.raw

    def close(self) -> None:
        if not self._is_over:
            asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
