"""A connection to a running server, for commands that are clients. It supports modern and legacy servers.

Import this module only when a command connects: the HTTP client takes a while to import.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
import typer

from tidings.cli.auth import TOKEN_VARIABLE
from tidings.core.model import Feature, topics_json
from tidings.core.redact import one_line
from tidings.errors import TidingsError, first_error
from tidings.runtime.shutdown import exit_process
from tidings.wire.http import HttpClientSession
from tidings.wire.methods import METHOD_NOT_FOUND, SUBSCRIBE
from tidings.wire.session import Era, Stream, Unanswered, as_dict

__all__ = ["Remote", "Unreachable", "bearer_headers", "check_url", "connect", "run"]

Result = TypeVar("Result")

_TIMEOUT = 20.0
"""Seconds for one answer."""

_ERAS: tuple[Era, ...] = ("modern", "legacy")

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
        raise first_error(group) from None


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

    def __init__(self, url: str, session: HttpClientSession) -> None:
        self._url = url
        self._session = session
        self._stream: Stream | None = None
        self._is_granted_all = True
        """Whether the server sends notifications of all URIs of `watch`."""

    @property
    def is_lost(self) -> bool:
        """Whether the stream of notifications has ended."""
        return self._stream is not None and self._stream.is_ended

    async def request(self, method: str, **params: Any) -> dict[str, Any]:
        """Send any request and return its result."""
        given = {name: value for name, value in params.items() if value is not None}
        try:
            frame = await self._session.request(method, **msgspec.to_builtins(given))
        except Unanswered as error:
            raise Unreachable(f"{self._url}: {error}") from None
        refusal = as_dict(frame.message.get("error"))
        if refusal.get("code") == METHOD_NOT_FOUND:
            raise TidingsError(
                f"{self._url} does not support {method}; it runs without Tidings, or with an older version"
            )
        if frame.result is None:
            reason = refusal.get("message", f"the result of {method} is not an object")
            raise TidingsError(f"{self._url}: {one_line(str(reason))}")
        return frame.result

    async def watch(self, uris: list[str]) -> None:
        """Ask for a notification of each change of a list, and of these URIs if the server grants them."""
        if self._session.era == "modern":
            stream = await self._session.listen(topics_json(Feature, uris))
            self._is_granted_all = set(uris) <= set(stream.granted.get("resourceSubscriptions") or ())
            # A stream without any granted topic ends immediately, although the server still runs.
            is_open = any(stream.granted.values())
        else:
            # A legacy session gets notifications of lists without a subscription.
            await self._session.open_stream()
            stream = self._session.inbox
            is_open = stream.status == 200
            for uri in uris:
                try:
                    await self.request(SUBSCRIBE, uri=uri)
                except TidingsError:  # denied, or the server supports no patterns
                    self._is_granted_all = False
        self._stream = stream if is_open else None

    def clear(self) -> None:
        """Forget the notifications that have arrived."""
        if self._stream is not None:
            self._stream.frames.clear()

    async def wait(self) -> None:
        """Wait for a notification, or for at most `_POLL` if the server sends no notification of some changes."""
        if (stream := self._stream) is None:
            await asyncio.sleep(_POLL)
        else:
            limit = None if self._is_granted_all else _POLL
            await stream.until(lambda: stream.frames or stream.is_ended, limit)


@asynccontextmanager
async def connect(url: str, token: str | None, headers: Mapping[str, str] | None = None) -> AsyncIterator[Remote]:
    """Connect in the modern era, or else in the legacy one."""
    check_url(url)
    headers = bearer_headers(token) | dict(headers or {})
    problem, status = "", 0
    for era in _ERAS:
        async with HttpClientSession(url, era, _TIMEOUT, headers=headers) as session:
            try:
                await session.open()
                problem = f"it did not answer {session.first_method} as MCP demands"
            except Unanswered as error:
                problem = str(error)
            if session.supports_era:
                try:
                    yield Remote(url, session)
                finally:
                    await session.end()
                return
            status = session.status
        if not status or status in (401, 403) or status >= 500:
            break  # no other era helps
    raise _explain(url, problem, status, has_token=bool(token))


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


def _explain(url: str, problem: str, status: int, *, has_token: bool) -> TidingsError:
    if status in (401, 403):
        refusal = "does not accept this token" if has_token else "requires a token"
        return TidingsError(f"{url} {refusal}; give one with --auth-token-file FILE, or {TOKEN_VARIABLE}")
    if status >= 500:  # for example a proxy whose server is down
        return Unreachable(f"{url} answered {status}; the server is not available at the moment")
    if status >= 400:
        return TidingsError(f"{url} answered {status}: this is not an MCP endpoint; the usual path is /mcp")
    return Unreachable(f"{url} can't be reached: {problem}")
