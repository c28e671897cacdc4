"""Sessions with a server, and a record of each message with its time.

A `Session` sends requests. A `Stream` collects the notifications of one listen request, or of one legacy session. Both
transports, `http.py` and `stdio.py`, implement them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from tidings.core.frames import ACKNOWLEDGED_METHOD, SUBSCRIPTION_KEY
from tidings.core.model import UPDATED_METHOD, Feature
from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.wire.methods import LIST_CHANGED, LIST_METHODS

__all__ = [
    "LEGACY",
    "MODERN",
    "Era",
    "Frame",
    "Listing",
    "Refused",
    "Session",
    "Stream",
    "Transcript",
    "Unanswered",
    "decode",
    "initialize_params",
    "message_of",
    "messages_in",
    "modern_params",
]

Era: TypeAlias = Literal["modern", "legacy"]
Direction: TypeAlias = Literal["sent", "received"]

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
CLIENT_INFO = {"name": "tidings-check", "version": "1"}
MAX_PAGES = 100
_METHOD_NOT_FOUND = -32601
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class Unanswered(TidingsError):
    """The server did not answer a request, or its answer is not a valid message."""


class Refused(Unanswered):
    """The server answered a list request with an error."""

    def __init__(self, method: str, error: dict[str, Any]) -> None:
        super().__init__(f"{method} was answered with {one_line(json.dumps(error), 200)}")
        self.method = method


@dataclass(frozen=True)
class Frame:
    """One message, response or stream event, as it was on the wire."""

    time: float
    """Seconds since the start of the check."""
    channel: str
    direction: Direction
    content: Any
    """A JSON-RPC message, or a text such as `GET: 405`."""

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
        return self.content if isinstance(self.content, dict) else {}

    @property
    def method(self) -> str:
        return str(self.message.get("method", ""))

    @property
    def params(self) -> dict[str, Any]:
        return _as_dict(self.message.get("params"))

    @property
    def uri(self) -> str | None:
        found = self.params.get("uri")
        return found if isinstance(found, str) else None

    @property
    def subscription(self) -> Any:
        return _as_dict(self.params.get("_meta")).get(SUBSCRIPTION_KEY)


class Transcript:
    """Records the frames of all sessions of one check."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.frames: list[Frame] = []

    def now(self) -> float:
        return time.monotonic() - self._started

    def record(self, channel: str, direction: Direction, content: Any) -> Frame:
        frame = Frame(self.now(), channel, direction, content)
        self.frames.append(frame)
        return frame


class Stream:
    """The notifications of one listen request, or those of a legacy session."""

    def __init__(self, channel: str, transcript: Transcript, request_id: str | int | None = None) -> None:
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
        self._transcript = transcript
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
        self.opened = self._transcript.record(self.channel, "received", f"HTTP {status} {json.dumps(shown)}")
        self._notify()

    def receive(self, message: Any) -> None:
        self.frames.append(self._transcript.record(self.channel, "received", message))
        self._notify()

    def end(self, reason: str) -> None:
        if not self.is_ended:
            self.is_ended = True
            self._transcript.record(self.channel, "received", f"end of the stream: {reason}")
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], object], limit: float) -> bool:
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
        return _as_dict(frame.params.get("notifications")) if frame else {}

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


@dataclass
class Listing:
    """All pages of one list of the server."""

    items: dict[str, Any]
    """The items by key, in the order of the server."""
    pages: list[Frame] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        return list(self.items)


class Session(ABC):
    """A connection of one era. The subclasses are the transports."""

    era: Era
    transport: Literal["http", "stdio"]

    def __init__(self, channel: str, transcript: Transcript, timeout: float) -> None:
        self.channel = channel
        self.transcript = transcript
        self.timeout = timeout
        self.discovery: Frame | None = None
        """The answer to `server/discover` or `initialize`."""
        self.inbox = Stream(channel, transcript)
        """The notifications of a legacy session, and those of a modern one that belong to no stream."""
        self.streams: list[Stream] = []
        self.fetched: dict[Feature, float] = {}
        """The time of the first answer to a list request, by feature. Before it, the client knows no list."""
        self.refused: set[str] = set()
        """The list requests that the server answered with an error when the check began."""
        self._ids = 0

    @property
    def capabilities(self) -> dict[str, Any]:
        return _as_dict(self._discovered.get("capabilities"))

    @property
    def name(self) -> str:
        meta = _as_dict(self._discovered.get("_meta"))
        info = self._discovered.get("serverInfo") or meta.get("io.modelcontextprotocol/serverInfo")
        return str(_as_dict(info).get("name", ""))

    @property
    def _discovered(self) -> dict[str, Any]:
        return _as_dict(self.discovery.message.get("result")) if self.discovery else {}

    @property
    def version(self) -> str:
        """The version of the protocol. A legacy server may choose an older one than the client offers."""
        chosen = self._discovered.get("protocolVersion")
        if self.era == "legacy" and isinstance(chosen, str) and _DATE.fullmatch(chosen):
            return chosen
        return MODERN if self.era == "modern" else LEGACY

    def capability(self, feature: Feature) -> dict[str, Any] | None:
        found = self.capabilities.get(feature.value)
        return found if isinstance(found, dict) else None

    def advertises(self, feature: Feature) -> bool:
        return (self.capability(feature) or {}).get("listChanged") is True

    @property
    def advertises_subscribe(self) -> bool:
        return (self.capability(Feature.RESOURCES) or {}).get("subscribe") is True

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    @abstractmethod
    async def request(self, method: str, **params: Any) -> Frame:
        """Send a request; return its response, which may be an error. Raise `Unanswered` if there is none."""

    @abstractmethod
    async def notify(self, method: str, **params: Any) -> None: ...

    @abstractmethod
    async def listen(self, requested: dict[str, Any], request_id: str | int | None = None) -> Stream:
        """Send `subscriptions/listen`, and wait until it is acknowledged or refused, or until the timeout."""

    @abstractmethod
    async def cancel(self, stream: Stream) -> None:
        """End a listen request as a client does."""

    @abstractmethod
    async def close(self) -> None: ...

    async def list(self, method: str) -> Listing:
        """Read all pages of a list. It is empty if the server does not have the method."""
        feature, member, key, _ = LIST_METHODS[method]
        items: dict[str, Any] = {}
        pages: list[Frame] = []
        params: dict[str, Any] = {}
        while len(pages) < MAX_PAGES:
            frame = await self.request(method, **params)
            result, error = frame.message.get("result"), frame.message.get("error")
            if isinstance(error, dict) and error.get("code") == _METHOD_NOT_FOUND and not pages:
                break
            if isinstance(error, dict):
                raise Refused(method, error)
            if not isinstance(result, dict) or not isinstance(result.get(member), list):
                raise Unanswered(f"{method} was answered with {one_line(json.dumps(frame.content), 200)}")
            pages.append(frame)
            self.fetched.setdefault(feature, frame.time)
            items |= {str(_as_dict(item).get(key)): _without_volatile(item) for item in result[member]}
            if not result.get("nextCursor"):
                break
            params = {"cursor": result["nextCursor"]}
        return Listing(items, pages)

    async def lists(self) -> dict[str, Listing]:
        """Read the lists of all features that the server declares, except for those that it refused."""
        return {
            method: await self.list(method)
            for method, each in LIST_METHODS.items()
            if self.capability(each.feature) is not None and method not in self.refused
        }

    async def read(self, uri: str) -> Any:
        """Return the contents of a resource, or None if it can't be read."""
        frame = await self.request("resources/read", uri=uri)
        return _as_dict(frame.message.get("result")).get("contents")


def modern_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the params of a modern request: its own, and the `_meta` that each request must have."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": CLIENT_INFO,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    return {"_meta": meta, **params}


def initialize_params() -> dict[str, Any]:
    return {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": CLIENT_INFO}


def message_of(method: str, params: Mapping[str, Any], request_id: str | int | None = None) -> dict[str, Any]:
    """Return a JSON-RPC request, or a notification if there is no id."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": dict(params)}
    return message if request_id is None else {**message, "id": request_id}


def decode(data: bytes) -> Any:
    """Return the value of JSON. Raise `ValueError` if it is none, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def messages_in(decoded: Any) -> Iterator[Any]:
    """Yield the messages of a body: old versions allow several in an array."""
    if isinstance(decoded, list):
        yield from decoded
    else:
        yield decoded


def _without_volatile(item: Any) -> Any:
    """Return an item without `size` and `lastModified`. They change with its content, of which `resources/updated`
    notifies, and not with the list."""
    if not isinstance(item, dict):
        return item
    annotations = {name: value for name, value in _as_dict(item.get("annotations")).items() if name != "lastModified"}
    return {**item, "size": None, "annotations": annotations}


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _covers(uris: Iterable[str], uri: str | None) -> bool:
    """Return whether a URI is subscribed, or is a sub-resource of one that is."""
    return uri is not None and any(uri.startswith(each) for each in uris)
