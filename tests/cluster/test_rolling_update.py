"""A rolling update: a replica of an earlier version and one of this version share their items.

The earlier version is that of the last commit with another `src/`, so the test needs the history of the repository.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import pytest
from mcp.client.client import Client

from tests.support.waiting import DEADLINE
from tidings.cluster.embedded import EmbeddedNats

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

SERVER = """
import sys
from mcp.server.mcpserver import MCPServer
import tidings
from tidings.cluster import Nats

label, url = sys.argv[1:]
server = MCPServer("board", log_level="INFO")
live = tidings.Live(server, cluster=Nats(url))


@server.tool(name=f"file_of_{label}")
def file() -> str:
    return tidings.__file__


@server.tool(name=f"add_to_{label}")
def add(name: str) -> str:
    def added() -> str:
        return f"{name} of {label}"

    live.tools.add(added, name=name)
    return "added"


live.run("http", port=0)
"""


def git(*arguments: str) -> bytes:
    """Return the output of a command, or skip the test if there is no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"there is no git history, and so no earlier version to build: {reason.decode().strip()}")


def find_earlier_commit() -> str:
    present = git("rev-parse", "HEAD:src")
    for commit in git("log", "--format=%H", "--max-count=50", "--", "src").decode().split():
        if git("rev-parse", f"{commit}:src") != present:
            return commit
    pytest.skip("no earlier commit has another src/: the history is too short, as in a shallow clone")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the earlier version, and return the folder of its content."""
    commit = find_earlier_commit()
    source, content = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(git("archive", "--format=tar", commit))) as archive:
        archive.extractall(source, filter="data")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(content)]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=DEADLINE)
    (wheel,) = content.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive_of_wheel:
        archive_of_wheel.extractall(content)
    return content


@asynccontextmanager
async def replica(label: str, url: str, path: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a replica with the package in this folder. Yield its URL and its process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, label, url),
        env=os.environ | {"PYTHONPATH": str(path), "COLUMNS": "1000"},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    reading = None
    try:
        log = b""
        async with asyncio.timeout(DEADLINE):
            while not (found := re.search(rb"running on (http://127\.0\.0\.1:\d+)", log)):
                line = await process.stderr.readline()
                assert line, log.decode()
                log += line
        reading = asyncio.create_task(process.stderr.read())  # so that its pipe is never full
        yield f"{found[1].decode()}/mcp", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if reading is not None:
            await reading


class Listening:
    """A client of one replica, and the changes that it is told of."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._told = asyncio.Event()

    async def follow(self) -> None:
        async with self._client.listen(tools_list_changed=True) as changes:
            self._told.set()  # what changed before the stream was open is not notified
            async for _ in changes:
                self._told.set()

    async def until(self, *names: str) -> None:
        """Wait until the list has exactly these tools. It is read again only after a notification."""
        async with asyncio.timeout(DEADLINE):
            while [tool.name for tool in (await self._client.list_tools(cache_mode="bypass")).tools] != sorted(names):
                await self._told.wait()
                self._told.clear()

    async def call(self, tool: str, **arguments: str) -> str:
        result = await self._client.call_tool(tool, arguments)
        assert not result.is_error, result
        return str((result.structured_content or {})["result"])


async def test_items_calls_and_notifications_cross_between_two_versions(earlier: Path) -> None:
    with EmbeddedNats() as nats:
        async with (
            replica("old", nats.url, earlier) as (old_url, old_process),
            replica("new", nats.url, ROOT / "src") as (new_url, _),
            Client(old_url) as old_client,
            Client(new_url) as new_client,
        ):
            old, new = Listening(old_client), Listening(new_client)
            following = [asyncio.create_task(each.follow()) for each in (old, new)]
            tools = ["file_of_old", "file_of_new", "add_to_old", "add_to_new"]
            for each in (old, new):
                await each.until(*tools)
                assert Path(await each.call("file_of_old")).is_relative_to(earlier)
                assert Path(await each.call("file_of_new")).is_relative_to(ROOT / "src")
            for caller, label in ((new, "old"), (old, "new")):  # each call is forwarded
                await caller.call(f"add_to_{label}", name=f"added_to_{label}")
                tools.append(f"added_to_{label}")
                for each in (old, new):
                    await each.until(*tools)
                    assert await each.call(f"added_to_{label}") == f"added_to_{label} of {label}"
            old_process.terminate()
            await new.until("file_of_new", "add_to_new", "added_to_new")
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
