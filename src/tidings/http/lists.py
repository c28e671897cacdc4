"""HTTP: lists and `server/discover`, from bytes that were made once per revision.

The real cost of a notification is the herd of refetches that it causes. The SDK words the first answer after a change,
for each version of the protocol; everyone else gets the same bytes with their own request id in them. Where a herd came
the last time, the lane itself is the first to ask, before any of the notifications can be answered. Only for servers
whose lists are the same for every caller, and never for a request with a cursor: `front` sees to both. The SDK is asked
again from time to time, and when it answers otherwise although nobody noticed a change, everybody is told of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from mcp_types import JSONRPCResponse
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tidings.core.model import Feature, Version
from tidings.http.stream import Message, Receive, Scope, Send

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Kept", "ListCache"]

logger = logging.getLogger(__name__)

_JSON_HEAD = b'{"jsonrpc":"2.0","id":'
_TAIL = b',"result":%b}'
_SSE_HEAD = b"event: message\r\ndata: " + _JSON_HEAD

_FEATURES = {
    "tools/list": Feature.TOOLS,
    "prompts/list": Feature.PROMPTS,
    "resources/list": Feature.RESOURCES,
    "resources/templates/list": Feature.RESOURCES,
}

_MOST_KEPT = 64
"""Answers. A few dozen at most are ever in use; on stdio, a client decides how many there could be."""


_Settle = Callable[[bool | None], None]
"""Says how asking the SDK ended: whether the answer is known now; None if there was none."""


class _Answer(msgspec.Struct):
    result: msgspec.Raw


class Kept:
    """An answer of the SDK's, but for the request id and, in the legacy era, the session id."""

    __slots__ = ("_length_at", "_session_at", "head", "headers", "is_used", "state", "tail", "until")

    def __init__(
        self, state: Hashable, until: float, headers: list[tuple[bytes, bytes]], head: bytes, tail: bytes
    ) -> None:
        self.state = state
        self.until = until
        self.head = head
        self.tail = tail
        self.is_used = False
        """Whether anybody got it but the one for whom it was made."""
        self.headers = headers
        names = [name.lower() for name, _ in headers]
        self._length_at = names.index(b"content-length") if b"content-length" in names else None
        self._session_at = names.index(b"mcp-session-id") if b"mcp-session-id" in names else None

    async def send(self, send: Send, tag: bytes, session_id: bytes = b"") -> None:
        body = self.head + tag + self.tail
        headers = self.headers.copy()
        if self._length_at is not None:
            headers[self._length_at] = (b"content-length", b"%d" % len(body))
        if self._session_at is not None:
            headers[self._session_at] = (b"mcp-session-id", session_id)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class ListCache:
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
        if time.monotonic() >= kept.until and key not in self._asked:
            return None
        if not kept.is_used:
            kept.is_used = True
            if isinstance(kept.state, Version):
                self._live.hub.notifications.fetched.record(_FEATURES[method], kept.state)
        return kept

    def can_serve(self, method: str) -> bool:
        """Return whether every caller gets the same response, and no middleware of the user must see the request."""
        is_list = method in _FEATURES or method == "server/discover"
        return is_list and self._live.shares_lists and not self._live.steps_aside

    def state_of(self, method: str) -> Hashable:
        """Return a value that changes when the response changes."""
        return self._live.state_of(method)

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
        settle = self._begin(key, state)
        start: Message | None = None

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

    def changed(self) -> None:
        """A change has been told. Those who asked before will ask again: what they get is made before they are heard,
        and whoever is heard earlier finds that it is being made."""
        live = self._live
        for key, kept in list(self._kept.items()):
            if not self._is_due(key, kept) or self.asked(*key) or live.steps_aside or not live.shares_lists:
                continue
            state = live.state_of(key[0])
            settle = self._begin(key, state)
            making = live.in_background(self._renew(key, state, kept.headers, settle))
            making.add_done_callback(partial(_settle_as_unknown, settle))

    def _is_due(self, key: tuple[str, str], kept: Kept) -> bool:
        return kept.is_used and key[1] in MODERN_PROTOCOL_VERSIONS and kept.state != self._live.state_of(key[0])

    async def _renew(
        self, key: tuple[str, str], state: Hashable, headers: list[tuple[bytes, bytes]], settle: _Settle
    ) -> None:
        live = self._live
        if live.state_of(key[0]) != state:
            return  # there was another change, and it is made for that
        try:
            result = await live.answered(*key)
            if "nextCursor" not in result and live.state_of(key[0]) == state:
                self.keep(key, state, _JSON_HEAD, _TAIL % _encode(result), headers)
                settle(True)
        except Exception as error:  # whoever asks gets the SDK's own answer
            logger.debug("%s could not be made beforehand: %r", key[0], error)

    def _begin(self, key: tuple[str, str], state: Hashable) -> _Settle:
        """The SDK is being asked; the function returned says how it ended, and only the first time."""
        future: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self._asked[key] = (state, future)

        def settle(is_known: bool | None) -> None:
            if self._asked.get(key) == (state, future):
                del self._asked[key]
            if not future.done():
                future.set_result(is_known)

        return settle

    def _learn(self, key: tuple[str, str], state: Hashable, start: Message, message: Message, tag: bytes) -> bool:
        """Keep an answer that is whole, and whose result is everybody's: neither an error nor a page is."""
        body = message.get("body", b"")
        is_sse = body.startswith(_SSE_HEAD)
        head = _SSE_HEAD if is_sse else _JSON_HEAD
        end = b"\r\n\r\n" if is_sse else b""
        if (
            start["status"] != 200
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
        self.keep(key, state, head, body[len(head) + len(tag) :], list(start["headers"]))
        return True

    def keep(
        self, key: tuple[str, str], state: Hashable, head: bytes, tail: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """What the SDK said in this state, before the request's id and after it."""
        if not self.knows(key[0]):
            return
        before = self._kept.pop(key, None)
        if len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = Kept(state, time.monotonic() + self._live.policy.list_memory, headers, head, tail)
        if before is not None and before.state == state and before.tail != tail and key[0] != "server/discover":
            self._live.wake(_FEATURES[key[0]])


def _settle_as_unknown(settle: _Settle, making: asyncio.Task[None]) -> None:
    """However it ended, and also if it never began: nobody may wait for it any more."""
    settle(None)


def _encode(result: dict[str, Any]) -> bytes:
    """As the SDK writes it: those who compare texts find the same one."""
    answer = JSONRPCResponse(jsonrpc="2.0", id=0, result=result)
    plain = answer.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(plain["result"], separators=(",", ":")).encode()
