"""Log lines, `_meta` and questions between an executable tool and its caller."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client

from tests.support.waiting import DEADLINE
from tests.support.workspaces import write
from tidings.workspace.source import Workspace

pytestmark = pytest.mark.anyio

HEADER = '#!/usr/bin/env bash\nset -euo pipefail\nsource "${MCP_SDK:?}/tool-sdk.sh"\n'
LOGS = HEADER + "mcp_log_debug t one\nmcp_log_info t two\nmcp_log_warn t three\n"
ASKS = HEADER + (
    "echo $MCP_ELICIT_SUPPORTED; mcp_elicit_confirm 'Go \"on\"?'; mcp_elicit_titled_choice Which a:Able 'b:B: c'\n"
    "mcp_elicit_multi_choice Many x y; mcp_elicit_string Name name; mcp_elicit_url Open https://example.com/\n"
)
META = HEADER + "mcp_meta_get .user.id\nmcp_meta_get .absent --default none\nmcp_meta_raw\n"


async def test_log_lines_below_the_level_of_the_client_are_not_sent(tmp_path: Path) -> None:
    write(tmp_path, {"tools/logs.sh": LOGS})
    lines: list[Any] = []

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        lines.append(params.data)

    server = Workspace(tmp_path).server
    async with asyncio.timeout(DEADLINE), Client(server, mode="legacy", logging_callback=on_log) as client:
        assert client.server_capabilities.logging is not None
        for level in (None, "warning", "debug"):
            if level is not None:
                await client.session.send_request(
                    types.SetLevelRequest(params=types.SetLevelRequestParams(level=level)), types.EmptyResult
                )
            await client.call_tool("logs", {})
            lines.append(level)

    assert lines == ["two", "three", None, "three", "warning", "one", "two", "three", "debug"]


@pytest.mark.parametrize("size", [1, 200_000], ids=["variable", "file"])
async def test_a_tool_gets_the_meta_of_its_request(tmp_path: Path, size: int) -> None:
    write(tmp_path, {"tools/meta.sh": META})

    async with asyncio.timeout(DEADLINE), Client(Workspace(tmp_path).server, mode="legacy") as client:
        meta: Any = {"user": {"id": "u1"}, "padding": "x" * size}
        result = await client.call_tool("meta", {}, meta=meta)

    assert isinstance(result.content[0], types.TextContent)
    user, absent, raw = result.content[0].text.splitlines()
    assert (user, absent) == ("u1", "none")
    assert json.loads(raw).items() >= meta.items()


async def test_a_tool_can_ask_the_user(tmp_path: Path) -> None:
    write(tmp_path, {"tools/asks.sh": ASKS})
    questions: list[tuple[str, Any]] = []
    answers: list[Any] = [{"confirmed": True}, {"choice": "b"}, None, {"name": "Ada"}]

    async def on_question(context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        assert isinstance(params, types.ElicitRequestFormParams)
        questions.append((params.message, params.requested_schema["properties"]))
        content = answers[len(questions) - 1]
        return types.ElicitResult(action="accept" if content else "decline", content=content)

    server = Workspace(tmp_path).server
    async with asyncio.timeout(DEADLINE), Client(server, mode="legacy", elicitation_callback=on_question) as client:
        result = await client.call_tool("asks", {})

    assert isinstance(result.content[0], types.TextContent)
    supported, *lines = result.content[0].text.splitlines()
    assert supported == "1"
    declined = {"action": "decline", "content": None}
    assert [json.loads(line) for line in lines[:4]] == [
        {"action": "accept", "content": {"confirmed": True}},
        {"action": "accept", "content": {"choice": "b"}},
        declined,
        {"action": "accept", "content": {"name": "Ada"}},
    ]
    titled = [{"const": "a", "title": "Able"}, {"const": "b", "title": "B: c"}]
    assert questions == [
        ('Go "on"?', {"confirmed": {"type": "boolean"}}),
        ("Which", {"choice": {"type": "string", "oneOf": titled}}),
        ("Many", {"choices": {"type": "array", "items": {"type": "string", "enum": ["x", "y"]}}}),
        ("Name", {"name": {"type": "string"}}),
    ]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_that_cannot_be_asked_declines(tmp_path: Path, mode: Any) -> None:
    """Version 2026-07-28 has no requests from the server, so `auto` with a callback declines as well."""
    write(tmp_path, {"tools/asks.sh": HEADER + "echo $MCP_ELICIT_SUPPORTED; mcp_elicit_confirm Go\n"})

    async def on_question(context: Any, params: Any) -> types.ElicitResult:
        raise AssertionError("the client was asked")

    callback = on_question if mode == "auto" else None
    server = Workspace(tmp_path).server
    async with asyncio.timeout(DEADLINE), Client(server, mode=mode, elicitation_callback=callback) as client:
        result = await client.call_tool("asks", {})

    assert isinstance(result.content[0], types.TextContent)
    supported, answer = result.content[0].text.splitlines()
    assert (supported, json.loads(answer)["action"]) == ("0", "decline")
