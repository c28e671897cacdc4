"""Notifications counted on the wire.

A new legacy session gets one notification per list, then one for each real change, and none otherwise.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.support.workspaces import PROMPTS, RESOURCES, TOOLS, UPDATED, script, serve_http, write
from tidings.live import Live
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

LISTS = [PROMPTS, RESOURCES, TOOLS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tools", "resources", "prompts", "server.d"):
        (tmp_path / name).mkdir()
    add_tool(tmp_path, "test_tool")
    return tmp_path


def add_tool(root: Path, name: str) -> None:
    write(root, {f".{name}": script("A tool")})
    (root / f".{name}").replace(root / "tools" / f"{name}.sh")


class Session:
    """A session over standard input and output, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._id = 0
        self.notifications: list[str] = []

    async def send(self, method: str, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", "method": method, **message}).encode() + b"\n")
        await self._process.stdin.drain()

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        await self.send(method, id=self._id, params=params)
        while "id" not in (message := await self._read()):
            self.notifications.append(message["method"])
        result: dict[str, Any] = message["result"]
        return result

    async def list_all(self) -> None:
        for feature in ("tools", "prompts", "resources") * 5:
            await self.request(f"{feature}/list")

    async def wait_for_count(self, count: int) -> None:
        while len(self.notifications) < count:
            self.notifications.append((await self._read())["method"])

    async def finish(self) -> list[str]:
        """End the session, and return all its notifications."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self.notifications += [json.loads(line)["method"] async for line in self._process.stdout]
        await self._process.wait()
        return self.notifications

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        message: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return message


@asynccontextmanager
async def open_session(folder: Path, version: str = "2025-11-25") -> AsyncIterator[Session]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidings", "serve", str(folder), "--stdio"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            session = Session(process)
            client = {"name": "counter", "version": "1"}
            await session.request("initialize", protocolVersion=version, capabilities={}, clientInfo=client)
            await session.send("notifications/initialized")
            yield session
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_new_session_gets_one_notification_per_list(folder: Path) -> None:
    for _ in range(2):  # the second session gets them again
        async with open_session(folder) as session:
            await session.request("tools/list")
            await session.request("tools/list")
            await session.wait_for_count(3)
            await session.list_all()
            assert sorted(await session.finish()) == LISTS


async def test_protocol_2025_03_26_gets_no_list_changed(folder: Path) -> None:
    async with open_session(folder, "2025-03-26") as session:
        await session.request("resources/subscribe", uri="workspace:///marker.txt")
        add_tool(folder, "another")
        while "another" not in json.dumps(await session.request("tools/list")):
            pass
        (folder / "resources" / "marker.txt").write_text("1")
        await session.wait_for_count(1)
        assert set(await session.finish()) == {UPDATED}


async def test_real_change_is_one_notification(folder: Path) -> None:
    async with open_session(folder, "2025-06-18") as session:
        await session.wait_for_count(3)
        add_tool(folder, "another")
        await session.wait_for_count(4)
        (folder / "tools" / "another.sh").touch()
        await session.list_all()
        assert (await session.finish())[3:] == [TOOLS]


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

    async with open_session(folder) as session:
        await session.wait_for_count(6)
        assert session.notifications.count(TOOLS) >= 4
        start, before = time.monotonic(), count_runs()
        await session.list_all()
        # Requests don't run the script.
        assert count_runs() - before <= (time.monotonic() - start) / 0.3 + 1
        assert session.notifications.count(TOOLS) <= count_runs()


async def test_unsubscribe_by_uri_returns_an_empty_result(folder: Path) -> None:
    async with open_session(folder) as session:
        await session.wait_for_count(3)
        uri = "workspace:///notes.txt"
        assert await session.request("resources/subscribe", uri=uri) == {}
        assert await session.request("resources/unsubscribe", uri=uri) == {}
        (folder / "resources" / "notes.txt").write_text("x")
        await session.wait_for_count(4)
        assert (await session.finish())[3:] == [RESOURCES]


async def test_without_announce_only_changes_are_sent(folder: Path) -> None:
    write(folder, {"tidings.toml": "[policy]\nannounce = false\n"})
    async with open_session(folder) as session:
        await session.list_all()
        add_tool(folder, "another")
        await session.wait_for_count(1)
        assert await session.finish() == [TOOLS]


class Received(asyncio.Queue[str]):
    """The methods of the notifications that a client of the SDK received."""

    async def put_message(self, message: Any) -> None:
        self.put_nowait(message.method)


@asynccontextmanager
async def connect_2025_03_26(url: str, received: Received) -> AsyncIterator[ClientSession]:
    """Connect a client that supports no other version."""
    async with (
        streamable_http_client(url) as (read_stream, write_stream),
        ClientSession(read_stream, write_stream, message_handler=received.put_message) as client,
    ):
        params = types.InitializeRequestParams(
            protocol_version="2025-03-26",
            capabilities=types.ClientCapabilities(),
            client_info=types.Implementation(name="older", version="1"),
        )
        await client.send_request(types.InitializeRequest(params=params), types.InitializeResult)
        await client.send_notification(types.InitializedNotification())
        yield client


async def test_counts_are_the_same_over_http_for_each_client(folder: Path) -> None:
    workspace = Workspace(folder)
    legacy, modern, older = (Received(), Received()), Received(), Received()
    async with (
        asyncio.timeout(60),
        serve_http(Live(workspace, policy=workspace.settings.policy)) as url,
        Client(url, mode="legacy", message_handler=legacy[0].put_message) as one,
        Client(url, mode="legacy", message_handler=legacy[1].put_message) as two,
        Client(url, mode="2026-07-28", message_handler=modern.put_message) as third,
    ):
        for received in legacy:
            assert sorted([await received.get() for _ in range(3)]) == LISTS
        for _ in range(5):
            await one.list_tools(cache_mode="bypass")
            await two.list_prompts(cache_mode="bypass")
        add_tool(folder, "another")
        for received in legacy:
            assert await received.get() == TOOLS
        for _ in range(2):  # a stream that returns and missed nothing gets nothing
            async with third.listen(tools_list_changed=True, prompts_list_changed=True):
                await third.list_tools(cache_mode="bypass")
        async with (
            third.listen(tools_list_changed=True, prompts_list_changed=True),
            connect_2025_03_26(url, older) as fourth,
        ):
            (folder / "prompts" / "last.md").write_text("The end")
            for received in (*legacy, modern):
                assert await received.get() == PROMPTS
                assert received.empty()
            assert [prompt.name for prompt in (await fourth.list_prompts()).prompts] == ["last"]
            assert older.empty()
