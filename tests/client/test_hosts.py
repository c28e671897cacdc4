from __future__ import annotations

from typing import Any

import pytest

from tidings.client.hosts import HOSTS, TOKEN_VARIABLE, HostedServer, read_servers
from tidings.errors import TidingsError


@pytest.mark.parametrize("name", HOSTS)
def test_a_server_is_read_as_it_was_written(name: str) -> None:
    host = HOSTS[name]
    servers = [HostedServer(("board", "--stdio"), {"LEVEL": "1"})]
    if host.remote is not None:
        token = f"Bearer ${TOKEN_VARIABLE}" if host.token_variable else "Bearer 1"
        servers += [
            HostedServer(url="https://x/mcp"),
            HostedServer(url="https://x/mcp", headers={"Authorization": token}),
        ]
    for server in servers:
        assert read_servers(host.write("board", server)) == {"board": server}


WRITTEN: list[tuple[dict[str, Any], HostedServer]] = [
    # The user settings of VS Code
    ({"mcp": {"inputs": [], "servers": {"board": {"type": "stdio", "command": "board"}}}}, HostedServer(("board",))),
    # opencode, with a server that is called `servers`
    ({"mcp": {"servers": {"type": "local", "command": ["board"]}}}, HostedServer(("board",))),
    # Gemini CLI, with other settings and both URLs
    (
        {
            "mcp": {"allowed": ["board"]},
            "mcpServers": {"board": {"url": "https://x/sse", "httpUrl": "https://x/mcp", "timeout": 1}},
        },
        HostedServer(url="https://x/mcp"),
    ),
    # A file of two programs
    ({"mcpServers": {}, "servers": {"board": {"url": "https://x/mcp"}}}, HostedServer(url="https://x/mcp")),
    # Codex
    (
        {
            "mcp_servers": {
                "board": {"url": "https://x/mcp", "bearer_token_env_var": "TOKEN", "http_headers": {"X-Team": "a"}}
            }
        },
        HostedServer(url="https://x/mcp", headers={"X-Team": "a", "Authorization": "Bearer $TOKEN"}),
    ),
]


@pytest.mark.parametrize(("settings", "server"), WRITTEN)
def test_settings_are_read_as_the_programs_write_them(settings: dict[str, Any], server: HostedServer) -> None:
    assert list(read_servers(settings).values()) == [server]


@pytest.mark.parametrize("name", ["codex", "claude-desktop"])
def test_no_header_is_lost(name: str) -> None:
    server = HostedServer(url="https://x/mcp", headers={"X-Team": "a"})
    entry = HOSTS[name].write("board", server)[HOSTS[name].member]["board"]
    if name == "codex":
        assert entry["http_headers"] == {"X-Team": "a"}
    else:
        assert entry["args"][-2:] == ["--header", "X-Team:${X_TEAM}"]
        assert entry["env"] == {"X_TEAM": "a"}


def test_settings_without_a_server_are_refused() -> None:
    given: list[dict[str, Any]] = [{}, {"mcpServers": []}, {"mcpServers": {"board": {}}}, {"servers": {"board": 1}}]
    for settings in given:
        with pytest.raises(TidingsError, match=r"no servers|neither a command nor a URL"):
            read_servers(settings)
