from __future__ import annotations

from typing import Any

import pytest

from tidings.client.hosts import HOSTS, TOKEN_VARIABLE, Server, read_servers
from tidings.errors import TidingsError


@pytest.mark.parametrize("name", HOSTS)
def test_a_server_is_read_as_it_was_written(name: str) -> None:
    host = HOSTS[name]
    servers = [Server(("board", "--stdio"), {"LEVEL": "1"})]
    if host.remote is not None:
        token = f"Bearer ${TOKEN_VARIABLE}" if host.token_variable else "Bearer 1"
        servers += [Server(url="https://x/mcp"), Server(url="https://x/mcp", headers={"Authorization": token})]
    for server in servers:
        assert read_servers(host.write("board", server)) == {"board": server}


def test_settings_without_a_server_are_refused() -> None:
    given: list[dict[str, Any]] = [{}, {"mcpServers": []}, {"mcpServers": {"board": {}}}, {"servers": {"board": 1}}]
    for settings in given:
        with pytest.raises(TidingsError, match=r"no servers|neither a command nor a URL"):
            read_servers(settings)
