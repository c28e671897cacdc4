"""Callbacks as subscribers may fail and use the hub, without effect on others."""

import functools
import logging
from collections.abc import Callable

import pytest

from tests.support.readers import Clock, Reader, add
from tidings import BUSY, Catalog, Feature, Hub, Notification, Policy, Topic

TOOLS, PROMPTS, RESOURCES = Feature


# Callbacks


def test_callback_gets_changes_and_has_a_label(catalog: Catalog, hub: Hub) -> None:
    received: list[Notification] = []

    def on_tools(notification: Notification) -> None:
        received.append(notification)

    subscriber = hub.subscribe(on_tools, "tools", uris=["a://1", "a://2", "a://3", "a://4"])
    add(catalog, "x")

    assert [change.key for change in received[0].changes] == ["x"]
    assert received[0].topic is TOOLS
    assert "on_tools of tools, a://1, a://2, a://3, …>" in repr(subscriber)


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.received = 0

    def __call__(self, notification: Notification) -> None:
        self.received += 1


def test_each_callable_has_one_subscriber(catalog: Catalog, hub: Hub) -> None:
    counter = Unhashable()
    partial = functools.partial(Unhashable.__call__, Unhashable())
    received: list[Notification] = []
    for callback in (counter, partial, received.append):
        first = hub.subscribe(callback, "tools")
        assert hub.subscribe(callback, "prompts") is first
    assert len(hub) == 3
    add(catalog, "x")
    assert (counter.received, len(received)) == (1, 1)

    for callback in (counter, partial, received.append):
        hub.unsubscribe(callback)
    assert len(hub) == 0


@pytest.mark.parametrize("answer", [None, False, True, 0, "BUSY"])
def test_only_busy_pauses_a_callback(catalog: Catalog, hub: Hub, answer: object) -> None:
    received: list[Notification] = []

    def callback(notification: Notification) -> object:
        received.append(notification)
        return answer

    hub.subscribe(callback, "tools")
    add(catalog, "x", "y")

    assert len(received) == 2
    assert repr(BUSY) == "BUSY"


async def coroutine_function(notification: Notification) -> None: ...


@pytest.mark.parametrize(
    ("callback", "complaint"),
    [("tools", "a function of one notification, not 'tools'"), (coroutine_function, "coroutine function.*live.listen")],
)
def test_invalid_callback_is_refused(hub: Hub, callback: Callable[..., object], complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        hub.subscribe(callback, "tools")

    assert len(hub) == 0


# Hooks


def test_hooks_are_called_for_first_and_last_subscriber(catalog: Catalog) -> None:
    received: list[tuple[str, Topic]] = []
    hub = Hub(
        catalog,
        on_watched=lambda topic: received.append(("first", topic)),
        on_unwatched=lambda topic: received.append(("last", topic)),
    )
    one, other = hub.open(print), hub.open(print)
    one.subscribe("tools", uris=["a://b", "a://*"])
    other.subscribe("tools", uris=["a://b"])
    assert received == [("first", TOOLS), ("first", "a://b"), ("first", "a://*")]

    received.clear()
    one.close()
    assert received == [("last", "a://*")]
    other.unsubscribe("tools")
    catalog.resources.deleted("a://b")
    assert received == [("last", "a://*"), ("last", TOOLS), ("last", "a://b")]


def test_failing_hook_is_logged_and_the_subscription_stays(
    catalog: Catalog, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(argument: object) -> None:
        raise RuntimeError("broken hook")

    hub = Hub(catalog, on_watched=broken, on_unwatched=broken)
    subscriber = hub.subscribe(reader.take, "tools", on_close=broken)
    add(catalog, "x")
    subscriber.close()

    assert reader.told() == [["added x"]]
    assert len(hub) == 0
    assert caplog.text.count("RuntimeError: broken hook") == 3


# Failures


@pytest.mark.parametrize("policy", [Policy(), Policy(quiet_gap=1)])
@pytest.mark.parametrize("failing", ["callback", "mute"])
def test_other_subscribers_are_notified_if_one_fails(
    catalog: Catalog, hub: Hub, clock: Clock, caplog: pytest.LogCaptureFixture, failing: str, policy: Policy
) -> None:
    before, after = Reader(), Reader()

    def fail(argument: object) -> bool:
        raise RuntimeError("failing subscriber")

    hub.subscribe(before.take, "tools", "prompts", settings=policy.delivery)
    hub.subscribe(fail, "tools", "prompts", settings=policy.delivery, is_muted=fail if failing == "mute" else None)
    hub.subscribe(after.take, "tools", "prompts", settings=policy.delivery)
    with caplog.at_level(logging.ERROR, "tidings"):
        for clock.now, name in ((0, "x"), (10, "y")):
            with catalog.batch():
                catalog.tools.add({"name": name})
                catalog.prompts.add({"name": name})
            hub.tick(clock.now + 1)

    assert before.told() == after.told() == [["added x"], ["added x"], ["added y"], ["added y"]]
    assert "RuntimeError: failing subscriber" in caplog.text


# Callbacks that use the hub


def test_callback_can_change_the_catalog(catalog: Catalog, hub: Hub) -> None:
    before, after = Reader(), Reader()

    def add_more(notification: Notification) -> None:
        if len(catalog.tools) < 3:
            add(catalog, f"x{len(catalog.tools)}")

    for callback in (before.take, add_more, after.take):
        hub.subscribe(callback, "tools")
    add(catalog, "x0")

    assert before.told() == after.told() == [["added x0"], ["added x1"], ["added x2"]]


def test_callback_can_close_another_during_delivery(catalog: Catalog, hub: Hub) -> None:
    closed, unsubscribed, kept = Reader(), Reader(), Reader()

    def close_others(notification: Notification) -> None:
        hub.close(closed.take)
        hub.unsubscribe(unsubscribed.take, "tools")
        hub.close(close_others)

    for callback in (close_others, closed.take, unsubscribed.take, kept.take):
        hub.subscribe(callback, "tools", "prompts")
    add(catalog, "x")

    assert (closed.told(), unsubscribed.told(), kept.told()) == ([], [], [["added x"]])
    catalog.prompts.add({"name": "p"})
    assert unsubscribed.told() == [["added p"]]


def test_subscriber_added_during_delivery_gets_the_next_change(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    hub.subscribe(lambda notification: hub.subscribe(reader.take, "tools"), "tools")
    add(catalog, "x")
    assert reader.told() == []
    add(catalog, "y")
    assert reader.told() == [["added y"]]
