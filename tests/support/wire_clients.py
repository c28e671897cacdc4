"""Clients of the board that see the bytes, HTTP by hand: of the modern era, and a legacy session."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest

from tests.support.sdk_clients import DEADLINE, MODERN, Heard

__all__ = ["EVERYTHING", "LegacyWire", "Stream", "Wire", "http", "read_answer"]

EVERYTHING = {
    "toolsListChanged": True,
    "promptsListChanged": True,
    "resourcesListChanged": True,
    "resourceSubscriptions": ["board://sprint"],
}
"""Of what a board tells, to be asked for in a listen."""


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(DEADLINE)) as client:
        yield client


@dataclass
class Wire:
    """HTTP by hand, for what a client does not show: headers, raw frames, comments."""

    url: str
    http: httpx2.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    def message(
        self, method: str, request_id: str | int, params: dict[str, Any], meta: Any = None, **capabilities: Any
    ) -> dict[str, Any]:
        meta = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientInfo": {"name": "wire", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": capabilities,
            **(meta or {}),
        }
        return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": {**params, "_meta": meta}}

    def _headers(self, method: str, params: dict[str, Any]) -> dict[str, str]:
        named = {"Mcp-Name": params["name"]} if "name" in params else {}
        return {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "MCP-Protocol-Version": MODERN,
            "Mcp-Method": method,
            **named,
            **self.headers,
        }

    async def post(self, method: str, request_id: str | int = 1, **params: Any) -> httpx2.Response:
        with anyio.fail_after(DEADLINE):
            return await self.http.post(
                self.url, json=self.message(method, request_id, params), headers=self._headers(method, params)
            )

    async def change(self, what: str, **args: Any) -> Any:
        response = await self.post("tools/call", name="change", arguments={"what": what, "args": args})
        return json.loads(read_answer(response.text)["result"]["content"][0]["text"])["result"]

    @asynccontextmanager
    async def listen(
        self, request_id: str | int, wanted: dict[str, Any], meta: dict[str, Any] | None = None, **capabilities: Any
    ) -> AsyncIterator[Stream]:
        method = "subscriptions/listen"
        message = self.message(method, request_id, {"notifications": wanted}, meta, **capabilities)
        body = json.dumps(message)  # in ASCII: half a character can be written only so
        async with self.http.stream("POST", self.url, content=body, headers=self._headers(method, {})) as response:
            stream = Stream(response, response.aiter_text())  # held here: whoever drops it closes the response
            yield stream


@dataclass
class LegacyWire:
    """A legacy session by hand: its stream is opened, dropped and opened again when the test says so."""

    url: str
    http: httpx2.AsyncClient
    version: str = "2025-11-25"
    session_id: str = ""

    @property
    def headers(self) -> dict[str, str]:
        named = {"Mcp-Session-Id": self.session_id, "MCP-Protocol-Version": self.version} if self.session_id else {}
        return {"Accept": "application/json, text/event-stream", "Content-Type": "application/json", **named}

    async def post(self, method: str, request_id: int | None = 1, **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        if request_id is not None:
            message["id"] = request_id
        with anyio.fail_after(DEADLINE):
            response = await self.http.post(self.url, json=message, headers=self.headers)
        assert response.status_code in (200, 202), (response.status_code, response.text)
        self.session_id = response.headers.get("mcp-session-id", self.session_id)
        return read_answer(response.text) if request_id is not None else {}

    async def shake_hands(self, meta: dict[str, Any] | None = None, **capabilities: Any) -> dict[str, Any]:
        params: dict[str, Any] = {"capabilities": capabilities, "clientInfo": {"name": "wire", "version": "1"}}
        if meta is not None:
            params["_meta"] = meta
        answer = await self.post("initialize", protocolVersion=self.version, **params)
        await self.post("notifications/initialized", None)
        result: dict[str, Any] = answer["result"]
        return result

    @asynccontextmanager
    async def stream(self, last: str | None = None) -> AsyncIterator[Stream]:
        """The standing `GET`; `last` is the id of the last event that was read."""
        headers = self.headers if last is None else self.headers | {"Last-Event-ID": last}
        async with self.http.stream("GET", self.url, headers=headers) as response:
            assert response.status_code == 200, response.status_code
            stream = Stream(response, response.aiter_text())  # held here, as above
            yield stream

    async def end(self) -> None:
        response = await self.http.delete(self.url, headers=self.headers)
        assert response.status_code == 200


def read_answer(body: str) -> dict[str, Any]:
    """A JSON-RPC response, whether it came as JSON or as the last event of a stream."""
    if not body.startswith("{"):
        body = [line[6:] for line in body.splitlines() if line.startswith("data: {")][-1]
    answer: dict[str, Any] = json.loads(body)
    return answer


@dataclass
class Stream:
    """A response as it comes."""

    response: httpx2.Response
    chunks: AsyncIterator[str]
    _rest: str = ""

    async def event(self) -> str:
        """The next event or comment, whole; empty at the end."""
        with anyio.fail_after(DEADLINE):
            while "\r\n\r\n" not in self._rest:
                try:
                    self._rest += await anext(self.chunks)
                except StopAsyncIteration:
                    return ""
        event, _, self._rest = self._rest.partition("\r\n\r\n")
        return event

    async def message(self) -> dict[str, Any]:
        """The next JSON-RPC message."""
        while True:
            event = await self.event()
            assert event, "the stream ended"
            for line in event.split("\r\n"):
                if line.startswith("data: {"):
                    message: dict[str, Any] = json.loads(line[6:])
                    return message

    async def heard(self) -> Heard:
        """The next notification."""
        message = await self.message()
        params = message["params"]
        return Heard(message["method"], params.get("_meta") or {}, params.get("uri"))
