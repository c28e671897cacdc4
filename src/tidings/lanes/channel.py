"""One streamed HTTP response that can be written to without waiting.

The writer itself drives the ASGI `send()` one step. Under uvicorn it completes there and then, so that nothing is
scheduled per stream and event. A `send()` that suspends (its reader is not reading) is handed to a task, with a
deadline; until it is done the channel is busy, and whoever wants to write waits in its mailbox.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, TypeAlias, cast

__all__ = ["Channel", "Message", "Receive", "Scope", "Send"]

logger = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


class Channel:
    """Whole chunks only, one at a time."""

    __slots__ = (
        "_deadline",
        "_limit",
        "_loop",
        "_owner",
        "_receive",
        "_send",
        "_task",
        "is_over",
        "on_free",
        "on_slow",
    )

    def __init__(self, send: Send, receive: Receive, limit: float, loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self._receive = receive
        self._limit = limit
        self._loop = loop
        self._owner = asyncio.current_task()
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.on_free: Callable[[], None] | None = None
        """Called when a write that had to wait is done."""
        self.on_slow: Callable[[], None] | None = None
        """Called when the reader did not read for longer than the limit; the connection is aborted then."""
        self.is_over = False

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    def write(self, chunk: bytes, *, is_last: bool = False) -> bool:
        """Write a chunk, unless busy or over. False if the reader has to be waited for: `on_free` is called then."""
        if self.is_over or self._task is not None:
            return False
        self.is_over = is_last
        coroutine = cast(
            "Coroutine[Any, Any, None]",
            self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last}),
        )
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            return True
        except Exception as error:  # a connection that broke: its own request task hears of it and cleans up
            logger.debug("writing to a stream failed: %r", error)
            self.is_over = True
            return True
        self._task = self._loop.create_task(self._finish(coroutine, waits_for))
        self._deadline = self._loop.call_later(self._limit, self._give_up)
        return False

    async def relay(self, send: Send, message: Message) -> None:
        """Let somebody else write a chunk of theirs, between ours."""
        while self._task is not None:
            await asyncio.wait({self._task})
        await send(message)

    def abort(self) -> None:
        """Drop the connection without waiting for what is still to be read."""
        self.is_over = True
        if self._task is not None:
            self._task.cancel()
        # Under uvicorn `receive` is a method of what holds the transport. Elsewhere, a request that ends before its
        # response makes the server close the connection.
        transport = getattr(getattr(self._receive, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()
        elif self._owner is not None and self._owner is not asyncio.current_task():
            self._owner.cancel()

    async def _finish(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        try:
            await _go_on(coroutine, waits_for)
        except Exception as error:  # as in write()
            logger.debug("writing to a stream failed: %r", error)
            self.is_over = True
        finally:
            self._task = None
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        if self.on_free is not None:
            self.on_free()

    def _give_up(self) -> None:
        self._deadline = None
        if self.on_slow is not None:
            self.on_slow()
        self.abort()


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Await the rest of a coroutine that has been driven to its first suspension."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(sent)
    except StopIteration:
        return
    finally:
        coroutine.close()
