"""`tidings serve --workers N`: processes with real clients, killed workers, and a killed parent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from tests.support.command import (
    GRACE,
    HELLO,
    TOKEN,
    Notifications,
    line_with,
    replace_file,
    run_command,
    serving,
    start_command,
    tidings,
)
from tests.support.receiver import receiving, verify
from tests.support.waiting import DEADLINE, is_running, is_served, until
from tests.support.wire_clients import LegacyWire, Stream, Wire, read_answer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the states of processes are read from /proc"),
]

PIDS = """
import os
def pids() -> list[int]:
    'Return the worker and its parent.'
    return [os.getpid(), os.getppid()]
"""

WAIT = """
import os, pathlib
starts, pipes = pathlib.Path({starts!r}), pathlib.Path({pipes!r})
number = len(list(starts.iterdir())) + 1
os.mkfifo(pipes / str(number))
(starts / "new").write_text(str(os.getpid()))
(starts / "new").rename(starts / str(number))
if number > 1:
    (pipes / str(number)).read_bytes()  # waits until the test writes to the pipe
"""


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    """A client that opens a connection for each request, so that any worker may accept it."""
    limits = httpx2.Limits(max_keepalive_connections=0)
    async with httpx2.AsyncClient(limits=limits, timeout=DEADLINE, verify=False) as client:
        yield client


@pytest.fixture
def pids_board(board: Path) -> Path:
    (board / "tools" / "pids.py").write_text(PIDS)
    return board


def read_pids(answer: dict[str, object]) -> tuple[int, int]:
    found = re.findall(r"\d+", json.dumps(answer["result"]["content"]))  # type: ignore[index]
    return int(found[0]), int(found[1])


async def find_workers(url: str, http: httpx2.AsyncClient, number: int) -> tuple[set[int], int]:
    """Call a tool until all workers have answered, and return their process ids and that of the parent."""
    workers: set[int] = set()
    parent = 0
    async with asyncio.timeout(DEADLINE):
        while len(workers) < number:
            answer = await Wire(url, http).post("tools/call", name="pids", arguments={})
            worker, parent = read_pids(read_answer(answer.text))
            workers.add(worker)
    assert len(workers) == number
    return workers, parent


def children_of(parent: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.add(int(path.parent.name))
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_clients_of_both_eras_are_served_by_all_workers_and_a_signal_ends_them(
    pids_board: Path, http: httpx2.AsyncClient
) -> None:
    async with serving(pids_board, "--workers", 3) as server:
        _, parent = await find_workers(server.url, http, 3)
        processes = {*children_of(parent), parent}
        assert len(processes) > 4  # NATS too
        for _ in range(3):
            told = Notifications()
            async with Client(
                streamable_http_client(server.url, http_client=http), mode="legacy", message_handler=told
            ) as client:
                found = {str((await client.call_tool("pids")).content) for _ in range(8)}
                assert len(found) == 1  # wherever the connections were accepted
                for feature in ("tools", "prompts", "resources"):  # a workspace announces them to a legacy session
                    await told.until(f"notifications/{feature}/list_changed")
                file = pids_board / "tools" / "hello.py"
                if file.exists():
                    file.unlink()
                else:
                    replace_file(file, HELLO)
                await told.until("notifications/tools/list_changed")
                names = {tool.name for tool in (await client.list_tools()).tools}
                assert ("hello" in names) is file.exists()
        async with Client(server.url) as modern, modern.listen(tools_list_changed=True) as changes:
            (pids_board / "tools" / "hello.py").unlink()
            await anext(changes)
            server.process.send_signal(signal.SIGINT)
            async for _ in changes:
                pass  # the stream ends with its result
        log = server.greeting + await server.stop()
        assert log.count("Serving") == log.count("stopping") == 1
        assert log.count("tool hello added") == 2
        assert not any(map(is_running, processes))


async def test_killed_worker_starts_again_and_its_sessions_are_unknown(
    pids_board: Path, http: httpx2.AsyncClient
) -> None:
    http.headers["Authorization"] = f"Bearer {TOKEN}"
    async with serving(pids_board, "--workers", 2, "--quiet", "--json", env={"TIDINGS_AUTH_TOKEN": TOKEN}) as server:
        async with httpx2.AsyncClient(verify=False, timeout=DEADLINE) as stranger:
            assert (await stranger.post(server.url, json={})).status_code == 401
        workers, _ = await find_workers(server.url, http, 2)
        wire = LegacyWire(server.url, http)
        await wire.shake_hands()
        killed, _ = read_pids(await wire.post("tools/call", name="pids", arguments={}))
        async with wire.stream() as stream:
            os.kill(killed, signal.SIGKILL)
            with pytest.raises((EOFError, httpx2.TransportError)):
                await read_all(stream)
        for _ in range(2):  # before and after the new start
            answer = await http.post(server.url, json={}, headers=wire.headers)
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Session not found")
            await until(lambda: not is_running(killed))
            survivors = workers - {killed}
            after, _ = await find_workers(server.url, http, 2)
            assert after > survivors
        again = LegacyWire(server.url, http)
        await again.shake_hands()
        log = await server.stop()
        assert log.count("ended with SIGKILL; ") == 1


async def read_all(stream: Stream) -> None:
    while True:
        await stream.message()


@pytest.mark.slow
async def test_webhook_is_managed_through_any_worker_and_survives_the_one_that_delivers_it(
    pids_board: Path, http: httpx2.AsyncClient
) -> None:
    with (pids_board / "tidings.toml").open("a") as settings:
        settings.write("\n[policy]\nwebhook_private = true\nwebhook_backoff = 0.05\nwebhook_timeout = 120\n")
    http.headers["Authorization"] = f"Bearer {TOKEN}"
    async with (
        receiving() as receiver,
        serving(pids_board, "--workers", 3, "--quiet", "--json", env={"TIDINGS_AUTH_TOKEN": TOKEN}) as server,
    ):
        command = ["subscriptions", server.url]
        add = [*command, "add", "hook", "--webhook", receiver.url, "--feature", "tools", "--json"]
        added = (await run_command(*add, token=TOKEN)).json_lines()
        secret = added[-1]["secret"]
        wire = Wire(server.url, http)
        await until_all_list(wire, lambda listed: [each["name"] for each in listed] == ["hook"])
        for _ in range(4):  # each command may reach another worker
            (listed,) = (await run_command(*command, "--json", token=TOKEN)).json_lines()
            assert (listed["name"], listed["webhook"]["state"]) == ("hook", "active")
        replace_file(pids_board / "tools" / "first.py", HELLO.replace("hello", "first"))
        delivery = await receiver.next()
        assert delivery.summary == "tools.list_changed added first"
        verify(delivery, secret, now=time.time())
        await until_all_list(wire, lambda listed: "lastSuccess" in listed[0]["webhook"])
        # The receiver does not answer, so the delivery is in progress when its worker is killed.
        receiver.gate.clear()
        replace_file(pids_board / "tools" / "hello.py", HELLO)
        delivery = await receiver.next()
        workers, parent = await find_workers(server.url, http, 3)
        deliverer = await find_connected(lambda: workers, receiver.port)
        os.kill(deliverer, signal.SIGKILL)
        repeated = await receiver.next()
        # Another id and no details, if the successor has other revisions: see docs/cluster.md.
        assert repeated.envelope["type"] == delivery.envelope["type"] == "tools.list_changed"
        assert receiver.came.empty()
        await until(lambda: deliverer not in children_of(parent))
        successor = await find_connected(lambda: children_of(parent), receiver.port)
        assert successor != deliverer  # another worker, or the one that was started instead
        receiver.gate.set()
        (pids_board / "tools" / "hello.py").unlink()
        assert (await receiver.next()).summary == "tools.list_changed removed hello"
        assert receiver.came.empty()
        removed = await run_command(*command, "remove", "hook", token=TOKEN)
        assert removed == (0, "", "Removed hook.\n")
        await until_all_list(wire, lambda listed: listed == [])
        assert (await run_command(*command, "--json", token=TOKEN)).json_lines() == []
        await server.stop()


async def until_all_list(wire: Wire, is_expected: Callable[[list[Any]], bool]) -> None:
    """Wait until all workers list these subscriptions: many answers in a row do."""
    in_a_row = 0
    async with asyncio.timeout(DEADLINE):
        while in_a_row < 20:
            answer = read_answer((await wire.post("dev.tidings/subscriptions/list")).text)
            in_a_row = in_a_row + 1 if is_expected(answer["result"]["subscriptions"]) else 0


async def find_connected(processes: Callable[[], set[int]], port: int) -> int:
    """Return the process that has a connection to a local port."""
    found: list[int] = []

    def find() -> bool:  # the kernel's table of connections may miss one while others change
        found[:] = [process for process in processes() if has_connection(process, port)]
        return len(found) == 1

    await until(find)
    return found[0]


def has_connection(process: int, port: int) -> bool:
    connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{each[9]}]" for each in connections if each[2].endswith(f":{port:04X}") and each[3] == "01"}
    found = set()
    for path in Path(f"/proc/{process}/fd").glob("*"):
        with suppress(FileNotFoundError):
            found.add(str(path.readlink()))
    return not found.isdisjoint(sockets)


async def test_no_process_survives_a_killed_parent(pids_board: Path, http: httpx2.AsyncClient) -> None:
    async with serving(pids_board, "--workers", 2) as server:
        _, parent = await find_workers(server.url, http, 2)
        processes = {*children_of(parent), parent}
        os.kill(parent, signal.SIGKILL)
        await until(lambda: not any(map(is_running, processes)))
        port = httpx2.URL(server.url).port
        assert port is not None
        assert not is_served(port)


async def test_killed_nats_server_starts_again(pids_board: Path, http: httpx2.AsyncClient) -> None:
    async with serving(pids_board, "--nats", "embedded") as server:
        _, parent = await find_workers(server.url, http, 1)
        (nats,) = (pid for pid in children_of(parent) if "nats-server" in command_of(pid))
        os.kill(nats, signal.SIGKILL)
        await server.line_with("the embedded NATS server has ended; starting it again")
        await server.line_with("connected to the cluster")
        assert (pids_board / ".tidings" / "nats").is_dir()
        async with start_command("serve", pids_board, "--port", 0, "--nats", "embedded") as other:
            await line_with(other.stderr, "the data of NATS is deleted at the end: another server uses this folder")
            await line_with(other.stderr, "Serving")  # with a watchdog, which ends NATS
        await server.stop()


async def test_worker_that_ends_leaves_the_data_of_nats(pids_board: Path, http: httpx2.AsyncClient) -> None:
    async with serving(pids_board, "--workers", 2, "--state", "none") as server:
        workers, parent = await find_workers(server.url, http, 2)
        (nats,) = (pid for pid in children_of(parent) if "nats-server" in command_of(pid))
        folders = nats_folders(nats)
        os.kill(workers.pop(), signal.SIGTERM)
        await server.line_with("ended with status 0")
        assert [folder.is_dir() for folder in folders] == [True, True]
        await server.stop()
        assert [folder.is_dir() for folder in folders] == [False, False]


def nats_folders(pid: int) -> tuple[Path, Path]:
    """Return the folders of the configuration and of the data of a NATS server."""
    file = Path(command_of(pid).rstrip("\0").rpartition("\0")[2])
    (store,) = re.findall(r'store_dir: "(.*)"', file.read_text())
    return file.parent, Path(store)


async def test_first_worker_may_end_before_the_others_have_started(board: Path, tmp_path: Path) -> None:
    starts, pipes = tmp_path / "starts", tmp_path / "pipes"
    starts.mkdir()
    pipes.mkdir()
    (board / "tools" / "wait.py").write_text(WAIT.format(starts=str(starts), pipes=str(pipes)))
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--port", 0, "--workers", 2) as process:
        await until((starts / "2").exists)
        os.kill(int((starts / "1").read_text()), signal.SIGKILL)
        await until((starts / "3").exists)
        await asyncio.to_thread((pipes / "2").write_bytes, b"")
        log = ""
        while "Serving" not in log:
            line = await process.stderr.readline()
            assert line, log
            log += line.decode()
        await asyncio.to_thread((pipes / "3").write_bytes, b"")
        process.terminate()
        assert await process.wait() == 0


async def test_worker_that_ends_during_its_first_start_ends_the_command(board: Path) -> None:
    (board / "tools" / "exit.py").write_text("import os\nos._exit(7)\n")
    async with asyncio.timeout(DEADLINE), start_command("serve", board, "--port", 0, "--workers", 2) as process:
        assert await asyncio.wait_for(process.wait(), GRACE) == 7
        assert b"Traceback" not in await process.stderr.read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stdio", "--workers", "2"], "--workers is for HTTP"),
        (["--workers", "0"], "--workers"),
        (["--workers", "2", "--state", "x.db"], "--state x.db is for one process"),
        (["--nats", "embedded", "--state", "x.db"], "--state x.db is for one process"),
        (["--workers", "2", "--nats-credentials", "x.creds"], "give its URL with --nats"),
        (["--nats", "http://127.0.0.1:1"], "a NATS URL has the form"),
    ],
)
def test_invalid_option_is_a_one_line_error(board: Path, options: list[str], message: str) -> None:
    tidings("serve", board, *options).check_error(message)
