"""The two commands of the README work on a fresh machine: Debian's Python with its pip, no uv, an empty home.

The checkout is a clone of the last commit. What an earlier installation left in pip's cache is not used.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.waiting import free_port, until

ROOT = Path(__file__).parent.parent
PYTHON = "/usr/bin/python3"
INSTALLATION = 600.0
"""Seconds for an installation. Only one that hangs reaches it."""

pytestmark = [pytest.mark.slow, pytest.mark.alone]


class Machine:
    """A fresh machine: a checkout, and the environment variables of a user who has configured nothing."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "tidings"
        home = folder / "home"
        home.mkdir()
        # Without the last one, make would use a uv in /usr/bin.
        self.variables = {"HOME": str(home), "PATH": "/usr/bin:/bin", "UV": ""}
        subprocess.run(["git", "clone", "--quiet", ROOT, self.checkout], check=True)

    def run(self, *command: str, status: int = 0, **variables: str) -> str:
        """Run a command, and return what it prints."""
        done = subprocess.run(
            command,
            cwd=self.checkout,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALLATION,
            check=False,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    @contextmanager
    def running(self, command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command that writes to a file. Interrupt it at the end, as Ctrl-C does."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.checkout, env=self.variables, stdout=file, stderr=subprocess.STDOUT, process_group=0
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    needed = "import sys, venv, ensurepip; assert sys.version_info >= (3, 11)"
    if subprocess.run([PYTHON, "-c", needed], check=False, capture_output=True).returncode:
        pytest.skip(f"{PYTHON} is not Python 3.11 or newer with venv (Debian: python3-venv)")
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    return Machine(tmp_path_factory.mktemp("machine"))


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def has_line(file: Path, pattern: str) -> bool:
    return re.search(pattern, file.read_text()) is not None


def test_make_run_serves_and_the_commands_that_it_prints_work(machine: Machine, tmp_path: Path) -> None:
    log, watched = tmp_path / "run.log", tmp_path / "watch.log"
    port = free_port()

    async def follow(server: subprocess.Popen[bytes]) -> None:
        await until(lambda: is_ready(port) or server.poll() is not None, INSTALLATION)
        assert server.poll() is None, log.read_text()
        printed = log.read_text().partition("\n\n")[0]
        watch, *commands = re.findall(r"^  (\S.*(?:\n {4}.*)*)$", printed, re.MULTILINE)
        with machine.running(shlex.split(watch), watched):
            await until(lambda: "Watching" in watched.read_text())
            lines = ["added +tool +hello", "updated +content", "removed +tool +hello"]
            for command, line in zip(commands, lines, strict=True):
                machine.run("sh", "-c", command)
                await until(partial(has_line, watched, line))

    with machine.running(["make", "run", f"PORT={port}"], log) as server:
        asyncio.run(follow(server))


def test_make_test_adds_what_the_tests_need(machine: Machine) -> None:
    chosen = "tests/core/test_hub.py tests/http/test_listen.py tests/test_repository.py"
    assert " passed" in machine.run("make", "test", f"PYTEST_ARGS=-q {chosen}")
    assert "No broken requirements" in machine.run(".venv/bin/python", "-m", "pip", "check")


def test_make_says_in_one_line_what_to_try_if_an_installation_fails(machine: Machine) -> None:
    no_index = {"PIP_INDEX_URL": "http://127.0.0.1:1", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    *_, advice, _ = machine.run("make", "VENV=.venv-failed", "run", status=2, **no_index).splitlines()
    assert advice.startswith("pip failed, see above.")

    *_, advice, _ = machine.run("make", "VENV=.venv-failed", "UV=/bin/false", "run", status=2).splitlines()
    assert advice == "uv failed, see above. To use pip instead: make UV= …"
