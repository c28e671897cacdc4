"""One connection to NATS: its options, and a client that never reconnects by itself.

A new connection with new subscriptions replaces a lost one. The reconnect of nats-py is not used: it resumes a consumer
after the last sequence, and so skips the messages of a stream that was created again.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from tidings.dependencies import missing_extra
from tidings.errors import TidingsError

try:
    import nats.aio.client
    import nats.errors
    from nats.aio.msg import Msg
except ImportError as error:
    raise missing_extra("NATS, which connects workers and replicas,", "nats") from error

__all__ = ["Client", "Lost", "Msg", "NatsError", "Options", "Refused", "connect", "request_json"]

NatsError = nats.errors.Error

CONNECT_TIMEOUT = 2
"""Seconds for TCP, and for the first line of the server. The next attempt follows soon."""
REQUEST_TIMEOUT = 2.0
"""Seconds for a reply of JetStream. No reply comes while NATS elects a leader, so a short timeout retries sooner."""
CLOSE_TIMEOUT = 1.0
"""Seconds to send what is buffered to a server that may be gone."""


class Lost(Exception):
    """The connection or the consumer cannot be used any longer. The message says why."""


class Refused(Lost):
    """JetStream refused a request."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Options:
    servers: list[str]
    """URLs without user and password, so that no error message shows them."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str, credentials: str | Path | None, token: str | None, tls: ssl.SSLContext | None) -> Options:
        """Read a URL, or several with commas between them. Raise `TidingsError` if one of the values is invalid."""
        servers = []
        user = password = None
        for part in url.split(","):
            try:
                parsed = urlsplit(part.strip())
                port = parsed.port or 4222
            except ValueError as error:
                raise TidingsError(f"a NATS URL is invalid: {error}") from None
            if parsed.scheme not in ("nats", "tls") or not parsed.hostname:
                raise TidingsError("a NATS URL has the form nats://HOST:PORT or tls://HOST:PORT")
            host = f"[{parsed.hostname}]" if ":" in parsed.hostname else parsed.hostname
            servers.append(f"{parsed.scheme}://{host}:{port}")
            if parsed.scheme == "tls" and tls is None:
                tls = ssl.create_default_context()
            if parsed.username is not None and parsed.password is None:
                token = token or unquote(parsed.username)
            elif parsed.username is not None and parsed.password is not None:
                user, password = unquote(parsed.username), unquote(parsed.password)
        path = None if credentials is None else Path(credentials)
        if path is not None:
            _check_credentials(path)
        return cls(servers=servers, user=user, password=password, token=token, credentials=path, tls=tls)


def _check_credentials(path: Path) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TidingsError(f"the NATS credentials {path} cannot be read: {error.strerror}") from None
    if b"BEGIN NATS USER JWT" not in content or b"BEGIN USER NKEY SEED" not in content:  # nats-py would hang
        raise TidingsError(f"the NATS credentials {path} have no user JWT or no seed; is it a .creds file?")


class Client(nats.aio.client.Client):
    """A client of nats-py that requires TLS if told so. Only this class uses private names of nats-py."""

    def __init__(self, requires_tls: bool) -> None:
        super().__init__()
        self.requires_tls = requires_tls
        self.denied: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the server denies a subject: a request gets no reply then."""

    def _connect_command(self) -> bytes:
        if self.requires_tls and not self._server_info.get("tls_required"):
            raise NatsError("the server does not use TLS; nothing secret was sent to it")
        return super()._connect_command()

    async def close_soon(self) -> None:
        """Close the connection, and drop what cannot be sent in time. Never raise because of the connection."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self.close()
        except Exception:  # nats-py raises many types, and the connection is not used any longer
            pass
        finally:
            writer = getattr(self._transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()


async def connect(options: Options, name: str, inbox: str, on_closed: Callable[[], None]) -> Client:
    """Return a new connection, or raise `Lost`. `on_closed` is called when the connection is lost or closed."""
    client = Client(options.tls is not None)

    async def closed() -> None:
        on_closed()

    async def on_error(error: Exception) -> None:
        """Note that a subject is denied. Ignore other errors: nats-py also calls `closed` if the connection is lost."""
        if "permissions violation" in str(error).lower() and not client.denied.done():
            client.denied.set_result(str(error))

    try:
        if options.credentials is not None:
            _check_credentials(options.credentials)  # it may have been replaced
        await client.connect(
            options.servers,
            name=name,
            inbox_prefix=inbox,
            closed_cb=closed,
            error_cb=on_error,
            allow_reconnect=False,
            max_reconnect_attempts=1,  # of this call; 0 would mean without end
            reconnect_time_wait=cast("int", 0.05),
            connect_timeout=CONNECT_TIMEOUT,
            user=options.user,
            password=options.password,
            token=options.token,
            user_credentials=options.credentials,
            tls=options.tls,
        )
    except Exception as error:  # nats-py raises many types
        reason = client.last_error if isinstance(error, nats.errors.NoServersError) else error
        await client.close_soon()
        raise Lost(f"{', '.join(options.servers)}: {str(reason) or type(reason).__name__}") from error
    except BaseException:
        await client.close_soon()
        raise
    return client


async def request_json(client: Client, subject: str, /, **values: Any) -> dict[str, Any]:
    """Return the reply of JetStream. Raise `Lost`, or `Refused` if the reply is an error."""
    body = json.dumps(values).encode() if values else b""
    requesting = asyncio.ensure_future(client.request(f"$JS.API.{subject}", body, timeout=REQUEST_TIMEOUT))
    try:
        waiting: list[asyncio.Future[Any]] = [requesting, client.denied]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not requesting.done():
            raise Lost(f"the NATS server denies {subject}: {client.denied.result()}")
        reply = requesting.result()
    except nats.errors.NoRespondersError:
        raise Lost("JetStream is not available; is it enabled on the NATS server?") from None
    except nats.errors.TimeoutError:
        raise Lost(f"NATS did not reply within {REQUEST_TIMEOUT:g} s to {subject}") from None
    finally:
        requesting.cancel()
    result: dict[str, Any] = json.loads(reply.data)
    problem = result.get("error")
    if problem is not None:
        raise Refused(f"NATS refused {subject}: {problem.get('description')}", problem.get("err_code", 0))
    return result
