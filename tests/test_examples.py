"""The examples run as their docstrings say, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.support.command import DEADLINE, GRACE, line_with
from tests.support.waiting import until_served

EXAMPLES = Path(__file__).parent.parent / "examples"


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def call(url: str, *arguments: str) -> str:
    async with running(str(EXAMPLES / "call.py"), url, *arguments) as process:
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()


@pytest.mark.parametrize("era", [[], ["--legacy"]], ids=["modern", "legacy"])
def test_the_board_notifies_its_clients(era: list[str]) -> None:
    async def scenario() -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}/mcp"
        async with asyncio.timeout(DEADLINE), running(str(EXAMPLES / "board.py"), "--port", str(port)) as board:
            assert "Serving the board" in await line_with(board.stdout, "Serving")
            await until_served(port)
            async with running(str(EXAMPLES / "watch.py"), url, *era) as watcher:
                await line_with(watcher.stdout, "watching")
                assert await call(url, "open_sprint") == "open\n"
                added = await line_with(watcher.stdout, "tools/list_changed")
                assert json.loads(added.split(" ", 1)[1])["operation"] == "added"
                assert await call(url, "add_task", "title=Ship it") == "2 tasks\n"
                assert "board://sprint" in await line_with(watcher.stdout, "resources/updated")
                board.send_signal(signal.SIGTERM)
                await asyncio.wait_for(board.wait(), GRACE)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("example", "tool", "arguments", "added"),
    [("lowlevel.py", "hello", {}, "goodbye"), ("fast.py", "learn", {"word": "moin"}, "moin")],
)
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_a_stdio_example_notifies_its_client(
    example: str, tool: str, arguments: dict[str, str], added: str, mode: str
) -> None:
    if example == "fast.py":
        pytest.importorskip("fastmcp")

    async def scenario() -> None:
        methods: asyncio.Queue[str] = asyncio.Queue()

        async def on_message(message: object) -> None:
            methods.put_nowait(str(getattr(message, "method", message)))

        parameters = StdioServerParameters(command=sys.executable, args=[str(EXAMPLES / example)])
        async with (
            asyncio.timeout(DEADLINE),
            Client(stdio_client(parameters), mode=mode, message_handler=on_message) as client,
        ):
            if mode == "legacy":
                await client.call_tool(tool, arguments)
                assert await methods.get() == "notifications/tools/list_changed"
            else:
                async with client.listen(tools_list_changed=True):
                    await client.call_tool(tool, arguments)
                    assert await methods.get() == "notifications/tools/list_changed"
            listed = await client.list_tools(cache_mode="bypass")
            assert added in [each.name for each in listed.tools]

    asyncio.run(scenario())
