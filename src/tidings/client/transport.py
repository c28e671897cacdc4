"""The target of a mirror as a `Client` of the SDK, on a transport that reports what the SDK does not say.

The SDK says neither that the stream of a legacy session is open or has ended, nor that the server has forgotten the
session, nor that the process of a stdio server has ended.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

import anyio
import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tidings.errors import TidingsError
from tidings.wire.http import make_http_client

__all__ = ["Observer", "Target", "describe", "make_client", "observe"]

Target: TypeAlias = Any
"""A URL, a stdio command (a text or a list), a `Client` of the SDK, a function that returns a new one, or anything else
that the `Client` accepts."""

_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
"""As the SDK has it. A stream on which nothing arrives for so long, not even a heartbeat, may be dead."""


class Observer(Protocol):
    def fail(self, error: Exception) -> None:
        """Note that the connection is lost."""

    def stream_opened(self) -> None:
        """Note that a GET stream of a legacy session is open."""

    def stream_ended(self) -> None:
        """Note that a GET stream was closed. The SDK opens that for notifications again, or gives up after two
        attempts."""


def make_client(target: Target) -> Client:
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


def observe(server: Any, headers: Mapping[str, str] | None, observer: Observer) -> Any:
    """Return what a `Client` connects to: a transport for a URL or a command, otherwise the server itself."""
    if isinstance(server, str):
        return _http_transport(server, headers, observer)
    if isinstance(server, StdioServerParameters):
        return _stdio_transport(server, observer)
    return server


@asynccontextmanager
async def _http_transport(url: str, headers: Mapping[str, str] | None, observer: Observer) -> AsyncIterator[Any]:
    async with (
        make_http_client(url, partial(_ObservedHttpClient, observer), headers=headers, timeout=_TIMEOUT) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


class _ObservedHttpClient(httpx2.AsyncClient):
    def __init__(self, observer: Observer, **options: Any) -> None:
        super().__init__(**options)
        self._observer = observer

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        is_stream = request.method == "GET"
        try:
            response = await super().send(request, **options)
        except httpx2.TransportError as error:
            if is_stream:
                self._observer.fail(error)
            raise
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            self._observer.fail(ConnectionError("the server no longer knows the session"))
        elif is_stream and response.status_code == 200:
            response.stream = _ObservedStream(response.stream, self._observer)
            self._observer.stream_opened()
        elif is_stream and response.status_code >= 400 and response.status_code != 405:  # 405: there is no stream
            self._observer.fail(ConnectionError(f"the server answered {response.status_code}"))
        return response


class _ObservedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, observer: Observer) -> None:
        self._stream = stream
        self._observer = observer

    def __aiter__(self) -> AsyncIterator[bytes]:
        chunks: AsyncIterator[bytes] = self._stream.__aiter__()
        return chunks

    async def aclose(self) -> None:
        self._observer.stream_ended()
        await self._stream.aclose()


@asynccontextmanager
async def _stdio_transport(command: StdioServerParameters, observer: Observer) -> AsyncIterator[Any]:
    async with stdio_client(command) as (reader, writer), anyio.create_task_group() as tasks:
        send, receive = anyio.create_memory_object_stream[Any](0)

        async def forward() -> None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the client was closed
                async with send:
                    async for message in reader:
                        await send.send(message)
            observer.fail(ConnectionError("the process of the server ended"))

        tasks.start_soon(forward)
        yield receive, writer
        tasks.cancel_scope.cancel()
