"""A running server that a command asks, as a client of whatever era the server speaks."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tidings.cli.access import read_token
from tidings.core.redact import plain
from tidings.errors import TidingsError
from tidings.stdio.process_exit import leave

if TYPE_CHECKING:
    from mcp.client.client import Client

__all__ = ["Remote", "Target", "Token", "TokenFile", "Unreachable", "connected", "is_url", "run", "token_of"]

Result = TypeVar("Result")

Target = Annotated[str, typer.Argument(metavar="URL|DIR", help="A running server, or the folder of a workspace.")]
Token = Annotated[
    str | None,
    typer.Option(help="The bearer token that the server wants.", envvar="TIDINGS_AUTH_TOKEN", show_envvar=True),
]
TokenFile = Annotated[Path | None, typer.Option(help="The same, read from a file.", metavar="FILE", readable=False)]

_PATIENCE = 20.0
"""Seconds for one answer."""

_FAREWELL = 2.0
"""Seconds for what an interrupted command has to close."""

_LOOK = 2.0
"""Seconds between two looks at what the server does not tell of."""


class Unreachable(TidingsError):
    """Nobody answers there, for now."""


def is_url(target: str) -> bool:
    return target.lower().startswith(("http://", "https://"))


def token_of(token: str | None, file: Path | None) -> str | None:
    return read_token(token if file is None else None, file)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it. An error comes out as it is, whatever groups it was in, and Ctrl-C is no error."""
    import asyncio

    try:
        return asyncio.run(_interruptible(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        raise next(_leaves(group)) from None


async def _interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """End at Ctrl-C, also where a connection that breaks at that moment takes the interruption for its own."""
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        task.cancel()
        loop.call_later(_FAREWELL, leave, 130)

    # On Windows, and on a thread that no signal reaches, the loop's own way has to do.
    with suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, interrupt)
    return await work


class Remote:
    """A connection to a server."""

    def __init__(self, url: str, client: Client) -> None:
        import asyncio

        self._url = url
        self._client = client
        self.roused = asyncio.Event()
        """Set when the server says that something changed, and when it says nothing any more."""
        self.is_lost = False
        self._hears_all = True

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Any request at all, and its result as it came."""
        import asyncio

        import mcp_types as types
        from mcp.shared.exceptions import MCPError
        from pydantic import RootModel

        request: Any = types.Request[dict[str, Any], str](method=method, params=params)
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self._client.session.send_request(request, RootModel[dict[str, Any]])
        except TimeoutError:
            raise Unreachable(f"{self._url} did not answer within {_PATIENCE:g} s") from None
        except MCPError as error:
            if error.code == types.METHOD_NOT_FOUND:
                raise TidingsError(
                    f"{self._url} has no {method}; it is not served by Tidings, or by an older one"
                ) from None
            if error.code == types.CONNECTION_CLOSED:
                raise Unreachable(f"{self._url} closed the connection") from None
            raise TidingsError(f"{self._url}: {plain(error.message)}") from None
        return answer.root

    @asynccontextmanager
    async def watching(self, uris: list[str]) -> AsyncIterator[None]:
        """Let `roused` be set by every change of a list, and of these URIs as far as the server allows it."""
        import asyncio

        from mcp_types.version import MODERN_PROTOCOL_VERSIONS

        async with AsyncExitStack() as stack:
            if self._client.protocol_version in MODERN_PROTOCOL_VERSIONS:
                listening = self._client.listen(
                    tools_list_changed=True,
                    prompts_list_changed=True,
                    resources_list_changed=True,
                    resource_subscriptions=uris,
                )
                subscription = await stack.enter_async_context(listening)
                self._hears_all = set(uris) <= set(subscription.honored.resource_subscriptions or ())
                # One of which nothing is honoured ends at once, and says nothing of the server.
                if any(value for _, value in subscription.honored):
                    task = asyncio.create_task(self._listen(subscription))
                    stack.callback(task.cancel)
            else:
                # Lists are watched from the handshake on.
                for uri in uris:
                    try:
                        await self.ask("resources/subscribe", uri=uri)
                    except TidingsError:
                        # It may not, or the server knows no patterns; lists are watched all the same.
                        self._hears_all = False
            yield

    async def wait(self) -> None:
        """Until something has changed, or may have without being told of."""
        import asyncio

        try:
            async with asyncio.timeout(None if self._hears_all else _LOOK):
                await self.roused.wait()
        except TimeoutError:
            pass

    async def _listen(self, events: Any) -> None:
        from mcp.client.subscriptions import SubscriptionLost

        try:
            async for _ in events:
                self.roused.set()
        except SubscriptionLost:
            pass
        self.is_lost = True
        self.roused.set()


@asynccontextmanager
async def connected(url: str, token: str | None) -> AsyncIterator[Remote]:
    import httpx2
    from mcp.client.client import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.exceptions import MCPError

    statuses: list[int] = []

    async def note(response: httpx2.Response) -> None:
        statuses[:] = [response.status_code]

    remote: Remote | None = None

    async def take(message: object) -> None:
        if remote is not None:
            remote.roused.set()

    _check(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        http = httpx2.AsyncClient(
            headers=headers, timeout=httpx2.Timeout(_PATIENCE, read=None), event_hooks={"response": [note]}
        )
    except (ValueError, ImportError) as error:
        raise TidingsError(f"the environment names a proxy that can't be used: {error}") from None
    try:
        async with (
            http,
            Client(streamable_http_client(url, http_client=http), cache=None, message_handler=take) as client,
        ):
            remote = Remote(url, client)
            yield remote
    except BaseException as error:
        if remote is not None:
            raise
        for each in _leaves(error):
            if isinstance(each, httpx2.HTTPError | OSError | MCPError):
                raise _why_not(url, each, statuses, token) from None
        raise


def _check(url: str) -> None:
    """Refuse what no request can be sent to."""
    import httpx2

    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise TidingsError(f"{url} is no URL: {error}") from None
    if not parsed.host or not 0 < (parsed.port or 80) < 65536:
        raise TidingsError(f"{url} is no URL of a server; one is http://127.0.0.1:8765/mcp")


def _why_not(url: str, error: Exception, statuses: list[int], token: str | None) -> TidingsError:
    if statuses in ([401], [403]):
        said = "does not take this token" if token else "wants a token"
        return TidingsError(f"{url} {said}; give one with --auth-token-file FILE, or TIDINGS_AUTH_TOKEN")
    if statuses and statuses[0] >= 500:  # as a proxy says while there is no server behind it
        return Unreachable(f"{url} answered {statuses[0]}; it is not served for now")
    if statuses and statuses[0] >= 400:
        return TidingsError(f"{url} answered {statuses[0]}: it is no MCP endpoint; its path is as a rule /mcp")
    return Unreachable(f"{url} can't be reached: {error}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
