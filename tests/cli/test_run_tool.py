from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import tidings
from tests.support.waiting import DEADLINE
from tests.support.workspaces import script, write


def test_run_tool_prints_the_text_on_stdout_and_progress_on_stderr(tmp_path: Path) -> None:
    tidings("new", tmp_path)

    assert tidings("run-tool", tmp_path, "greet", "--arg", "name=42", "--arg", "excited=true").stdout == "Hello, 42!\n"
    assert tidings("run-tool", tmp_path, "greet", "--args", '{"name": "Ada"}').stdout == "Hello, Ada.\n"
    assert tidings("run-tool", tmp_path, "greet", "--args", "-", stdin='{"name": "Eve"}').stdout == "Hello, Eve.\n"
    report = tidings("run-tool", tmp_path, "report", "--json")
    assert json.loads(report.stdout)["structuredContent"]["files"] == 3
    assert report.stderr == "1/2 counting files\n2/2 counting bytes\n"


def test_control_characters_of_a_tool_are_escaped_on_stderr(tmp_path: Path) -> None:
    fails = "printf 'a\\033]0;title\\007\\n\\tb\\n' >&2; exit 3"
    write(tmp_path, {"tools/fails.sh": script("Fail", fails), "tools/prints.sh": script("Print", "printf '\\033[1mb'")})
    failed = tidings("run-tool", tmp_path, "fails")
    assert "a\\x1b]0;title\\x07\n\tb" in failed.stderr
    assert tidings("run-tool", tmp_path, "prints").stdout == "\x1b[1mb\n"  # a program may read it
    unknown = tidings("run-tool", tmp_path, "\x1b[2J")
    assert unknown.status == 2
    assert "\x1b" not in unknown.stderr


def test_characters_that_the_terminal_does_not_have_are_escaped(tmp_path: Path) -> None:
    tidings("new", tmp_path)
    command = (sys.executable, "-m", "tidings", "run-tool", tmp_path, "greet", "--arg", "name=Zoë")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert found.stdout == "Hello, Zo\\xeb.\n"


def test_run_tool_exits_with_1_if_the_tool_fails(board: Path) -> None:
    (board / "tools" / "fail.sh").write_text("#!/bin/sh\necho half; echo 'no such board' >&2; exit 3\n")
    (board / "tools" / "fail.sh").chmod(0o755)

    failed = tidings("run-tool", board, "fail")

    assert (failed.status, failed.stdout) == (1, "")
    assert "no such board" in failed.stderr
    assert json.loads(tidings("run-tool", board, "fail", "--json").stdout)["isError"] is True
    assert tidings("run-tool", board, "add_task").status == 1  # an argument is missing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add_tsk"], "there is add_task"),
        (["add_task", "--args", "{"], "--args must be a JSON object"),
        (["add_task", "--args", "[]"], "--args must be a JSON object"),
        (["add_task", "--arg", "title"], "NAME=VALUE"),
        (["deploy"], "tools/deploy.py:1: deploy: parameter 'target'"),  # the reason why this tool is missing
    ],
)
def test_run_tool_exits_with_2_if_the_call_is_wrong(board: Path, arguments: list[str], message: str) -> None:
    (board / "tools" / "deploy.py").write_text("def deploy(target) -> str:\n    return target\n")

    refused = tidings("run-tool", board, *arguments)

    assert (refused.status, refused.stdout) == (2, "")
    assert message in refused.stderr
