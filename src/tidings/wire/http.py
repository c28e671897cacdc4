"""Sessions over Streamable HTTP, of both eras."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx2
from mcp.shared.inbound import encode_header_value

from tidings.core.redact import one_line, redact_uri
from tidings.errors import TidingsError
from tidings.wire.session import (
    MODERN,
    Frame,
    Session,
    Stream,
    Transcript,
    Unanswered,
    decode,
    initialize_params,
    message_of,
    messages_in,
    modern_params,
)
from tidings.wire.sse import read_events

__all__ = ["HttpSession", "LegacyHttp", "ModernHttp"]

_ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
_REOPEN_ATTEMPTS = 20
_REOPEN_PAUSE = 0.2
_END_TIMEOUT = 0.2
"""Seconds for a server to end the stream after its answer, so that the connection can be used again."""
_NAMES = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""The param that a modern request repeats in the header `Mcp-Name`."""
_VISIBLE_ASCII = re.compile(r"[!-~]+")


class HttpSession(Session):
    """A session of either era over HTTP. It has an HTTP client and connections of its own."""

    transport = "http"

    def __init__(
        self, channel: str, transcript: Transcript, timeout: float, url: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(channel, transcript, timeout)
        self.url = url
        self.headers = dict(headers)
        # Loading the certificates takes long, and plain HTTP needs none.
        verify = ssl.create_default_context() if url.startswith("https") else False
        try:
            self._http = httpx2.AsyncClient(verify=verify, timeout=httpx2.Timeout(timeout))
        except (ValueError, ImportError) as error:
            raise TidingsError(f"the proxy that the environment names can't be used: {error}") from None
        self._readers: dict[Stream, asyncio.Task[None]] = {}

    def _headers(self, method: str, params: Mapping[str, Any]) -> dict[str, str]:
        return {**_ACCEPT, **self.headers}

    def _params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return dict(params)

    async def request(self, method: str, **params: Any) -> Frame:
        request_id = self.next_id()
        response, messages = await self._post(message_of(method, self._params(params), request_id), params)
        for message in messages:
            if _is_answer(message, request_id):
                return self.transcript.record(self.channel, "received", message)
            self.inbox.receive(message)
        if not messages or response.status_code >= 400:
            self.transcript.record(self.channel, "received", _describe(response))
        raise Unanswered(f"{method} was answered with {_describe(response)}")

    async def notify(self, method: str, **params: Any) -> None:
        _, messages = await self._post(message_of(method, self._params(params)), params)
        for message in messages:
            self.inbox.receive(message)

    async def _post(self, message: dict[str, Any], params: Mapping[str, Any]) -> tuple[httpx2.Response, list[Any]]:
        """Send a message. Return the response, and the messages in its body. After the answer, wait `_END_TIMEOUT` for
        the end of a stream; the server need not end it."""
        method = message["method"]
        self.transcript.record(self.channel, "sent", message)
        messages: list[Any] = []
        answering: httpx2.Response | None = None
        request = self._http.stream("POST", self.url, json=message, headers=self._headers(method, params))
        try:
            async with asyncio.timeout(self.timeout) as deadline, request as response:
                if not _is_stream(response):
                    await response.aread()
                    return response, _parse(response)
                async for each in _read_messages(response):
                    messages.append(each)
                    if answering is None and "id" in message and _is_answer(each, message["id"]):
                        answering = response
                        deadline.reschedule(asyncio.get_running_loop().time() + _END_TIMEOUT)
                return response, messages
        except TimeoutError:
            problem = f"{method} was not answered within {self.timeout:g} s"
        except httpx2.HTTPError as error:
            problem = f"{method} failed: {one_line(str(error) or type(error).__name__, 200)}"
        except UnicodeError:  # a name or cursor of the server with half a surrogate pair
            problem = f"{method} can't be sent, because a text of the server is not valid Unicode"
        except httpx2.InvalidURL as error:
            raise TidingsError(f"{self.url} is not a URL: {error}") from None
        if answering is None:
            raise Unanswered(problem)
        return answering, messages

    def _start(self, stream: Stream, method: str, message: Any, headers: Mapping[str, str]) -> None:
        self._readers[stream] = asyncio.create_task(self._read(stream, method, message, headers))

    async def _read(self, stream: Stream, method: str, message: Any, headers: Mapping[str, str]) -> None:
        """Read a stream until it ends."""
        reason = "the server closed it"
        try:
            timeout = httpx2.Timeout(self.timeout, read=None)
            request = self._http.stream(method, self.url, json=message, headers=dict(headers), timeout=timeout)
            async with request as response:
                stream.open(response.status_code, response.headers)
                if not _is_stream(response):
                    await response.aread()
                    for each in _parse(response):
                        stream.receive(each)
                else:
                    async for each in _read_messages(response):
                        stream.receive(each)
        except (httpx2.HTTPError, UnicodeError) as error:
            reason = str(error) or type(error).__name__
        except asyncio.CancelledError:
            reason = "the client closed it"
            raise
        finally:
            stream.end(reason)

    def raw_request(self, method: str, request_id: str, **params: Any) -> bytes:
        """Return the bytes of a request, for a connection that the caller opens."""
        url = httpx2.URL(self.url)
        body = json.dumps(message_of(method, self._params(params), request_id)).encode()
        headers = {**self._headers(method, params), "Host": url.netloc.decode(), "Content-Length": str(len(body))}
        head = [f"POST {url.raw_path.decode()} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + body

    async def cancel(self, stream: Stream) -> None:
        if (reader := self._readers.pop(stream, None)) is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def close(self) -> None:
        for stream in list(self._readers):
            await self.cancel(stream)
        await self._http.aclose()


class ModernHttp(HttpSession):
    era = "modern"

    def _headers(self, method: str, params: Mapping[str, Any]) -> dict[str, str]:
        headers = {**super()._headers(method, params), "MCP-Protocol-Version": MODERN, "Mcp-Method": method}
        name = params.get(_NAMES.get(method, ""))
        if isinstance(name, str):
            headers["Mcp-Name"] = encode_header_value(name)
        return headers

    def _params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return modern_params(params)

    async def open(self) -> None:
        self.discovery = await self.request("server/discover")

    async def listen(self, requested: dict[str, Any], request_id: str | int | None = None) -> Stream:
        request_id = self.next_id() if request_id is None else request_id
        message = message_of("subscriptions/listen", modern_params({"notifications": requested}), request_id)
        stream = Stream(f"{self.channel}, stream {request_id!r}", self.transcript, request_id)
        stream.requested = requested
        stream.request = self.transcript.record(stream.channel, "sent", message)
        self.streams.append(stream)
        self._start(stream, "POST", message, self._headers("subscriptions/listen", {}))
        await stream.until(lambda: stream.is_settled, self.timeout)
        return stream


class LegacyHttp(HttpSession):
    era = "legacy"
    session_id: str | None = None

    def _headers(self, method: str, params: Mapping[str, Any]) -> dict[str, str]:
        headers = super()._headers(method, params)
        if method != "initialize":
            headers["MCP-Protocol-Version"] = self.version
        if self.session_id is not None:
            headers["Mcp-Session-Id"] = self.session_id
        return headers

    async def open(self) -> None:
        request_id = self.next_id()
        response, messages = await self._post(message_of("initialize", initialize_params(), request_id), {})
        answers = [message for message in messages if _is_answer(message, request_id)]
        if not answers:
            raise Unanswered(f"initialize was answered with {_describe(response)}")
        session_id = response.headers.get("mcp-session-id")
        if session_id is not None and not _VISIBLE_ASCII.fullmatch(session_id):
            raise Unanswered("the Mcp-Session-Id of the server has characters other than visible ASCII")
        self.session_id = session_id
        self.discovery = self.transcript.record(self.channel, "received", answers[0])
        await self.notify("notifications/initialized")

    async def open_stream(self) -> None:
        """Open the `GET` stream, and wait for the status of the response."""
        self.inbox.request = self.transcript.record(self.channel, "sent", "GET")
        self._start(self.inbox, "GET", None, {**self._headers("", {}), "Accept": "text/event-stream"})
        await self.inbox.until(lambda: self.inbox.status or self.inbox.is_ended, self.timeout)

    async def reopen_stream(self) -> bool:
        """Close the `GET` stream, and open it again. Return whether the server accepts it."""
        await self.cancel(self.inbox)
        for _ in range(_REOPEN_ATTEMPTS):
            self.inbox.reopen()
            await self.open_stream()
            if self.inbox.status != 409:  # the server has not yet noticed that the old one is closed
                break
            await self.cancel(self.inbox)
            await asyncio.sleep(_REOPEN_PAUSE)
        return self.inbox.status == 200

    async def status_of(self, method: str, session_id: str) -> Frame:
        """Send a request with this session id; return the status of the response."""
        headers = {**self._headers("ping", {}), "Mcp-Session-Id": session_id}
        message = message_of("ping", {}, self.next_id()) if method == "POST" else None
        self.transcript.record(self.channel, "sent", f"{method} with Mcp-Session-Id {session_id}")
        try:
            async with self._http.stream(method, self.url, json=message, headers=headers) as response:
                status = response.status_code
        except httpx2.HTTPError as error:
            raise Unanswered(f"{method} failed: {one_line(str(error) or type(error).__name__, 200)}") from None
        return self.transcript.record(self.channel, "received", f"HTTP {status}")

    async def listen(self, requested: dict[str, Any], request_id: str | int | None = None) -> Stream:
        raise NotImplementedError("a legacy session has no listen requests")


def _is_answer(message: Any, request_id: str | int) -> bool:
    return isinstance(message, dict) and "method" not in message and message.get("id") == request_id


def _is_stream(response: httpx2.Response) -> bool:
    return str(response.headers.get("content-type", "")).startswith("text/event-stream")


def _parse(response: httpx2.Response) -> list[Any]:
    """Return the messages of a complete body that is not a stream."""
    try:
        return list(messages_in(decode(response.content)))
    except ValueError:
        return []


async def _read_messages(response: httpx2.Response) -> AsyncIterator[Any]:
    """Yield the messages of a stream. Data that is no JSON is a text."""
    async for event in read_events(response.aiter_bytes()):
        if not event.data:
            continue  # an event that only gives an id
        try:
            yield decode(event.data)
        except ValueError:
            yield event.data.decode(errors="replace")


def _describe(response: httpx2.Response) -> str:
    if "location" in response.headers:
        target = redact_uri(str(response.headers["location"]))
        return f"HTTP {response.status_code}, a redirect to {one_line(target, 200)}; check that URL"
    if _is_stream(response):
        return f"HTTP {response.status_code}, a stream without the response"
    return f"HTTP {response.status_code} {one_line(response.text, 200)}".strip()
