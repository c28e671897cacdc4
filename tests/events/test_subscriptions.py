"""`events/subscribe` and `events/unsubscribe`: checks, challenge, renewal, rights, and end.

Covers `draft.py` and `service.py`.
"""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from tests.support.certificates import make_certificates
from tests.support.events import EventClient, event_receiver, serving_events
from tests.support.hooks import nothing
from tests.support.messages import modern_headers, modern_message
from tests.support.receiver import receiving
from tests.support.waiting import free_port, until
from tests.support.wire_clients import read_answer
from tidings import Feature, Live, Principal
from tidings.events import EventTopic, subscriptions
from tidings.store.sqlite import peek
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio

NAME = "comment.created"
TOOLS = "tools.list_changed"
URL = "https://receiver.example/events"
INVALID, NOT_FOUND, FORBIDDEN, EXHAUSTED, UNSUPPORTED, CALLBACK = -32602, -32011, -32012, -32013, -32014, -32015
DOCUMENT = {
    "type": "object",
    "properties": {"document_id": {"type": "string"}, "count": {"type": "number"}},
    "additionalProperties": False,
}


def declare(live: Live) -> None:
    live.event(NAME, arguments=DOCUMENT)


def params(name: str = NAME, url: str = URL, **delivery: Any) -> dict[str, Any]:
    target = {"mode": "webhook", "url": url, "secret": new_secret(), **delivery}
    return {"name": name, "delivery": {key: value for key, value in target.items() if value is not None}}


async def test_invalid_requests_have_the_codes_of_the_draft() -> None:
    short, long = (f"whsec_{base64.b64encode(b'x' * size).decode()}" for size in (23, 65))
    async with serving_events(declare=declare, webhook_private=False) as (_, client):
        for code, request in (
            (INVALID, params(secret=None)),
            (INVALID, params(secret=short)),
            (INVALID, params(secret=long)),
            (INVALID, params(secret=f"{new_secret()} {new_secret()}")),
            (INVALID, params(secret="whsec_…")),
            (INVALID, params(url="http://receiver.example/")),
            (INVALID, params(url="https://127.0.0.1/")),
            (INVALID, params(url="https://[::ffff:10.0.0.1]/")),
            (INVALID, params(url="https://user:password@receiver.example/")),
            (INVALID, params(url="https://[")),
            (INVALID, params() | {"arguments": {"document_id": 1}}),
            (INVALID, params() | {"arguments": {"other": "x"}}),
            (INVALID, params() | {"arguments": {"document_id": "x" * 10_000}}),
            (INVALID, params() | {"arguments": {"document_id": "\ud800"}}),
            (INVALID, params() | {"ttlMs": 0}),
            (INVALID, {"name": NAME}),
            (INVALID, params("resource.updated")),
            (NOT_FOUND, params("comment.deleted")),
            (UNSUPPORTED, params(mode="push")),
            (CALLBACK, params(url=f"https://receiver.invalid:{free_port()}/")),
        ):
            error = await client.error("events/subscribe", **request)
            assert error["code"] == code, (request, error)
            assert "whsec_" not in error["message"].replace("whsec_ and", "").replace("whsec_…", "")
        error = await client.error("events/subscribe", **params("comment.deleted"))
        assert error["data"] == {"kind": "event"}
        gone = await client.error("events/unsubscribe", name=NAME, delivery={"url": URL})
        assert (gone["code"], gone["data"]) == (NOT_FOUND, {"kind": "subscription"})


async def test_caller_without_authentication_may_not_subscribe_unless_the_policy_allows_it() -> None:
    async with event_receiver() as receiver:
        async with serving_events(is_open=True) as (_, client):
            assert (await client.request("events/list"))["events"]
            assert (await client.error("events/subscribe", **client.params(receiver, TOOLS)))["code"] == FORBIDDEN
        async with serving_events(is_open=True, webhooks="anyone") as (_, client):
            assert (await client.subscribe(receiver, TOOLS))["id"]


async def test_id_is_the_same_for_equal_keys_and_differs_by_principal(tmp_path: Path) -> None:
    async with event_receiver() as receiver:
        ids: list[str] = []
        for number in (1, 1.0, 2):
            async with serving_events(tmp_path / "state.db", declare=declare) as (_, client):
                ids.append((await client.subscribe(receiver, NAME, {"count": number, "document_id": "a"}))["id"])
                client.token = "bob"
                assert (await client.subscribe(receiver, NAME, {"count": number, "document_id": "a"}))["id"] not in ids
        assert ids[0] == ids[1] != ids[2]


async def test_failed_challenges_have_their_category_and_are_limited_per_receiver(tmp_path: Path) -> None:
    _, cert = make_certificates(tmp_path, "localhost")
    async with (
        event_receiver() as receiver,
        receiving(cert, host="localhost") as untrusted,
        serving_events() as (
            live,
            client,
        ),
    ):

        async def reason(url: str) -> Any:
            error = await client.error("events/subscribe", **params(TOOLS, url, secret=receiver.secret))
            assert error["code"] == CALLBACK
            return error["data"]["reason"]

        assert await reason(f"http://127.0.0.1:{free_port()}/") == "connection_refused"
        assert await reason(untrusted.url) == "tls_error"
        receiver.is_honest = False
        assert await reason(receiver.url) == "challenge_failed"
        for status, category in ((204, "challenge_failed"), (404, "http_4xx"), (302, "http_4xx"), (503, "http_5xx")):
            receiver.receiver.answers(status)
            assert await reason(receiver.url) == category
        while live.hub.counts.events["unverified"] < 12:
            await reason(receiver.url)
        error = await client.error("events/subscribe", **params(TOOLS, receiver.url))
        assert (error["code"], error["data"]) == (EXHAUSTED, {"limit": "verifications"})
        assert not live.durables.all()


async def test_receiver_that_does_not_answer_the_challenge_in_time_is_a_timeout() -> None:
    async with event_receiver() as receiver, serving_events(webhook_timeout=0.05) as (_, client):
        receiver.receiver.gate.clear()
        error = await client.error("events/subscribe", **client.params(receiver, TOOLS))
        assert error["data"] == {"reason": "timeout"}


async def test_url_is_verified_once_per_principal_also_after_a_restart(tmp_path: Path) -> None:
    async with event_receiver() as receiver:
        async with serving_events(tmp_path / "state.db") as (_, client):
            for name in (TOOLS, TOOLS, "prompts.list_changed"):
                await client.subscribe(receiver, name)
            assert receiver.challenges == 1
            client.token = "bob"
            await client.subscribe(receiver, TOOLS)
            assert receiver.challenges == 2
        async with serving_events(tmp_path / "state.db") as (_, client):
            await client.subscribe(receiver, "resources.list_changed")
            assert receiver.challenges == 2


async def test_lifetime_is_granted_within_limits(tmp_path: Path) -> None:
    async with event_receiver() as receiver:

        async def granted(live: Live, client: EventClient, **requested: Any) -> float:
            await client.subscribe(receiver, TOOLS, **requested)
            [durable] = live.durables.all()
            assert durable.event is not None
            return round(durable.event.expires - live.catalog.now())

        async with serving_events(tmp_path / "state.db", durable_ttl=7200.0) as (live, client):
            assert await granted(live, client) == 7200
            assert await granted(live, client, ttlMs=None) == 7200
            assert await granted(live, client, ttlMs=600_000) == 600
            assert await granted(live, client, ttlMs=1) == 60
        async with serving_events() as (live, client):
            assert await granted(live, client) == 3600


async def test_subscription_ends_at_its_time_also_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with event_receiver() as receiver, serving_events() as (live, client):
        await client.subscribe(receiver, TOOLS)
        await until(lambda: len(live.hub))
        now = live.catalog.now
        monkeypatch.setattr(live.durables, "_now", lambda: now() + 3601)
        live.durables.expire()
        await until(lambda: not len(live.hub) and not len(live.events.deliveries))


async def test_renewal_reports_and_resumes_suspended_deliveries(tmp_path: Path) -> None:
    async with event_receiver() as receiver, serving_events(declare=declare, webhook_attempts=2) as (live, client):
        first = await client.subscribe(receiver, NAME)
        assert "deliveryStatus" not in first
        renewed = await client.subscribe(receiver, NAME)
        assert renewed["deliveryStatus"] == {"active": True, "lastDeliveryAt": None, "lastError": None}
        receiver.answers(200, 500)
        live.emit(NAME, {"number": 1})
        live.emit(NAME, {"number": 2})
        await until(lambda: live.durables.all()[0].event.is_suspended)  # type: ignore[union-attr]
        sent = live.hub.counts.events["failed"]
        live.emit(NAME, {"number": 3})
        assert sent == live.hub.counts.events["failed"] == 2
        while not receiver.receiver.came.empty():
            receiver.receiver.came.get_nowait()
        receiver.answers(200)
        status = (await client.subscribe(receiver, NAME))["deliveryStatus"]
        assert (status["active"], status["lastError"]) == (False, "http_5xx")
        assert status["lastDeliveryAt"] <= status["failedSince"]
        assert [(await receiver.next_event())["data"]["number"] for _ in range(2)] == [2, 3]
        await until(lambda: not len(live.events.occurrences))
        status = (await client.subscribe(receiver, NAME))["deliveryStatus"]
        assert (status["active"], status["lastError"], "failedSince" in status) == (True, None, False)


async def test_new_secret_and_the_one_before_both_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        await client.subscribe(receiver, NAME)
        old, receiver.secret = receiver.secret, new_secret()
        await client.subscribe(receiver, NAME)
        assert receiver.challenges == 1
        live.emit(NAME, {})
        delivery = await receiver.next()
        for secret in (old, receiver.secret):
            Webhook(secret).verify(delivery.body, delivery.headers)
        monkeypatch.setattr(subscriptions, "_OLD_SECRET_TTL", -1.0)
        receiver.secret = new_secret()
        await client.subscribe(receiver, NAME)
        live.emit(NAME, {})
        assert len((await receiver.next()).headers["webhook-signature"].split(" ")) == 1


async def test_unsubscribed_receiver_gets_nothing_more() -> None:
    async with (
        event_receiver("/1") as one,
        event_receiver("/2") as two,
        serving_events(declare=declare) as (
            live,
            client,
        ),
    ):
        for receiver in (one, two):
            await client.subscribe(receiver, NAME)
            await client.subscribe(receiver, TOOLS)
        await until(lambda: len(live.hub) == 2)
        for name in (NAME, TOOLS):
            await client.request("events/unsubscribe", name=name, delivery={"mode": "webhook", "url": one.url})
        client.token = "bob"
        error = await client.error("events/unsubscribe", name=NAME, delivery={"url": two.url})
        assert error["code"] == NOT_FOUND
        live.emit(NAME, {})
        live.tools.add(nothing, name="one")
        assert {(await two.next_event())["name"] for _ in range(2)} == {NAME, TOOLS}
        assert one.receiver.connections == one.challenges == 1


async def test_subscription_that_was_unsubscribed_is_no_longer_in_the_store(tmp_path: Path) -> None:
    async with event_receiver() as receiver, serving_events(tmp_path / "state.db") as (_, client):
        await client.subscribe(receiver, TOOLS)
        assert len(peek(tmp_path / "state.db").durables) == 1
        await client.request("events/unsubscribe", name=TOOLS, delivery={"url": receiver.url})
        assert not peek(tmp_path / "state.db").durables


async def test_410_ends_the_subscription_and_413_skips_the_event() -> None:
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        await client.subscribe(receiver, NAME)
        await client.subscribe(receiver, TOOLS)
        await until(lambda: len(live.hub))
        receiver.answers(413, 413, 200, 200, 410)
        live.emit(NAME, {"number": 1})
        await receiver.next()
        live.tools.add(nothing, name="one")
        await receiver.next()
        await until(lambda: live.hub.counts.events["refused"] == 2)
        live.emit(NAME, {"number": 2})
        assert (await receiver.next_event())["data"] == {"number": 2}
        live.tools.add(nothing, name="two")
        assert (await receiver.next_event())["data"]["tool"]["name"] == "two"
        await until(lambda: live.hub.counts.events["delivered"] == 2)
        live.emit(NAME, {"number": 3})
        live.tools.add(nothing, name="three")
        await receiver.next()
        await receiver.next()
        await until(lambda: not live.durables.all() and not len(live.events.deliveries))
        assert not len(live.events.occurrences)


async def test_caller_subscribes_only_to_what_authorize_allows_and_delivery_stops_when_that_ends() -> None:
    refused: set[str] = set()

    def authorize(principal: Principal | None, topic: Any) -> bool:
        assert principal is not None
        assert principal.scopes == ("read",)
        if isinstance(topic, EventTopic):
            return topic.arguments["document_id"] not in refused and str(topic) == f"event:{NAME}"
        return (topic.value if isinstance(topic, Feature) else topic) not in refused

    refused |= {"secret", "docs://secret", "prompts"}
    async with event_receiver() as receiver, serving_events(declare=declare, authorize=authorize) as (live, client):
        for name, arguments in (
            (NAME, {"document_id": "secret"}),
            ("resource.updated", {"uri": "docs://secret"}),
            ("prompts.list_changed", {}),
        ):
            error = await client.error("events/subscribe", **client.params(receiver, name, arguments))
            assert error["code"] == FORBIDDEN
        assert not receiver.challenges
        await client.subscribe(receiver, NAME, {"document_id": "d1"})
        await client.subscribe(receiver, TOOLS)
        await until(lambda: len(live.hub))
        live.emit(NAME, {"document_id": "d1"})
        assert (await receiver.next_event())["name"] == NAME
        refused |= {"d1", "tools"}
        live.emit(NAME, {"document_id": "d1"})
        live.tools.add(nothing, name="one")
        for _ in range(2):
            ended = await receiver.next()
            assert (ended.envelope["type"], ended.envelope["error"]["code"]) == ("terminated", FORBIDDEN)
            assert ended.id.startswith("msg_terminated_")
        await until(lambda: not live.durables.all())


async def test_number_of_subscriptions_is_limited_per_principal() -> None:
    async with (
        event_receiver() as receiver,
        serving_events(declare=declare, max_durables_per_principal=2) as (
            _,
            client,
        ),
    ):
        for number in range(2):
            await client.subscribe(receiver, NAME, {"count": number})
        error = await client.error("events/subscribe", **client.params(receiver, NAME, {"count": 3}))
        assert (error["code"], error["data"]) == (EXHAUSTED, {"limit": "subscriptions"})


async def test_secrets_and_urls_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        event_receiver("/path-of-secret?key=of-secret") as receiver,
        serving_events(declare=declare, webhook_attempts=2) as (live, client),
    ):
        await client.subscribe(receiver, NAME)
        receiver.answers(413, 500)
        live.emit(NAME, {})
        live.emit(NAME, {})
        await until(lambda: live.hub.counts.events["failed"] == 2)
    own = [record.getMessage() for record in caplog.records if record.name.startswith("tidings")]
    assert any("suspended" in text for text in own)
    assert not [text for text in own if receiver.secret in text or "of-secret" in text]


async def test_receiver_that_hangs_and_one_that_fails_do_not_delay_the_others() -> None:
    async with (
        event_receiver("/hangs") as hanging,
        event_receiver("/fails") as failing,
        event_receiver() as good,
        serving_events(declare=declare, max_durables_per_principal=400, webhook_timeout=30.0) as (live, client),
    ):
        for receiver in (hanging, failing, good):
            for number in range(100):
                await client.subscribe(receiver, NAME, {"count": number})
        hanging.receiver.gate.clear()
        failing.answers(500)
        for number in range(100):
            live.emit(NAME, {"count": number})
        assert {(await good.next_event())["data"]["count"] for _ in range(100)} == set(range(100))
        assert hanging.receiver.connections <= 33
        hanging.receiver.gate.set()
        failing.answers(200)
        await until(lambda: not len(live.events.occurrences))


async def test_subscriptions_are_listed_and_removed_like_other_durable_ones_but_not_changed() -> None:
    async with event_receiver() as receiver, serving_events(declare=declare) as (live, client):
        key = (await client.subscribe(receiver, NAME, {"document_id": "d1"}))["id"]
        [listed] = (await client.request("dev.tidings/subscriptions/list"))["subscriptions"]
        assert (listed["name"], listed["event"]["arguments"]) == (key, {"document_id": "d1"})
        assert receiver.secret not in str(listed)
        put = {"name": key, "notifications": {"toolsListChanged": True}}
        error = await client.error("dev.tidings/subscriptions/put", **put)
        assert "renew it with events/subscribe" in error["message"]
        assert (await client.request("dev.tidings/subscriptions/remove", name=key))["removed"]
        await until(lambda: not len(live.events.deliveries))


async def test_request_without_the_header_of_the_name_is_served() -> None:
    """The specification requires `Mcp-Name` for calls and reads only; a consumer may leave it out."""
    async with event_receiver() as receiver, serving_events() as (_, client):
        message = modern_message("events/subscribe", 1, client.params(receiver, TOOLS))
        headers = modern_headers("events/subscribe") | {"Authorization": "Bearer alice"}
        response = await client.http.post(client.url, json=message, headers=headers)
        assert read_answer(response.text)["result"]["id"]


async def test_subscription_that_the_policy_no_longer_allows_ends_without_a_request(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    async with event_receiver() as receiver:
        receiver.answers(500)
        async with serving_events(store, declare=declare, webhook_backoff=60) as (live, client):
            await client.subscribe(receiver, NAME)
            await client.subscribe(receiver, TOOLS)
            live.emit(NAME, {})
            await receiver.next()
        sent = receiver.receiver.connections
        async with serving_events(store, declare=declare, webhook_private=False) as (live, _):
            await until(lambda: not live.durables.all())
        assert receiver.receiver.connections == sent
