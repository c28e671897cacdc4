"""Hidden changes of a fetched list are found once for all subscribers that missed the same."""

from __future__ import annotations

import math

import pytest

from tests.support.readers import Clock, Reader
from tidings import Catalog, Change, Feature, Filter, Hub, Subscriber

TOOLS = Feature.TOOLS


class Counting(Filter):
    """A filter that counts the calls of `passes`."""

    calls = 0

    def passes(self, change: Change) -> bool:
        type(self).calls += 1
        return super().passes(change)


def open_slow(hub: Hub, reader: Reader, filter: Filter) -> Subscriber:
    slow = hub.open(reader.take, filter=filter)
    slow.subscribe("tools")
    slow.pause()
    return slow


def fetch(catalog: Catalog, hub: Hub) -> None:
    hub.notifications.fetched.record(TOOLS, catalog.tools.version)


def calls_for(number: int, *, is_undone: bool) -> tuple[int, Reader]:
    """Count the calls of the filter while several equal subscribers are woken."""
    catalog, reader = Catalog(), Reader()
    hub = Hub(catalog, clock=Clock())
    waiting = [open_slow(hub, reader, Counting(names=["t*"])) for _ in range(number)]
    for index in range(20):
        catalog.tools.add({"name": f"t{index}"})
    fetch(catalog, hub)
    if is_undone:
        catalog.tools.remove("t0")
    catalog.tools.add({"name": "other"})
    Counting.calls = 0
    for each in waiting:
        hub.wake(each)
    return Counting.calls, reader


@pytest.mark.parametrize("is_undone", [True, False])
def test_filter_is_evaluated_once_for_equal_subscribers(is_undone: bool) -> None:
    one, _ = calls_for(1, is_undone=is_undone)
    many, reader = calls_for(30, is_undone=is_undone)

    assert many == one > 0
    assert [told.complete for told in reader.received] == [not is_undone] * 30


def test_later_undone_change_is_not_hidden_by_the_cache(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    early, late = (open_slow(hub, reader, Filter(names=["t*"])) for _ in range(2))
    catalog.tools.add({"name": "t1"})
    fetch(catalog, hub)
    catalog.tools.add({"name": "other"})
    hub.wake(early)
    assert reader.told() == [["added t1"]]
    early.close()

    catalog.tools.add({"name": "t2"})
    fetch(catalog, hub)
    catalog.tools.remove("t2")
    hub.wake(late)

    (told,) = reader.received
    assert (told.complete, told.changes) == (False, ())


def test_cache_distinguishes_filters(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    waiting = [open_slow(hub, reader, Filter(names=[name])) for name in ("passing", "staying")]
    with catalog.batch():
        for name in ("passing", "staying"):
            catalog.tools.add({"name": name})
    fetch(catalog, hub)
    catalog.tools.remove("passing")

    for each in waiting:
        hub.wake(each)

    assert [told.complete for told in reader.received] == [False, True]
    assert reader.told() == [[], ["added staying"]]


def test_discarded_changes_may_have_been_undone(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    other = Reader()
    slow = hub.open(other.take)
    slow.subscribe("tools")
    slow.pause()
    picky = open_slow(hub, reader, Filter(names=["t*"]))
    catalog.tools.add({"name": "t"})
    fetch(catalog, hub)
    catalog.tools.remove("t")
    catalog.tools.add({"name": "other"})
    hub.wake(slow)
    assert other.told() == [["added other"]], "the net change"

    hub.journal.expire(math.inf)
    hub.wake(picky)

    (told,) = reader.received
    assert (told.complete, told.changes) == (False, ())


def test_cache_distinguishes_revisions(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    early = open_slow(hub, reader, Filter(names=["t*"]))
    catalog.tools.add({"name": "t1"})
    fetch(catalog, hub)
    catalog.tools.remove("t1")
    late = open_slow(hub, reader, Filter(names=["t*"]))
    catalog.tools.add({"name": "t2"})
    fetch(catalog, hub)
    catalog.tools.add({"name": "other"})

    for each in (early, late):
        hub.wake(each)

    assert [told.complete for told in reader.received] == [False, True]
    assert reader.told() == [[], ["added t2"]]
