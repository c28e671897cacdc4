"""Where a webhook's request may go, and that it goes nowhere else."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import logging
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.certificates import make_certificates
from tests.support.receiver import DEADLINE, Delivery, receiving, verify
from tests.support.waiting import until
from tidings import TidingsError
from tidings.webhooks import http_client as courier_module
from tidings.webhooks.http_client import WebhookClient, check_url, why_not_public
from tidings.webhooks.signature import check_secret, new_secret, sign

pytestmark = pytest.mark.anyio

REFUSED = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "::1", "::"),
    *("10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1", "100.64.0.1", "100.100.100.200"),
    *("169.254.169.254", "169.254.0.1", "fe80::1", "fe80::a9fe:a9fe", "fd00:ec2::254", "fc00::1", "fec0::1"),
    *("192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "168.63.129.16"),
    *("224.0.0.1", "239.255.255.255", "ff02::1", "ff05::1:3", "240.0.0.1", "255.255.255.255"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::a00:1"),
    *("64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a00:1::1", "2002:a9fe:a9fe::"),
    *("2001:0:7f00:1::", "2001:db8::1", "100::1", "2001:10::1", "3fff::1", "5f00::1", "192.88.99.1"),
]
ALLOWED = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "2a00:1450:4001:81b::200e",
           "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
async def test_no_request_goes_to_an_address_that_is_not_public(address: str, caplog: pytest.LogCaptureFixture) -> None:
    assert why_not_public(ipaddress.ip_address(address)) is not None

    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.215.14", address]

    outcome = await WebhookClient(timeout=DEADLINE, resolve=resolve).post("https://receiver.example/", {}, b"")
    assert address in caplog.text
    assert address not in str(outcome.error), "whoever put the webhook is to learn nothing of our network"
    assert "nothing was sent" in str(outcome.error)


@pytest.mark.parametrize("address", ALLOWED)
def test_public_addresses_are_public(address: str) -> None:
    assert why_not_public(ipaddress.ip_address(address)) is None


@given(st.ip_addresses(v=4))
def test_what_carries_an_address_is_what_it_carries(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    carriers = [
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
    ]
    assert {why_not_public(each) for each in carriers} == {why_not_public(address)}


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address.is_private or address.is_multicast or address.is_link_local or address.is_loopback:
        assert why_not_public(address) is not None


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
def test_a_url_that_may_not_be_is_refused_in_words(url: str) -> None:
    with pytest.raises(TidingsError):
        check_url(url, allow_loopback=False)


@pytest.mark.parametrize(
    "url", ["https://receiver.example/a?b=c", "https://receiver.example:8443/", "https://1.1.1.1/"]
)
def test_an_https_url_of_others_is_fine(url: str) -> None:
    check_url(url, allow_loopback=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "https://localhost/", "http://[::1]/"])
def test_this_machine_is_fine_where_it_is_allowed(url: str) -> None:
    check_url(url, allow_loopback=True)
    with pytest.raises(TidingsError, match="http only on the loopback"):
        check_url("http://receiver.example/", allow_loopback=True)


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost."])
async def test_other_ways_to_write_this_machine_lead_nowhere(host: str) -> None:
    async with receiving() as receiver:
        url = receiver.url.replace("127.0.0.1", host)
        outcome = await WebhookClient(timeout=DEADLINE).post(url, {}, b"")
        assert outcome.error is not None
        assert receiver.connections == 0


async def test_a_name_that_changes_its_address_after_the_check_is_asked_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: what was checked is what is connected to."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers.pop(0)

    authority, certificate = make_certificates(tmp_path, "receiver.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    async with receiving(certificate, "receiver.example") as receiver:
        # The first answer is private here, and allowed, so that there is somebody to connect to.
        courier = WebhookClient(timeout=DEADLINE, allow_private=True, resolve=resolve)
        outcome = await courier.post(receiver.url, {}, b"hello")
        assert outcome.error is None
        assert asked == ["receiver.example"]
        delivery = await receiver.next()
        # The connection went to the address, and the request to the name.
        assert delivery.headers["host"] == receiver.url.split("/")[2]

    strict = WebhookClient(timeout=DEADLINE, resolve=resolve)
    outcome = await strict.post(receiver.url, {}, b"hello")
    assert "receiver.example leads to an address that is not public" in str(outcome.error)


async def test_a_certificate_of_somebody_else_or_of_an_unknown_authority_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    authority, certificate = make_certificates(tmp_path, "somebody.example")
    async with receiving(certificate, "receiver.example") as receiver:
        unknown = await WebhookClient(timeout=DEADLINE, allow_private=True, resolve=resolve).post(receiver.url, {}, b"")
        assert "CERTIFICATE_VERIFY_FAILED" in str(unknown.error)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        other = await WebhookClient(timeout=DEADLINE, allow_private=True, resolve=resolve).post(receiver.url, {}, b"")
        assert "receiver.example" in str(other.error)
        assert receiver.came.empty()


async def test_names_that_nobody_answers_for_take_no_thread_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def never(*asked: object, **more: object) -> list[object]:
        is_over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", never)
    courier = WebhookClient(timeout=0.01)
    try:
        # More of them than the loop's own pool has threads.
        outcomes = await asyncio.gather(*(courier.post(f"https://{n}.example/", {}, b"") for n in range(40)))
        assert {outcome.error for outcome in outcomes} == {"no answer within 0.01 s"}
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), DEADLINE) == "done"
    finally:
        is_over.set()


async def test_names_that_nobody_answers_for_are_no_more_threads_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, asked, known = threading.Event(), queue.Queue[object](), socket.getaddrinfo

    def late(host: str, *more: Any, **options: Any) -> Any:
        if not host.endswith(".example"):
            return known(host, *more, **options)
        asked.put(host)
        is_over.wait()
        return known("127.0.0.1", *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(courier_module, "_MOST_LOOKUPS", 2)
    async with receiving(host="receiver.example") as receiver:
        courier = WebhookClient(timeout=DEADLINE, allow_private=True)
        waiting = [asyncio.create_task(courier.post(receiver.url, {}, b"")) for _ in range(2)]
        try:
            for _ in waiting:
                await asyncio.to_thread(asked.get, timeout=DEADLINE)
            waiting[0].cancel()  # its lookup goes on all the same
            await asyncio.wait(waiting[:1])
            refused = await courier.post(receiver.url, {}, b"")
            assert "2 names are being looked up" in str(refused.error)
            assert asked.empty()
        finally:
            is_over.set()
        assert (await waiting[1]).error is None
        await until(lambda: not any(thread.name == "tidings-resolve" for thread in threading.enumerate()))
        assert (await courier.post(receiver.url, {}, b"")).error is None


async def test_a_thread_that_can_not_be_started_is_a_delivery_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "tidings-resolve":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(courier_module, "_MOST_LOOKUPS", 1)
    courier = WebhookClient(timeout=DEADLINE)
    for _ in range(2):  # and it counts for nothing
        outcome = await courier.post("https://receiver.example/", {}, b"")
        assert outcome.error == "RuntimeError: can't start new thread"


async def test_the_next_address_is_tried_when_one_is_not_there() -> None:
    async with receiving(host="localhost") as receiver:

        async def resolve(host: str, port: int) -> list[str]:
            return ["::1", "127.0.0.1"]

        outcome = await WebhookClient(timeout=DEADLINE, resolve=resolve).post(receiver.url, {}, b"")
        assert outcome.error is None


async def test_a_redirect_is_not_followed() -> None:
    async with receiving() as receiver, receiving() as other:
        receiver.answer = lambda delivery: (307, {"location": other.url})
        outcome = await WebhookClient(timeout=DEADLINE).post(receiver.url, {}, b"")
        assert (outcome.status, outcome.error) == (307, "answered 307; redirects are not followed")
        assert other.connections == 0


async def test_an_answer_without_end_or_without_beginning_holds_nobody_up() -> None:
    async with receiving() as receiver:
        receiver.body = None
        async with asyncio.timeout(DEADLINE / 2):
            outcome = await WebhookClient(timeout=DEADLINE).post(receiver.url, {}, b"")
        assert outcome.error is None  # its head was all we wanted
        receiver.gate.clear()
        outcome = await WebhookClient(timeout=0.2).post(receiver.url, {}, b"")
        assert outcome.error == "no answer within 0.2 s"


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as receiver, receiving() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url.rsplit("/", 1)[0])
        outcome = await WebhookClient(timeout=DEADLINE).post(receiver.url, {}, b"")
        assert outcome.error is None
        assert proxy.connections == 0


@pytest.mark.parametrize(("value", "least", "most"), [("7", 7, 7), ("soon", None, None), ("-3", None, None)])
async def test_retry_after_in_seconds(value: str, least: float | None, most: float | None) -> None:
    async with receiving() as receiver:
        receiver.answer = lambda delivery: (503, {"retry-after": value})
        outcome = await WebhookClient(timeout=DEADLINE).post(receiver.url, {}, b"")
        assert outcome.retry_after == least == most


async def test_retry_after_of_no_time_at_all() -> None:
    async with receiving() as receiver:
        zone = "+99999999999999999999"
        receiver.answer = lambda delivery: (503, {"retry-after": f"Mon, 01 Jan 2024 00:00:00 {zone}"})
        outcome = await WebhookClient(timeout=DEADLINE).post(receiver.url, {}, b"")
        assert (outcome.status, outcome.retry_after) == (503, None)


async def test_the_url_of_a_delivery_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with receiving() as receiver, httpx2.AsyncClient(timeout=DEADLINE) as client:
        assert (await WebhookClient(timeout=DEADLINE).post(f"{receiver.url}&token=SECRET", {}, b"")).error is None
        assert "SECRET" not in caplog.text
        await client.post(f"{receiver.url}&mine", content=b"")
        assert "mine" in caplog.text, "those of others are"


async def test_retry_after_as_a_date() -> None:
    from email.utils import formatdate

    async with receiving() as receiver:
        receiver.answer = lambda delivery: (429, {"retry-after": formatdate(time.time() + 60, usegmt=True)})
        outcome = await WebhookClient(timeout=DEADLINE).post(receiver.url, {}, b"")
        assert outcome.retry_after is not None
        assert 30 < outcome.retry_after <= 61


# Signatures


def test_the_signature_is_the_one_of_the_specification() -> None:
    """The example that the reference libraries of Standard Webhooks are tested with."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    message_id, timestamp, body = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    assert sign(secret, message_id, timestamp, body) == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_whoever_has_one_of_the_secrets_can_verify(body: bytes, timestamp: int) -> None:
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
def test_a_weak_secret_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(TidingsError) as refused:
        check_secret(secret)
    assert len(secret) < 8 or secret not in str(refused.value)
