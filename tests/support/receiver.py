"""A receiver of webhooks and telemetry over HTTP or HTTPS. The test decides what it answers, and when.

`verify` follows the Standard Webhooks specification and uses no code of Tidings.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.waiting import DEADLINE

__all__ = ["Delivery", "Receiver", "receiving", "verify"]


@dataclass(frozen=True)
class Delivery:
    """One request."""

    headers: dict[str, str]
    body: bytes
    path: str = ""

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def envelope(self) -> dict[str, Any]:
        envelope: dict[str, Any] = json.loads(self.body)
        return envelope

    @property
    def summary(self) -> str:
        """`tools.list_changed added a, removed b`."""
        change = self.envelope["data"]["_meta"]["dev.tidings/change"]
        changes = change.get("changes", [change])
        told = ", ".join(f"{each.get('operation')} {each.get('name', each.get('uri'))}" for each in changes)
        return f"{self.envelope['type']} {told}"


@dataclass
class Receiver:
    """`answer` returns the status and headers of a response; responses wait until `gate` is set."""

    url: str = ""
    port: int = 0
    came: asyncio.Queue[Delivery] = field(default_factory=asyncio.Queue)
    answer: Callable[[Delivery], tuple[int, dict[str, str]]] = lambda delivery: (204, {})
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes | None = b""
    """The body of a response; None for one that never ends."""
    reply: Callable[[Delivery], bytes] | None = None
    """Returns the body of a response instead."""
    connections: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def answers(self, *statuses: int) -> None:
        """Answer with these statuses in turn, and with the last one from then on."""
        left = list(statuses)
        self.answer = lambda delivery: (left.pop(0) if len(left) > 1 else left[0], {})

    async def next(self) -> Delivery:
        async with asyncio.timeout(DEADLINE):
            return await self.came.get()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            delivery = Delivery(headers, body, head[0].split(" ")[1])
            status, extra = self.answer(delivery)
            self.came.put_nowait(delivery)
            await self.gate.wait()
            lines = [f"HTTP/1.1 {status} Whatever", *(f"{name}: {value}" for name, value in extra.items())]
            writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode())
            if self.reply is not None:
                writer.write(self.reply(delivery))
            elif self.body is not None:
                writer.write(self.body)
            while self.reply is None and self.body is None:
                writer.write(b"x" * 65536)
                await writer.drain()
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving(
    certificate: Path | None = None, host: str = "127.0.0.1", path: str = "/hook?of=tidings"
) -> AsyncIterator[Receiver]:
    """Run a receiver; over HTTPS if a certificate is given (a PEM file with its key)."""
    receiver = Receiver()
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=context)
    receiver.port = server.sockets[0].getsockname()[1]
    receiver.url = f"{'https' if certificate else 'http'}://{host}:{receiver.port}{path}"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.close()


def verify(delivery: Delivery, secret: str, *, now: float, tolerance: float = 300) -> None:
    """Verify a delivery as https://www.standardwebhooks.com describes it, with assertions."""
    message_id, timestamp = delivery.headers["webhook-id"], delivery.headers["webhook-timestamp"]
    assert message_id
    assert "." not in message_id
    assert abs(now - int(timestamp)) <= tolerance
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{message_id}.{timestamp}.".encode() + delivery.body
    expected = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    passed = [each.split(",", 1) for each in delivery.headers["webhook-signature"].split(" ")]
    assert any(version == "v1" and hmac.compare_digest(value, expected) for version, value in passed)
