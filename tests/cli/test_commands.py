"""The commands of `tidings` that end by themselves: what each prints, where, and with which status it ends.

What `tidings serve` does is in test_cli_serve; the commands that ask a server, in test_cli_history.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.command import DEADLINE, EXAMPLE, HELLO, ROOT, TIDINGS, Told, board, tidings
from tidings.cli.commands import app
from tidings.cli.config import CLIENTS
from tidings.cli.config import Client as Program

__all__ = ["board"]

pytestmark = pytest.mark.anyio


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


@pytest.mark.parametrize("command", [["serve"], ["validate"], ["config", "--client", "cursor"], ["run-tool"]])
def test_a_folder_that_is_none_is_one_clear_line(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder, word in ((tmp_path / "missing", "is not there; `tidings new"), (file, "is not a folder")):
        refused = tidings(*command, folder, *(["greet"] if command == ["run-tool"] else []))
        assert refused.exit_code == 2
        assert word in refused.stderr
        assert refused.stderr.count("\n") == 1


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
