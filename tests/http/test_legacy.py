"""A legacy session may have several streams open: its standing one, and those on which answers are resumed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import pytest

from tests.support.everything import serving

pytestmark = pytest.mark.anyio

DEADLINE = 60.0
VERSION = "2025-11-25"
HEADERS = {"accept": "application/json, text/event-stream", "mcp-protocol-version": VERSION}


async def events(response: httpx2.Response) -> AsyncIterator[tuple[str | None, Any]]:
    """Event id and message of each server-sent event; one that only carries an id has no message."""
    event_id = None
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name.rstrip(":") == "data":
            yield event_id, json.loads(value) if value else None


def call(request_id: int, name: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": {"name": name, "arguments": {}}}


async def test_resumed_response_does_not_move_notifications_to_its_stream() -> None:
    with serving() as url:
        async with httpx2.AsyncClient(headers=HEADERS, timeout=DEADLINE) as http:
            params = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "two", "version": "1"}}
            message: dict[str, Any] = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
            answer = await http.post(url, json=message)
            http.headers["mcp-session-id"] = answer.headers["mcp-session-id"]
            await http.post(url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
            async with http.stream("GET", url) as standing:
                # The server hangs up before it has answered; the rest is asked for by the id of the last event.
                async with http.stream("POST", url, json=call(1, "test_reconnection")) as cut:
                    ids = [event_id async for event_id, _ in events(cut)]
                async with http.stream("GET", url, headers={"last-event-id": ids[-1] or ""}) as resumed:
                    answers = [message async for _, message in up_to_answer(events(resumed), 1)]
                assert answers[-1]["result"]["content"][0]["text"] == "Here I am again."

                await http.post(url, json=call(2, "test_trigger_tool_change"))
                with anyio.fail_after(DEADLINE):
                    _, told = await anext(events(standing))
                assert told["method"] == "notifications/tools/list_changed"
                assert told["params"]["tool"]["name"] == "dynamic_tool"


async def up_to_answer(
    stream: AsyncIterator[tuple[str | None, Any]], request_id: int
) -> AsyncIterator[tuple[str | None, Any]]:
    """The events with a message, up to the answer to a request."""
    async for event_id, message in stream:
        if message is not None:
            yield event_id, message
            if message.get("id") == request_id:
                return
