"""Responses to list requests over HTTP, from the cache of `tidings.server.list_cache`.

The first request after a change goes to the SDK, and its response is stored. Errors and single pages of a list are not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidings.core.frames import SSE_HEAD, SSE_TAIL
from tidings.http.stream import Message, Receive, Scope, Send
from tidings.server.list_cache import CachedResponse, ListCache, Outcome
from tidings.wire.envelope import DECODE_ERRORS, RESPONSE_HEAD, tail_of_response

__all__ = ["request_and_store", "send_cached"]


async def send_cached(response: CachedResponse, send: Send, tag: bytes, session_id: bytes) -> None:
    """Send a cached response with the id of this request and, if it is a legacy one, of its session."""
    body = response.head + tag + response.tail
    headers = response.headers.copy()
    if response.length_index is not None:
        headers[response.length_index] = (b"content-length", b"%d" % len(body))
    if response.session_index is not None:
        headers[response.session_index] = (b"mcp-session-id", session_id)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def request_and_store(
    cache: ListCache, app: Any, scope: Scope, receive: Receive, send: Send, method: str, version: str, tag: bytes
) -> None:
    """Let the SDK respond to this request, and store its response."""
    state = cache.state_of(method)
    finish = cache.begin(method, version)
    start: Message | None = None

    async def send_and_store(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start":
            start = message
            return
        if start is not None:
            first, start = start, None
            if cache.state_of(method) != state or (parts := _split(first, message, tag)) is None:
                finish(Outcome.NOT_CACHEABLE)
            else:
                head, tail, result = parts
                headers = [(name.lower(), value) for name, value in first["headers"]]
                cache.store((method, version), state, head, tail, headers, result)
                # Before anything is sent: other clients must not wait until this one reads.
                finish(Outcome.CACHED)
            await send(first)
        await send(message)

    try:
        await app(scope, receive, send_and_store)
    finally:
        finish(Outcome.NO_RESPONSE)


def _split(start: Message, message: Message, tag: bytes) -> tuple[bytes, bytes, dict[str, Any]] | None:
    """Return the response before and after its request id, and its result; None if it is an error, a page, or not
    complete."""
    body = message.get("body", b"")
    is_sse = body.startswith(SSE_HEAD)
    before, after = (SSE_HEAD, SSE_TAIL) if is_sse else (b"", b"")
    if start["status"] != 200 or not body.endswith(b"}" + after) or bool(message.get("more_body")) != is_sse:
        return None
    response = body[len(before) : len(body) - len(after)]
    tail = tail_of_response(response, tag)
    if tail is None:
        return None
    try:
        result: dict[str, Any] = msgspec.json.decode(tail.removeprefix(b',"result":')[:-1])
    except DECODE_ERRORS:
        return None
    return None if "nextCursor" in result else (before + RESPONSE_HEAD, tail + after, result)
