"""What a filter hides of what was shown is found out once for all who missed the same, and anew when that changes."""

from __future__ import annotations

import math

import pytest

from tests.support.readers import Clock, Reader, catalog, clock, hub, reader
from tidings import Catalog, Change, Feature, Filter, Hub, Subscriber

__all__ = ["catalog", "clock", "hub", "reader"]

TOOLS = Feature.TOOLS


class Counting(Filter):
    """A filter that says how often it, or one that equals it, was asked."""

    asked = 0

    def passes(self, change: Change) -> bool:
        type(self).asked += 1
        return super().passes(change)


def open_slow(hub: Hub, reader: Reader, filter: Filter) -> Subscriber:
    slow = hub.open(reader.take, filter=filter)
    slow.subscribe("tools")
    slow.pause()
    return slow


def show(catalog: Catalog, hub: Hub) -> None:
    hub.notifications.fetched.record(TOOLS, catalog.tools.version)


def asked_by(number: int, *, is_undone: bool) -> tuple[int, Reader]:
    """How often the filter is asked while a number of readers that missed the same are woken."""
    catalog, reader = Catalog(), Reader()
    hub = Hub(catalog, clock=Clock())
    waiting = [open_slow(hub, reader, Counting(names=["t*"])) for _ in range(number)]
    for index in range(20):
        catalog.tools.add({"name": f"t{index}"})
    show(catalog, hub)
    if is_undone:
        catalog.tools.remove("t0")
    catalog.tools.add({"name": "other"})
    Counting.asked = 0
    for each in waiting:
        hub.wake(each)
    return Counting.asked, reader


@pytest.mark.parametrize("is_undone", [True, False])
def test_filter_is_evaluated_once_for_equal_subscribers(is_undone: bool) -> None:
    one, _ = asked_by(1, is_undone=is_undone)
    many, reader = asked_by(30, is_undone=is_undone)

    assert many == one > 0
    assert [told.complete for told in reader.heard] == [not is_undone] * 30


def test_later_undone_change_is_not_hidden_by_the_cache(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    early, late = (open_slow(hub, reader, Filter(names=["t*"])) for _ in range(2))
    catalog.tools.add({"name": "t1"})
    show(catalog, hub)
    catalog.tools.add({"name": "other"})
    hub.wake(early)
    assert reader.told() == [["added t1"]]
    early.close()

    catalog.tools.add({"name": "t2"})
    show(catalog, hub)
    catalog.tools.remove("t2")
    hub.wake(late)

    (told,) = reader.heard
    assert (told.complete, told.changes) == (False, ())


def test_cache_distinguishes_filters(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    waiting = [open_slow(hub, reader, Filter(names=[name])) for name in ("passing", "staying")]
    with catalog.batch():
        for name in ("passing", "staying"):
            catalog.tools.add({"name": name})
    show(catalog, hub)
    catalog.tools.remove("passing")

    for each in waiting:
        hub.wake(each)

    assert [told.complete for told in reader.heard] == [False, True]
    assert reader.told() == [[], ["added staying"]]


def test_discarded_changes_may_have_been_undone(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    other = Reader()
    slow = hub.open(other.take)
    slow.subscribe("tools")
    slow.pause()
    picky = open_slow(hub, reader, Filter(names=["t*"]))
    catalog.tools.add({"name": "t"})
    show(catalog, hub)
    catalog.tools.remove("t")
    catalog.tools.add({"name": "other"})
    hub.wake(slow)
    assert other.told() == [["added other"]], "all that is left, and known from now on"

    hub.journal.expire(math.inf)
    hub.wake(picky)

    (told,) = reader.heard
    assert (told.complete, told.changes) == (False, ())
