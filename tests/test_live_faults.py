"""What clients do to a server: never read, half-close, vanish, come and go by the thousand; and what stopping it takes.

Every server here is a process of its own, and every client a real socket. A reader that stops reading costs one
mailbox and delays nobody; whoever is gone leaves nothing behind; a signal ends every stream as the protocol says.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from tempfile import TemporaryFile
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError

from tests.faults.crowd import (
    churn,
    deafen,
    fill_carried,
    many,
    open_legacy,
    quiet,
    read_until,
    readers,
    sockets,
    update,
)
from tests.faults.wire import (
    ALL,
    COMMANDS,
    LEGACY,
    MODERN,
    PATIENCE,
    ROOT,
    WATCHED,
    How,
    Process,
    Settings,
    Stream,
    deaf,
    envelope,
    environment,
    get_request,
    is_cut,
    listen,
    listen_request,
    modern_request,
    open_session,
    request,
    serve,
    silence,
)

pytestmark = pytest.mark.anyio

HTTP: tuple[How, ...] = ("asgi", "run")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


# Readers that don't read


@pytest.mark.alone
@pytest.mark.parametrize("how", HTTP)
async def test_two_hundred_that_never_read_delay_nobody_and_cost_a_mailbox_each(
    how: How, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two servers side by side, one of them with 200 readers that are full; rounds take turns."""
    settings = Settings(policy={"write_deadline": 100.0, "journal_changes": 20})
    async with serve(how, settings) as alone, serve(how, settings) as crowded, readers(alone, 50) as few:
        silent = await deafen(crowded, listening=160, sessions=40)
        with sockets(silent):
            async with readers(crowded, 50) as among:
                for _ in range(5):
                    await few.round(10_000)
                    await among.round(10_000)
                full = await crowded.state()
                before = crowded.rss()
                times: dict[str, list[float]] = {"alone": [], "crowded": []}
                for _ in range(60):
                    times["alone"].append(await few.round(10_000))
                    times["crowded"].append(await among.round(10_000))
                state = await crowded.state(is_deep=True)
                growth = crowded.rss() - before
    without, with_silent = (statistics.median(times[name]) for name in ("alone", "crowded"))
    with capsys.disabled():
        sys.stdout.write(
            f"\n[{how}] 50 readers: {without * 1e3:.2f} ms without, {with_silent * 1e3:.2f} ms with 200 that never "
            f"read ({with_silent / without:.2f}x); 60 changes grew the server by {growth / 1e3:.0f} kB\n"
        )
    assert state["stuck"] == 200
    assert state["most_pending"] == 1, "one topic changed, however often"
    assert state["objects"]["Mailbox"] == 200
    assert state["objects"]["Entry"] == 200
    assert state["tasks"] <= full["tasks"], "a change must not start tasks for those who don't read"
    assert growth < 4e6, "60 changes of 10 kB, kept for 200 readers, would be 120 MB"
    # Below 4 ms, 1.5 times is less than what a busy machine adds by itself.
    assert with_silent <= max(1.5 * without, without + 0.002)


@pytest.mark.parametrize("how", HTTP)
async def test_past_the_write_deadline_they_are_cut_off_and_all_of_theirs_is_gone(how: How) -> None:
    settings = Settings(policy={"write_deadline": 1.0, "journal_changes": 20}, options={"session_idle_timeout": 2.0})
    async with serve(how, settings) as server:
        base, fds = await server.state(is_deep=True), server.fds()
        async with readers(server, 5) as among:
            with sockets(await deafen(server, listening=30, sessions=10)) as silent:
                await server.logged("listen stream was not read for 1.0 s; cutting it off", times=30)
                await server.logged("legacy stream was not read for 1.0 s; cutting it off", times=10)
                cut = await asyncio.gather(*map(is_cut, silent))
                assert all(cut)
                # The sessions outlive their streams until the SDK finds them idle.
                state = await server.until(lambda state: state["subscribers"] == 5)
                assert (state["listening"], state["spliced"], state["streams"]) == (5, 0, 5)
                await among.round(100)
        await server.until(lambda state: state["objects"] == base["objects"], is_deep=True)
        await server.until(lambda _: server.fds() <= fds)
        assert not server.errors()


@pytest.mark.parametrize("how", HTTP)
async def test_a_legacy_session_that_was_cut_off_is_told_when_it_comes_back(how: How) -> None:
    """What was cut off with its stream was never read: it must not count as told."""
    async with serve(how, Settings(policy={"write_deadline": 0.5, "journal_changes": 20})) as server:
        session_id = await open_session(server.port)
        with sockets([deaf(server.port, get_request(session_id))]) as (silent,):
            await server.until(lambda state: state["spliced"] == 1)
            number = 0
            while not (await server.state())["stuck"]:
                number += 1
                await server.change(update(number, 60_000))
            await server.logged("legacy stream was not read for 0.5 s; cutting it off")
            assert await is_cut(silent)
            await server.until(lambda state: state["spliced"] == 0)
        stream = await Stream.open(server.port, get_request(session_id))
        async with asyncio.timeout(PATIENCE):
            event = await stream.event()
        assert event is not None
        assert event["params"]["_meta"]["dev.tidings/change"]["revision"] == await revision(server)


async def test_a_legacy_session_whose_stream_broke_is_told_what_it_did_not_read() -> None:
    """A cut cable: the server writes on for a while, and nothing of it arrives. The client comes back with the id of
    the last event that it read, as the SDKs' clients do."""
    settings = Settings(policy={"write_deadline": 1.0, "keep_alive": 0.2})
    async with serve("uvicorn", settings) as server:
        session_id = await open_session(server.port)
        with sockets([deaf(server.port, get_request(session_id))]) as (client,):
            await server.until(lambda state: state["spliced"] == 1)
            await server.change(update(1))
            read = await read_until(client, b"list_changed")
            silence(client)
            await server.change(update(2), {"do": "add", "of": "prompts", "key": "new"})
            await server.until(lambda state: state["spliced"] == 0)
        (last,) = re.findall(rb"\nid: (\S+)\r\n", read)
        stream = await Stream.open(server.port, get_request(session_id, last.decode()))
        async with asyncio.timeout(PATIENCE):
            told = [await stream.event(), await stream.event()]
            assert sorted(event["method"] for event in told if event) == [
                "notifications/prompts/list_changed",
                "notifications/tools/list_changed",
            ]
            # And nothing but that: what comes next is the next change.
            await server.change(update(3))
            event = await stream.event()
        assert event is not None
        assert event["params"]["tool"]["description"] == "3 "


async def test_a_stream_behind_a_middleware_that_hides_the_connection_is_cut_off_too() -> None:
    """`BaseHTTPMiddleware` gives the app a `receive` of its own: only the request's end is in our hands."""
    settings = Settings(policy={"write_deadline": 0.5, "journal_changes": 20}, is_wrapped=True)
    async with serve("uvicorn", settings) as server:
        with sockets(await deafen(server, listening=5, sessions=0)) as silent:
            await server.logged("listen stream was not read for 0.5 s; cutting it off", times=5)
            await server.until(lambda state: (state["subscribers"], state["streams"]) == (0, 0))
            assert all(await asyncio.gather(*map(is_cut, silent)))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"has_middleware": True}, ALL), ({}, {"toolsListChanged": 1})],
    ids=["middleware", "a loose request"],
)
async def test_a_stream_that_the_sdk_carries_is_cut_off_too_and_keeps_no_process(
    options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Where the user's own middleware must see every request, and where only the SDK takes it for a request: the SDK
    writes to the stream then, and waits for a reader."""
    settings = Settings(policy={"write_deadline": 1.0, "journal_changes": 20}, **options)
    async with serve("uvicorn", settings) as server:
        base, fds = await server.state(is_deep=True), server.fds()
        with sockets(await fill_carried(server, 10, wanted)) as silent:
            await server.logged("listen stream was not read for 1.0 s; cutting it off", times=10)
            assert all(await asyncio.gather(*map(is_cut, silent)))
            await server.until(lambda state: state["objects"] == base["objects"], is_deep=True)
            await server.until(lambda _: server.fds() <= fds)
    async with serve("uvicorn", Settings(policy={"journal_changes": 20}, **options)) as server:
        stream = await listen(server.port, 1, wanted)
        resting = asyncio.ensure_future(stream.rest())
        with sockets(await fill_carried(server, 10, wanted)):
            server.send_signal(signal.SIGTERM)
            assert await server.ended(within=PATIENCE) < 2
            assert (await resting)[-1]["id"] == 1
            assert stream.is_terminated


async def revision(server: Process) -> int:
    _, _, body = await request(server.port, "POST", "/change", body=[])
    return int(body)


# Clients that are gone, and clients that only seem to be there


@pytest.mark.parametrize("how", HTTP)
async def test_a_client_that_closes_its_half_is_gone(how: How) -> None:
    async with serve(how) as server:
        streams = await many(10, lambda number: listen(server.port, number))
        streams += await many(5, lambda _: open_legacy(server.port))
        for stream in streams:
            stream.half_close()
        for stream in streams:
            async with asyncio.timeout(PATIENCE):
                assert await stream.event() is None
        # The legacy sessions themselves live on: their clients may open another stream.
        await server.until(lambda state: (state["listening"], state["spliced"], state["subscribers"]) == (0, 0, 5))
        kept = {
            "Subscriber": 5,
            "SplicedSession": 5,
            "Mailbox": 0,
            "Entry": 0,
            "Channel": 0,
            "Parked": 0,
            "ListenStream": 0,
        }
        await server.until(lambda state: kept.items() <= state["objects"].items(), is_deep=True)
        assert not server.errors()


@pytest.mark.parametrize("how", HTTP)
async def test_a_client_behind_a_cut_cable_is_noticed(how: How) -> None:
    """Nobody acknowledges what is sent, and nobody closes the connection. A keep-alive is enough to notice."""
    settings = Settings(policy={"write_deadline": 1.0, "keep_alive": 0.2}, options={"session_idle_timeout": 1.0})
    async with serve(how, settings) as server:
        base, fds = await server.state(is_deep=True), server.fds()
        session_ids = await many(2, lambda _: open_session(server.port))
        requests = [listen_request(number) for number in range(5)] + [*map(get_request, session_ids)]
        with sockets([deaf(server.port, each) for each in requests]) as clients:
            await server.until(lambda state: (state["listening"], state["spliced"]) == (5, 2))
            for client in clients:
                silence(client)
            await server.until(lambda state: state["listening"] == 0)
            # Keep-alives of legacy streams are the SDK's, every 15 s. A change is noticed sooner.
            await server.change(update(1))
            await server.until(lambda state: (state["spliced"], state["streams"]) == (0, 0))
            await server.until(lambda state: state["objects"] == base["objects"], is_deep=True)
            await server.until(lambda _: server.fds() <= fds)
        assert not server.errors()


_VICTIM = """
import socket, sys
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
async def test_clients_killed_in_the_middle_of_a_stream_leave_nothing(how: How) -> None:
    async with serve(how, Settings(options={"session_idle_timeout": 1.0})) as server:
        base, fds = await server.state(is_deep=True), server.fds()
        session_ids = await many(10, lambda _: open_session(server.port))
        requests = [listen_request(number) for number in range(40)] + [*map(get_request, session_ids)]
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _VICTIM, str(server.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert victim.stdin is not None
        assert victim.stdout is not None
        victim.stdin.write(repr(requests).encode() + b"\n")
        assert await victim.stdout.readline() == b"ready\n"
        await server.until(lambda state: (state["listening"], state["spliced"]) == (40, 10))
        for number in range(20):
            await server.change(update(number, 20_000))
            if number == 10:
                victim.kill()
        await victim.wait()
        victim._transport.close()  # type: ignore[attr-defined]  # else it warns when it is collected
        await server.until(lambda state: (state["subscribers"], state["streams"], state["spliced"]) == (0, 0, 0))
        await server.until(lambda state: state["objects"] == base["objects"], is_deep=True)
        await server.until(lambda _: server.fds() <= fds)
        assert not server.errors()


@pytest.mark.parametrize(("how", "count"), [("asgi", 10_000), ("run", 2_000)])
async def test_ten_thousand_come_and_go_and_nothing_of_them_stays(
    how: How, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listen streams that end in every way a client can end them, and legacy sessions with their streams."""
    async with serve(how) as server:
        await churn(server, 1_000, 200)
        base, before, fds = await quiet(server), server.rss(), server.fds()
        start = time.monotonic()
        await churn(server, count * 28 // 25, 200)  # nine in ten are acknowledged
        seconds = time.monotonic() - start
        after = await quiet(server)
        growth = server.rss() - before
        with capsys.disabled():
            sys.stdout.write(
                f"\n[{how}] {count:,} streams and 200 sessions came and went in {seconds:.1f} s; "
                f"the server went from {before / 1e6:.1f} MB by {growth / 1e3:+.0f} kB\n"
            )
        assert after == base
        await server.until(lambda _: server.fds() <= fds)
        assert growth < 2_000_000, "200 bytes for each that came"
        assert not server.errors()


@pytest.mark.parametrize(("how", "is_guarded", "most"), [("run", True, 4_000), ("uvicorn", False, 4_000)])
async def test_a_stream_takes_no_more_than_it_may(
    how: How, is_guarded: bool, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parked, 4 kB with a caller of its own and all that is asked of it."""

    async def open_one(number: int) -> None:
        request = listen_request(number, authorization=f"Bearer {number}")
        stream = await Stream.open(server.port, request)
        assert await stream.event()

    async with serve(how, Settings(is_guarded=is_guarded)) as server:
        await many(500, open_one)
        before = server.rss()
        await many(1_500, open_one)
        taken = (server.rss() - before) / 1_500
        assert (await server.state())["listening"] == 2_000
        objects = (await server.state(is_deep=True))["objects"]
        assert (objects["Parked"], objects["Channel"]) == (2_000, 0)
    with capsys.disabled():
        sys.stdout.write(f"\n[{how}] a stream takes {taken / 1e3:.1f} kB\n")
    assert taken <= most


# Stopping


@pytest.mark.alone
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("how", [*HTTP, "uvicorn"])
async def test_a_signal_ends_five_hundred_streams_gracefully(
    how: How, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(how) as server:
        listening = await many(500, lambda number: listen(server.port, number))
        legacy = await many(50, lambda _: open_legacy(server.port))
        await server.change(update(1))
        resting = [asyncio.ensure_future(stream.rest()) for stream in listening + legacy]
        await server.until(lambda state: (state["listening"], state["spliced"]) == (500, 50))
        server.send_signal(number)
        seconds = await server.ended(within=PATIENCE)
        rests = await asyncio.gather(*resting)
    for request_id, (stream, events) in enumerate(zip(listening, rests, strict=False)):
        told, result = events
        assert told["method"] == "notifications/tools/list_changed"
        assert result["id"] == request_id
        assert result["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == request_id
        assert stream.is_terminated
    for stream, events in zip(legacy, rests[500:], strict=True):
        assert [event["method"] for event in events] == ["notifications/tools/list_changed"]
        assert stream.is_terminated
    with capsys.disabled():
        sys.stdout.write(f"\n[{how}, {number.name}] gone with 550 streams after {seconds:.2f} s\n")
    assert seconds < 2
    assert not server.errors()


@pytest.mark.alone
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("how", HTTP)
async def test_readers_that_do_not_read_cannot_keep_the_process(how: How, number: signal.Signals) -> None:
    """With the default write deadline of 20 s."""
    async with serve(how, Settings(policy={"journal_changes": 20})) as server:
        streams = await many(5, lambda number: listen(server.port, number))
        resting = [asyncio.ensure_future(stream.rest()) for stream in streams]
        with sockets(await deafen(server, listening=10, sessions=5)):
            server.send_signal(number)
            assert await server.ended(within=PATIENCE) < 2
            for request_id, events in enumerate(await asyncio.gather(*resting)):
                assert events[-1]["id"] == request_id
                assert "result" in events[-1]
        assert not server.errors()


@pytest.mark.alone
@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_ends_a_listen_on_stdio_gracefully(number: signal.Signals) -> None:
    async with serve("stdio") as server:
        child = server.process
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(envelope("subscriptions/listen", "mine", {"notifications": ALL})).encode() + b"\n")
        async with asyncio.timeout(PATIENCE):
            acknowledged = json.loads(await child.stdout.readline())
            assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
            server.send_signal(number)
            seconds = await server.ended(within=PATIENCE)
            rest = [json.loads(line) async for line in child.stdout]
        (result,) = rest
        assert result["id"] == "mine"
        assert result["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == "mine"
        assert seconds < 2
        assert not server.errors()


# What the user's own code does to us, and must not do to the user


@asynccontextmanager
async def connect(
    how: How, settings: Settings, mode: str, told: asyncio.Queue[Any]
) -> AsyncIterator[tuple[Client, Any]]:
    """A client of the SDK, and a function that waits for a line in the server's log."""

    async def note(message: Any) -> None:
        told.put_nowait(message)

    if how == "stdio":
        with TemporaryFile("w+") as log:
            parameters = StdioServerParameters(
                command=sys.executable, args=COMMANDS["stdio"], env=environment(settings), cwd=ROOT
            )

            async def read_log(pattern: str) -> None:
                log.seek(0)
                assert re.search(pattern, log.read())

            async with Client(stdio_client(parameters, errlog=log), mode=mode, message_handler=note) as client:
                yield client, read_log
    else:
        async with serve(how, settings) as server:
            url = f"http://127.0.0.1:{server.port}/mcp"
            async with Client(url, mode=mode, message_handler=note) as client:
                yield client, server.logged


@pytest.mark.filterwarnings("ignore:resources/subscribe is removed")
@pytest.mark.parametrize("mode", ["legacy", MODERN])
@pytest.mark.parametrize("how", ["uvicorn", "run", "stdio"])
async def test_whatever_of_the_users_raises_no_request_and_no_tool_call_fails(how: How, mode: str) -> None:
    """authorize, both hooks, a sink of the catalog and a callback of the hub: all of them raise."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    async with connect(how, Settings(is_broken=True), mode, told) as (client, logged), AsyncExitStack() as stack:
        if mode == "legacy":
            await client.subscribe_resource(WATCHED)
            with pytest.raises(MCPError, match="may not watch"):
                await client.subscribe_resource("board://other")
        else:
            listening = client.listen(tools_list_changed=True, resource_subscriptions=[WATCHED, "board://other"])
            subscription = await stack.enter_async_context(listening)
            assert subscription.honored.resource_subscriptions == [WATCHED]
        echoed = await client.call_tool("echo", {"text": "hello"})
        assert echoed.content[0].text == "hello"  # type: ignore[union-attr]
        changes = [update(1), {"do": "updated", "of": "resources", "key": WATCHED, "text": "etag"}]
        changed = await client.call_tool("change", {"operations": changes})
        assert not changed.is_error
        async with asyncio.timeout(PATIENCE):
            heard = {(await told.get()).method, (await told.get()).method}
        assert heard == {"notifications/tools/list_changed", "notifications/resources/updated"}
        assert [tool.description for tool in (await client.list_tools()).tools if tool.name == "echo"] == ["1 "]
        for culprit in ("user's authorize", "user's hook", "sink of the catalog", "user's callback"):
            await logged(f"RuntimeError: the {culprit} is broken|RuntimeError: a {culprit} is broken")


@pytest.mark.parametrize("how", HTTP)
async def test_a_list_handler_that_raises_fails_no_other_request_and_heals(how: How) -> None:
    async with serve(how, Settings(is_lowlevel=True)) as server:
        await server.change({"do": "fail", "of": "tools", "key": "", "text": "yes"})
        called = json.loads(await ask(server, "tools/call", {"name": "echo", "arguments": {"text": "hello"}}))
        assert called["result"]["content"][0]["text"] == "hello"
        stream = await listen(server.port, 1)
        session_id = await open_session(server.port)
        legacy = await Stream.open(server.port, get_request(session_id))
        assert legacy.status == 200
        await server.change({"do": "add", "of": "tools", "key": "unseen"})
        failed = json.loads(await ask(server, "tools/list", {}))
        assert failed["error"]["code"] == -32603, "the user's own error is the user's own"
        await server.logged("RuntimeError: the user's list handler is broken")
        await server.change({"do": "fail", "of": "tools", "key": ""}, {"do": "add", "of": "tools", "key": "seen"})
        for each in (stream, legacy):
            async with asyncio.timeout(PATIENCE):
                event = await each.event()
            assert event is not None
            assert event["method"] == "notifications/tools/list_changed"
        listed = json.loads(await ask(server, "tools/list", {}))
        assert {"seen", "unseen"} <= {tool["name"] for tool in listed["result"]["tools"]}


@pytest.mark.alone
@pytest.mark.parametrize("how", HTTP)
async def test_a_list_handler_that_hangs_keeps_no_other_request(how: How) -> None:
    async with serve(how, Settings(is_lowlevel=True, lists_fail="hang")) as server:
        await server.logged("lists were not there after 1.0 s; going on without them")
        start = time.monotonic()
        session_id = await open_session(server.port)
        await listen(server.port, 1)
        await open_legacy(server.port)
        # The SDK itself asks for the list before a call of the modern protocol.
        call = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "echo", "arguments": {"text": "hi"}},
        }
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        headers |= {"mcp-session-id": session_id, "mcp-protocol-version": LEGACY}
        status, _, body = await request(server.port, "POST", "/mcp", headers, call)
        assert status == 200
        assert b'"text":"hi"' in body
        assert time.monotonic() - start < 1, "only the start of the server waits"


async def ask(server: Process, method: str, params: dict[str, Any]) -> bytes:
    """One modern request, answered as JSON or as the only event of a stream."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(modern_request(method, 1, params).replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            answer = await reader.read()
        finally:
            writer.close()
    return bytes(re.findall(rb"\{.*\}", answer)[-1])
