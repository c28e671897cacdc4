"""Measure what `tidings serve --stdio` imports until its first response, by part: `python bench/imports.py`.

`python -X importtime` gives the time of each module without that of its own imports. It slows the imports: compare the
shares, not the milliseconds. The time of a module is the least of all rounds. Do not set `PYTHONDONTWRITEBYTECODE`:
then it also contains the compilation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROUNDS = 7
MODULE = re.compile(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}},
}
NOT_NEEDED_ON_STDIO = (
    *("mcp.client", "mcp.server.auth", "mcp.server.sse", "mcp.server.streamable_http", "mcp.shared.auth"),
    *("click", "cryptography", "h11", "http", "httpcore2", "httpx2", "idna", "jwt", "python_multipart"),
    *("sse_starlette", "starlette", "uvicorn"),
)
PARTS = {
    "the SDK's client, authentication and HTTP, which stdio does not need": NOT_NEEDED_ON_STDIO,
    "the rest of the SDK": ("mcp", "mcp_types", "pydantic", "pydantic_core", "pydantic_settings", "annotated_types"),
    "Tidings": ("tidings", "msgspec", "uvloop"),
    "all others": (),  # see `part_of`
}


def import_times(requests: Sequence[Mapping[str, Any]], *command: str) -> dict[str, int]:
    """Start a stdio server with this Python. Return the microseconds of each module that it has imported when it has
    answered the requests."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        responses = []
        for request in requests:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            responses.append(process.stdout.readline())
        process.kill()
        log.seek(0)
        text = log.read()
    if not all(b'"result"' in response for response in responses):
        sys.exit(f"a request failed: {responses[-1].decode()}\n{text}")
    return {name: int(taken) for taken, name in MODULE.findall(text)}


def part_of(module: str) -> str:
    return next(
        (part for part, names in PARTS.items() if any(f"{module}.".startswith(f"{name}.") for name in names)),
        "all others",
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tools").mkdir()
        rounds = [import_times([INITIALIZE], "-m", "tidings", "serve", folder, "--stdio") for _ in range(ROUNDS)]
    least = {name: min(each.get(name, taken) for each in rounds) for name, taken in rounds[0].items()}
    totals = dict.fromkeys(PARTS, 0)
    for name, taken in least.items():
        totals[part_of(name)] += taken
    whole = sum(totals.values())
    for part, taken in totals.items():
        print(f"{100 * taken / whole:5.1f} %  {taken / 1000:6.1f} ms  {part}")


if __name__ == "__main__":
    main()
