"""Sessions with a process that the check starts, of both eras.

All messages share one pipe. Those that carry the id of a listen request belong to its stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tidings.core.frames import ACKNOWLEDGED_METHOD
from tidings.core.redact import one_line
from tidings.errors import TidingsError
from tidings.wire.session import (
    Era,
    Frame,
    Session,
    Stream,
    Transcript,
    Unanswered,
    decode,
    initialize_params,
    message_of,
    modern_params,
)

__all__ = ["StdioSession"]

_CHUNK = 1 << 16
_EXIT_TIMEOUT = 5.0
"""Seconds for the process to exit when its input ends, and after SIGTERM."""


class StdioSession(Session):
    transport = "stdio"

    def __init__(self, channel: str, transcript: Transcript, timeout: float, command: Sequence[str], era: Era) -> None:
        super().__init__(channel, transcript, timeout)
        self.era = era
        self.errors: deque[str] = deque(maxlen=20)
        """The last lines of its standard error."""
        self._command = list(command)
        self._answers: dict[Any, asyncio.Future[Frame]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._can_read = asyncio.Event()
        self._can_read.set()
        self.process: asyncio.subprocess.Process

    async def open(self) -> None:
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=_CHUNK,  # so that a paused session soon stops reading
                start_new_session=True,  # so that Ctrl-C does not reach it, and that all its processes can be ended
            )
        except OSError as error:
            raise TidingsError(f"{self._command[0]} can't be run: {error.strerror or error}") from None
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_errors())]
        if self.era == "modern":
            self.discovery = await self.request("server/discover")
        else:
            self.discovery = await self.request("initialize", **initialize_params())
            await self.notify("notifications/initialized")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        try:
            while True:
                await self._can_read.wait()
                chunk = await self.process.stdout.read(_CHUNK)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._receive(line)
                if not chunk:
                    break
        finally:
            for stream in (*self.streams, self.inbox):
                stream.end("the process closed its output")
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(Unanswered(f"the process ended{self._last_error()}"))

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(_CHUNK):
            self.errors.extend(chunk.decode(errors="replace").splitlines())

    def _last_error(self) -> str:
        return f": {one_line(self.errors[-1], 200)}" if self.errors else ""

    def _receive(self, line: bytes) -> None:
        try:
            message = decode(line)
        except ValueError:
            message = line.decode(errors="replace").rstrip()
        content = message if isinstance(message, dict) else {}
        stream = self._stream_of(content)
        if stream is not None:
            stream.receive(message)
            if "id" in content:
                stream.end("the server ended the subscription")
        elif "method" not in content and (answer := self._take_answer(content.get("id"))) is not None:
            frame = self.transcript.record(self.channel, "received", message)
            if not answer.done():
                answer.set_result(frame)
        else:
            self.inbox.receive(message)

    def _take_answer(self, request_id: Any) -> asyncio.Future[Frame] | None:
        return self._answers.pop(request_id, None) if isinstance(request_id, str | int) else None

    def _stream_of(self, message: dict[str, Any]) -> Stream | None:
        """Return the stream that a message belongs to, by its subscription id or as the response of the request."""
        frame = Frame(0, "", "received", message)
        found = frame.subscription if frame.method else message.get("id")
        # A wrong id must not look like a missing acknowledgement, so the most likely stream gets the message.
        waiting = [stream for stream in self.streams if not stream.is_settled]
        candidates = (
            *(stream for stream in self.streams if _is_same_id(stream.request_id, found)),
            *(stream for stream in self.streams if found is not None and str(stream.request_id) == str(found)),
            *(waiting if frame.method == ACKNOWLEDGED_METHOD else ()),
        )
        return next(iter(candidates), None)

    async def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(self.timeout):
                await self.process.stdin.drain()
        except TimeoutError:
            raise Unanswered(f"the process did not read its input for {self.timeout:g} s") from None
        except (OSError, RuntimeError):
            raise Unanswered(f"the process ended{self._last_error()}") from None

    def _params(self, params: dict[str, Any]) -> dict[str, Any]:
        return modern_params(params) if self.era == "modern" else params

    async def _send(self, message: dict[str, Any]) -> asyncio.Future[Frame]:
        """Send a request; return the future of its response."""
        if self._tasks[0].done():
            raise Unanswered(f"the process ended{self._last_error()}")
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[message["id"]] = answer
        await self._write(message)
        return answer

    async def send_unrecorded(self, method: str, request_id: str) -> asyncio.Future[Frame]:
        """Send a request that is not in the transcript, because its id is very long."""
        return await self._send(message_of(method, self._params({}), request_id))

    async def request(self, method: str, **params: Any) -> Frame:
        message = message_of(method, self._params(params), self.next_id())
        self.transcript.record(self.channel, "sent", message)
        answer = await self._send(message)
        try:
            async with asyncio.timeout(self.timeout):
                return await answer
        except TimeoutError:
            raise Unanswered(f"{method} was not answered within {self.timeout:g} s{self._last_error()}") from None

    async def notify(self, method: str, **params: Any) -> None:
        message = message_of(method, self._params(params))
        self.transcript.record(self.channel, "sent", message)
        await self._write(message)

    async def listen(self, requested: dict[str, Any], request_id: str | int | None = None) -> Stream:
        request_id = self.next_id() if request_id is None else request_id
        message = message_of("subscriptions/listen", modern_params({"notifications": requested}), request_id)
        stream = Stream(f"{self.channel}, stream {request_id!r}", self.transcript, request_id)
        stream.requested = requested
        stream.request = self.transcript.record(stream.channel, "sent", message)
        self.streams.append(stream)
        await self._write(message)
        await stream.until(lambda: stream.is_settled, self.timeout)
        return stream

    async def cancel(self, stream: Stream) -> None:
        await self.notify("notifications/cancelled", requestId=stream.request_id)
        await self.request("server/discover")  # when this is answered, the server has read the cancellation
        stream.cancelled = self.transcript.now()

    # The process

    def pause(self) -> None:
        """Stop reading what the process writes, after at most three chunks."""
        self._can_read.clear()

    def resume(self) -> None:
        self._can_read.set()

    async def terminate(self, limit: float) -> bool:
        """Send SIGTERM. Return whether the process exits in time."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self.process.wait()
                await asyncio.gather(*self._tasks)
        return self.process.returncode is not None

    async def close(self) -> None:
        """Close the input of the process, and end it if it does not exit then."""
        if not self._tasks:
            return
        self.resume()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            for number in (None, signal.SIGTERM):
                if number is not None:
                    self._kill_all(number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_TIMEOUT):
                        await self.process.wait()
                if self.process.returncode is not None:
                    break
        finally:  # also after a second Ctrl-C
            self._kill_all(signal.SIGKILL)  # and processes that it started, which hold its pipes
        await self.process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in self._answers.values():
            if answer.done() and not answer.cancelled():
                answer.exception()  # so that asyncio does not report it

    def _kill_all(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _is_same_id(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other
