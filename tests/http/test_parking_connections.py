"""Parked streams over IPv6, over a Unix socket and over TLS, and clients over TLS that never say goodbye."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import make_certificates
from tests.support.faults.wire import listen_request
from tests.support.loops import anyio_backend
from tests.support.streams import ANOTHER, Capitals, Server, check_told, connected, rest, serving
from tests.support.waiting import DEADLINE, until
from tidings import Policy
from tidings.http.parking import Parked
from tidings.http.stream import Channel

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio


async def test_a_stream_over_ipv6_is_parked() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    request = listen_request(1).replace(b"127.0.0.1:80", b"[::1]:80")
    async with serving(host="::1") as server, connected(server, request) as (stream, _):
        await check_told(server, stream)
        assert isinstance(server.outlets[0], Parked)


async def test_a_stream_over_a_unix_socket_is_parked(tmp_path: Path) -> None:
    async with (
        serving(uds=str(tmp_path / "s")) as server,
        connected(server, listen_request(1)) as (stream, _),
    ):
        await check_told(server, stream)
        assert isinstance(server.outlets[0], Parked)


async def test_a_stream_over_tls_is_parked(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=files["ssl_ca_certs"])
    async with (
        serving(**files) as server,
        connected(server, listen_request(1), ssl=trust, server_hostname="localhost") as (stream, _),
    ):
        await check_told(server, stream)
        assert isinstance(server.outlets[0], Parked)
        server.live.stop()
        (result,) = await rest(stream)
        assert result["id"] == 1
        assert stream.is_terminated


class Curt:
    """A client over TLS that reads what it is sent, and never says that it will close its end too."""

    def __init__(self, address: Any, trust: ssl.SSLContext, request: bytes) -> None:
        self._socket = trust.wrap_socket(socket.create_connection(address, DEADLINE), server_hostname="localhost")
        self._socket.sendall(request)
        self.text = b""

    def read_until(self, mark: bytes) -> None:
        while mark not in self.text:
            data = self._socket.recv(1 << 16)
            assert data, f"the connection ended after {self.text[-100:]!r}"
            self.text += data

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def curt(server: Server, files: dict[str, str], request: bytes) -> AsyncIterator[Curt]:
    trust = ssl.create_default_context(cafile=files["ssl_ca_certs"])
    client = await asyncio.to_thread(Curt, server.address, trust, request)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("is_parked", [True, False], ids=["parked", "plain"])
async def test_over_tls_who_never_says_goodbye_cannot_keep_the_process(tmp_path: Path, is_parked: bool) -> None:
    """As under `uvicorn --ssl-keyfile …`, which waits for every connection, however long it takes."""
    files = certificate(tmp_path)
    middleware = [] if is_parked else [Capitals]
    async with (
        serving(*middleware, http="httptools", timeout_graceful_shutdown=None, **files) as server,
        curt(server, files, listen_request(1)) as client,
    ):
        await asyncio.to_thread(client.read_until, b"acknowledged")
        await until(lambda: [type(outlet) for outlet in server.outlets] == [Parked if is_parked else Channel])
        server.live.stop()
        server.uvicorn.should_exit = True
        await asyncio.to_thread(client.read_until, b"\r\n0\r\n\r\n")
        async with asyncio.timeout(15):  # both event loops give up by themselves, after 30 s
            await until(lambda: not server.uvicorn.server_state.connections)


async def test_over_tls_a_stream_that_has_ended_takes_nobodys_place_and_its_connection_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = certificate(tmp_path)
    async with (
        serving(policy=Policy(write_deadline=1.0, max_streams=1), **files) as server,
        curt(server, files, listen_request(1)) as client,
    ):
        await asyncio.to_thread(client.read_until, b"acknowledged")
        await asyncio.to_thread(client.send, ANOTHER)
        await asyncio.to_thread(client.read_until, b"\r\n0\r\n\r\n")
        async with curt(server, files, listen_request(2)) as other:
            await asyncio.to_thread(other.read_until, b"acknowledged")
            assert server.live.gate.count == 1
            await until(lambda: len(server.outlets) == 1)
        assert dict(server.live.hub.counts.cut_off) == {}, "it has read everything"
        assert "not read" not in caplog.text


def certificate(folder: Path) -> dict[str, str]:
    authority, own = make_certificates(folder, "localhost")
    return {"ssl_certfile": str(own), "ssl_keyfile": str(own), "ssl_ca_certs": str(authority)}
