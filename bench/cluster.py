"""Measure a cluster: `python bench/cluster.py [--json] [--quick]`.

Real servers in processes of their own, one NATS server, and clients in this process that write HTTP themselves, all on
this machine. The clusters to compare run at the same time and take turns. The figures are wall time, so they need cores
for all processes: with fewer cores than replicas, more replicas cannot be faster. CPU times do not depend on that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import selectors
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `bench` and `tidings`, when run as a script

import mcp_types as types
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bench.measuring import Row, Scale, machine, middle, ratio, row, written
from tidings import Live, Policy
from tidings.cluster import Nats
from tidings.cluster.embedded import EmbeddedNats

CHANGING = "changing"
BURST = 50
"""Contents that change at once in a round of deliveries."""
CALLERS = 32
SIZES = (1, 2, 4)
CALL_SECONDS = 1.5
DEADLINE = 120.0
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


# The server


def serve(name: str, url: str, tools: int, is_first: bool) -> None:
    """Serve one replica. It prints its port, and with `tools` the seconds until it has all of them."""
    started, used = time.monotonic(), time.process_time()

    async def list_many(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name=f"tool_{number:05}", input_schema=SCHEMA) for number in range(tools)]
        )

    server: Any = MCPServer(name, log_level="WARNING")
    if is_first and tools:  # an MCPServer takes a millisecond for each tool
        server = Server(name, on_list_tools=list_many)
    live = Live(server, cluster=Nats(url), policy=Policy(max_streams_per_address=50_000))

    def work(text: str) -> str:
        """Search the tickets of one sprint for a text."""
        return text

    async def change(request: Request) -> Response:
        live.tools.update(CHANGING, description=request.query_params["text"])
        return Response()

    async def burst(request: Request) -> Response:
        for number in range(BURST):
            live.resources.updated(f"bench://item/{number}")
        return Response()

    async def state(request: Request) -> Response:
        assert live.replica is not None
        return JSONResponse({"tools": len(live.catalog.tools.snapshot()), "replicas": len(live.replica.state.replicas)})

    if isinstance(server, MCPServer):
        for tool in ("here", CHANGING, "there") if is_first else ("here",):
            server.add_tool(work, name=tool)
        for function in (change, burst, state):
            server.custom_route(f"/{function.__name__}", methods=["POST"])(function)

    async def report() -> None:
        assert live.replica is not None
        while len(live.catalog.tools.snapshot()) < tools or live.replica.id not in live.replica.state.replicas:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        print(json.dumps({"ready": time.monotonic() - started, "cpu": time.process_time() - used}), flush=True)

    def start_report() -> None:
        live.bridge.start_task(report())

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
        live.bridge.on_bind(start_report)
        from tidings.http.app import serve_app

        serve_app(live.http_app(), sockets=[listener], log_level="warning")


class Replica:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.ready = 0.0
        """Seconds from the end of its imports until it had all items and was a member."""
        self.cpu = 0.0
        """The CPU seconds of that."""

    async def read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await self.process.stdout.readline()
        values: dict[str, float] = json.loads(line)
        return values

    def used(self) -> float:
        """Return the CPU seconds of its event loop."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    async def ask(self, path: str) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 200 " in head, head
        return json.loads(body) if body else None


@asynccontextmanager
async def replica(name: str, url: str, tools: int = 0, *, is_first: bool = False) -> AsyncIterator[Replica]:
    options = ["--serve", name, "--nats", url, "--tools", str(tools), *(["--first"] if is_first else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    one = Replica(process)
    try:
        one.port = int((await one.read())["port"])
        found = await one.read()
        one.ready, one.cpu = found["ready"], found["cpu"]
        yield one
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def cluster(size: int, url: str) -> AsyncIterator[list[Replica]]:
    """Run a cluster of its own name."""
    async with AsyncExitStack() as stack:
        starting = (replica(f"bench-{size}", url, is_first=number == 0) for number in range(size))
        found = list(await asyncio.gather(*map(stack.enter_async_context, starting)))
        async with asyncio.timeout(DEADLINE):
            while {(await each.ask("/state"))["replicas"] for each in found} != {size}:
                pass
        yield found


# The clients


def posted(method: str, params: dict[str, Any], request_id: int = 1) -> bytes:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": {"_meta": meta, **params}}
    body = json.dumps(message).encode()
    headers = {
        "host": "127.0.0.1:80",
        "content-length": str(len(body)),
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": method,
    }
    if "name" in params:
        headers["mcp-name"] = params["name"]
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body


class Streams:
    """Listen streams, read with as little work as possible: the client shares the cores with the servers."""

    def __init__(self, replicas: list[Replica], number: int, wanted: dict[str, Any]) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        sent = posted("subscriptions/listen", {"notifications": wanted})
        for count in range(number):
            client = socket.create_connection(("127.0.0.1", replicas[count % len(replicas)].port))
            client.sendall(sent)
            client.setblocking(False)
            self._selector.register(client, selectors.EVENT_READ)
            self._sockets.append(client)
        self.wait_for(b"acknowledged", 1)

    def wait_for(self, text: bytes, times: int) -> None:
        """Read until each stream has had the text this many times."""
        missing = dict.fromkeys(self._sockets, times)
        deadline = time.monotonic() + DEADLINE
        while missing:
            assert time.monotonic() < deadline, f"{len(missing)} streams miss {text!r}"
            for key, _ in self._selector.select(1):
                client: socket.socket = key.fileobj  # type: ignore[assignment]
                found = client.recv(1 << 20).count(text)
                if found:
                    missing[client] = missing.get(client, 0) - found
                    if missing[client] <= 0:
                        del missing[client]

    def close(self) -> None:
        for client in self._sockets:
            client.close()
        self._selector.close()


async def last_of(replicas: list[Replica], streams: Streams, number: int) -> float:
    """Return the milliseconds from a change until the last stream was notified."""
    text = f"Version {number}."
    waiting = asyncio.create_task(asyncio.to_thread(streams.wait_for, text.encode(), 1))
    await asyncio.sleep(0)
    began = time.perf_counter()
    await replicas[0].ask(f"/change?text={text.replace(' ', '%20')}")
    await waiting
    return 1000 * (time.perf_counter() - began)


async def deliveries(replicas: list[Replica], streams: Streams, number: int) -> float:
    """Return the deliveries per second of a burst of changes."""
    waiting = asyncio.create_task(asyncio.to_thread(streams.wait_for, b"resources/updated", BURST))
    began = time.perf_counter()
    await replicas[0].ask("/burst")
    await waiting
    return number * BURST / (time.perf_counter() - began)


async def calls(replicas: list[Replica], tool: str, seconds: float) -> float:
    """Return the calls per second of clients that each call again when they have the result."""
    sent = posted("tools/call", {"name": tool, "arguments": {"text": "x"}})
    done = 0
    end = time.perf_counter() + seconds

    async def call(port: int) -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head, head
            if b"content-length: " in head:
                body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            else:
                body = await reader.readuntil(b"0\r\n\r\n")
            assert b'"result"' in body, body
            done += 1
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(call(replicas[number % len(replicas)].port) for number in range(CALLERS)))
    return done / (time.perf_counter() - began)


# Figures


async def measure(scale: Scale) -> list[Row]:
    with EmbeddedNats() as nats:
        rows = await start(nats.url, scale)
        async with AsyncExitStack() as stack:
            starting = (cluster(size, nats.url) for size in SIZES)
            found = await asyncio.gather(*map(stack.enter_async_context, starting))
            clusters = dict(zip(SIZES, found, strict=True))
            rows += await latency(clusters, scale)
            rows += await rates(clusters, scale)
    return rows


async def latency(clusters: dict[int, list[Replica]], scale: Scale) -> list[Row]:
    few, many = scale.of(250), scale.of(1_000)
    wanted = {"toolsListChanged": True}
    kinds = {
        "one": (clusters[1], Streams(clusters[1], few, wanted)),
        "four": (clusters[4], Streams(clusters[4], many, wanted)),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(-2, scale.rounds):
        for kind in sorted(kinds, reverse=bool(turn % 2)):
            replicas, streams = kinds[kind]
            before = [each.used() for each in replicas]
            taken = await last_of(replicas, streams, turn + 2)
            if turn >= 0:
                times[kind].append(taken)
                used = [each.used() - start for each, start in zip(replicas, before, strict=True)]
                cpu[kind].append(1000 * sum(used) / len(used))
    for _, streams in kinds.values():
        streams.close()
    return [
        row("last-one", f"change to the last of {few:,} streams, 1 replica", middle(times["one"]), "ms"),
        row("last-four", f"change to the last of {many:,} streams, 4 replicas", middle(times["four"]), "ms"),
        row("last", "  that over the former", ratio(times["four"], times["one"]), most=2),
        row("cpu-one", "CPU of the replica for that change, 1 replica", middle(cpu["one"]), "ms"),
        row("cpu-four", "CPU of each replica for that change, 4 replicas", middle(cpu["four"]), "ms"),
        row("cpu", "  that over the former", ratio(cpu["four"], cpu["one"])),
    ]


async def rates(clusters: dict[int, list[Replica]], scale: Scale) -> list[Row]:
    number = scale.of(400)
    wanted = {"resourceSubscriptions": ["bench://item/**"]}
    streams = {size: Streams(replicas, number, wanted) for size, replicas in clusters.items()}
    found: dict[tuple[str, int], list[float]] = {}
    seconds = CALL_SECONDS / scale.part
    for _ in range(max(3, scale.rounds // 6)):
        for size, replicas in clusters.items():
            found.setdefault(("deliveries", size), []).append(await deliveries(replicas, streams[size], number))
    for each in streams.values():
        each.close()
    for _ in range(max(2, scale.rounds // 10)):
        for size, replicas in clusters.items():
            found.setdefault(("calls", size), []).append(await calls(replicas, "here", seconds))
            found.setdefault(("forwarded", size), []).append(await calls(replicas, "there", seconds))
    names = {
        "deliveries": f"notifications, {number:,} streams",
        "calls": "tools/call",
        "forwarded": "tools/call of a tool of one replica",
    }
    return [
        row(f"{kind}-{size}", f"{name}, {size} replica{'s' * (size > 1)}", middle(found[kind, size]), "/s")
        for kind, name in names.items()
        for size in clusters
    ]


async def start(url: str, scale: Scale) -> list[Row]:
    number = scale.of(10_000)
    ready, cpu, whole = [], [], []
    async with replica("bench-many", url, number, is_first=True):
        for _ in range(3 if scale.part > 1 else 9):
            began = time.perf_counter()
            async with replica("bench-many", url, number) as new:
                whole.append(1000 * (time.perf_counter() - began))
                ready.append(1000 * new.ready)
                cpu.append(1000 * new.cpu)
    return [
        row("ready", f"a new replica with {number:,} items in the table", middle(ready), "ms", most=2_000),
        row("ready-cpu", "  CPU of that", middle(cpu), "ms"),
        row("ready-process", "  the same with the start of Python and all imports", middle(whole), "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--quick", action="store_true", help="check that it works; the figures mean nothing")
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds (60)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--nats", help=argparse.SUPPRESS)
    parser.add_argument("--tools", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.nats, options.tools, options.first)
        return
    scale = Scale(rounds=options.rounds or (3 if options.quick else 60), part=20 if options.quick else 1)
    rows = asyncio.run(measure(scale))
    assert all(math.isfinite(found.value) for found in rows)
    about = machine() | {"rounds": scale.rounds, "quick": options.quick}
    if options.json:
        print(json.dumps(about | {"rows": [asdict(found) for found in rows]}, ensure_ascii=False, indent=1))
        return
    print(f"{about['python']}, {os.cpu_count()} cores for up to 7 servers, NATS and the clients")
    for found in rows:
        print(written(found))


if __name__ == "__main__":
    main()
