"""Make docs/serve.svg, the picture in README.md: `make screenshot`, or `python docs/screenshot.py [FILE]`.

Runs the real `tidings serve` in a pseudo-terminal, connects two clients, changes files, and writes the screen as SVG.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from pathlib import Path

from mcp.client.client import Client
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, LINES = 92, 24
DEADLINE = 60.0
PICTURE = Path(__file__).with_name("serve.svg")
TIDINGS = Path(sys.executable).with_name("tidings")

_CONTROL = re.compile(r"\x1b\[(\?25[hl]|[0-9]*A|2K)|\r?\n|\r")
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""Rich's own format without its fonts, which a browser would have to fetch."""


class Screen:
    """The lines of a terminal, for the control sequences that a panel of rich uses."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = 0

    def write(self, text: str) -> None:
        position = 0
        for control in _CONTROL.finditer(text):
            self.lines[self._row] += text[position : control.start()]
            position = control.end()
            if control[0].endswith("\n"):
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            elif control[0].endswith("A"):
                self._row = max(0, self._row - int(control[1][:-1] or 1))
            elif control[0].endswith("2K"):
                self.lines[self._row] = ""
        self.lines[self._row] += text[position:]

    def __contains__(self, text: str) -> bool:
        return any(text in Text.from_ansi(line).plain for line in self.lines)


class Terminal:
    """`tidings serve` in a pseudo-terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.screen = Screen()
        self._changed = asyncio.Event()
        self._end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            [TIDINGS, *arguments],
            cwd=folder,
            env={**os.environ, "TERM": "xterm-256color", "PATH": f"{TIDINGS.parent}{os.pathsep}{os.environ['PATH']}"},
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        asyncio.get_running_loop().add_reader(self._end, self._read)

    def _read(self) -> None:
        try:
            text = os.read(self._end, 1 << 16).decode()
        except OSError:  # the process has ended
            asyncio.get_running_loop().remove_reader(self._end)
            return
        self.screen.write(text)
        self._changed.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(DEADLINE):
            while text not in self.screen:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        self._process.terminate()
        self._process.wait(DEADLINE)
        os.close(self._end)


async def connected(url: str, mode: str) -> None:
    async with Client(url, mode=mode) as client:
        if mode != "legacy":
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    pass
        await asyncio.Event().wait()


async def take(folder: Path) -> list[str]:
    """Return the lines of the screen after some changes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    workspace = folder / "my-server"
    terminal = Terminal(folder, "serve", "my-server", "--port", str(port))
    clients: list[asyncio.Task[None]] = []
    try:
        await terminal.until("clients")
        clients = [asyncio.create_task(connected(url, mode)) for mode in ("auto", "auto", "legacy")]
        await terminal.until("2 modern streams, 1 legacy session")
        (workspace / "tools/hello.py").write_text('def hello(name: str) -> str:\n    return f"Hello, {name}!"\n')
        await terminal.until("tool hello added")
        (workspace / "resources/readme.md").write_text("# Read me again\n")
        await terminal.until("readme.md updated")
        (workspace / "tools/forecast.py").write_text("def forecast(city) -> int:\n    return 3\n")
        await terminal.until("forecast.py:1")
        return [line.replace(str(port), "8765") for line in terminal.screen.lines]
    finally:
        for client in clients:
            client.cancel()
        for client in clients:
            with suppress(BaseException):
                await client
        terminal.close()


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        subprocess.run([TIDINGS, "new", folder / "my-server"], check=True, capture_output=True)
        lines = asyncio.run(take(folder))
    finally:
        shutil.rmtree(folder)
    while not lines[-1].strip():
        lines.pop()
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("$ tidings serve my-server"))
    for line in lines:
        console.print(Text.from_ansi(line.rstrip()))
    picture = console.export_svg(title="tidings", theme=MONOKAI, code_format=_SVG, unique_id="tidings")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
