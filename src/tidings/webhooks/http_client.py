"""POST requests to URLs that a client chose, restricted to public addresses.

The server can reach addresses that the client can't: its own machine, its private network, the metadata service of its
cloud provider. So a host name is resolved once, all of its addresses must be public, and the connection goes to the
checked address (a later DNS answer has no effect). Redirects and proxies are not used, and only the head of a response
is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

from tidings.errors import TidingsError
from tidings.wire.addresses import is_loopback, parse_address, reason_not_public

if TYPE_CHECKING:
    import ssl

    import httpx2

__all__ = ["Cause", "PostResult", "Resolve", "WebhookClient", "check_url"]

logger = logging.getLogger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and port."""

Cause: TypeAlias = Literal["status", "timeout", "tls", "connection"]
"""Why a receiver did not accept a request: by its answer, or because there was none."""

_MAX_URL = 2_000
_MAX_LOOKUPS = 256
"""Host names that are resolved at the same time, each in a thread. This is several times the number of concurrent
deliveries, so only lookups that never end reach it."""
_MAX_ERROR = 300


@dataclass(frozen=True, slots=True)
class PostResult:
    status: int | None = None
    error: str | None = None
    """None if the receiver accepted the request."""
    retry_after: float | None = None
    """Seconds that the receiver asks to wait."""
    cause: Cause | None = None
    """The kind of the error."""
    answer: bytes = b""
    """The start of the body of the answer, as much as was asked for."""


def check_url(url: str, *, allow_loopback: bool) -> None:
    """Raise `TidingsError` if the URL itself shows that deliveries to it are not allowed."""
    parsed = _parse(url)
    if is_loopback(parsed.raw_host.decode("ascii")):
        if not allow_loopback:
            raise TidingsError(f"{url} is on this server's own machine; use an https URL that others can reach")
    elif parsed.scheme != "https":
        raise TidingsError(f"{url}: a webhook needs an https URL (http only on the loopback address)")
    else:
        address = parse_address(parsed.host)
        if address is not None and not allow_loopback and (reason := reason_not_public(address)) is not None:
            raise TidingsError(f"{url} is {reason}; use an https URL that others can reach")


class WebhookClient:
    def __init__(self, *, timeout: float, allow_private: bool = False, resolve: Resolve | None = None) -> None:
        """`allow_private` allows requests to all addresses."""
        self._timeout = timeout
        self._allow_private = allow_private
        self._resolve = resolve or _Resolver()
        self._ssl_context: ssl.SSLContext | None = None

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, max_answer: int = 0) -> PostResult:
        """Send a request, and read at most `max_answer` bytes of the body of its answer. Errors are in the result; only
        a cancellation is raised."""
        import httpx2

        try:
            async with asyncio.timeout(self._timeout):
                return await self._post(_parse(url), headers, body, max_answer)
        except TimeoutError:
            return PostResult(error=f"no answer within {self._timeout:g} s", cause="timeout")
        except TidingsError as error:
            return PostResult(error=str(error), cause="connection")
        except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: can't start a thread
            cause: Cause = "tls" if _is_tls(error) else "connection"
            return PostResult(error=f"{type(error).__name__}: {error}"[:_MAX_ERROR], cause=cause)

    async def _post(self, url: httpx2.URL, headers: Mapping[str, str], body: bytes, max_answer: int) -> PostResult:
        import httpx2

        addresses = await self._allowed_addresses(url)
        if self._ssl_context is None:
            # In a thread: this reads the certificates of the machine, or those of SSL_CERT_FILE.
            self._ssl_context = await asyncio.to_thread(httpx2.create_ssl_context)
        host = url.raw_host.decode("ascii")
        headers = {**headers, "Host": url.netloc.decode("ascii")}
        extensions = {"sni_hostname": host.strip("[]")}
        # A new transport, and so a new connection, because the address is checked for each delivery. Not a client: that
        # logs URLs, which can be secrets.
        async with httpx2.AsyncHTTPTransport(verify=self._ssl_context) as transport:
            for number, address in enumerate(addresses, 1):
                target = url.copy_with(host=address)
                request = httpx2.Request("POST", target, headers=headers, content=body, extensions=extensions)
                try:
                    response = await transport.handle_async_request(request)
                except httpx2.ConnectError:
                    if number == len(addresses):
                        raise
                else:
                    try:
                        answer = await _read(response, max_answer) if max_answer else b""
                    finally:
                        await response.aclose()
                    return _result(response, answer)
        raise TidingsError(f"{host} has no address")

    async def _allowed_addresses(self, url: httpx2.URL) -> list[str]:
        """Return the addresses of a URL. Raise `TidingsError` if one of them is not allowed."""
        host = url.host
        port = url.port or (443 if url.scheme == "https" else 80)
        is_address = parse_address(host) is not None
        addresses = [host] if is_address else await self._resolve(url.raw_host.decode("ascii"), port)
        if self._allow_private:
            return addresses
        is_local = is_loopback(host)
        for each in addresses:
            address = ipaddress.ip_address(each.partition("%")[0])
            if is_local and address.is_loopback:
                continue
            if is_local or (reason := reason_not_public(address)) is not None:
                reason = "not the loopback address" if is_local else reason
                logger.warning(
                    "%s resolves to %s, %s; nothing was sent (Policy.webhook_private allows it)", host, each, reason
                )
                # The client sees this error, and must not learn addresses of the server's network.
                raise TidingsError(f"{host} resolves to an address that is not public; nothing was sent")
        return addresses


async def _read(response: httpx2.Response, size: int) -> bytes:
    """Return the first bytes of the body of a response."""
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) >= size:
            break
    return body[:size]


def _is_tls(error: BaseException | None) -> bool:
    """Return whether a connection failed because of TLS, for example an invalid certificate."""
    import ssl

    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


def _result(response: httpx2.Response, answer: bytes) -> PostResult:
    status = response.status_code
    if 200 <= status < 300:
        return PostResult(status, answer=answer)
    note = "; redirects are not followed" if 300 <= status < 400 else ""
    return PostResult(status, f"answered {status}{note}", _seconds(response.headers.get("retry-after")), "status")


def _seconds(retry_after: str | None) -> float | None:
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    from email.utils import parsedate_to_datetime

    try:
        date = parsedate_to_datetime(retry_after)
        return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):
        return None


def _parse(url: str) -> httpx2.URL:
    import httpx2

    if len(url) > _MAX_URL:
        raise TidingsError(f"the URL of a webhook has at most {_MAX_URL} characters")
    try:
        parsed = httpx2.URL(url)
        urlsplit(url)  # refuses some that httpx2 accepts, such as https://[
    except (httpx2.InvalidURL, ValueError) as error:
        raise TidingsError(f"{url!r} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TidingsError(f"{url!r} is not an https URL")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise TidingsError(f"{url!r} has an invalid port; ports are 1 to 65535")
    if parsed.userinfo or parsed.fragment:
        raise TidingsError("the URL of a webhook can have no user and no fragment; deliveries are signed instead")
    return parsed


class _Resolver:
    """Resolves each host name in its own daemon thread.

    A client can choose a name whose name server never answers, and a lookup can't be interrupted. In a thread of the
    loop's pool it would delay other work and the exit of the process.
    """

    def __init__(self) -> None:
        self._slots = threading.Semaphore(_MAX_LOOKUPS)

    async def __call__(self, host: str, port: int) -> list[str]:
        if not self._slots.acquire(blocking=False):
            raise TidingsError(f"{_MAX_LOOKUPS} DNS lookups are running without an answer; nothing was sent")
        future: Future[list[str]] = Future()
        future.set_running_or_notify_cancel()  # the lookup continues if the delivery is cancelled
        try:
            threading.Thread(
                target=self._resolve, args=(host, port, future), name="tidings-resolve", daemon=True
            ).start()
        except BaseException:
            self._slots.release()
            raise
        return await asyncio.wrap_future(future)

    def _resolve(self, host: str, port: int, future: Future[list[str]]) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            future.set_result(list(dict.fromkeys(str(address[0]) for *_, address in found)))
        except Exception as error:
            future.set_exception(error)
        finally:
            self._slots.release()
