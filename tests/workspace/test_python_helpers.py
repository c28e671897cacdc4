"""Python files that tools import from beside them: whose they are, when they are read anew, what is said of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.support.waiting import until
from tests.support.workspaces import call, run, write
from tidings.workspace.source import Workspace


@pytest.mark.parametrize(("name", "first"), [("_in_the_body", ""), ("_in_both", "import _in_both\n")])
def test_a_tool_imports_in_its_body_while_another_one_is_loaded(tmp_path: Path, name: str, first: str) -> None:
    write(
        tmp_path,
        {
            f"tools/one/{name}.py": "calls = []\n",
            "tools/one/tool.py": f"{first}def one() -> int:\n"
            f"    from {name} import calls\n    calls.append(1)\n    return len(calls)\n",
        },
    )
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    slow = (
        "import os, threading\n"
        f"open({str(begun)!r}, 'w').close()\n"
        f"while not os.path.exists({str(go_on)!r}):\n    threading.Event().wait(0.002)\n"
        "def two() -> int:\n    return 2\n"
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        write(tmp_path, {"tools/two/tool.py": slow})
        loading = asyncio.create_task(asyncio.to_thread(workspace.rescan))
        await until(begun.exists)
        try:
            assert await call(client, "one") == {"result": 1}
            assert await call(client, "one") == {"result": 2}
        finally:
            go_on.touch()
            await loading
        assert await call(client, "one") == {"result": 3}

    run(tmp_path, scenario)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_helper_that_was_missing_or_broken_heals_the_tools_that_import_it(tmp_path: Path, is_told: bool) -> None:
    late = f"_late_{is_told}"  # one that no other folder has
    write(
        tmp_path,
        {
            "tools/one.py": f"import {late}\ndef one() -> int:\n    return {late}.value\n",
            "tools/two.py": "import _bad_one\ndef two() -> int:\n    return _bad_one.value\n",
            "tools/_bad_one.py": "good = 1\nvalue = = 2\n",
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert [str(problem) for problem in workspace.problems] == [
            "tools/_bad_one.py:2: invalid syntax (Python)",
            f"tools/one.py:1: ModuleNotFoundError: No module named '{late}'",
        ]
        healed = {f"tools/{late}.py": "value = 1\n", "tools/_bad_one.py": "value = 2\n"}
        write(tmp_path, healed)
        workspace.rescan([tmp_path / name for name in healed] if is_told else None)
        assert workspace.problems == ()
        assert await call(client, "one") == {"result": 1}
        assert await call(client, "two") == {"result": 2}

    run(tmp_path, scenario)


@pytest.mark.parametrize("is_told", [True, False])
def test_tools_share_their_helpers_whichever_of_these_changes(tmp_path: Path, is_told: bool) -> None:
    write(
        tmp_path,
        {
            "tools/a.py": "from _counted import calls\ndef a() -> int:\n    calls.append(1)\n    return len(calls)\n",
            "tools/b.py": "from _counted import calls\nfrom _other import value\n"
            "def b() -> list[int]:\n    return [len(calls), value]\n",
            "tools/_counted.py": "calls = []\n",
            "tools/_other.py": "value = 1\n",
        },
    )

    other = tmp_path / "tools" / "_other.py"
    then = other.stat().st_ctime_ns

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert await call(client, "a") == {"result": 1}
        assert await call(client, "b") == {"result": [1, 1]}
        # Written until its time is another: the clock of a file system has steps.
        await until(lambda: other.stat().st_ctime_ns != then, doing=lambda: other.write_text("value = 1000\n"))
        workspace.rescan([other] if is_told else None)
        assert await call(client, "a") == {"result": 1}
        assert await call(client, "b") == {"result": [1, 1000]}
        write(tmp_path, {"tools/b.py": (tmp_path / "tools" / "b.py").read_text() + "\n"})
        workspace.rescan([tmp_path / "tools" / "b.py"] if is_told else None)
        assert await call(client, "b") == {"result": [1, 1000]}
        assert await call(client, "a") == {"result": 2}

    run(tmp_path, scenario)
