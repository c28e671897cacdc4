"""Python tools: which functions are tools, how they run, and the modules that they import from their folder."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import DEADLINE, until
from tests.support.workspaces import call, call_with_progress, get_problems, list_tools, serve, watch, write
from tidings.workspace import python
from tidings.workspace.metadata import read_file
from tidings.workspace.python import StillLoading, load_python

pytestmark = pytest.mark.anyio

SUMS = '''
import asyncio
from dataclasses import dataclass
from mcp.server.mcpserver import Context

@dataclass
class Sum:
    value: int

def add(a: int, b: int = 1) -> Sum:
    """Add two numbers."""
    return Sum(_helper(a, b))

async def later(text: str, ctx: Context) -> str:
    await asyncio.sleep(0)
    await ctx.report_progress(1, 2, "half")
    return text

def _helper(a: int, b: int) -> int:
    return a + b

square = lambda x: x * x
'''


async def test_public_functions_with_hints_are_tools_as_in_the_sdk(tmp_path: Path) -> None:
    write(tmp_path, {"tools/sums.py": SUMS})
    async with serve(tmp_path) as (client, _):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert sorted(tools) == ["add", "later"]
        assert tools["add"].description == "Add two numbers."
        assert tools["add"].input_schema["required"] == ["a"]
        assert tools["later"].input_schema["properties"].keys() == {"text"}
        assert await call(client, "add", {"a": 2}) == {"value": 3}
        assert await call_with_progress(client, "later", {"text": "hi"}) == ("hi", [(1, 2, "half")])


async def test_changed_file_runs_as_a_new_module(tmp_path: Path) -> None:
    source = "calls = []\ndef count() -> int:\n    calls.append(1)\n    return len(calls)\n"
    write(tmp_path, {"tools/count.py": source})
    async with serve(tmp_path) as (client, workspace):
        assert await call(client, "count") == {"result": 1}
        assert await call(client, "count") == {"result": 2}
        write(tmp_path, {"tools/count.py": source + "# changed\n"})
        workspace.rescan()
        assert await call(client, "count") == {"result": 1}


async def test_other_files_are_loaded_if_one_exits_or_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidings.workspace.python._LOAD_TIMEOUT", 2.0)
    write(
        tmp_path,
        {
            "tools/cancels.py": "import asyncio\nraise asyncio.CancelledError\n",
            "tools/exits.py": "import sys\nsys.exit(3)\n",
            "tools/hangs.py": "import threading\nthreading.Event().wait(60)\n",
            "tools/good.py": "import sys\ndef quits() -> str:\n    sys.exit(4)\ndef stays() -> int:\n    return 1\n",
        },
    )
    async with serve(tmp_path) as (client, workspace):
        assert (await list_tools(client)).keys() == {"quits", "stays"}
        cancels, exits, hangs = map(str, workspace.problems)
        assert cancels == "tools/cancels.py:2: CancelledError"
        assert exits == "tools/exits.py:2: SystemExit: 3"
        assert hangs.startswith("tools/hangs.py: still running after 2 s")
        assert (await client.call_tool("quits", {})).is_error
        assert await call(client, "stays") == {"result": 1}


async def test_server_continues_whatever_a_tool_raises(tmp_path: Path) -> None:
    raising = "class Skipped(BaseException): pass\ndef skips() -> int:\n    raise Skipped('why')\n"
    cancelling = (
        "import asyncio\nasync def awaits() -> int:\n"
        "    task = asyncio.ensure_future(asyncio.sleep(60))\n    task.cancel()\n    return await task\n"
    )
    write(tmp_path, {"tools/raising.py": raising, "tools/cancelling.py": cancelling})
    async with serve(tmp_path) as (client, _):
        assert await call(client, "skips") == "skips ended with Skipped('why')"
        assert await call(client, "awaits") == "awaits ended with CancelledError()"


async def test_result_that_cannot_be_encoded_is_a_tool_error(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"tools/names.py": "def names() -> str:\n    return b'\\xff.txt'.decode('utf-8', 'surrogateescape')\n"},
    )
    async with serve(tmp_path) as (client, _):
        assert await call(client, "names") == "names: the result contains text that UTF-8 can't encode"


async def test_slow_file_delays_no_other_file_and_is_loaded_when_it_is_ready(tmp_path: Path) -> None:
    may_end = tmp_path / "may_end"
    slow = (
        "import os, threading\n"
        f"while not os.path.exists({str(may_end)!r}):\n    threading.Event().wait(0.002)\n"
        "def slow() -> int:\n    return 1\n"
    )
    async with watch(tmp_path) as watcher:
        write(tmp_path, {"tools/slow.py": slow})
        await until(lambda: watcher.workspace.watcher.pending)
        write(tmp_path, {"tools/quick.py": "def quick() -> int:\n    return 2\n"})
        await watcher.until_tools("quick")
        may_end.touch()
        await watcher.until_tools("quick", "slow")
        assert watcher.workspace.problems == ()


async def test_endless_file_ends_when_it_is_edited_removed_or_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "while True:\n    pass\n"

    def count_running() -> int:
        return sum(thread.name == "loading endless.py" for thread in threading.enumerate())

    async with watch(tmp_path) as watcher:
        write(tmp_path, {"tools/endless.py": endless})
        await until(lambda: count_running() == 1)
        (tmp_path / "tools" / "endless.py").unlink()
        await until(lambda: count_running() == 0)
        write(tmp_path, {"tools/endless.py": endless})
        await until(lambda: count_running() == 1)
        write(tmp_path, {"tools/endless.py": "def good() -> int:\n    return 1\n"})
        await until(lambda: count_running() == 0)
        await watcher.until_tools("good")
    monkeypatch.setattr("tidings.workspace.python._LOAD_TIMEOUT", 1.0)
    write(tmp_path, {"tools/endless.py": endless})
    assert "still running" in get_problems(tmp_path)[0]
    await until(lambda: count_running() == 0)


def test_edit_while_a_slow_file_is_being_read_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slow.py"
    path.write_text("while True:\n    pass\n")

    def read_and_edit(root: Path, path: Path) -> bytes:
        source = read_file(root, path)
        path.write_text("def edited() -> int:\n    return 1\n")
        return source

    with monkeypatch.context() as patch:
        patch.setattr(python, "read_file", read_and_edit)
        patch.setattr(python, "_FIRST_WAIT", 0.0)
        with pytest.raises(StillLoading):
            load_python(tmp_path, path, {})
    monkeypatch.setattr(python, "_FIRST_WAIT", DEADLINE)
    assert [item.key for item in load_python(tmp_path, path, {})] == ["edited"]


async def test_caller_gets_the_type_and_the_message_of_an_error(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/errors.py": "def boom(text: str, count: int = 1) -> int:\n"
            "    raise KeyError(text) if text else AssertionError\n"
        },
    )
    async with serve(tmp_path) as (client, _):
        assert await call(client, "boom", {"text": "key"}) == "boom: KeyError: 'key'"
        assert await call(client, "boom", {"text": ""}) == "boom: AssertionError"
        assert await call(client, "boom", {"count": "many"}) == (
            "boom: text: Field required; count: Input should be a valid integer, unable to parse string as an integer"
        )


def test_missing_hint_and_missing_tool_are_reported(tmp_path: Path) -> None:
    write(tmp_path, {"tools/bad.py": "\ndef f(x) -> int:\n    return 1\n", "tools/none.py": "x = 1\n"})
    first, second = get_problems(tmp_path)
    assert first.startswith("tools/bad.py:2: f: parameter 'x' has no type hint")
    assert second.startswith("tools/none.py: contains no tool")


# Modules beside a tool


@pytest.mark.parametrize(("name", "header"), [("_in_the_body", ""), ("_in_both", "import _in_both\n")])
async def test_function_imports_while_another_tool_is_loaded(tmp_path: Path, name: str, header: str) -> None:
    started, may_end = tmp_path / "started", tmp_path / "may_end"
    body = f"    from {name} import calls\n    calls.append(1)\n    return len(calls)\n"
    write(
        tmp_path,
        {
            f"tools/one/{name}.py": "calls = []\n",
            "tools/one/tool.py": f"{header}def one() -> int:\n{body}",
        },
    )
    slow = (
        "import os, threading\n"
        f"open({str(started)!r}, 'w').close()\n"
        f"while not os.path.exists({str(may_end)!r}):\n    threading.Event().wait(0.002)\n"
        "def two() -> int:\n    return 2\n"
    )
    async with serve(tmp_path) as (client, workspace):
        write(tmp_path, {"tools/two/tool.py": slow})
        loading = asyncio.create_task(asyncio.to_thread(workspace.rescan))
        await until(started.exists)
        try:
            assert await call(client, "one") == {"result": 1}
            assert await call(client, "one") == {"result": 2}
        finally:
            may_end.touch()
            await loading
        assert await call(client, "one") == {"result": 3}


@pytest.mark.parametrize("is_event", [True, False])
async def test_tools_load_again_when_a_missing_or_broken_module_is_fixed(tmp_path: Path, is_event: bool) -> None:
    late = f"_late_{is_event}"  # a name that no other folder has
    write(
        tmp_path,
        {
            "tools/one.py": f"import {late}\ndef one() -> int:\n    return {late}.value\n",
            "tools/two.py": "import _bad_one\ndef two() -> int:\n    return _bad_one.value\n",
            "tools/_bad_one.py": "good = 1\nvalue = = 2\n",
        },
    )
    async with serve(tmp_path) as (client, workspace):
        assert [str(problem) for problem in workspace.problems] == [
            "tools/_bad_one.py:2: invalid syntax (Python)",
            f"tools/one.py:1: ModuleNotFoundError: No module named '{late}'",
        ]
        fixed = {f"tools/{late}.py": "value = 1\n", "tools/_bad_one.py": "value = 2\n"}
        write(tmp_path, fixed)
        workspace.rescan([tmp_path / name for name in fixed] if is_event else None)
        assert workspace.problems == ()
        assert (await call(client, "one"), await call(client, "two")) == ({"result": 1}, {"result": 2})


@pytest.mark.parametrize("is_event", [True, False])
async def test_tools_of_a_folder_share_their_modules(tmp_path: Path, is_event: bool) -> None:
    write(
        tmp_path,
        {
            "tools/a.py": "from _counted import calls\ndef a() -> int:\n    calls.append(1)\n    return len(calls)\n",
            "tools/b.py": "from _counted import calls\nfrom _other import value\n"
            "def b() -> list[int]:\n    return [len(calls), value]\n",
            "tools/_counted.py": "calls = []\n",
            "tools/_other.py": "value = 1\n",
            "tools/folder/_counted.py": "calls = 'of the folder'\n",
            "tools/folder/tool.py": "from _counted import calls\ndef other() -> str:\n    return calls\n",
        },
    )
    path = tmp_path / "tools" / "_other.py"
    ctime = path.stat().st_ctime_ns
    async with serve(tmp_path) as (client, workspace):

        async def get_results() -> list[Any]:
            return [(await call(client, name))["result"] for name in ("a", "b", "other")]

        assert await get_results() == [1, [1, 1], "of the folder"]
        # Repeat until the time differs: the clock of a file system may be coarse.
        await until(lambda: path.stat().st_ctime_ns != ctime, action=lambda: path.write_text("value = 1000\n"))
        workspace.rescan([path] if is_event else None)
        assert await get_results() == [1, [1, 1000], "of the folder"]
        # An edit of a tool loads no module again.
        write(tmp_path, {"tools/b.py": (tmp_path / "tools" / "b.py").read_text() + "\n"})
        workspace.rescan([tmp_path / "tools" / "b.py"] if is_event else None)
        assert await get_results() == [2, [2, 1000], "of the folder"]
