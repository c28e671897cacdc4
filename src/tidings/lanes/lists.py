"""Modern HTTP: lists and `server/discover`, from bytes that were made once per revision.

The real cost of a notification is the herd of refetches that it causes. The SDK words the first answer after a change;
everyone else gets those bytes with their own request id in front. Only for servers whose lists are the same for every
caller, and never for a request with a cursor: `front` sees to both. The SDK is asked again from time to time, and when
it answers otherwise although nobody noticed a change, everybody is told of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from tidings.frames import encode_tag
from tidings.lanes.channel import Message, Receive, Scope, Send
from tidings.model import Feature

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["LISTS", "Key", "ListsLane"]

LISTS = frozenset({"tools/list", "prompts/list", "resources/list", "resources/templates/list", "server/discover"})

Key: TypeAlias = tuple[str, Hashable]
"""A method, and all else in a request that an answer depends on."""

_MOST_KEPT = 64
"""Results. A few dozen at most are ever in use; on stdio, a client decides how many there could be."""


class _Answer(msgspec.Struct):
    result: msgspec.Raw


class _Kept(NamedTuple):
    state: Hashable
    result: bytes
    until: float


class ListsLane:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._kept: dict[Key, _Kept] = {}
        self._asked: dict[tuple[str, str], tuple[Hashable, asyncio.Future[bytes | None]]] = {}

    async def serve(
        self, app: Any, scope: Scope, receive: Receive, send: Send, request_id: str | int, method: str, version: str
    ) -> None:
        key, state = (method, version), self._live.state_of(method)
        result = self.kept(key, state)
        if result is None:
            asked_state, asked = self._asked.get(key, (None, None))
            if asked is None or asked_state != state:
                await self._ask(key, state, app, scope, receive, send)
                return
            # Somebody has just asked the SDK for the same: a herd asks once.
            result = await asyncio.shield(asked)
        if result is None:
            await app(scope, receive, send)
            return
        body = b'{"jsonrpc":"2.0","id":%s,"result":%s}' % (encode_tag(request_id), result)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _ask(
        self, key: tuple[str, str], state: Hashable, app: Any, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let the SDK answer this caller, and keep what it said."""
        future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._asked[key] = (state, future)
        start: Message = {}
        body = bytearray()

        async def listen_in(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                body.extend(message.get("body", b""))
            await send(message)

        result: bytes | None = None
        try:
            await app(scope, receive, listen_in)
            if start.get("status") == 200 and _is_json(start) and self._live.state_of(key[0]) == state:
                result = _result(bytes(body))
                if result is not None:
                    self.keep(key, state, result)
        finally:
            if self._asked.get(key) == (state, future):
                del self._asked[key]
            if not future.done():
                future.set_result(result)

    def kept(self, key: Key, state: Hashable) -> bytes | None:
        """The result that the SDK gave in this state, if it did and that was not long ago."""
        kept = self._kept.get(key)
        return kept.result if kept is not None and kept.state == state and time.monotonic() < kept.until else None

    def keep(self, key: Key, state: Hashable, result: bytes) -> None:
        before = self._kept.pop(key, None)
        if len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = _Kept(state, result, time.monotonic() + self._live.policy.list_memory)
        if before is not None and before.state == state and before.result != result and key[0] != "server/discover":
            self._live.wake(Feature(key[0].partition("/")[0]))


def _is_json(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"application/json") for name, value in start["headers"]
    )


def _result(body: bytes) -> bytes | None:
    """The result as it stands in the answer, if it is whole: an error or a page is nobody else's answer."""
    try:
        result = bytes(msgspec.json.decode(body, type=_Answer).result)
        is_page = "nextCursor" in msgspec.json.decode(result)
    except msgspec.DecodeError:
        return None
    return None if is_page else result
