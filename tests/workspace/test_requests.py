"""Requests with mistakes: each gets -32602 and the reason, and leaves no traceback in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError

from tests.support.sdk_clients import MODERN, open_client
from tests.support.workspaces import serve_http, write
from tidings.live import Live
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("version", ["2025-11-25", MODERN])
async def test_mistake_of_the_client_is_invalid_params(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    write(tmp_path, {"prompts/greet.md": "Hello {name}, {greeting}", "tools/t.sh": "#!/bin/sh\necho ok\n"})
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("prompts/get", {"name": "nothing"}, "Unknown prompt: nothing"),
        ("prompts/get", {"name": "greet"}, "greet: missing arguments: name, greeting"),
        ("prompts/get", {"name": "greet", "arguments": {"name": "Ada"}}, "greet: missing arguments: greeting"),
        ("tools/list", {"cursor": "next"}, "Unknown cursor: next"),
        ("prompts/list", {"cursor": "next"}, "Unknown cursor: next"),
        ("resources/list", {"cursor": "next"}, "Unknown cursor: next"),
        ("resources/templates/list", {"cursor": "next"}, "Unknown cursor: next"),
    ]
    async with serve_http(Live(Workspace(tmp_path))) as url, open_client(url, version) as client:
        for method, params, reason in mistakes:
            with pytest.raises(MCPError, match=reason) as raised:
                await client.request(method, **params)
            assert raised.value.error.code == -32602
        arguments = {"name": "Ada", "greeting": "hi"}
        assert "Hello Ada, hi" in str(await client.request("prompts/get", name="greet", arguments=arguments))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info] == []
