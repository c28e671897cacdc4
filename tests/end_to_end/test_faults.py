"""Clients that never read, half-close, vanish, or connect and disconnect by the thousand.

Every server is its own process, and every client a real socket. A client that stops reading costs one mailbox and does
not delay the others. The server keeps nothing of a client that has disconnected.
"""

from __future__ import annotations

import asyncio
import re
import signal
import statistics
import sys
from typing import Any

import pytest

from tests.support.faults.many_clients import (
    close_sessions,
    fill_sdk_streams,
    many,
    measure_baseline,
    open_and_close,
    open_sessions,
    open_unread_streams,
    read_until,
    readers,
    sockets,
    update,
)
from tests.support.faults.wire import (
    ALL,
    HTTP,
    TIMEOUT,
    How,
    Process,
    Settings,
    Stream,
    connect_unread,
    drop_packets,
    get_request,
    is_cut,
    listen,
    listen_request,
    open_session,
    serve,
)

pytestmark = pytest.mark.anyio

UNMET = 3600.0
"""Seconds between keep-alives where a client must be noticed without one."""


# Clients that do not read


@pytest.mark.alone
@pytest.mark.parametrize("how", HTTP)
async def test_two_hundred_unread_streams_delay_no_other_and_cost_one_mailbox_each(how: How) -> None:
    """Compare two servers, one of them with 200 full streams, in alternating rounds."""
    settings = Settings(policy={"write_deadline": 100.0, "journal_changes": 20})
    async with serve(how, settings) as alone, serve(how, settings) as crowded, readers(alone, 50) as few:
        silent = await open_unread_streams(crowded, 160, await open_sessions(crowded, 40))
        with sockets(silent):
            async with readers(crowded, 50) as among:
                for _ in range(5):
                    await few.round(10_000)
                    await among.round(10_000)
                full = await crowded.state()
                before = crowded.rss()
                times: dict[str, list[float]] = {"alone": [], "crowded": []}
                for _ in range(30):
                    times["alone"].append(await few.round(10_000))
                    times["crowded"].append(await among.round(10_000))
                state = await crowded.state(is_deep=True)
                growth = crowded.rss() - before
    without, with_silent = (statistics.median(times[name]) for name in ("alone", "crowded"))
    assert state["stuck"] == 200
    assert state["most_pending"] == 1, "one topic changed, however often"
    assert state["objects"]["Mailbox"] == 200
    assert state["objects"]["MailboxEntry"] == 200
    assert state["tasks"] <= full["tasks"], "a change must not start tasks for those who don't read"
    assert growth < 4e6, "30 changes of 10 kB, kept for 200 readers, would be 60 MB"
    # Below 4 ms, 1.5 times is less than what a busy machine adds by itself.
    assert with_silent <= max(1.5 * without, without + 0.002)


async def until_aborted(server: Process, pattern: str, times: int) -> None:
    """Make changes until the server has aborted this many streams.

    A full stream may take more bytes later, because the kernel of a busy machine enlarges its buffers late."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            try:
                await server.logged(pattern, times, within=6.0)
                return
            except TimeoutError:
                await server.change(update(0, 60_000), update(1, 60_000))


@pytest.mark.parametrize("how", HTTP)
async def test_unread_streams_are_aborted_after_the_write_deadline(how: How) -> None:
    # Long enough that a busy machine does not stop a reader for as long, which would be aborted too.
    async with serve(how, Settings(policy={"write_deadline": 4.0, "journal_changes": 20})) as server:
        until_nothing_is_left = await measure_baseline(server)
        session_ids = await open_sessions(server, 10)
        async with readers(server, 5) as among:
            with sockets(await open_unread_streams(server, 30, session_ids)) as silent:
                await until_aborted(server, "listen stream was not read for 4.0 s; aborting it", 30)
                await until_aborted(server, "legacy stream was not read for 4.0 s; aborting it", 10)
                assert all(await asyncio.gather(*map(is_cut, silent)))
                # The sessions outlive their streams: their clients may open another one.
                state = await server.until(lambda state: state["subscribers"] == 15)
                assert (state["listening"], state["legacy_streams"], state["streams"]) == (5, 0, 15)
                await among.round(100)
        await close_sessions(server, session_ids)
        await until_nothing_is_left()


@pytest.mark.parametrize("how", HTTP)
async def test_legacy_session_is_notified_again_after_its_stream_was_aborted(how: How) -> None:
    """Notifications that were lost with a closed stream must not count as told."""
    async with serve(how, Settings(policy={"write_deadline": 0.5, "journal_changes": 20})) as server:
        session_id = await open_session(server.port)
        with sockets([connect_unread(server.port, get_request(session_id))]) as (silent,):
            await server.until(lambda state: state["legacy_streams"] == 1)
            number = 0
            while not (await server.state())["stuck"]:
                number += 1
                await server.change(update(number, 60_000))
            await server.logged("legacy stream was not read for 0.5 s; aborting it")
            assert await is_cut(silent)
            await server.until(lambda state: state["legacy_streams"] == 0)
        stream = await Stream.open(server.port, get_request(session_id))
        async with asyncio.timeout(TIMEOUT):
            event = await stream.event()
        assert event is not None
        assert event["params"]["_meta"]["dev.tidings/change"]["revision"] == await server.change()


async def test_legacy_session_gets_the_notifications_it_did_not_read() -> None:
    """After a cable is cut, the server continues to write, and nothing arrives. The client reconnects with the id of
    the last event that it read, as clients of the SDKs do."""
    settings = Settings(policy={"write_deadline": 1.0, "keep_alive": 0.2})
    async with serve("uvicorn", settings) as server:
        session_id = await open_session(server.port)
        with sockets([connect_unread(server.port, get_request(session_id))]) as (client,):
            await server.until(lambda state: state["legacy_streams"] == 1)
            await server.change(update(1))
            read = await read_until(client, b"list_changed")
            drop_packets(client)
            await server.change(update(2), {"do": "add", "of": "prompts", "key": "new"})
            await server.until(lambda state: state["legacy_streams"] == 0)
        *_, last = re.findall(rb"\nid: (\S+)\r\n", read)
        stream = await Stream.open(server.port, get_request(session_id, last.decode()))
        async with asyncio.timeout(TIMEOUT):
            told = [await stream.event(), await stream.event()]
            assert sorted(event["method"] for event in told if event) == [
                "notifications/prompts/list_changed",
                "notifications/tools/list_changed",
            ]
            # Nothing else is sent: the next event is the next change.
            await server.change(update(3))
            event = await stream.event()
        assert event is not None
        assert event["params"]["tool"]["description"] == "3 "


async def test_unread_stream_behind_middleware_is_aborted() -> None:
    """`BaseHTTPMiddleware` replaces `receive`, so that Tidings can only end the request."""
    settings = Settings(policy={"write_deadline": 0.5, "journal_changes": 20}, is_wrapped=True)
    async with serve("uvicorn", settings) as server:
        with sockets(await open_unread_streams(server, 5)) as silent:
            await server.logged("listen stream was not read for 0.5 s; aborting it", times=5)
            await server.until(lambda state: (state["subscribers"], state["streams"]) == (0, 0))
            assert all(await asyncio.gather(*map(is_cut, silent)))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        pytest.param({"has_middleware": True}, ALL, id="middleware"),
        pytest.param({}, {"toolsListChanged": 1}, id="a loose request", marks=pytest.mark.slow),
    ],
)
async def test_unread_stream_of_the_sdk_is_aborted_and_cannot_keep_the_process(
    options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """If the user has a middleware, or only the SDK accepts the request, the SDK writes to the stream and waits for
    the client to read."""
    settings = Settings(policy={"write_deadline": 1.0, "journal_changes": 20}, **options)
    async with serve("uvicorn", settings) as server:
        until_nothing_is_left = await measure_baseline(server)
        with sockets(await fill_sdk_streams(server, 10, wanted)) as silent:
            await server.logged("listen stream was not read for 1.0 s; aborting it", times=10)
            assert all(await asyncio.gather(*map(is_cut, silent)))
            await until_nothing_is_left()
    async with serve("uvicorn", Settings(policy={"journal_changes": 20}, **options)) as server:
        stream = await listen(server.port, 1, wanted)
        resting = asyncio.ensure_future(stream.rest())
        with sockets(await fill_sdk_streams(server, 10, wanted)):
            server.send_signal(signal.SIGTERM)
            assert await server.wait_for_exit(within=TIMEOUT) < 2
            assert (await resting)[-1]["id"] == 1
            assert stream.is_terminated


# Clients that disconnect, and clients that vanish without a disconnect


@pytest.mark.parametrize("how", HTTP)
async def test_half_closed_connection_ends_the_stream(how: How) -> None:
    async with serve(how, Settings(policy={"keep_alive": UNMET})) as server:
        until_nothing_is_left = await measure_baseline(server)
        session_ids = await open_sessions(server, 5)
        streams = await many(10, lambda number: listen(server.port, number))
        streams += [await Stream.open(server.port, get_request(session_id)) for session_id in session_ids]
        for stream in streams:
            stream.half_close()
        for stream in streams:
            async with asyncio.timeout(TIMEOUT):
                assert await stream.event() is None
        # The legacy sessions stay open: their clients may open another stream.
        await server.until(
            lambda state: (state["listening"], state["legacy_streams"], state["subscribers"]) == (0, 0, 5)
        )
        await close_sessions(server, session_ids)
        await until_nothing_is_left()


@pytest.mark.parametrize("how", HTTP)
async def test_client_that_vanishes_without_closing_is_detected(how: How) -> None:
    """The client acknowledges no packet, and does not close the connection. A keep-alive is enough to detect this."""
    async with serve(how, Settings(policy={"write_deadline": 1.0, "keep_alive": 0.2})) as server:
        until_nothing_is_left = await measure_baseline(server)
        session_ids = await open_sessions(server, 2)
        requests = [listen_request(number) for number in range(5)] + [*map(get_request, session_ids)]
        with sockets([connect_unread(server.port, each) for each in requests]) as clients:
            await server.until(lambda state: (state["listening"], state["legacy_streams"]) == (5, 2))
            for client in clients:
                drop_packets(client)
            await server.until(lambda state: state["listening"] == 0)
            # Keep-alives of legacy streams are the SDK's, every 15 s. A change is noticed sooner.
            await server.change(update(1))
            await server.until(lambda state: state["legacy_streams"] == 0)
            await close_sessions(server, session_ids)
            await until_nothing_is_left()


_VICTIM = """
import socket, sys
print("here", flush=True)
requests = eval(sys.stdin.readline())
opened = []
for sent in requests:
    client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    client.sendall(sent)
    opened.append(client)
print("ready", flush=True)
while True:
    for client in opened:
        client.recv(100)
"""


@pytest.mark.parametrize("how", HTTP)
async def test_state_of_clients_killed_in_the_middle_of_a_stream_is_removed(how: How) -> None:
    async with serve(how, Settings(policy={"keep_alive": UNMET})) as server:
        until_nothing_is_left = await measure_baseline(server)
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _VICTIM, str(server.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert victim.stdin is not None
        assert victim.stdout is not None
        assert await victim.stdout.readline() == b"here\n"
        session_ids = await open_sessions(server, 10)
        requests = [listen_request(number) for number in range(40)] + [*map(get_request, session_ids)]
        victim.stdin.write(repr(requests).encode() + b"\n")
        assert await victim.stdout.readline() == b"ready\n"
        await server.until(lambda state: (state["listening"], state["legacy_streams"]) == (40, 10))
        for number in range(20):
            await server.change(update(number, 20_000))
            if number == 10:
                victim.kill()
        await victim.wait()
        victim._transport.close()  # type: ignore[attr-defined]  # else it warns when it is collected
        await server.until(lambda state: (state["listening"], state["legacy_streams"]) == (0, 0))
        await close_sessions(server, session_ids)
        await until_nothing_is_left()


@pytest.mark.parametrize(("how", "count"), [pytest.param("asgi", 10_000, marks=pytest.mark.slow), ("run", 1_000)])
async def test_memory_of_short_streams_is_freed(how: How, count: int) -> None:
    """Listen streams that end in every way a client can end them, and legacy sessions with their streams."""
    async with serve(how) as server:
        until_nothing_is_left = await measure_baseline(server)
        await open_and_close(server, 500, 100)
        await until_nothing_is_left()
        before = server.rss()
        await open_and_close(server, count * 28 // 25, 100)  # nine in ten are acknowledged
        await until_nothing_is_left()
        assert server.rss() - before < 2_000_000, "200 bytes for each of 10,000 streams"


async def test_parked_stream_takes_at_most_4_kb() -> None:
    """Each stream has its own principal, and `authorize` is called for it."""

    async def open_one(number: int) -> None:
        stream = await Stream.open(server.port, listen_request(number, authorization=f"Bearer {number}"))
        assert await stream.event()

    async with serve("run", Settings(is_guarded=True)) as server:
        await many(500, open_one)
        before = server.rss()
        await many(1_500, open_one)
        taken = (server.rss() - before) / 1_500
        objects = (await server.state(is_deep=True))["objects"]
        assert (objects["ParkedStream"], objects["AsgiStream"]) == (2_000, 0)
    assert taken <= 4_000
