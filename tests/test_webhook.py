"""Webhooks: signed, level-triggered, tried again, given up, and remembered over restarts. The receivers are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from tests.servers.receiver import DEADLINE, Delivery, Receiver, make_certificates, receiving, verify
from tests.test_cli_history import ran
from tidings import Feature, LimitReached, Live, Notification, Policy, Principal, TidingsError
from tidings.durable import SERVER, Durable, Webhook
from tidings.lanes.courier import Courier, Outcome
from tidings.lanes.signature import new_secret
from tidings.lanes.webhook import _Post
from tidings.store.sqlite import peek
from tidings.subscriptions import as_json

pytestmark = pytest.mark.anyio


def nothing() -> None:
    """A tool."""


@asynccontextmanager
async def lively(store: Path | None = None, authorize: Any = None, **knobs: Any) -> AsyncIterator[Live]:
    """A server that is live on this event loop, without clients."""
    knobs = {"webhook_backoff": 0.01, "webhook_attempts": 4, "webhook_timeout": 5.0, **knobs}
    live = Live(MCPServer("hooks"), policy=Policy(**knobs), store=store, authorize=authorize)
    await live.attend()
    try:
        yield live
    finally:
        live.stop()
        live.keeper.close()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not is_so():  # noqa: ASYNC110  # how a webhook fares is written down, and nobody is told
            await asyncio.sleep(0.002)


def webhook(live: Live, name: str = "hook") -> Webhook:
    durable = live.durables.get((SERVER, name))
    assert durable is not None
    assert durable.webhook is not None
    return durable.webhook


async def open_webhook(live: Live, receiver: Receiver, *features: str, **options: Any) -> Durable:
    """A webhook that listens."""
    name = options.pop("name", "hook")
    durable = live.webhooks.put(name, receiver.url, *features, **options)
    await until(lambda: live.durables.is_connected(durable.key))
    return durable


async def marked(live: Live, receiver: Receiver) -> list[str]:
    """What comes until a further change: to show that nothing else was sent."""
    live.resources.updated("board://marker")
    gists: list[str] = []
    while not gists or "board://marker" not in gists[-1]:
        gists.append((await receiver.next()).gist)
    return gists[:-1]


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


async def test_what_its_pace_holds_back_is_not_late() -> None:
    async with receiving() as receiver, lively(min_interval=0.5) as live:
        await open_webhook(live, receiver, "tools")
        for name in ("one", "two"):
            live.tools.add(nothing, name=name)
        began = time.monotonic()
        assert [(await receiver.next()).gist[-3:] for _ in range(2)] == ["one", "two"]
        assert time.monotonic() - began > 0.4
        await until(lambda: live.hub.counts.sent["tools"] == 2)
        assert sum(live.hub.counts.latency.sums) < 0.4


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
    async with receiving() as receiver, lively(webhook_backoff=0.2) as live:
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


async def test_a_name_of_several_owners_keeps_no_webhook_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with receiving() as receiver:
        async with lively(path) as live:
            await open_webhook(live, receiver, "tools")
            assert live.durables.enter({"name": "hook"}, None, [Feature.TOOLS], [], {}, lambda: None) is not None
        async with lively(path) as live:
            await until(lambda: live.durables.is_connected((SERVER, "hook")))


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
            live.durables.put(Durable(name="hook", owner=owner, features=(Feature.TOOLS,), ttl=60.0, webhook=hook))
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


async def test_a_stream_that_comes_while_a_delivery_fails_does_not_shorten_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidings.lanes.webhook._AGAIN", 0.01)
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


async def test_a_stream_under_its_name_takes_its_place_while_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidings.lanes.webhook._AGAIN", 0.01)
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
        live.durables.put(Durable(name="hook", owner=alice.who, features=(Feature.TOOLS,), ttl=60.0, webhook=hook))
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
        with pytest.raises(TidingsError, match="to watch"):
            live.webhooks.put("hook", "https://receiver.example/")
        with pytest.raises(TidingsError, match="no feature"):
            live.webhooks.put("hook", "https://receiver.example/", "tool")
        with pytest.raises(TidingsError, match="whsec_"):
            live.webhooks.put("hook", "https://receiver.example/", "tools", secret="guess")
        live.webhooks.put("hook", "https://receiver.example/", "tools")
        with pytest.raises(LimitReached):
            live.webhooks.put("another", "https://receiver.example/", "tools")


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
            assert meta["dev.tidings/cursor"]["asOf"] == live.hub.news.revision
            await until(lambda: live.durables.is_connected((SERVER, "hook")))

            live.resources.updated("board://7")
            assert (await receiver.next()).gist == "resources.updated updated board://7"
            await until(lambda: webhook(live).attempts == 0)
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
        assert "has yet to be told to refetch board://*, board://named" in (await ran("subscriptions", path))[1]

        receiver.answers(204)
        async with lively(path) as live:
            live.webhooks.revive("hook")
            await until(lambda: webhook(live).last_refetch)
        listed = as_json(peek(path).durables[SERVER, "hook"])["webhook"]
        assert "refetch" not in listed
        assert listed["lastRefetch"] == listed["lastSuccess"]
        assert f"was told to refetch at {listed['lastRefetch']}" in (await ran("subscriptions", path))[1]


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


class Meddling(Courier):
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
        courier = live.webhooks.courier = Meddling(timeout=5.0)
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
        courier = live.webhooks.courier = Meddling(timeout=5.0)

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
