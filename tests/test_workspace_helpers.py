"""Python files that tools import from beside them: whose they are, when they are read anew, what is said of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.waiting import until
from tests.workspaces import call, run, write
from tidings.sources.workspace.workspace import Workspace


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
