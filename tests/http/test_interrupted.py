"""Calls that the end of the server interrupts."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx2
import pytest

from tests.support.command import serving
from tests.support.messages import ACCEPT_BOTH, initialize, modern_headers, modern_message
from tests.support.sdk_clients import MODERN
from tests.support.shared_pipe import SharedPipe
from tests.support.wire_clients import read_answer
from tests.support.workspaces import script, write


@pytest.mark.anyio
@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
async def test_interrupted_call_gets_a_json_rpc_error(tmp_path: Path, version: str) -> None:
    write(tmp_path, {"tools/slow.sh": script("A tool", "exec 9>pipe; printf x >&9; sleep 1000")})
    pipe = SharedPipe(tmp_path / "pipe")
    params = {"name": "slow", "arguments": {}}
    async with serving(tmp_path) as served, httpx2.AsyncClient(timeout=None) as client:
        if version == MODERN:
            request = modern_message("tools/call", 7, params)
            headers = modern_headers("tools/call", params)
        else:
            opened = await client.post(served.url, json=initialize(version), headers=ACCEPT_BOTH)
            request = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
            headers = ACCEPT_BOTH | {
                "mcp-session-id": opened.headers["mcp-session-id"],
                "mcp-protocol-version": version,
            }
        call = asyncio.create_task(client.post(served.url, json=request, headers=headers))
        assert await asyncio.to_thread(pipe.read) == b"x"
        await served.stop()
        response = await call
        assert response.status_code == (503 if version == MODERN else 200)
        answer = read_answer(response.text)
        assert (answer["id"], answer["error"]["code"]) == (7, -32000)
        assert "stopped" in answer["error"]["message"]


@pytest.mark.anyio
@pytest.mark.alone
async def test_call_that_ends_soon_after_the_signal_is_answered(tmp_path: Path) -> None:
    """Half a second later, while `FINISH_CALLS` is one."""
    text = "printf x >pipe; until [ -e go ]; do sleep 0.01; done; sleep 0.5; echo finished"
    write(tmp_path, {"tools/slow.sh": script("A tool", text)})
    pipe = SharedPipe(tmp_path / "pipe")
    params = {"name": "slow", "arguments": {}}
    async with serving(tmp_path) as served, httpx2.AsyncClient(timeout=None) as client:
        request = modern_message("tools/call", 7, params)
        call = asyncio.create_task(client.post(served.url, json=request, headers=modern_headers("tools/call", params)))
        assert await asyncio.to_thread(pipe.read) == b"x"
        served.process.send_signal(signal.SIGTERM)
        await served.line_with("stopping")
        (tmp_path / "go").touch()
        answer = read_answer((await call).text)
        assert "finished" in str(answer["result"]["content"])
        await served.stop()
