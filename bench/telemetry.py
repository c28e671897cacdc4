"""Compare the cost of a delivery with and without telemetry: `python bench/telemetry.py`.

Four servers run in one process, with the same number of listen streams, opened through the whole ASGI app. The bytes of
each stream go through a real TCP socket. The figure is the ratio of the medians of the CPU time of this thread. There
is no uvicorn: its cost is the same for all servers, and would only make the ratios smaller.

Writing to a socket again soon after a write costs more. So the order of the servers matters more than telemetry does:
each server runs in each position, and after each other server, equally often. One of them is there twice; the ratio of
the two shows the precision.

* *without*: the same source without the lines that count or observe, and with telemetry off; twice;
* *counted*: the normal server, without an OpenTelemetry SDK in the process;
* *exported*: with an SDK; spans and metrics are serialized as for a collector. A collection of metrics, which happens
  once a minute, has its own figure.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import json
import socket
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from time import thread_time
from types import FunctionType, MethodType
from typing import Any

from mcp.server.mcpserver import MCPServer
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `bench` and `tidings`, when run as a script

from bench.measuring import Row, Scale, machine, middle, no_collections, ratio, row, written
from tidings import Live
from tidings.core.delivery import Delivery
from tidings.telemetry import Telemetry

ORDERS = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
"""Orders in which each server runs once in each position, and once after each other server."""


class Encoding(SpanExporter):
    """Encode spans as an exporter does, and send nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def note() -> str:
    """A tool."""
    return ""


class Seen:
    """One server and its streams."""

    def __init__(self, telemetry: bool | Telemetry, flush: Callable[[], object] | None = None) -> None:
        server: MCPServer[Any] = MCPServer("bench", log_level="ERROR")
        server.tool()(note)
        self.live = Live(server, telemetry=telemetry)
        self._flush = flush
        self._sockets: list[socket.socket] = []
        self._round = 0
        self._stack = AsyncExitStack()

    async def open(self, streams: int, **options: Any) -> None:
        """Open streams. `options` are those of the app."""
        app = self.app = self.live.http_app(**options)
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        listener = socket.create_server(("127.0.0.1", 0))
        for number in range(streams):
            client = socket.create_connection(listener.getsockname())
            writer, _ = listener.accept()
            client.setblocking(False)
            self._sockets += [client, writer]
            is_open = asyncio.Event()
            task = asyncio.create_task(app(*_request(number, writer, is_open)))
            self._stack.callback(task.cancel)
            await is_open.wait()
        listener.close()
        assert len(self.live.hub) == streams
        self.drain()

    def drain(self) -> None:
        for client in self._sockets[::2]:
            try:
                while client.recv(1 << 20):
                    pass
            except BlockingIOError:
                pass

    def sample(self) -> float:
        """Return the CPU time of one change and its delivery."""
        start = thread_time()
        self._round += 1
        self.live.tools.update("note", description=f"The {self._round}th.")
        self.live.bridge.publish_queued()  # now, and not at the end of this turn of the event loop
        if self._flush is not None:
            self._flush()
        taken = thread_time() - start
        self.drain()
        return taken

    def strip(self) -> None:
        """Remove the lines that count and observe from the functions of a fan-out."""
        delivery: Any = self.live.hub.delivery
        for name in ("publish", "_deliver_to_all"):
            setattr(delivery, name, MethodType(stripped(getattr(Delivery, name)), delivery))
        for subscriber in self.live.hub:
            deliver: Any = subscriber.deliver
            subscriber.deliver = MethodType(stripped(deliver.__func__), deliver.__self__)

    async def close(self) -> None:
        await self._stack.aclose()
        for each in self._sockets:
            each.close()


def _request(number: int, writer: socket.socket, is_open: asyncio.Event) -> tuple[Any, Any, Any]:
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"notifications": {"toolsListChanged": True}, "_meta": meta}
    message = {"jsonrpc": "2.0", "id": number, "method": "subscriptions/listen", "params": params}
    headers = {
        "host": "127.0.0.1:80",
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "subscriptions/listen",
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    waiting = [{"type": "http.request", "body": json.dumps(message).encode(), "more_body": False}]

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: Any) -> None:
        if message.get("body"):
            writer.send(message["body"])
            is_open.set()

    return scope, receive, send


class _Stripper(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        is_seeing = isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and _sees(node)
        return ast.Pass() if is_seeing else super().visit(node)


def _sees(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in ("counts", "observer") for each in ast.walk(node))


def stripped(function: FunctionType) -> FunctionType:
    """Return the function without the lines that count or observe, compiled from its source."""
    tree = _Stripper().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    assert not _sees(tree), ast.unparse(tree)
    scope = dict(function.__globals__)
    exec(compile(ast.fix_missing_locations(tree), inspect.getsourcefile(function) or "", "exec"), scope)
    made = scope[function.__name__]
    assert isinstance(made, FunctionType)
    return made


async def measure(scale: Scale) -> list[Row]:
    streams = scale.of(1_000)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Encoding(), schedule_delay_millis=3_600_000))
    reader = InMemoryMetricReader()
    telemetry = Telemetry(tracer_provider=provider, meter_provider=MeterProvider([reader], shutdown_on_exit=False))
    servers = [Seen(False), Seen(True), Seen(telemetry, provider.force_flush), Seen(False)]
    rows: list[Row] = []
    try:
        for number, server in enumerate(servers):
            await server.open(streams)
            if number in (0, 3):
                server.strip()
        times: list[list[float]] = [[] for _ in servers]
        with no_collections():
            for turn in range(-len(ORDERS), scale.rounds):
                for index in ORDERS[turn % len(ORDERS)]:
                    taken = servers[index].sample()
                    if turn >= 0:
                        times[index].append(taken)
        without, counted, exported, again = times
        cost = [1e6 * taken / streams for taken in without]
        rows.append(row("delivery", f"a delivery without, {streams:,} streams", middle(cost), "µs"))
        rows.append(row("control", "  the same, over that", ratio(again, without)))
        rows.append(row("counted", "  counted, with no exporter, over that", ratio(counted, without), most=1.02))
        rows.append(row("exported", "  exported, over that", ratio(exported, without), most=1.15))
        collections = []
        for _ in range(scale.rounds):
            servers[2].sample()
            start = thread_time()
            data = reader.get_metrics_data()
            assert data is not None
            encode_metrics(data).SerializeToString()
            collections.append(1e3 * (thread_time() - start))
        rows.append(row("collection", f"a collection after {streams:,} deliveries", middle(collections), "ms"))
        for server in servers:
            assert server.live.hub.counts.sent["tools"] == (
                0 if server in (servers[0], servers[3]) else server._round * streams
            )
    finally:
        for server in reversed(servers):  # the lifespans are nested
            await server.close()
        provider.shutdown()
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What telemetry adds to the cost of a delivery.")
    parser.add_argument("--rounds", type=int, default=0, help="number of rounds, a multiple of four (400)")
    parser.add_argument("--quick", action="store_true", help="check that it works; the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    scale = Scale(rounds=options.rounds or (3 if options.quick else 400), part=50 if options.quick else 1)
    rows = asyncio.run(measure(scale))
    about = machine() | {"rounds": scale.rounds, "quick": options.quick}
    if options.json:
        print(json.dumps(about | {"rows": [asdict(found) for found in rows]}, ensure_ascii=False, indent=1))
    else:
        for found in rows:
            print(written(found))


if __name__ == "__main__":
    main()
