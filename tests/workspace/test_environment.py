"""A tool sees its arguments and what it is allowed, whatever stands in them, and nothing else of the server's."""

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

from tests.support.workspaces import NASTY
from tidings.errors import InvalidItem
from tidings.workspace.environment import SDK, build_environment, encode_json, list_roots
from tidings.workspace.process import run_process

KERNEL_LIMIT = 128 * 1024


def test_only_what_is_allowed_of_the_server_s_own_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET_TOKEN", "MCPBASH_REMOTE_TOKEN", "AWS_PROFILE", "AWS_KEY", "LC_TIME", "TZ", "EXTRA"):
        monkeypatch.setenv(name, "x")
    found = build_environment(tmp_path, {}, allowed=["EXTRA", "AWS_P*"], variables={"OWN": "1", "TZ": "UTC"})

    assert {"SECRET_TOKEN", "MCPBASH_REMOTE_TOKEN", "AWS_KEY"}.isdisjoint(found)
    assert found["PATH"] == os.environ["PATH"]
    assert (found["LC_TIME"], found["EXTRA"], found["AWS_PROFILE"]) == ("x", "x", "x")
    assert (found["OWN"], found["TZ"]) == ("1", "UTC")


def test_a_tool_finds_its_workspace_its_name_and_the_helpers(tmp_path: Path) -> None:
    found = build_environment(
        tmp_path, {"a": 1}, name="deploy", request_meta={"user": "ada"}, scratch=tmp_path / "scratch"
    )

    assert found["TIDINGS_WORKSPACE"] == found["MCPBASH_PROJECT_ROOT"] == str(tmp_path)
    assert found["TIDINGS_TOOL_NAME"] == "deploy"
    assert found["TIDINGS_PYTHON"] == sys.executable
    assert Path(found["MCP_SDK"], "tool-sdk.sh").is_file()
    assert found["TIDINGS_ARGS_JSON"] == found["MCP_TOOL_ARGS_JSON"] == '{"a":1}'
    assert json.loads(found["MCP_TOOL_META_JSON"]) == {"user": "ada"}
    assert found["MCP_TOOL_ERROR_FILE"].startswith(str(tmp_path / "scratch"))


def test_simple_arguments_have_a_variable_each(tmp_path: Path) -> None:
    given = {"name": "x y", "dry-run": True, "a.b": 1.5, "count": 3, "list": [1], "none": None, "größe": "1", "=": "2"}
    found = build_environment(tmp_path, given)

    assert {name: value for name, value in found.items() if name.startswith("TIDINGS_ARG_")} == {
        "TIDINGS_ARG_NAME": "x y",
        "TIDINGS_ARG_DRY_RUN": "true",
        "TIDINGS_ARG_A_B": "1.5",
        "TIDINGS_ARG_COUNT": "3",
    }


def test_one_argument_can_not_take_the_place_of_another(tmp_path: Path) -> None:
    found = build_environment(tmp_path, {"dry_run": True, "other": 1, "dry-run": False, "DRY.RUN": False})

    assert "TIDINGS_ARG_DRY_RUN" not in found
    assert found["TIDINGS_ARG_OTHER"] == "1"


@pytest.mark.parametrize("name", ["A=B", "", "A B", "1A", "A\0"])
def test_a_name_that_is_none_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidItem, match="name of a variable"):
        build_environment(tmp_path, {}, variables={name: "x"})


@pytest.mark.parametrize("value", ["a\0b", "x" * KERNEL_LIMIT, "\ud800"], ids=["nul", "large", "surrogate"])
def test_a_value_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidItem, match="value of NAME"):
        build_environment(tmp_path, {}, variables={"NAME": value})


def test_what_is_too_large_for_a_variable_is_in_a_file(tmp_path: Path) -> None:
    arguments = {"text": "ä" * 500_000, "small": "s"}
    found = build_environment(tmp_path, arguments, request_meta={"m": "y" * 200_000}, scratch=tmp_path)

    assert "TIDINGS_ARGS_JSON" not in found
    assert json.loads(Path(found["TIDINGS_ARGS_FILE"]).read_text("utf-8")) == arguments
    assert found["MCP_TOOL_ARGS_FILE"] == found["TIDINGS_ARGS_FILE"]
    assert json.loads(Path(found["MCP_TOOL_META_FILE"]).read_text("utf-8")) == {"m": "y" * 200_000}
    assert "TIDINGS_ARG_TEXT" not in found
    assert found["TIDINGS_ARG_SMALL"] == "s"


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_limit_of_a_variable_is_met_to_the_byte(tmp_path: Path, over: int) -> None:
    """Only a variable that the kernel takes is set; one byte more in it, and no tool would start."""
    value = "x" * (KERNEL_LIMIT - len("TIDINGS_ARG_A=") - 1 + over)
    found = build_environment(tmp_path, {"a": value})

    assert ("TIDINGS_ARG_A" in found) is (over <= 0)


def test_many_arguments_together_stay_startable(tmp_path: Path) -> None:
    found = build_environment(tmp_path, {f"a{number}": "x" * 100_000 for number in range(100)}, scratch=tmp_path)

    assert sum(len(name) + len(value) + 2 for name, value in found.items()) < 600_000


def test_without_roots_of_a_client_those_of_the_workspace_are_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert list_roots(tmp_path) == [tmp_path.resolve()]

    (tmp_path / "config").mkdir()
    listed = {"roots": [{"path": "./data"}, {"path": "data"}, {"path": "/nowhere/at/all"}]}
    (tmp_path / "config" / "roots.json").write_text(json.dumps(listed))
    assert list_roots(tmp_path) == [(tmp_path / "data").resolve()]
    assert build_environment(tmp_path, {})["MCP_ROOTS_PATHS"] == str((tmp_path / "data").resolve())

    (tmp_path / "config" / "roots.json").write_text("[broken")
    assert list_roots(tmp_path) == [tmp_path.resolve()]


# Through a real process

ECHO = """#!/bin/sh
cat
printf '\\036%s\\036%s' "$TIDINGS_ARGS_JSON" "$TIDINGS_ARG_VALUE"
[ -z "$TIDINGS_ARGS_FILE" ] || cat "$TIDINGS_ARGS_FILE"
"""


async def echo(folder: Path, arguments: dict[str, Any]) -> list[str]:
    tool = folder / "echo.sh"
    tool.write_text(ECHO)
    tool.chmod(0o755)
    outcome = await run_process(
        [str(tool)],
        stdin=encode_json(arguments).encode(),
        env=build_environment(folder, arguments, scratch=folder),
        cwd=folder,
        timeout=60,
        max_output=10 << 20,
    )
    assert (outcome.status, outcome.stderr) == (0, b"")
    return outcome.stdout.decode().split("\x1e")


@pytest.mark.anyio
@pytest.mark.parametrize("case", NASTY)
async def test_every_nastiness_arrives_as_it_was_sent(tmp_path: Path, case: str) -> None:
    arguments = {"value": NASTY[case], NASTY[case]: 1}
    received = await echo(tmp_path, arguments)

    assert json.loads(received[0]) == json.loads(received[1]) == arguments
    assert NASTY[case] == "\x1e".join(received[2:])
    assert not (tmp_path / "owned").exists()


@pytest.mark.anyio
async def test_what_no_variable_can_hold_arrives_by_its_input(tmp_path: Path) -> None:
    nul, half, huge = {"value": "a\0b"}, {"value": "\ud83d"}, {"value": "🎉" * 300_000}

    assert [json.loads(text) for text in (await echo(tmp_path, nul))[:2]] == [nul, nul]
    assert [json.loads(text) for text in (await echo(tmp_path, half))[:2]] == [half, half]
    received = await echo(tmp_path, huge)
    assert (json.loads(received[0]), received[1], json.loads(received[2])) == (huge, "", huge)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(), max_size=8) | st.text(string.printable, max_size=8), JSON, max_size=6))
def test_any_arguments_become_an_environment_that_can_be_started(arguments: dict[str, Any]) -> None:
    found = build_environment(SDK, arguments)

    assert json.loads(found["TIDINGS_ARGS_JSON"]) == arguments
    for name, value in found.items():
        assert "\0" not in name + value
        assert "=" not in name
        assert len(f"{name}={value}".encode("utf-8", "surrogateescape")) < KERNEL_LIMIT
