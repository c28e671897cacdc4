"""No tool survives its server, however the server ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import DEADLINE, GRACE, INITIALIZE, start_command
from tests.support.forking import KILL
from tests.support.shared_pipe import SharedPipe
from tests.support.workspaces import script, write

IGNORES_SIGTERM = "exec 9>pipe; trap '' TERM; sleep 1000 & printf x >&9; while :; do sleep 1000; done"


def test_workspace_can_be_imported_where_processes_cannot_fork() -> None:
    """Windows has Python tools, but no executable ones."""
    code = "import os; del os.register_at_fork, os.fork; import tidings.workspace.source"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGTERM, KILL], ids=["SIGTERM", "SIGKILL"])
async def test_tool_that_ignores_sigterm_ends_with_its_server(
    tmp_path: Path, pipe: SharedPipe, number: signal.Signals
) -> None:
    write(tmp_path, {"tools/t.sh": script("A tool", IGNORES_SIGTERM)})
    call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "t", "arguments": {}}}
    ping = {"jsonrpc": "2.0", "id": 3, "method": "ping"}
    async with (
        asyncio.timeout(DEADLINE),
        start_command("serve", tmp_path, "--stdio", stdin=subprocess.PIPE) as process,
    ):
        for message in (INITIALIZE, {"jsonrpc": "2.0", "method": "notifications/initialized"}, call):
            process.stdin.write(json.dumps(message).encode() + b"\n")
        assert await asyncio.to_thread(pipe.read) == b"x"
        # The server answers after it has registered the tool, which may print a moment earlier.
        process.stdin.write(json.dumps(ping).encode() + b"\n")
        while json.loads(await process.stdout.readline()).get("id") != 3:
            pass
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), GRACE)
        assert await asyncio.to_thread(lambda: pipe.has_ended)
