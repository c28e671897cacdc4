"""Webhooks after a restart: secret, failures and delays are kept, and a receiver that missed too much must refetch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from msgspec.structs import replace

from tests.support.command import run_command
from tests.support.hooks import durable_of, live_server, nothing, open_webhook, until_open, webhook_of
from tests.support.receiver import Delivery, Receiver, receiving, verify
from tests.support.waiting import until
from tidings import Feature, Live, Policy
from tidings.store.durable import SERVER, DurableSubscription, Webhook, as_json
from tidings.store.sqlite import peek
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.mark.parametrize(
    ("owner", "policy", "error"),
    [
        (("mallory", None), {"webhooks": "none", "webhook_private": True}, "Policy.webhooks"),
        (None, {"webhooks": "principals", "webhook_private": True}, "Policy.webhooks"),
        (("mallory", None), {"webhook_private": False}, "own machine"),
    ],
)
async def test_webhook_that_the_policy_no_longer_allows_is_dead_after_a_restart(
    path: Path, owner: Any, policy: dict[str, Any], error: str
) -> None:
    async with receiving() as receiver, receiving() as own:
        async with live_server(path, webhooks="anyone", webhook_private=True) as live:
            webhook = Webhook(url=receiver.url, secret=new_secret())
            live.durables.put(
                DurableSubscription(name="hook", owner=owner, features=(Feature.TOOLS,), ttl=60.0, webhook=webhook)
            )
            await open_webhook(live, own, "tools", name="own")
        async with live_server(path, **policy) as live:
            live.tools.add(nothing, name="one")
            await own.next()
            webhook = webhook_of(live, owner=owner)
            assert webhook.is_dead
            assert error in (webhook.last_error or "")
            assert durable_of(live, owner=owner).expires is not None
            assert receiver.connections == 0


async def test_ttl_starts_only_when_the_webhook_is_dead(path: Path) -> None:
    async with receiving() as receiver:
        async with live_server(path) as live:
            await open_webhook(live, receiver, "tools", ttl=0.0)
        receiver.answers(500)
        async with live_server(path, webhook_attempts=1) as live:
            await until_open(live)
            live.tools.add(nothing, name="one")
            await receiver.next()
            await until(lambda: live.durables.get((SERVER, "hook")) is None)


async def test_restart_delivers_the_difference_and_keeps_dead_webhooks_dead(path: Path) -> None:
    async def next_with(receiver: Receiver, text: str) -> Delivery:
        while text not in (delivery := await receiver.next()).summary:
            pass
        return delivery

    async with receiving() as receiver, receiving() as broken:
        async with live_server(path) as live:
            await open_webhook(live, receiver, "tools", "prompts", uris=["board://a"])
            broken.answers(500)
            await open_webhook(live, broken, "tools", name="broken")
            live.tools.add(nothing, name="one")
            assert (await receiver.next()).summary == "tools.list_changed added one"
            await until(lambda: webhook_of(live, "broken").is_dead)
            await until(lambda: webhook_of(live).last_success)
            secret = webhook_of(live).secret
        connections = broken.connections
        async with live_server(path) as live:
            dead = webhook_of(live, "broken")
            assert (dead.is_dead, dead.attempts, dead.last_error) == (True, 4, "answered 500")
            assert webhook_of(live).secret == secret
            live.tools.add(nothing, name="one")
            live.prompts.add(nothing, name="greet")
            delivery = await next_with(receiver, "prompts.list_changed added greet")
            verify(delivery, secret, now=time.time())
            assert broken.connections == connections
            broken.answers(200)
            live.webhooks.revive("broken")
            await next_with(broken, "one")


async def test_failing_webhook_continues_to_count_failures_after_a_restart(path: Path) -> None:
    async with receiving() as receiver:
        receiver.answers(500)
        async with live_server(path, webhook_backoff=0.05) as live:
            await open_webhook(live, receiver, "tools", uris=["board://a"])
            live.resources.updated("board://a")
            first = await receiver.next()
            await until(lambda: webhook_of(live).attempts == 1)
        async with live_server(path, webhook_backoff=0.05) as live:
            assert webhook_of(live).attempts == 1
            again = await receiver.next()
            assert again.summary == first.summary == "resources.updated updated board://a"
            assert again.id == first.id
            await until(lambda: webhook_of(live).is_dead)


async def test_retry_after_survives_a_restart(path: Path) -> None:
    async with receiving() as receiver, receiving() as other:
        receiver.answer = lambda delivery: (503, {"retry-after": "3600"})
        async with live_server(path) as live:
            await open_webhook(live, receiver, "prompts")
            live.prompts.add(nothing, name="one")
            await receiver.next()
            await until(lambda: webhook_of(live).next_attempt)
        async with live_server(path) as live:
            await open_webhook(live, other, "prompts", name="other")
            live.prompts.add(nothing, name="two")
            await other.next()
            assert receiver.connections == 1
            live.webhooks.revive("hook")
            await receiver.next()


async def test_clock_that_was_set_back_does_not_delay_the_next_attempt(path: Path) -> None:
    async with receiving() as receiver:
        receiver.answers(500)
        async with live_server(path, webhook_attempts=9, webhook_backoff=3600) as live:
            await open_webhook(live, receiver, uris=["board://a"])
            live.resources.updated("board://a")
            await receiver.next()
            await until(lambda: webhook_of(live).next_attempt)
            in_the_future = replace(webhook_of(live), next_attempt=time.time() + 1e9)
            live.durables.change((SERVER, "hook"), webhook=in_the_future)
        receiver.answers(200)
        async with live_server(path):
            assert (await receiver.next()).summary == "resources.updated updated board://a"


# A receiver that missed more than the server knows


async def miss_too_much(path: Path, receiver: Receiver) -> None:
    """Create a webhook, and let the server forget which contents changed while the webhook was not open."""
    async with live_server(path) as live:
        await open_webhook(live, receiver, "tools", uris=["board://*", "board://named"])
        live.resources.updated("board://1")
        assert (await receiver.next()).summary == "resources.updated updated board://1"
        await until(lambda: webhook_of(live).last_success)
    forgetful = Live(MCPServer("hooks"), policy=Policy(max_contents=1, journal_changes=1), store=path)
    for number in range(5):
        forgetful.resources.updated(f"board://{number}")
    forgetful.close()


async def test_receiver_that_missed_too_much_is_told_to_refetch_first(path: Path) -> None:
    async with receiving() as receiver:
        await miss_too_much(path, receiver)
        receiver.answers(500, 204)
        async with live_server(path) as live:
            first, again = await receiver.next(), await receiver.next()
            assert first.id == again.id
            verify(again, webhook_of(live).secret, now=time.time())
            assert again.envelope["type"] == "resources.refetch"
            meta = again.envelope["data"]["_meta"]
            assert meta["dev.tidings/refetch"] == ["board://*", "board://named"]
            assert meta["dev.tidings/cursor"]["asOf"] == live.hub.notifications.revision
            await until_open(live)

            live.resources.updated("board://7")
            assert (await receiver.next()).summary == "resources.updated updated board://7"
            await until(lambda: live.hub.counts.sent["contents"])
        async with live_server(path) as live:
            await until_open(live)
            live.tools.add(nothing, name="one")
            assert (await receiver.next()).summary == "tools.list_changed added one", "no second refetch"


async def test_pending_refetch_is_listed_until_it_is_delivered(path: Path) -> None:
    async with receiving() as receiver:
        await miss_too_much(path, receiver)
        receiver.answers(500)
        async with live_server(path, webhook_attempts=1) as live:
            await until(lambda: webhook_of(live).is_dead)
        listed = as_json(peek(path).durables[SERVER, "hook"])["webhook"]
        assert (listed["state"], listed["refetch"]) == ("dead", ["board://*", "board://named"])
        assert "refetch board://*, board://named" in (await run_command("subscriptions", path))[1]

        receiver.answers(204)
        async with live_server(path) as live:
            live.webhooks.revive("hook")
            await until(lambda: webhook_of(live).last_refetch)
        listed = as_json(peek(path).durables[SERVER, "hook"])["webhook"]
        assert "refetch" not in listed
        assert listed["lastRefetch"] <= listed["lastSuccess"]
        assert f"refetch at {listed['lastRefetch']}" in (await run_command("subscriptions", path))[1]


@pytest.mark.parametrize("status", [500, 204])
async def test_refetch_has_a_new_id_if_contents_changed_since_the_last_one(path: Path, status: int) -> None:
    """Otherwise a receiver that drops duplicates would miss board://8."""
    async with receiving() as receiver:
        await miss_too_much(path, receiver)
        async with live_server(path, max_contents=1) as live:
            statuses = iter([status])

            def answer(delivery: Delivery) -> tuple[int, dict[str, str]]:
                if (now := next(statuses, None)) is None:
                    return 204, {}
                for number in range(7, 9):  # the server can remember one of them
                    live.resources.updated(f"board://{number}")
                return now, {}

            receiver.answer = answer
            first, second = await receiver.next(), await receiver.next()
            assert first.envelope["type"] == second.envelope["type"] == "resources.refetch"
            assert first.id != second.id
            await until_open(live)


async def test_refetches_pause_while_contents_change_faster_than_they_are_refetched(path: Path) -> None:
    async with receiving() as receiver, receiving() as other:
        await miss_too_much(path, receiver)
        async with live_server(path, max_contents=1, webhook_backoff=600.0) as live:

            def answer(delivery: Delivery) -> tuple[int, dict[str, str]]:
                for number in range(2):
                    live.resources.updated(f"board://{number}")
                return 204, {}

            receiver.answer = answer
            for _ in range(2):
                assert (await receiver.next()).envelope["type"] == "resources.refetch"
            # A complete delivery to another webhook shows that there is no immediate third one.
            await open_webhook(live, other, "prompts", name="other")
            live.prompts.add(nothing, name="one")
            await other.next()
            assert receiver.came.empty()
            assert not live.durables.is_connected((SERVER, "hook"))


async def test_put_during_a_refetch_request_is_not_overwritten(path: Path) -> None:
    async with receiving() as receiver, receiving() as another:
        await miss_too_much(path, receiver)

        def put(live: Live) -> None:
            live.webhooks.put("hook", another.url, "prompts", uris=["board://*", "other://*"], ttl=9)

        async with live_server(path, then=put) as live:
            assert (await receiver.next()).envelope["type"] == "resources.refetch"
            # The new receiver does not know what the old one was told.
            assert (await another.next()).envelope["type"] == "resources.refetch"
            await until_open(live)
            durable = durable_of(live)
            assert (durable.features, durable.uris, durable.ttl) == ((Feature.PROMPTS,), ("board://*", "other://*"), 9)
            live.resources.updated("other://1")
            assert (await another.next()).summary == "resources.updated updated other://1"
