"""A program on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess

from tests.support.command import DEADLINE, TIDINGS
from tests.support.forking import forked_command

__all__ = ["Screen", "run_on_terminal"]


def run_on_terminal(*arguments: object, columns: int = 200) -> str:
    """Run a command of `tidings` on a terminal, and return its output."""
    master, slave = pty.openpty()
    command = forked_command(TIDINGS, *arguments)
    environment = os.environ | {"COLUMNS": str(columns)}
    with subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env=environment) as process:
        os.close(slave)
        output = b""
        while chunk := _read(master):
            output += chunk
        os.close(master)
        assert process.wait(DEADLINE) == 0, output
    return output.decode()


def _read(master: int) -> bytes:
    """Return the next output, or nothing if the program has closed its side."""
    try:
        return os.read(master, 65536)
    except OSError:  # how Linux reports the end
        return b""


class Screen:
    """The output of a running program on its terminal, with and without control sequences."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._position = 0
        self._received = asyncio.Event()
        self._is_closed = False
        self.raw = ""
        self.text = ""
        asyncio.get_running_loop().add_reader(master, self._on_readable)

    def _on_readable(self) -> None:
        chunk = _read(self._master)
        if not chunk:
            self._is_closed = True
            asyncio.get_running_loop().remove_reader(self._master)
        self.raw += chunk.decode("utf-8", "replace")
        self.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)
        self._received.set()

    async def shows(self, pattern: str) -> re.Match[str]:
        """Wait for a text after the one that was found last."""
        while not (found := re.compile(pattern).search(self.text, self._position)):
            assert not self._is_closed, self.text
            self._received.clear()
            await self._received.wait()
        self._position = found.start()
        return found

    async def rest(self) -> str:
        while not self._is_closed:
            self._received.clear()
            await self._received.wait()
        return self.raw

    def close(self) -> None:
        if not self._is_closed:
            asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
