"""Which URLs and addresses a webhook can use, how requests fail, and signatures."""

from __future__ import annotations

import asyncio
import base64
import logging
import queue
import socket
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.addresses import REFUSED
from tests.support.certificates import make_certificates
from tests.support.receiver import Delivery, receiving, verify
from tests.support.waiting import DEADLINE, until
from tidings import TidingsError
from tidings.webhooks import http_client
from tidings.webhooks.http_client import PostResult, Resolve, WebhookClient, check_url
from tidings.webhooks.signature import check_secret, new_secret, sign

pytestmark = pytest.mark.anyio


def resolve_to(*addresses: str) -> Resolve:
    async def resolve(host: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


async def post(url: str, **options: Any) -> PostResult:
    return await WebhookClient(**{"timeout": DEADLINE, **options}).post(url, {}, b"")


# Addresses and URLs


@pytest.mark.parametrize("address", REFUSED)
async def test_no_request_goes_to_an_address_that_is_not_public(address: str, caplog: pytest.LogCaptureFixture) -> None:
    result = await post("https://receiver.example/", resolve=resolve_to("93.184.215.14", address))
    assert address in caplog.text
    assert address not in str(result.error), "the client must not learn addresses of the server's network"
    assert "nothing was sent" in str(result.error)


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example/",
        "http://10.0.0.1/",
        "https://10.0.0.1/",
        "https://[::ffff:10.0.0.1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://127.0.0.1/",
        "https://localhost/",
        "http://[::1]:9/",
        "ftp://receiver.example/",
        "file:///etc/passwd",
        "https://",
        "https:///path",
        "https://user:password@receiver.example/",
        "https://receiver.example/#part",
        "https://receiver.example:0/",
        "https://receiver.example:65536/",
        "no url at all",
        "https://receiver.example/" + "x" * 2000,
    ],
)
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(TidingsError):
        check_url(url, allow_loopback=False)


@pytest.mark.parametrize(
    ("url", "allow_loopback"),
    [
        ("https://receiver.example/a?b=c", False),
        ("https://receiver.example:8443/", False),
        ("https://1.1.1.1/", False),
        ("http://127.0.0.1:9/", True),
        ("https://localhost/", True),
        ("http://[::1]/", True),
    ],
)
def test_https_url_is_accepted_and_the_loopback_address_if_allowed(url: str, allow_loopback: bool) -> None:
    check_url(url, allow_loopback=allow_loopback)


def test_plain_http_is_rejected_outside_of_the_loopback_address() -> None:
    with pytest.raises(TidingsError, match="http only on the loopback"):
        check_url("http://receiver.example/", allow_loopback=True)


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost."])
async def test_other_spellings_of_the_loopback_address_get_no_request(host: str) -> None:
    async with receiving() as receiver:
        assert (await post(receiver.url.replace("127.0.0.1", host))).error is not None
        assert receiver.connections == 0


async def test_request_goes_to_the_checked_address_even_if_the_name_resolves_differently_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers.pop(0)

    authority, certificate = make_certificates(tmp_path, "receiver.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    async with receiving(certificate, "receiver.example") as receiver:
        result = await post(receiver.url, allow_private=True, resolve=resolve)
        assert result.error is None
        assert asked == ["receiver.example"]
        assert (await receiver.next()).headers["host"] == receiver.url.split("/")[2]
    result = await post(receiver.url, resolve=resolve)
    assert "receiver.example resolves to an address that is not public" in str(result.error)


async def test_certificate_of_another_host_or_of_an_unknown_authority_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"allow_private": True, "resolve": resolve_to("127.0.0.1")}
    authority, certificate = make_certificates(tmp_path, "another.example")
    async with receiving(certificate, "receiver.example") as receiver:
        assert "CERTIFICATE_VERIFY_FAILED" in str((await post(receiver.url, **options)).error)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert "receiver.example" in str((await post(receiver.url, **options)).error)
        assert receiver.came.empty()


# DNS lookups


async def test_lookups_that_hang_take_no_threads_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def getaddrinfo(*args: object, **options: object) -> list[object]:
        is_over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    client = WebhookClient(timeout=0.01)
    try:
        # More than the loop's thread pool has.
        results = await asyncio.gather(*(client.post(f"https://{n}.example/", {}, b"") for n in range(40)))
        assert {result.error for result in results} == {"no answer within 0.01 s"}
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), DEADLINE) == "done"
    finally:
        is_over.set()


async def test_number_of_concurrent_lookups_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, asked, original = threading.Event(), queue.Queue[object](), socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        if not host.endswith(".example"):
            return original(host, *args, **options)
        asked.put(host)
        is_over.wait()
        return original("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(http_client, "_MAX_LOOKUPS", 2)
    async with receiving(host="receiver.example") as receiver:
        client = WebhookClient(timeout=DEADLINE, allow_private=True)
        waiting = [asyncio.create_task(client.post(receiver.url, {}, b"")) for _ in range(2)]
        try:
            for _ in waiting:
                await asyncio.to_thread(asked.get, timeout=DEADLINE)
            waiting[0].cancel()  # the lookup continues
            await asyncio.wait(waiting[:1])
            refused = await client.post(receiver.url, {}, b"")
            assert "2 DNS lookups are running" in str(refused.error)
            assert asked.empty()
        finally:
            is_over.set()
        assert (await waiting[1]).error is None
        await until(lambda: not any(thread.name == "tidings-resolve" for thread in threading.enumerate()))
        assert (await client.post(receiver.url, {}, b"")).error is None


# Requests and responses


async def test_next_address_is_tried_if_one_does_not_answer() -> None:
    async with receiving(host="localhost") as receiver:
        assert (await post(receiver.url, resolve=resolve_to("::1", "127.0.0.1"))).error is None


async def test_redirect_is_not_followed() -> None:
    async with receiving() as receiver, receiving() as other:
        receiver.answer = lambda delivery: (307, {"location": other.url})
        assert await post(receiver.url) == PostResult(307, "answered 307; redirects are not followed", cause="status")
        assert other.connections == 0


async def test_response_without_an_end_or_without_a_start_does_not_block() -> None:
    async with receiving() as receiver:
        receiver.body = None
        async with asyncio.timeout(DEADLINE / 2):
            assert (await post(receiver.url)).error is None  # the head is enough
        receiver.gate.clear()
        assert (await post(receiver.url, timeout=0.2)).error == "no answer within 0.2 s"


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as receiver, receiving() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url.rsplit("/", 1)[0])
        assert (await post(receiver.url)).error is None
        assert proxy.connections == 0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        ("soon", None),
        ("-3", None),
        ("Mon, 01 Jan 2024 00:00:00 +99999999999999999999", None),
        (formatdate(0, usegmt=True), 0),
    ],
)
async def test_retry_after_is_parsed(value: str, seconds: float | None) -> None:
    async with receiving() as receiver:
        receiver.answer = lambda delivery: (503, {"retry-after": value})
        assert await post(receiver.url) == PostResult(503, "answered 503", seconds, "status")
        receiver.answer = lambda delivery: (429, {"retry-after": formatdate(time.time() + 60, usegmt=True)})
        result = await post(receiver.url)
        assert 30 < (result.retry_after or 0) <= 61


async def test_url_of_a_delivery_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with receiving() as receiver, httpx2.AsyncClient(timeout=DEADLINE) as client:
        assert (await post(f"{receiver.url}&token=SECRET")).error is None
        assert "SECRET" not in caplog.text
        await client.post(f"{receiver.url}&mine", content=b"")
        assert "mine" in caplog.text, "other requests are logged"


# Signatures


def test_signature_matches_the_example_of_standard_webhooks() -> None:
    """The example that the reference libraries use in their tests."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    message_id, timestamp, body = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    assert sign(secret, message_id, timestamp, body) == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_each_of_several_secrets_verifies_and_no_other(body: bytes, timestamp: int) -> None:
    old, new, other = new_secret(), new_secret(), new_secret()
    signature = sign(check_secret(f"{new}  {old}"), "msg_1", timestamp, body)
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(timestamp), "webhook-signature": signature}
    for secret in (old, new):
        verify(Delivery(headers, body), secret, now=timestamp)
    with pytest.raises(AssertionError):
        verify(Delivery(headers, body), other, now=timestamp)
    with pytest.raises(AssertionError):
        verify(Delivery(headers, body + b"!"), new, now=timestamp)


@pytest.mark.parametrize("secret", ["", "secret", "whsec_", "whsec_!!", "whsec_" + base64.b64encode(b"short").decode()])
def test_weak_secret_is_rejected_without_showing_it(secret: str) -> None:
    with pytest.raises(TidingsError) as error:
        check_secret(secret)
    assert len(secret) < 8 or secret not in str(error.value)
