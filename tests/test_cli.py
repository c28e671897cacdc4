"""The command `tidings`, as its users meet it: processes that real clients talk to, and what is printed where."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from typer.testing import CliRunner, Result

from tidings.cli import main
from tidings.cli.commands import app
from tidings.cli.config import CLIENTS
from tidings.cli.config import Client as Program

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "workspace"
TIDINGS = str(Path(sys.executable).with_name("tidings"))
HELLO = 'def hello() -> str:\n    """Say hello."""\n    return "hello"\n'
TOKEN = "correct-horse-battery-staple"
DEADLINE = 40
GRACE = 20.0
"""Seconds for the end of a server, met only by one that does not end. How soon it does: test_live_stopping."""

pytestmark = pytest.mark.anyio


def tidings(*arguments: object, stdin: str | None = None) -> Result:
    """The command in this process: for what needs no process of its own."""
    return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)


@dataclass
class Served:
    process: asyncio.subprocess.Process
    url: str
    greeting: str

    async def line_with(self, text: str) -> str:
        return await line_with(self.process.stderr, text)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit status, if it comes in time."""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), GRACE)


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    assert stream is not None
    read: list[str] = []
    while line := (await stream.readline()).decode():
        read.append(line)
        if text in line:
            return line
    raise AssertionError(f"the process ended without saying {text!r}, but {read}")


@asynccontextmanager
async def started(*arguments: object, env: dict[str, str] | None = None, **pipes: Any) -> AsyncIterator[Any]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    environment = {**os.environ, **(env or {})}
    process = await asyncio.create_subprocess_exec(TIDINGS, *map(str, arguments), env=environment, **pipes)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def serving(folder: Path, *options: object, env: dict[str, str] | None = None) -> AsyncIterator[Served]:
    async with (
        asyncio.timeout(DEADLINE),
        started("serve", folder, "--port", 0, *options, env=env) as process,
    ):
        first = await line_with(process.stderr, "Serving")
        greeting = first
        while "Ctrl-C" not in greeting:
            greeting += (await process.stderr.readline()).decode()
        found = re.search(r"http://\S+", first)
        assert found is not None
        yield Served(process, found[0], greeting)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A copy of the example that may be changed."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "board"))


class Told:
    """What a client is told, in order."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, message: object) -> None:
        if (method := getattr(message, "method", None)) is not None:
            self.messages.put_nowait(str(method))

    async def until(self, method: str) -> None:
        while await self.messages.get() != method:
            pass


# Help


def test_help_needs_neither_the_sdk_nor_a_server() -> None:
    program = "import sys, tidings.cli.commands; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE
    )

    loaded = {name.split(".")[0] for name in found.stdout.split()}
    assert not loaded & {"asyncio", "mcp", "mcp_types", "uvicorn", "starlette", "rich", "jsonschema", "pydantic"}


def test_every_command_explains_itself_and_every_option() -> None:
    for command in ("serve", "new", "run-tool", "validate", "config"):
        help_text = tidings(command, "--help")
        assert help_text.exit_code == 0
        assert "Usage" in help_text.stdout
    page = (ROOT / "docs" / "serve.md").read_text()
    from typer.main import get_command

    for name, command in getattr(get_command(app), "commands").items():  # noqa: B009  # typer's classes don't say
        assert f"`tidings {name}" in page
        assert "--json" in [option for parameter in command.params for option in parameter.opts]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, (name, parameter.name)
                assert all(f"`{option}" in page for option in parameter.opts if option.startswith("--")), parameter.opts


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert tidings("--version").stdout == f"tidings {version('tidings')}\n"


def test_completion_is_offered_for_the_shell() -> None:
    # As a user does it: the shell is known by being the parent. With one command more, because it would else become it.
    command = ["bash", "-c", f'"{TIDINGS}" --show-completion && true']
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert "_TIDINGS_COMPLETE" in shown.stdout


# A workspace from the first command to the first client


async def test_a_new_workspace_is_valid_and_its_client_is_told_of_changes(tmp_path: Path) -> None:
    folder = tmp_path / "my server"
    made = tidings("new", folder, "--json")
    assert made.exit_code == 0
    files = json.loads(made.stdout)["files"]
    assert {"tidings.toml", "tools/greet.py", "tools/today.sh", "tools/report/tool.sh", "prompts/review.md"} <= set(
        files
    )

    checked = tidings("validate", folder, "--json")
    assert json.loads(checked.stdout) == {
        "workspace": str(folder),
        "items": {"tools": 3, "prompts": 1, "resources": 3},
        "problems": [],
    }
    assert checked.exit_code == 0

    printed = tidings("config", folder, "--client", "claude-code")
    server = json.loads(printed.stdout)["mcpServers"]["my-server"]
    assert Path(server["command"]).is_absolute()
    told = Told()
    parameters = StdioServerParameters(command=server["command"], args=server["args"])
    async with asyncio.timeout(DEADLINE), Client(stdio_client(parameters), message_handler=told) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"greet", "today", "report"}
        report = await client.call_tool("report")
        assert report.structured_content == {"files": 3, "bytes": sum(f.stat().st_size for f in resources_of(folder))}
        note = await client.read_resource("notes://first")
        assert "first note" in str(note.contents[0])
        prompt = await client.get_prompt("review", {"diff": "+1"})
        assert "+1" in str(prompt.messages[0].content)
        async with client.listen(tools_list_changed=True):
            (folder / "tools" / "hello.py").write_text(HELLO)
            await told.until("notifications/tools/list_changed")
            assert "hello" in {tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools}


def resources_of(folder: Path) -> list[Path]:
    return [path for path in (folder / "resources").rglob("*") if path.is_file()]


def test_new_overwrites_nothing_and_says_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "greet.py").write_text("mine")
    (tmp_path / "README.md").write_text("mine too")

    refused = tidings("new", tmp_path)

    assert refused.exit_code == 2
    assert str(tmp_path / "tools/greet.py") in refused.stderr
    assert str(tmp_path / "README.md") in refused.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["README.md", "greet.py", "tools"]
    assert (tmp_path / "tools" / "greet.py").read_text() == "mine"


def test_new_fills_a_folder_that_has_other_files(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("mine")

    assert tidings("new", tmp_path).exit_code == 0
    assert tidings("validate", tmp_path).exit_code == 0


def test_the_example_is_valid() -> None:
    assert tidings("validate", EXAMPLE).exit_code == 0


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
            async with httpx2.AsyncClient(headers=headers) as http:
                for answer in (await http.post(server.url, json={}), await http.get(server.url)):
                    assert answer.status_code == 401
                    assert answer.headers["www-authenticate"].startswith("Bearer")
        async with httpx2.AsyncClient(headers=bearer(TOKEN), timeout=DEADLINE) as http:
            for mode in ("legacy", "2026-07-28"):
                async with Client(streamable_http_client(server.url, http_client=http), mode=mode) as client:
                    result = await client.call_tool("leak")
                    assert getattr(result.content[0], "text", "").strip() == "0"
        (board / "tools" / "hello.py").write_text(HELLO)
        (board / "tools" / "broken.py").write_text("def (")
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
        (board / "tools" / "broken.py").write_text("def (")
        first = (await process.stderr.readline()).decode()
        while "Invalid" in first:  # the SDK's own warnings of the requests above
            first = (await process.stderr.readline()).decode()
        assert "warning: tools/broken.py:1: " in first
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        assert b"Traceback" not in await process.stderr.read()


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
}


async def connected(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0)
            continue
        writer.close()
        return


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_it_still_starts_ends_it_as_cleanly(board: Path, number: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with asyncio.timeout(DEADLINE), started("serve", board, "--port", port) as process:
        await connected(port)  # the port is bound before anything slow is done
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


def test_a_port_in_use_is_one_clear_line(board: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = tidings("serve", board, "--port", taken.getsockname()[1])

    assert refused.exit_code == 2
    assert re.fullmatch(r"tidings: port \d+ of 127.0.0.1 is in use; [^\n]+\n", refused.stderr)


@pytest.mark.parametrize("command", [["serve"], ["validate"], ["config", "--client", "cursor"], ["run-tool"]])
def test_a_folder_that_is_none_is_one_clear_line(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder, word in ((tmp_path / "missing", "is not there; `tidings new"), (file, "is not a folder")):
        refused = tidings(*command, folder, *(["greet"] if command == ["run-tool"] else []))
        assert refused.exit_code == 2
        assert word in refused.stderr
        assert refused.stderr.count("\n") == 1


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
        (board / "tools" / "noisy.py").write_text(noise + HELLO.replace("hello", "hi"))
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


# run-tool


def test_run_tool_prints_the_text_and_progress_elsewhere(tmp_path: Path) -> None:
    tidings("new", tmp_path)

    assert tidings("run-tool", tmp_path, "greet", "--arg", "name=42", "--arg", "excited=true").stdout == "Hello, 42!\n"
    assert tidings("run-tool", tmp_path, "greet", "--args", '{"name": "Ada"}').stdout == "Hello, Ada.\n"
    assert tidings("run-tool", tmp_path, "greet", "--args", "-", stdin='{"name": "Eve"}').stdout == "Hello, Eve.\n"
    report = tidings("run-tool", tmp_path, "report", "--json")
    assert json.loads(report.stdout)["structuredContent"]["files"] == 3
    assert report.stderr == "1/2 counting files\n2/2 counting bytes\n"


def test_run_tool_ends_with_1_when_the_tool_failed(board: Path) -> None:
    (board / "tools" / "fail.sh").write_text("#!/bin/sh\necho half; echo 'no such board' >&2; exit 3\n")
    (board / "tools" / "fail.sh").chmod(0o755)

    failed = tidings("run-tool", board, "fail")

    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "no such board" in failed.stderr
    assert json.loads(tidings("run-tool", board, "fail", "--json").stdout)["isError"] is True
    assert tidings("run-tool", board, "add_task").exit_code == 1  # an argument is missing


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["add_tsk"], "there is add_task"),
        (["add_task", "--args", "{"], "not JSON"),
        (["add_task", "--args", "[]"], "one JSON object"),
        (["add_task", "--arg", "title"], "NAME=VALUE"),
    ],
)
def test_run_tool_ends_with_2_when_the_command_is_wrong(board: Path, arguments: list[str], word: str) -> None:
    refused = tidings("run-tool", board, *arguments)

    assert refused.exit_code == 2
    assert word in refused.stderr
    assert refused.stdout == ""


def test_run_tool_says_why_a_tool_is_missing(board: Path) -> None:
    (board / "tools" / "deploy.py").write_text("def deploy(target) -> str:\n    return target\n")

    assert "tools/deploy.py:1: deploy: parameter 'target'" in tidings("run-tool", board, "deploy").stderr


# validate


def test_validate_names_file_and_line_of_all_that_is_wrong(board: Path) -> None:
    (board / "tools" / "broken.py").write_text("def fine() -> str:\n    return ''\n\ndef broken(:\n")
    (board / "tools" / "other.py").write_text("def add_task(title: str) -> str:\n    return title\n")
    (board / "tools" / "plain.sh").write_text("#!/bin/sh\necho\n")
    (board / "prompts" / "bad.md").write_text("---\ndescription: [\n---\n")
    (board / "tidings.toml").write_text('name = "board"\nnmae = 1\n')

    found = tidings("validate", board)
    as_json = tidings("validate", board, "--json")

    assert found.exit_code == as_json.exit_code == 1
    lines = found.stdout.splitlines()
    for place in ("tools/broken.py:4:", "tools/other:1:", "tools/plain.sh:1:", "tidings.toml:2:"):
        assert any(line.startswith(f"{board}/{place} ") for line in lines), (place, lines)
    assert any(re.match(rf"{board}/prompts/bad.md:\d: ", line) for line in lines)
    assert "5 problems" in lines[-1]
    assert "\x1b" not in found.stdout
    problems = json.loads(as_json.stdout)["problems"]
    assert len(problems) == 5
    assert ("tools/broken.py", 4) in {(problem["path"], problem["line"]) for problem in problems}


def test_what_a_file_prints_is_not_among_the_results(board: Path) -> None:
    (board / "tools" / "noisy.py").write_text(f'print("noise")\n{HELLO}')

    for command in (["validate", str(board), "--json"], ["run-tool", str(board), "hello", "--json"]):
        printed = subprocess.run([TIDINGS, *command], capture_output=True, text=True, check=True, timeout=DEADLINE)
        json.loads(printed.stdout)
        assert "noise" in printed.stderr


# config


def test_every_client_has_a_format() -> None:
    assert set(CLIENTS) == set(Program)


@pytest.mark.parametrize("client", list(Program))
@pytest.mark.parametrize(
    "options", [[], ["--http", "http://127.0.0.1:8765/mcp"], ["--http", "https://x/mcp", "--auth"]]
)
def test_config_prints_what_the_client_can_read(client: Program, options: list[str], tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" \\ ü'
    folder.mkdir()

    printed = tidings("config", folder, "--client", client, "--name", "it", *options)

    assert printed.exit_code == 0
    settings = tomllib.loads(printed.stdout) if client is Program.CODEX else json.loads(printed.stdout)
    entry = settings[CLIENTS[client].member]["it"]
    text = json.dumps(entry, ensure_ascii=False)
    if options:
        assert options[1] in text
        assert ("Bearer" in text or "bearer_token_env_var" in text) is ("--auth" in options)
    else:
        words = entry["command"] if client is Program.OPENCODE else [entry["command"], *entry["args"]]
        assert words[-3:] == ["serve", str(folder), "--stdio"]
        assert Path(words[0]).is_absolute()
    assert printed.stderr.startswith("For ")
    whole = json.loads(tidings("config", folder, "--client", client, "--name", "it", "--json", *options).stdout)
    assert whole["settings"] == settings
    assert whole["where"] in printed.stderr


def test_config_refuses_what_it_cannot_mean(board: Path) -> None:
    for options, word in ((["--auth"], "--http"), (["--http", "localhost"], "whole URL")):
        refused = tidings("config", board, "--client", "cursor", *options)
        assert refused.exit_code == 2
        assert word in refused.stderr
    unknown = tidings("config", board, "--client", "emacs")
    assert unknown.exit_code == 2
    assert "claude-desktop" in unknown.stderr
