"""The app of a server: the level of its logs, and the headers that it accepts on a local address."""

from __future__ import annotations

import os
import subprocess

import httpx2
import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.forking import ENVIRONMENT, forked_command
from tests.support.messages import initialize
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


@pytest.mark.parametrize("host", ["127.0.0.2", "0:0:0:0:0:0:0:1", "127.1"])
async def test_app_for_a_local_address_checks_the_host_header(host: str) -> None:
    app = Live(MCPServer("local")).http_app(host=host)
    transport = httpx2.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport) as http:
        for name, status in ((host, 200), ("localhost", 200), ("evil.example", 421)):
            netloc = f"[{name}]:8000" if ":" in name else f"{name}:8000"
            answer = await http.post(
                "http://any/mcp",
                json=initialize(),
                headers={"Host": netloc, "Accept": "application/json, text/event-stream"},
            )
            assert answer.status_code == status, name
