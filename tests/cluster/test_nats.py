"""NATS as a backend: faults of the server and of the network, security, and the cleanup of consumers and processes.

Covers `embedded.py` and `nats_client.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.support.backends import replica
from tests.support.certificates import make_certificates
from tests.support.nats_credentials import make_credentials
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waiting import DEADLINE, free_port, is_running, until
from tidings.cluster import Nats
from tidings.cluster.backend import CallFailed, Entry, Unavailable
from tidings.cluster.embedded import EmbeddedNats
from tidings.errors import TidingsError

pytestmark = pytest.mark.anyio

STREAM = "KV_tidings-s"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path / "store", token=False) as server:
        yield server


@asynccontextmanager
async def admin(url: str) -> AsyncIterator[Any]:
    """Yield a function that sends a request to the API of JetStream."""
    client = await nats.connect(url)

    async def request(subject: str, **values: Any) -> Any:
        body = json.dumps(values).encode() if values else b""
        return json.loads((await client.request(f"$JS.API.{subject}", body, timeout=10)).data)

    request.client = client  # type: ignore[attr-defined]
    try:
        yield request
    finally:
        await client.close()


async def test_a_server_that_restarts_with_its_data_has_the_same_epoch(server: EmbeddedNats) -> None:
    async with replica(Nats(server.url), "s", "a") as a, replica(Nats(server.url), "s", "b") as b:
        await a.write(("x", b"1"), ("y", b"1"))
        await b.until({"x": b"1", "y": b"1"})
        for attempt, stop in enumerate((server.stop, server.kill)):
            await asyncio.to_thread(stop)
            await until(lambda: not a.is_connected and not b.is_connected)
            with pytest.raises(Unavailable, match="NATS cannot be reached"):
                await a.write(("x", b"lost"))
            with pytest.raises(CallFailed, match="NATS cannot be reached"):
                await a.backend.call("b", b"", lambda progress: None, 1)
            await asyncio.to_thread(server.start)
            await until(lambda: a.is_connected and b.is_connected)
            await b.write(("x", b"%d" % attempt))
            await a.until({"x": b"%d" % attempt, "y": b"1"})

        assert len(set(a.epochs)) == 1
        assert len(a.epochs) == 3
        assert len(a.lost) == len(b.lost) == 2  # reported once for each outage
        assert a.seen == sorted(a.seen)


async def test_a_server_that_restarts_without_its_data_has_another_epoch(server: EmbeddedNats, tmp_path: Path) -> None:
    async with replica(Nats(server.url), "s", "a") as a, replica(Nats(server.url), "s", "b") as b:
        await a.write(*((f"k/{number}", b"1") for number in range(10)))
        await until(lambda: len(b.table) == 10)
        server.kill()
        shutil.rmtree(tmp_path / "store")
        await asyncio.to_thread(server.start)
        await until(lambda: len(a.epochs) == len(b.epochs) == 2)
        assert a.epochs[1] == b.epochs[1] != a.epochs[0]
        assert a.table == b.table == {}

        await a.write(("new", b"1"))
        await b.until({"new": b"1"})
        assert b.seen == sorted(set(b.seen))


async def test_a_deleted_stream_is_created_again(server: EmbeddedNats) -> None:
    async with replica(Nats(server.url), "s", "a") as a, admin(server.url) as request:
        await a.write(("x", b"1"))
        await a.until({"x": b"1"})
        await request(f"STREAM.DELETE.{STREAM}")
        await until(lambda: len(a.epochs) == 2)
        assert a.table == {}
        assert "sent nothing for 2 s" in a.lost[0]


async def test_a_server_that_does_not_respond_is_noticed(server: EmbeddedNats) -> None:
    async with replica(Nats(server.url), "s", "a") as a:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await until(lambda: not a.is_connected)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await until(lambda: a.is_connected)
        await a.write(("x", b"1"))
        await a.until({"x": b"1"})


async def test_lost_connections_leave_no_consumer_behind(server: EmbeddedNats) -> None:
    async with tcp_proxy(server.port) as proxy, admin(server.url) as request:
        async with (
            replica(Nats(f"nats://127.0.0.1:{proxy.port}"), "s", "a") as a,
            replica(Nats(server.url), "s", "b") as b,
        ):
            for number in range(5):
                await b.write(("x", b"%d" % number))
                await a.until({"x": b"%d" % number})
                proxy.cut()
                await until(lambda number=number: len(a.lost) == number + 1)  # type: ignore[misc]
                await until(lambda: a.is_connected)
            assert len((await request(f"CONSUMER.LIST.{STREAM}"))["consumers"]) == 2
            assert b.lost == []
        assert (await request(f"CONSUMER.LIST.{STREAM}"))["consumers"] == []


async def test_a_write_that_is_not_acknowledged_is_not_certain(server: EmbeddedNats) -> None:
    async with tcp_proxy(server.port) as proxy, replica(Nats(f"nats://127.0.0.1:{proxy.port}"), "s", "a") as a:
        proxy.silence()
        with pytest.raises(Unavailable):
            await a.write(("x", b"1"))
        proxy.resume()
        await until(lambda: a.is_connected)
        await a.write(("x", b"2"))
        await a.until({"x": b"2"})


async def test_a_handler_ends_when_its_caller_is_lost_and_a_call_when_its_handler_is(server: EmbeddedNats) -> None:
    async with (
        tcp_proxy(server.port) as proxy,
        replica(Nats(server.url), "s", "a") as a,
        replica(Nats(f"nats://127.0.0.1:{proxy.port}"), "s", "b") as b,
    ):
        progress: list[bytes] = []
        to_b = asyncio.create_task(a.backend.call("b", b"wait", progress.append, 600))
        to_a = asyncio.create_task(b.backend.call("a", b"wait", progress.append, 600))
        await until(lambda: len(progress) == 6)
        proxy.cut()
        for call in (to_a, to_b):
            with pytest.raises(CallFailed):
                await call
        await until(lambda: a.cancelled == b.cancelled == 1)


async def test_a_message_that_cannot_be_decoded_is_counted_and_skipped(server: EmbeddedNats) -> None:
    backend = Nats(server.url)
    async with replica(backend, "s", "a") as a, admin(server.url) as request:
        client = request.client
        for subject in ("a.b", "=zz", "=FF", f"={'0' * 64}"):
            await client.publish(f"$KV.tidings-s.{subject}", b"?")
        await client.publish("tidings.s.call.a", b"?", reply="nobody.listens")
        await client.publish("tidings.s.cancel.a", b"\xff")
        await a.write(("x", b"1"))
        await a.until({"x": b"1"})
        await until(lambda: backend.undecodable == 5)


async def test_a_stream_with_another_configuration_is_refused(server: EmbeddedNats) -> None:
    async with admin(server.url) as request:
        await request(f"STREAM.CREATE.{STREAM}", name=STREAM, subjects=["$KV.tidings-s.>"])
    backend = Nats(server.url)
    assert "was not created by Tidings" in await reason_of(backend)


async def test_an_error_of_the_watcher_loads_the_table_again(
    server: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(Nats(server.url), "s", "a") as a:
        works = a.apply

        def fail(entries: Sequence[Entry]) -> None:
            a.apply = works  # type: ignore[method-assign]
            raise ValueError("a defect")

        a.apply = fail  # type: ignore[method-assign]
        await a.write(("x", b"1"))
        await a.until({"x": b"1"})
        assert a.lost == ["ValueError: a defect"]
        assert "the connection to NATS ended unexpectedly" in caplog.text


@pytest.mark.slow  # the other servers elect a leader first
async def test_a_cluster_of_three_nats_servers_may_lose_one(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                EmbeddedNats(
                    token=False,
                    config=f"server_name: n{port}\n"
                    f'cluster {{ name: three, listen: "127.0.0.1:{port}", routes: [{routes}] }}',
                )
            )
            for port in ports
        ]
        url = ",".join(server.url for server in servers)
        async with (
            replica(Nats(url, copies=3), "s", "a") as a,
            replica(Nats(url, copies=3), "s", "b") as b,
            admin(url.partition(",")[0]) as request,
        ):
            await a.write(("x", b"1"), ("y", b"1"))
            leader = (await request(f"STREAM.INFO.{STREAM}"))["cluster"]["leader"]
            servers[ports.index(int(leader.removeprefix("n")))].kill()
            async with asyncio.timeout(DEADLINE):
                while a.table.get("x") != b"2":
                    try:
                        await a.write(("x", b"2"))
                    except Unavailable:
                        await until(lambda: a.is_connected)
            await b.until({"x": b"2", "y": b"1"})
            assert set(a.epochs) == set(b.epochs)
            assert len(set(a.epochs)) == 1


async def reason_of(backend: Nats) -> str:
    """Return why a backend cannot connect."""
    reasons: list[str] = []

    class Watcher:
        def load(self, *values: object) -> None:
            raise AssertionError("it has connected")

        apply = load

        def lose(self, reason: str) -> None:
            reasons.append(reason)

    async def handle(request: bytes, on_progress: object) -> bytes:
        return b""

    running = asyncio.create_task(backend.run("s", "a", Watcher(), handle))
    await until(lambda: reasons or running.done())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    return reasons[0]


async def test_a_server_that_is_not_there_is_reported_once() -> None:
    assert "127.0.0.1:1" in await reason_of(Nats("nats://127.0.0.1:1"))


async def test_tls(tmp_path: Path) -> None:
    authority, certificate = make_certificates(tmp_path, "127.0.0.1")
    config = f'tls {{ cert_file: "{certificate}", key_file: "{certificate}" }}'
    with EmbeddedNats(config=config, scheme="tls") as server:
        context = ssl.create_default_context(cafile=str(authority))
        async with replica(Nats(server.url, tls=context), "s", "a") as a:
            await a.write(("x", b"1"))
            await a.until({"x": b"1"})
        assert "certificate verify failed" in await reason_of(Nats(server.url))


async def test_nothing_secret_is_sent_to_a_server_without_tls(server: EmbeddedNats) -> None:
    assert "does not use TLS" in await reason_of(Nats(server.url.replace("nats://", "tls://user:secret@")))


async def test_token_and_password() -> None:
    with EmbeddedNats() as server:
        async with replica(Nats(server.url), "s", "a"):
            pass
        bare = f"nats://127.0.0.1:{server.port}"
        reason = await reason_of(Nats(bare, token="wrong"))
        assert "Authorization Violation" in reason
        assert "wrong" not in reason
    config = 'authorization { user: "me@home", password: "a/b:c" }'
    with EmbeddedNats(token=False, config=config) as server:
        async with replica(Nats(server.url.replace("//", "//me%40home:a%2Fb%3Ac@")), "s", "a"):
            pass


def documented_permissions(direction: str) -> list[str]:
    """Return the subjects that docs/cluster.md lists for the server `board`, as those of the server `s`."""
    lines = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {direction} |")]
    return [subject.replace("board", "s") for subject in re.findall("`(.+?)`", row)]


async def test_credentials_with_the_documented_permissions_of_one_server(tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    publish, subscribe = map(documented_permissions, ("publish", "subscribe"))
    with EmbeddedNats(token=False, config=make_credentials(path, publish, subscribe)) as server:
        backends = [Nats(server.url, credentials=path) for _ in range(2)]
        async with replica(backends[0], "s", "a") as a, replica(backends[1], "s", "b") as b:
            await a.write(*((f"k/{number}", b"x" * 10_000) for number in range(1000)))  # enough for flow control
            await until(lambda: len(b.table) == 1000)
            assert await a.backend.call("b", b"hello", lambda progress: None, 30) == b"b got hello"
            await b.write(("k/0", None))
            await until(lambda: len(a.table) == 999)
        assert "Authorization Violation" in await reason_of(Nats(server.url))
        # Another server name is refused.
        other = Nats(server.url, credentials=path, prefix="other")
        assert "the NATS server denies" in await reason_of(other)


async def test_denied_flow_control_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "user.creds"
    publish = [each for each in documented_permissions("publish") if not each.startswith("$JS.FC.")]
    config = make_credentials(path, publish, documented_permissions("subscribe"))
    with EmbeddedNats(token=False, config=config) as server:
        async with replica(Nats(server.url, credentials=path), "s", "a") as a:
            with suppress(Unavailable):
                await a.write(*((f"k/{number}", b"x" * 10_000) for number in range(1000)))
            await until(lambda: a.lost)
            assert "denies a subject" in a.lost[0]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://x", "has the form nats://HOST:PORT"),
        ("nats://", "has the form nats://HOST:PORT"),
        ("nats://user:secret@x:99999", "a NATS URL is invalid"),
    ],
)
def test_an_invalid_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(TidingsError, match=message) as caught:
        Nats(url)
    assert "secret" not in str(caught.value)


def test_invalid_credentials_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TidingsError, match="cannot be read"):
        Nats("nats://x", credentials=tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(TidingsError, match=r"is it a \.creds file"):
        Nats("nats://x", credentials=tmp_path / "empty")


def test_the_error_without_the_packages_names_the_extra() -> None:
    program = "import sys; sys.modules['nats'] = None; from tidings.cluster import MemoryBackend, Nats"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert 'TidingsError: NATS, which connects workers and replicas, needs the extra "nats"' in found.stderr


async def test_the_embedded_server_ends_with_a_killed_process() -> None:
    program = """
import sys
from tidings.cluster.embedded import EmbeddedNats
with EmbeddedNats() as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    pid = int(await child.stdout.readline())
    child.kill()
    await child.wait()
    await until(lambda: not is_running(pid))


def test_an_interrupted_start_leaves_no_process(tmp_path: Path) -> None:
    program = """
import pathlib, sys, tempfile
from tidings.cluster.embedded import EmbeddedNats
folder = pathlib.Path(tempfile.gettempdir())
def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".ports"):
        print(server.pid, flush=True)
        while not list(folder.glob("*/*.ports")):
            pass
        raise KeyboardInterrupt
sys.addaudithook(interrupt)
server = EmbeddedNats()
try:
    server.start()
except KeyboardInterrupt:
    pass
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
        timeout=60,
    )
    assert not is_running(int(found.stdout))
    assert not list(tmp_path.iterdir())


def test_an_embedded_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with EmbeddedNats(token=False) as server, pytest.raises(TidingsError, match="did not start"):
        EmbeddedNats(port=server.port).start()


def test_an_embedded_server_that_is_not_installed_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda name: [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TidingsError, match="embedded NATS server needs the extra"):
        EmbeddedNats().start()
    assert list(tmp_path.iterdir()) == []
