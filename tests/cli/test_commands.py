"""Common behaviour of all commands: help, completion, one-line errors, and a fast start. Covers `options.py` and
`output.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.support.command import DEADLINE, EXAMPLE, HELLO, ROOT, TIDINGS, tidings
from tests.support.forking import forked_command
from tidings.cli.commands import make_app


def test_help_imports_neither_the_sdk_nor_a_server() -> None:
    program = "import sys, tidings.cli.commands as cli; cli.make_app(); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE
    )

    loaded = {name.split(".")[0] for name in result.stdout.split()}
    unwanted = {"mcp", "mcp_types", "uvicorn", "starlette", "httpx2", "pydantic", "jsonschema", "sqlite3"}
    assert not loaded & {"asyncio", "rich", *unwanted}


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all commands, with the names of their groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_every_command_and_option_has_help_and_documentation() -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    for name, command in commands(get_command(make_app())):
        printed = tidings(*name.split(), "--help").stdout
        assert "Usage" in printed
        assert "<bool>" not in printed
        assert f"`tidings {name}" in page
        assert "--json" in [option for parameter in command.params for option in parameter.opts]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help, (name, parameter.name)
                assert all(f"`{option}" in page for option in parameter.opts if option.startswith("--")), parameter.opts


def test_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert tidings("--version").stdout == f"tidings {version('tidings')}\n"


def test_completion_is_available_for_the_shell() -> None:
    # Typer detects the shell from the parent process. Bash would replace itself with a single command.
    command = ["bash", "-c", f'"{TIDINGS}" --show-completion && true']
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert "_TIDINGS_COMPLETE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sevre"], "No such command 'sevre'. Did you mean 'serve'?; see `tidings --help`"),
        (["serve", "--prot", "1"], "No such option: --prot"),
        (["serve", "--port", "99999"], "Invalid value for '--port'"),
        (["run-tool"], "see `tidings run-tool --help`"),
        (["new", ""], "DIR is empty; give the folder to create, or . for the current one"),
        (["config", EXAMPLE, "--client", "emacs"], "claude-desktop"),
        (["history", EXAMPLE, "--feature", "tool"], "Invalid value for '--feature': 'tool' is not one of 'tools'"),
    ],
)
def test_usage_error_is_one_line(arguments: list[object], message: str) -> None:
    tidings(*arguments).check_error(message)


@pytest.mark.parametrize(
    "command", [["serve"], ["validate"], ["config", "--client", "cursor"], ["run-tool"], ["history"]], ids=str
)
def test_folder_that_is_missing_or_unreadable_is_a_one_line_error(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable = tmp_path / "unreadable"
    unreadable.mkdir()
    file = tmp_path / "tidings.toml"
    file.write_text("")
    # The tests may run as root, who may read every folder.
    monkeypatch.setattr(os, "access", lambda path, mode: path != unreadable)
    cases = {tmp_path / "missing": "does not exist; `tidings new", unreadable: "can't be read: permission denied"}
    if command != ["history"]:
        cases[file] = "is not a folder"
    for folder, message in cases.items():
        tidings(*command, folder, *(["greet"] if command == ["run-tool"] else [])).check_error(message)


@pytest.mark.parametrize("command", [["validate", EXAMPLE], ["validate", EXAMPLE, "--json"], ["--version"]], ids=str)
def test_output_that_cannot_be_written_is_a_one_line_error(command: list[object]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            forked_command(TIDINGS, *command), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "tidings: the output: No space left on device\n"


@pytest.mark.parametrize("command", ["serve . --stdio <&- >&-", "serve . --stdio 2>&-", "validate . >&-"])
def test_standard_stream_that_is_closed_is_like_an_empty_file(board: Path, command: str) -> None:
    result = subprocess.run(
        ["sh", "-c", f'exec "{TIDINGS}" {command}'],
        cwd=board,
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert result.returncode == 0, result
    assert "Traceback" not in result.stderr


def test_output_of_workspace_files_is_not_among_the_results(board: Path) -> None:
    (board / "tools" / "noisy.py").write_text(f'print("noise")\n{HELLO}')

    for command in (["validate", str(board), "--json"], ["run-tool", str(board), "hello", "--json"]):
        started = forked_command(TIDINGS, *command)
        result = subprocess.run(started, capture_output=True, text=True, check=True, timeout=DEADLINE)
        json.loads(result.stdout)
        assert "noise" in result.stderr
