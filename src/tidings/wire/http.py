"""A session over Streamable HTTP, of either era, and the HTTP client of all clients."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import httpx2

from tidings.core.redact import one_line, redact_uri
from tidings.errors import TidingsError
from tidings.wire.methods import CALL_METHODS, INITIALIZE, LISTEN
from tidings.wire.session import MODERN, Era, Frame, Session, Stream, Unanswered, split_messages
from tidings.wire.sse import EventTooLong, read_events

__all__ = ["HttpClientSession", "make_http_client"]

_ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
_REOPEN_ATTEMPTS = 20
_REOPEN_PAUSE = 0.2
_END_TIMEOUT = 0.2
"""Seconds for a server to end the stream after its answer, so that the connection can be used again."""
_VISIBLE_ASCII = re.compile(r"[!-~]+")


def make_http_client(url: str, kind: Callable[..., Any] = httpx2.AsyncClient, **options: Any) -> Any:
    """Return an HTTP client for requests to one server. Raise `TidingsError` if it can't use the proxy."""
    # Loading the certificates takes long, and plain HTTP needs none. A proxy with TLS is verified all the same.
    verify = False if url.lower().startswith("http://") else ssl.create_default_context()
    try:
        return kind(verify=verify, **options)
    except (ValueError, ImportError) as error:
        raise TidingsError(f"the proxy that the environment names can't be used: {error}") from None


class HttpClientSession(Session):
    """It has an HTTP client and connections of its own."""

    transport = "http"

    def __init__(self, url: str, era: Era, timeout: float, *, headers: Mapping[str, str], **options: Any) -> None:
        super().__init__(era, timeout, **options)
        self.url = url
        self.session_id: str | None = None
        self.status = 0
        """The status of the last response to a request."""
        self._own_headers = dict(headers)
        self._http: httpx2.AsyncClient = make_http_client(url, timeout=httpx2.Timeout(timeout))
        self._readers: dict[Stream, asyncio.Task[None]] = {}

    def _headers(self, method: str, params: Mapping[str, Any]) -> dict[str, str]:
        headers = {**_ACCEPT, **self._own_headers}
        if self.era == "modern":
            headers |= {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
            feature = CALL_METHODS.get(method)
            if feature is not None and isinstance(name := params.get(feature.key_field), str):
                from mcp.shared.inbound import encode_header_value  # here, because it imports the SDK

                headers["Mcp-Name"] = encode_header_value(name)
        elif method != INITIALIZE:
            headers["MCP-Protocol-Version"] = self.version
        if self.session_id is not None:
            headers["Mcp-Session-Id"] = self.session_id
        return headers

    async def request(self, method: str, **params: Any) -> Frame:
        request_id = self.next_id()
        response, messages, answer = await self._post(method, params, request_id)
        for data in messages:
            self.inbox.receive(data)
        if answer is not None:
            if method == INITIALIZE:
                self._set_session_id(response.headers.get("mcp-session-id"))
            return self.record(self.channel, "received", answer)
        if not messages or response.status_code >= 400:
            self.record(self.channel, "received", _describe(response))
        raise Unanswered(f"{method} was answered with {_describe(response)}")

    def _set_session_id(self, session_id: str | None) -> None:
        if session_id is not None and not _VISIBLE_ASCII.fullmatch(session_id):
            raise Unanswered("the Mcp-Session-Id of the server has characters other than visible ASCII")
        self.session_id = session_id

    async def notify(self, method: str, **params: Any) -> None:
        _, messages, _ = await self._post(method, params)
        for data in messages:
            self.inbox.receive(data)

    async def _post(
        self, method: str, params: Mapping[str, Any], request_id: int | None = None
    ) -> tuple[httpx2.Response, list[bytes], bytes | None]:
        """Send a message. Return the response, the messages in its body before the answer, and the answer. After the
        answer, wait at most `_END_TIMEOUT` for the server to end the stream, which it need not do."""
        sent = self.encode(method, params, request_id)
        self.record(self.channel, "sent", sent)
        messages: list[bytes] = []
        answering: httpx2.Response | None = None
        answer: bytes | None = None
        try:
            request = self._http.stream("POST", self.url, content=sent, headers=self._headers(method, params))
            async with asyncio.timeout(self.timeout) as deadline, request as response:
                self.status = response.status_code
                async for data in _read_messages(response):
                    if answer is not None:
                        continue
                    if request_id is None or not Frame(0, "", "received", data).answers(request_id):
                        messages.append(data)
                    else:
                        answering, answer = response, data
                        deadline.reschedule(asyncio.get_running_loop().time() + _END_TIMEOUT)
                return response, messages, answer
        except TimeoutError:
            problem = f"{method} was not answered within {self.timeout:g} s"
        except httpx2.HTTPError as error:
            problem = f"{method} failed: {one_line(str(error) or type(error).__name__, 200)}"
        except EventTooLong as error:
            problem = f"{method} failed: {error}"
        except UnicodeError:  # a name of the server with half a surrogate pair
            problem = f"{method} can't be sent, because a text of the server is not valid Unicode"
        except httpx2.InvalidURL as error:
            raise TidingsError(f"{self.url} is not a URL: {error}") from None
        if answering is None:
            raise Unanswered(problem)
        return answering, messages, answer

    # Streams

    async def _send_listen(self, stream: Stream, data: bytes) -> None:
        self._start(stream, "POST", data, self._headers(LISTEN, {}))

    async def open_stream(self) -> None:
        """Open the `GET` stream of a legacy session, and wait for the status of the response."""
        self.inbox.request = self.record(self.channel, "sent", "GET")
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

    def _start(self, stream: Stream, method: str, data: bytes | None, headers: Mapping[str, str]) -> None:
        self._readers[stream] = asyncio.create_task(self._read(stream, method, data, headers))

    async def _read(self, stream: Stream, method: str, data: bytes | None, headers: Mapping[str, str]) -> None:
        """Read a stream until it ends."""
        reason = "the server closed it"
        try:
            timeout = httpx2.Timeout(self.timeout, read=None)
            request = self._http.stream(method, self.url, content=data, headers=dict(headers), timeout=timeout)
            async with request as response:
                stream.open(response.status_code, response.headers)
                async for each in _read_messages(response):
                    stream.receive(each)
        except (httpx2.HTTPError, UnicodeError, EventTooLong) as error:
            reason = str(error) or type(error).__name__
        except asyncio.CancelledError:
            reason = "the client closed it"
            raise
        finally:
            stream.end(reason)

    async def cancel(self, stream: Stream) -> None:
        if (reader := self._readers.pop(stream, None)) is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def end(self) -> None:
        """Tell the server that a legacy session is not needed any longer."""
        if self.session_id is not None:
            with suppress(Unanswered):
                await self.status_of("DELETE", self.session_id)

    async def close(self) -> None:
        for stream in list(self._readers):
            await self.cancel(stream)
        await self._http.aclose()

    # Unusual requests

    def raw_request(self, method: str, request_id: str, **params: Any) -> bytes:
        """Return the bytes of a request, for a connection that the caller opens."""
        url = httpx2.URL(self.url)
        body = self.encode(method, params, request_id)
        headers = {**self._headers(method, params), "Host": url.netloc.decode(), "Content-Length": str(len(body))}
        head = [f"POST {url.raw_path.decode()} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + body

    async def status_of(self, method: str, session_id: str) -> Frame:
        """Send a request with this session id; return the status of the response."""
        headers = {**self._headers("ping", {}), "Mcp-Session-Id": session_id}
        data = self.encode("ping", {}, self.next_id()) if method == "POST" else None
        self.record(self.channel, "sent", f"{method} with Mcp-Session-Id {session_id}")
        try:
            async with self._http.stream(method, self.url, content=data, headers=headers) as response:
                status = response.status_code
        except httpx2.HTTPError as error:
            raise Unanswered(f"{method} failed: {one_line(str(error) or type(error).__name__, 200)}") from None
        return self.record(self.channel, "received", f"HTTP {status}")


def _is_stream(response: httpx2.Response) -> bool:
    return str(response.headers.get("content-type", "")).startswith("text/event-stream")


async def _read_messages(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the messages of a stream, or of a whole body."""
    if _is_stream(response):
        async for event in read_events(response.aiter_bytes()):
            if event.data:  # an empty event only has an id
                yield event.data
    else:
        for data in split_messages(await response.aread()):
            yield data


def _describe(response: httpx2.Response) -> str:
    if "location" in response.headers:
        target = redact_uri(str(response.headers["location"]))
        return f"HTTP {response.status_code}, a redirect to {one_line(target, 200)}; check that URL"
    if _is_stream(response):
        return f"HTTP {response.status_code}, a stream without the response"
    return f"HTTP {response.status_code} {one_line(response.text, 200)}".strip()
