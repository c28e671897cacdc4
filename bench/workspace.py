"""Measure the folder server: `python bench/workspace.py [--json] [--quick]`.

It runs real `tidings serve` processes with real clients. The figures of the shell framework come from the requirements
and from another machine; everything else is measured here, in one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mcp.client.client import Client

BARE = """
from mcp.server.mcpserver import MCPServer
MCPServer("bare").run("stdio")
"""


class Row(NamedTuple):
    key: str
    what: str
    value: float
    unit: str
    target: str
    is_met: bool | None


def fill(root: Path, tools: int) -> None:
    for folder in ("tools", "resources", "prompts"):
        (root / folder).mkdir()
    for number in range(tools):
        script(root, number, f"Tool {number}")


def script(root: Path, number: int, description: str) -> None:
    temporary = root / f".t{number}"
    temporary.write_text(f"#!/bin/sh\n# @describe {description}\necho {number}\n")
    temporary.chmod(0o755)
    temporary.replace(root / "tools" / f"t{number}.sh")


@asynccontextmanager
async def served(root: Path) -> AsyncIterator[tuple[str, int]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tidings", "serve", str(root), "--port", "0", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        started = json.loads(await process.stdout.readline())
        yield started["url"], process.pid
    finally:
        process.terminate()
        await process.wait()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def latencies(url: str, root: Path, rounds: int, *, is_busy: bool) -> list[float]:
    """Return the milliseconds from file changes to their notifications, at a client that only listens."""
    heard: asyncio.Queue[float] = asyncio.Queue()

    async def on_message(message: Any) -> None:
        heard.put_nowait(time.perf_counter())

    async def keep_listing() -> None:
        async with Client(url, mode="2026-07-28") as other:
            while True:
                await other.list_tools(cache_mode="bypass")

    found = []
    async with (
        Client(url, mode="2026-07-28", message_handler=on_message) as client,
        client.listen(tools_list_changed=True),
    ):
        lister = asyncio.create_task(keep_listing()) if is_busy else None
        for number in range(rounds):
            begin = time.perf_counter()
            script(root, 0, f"Change {number} {time.time_ns()}")
            found.append((await heard.get() - begin) * 1000)
        if lister is not None:
            lister.cancel()
    return found[1:]


async def heard_times(rounds: int) -> float:
    """Return the median of `latencies` with 1,000 tools, while another client requests lists."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        fill(root, 1000)
        async with served(root) as (url, _):
            return statistics.median(await latencies(url, root, rounds, is_busy=True))


async def cost_of_a_change(tools: int, rounds: int) -> float:
    """Return the milliseconds of server CPU per change."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        fill(root, tools)
        async with served(root) as (url, pid):
            await latencies(url, root, 5, is_busy=False)
            before = cpu_of(pid)
            await latencies(url, root, rounds, is_busy=False)
            return (cpu_of(pid) - before) / rounds * 1000


class Pipe:
    """A legacy session over stdio."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._id = 0

    async def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._id += 1
        message = {"jsonrpc": "2.0", "id": self._id, "method": method, "params": params or {}}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        while "id" not in (answer := json.loads(await self._process.stdout.readline())):
            pass
        result: dict[str, Any] = answer["result"]
        return result

    async def look(self) -> None:
        """Send the first request of a modern client."""
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        await self.ask("server/discover", {"_meta": meta})
        await self.ask("tools/list", {"_meta": meta})

    async def greet(self) -> None:
        client = {"name": "bench", "version": "1"}
        await self.ask("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client})
        assert self._process.stdin is not None
        self._process.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')


@asynccontextmanager
async def piped(*command: str, env: dict[str, str] | None = None) -> AsyncIterator[Pipe]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=64 << 20,
        env=env,
    )
    try:
        yield Pipe(process)
    finally:
        process.kill()
        await process.wait()


def bytecode_in(place: str) -> dict[str, str]:
    """Return an environment in which both servers have cached bytecode, as installed packages have."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return env | {"PYTHONPYCACHEPREFIX": place}


def children_cpu() -> float:
    """Return the CPU milliseconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1000


async def start_times(rounds: int) -> dict[str, float]:
    """Return milliseconds from process start to the first responses, and CPU, of Tidings and of a bare SDK server. Both
    take turns, so that slow phases of the machine affect both. The first run of each compiles and does not count."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as cache:
        fill(Path(place), 10)
        kinds = {"start": ("-m", "tidings", "serve", place, "--stdio"), "start_bare": ("-c", BARE)}
        for number in range(rounds + 1):
            for era in ("", "_modern"):
                for kind, command in kinds.items():
                    before, begin = children_cpu(), time.perf_counter()
                    async with piped(*command, env=bytecode_in(cache)) as pipe:
                        await (pipe.look() if era else pipe.greet())
                        taken = (time.perf_counter() - begin) * 1000
                    if number:
                        found.setdefault(kind + era, []).append(taken)
                        found.setdefault(f"{kind}{era}_cpu", []).append(children_cpu() - before)
    return {key: statistics.median(times) for key, times in found.items()}


async def rows(quick: bool, rounds: int) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        fill(root, 100 if quick else 1000)
        begin = time.perf_counter()
        async with piped("-m", "tidings", "serve", place, "--stdio") as pipe:
            await pipe.greet()
            await pipe.ask("tools/list")
            first = time.perf_counter() - begin
        found.append(Row("first_list", "start to the first tools/list, 1,000 tools", first, "s", "≤ 2", first <= 2))
        async with served(root) as (url, _):
            waits = sorted(await latencies(url, root, rounds, is_busy=True))
        median, late = statistics.median(waits), waits[int(len(waits) * 0.95)]
        found.append(
            Row("heard_median", "file change to notification, 1,000 tools, median", median, "ms", "≤ 60", median <= 60)
        )
        found.append(Row("heard_late", "the same, 95 %", late, "ms", "≤ 150", late <= 150))
    small, large = await cost_of_a_change(10, rounds), await cost_of_a_change(100 if quick else 1000, rounds)
    ratio = large / small
    found.append(Row("change_ratio", "CPU of a change, 1,000 tools over 10", ratio, "×", "≤ 2", ratio <= 2))
    with tempfile.TemporaryDirectory() as place:
        fill(Path(place), 100)
        async with piped("-m", "tidings", "serve", place, "--stdio") as pipe:
            await pipe.greet()
            begin = time.perf_counter()
            for _ in range(100):
                await pipe.ask("tools/list")
            lists = time.perf_counter() - begin
            calls = []
            for _ in range(rounds):
                begin = time.perf_counter()
                await pipe.ask("tools/call", {"name": "t0", "arguments": {}})
                calls.append((time.perf_counter() - begin) * 1000)
    faster = 28 / lists
    found.append(Row("lists", "100 tools/list, 100 tools, stdio: 28 s over ours", faster, "×", "≥ 100", faster >= 100))
    call = statistics.median(calls)
    found.append(Row("call", "tools/call of a shell script, median", call, "ms", "≤ 30", call <= 30))
    times = await start_times(3 if quick else 15)
    for era, what in (
        ("", "start to initialize, stdio"),
        ("_modern", "start to server/discover and tools/list, stdio"),
    ):
        for measure, name in (("", ""), ("_cpu", ", CPU")):
            ours, bare = times[f"start{era}{measure}"], times[f"start_bare{era}{measure}"]
            target = ("≤ the SDK's", ours <= bare) if measure else ("", None)
            found.append(Row(f"start{era}{measure}", f"{what}{name}", ours, "ms", *target))
            found.append(Row(f"start_bare{era}{measure}", "the same, a bare server of the SDK's", bare, "ms", "", None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="check that it works; the figures mean nothing")
    parser.add_argument("--rounds", type=int, help="number of rounds (60)")
    options = parser.parse_args()
    found = asyncio.run(rows(options.quick, options.rounds or (10 if options.quick else 60)))
    if options.json:
        print(json.dumps([row._asdict() for row in found], indent=1))
        return
    print("| what | here | target | |\n|---|---|---|---|")
    for row in found:
        verdict = {True: "met", False: "missed", None: ""}[row.is_met]
        print(f"| {row.what} | {row.value:.3g} {row.unit} | {row.target} | {verdict} |")


if __name__ == "__main__":
    main()
