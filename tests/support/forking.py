"""Start Python programs as forks of a process that has already imported the SDK and Tidings: see `fork_server.py`."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["ENVIRONMENT", "KILL", "ROOT", "forked_command", "write_programs"]

ROOT = Path(__file__).parents[2]
FORK_SERVER = Path(__file__).with_name("fork_server.py")
KILL = signal.SIGUSR1
"""Kills a program that was started with `forked_command`."""

ENVIRONMENT = {
    # The SDK passes almost nothing of the environment to a child process.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    "FASTMCP_CHECK_FOR_UPDATES": "off",  # tests do not use the network
    "FASTMCP_SHOW_SERVER_BANNER": "false",
    "FASTMCP_LOG_LEVEL": "WARNING",
}


def forked_command(*arguments: object) -> list[str]:
    """Return the command that does the same as `python ARGUMENTS…`, but starts in a twentieth of the time."""
    return [sys.executable, "-IS", str(FORK_SERVER), _start_server(), *map(str, arguments)]


def write_programs(folder: Path) -> None:
    """Write `tidings` and `python` into a folder for PATH. They start Tidings and `.py` files with `forked_command`."""
    python = f'case "$1" in *.py) exec {shlex.join(forked_command())} "$@";; *) exec {sys.executable} "$@";; esac'
    tidings = f'exec {shlex.join(forked_command(Path(sys.executable).with_name("tidings")))} "$@"'
    for name, line in (("python", python), ("tidings", tidings)):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)


@functools.cache
def _start_server() -> str:
    """Start the server of `fork_server.py` once for this process, and return the path of its socket."""
    folder = tempfile.mkdtemp()
    path = str(Path(folder, "socket"))
    command = [sys.executable, "-c", f"from tests.support.fork_server import serve; serve({path!r})"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT, cwd=ROOT
    )

    def stop() -> None:
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(stop)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return path
