from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.command import DEADLINE, HELLO, Notifications, tidings
from tests.support.waiting import until
from tests.support.workspaces import list_names, read, watch, write
from tidings.core.model import Feature


@pytest.mark.anyio
async def test_new_workspace_is_valid_and_its_client_is_notified_of_changes(tmp_path: Path) -> None:
    folder = tmp_path / "my server"
    created = tidings("new", folder, "--json")
    assert created.status == 0
    expected = {"tidings.toml", "tools/greet.py", "tools/today.sh", "tools/report/tool.sh", "prompts/review.md"}
    assert expected <= set(json.loads(created.stdout)["files"])

    validated = tidings("validate", folder, "--json")
    assert json.loads(validated.stdout) == {
        "workspace": str(folder),
        "items": {"tools": 3, "prompts": 1, "resources": 3},
        "problems": [],
    }
    assert validated.status == 0

    settings = tidings("config", folder, "--client", "claude-code")
    server = json.loads(settings.stdout)["mcpServers"]["my-server"]
    assert Path(server["command"]).is_absolute()
    notifications = Notifications()
    parameters = StdioServerParameters(command=server["command"], args=server["args"])
    async with asyncio.timeout(DEADLINE), Client(stdio_client(parameters), message_handler=notifications) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"greet", "today", "report"}
        report = await client.call_tool("report")
        size = sum(path.stat().st_size for path in (folder / "resources").rglob("*") if path.is_file())
        assert report.structured_content == {"files": 3, "bytes": size}
        note = await client.read_resource("notes://first")
        assert "first note" in str(note.contents[0])
        prompt = await client.get_prompt("review", {"diff": "+1"})
        assert "+1" in str(prompt.messages[0].content)
        async with client.listen(tools_list_changed=True):
            (folder / "tools" / "hello.py").write_text(HELLO)
            await notifications.until("notifications/tools/list_changed")
            assert "hello" in {tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools}


@pytest.mark.anyio
async def test_a_file_added_to_any_folder_of_a_new_workspace_appears(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    tidings("new", folder)
    async with watch(folder) as watcher:
        client = watcher.client
        added = {
            "tools/hello.py": HELLO,
            "tools/shell.sh": "#!/bin/sh\n",
            "tools/mine/tool.sh": "echo mine\n",
            "prompts/mine.md": "hi {x}\n",
            "resources/mine.txt": "mine",
            "resources/notes/mine.md": "mine",
        }
        write(folder, added)
        await watcher.until_tools("greet", "hello", "mine", "report", "shell", "today")
        await until(lambda: list_names(watcher.workspace, Feature.PROMPTS) == ["mine", "review"])
        assert {"mine.txt", "notes/mine.md"} <= set(list_names(watcher.workspace, Feature.RESOURCES))
        assert await read(client, "notes://mine") == "mine"
        (folder / "server.d/register-example.sh").rename(folder / "server.d/register.sh")
        await until(lambda: "drafts" in list_names(watcher.workspace, Feature.RESOURCES))
        write(folder, {"resources/drafts/mine.md": "draft"})
        assert await read(client, "drafts://mine") == "draft"
        assert list_names(watcher.workspace, Feature.PROMPTS) == ["mine", "review"]
        assert watcher.workspace.problems == ()


def test_new_overwrites_nothing_and_names_the_files_that_exist(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "greet.py").write_text("mine")
    (tmp_path / "README.md").write_text("mine too")

    tidings("new", tmp_path).check_error(str(tmp_path / "tools/greet.py"), str(tmp_path / "README.md"))

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["README.md", "greet.py", "tools"]
    assert (tmp_path / "tools" / "greet.py").read_text() == "mine"


def test_new_creates_nothing_if_a_file_has_the_name_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tools").touch()

    tidings("new", tmp_path).check_error(f"already exists: {tmp_path / 'tools'}")

    assert [path.name for path in tmp_path.rglob("*")] == ["tools"]
