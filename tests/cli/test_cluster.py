"""`tidings cluster status` with a real NATS server and replicas in this process. Covers `cluster/status.py`."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from mcp.client.client import Client
from mcp.server.mcpserver import MCPServer

from tests.support.command import run_command
from tests.support.waiting import until
from tidings import Live
from tidings.cluster import Nats
from tidings.cluster.embedded import EmbeddedNats

pytestmark = pytest.mark.anyio


async def run_status(*arguments: str) -> tuple[int, str, str]:
    command = (sys.executable, "-m", "tidings", "cluster", "status", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_status_shows_the_replicas_and_fails_if_they_disagree(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path) as nats:
        async with AsyncExitStack() as stack:
            lives = [Live(MCPServer("board", log_level="CRITICAL"), cluster=Nats(nats.url)) for _ in range(2)]
            for live in lives:
                stack.push_async_callback(leave, live)
                client = await stack.enter_async_context(Client(live.server))
                await client.list_tools()
            lives[0].tools.add(lambda: "ok", name="deploy")
            await until(lambda: all("deploy" in live.catalog.tools and live.find_degraded() == [] for live in lives))

            status, output, errors = await run_status("--nats", nats.url, "--json", "--timeout", "60")
            assert (status, errors) == (0, "")
            replicas = [json.loads(line) for line in output.splitlines()]
            assert [replica["server"] for replica in replicas] == ["board", "board"]
            assert sorted(replica["items"] for replica in replicas) == [0, 1]
            assert all(replica["consistent"] for replica in replicas)

            # A replica whose list differs: its clients alone see this change.
            lives[1].catalog.tools.mark_changed("another")
            different = lives[1].catalog.tools.version.digest
            await until(lambda: has_reported(lives[0], different))
            status, output, errors = await run_status("--nats", nats.url, "--name", "board", "--timeout", "1")
            assert status == 1
            assert "the replicas of board have different lists" in errors
            assert len(output.splitlines()) == 3  # a line for each replica, however long


async def leave(live: Live) -> None:
    live.stop()
    await until(lambda: live.replica is not None and not live.replica.is_running)


def has_reported(live: Live, digest: str) -> bool:
    assert live.replica is not None
    return any(info.digests["tools"] == digest for info in live.replica.state.replicas.values())


async def test_a_missing_command_is_a_one_line_error() -> None:
    (await run_command("cluster")).check_error("Missing command; see `tidings cluster --help`")


@pytest.mark.parametrize("options", [[], ["--name", "board"]])
async def test_status_without_nats_is_one_line(options: list[str]) -> None:
    status, output, errors = await run_status("--nats", "nats://127.0.0.1:9", "--timeout", "1", *options)
    assert status == 2
    assert output == ""
    assert len(errors.splitlines()) == 1
    assert "nats://127.0.0.1:9: nats: no servers available" in errors


async def test_status_without_permission_names_the_reason_and_no_password(tmp_path: Path) -> None:
    limited = 'permissions: {publish: ["$JS.API.STREAM.>"], subscribe: ">"}'
    users = f'{{user: all, password: a}}, {{user: limited, password: "secret", {limited}}}'
    with EmbeddedNats(tmp_path, token=False, config=f"authorization {{ users: [{users}] }}") as nats:
        live = Live(MCPServer("board", log_level="CRITICAL"), cluster=Nats(nats.url.replace("//", "//all:a@")))
        async with Client(live.server) as client:
            await client.list_tools()
            await until(lambda: live.find_degraded() == [])
            await leave(live)
        url = nats.url.replace("//", "//limited:secret@")
        status, _, errors = await run_status("--nats", url, "--name", "board", "--timeout", "2")
    assert status == 2
    assert "board were not read within 2 s: the NATS server denies" in errors.splitlines()[-1]
    assert "secret" not in errors


async def test_status_of_an_unknown_server_creates_nothing(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path) as nats:
        assert await run_status("--nats", nats.url, "--name", "bord") == (0, "", "There are no replicas.\n")
        assert await Nats(nats.url).list_servers() == []
