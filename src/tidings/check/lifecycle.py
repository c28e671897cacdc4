"""Check sessions and processes: unknown sessions, slow readers, SIGTERM, tokens that expire."""

from __future__ import annotations

import asyncio
import socket
import ssl
import uuid
from contextlib import suppress
from typing import Any

import httpx2

from tidings.check.run import Run
from tidings.core.model import Feature, topics_json
from tidings.wire.http import HttpClientSession
from tidings.wire.methods import LISTEN
from tidings.wire.session import Frame, Session, Unanswered
from tidings.wire.stdio import StdioClientSession

__all__ = ["check_expiry", "check_sessions", "check_sigterm", "check_slow_reader"]

_SIGTERM_TIMEOUT = 10.0
"""Seconds to exit after SIGTERM: as long as Docker waits until it kills a process."""
_EXPIRY_TOLERANCE = 10.0
"""Seconds that a stream may outlive its token: clocks differ, and servers look at intervals."""
_ID_LENGTH = 1 << 15
"""Characters: servers that read lines may have a limit of twice as many bytes."""
_UNREAD_SOCKET = 160
"""Requests with an id of that length: together more than the buffers of a socket hold by default."""
_UNREAD_PIPE = 40
"""The same for a pipe."""
_ATTEMPTS = 3
"""Requests in a row without an answer after which the server counts as blocked, and not only as busy."""
_BLOCKED = 1.0
"""Seconds without progress after which the server is assumed to wait for the client to read."""


async def check_sessions(run: Run) -> None:
    if not run.is_http:
        run.skip(["unknown-session"], "the target is a stdio server")
    elif run.legacy is None:
        run.skip(["unknown-session"], run.missing["legacy"])
    elif isinstance(run.legacy, HttpClientSession) and run.legacy.session_id is None:
        run.skip(["unknown-session"], "the server is stateless: it gives no session ids")
    else:
        ended = await run.open("legacy")
        assert isinstance(ended, HttpClientSession)
        assert ended.session_id is not None
        deleted = await ended.status_of("DELETE", ended.session_id)
        ids = {"unknown": uuid.uuid4().hex}
        if str(deleted.content).startswith("HTTP 2"):
            ids["deleted"] = ended.session_id
        for kind, session_id in ids.items():
            # GET is answered with 405 if the server has no streams at all.
            for method, expected in (("POST", ("HTTP 404",)), ("GET", ("HTTP 404", "HTTP 405"))):
                answer = await ended.status_of(method, session_id)
                if answer.content not in expected:
                    sent = next(each for each in reversed(run.transcript.frames) if each.direction == "sent")
                    message = f"{method} with the id of a session that is {kind} was answered with {answer.content}"
                    run.report.add("unknown-session", message, [sent, answer])
        run.passed("unknown-session")


async def check_slow_reader(run: Run) -> None:
    """Send many requests without reading. Their ids are long, so that the responses, which repeat them, fill the
    buffers."""
    session = await run.open(run.sessions[0].era)
    method = next(iter(run.before[run.sessions[0]]), None)
    if method is None:
        run.skip(["slow-reader"], "the server declares no list")
    elif isinstance(session, StdioClientSession):
        await _check_slow_pipe(run, session, method)
    elif isinstance(session, HttpClientSession):
        await _check_slow_socket(run, session, method)


async def _check_slow_pipe(run: Run, session: StdioClientSession, method: str) -> None:
    """Send requests without reading, then read all responses."""
    sent = run.transcript.record(session.channel, "sent", f"{_UNREAD_PIPE} × {method} with long ids, nothing is read")
    session.set_reading(False)
    answers: list[asyncio.Future[Frame]] = []
    with suppress(TimeoutError):
        for number in range(_UNREAD_PIPE):
            async with asyncio.timeout(_BLOCKED):
                answers.append(await session.send_unrecorded(method, _long_id(number)))
    session.set_reading(True)
    done, pending = await asyncio.wait(answers, timeout=2 * run.options.timeout)
    failed = [answer for answer in done if answer.exception() is not None]
    if pending or failed:
        message = f"{len(pending) + len(failed)} of {len(answers)} requests had no response after the client read again"
        run.report.add("slow-reader", message, [sent])
    run.passed("slow-reader")


async def _check_slow_socket(run: Run, session: HttpClientSession, method: str) -> None:
    """Send requests on a connection that is not read, and ask on another one."""
    writers: list[asyncio.StreamWriter] = []
    what = f"{_UNREAD_SOCKET} × {method} with long ids, pipelined, nothing is read"
    sent = run.transcript.record("client that does not read", "sent", what)
    try:
        writers.append(await _connect_without_reading(session.url))
        if session.era == "modern":
            everything = topics_json(Feature, ())
            writers[0].write(session.raw_request(LISTEN, "unread", notifications=everything))
            writers.append(await _connect_without_reading(session.url))
        with suppress(TimeoutError):
            for number in range(_UNREAD_SOCKET):
                writers[-1].write(session.raw_request(method, _long_id(number)))
                async with asyncio.timeout(_BLOCKED):
                    await writers[-1].drain()
        errors: list[Unanswered] = []
        for _ in range(_UNREAD_SOCKET):  # meanwhile, the server fills the buffers of the other connection
            try:
                await session.request(method)
                errors.clear()
            except Unanswered as error:
                errors.append(error)
            if len(errors) == _ATTEMPTS:
                answered = run.transcript.record(session.channel, "received", str(errors[-1]))
                message = f"another client got no answer while one did not read: {errors[-1]}"
                run.report.add("slow-reader", message, [sent, answered])
                break
    except OSError as error:
        run.skip(["slow-reader"], f"a second connection failed: {error}")
        return
    finally:
        for writer in writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
    run.passed("slow-reader")


def _long_id(number: int) -> str:
    return f"{number}-".ljust(_ID_LENGTH, "x")


async def _connect_without_reading(url: str) -> asyncio.StreamWriter:
    parsed = httpx2.URL(url)
    loop = asyncio.get_running_loop()
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    family, kind, number, _, address = (await loop.getaddrinfo(parsed.host, port, type=socket.SOCK_STREAM))[0]
    connection = socket.socket(family, kind, number)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(connection, address)
        context = ssl.create_default_context() if parsed.scheme == "https" else None
        # With this limit, the reader stops reading at once.
        _, writer = await asyncio.open_connection(
            sock=connection, limit=1, ssl=context, server_hostname=parsed.host if context else None
        )
    except BaseException:
        connection.close()
        raise
    return writer


async def check_sigterm(run: Run) -> None:
    if run.is_http:
        run.skip(["sigterm", "graceful-end"], "the check has not started the server")
        return
    session = await run.open(run.sessions[0].era)
    assert isinstance(session, StdioClientSession)
    stream = None
    if session.era == "modern":
        stream = await session.listen(topics_json(Feature, ()))
    sent = run.transcript.record(session.channel, "sent", "SIGTERM")
    has_exited = await session.terminate(_SIGTERM_TIMEOUT)
    opening = stream.acknowledgement if stream is not None else session.discovery
    run.passed("sigterm")
    if not has_exited:
        run.report.add("sigterm", f"the process still runs {_SIGTERM_TIMEOUT:g} s after SIGTERM", [opening, sent])
    if stream is None or stream.acknowledgement is None:
        run.skip(["graceful-end"], "there is no listen stream")
    elif not has_exited:
        run.skip(["graceful-end"], "the process did not exit")
    else:
        if stream.answer is None or "result" not in stream.answer.message:
            message = "the process exited without the result of subscriptions/listen"
            run.report.add("graceful-end", message, [opening, sent, *stream.frames[1:]])
        run.passed("graceful-end")


async def check_expiry(run: Run) -> None:
    """Hold a stream open until its token has expired. No check can send a request with this token afterwards."""
    expires = run.options.token_expires
    if expires is None or run.options.token is None or not run.is_http:
        run.skip(["token-expiry"], "a token and the time of its end are needed: --token-expires SECONDS")
        return
    if run.transcript.now() >= expires:
        run.skip(["token-expiry"], "the token expired before this check; use one that is valid longer")
        return
    session: Session = await run.open(run.sessions[0].era)
    if session.era == "modern":
        stream = await session.listen(topics_json(Feature, ()))
        is_open = stream.acknowledgement is not None and not stream.is_ended
    else:
        assert isinstance(session, HttpClientSession)
        stream = session.inbox
        await session.open_stream()
        is_open = stream.status == 200
    if not is_open:
        run.skip(["token-expiry"], "the server has no stream of notifications")
        return
    tolerance = min(_EXPIRY_TOLERANCE, run.options.timeout)
    remaining = expires - run.transcript.now() + tolerance
    run.progress(f"waiting {remaining:.0f} s until the token has expired")
    if not await stream.until(lambda: stream.is_ended, max(remaining, 0.0)):
        message = f"the stream is still open {tolerance:g} s after its token expired"
        evidence: list[Any] = [stream.request, stream.acknowledgement or stream.opened]
        run.report.add("token-expiry", message, [*evidence, *stream.frames[-1:]])
    run.passed("token-expiry")
