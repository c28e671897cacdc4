"""The core keeps its promises in random scenarios, and closed subscribers leave nothing behind."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.promises.machine import Machine, assert_nothing_is_left
from tests.support.promises.strategies import PATTERNS, URIS
from tests.support.readers import Clock
from tests.support.stress import sized
from tidings import BUSY, Catalog, Feature, Filter, Hub, Notification, Policy, Reason, Subscriber, Topic

pytestmark = pytest.mark.usefixtures("no_logs")


@pytest.mark.stress
def test_core_keeps_its_promises() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=sized(60, 1_500), stateful_step_count=40))


@pytest.mark.stress
def test_nothing_remains_after_random_openings() -> None:
    chance = random.Random(2)
    clock = Clock()
    catalog = Catalog(clock=clock)
    watched: set[Topic] = set()
    hub = Hub(catalog, clock=clock, on_watched=watched.add, on_unwatched=watched.remove)
    options: list[dict[str, Any]] = [
        {},
        {"settings": Policy(quiet_gap=0.5, min_interval=1.0).delivery},
        {"filter": Filter(["added"])},
        {"settings": Policy(max_pending=4).delivery, "is_muted": lambda topic: topic == "a://p"},
    ]
    wanted = [
        (chance.sample(tuple(Feature), chance.randrange(1, 3)), chance.sample((*URIS, *PATTERNS), chance.randrange(3)))
        for _ in range(1000)
    ]
    opened: deque[Subscriber] = deque()
    for cycle in range(sized(10_000, 100_000)):
        features, uris = chance.choice(wanted)
        ttl = None if cycle % 3 else 1.0
        if cycle % 5 == 0:
            opened.append(
                hub.subscribe(deque[Notification]().append, *features, uris=uris, ttl=ttl, **options[cycle % 4])
            )
        else:
            subscriber = hub.open(lambda _: BUSY, **options[cycle % 4])
            subscriber.subscribe(*features, uris=uris, ttl=ttl)
            opened.append(subscriber)
        if len(opened) > 20:
            subscriber = opened.popleft()
            if cycle % 7 == 0:
                subscriber.unsubscribe()
            subscriber.close(Reason.DISCONNECTED)
        if cycle % 100 == 0:
            catalog.tools.add({"name": "p", "description": str(cycle)}, replace=True)
            catalog.resources.updated(chance.choice(URIS))
            clock.now += 0.3
            hub.tick()
    assert len(hub) <= 40
    assert len(hub.delivery._timers._heap) <= 2 * len(hub)
    for subscriber in opened:
        subscriber.close()
    assert_nothing_is_left(hub)
    assert not watched
