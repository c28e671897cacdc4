"""One connection of a mirror to a server, through the `Client` of the SDK.

A connection is used until it is lost, and then replaced by a new one. It hides the differences between the eras: how a
client asks for notifications, and whether the server can send them at the moment. It does not keep the lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import mcp_types as types
from mcp.client.client import Client
from mcp.client.extension import ClientExtension, NotificationBinding
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, Field

from tidings.client.snapshot import ListName
from tidings.client.timing import Timing
from tidings.client.transport import Target, make_client, observe
from tidings.core.cursor import Cursor
from tidings.core.frames import CURSOR_KEY, DELETED_METHOD, EXTENSION
from tidings.core.model import Feature, Topic
from tidings.wire.methods import ListMethod, list_methods
from tidings.wire.paging import read_pages

__all__ = ["Connection", "DeletedParams", "Fetched", "connect"]

_log = logging.getLogger(__name__)

_LISTS: Mapping[str, ListName] = {
    **{f"{feature.value}/list": feature.value for feature in Feature},
    "resources/templates/list": "templates",
}
"""The list of a mirror that each method reads."""
_NOT_FOUND = (types.INVALID_PARAMS, -32002)
"""The errors for a resource that does not exist, since 2026-07-28 and before."""


class Fetched(NamedTuple):
    """The lists of one feature, all of one version as far as the client can know."""

    lists: dict[ListName, list[Any]]
    cursor: Cursor | None = None
    ttl: float | None = None
    """Seconds for which the server says that the lists are fresh."""


class DeletedParams(BaseModel):
    """The params of `notifications/resources/deleted`."""

    model_config = ConfigDict(extra="allow")
    uri: str
    meta: dict[str, Any] = Field(default_factory=dict, alias="_meta")


class Connection:
    def __init__(self, timing: Timing, on_stream: Callable[[Connection], None]) -> None:
        self.client: Client
        self.has_stream = True
        """Whether a legacy server can send notifications: over HTTP, a GET stream must be open."""
        self.subscriptions: set[str] = set()
        """The URIs for which the server has agreed to send notifications."""
        self.lost = asyncio.Event()
        self.error: BaseException | None = None
        self._timing = timing
        self._on_stream = on_stream
        self._open_streams = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._granted: set[Feature] = set()
        """The lists for which the server has agreed to send notifications."""
        self._listening: asyncio.Task[None] | None = None
        """Reads the listen stream, in the modern era."""

    @property
    def is_modern(self) -> bool:
        return self.client.protocol_version in MODERN_PROTOCOL_VERSIONS

    @property
    def is_tidings(self) -> bool:
        """Whether the server says that it has Tidings: it notifies of every change, and continues from a cursor. A
        legacy server does not say so."""
        return EXTENSION in (self.client.server_capabilities.extensions or {})

    def serves(self, feature: Feature) -> bool:
        """Return whether the server declares the feature, or declares none: a client with a pinned protocol version
        gets no capabilities."""
        capabilities = self.client.server_capabilities
        declared = [getattr(capabilities, each.value) is not None for each in Feature]
        return getattr(capabilities, feature.value) is not None or not any(declared)

    def notifies_of(self, topic: Topic) -> bool:
        """Return whether the server can notify of changes of a list or content at the moment."""
        promised = topic in (self._granted if isinstance(topic, Feature) else self.subscriptions)
        return promised and (self.is_modern or self.has_stream)

    # Tasks, and the loss of the connection

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until the connection is closed. If the task raises, the connection is lost."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note that the connection is lost. The first error counts."""
        self.error = self.error or error
        self.lost.set()

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The GET streams of a legacy session: one for notifications, and one for each response that is resumed. They cannot
    # be told apart here.

    def stream_opened(self) -> None:
        self._open_streams += 1
        self.has_stream = True
        self._on_stream(self)

    def stream_ended(self) -> None:
        self._open_streams -= 1
        if self._open_streams:
            return
        self.has_stream = False
        self._on_stream(self)
        asyncio.get_running_loop().call_later(self._timing.first_poll, self._require_stream)

    def _require_stream(self) -> None:
        if not self.has_stream:
            self.fail(ConnectionError("the stream of the session ended"))

    # Notifications

    async def listen(self, uris: Collection[str]) -> dict[str, str]:
        """Ask for notifications of all lists, of the contents with these URIs, and of no others.

        Return after the acknowledgement, with the refused URIs and the reason of each.
        """
        announced = {feature for feature in Feature if self.serves(feature) and self._announces(feature)}
        resources = self.client.server_capabilities.resources
        if uris and (resources is None or not resources.subscribe):
            await self.listen(())
            return dict.fromkeys(uris, "it does not support subscriptions to resources")
        if self.subscriptions == set(uris) and (self._listening is not None or not announced):
            return {}
        if self.is_modern:
            return await self._replace_stream(announced, uris)
        self._granted = announced
        return await self._subscribe_and_unsubscribe(uris)

    def _announces(self, feature: Feature) -> bool:
        capability = getattr(self.client.server_capabilities, feature.value)
        return bool(capability.list_changed) if capability is not None else self.is_modern

    async def _subscribe_and_unsubscribe(self, uris: Collection[str]) -> dict[str, str]:
        for uri in self.subscriptions.difference(uris):
            unsubscribe = types.UnsubscribeRequest(params=types.UnsubscribeRequestParams(uri=uri))
            await self.client.session.send_request(unsubscribe, types.EmptyResult)
            self.subscriptions.discard(uri)
        refused: dict[str, str] = {}
        for uri in [uri for uri in uris if uri not in self.subscriptions]:
            subscribe = types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uri))
            try:
                await self.client.session.send_request(subscribe, types.EmptyResult)
                self.subscriptions.add(uri)
            except MCPError as error:
                _raise_if_closed(error)
                refused[uri] = error.message
        return refused

    async def _replace_stream(self, announced: set[Feature], uris: Collection[str]) -> dict[str, str]:
        """Open a listen stream, and then end the one before it, so that no notification is lost."""
        acknowledged: asyncio.Future[types.SubscriptionFilter] = asyncio.get_running_loop().create_future()
        listening = self.start(self._read_stream(acknowledged, announced, uris))
        try:
            async with asyncio.timeout(self._timing.acknowledgement):
                granted = await acknowledged
        except TimeoutError:
            listening.cancel()
            reason = f"it did not acknowledge the stream within {self._timing.acknowledgement:g} s"
            _log.warning("%s; its lists are polled. Does a proxy buffer its events?", reason)
            return dict.fromkeys(uris, reason)
        except MCPError as error:
            _raise_if_closed(error)
            # The server refuses the URIs, or has no listen streams.
            if uris and self._listening is None:
                await self.listen(())
            return dict.fromkeys(uris, error.message)
        except BaseException:
            listening.cancel()
            raise
        if self._listening is not None:
            self._listening.cancel()
        self._listening = listening
        self._granted = {feature for feature in announced if getattr(granted, _list_topic(feature))}
        self.subscriptions = set(granted.resource_subscriptions or ()).intersection(uris)
        return {uri: "it does not grant this one" for uri in uris if uri not in self.subscriptions}

    async def _read_stream(
        self, acknowledged: asyncio.Future[types.SubscriptionFilter], features: set[Feature], uris: Collection[str]
    ) -> None:
        """Read a listen stream until it ends. Then the connection is lost."""
        topics: dict[str, Any] = {_list_topic(feature): True for feature in features}
        try:
            async with self.client.listen(**topics, resource_subscriptions=[*uris]) as stream:
                acknowledged.set_result(stream.honored)
                async for _ in stream:
                    pass  # the message handler gets the notification, with its `_meta`
                if not any(granted for _, granted in stream.honored):
                    return  # a stream without a topic ends at once
        except Exception as error:
            if acknowledged.done():
                raise
            acknowledged.set_exception(error)
            return
        raise ConnectionError("the server ended the listen stream")

    # Lists and contents

    async def fetch(self, feature: Feature, is_outdated: Callable[[], bool]) -> Fetched | None:
        """Read the lists of a feature. Return None if they changed meanwhile, so that pages of two versions were read.

        `is_outdated` says whether a notification has arrived since the start.
        """
        lists: dict[ListName, list[Any]] = {}
        pages: list[Any] = []
        for name, method in list_methods(feature).items():
            read = await self._read_pages(name, method) if self.serves(feature) else []
            if read is None or (len(read) > 1 and not _cursor(read[0]) and is_outdated()):
                return None
            lists[_LISTS[name]] = [item for page in read for item in getattr(page, method.attribute)]
            pages += read
        cursors = [_cursor(page) for page in pages]
        if len({cursor and cursor.versions.get(feature) for cursor in cursors}) > 1:
            return None
        ttls = [page.ttl_ms / 1000 for page in pages if "ttl_ms" in page.model_fields_set and page.ttl_ms]
        return Fetched(lists, cursors[0] if cursors else None, min(ttls, default=None))

    async def _read_pages(self, name: str, method: ListMethod) -> list[Any] | None:
        """Return all pages of a list, or None if the server no longer has the version of the first one."""
        pages: list[Any] = []
        try:
            async for page in read_pages(name, getattr(self.client, method.function)):
                pages += [page]  # one by one: what was read before an error counts
        except MCPError as error:
            if error.code == types.METHOD_NOT_FOUND and not pages:
                return []  # for example a server with resources and without templates
            if error.code == types.INVALID_PARAMS and pages:
                return None
            raise
        return pages

    async def read_content(self, uri: str) -> types.ReadResourceResult | None:
        """Read a resource. Return None if there is none."""
        try:
            result = await self.client.read_resource(uri)
        except MCPError as error:
            if error.code in _NOT_FOUND:
                return None
            raise
        return types.ReadResourceResult(contents=result.contents)  # without what differs in each answer


def _list_topic(feature: Feature) -> str:
    return f"{feature.value}_list_changed"


def _cursor(page: Any) -> Cursor | None:
    return Cursor.parse((page.meta or {}).get(CURSOR_KEY))


def _raise_if_closed(error: MCPError) -> None:
    """Raise an error that is no answer of the server."""
    if error.code == types.CONNECTION_CLOSED:
        raise error


@asynccontextmanager
async def connect(
    target: Target,
    headers: Mapping[str, str] | None,
    timing: Timing,
    resume: Cursor | None,
    on_message: Callable[[Connection, Any], Awaitable[None]],
    on_stream: Callable[[Connection], None],
) -> AsyncIterator[Connection]:
    """Open a new connection. `on_stream` is called when a GET stream of a legacy session is opened, and when the last
    one ends."""
    connection = Connection(timing, on_stream)
    given = make_client(target)
    # Whether the GET stream is open is not known yet; of a transport of the user, it is never known.
    connection.has_stream = not isinstance(given.server, str | AbstractAsyncContextManager)

    async def receive(message: Any) -> None:
        if given.message_handler is not None and not isinstance(message, DeletedParams):
            await given.message_handler(message)
        await on_message(connection, message)

    async with replace(
        given,
        server=observe(given.server, headers, connection),
        message_handler=receive,
        extensions=[*(given.extensions or ()), _Changes({"resume": resume.as_json()} if resume else {}, receive)],
        cache=None,
    ) as connection.client:
        try:
            yield connection
        finally:
            await connection.close()


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
