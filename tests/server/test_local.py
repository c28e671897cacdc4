"""In-process listeners: `async with listen(hub, …) as changes: async for change in changes`."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from tidings import Catalog, ChangesMissed, Feature, Filter, Hub, Policy, Reason
from tidings.server.local import Listener, listen

pytestmark = pytest.mark.anyio

SOON = 30  # seconds, far more than a test takes


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def hub(catalog: Catalog) -> Hub:
    return Hub(catalog)


@pytest.fixture(autouse=True)
async def deadline() -> AsyncIterator[None]:
    async with asyncio.timeout(SOON):
        yield


async def take(changes: Listener, count: int) -> list[str]:
    async with asyncio.timeout(SOON):
        return [f"{change.operation} {change.key}" for change in [await anext(changes) for _ in range(count)]]


async def rest(changes: Listener) -> list[str]:
    async with asyncio.timeout(SOON):
        return [change.key async for change in changes]


async def waiting(task: asyncio.Task[object]) -> None:
    """Let a task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()


async def test_listener_gets_the_changes_of_its_topics_in_order(catalog: Catalog, hub: Hub) -> None:
    async with listen(hub, "prompts", uris=["a://*"]) as changes:
        catalog.prompts.add({"name": "p"})
        catalog.tools.add({"name": "unheard"})
        catalog.resources.updated("a://b", author="ada")
        catalog.prompts.update("p", title="P")
        heard = [await anext(changes) for _ in range(3)]

    assert [(change.topic, change.operation, change.key) for change in heard] == [
        (Feature.PROMPTS, "added", "p"),
        (Feature.PROMPTS, "updated", "p"),
        ("a://b", "updated", "a://b"),
    ]
    assert heard[2].metadata == {"author": "ada"}


async def test_waiting_listener_is_woken_by_a_change(catalog: Catalog, hub: Hub) -> None:
    async with listen(hub, "tools") as changes:
        for name in ("a", "b"):
            task = asyncio.create_task(take(changes, 1))
            await waiting(task)
            catalog.tools.add({"name": name})
            assert await task == [f"added {name}"]


async def test_waiting_listener_is_woken_from_another_thread(catalog: Catalog, hub: Hub) -> None:
    each = 200

    def work() -> None:
        for number in range(each):
            catalog.tools.add({"name": str(number)})

    async with listen(hub, "tools") as changes:
        thread = threading.Thread(target=work)
        thread.start()
        heard = await take(changes, each)
        thread.join(timeout=SOON)

    assert heard == [f"added {number}" for number in range(each)]


async def test_slow_listener_gets_the_net_changes(catalog: Catalog, hub: Hub) -> None:
    async with listen(hub, "tools") as changes:
        for name in ("a", "b", "passing"):
            catalog.tools.add({"name": name})
        catalog.tools.remove("passing")
        assert await take(changes, 2) == ["added a", "added b"]
        catalog.tools.add({"name": "c"})
        assert await take(changes, 1) == ["added c"]


async def test_listener_behind_the_journal_raises_once_and_continues(catalog: Catalog) -> None:
    hub = Hub(catalog, policy=Policy(journal_changes=1))
    async with listen(hub, "tools") as changes:
        for name in "abcd":
            catalog.tools.add({"name": name})
        assert await take(changes, 1) == ["added a"]
        with pytest.raises(ChangesMissed, match=r"tools changed.*read it again.*revision 4"):
            await anext(changes)
        catalog.tools.add({"name": "e"})
        assert await take(changes, 1) == ["added e"]


async def test_options_reach_the_subscription(catalog: Catalog, hub: Hub) -> None:
    known = catalog.version(Feature.TOOLS)
    for name in ("a", "b"):
        catalog.tools.add({"name": name})
    async with listen(hub, "tools", told={Feature.TOOLS: known}, filter=Filter(names=["b"]), label="mine") as changes:
        assert await take(changes, 1) == ["added b"]
        assert [subscriber.label for subscriber in hub.subscribers("tools")] == ["mine"]


async def test_ending_the_block_unsubscribes_and_ends_the_iteration(catalog: Catalog, hub: Hub) -> None:
    async with listen(hub, "tools") as changes:
        assert len(hub.subscribers("tools")) == 1
        catalog.tools.add({"name": "a"})
    assert len(hub) == 0
    catalog.tools.add({"name": "b"})

    assert await rest(changes) == ["a"], "what it was told is not taken back"


async def test_cancelling_the_task_unsubscribes(hub: Hub) -> None:
    async def iterate() -> None:
        async with listen(hub, "tools") as changes:
            await anext(changes)

    task = asyncio.create_task(iterate())
    await waiting(task)
    assert len(hub) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(hub) == 0


async def test_cancelling_a_task_without_a_block_unsubscribes(hub: Hub) -> None:
    closed: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()

    async def iterate() -> None:
        async for _ in listen(hub, "tools", on_close=closed.set_result):
            pass

    task = asyncio.create_task(iterate())
    await waiting(task)
    assert len(hub) == 1
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task  # and its traceback, which refers to the listener
    gc.collect()

    assert await closed is Reason.COLLECTED
    assert len(hub) == 0


async def test_losing_the_last_reference_unsubscribes(catalog: Catalog, hub: Hub) -> None:
    closed: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
    changes = aiter(listen(hub, "tools", uris=["a://b", "a://*"], on_close=closed.set_result, ttl=60))
    catalog.tools.add({"name": "a"})
    assert await take(changes, 1) == ["added a"]
    assert len(hub) == 1
    del changes
    gc.collect()

    assert await closed is Reason.COLLECTED
    assert (hub.subscriptions(), hub.next_due()) == ([], None)


async def test_closing_a_listener_ends_its_iteration(hub: Hub) -> None:
    async with listen(hub, "tools") as changes:
        task = asyncio.create_task(rest(changes))
        await waiting(task)
        changes.close()
        assert await task == []


async def test_deletion_is_the_last_change_of_a_listener(catalog: Catalog, hub: Hub) -> None:
    async with listen(hub, uris=["a://b"]) as changes:
        task = asyncio.create_task(rest(changes))
        await waiting(task)
        catalog.resources.deleted("a://b")
        assert await task == ["a://b"]


async def test_expiry_ends_the_iteration(hub: Hub) -> None:
    reasons: list[Reason] = []
    async with listen(hub, "tools", ttl=5, on_close=reasons.append) as changes:
        task = asyncio.create_task(rest(changes))
        await waiting(task)
        due = hub.next_due()
        assert due is not None
        hub.tick(due)
        async with asyncio.timeout(SOON):
            assert await task == []
    assert reasons == [Reason.EXPIRED]
