"""Notifications counted by clients.

A new legacy session gets one notification per list, then one for each real change, and none otherwise.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from mcp.client.stdio import StdioServerParameters

from tests.support.command import TIDINGS, replace_file
from tests.support.forking import forked_command
from tests.support.sdk_clients import MODERN, MUTED, RecordingClient, open_client
from tests.support.workspaces import MARKER, PROMPTS, RESOURCES, TOOLS, UPDATED, script, serve_http, write
from tidings.live import Live
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

LISTS = [PROMPTS, RESOURCES, TOOLS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"resources/marker.txt": "0", "tools/test_tool.sh": script("A tool")})
    for name in ("prompts", "server.d"):
        (tmp_path / name).mkdir()
    return tmp_path


def add_tool(root: Path, name: str) -> None:
    write(root, {f".{name}": script("A tool")})
    (root / f".{name}").replace(root / "tools" / f"{name}.sh")


def open_session(folder: Path, version: str = "2025-11-25") -> AbstractAsyncContextManager[RecordingClient]:
    """Connect a client over standard input and output."""
    command, *arguments = forked_command(TIDINGS, "serve", folder, "--stdio")
    return open_client(StdioServerParameters(command=command, args=arguments), version)


def get_methods(client: RecordingClient) -> list[str]:
    return [received.method for received in client.received]


async def wait_for_count(client: RecordingClient, count: int) -> None:
    await client.until(lambda: len(client.received) >= count, f"notification {count}")


async def list_all(client: RecordingClient) -> None:
    for feature in ("tools", "prompts", "resources") * 5:
        await client.request(f"{feature}/list")


async def settle(client: RecordingClient, folder: Path) -> list[str]:
    """Return the notifications until now. That of a marker file comes after all of them."""
    await client.subscribe(MARKER)
    replace_file(folder / "resources" / "marker.txt", "1")
    await client.until(lambda: UPDATED in get_methods(client), "the marker")
    *methods, marker = get_methods(client)
    assert marker == UPDATED
    return methods


async def test_new_session_gets_one_notification_per_list(folder: Path) -> None:
    for _ in range(2):  # the second session gets them again
        async with open_session(folder) as client:
            await client.request("tools/list")
            await client.request("tools/list")
            await wait_for_count(client, 3)
            await list_all(client)
            assert sorted(await settle(client, folder)) == LISTS
        replace_file(folder / "resources" / "marker.txt", "0")


async def test_protocol_2025_03_26_gets_no_list_changed(folder: Path) -> None:
    async with open_session(folder, MUTED) as client:
        add_tool(folder, "another")
        while len((await client.request("tools/list"))["tools"]) < 2:
            pass
        assert await settle(client, folder) == []


async def test_real_change_is_one_notification(folder: Path) -> None:
    async with open_session(folder, "2025-06-18") as client:
        await wait_for_count(client, 3)
        add_tool(folder, "another")
        await wait_for_count(client, 4)
        (folder / "tools" / "another.sh").touch()
        await list_all(client)
        assert (await settle(client, folder))[3:] == [TOOLS]


async def test_changing_registration_is_one_notification_per_run(folder: Path) -> None:
    write(
        folder,
        {
            "server.d/register.sh": "#!/bin/sh\n"
            'echo run >> "$TIDINGS_WORKSPACE/runs"\n'
            'number=$(wc -l < "$TIDINGS_WORKSPACE/runs" | tr -d " ")\n'
            'echo "{\\"tools\\": [{\\"name\\": \\"n$number\\", \\"path\\": \\"test_tool.sh\\"}]}"\n',
            "tidings.toml": "[register]\nttl = 0.3\n",
        },
    )

    def count_runs() -> int:
        return len((folder / "runs").read_text().splitlines())

    async with open_session(folder) as client:
        await wait_for_count(client, 6)
        assert get_methods(client).count(TOOLS) >= 4
        start, before = time.monotonic(), count_runs()
        await list_all(client)
        # Requests don't run the script.
        assert count_runs() - before <= (time.monotonic() - start) / 0.3 + 1
        assert get_methods(client).count(TOOLS) <= count_runs()


async def test_unsubscribe_by_uri_returns_an_empty_result(folder: Path) -> None:
    async with open_session(folder) as client:
        await wait_for_count(client, 3)
        uri = "workspace:///notes.txt"
        assert await client.request("resources/subscribe", uri=uri) == {}
        assert await client.request("resources/unsubscribe", uri=uri) == {}
        (folder / "resources" / "notes.txt").write_text("x")
        await wait_for_count(client, 4)
        assert (await settle(client, folder))[3:] == [RESOURCES]


async def test_without_announce_only_changes_are_sent(folder: Path) -> None:
    write(folder, {"tidings.toml": "[policy]\nannounce = false\n"})
    async with open_session(folder) as client:
        await list_all(client)
        add_tool(folder, "another")
        await wait_for_count(client, 1)
        assert await settle(client, folder) == [TOOLS]


async def test_counts_are_the_same_over_http_for_each_client(folder: Path) -> None:
    workspace = Workspace(folder)
    async with (
        serve_http(Live(workspace, policy=workspace.settings.policy)) as url,
        open_client(url, "2025-06-18") as one,
        open_client(url, "2025-11-25") as two,
        open_client(url, MUTED) as muted,
        open_client(url, MODERN) as modern,
    ):
        for client in (one, two):
            await wait_for_count(client, 3)
            await list_all(client)
        add_tool(folder, "another")
        for client in (one, two):
            await wait_for_count(client, 4)
        for _ in range(2):  # a stream that returns and missed nothing gets nothing
            async with modern.listen():
                await list_all(modern)
        async with modern.listen():
            (folder / "prompts" / "last.md").write_text("The end")
            for client, expected in (
                (one, [*LISTS, TOOLS, PROMPTS]),
                (two, [*LISTS, TOOLS, PROMPTS]),
                (modern, [PROMPTS]),
            ):
                await wait_for_count(client, len(expected))
                methods = get_methods(client)
                assert sorted(methods[:3]) + methods[3:] == expected
            [prompt] = (await muted.request("prompts/list"))["prompts"]
            assert (prompt["name"], muted.received) == ("last", [])
