"""What is wrong in a workspace is said with file and line, and is the trouble of that file alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.support.workspaces import call, run, write
from tidings.errors import TidingsError
from tidings.workspace.source import Workspace


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name = [", "tidings.toml:1: not TOML"),
        ("\nnom = 'x'", "tidings.toml:2: nom is not a setting"),
        ("name = 1", "tidings.toml:1: name is 1; it must be a string"),
        ("[policy]\nquiet_gap = -1", "tidings.toml:2: [policy] quiet_gap is -1"),
        ("[tools]\ntimeout = 'long'", "tidings.toml:2: [tools] timeout is 'long'; it must be a number"),
    ],
)
def test_a_mistake_in_the_settings_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path, {"tidings.toml": text})
    [found] = Workspace(tmp_path).problems
    assert str(found).startswith(problem)


def test_settings_that_are_linked_from_outside_are_named_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "ws"
    write(tmp_path, {"outside.toml": 'name = "outside"\n', "ws/tools/fine.sh": "#!/bin/sh\necho fine\n"})
    (root / "tidings.toml").symlink_to(tmp_path / "outside.toml")
    workspace = Workspace(root)
    assert [str(each) for each in workspace.problems] == [
        "tidings.toml: is a link to a file outside the workspace; replace it by a file"
    ]
    assert "tidings.toml: is a link to a file outside the workspace; replace it by a file" in caplog.text
    assert workspace.settings.name == "ws"
    (root / "tidings.toml").unlink()
    write(root, {"tidings.toml": 'instructions = "Ask."\n'})
    workspace.rescan()
    assert (workspace.problems, workspace.settings.instructions) == ((), "Ask.")


def test_a_folder_that_is_none_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TidingsError, match="tidings new"):
        Workspace(tmp_path / "nowhere")


def test_a_parameter_without_a_hint_is_an_error_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, {"tools/bad.py": "\ndef f(x) -> int:\n    return 1\n", "tools/none.py": "x = 1\n"})
    first, second = Workspace(tmp_path).problems
    assert str(first).startswith("tools/bad.py:2: f: parameter 'x' has no type hint")
    assert str(second).startswith("tools/none.py: contains no tool")


def test_the_same_name_twice_is_served_once_and_said(tmp_path: Path) -> None:
    write(
        tmp_path, {"tools/a.sh": "#!/bin/sh\n# @name same\necho a\n", "tools/b.sh": "#!/bin/sh\n# @name same\necho b\n"}
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert await call(client, "same") == "a"
        assert "tools/a defines it too" in str(workspace.problems[0])
        (tmp_path / "tools" / "a.sh").unlink()
        workspace.rescan()
        assert await call(client, "same") == "b"
        assert workspace.problems == ()

    run(tmp_path, scenario)


def test_a_script_that_is_empty_is_being_written_and_stays_what_it_was(tmp_path: Path) -> None:
    write(tmp_path, {"tools/a.sh": "#!/bin/sh\n# @describe one\necho a\n"})

    async def scenario(client: Client, workspace: Workspace) -> None:
        (tmp_path / "tools" / "a.sh").write_bytes(b"")
        workspace.rescan()
        [tool] = (await client.list_tools(cache_mode="bypass")).tools
        assert tool.description == "one"
        [problem] = workspace.problems
        assert "tools/a.sh" in str(problem)
        assert "the file is empty" in str(problem)

    run(tmp_path, scenario)


def test_an_error_is_logged_with_file_and_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"tools/broken.py": "def f(:\n"})
    with caplog.at_level(logging.WARNING):
        Workspace(tmp_path)
    assert "tools/broken.py:1: invalid syntax" in caplog.text


def test_a_file_that_ends_or_never_ends_when_it_is_loaded_is_its_own_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.workspace.python._LOAD_TIMEOUT", 2.0)  # enough for those that do end
    write(
        tmp_path,
        {
            "tools/exits.py": "import sys\nsys.exit(3)\n",
            "tools/hangs.py": "import threading\nthreading.Event().wait(60)\n",
            "tools/good.py": "def good(x: int) -> int:\n    return x\n",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["good"]
        first, second = workspace.problems
        assert str(first) == "tools/exits.py: calls sys.exit(3) when it is loaded"
        assert str(second).startswith("tools/hangs.py: still running after 2 s")

    run(tmp_path, scenario)


def test_a_tool_that_exits_fails_its_call_and_nothing_else(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"tools/quits.py": "import sys\ndef quits() -> str:\n    sys.exit(4)\ndef stays() -> int:\n    return 1\n"},
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        failed = await client.call_tool("quits", {})
        assert failed.is_error
        assert await call(client, "stays") == {"result": 1}

    run(tmp_path, scenario)


def test_links_in_a_circle_and_names_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"resources/a.txt": "a", "tools/fine.sh": "#!/bin/sh\necho fine\n"})
    for name in ("l", "m"):
        (tmp_path / "resources" / name).symlink_to(".")
    Path(os.fsdecode(os.fsencode(tmp_path / "tools") + b"/z\xff.sh")).touch(0o755)

    async def scenario(client: Client, workspace: Workspace) -> None:
        listed = [each.uri for each in (await client.list_resources()).resources]
        assert listed == ["tidings://errors", "workspace:///a.txt"]
        assert [tool.name for tool in (await client.list_tools()).tools] == ["fine"]

    run(tmp_path, scenario)


def test_an_item_that_no_wire_can_carry_is_a_problem_of_its_file_alone(tmp_path: Path) -> None:
    large = "x" * (2 << 20)
    write(
        tmp_path,
        {
            "tools/large.py": f'def large(x: int) -> int:\n    """{large}"""\n    return x\n',
            "tools/half.py": 'def half(x: int) -> int:\n    "\\ud800"\n    return x\n',
            "tools/good.py": "def good(x: int) -> int:\n    return x\n",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["good"]
        assert [problem.path for problem in workspace.problems] == ["tools/half.py", "tools/large.py"]

    run(tmp_path, scenario)
