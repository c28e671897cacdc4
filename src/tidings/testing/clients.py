"""Clients of each era, connected to the server of a test, and assertions about what they are told.

`connect()` works with any MCP server: it compares the lists that the clients fetch, and needs no metadata in the
notifications.

To assert that a client gets no notification, a test has to know that none is on its way. A `Live` server sends a
marker: when it has arrived, so has everything before it. With another server, each client waits for the answer to a
request, and then for a short time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import httpx2
import mcp_types as types
import uvicorn
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tidings.core.model import UPDATED_METHOD, Feature
from tidings.errors import NotSupported, TidingsError, first_error
from tidings.wire.http import make_http_client
from tidings.wire.methods import LIST_CHANGED, list_methods
from tidings.wire.paging import read_pages

__all__ = ["Frame", "LiveClient", "LiveClients", "NotificationError", "connect"]

Era: TypeAlias = Literal["modern", "legacy"]
Names: TypeAlias = str | Sequence[str]

MARKER = "tidings-testing://marker"
DEADLINE = 5.0
"""Seconds for a notification to arrive: far above what a healthy server needs on a busy machine."""
QUIET = 0.2
"""Seconds without a notification that count as silence, where no marker can be sent."""
_SHOWN = 20
"""Frames of each client in an error."""

_TOPICS = {feature.value: feature for feature in Feature}


class NotificationError(AssertionError):
    """The clients were told something else than the test expects. The message has the frames of each client."""


@dataclass
class Frame:
    """A notification of a change, as a client got it."""

    at: float
    """Seconds since the client was connected."""
    method: str
    params: dict[str, Any]
    is_expected: bool = False
    """Whether an assertion has expected it."""

    @property
    def topic(self) -> str:
        """The feature or the URI."""
        feature = LIST_CHANGED.get(self.method)
        return feature.value if feature else str(self.params.get("uri"))

    def __str__(self) -> str:
        params = json.dumps(self.params, ensure_ascii=False, sort_keys=True)
        return f"{self.at:6.3f} s  {self.method} {params:.300}{'  (expected)' if self.is_expected else ''}"


@dataclass(frozen=True)
class _Difference:
    """The names of the items that differ between two lists."""

    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return len(self.added) + len(self.removed) + len(self.updated)

    def __str__(self) -> str:
        parts = {"added": self.added, "removed": self.removed, "updated": self.updated}
        named = [f"{name} {', '.join(map(repr, sorted(found)))}" for name, found in parts.items() if found]
        return "; ".join(named) or "no difference"


@dataclass
class LiveClient:
    """One connected client, and what it was told."""

    label: str
    client: Client = field(init=False)
    """The client of the SDK, for requests."""
    frames: list[Frame] = field(default_factory=list)
    """All notifications of changes, in their order."""
    uris: frozenset[str] = frozenset()
    """The URIs that it has subscribed to."""
    has_marker: bool = False
    _lists: dict[Feature, dict[str, Any]] = field(default_factory=dict)
    _markers: int = 0
    _started: float = field(default_factory=time.monotonic)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _stream: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_modern(self) -> bool:
        return self.client.protocol_version in MODERN_PROTOCOL_VERSIONS

    def unexpected(self, topic: str | None = None) -> list[Frame]:
        """Return the notifications that no assertion has expected yet."""
        return [frame for frame in self.frames if not frame.is_expected and topic in (None, frame.topic)]

    def report(self) -> str:
        """Return the notifications as text, one per line."""
        shown = [f"    {frame}" for frame in self.frames[-_SHOWN:]]
        return "\n".join([f"  {self.label} got {len(self.frames) or 'no'} notifications of changes", *shown])

    async def _receive(self, message: Any) -> None:
        method = getattr(message, "method", None)
        if method not in LIST_CHANGED and method != UPDATED_METHOD:
            return
        params = message.params.model_dump(mode="json", by_alias=True, exclude_none=True) if message.params else {}
        if params.get("uri") == MARKER:
            self._markers += 1
        else:
            self.frames.append(Frame(time.monotonic() - self._started, method, params))
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def _on_response(self, response: httpx2.Response) -> None:
        """Note that the stream of a legacy session is open, or that the server has none."""
        if response.request.method == "GET":
            self._stream.set()

    async def _fetch(self, feature: Feature) -> dict[str, Any]:
        if getattr(self.client.server_capabilities, feature.value) is None:
            return {}
        items: dict[str, Any] = {}
        for name, method in list_methods(feature).items():
            try:
                async for page in read_pages(name, getattr(self.client, method.function)):
                    dumped = page.model_dump(mode="json", by_alias=True, exclude_unset=True)
                    items |= {str(item[method.key]): item for item in dumped[method.member]}
            except MCPError as error:
                if error.code != types.METHOD_NOT_FOUND:  # for example a server with resources and without templates
                    raise
        return items

    async def _difference(self, feature: Feature, items: dict[str, Any] | None = None) -> _Difference:
        """Compare a list with the one of the last assertion."""
        before = self._lists[feature]
        after = await self._fetch(feature) if items is None else items
        updated = {name for name in before.keys() & after.keys() if before[name] != after[name]}
        return _Difference(
            frozenset(after.keys() - before.keys()), frozenset(before.keys() - after.keys()), frozenset(updated)
        )

    async def _until_told(self, topic: str, expected: _Difference, at_most: int, barrier: _Barrier) -> str | None:
        """Wait for a notification after which the list differs as expected; return what is wrong at the deadline."""
        feature = _TOPICS.get(topic)
        items: dict[str, Any] = {}
        difference = _Difference()
        while True:
            arrived = self._arrived
            if self.unexpected(topic):
                if feature is None:
                    break
                items = await self._fetch(feature)
                difference = await self._difference(feature, items)
                if difference == expected or not expected.size:
                    break
            await arrived.wait()
        await barrier.wait()
        told = self.unexpected(topic)
        if len(told) > at_most:
            return f"it was told {len(told)} times, and at most {at_most} is expected"
        for frame in told:
            frame.is_expected = True
        if feature is not None:
            self._lists[feature] = items
        return None

    async def _explain(self, topic: str, expected: _Difference) -> str:
        """Say why the client was not told of a topic in time."""
        told = self.unexpected(topic)
        if topic not in _TOPICS:
            return f"it was not told of {topic}"
        feature = _TOPICS[topic]
        difference = await self._difference(feature)
        if told:
            return f"it was told of {topic}, but its list has: {difference}"
        capability = getattr(self.client.server_capabilities, topic)
        if difference.size:
            announced = capability is not None and capability.list_changed
            hint = "" if announced else f"; the server does not announce {topic}.listChanged either"
            return f"the list of {topic} has changed ({difference}), but the server sent no notification{hint}"
        return f"it was not told of {topic}, and the list of {topic} has not changed"

    async def _round_trip(self) -> None:
        """Wait for the answer to the cheapest request of the era."""
        if self.is_modern:
            await self.client.session.send_discover(self.client.protocol_version)
        else:
            await self.client.session.send_request(types.PingRequest(), types.EmptyResult)

    async def _until_marker(self, number: int) -> None:
        while self._markers < number:
            await self._arrived.wait()


class LiveClients:
    """The clients of `connect()`."""

    def __init__(self, clients: dict[Era, LiveClient], live: Any) -> None:
        self._clients = clients
        self._live = live

    def __iter__(self) -> Iterator[LiveClient]:
        return iter(self._clients.values())

    def __getitem__(self, era: Era) -> LiveClient:
        return self._clients[era]

    async def call(self, name: str, arguments: dict[str, Any] | None = None) -> types.CallToolResult:
        """Call a tool of the server through one of the clients."""
        return await next(iter(self)).client.call_tool(name, arguments)

    def report(self) -> str:
        """Return the notifications of all clients as text."""
        return "\n".join(client.report() for client in self)

    async def assert_told(
        self,
        topic: str,
        *,
        added: Names = (),
        removed: Names = (),
        updated: Names = (),
        at_most: int | None = None,
        within: float = DEADLINE,
    ) -> None:
        """Assert that each client is told of a topic: "tools", "prompts", "resources", or a URI of `connect(uris=…)`.

        With names, the list must then differ in exactly these items from the list at the last assertion. A client may
        be told once for each name, or `at_most` times. `within` is the deadline in seconds.
        """
        __tracebackhide__ = True
        expected = _Difference(*map(_names, (added, removed, updated)))
        if topic not in _TOPICS and (expected.size or any(topic not in client.uris for client in self)):
            raise TidingsError(
                f"{topic!r} is not a topic of these clients; give tools, prompts or resources with names, or a URI of "
                "connect(…, uris=[…]) without"
            )
        most = at_most or max(expected.size, 1)
        barrier = self._barrier()
        clients = list(self)

        async def wait(client: LiveClient) -> str | None:
            try:
                async with asyncio.timeout(within):
                    return await client._until_told(topic, expected, most, barrier)
            except TimeoutError:
                return await client._explain(topic, expected)

        problems = await asyncio.gather(*map(wait, clients))
        if any(problems):
            what = f"{topic}: {expected}" if expected.size else topic
            self._fail(f"not every client was told, within {within:g} s, of {what}", clients, problems)

    async def assert_silent(self, *, quiet: float = QUIET) -> None:
        """Assert that no client is told of anything, but for what the assertions before this one have expected.

        Of a server that is not a `Live`, `quiet` seconds without a notification count as silence.
        """
        __tracebackhide__ = True
        clients = list(self)
        await self._barrier().wait()
        problems = await asyncio.gather(*[self._explain_unexpected(client, quiet) for client in clients])
        if any(problems):
            self._fail("a client was told of something, and the test expects silence", clients, problems)

    async def _explain_unexpected(self, client: LiveClient, quiet: float) -> str | None:
        if not client.has_marker:
            with suppress(TimeoutError):
                async with asyncio.timeout(quiet):
                    while not client.unexpected():
                        await client._arrived.wait()
        reasons = []
        for topic in dict.fromkeys(frame.topic for frame in client.unexpected()):
            if topic not in _TOPICS:
                reasons.append(f"it was told of {topic}")
            elif (difference := await client._difference(_TOPICS[topic])).size:
                reasons.append(f"it was told of {topic}, which changed: {difference}")
            else:
                reasons.append(f"it was told of {topic}, whose list has not changed")
        return "; ".join(reasons) or None

    def _barrier(self) -> _Barrier:
        return _Barrier(list(self), self._live)

    def _fail(self, summary: str, clients: list[LiveClient], problems: list[str | None]) -> None:
        __tracebackhide__ = True
        found = [
            f"  {client.label}: {problem or 'as expected'}" for client, problem in zip(clients, problems, strict=True)
        ]
        raise NotificationError("\n".join([summary, *found, self.report()]))


class _Barrier:
    """Waits until each client has received what was sent before, as far as that can be known. It is used once."""

    def __init__(self, clients: list[LiveClient], live: Any) -> None:
        self._clients = clients
        self._live = live
        self._waiting: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Pass the barrier, which is the same for all that wait."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._pass())
        await asyncio.shield(self._waiting)

    async def _pass(self) -> None:
        numbers = [client._markers + 1 for client in self._clients]
        if any(client.has_marker for client in self._clients):
            self._live.resources.updated(MARKER)
        for client, number in zip(self._clients, numbers, strict=True):
            try:
                async with asyncio.timeout(DEADLINE):
                    await client._round_trip()
                    if client.has_marker:
                        await client._until_marker(number)
            except TimeoutError:
                raise TidingsError(
                    f"the {client.label} got no answer and no notification of {MARKER} within {DEADLINE:g} s"
                ) from None


def _names(given: Names) -> frozenset[str]:
    return frozenset([given] if isinstance(given, str) else given)


@asynccontextmanager
async def connect(
    target: Any,
    *,
    eras: Sequence[Era] = ("modern", "legacy"),
    over: Literal["http", "memory"] = "http",
    uris: Sequence[str] = (),
    headers: dict[str, str] | None = None,
    path: str = "/mcp",
) -> AsyncIterator[LiveClients]:
    """Connect one client per era, which listen to all lists and to the contents of `uris`.

    `target` is a `Live`, an `MCPServer`, a low-level `Server`, a `FastMCP`, an ASGI app that serves MCP at `path`, or
    the URL of a server that runs already. Over "http", a server is served on a free port of this machine, in the event
    loop of the test. Over "memory", the clients are connected without HTTP.
    """
    if unknown := {*eras} - {*get_args(Era)}:
        raise TidingsError(f"{unknown.pop()!r} is no era; give some of {', '.join(get_args(Era))}")
    if over not in ("http", "memory"):
        raise TidingsError(f"the clients can be connected over 'http' or 'memory', not over {over!r}")
    live = target if hasattr(getattr(target, "resources", None), "updated") else None
    opened: asyncio.Future[LiveClients] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    async def keep_open() -> None:
        async with AsyncExitStack() as stack:
            server: Any = target
            if over == "memory":
                server = live.server if live is not None else target
            elif not isinstance(target, str):
                port = await stack.enter_async_context(_serving(_app_of(target)))
                server = f"http://127.0.0.1:{port}{path}"
            clients: dict[Era, LiveClient] = {}
            for era in eras:
                client = _client(era, over, server, headers, uris, live is not None)
                clients[era] = await stack.enter_async_context(client)
            opened.set_result(LiveClients(clients, live))
            await ended.wait()

    # A task of its own: the task groups of the SDK would wrap an error of the test in an exception group.
    keeping = asyncio.create_task(keep_open())
    try:
        waited: list[asyncio.Future[Any]] = [keeping, opened]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            error = keeping.exception()
            assert error is not None
            raise first_error(error) from None
        yield opened.result()
    finally:
        ended.set()
        if not opened.done():  # not connected: the caller was cancelled, for example by a timeout
            keeping.cancel()
        await asyncio.wait([keeping])


def _app_of(target: Any) -> Any:
    for name in ("http_app", "streamable_http_app"):
        if make := getattr(target, name, None):
            return make()
    if not callable(target):
        raise TidingsError(f"{type(target).__name__} is not a server, an ASGI app or a URL")
    return target


@asynccontextmanager
async def _client(
    era: Era, over: str, server: Any, headers: dict[str, str] | None, uris: Sequence[str], is_live: bool
) -> AsyncIterator[LiveClient]:
    found = LiveClient(f"{era} client over {over}")
    async with AsyncExitStack() as stack:
        is_http = isinstance(server, str)
        if is_http:
            http = make_http_client(
                server,
                headers=headers,
                timeout=httpx2.Timeout(30.0, read=None),  # a stream may be silent for long
                event_hooks={"response": [found._on_response]},
            )
            server = streamable_http_client(server, http_client=await stack.enter_async_context(http))
        mode: Any = "auto" if era == "modern" else "legacy"
        client = Client(server, mode=mode, message_handler=found._receive, cache=None)
        found.client = await stack.enter_async_context(client)
        if found.is_modern != (era == "modern"):
            raise NotSupported(
                f"the server does not serve {era} clients; name those that it serves: connect(…, eras=…)"
            )
        async with asyncio.timeout(DEADLINE):
            if found.is_modern:
                await _listen(found, stack, uris, is_live)
            else:
                await _subscribe(found, uris, is_live)
                if is_http:
                    await found._stream.wait()
            for feature in Feature:
                found._lists[feature] = await found._fetch(feature)
        yield found


async def _listen(found: LiveClient, stack: AsyncExitStack, uris: Sequence[str], is_live: bool) -> None:
    stream = await stack.enter_async_context(
        found.client.listen(
            tools_list_changed=True,
            prompts_list_changed=True,
            resources_list_changed=True,
            resource_subscriptions=[*uris, MARKER] if is_live else [*uris],
        )
    )
    granted = set(stream.honored.resource_subscriptions or ())
    if refused := set(uris) - granted:
        raise NotSupported(
            f"the server does not grant the {found.label} a subscription to {', '.join(sorted(refused))}"
        )
    found.uris, found.has_marker = frozenset(uris), MARKER in granted


async def _subscribe(found: LiveClient, uris: Sequence[str], is_live: bool) -> None:
    for uri in uris:
        await found.client.session.send_request(_subscribe_request(uri), types.EmptyResult)
    found.uris = frozenset(uris)
    if is_live:
        with suppress(MCPError):  # a server without resources
            await found.client.session.send_request(_subscribe_request(MARKER), types.EmptyResult)
            found.has_marker = True


def _subscribe_request(uri: str) -> types.SubscribeRequest:
    return types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uri))


class _Server(uvicorn.Server):
    """A server that leaves the signals to the test runner, and says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def _serving(app: Any) -> AsyncIterator[int]:
    """Serve an ASGI app on a free port of this machine."""
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = _Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = asyncio.create_task(server.serve([listener]))
        ready = asyncio.create_task(server.ready.wait())
        try:
            await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
                raise TidingsError("the server did not start; its log says why")
            yield listener.getsockname()[1]
        finally:
            ready.cancel()
            server.should_exit = True
            await running
