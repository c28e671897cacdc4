"""One connection of a mirror to a server, through the `Client` of the SDK.

A connection is used until it is lost, and then replaced by a new one. It opens listen streams, reads whole lists, and
knows whether the server can send notifications at the moment. It keeps no state of the lists.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import anyio
import httpx2
import mcp_types as types
from mcp.client.client import Client
from mcp.client.extension import ClientExtension, NotificationBinding
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import Subscription, SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, Field

from tidings.client.snapshot import ListName
from tidings.client.timing import Timing
from tidings.core.cursor import Cursor
from tidings.core.frames import CURSOR_KEY, DELETED_METHOD, EXTENSION
from tidings.core.model import Feature
from tidings.errors import TidingsError

__all__ = ["Connection", "DeletedParams", "Fetched", "Stream", "Target", "connect", "describe"]

Target: TypeAlias = Any
"""A URL, a stdio command (a text or a list), a `Client` of the SDK, a function that returns a new one, or anything else
that the `Client` accepts."""

_LISTS: Mapping[Feature, Mapping[ListName, tuple[str, str]]] = {
    Feature.TOOLS: {"tools": ("list_tools", "tools")},
    Feature.PROMPTS: {"prompts": ("list_prompts", "prompts")},
    Feature.RESOURCES: {
        "resources": ("list_resources", "resources"),
        "templates": ("list_resource_templates", "resource_templates"),
    },
}
"""For each list of a feature: the method of the `Client`, and the member of its result."""

_STREAM_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""As the SDK has it. A stream on which nothing arrives for so long, not even a heartbeat, may be dead."""


class Fetched(NamedTuple):
    """The lists of one feature, all of one version as far as the client can know."""

    lists: dict[ListName, list[Any]]
    cursor: Cursor | None = None
    ttl: float | None = None
    """Seconds for which the server says that the lists are fresh."""


class Stream(NamedTuple):
    """An open listen stream."""

    task: asyncio.Task[None]
    id: str | int
    granted: types.SubscriptionFilter


class DeletedParams(BaseModel):
    """The params of `notifications/resources/deleted`."""

    model_config = ConfigDict(extra="allow")
    uri: str
    meta: dict[str, Any] = Field(default_factory=dict, alias="_meta")


class Connection:
    def __init__(self, timing: Timing, on_stream: Callable[[Connection], None]) -> None:
        self.client: Client
        self.has_stream = True
        """Whether a legacy server can send notifications: over HTTP, the GET stream must be open."""
        self.lost = asyncio.Event()
        self.error: BaseException | None = None
        self._timing = timing
        self._on_stream = on_stream
        self._streams: set[asyncio.Task[None]] = set()

    @property
    def is_modern(self) -> bool:
        return self.client.protocol_version in MODERN_PROTOCOL_VERSIONS

    @property
    def has_cursors(self) -> bool:
        """Whether this is a Tidings server: it notifies of every change, and continues from a cursor."""
        return EXTENSION in (self.client.server_capabilities.extensions or {})

    def serves(self, feature: Feature) -> bool:
        """Return whether the server declares the feature. A client with a pinned version gets no declaration."""
        capabilities = self.client.server_capabilities
        declared = [getattr(capabilities, each.value) is not None for each in Feature]
        return getattr(capabilities, feature.value) is not None or not any(declared)

    def announces(self, feature: Feature) -> bool:
        """Return whether the server says that it notifies of changes of the list."""
        capability = getattr(self.client.server_capabilities, feature.value)
        return bool(capability.list_changed) if capability is not None else self.is_modern

    def fail(self, error: BaseException) -> None:
        """Say that the connection is lost. The first error counts."""
        self.error = self.error or error
        self.lost.set()

    # The GET stream of a legacy session

    def set_stream(self, is_open: bool) -> None:
        """Note that the stream was opened, or that the server has none."""
        self.has_stream = is_open
        self._on_stream(self)

    def end_stream(self) -> None:
        """Note that the stream ended. The SDK opens it again, or gives up after two attempts without a word."""
        self.has_stream = False
        asyncio.get_running_loop().call_later(self._timing.first_poll, self._require_stream)

    def _require_stream(self) -> None:
        if not self.has_stream:
            self.fail(ConnectionError("the stream of the session ended"))

    # Listen streams

    async def listen(self, **topics: Any) -> Stream:
        """Open a listen stream, and wait for its acknowledgement. The connection is lost when the stream ends."""
        acknowledged: asyncio.Future[Subscription] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._read_stream(acknowledged, topics))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        try:
            async with asyncio.timeout(self._timing.answer):
                stream = await acknowledged
        except BaseException:
            task.cancel()
            raise
        return Stream(task, stream.subscription_id, stream.honored)

    async def _read_stream(self, acknowledged: asyncio.Future[Subscription], topics: dict[str, Any]) -> None:
        error: Exception = ConnectionError("the server ended the listen stream")
        try:
            async with self.client.listen(**topics) as stream:
                acknowledged.set_result(stream)
                async for _ in stream:
                    pass  # the message handler gets the notification, with its `_meta`
                if not any(granted for _, granted in stream.honored):
                    return  # a stream without a topic ends at once
        except (MCPError, SubscriptionLost, RuntimeError) as raised:
            error = raised
        finally:
            if not acknowledged.done():
                acknowledged.set_exception(error)
        self.fail(error)

    async def close_streams(self) -> None:
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    # Lists

    async def fetch(self, feature: Feature, is_outdated: Callable[[], bool]) -> Fetched | None:
        """Read the lists of a feature. Return None if they changed meanwhile, so that pages of two versions were read.

        `is_outdated` says whether a notification has arrived since the start.
        """
        lists: dict[ListName, list[Any]] = {name: [] for name in _LISTS[feature]}
        pages: list[Any] = []
        for name, (method, member) in _LISTS[feature].items() if self.serves(feature) else ():
            read = await self._read_pages(getattr(self.client, method))
            if read is None or (len(read) > 1 and not _cursor(read[0]) and is_outdated()):
                return None
            lists[name] = [item for page in read for item in getattr(page, member)]
            pages += read
        cursors = [_cursor(page) for page in pages]
        if len({cursor and cursor.versions.get(feature) for cursor in cursors}) > 1:
            return None
        ttls = [page.ttl_ms / 1000 for page in pages if "ttl_ms" in page.model_fields_set and page.ttl_ms]
        return Fetched(lists, cursors[0] if cursors else None, min(ttls, default=None))

    async def _read_pages(self, read: Callable[..., Awaitable[Any]]) -> list[Any] | None:
        """Return all pages of a list, or None if the server no longer has the version of the first one."""
        pages: list[Any] = []
        cursors: list[str | None] = [None]
        while len(pages) < len(cursors):
            try:
                page = await read(cursor=cursors[-1])
            except MCPError as error:
                if error.code == types.METHOD_NOT_FOUND and not pages:
                    return []  # for example a server with resources and without templates
                if error.code == types.INVALID_PARAMS and pages:
                    return None
                raise
            pages.append(page)
            if page.next_cursor in cursors[1:]:
                raise TidingsError(f"the server's pages never end; it sent {page.next_cursor!r:.80} twice")
            if page.next_cursor is not None:
                cursors.append(page.next_cursor)
        return pages


def _cursor(page: Any) -> Cursor | None:
    return Cursor.parse((page.meta or {}).get(CURSOR_KEY))


@asynccontextmanager
async def connect(
    target: Target,
    headers: Mapping[str, str] | None,
    timing: Timing,
    resume: Cursor | None,
    on_message: Callable[[Connection, Any], Awaitable[None]],
    on_stream: Callable[[Connection], None],
) -> AsyncIterator[Connection]:
    """Open a new connection to the target."""
    connection = Connection(timing, on_stream)
    given = _client(target)
    server: Any = given.server

    async def receive(message: Any) -> None:
        if given.message_handler is not None and not isinstance(message, DeletedParams):
            await given.message_handler(message)
        await on_message(connection, message)

    async with AsyncExitStack() as stack:
        if isinstance(server, str):
            http = _ReportingClient(connection, headers=headers, timeout=_STREAM_TIMEOUT)
            server = streamable_http_client(server, http_client=await stack.enter_async_context(http))
            connection.has_stream = False
        elif isinstance(server, StdioServerParameters):
            server = _reporting_end(stdio_client(server), connection)
        elif isinstance(server, AbstractAsyncContextManager):
            connection.has_stream = False  # a transport that cannot be observed: poll too
        extension = _Changes({"resume": resume.as_json()} if resume else {}, receive)
        extensions = [*(given.extensions or ()), extension]
        client = replace(given, server=server, message_handler=receive, extensions=extensions, cache=None)
        connection.client = await stack.enter_async_context(client)
        stack.push_async_callback(connection.close_streams)
        yield connection


def _client(target: Target) -> Client:
    if isinstance(target, Client):
        return target
    if callable(target) and not isinstance(target, type) and isinstance(made := target(), Client):
        return made
    if isinstance(target, str) and not target.startswith(("http://", "https://")):
        target = shlex.split(target)
    if isinstance(target, Sequence) and not isinstance(target, str):
        if not target:
            raise TidingsError("the target is empty; give a URL such as http://127.0.0.1:8765/mcp, or a command")
        target = StdioServerParameters(command=str(target[0]), args=[str(each) for each in target[1:]])
    return Client(target)


def describe(target: Target) -> str:
    """Return a name of the target for messages."""
    while isinstance(target, Client):
        target = target.server
    if isinstance(target, StdioServerParameters):
        target = [target.command, *target.args]
    if isinstance(target, str):
        return target
    return shlex.join(map(str, target)) if isinstance(target, Sequence) else type(target).__name__


class _Changes(ClientExtension):
    """The extension of Tidings. Servers without it ignore it."""

    identifier = EXTENSION

    def __init__(self, settings: Mapping[str, Any], receive: Callable[[Any], Awaitable[None]]) -> None:
        self._settings = {"filter": {"detail": "delta"}, **settings}
        self._receive = receive

    def settings(self) -> dict[str, Any]:
        return self._settings

    def notifications(self) -> list[NotificationBinding[Any]]:
        return [NotificationBinding(method=DELETED_METHOD, params_type=DeletedParams, handler=self._receive)]


class _ReportingClient(httpx2.AsyncClient):
    """Reports the state of a legacy session, of which the SDK's transport says nothing: whether its GET stream is open,
    and whether the server still knows the session."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        super().__init__(**options)
        self._connection = connection

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        is_stream = request.method == "GET"
        try:
            response = await super().send(request, **options)
        except httpx2.TransportError as error:
            if is_stream:
                self._connection.fail(error)
            raise
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            self._connection.fail(ConnectionError("the server no longer knows the session"))
        elif is_stream and response.status_code in (200, 405):
            self._connection.set_stream(response.status_code == 200)
            if response.status_code == 200:
                response.stream = _ReportingStream(response.stream, self._connection)
        elif is_stream and response.status_code >= 400:
            self._connection.fail(ConnectionError(f"the server answered {response.status_code}"))
        return response


class _ReportingStream(httpx2.AsyncByteStream):
    """Reports when the GET stream of a legacy session is closed."""

    def __init__(self, stream: Any, connection: Connection) -> None:
        self._stream = stream
        self._connection = connection

    def __aiter__(self) -> AsyncIterator[bytes]:
        chunks: AsyncIterator[bytes] = self._stream.__aiter__()
        return chunks

    async def aclose(self) -> None:
        self._connection.end_stream()
        await self._stream.aclose()


@asynccontextmanager
async def _reporting_end(transport: Any, connection: Connection) -> AsyncIterator[Any]:
    """Report the end of a process, which the SDK says only to requests that wait for an answer."""
    async with transport as (reader, writer), anyio.create_task_group() as tasks:
        send, receive = anyio.create_memory_object_stream[Any](0)

        async def forward() -> None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the client was closed
                async with send:
                    async for message in reader:
                        await send.send(message)
            connection.fail(ConnectionError("the process of the server ended"))

        tasks.start_soon(forward)
        yield receive, writer
        tasks.cancel_scope.cancel()
