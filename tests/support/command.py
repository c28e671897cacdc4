"""Run the command `tidings`: in this process, or as a process with clients."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.support.forking import forked_command
from tests.support.messages import initialize
from tidings.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "workspace"
TIDINGS = str(Path(sys.executable).with_name("tidings"))
HELLO = 'def hello() -> str:\n    """Say hello."""\n    return "hello"\n'
TOKEN = "correct-horse-battery-staple"
SECRET = "hunter2"
"""A text that must not appear in any output."""
DEADLINE = 120
"""Seconds for everything that a test does with its processes. They start slowly on a busy machine."""
GRACE = 60.0
"""Seconds for a server to exit. Only a server that hangs reaches it; test_live_stopping checks how fast one exits."""
INITIALIZE = initialize()


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str

    def check_error(self, *texts: str, status: int = 2) -> None:
        """Check that the command printed one line with these texts on standard error, and nothing else."""
        assert (self.status, self.stdout) == (status, ""), self
        assert re.fullmatch(r"tidings: [^\n]+\n", self.stderr), self.stderr
        for text in texts:
            assert text in self.stderr

    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


def tidings(*arguments: object, stdin: str = "", token: str | None = None) -> Result:
    """Run a command in this process, without the second that a process needs to import the SDK."""
    stdout, stderr, status = io.StringIO(), io.StringIO(), 0
    environment = {name: value for name, value in os.environ.items() if name != "TIDINGS_AUTH_TOKEN"}
    with (
        patch.dict(os.environ, environment | ({"TIDINGS_AUTH_TOKEN": token} if token else {}), clear=True),
        patch("sys.stdin", io.StringIO(stdin)),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = int(error.code or 0)
    return Result(status, stdout.getvalue(), stderr.getvalue())


async def run_command(*arguments: object, token: str | None = None) -> Result:
    """Run a command in this process while the event loop of the test continues."""
    async with asyncio.timeout(DEADLINE):
        return await asyncio.to_thread(tidings, *arguments, token=token)


@dataclass
class Served:
    process: asyncio.subprocess.Process
    url: str
    greeting: str

    async def line_with(self, text: str) -> str:
        return await line_with(self.process.stderr, text)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Send a signal unless the server has exited, check that its status is 0, and return the rest of its log."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        assert await asyncio.wait_for(self.process.wait(), GRACE) == 0
        assert self.process.stderr is not None
        log = (await self.process.stderr.read()).decode()
        assert "Traceback" not in log
        return log


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    """Return the next line that contains a text."""
    assert stream is not None
    lines: list[str] = []
    while line := (await stream.readline()).decode():
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"the process ended without printing {text!r}, but printed {lines}")


def start_command(*arguments: object, **options: Any) -> AbstractAsyncContextManager[Any]:
    """Start a command of `tidings` as a process, and kill it at the end of the block."""
    return start_process(*forked_command(TIDINGS, *arguments), **options)


@asynccontextmanager
async def start_process(*command: object, env: dict[str, str] | None = None, **pipes: Any) -> AsyncIterator[Any]:
    """Start a process, and kill it at the end of the block."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    environment = {**os.environ, **(env or {})}
    process = await asyncio.create_subprocess_exec(*map(str, command), env=environment, **pipes)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        # Processes that it started may hold its pipes for a moment. asyncio closes a pipe only when all have closed it.
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                await stream.read()


@asynccontextmanager
async def serving(folder: Path, *options: object, env: dict[str, str] | None = None) -> AsyncIterator[Served]:
    """Start `tidings serve`, and wait for its greeting, or for its line of JSON with the option `--json`."""
    async with (
        asyncio.timeout(DEADLINE),
        start_command("serve", folder, "--port", 0, *options, env=env) as process,
    ):
        if "--json" in options:
            yield Served(process, json.loads(await process.stdout.readline())["url"], "")
            return
        greeting = first = await line_with(process.stderr, "Serving")
        while "Ctrl-C" not in greeting:
            greeting += (await process.stderr.readline()).decode()
        found = re.search(r"http://\S+", first)
        assert found is not None
        yield Served(process, found[0], greeting)


class Running:
    """A command that prints until Ctrl-C ends it."""

    status_of_interrupt = 130

    def __init__(self, process: Any) -> None:
        self.process = process

    async def line(self, text: str = "") -> str:
        """Return the next line of standard output that contains a text."""
        return await line_with(self.process.stdout, text)

    async def change(self, text: str) -> dict[str, Any]:
        """Return the next line of standard output that contains a text, which is JSON."""
        change: dict[str, Any] = json.loads(await self.line(text))
        return change

    async def status(self, text: str) -> str:
        """Return the next line of standard error that contains a text."""
        return await line_with(self.process.stderr, text)

    async def interrupt(self) -> str:
        """End it with Ctrl-C, and return the rest of its standard error."""
        self.process.send_signal(signal.SIGINT)
        errors: str = (await self.process.stderr.read()).decode()
        assert await self.process.wait() == self.status_of_interrupt
        assert "Traceback" not in errors
        return errors


@asynccontextmanager
async def running(*arguments: object, token: str | None = None) -> AsyncIterator[Running]:
    env = {"TIDINGS_AUTH_TOKEN": token} if token is not None else {}
    async with asyncio.timeout(3 * DEADLINE), start_command(*arguments, env=env) as process:
        yield Running(process)


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step, because a watcher may read it at any moment."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


class Notifications:
    """A message handler that collects the methods of notifications."""

    def __init__(self) -> None:
        self._methods: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, message: object) -> None:
        if (method := getattr(message, "method", None)) is not None:
            self._methods.put_nowait(str(method))

    async def until(self, method: str) -> None:
        while await self._methods.get() != method:
            pass
