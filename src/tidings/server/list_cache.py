"""Responses to list requests and `server/discover`, encoded once per revision.

The main cost of a notification is the requests that it causes. The SDK makes the first response after a change, for
each version of the protocol. All other clients get the same bytes with their own request id. If several clients used a
response, the cache requests it again as soon as the list changes, before these clients do.

Only for servers whose lists are the same for every caller, and for requests of the whole list. The cache asks the SDK
again after `Policy.list_max_age`, and later if its response took much CPU. If the response differs from the one before
or from the catalog, although no change was noticed, the list is read again and clients are notified.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from mcp_types import JSONRPCResponse
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tidings.core.hub import Hub
from tidings.core.model import Feature, Version
from tidings.sdk import internals
from tidings.sdk.source import Source
from tidings.server.list_reader import ListReader
from tidings.server.loop_bridge import LoopBridge
from tidings.wire.envelope import RESPONSE_HEAD
from tidings.wire.methods import CACHEABLE_METHODS, DISCOVER, LIST_METHODS

__all__ = ["CachedResponse", "Finish", "Headers", "ListCache", "Outcome"]

logger = logging.getLogger(__name__)

_MAX_RESPONSES = 64
"""A few dozen are in use at most. On stdio, a client decides how many there could be."""

_COST_FACTOR = 50
"""A response is used for this multiple of the CPU time that the SDK took for it: asking again takes 2 % of a core."""

_MAX_MEMORY = 60.0
"""Seconds after which the cache asks the SDK again in any case, unless `Policy.list_max_age` is longer."""

Key = tuple[str, str]
"""The method, and the version of the protocol or the form of the request."""

Headers = list[tuple[bytes, bytes]]


class Outcome(Enum):
    """The outcome of a request to the SDK, for the clients that wait for the same response."""

    CACHED = auto()
    NOT_CACHEABLE = auto()
    """Each client has to ask the SDK itself."""
    NO_RESPONSE = auto()
    """One of the clients has to ask again: the request failed, or its client has disconnected."""


Finish = Callable[[Outcome], None]
"""Reports the end of a request to the SDK. Only the first call counts."""


class _PendingRequest(NamedTuple):
    """A request to the SDK in progress."""

    state: Hashable
    """The state for which it was made."""
    future: asyncio.Future[Outcome]
    started: float
    """CPU time of the event loop's thread."""


class CachedResponse:
    """A response without its request id, which is between `head` and `tail`."""

    __slots__ = ("expires", "head", "headers", "is_used", "length_index", "session_index", "state", "tail")

    def __init__(self, state: Hashable, expires: float, headers: Headers, head: bytes, tail: bytes) -> None:
        self.state = state
        self.expires = expires
        self.headers = headers
        self.head = head
        self.tail = tail
        self.is_used = False
        """Whether a client got it from the cache."""
        names = [name for name, _ in headers]
        self.length_index = names.index(b"content-length") if b"content-length" in names else None
        self.session_index = names.index(b"mcp-session-id") if b"mcp-session-id" in names else None


class ListCache:
    def __init__(
        self, source: Source, reader: ListReader, hub: Hub, bridge: LoopBridge, *, shared_lists: bool | None
    ) -> None:
        """`shared_lists` is the option of `Live`. If it is None, the source decides."""
        self._source = source
        self._server = source.lowlevel
        self._reader = reader
        self._hub = hub
        self._bridge = bridge
        self.shared_lists = shared_lists
        self._responses: dict[Key, CachedResponse] = {}
        self._pending: dict[Key, _PendingRequest] = {}
        bridge.follow_lists(self._renew_used)

    @property
    def is_usable(self) -> bool:
        """Whether responses may come from the cache: callers see the same lists, and the user has no middleware, which
        has to see every request."""
        are_shared = self._source.has_shared_lists if self.shared_lists is None else self.shared_lists
        return are_shared and not self._source.has_user_middleware()

    def can_serve(self, method: str) -> bool:
        """Return whether responses to this method may come from the cache.

        Ask for each response: the user may replace a handler at any time, and the new one may respond to each caller
        differently."""
        if method not in CACHEABLE_METHODS or not self.is_usable:
            return False
        if method == DISCOVER:
            return internals.has_standard_discover(self._server)
        return self._source.is_list_shared(method) if self.shared_lists is None else self.shared_lists

    def state_of(self, method: str) -> Hashable:
        """Return the state that a response depends on."""
        if method == DISCOVER:
            return (self._server.instructions, tuple(map(self._reader.serves, Feature)), self._reader.serves_contents())
        return self._hub.catalog.items(LIST_METHODS[method].feature).version

    def is_cacheable(self, method: str) -> bool:
        """Return whether a response may be cached now: all callers share it, and the catalog has what the server lists.
        While a list is being read, the SDK has to respond."""
        return self.can_serve(method) and (method == DISCOVER or self._reader.is_current(LIST_METHODS[method].feature))

    def find(self, method: str, version: str) -> CachedResponse | None:
        """Return the present response, if it is cached. An expired one is used while its replacement is requested."""
        key = (method, version)
        response = self._responses.get(key)
        if response is None or not self.is_cacheable(method) or response.state != self.state_of(method):
            return None
        if time.monotonic() >= response.expires and key not in self._pending:
            return None
        if not response.is_used:
            response.is_used = True
            if isinstance(response.state, Version):
                self._hub.notifications.fetched.record(LIST_METHODS[method].feature, response.state)
        return response

    def find_pending(self, method: str, version: str) -> asyncio.Future[Outcome] | None:
        """Return the request to the SDK for the same response, if one is in progress: one request serves all clients
        that wait. Await it with `asyncio.shield`."""
        pending = self._pending.get((method, version))
        return pending.future if pending is not None and pending.state == self.state_of(method) else None

    def begin(self, method: str, version: str) -> Finish:
        """Record that a request to the SDK starts. The caller passes its result to the returned function."""
        key, state = (method, version), self.state_of(method)
        pending = _PendingRequest(state, asyncio.get_running_loop().create_future(), time.thread_time())
        self._pending[key] = pending

        def finish(outcome: Outcome) -> None:
            if self._pending.get(key) is pending:
                del self._pending[key]
            if not pending.future.done():
                pending.future.set_result(outcome)

        return finish

    def store(
        self, key: Key, state: Hashable, head: bytes, tail: bytes, headers: Headers, result: Mapping[str, Any]
    ) -> None:
        """Store the response that the SDK made in this state. If it shows a change that was not noticed, read the list
        again."""
        method = key[0]
        if not self.is_cacheable(method):
            return
        previous = self._responses.pop(key, None)
        if len(self._responses) >= _MAX_RESPONSES:
            del self._responses[next(iter(self._responses))]
        self._responses[key] = CachedResponse(state, time.monotonic() + self._memory(key), headers, head, tail)
        if method == DISCOVER:
            return
        if previous is not None and previous.state == state:
            is_new = previous.tail != tail
        else:
            is_new = self._has_unknown_item(method, result)
        if is_new:
            self._reader.read_again(LIST_METHODS[method].feature)

    def _has_unknown_item(self, method: str, result: Mapping[str, Any]) -> bool:
        """Return whether a list has an item that the catalog does not have, or has differently."""
        feature, member, key, _ = LIST_METHODS[method]
        items = self._hub.catalog.items(feature)
        return any(not items.has(item.get(key), item) for item in result.get(member, ()))

    def _memory(self, key: Key) -> float:
        """Return for how many seconds the response that has just been made is used."""
        memory, pending = self._hub.policy.list_max_age, self._pending.get(key)
        if memory == 0 or pending is None:
            return memory
        cost = time.thread_time() - pending.started
        return max(memory, min(_COST_FACTOR * cost, _MAX_MEMORY))

    def _renew_used(self) -> None:
        """Request the responses again that clients used, after a change and before clients ask for them."""
        if not self._responses or not self.is_usable:
            return
        for key, response in list(self._responses.items()):
            method, version = key
            if not response.is_used or version not in MODERN_PROTOCOL_VERSIONS or self.find_pending(*key):
                continue
            if response.state != (state := self.state_of(method)):
                finish = self.begin(*key)
                renewing = self._bridge.start_task(self._renew(key, state, response.headers, finish))
                # Also if the task never starts: clients must not wait for it.
                renewing.add_done_callback(partial(_finish_without_response, finish))

    async def _renew(self, key: Key, state: Hashable, headers: Headers, finish: Finish) -> None:
        if self.state_of(key[0]) != state:
            return  # after another change, which has its own task
        try:
            result = await self._reader.request(*key)
            if "nextCursor" not in result and self.state_of(key[0]) == state:
                self.store(key, state, RESPONSE_HEAD, b',"result":%b}' % _encode(result), headers, result)
                finish(Outcome.CACHED)
        except Exception as error:  # clients get the response of the SDK
            logger.debug("%s could not be made in advance: %r", key[0], error)


def _finish_without_response(finish: Finish, task: asyncio.Task[None]) -> None:
    finish(Outcome.NO_RESPONSE)


def _encode(result: dict[str, Any]) -> bytes:
    """Encode as the SDK does, for clients that compare texts."""
    response = JSONRPCResponse(jsonrpc="2.0", id=0, result=result)
    plain = response.model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(plain["result"], separators=(",", ":")).encode()
