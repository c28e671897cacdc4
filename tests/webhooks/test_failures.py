"""A failed delivery is repeated, after delays that grow, until the receiver accepts it or the webhook is dead."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from tests.support.hooks import (
    live_server,
    nothing,
    open_webhook,
    summaries_until_now,
    webhook_of,
)
from tests.support.receiver import receiving
from tests.support.waiting import until
from tidings import Live
from tidings.store.durable import SERVER
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio


async def test_failed_delivery_is_repeated_with_the_same_id_and_body() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(500, 503, 200)
        live.tools.add(nothing, name="one")
        attempts = [await receiver.next() for _ in range(3)]
        assert len({each.id for each in attempts}) == len({each.body for each in attempts}) == 1
        assert attempts[0].summary == "tools.list_changed added one"
        await until(lambda: webhook_of(live).last_success)
        counts = live.hub.counts
        assert (counts.sent["tools"], counts.failures["webhook"], sum(counts.latency.counts)) == (1, 2, 1)
        webhook = webhook_of(live)
        assert (webhook.attempts, webhook.last_error, webhook.next_attempt) == (0, None, None)
        live.tools.add(nothing, name="two")
        assert (await receiver.next()).summary == "tools.list_changed added two"


async def test_only_an_accepted_delivery_counts_as_told() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools", "prompts", uris=["board://*"])
        receiver.gate.clear()
        receiver.answers(500, 200)
        live.tools.add(nothing, name="one")
        first = await receiver.next()
        # During the request that fails: another change of the list, another list, and contents.
        live.tools.add(nothing, name="two")
        live.prompts.add(nothing, name="greet")
        live.resources.updated("board://a")
        live.resources.updated("board://a")
        receiver.gate.set()

        assert first.summary == "tools.list_changed added one"
        assert sorted([(await receiver.next()).summary for _ in range(3)]) == [
            "prompts.list_changed added greet",
            "resources.updated updated board://a",
            "tools.list_changed added one, added two",
        ]
        assert await summaries_until_now(live, receiver) == []


async def test_change_that_is_undone_before_the_next_attempt_is_not_delivered() -> None:
    async with receiving() as receiver, live_server(webhook_backoff=2.0) as live:
        await open_webhook(live, receiver, "tools", uris=["board://marker"])
        receiver.answers(500, 200)
        live.tools.add(nothing, name="one")
        await receiver.next()
        await until(lambda: webhook_of(live).attempts)
        live.tools.remove("one")
        assert await summaries_until_now(live, receiver) == []


async def test_topic_accepted_before_a_failure_is_not_delivered_again() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools", "prompts")
        receiver.gate.clear()
        receiver.answers(200, 500, 200)
        with live.catalog.batch():
            live.tools.add(nothing, name="one")
            live.prompts.add(nothing, name="greet")
        first = await receiver.next()
        receiver.gate.set()
        second, third = await receiver.next(), await receiver.next()
        assert first.summary == "tools.list_changed added one"
        assert second.summary == third.summary == "prompts.list_changed added greet"
        assert second.id == third.id


async def test_delay_grows_and_the_receiver_can_ask_for_a_longer_one() -> None:
    async with receiving() as receiver, live_server(webhook_backoff=0.1, webhook_attempts=9) as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(500)
        live.tools.add(nothing, name="one")
        times = []
        for _ in range(4):
            await receiver.next()
            times.append(time.monotonic())
        delays = [later - earlier for earlier, later in pairwise(times)]
        assert [delay >= least for delay, least in zip(delays, (0.05, 0.1, 0.2), strict=True)] == [True] * 3
        receiver.answer = lambda delivery: (429, {"retry-after": "3600"})
        await receiver.next()
        await until(lambda: webhook_of(live).attempts == 5)
        next_attempt = webhook_of(live).next_attempt
        assert next_attempt is not None
        assert next_attempt - time.time() > 3590


async def test_webhook_is_dead_after_too_many_failures_and_can_be_revived() -> None:
    async with receiving() as receiver, live_server() as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(500)
        live.tools.add(nothing, name="one")
        for _ in range(4):
            await receiver.next()
        await until(lambda: webhook_of(live).is_dead)
        assert (webhook_of(live).attempts, webhook_of(live).last_error) == (4, "answered 500")
        assert not live.durables.is_connected((SERVER, "hook"))
        live.tools.add(nothing, name="two")
        assert receiver.connections == 4

        receiver.answers(200)
        live.webhooks.revive("hook")
        assert (await receiver.next()).summary == "tools.list_changed added one, added two"
        await until(lambda: webhook_of(live).last_success)
        assert not webhook_of(live).is_dead
        assert live.webhooks.revive("unknown") is None


async def test_result_of_a_request_does_not_undo_a_put_made_during_the_request() -> None:
    secret = new_secret()
    async with receiving() as old, receiving() as new:

        def put(live: Live) -> None:
            live.webhooks.put("hook", new.url, "tools", secret=secret)

        async with live_server(then=put) as live:
            await open_webhook(live, old, "tools")
            live.tools.add(nothing, name="one")
            await old.next()
            await until(lambda: webhook_of(live).url == new.url)
            assert (webhook_of(live).secret, webhook_of(live).last_success) == (secret, None)
