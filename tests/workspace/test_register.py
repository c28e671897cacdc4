"""Registered items, their scripts, and folders of mcp-bash-framework, which are served unchanged.

Covers `registration.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import threading
from pathlib import Path

import pytest

from tests.support.command import GRACE, serving, start_command
from tests.support.waiting import DEADLINE, is_running, until
from tests.support.workspaces import call, get_problems, list_names, read, run_source, script, serve, watch, write
from tidings.core.model import Feature
from tidings.workspace import DEFAULT_POLL
from tidings.workspace.registration import RegisterScripts
from tidings.workspace.settings import Settings
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

JSON = '{"tools": [{"name": "%s", "path": "scripts/greet.sh"}]}'
FILES = {
    "tools/found.sh": script("Found"),
    "prompts/found.md": "Found",
    "scripts/greet.sh": script("Greet", "echo hello"),
}


def register(name: str) -> str:
    return f"#!/bin/sh\necho '{JSON % name}'\n"


def test_scripts_run_every_5_seconds_and_all_files_are_scanned_every_10() -> None:
    assert Settings("any").register_ttl == 5
    assert inspect.signature(Workspace).parameters["poll"].default == DEFAULT_POLL == 10


async def test_registered_items_replace_those_of_the_folder(tmp_path: Path) -> None:
    write(tmp_path, FILES | {"server.d/register.sh": register("greet")})
    async with watch(tmp_path) as watcher:
        assert (sorted(await watcher.tools()), sorted(await watcher.prompts())) == (["greet"], ["found"])
        assert await call(watcher.client, "greet") == "hello"
        write(tmp_path, {"server.d/register.sh": "#!/bin/sh\nexit 3\n"})
        await until(lambda: watcher.workspace.problems)
        assert "exit status 3" in await watcher.errors()
        assert (await watcher.tools()).keys() == {"greet"}
        (tmp_path / "server.d" / "register.sh").unlink()
        await watcher.until_tools("found")


@pytest.mark.parametrize(
    ("settings", "text", "problem"),
    [
        ("[register]\ntimeout = 0.2\n", "sleep 60", "did not finish within 0.2 s"),
        ("[tools]\nmax_output = 1000\n", "yes '{\"tools\": []}'", "printed more than 1000 bytes"),
    ],
)
def test_script_is_stopped_at_its_limit(tmp_path: Path, settings: str, text: str, problem: str) -> None:
    write(tmp_path, {"tidings.toml": settings, "server.d/register.sh": f"#!/bin/sh\n{text}\n"})
    [found] = get_problems(tmp_path)
    assert found.startswith(f"server.d/register.sh: {problem}")


@pytest.mark.parametrize("first", ["register.sh", "register.json"])
async def test_items_stay_until_the_new_script_has_run(tmp_path: Path, first: str) -> None:
    old, new = tmp_path / "server.d" / first, tmp_path / "server.d" / "register.bash"
    write(tmp_path, FILES | {f"server.d/{first}": register("greet") if first == "register.sh" else JSON % "greet"})
    workspace = Workspace(tmp_path)
    write(tmp_path, {"server.d/register.bash": register("welcome")})
    old.unlink()
    workspace.rescan([old, new])
    assert (list_names(workspace), workspace.problems) == (["greet"], ())
    async with run_source(workspace):
        await until(lambda: list_names(workspace) == ["welcome"])
    new.unlink()
    workspace.rescan([new])
    assert list_names(workspace) == ["found"]


async def test_only_a_change_of_the_script_itself_makes_it_run(tmp_path: Path) -> None:
    path, log = tmp_path / "server.d" / "register.sh", tmp_path / "server.d" / "register.log"
    write(tmp_path, {"server.d/register.sh": f"#!/bin/sh\necho run >> '{log}'\n"})
    scripts = RegisterScripts(tmp_path, lambda: Settings("a"), lambda: [path, log])
    assert scripts.has_changes()
    await scripts.run()
    assert log.read_text() == "run\n"
    assert not scripts.has_changes()
    write(tmp_path, {"server.d/register.sh": register("greet")})
    assert scripts.has_changes()


def test_script_interrupted_at_its_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def interrupt(thread: threading.Thread) -> None:
        threads.append(thread)
        raise KeyboardInterrupt

    path = tmp_path / "server.d" / "register.sh"
    write(tmp_path, {"server.d/register.sh": f"#!/bin/sh\nexec sleep {2 * DEADLINE}\n"})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            RegisterScripts(tmp_path, lambda: Settings("a", register_timeout=600), lambda: [path]).run_blocking()
    [thread] = threads
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_hanging_script_ends_with_its_server(board: Path, tmp_path: Path, number: signal.Signals) -> None:
    pid = tmp_path / "pid"
    text = f"#!/bin/sh\necho $$ > '{pid}.new'\nmv '{pid}.new' '{pid}'\nexec sleep 600\n"
    write(board, {"tidings.toml": "[register]\ntimeout = 600\n"})

    async def stop(process: asyncio.subprocess.Process) -> None:
        await until(pid.exists)
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), GRACE) == 0
        await until(lambda: not is_running(int(pid.read_text())))
        pid.unlink()

    async with serving(board) as server:
        write(board, {"server.d/register.sh": text})
        await stop(server.process)
    async with start_command("serve", board, "--port", 0) as process:  # while the server starts
        await stop(process)


async def test_folder_of_mcp_bash_framework_is_served_unchanged(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "server.d/server.meta.json": '{"name": "bash", "title": "Bash", "version": "3.0"}',
            "tools/hello/tool.meta.json": '{"name": "say-hello", "description": "Greets", "inputSchema": '
            '{"type": "object", "properties": {"name": {"type": "string"}}}, "timeoutSecs": 5}',
            "tools/hello/tool.sh": 'source "${MCP_SDK}/tool-sdk.sh"\nmcp_emit_text "Hello $(mcp_args_get \'.name\')"\n',
            "resources/greeting.meta.json": '{"name": "greeting", "uri": "file://./resources/greeting.txt", '
            '"mimeType": "text/plain", "provider": "file"}',
            "resources/greeting.txt": "Hello from a file",
            "prompts/greet.meta.json": '{"name": "prompt.greet", "path": "greet.txt", "arguments": {"type": "object", '
            '"required": ["name"], "properties": {"name": {"type": "string", "description": "Who"}}}}',
            "prompts/greet.txt": "Hello, ${name}!",
        },
    )
    async with serve(tmp_path) as (client, workspace):
        assert workspace.problems == ()
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("bash", "3.0")
        assert await call(client, "say-hello", {"name": "Ada"}) == "Hello Ada"
        assert await read(client, "file://./resources/greeting.txt") == "Hello from a file"
        [message] = (await client.get_prompt("prompt.greet", {"name": "Ada"})).messages
        assert getattr(message.content, "text", None) == "Hello, Ada!"


async def test_register_json_of_mcp_bash_framework_is_served_unchanged(tmp_path: Path) -> None:
    topic = {"type": "object", "properties": {"topic": {"type": "string"}}}
    content = {
        "version": 1,
        "tools": [{"name": "manual.progress", "path": "progress-demo.sh"}],
        "prompts": [{"name": "manual.prompt", "path": "manual.txt", "arguments": topic}],
        "resourceTemplates": [{"name": "logs", "uriTemplate": "file:///var/log/{service}.log"}],
    }
    write(
        tmp_path,
        {
            "tools/progress-demo.sh": "#!/bin/sh\necho done\n",
            "tools/shared/print.sh": "#!/bin/sh\n",
            "prompts/manual.txt": "On {{topic}}.",
            "server.d/register.json": json.dumps(content),
        },
    )
    async with serve(tmp_path) as (client, workspace):
        assert workspace.problems == ()  # no file is expected to be a tool by itself
        assert list_names(workspace) == ["manual.progress"]
        assert await call(client, "manual.progress") == "done"
        assert list_names(workspace, Feature.PROMPTS) == ["manual.prompt"]
        assert len((await client.list_resource_templates()).resource_templates) == 1
