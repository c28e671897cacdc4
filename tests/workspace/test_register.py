"""What a workspace registers beside its files, and folders of mcp-bash-framework, which are served as they are."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.support.waiting import DEADLINE
from tests.support.workspaces import call, read, run, write
from tidings.workspace.register import run_register_script
from tidings.workspace.settings import Settings
from tidings.workspace.source import Workspace


def test_registered_items_are_served_beside_or_in_place_of_the_folders(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tools/found.sh": "#!/bin/sh\necho found\n",
            "scripts/greet.sh": "#!/bin/sh\necho hello\n",
            "prompts/found.md": "Found",
            "server.d/register.sh": '#!/bin/sh\necho \'{"tools": [{"name": "greet", "path": "scripts/greet.sh"}]}\'\n',
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["greet"]
        assert await call(client, "greet") == "hello"
        assert [prompt.name for prompt in (await client.list_prompts()).prompts] == ["found"]
        write(tmp_path, {"server.d/register.sh": "#!/bin/sh\nexit 3\n"})
        workspace.rescan()
        assert [tool.name for tool in (await client.list_tools()).tools] == ["greet"]
        assert "exit status 3" in str(workspace.problems[0])
        (tmp_path / "server.d" / "register.sh").unlink()
        workspace.rescan()
        assert [tool.name for tool in (await client.list_tools()).tools] == ["found"]

    run(tmp_path, scenario)


def test_a_registration_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"tidings.toml": "[register]\ntimeout = 0.2\n", "server.d/register.sh": "#!/bin/sh\nsleep 60\n"},
    )
    [problem] = Workspace(tmp_path).problems
    assert (
        str(problem) == "server.d/register.sh: did not finish within 0.2 s; make it faster, or raise [register] timeout"
    )


def test_a_folder_of_mcp_bash_framework_is_served_as_it_is(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "server.d/server.meta.json": '{"name": "bash", "title": "Bash", "version": "3.0"}',
            "tools/hello/tool.meta.json": '{"name": "say-hello", "description": "Greets", "inputSchema": '
            '{"type": "object", "properties": {"name": {"type": "string"}}}, "timeoutSecs": 5}',
            "resources/greeting.meta.json": '{"name": "greeting", "uri": "file://./resources/greeting.txt", '
            '"mimeType": "text/plain", "provider": "file"}',
            "resources/greeting.txt": "Hello from a file",
            "prompts/greet.meta.json": '{"name": "prompt.greet", "path": "greet.txt", "arguments": {"type": "object", '
            '"required": ["name"], "properties": {"name": {"type": "string", "description": "Who"}}}}',
            "prompts/greet.txt": "Hello, ${name}!",
        },
    )
    script = tmp_path / "tools" / "hello" / "tool.sh"
    script.write_text('source "${MCP_SDK}/tool-sdk.sh"\nmcp_emit_text "Hello $(mcp_args_get \'.name\')"\n')

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert workspace.problems == ()
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("bash", "3.0")
        assert await call(client, "say-hello", {"name": "Ada"}) == "Hello Ada"
        assert await read(client, "file://./resources/greeting.txt") == "Hello from a file"
        [message] = (await client.get_prompt("prompt.greet", {"name": "Ada"})).messages
        assert getattr(message.content, "text", None) == "Hello, Ada!"

    run(tmp_path, scenario)


def test_a_register_json_of_mcp_bash_framework_is_honoured(tmp_path: Path) -> None:
    topic = {"type": "object", "properties": {"topic": {"type": "string"}}}
    registered = {
        "version": 1,
        "tools": [{"name": "manual.progress", "path": "progress-demo.sh"}],
        "prompts": [{"name": "manual.prompt", "path": "manual.txt", "arguments": topic}],
        "resourceTemplates": [{"name": "logs", "uriTemplate": "file:///var/log/{service}.log"}],
    }
    write(
        tmp_path,
        {
            "tools/progress-demo.sh": "#!/bin/sh\necho done\n",
            "prompts/manual.txt": "On {{topic}}.",
            "server.d/register.json": json.dumps(registered),
        },
    )

    async def scenario(client: Client, workspace: Workspace) -> None:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["manual.progress"]
        assert await call(client, "manual.progress") == "done"
        assert [prompt.name for prompt in (await client.list_prompts()).prompts] == ["manual.prompt"]
        assert len((await client.list_resource_templates()).resource_templates) == 1

    run(tmp_path, scenario)


def test_a_registration_that_prints_without_end_is_cut_and_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"tidings.toml": "[tools]\nmax_output = 1000\n", "server.d/register.sh": "#!/bin/sh\nyes '{\"tools\": []}'\n"},
    )
    [problem] = Workspace(tmp_path).problems
    assert "printed more than 1000 bytes" in str(problem)


def test_a_registration_that_is_interrupted_as_it_begins_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "running register.sh":
            return start(thread)
        begun.append(thread)
        raise KeyboardInterrupt

    script = tmp_path / "server.d" / "register.sh"
    write(tmp_path, {"server.d/register.sh": f"#!/bin/sh\nexec sleep {2 * DEADLINE}\n"})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_register_script(tmp_path, Settings("a", register_timeout=600), script, lambda end: None)
    [thread] = begun
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()
