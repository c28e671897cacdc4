"""A receiver of MCP Events on the package `standardwebhooks`, and a client that subscribes it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from mcp.server.mcpserver import MCPServer
from standardwebhooks.webhooks import Webhook

from tests.support.messages import modern_headers, modern_message
from tests.support.receiver import Delivery, Receiver, receiving
from tests.support.tokens import authentication
from tests.support.uvicorn_server import address_of, run_uvicorn
from tests.support.waiting import DEADLINE
from tests.support.wire_clients import read_answer
from tidings import Live, Policy
from tidings.webhooks.signature import new_secret

__all__ = ["POLICY", "EventClient", "EventReceiver", "event_receiver", "serving_events"]

POLICY: dict[str, Any] = {"webhook_private": True, "webhook_backoff": 0.01, "webhook_timeout": DEADLINE}


@dataclass
class EventReceiver:
    """Verifies each request with the secret of its client, and answers challenges."""

    receiver: Receiver
    secret: str = field(default_factory=new_secret)
    challenges: int = 0
    is_honest: bool = True
    """Whether it answers challenges."""

    @property
    def url(self) -> str:
        return self.receiver.url

    def reply(self, delivery: Delivery) -> bytes:
        body = Webhook(self.secret).verify(delivery.body, delivery.headers)
        assert delivery.headers["content-type"] == "application/json"
        assert delivery.headers["x-mcp-subscription-id"].startswith("sub_")
        if body.get("type") != "verification":
            return b""
        self.challenges += 1
        return json.dumps({"challenge": body["challenge"] if self.is_honest else "guessed"}).encode()

    async def next(self) -> Delivery:
        """Return the next request that is no challenge."""
        while True:
            delivery = await self.receiver.next()
            if delivery.envelope.get("type") != "verification":
                return delivery

    async def next_event(self) -> dict[str, Any]:
        delivery = await self.next()
        event = delivery.envelope
        assert event["eventId"] == delivery.id
        return event

    def answers(self, *statuses: int) -> None:
        """Answer events with these statuses in turn, and with the last one from then on."""
        left = list(statuses)

        def answer(delivery: Delivery) -> tuple[int, dict[str, str]]:
            if delivery.envelope.get("type") == "verification":
                return 200, {}
            return (left.pop(0) if len(left) > 1 else left[0], {})

        self.receiver.answer = answer


@asynccontextmanager
async def event_receiver(path: str = "/events?key=1") -> AsyncIterator[EventReceiver]:
    async with receiving(path=path) as receiver:
        made = EventReceiver(receiver)
        receiver.reply = made.reply
        made.answers(200)
        yield made


@dataclass
class EventClient:
    """A client of the events of one server."""

    url: str
    http: httpx2.AsyncClient
    token: str = "alice"
    """Empty for a client without authentication."""

    async def post(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the whole response to a request."""
        authorization = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        headers = modern_headers(method, params) | authorization
        body = json.dumps(modern_message(method, 1, params))  # in ASCII, which can contain a lone surrogate
        response = await self.http.post(self.url, content=body, headers=headers)
        return read_answer(response.text)

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        answer = await self.post(method, **params)
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def error(self, method: str, **params: Any) -> dict[str, Any]:
        answer = await self.post(method, **params)
        assert "error" in answer, answer
        error: dict[str, Any] = answer["error"]
        return error

    async def subscribe(
        self, receiver: EventReceiver, name: str, arguments: dict[str, Any] | None = None, **params: Any
    ) -> dict[str, Any]:
        return await self.request("events/subscribe", **self.params(receiver, name, arguments), **params)

    @staticmethod
    def params(receiver: EventReceiver, name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        delivery = {"mode": "webhook", "url": receiver.url, "secret": receiver.secret}
        return {"name": name, "arguments": arguments or {}, "delivery": delivery, "cursor": None}


@asynccontextmanager
async def serving_events(
    store: Path | None = None,
    *,
    authorize: Any = None,
    declare: Callable[[Live], object] | None = None,
    is_open: bool = False,
    telemetry: Any = True,
    **policy: Any,
) -> AsyncIterator[tuple[Live, EventClient]]:
    """Serve an `MCPServer` with events on HTTP; tokens are needed unless it `is_open`."""
    server: MCPServer[Any] = MCPServer("events", log_level="CRITICAL", **({} if is_open else authentication()))
    server.resource("docs://a", name="a")(lambda: "a")
    options = {"policy": Policy(**{**POLICY, **policy}), "authorize": authorize, "telemetry": telemetry}
    live = Live(server, events=True, store=store, **options)
    if declare is not None:
        declare(live)
    try:
        async with run_uvicorn(live.http_app()) as running, httpx2.AsyncClient(timeout=DEADLINE, verify=False) as http:
            yield live, EventClient(f"http://127.0.0.1:{address_of(running)[1]}/mcp", http)
    finally:
        live.close()
