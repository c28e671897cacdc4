"""The command `tidings`, in this process or in one of its own, and what its clients are told."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tidings import TidingsError
from tidings.cli.commands import app

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "workspace"
TIDINGS = str(Path(sys.executable).with_name("tidings"))
HELLO = 'def hello() -> str:\n    """Say hello."""\n    return "hello"\n'
TOKEN = "correct-horse-battery-staple"
DEADLINE = 120
"""Seconds for all that a test does with its processes, however slowly they start."""
GRACE = 60.0
"""Seconds for the end of a server, met only by one that does not end. How soon it does: test_live_stopping."""


def tidings(*arguments: object, stdin: str | None = None) -> Result:
    """The command in this process: for what needs no process of its own."""
    return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)


async def ran(*arguments: object, token: str | None = None) -> tuple[int, str, str]:
    """A command to its end: status, standard output, standard error. Through the same entry as the process has, without
    the second that a process needs to import the SDK."""
    env = {"TIDINGS_AUTH_TOKEN": token}
    invoke = partial(CliRunner().invoke, app, [str(each) for each in arguments], env=env)
    async with asyncio.timeout(DEADLINE):
        result = await asyncio.to_thread(invoke)
    if isinstance(result.exception, TidingsError):
        return 2, result.stdout, f"tidings: {result.exception}\n"  # as main() has it
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@dataclass
class Served:
    process: asyncio.subprocess.Process
    url: str
    greeting: str

    async def line_with(self, text: str) -> str:
        return await line_with(self.process.stderr, text)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit status, if it comes in time."""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), GRACE)


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    assert stream is not None
    read: list[str] = []
    while line := (await stream.readline()).decode():
        read.append(line)
        if text in line:
            return line
    raise AssertionError(f"the process ended without saying {text!r}, but {read}")


@asynccontextmanager
async def started(*arguments: object, env: dict[str, str] | None = None, **pipes: Any) -> AsyncIterator[Any]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    environment = {**os.environ, **(env or {})}
    process = await asyncio.create_subprocess_exec(TIDINGS, *map(str, arguments), env=environment, **pipes)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def serving(folder: Path, *options: object, env: dict[str, str] | None = None) -> AsyncIterator[Served]:
    async with (
        asyncio.timeout(DEADLINE),
        started("serve", folder, "--port", 0, *options, env=env) as process,
    ):
        first = await line_with(process.stderr, "Serving")
        greeting = first
        while "Ctrl-C" not in greeting:
            greeting += (await process.stderr.readline()).decode()
        found = re.search(r"http://\S+", first)
        assert found is not None
        yield Served(process, found[0], greeting)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A copy of the example that may be changed."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "board"))


def drop(path: Path, text: str) -> None:
    """Write a file in one step, as an editor saves it: whoever watches may look at any moment."""
    spare = path.with_name(f".{path.name}")
    spare.write_text(text)
    spare.replace(path)


class Told:
    """What a client is told, in order."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, message: object) -> None:
        if (method := getattr(message, "method", None)) is not None:
            self.messages.put_nowait(str(method))

    async def until(self, method: str) -> None:
        while await self.messages.get() != method:
            pass


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
}
