"""The examples run as their docstrings say, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.command import DEADLINE, GRACE, Notifications, line_with, start_command, start_process
from tests.support.forking import forked_command
from tests.support.waiting import free_port, until_served

pytestmark = pytest.mark.anyio

EXAMPLES = Path(__file__).parent.parent / "examples"


def running(example: str, *arguments: str) -> AbstractAsyncContextManager[Any]:
    env = {"PYTHONUNBUFFERED": "1"}
    command = forked_command(EXAMPLES / example, *arguments)
    return start_process(*command, env=env, stderr=asyncio.subprocess.DEVNULL)


async def call(url: str, *arguments: str) -> str:
    async with running("call.py", url, *arguments) as process:
        output: bytes = (await process.communicate())[0]
        assert process.returncode == 0
        return output.decode()


@pytest.mark.parametrize("era", [[], ["--legacy"]], ids=["modern", "legacy"])
async def test_the_board_notifies_its_clients(era: list[str]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    async with asyncio.timeout(DEADLINE), running("board.py", "--port", str(port)) as board:
        assert "Serving the board" in await line_with(board.stdout, "Serving")
        await until_served(port)
        watched = ("--feature", "tools", "--uri", "board://sprint", "--json")
        async with start_command("watch", url, *watched, *era) as watcher:
            await line_with(watcher.stderr, "Watching")
            assert await call(url, "open_sprint") == "open\n"
            assert json.loads(await line_with(watcher.stdout, "close_sprint"))["operation"] == "added"
            assert await call(url, "add_task", "title=Ship it") == "2 tasks\n"
            assert json.loads(await line_with(watcher.stdout, "board://sprint"))["operation"] == "updated"
            board.send_signal(signal.SIGTERM)
            await asyncio.wait_for(board.wait(), GRACE)


async def test_the_mirror_follows_the_board() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    async with asyncio.timeout(DEADLINE), running("board.py", "--port", str(port)):
        await until_served(port)
        async with running("mirror.py", url, "--uri", "board://sprint") as mirror:
            await line_with(mirror.stdout, "tools, fresh")
            assert await call(url, "open_sprint") == "open\n"
            assert await line_with(mirror.stdout, "tools") == "added tools close_sprint\n"
            await call(url, "add_task", "title=Ship it")
            await line_with(mirror.stdout, "content board://sprint")


@pytest.mark.parametrize(
    ("example", "tool", "arguments", "added"),
    [("lowlevel.py", "hello", {}, "goodbye"), ("fast.py", "learn", {"word": "moin"}, "moin")],
)
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_stdio_example_notifies_its_client(
    example: str, tool: str, arguments: dict[str, str], added: str, mode: str
) -> None:
    if example == "fast.py":
        pytest.importorskip("fastmcp")

    told = Notifications()
    command, *options = forked_command(EXAMPLES / example)
    parameters = StdioServerParameters(command=command, args=options)
    async with (
        asyncio.timeout(DEADLINE),
        Client(stdio_client(parameters), mode=mode, message_handler=told) as client,
        nullcontext() if mode == "legacy" else client.listen(tools_list_changed=True),
    ):
        await client.call_tool(tool, arguments)
        await told.until("notifications/tools/list_changed")
        listed = await client.list_tools(cache_mode="bypass")
        assert added in [each.name for each in listed.tools]


async def test_the_receiver_prints_events_of_the_server() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    async with asyncio.timeout(DEADLINE), running("events.py", "--port", str(port)):
        await until_served(port)
        async with running("event_receiver.py", url, "comment.created", '{"document_id": "d1"}') as receiver:
            await line_with(receiver.stdout, "Subscribed")
            await call(url, "comment", "document_id=d2", "text=other")
            event_id = await call(url, "comment", "document_id=d1", "text=Hello")
            event = json.loads(await line_with(receiver.stdout, "eventId"))
            assert (event["eventId"], event["data"]["text"]) == (event_id.strip(), "Hello")
            receiver.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(receiver.wait(), GRACE) == 0
