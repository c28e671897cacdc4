"""Notifications counted on the wire: one triplet for a new legacy session, one for each real change, none otherwise."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
import uvicorn
from mcp.client.client import Client
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.support.waiting import until
from tidings.live import Live
from tidings.workspace.source import Workspace

LISTS = [f"notifications/{feature}/list_changed" for feature in ("prompts", "resources", "tools")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tools", "resources", "prompts", "server.d"):
        (tmp_path / name).mkdir()
    add_tool(tmp_path, "test_tool", "A test tool")
    return tmp_path


def add_tool(root: Path, name: str, description: str) -> None:
    temporary = root / f".{name}"
    temporary.write_text(f"#!/bin/sh\n# @describe {description}\necho ok\n")
    temporary.chmod(temporary.stat().st_mode | stat.S_IXUSR)
    temporary.replace(root / "tools" / f"{name}.sh")


class Pipe:
    """A session over standard input and output, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._id = 0
        self.told: list[str] = []

    async def send(self, method: str, params: dict[str, Any] | None = None) -> None:
        await self._write({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})

    async def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._id += 1
        await self._write({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params or {}})
        while "id" not in (message := await self._read()):
            self.told.append(message["method"])
        result: dict[str, Any] = message["result"]
        return result

    async def until(self, count: int) -> None:
        while len(self.told) < count:
            self.told.append((await self._read())["method"])

    async def finish(self) -> list[str]:
        """End the session, and return all that was told in it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self.told += [json.loads(line)["method"] for line in (await self._process.stdout.read()).splitlines()]
        await self._process.wait()
        return self.told

    async def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        message: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return message


@asynccontextmanager
async def session(folder: Path, version: str) -> AsyncIterator[Pipe]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidings",
        "serve",
        str(folder),
        "--stdio",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            pipe = Pipe(process)
            client = {"name": "counter", "version": "1"}
            await pipe.ask("initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": client})
            await pipe.send("notifications/initialized")
            yield pipe
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def be_busy(pipe: Pipe) -> None:
    for _ in range(5):
        await pipe.ask("tools/list")
        await pipe.ask("prompts/list")
        await pipe.ask("resources/list")


def test_a_fresh_session_gets_one_triplet_and_then_none(folder: Path) -> None:
    async def scenario() -> None:
        for _ in range(2):  # and a new session gets it again
            async with session(folder, "2025-11-25") as pipe:
                await pipe.ask("tools/list")
                await pipe.ask("tools/list")
                await pipe.until(3)
                await be_busy(pipe)
                assert sorted(await pipe.finish()) == LISTS

    asyncio.run(scenario())


def test_protocol_2025_03_26_gets_none(folder: Path) -> None:
    async def scenario() -> None:
        async with session(folder, "2025-03-26") as pipe:
            await pipe.ask("resources/subscribe", {"uri": "workspace:///marker.txt"})
            await pipe.ask("tools/list")
            add_tool(folder, "another", "Another")
            while "another" not in json.dumps(await pipe.ask("tools/list")):
                pass
            (folder / "resources" / "marker.txt").write_text("1")
            await pipe.until(1)
            assert set(await pipe.finish()) == {"notifications/resources/updated"}

    asyncio.run(scenario())


def test_a_real_change_is_one_notification_of_its_feature(folder: Path) -> None:
    async def scenario() -> None:
        async with session(folder, "2025-06-18") as pipe:
            await pipe.until(3)
            add_tool(folder, "another", "Another")
            await pipe.until(4)
            (folder / "tools" / "another.sh").touch()
            await be_busy(pipe)
            assert (await pipe.finish())[3:] == ["notifications/tools/list_changed"]

    asyncio.run(scenario())


@asynccontextmanager
async def older_client(url: str, listener: Any) -> AsyncIterator[ClientSession]:
    """A client that speaks 2025-03-26 and nothing else."""
    async with (
        streamable_http_client(url) as (read_stream, write_stream),
        ClientSession(read_stream, write_stream, message_handler=listener) as client,
    ):
        await client.send_request(
            types.InitializeRequest(
                params=types.InitializeRequestParams(
                    protocol_version="2025-03-26",
                    capabilities=types.ClientCapabilities(),
                    client_info=types.Implementation(name="older", version="1"),
                )
            ),
            types.InitializeResult,
        )
        await client.send_notification(types.InitializedNotification())
        yield client


def test_a_registration_that_never_prints_the_same_is_told_once_per_run(folder: Path) -> None:
    script = folder / "server.d" / "register.sh"
    script.write_text(
        "#!/bin/sh\n"
        'echo run >> "$TIDINGS_WORKSPACE/runs"\n'
        'number=$(wc -l < "$TIDINGS_WORKSPACE/runs" | tr -d " ")\n'
        'echo "{\\"tools\\": [{\\"name\\": \\"n$number\\", \\"path\\": \\"test_tool.sh\\"}]}"\n'
    )
    script.chmod(0o755)
    (folder / "tidings.toml").write_text("[register]\nttl = 0.3\n")

    async def scenario() -> None:
        async with session(folder, "2025-11-25") as pipe:
            await pipe.until(6)
            assert pipe.told.count("notifications/tools/list_changed") >= 4
            begin, before = time.monotonic(), len((folder / "runs").read_text().splitlines())
            await be_busy(pipe)
            runs = len((folder / "runs").read_text().splitlines())
            # On its own clock, whatever is asked meanwhile.
            assert runs - before <= (time.monotonic() - begin) / 0.3 + 1
            assert pipe.told.count("notifications/tools/list_changed") <= runs

    asyncio.run(scenario())


def test_unsubscribing_by_uri_answers_nothing_and_ends_it(folder: Path) -> None:
    async def scenario() -> None:
        async with session(folder, "2025-11-25") as pipe:
            await pipe.until(3)
            uri = {"uri": "workspace:///notes.txt"}
            assert await pipe.ask("resources/subscribe", uri) == {}
            assert await pipe.ask("resources/unsubscribe", uri) == {}
            (folder / "resources" / "notes.txt").write_text("x")
            await pipe.until(4)
            assert (await pipe.finish())[3:] == ["notifications/resources/list_changed"]

    asyncio.run(scenario())


def test_without_announce_nobody_is_told_before_something_changed(folder: Path) -> None:
    (folder / "tidings.toml").write_text("[policy]\nannounce = false\n")

    async def scenario() -> None:
        async with session(folder, "2025-11-25") as pipe:
            await be_busy(pipe)
            add_tool(folder, "another", "Another")
            await pipe.until(1)
            assert await pipe.finish() == ["notifications/tools/list_changed"]

    asyncio.run(scenario())


def test_the_counts_hold_over_http_for_each_client(folder: Path) -> None:
    async def scenario() -> None:
        workspace = Workspace(folder)
        live = Live(workspace, policy=workspace.settings.policy)
        server = uvicorn.Server(uvicorn.Config(live.http_app(), port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
        heard: list[asyncio.Queue[str]] = [asyncio.Queue(), asyncio.Queue()]

        def listener(queue: asyncio.Queue[str]) -> Any:
            async def on_message(message: Any) -> None:
                queue.put_nowait(message.method)

            return on_message

        async with (
            asyncio.timeout(60),
            Client(url, mode="legacy", message_handler=listener(heard[0])) as one,
            Client(url, mode="legacy", message_handler=listener(heard[1])) as two,
        ):
            for queue in heard:
                assert sorted([await queue.get() for _ in range(3)]) == LISTS
            for _ in range(5):
                await one.list_tools(cache_mode="bypass")
                await two.list_prompts(cache_mode="bypass")
            add_tool(folder, "another", "Another")
            for queue in heard:
                assert await queue.get() == "notifications/tools/list_changed"
            muted: asyncio.Queue[str] = asyncio.Queue()
            modern: asyncio.Queue[str] = asyncio.Queue()
            async with Client(url, mode="2026-07-28", message_handler=listener(modern)) as third:
                for _ in range(2):  # a stream that comes back and missed nothing is told nothing
                    async with third.listen(tools_list_changed=True, prompts_list_changed=True):
                        await third.list_tools(cache_mode="bypass")
                async with (
                    third.listen(tools_list_changed=True, prompts_list_changed=True),
                    older_client(url, listener(muted)) as older,
                ):
                    (folder / "prompts" / "last.md").write_text("The end")
                    for queue in (*heard, modern):
                        assert await queue.get() == "notifications/prompts/list_changed"
                        assert queue.empty()
                    assert [prompt.name for prompt in (await older.list_prompts()).prompts] == ["last"]
                    assert muted.empty()
        server.should_exit = True
        live.stop()
        await serving

    asyncio.run(scenario())
