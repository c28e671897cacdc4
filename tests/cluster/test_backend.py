"""The contract of a backend, over the one in memory and over a real NATS server.

Covers `memory.py`, `nats_calls.py` and `nats_table.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from tests.support.backends import Replica, replica
from tests.support.waiting import until
from tidings.cluster import MemoryBackend, Nats
from tidings.cluster.backend import Backend, CallFailed, NotDelivered, TooLarge, Unavailable, Write
from tidings.cluster.memory import MemoryTable

pytestmark = pytest.mark.anyio

MakeBackend = Callable[[], Backend]
Join = Callable[[str], AbstractAsyncContextManager[Replica]]

NUMBERS = itertools.count()


@pytest.fixture(params=["memory", "nats"])
def join(request: pytest.FixtureRequest) -> Join:
    """Return a function that adds a replica to a new cluster."""
    make: MakeBackend
    if request.param == "memory":
        make = MemoryTable().backend
    else:
        url = request.getfixturevalue("nats_url")
        make = lambda: Nats(url)  # noqa: E731 – one expression for each kind
    server = f"server {next(NUMBERS)}"
    return lambda name: replica(make(), server, name)


async def test_all_replicas_see_all_writes_in_one_order(join: Join) -> None:
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(join(f"r{number}")) for number in range(3)]
        await asyncio.gather(
            *(
                one.write(*((f"key/{number} {step}", b"%d" % step) for step in range(20)), ("shared", b"%d" % number))
                for number, one in enumerate(replicas)
            )
        )
        await replicas[0].write(("end", b""))
        await until(lambda: all("end" in one.table for one in replicas))

        # A write that another one of the same key replaces may be skipped.
        first = [entry for entry in replicas[0].applied if entry.key != "shared"]
        assert all([entry for entry in one.applied if entry.key != "shared"] == first for one in replicas)
        assert all(one.table == replicas[0].table for one in replicas)
        for number in range(3):  # the writes of each replica are in the order in which it made them
            keys = [entry.key for entry in first if entry.key.startswith(f"key/{number} ")]
            assert keys == [f"key/{number} {step}" for step in range(20)]
        assert all(one.seen == sorted(set(one.seen)) for one in replicas)


async def test_a_deletion_is_seen_by_all(join: Join) -> None:
    async with join("a") as a, join("b") as b:
        await a.write(("x", b"1"), ("y", b""))
        await b.until({"x": b"1", "y": b""})
        await b.write(("x", None))
        await a.until({"y": b""})
        await b.until({"y": b""})
        assert a.applied[-1].value is None

        async with join("c") as c:
            assert c.table == {"y": b""}
            assert c.seen[0] == a.seen[-1]


async def test_an_expired_key_is_deleted_for_all(join: Join) -> None:
    async with join("a") as a, join("b") as b:
        await a.write(Write("lease/a", b"1", ttl=1), Write("lease/b", b"1", ttl=1), Write("x", b"1"))
        await b.write(Write("lease/b", b"2"))  # written again, without an expiry
        await a.until({"x": b"1", "lease/b": b"2"})
        await b.until({"x": b"1", "lease/b": b"2"})
        await until(lambda: a.seen[-1] == b.seen[-1])  # all see the expiry at the same place


async def test_a_renewed_key_does_not_expire(join: Join) -> None:
    async with join("a") as a:
        await a.write(Write("lease", b"1", ttl=1))
        await a.write(Write("lease", b"2", ttl=60), Write("other", b"", ttl=2))
        await until(lambda: any(entry.key == "other" and entry.value is None for entry in a.applied))
        assert a.table == {"lease": b"2"}


async def test_a_replica_that_joins_during_writes_misses_none(join: Join) -> None:
    async with join("a") as a:
        await a.write(*((f"k/{number}", b"0") for number in range(300)))
        is_done = False

        async def keep_writing() -> None:
            step = 0
            while not is_done:
                step += 1
                await a.write(*((f"k/{(step * 7 + n) % 300}", b"%d" % step) for n in range(10)), (f"new/{step}", b""))

        writing = asyncio.create_task(keep_writing())
        for attempt in range(5):
            async with join(f"b{attempt}") as b:
                # The snapshot has every key: none is missing because it was written at that moment.
                assert len([key for key in b.table if key.startswith("k/")]) == 300
                count = len(a.applied)
                await until(lambda count=count: len(a.applied) >= count + 50)  # type: ignore[misc]
                if attempt == 4:
                    is_done = True
                    await writing
                    await until(lambda b=b: a.seen[-1] == b.seen[-1])  # type: ignore[misc]
                    assert a.table == b.table
                    assert b.seen == sorted(set(b.seen))


async def test_a_write_that_expects_another_entry_is_not_stored(join: Join) -> None:
    async with join("a") as a, join("b") as b:
        first, other = await a.write(("x", b"1"), ("y", b""))
        assert first is not None
        assert other is not None
        (second,) = await b.write(Write("x", b"2", expected=first))
        assert second is not None
        # Neither a write nor a deletion may replace the new entry, and the writes beside them are stored.
        orders = await a.write(
            Write("x", b"3", expected=first), Write("x", None, expected=first), Write("y", b"3", expected=other)
        )
        assert orders[:2] == [None, None]
        await b.until({"x": b"2", "y": b"3"})
        assert [entry.order for entry in b.applied if entry.key == "x"][-1] == second
        assert b.applied[-1].order == orders[2]

        await a.write(("x", None))
        assert await b.write(Write("x", b"4", expected=second), Write("new", b"", expected=second)) == [None, None]
        await b.until({"y": b"3"})
        results = await asyncio.gather(
            *(one.write(Write("y", one.name.encode(), expected=orders[2])) for one in (a, b) for _ in range(5))
        )
        assert [order for (order,) in results].count(None) == 9


async def test_an_expected_entry_of_a_table_that_was_lost_is_not_found() -> None:
    table = MemoryTable()
    async with replica(table.backend(), "s", "a") as a:
        (order,) = await a.write(("x", b"1"))
        table.clear()
        assert await a.write(Write("x", b"2", expected=order)) == [None]


ODD_KEYS = [
    "tool/a b",
    "resource/https://example.com/päth?q=1&x=%20#ü",
    "resource/file:///C:/..//x",
    "prompt/日本語 🎉",
    "tool/" + "x" * 1000,
    "tool/" + "é" * 1000,
    "tool/" + "é" * 999 + "e",
    "tool/=41=",
    "tool/A.B.>.*",
    "tool/\x00\r\n\t",
    " lead/and trail ",
    "." * 10,
    "TOOL/a",
    "tool/a",
]


async def test_any_text_is_a_key(join: Join) -> None:
    values = {key: key.encode() for key in ODD_KEYS}
    async with join("a") as a, join("b") as b:
        await a.write(*values.items())
        await b.until(values)
        async with join("c") as c:
            assert c.table == values
            await a.write(*((key, None) for key in ODD_KEYS))
            await b.until({})
            await c.until({})
        orders = dict(zip(ODD_KEYS, await a.write(*(Write(key, b"", ttl=1) for key in ODD_KEYS)), strict=True))
        assert None not in orders.values()

        def expired() -> set[str]:
            removed = (entry for entry in b.applied if entry.value is None)
            return {entry.key for entry in removed if entry.order > (orders[entry.key] or 0)}

        await until(lambda: expired() == set(ODD_KEYS))
        assert b.table == {}


async def test_a_large_value_is_refused_and_none_of_the_writes_is_stored(join: Join) -> None:
    async with join("a") as a:
        with pytest.raises(TooLarge, match=r"tool/large has [\d,]{9} bytes"):
            await a.write(("x", b"1"), ("tool/large", b"x" * (1024 * 1024 + 1)))
        await a.write(("y", b"x" * 1_000_000))
        await until(lambda: "y" in a.table)
        assert "x" not in a.table


async def test_many_writes_in_one_call(join: Join) -> None:
    async with join("a") as a, join("b") as b:
        await a.write(*((f"k/{number}", b"v" * 100) for number in range(2000)))
        await until(lambda: len(b.table) == 2000)
        assert [entry.key for entry in b.applied] == [f"k/{number}" for number in range(2000)]


async def test_a_call_has_progress_and_a_reply(join: Join) -> None:
    async with join("a") as a, join("b"):
        progress: list[bytes] = []
        assert await a.backend.call("b", b"hello", progress.append, 30) == b"b got hello"
        assert progress == [b"step 0", b"step 1", b"step 2"]
        replies = await asyncio.gather(*(a.backend.call("b", b"%d" % n, progress.append, 30) for n in range(50)))
        assert replies == [b"b got %d" % n for n in range(50)]
        assert await a.backend.call("a", b"myself", progress.append, 30) == b"a got myself"


@pytest.mark.filterwarnings("ignore")
async def test_an_error_of_the_handler_fails_the_call(join: Join) -> None:
    async with join("a") as a, join("b"):
        with pytest.raises(CallFailed, match="the replica b failed: the file is missing"):
            await a.backend.call("b", b"fail", lambda progress: None, 30)


async def test_a_cancelled_call_cancels_the_handler(join: Join) -> None:
    async with join("a") as a, join("b") as b:
        progress: list[bytes] = []
        call = asyncio.create_task(a.backend.call("b", b"wait", progress.append, 30))
        await until(lambda: len(progress) == 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: b.cancelled == 1)


async def test_the_timeout_of_a_call_cancels_the_handler(join: Join) -> None:
    async with join("a") as a, join("b") as b:
        with pytest.raises(CallFailed, match=r"did not reply within 0\.2 s"):
            await a.backend.call("b", b"wait", lambda progress: None, 0.2)
        await until(lambda: b.cancelled == 1)


async def test_a_call_to_a_missing_replica_fails_at_once(join: Join) -> None:
    async with join("a") as a:
        async with asyncio.timeout(15):
            with pytest.raises(NotDelivered, match="replica nobody"):
                await a.backend.call("nobody", b"", lambda progress: None, 60)


async def test_a_call_fails_when_the_replica_leaves(join: Join) -> None:
    async with join("a") as a:
        progress: list[bytes] = []
        async with join("b") as b:
            call = asyncio.create_task(a.backend.call("b", b"wait", progress.append, 60))
            await until(lambda: len(progress) == 3)
        assert b.cancelled == 1
        with pytest.raises(CallFailed) as raised:
            await call
        assert not isinstance(raised.value, NotDelivered)


async def test_nothing_is_written_or_called_before_the_start_and_after_the_end(join: Join) -> None:
    async with join("a") as a:
        pass
    with pytest.raises(Unavailable):
        await a.write(("x", b"1"))
    with pytest.raises(NotDelivered):
        await a.backend.call("a", b"", lambda progress: None, 1)


async def test_the_backend_in_memory_can_be_disconnected_and_emptied() -> None:
    table = MemoryTable()
    backend = MemoryBackend(table)
    async with replica(table.backend(), "s", "a") as a, replica(backend, "s", "b") as b:
        await a.write(("x", b"1"))
        await b.until({"x": b"1"})
        backend.disconnect("the cable is out")
        await until(lambda: b.lost == ["the cable is out"])
        with pytest.raises(Unavailable):
            await b.write(("x", b"2"))
        with pytest.raises(CallFailed):
            await a.backend.call("b", b"", lambda progress: None, 1)
        await a.write(("x", b"3"))
        await a.until({"x": b"3"})
        assert b.table == {"x": b"1"}
        backend.reconnect()
        await b.until({"x": b"3"})
        assert b.epochs[0] == b.epochs[1]

        table.clear()
        await until(lambda: a.table == b.table == {})
        assert a.epochs[-1] == b.epochs[-1] != a.epochs[0]
        assert b.seen == sorted(b.seen)
