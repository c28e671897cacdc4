"""What a restart leaves of a webhook: its secret, failures and pauses; and whoever missed too much refetches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from msgspec.structs import replace

from tests.support.command import run_command
from tests.support.hooks import lively, nothing, open_webhook, webhook
from tests.support.receiver import Delivery, Receiver, receiving, verify
from tests.support.waiting import DEADLINE, until
from tidings import Feature, Live, Policy
from tidings.store.durable import SERVER, DurableSubscription, Webhook
from tidings.store.durable_json import as_json
from tidings.store.sqlite import peek
from tidings.webhooks.delivery import _Post
from tidings.webhooks.http_client import Outcome, WebhookClient
from tidings.webhooks.signature import new_secret

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("owner", "knobs", "said"),
    [
        (("mallory", None), {"webhooks": "none", "webhook_private": True}, "Policy.webhooks"),
        (None, {"webhooks": "principals", "webhook_private": True}, "Policy.webhooks"),
        (("mallory", None), {"webhook_private": False}, "own machine"),
    ],
)
async def test_what_a_policy_no_longer_allows_is_given_up_at_the_next_start(
    tmp_path: Path, owner: Any, knobs: dict[str, Any], said: str
) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver, receiving() as own:
        async with lively(path, webhooks="anyone", webhook_private=True) as live:
            hook = Webhook(url=receiver.url, secret=new_secret())
            live.durables.put(
                DurableSubscription(name="hook", owner=owner, features=(Feature.TOOLS,), ttl=60.0, webhook=hook)
            )
            await open_webhook(live, own, "tools", name="own")
        async with lively(path, **knobs) as live:
            live.tools.add(nothing, name="one")
            await own.next()
            kept = live.durables.get((owner, "hook"))
            assert kept is not None
            assert kept.webhook is not None
            assert kept.webhook.is_dead
            assert said in (kept.webhook.last_error or "")
            assert kept.expires is not None
            assert receiver.connections == 0


async def test_a_webhook_outlives_its_time_while_it_is_tried(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        async with lively(path) as live:
            await open_webhook(live, receiver, "tools", ttl=0.0)
        receiver.answers(500)
        async with lively(path, webhook_attempts=1) as live:
            await until(lambda: live.durables.is_connected((SERVER, "hook")))
            live.tools.add(nothing, name="one")
            await receiver.next()
            await until(lambda: live.durables.get((SERVER, "hook")) is None)


async def test_a_restart_delivers_the_difference_and_keeps_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver, receiving() as broken:
        async with lively(path) as live:
            await open_webhook(live, receiver, "tools", "prompts", uris=["board://a"])
            broken.answers(500)
            await open_webhook(live, broken, "tools", name="broken")
            live.tools.add(nothing, name="one")
            assert (await receiver.next()).gist == "tools.list_changed added one"
            await until(lambda: webhook(live, "broken").is_dead)
            await until(lambda: webhook(live).last_success)
            secret = webhook(live).secret
        connections = broken.connections
        # The same list, and a prompt that was not there.
        async with lively(path) as live:
            assert webhook(live, "broken").is_dead
            assert (webhook(live, "broken").attempts, webhook(live, "broken").last_error) == (4, "answered 500")
            assert webhook(live).secret == secret
            live.tools.add(nothing, name="one")
            live.prompts.add(nothing, name="greet")
            delivery = await receiver.next()
            while delivery.gist != "prompts.list_changed added greet":
                delivery = await receiver.next()
            verify(delivery, secret, now=time.time())
            assert broken.connections == connections
            broken.answers(200)
            live.webhooks.revive("broken")
            assert "one" in (await broken_until(broken, "one")).gist


async def broken_until(receiver: Receiver, text: str) -> Delivery:
    while text not in (delivery := await receiver.next()).gist:
        pass
    return delivery


async def test_a_webhook_that_was_failing_goes_on_failing_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        receiver.answers(500)
        async with lively(path, webhook_backoff=0.05) as live:
            await open_webhook(live, receiver, "tools", uris=["board://a"])
            live.resources.updated("board://a")
            first = await receiver.next()
            await until(lambda: webhook(live).attempts == 1)
        async with lively(path, webhook_backoff=0.05) as live:
            assert webhook(live).attempts == 1
            again = await receiver.next()
            assert again.gist == first.gist == "resources.updated updated board://a"
            assert again.id == first.id
            await until(lambda: webhook(live).is_dead)


async def test_a_pause_that_a_receiver_asked_for_outlives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver, receiving() as other:
        receiver.answer = lambda delivery: (503, {"retry-after": "3600"})
        async with lively(path) as live:
            await open_webhook(live, receiver, "prompts")
            live.prompts.add(nothing, name="one")
            await receiver.next()
            await until(lambda: webhook(live).next_attempt)
        async with lively(path) as live:
            await open_webhook(live, other, "prompts", name="other")
            live.prompts.add(nothing, name="two")
            await other.next()
            assert receiver.connections == 1
            live.webhooks.revive("hook")
            await receiver.next()


async def test_a_clock_that_was_set_back_silences_nobody(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        receiver.answers(500)
        async with lively(path, webhook_attempts=9, webhook_backoff=3600) as live:
            await open_webhook(live, receiver, uris=["board://a"])
            live.resources.updated("board://a")
            await receiver.next()
            await until(lambda: webhook(live).next_attempt)
            of_another_time = replace(webhook(live), next_attempt=time.time() + 1e9)
            live.durables.change((SERVER, "hook"), webhook=of_another_time)
        receiver.answers(200)
        async with lively(path):
            assert (await receiver.next()).gist == "resources.updated updated board://a"


# More was missed than anybody knows


async def missed_too_much(path: Path, receiver: Receiver) -> None:
    """A webhook whose server forgets, while it is not there, which contents changed."""
    async with lively(path) as live:
        await open_webhook(live, receiver, "tools", uris=["board://*", "board://named"])
        live.resources.updated("board://1")
        assert (await receiver.next()).gist == "resources.updated updated board://1"
        await until(lambda: webhook(live).last_success)
    with_others = Live(MCPServer("hooks"), policy=Policy(max_contents=1, journal_changes=1), store=path)
    for number in range(5):
        with_others.resources.updated(f"board://{number}")
    with_others.close()


async def test_who_missed_more_than_anybody_knows_is_told_to_refetch_first(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        await missed_too_much(path, receiver)
        receiver.answers(500, 204)
        async with lively(path) as live:
            first, again = await receiver.next(), await receiver.next()
            assert first.id == again.id
            verify(again, webhook(live).secret, now=time.time())
            assert again.envelope["type"] == "resources.refetch"
            meta = again.envelope["data"]["_meta"]
            assert meta["dev.tidings/refetch"] == ["board://*", "board://named"]
            assert meta["dev.tidings/cursor"]["asOf"] == live.hub.notifications.revision
            await until(lambda: live.durables.is_connected((SERVER, "hook")))

            before = webhook(live).last_success
            live.resources.updated("board://7")
            assert (await receiver.next()).gist == "resources.updated updated board://7"
            await until(lambda: webhook(live).last_success != before)
        async with lively(path) as live:
            await until(lambda: live.durables.is_connected((SERVER, "hook")))
            live.tools.add(nothing, name="one")
            assert (await receiver.next()).gist == "tools.list_changed added one", "it was told, and is not again"


async def test_who_has_to_refetch_is_listed_so_until_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        await missed_too_much(path, receiver)
        receiver.answers(500)
        async with lively(path, webhook_attempts=1) as live:
            await until(lambda: webhook(live).is_dead)
        listed = as_json(peek(path).durables[SERVER, "hook"])["webhook"]
        assert (listed["state"], listed["refetch"]) == ("dead", ["board://*", "board://named"])
        assert "has yet to be told to refetch board://*, board://named" in (await run_command("subscriptions", path))[1]

        receiver.answers(204)
        async with lively(path) as live:
            live.webhooks.revive("hook")
            await until(lambda: webhook(live).last_refetch)
        listed = as_json(peek(path).durables[SERVER, "hook"])["webhook"]
        assert "refetch" not in listed
        assert listed["lastRefetch"] <= listed["lastSuccess"]  # the call was a success, whose time is taken next
        assert f"was told to refetch at {listed['lastRefetch']}" in (await run_command("subscriptions", path))[1]


@pytest.mark.parametrize("status", [500, 204])
async def test_two_calls_to_refetch_have_one_id_only_if_nothing_changed_between_them(
    tmp_path: Path, status: int
) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        await missed_too_much(path, receiver)
        async with lively(path, max_contents=1) as live:
            statuses = iter([status])

            def answer(delivery: Delivery) -> tuple[int, dict[str, str]]:
                if (now := next(statuses, None)) is None:
                    return 204, {}
                for number in range(7, 9):  # of which one can be remembered
                    live.resources.updated(f"board://{number}")
                return now, {}

            receiver.answer = answer
            first, second = await receiver.next(), await receiver.next()
            assert first.envelope["type"] == second.envelope["type"] == "resources.refetch"
            assert first.id != second.id, "who drops what it has seen would not hear of board://8"
            await until(lambda: live.durables.is_connected((SERVER, "hook")))


async def test_contents_that_change_faster_than_they_are_refetched_are_not_called_without_a_pause(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        await missed_too_much(path, receiver)
        async with lively(path, max_contents=1, webhook_backoff=600.0) as live:

            def answer(delivery: Delivery) -> tuple[int, dict[str, str]]:
                for number in range(2):
                    live.resources.updated(f"board://{number}")
                return 204, {}

            receiver.answer = answer
            for _ in range(2):
                assert (await receiver.next()).envelope["type"] == "resources.refetch"
            await until(lambda: _post(live)._timer is not None)
            assert receiver.came.empty()
            assert not live.durables.is_connected((SERVER, "hook")), "nor was it said to know what it does not"


def _post(live: Live) -> _Post:
    return live.webhooks._posts[SERVER, "hook"]


class Meddling(WebhookClient):
    """Whose deliveries something else happens after, before anybody has looked at the answer."""

    then: Callable[[], object] | None = None

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        outcome = await super().post(url, headers, body)
        then, self.then = self.then, None
        if then is not None:
            then()
        return outcome


async def test_what_is_put_while_a_call_to_refetch_is_answered_counts(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver, receiving() as another:
        await missed_too_much(path, receiver)
        live = Live(MCPServer("hooks"), policy=Policy(webhook_backoff=0.01), store=path)
        courier = live.webhooks.courier = Meddling(timeout=DEADLINE)
        courier.then = lambda: live.webhooks.put("hook", another.url, "prompts", uris=["board://*", "other://*"], ttl=9)
        await live.attend()
        try:
            assert (await receiver.next()).envelope["type"] == "resources.refetch"
            told = await another.next()
            assert told.envelope["type"] == "resources.refetch", (
                "of what the former receiver was told, this knows nothing"
            )
            await until(lambda: live.durables.is_connected((SERVER, "hook")))
            durable = live.durables.get((SERVER, "hook"))
            assert durable is not None
            assert (durable.features, durable.uris, durable.ttl) == ((Feature.PROMPTS,), ("board://*", "other://*"), 9)
            live.resources.updated("other://1")
            assert (await another.next()).gist == "resources.updated updated other://1"
        finally:
            live.stop()
            live.keeper.close()


async def test_a_webhook_whose_name_a_stream_had_meanwhile_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        await missed_too_much(path, receiver)
        live = Live(MCPServer("hooks"), policy=Policy(webhook_backoff=0.01), store=path)
        courier = live.webhooks.courier = Meddling(timeout=DEADLINE)

        def visit() -> None:
            visit = live.durables.enter({"name": "hook"}, SERVER, [Feature.PROMPTS], [], {}, nothing)
            assert visit is not None
            subscriber = live.hub.open(lambda notification: None)
            visit.watch(subscriber)
            live.hub.subscribe(subscriber, "prompts")
            live.hub.close(subscriber)

        courier.then = visit
        await live.attend()
        try:
            assert (await receiver.next()).envelope["type"] == "resources.refetch"
            await until(lambda: live.durables.is_connected((SERVER, "hook")))
            live.prompts.add(nothing, name="one")
            assert (await receiver.next()).gist == "prompts.list_changed added one"
        finally:
            live.stop()
            live.keeper.close()
