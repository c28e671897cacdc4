"""`Mirror`: an always-current copy of a server's tools, prompts, resources, templates and watched contents.

A notification only wakes the mirror up. If it has the changes (from a Tidings server) and they lead to the digest of
the server's list, the mirror applies them. Otherwise it fetches the list, compares, and publishes what differs. For
each feature and watched content, one request is running and at most one is queued, whatever the number of
notifications. Its answers are read one after the other, so an old answer never replaces a newer one.

The mirror does not repeat a call of a tool that failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast

import mcp_types as types
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.uri_template import UriTemplate

from tidings.client.connection import Connection, DeletedParams, Fetched, Stream, Target, connect, describe
from tidings.client.lists import ChangingLists, call_safely
from tidings.client.snapshot import Snapshot
from tidings.client.timing import Timing
from tidings.core.cursor import Cursor
from tidings.core.digest import split_digest
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, DELETED_METHOD, SUBSCRIPTION_KEY
from tidings.core.model import Feature, Version
from tidings.core.patterns import Match, compile_pattern, is_pattern
from tidings.core.redact import one_line
from tidings.errors import Disconnected, NotFound, NotSupported, TidingsError

__all__ = ["Mirror", "Status"]

_log = logging.getLogger(__name__)

_UPDATED = "notifications/resources/updated"
_NOT_FOUND = (types.INVALID_PARAMS, -32002)
"""The errors for a resource that does not exist, since 2026-07-28 and before."""
_FEATURES = {feature.method: feature for feature in Feature}


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


class _State:
    """The state of one feature, or of one watched content."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set if it has to be fetched."""
        self.is_fetching = False
        self.stale_since: float | None = None
        self.is_granted = False
        """Whether the server notifies of its changes."""
        self.task: asyncio.Task[None] | None = None
        """Fetches it, on the present connection."""
        self.is_loaded = False
        """Whether it was fetched, or resumed, on the present connection."""
        self.poll = 0.0
        """Seconds until the next poll, if the server does not notify."""
        self.reason: str | None = None


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
        self._states = {feature: _State() for feature in Feature}
        self._connection: Connection | None = None
        self._lost_since: float | None = None
        self._reason: str | None = None
        self._started: asyncio.Future[None]
        self._tasks: list[asyncio.Task[None]] = []
        self._handlers: dict[str, Callable[[Any], Any]] = {}
        self._subscribed: dict[str, Match] = {}
        self._watched: dict[str, _State] = {}
        self._contents: Stream | None = None
        """The listen stream of the subscribed contents."""
        self._replaced: set[str | int] = set()
        """The ids of those before it, whose last notifications the new one repeats."""
        self._subscribing = asyncio.Lock()

    @property
    def status(self) -> Status:
        if self._is_closed:
            return Status("closed", self._lost_since, self._reason)
        connection, states = self._connection, [*self._states.values(), *self._watched.values()]
        stale = [state.stale_since for state in states if state.stale_since is not None]
        if connection is None:
            return Status("reconnecting", min([*stale, self._lost_since or time.time()]), self._reason)
        if stale:
            return Status("stale", min(stale), next((state.reason for state in states if state.reason), None))
        notified = [self._is_notified(connection, feature) for feature in Feature if connection.serves(feature)]
        return Status("fresh" if all(notified) else "polling")

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

    # Contents of resources, and other notifications

    async def subscribe(self, uri: str) -> None:
        """Ask for notifications of a content: they go to the handler of `notifications/resources/updated`."""
        async with self._subscribing:
            connection = self._connected()
            resources = connection.client.server_capabilities.resources
            if resources is None or not resources.subscribe:
                raise NotSupported(f"{self._name} does not support subscriptions to resources, so not to {uri}")
            if uri not in self._subscribed:
                match = compile_pattern(uri, _template) if is_pattern(uri) else _is_same_or_below(uri)
                await self._subscribe(connection, [*self._subscribed, uri])
                self._subscribed[uri] = match

    async def unsubscribe(self, uri: str) -> None:
        """End the notifications of a resource's content."""
        async with self._subscribing:
            if self._subscribed.pop(uri, None) is None or (connection := self._connection) is None:
                return
            if connection.is_modern:
                await self._subscribe(connection, [*self._subscribed])
            else:
                request = types.UnsubscribeRequest(params=types.UnsubscribeRequestParams(uri=uri))
                await connection.client.session.send_request(request, types.EmptyResult)

    @property
    def subscribed(self) -> frozenset[str]:
        return frozenset(self._subscribed)

    async def watch(self, uri: str) -> types.ReadResourceResult:
        """Subscribe to a resource, keep its content current in `contents`, and return it."""
        if is_pattern(uri):
            raise TidingsError(f"{uri} is a pattern; watch() reads one resource, subscribe() accepts patterns")
        was_subscribed = uri in self._subscribed
        await self.subscribe(uri)
        if uri not in self._watched:
            connection, state = self._connected(), _State()
            state.is_granted = True
            self._watched[uri] = state
            try:
                await self._fetch_content(connection, uri, state)
                if uri not in self.contents:
                    raise NotFound(f"{self._name} has no resource {uri}")
            except BaseException:
                del self._watched[uri]
                if not was_subscribed:
                    await self.unsubscribe(uri)
                raise
            if connection is self._connection:
                self._maintain_content(connection, uri, state)
        return cast("types.ReadResourceResult", await self.wait_for(uri, "contents"))

    async def unwatch(self, uri: str) -> None:
        """Remove a content from `contents`, and unsubscribe from its resource."""
        state = self._watched.pop(uri, None)
        if state is not None and state.task is not None:
            await _cancel([state.task])
        self._read(self._snapshot.changed({"contents": {uri: None}}), None)
        await self.unsubscribe(uri)

    def _maintain_content(self, connection: Connection, uri: str, state: _State) -> None:
        fetch = partial(self._fetch_content, connection, uri, state)
        state.task = asyncio.create_task(self._maintain(connection, uri, state, fetch, lambda: None))

    async def _fetch_content(self, connection: Connection, uri: str, state: _State) -> bool:
        if not state.is_granted:
            async with self._subscribing:
                await self._subscribe(connection, [*(each for each in self._subscribed if each != uri), uri])
            state.is_granted = True
        try:
            result = await connection.client.read_resource(uri)
        except MCPError as error:
            if error.code not in _NOT_FOUND:
                raise
            content = None
        else:
            content = types.ReadResourceResult(contents=result.contents)  # without what differs in each answer
        self._read(self._snapshot.changed({"contents": {uri: content}}), None)
        self._set_current(state)
        return True

    def _mark_contents(self, changed: str | None = None) -> None:
        """Note that watched contents are out of date: of this URI and those above it, or all."""
        for uri, state in self._watched.items():
            if changed is None or _is_same_or_below(uri)(changed):
                self._mark(state)

    async def _subscribe(self, connection: Connection, uris: list[str]) -> None:
        """Subscribe to the last of these URIs, and in the modern era to the others again."""
        if not connection.is_modern:
            request = types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uris[-1]))
            await connection.client.session.send_request(request, types.EmptyResult)
            return
        opened: Stream | None = None
        if uris:
            # The new stream opens before the old one ends, so that no notification is lost.
            opened = await connection.listen(resource_subscriptions=uris)
            if refused := set(uris) - set(opened.granted.resource_subscriptions or ()):
                opened.task.cancel()
                raise NotSupported(f"{self._name} does not grant a subscription to {', '.join(sorted(refused))}")
        if self._contents is not None:
            self._contents.task.cancel()
            self._replaced.add(self._contents.id)
        self._contents = opened

    async def _subscribe_again(self, connection: Connection) -> None:
        """Renew the subscriptions to contents, and report each of them as updated: it may have changed meanwhile."""
        async with self._subscribing:
            uris = [*self._subscribed]
            try:
                for number in [len(uris)] if connection.is_modern else range(1, len(uris) + 1):
                    await self._subscribe(connection, uris[:number])
            except (MCPError, NotSupported) as error:
                _log.warning("%s: the subscriptions are not renewed: %s", self._name, one_line(str(error), 200))
        self._mark_contents()
        for uri in uris:
            params = types.ResourceUpdatedNotificationParams(uri=uri)
            await self._handle(_UPDATED, types.ResourceUpdatedNotification(params=params))

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
        if feature := _FEATURES.get(method):
            self._list_changed(feature, meta)
        elif method in (_UPDATED, DELETED_METHOD):
            if meta.get(SUBSCRIPTION_KEY) in self._replaced:
                return
            if not any(match(str(params.uri)) for match in self._subscribed.values()):
                _log.debug("%s notified of %s without a subscription", self._name, one_line(str(params.uri), 200))
                return
            self._mark_contents(str(params.uri))
        await self._handle(method, message)

    # The connection

    async def __aenter__(self) -> Self:
        """Connect, and fetch all lists. Raise the error if the first connection fails; later ones are retried."""
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
        await _cancel(self._tasks)
        self._connection, self._lost_since = None, time.time()
        self._publish(self._snapshot)

    async def _run(self) -> None:
        failures = 0
        while True:
            error: BaseException | None = None
            for state in self._states.values():
                state.is_loaded = False
            try:
                async with connect(
                    self._target, self._headers, self._timing, self._cursor, self._receive, self._stream_changed
                ) as connection:
                    await self._follow(connection)
                    error = connection.error
            except Exception as raised:
                error = _first(raised)
            if self._is_closed:
                return  # a transport that fails while it is closed replaces the cancellation by its error
            is_current = all(state.is_loaded for state in self._states.values())
            self._reason = one_line(str(error) or type(error).__name__, 200)
            if not self._started.done():
                self._started.set_exception(Disconnected(f"{self._name} can't be reached: {self._reason}"))
                return
            self._lost_since = self._lost_since or time.time()
            failures = 0 if is_current else failures + 1
            await asyncio.sleep(self._timing.retry_delay(failures))

    async def _follow(self, connection: Connection) -> None:
        """Keep the lists current until the connection is lost."""
        self._connection = connection
        for state in self._states.values():
            state.wake.clear()
            state.poll = self._timing.first_poll
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._ask_for_notifications(connection)
            for feature, state in self._states.items():
                if self._is_resumed(connection, feature):
                    self._set_current(state)
                else:
                    # After the acknowledgement: a change before it is in the list, one after it is notified.
                    self._mark(state)
                fetch = partial(self._fetch_lists, connection, feature, state)
                poll = partial(self._poll_delay, connection, feature, state)
                tasks.append(asyncio.create_task(self._maintain(connection, feature.value, state, fetch, poll)))
            for uri, state in self._watched.items():
                self._maintain_content(connection, uri, state)
            tasks.append(asyncio.create_task(self._subscribe_again(connection)))
            await connection.lost.wait()
        finally:
            self._connection = self._contents = None  # before the client is closed, which takes a while
            await _cancel([*tasks, *(state.task for state in self._watched.values() if state.task is not None)])

    async def _ask_for_notifications(self, connection: Connection) -> None:
        announced = {feature for feature in Feature if connection.serves(feature) and connection.announces(feature)}
        if connection.is_modern and announced:
            topics: dict[str, Any] = {f"{feature.value}_list_changed": True for feature in announced}
            try:
                granted = (await connection.listen(**topics)).granted
            except MCPError as error:
                if error.code == types.CONNECTION_CLOSED:
                    raise
                granted = types.SubscriptionFilter()  # the server has no listen streams: poll
            announced = {feature for feature in announced if getattr(granted, f"{feature.value}_list_changed")}
        for feature, state in self._states.items():
            state.is_granted = feature in announced

    def _stream_changed(self, connection: Connection) -> None:
        # The server may not have notified of changes before the stream was open.
        if connection is self._connection and connection.has_stream:
            for state in self._states.values():
                self._mark(state)
            self._mark_contents()

    def _is_notified(self, connection: Connection, feature: Feature) -> bool:
        return self._states[feature].is_granted and (connection.is_modern or connection.has_stream)

    # The lists

    def _known(self, feature: Feature) -> Version | None:
        """Return the version of the server's list that the mirror has read last."""
        return self._cursor.versions.get(feature) if self._cursor else None

    def _is_resumed(self, connection: Connection, feature: Feature) -> bool:
        """Return whether the server notifies of every difference to the list that the mirror has."""
        known = self._known(feature)
        if known is None or not (connection.has_cursors and connection.is_modern and self._states[feature].is_granted):
            return False
        return split_digest(known.digest)[0] == self._snapshot.list_digest(feature)

    def _list_changed(self, feature: Feature, meta: Mapping[str, Any]) -> None:
        """Apply the changes that a notification of a Tidings server has, or fetch the list."""
        state, known, cursor = self._states[feature], self._known(feature), Cursor.parse(meta.get(CURSOR_KEY))
        version = cursor.versions.get(feature) if cursor else None
        if cursor is None or version is None or known is None or state.is_fetching or state.wake.is_set():
            self._mark(state)
        elif self._cursor and cursor.epoch == self._cursor.epoch and version.revision <= known.revision:
            pass  # the mirror has fetched a newer list
        elif (present := self._after(feature, known, version, meta.get(CHANGE_KEY))) is not None:
            self._read(present, cursor)
        else:
            self._mark(state)

    def _after(self, feature: Feature, known: Version, version: Version, summary: Any) -> Snapshot | None:
        """Return the lists after the changes of a notification, or None if the list has to be fetched."""
        if split_digest(known.digest)[1] != split_digest(version.digest)[1]:
            return None  # the server could not read its list
        # Anything may be wrong in a message: then the list is fetched.
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            return self._snapshot.with_delta(feature, split_digest(version.digest)[0], summary)
        return None

    def _mark(self, state: _State) -> None:
        """Note that a list or a content is out of date."""
        if state.stale_since is None:
            state.stale_since = self._lost_since or time.time()
        state.wake.set()

    async def _maintain(
        self,
        connection: Connection,
        name: str,
        state: _State,
        fetch: Callable[[], Awaitable[bool]],
        poll_delay: Callable[[], float | None],
    ) -> None:
        """Fetch whenever the state is marked, or a poll is due: the only task that does. `fetch` returns False if it
        has to be called again."""
        failures = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(poll_delay()):
                    await state.wake.wait()
            state.wake.clear()
            state.is_fetching = True
            try:
                async with asyncio.timeout(self._timing.answer):
                    is_complete = await fetch()
            except (MCPError, TidingsError, ValueError) as error:  # ValueError: the result is not valid
                is_closed = isinstance(error, MCPError) and error.code == types.CONNECTION_CLOSED
                if is_closed or not self._started.done():
                    connection.fail(error)
                    return
                failures += 1
                self._mark(state)
                state.reason = one_line(f"{name}: {error}", 200)
                await asyncio.sleep(self._timing.retry_delay(failures))
                continue
            except Exception as error:
                connection.fail(error)
                return
            finally:
                state.is_fetching = False
            failures = 0
            if not is_complete:
                self._mark(state)
            await asyncio.sleep(self._timing.min_interval)

    async def _fetch_lists(self, connection: Connection, feature: Feature, state: _State) -> bool:
        fetched = await connection.fetch(feature, state.wake.is_set)
        if fetched is not None:
            self._apply(state, fetched)
        return fetched is not None

    def _poll_delay(self, connection: Connection, feature: Feature, state: _State) -> float | None:
        """Return the seconds until the next poll, or None if there is no need for one."""
        is_notified = self._is_notified(connection, feature)
        if not connection.serves(feature) or (is_notified and connection.has_cursors):
            return None
        return self._timing.poll_delay(self._timing.recheck if is_notified else state.poll)

    def _apply(self, state: _State, fetched: Fetched) -> None:
        present = self._snapshot.with_lists(fetched.lists)
        if fetched.ttl is not None:
            state.poll = max(fetched.ttl, 1.0)  # however short the server says, at most one request per second
        elif present is not self._snapshot:
            state.poll = self._timing.first_poll
        else:
            state.poll = min(state.poll * 1.5, self._timing.longest_poll)
        self._read(present, fetched.cursor)
        self._set_current(state)

    def _read(self, present: Snapshot, cursor: Cursor | None) -> None:
        """Publish what was read from the server, and keep its version."""
        if cursor is not None:
            self._cursor = self._cursor.merge(cursor, is_read=True) if self._cursor else cursor
        for uri, state in self._watched.items():
            if uri in present.resources and uri not in self._snapshot.resources:
                state.is_granted = False  # the subscription may have ended with the resource
                self._mark(state)
        if present is not self._snapshot:
            self._publish(present)

    def _set_current(self, state: _State) -> None:
        state.is_loaded = True
        if not state.wake.is_set():
            state.stale_since = state.reason = None
        if all(each.is_loaded for each in self._states.values()):
            self._lost_since = self._reason = None
            if not self._started.done():
                self._started.set_result(None)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _template(text: str) -> Match:
    template = UriTemplate.parse(text)
    return lambda uri: template.match(uri) is not None


def _is_same_or_below(subscribed: str) -> Match:
    """A server may notify of a resource below the subscribed one."""
    return lambda uri: uri == subscribed or uri.startswith(subscribed.rstrip("/") + "/")


def _first(error: BaseException) -> BaseException:
    """Return the first error in an exception group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
