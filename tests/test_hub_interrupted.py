"""What ends a program may be raised within one delivery; nobody else is told less for it."""

import asyncio

import pytest

from tests.readers import Clock, Reader, catalog, clock, hub, reader
from tidings import Catalog, Hub, Notification, Policy

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
    hub.tick()

    assert sorted(reader.told()) == [["added p"], ["added t"]]
    assert not hub.failures, "it is nobody's failure"


@pytest.mark.parametrize("policy", [None, PACED])
def test_a_cancelled_task_that_a_callback_asked_for_is_its_own_failure(
    catalog: Catalog, hub: Hub, clock: Clock, reader: Reader, policy: Policy | None
) -> None:
    """`task.result()` of one that was cancelled raises what is no `Exception`."""
    open_two(hub, reader, asyncio.CancelledError(), policy)

    change_both(catalog, hub, clock)

    assert sorted(reader.told()) == [["added p"], ["added t"]]
    assert hub.failures["delivery"] == 2
