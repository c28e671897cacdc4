"""One request to somebody else's server, and only to where it may go.

A webhook's URL is chosen by a client, and the server may reach what that client can't: its own machine, its private
network, its provider's metadata. So a name is resolved once, every address it has must be a public one, and the
connection goes to the very address that was checked, whatever the name leads to a moment later. No redirects, no
proxies, no more of an answer than its head.
"""

from __future__ import annotations

import asyncio
import contextvars
import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from tidings.errors import TidingsError

if TYPE_CHECKING:
    import ssl

    import httpx2

__all__ = ["Outcome", "Resolve", "WebhookClient", "check_url", "why_not_public"]

logger = logging.getLogger(__name__)

_is_on_its_way: contextvars.ContextVar[bool] = contextvars.ContextVar("tidings_courier", default=False)
"""Whether a request is a courier's: its URL may well be a secret, and httpx2 would log it."""


def _is_no_delivery(record: logging.LogRecord) -> bool:
    return not _is_on_its_way.get()


Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host."""

_LONGEST_URL = 2_000
_MOST_LOOKUPS = 256
"""Names that are looked up at the same time, each on a thread: several times the deliveries that are under way, so that
it is met only by lookups that nobody waits for any more."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "2001::/23", "3fff::/20", "5f00::/16"),
    )
)
"""Of special use, which not every version of Python knows. A provider's metadata is at 192.0.0.192."""
_OF_PROVIDERS = {ipaddress.ip_address("168.63.129.16"): "Azure's own services"}
"""Public by their number, and yet answered by the machine's own surroundings."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request."""

    status: int | None = None
    error: str | None = None
    """None if the receiver took it."""
    retry_after: float | None = None
    """Seconds that the receiver asks to be left alone."""


def check_url(url: str, *, allow_loopback: bool) -> None:
    """Raise unless deliveries may be sent to this URL, as far as the URL itself shows."""
    parsed = _parse(url)
    if _is_loopback(parsed.raw_host.decode("ascii")):
        if not allow_loopback:
            raise TidingsError(f"{url} is on this server's own machine; give an https URL that others can reach")
    elif parsed.scheme != "https":
        raise TidingsError(f"{url}: a webhook is an https URL (http only on the loopback address)")
    else:
        address = _address(parsed.host)
        if address is not None and not allow_loopback and (reason := why_not_public(address)) is not None:
            raise TidingsError(f"{url} is {reason}; give an https URL that others can reach")


def why_not_public(address: Address) -> str | None:
    """Why no request of a stranger's should go there; None if it may."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            # What carries an IPv4 address leads to that one, by one way or another.
            return why_not_public(inner)
        if address.is_site_local:
            return "an address of a private network"
    if address.is_loopback or address.is_unspecified:
        return "an address of this server's own machine"
    if address.is_link_local:
        return "a link-local address, where providers keep their metadata"
    if address.is_multicast:
        return "a multicast address"
    if address.is_private or address.is_reserved or not address.is_global or any(address in each for each in _SPECIAL):
        return "an address of a private network"
    return f"an address of {_OF_PROVIDERS[address]}" if address in _OF_PROVIDERS else None


class WebhookClient:
    def __init__(self, *, timeout: float, allow_private: bool = False, resolve: Resolve | None = None) -> None:
        """`allow_private` lets requests go to any address at all."""
        self._timeout = timeout
        self._allow_private = allow_private
        self._resolve = resolve or _Resolver()
        self._trust: ssl.SSLContext | None = None

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        """Deliver, or say why not. Raises nothing but a cancellation."""
        import httpx2

        logging.getLogger("httpx2").addFilter(_is_no_delivery)  # once, however often
        token = _is_on_its_way.set(True)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._post(_parse(url), headers, body)
        except TimeoutError:
            return Outcome(error=f"no answer within {self._timeout:g} s")
        except TidingsError as error:
            return Outcome(error=str(error))
        except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:  # the last, if no thread can be started
            return Outcome(error=f"{type(error).__name__}: {error}"[:300])
        finally:
            _is_on_its_way.reset(token)

    async def _post(self, url: httpx2.URL, headers: Mapping[str, str], body: bytes) -> Outcome:
        import httpx2

        addresses = await self._allowed(url)
        if self._trust is None:
            # Reads the machine's certificates, which takes a while. SSL_CERT_FILE names others.
            self._trust = await asyncio.to_thread(httpx2.create_ssl_context)
        host = url.raw_host.decode("ascii")
        head = {**headers, "Host": url.netloc.decode("ascii")}
        # Connections are not kept: the next delivery has its address checked anew.
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(
            verify=self._trust, trust_env=False, timeout=self._timeout, limits=limits
        ) as client:
            for number, address in enumerate(addresses, 1):
                request = client.build_request(
                    "POST",
                    url.copy_with(host=address),
                    headers=head,
                    content=body,
                    extensions={"sni_hostname": host.strip("[]")},
                )
                try:
                    response = await client.send(request, stream=True, follow_redirects=False)
                except httpx2.ConnectError:
                    if number == len(addresses):
                        raise
                    continue
                try:
                    return _outcome(response)
                finally:
                    await response.aclose()
        raise TidingsError(f"{host} has no address")

    async def _allowed(self, url: httpx2.URL) -> list[str]:
        """The addresses behind a URL: all of them, or none if one is where no stranger may send us."""
        host = url.host
        port = url.port or (443 if url.scheme == "https" else 80)
        found = [host] if _address(host) is not None else await self._resolve(url.raw_host.decode("ascii"), port)
        if self._allow_private:
            return found
        is_local = _is_loopback(host)
        for each in found:
            address = ipaddress.ip_address(each.partition("%")[0])
            if is_local and address.is_loopback:
                continue
            if is_local or (reason := why_not_public(address)) is not None:
                # Whoever put the webhook is not told the address: it would learn the names and numbers of our network.
                reason = "not the loopback address" if is_local else reason
                logger.warning(
                    "%s leads to %s, %s; nothing was sent (Policy.webhook_private allows it)", host, each, reason
                )
                raise TidingsError(f"{host} leads to an address that is not public; nothing was sent")
        return found


def _outcome(response: httpx2.Response) -> Outcome:
    status = response.status_code
    if 200 <= status < 300:
        return Outcome(status)
    note = "; redirects are not followed" if 300 <= status < 400 else ""
    return Outcome(status, f"answered {status}{note}", _seconds(response.headers.get("retry-after")))


def _seconds(retry_after: str | None) -> float | None:
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(retry_after)
        return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):
        return None


def _parse(url: str) -> httpx2.URL:
    import httpx2

    if len(url) > _LONGEST_URL:
        raise TidingsError(f"a webhook's URL has at most {_LONGEST_URL} characters")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError) as error:
        raise TidingsError(f"{url!r} is no URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise TidingsError(f"{url!r} is no https URL")
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise TidingsError(f"{url!r} has a port that can't be; ports are 1 to 65535")
    if parsed.userinfo or parsed.fragment:
        raise TidingsError("a webhook's URL has neither a user nor a fragment; deliveries are signed instead")
    return parsed


def _is_loopback(host: str) -> bool:
    """Whether a host, as it is written, means this machine."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


class _Resolver:
    """Asks on a thread of its own each time. Whoever chose the name may have its name server never answer, and nothing
    can interrupt that: a thread of the pool would be taken from everybody else, and the end of the process would wait
    for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def settle(answer: list[str] | Exception) -> None:
            if found.done():  # nobody waits any more
                return
            if isinstance(answer, Exception):
                found.set_exception(answer)
            else:
                found.set_result(answer)

        def ask() -> None:
            answer: list[str] | Exception
            try:
                asked = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                answer = list(dict.fromkeys(str(address[0]) for *_, address in asked))
            except Exception as error:  # whatever it is, whoever waits has it
                answer = error
            self._count(-1)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, answer)

        self._count(1)
        try:
            threading.Thread(target=ask, name="tidings-resolve", daemon=True).start()
        except BaseException:
            self._count(-1)
            raise
        return await found

    def _count(self, more: int) -> None:
        with self._lock:
            if self._under_way + more > _MOST_LOOKUPS:
                raise TidingsError(
                    f"{_MOST_LOOKUPS} names are being looked up, and nobody answers for them; nothing was sent"
                )
            self._under_way += more
