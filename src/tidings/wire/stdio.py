"""A session with a process that it starts, of either era.

All messages share one pipe. Those that carry the id of a listen request belong to its stream.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

from tidings.core.frames import ACKNOWLEDGED_METHOD
from tidings.core.redact import one_line
from tidings.runtime.child import Child
from tidings.wire.methods import CANCELLED, DISCOVER
from tidings.wire.session import Era, Frame, Session, Stream, Unanswered
from tidings.wire.sse import MAX_MESSAGE

__all__ = ["StdioClientSession"]

_CLOSE_TIMEOUT = 5.0
"""Seconds for the process to exit when its input ends, and after SIGTERM."""


class StdioClientSession(Session):
    transport = "stdio"

    def __init__(self, command: Sequence[str], era: Era, timeout: float, **options: Any) -> None:
        super().__init__(era, timeout, **options)
        self._command = list(command)
        self._child: Child | None = None
        self._answers: dict[Any, asyncio.Future[Frame]] = {}
        self._unfinished: list[bytes] = []
        """The parts of the line that has not ended yet."""
        self._size = 0
        self._problem = "the process ended"
        """The reason why there are no more answers."""
        self._is_ended = False

    async def open(self) -> None:
        # It leads a group of its own, so that Ctrl-C does not reach it.
        self._child = await Child.start(self._command, on_output=self._read, grace=_CLOSE_TIMEOUT)
        await super().open()

    def _read(self, chunk: bytes) -> None:
        if self._is_ended:
            return
        first, *others = chunk.split(b"\n")
        self._unfinished.append(first)
        self._size += len(first)
        for part in others:
            line, self._unfinished, self._size = b"".join(self._unfinished), [part], len(part)
            self._receive(line)
        if self._size > MAX_MESSAGE:
            self._unfinished = []
            self._problem = f"the process sent a line of more than {MAX_MESSAGE >> 20} MB"
            self._end()
        if not chunk:
            asyncio.get_running_loop().call_soon(self._end)  # when the last line of stderr is read

    def _end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        for stream in (*self.streams, self.inbox):
            stream.end("the process closed its output")
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._ended())
                answer.exception()  # so that asyncio does not report it

    def _ended(self) -> Unanswered:
        return Unanswered(f"{self._problem}{self._last_error()}")

    def _last_error(self) -> str:
        lines = self._child.stderr.decode(errors="replace").splitlines() if self._child is not None else []
        return f": {one_line(lines[-1], 200)}" if lines else ""

    def _receive(self, line: bytes) -> None:
        frame = Frame(0, self.channel, "received", line)
        request_id = frame.message.get("id")
        stream = self._stream_of(frame)
        if stream is not None:
            stream.receive(line)
            if "id" in frame.message:
                stream.end("the server ended the subscription")
        elif not frame.method and isinstance(request_id, str | int | float) and request_id in self._answers:
            answer = self._answers.pop(request_id)
            received = self.record(self.channel, "received", line)
            if not answer.done():
                answer.set_result(received)
        else:
            self.inbox.receive(line)

    def _stream_of(self, frame: Frame) -> Stream | None:
        """Return the stream that a message belongs to, by its subscription id or as the response of the request."""
        found = frame.subscription if frame.method else frame.message.get("id")
        for stream in self.streams:
            if type(stream.request_id) is type(found) and stream.request_id == found:
                return stream
        # A wrong id must not look like a missing acknowledgement, so the most likely stream gets the message.
        is_acknowledgement = frame.method == ACKNOWLEDGED_METHOD
        likely = [stream for stream in self.streams if found is not None and str(stream.request_id) == str(found)]
        likely += [stream for stream in self.streams if is_acknowledgement and not stream.is_settled]
        return likely[0] if likely else None

    async def _write(self, data: bytes) -> None:
        if self._child is None or self._is_ended:
            raise self._ended()
        self._child.write(data + b"\n")
        try:
            async with asyncio.timeout(self.timeout):
                await self._child.until_written()
        except TimeoutError:
            raise Unanswered(f"the process did not read its input for {self.timeout:g} s") from None
        if self._child.is_input_closed:
            raise self._ended()

    async def _send(self, data: bytes, request_id: str | int) -> asyncio.Future[Frame]:
        """Send a request; return the future of its response."""
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        await self._write(data)
        return answer

    async def send_unrecorded(self, method: str, request_id: str) -> asyncio.Future[Frame]:
        """Send a request that is not recorded, because its id is very long."""
        return await self._send(self.encode(method, {}, request_id), request_id)

    async def request(self, method: str, **params: Any) -> Frame:
        request_id = self.next_id()
        data = self.encode(method, params, request_id)
        self.record(self.channel, "sent", data)
        answer = await self._send(data, request_id)
        try:
            async with asyncio.timeout(self.timeout):
                return await answer
        except TimeoutError:
            raise Unanswered(f"{method} was not answered within {self.timeout:g} s{self._last_error()}") from None

    async def notify(self, method: str, **params: Any) -> None:
        data = self.encode(method, params)
        self.record(self.channel, "sent", data)
        await self._write(data)

    async def _send_listen(self, stream: Stream, data: bytes) -> None:
        await self._write(data)

    async def cancel(self, stream: Stream) -> None:
        await self.notify(CANCELLED, requestId=stream.request_id)
        # When this is answered, the server has read the cancellation.
        stream.cancelled = (await self.request(DISCOVER)).time

    # The process

    def set_reading(self, is_reading: bool) -> None:
        """Stop reading what the process writes, or go on."""
        if self._child is not None:
            self._child.set_reading(is_reading)

    async def terminate(self, limit: float) -> bool:
        """Send SIGTERM. Return whether the process exits in time."""
        assert self._child is not None
        self._child.signal(signal.SIGTERM)
        await asyncio.wait([self._child.finished], timeout=limit)
        return self._child.finished.done()

    async def close(self) -> None:
        """Close the input of the process, and end it if it does not exit then."""
        if self._child is None:
            return
        self.set_reading(True)
        self._child.write(b"", closes=True)
        try:
            await asyncio.wait([self._child.finished], timeout=_CLOSE_TIMEOUT)
            self._child.stop()
            await self._child.wait()
        finally:  # also after a second Ctrl-C
            self._child.kill_now()
