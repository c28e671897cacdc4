"""Deliveries to real receivers: their content, signatures, order, and who gets them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.hooks import (
    connect_stream,
    durable_of,
    live_server,
    nothing,
    open_webhook,
    summaries_until_now,
    until_open,
    webhook_of,
)
from tests.support.receiver import receiving, verify
from tests.support.waiting import until
from tidings import Feature, Notification, Principal, TidingsError
from tidings.store.durable import DurableSubscription, Webhook
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio

URL = "https://receiver.example/"


async def test_delivery_is_signed_and_has_the_params_of_the_notification() -> None:
    async with receiving() as receiver, live_server() as live:
        webhook = await open_webhook(live, receiver, "tools", uris=["board://a"])
        live.tools.add(nothing, name="one", description="Erste. \u2028 \u20ac")
        delivery = await receiver.next()

        verify(delivery, webhook.secret, now=time.time())
        assert delivery.headers["content-type"] == "application/json"
        envelope = delivery.envelope
        assert envelope.keys() == {"type", "timestamp", "data"}
        assert envelope["type"] == "tools.list_changed"
        data = envelope["data"]
        assert (data["operation"], data["tool"]["description"]) == ("added", "Erste. \u2028 \u20ac")
        assert data["_meta"]["dev.tidings/cursor"] == live.subscriptions.cursor([Feature.TOOLS])
        assert data["_meta"]["dev.tidings/change"]["name"] == "one"

        live.resources.updated("board://a", author="Ann")
        content = await receiver.next()
        assert content.envelope["type"] == "resources.updated"
        assert content.envelope["data"]["uri"] == "board://a"
        assert content.envelope["data"]["metadata"] == {"author": "Ann"}
        assert content.id != delivery.id
        live.prompts.add(nothing, name="not watched")
        live.resources.updated("board://b")
        live.tools.remove("one")
        assert (await receiver.next()).summary == "tools.list_changed removed one"


async def test_changes_during_a_delivery_are_merged_into_one_delivery() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools")
        receiver.gate.clear()
        live.tools.add(nothing, name="first")
        assert (await receiver.next()).summary == "tools.list_changed added first"
        for number in range(50):
            live.tools.add(nothing, name=f"t{number:02}")
        live.tools.remove("t00")
        assert receiver.came.empty()
        receiver.gate.set()

        second = await receiver.next()
        names = [each["tool"]["name"] for each in second.envelope["data"]["changes"]]
        assert names == [f"t{number:02}" for number in range(1, 50)]
        await until(lambda: webhook_of(live).last_success)
        live.tools.add(nothing, name="last")
        assert (await receiver.next()).summary == "tools.list_changed added last"
        assert receiver.connections == 3


async def test_hanging_receiver_does_not_delay_others() -> None:
    async with receiving() as slow, receiving() as quick, live_server() as live:
        await open_webhook(live, slow, "tools", name="slow")
        await open_webhook(live, quick, "tools", name="quick")
        slow.gate.clear()
        for number in range(5):
            live.tools.add(nothing, name=f"t{number}")
        while "t4" not in (await quick.next()).summary:
            pass
        await slow.next()
        assert slow.connections == 1


async def test_removed_webhook_gets_nothing_more_and_its_request_is_cancelled() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools")
        receiver.gate.clear()
        live.tools.add(nothing, name="one")
        await receiver.next()
        assert live.webhooks.remove("hook")
        await until(lambda: len(live.hub) == 0)
        live.tools.add(nothing, name="two")
        assert receiver.connections == 1


async def test_delivery_over_one_mebibyte_is_sent_without_the_items() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools")
        with live.catalog.batch():
            for number in range(3):
                live.tools.add(nothing, name=f"t{number}", description="x" * 500_000)
        delivery = await receiver.next()
        assert len(delivery.body) < 1 << 20
        assert delivery.summary == "tools.list_changed added t0, added t1, added t2"


async def test_webhook_has_filter_and_detail() -> None:
    async with receiving() as receiver, live_server() as live:
        live.tools.add(nothing, name="one")
        await open_webhook(live, receiver, "tools", terms={"operations": ["removed"], "detail": "summary"})
        live.tools.add(nothing, name="two")
        live.tools.remove("one")
        delivery = await receiver.next()
        assert delivery.summary == "tools.list_changed removed one"
        assert "tool" not in delivery.envelope["data"]


async def test_put_again_keeps_the_secret_and_can_replace_it_step_by_step() -> None:
    async with receiving() as receiver, live_server() as live:
        old = (await open_webhook(live, receiver, "tools")).secret
        live.webhooks.put("hook", receiver.url, "tools")
        assert webhook_of(live).secret == old
        new = new_secret()
        await open_webhook(live, receiver, "tools", secret=f"{new} {old}")
        live.tools.add(nothing, name="one")
        delivery = await receiver.next()
        for secret in (old, new):
            verify(delivery, secret, now=time.time())


async def test_put_changes_what_an_open_webhook_watches() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools", uris=["board://a"])
        live.webhooks.put("hook", receiver.url, "prompts", uris=["board://marker"])
        await until(lambda: any(Feature.PROMPTS in each.features for each in live.hub))
        durable = durable_of(live)
        assert (durable.features, durable.uris) == ((Feature.PROMPTS,), ("board://marker",))
        live.tools.add(nothing, name="one")
        live.resources.updated("board://a")
        live.prompts.add(nothing, name="greet")
        assert await summaries_until_now(live, receiver) == ["prompts.list_changed added greet"]


async def test_stream_with_the_same_name_replaces_the_webhook_while_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidings.webhooks.delivery._RECHECK_DELAY", 0.01)
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools")
        told: list[Notification] = []
        stream = connect_stream(live, Feature.TOOLS, deliver=told.append)
        live.tools.add(nothing, name="one")
        await until(lambda: len(told) == 1)
        stream.close()
        await until_open(live)
        # The server does not know whether the client read the notification before the stream closed.
        assert (await receiver.next()).summary == "tools.list_changed None None"
        live.tools.add(nothing, name="two")
        assert (await receiver.next()).summary == "tools.list_changed added two"
        assert receiver.connections == 2


async def test_webhook_fails_when_authorize_refuses_a_topic_at_the_interval() -> None:
    allowed = {"tools"}
    policy: dict[str, Any] = {"webhook_attempts": 1, "webhook_private": True, "authorize_interval": 0.01}

    def authorize(principal: Principal | None, topic: Any) -> bool:
        return topic.value in allowed

    async with receiving() as receiver, live_server(authorize=authorize, **policy) as live:
        owner = ("alice", None)
        webhook = Webhook(url=receiver.url, secret=new_secret())
        live.durables.put(
            DurableSubscription(name="hook", owner=owner, features=(Feature.TOOLS,), ttl=60.0, webhook=webhook)
        )
        await until_open(live, owner=owner)
        allowed.clear()
        await until(lambda: webhook_of(live, owner=owner).is_dead)
        assert webhook_of(live, owner=owner).last_error == "the owner may no longer watch tools"


async def test_owner_that_is_no_longer_authorized_gets_nothing() -> None:
    allowed = {"tools", "prompts"}
    asked: list[tuple[Any, Any]] = []

    def authorize(principal: Principal | None, topic: Any) -> bool:
        asked.append((principal, topic))
        return topic.value in allowed

    policy: dict[str, Any] = {"webhook_attempts": 2, "webhook_private": True}
    async with receiving() as receiver, live_server(authorize=authorize, **policy) as live:
        alice = Principal("alice", None, ("read",))
        webhook = Webhook(url=receiver.url, secret=new_secret(), scopes=alice.scopes)
        live.durables.put(
            DurableSubscription(name="hook", owner=alice.identity, features=(Feature.TOOLS,), ttl=60.0, webhook=webhook)
        )
        await until_open(live, owner=alice.identity)
        assert asked[-1][0] == alice, "with the scopes of the put"
        allowed.clear()
        receiver.answers(500, 200)
        live.tools.add(nothing, name="one")
        await receiver.next()
        await until(lambda: webhook_of(live, owner=alice.identity).is_dead)
        assert receiver.connections == 1


@pytest.mark.parametrize(
    ("url", "features", "options", "message"),
    [
        ("http://receiver.example/", ["tools"], {}, "https"),
        (URL, ["tools"], {"ttl": -1}, "a number of seconds"),
        (URL, ["tools"], {"ttl": float("nan")}, "a number of seconds"),
        (URL, [], {}, "to watch"),
        (URL, ["tool"], {}, "no feature"),
        (URL, ["tools"], {"secret": "guess"}, "whsec_"),
    ],
)
async def test_invalid_webhook_is_rejected(
    url: str, features: list[str], options: dict[str, Any], message: str
) -> None:
    async with live_server() as live:
        with pytest.raises(TidingsError, match=message):
            live.webhooks.put("hook", url, *features, **options)
