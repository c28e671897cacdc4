"""Signals that a server on stdio gets while its process is ending already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.command import DEADLINE, INITIALIZE

SERVER = """
import asyncio, atexit, sys
from mcp.server.mcpserver import MCPServer
from tidings import Live
from tidings.runtime import shutdown
from tidings.stdio import transport

shutdown.EXIT_TIMEOUT = transport.STDIO_DEADLINE = 3600  # on a busy machine, everything needs long
transport.ANSWER_REST = 0.01
mcp = MCPServer("ending")
tasks = []

def read():
    with open(sys.argv[1]) as pipe:
        return pipe.readline()

def say(text):
    print(text, file=sys.stderr, flush=True)

async def report_end():
    try:
        await asyncio.Event().wait()
    finally:
        say("the event loop ends")

@mcp.tool()
async def block() -> str:
    tasks.append(asyncio.create_task(report_end()))
    await asyncio.to_thread(read)

live = Live(mcp)
"""
EXIT_FUNCTION = """
def write():
    say("writing")
    say(read().strip())

atexit.register(write)
"""


@contextmanager
def serving(folder: Path, program: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a server, and the pipe that it reads to go on."""
    path, name = folder / "server.py", folder / "pipe"
    path.write_text(SERVER + program + "live.run('stdio')")
    os.mkfifo(name)
    pipe = os.open(name, os.O_RDWR)  # this does not wait for the server
    # Not forked: the signals must arrive in this order.
    with subprocess.Popen([sys.executable, path, name], stdin=-1, stdout=-1, stderr=-1, bufsize=0) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
            assert process.stdout.readline()
            yield process, pipe
        finally:
            process.kill()
            os.close(pipe)


def until_said(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stderr is not None
    assert text in iter(process.stderr.readline, b"")


def test_second_signal_does_not_interrupt_exit_functions(tmp_path: Path) -> None:
    with serving(tmp_path, EXIT_FUNCTION) as (process, pipe):
        process.send_signal(signal.SIGTERM)
        until_said(process, b"writing\n")
        process.send_signal(signal.SIGTERM)
        os.write(pipe, b"written\n")
        until_said(process, b"written\n")
        assert process.wait(DEADLINE) == 128 + signal.SIGTERM


def test_signal_after_the_input_does_not_interrupt_the_thread_of_a_tool(tmp_path: Path) -> None:
    with serving(tmp_path, "") as (process, pipe):
        assert process.stdin is not None
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "block", "arguments": {}}}
        process.stdin.write(json.dumps(call).encode() + b"\n")
        process.stdin.close()
        until_said(process, b"the event loop ends\n")
        process.send_signal(signal.SIGTERM)
        os.write(pipe, b"\n")
        assert process.wait(DEADLINE) == 0
