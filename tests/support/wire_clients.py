"""Clients of the board that send and read HTTP without the SDK: a modern one, and a legacy session."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest

from tests.support.messages import ACCEPT_BOTH, LISTS, initialize, modern_headers, modern_message
from tests.support.sdk_clients import DEADLINE, Received

__all__ = ["EVERYTHING", "LegacyWire", "Stream", "Wire", "Wires", "http", "read_answer"]

EVERYTHING = {**LISTS, "resourceSubscriptions": ["board://sprint"]}
"""The `notifications` of a listen request for all topics of a board."""


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    # The servers use plain HTTP, and loading the certificates takes longer than a test.
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(DEADLINE), verify=False) as client:
        yield client


@dataclass
class Wire:
    """A modern client that shows headers, raw frames and comments."""

    url: str
    http: httpx2.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    async def post(self, method: str, request_id: str | int = 1, **params: Any) -> httpx2.Response:
        headers = modern_headers(method, params) | self.headers
        with anyio.fail_after(DEADLINE):
            return await self.http.post(self.url, json=modern_message(method, request_id, params), headers=headers)

    async def change(self, what: str, **args: Any) -> Any:
        response = await self.post("tools/call", name="change", arguments={"what": what, "args": args})
        return json.loads(read_answer(response.text)["result"]["content"][0]["text"])["result"]

    @asynccontextmanager
    async def listen(
        self, request_id: str | int, requested: dict[str, Any], meta: dict[str, Any] | None = None, **capabilities: Any
    ) -> AsyncIterator[Stream]:
        method = "subscriptions/listen"
        meta = {"io.modelcontextprotocol/clientCapabilities": capabilities, **(meta or {})}
        message = modern_message(method, request_id, {"notifications": requested}, meta)
        body = json.dumps(message)  # in ASCII, which can contain a lone surrogate
        headers = modern_headers(method) | self.headers
        async with self.http.stream("POST", self.url, content=body, headers=headers) as response:
            # Referenced here, because garbage collection closes the response.
            stream = Stream(response, response.aiter_text())
            yield stream


@dataclass
class LegacyWire:
    """A legacy session whose stream a test opens and closes."""

    url: str
    http: httpx2.AsyncClient
    version: str = "2025-11-25"
    session_id: str = ""

    @property
    def headers(self) -> dict[str, str]:
        named = {"Mcp-Session-Id": self.session_id, "MCP-Protocol-Version": self.version} if self.session_id else {}
        return ACCEPT_BOTH | named

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
        params = {"capabilities": capabilities} if meta is None else {"capabilities": capabilities, "_meta": meta}
        answer = await self.post("initialize", **initialize(self.version, **params)["params"])
        await self.post("notifications/initialized", None)
        result: dict[str, Any] = answer["result"]
        return result

    @asynccontextmanager
    async def stream(self, last: str | None = None) -> AsyncIterator[Stream]:
        """Open the `GET` stream. `last` is the id of the last event that was read."""
        headers = self.headers if last is None else self.headers | {"Last-Event-ID": last}
        async with self.http.stream("GET", self.url, headers=headers) as response:
            assert response.status_code == 200, response.status_code
            stream = Stream(response, response.aiter_text())  # as above
            yield stream

    async def end(self) -> None:
        response = await self.http.delete(self.url, headers=self.headers)
        assert response.status_code == 200


@dataclass
class Wires:
    """Makes clients of several servers, by the name of the server."""

    urls: dict[str, str]
    http: httpx2.AsyncClient

    def modern(self, server: str, token: str | None = None) -> Wire:
        return Wire(self.urls[server], self.http, {"Authorization": f"Bearer {token}"} if token else {})

    def legacy(self, server: str) -> LegacyWire:
        return LegacyWire(self.urls[server], self.http)


def read_answer(body: str) -> dict[str, Any]:
    """Return a JSON-RPC response that is JSON, or the last event of a stream."""
    if not body.startswith("{"):
        body = [line[6:] for line in body.splitlines() if line.startswith("data: {")][-1]
    answer: dict[str, Any] = json.loads(body)
    return answer


@dataclass
class Stream:
    """The body of a response, event by event."""

    response: httpx2.Response
    chunks: AsyncIterator[str]
    _rest: str = ""

    async def event(self, deadline: float | None = DEADLINE) -> str:
        """Return the next event or comment; an empty string at the end."""
        with anyio.fail_after(deadline):
            while "\r\n\r\n" not in self._rest:
                try:
                    self._rest += await anext(self.chunks)
                except StopAsyncIteration:
                    return ""
        event, _, self._rest = self._rest.partition("\r\n\r\n")
        return event

    async def message(self, deadline: float | None = DEADLINE) -> dict[str, Any]:
        """Return the next JSON-RPC message."""
        while True:
            event = await self.event(deadline)
            if not event:
                raise EOFError("the stream ended")
            for line in event.split("\r\n"):
                if line.startswith("data: {"):
                    message: dict[str, Any] = json.loads(line[6:])
                    return message

    async def received(self) -> Received:
        """Return the next notification."""
        message = await self.message()
        params = message["params"]
        return Received(message["method"], params.get("_meta") or {}, params.get("uri"))
