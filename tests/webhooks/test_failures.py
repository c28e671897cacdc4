"""A delivery that fails is made again, after pauses that grow, until it is taken or its webhook is given up."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from tests.support.hooks import lively, marked, nothing, open_webhook, webhook
from tests.support.receiver import DEADLINE, receiving
from tests.support.waiting import until
from tidings import Notification
from tidings.store.durable import SERVER
from tidings.webhooks.delivery import _Post
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio


async def test_a_delivery_that_failed_is_made_again_under_the_same_id_until_it_is_taken() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(500, 503, 200)
        live.tools.add(nothing, name="one")
        attempts = [await receiver.next() for _ in range(3)]
        assert len({each.id for each in attempts}) == 1
        assert len({each.body for each in attempts}) == 1
        assert attempts[0].gist == "tools.list_changed added one"
        await until(lambda: webhook(live).last_success)
        counts = live.hub.counts
        assert (counts.sent["tools"], counts.failures["webhook"], sum(counts.latency.counts)) == (1, 2, 1)
        assert (webhook(live).attempts, webhook(live).last_error, webhook(live).next_attempt) == (0, None, None)
        live.tools.add(nothing, name="two")
        assert (await receiver.next()).gist == "tools.list_changed added two"


async def test_told_counts_only_what_was_taken() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools", "prompts", uris=["board://*"])
        receiver.gate.clear()
        receiver.answers(500, 200)
        live.tools.add(nothing, name="one")
        first = await receiver.next()
        # While that one is on its way, to fail: more of the same list, another list, and contents.
        live.tools.add(nothing, name="two")
        live.prompts.add(nothing, name="greet")
        live.resources.updated("board://a")
        live.resources.updated("board://a")
        receiver.gate.set()

        told = sorted([(await receiver.next()).gist for _ in range(3)])
        assert told == [
            "prompts.list_changed added greet",
            "resources.updated updated board://a",
            "tools.list_changed added one, added two",
        ]
        assert first.gist == "tools.list_changed added one"
        assert await marked(live, receiver) == []


async def test_what_is_as_it_was_when_the_time_comes_is_not_told() -> None:
    async with receiving() as receiver, lively(webhook_backoff=2.0) as live:
        await open_webhook(live, receiver, "tools", uris=["board://marker"])
        receiver.answers(500, 200)
        live.tools.add(nothing, name="one")
        await receiver.next()
        await until(lambda: webhook(live).attempts)
        live.tools.remove("one")
        assert await marked(live, receiver) == []


async def test_what_was_taken_before_a_failure_is_not_delivered_again() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools", "prompts")
        receiver.gate.clear()
        receiver.answers(200, 500, 200)
        with live.catalog.batch():
            live.tools.add(nothing, name="one")
            live.prompts.add(nothing, name="greet")
        first = await receiver.next()
        receiver.gate.set()
        second, third = await receiver.next(), await receiver.next()
        assert first.gist == "tools.list_changed added one"
        assert second.gist == third.gist == "prompts.list_changed added greet"
        assert second.id == third.id


async def test_a_deletion_that_could_not_be_delivered_is_delivered_later() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools", uris=["board://a"])
        receiver.answers(500, 200)
        live.resources.deleted("board://a")
        assert (await receiver.next()).gist == "resources.updated deleted board://a"
        again = await receiver.next()
        assert again.gist == "resources.updated deleted board://a"


async def test_the_pause_grows_and_the_receiver_may_ask_for_a_longer_one() -> None:
    async with receiving() as receiver, lively(webhook_backoff=0.1, webhook_attempts=9) as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(500)
        live.tools.add(nothing, name="one")
        moments = []
        for _ in range(4):
            await receiver.next()
            moments.append(time.monotonic())
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        assert [gap >= least for gap, least in zip(gaps, (0.05, 0.1, 0.2), strict=True)] == [True] * 3
        receiver.answer = lambda delivery: (429, {"retry-after": "3600"})
        await receiver.next()
        await until(lambda: webhook(live).attempts == 5)
        next_attempt = webhook(live).next_attempt
        assert next_attempt is not None
        assert next_attempt - time.time() > 3590


async def test_who_keeps_failing_is_given_up_and_can_be_revived() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(500)
        live.tools.add(nothing, name="one")
        for _ in range(4):
            await receiver.next()
        await until(lambda: webhook(live).is_dead)
        assert (webhook(live).attempts, webhook(live).last_error) == (4, "answered 500")
        assert not live.durables.is_connected((SERVER, "hook"))
        live.tools.add(nothing, name="two")
        assert receiver.connections == 4

        receiver.answers(200)
        live.webhooks.revive("hook")
        assert (await receiver.next()).gist == "tools.list_changed added one, added two"
        await until(lambda: webhook(live).last_success)
        assert not webhook(live).is_dead
        assert live.webhooks.revive("nobody") is None


async def test_who_says_that_it_is_gone_is_believed() -> None:
    async with receiving() as receiver, lively() as live:
        await open_webhook(live, receiver, "tools")
        receiver.answers(410)
        live.tools.add(nothing, name="one")
        await receiver.next()
        await until(lambda: webhook(live).is_dead)
        assert webhook(live).attempts == 1


async def test_an_answer_that_comes_with_a_put_does_not_undo_it() -> None:
    async with receiving() as old, receiving() as new, lively() as live:
        await open_webhook(live, old, "tools")
        live.tools.add(nothing, name="one")
        await old.next()
        secret = new_secret()
        # In the turn in which the answer is taken in, the put comes before it.
        taken, succeed = asyncio.Event(), _Post._succeed

        def put_first(post: _Post, notification: Notification) -> None:
            live.webhooks.put("hook", new.url, "tools", secret=secret)
            succeed(post, notification)
            taken.set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Post, "_succeed", put_first)
            await asyncio.wait_for(taken.wait(), DEADLINE)
        assert (webhook(live).url, webhook(live).secret) == (new.url, secret)
        assert webhook(live).last_success is None


async def test_a_stream_that_comes_while_a_delivery_fails_does_not_shorten_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidings.webhooks.delivery._AGAIN", 0.01)
    async with receiving() as receiver, lively(webhook_backoff=60.0) as live:
        durable = await open_webhook(live, receiver, "tools")
        receiver.gate.clear()
        receiver.answers(500)
        live.tools.add(nothing, name="one")
        await receiver.next()
        visit = live.durables.enter({"name": "hook"}, SERVER, durable.features, (), {}, lambda: None)
        assert visit is not None
        assert visit.ack["isNew"] is False
        stream = live.hub.open(lambda notification: None)
        visit.watch(stream)
        live.hub.subscribe(stream, "tools", told=visit.told())
        receiver.gate.set()
        stream.close()
        # One more attempt, by the timer that there is; then the pause.
        await receiver.next()
        await until(lambda: webhook(live).attempts == 1)
        (post,) = live.webhooks._posts.values()
        timers = [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        assert [each for each in timers if getattr(each._callback, "__self__", None) is post] == [post._timer]
