"""Read the code blocks of a documentation page, and run them as a reader would.

A comment on the line before a block says how it is run:

    <!-- file: NAME -->      save the block as NAME in the working directory
    <!-- terminal: NAME -->  run its commands in a terminal of their own, and go on while they run
    <!-- repeat: REASON -->  repeat each command until its output is the one that the page shows
    <!-- not run: REASON --> skip the block
    <!-- setup LANGUAGE      run these lines, which the reader does not see; LANGUAGE may be `terminal: NAME`
    ...
    -->

`python` blocks of one page share their names, and may use `await`. `sh` blocks must succeed. `console` blocks show
commands (`$ …`) and their whole output, where `…` stands for any text, and a line that is only `…` for any number of
lines. Times are not compared. The port 8765 is replaced by a free one.

A setup opens a server with `cleanup.enter_context(…)`. It is closed after the page, also if a block fails.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forking import write_programs
from tests.support.waiting import DEADLINE, free_port

__all__ = ["Block", "Session", "read_blocks"]

PORT = "8765"
SHELLS = ("sh", "bash", "console")

_MARKER = re.compile(r"<!-- (file|terminal|repeat|not run): (.+) -->")
_SETUP = re.compile(r"<!-- setup (python|sh|terminal: (\w+))")
_TIME = r"(?:\d{4}-\d\d-\d\dT)?\d\d:\d\d:\d\d(?:\.\d+)?"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    marker: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks and the hidden setup of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    marker = value = ""
    while number < len(lines):
        line, start = lines[number], number + 1
        number += 1
        if found := _SETUP.fullmatch(line):
            end = lines.index("-->", number)
            text, terminal = "\n".join(lines[number:end]), found[2]
            if terminal:
                yield Block(page.name, start, "console", text, "terminal", terminal)
            else:
                yield Block(page.name, start, found[1], text)
            number = end + 1
        elif line.lstrip().startswith("```"):
            indent = len(line) - len(line.lstrip())
            end = next(i for i in range(number, len(lines)) if lines[i].strip() == "```")
            text = "\n".join(each[indent:] for each in lines[number:end])
            yield Block(page.name, start, line.strip("` "), text, marker, value)
            number, marker, value = end + 1, "", ""
        elif found := _MARKER.fullmatch(line.strip()):
            marker, value = found.groups()
        else:
            marker = value = ""


def _regex(line: str) -> str:
    """Return a pattern for one line of shown output."""
    parts = re.split(f"(…|{_TIME})", line)
    return "".join(
        re.escape(part) if number % 2 == 0 else ".*?" if part == "…" else _TIME for number, part in enumerate(parts)
    )


def shown_matches(shown: list[str], output: list[str]) -> bool:
    """Return whether the output is the one that the page shows."""
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == "…" else _regex(line) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in output)) is not None


class Terminal:
    """A command that keeps running, and its output so far."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.seen = 0
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def expect(self, shown: list[str], block: Block) -> None:
        """Wait until the output since the last call is the one that the page shows."""
        deadline = time.monotonic() + DEADLINE
        with self._changed:
            while True:
                for end in range(self.seen, len(self.lines) + 1):
                    if shown_matches(shown, self.lines[self.seen : end]):
                        self.seen = end
                        return
                left = deadline - time.monotonic()
                if left <= 0 or (self._process.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(
                        f"{block} shows\n{_indent(shown)}\nbut got\n{_indent(self.lines[self.seen :])}"
                    )
                self._changed.wait(min(left, 0.5))

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._reader.join(DEADLINE)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _indent(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


class Session:
    """One reader of one page, in an empty folder."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self._cleanup = ExitStack()
        self.names: dict[str, Any] = {"__name__": "page", "cleanup": self._cleanup}
        self._terminals: dict[str, Terminal] = {}
        self._runner = asyncio.Runner()
        self.port = str(free_port())
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("TIDINGS_", "OTEL_"))},
            "PATH": f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "PYTHONUNBUFFERED": "1",
        }

    @classmethod
    @contextmanager
    def open(cls, folder: Path) -> Iterator[Session]:
        with tempfile.TemporaryDirectory() as programs:
            write_programs(Path(programs))
            session = cls(folder, Path(programs))
            try:
                yield session
            finally:
                with session._cleanup, session._runner:  # the tasks end before the servers that they use
                    for terminal in reversed(session._terminals.values()):
                        terminal.close()

    def run(self, block: Block) -> None:
        if block.marker == "not run":
            return
        if block.marker == "file":
            path = self.folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._with_port(block.text) + "\n", encoding="utf-8")
        elif block.language == "python":
            self._run_python(block)
        elif block.language == "console":
            self._run_console(block)
        elif block.language in SHELLS:
            self._run_command(block.text, block)

    def _run_python(self, block: Block) -> None:
        source = "\n" * block.line + block.text
        code = compile(source, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        try:
            result = eval(code, self.names)
            if inspect.iscoroutine(result):
                self._runner.run(asyncio.wait_for(result, DEADLINE))
        except BaseException as error:
            error.add_note(f"in the block at {block}")
            raise

    def _run_console(self, block: Block) -> None:
        commands: list[tuple[str, list[str]]] = []
        for line in block.text.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif commands:
                commands[-1][1].append(self._with_port(line))
            else:  # more output of a terminal
                commands.append(("", [self._with_port(line)]))
        for command, shown in commands:
            if block.marker == "terminal":
                if command:
                    if block.value in self._terminals:
                        self._terminals[block.value].close()
                    self._terminals[block.value] = Terminal(self._with_port(command), self.folder, self._environment)
                self._terminals[block.value].expect(shown, block)
            else:
                output = self._run_command(command, block)
                deadline = time.monotonic() + DEADLINE
                while block.marker == "repeat" and not shown_matches(shown, output) and time.monotonic() < deadline:
                    output = self._run_command(command, block)
                assert shown_matches(shown, output), (
                    f"{block}: $ {command} shows\n{_indent(shown)}\nbut prints\n{_indent(output)}"
                )

    def _run_command(self, command: str, block: Block) -> list[str]:
        done = subprocess.run(
            ["bash", "-e", "-c", self._with_port(command)],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == 0, f"{block}: {command}\nended with {done.returncode}:\n{done.stdout}"
        return done.stdout.splitlines()

    def _with_port(self, text: str) -> str:
        text = text.replace(PORT, self.port)
        return re.sub(r"(tidings serve [^-\s]\S*)(?!.*--(?:stdio|port))", rf"\1 --port {self.port}", text)
