"""One session with a server, of either era: its messages as they are on the wire, and a record of each.

A `Session` sends requests. A `Stream` collects the notifications of one listen request, or of one legacy session. The
transports are in `http.py` and `stdio.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

from tidings.core.frames import ACKNOWLEDGED_METHOD, SUBSCRIPTION_KEY
from tidings.core.model import UPDATED_METHOD, Feature
from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.wire.methods import DISCOVER, INITIALIZE, INITIALIZED, LIST_CHANGED, LISTEN

__all__ = [
    "LEGACY",
    "MODERN",
    "Direction",
    "Era",
    "Frame",
    "Record",
    "Session",
    "Stream",
    "Unanswered",
    "as_dict",
    "split_messages",
]

Era: TypeAlias = Literal["modern", "legacy"]
Direction: TypeAlias = Literal["sent", "received"]
Record: TypeAlias = "Callable[[str, Direction, bytes | str], Frame]"
"""Called with the channel, the direction, and each message, or a text such as `GET: 405`."""

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
"""The version that a client of the legacy era offers. The server may choose an older one."""
_HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", LEGACY)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class Unanswered(TidingsError):
    """The server did not answer a request, or its answer is not a valid message."""


@dataclass(frozen=True)
class Frame:
    """One message, response or stream event, as it was on the wire."""

    time: float
    channel: str
    direction: Direction
    data: bytes | str
    """The bytes of a JSON-RPC message, or a text such as `GET: 405`."""

    @cached_property
    def content(self) -> Any:
        """The decoded message, or a text if it is none."""
        if isinstance(self.data, str):
            return self.data
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            return self.data.decode(errors="replace").rstrip()

    def as_json(self) -> dict[str, Any]:
        return {
            "time": round(self.time, 3),
            "channel": self.channel,
            "direction": self.direction,
            "content": self.content,
        }

    def __str__(self) -> str:
        content = self.content if isinstance(self.content, str) else json.dumps(self.content, ensure_ascii=False)
        arrow = "→" if self.direction == "sent" else "←"
        return f"{self.time:7.3f} s  {self.channel}  {arrow} {one_line(content, 240)}"

    @property
    def message(self) -> dict[str, Any]:
        return as_dict(self.content)

    @property
    def result(self) -> dict[str, Any] | None:
        found = self.message.get("result")
        return found if isinstance(found, dict) else None

    @property
    def method(self) -> str:
        return str(self.message.get("method", ""))

    @property
    def params(self) -> dict[str, Any]:
        return as_dict(self.message.get("params"))

    @property
    def uri(self) -> str | None:
        found = self.params.get("uri")
        return found if isinstance(found, str) else None

    @property
    def subscription(self) -> Any:
        return as_dict(self.params.get("_meta")).get(SUBSCRIPTION_KEY)

    def answers(self, request_id: str | int) -> bool:
        return "method" not in self.message and self.message.get("id") == request_id


def _make_frame(channel: str, direction: Direction, data: bytes | str) -> Frame:
    return Frame(time.monotonic(), channel, direction, data)


class Stream:
    """The notifications of one listen request, or those of a legacy session."""

    def __init__(self, channel: str, record: Record, request_id: str | int | None = None) -> None:
        self.channel = channel
        self.request_id = request_id
        self.requested: dict[str, Any] = {}
        """The filter of the listen request."""
        self.subscribed: set[str] = set()
        """The URIs to which a legacy session is subscribed."""
        self.unsubscribed: set[str] = set()
        """The URIs to which it was subscribed before."""
        self.request: Frame | None = None
        self.opened: Frame | None = None
        """The status and headers of the response, over HTTP."""
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.frames: list[Frame] = []
        self.is_ended = False
        self.cancelled: float | None = None
        """The time at which the server knows that the client has cancelled the listen request."""
        self._record = record
        self._changed = asyncio.Event()

    # Received

    def reopen(self) -> None:
        """Reset the status for a new connection, and keep the frames."""
        self.status, self.is_ended = 0, False

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        shown = {
            name: headers[name] for name in ("content-type", "content-encoding", "x-accel-buffering") if name in headers
        }
        self.status, self.headers = status, headers
        self.opened = self._record(self.channel, "received", f"HTTP {status} {json.dumps(shown)}")
        self._notify()

    def receive(self, data: bytes) -> None:
        self.frames.append(self._record(self.channel, "received", data))
        self._notify()

    def end(self, reason: str) -> None:
        if not self.is_ended:
            self.is_ended = True
            self._record(self.channel, "received", f"end of the stream: {reason}")
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], object], limit: float | None) -> bool:
        """Wait for a condition. Return whether it became true in time."""
        try:
            async with asyncio.timeout(limit):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # Derived from the received messages

    @property
    def acknowledgement(self) -> Frame | None:
        return next((frame for frame in self.frames if frame.method == ACKNOWLEDGED_METHOD), None)

    @property
    def granted(self) -> dict[str, Any]:
        frame = self.acknowledgement
        return as_dict(frame.params.get("notifications")) if frame else {}

    @property
    def answer(self) -> Frame | None:
        """The response to the listen request: the end of the subscription, or an error."""
        return next((frame for frame in self.frames if "id" in frame.message and "method" not in frame.message), None)

    @property
    def is_settled(self) -> bool:
        """Whether the listen request is acknowledged or refused."""
        return self.acknowledgement is not None or self.answer is not None or self.is_ended

    def notifications(self, since: int = 0) -> list[Frame]:
        """Return the notifications of changes that came after the acknowledgement, from a position in `frames` on."""
        first = self.frames.index(self.acknowledgement) + 1 if self.acknowledgement else 0
        found = self.frames[max(first, since) :]
        return [frame for frame in found if frame.method in LIST_CHANGED or frame.method == UPDATED_METHOD]

    def expects(self, frame: Frame) -> bool:
        """Return whether the client has asked for this notification."""
        feature = LIST_CHANGED.get(frame.method)
        if self.request_id is None:
            return feature is not None or _covers(self.subscribed, frame.uri)
        if feature is not None:
            return self.requested.get(f"{feature.value}ListChanged") is True
        return frame.method == UPDATED_METHOD and _covers(self.requested.get("resourceSubscriptions", ()), frame.uri)


class Session(ABC):
    """A connection of one era. The subclasses are the transports."""

    transport: Literal["http", "stdio"]

    def __init__(
        self, era: Era, timeout: float, *, client: str = "tidings", channel: str = "", record: Record = _make_frame
    ) -> None:
        """`timeout` is for each answer, `client` the name that the server is told."""
        self.era = era
        self.timeout = timeout
        self.channel = channel
        self.record = record
        self.discovery: Frame | None = None
        """The answer to `server/discover` or `initialize`."""
        self.inbox = Stream(channel, record)
        """The notifications of a legacy session, and those of a modern one that belong to no stream."""
        self.streams: list[Stream] = []
        self._client = {"name": client, "version": "1"}
        self._ids = 0

    # Properties from discovery or the handshake

    @property
    def _discovered(self) -> dict[str, Any]:
        return (self.discovery.result if self.discovery else None) or {}

    @property
    def capabilities(self) -> dict[str, Any]:
        return as_dict(self._discovered.get("capabilities"))

    @property
    def name(self) -> str:
        meta = as_dict(self._discovered.get("_meta"))
        info = self._discovered.get("serverInfo") or meta.get("io.modelcontextprotocol/serverInfo")
        return str(as_dict(info).get("name", ""))

    @property
    def version(self) -> str:
        """The version of the protocol."""
        chosen = self._discovered.get("protocolVersion")
        if self.era == "legacy" and isinstance(chosen, str) and _DATE.fullmatch(chosen):
            return chosen
        return MODERN if self.era == "modern" else LEGACY

    @property
    def supports_era(self) -> bool:
        """Whether the server has answered that it supports this era."""
        if self.era == "modern":
            found = self._discovered.get("supportedVersions")
            return isinstance(found, list) and MODERN in found
        return self._discovered.get("protocolVersion") in _HANDSHAKE_VERSIONS

    def capability(self, feature: Feature) -> dict[str, Any] | None:
        found = self.capabilities.get(feature.value)
        return found if isinstance(found, dict) else None

    def advertises(self, feature: Feature) -> bool:
        return (self.capability(feature) or {}).get("listChanged") is True

    @property
    def advertises_subscribe(self) -> bool:
        return (self.capability(Feature.RESOURCES) or {}).get("subscribe") is True

    # Requests

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def encode(self, method: str, params: Mapping[str, Any], request_id: str | int | None = None) -> bytes:
        """Return a request of this era, or a notification if there is no id."""
        if self.era == "modern":
            meta = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientInfo": self._client,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
            params = {"_meta": meta, **params}
        message = {"jsonrpc": "2.0", "method": method, "params": dict(params)}
        return json.dumps(message if request_id is None else {**message, "id": request_id}).encode()

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    @property
    def first_method(self) -> str:
        """The first request of a session."""
        return DISCOVER if self.era == "modern" else INITIALIZE

    async def open(self) -> None:
        """Ask the server what it is. Its answer, which may be an error, is `discovery`."""
        if self.era == "modern":
            self.discovery = await self.request(self.first_method)
        else:
            params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": self._client}
            self.discovery = await self.request(self.first_method, **params)
            await self.notify(INITIALIZED)

    @abstractmethod
    async def request(self, method: str, **params: Any) -> Frame:
        """Send a request; return its response, which may be an error. Raise `Unanswered` if there is none."""

    @abstractmethod
    async def notify(self, method: str, **params: Any) -> None: ...

    async def listen(self, requested: dict[str, Any], request_id: str | int | None = None) -> Stream:
        """Send `subscriptions/listen`, and wait until it is acknowledged or refused, or until the timeout."""
        request_id = self.next_id() if request_id is None else request_id
        data = self.encode(LISTEN, {"notifications": requested}, request_id)
        stream = Stream(f"{self.channel}, stream {request_id!r}", self.record, request_id)
        stream.requested = requested
        stream.request = self.record(stream.channel, "sent", data)
        self.streams.append(stream)
        await self._send_listen(stream, data)
        await stream.until(lambda: stream.is_settled, self.timeout)
        return stream

    @abstractmethod
    async def _send_listen(self, stream: Stream, data: bytes) -> None: ...

    @abstractmethod
    async def cancel(self, stream: Stream) -> None:
        """End a listen request as a client does."""

    @abstractmethod
    async def close(self) -> None: ...


def split_messages(body: bytes) -> list[bytes]:
    """Return the messages of a body: old versions allow several in an array. An invalid body has none.

    What `Frame` decodes is valid: `json` accepts `NaN` and half a surrogate pair, which some servers send."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return []
    return [json.dumps(each).encode() for each in content] if isinstance(content, list) else [body]


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _covers(uris: Iterable[str], uri: str | None) -> bool:
    """Return whether a URI is subscribed, or is a sub-resource of one that is."""
    return uri is not None and any(uri.startswith(each) for each in uris)
