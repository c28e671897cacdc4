"""A `KeyboardInterrupt` or `SystemExit` in one delivery does not prevent the others."""

import asyncio

import pytest

from tests.support.readers import Clock, Reader
from tidings import BUSY, Catalog, Feature, Hub, Notification, Policy
from tidings.core.delivery_settings import DeliverySettings

PACED = Policy(quiet_gap=1).delivery


def open_two(hub: Hub, reader: Reader, error: BaseException, settings: DeliverySettings | None) -> None:
    """Open a subscriber whose `deliver` raises, and a second one."""

    def fail(notification: Notification) -> None:
        raise error

    for deliver in (fail, reader.take):
        hub.open(deliver, settings=settings).subscribe("tools", "prompts")


def change_both(catalog: Catalog, hub: Hub, clock: Clock) -> None:
    with catalog.batch():
        catalog.tools.add({"name": "t"})
        catalog.prompts.add({"name": "p"})
    clock.now = 1.0
    hub.tick()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("settings", [None, PACED])
def test_exit_is_raised_after_all_subscribers_were_told(
    catalog: Catalog,
    hub: Hub,
    clock: Clock,
    reader: Reader,
    settings: DeliverySettings | None,
    ending: type[BaseException],
) -> None:
    open_two(hub, reader, ending(), settings)

    with pytest.raises(ending):
        change_both(catalog, hub, clock)

    assert sorted(reader.told()) == [["added p"], ["added t"]]
    assert not hub.counts.failures, "an exit is not a failed delivery"


@pytest.mark.parametrize("settings", [None, PACED])
def test_cancelled_error_of_a_callback_counts_as_failed_delivery(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader, settings: DeliverySettings | None
) -> None:
    """`task.result()` of a cancelled task raises a `BaseException`."""
    open_two(hub, reader, asyncio.CancelledError(), settings)

    change_both(catalog, hub, clock)

    assert sorted(reader.told()) == [["added p"], ["added t"]]
    assert hub.counts.failures["delivery"] == 2


def test_interrupted_resume_delivers_everything_missed(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    uris = ["a://1", "a://2", "a://3"]
    for uri in uris:
        catalog.resources.updated(uri)

    def take(notification: Notification) -> None:
        reader.take(notification)
        if len(reader.received) == 1:
            raise KeyboardInterrupt

    subscriber = hub.open(take, settings=Policy(max_pending=1).delivery)
    with pytest.raises(KeyboardInterrupt):
        hub.subscribe(subscriber, uris=uris, told=dict.fromkeys(uris))

    assert [notification.topic for notification in reader.received] == uris
    assert not subscriber.pending


def test_wake_raises_the_exit_of_a_callback(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    def take(notification: Notification) -> object:
        reader.take(notification)
        if len(reader.received) == 2:
            raise KeyboardInterrupt
        return BUSY if len(reader.received) == 1 else None

    subscriber = hub.open(take)
    subscriber.subscribe("tools", "prompts")
    catalog.tools.add({"name": "t"})
    catalog.tools.add({"name": "u"})
    catalog.prompts.add({"name": "p"})

    with pytest.raises(KeyboardInterrupt):
        hub.wake(subscriber)

    assert sorted(reader.told()) == [["added p"], ["added t"], ["added u"]]


@pytest.mark.parametrize("settings", [None, PACED])
def test_callback_that_uses_the_hub_is_not_interrupted_by_another(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader, settings: DeliverySettings | None
) -> None:
    done: list[str] = []
    other = hub.open(reader.take)

    def use(notification: Notification) -> None:
        hub.subscribe(other, "resources", told={Feature.RESOURCES: None})
        done.append("subscribed")
        catalog.resources.add({"name": "r", "uri": "a://r"})
        done.append("changed")
        hub.wake(other)
        done.append("woken")
        hub.tick()
        done.append("ticked")

    def fail(notification: Notification) -> None:
        raise KeyboardInterrupt

    for deliver in (fail, use):
        hub.open(deliver, settings=settings).subscribe("tools")
    with pytest.raises(KeyboardInterrupt):
        change_both(catalog, hub, clock)

    assert done == ["subscribed", "changed", "woken", "ticked"]
    assert reader.received[-1].version == catalog.resources.version
