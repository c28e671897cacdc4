"""Real clients of the board: the SDK's own, which write down what they are told.

Nothing here sleeps. To show that nothing more is said, a marker is: a change of a resource that every ear watches. What
is told of it comes after whatever was to be told before, on the same stream. Clients that see the bytes are in
`wires.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
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

from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, DELETED_METHOD, EXTENSION, SUBSCRIPTION_KEY

__all__ = [
    "DEADLINE",
    "KINDS",
    "LEGACY",
    "MARKER",
    "MODERN",
    "MUTED",
    "Ear",
    "Heard",
    "keys",
    "listening",
    "open_ear",
    "serving",
    "serving_all",
    "stdio_server",
]

BOARD = Path(__file__).with_name("board.py")
KINDS = ("mcpserver", "lowlevel", "fastmcp")
MODERN = "2026-07-28"
MUTED = "2025-03-26"
LEGACY = ("2024-11-05", MUTED, "2025-06-18", "2025-11-25")
MARKER = "board://marker"
DEADLINE = 60.0
"""Seconds for one wait, which may be for a process to start: far above the slowest, so that only what never comes meets
it."""

ENVIRONMENT = {
    # Which sources are tested; the SDK hands a child process next to nothing of the environment.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(BOARD.parents[2]), os.environ.get("PYTHONPATH")])),
    "FASTMCP_CHECK_FOR_UPDATES": "off",  # no test asks the network
    "FASTMCP_SHOW_SERVER_BANNER": "false",
    "FASTMCP_LOG_LEVEL": "WARNING",
}


# Processes


@contextmanager
def serving(kind: str, **options: Any) -> Iterator[str]:
    """A board on HTTP, in a process of its own; gives the URL of its endpoint."""
    with serving_all({kind: (kind, options)}) as urls:
        yield urls[kind]


@contextmanager
def serving_all(servers: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[dict[str, str]]:
    """Several boards, started side by side; gives their URLs by the names they have here."""
    with ExitStack() as stack:
        processes = {name: stack.enter_context(_process(kind, options)) for name, (kind, options) in servers.items()}
        yield {name: f"http://127.0.0.1:{_port(process)}/mcp" for name, process in processes.items()}


@contextmanager
def _process(kind: str, options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(BOARD), kind, "http", json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT) as process:
        try:
            yield process
        finally:
            process.terminate()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a board did not start; what it said is above"
    return int(line)


def stdio_server(kind: str, **options: Any) -> StdioServerParameters:
    """How a client starts a board of its own."""
    return StdioServerParameters(
        command=sys.executable, args=[str(BOARD), kind, "stdio", json.dumps(options)], env=ENVIRONMENT
    )


# What a client heard


@dataclass(frozen=True)
class Heard:
    """One notification, as the client's own handler got it."""

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
    def gist(self) -> str:
        """`tools added x`, or `content updated board://x`; several changes with commas between them."""
        topic = self.method.removeprefix("notifications/").removesuffix("/list_changed")
        if topic == "resources/updated":
            topic = "content"
            assert self.change.get("uri", self.uri) == self.uri
        changes = self.change.get("changes", [self.change])
        return ", ".join(f"{topic} {each.get('operation')} {each.get('name', each.get('uri'))}" for each in changes)


class _DeletedParams(BaseModel):
    model_config = ConfigDict(extra="allow")
    uri: str
    meta: dict[str, Any] = Field(default_factory=dict, alias="_meta")


@dataclass
class Ear:
    """A connected client. `heard` is what it was told since the last step."""

    version: str
    session: ClientSession = None  # type: ignore[assignment]  # set as soon as there is one
    client: Client | None = None
    heard: list[Heard] = field(default_factory=list)
    capabilities: types.ServerCapabilities | None = None
    _news: anyio.Event = field(default_factory=anyio.Event)
    _rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def is_modern(self) -> bool:
        return self.version == MODERN

    @property
    def gists(self) -> list[str]:
        return [each.gist for each in self.heard]

    async def take(self, message: Any) -> None:
        if isinstance(message, Exception):
            raise message
        params = message.params
        self.note(Heard(message.method, dict(params.meta or {}) if params else {}, getattr(params, "uri", None)))

    async def take_deleted(self, params: _DeletedParams) -> None:
        self.note(Heard(DELETED_METHOD, params.meta, params.uri))

    def note(self, heard: Heard) -> None:
        self.heard.append(heard)
        self._news.set()
        self._news = anyio.Event()

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        with anyio.move_on_after(DEADLINE) as scope:
            while not is_so():
                await self._news.wait()
        assert not scope.cancelled_caught, f"{self.version}: {what} did not come; heard {self.gists}"

    async def change(self, what: str, where: str = "request", **args: Any) -> Any:
        """Let the board do something; an error of it is returned as `Class: text`."""
        with anyio.fail_after(DEADLINE):
            result = await self.session.call_tool("change", {"what": what, "where": where, "args": args})
        assert not result.is_error, result
        content = result.content[0]
        assert isinstance(content, types.TextContent)
        answer = json.loads(content.text)
        return f"{answer['error']}: {answer['text']}" if "error" in answer else answer["result"]

    async def mark(self, *, streams: int = 1) -> None:
        """Wait until all that was to be told has been told."""
        nonce = f"{id(self)}-{next(self._rounds)}"
        before = self.gists.count(f"content updated {MARKER}")
        await self.change("updated", uri=MARKER, metadata={"round": nonce})
        await self.until(
            lambda: self.gists.count(f"content updated {MARKER}") >= before + streams, "the marker of this step"
        )

    async def settle(self, *expected: str, among: Iterable[Ear] = ()) -> list[Heard]:
        """Exactly these are told, and then nothing more before the marker."""
        for ear in (self, *among):
            await ear.until(lambda ear=ear: len(ear.heard) >= len(expected), ", ".join(expected))  # type: ignore[misc]
        await self.mark()
        told = self.heard[:]
        for ear in (self, *among):
            await ear.until(lambda ear=ear: ear.gists[-1:] == [f"content updated {MARKER}"], "the marker")  # type: ignore[misc]
            assert ear.gists == [*expected, f"content updated {MARKER}"], f"{ear.version} was told otherwise"
            ear.heard.clear()
        return told[:-1]

    async def step(self, what: str, *expected: str, where: str = "request", **args: Any) -> list[Heard]:
        """One change, and exactly what is told of it."""
        answer = await self.change(what, where, **args)
        assert not isinstance(answer, str) or answer == "later", answer
        return await self.settle(*expected)

    async def until_state(self, **expected: Any) -> None:
        """Ask the board until it is so: what a server notices of a client that left comes when it comes."""
        state: dict[str, Any] = {}
        with anyio.move_on_after(DEADLINE) as scope:
            while any(state.get(name) != value for name, value in expected.items()) or not state:
                state = await self.change("state")
        assert not scope.cancelled_caught, f"expected {expected}, and it is {state}"

    async def subscribe(self, uri: str) -> None:
        await self.request("resources/subscribe", uri=uri)

    async def unsubscribe(self, uri: str) -> None:
        await self.request("resources/unsubscribe", uri=uri)

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        """Any request at all, and its result as it came."""
        request: Any = types.Request[dict[str, Any], str](method=method, params=params)
        with anyio.fail_after(DEADLINE):
            result = await self.session.send_request(request, _Anything)
        return result.model_dump(by_alias=True)

    async def names(self, feature: str) -> list[str]:
        """The keys of a list, as they come."""
        items, _ = await self.listed(feature)
        return keys(items)

    async def listed(self, feature: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A list, and the version of its topic in the cursor that came with it."""
        method, member = _LISTS[feature]
        result = await self.request(method)
        topic = "resources" if feature == "templates" else feature
        return result[member], result["_meta"][CURSOR_KEY]["topics"][topic]

    @asynccontextmanager
    async def listen(self, *uris: str, tools: bool = True, prompts: bool = True, resources: bool = True) -> Any:
        """A listen stream, with the marker on it."""
        assert self.client is not None
        with anyio.fail_after(DEADLINE):
            stack = AsyncExitStack()
            subscription = await stack.enter_async_context(
                self.client.listen(
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
    """What tells the items of a list apart, in its order."""
    return [str(item.get("uri", item.get("uriTemplate", item["name"]))) for item in items]


@asynccontextmanager
async def open_ear(
    server: str | StdioServerParameters,
    version: str,
    *,
    extended: str | None = None,
    settings: dict[str, Any] | None = None,
    token: str | None = None,
    terminate: bool = True,
) -> AsyncIterator[Ear]:
    """A client of this version. `extended` says where it declares `dev.tidings/changes`, if at all; `settings` is what
    it says there."""
    ear = Ear(version)
    async with AsyncExitStack() as stack:
        transport: Any
        if isinstance(server, str):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30)))
            transport = streamable_http_client(server, http_client=http, terminate_on_close=terminate)
        else:
            transport = stdio_client(server)
        if version == MODERN:
            extensions = [_Extension(ear, settings or {})] if extended else None
            client = Client(transport, mode="auto", message_handler=ear.take, cache=None, extensions=extensions)
            ear.client = await stack.enter_async_context(client)
            ear.session = client.session
            assert client.protocol_version == MODERN
            ear.capabilities = client.server_capabilities
        else:
            reader, writer = await stack.enter_async_context(transport)
            bindings = [
                NotificationBinding(method=DELETED_METHOD, params_type=_DeletedParams, handler=ear.take_deleted)
            ]
            ear.session = ClientSession(reader, writer, message_handler=ear.take, notification_bindings=bindings)
            await stack.enter_async_context(ear.session)
            with anyio.fail_after(DEADLINE):
                ear.capabilities = await _shake_hands(ear.session, version, extended, settings or {})
        yield ear


async def _shake_hands(
    session: ClientSession, version: str, extended: str | None, settings: dict[str, Any]
) -> types.ServerCapabilities:
    """The handshake of a client whose newest version is this one: the SDK's own always offers its newest."""
    capabilities = types.ClientCapabilities.model_validate({extended: {EXTENSION: settings}} if extended else {})
    result = await session.send_request(
        types.InitializeRequest(
            params=types.InitializeRequestParams(
                protocol_version=version,
                capabilities=capabilities,
                client_info=types.Implementation(name="ear", version="1"),
            )
        ),
        types.InitializeResult,
    )
    assert result.protocol_version == version
    session.adopt(result)
    await session.send_notification(types.InitializedNotification())
    return result.capabilities


class _Extension(ClientExtension):
    identifier = EXTENSION

    def __init__(self, ear: Ear, settings: dict[str, Any]) -> None:
        self._ear = ear
        self._settings = settings

    def settings(self) -> dict[str, Any]:
        return self._settings

    def notifications(self) -> list[NotificationBinding[Any]]:
        return [NotificationBinding(method=DELETED_METHOD, params_type=_DeletedParams, handler=self._ear.take_deleted)]


@asynccontextmanager
async def listening(ear: Ear, *uris: str) -> AsyncIterator[Subscription | None]:
    """Watch every list, these URIs and the marker, however this era does it."""
    if ear.is_modern:
        async with ear.listen(*uris) as subscription:
            yield subscription
        return
    for uri in (*uris, MARKER):
        await ear.subscribe(uri)
    yield None
