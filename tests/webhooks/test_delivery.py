"""Webhooks: signed, level-triggered, each at its own pace, and only for those who may watch. The receivers are real."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import make_certificates
from tests.support.hooks import lively, marked, nothing, open_webhook, webhook
from tests.support.receiver import Delivery, receiving, verify
from tests.support.waiting import until
from tidings import Feature, LimitReached, Principal, TidingsError
from tidings.store.durable import SERVER, DurableSubscription, Webhook
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio


async def test_a_change_is_delivered_to_a_url_signed_and_with_what_the_wire_says() -> None:
    async with receiving() as receiver, lively() as live:
        durable = await open_webhook(live, receiver, "tools", uris=["board://a"])
        live.tools.add(nothing, name="one", description="First.")
        delivery = await receiver.next()

        assert durable.webhook is not None
        assert durable.webhook.secret.startswith("whsec_")
        verify(delivery, durable.webhook.secret, now=time.time())
        with pytest.raises(AssertionError):
            verify(Delivery(delivery.headers, delivery.body + b" "), durable.webhook.secret, now=time.time())
        assert delivery.headers["content-type"] == "application/json"
        envelope = delivery.envelope
        assert envelope.keys() == {"type", "timestamp", "data"}
        assert envelope["type"] == "tools.list_changed"
        data = envelope["data"]
        assert (data["operation"], data["tool"]["description"]) == ("added", "First.")
        assert data["_meta"]["dev.tidings/cursor"] == live.cursor(durable.features)
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
        assert (await receiver.next()).gist == "tools.list_changed removed one"


async def test_https_with_an_authority_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, certificate = make_certificates(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    async with receiving(certificate, "localhost") as receiver, lively() as live:
        durable = await open_webhook(live, receiver, "tools")
        live.tools.add(nothing, name="one")
        delivery = await receiver.next()
        assert durable.webhook is not None
        verify(delivery, durable.webhook.secret, now=time.time())
        assert delivery.headers["host"].startswith("localhost:")


async def test_what_changes_while_a_delivery_is_under_way_is_one_delivery_more() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools")
        receiver.gate.clear()
        live.tools.add(nothing, name="first")
        assert (await receiver.next()).gist == "tools.list_changed added first"
        for number in range(50):
            live.tools.add(nothing, name=f"t{number:02}")
        live.tools.remove("t00")
        assert receiver.came.empty()
        receiver.gate.set()

        second = await receiver.next()
        names = [each["tool"]["name"] for each in second.envelope["data"]["changes"]]
        assert names == [f"t{number:02}" for number in range(1, 50)]
        await until(lambda: webhook(live).last_success)
        live.tools.add(nothing, name="last")
        assert (await receiver.next()).gist == "tools.list_changed added last"
        assert receiver.connections == 3


async def test_what_its_pace_holds_back_is_not_late() -> None:
    async with receiving() as receiver, lively(min_interval=0.5) as live:
        await open_webhook(live, receiver, "tools")
        began = time.monotonic()
        for name in ("one", "two"):
            live.tools.add(nothing, name=name)
        took = []
        for number, name in enumerate(("one", "two"), 1):
            assert (await receiver.next()).gist.endswith(f"added {name}")
            await until(lambda number=number: live.hub.counts.sent["tools"] >= number)  # type: ignore[misc]
            took.append(time.monotonic() - began)
        assert took[1] > 0.4
        # However long the machine took for both, the pause of half a second is not in it.
        assert sum(live.hub.counts.latency.sums) < sum(took) - 0.4


async def test_one_receiver_that_hangs_holds_up_nobody_else() -> None:
    async with receiving() as slow, receiving() as quick, lively(webhook_timeout=60.0) as live:
        await open_webhook(live, slow, "tools", name="slow")
        await open_webhook(live, quick, "tools", name="quick")
        slow.gate.clear()
        for number in range(5):
            live.tools.add(nothing, name=f"t{number}")
            await until(lambda: quick.came.qsize() or webhook(live, "quick").last_success)
        await until(lambda: any("t4" in quick.came.get_nowait().gist for _ in range(quick.came.qsize())))
        await until(lambda: slow.connections)
        assert slow.connections == 1


async def test_removing_it_ends_it_and_cuts_off_what_is_under_way() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools")
        receiver.gate.clear()
        live.tools.add(nothing, name="one")
        await receiver.next()
        assert live.webhooks.remove("hook")
        await until(lambda: len(live.webhooks) == 0)
        assert len(live.hub) == 0
        live.tools.add(nothing, name="two")
        assert receiver.connections == 1


async def test_a_delivery_is_never_larger_than_a_receiver_can_be_asked_to_take() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools")
        with live.catalog.batch():
            for number in range(3):
                live.tools.add(nothing, name=f"t{number}", description="x" * 500_000)
        delivery = await receiver.next()
        assert len(delivery.body) < 1 << 20
        assert delivery.gist == "tools.list_changed added t0, added t1, added t2"


async def test_terms_count_for_webhooks_too() -> None:
    async with receiving() as receiver, lively() as live:
        live.tools.add(nothing, name="one")
        await open_webhook(live, receiver, "tools", terms={"operations": ["removed"], "detail": "summary"})
        live.tools.add(nothing, name="two")
        live.tools.remove("one")
        delivery = await receiver.next()
        assert delivery.gist == "tools.list_changed removed one"
        assert "tool" not in delivery.envelope["data"]


async def test_several_secrets_sign_while_one_takes_the_place_of_another() -> None:
    async with receiving() as receiver, lively() as live:
        old = (await open_webhook(live, receiver, "tools")).webhook
        assert old is not None
        kept = live.webhooks.put("hook", receiver.url, "tools").webhook
        assert kept is not None
        assert kept.secret == old.secret
        new = new_secret()
        await open_webhook(live, receiver, "tools", secret=f"{new} {old.secret}")
        live.tools.add(nothing, name="one")
        delivery = await receiver.next()
        verify(delivery, old.secret, now=time.time())
        verify(delivery, new, now=time.time())


async def test_what_a_webhook_watches_can_be_changed_while_it_is_open() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools", uris=["board://a"])
        live.webhooks.put("hook", receiver.url, "prompts", uris=["board://marker"])
        await until(lambda: any(Feature.PROMPTS in each.features for each in live.hub))
        durable = live.durables.get((SERVER, "hook"))
        assert durable is not None
        assert (durable.features, durable.uris) == ((Feature.PROMPTS,), ("board://marker",))
        live.tools.add(nothing, name="one")
        live.resources.updated("board://a")
        live.prompts.add(nothing, name="greet")
        assert await marked(live, receiver) == ["prompts.list_changed added greet"]


async def test_a_name_of_several_owners_keeps_no_webhook_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        async with lively(path) as live:
            await open_webhook(live, receiver, "tools")
            assert live.durables.enter({"name": "hook"}, None, [Feature.TOOLS], [], {}, lambda: None) is not None
        async with lively(path) as live:
            await until(lambda: live.durables.is_connected((SERVER, "hook")))


async def test_a_stream_under_its_name_takes_its_place_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.webhooks.delivery._AGAIN", 0.01)
    async with receiving() as receiver, lively() as live:
        durable = await open_webhook(live, receiver, "tools")
        ended: list[bool] = []
        visit = live.durables.enter({"name": "hook"}, SERVER, durable.features, (), {}, lambda: ended.append(True))
        assert visit is not None
        told: list[str] = []
        stream = live.hub.open(lambda notification: told.append(repr(notification)))
        visit.watch(stream)
        live.hub.subscribe(stream, "tools", told=visit.told())
        live.tools.add(nothing, name="one")
        assert len(told) == 1
        stream.close()
        await until(lambda: live.durables.is_connected(durable.key))
        # Whether the stream's reader has read it, nobody knows.
        assert (await receiver.next()).gist == "tools.list_changed None None"
        live.tools.add(nothing, name="two")
        assert (await receiver.next()).gist == "tools.list_changed added two"
        assert (receiver.connections, ended) == (2, [])


async def test_who_may_no_longer_watch_is_no_longer_told() -> None:
    allowed = {"tools", "prompts"}
    asked: list[tuple[Any, Any]] = []

    def authorize(principal: Principal | None, topic: Any) -> bool:
        asked.append((principal, topic))
        return topic.value in allowed

    async with receiving() as receiver, lively(authorize=authorize, webhook_attempts=2, webhook_private=True) as live:
        alice = Principal("alice", None, ("read",))
        hook = Webhook(url=receiver.url, secret=new_secret(), scopes=alice.scopes)
        live.durables.put(
            DurableSubscription(name="hook", owner=alice.who, features=(Feature.TOOLS,), ttl=60.0, webhook=hook)
        )
        await until(lambda: live.durables.is_connected((alice.who, "hook")))
        assert asked[-1][0] == alice  # with her scopes
        allowed.clear()
        receiver.answers(500, 200)
        live.tools.add(nothing, name="one")
        await receiver.next()

        def is_dead() -> bool:
            durable = live.durables.get((alice.who, "hook"))
            assert durable is not None
            assert durable.webhook is not None
            return durable.webhook.is_dead

        await until(is_dead)
        assert receiver.connections == 1


async def test_what_can_not_be_a_webhook_is_refused() -> None:
    async with lively(max_durables=1) as live:
        for url in ("http://receiver.example/", "nonsense"):
            with pytest.raises(TidingsError):
                live.webhooks.put("hook", url, "tools")
        with pytest.raises(TidingsError, match="1 to 256 characters"):
            live.webhooks.put("x" * 300, "https://receiver.example/", "tools")
        with pytest.raises(TidingsError, match="URI template"):
            live.webhooks.put("hook", "https://receiver.example/", uris=["board://{"])
        for ttl in (-1, float("nan")):
            with pytest.raises(TidingsError, match="a number of seconds"):
                live.webhooks.put("hook", "https://receiver.example/", "tools", ttl=ttl)
        with pytest.raises(TidingsError, match="to watch"):
            live.webhooks.put("hook", "https://receiver.example/")
        with pytest.raises(TidingsError, match="no feature"):
            live.webhooks.put("hook", "https://receiver.example/", "tool")
        with pytest.raises(TidingsError, match="whsec_"):
            live.webhooks.put("hook", "https://receiver.example/", "tools", secret="guess")
        live.webhooks.put("hook", "https://receiver.example/", "tools")
        with pytest.raises(LimitReached):
            live.webhooks.put("another", "https://receiver.example/", "tools")
