"""Run `examples/everything.py` in its own process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.forking import ENVIRONMENT, forked_command
from tests.support.waiting import free_port, is_served

__all__ = ["serving"]

EVERYTHING = Path(__file__).parent.parent.parent / "examples" / "everything.py"


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Yield the URL of its endpoint on `localhost`. The server must refuse other hosts, and the suite checks that."""
    port = free_port()
    command = forked_command(str(EVERYTHING), "--port", str(port), *options)
    output = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT) as process:
        try:
            while not is_served(port):
                try:
                    process.wait(0.05)  # the pause between two tries
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(f"{EVERYTHING.name} did not start")
            yield f"http://localhost:{port}/mcp"
        finally:
            process.terminate()
