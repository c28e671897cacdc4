"""What ends a program may be raised within one delivery; nobody else is told less for it."""

import asyncio

import pytest

from tests.support.readers import Clock, Reader, catalog, clock, hub, reader
from tidings import BUSY, Catalog, Change, Feature, Hub, Notification, Policy

__all__ = ["catalog", "clock", "hub", "reader"]

PACED = Policy(quiet_gap=1)


def open_two(hub: Hub, reader: Reader, error: BaseException, policy: Policy | None) -> None:
    """One that raises when it is told something, and another one after it."""

    def fail(notification: Notification) -> None:
        raise error

    for deliver in (fail, reader.take):
        hub.open(deliver, policy=policy).subscribe("tools", "prompts")


def change_both(catalog: Catalog, hub: Hub, clock: Clock) -> None:
    with catalog.batch():
        catalog.tools.add({"name": "t"})
        catalog.prompts.add({"name": "p"})
    clock.now = 1.0
    hub.tick()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("policy", [None, PACED])
def test_what_ends_the_program_does_so_when_all_have_been_told(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader, policy: Policy | None, ending: type[BaseException]
) -> None:
    open_two(hub, reader, ending(), policy)

    with pytest.raises(ending):
        change_both(catalog, hub, clock)

    assert sorted(reader.told()) == [["added p"], ["added t"]]
    assert not hub.counts.failures, "it is nobody's failure"


@pytest.mark.parametrize("policy", [None, PACED])
def test_a_cancelled_task_that_a_callback_asked_for_is_its_own_failure(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader, policy: Policy | None
) -> None:
    """`task.result()` of one that was cancelled raises what is no `Exception`."""
    open_two(hub, reader, asyncio.CancelledError(), policy)

    change_both(catalog, hub, clock)

    assert sorted(reader.told()) == [["added p"], ["added t"]]
    assert hub.counts.failures["delivery"] == 2


def test_all_who_are_due_are_told_by_the_tick_that_is_ended(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader
) -> None:
    open_two(hub, reader, KeyboardInterrupt(), PACED)
    for _ in range(2):
        hub.open(reader.take, policy=PACED).subscribe("tools")
    catalog.tools.add({"name": "t"})
    clock.now = 1.0

    with pytest.raises(KeyboardInterrupt):
        hub.tick()

    assert reader.told() == [["added t"]] * 3
    hub.tick()
    assert reader.told() == [], "and what ended it is over"


def test_one_who_comes_back_is_told_all_of_it_though_more_than_may_wait(
    catalog: Catalog, hub: Hub, reader: Reader
) -> None:
    uris = ["a://1", "a://2", "a://3"]
    for uri in uris:
        catalog.resources.updated(uri)

    def take(notification: Notification) -> None:
        reader.take(notification)
        if len(reader.heard) == 1:
            raise KeyboardInterrupt

    subscriber = hub.open(take, policy=Policy(max_pending=1))
    with pytest.raises(KeyboardInterrupt):
        hub.subscribe(subscriber, uris=uris, told=dict.fromkeys(uris))

    assert [notification.topic for notification in reader.heard] == uris
    assert not subscriber.pending


def test_who_wakes_one_hears_what_ends_the_program(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    def take(notification: Notification) -> object:
        reader.take(notification)
        if len(reader.heard) == 2:
            raise KeyboardInterrupt
        return BUSY if len(reader.heard) == 1 else None

    subscriber = hub.open(take)
    subscriber.subscribe("tools", "prompts")
    catalog.tools.add({"name": "t"})
    catalog.tools.add({"name": "u"})
    catalog.prompts.add({"name": "p"})

    with pytest.raises(KeyboardInterrupt):
        hub.wake(subscriber)

    assert sorted(reader.told()) == [["added p"], ["added t"], ["added u"]]


@pytest.mark.parametrize("policy", [None, PACED])
def test_a_callback_that_uses_the_hub_itself_is_not_cut_short_by_the_end_of_another(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader, policy: Policy | None
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
        hub.open(deliver, policy=policy).subscribe("tools")
    with pytest.raises(KeyboardInterrupt):
        change_both(catalog, hub, clock)

    assert done == ["subscribed", "changed", "woken", "ticked"]
    assert reader.heard[-1].version == catalog.resources.version


def test_other_sinks_hear_of_every_commit_though_one_is_ended(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    """A store is one of them: what it does not hear of is never written down."""
    heard: list[tuple[Change, ...]] = []

    def fail(notification: Notification) -> None:
        catalog.prompts.add({"name": "p"})
        raise KeyboardInterrupt

    hub.open(fail).subscribe("tools")
    hub.open(reader.take).subscribe("prompts")
    catalog.follow(heard.append)

    with pytest.raises(KeyboardInterrupt):
        catalog.tools.add({"name": "t"})

    assert [[change.key for change in changes] for changes in heard] == [["t"], ["p"]]
    assert reader.told() == [["added p"]]
