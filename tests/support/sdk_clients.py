"""Clients of the SDK that record the notifications of a board.

Nothing here sleeps. To show that no further notification comes, a test changes a marker: a resource that every client
watches. Its notification comes after all earlier ones on the same stream. Clients that read bytes are in
`wire_clients.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
from mcp.client.client import Client
from mcp.client.extension import ClientExtension, NotificationBinding
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import Subscription
from pydantic import BaseModel, ConfigDict, Field

from tests.support.forking import ENVIRONMENT, forked_command
from tests.support.messages import LATEST_LEGACY, MODERN
from tests.support.waiting import DEADLINE
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, DELETED_METHOD, EXTENSION, SUBSCRIPTION_KEY

__all__ = [
    "DEADLINE",
    "KINDS",
    "LEGACY",
    "MARKER",
    "MODERN",
    "MUTED",
    "ChangesExtension",
    "DeletedParams",
    "Received",
    "RecordingClient",
    "keys",
    "listening",
    "open_client",
    "serving",
    "serving_all",
    "stdio_server",
]

BOARD = Path(__file__).with_name("board.py")
KINDS = ("mcpserver", "lowlevel", "fastmcp")
MUTED = "2025-03-26"
LEGACY = ("2024-11-05", MUTED, "2025-06-18", LATEST_LEGACY)
MARKER = "board://marker"

# Processes


@contextmanager
def serving(kind: str, **options: Any) -> Iterator[str]:
    """Start a board on HTTP in a process of its own; yield the URL of its endpoint."""
    with serving_all({kind: (kind, options)}) as urls:
        yield urls[kind]


@contextmanager
def serving_all(servers: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[dict[str, str]]:
    """Start several boards in parallel; yield their URLs by name."""
    with ExitStack() as stack:
        processes = {name: stack.enter_context(_process(kind, options)) for name, (kind, options) in servers.items()}
        yield {name: f"http://127.0.0.1:{_port(process)}/mcp" for name, process in processes.items()}


@contextmanager
def _process(kind: str, options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = forked_command(BOARD, kind, "http", json.dumps(options))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a board did not start; its output is above"
    return int(line)


def stdio_server(kind: str, **options: Any) -> StdioServerParameters:
    """Return the parameters with which a client starts a board on stdio."""
    command, *arguments = forked_command(BOARD, kind, "stdio", json.dumps(options))
    return StdioServerParameters(command=command, args=arguments, env=ENVIRONMENT)


# Notifications


@dataclass(frozen=True)
class Received:
    """One notification, as the handler of the client got it."""

    method: str
    meta: dict[str, Any]
    uri: str | None = None

    @property
    def change(self) -> dict[str, Any]:
        change: dict[str, Any] = self.meta.get(CHANGE_KEY) or {}
        return change

    @property
    def subscription(self) -> str | int | None:
        return self.meta.get(SUBSCRIPTION_KEY)

    @property
    def summary(self) -> str:
        """`tools added x`, or `content updated board://x`; several changes are separated by commas."""
        topic = self.method.removeprefix("notifications/").removesuffix("/list_changed")
        if topic == "resources/updated":
            topic = "content"
            assert self.change.get("uri", self.uri) == self.uri
        changes = self.change.get("changes", [self.change])
        return ", ".join(f"{topic} {each.get('operation')} {each.get('name', each.get('uri'))}" for each in changes)


class DeletedParams(BaseModel):
    """The params of `notifications/resources/deleted`."""

    model_config = ConfigDict(extra="allow")
    uri: str
    meta: dict[str, Any] = Field(default_factory=dict, alias="_meta")


class ChangesExtension(ClientExtension):
    """`dev.tidings/changes`, as a client of the SDK declares it."""

    identifier = EXTENSION

    def __init__(self, settings: dict[str, Any], on_deleted: Callable[[DeletedParams], Awaitable[None]]) -> None:
        self._settings = settings
        self._on_deleted = on_deleted

    def settings(self) -> dict[str, Any]:
        return self._settings

    def notifications(self) -> list[NotificationBinding[Any]]:
        return [NotificationBinding(method=DELETED_METHOD, params_type=DeletedParams, handler=self._on_deleted)]


@dataclass
class RecordingClient:
    """A connected client. `received` has the notifications since the last step."""

    version: str
    session: ClientSession = None  # type: ignore[assignment]  # set as soon as there is one
    sdk_client: Client | None = None
    received: list[Received] = field(default_factory=list)
    capabilities: types.ServerCapabilities | None = None
    _arrival: anyio.Event = field(default_factory=anyio.Event)
    _markers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def is_modern(self) -> bool:
        return self.version == MODERN

    @property
    def summaries(self) -> list[str]:
        return [each.summary for each in self.received]

    async def take(self, message: Any) -> None:
        if isinstance(message, Exception):
            raise message
        params = message.params
        self.note(Received(message.method, dict(params.meta or {}) if params else {}, getattr(params, "uri", None)))

    async def take_deleted(self, params: DeletedParams) -> None:
        self.note(Received(DELETED_METHOD, params.meta, params.uri))

    def note(self, received: Received) -> None:
        self.received.append(received)
        self._arrival.set()
        self._arrival = anyio.Event()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(DEADLINE) as scope:
            while not condition():
                await self._arrival.wait()
        assert not scope.cancelled_caught, f"{self.version}: {what} did not come; received {self.summaries}"

    async def change(self, what: str, where: str = "request", **args: Any) -> Any:
        """Call a method of the board; return its result, or its error as `Class: text`."""
        with anyio.fail_after(DEADLINE):
            result = await self.session.call_tool("change", {"what": what, "where": where, "args": args})
        assert not result.is_error, result
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        answer = json.loads(content.text)
        return f"{answer['error']}: {answer['text']}" if "error" in answer else answer["result"]

    async def mark(self, *, streams: int = 1) -> None:
        """Change the marker, and wait for its notification."""
        nonce = f"{id(self)}-{next(self._markers)}"
        before = self.summaries.count(f"content updated {MARKER}")
        await self.change("updated", uri=MARKER, metadata={"round": nonce})
        await self.until(
            lambda: self.summaries.count(f"content updated {MARKER}") >= before + streams, "the marker of this step"
        )

    async def settle(self, *expected: str, among: Iterable[RecordingClient] = ()) -> list[Received]:
        """Check that exactly these notifications come before the marker."""
        for client in (self, *among):
            await client.until(lambda client=client: len(client.received) >= len(expected), ", ".join(expected))  # type: ignore[misc]
        await self.mark()
        told = self.received[:]
        marker = f"content updated {MARKER}"
        for client in (self, *among):
            await client.until(lambda client=client: client.summaries[-1:] == [marker], "the marker")  # type: ignore[misc]
            assert client.summaries == [*expected, marker], f"{client.version} received others"
            client.received.clear()
        return told[:-1]

    async def step(self, what: str, *expected: str, where: str = "request", **args: Any) -> list[Received]:
        """Make one change, and check that it causes exactly these notifications."""
        answer = await self.change(what, where, **args)
        assert not isinstance(answer, str) or answer == "later", answer
        return await self.settle(*expected)

    async def until_state(self, **expected: Any) -> None:
        """Wait until the board has this state."""
        state = await self.change("state")
        with anyio.move_on_after(DEADLINE) as scope:
            while any(state[name] != value for name, value in expected.items()):
                await anyio.sleep(0.01)  # the server may need this core
                state = await self.change("state")
        assert not scope.cancelled_caught, f"expected {expected}, got {state}"

    async def subscribe(self, uri: str) -> None:
        await self.request("resources/subscribe", uri=uri)

    async def unsubscribe(self, uri: str) -> None:
        await self.request("resources/unsubscribe", uri=uri)

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        """Send any request; return its result unchanged."""
        request: Any = types.Request[dict[str, Any], str](method=method, params=params)
        with anyio.fail_after(DEADLINE):
            result = await self.session.send_request(request, _Anything)
        return result.model_dump(by_alias=True)

    async def names(self, feature: str) -> list[str]:
        """Return the keys of a list, in its order."""
        items, _ = await self.listed(feature)
        return keys(items)

    async def listed(self, feature: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return a list, and the version of its topic in the cursor of the result."""
        method, member = _LISTS[feature]
        result = await self.request(method)
        topic = "resources" if feature == "templates" else feature
        return result[member], result["_meta"][CURSOR_KEY]["topics"][topic]

    @asynccontextmanager
    async def listen(self, *uris: str, tools: bool = True, prompts: bool = True, resources: bool = True) -> Any:
        """Open a listen stream that also watches the marker."""
        assert self.sdk_client is not None
        with anyio.fail_after(DEADLINE):
            stack = AsyncExitStack()
            subscription = await stack.enter_async_context(
                self.sdk_client.listen(
                    tools_list_changed=tools,
                    prompts_list_changed=prompts,
                    resources_list_changed=resources,
                    resource_subscriptions=[*uris, MARKER],
                )
            )
        async with stack:
            yield subscription


_LISTS = {
    "tools": ("tools/list", "tools"),
    "prompts": ("prompts/list", "prompts"),
    "resources": ("resources/list", "resources"),
    "templates": ("resources/templates/list", "resourceTemplates"),
}


class _Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


def keys(items: list[dict[str, Any]]) -> list[str]:
    """Return the keys of items, in order."""
    return [str(item.get("uri", item.get("uriTemplate", item["name"]))) for item in items]


@asynccontextmanager
async def open_client(
    server: str | StdioServerParameters,
    version: str,
    *,
    extended: str | None = None,
    settings: dict[str, Any] | None = None,
    token: str | None = None,
) -> AsyncIterator[RecordingClient]:
    """Connect a client of this version. `extended` is the capability in which it declares `dev.tidings/changes`, with
    `settings`."""
    client = RecordingClient(version)
    extension = ChangesExtension(settings or {}, client.take_deleted)
    async with AsyncExitStack() as stack:
        transport: Any
        if isinstance(server, str):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            # The servers use plain HTTP, and loading the certificates takes longer than a test.
            http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30), verify=False)
            await stack.enter_async_context(http)
            transport = streamable_http_client(server, http_client=http)
        else:
            transport = stdio_client(server)
        if version == MODERN:
            extensions = [extension] if extended else None
            sdk_client = Client(transport, mode="auto", message_handler=client.take, cache=None, extensions=extensions)
            client.sdk_client = await stack.enter_async_context(sdk_client)
            client.session = sdk_client.session
            assert sdk_client.protocol_version == MODERN
            client.capabilities = sdk_client.server_capabilities
        else:
            reader, writer = await stack.enter_async_context(transport)
            bindings = extension.notifications()
            client.session = ClientSession(reader, writer, message_handler=client.take, notification_bindings=bindings)
            await stack.enter_async_context(client.session)
            with anyio.fail_after(DEADLINE):
                client.capabilities = await _shake_hands(client.session, version, extended, settings or {})
        yield client


async def _shake_hands(
    session: ClientSession, version: str, extended: str | None, settings: dict[str, Any]
) -> types.ServerCapabilities:
    """Do the handshake with this version. The SDK's own handshake always offers the newest."""
    capabilities = types.ClientCapabilities.model_validate({extended: {EXTENSION: settings}} if extended else {})
    result = await session.send_request(
        types.InitializeRequest(
            params=types.InitializeRequestParams(
                protocol_version=version,
                capabilities=capabilities,
                client_info=types.Implementation(name="client", version="1"),
            )
        ),
        types.InitializeResult,
    )
    assert result.protocol_version == version
    session.adopt(result)
    await session.send_notification(types.InitializedNotification())
    return result.capabilities


@asynccontextmanager
async def listening(client: RecordingClient, *uris: str) -> AsyncIterator[Subscription | None]:
    """Watch every list, these URIs and the marker, in the way of the client's era."""
    if client.is_modern:
        async with client.listen(*uris) as subscription:
            yield subscription
        return
    for uri in (*uris, MARKER):
        await client.subscribe(uri)
    yield None
