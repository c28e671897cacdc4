"""The ASGI front: which request is ours, and which is the SDK's.

It stands where the SDK's session manager is called, inside the server's authentication. Keyed on the routing headers,
and in the legacy era on the session; in any doubt the body is replayed into the SDK, so that the SDK words the error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser

from tidings.http.listen import ListenStream
from tidings.http.request_checks import LISTEN, Claim, Verdicts, form_of, tidied
from tidings.http.stream import Message, Receive, Scope, Send
from tidings.server import internals as seams
from tidings.server.authorization import Principal

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from tidings.live import Live

__all__ = ["Router", "principal_of"]


class Router:
    def __init__(self, live: Live, manager: StreamableHTTPSessionManager) -> None:
        self._live = live
        self._manager = manager
        self._app = manager.asgi_app
        self._most = manager.max_request_body_size
        live.splice.has_event_store = manager.event_store is not None
        self.verdicts = Verdicts(manager)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["method"] == "POST":
                form = form_of(scope["headers"])
                claim = self.verdicts.known(form) or await self.verdicts.examine(form)
                if claim is not None:
                    if claim.method != LISTEN:
                        await self._list(claim, scope, receive, send)
                        return
                    stream = await self._listen(claim, scope, receive, send)
                    if stream is not None:
                        # Here, where nothing of the request is held any more but what its server keeps.
                        del form, claim
                        await stream.until_lost(receive)
                    return
            elif scope["method"] == "GET":
                session_id = _session_id(scope)
                if session_id is not None:
                    name = session_id.decode("latin-1")
                    is_its_own = seams.session_of(self._manager, name, scope.get("user")) is not None
                    await self._live.splice.serve(self._app, _tidy(scope), receive, send, name, is_its_own=is_its_own)
                    return
            scope = _tidy(scope)
        await self._app(scope, receive, send)

    async def _list(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        live = self._live
        is_ours = claim.is_clear and not live.steps_aside
        session_id, version = b"", claim.version
        if is_ours and not version:
            session_id = _session_id(scope) or b""
            version = live.splice.version_of(session_id.decode("latin-1"))
        if not is_ours or not version or not live.shares_lists:
            await self._app(_tidy(scope), receive, send)
            return
        messages, body = await self._read(receive)
        if messages[-1]["type"] == "http.disconnect":
            return  # nobody is there any more; the SDK would raise
        question = self.verdicts.question(claim.method, version, body)
        if question is None:
            await self._app(_tidy(scope), _replay(messages, receive), send)
            return
        if not live.is_attended:
            await live.attend()
        method, tag = question
        while (kept := live.lists.find(method, version)) is None and live.lists.knows(method):
            asked = live.lists.asked(method, version)
            if asked is None:
                replayed = _replay(messages, receive)
                await live.lists.ask(self._app, _tidy(scope), replayed, send, method, version, tag)
                return
            if await asyncio.shield(asked) is False:
                break
        if kept is None or (session_id and not self._touch(session_id, scope)):
            await self._app(_tidy(scope), _replay(messages, receive), send)
            return
        await kept.send(send, tag, session_id)

    def _touch(self, session_id: bytes, scope: Scope) -> bool:
        """Whether this caller's session is there to be answered; if so, it has just been used."""
        transport = seams.session_of(self._manager, session_id.decode("latin-1"), scope.get("user"))
        if transport is None:
            return False
        seams.put_off_idle_end(transport)
        return True

    async def _listen(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> ListenStream | None:
        """Open a stream. One that its request has to wait for is returned."""
        live = self._live
        if not claim.is_clear or live.steps_aside:
            await live.listen.carry(self._app, _tidy(scope), receive, send)
            return None
        messages, body = await self._read(receive)
        if messages[-1]["type"] == "http.disconnect":
            return None  # as above
        request = self.verdicts.listen_request(claim.version, body)
        if request is None:
            # The SDK words the error; or it takes what we don't, and then carries a stream.
            await live.listen.carry(self._app, _tidy(scope), receive, send, _replay(messages, receive))
            return None
        if not live.is_attended:
            await live.attend()
        live.hub.tracer.continue_trace(request.meta)
        return await live.listen.serve(scope, receive, send, request, principal_of(scope.get("user")))

    async def _read(self, receive: Receive) -> tuple[list[Message], bytes]:
        """The messages of a request, and its body if all of it came and is no larger than the SDK allows."""
        message = await receive()
        messages = [message]
        body = b""
        while True:
            if message["type"] != "http.request":
                return messages, b""
            body += message.get("body", b"")
            if len(body) > self._most:
                return messages, b""
            if not message.get("more_body"):
                return messages, body
            message = await receive()
            messages.append(message)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Return a `receive` that gives the messages that were read, and then those that follow."""
    kept = iter(messages)

    async def replayed() -> Message:
        for message in kept:
            return message
        return await receive()

    return replayed


def _session_id(scope: Scope) -> bytes | None:
    """The session that a request names; one that names two is nobody's."""
    named = [value for name, value in scope["headers"] if name == b"mcp-session-id"]
    return named[0].strip(b" \t") if len(named) == 1 else None


def _tidy(scope: Scope) -> Scope:
    if any(value[-1:] in (b" ", b"\t") for _, value in scope["headers"]):
        return {**scope, "headers": tidied(scope["headers"])}
    return scope


def principal_of(user: object) -> Principal | None:
    """Who the server's authentication says this is."""
    if not isinstance(user, AuthenticatedUser):
        return None
    token = user.access_token
    return Principal(token.client_id, token.subject, tuple(token.scopes), token.claims or {})
