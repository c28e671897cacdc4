"""Callbacks as subscribers: they may fail, act and die, and nobody else pays for it."""

import functools
import gc
import logging
import weakref
from collections.abc import Callable

import pytest

from tests.support.readers import Clock, Reader, add, catalog, clock, hub, reader
from tidings import BUSY, Catalog, Feature, Hub, Notification, Policy, Reason, Topic

__all__ = ["catalog", "clock", "hub", "reader"]

TOOLS, PROMPTS, RESOURCES = Feature


# Callbacks


def test_a_callback_is_told_with_the_changes_and_has_a_name_in_the_logs(catalog: Catalog, hub: Hub) -> None:
    heard: list[Notification] = []

    def on_tools(notification: Notification) -> None:
        heard.append(notification)

    subscriber = hub.subscribe(on_tools, "tools", uris=["a://1", "a://2", "a://3", "a://4"])
    add(catalog, "x")

    assert [change.key for change in heard[0].changes] == ["x"]
    assert heard[0].topic is TOOLS
    assert "on_tools of tools, a://1, a://2, a://3, …>" in repr(subscriber)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.heard = 0

    def __call__(self, notification: Notification) -> None:
        self.heard += 1


def test_any_callable_is_the_same_subscriber_however_often_it_is_named(catalog: Catalog, hub: Hub) -> None:
    counter = Unhashable()
    partial = functools.partial(Unhashable.__call__, Unhashable())
    heard: list[Notification] = []
    for callback in (counter, partial, heard.append):
        first = hub.subscribe(callback, "tools")
        assert hub.subscribe(callback, "prompts") is first
    assert len(hub) == 3
    add(catalog, "x")
    assert (counter.heard, len(heard)) == (1, 1)

    for callback in (counter, partial, heard.append):
        hub.unsubscribe(callback)
    assert len(hub) == 0


@pytest.mark.parametrize("answer", [None, False, True, 0, "BUSY"])
def test_no_answer_but_busy_silences_a_callback(catalog: Catalog, hub: Hub, answer: object) -> None:
    heard: list[Notification] = []

    def callback(notification: Notification) -> object:
        heard.append(notification)
        return answer

    hub.subscribe(callback, "tools")
    add(catalog, "x", "y")

    assert len(heard) == 2
    assert repr(BUSY) == "BUSY"


async def coroutine_function(notification: Notification) -> None: ...


@pytest.mark.parametrize(
    ("callback", "complaint"),
    [("tools", "a function of one notification, not 'tools'"), (coroutine_function, "coroutine function.*live.listen")],
)
def test_what_can_not_be_called_back_is_refused(hub: Hub, callback: Callable[..., object], complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        hub.subscribe(callback, "tools")

    assert len(hub) == 0


def test_leaving_the_block_ends_the_subscription(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    with hub.subscribe(reader.take, "tools"):
        add(catalog, "x")
    add(catalog, "y")

    assert reader.told() == [["added x"]]


# Losing the last reference


def test_a_method_does_not_keep_its_object_alive_and_goes_with_it(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reasons: list[Reason] = []
    mortal = Reader()
    hub.subscribe(mortal.take, "tools", uris=["a://b", "a://*"], on_close=reasons.append, ttl=60)
    hub.subscribe(reader.take, "tools")
    trace = weakref.ref(mortal)
    del mortal
    gc.collect()
    assert trace() is None

    add(catalog, "x")
    assert reader.told() == [["added x"]]
    assert reasons == [Reason.COLLECTED]
    assert [topic for topic, _ in hub.subscriptions()] == [TOOLS]
    assert hub.next_due() is None


def test_ten_thousand_lost_methods_leave_nothing_behind(catalog: Catalog, hub: Hub) -> None:
    readers = [Reader() for _ in range(10_000)]
    for number, each in enumerate(readers):
        hub.subscribe(each.take, "tools", uris=[f"a://{number}", f"a://{number}/*"])
    readers.clear()
    del each
    gc.collect()

    assert len(hub) == 0
    assert hub.subscriptions() == []
    add(catalog, "x")


def test_an_object_born_where_another_died_is_another_subscriber(catalog: Catalog, hub: Hub) -> None:
    mortal = Reader()
    hub.subscribe(mortal.take, "prompts")
    address = id(mortal)
    del mortal
    born = [Reader() for _ in range(1000)]
    [heir] = [reader for reader in born if id(reader) == address]
    hub.subscribe(heir.take, "tools")

    assert [topic for topic, _ in hub.subscriptions()] == [TOOLS]
    add(catalog, "x")
    assert heir.told() == [["added x"]]


def test_a_function_lives_as_long_as_its_subscription(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    def subscribe() -> None:
        def local(notification: Notification) -> None:
            reader.take(notification)

        hub.subscribe(local, "tools")

    subscribe()
    gc.collect()
    add(catalog, "x")

    assert reader.told() == [["added x"]]


# Hooks


def test_hooks_hear_of_the_first_and_the_last_subscriber_of_each_topic(catalog: Catalog) -> None:
    heard: list[tuple[str, Topic]] = []
    hub = Hub(
        catalog, first=lambda topic: heard.append(("first", topic)), last=lambda topic: heard.append(("last", topic))
    )
    one, other = hub.open(print), hub.open(print)
    one.subscribe("tools", uris=["a://b", "a://*"])
    other.subscribe("tools", uris=["a://b"])
    assert heard == [("first", TOOLS), ("first", "a://b"), ("first", "a://*")]

    heard.clear()
    one.close()
    assert heard == [("last", "a://*")]
    other.unsubscribe("tools")
    catalog.resources.deleted("a://b")
    assert heard == [("last", "a://*"), ("last", TOOLS), ("last", "a://b")]


def test_a_hook_that_fails_is_logged_and_the_subscription_holds(
    catalog: Catalog, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(argument: object) -> None:
        raise RuntimeError("broken hook")

    hub = Hub(catalog, first=broken, last=broken)
    subscriber = hub.subscribe(reader.take, "tools", on_close=broken)
    add(catalog, "x")
    subscriber.close()

    assert reader.told() == [["added x"]]
    assert len(hub) == 0
    assert caplog.text.count("RuntimeError: broken hook") == 3


# One bad subscriber


@pytest.mark.parametrize("bad", ["callback", "mute"])
def test_one_bad_subscriber_harms_neither_the_others_nor_the_publisher(
    catalog: Catalog, hub: Hub, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    before, after = Reader(), Reader()

    def broken(argument: object) -> bool:
        raise RuntimeError("broken subscriber")

    hub.subscribe(before.take, "tools", "prompts")
    hub.subscribe(broken, "tools", "prompts", is_muted=broken if bad == "mute" else None)
    hub.subscribe(after.take, "tools", "prompts")
    with caplog.at_level(logging.ERROR, "tidings"):
        for name in ("x", "y"):
            with catalog.batch():
                catalog.tools.add({"name": name})
                catalog.prompts.add({"name": name})

    assert before.told() == after.told() == [["added x"], ["added x"], ["added y"], ["added y"]]
    assert "RuntimeError: broken subscriber" in caplog.text


@pytest.mark.parametrize("bad", ["callback", "mute"])
def test_one_bad_subscriber_that_is_told_later_harms_nobody_either(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    def broken(argument: object) -> bool:
        raise RuntimeError("broken subscriber")

    gap = Policy(quiet_gap=1)
    hub.subscribe(broken, "tools", policy=gap, is_muted=broken if bad == "mute" else None)
    hub.subscribe(reader.take, "tools", policy=gap)
    for clock.now, name in ((0, "x"), (10, "y")):
        add(catalog, name)
        hub.tick(clock.now + 1)

    assert reader.told() == [["added x"], ["added y"]]
    assert "RuntimeError: broken subscriber" in caplog.text


# Subscribers that act while they are told


def test_a_callback_may_change_the_catalog_and_all_hear_all_in_order(catalog: Catalog, hub: Hub) -> None:
    before, after = Reader(), Reader()

    def meddler(notification: Notification) -> None:
        if len(catalog.tools) < 3:
            add(catalog, f"x{len(catalog.tools)}")

    for callback in (before.take, meddler, after.take):
        hub.subscribe(callback, "tools")
    add(catalog, "x0")

    assert before.told() == after.told() == [["added x0"], ["added x1"], ["added x2"]]


def test_a_callback_may_close_or_unsubscribe_another_in_the_middle_of_a_fan_out(catalog: Catalog, hub: Hub) -> None:
    closed, unsubscribed, kept = Reader(), Reader(), Reader()

    def meddler(notification: Notification) -> None:
        hub.close(closed.take)
        hub.unsubscribe(unsubscribed.take, "tools")
        hub.close(meddler)

    for callback in (meddler, closed.take, unsubscribed.take, kept.take):
        hub.subscribe(callback, "tools", "prompts")
    add(catalog, "x")

    assert (closed.told(), unsubscribed.told(), kept.told()) == ([], [], [["added x"]])
    catalog.prompts.add({"name": "p"})
    assert unsubscribed.told() == [["added p"]]


def test_one_who_comes_in_the_middle_of_a_fan_out_hears_of_the_next_change(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    hub.subscribe(lambda notification: hub.subscribe(reader.take, "tools"), "tools")
    add(catalog, "x")
    assert reader.told() == []
    add(catalog, "y")
    assert reader.told() == [["added y"]]


def test_one_who_is_woken_in_the_middle_of_a_fan_out_is_told_each_version_once(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    def waker(notification: Notification) -> None:
        if notification.version.revision > 3:
            reader.is_slow = False
            hub.wake(slow)

    hub.subscribe(waker, "tools")
    slow = hub.subscribe(reader.take, "tools", "prompts")
    reader.is_slow = True
    catalog.prompts.add({"name": "p1"})
    catalog.prompts.add({"name": "p2"})
    add(catalog, "x")
    with catalog.batch():
        add(catalog, "y")
        catalog.prompts.add({"name": "p3"})

    versions = [(notification.topic, notification.version) for notification in reader.heard]
    assert len(set(versions)) == len(versions)
    told = [change.key for notification in reader.heard for change in notification.changes]
    assert sorted(told) == ["p1", "p2", "p3", "x", "y"]


def test_a_tick_in_the_middle_of_a_fan_out_tells_each_version_once(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(lambda notification: hub.tick(), "tools")
    hub.subscribe(reader.take, "tools", policy=Policy(quiet_gap=1))
    for clock.now, name in ((0, "a"), (0.5, "b"), (5, "c"), (9, "d")):
        add(catalog, name)
    hub.tick(10)

    keys = [change.key for notification in reader.heard for change in notification.changes]
    assert keys == ["a", "b", "c", "d"]


def test_one_who_says_in_the_middle_of_a_fan_out_what_it_knows_is_told_each_version_once(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    knew = catalog.version(TOOLS)
    subscriber = hub.open(reader.take)
    hub.subscribe(lambda notification: hub.subscribe(subscriber, told={TOOLS: knew}), "tools")
    subscriber.subscribe("tools")
    add(catalog, "a")

    assert reader.told() == [["added a"]]


def test_one_who_is_told_of_two_lists_at_once_is_told_each_change_once(
    catalog: Catalog, hub: Hub, reader: Reader, clock: Clock
) -> None:
    hub.subscribe(reader.take, "tools", "prompts", policy=Policy(quiet_gap=1))
    for name in ("p1", "p2"):
        catalog.prompts.add({"name": name})
    clock.now = 5  # due for long, and not yet ticked
    with catalog.batch():
        catalog.tools.add({"name": "x"})
        catalog.prompts.add({"name": "p3"})
        catalog.tools.add({"name": "y"})
    for clock.now in (6, 7, 8):
        hub.tick()

    keys = [change.key for notification in reader.heard for change in notification.changes]
    assert sorted(keys) == ["p1", "p2", "p3", "x", "y"]


def test_one_who_comes_back_in_the_middle_of_a_fan_out_is_told_each_version_once(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    catalog.resources.updated("a://b")
    known = catalog.version("a://b")

    def meddler(notification: Notification) -> None:
        catalog.resources.updated("a://b")
        hub.subscribe(reader.take, uris=["a://b"], told={"a://b": known})

    hub.subscribe(meddler, "tools")
    add(catalog, "x")

    assert [notification.version for notification in reader.heard] == [catalog.version("a://b")]
