"""The app of a server: the level of its logs, and the headers that it checks."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated, Any

import httpx2
import pytest
from fastmcp import FastMCP
from mcp.server.mcpserver import MCPServer
from pydantic import Field

from tests.support.forking import ENVIRONMENT, forked_command
from tests.support.messages import modern_headers, modern_message
from tests.support.wire_clients import read_answer
from tidings import Live

pytestmark = pytest.mark.anyio

SCRIPT = """
import asyncio, logging, os, signal, threading, urllib.request
from mcp.server.mcpserver import MCPServer
from tests.support.waiting import free_port, until_served
from tidings import Live

def ask_and_end(port):
    asyncio.run(until_served(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=60) as response:
        assert response.status == 200
    os.kill(os.getpid(), signal.SIGINT)

for level in (None, logging.WARNING, logging.INFO, "WARNING", "info"):
    port = free_port()
    asking = threading.Thread(target=ask_and_end, args=(port,))
    asking.start()
    print(f"level {level}", flush=True)
    Live(MCPServer("levels")).run("http", port=port, log_level=level, health=True)
    asking.join()
"""


def test_log_level_may_be_a_name_a_number_or_none() -> None:
    command = forked_command("-c", SCRIPT)
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = [part for part in done.stdout.split("level ") if part]
    logged = {part.splitlines()[0]: "GET /health/live" in part for part in said}
    assert logged == {"None": True, "30": False, "20": True, "WARNING": False, "info": True}


def deploy(where: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    return where


def schema_with(header: str | None) -> dict[str, Any]:
    annotation = {"x-mcp-header": header} if header else {}
    return {"type": "object", "properties": {"where": {"type": "string", **annotation}}, "required": ["where"]}


@pytest.mark.parametrize("kind", [MCPServer, FastMCP])
async def test_headers_of_a_changed_tool_are_checked_by_its_present_schema(kind: Any) -> None:
    live = Live(kind("headers"))
    app = live.http_app()
    transport = httpx2.ASGITransport(app)

    async def call(header: str | None = None) -> str:
        """Return the text of the result, or the message of the error."""
        params = {"name": "deploy", "arguments": {"where": "eu"}}
        headers = modern_headers("tools/call", params) | ({f"Mcp-Param-{header}": "eu"} if header else {})
        message = modern_message("tools/call", params=params)
        response = await http.post("http://127.0.0.1:8000/mcp", json=message, headers=headers)
        answer = read_answer(response.text) if response.is_success else response.json()
        return str(answer["result"]["content"][0]["text"] if "result" in answer else answer["error"]["message"])

    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport) as http:
        live.tools.add(deploy)
        assert "Mcp-Param-Region header is missing" in await call()
        assert await call("Region") == "eu"

        live.tools.update("deploy", inputSchema=schema_with("Place"))
        assert "Mcp-Param-Place header is missing" in await call("Region")
        assert await call("Place") == "eu"

        live.tools.update("deploy", inputSchema=schema_with(None))
        assert await call() == "eu"

        live.tools.update("deploy", inputSchema=schema_with("Place"))
        live.tools.remove("deploy")
        assert "Unknown tool" in await call()
