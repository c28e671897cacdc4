"""`Mirror`: an always-current copy of a server's tools, prompts, resources, templates and watched contents.

A notification only wakes the mirror up. If it has the changes (from a Tidings server) and they lead to the digest of
the server's list, the mirror applies them. Otherwise it fetches the list, compares, and publishes what differs.

`Connection` hides the eras of the protocol. A `Refresher` decides when a list or a content is fetched. The mirror
connects again, keeps what it has read, and does not repeat a call of a tool that failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import mcp_types as types
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.uri_template import UriTemplate

from tidings.client.connection import Connection, DeletedParams, connect
from tidings.client.lists import ChangingLists, call_safely
from tidings.client.refresher import Refresher
from tidings.client.snapshot import Detected, Snapshot
from tidings.client.timing import Timing
from tidings.client.transport import Target, describe
from tidings.core.cursor import Cursor
from tidings.core.digest import split_digest
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, DELETED_METHOD
from tidings.core.model import UPDATED_METHOD, Feature, Topic, Version
from tidings.core.patterns import Match, compile_pattern, is_pattern
from tidings.core.redact import one_line
from tidings.errors import Disconnected, NotFound, NotSupported, TidingsError, first_error
from tidings.wire.methods import LIST_CHANGED

__all__ = ["Mirror", "Status"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """How current a mirror is."""

    state: Literal["fresh", "polling", "stale", "reconnecting", "closed"]
    """`fresh`: the server notifies of every change. `polling`: the lists are as of the last poll. `stale`: a list
    changed, and is being fetched. `reconnecting`: the lists are those of the lost connection."""
    stale_since: float | None = None
    """The time (`time.time()`) since which the lists may be out of date."""
    reason: str | None = None
    """The last error, if the mirror is stale because of one."""


class Mirror(ChangingLists):
    """Keep a copy of a server's lists current, from `async with` on.

    `target` is a URL, a stdio command (a text or a list), a `Client` of the SDK that is not entered, anything that a
    `Client` accepts, or a function that returns a new `Client` for each connection. `headers` are those of the requests
    to a URL, for example a token.
    """

    def __init__(
        self, target: Target, *, headers: Mapping[str, str] | None = None, timing: Timing | None = None
    ) -> None:
        super().__init__()
        self._target = target
        self._name = one_line(describe(target), 200)
        self._headers = headers
        self._timing = timing or Timing()
        self._cursor: Cursor | None = None
        """The versions of the server's lists that the mirror has read last."""
        self._connection: Connection | None = None
        self._refreshers: dict[Topic, Refresher] = {}
        """Those of the lists and watched contents, on the present connection."""
        self._lost_since: float | None = None
        self._reason: str | None = None
        """Why the last connection was lost."""
        self._failures = 0
        """The connections in a row on which not every list was fetched."""
        self._started: asyncio.Future[None]
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[str, Callable[[Any], Any]] = {}
        self._subscribed: dict[str, Match] = {}
        self._watched: set[str] = set()
        self._subscribing = asyncio.Lock()

    @property
    def status(self) -> Status:
        if self._is_closed:
            return Status("closed", self._lost_since, self._reason)
        if self._connection is None:
            return Status("reconnecting", self._lost_since, self._reason)
        refreshers = [*self._refreshers.values()]
        if (since := _oldest(refreshers)) is not None:
            return Status("stale", since, next((each.error for each in refreshers if each.error), None))
        topics: list[Topic] = [*filter(self._connection.serves, Feature), *self._watched]
        return Status("fresh" if all(map(self._connection.notifies_of, topics)) else "polling")

    async def next_status(self, seen: Status) -> Status:
        """Return the status as soon as it is not `seen`."""
        while (status := self.status) == seen:
            await self._changed.wait()
        return status

    # Requests

    @property
    def client(self) -> Client:
        """The connected `Client` of the SDK, for requests that the mirror has no method for. Another one after each
        reconnect."""
        return self._connected().client

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> types.CallToolResult:
        """Call a tool. `options` are those of `Client.call_tool`."""
        connection = self._connected()
        try:
            return await connection.client.call_tool(name, dict(arguments or {}), **options)
        except MCPError as error:
            if error.code != types.CONNECTION_CLOSED:
                raise
            connection.fail(error)
            message = f"{self._name}: the connection was lost during the call of {name!r}; it may have run"
            raise Disconnected(message) from error

    def _connected(self) -> Connection:
        if self._connection is None:
            reason = f": {self._reason}" if self._reason else ""
            raise Disconnected(f"{self._name} is not connected ({self.status.state}){reason}")
        return self._connection

    # Contents of resources

    async def subscribe(self, uri: str) -> None:
        """Ask for notifications of a content: they go to the handler of `notifications/resources/updated`."""
        match = compile_pattern(uri, _compile_template) if is_pattern(uri) else _is_same_or_below(uri)
        async with self._subscribing:
            connection = self._connected()
            if uri in self._subscribed:
                return
            self._subscribed[uri] = match  # a notification may arrive together with the acknowledgement
            try:
                refused = await connection.listen(self._subscribed)
                if uri in refused:
                    raise NotSupported(f"{self._name} refuses a subscription to {uri}: {one_line(refused[uri], 200)}")
            except BaseException:
                del self._subscribed[uri]
                raise

    async def unsubscribe(self, uri: str) -> None:
        """End the notifications of a resource's content."""
        async with self._subscribing:
            if self._subscribed.pop(uri, None) is not None and self._connection is not None:
                await self._connection.listen(self._subscribed)

    @property
    def subscribed(self) -> frozenset[str]:
        return frozenset(self._subscribed)

    async def watch(self, uri: str) -> types.ReadResourceResult:
        """Subscribe to a resource, keep its content current in `contents`, and return it."""
        if is_pattern(uri):
            raise TidingsError(f"{uri} is a pattern; watch() reads one resource, subscribe() accepts patterns")
        await self.subscribe(uri)
        if uri not in self._watched:
            connection = self._connected()
            self._watched.add(uri)
            refresher = self._refreshers[uri] = self._content_refresher(connection, uri)
            try:
                await refresher.fetch()
                if uri not in self.contents:
                    raise NotFound(f"{self._name} has no resource {uri}")
            except BaseException:
                await self.unwatch(uri)
                raise
            if connection is self._connection:
                refresher.task = connection.start(refresher.run())
        while uri not in self.contents:  # another call of `watch()` reads it, or the server has deleted it
            if self._is_closed:
                raise Disconnected(f"{self._name}: closed before the server had {uri}")
            if uri not in self._watched:
                raise NotFound(f"{self._name}: {uri} could not be read, or unwatch() was called")
            await self._changed.wait()
        return self.contents[uri]

    async def unwatch(self, uri: str) -> None:
        """Remove a content from `contents`, and unsubscribe from its resource."""
        self._watched.discard(uri)
        refresher = self._refreshers.pop(uri, None)
        if refresher is not None and refresher.task is not None:
            refresher.task.cancel()
        self._publish(self._snapshot.changed({"contents": {uri: None}}))
        await self.unsubscribe(uri)

    def _content_refresher(self, connection: Connection, uri: str) -> Refresher:
        async def fetch(refresher: Refresher) -> bool:
            if uri not in connection.subscriptions:
                await self._listen(connection)
            content = await connection.read_content(uri)
            refresher.interval = None if connection.notifies_of(uri) else self._timing.recheck
            self._publish(self._snapshot.changed({"contents": {uri: content}}), refresher.detected)
            return True

        return Refresher(uri, fetch, self._timing, self._progressed)

    # Notifications

    def set_notification_handler(self, method: str, handler: Callable[[Any], Any] | None) -> None:
        """Call `handler(notification)` for each notification of this method; None removes the handler.

        The handler of `notifications/resources/updated` only gets URIs that this mirror has subscribed to. After a
        reconnect it gets one notification for each of them, because the content may have changed meanwhile.
        """
        if handler is None:
            self._handlers.pop(method, None)
        else:
            self._handlers[method] = handler

    async def _handle(self, method: str, message: Any) -> None:
        if handler := self._handlers.get(method):
            await call_safely(handler, message)

    async def _receive(self, connection: Connection, message: Any) -> None:
        if connection is not self._connection:
            return  # of a connection that is lost
        if isinstance(message, Exception):
            _log.warning("%s sent something unexpected: %s", self._name, one_line(str(message), 200))
            return
        is_deleted = isinstance(message, DeletedParams)
        method, params = (DELETED_METHOD, message) if is_deleted else (message.method, message.params)
        meta = (params and params.meta) or {}
        if feature := LIST_CHANGED.get(method):
            refresher = self._refreshers[feature]
            if not (refresher.is_idle and self._apply_notification(connection, feature, meta)):
                refresher.mark()
        elif method in (UPDATED_METHOD, DELETED_METHOD):
            uri = str(params.uri)
            if not any(match(uri) for match in self._subscribed.values()):
                _log.debug("%s notified of %s without a subscription", self._name, one_line(uri, 200))
                return
            for watched in self._watched:
                if _is_same_or_below(watched)(uri):
                    self._refreshers[watched].mark()
        await self._handle(method, message)

    def _apply_notification(self, connection: Connection, feature: Feature, meta: Mapping[str, Any]) -> bool:
        """Apply the changes that a notification of a Tidings server has. Return False if the list must be fetched."""
        started = time.monotonic()
        known, cursor = self._known(feature), Cursor.parse(meta.get(CURSOR_KEY))
        version = cursor.versions.get(feature) if cursor else None
        if cursor is None or version is None or known is None or self._cursor is None:
            return False
        if cursor.epoch == self._cursor.epoch and version.revision <= known.revision:
            return True  # the mirror has fetched a newer list
        digest, unknown = split_digest(version.digest)
        if split_digest(known.digest)[1] != unknown:
            return False  # the server could not read its list
        present = self._snapshot.with_delta(feature, digest, meta.get(CHANGE_KEY))
        if present is not None:
            self._publish_lists(connection, present, cursor, Detected("notification", time.monotonic() - started))
        return present is not None

    # The connection

    async def __aenter__(self) -> Self:
        """Connect, and fetch all lists. Raise the error if the first connection fails; later ones are retried."""
        if self._tasks:
            raise TidingsError(f"the mirror of {self._name} was used before; create another one")
        self._started = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._run())]
        try:
            await self._started
        except BaseException:
            await self._close()
            raise
        self._tasks.append(asyncio.create_task(self._call_back(self.changes())))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wake()

    async def _run(self) -> None:
        while True:
            try:
                async with connect(
                    self._target, self._headers, self._timing, self._cursor, self._receive, self._stream_changed
                ) as connection:
                    await self._follow(connection)
            except Exception as error:
                self._reason = _message(first_error(error))
            if self._is_closed:
                return  # a transport that fails while it is closed replaces the cancellation by its error
            if not self._started.done():
                self._started.set_exception(Disconnected(f"{self._name} can't be reached: {self._reason}"))
                return
            self._wake()
            await asyncio.sleep(self._timing.retry_delay(self._failures))
            self._failures += 1

    async def _follow(self, connection: Connection) -> None:
        """Keep the lists and contents current until the connection is lost."""
        self._refreshers = {feature: self._list_refresher(connection, feature) for feature in Feature}
        self._refreshers |= {uri: self._content_refresher(connection, uri) for uri in self._watched}
        for refresher in self._refreshers.values():
            refresher.stale_since = self._lost_since or time.time()
        self._connection = connection
        try:
            await self._listen(connection)
            for topic, refresher in self._refreshers.items():
                if isinstance(topic, Feature) and self._is_resumed(connection, topic):
                    refresher.set_current()
                else:
                    # After the acknowledgement: a change before it is in the list, one after it is notified.
                    refresher.mark("reconnect")
                refresher.task = connection.start(refresher.run())
            connection.start(self._report_contents())
            await connection.lost.wait()
        finally:
            self._connection = None  # before the client is closed, which takes a while
            self._lost_since = _oldest(self._refreshers.values()) or time.time()
            if connection.error is not None:
                self._reason = _message(connection.error)
            self._wake()

    async def _listen(self, connection: Connection) -> None:
        """Ask for notifications of the lists and of the subscribed contents."""
        async with self._subscribing:
            refused = await connection.listen(self._subscribed)
        for uri, reason in refused.items():
            _log.warning("%s: the subscription to %s is not renewed: %s", self._name, uri, one_line(reason, 200))

    async def _report_contents(self) -> None:
        """Report each subscribed content as updated: it may have changed while there was no connection."""
        for uri in [*self._subscribed]:
            params = types.ResourceUpdatedNotificationParams(uri=uri)
            await self._handle(UPDATED_METHOD, types.ResourceUpdatedNotification(params=params))

    def _stream_changed(self, connection: Connection) -> None:
        if connection is self._connection:
            self._wake()
            # The server may not have notified of changes before the stream was open.
            for refresher in self._refreshers.values() if connection.has_stream else ():
                refresher.mark("reconnect")

    def _progressed(self) -> None:
        """Note that the state of a refresher has changed."""
        lists = [self._refreshers[feature] for feature in Feature]
        if all(each.is_loaded for each in lists):
            self._failures = 0
            if not self._started.done():
                self._started.set_result(None)
        elif not self._started.done() and self._connection is not None:
            for each in lists:
                if each.error is not None:
                    self._connection.fail(TidingsError(each.error))
        self._wake()

    # The lists

    def _list_refresher(self, connection: Connection, feature: Feature) -> Refresher:
        return Refresher(feature.value, partial(self._fetch_lists, connection, feature), self._timing, self._progressed)

    async def _fetch_lists(self, connection: Connection, feature: Feature, refresher: Refresher) -> bool:
        fetched = await connection.fetch(feature, lambda: refresher.is_marked)
        if fetched is None:
            return False
        present = self._snapshot.with_lists(fetched.lists)
        if not connection.serves(feature):
            refresher.interval = None
        elif connection.notifies_of(feature):
            refresher.interval = None if connection.is_tidings else self._timing.recheck
        elif fetched.ttl is not None:
            refresher.interval = max(fetched.ttl, 1.0)  # however short the server says, at most one request per second
        elif refresher.interval is None or present is not self._snapshot:
            refresher.interval = self._timing.first_poll
        else:
            refresher.interval = min(refresher.interval * 1.5, self._timing.longest_poll)
        self._publish_lists(connection, present, fetched.cursor, refresher.detected)
        return True

    def _publish_lists(
        self, connection: Connection, present: Snapshot, cursor: Cursor | None, detected: Detected
    ) -> None:
        """Publish what was read from the server, and keep its version."""
        if cursor is not None:
            self._cursor = self._cursor.merge(cursor, is_read=True) if self._cursor else cursor
        for uri in self._watched:
            if uri in present.resources and uri not in self._snapshot.resources:
                connection.subscriptions.discard(uri)  # it may have ended with the resource
                self._refreshers[uri].mark()
        self._publish(present, detected)

    def _known(self, feature: Feature) -> Version | None:
        return self._cursor.versions.get(feature) if self._cursor else None

    def _is_resumed(self, connection: Connection, feature: Feature) -> bool:
        """Return whether the server notifies of every difference to the list that the mirror has."""
        known = self._known(feature)
        if known is None or not (connection.is_modern and connection.is_tidings and connection.notifies_of(feature)):
            return False
        return split_digest(known.digest)[0] == self._snapshot.list_digest(feature)


def _oldest(refreshers: Iterable[Refresher]) -> float | None:
    """Return the time since which one of them is out of date, or None if all are current."""
    return min((each.stale_since for each in refreshers if each.stale_since is not None), default=None)


def _compile_template(text: str) -> Match:
    template = UriTemplate.parse(text)
    return lambda uri: template.match(uri) is not None


def _is_same_or_below(subscribed: str) -> Match:
    """Match the subscribed resource and those below it, because a server may notify of them, too."""
    return lambda uri: uri == subscribed or uri.startswith(subscribed.rstrip("/") + "/")


def _message(error: BaseException) -> str:
    return one_line(str(error) or type(error).__name__, 200)
