"""Run `examples/everything.py` in its own process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["serving"]

EVERYTHING = Path(__file__).parent.parent.parent / "examples" / "everything.py"


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Yield the URL of its endpoint on `localhost`. The server must refuse other hosts, and the suite checks that."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    command = [sys.executable, str(EVERYTHING), "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not accepts(port):
                try:
                    process.wait(0.05)  # the pause between two tries
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(f"{EVERYTHING.name} did not start")
            yield f"http://localhost:{port}/mcp"
        finally:
            process.terminate()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
