"""A tool gets its arguments unchanged, and only the allowed variables of the server."""

from __future__ import annotations

import json
import os
import string
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.workspaces import DIFFICULT_STRINGS, write
from tidings.errors import InvalidItem
from tidings.workspace.environment import SDK, build_environment, check_variables, encode_json, list_roots
from tidings.workspace.process import run_process

KERNEL_LIMIT = 128 * 1024


def test_only_allowed_variables_are_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET_TOKEN", "MCPBASH_REMOTE_TOKEN", "AWS_PROFILE", "AWS_KEY", "LC_TIME", "TZ", "EXTRA"):
        monkeypatch.setenv(name, "x")
    env = build_environment(tmp_path, {}, allowed=["EXTRA", "AWS_P*"], variables={"OWN": "1", "TZ": "UTC"})

    assert {"SECRET_TOKEN", "MCPBASH_REMOTE_TOKEN", "AWS_KEY"}.isdisjoint(env)
    assert env["PATH"] == os.environ["PATH"]
    assert (env["LC_TIME"], env["EXTRA"], env["AWS_PROFILE"], env["OWN"], env["TZ"]) == ("x", "x", "x", "1", "UTC")


def test_environment_has_workspace_name_and_helpers(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    env = build_environment(tmp_path, {"a": 1}, name="deploy", scratch=scratch)

    assert env["TIDINGS_WORKSPACE"] == env["MCPBASH_PROJECT_ROOT"] == str(tmp_path)
    assert env["TIDINGS_TOOL_NAME"] == "deploy"
    assert env["TIDINGS_PYTHON"] == sys.executable
    assert Path(env["MCP_SDK"], "tool-sdk.sh").is_file()
    assert env["TIDINGS_ARGS_JSON"] == env["MCP_TOOL_ARGS_JSON"] == '{"a":1}'
    assert env["MCP_TOOL_ERROR_FILE"].startswith(str(scratch))


def test_simple_arguments_have_a_variable_each(tmp_path: Path) -> None:
    simple = {"name": "x y", "dry-run": True, "a.b": 1.5, "count": 3}
    other = {"list": [1], "none": None, "größe": "1", "=": "2"}
    ambiguous = {"same_name": True, "same-name": False, "SAME.NAME": False}
    env = build_environment(tmp_path, simple | other | ambiguous)

    assert {name: value for name, value in env.items() if name.startswith("TIDINGS_ARG_")} == {
        "TIDINGS_ARG_NAME": "x y",
        "TIDINGS_ARG_DRY_RUN": "true",
        "TIDINGS_ARG_A_B": "1.5",
        "TIDINGS_ARG_COUNT": "3",
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, "x", "name of a variable") for name in ("A=B", "", "A B", "1A", "A\0")]
    + [("NAME", value, "value of NAME") for value in ("a\0b", "x" * KERNEL_LIMIT, "\ud800")],
    ids=range(8),
)
def test_invalid_variable_is_rejected(name: str, value: str, message: str) -> None:
    with pytest.raises(InvalidItem, match=message):
        check_variables({name: value})


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_variable_can_have_the_maximum_size(tmp_path: Path, excess: int) -> None:
    value = "x" * (KERNEL_LIMIT - len("TIDINGS_ARG_A=") - 1 + excess)
    env = build_environment(tmp_path, {"a": value, "small": "s"}, scratch=tmp_path)

    assert ("TIDINGS_ARG_A" in env) is (excess <= 0)
    assert env["TIDINGS_ARG_SMALL"] == "s"
    assert "TIDINGS_ARGS_JSON" not in env
    assert env["MCP_TOOL_ARGS_FILE"] == env["TIDINGS_ARGS_FILE"]


def test_total_size_of_arguments_is_limited(tmp_path: Path) -> None:
    env = build_environment(tmp_path, {f"a{number}": "x" * 100_000 for number in range(100)})

    assert "TIDINGS_ARGS_JSON" not in env
    assert sum(len(name) + len(value) + 2 for name, value in env.items()) < 600_000


def test_roots_are_configured_or_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert list_roots(tmp_path) == [tmp_path.resolve()]

    config = {"roots": [{"path": "./data"}, {"path": "data"}, {"path": "/nowhere/at/all"}]}
    write(tmp_path, {"config/roots.json": json.dumps(config)})
    assert list_roots(tmp_path) == [(tmp_path / "data").resolve()]
    assert build_environment(tmp_path, {})["MCP_ROOTS_PATHS"] == str((tmp_path / "data").resolve())

    write(tmp_path, {"config/roots.json": "[broken"})
    assert list_roots(tmp_path) == [tmp_path.resolve()]


# Through a real process

ECHO = """#!/bin/sh
cat
printf '\\036%s\\036%s' "$TIDINGS_ARGS_JSON" "$TIDINGS_ARG_VALUE"
[ -z "$TIDINGS_ARGS_FILE" ] || cat "$TIDINGS_ARGS_FILE"
"""


async def echo(folder: Path, arguments: dict[str, Any]) -> list[str]:
    write(folder, {"echo.sh": ECHO})
    outcome = await run_process(
        [str(folder / "echo.sh")],
        stdin=encode_json(arguments).encode(),
        env=build_environment(folder, arguments, scratch=folder),
        cwd=folder,
        timeout=60,
        max_output=10 << 20,
    )
    assert (outcome.status, outcome.stderr) == (0, b"")
    return outcome.stdout.decode().split("\x1e")


@pytest.mark.anyio
@pytest.mark.parametrize("case", DIFFICULT_STRINGS)
async def test_difficult_strings_arrive_unchanged(tmp_path: Path, case: str) -> None:
    text = DIFFICULT_STRINGS[case]
    arguments = {"value": text, text: 1}
    received = await echo(tmp_path, arguments)

    assert json.loads(received[0]) == json.loads(received[1]) == arguments
    assert "\x1e".join(received[2:]) == text
    assert not (tmp_path / "owned").exists()


@pytest.mark.anyio
async def test_value_that_no_variable_can_have_arrives_on_stdin(tmp_path: Path) -> None:
    for value in ({"value": "a\0b"}, {"value": "\ud83d"}):
        assert [json.loads(text) for text in (await echo(tmp_path, value))[:2]] == [value, value]
    large = {"value": "🎉" * 300_000}
    stdin, variable, file = await echo(tmp_path, large)
    assert (json.loads(stdin), variable, json.loads(file)) == (large, "", large)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(), max_size=8) | st.text(string.printable, max_size=8), JSON, max_size=6))
def test_any_arguments_make_a_valid_environment(arguments: dict[str, Any]) -> None:
    env = build_environment(SDK, arguments)

    assert json.loads(env["TIDINGS_ARGS_JSON"]) == arguments
    for name, value in env.items():
        assert "\0" not in name + value
        assert "=" not in name
        assert len(f"{name}={value}".encode("utf-8", "surrogateescape")) < KERNEL_LIMIT
