"""Forward a call to a replica that has the handler: the owner of the item.

The replica that the client is connected to sends a request. The owner sends any number of messages for the client
(progress, log messages) and one reply. The owner runs the request through its own middleware and handlers, with the
caller's principal. It does not get the caller's access token and HTTP headers.

The handler of a forwarded call cannot send requests to a legacy client (sampling, elicitation and roots). Elicitation
of version 2026-07-28 is part of the result, so it works. `middleware.py` chooses the owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn

import anyio
from mcp.server import Server, ServerRequestContext
from mcp.server.auth.middleware.auth_context import auth_context_var, get_access_token
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.connection import Connection
from mcp.server.context import HandlerResult
from mcp.server.runner import modern_error_data, serve_one
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.jsonrpc_dispatcher import handler_exception_to_error_data
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, REQUEST_TIMEOUT, ClientCapabilities, ErrorData, Implementation
from mcp_types.version import KNOWN_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError
from starlette.authentication import AuthCredentials
from starlette.requests import Request

from tidings.cluster.backend import Backend, CallTooLarge, NotDelivered, OnProgress
from tidings.core.counts import Counts
from tidings.core.redact import redact_uri
from tidings.core.tracer import Tracer
from tidings.errors import TidingsError
from tidings.sdk import internals
from tidings.sdk.requests import RequestContext

__all__ = ["IDLE_TIMEOUT", "forward", "handle", "is_forwarded"]

logger = logging.getLogger(__name__)

Ctx = ServerRequestContext[Any, Any]

IDLE_TIMEOUT = 60.0
"""Seconds without progress after which a call is cancelled: the read timeout of common HTTP proxies."""

_MAX_DURATION = 86_400.0
"""Seconds that a call with progress may take. The idle timeout ends all others."""

_MAX_PENDING = 1000
"""Messages that wait for a client that does not read. Later ones are dropped: progress and log messages may be lost."""

_VERSION = 1
"""Changes only if an owner of the previous version would misunderstand a request. Unknown members are ignored."""

_FAILURE = "forwarding"
"""The name of failed calls in the metric of failures. Errors of the handler are not counted."""

_FORWARDED = "tidings.forwarded"
"""The key in the state of the connection of a forwarded request."""


class _Encoded(BaseModel):
    # The SDK writes infinity and NaN in the same way. Unknown members, which newer versions may send, are ignored.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    def encode(self, fallback: Callable[[Any], Any] | None = None) -> bytes:
        return self.model_dump_json(by_alias=True, fallback=fallback).encode()


class _Caller(AccessToken):
    """An access token without the token itself, and without members that the user's own class may have."""

    token: str = Field(default="", exclude=True)


class _Request(_Encoded):
    version: int = _VERSION
    method: str
    params: dict[str, Any] | None
    request_id: int | str
    protocol_version: str
    client_info: Implementation | None
    client_capabilities: ClientCapabilities | None
    caller: _Caller | None
    is_http: bool
    idle_timeout: float


class _Message(_Encoded):
    """Something that the handler sends to the client before its result."""

    channel: Literal["progress", "request", "connection"]
    """A `progress` message has no token. It is also sent if the client wants no progress, to extend the timeout."""
    method: str = ""
    params: dict[str, Any] | None


class _Reply(_Encoded):
    version: int = _VERSION
    result: dict[str, Any] | None = None
    error: ErrorData | None = None
    refusal: str | None = None
    """The reason why the owner did not start the handler."""


def is_forwarded(ctx: Ctx) -> bool:
    """Return whether another replica forwarded this request. It must not be forwarded again."""
    return _FORWARDED in internals.connection_of(ctx.session).state


# On the replica that the client is connected to


async def forward(
    backend: Backend,
    owners: Sequence[str],
    ctx: Ctx,
    tracer: Tracer,
    counts: Counts,
    *,
    idle_timeout: float = IDLE_TIMEOUT,
) -> HandlerResult:
    """Run a request on the first of the owners that can be reached, and return its result or raise its error.

    A call that may have run is not repeated. Cancelling this cancels the handler of the owner. The handler is also
    cancelled if it sends neither progress nor a result for `idle_timeout` seconds."""
    client = ctx.session.client_params
    user = ctx.request.scope.get("user") if ctx.request is not None else None
    token = user.access_token if isinstance(user, AuthenticatedUser) else get_access_token()
    assert ctx.request_id is not None  # a notification has no handler to call
    request = _Request(
        method=ctx.method,
        params=_with_trace(ctx.params, tracer.current_trace()),
        request_id=ctx.request_id,
        protocol_version=ctx.protocol_version,
        client_info=client.client_info if client is not None else None,
        client_capabilities=ctx.session.client_capabilities,
        caller=_Caller.model_validate(token.model_dump(exclude={"token"})) if token is not None else None,
        is_http=ctx.request is not None,
        idle_timeout=idle_timeout,
    ).encode(fallback=str)  # the claims come from the user's code, and may contain any object
    for owner in owners:
        try:
            reply = await _call(backend, owner, request, ctx, counts, idle_timeout)
        except NotDelivered as error:
            logger.info("%s was not delivered: %s", _describe(ctx), error)
            continue
        if reply.refusal is not None:
            logger.warning("the replica %s refused %s: %s", owner, _describe(ctx), reply.refusal)
            continue
        if reply.error is not None:
            raise MCPError.from_error_data(reply.error)
        return reply.result
    raise MCPError(INTERNAL_ERROR, f"{_describe(ctx)} was not run: no replica that has it can be reached; try again")


def _with_trace(params: Mapping[str, Any] | None, trace: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return the params with the current trace context instead of the client's, which is its parent."""
    meta = (params or {}).get("_meta") or {}
    if trace is None or not isinstance(meta, dict):  # the owner's SDK refuses a `_meta` that is not an object
        return dict(params) if params is not None else None
    others = {key: value for key, value in meta.items() if key not in ("traceparent", "tracestate")}
    return {**(params or {}), "_meta": {**others, **trace}}


async def _call(backend: Backend, owner: str, request: bytes, ctx: Ctx, counts: Counts, idle_timeout: float) -> _Reply:
    sender, receiver = anyio.create_memory_object_stream[bytes](_MAX_PENDING)
    reply: bytes | None = None
    failure: TidingsError | None = None

    def on_progress(message: bytes) -> None:
        scope.deadline = anyio.current_time() + idle_timeout
        with suppress(anyio.WouldBlock, anyio.ClosedResourceError):
            sender.send_nowait(message)

    # The group waits until all messages are sent to the client, so that they come before the result.
    with receiver:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_messages, receiver, ctx.session, counts)
            with sender, anyio.CancelScope(deadline=anyio.current_time() + idle_timeout) as scope:
                try:
                    reply = await backend.call(owner, request, on_progress, _MAX_DURATION)
                except TidingsError as error:  # raised below, because the group would wrap it
                    failure = error
    if isinstance(failure, NotDelivered):
        raise failure
    if isinstance(failure, CallTooLarge):
        raise MCPError(INVALID_PARAMS, f"{_describe(ctx)} was not run: {failure}")
    if failure is not None:
        message = f"{_describe(ctx)} was forwarded to another replica, and may have run, but has no result: {failure}"
        counts.failures[_FAILURE] += 1
        logger.warning("%s", message)
        raise MCPError(INTERNAL_ERROR, message) from failure
    if reply is None:
        counts.failures[_FAILURE] += 1
        raise MCPError.from_error_data(_timeout_error(ctx, idle_timeout))
    try:
        return _Reply.model_validate_json(reply)
    except ValidationError as error:
        counts.failures[_FAILURE] += 1
        logger.error("the replica %s sent a reply to %s that cannot be decoded: %s", owner, _describe(ctx), error)
        message = f"{_describe(ctx)} has run on another replica, whose reply cannot be decoded"
        raise MCPError(INTERNAL_ERROR, message) from None


async def _send_messages(
    receiver: anyio.abc.ObjectReceiveStream[bytes], session: ServerSession, counts: Counts
) -> None:
    async for encoded in receiver:
        try:
            message = _Message.model_validate_json(encoded)
            if message.channel == "progress":
                await session.report_progress(**(message.params or {}))
            elif message.channel == "request":
                await internals.notify_request(session, message.method, message.params)
            else:
                await internals.connection_of(session).notify(message.method, message.params)
        except ValidationError:  # a newer version may send other kinds of messages
            counts.failures[_FAILURE] += 1
        except Exception as error:  # a closed connection of the client must not make the call fail
            logger.debug("a message of another replica could not be sent to the client: %r", error)


def _describe(call: Ctx | _Request) -> str:
    name, uri = (call.params or {}).get("name"), (call.params or {}).get("uri")
    return f"{call.method} {redact_uri(uri) if isinstance(uri, str) else name!r}"


def _timeout_error(call: Ctx | _Request, idle_timeout: float) -> ErrorData:
    text = f"runs on another replica, and was cancelled after {idle_timeout:g} s without progress or a result"
    return ErrorData(code=REQUEST_TIMEOUT, message=f"{_describe(call)} {text}")


# On the owner


async def handle(
    server: Server[Any], lifespan_state: Any, counts: Counts, request: bytes, on_progress: OnProgress
) -> bytes:
    """Run a forwarded request through the server's own middleware and handlers, and return the reply.

    `lifespan_state` is what the lifespan of the server yielded."""
    try:
        call = _Request.model_validate_json(request)
    except ValidationError as error:
        counts.failures[_FAILURE] += 1
        logger.error("a call of another replica cannot be decoded: %s", error)
        return _Reply(refusal="the request cannot be decoded").encode()
    if call.version != _VERSION or call.protocol_version not in KNOWN_PROTOCOL_VERSIONS:
        versions = f"version {call.version} with protocol version {call.protocol_version}"
        return _Reply(refusal=f"requests of {versions} are not known here").encode()
    reply = _Reply(error=_timeout_error(call, call.idle_timeout))
    with anyio.CancelScope(deadline=anyio.current_time() + call.idle_timeout) as scope:

        def send(message: _Message) -> None:
            scope.deadline = anyio.current_time() + call.idle_timeout
            on_progress(message.encode())

        reply = await _run(server, lifespan_state, call, send)
    try:
        return reply.encode()
    except PydanticSerializationError as error:
        logger.error("the result of %s cannot be encoded: %s", _describe(call), error)
        return _Reply(error=ErrorData(code=INTERNAL_ERROR, message="Internal server error")).encode()


async def _run(server: Server[Any], lifespan_state: Any, call: _Request, send: Callable[[_Message], None]) -> _Reply:
    caller = call.caller
    user = AuthenticatedUser(AccessToken(token="", **caller.model_dump())) if caller is not None else None
    connection = Connection.from_envelope(
        call.protocol_version, call.client_info, call.client_capabilities, outbound=_Channel("connection", send)
    )
    connection.state[_FORWARDED] = True
    entered = auth_context_var.set(user)
    try:
        context = _RequestContext(call, _http_request(user) if call.is_http else None, send)
        result = await serve_one(
            server, context, call.method, call.params, connection=connection, lifespan_state=lifespan_state
        )
        return _Reply(result=result)
    except Exception as error:
        return _Reply(error=_error_data(error, call))
    finally:
        auth_context_var.reset(entered)


def _error_data(error: Exception, call: _Request) -> ErrorData:
    """Return the error that the SDK would send to a client of this replica."""
    if call.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return modern_error_data(error)
    if (data := handler_exception_to_error_data(error)) is not None:
        return data
    logger.error("%s failed", _describe(call), exc_info=error)
    return ErrorData(code=0, message=str(error))


def _http_request(user: AuthenticatedUser | None) -> Request:
    """Return a request with the caller and without headers. Without a request, as on stdio, a handler would treat the
    caller as local."""
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    if user is not None:
        scope |= {"user": user, "auth": AuthCredentials(user.scopes)}
    return Request(scope)


class _ForwardedRequestError(NoBackChannelError):
    def __init__(self, method: str) -> None:
        super().__init__(method)
        text = f"Cannot send {method!r}: the client is connected to another replica, and can only be sent notifications"
        self.error = ErrorData(code=self.code, message=text)


class _Channel:
    """The SDK's `Outbound`, to a client of another replica."""

    def __init__(self, channel: Literal["request", "connection"], send: Callable[[_Message], None]) -> None:
        self._channel = channel
        self._send = send

    async def send_raw_request(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> NoReturn:
        raise _ForwardedRequestError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: Any = None) -> None:
        self._send(_Message(channel=self._channel, method=method, params=dict(params) if params is not None else None))


class _RequestContext(_Channel, RequestContext):
    def __init__(self, call: _Request, request: Request | None, send: Callable[[_Message], None]) -> None:
        _Channel.__init__(self, "request", send)
        RequestContext.__init__(self, call.request_id, request)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        self._send(_Message(channel="progress", params={"progress": progress, "total": total, "message": message}))
