"""The ASGI router: which requests Tidings serves, and which the SDK.

It replaces the SDK's session manager inside the server's authentication. It decides by the routing headers and, for
legacy clients, by the session. The SDK gets every request that Tidings does not serve, and returns the error
for an invalid one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from tidings.core.model import Feature, Version
from tidings.http.interrupted import AnswerInterrupted
from tidings.http.legacy import LegacyStreams
from tidings.http.listen import ListenStream, ListenStreams
from tidings.http.lists import request_and_store, send_cached
from tidings.http.request_checks import CheckedHeaders, RequestChecks, relevant_headers, strip_values
from tidings.http.stream import Message, Receive, Scope, Send, replay
from tidings.sdk import internals
from tidings.sdk.source import Source
from tidings.server.authorization import principal_of
from tidings.server.client_identity import ClientIdentity
from tidings.server.list_cache import ListCache, Outcome
from tidings.server.list_reader import ListReader
from tidings.wire.methods import LIST_METHODS, LISTEN

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

__all__ = ["Router"]


class Router:
    def __init__(
        self,
        manager: StreamableHTTPSessionManager,
        source: Source,
        reader: ListReader,
        cache: ListCache,
        listen_streams: ListenStreams,
        legacy_streams: LegacyStreams,
    ) -> None:
        self._manager = manager
        self._app = AnswerInterrupted(manager.asgi_app, lambda: listen_streams.subscriptions.is_stopping)
        self._max_body = manager.max_request_body_size
        self._source = source
        self._reader = reader
        self._cache = cache
        self._listen_streams = listen_streams
        self._legacy_streams = legacy_streams
        legacy_streams.has_event_store = manager.event_store is not None
        self._checks = RequestChecks(manager)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["method"] == "POST" and not self._declares_too_much(scope):
                headers = relevant_headers(scope["headers"])
                checked = await self._checks.check_headers(headers)
                if checked is not None:
                    if checked.method != LISTEN:
                        await self._list(checked, scope, receive, send)
                        return
                    stream = await self._listen(checked, scope, receive, send)
                    if stream is not None:
                        # Wait here, because no stack frame keeps parts of the request any more.
                        del headers, checked
                        await stream.wait_for_end(receive)
                    return
            elif scope["method"] == "GET" and (session_id := _session_id(scope)) is not None:
                name = session_id.decode("latin-1")
                is_owner = internals.session_of(self._manager, name, scope.get("user")) is not None
                await self._legacy_streams.serve(self._app, _stripped(scope), receive, send, name, is_owner=is_owner)
                return
            scope = _stripped(scope)
        await self._app(scope, receive, send)

    def _declares_too_much(self, scope: Scope) -> bool:
        """Return whether the body is said to be larger than the SDK allows. The SDK refuses it without reading it."""
        sizes = [value for name, value in scope["headers"] if name == b"content-length"]
        return any(size.isdigit() and int(size[:20]) > self._max_body for size in sizes)

    async def _list(self, checked: CheckedHeaders, scope: Scope, receive: Receive, send: Send) -> None:
        cache = self._cache
        can_respond = checked.is_valid and cache.is_usable
        session_id, version = b"", checked.version
        if can_respond and not version:
            session_id = _session_id(scope) or b""
            version = self._legacy_streams.version_of(session_id.decode("latin-1"))
        if not can_respond or not version:
            await self._app(_stripped(scope), receive, send)
            return
        messages, body = await self._read(receive)
        if messages[-1]["type"] == "http.disconnect":
            return  # the SDK would raise
        request = self._checks.list_request(checked.method, version, body)
        if request is None:
            await self._app(_stripped(scope), replay(messages, receive), send)
            return
        if not self._reader.is_loaded:
            await self._reader.ensure_loaded()
        method, tag = request
        while (response := cache.find(method, version)) is None and cache.is_cacheable(method):
            pending = cache.find_pending(method, version)
            if pending is None:
                replayed = replay(messages, receive)
                await request_and_store(cache, self._app, _stripped(scope), replayed, send, method, version, tag)
                return
            if await asyncio.shield(pending) is Outcome.NOT_CACHEABLE:
                break
        if response is None or (session_id and not self._touch(session_id, scope)):
            await self._app(_stripped(scope), replay(messages, receive), send)
            return
        if isinstance(response.state, Version):
            self._report_fetch(scope, body, session_id, LIST_METHODS[method].feature, response.state.revision)
        await send_cached(response, send, tag, session_id)

    def _report_fetch(self, scope: Scope, body: bytes, session_id: bytes, feature: Feature, revision: int) -> None:
        observer = self._listen_streams.subscriptions.client_observer
        if observer is None:
            return
        if session_id:
            client = ClientIdentity(session=session_id.decode("latin-1"))
        else:
            address = scope["client"][0] if scope.get("client") else None
            meta = (msgspec.json.decode(body).get("params") or {}).get("_meta")  # the request was checked
            client = ClientIdentity.of_modern(meta, principal_of(scope.get("user")), address)
        observer.client_fetched(client, feature, revision)

    def _touch(self, session_id: bytes, scope: Scope) -> bool:
        """Postpone the idle timeout of the caller's session. Return False if the caller has no such session."""
        transport = internals.session_of(self._manager, session_id.decode("latin-1"), scope.get("user"))
        if transport is None:
            return False
        internals.restart_idle_timeout(transport)
        return True

    async def _listen(self, checked: CheckedHeaders, scope: Scope, receive: Receive, send: Send) -> ListenStream | None:
        """Open a stream. Return it if its request has to wait for the end."""
        streams = self._listen_streams
        if not checked.is_valid or self._source.has_user_middleware():
            await streams.serve_by_sdk(self._app, _stripped(scope), receive, send)
            return None
        messages, body = await self._read(receive)
        if messages[-1]["type"] == "http.disconnect":
            return None
        request = self._checks.listen_request(checked.version, body)
        if request is None:
            # The SDK responds with the error, or accepts what Tidings does not, and then writes a stream.
            await streams.serve_by_sdk(self._app, _stripped(scope), receive, send, replay(messages, receive))
            return None
        if not self._reader.is_loaded:
            await self._reader.ensure_loaded()
        streams.hub.tracer.continue_trace(request.meta)
        return await streams.serve(scope, receive, send, request, principal_of(scope.get("user")))

    async def _read(self, receive: Receive) -> tuple[list[Message], bytes]:
        """Return the messages of a request, and its body if it is complete and no larger than the SDK allows."""
        messages: list[Message] = []
        body = b""
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return messages, b""
            body += message.get("body", b"")
            if len(body) > self._max_body:
                return messages, b""
            if not message.get("more_body"):
                return messages, body


def _session_id(scope: Scope) -> bytes | None:
    """Return the session id of a request; None if it has none, or several."""
    values = [value for name, value in scope["headers"] if name == b"mcp-session-id"]
    return values[0].strip(b" \t") if len(values) == 1 else None


def _stripped(scope: Scope) -> Scope:
    if any(value[-1:] in (b" ", b"\t") for _, value in scope["headers"]):
        return {**scope, "headers": strip_values(scope["headers"])}
    return scope
