"""Calls between replicas over core NATS: requests, progress, replies and cancellation. Nothing is stored.

A call fails with the connection, because its messages may be lost with it. The replica that handles a call sends a
heartbeat each second. The caller notices that the replica was killed when no heartbeat comes. The replica notices that
the caller was killed when NATS has no receiver for a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tidings.cluster.backend import CallFailed, CallHandler, CallTooLarge, NotDelivered, OnProgress
from tidings.cluster.nats_client import Client, Msg, NatsError
from tidings.cluster.nats_names import encode_name

__all__ = ["Calls"]

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL = 1.0
"""Seconds between two heartbeats of a replica that handles a call."""
SILENCE_LIMIT = 5.0
"""Seconds without a message after which the caller gives the replica up as lost."""

KIND = "Tidings-Kind"
TIMEOUT = "Tidings-Timeout"


class Calls:
    """Make and handle calls over one connection, until that is lost."""

    def __init__(
        self, client: Client, subject: str, replica: str, handler: CallHandler, on_undecodable: Callable[[], None]
    ) -> None:
        self._client = client
        self._subject = subject
        self._replica = replica
        self._handler = handler
        self._on_undecodable = on_undecodable
        self._inbox = client.new_inbox()
        self._count = 0
        self._callers: dict[str, asyncio.Queue[Msg | str]] = {}
        """The messages of each call in progress, by reply subject. A string is the reason why no message follows."""
        self._handling: dict[str, asyncio.Task[None]] = {}
        """The tasks that handle calls, by the reply subject of the caller."""

    async def open(self) -> None:
        replica = encode_name(self._replica)
        await self._client.subscribe(f"{self._inbox}.reply.*", cb=self._receive)
        await self._client.subscribe(f"{self._inbox}.gone.*", cb=self._caller_gone)
        await self._client.subscribe(f"{self._subject}.call.{replica}", cb=self._start)
        await self._client.subscribe(f"{self._subject}.cancel.{replica}", cb=self._cancel)

    async def close(self, reason: str) -> None:
        """Fail the calls that wait, and cancel the handlers."""
        for queue in self._callers.values():
            queue.put_nowait(reason)
        handling = dict(self._handling)
        for task in handling.values():
            task.cancel()
        await asyncio.gather(*handling.values(), return_exceptions=True)
        for reply in handling:
            await self._try_publish(reply, b"it has left the cluster", headers={KIND: "error"})

    async def call(self, replica: str, request: bytes, on_progress: OnProgress, timeout: float) -> bytes:  # noqa: ASYNC109 – as in the protocol
        if len(request) > self._client.max_payload - 1024:  # for the headers
            size = f"{len(request):,} bytes"
            raise CallTooLarge(f"the request has {size}, more than the NATS server accepts (max_payload)")
        self._count += 1
        reply = f"{self._inbox}.reply.{self._count}"
        queue = self._callers[reply] = asyncio.Queue()
        has_ended = False
        try:
            async with asyncio.timeout(timeout):
                await self._client.publish(
                    f"{self._subject}.call.{encode_name(replica)}", request, reply, {TIMEOUT: f"{timeout:.3f}"}
                )
                while True:
                    message = await _next(queue, replica)
                    headers = message.headers or {}
                    kind = headers.get(KIND)
                    if kind == "progress":
                        on_progress(message.data)
                    elif kind is not None and kind != "alive":
                        has_ended = True
                        if kind == "reply":
                            return message.data
                        raise CallFailed(f"the replica {replica} failed: {message.data.decode(errors='replace')}")
                    elif "Status" in headers:
                        has_ended = True
                        raise NotDelivered(f"the replica {replica} is gone")
        except TimeoutError:
            raise CallFailed(f"the replica {replica} did not reply within {timeout:g} s") from None
        except NatsError as error:
            raise CallFailed(f"the call to the replica {replica} was not sent: {error}") from error
        finally:
            del self._callers[reply]
            if not has_ended:
                await self._try_publish(f"{self._subject}.cancel.{encode_name(replica)}", reply.encode())

    async def _receive(self, message: Msg) -> None:
        queue = self._callers.get(message.subject)
        if queue is not None:
            queue.put_nowait(message)

    async def _start(self, message: Msg) -> None:
        try:
            timeout = float((message.headers or {})[TIMEOUT])
        except (KeyError, ValueError):
            timeout = 0.0
        if timeout <= 0 or not message.reply or message.reply in self._handling:
            self._on_undecodable()
            return
        task = asyncio.create_task(self._handle(message, timeout))
        self._handling[message.reply] = task
        task.add_done_callback(lambda _: self._handling.pop(message.reply, None))

    async def _cancel(self, message: Msg) -> None:
        task = self._handling.get(message.data.decode(errors="replace"))
        if task is not None:
            task.cancel()

    async def _caller_gone(self, message: Msg) -> None:
        """Cancel a handler: NATS has no receiver for its heartbeat."""
        number = message.subject.rpartition(".")[2]
        for task in self._handling.values():
            if task.get_name() == number:
                task.cancel()

    async def _handle(self, message: Msg, timeout: float) -> None:  # noqa: ASYNC109 – of the caller
        self._count += 1
        number = str(self._count)
        task = asyncio.current_task()
        assert task is not None
        task.set_name(number)
        progress: asyncio.Queue[bytes | None] = asyncio.Queue()
        sender = asyncio.create_task(self._send_progress(message.reply, number, progress))
        try:
            async with asyncio.timeout(timeout):
                kind, data = "reply", await self._handler(message.data, progress.put_nowait)
            if len(data) > self._client.max_payload - 1024:
                kind, data = (
                    "error",
                    f"the reply has {len(data):,} bytes, more than NATS accepts (max_payload)".encode(),
                )
        except TimeoutError:
            kind, data = "error", b"the handler did not return in time"
        except Exception as error:
            logger.exception("a call from another replica failed")
            kind, data = "error", str(error).encode(errors="replace")
        finally:
            progress.put_nowait(None)  # the sender is not cancelled, because nats-py may swallow a cancellation
            await sender
        await self._try_publish(message.reply, data, headers={KIND: kind})

    async def _send_progress(self, reply: str, number: str, progress: asyncio.Queue[bytes | None]) -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL):
                    data = await progress.get()
            except TimeoutError:
                await self._try_publish(reply, b"", f"{self._inbox}.gone.{number}", {KIND: "alive"})
            else:
                if data is None:
                    return
                await self._try_publish(reply, data, headers={KIND: "progress"})

    async def _try_publish(
        self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        try:
            await self._client.publish(subject, data, reply, headers)
        except NatsError:
            pass  # the connection is lost, or the progress is too large


async def _next(queue: asyncio.Queue[Msg | str], replica: str) -> Msg:
    try:
        async with asyncio.timeout(SILENCE_LIMIT):
            message = await queue.get()
    except TimeoutError:
        raise CallFailed(f"the replica {replica} has sent nothing for {SILENCE_LIMIT:g} s") from None
    if isinstance(message, str):
        raise CallFailed(message)
    return message
