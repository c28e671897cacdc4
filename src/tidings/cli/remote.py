"""A connection to a running server, for commands that are clients. It supports modern and legacy servers.

Import this module only when a command connects, because it imports the SDK.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import mcp_types as types
import typer
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import RootModel

from tidings.cli.auth import TOKEN_VARIABLE
from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.runtime.shutdown import exit_process

__all__ = ["Remote", "Unreachable", "bearer_headers", "check_url", "connect", "make_http_client", "run"]

Result = TypeVar("Result")

_TIMEOUT = 20.0
"""Seconds for one answer."""

_CLOSE_TIMEOUT = 2.0
"""Seconds for an interrupted command to close its connections."""

_POLL = 2.0
"""Seconds between two requests if the server sends no notification of some changes."""


class Unreachable(TidingsError):
    """An error that may be temporary: the server does not answer."""


def run(work: Coroutine[Any, Any, Result], close_timeout: float = _CLOSE_TIMEOUT) -> Result:
    """Run a coroutine. Raise the first error of an exception group, and exit with status 130 on Ctrl-C."""
    try:
        return asyncio.run(_cancel_on_interrupt(work, close_timeout))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        raise next(_flatten(group)) from None


async def _cancel_on_interrupt(work: Coroutine[Any, Any, Result], close_timeout: float) -> Result:
    """Cancel on Ctrl-C. Exit after a timeout if a connection that breaks at that moment ignores the cancellation."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        task.cancel()
        loop.call_later(close_timeout, exit_process, 130)

    # Windows has no such handler, and only the main thread gets signals. Otherwise asyncio's default applies.
    with suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, interrupt)
    return await work


class Remote:
    """A connection to a server."""

    def __init__(self, url: str, client: Client) -> None:
        self._url = url
        self._client = client
        self.changed = asyncio.Event()
        """Set on each notification, and when the stream of notifications ends."""
        self.is_lost = False
        """Whether that stream has ended."""
        self._is_granted_all = True
        """Whether the server granted all URIs of `watch`."""

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        """Send any request and return its result."""
        request: Any = types.Request[dict[str, Any], str](method=method, params=params)
        try:
            async with asyncio.timeout(_TIMEOUT):
                answer = await self._client.session.send_request(request, RootModel[dict[str, Any]])
        except TimeoutError:
            raise Unreachable(f"{self._url} did not answer within {_TIMEOUT:g} s") from None
        except MCPError as error:
            if error.code == types.METHOD_NOT_FOUND:
                raise TidingsError(
                    f"{self._url} does not support {method}; it runs without Tidings, or with an older version"
                ) from None
            if error.code == types.CONNECTION_CLOSED:
                raise Unreachable(f"{self._url} closed the connection") from None
            raise TidingsError(f"{self._url}: {one_line(error.message)}") from None
        return answer.root

    @asynccontextmanager
    async def watch(self, uris: list[str]) -> AsyncIterator[None]:
        """Set `changed` on each change of a list, and of these URIs if the server grants them."""
        async with AsyncExitStack() as stack:
            if self._client.protocol_version in MODERN_PROTOCOL_VERSIONS:
                listening = self._client.listen(
                    tools_list_changed=True,
                    prompts_list_changed=True,
                    resources_list_changed=True,
                    resource_subscriptions=uris,
                )
                subscription = await stack.enter_async_context(listening)
                granted = subscription.honored
                self._is_granted_all = set(uris) <= set(granted.resource_subscriptions or ())
                # A stream without any granted topic ends immediately, although the server still runs.
                if any(value for _, value in granted):
                    task = asyncio.create_task(self._listen(subscription))
                    stack.callback(task.cancel)
            else:
                # A legacy session gets notifications of lists without a subscription.
                for uri in uris:
                    try:
                        await self.request("resources/subscribe", uri=uri)
                    except TidingsError:  # denied, or the server supports no patterns
                        self._is_granted_all = False
            yield

    async def wait(self) -> None:
        """Wait for a notification, or for at most `_POLL` if the server sends no notification of some changes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._is_granted_all else _POLL):
                await self.changed.wait()

    async def _listen(self, events: Any) -> None:
        with suppress(SubscriptionLost):
            async for _ in events:
                self.changed.set()
        self.is_lost = True
        self.changed.set()


@asynccontextmanager
async def connect(url: str, token: str | None, headers: Mapping[str, str] | None = None) -> AsyncIterator[Remote]:
    last_status: int | None = None

    async def save_status(response: httpx2.Response) -> None:
        nonlocal last_status
        last_status = response.status_code

    remote: Remote | None = None

    async def on_message(message: object) -> None:
        if remote is not None:
            remote.changed.set()

    check_url(url)
    headers = bearer_headers(token) | dict(headers or {})
    http = make_http_client(
        headers=headers, timeout=httpx2.Timeout(_TIMEOUT, read=None), event_hooks={"response": [save_status]}
    )
    try:
        async with (
            http,
            Client(streamable_http_client(url, http_client=http), cache=None, message_handler=on_message) as client,
        ):
            remote = Remote(url, client)
            yield remote
    except BaseException as error:
        if remote is not None:
            raise
        for each in _flatten(error):
            # ValueError: the SDK can't decode the answer. RuntimeError: its protocol version is unknown.
            if isinstance(each, httpx2.HTTPError | OSError | MCPError | ValueError | RuntimeError):
                raise _explain(url, each, last_status, has_token=bool(token)) from None
        raise


def make_http_client(**options: Any) -> httpx2.AsyncClient:
    try:
        return httpx2.AsyncClient(**options)
    except (ValueError, ImportError) as error:
        raise TidingsError(f"the proxy that the environment names can't be used: {error}") from None


def bearer_headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def check_url(url: str) -> None:
    try:
        parsed = httpx2.URL(url)
        urlsplit(url)  # refuses some that httpx2 accepts, such as http://[
    except (httpx2.InvalidURL, ValueError) as error:
        raise TidingsError(f"{url} is not a URL: {error}") from None
    if not parsed.host or not 0 < (parsed.port or 80) < 65536:
        raise TidingsError(f"{url} is not a URL of a server; give one like http://127.0.0.1:8765/mcp")


def _explain(url: str, error: Exception, status: int | None, *, has_token: bool) -> TidingsError:
    if status in (401, 403):
        refusal = "does not accept this token" if has_token else "requires a token"
        return TidingsError(f"{url} {refusal}; give one with --auth-token-file FILE, or {TOKEN_VARIABLE}")
    if status is not None and status >= 500:  # for example a proxy whose server is down
        return Unreachable(f"{url} answered {status}; the server is not available at the moment")
    if status is not None and status >= 400:
        return TidingsError(f"{url} answered {status}: this is not an MCP endpoint; the usual path is /mcp")
    return Unreachable(f"{url} can't be reached: {one_line(str(error) or type(error).__name__, 200)}")


def _flatten(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _flatten(each)
    else:
        yield error
