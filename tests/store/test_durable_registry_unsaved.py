"""Which records are collected for the next batch."""

from __future__ import annotations

import pytest

from tests.support.durables import KEY, Client, record_of
from tests.support.stores import StoredServer
from tidings import Feature
from tidings.store.durable import DurableSubscription

TOOLS = Feature.TOOLS


@pytest.mark.parametrize(("clients", "uris", "pauses"), [(1000, 0, 2), (20, 10_000, 9)])
def test_many_records_are_collected_in_slices(server: StoredServer, clients: int, uris: int, pauses: int) -> None:
    """Other threads need the lock in between."""
    for number in range(clients):
        Client(server, name=str(number), uris=[f"a://{each}" for each in range(uris)])
    server.write()
    server.add_tools("a")
    server.confirm_all()
    calls: list[int] = []

    assert len(server.durables.collect_unsaved(lambda: calls.append(1))) == clients
    assert len(calls) >= pauses
    server.durables.confirm_written()
    assert server.durables.collect_unsaved() == {}


def test_records_that_are_created_and_removed_during_an_outage_leave_nothing(server: StoredServer) -> None:
    durables = server.durables
    durables.put(DurableSubscription(name="stays", ttl=9))
    durables.put(DurableSubscription(name="was written", ttl=9))
    server.write()
    durables.remove((None, "was written"))
    for number in range(100):
        durables.put(DurableSubscription(name=f"collected {number}", ttl=9))
        durables.collect_unsaved()
        durables.remove((None, f"collected {number}"))
        durables.put(DurableSubscription(name=f"marked {number}", ttl=9))
        durables.remove((None, f"marked {number}"))

    assert dict(durables.collect_unsaved()) == {(None, "was written"): None}
    server.write()
    server.kill()
    assert [record.name for record in server.durables.all()] == ["stays"]


def test_record_that_is_removed_while_it_is_being_written_is_removed_from_the_store(server: StoredServer) -> None:
    server.durables.put(DurableSubscription(name="laptop", ttl=9))
    server.batch.durables.update(server.durables.collect_unsaved())
    server.durables.remove(KEY)
    server.store.write(server.batch)
    server.durables.confirm_written()
    server.batch.durables.clear()

    server.write()
    server.kill()
    assert server.durables.all() == []


def test_told_versions_are_written_when_they_are_confirmed_and_not_with_each_batch(server: StoredServer) -> None:
    for number in range(20):
        Client(server, name=str(number))
    server.write()
    for number in range(50):
        server.add_tools(f"t{number}")
        assert server.durables.collect_unsaved() == {}
        server.write()
        server.now += 0.05
    assert server.durables.has_unsaved
    server.confirm_all()
    assert len(server.durables.collect_unsaved()) == 20
    server.write()
    assert not server.durables.has_unsaved
    assert {record.lists[TOOLS] for record in server.durables.all()} == {server.catalog.version(TOOLS)}


def test_under_steady_changes_versions_told_long_ago_are_written(server: StoredServer) -> None:
    Client(server, TOOLS, uris="a://1")
    server.catalog.resources.updated("a://1")
    for number in range(40):
        server.add_tools(f"t{number}")
        server.write()
        server.now += 2.0
    server.restart()
    stored = server.state.durables[KEY]
    assert stored.contents == {"a://1": server.catalog.version("a://1")}
    assert stored.lists == {TOOLS: None}
    assert record_of(server).lists == {TOOLS: None}
