"""Measure a call of an executable tool, compared with the bare start of its process: `python bench/process.py`.

It measures wall time, as the caller waits. The kinds take turns, so that slow phases of the machine affect all of them.
A figure is the median, with the 10th and the 90th percentile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter

import uvloop

from tidings.workspace.environment import build_environment
from tidings.workspace.executable import Executable
from tidings.workspace.process import run_process

ROUNDS = 200
SHELL = "#!/bin/sh\necho hello\n"
HELPERS = """#!/usr/bin/env bash
source "${MCP_SDK:?}/tool-sdk.sh"
mcp_result_success "$(mcp_json_obj message "Hello, $(mcp_args_require .name)")"
"""


async def measure(folder: Path) -> dict[str, list[float]]:
    trivial, helped = folder / "trivial", folder / "helped"
    for path, text in ((trivial, SHELL), (helped, HELPERS)):
        path.write_text(text)
        path.chmod(0o755)
    env = build_environment(folder, {})

    async def bare() -> None:
        actions = ((os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),)
        os.waitpid(os.posix_spawn(trivial, (trivial,), env, file_actions=actions), 0)  # noqa: ASYNC221, ASYNC222  # this is measured

    async def run() -> None:
        await run_process([str(trivial)], stdin=b"{}", env=env, cwd=folder, timeout=30, max_output=1000, on_line=print)

    async def call(path: Path) -> None:
        executable = Executable(command=[str(path)], root=folder, name="t", timeout=30, max_output=1000)
        result = await executable.call({"name": "ada"})
        assert not result.is_error

    kinds: dict[str, Callable[[], Awaitable[None]]] = {
        "a bare start and wait (posix_spawn)": bare,
        "run_process": run,
        "a whole call of a shell script": lambda: call(trivial),
        "a whole call of a bash script with the helpers": lambda: call(helped),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, function in kinds.items():
            start = perf_counter()
            await function()
            times[kind].append((perf_counter() - start) * 1000)
    return times


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        times = uvloop.run(measure(Path(folder)))
    for kind, samples in times.items():
        tenths = statistics.quantiles(samples, n=10)
        print(f"{statistics.median(samples):6.2f} ms ({tenths[0]:.2f} … {tenths[-1]:.2f})  {kind}")


if __name__ == "__main__":
    main()
