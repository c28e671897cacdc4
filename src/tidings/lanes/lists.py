"""HTTP: lists and `server/discover`, from bytes that were made once per revision.

The real cost of a notification is the herd of refetches that it causes. The SDK words the first answer after a change,
for each version of the protocol; everyone else gets the same bytes with their own request id in them. Only for servers
whose lists are the same for every caller, and never for a request with a cursor: `front` sees to both. The SDK is asked
again from time to time, and when it answers otherwise although nobody noticed a change, everybody is told of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import msgspec

from tidings.lanes.channel import Message, Receive, Scope, Send
from tidings.model import Feature

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Kept", "ListsLane"]

_JSON_HEAD = b'{"jsonrpc":"2.0","id":'
_SSE_HEAD = b"event: message\r\ndata: " + _JSON_HEAD

_FEATURES = {
    "tools/list": Feature.TOOLS,
    "prompts/list": Feature.PROMPTS,
    "resources/list": Feature.RESOURCES,
    "resources/templates/list": Feature.RESOURCES,
}


class _Answer(msgspec.Struct):
    result: msgspec.Raw


class Kept:
    """An answer of the SDK's, but for the request id and, in the legacy era, the session id."""

    __slots__ = ("_headers", "_length_at", "_session_at", "head", "lines", "state", "tail", "until")

    def __init__(
        self, state: Hashable, until: float, headers: list[tuple[bytes, bytes]], head: bytes, tail: bytes
    ) -> None:
        self.state = state
        self.until = until
        self.head = head
        self.tail = tail
        self._headers = headers
        names = [name.lower() for name, _ in headers]
        self._length_at = names.index(b"content-length") if b"content-length" in names else None
        self._session_at = names.index(b"mcp-session-id") if b"mcp-session-id" in names else None
        self.lines = b"".join(
            b"%b: %b\r\n" % (name.lower(), b"%d" if at == self._length_at else value.replace(b"%", b"%%"))
            for at, (name, value) in enumerate(headers)
        )
        """The headers as they stand on the wire, with `%d` for the length."""

    async def send(self, send: Send, tag: bytes, session_id: bytes = b"") -> None:
        body = self.head + tag + self.tail
        headers = self._headers.copy()
        if self._length_at is not None:
            headers[self._length_at] = (b"content-length", b"%d" % len(body))
        if self._session_at is not None:
            headers[self._session_at] = (b"mcp-session-id", session_id)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class ListsLane:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._kept: dict[tuple[str, str], Kept] = {}
        """By method and version of the protocol, which tells the eras apart as well."""
        self._asked: dict[tuple[str, str], tuple[Hashable, asyncio.Future[bool | None]]] = {}

    def find(self, method: str, version: str) -> Kept | None:
        """The answer of this moment, if it is known. An old one goes on until whoever asks anew has been answered."""
        key = (method, version)
        kept = self._kept.get(key)
        if kept is None or not self.knows(method) or kept.state != self._live.state_of(method):
            return None
        return kept if time.monotonic() < kept.until or key in self._asked else None

    def knows(self, method: str) -> bool:
        """Whether the state that an answer depends on is known. While the server is being read, it may be an old one,
        and each caller has to ask for itself."""
        feature = _FEATURES.get(method)
        return feature is None or self._live.knows(feature)

    def asked(self, method: str, version: str) -> asyncio.Future[bool | None] | None:
        """Somebody has just asked the SDK for the same: a herd asks once. Whether the answer is now known; None if
        there was none, because the one who asked has left. To be shielded: it is not one waiter's to cancel."""
        state, asked = self._asked.get((method, version), (None, None))
        return asked if state == self._live.state_of(method) else None

    async def ask(
        self, app: Any, scope: Scope, receive: Receive, send: Send, method: str, version: str, tag: bytes
    ) -> None:
        """Let the SDK answer this caller, and keep what it said."""
        key, state = (method, version), self._live.state_of(method)
        future: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self._asked[key] = (state, future)
        start: Message | None = None

        def settle(is_known: bool | None) -> None:
            if self._asked.get(key) == (state, future):
                del self._asked[key]
            if not future.done():
                future.set_result(is_known)

        async def listen_in(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                # Before anything is written: nobody else waits until this client reads.
                first, start = start, None
                settle(self._learn(key, state, first, message, tag))
                await send(first)
            await send(message)

        try:
            await app(scope, receive, listen_in)
        finally:
            settle(None)

    def _learn(self, key: tuple[str, str], state: Hashable, start: Message, message: Message, tag: bytes) -> bool:
        """Keep an answer that is whole, and whose result is everybody's: neither an error nor a page is."""
        body = message.get("body", b"")
        is_sse = body.startswith(_SSE_HEAD)
        head = _SSE_HEAD if is_sse else _JSON_HEAD
        end = b"\r\n\r\n" if is_sse else b""
        if (
            start["status"] != 200
            or not self.knows(key[0])
            or self._live.state_of(key[0]) != state
            or not body.startswith(head + tag + b',"result":{')
            or not body.endswith(b"}" + end)
            or bool(message.get("more_body")) != is_sse
        ):
            return False
        text = body[len(head) - len(_JSON_HEAD) : len(body) - len(end)]
        try:
            if "nextCursor" in msgspec.json.decode(msgspec.json.decode(text, type=_Answer).result):
                return False
        except msgspec.DecodeError:
            return False
        before = self._kept.get(key)
        until = time.monotonic() + self._live.policy.list_memory
        kept = self._kept[key] = Kept(state, until, list(start["headers"]), head, body[len(head) + len(tag) :])
        if before is not None and before.state == state and before.tail != kept.tail and key[0] != "server/discover":
            self._live.wake(_FEATURES[key[0]])
        return True
