"""`tidings serve --stdio`: it starts fast, and writes only protocol messages to standard output."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.imports import import_times
from tests.support.command import DEADLINE, GRACE, HELLO, INITIALIZE, TIDINGS, replace_file, start_command, tidings
from tests.support.forking import forked_command
from tests.support.messages import modern_message

BARE = """
from mcp.server.mcpserver import MCPServer
MCPServer("bare").run("stdio")
"""

STARTS = [
    pytest.param([INITIALIZE], id="legacy", marks=pytest.mark.slow),
    pytest.param([modern_message("server/discover", 1), modern_message("tools/list", 2)], id="modern"),
]


@pytest.mark.parametrize("requests", STARTS)
def test_first_answer_imports_only_the_sdk_typer_and_tidings(tmp_path: Path, requests: list[dict[str, Any]]) -> None:
    """A bare server of the SDK is the baseline."""
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "hello.sh"
    script.write_text("#!/bin/sh\n# @describe Say hello\n# @arg name:string! To whom\necho hello\n")
    script.chmod(0o755)

    def imported(*command: str) -> set[str]:
        return {name.split(".")[0] for name in import_times(requests, *command)}

    ours = imported("-m", "tidings", "serve", str(tmp_path), "--stdio")
    allowed = {"tidings", "msgspec", "sqlite3", "_sqlite3", "gc", "runpy"}
    typer = {"typer", "click", "annotated_doc", "difflib", "shellingham"}
    # uvloop costs 5 ms once, and saves 10 % per message.
    assert ours - imported("-c", BARE) <= allowed | typer | {"uvloop"}


@pytest.mark.anyio
async def test_stdout_contains_only_protocol_messages(board: Path) -> None:
    noise = 'import os\nprint("noise")\nos.write(1, b"noise")\nos.system("echo noise")\n'
    (board / "tools" / "noisy.py").write_text(noise + HELLO.replace("return", 'print("noise"); return'))
    async with (
        asyncio.timeout(DEADLINE),
        start_command("serve", board, "--stdio", stdin=subprocess.PIPE) as process,
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
        replace_file(board / "tools" / "noisy.py", noise + HELLO.replace("hello", "hi"))
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
        log = (await process.stderr.read()).decode()
        assert "noise" in log
        assert "tool hi added" in log


def test_thread_of_a_tool_does_not_keep_the_process(board: Path) -> None:
    source = "import threading\ndef start() -> str:\n    threading.Thread(target=threading.Event().wait).start()\n"
    (board / "tools" / "threads.py").write_text(source + '    return "started"\n')
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "start", "arguments": {}}}
    requests = [INITIALIZE, {"jsonrpc": "2.0", "method": "notifications/initialized"}, call]
    result = subprocess.run(
        forked_command(TIDINGS, "serve", board, "--stdio"),
        input="".join(f"{json.dumps(request)}\n" for request in requests),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=GRACE,
    )
    assert "started" in result.stdout


def test_the_variable_of_mcp_bash_names_the_folder(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCPBASH_PROJECT_ROOT", str(board))

    process = subprocess.run(
        forked_command(TIDINGS, "serve", "--stdio"),
        input=f"{json.dumps(INITIALIZE)}\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=GRACE,
    )
    assert json.loads(process.stdout)["result"]["serverInfo"]["name"] == board.name
    assert json.loads(tidings("validate", "--json").stdout)["workspace"] == str(board)
