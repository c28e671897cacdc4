"""The forced end of a process: exit functions run, and can't block it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.command import DEADLINE, HELLO, INITIALIZE, line_with, replace_file, start_process
from tests.support.forking import forked_command
from tests.support.receiver import Receiver, receiving
from tests.support.waiting import until
from tidings.store import State, StoreBusy
from tidings.store.sqlite import SQLiteStore

pytestmark = pytest.mark.anyio

WITHOUT_TIMEOUTS = """
from tidings.runtime import shutdown
from tidings.cli import main, otlp
from tidings.store import writer
shutdown.EXIT_TIMEOUT = otlp.SHUTDOWN_TIMEOUT = 3600  # on a busy machine, exit functions need long
writer.WRITE_DELAY = 3600  # nothing is written before the exit
main()
"""


@asynccontextmanager
async def serving_without_timeouts(board: Path, collector: Receiver) -> AsyncIterator[asyncio.subprocess.Process]:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "3600",
        "OTEL_BSP_SCHEDULE_DELAY": "3600000",
        "OTEL_METRIC_EXPORT_INTERVAL": "3600000",
    }
    program = board.with_name("without_timeouts.py")
    program.write_text(WITHOUT_TIMEOUTS)
    command = forked_command(program, "serve", board, "--stdio")
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    async with asyncio.timeout(DEADLINE), start_process(*command, env=env, **pipes) as process:
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        await line_with(process.stdout, '"result"')
        process.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        process.stdin.write(b'{"jsonrpc":"2.0","id":"ready","method":"ping"}\n')
        await line_with(process.stdout, '"ready"')
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
async def test_telemetry_is_sent_after_a_signal_on_stdio(board: Path, number: signal.Signals) -> None:
    async with receiving(path="") as collector:
        async with serving_without_timeouts(board, collector) as process:
            process.send_signal(number)
            assert await process.wait() == 128 + number
        sent = [collector.came.get_nowait() for _ in range(collector.came.qsize())]
    spans = {
        span.name
        for each in sent
        if each.path == "/v1/traces"
        for group in ExportTraceServiceRequest.FromString(each.body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    }
    assert "change_notifier.subscribe" in spans
    assert [each for each in sent if each.path == "/v1/metrics" and ExportMetricsServiceRequest.FromString(each.body)]


async def test_collector_that_never_answers_does_not_delay_the_store(board: Path) -> None:
    async with receiving(path="") as collector:
        collector.gate.clear()
        async with serving_without_timeouts(board, collector) as process:
            replace_file(board / "tools" / "hello.py", HELLO)
            await line_with(process.stdout, "notifications/tools/list_changed")
            process.send_signal(signal.SIGTERM)
            await collector.next()
            state = await open_when_free(SQLiteStore(board / ".tidings" / "state.db"))
            assert "hello" in [change.key for change in state.journal]
            assert process.returncode is None, "the process still waits for the collector"
            collector.gate.set()
            assert await process.wait() == 128 + signal.SIGTERM


async def open_when_free(store: SQLiteStore) -> State:
    """Return the state after the server has closed the store."""
    found: list[State] = []

    def is_free() -> bool:
        try:
            found.append(store.open())
        except StoreBusy:
            return False
        store.close()
        return True

    await until(is_free, DEADLINE)
    return found[0]


def test_exit_function_that_hangs_or_raises_does_not_block_the_exit() -> None:
    """They run in reverse order: first the one that raises, then the one that hangs."""
    script = (
        "import atexit, threading; from tidings.runtime.shutdown import exit_process;"
        "atexit.register(threading.Event().wait); atexit.register(int, 'x'); exit_process(7)"
    )
    ran = subprocess.run(forked_command("-c", script), capture_output=True, timeout=DEADLINE, check=False)
    assert ran.returncode == 7


UNCANCELLABLE = """
import asyncio, contextlib
from tidings.cli.remote import run

async def work():
    print("started", flush=True)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

run(work())
"""


async def test_interrupt_ends_a_command_that_suppresses_its_cancellation() -> None:
    async with asyncio.timeout(DEADLINE), start_process(*forked_command("-c", UNCANCELLABLE)) as process:
        assert await process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


IN_CALLBACK = """
import signal, threading, weakref
from tidings.runtime import shutdown
class Watched: pass
def receive(reference):
    signal.raise_signal(signal.SIGTERM)
    [None for _ in range(100)]  # the handler runs at the latest here
def run():
    with shutdown.exit_on_signals() as check:
        watched = Watched()
        reference = weakref.ref(watched, receive)
        del watched
        {step}
        print("still runs")
shutdown.START_DEADLINE = {deadline}
run()
"""


@pytest.mark.parametrize(
    ("step", "deadline"), [("check()", 3600), ("raise ImportError", 3600), ("threading.Event().wait()", 0.01)]
)
def test_signal_in_a_callback_that_discards_exceptions_ends_the_start(step: str, deadline: float) -> None:
    script = IN_CALLBACK.format(step=step, deadline=deadline)
    ran = subprocess.run(forked_command("-c", script), capture_output=True, timeout=DEADLINE, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
