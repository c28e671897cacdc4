"""Histories from messages on the wire, and from a recorder inside a process."""

from __future__ import annotations

import json

import pytest

from tests.support.promises.checks import check_all
from tests.support.promises.history import (
    Changed,
    Closed,
    Event,
    History,
    MailboxSize,
    Muted,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
)
from tests.support.promises.recorder import Recorder
from tests.support.readers import Clock
from tidings import BUSY, Catalog, Feature, Hub, Notification, Operation, Policy, Topic, Version
from tidings.core.frames import FrameFormat, encode_frame

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
THREE = Version(3, "three")
ADDED = Operation.ADDED


def notifications() -> list[Notification]:
    """Return a notification of each form."""
    catalog = Catalog()
    found: list[Notification] = []
    Hub(catalog).subscribe(found.append, "tools", "resources", uris=["a://**"])
    catalog.tools.add({"name": "p"})
    with catalog.batch():
        catalog.tools.add({"name": "q"})
        catalog.tools.remove("p")
    catalog.resources.updated("a://p", author="q")
    catalog.resources.deleted("a://p")
    found.append(Notification(TOOLS, THREE, (), since=-1, complete=False))
    return found


@pytest.mark.parametrize("is_extended", [False, True])
@pytest.mark.parametrize("detail", ["full", "summary"])
def test_message_is_read(detail: str, is_extended: bool) -> None:
    shape = FrameFormat(detail=detail, is_extended=is_extended)  # type: ignore[arg-type]
    for notification in notifications():
        read = Told.from_message("s", json.loads(encode_frame(notification, shape)))
        changes = tuple((change.operation, change.key) for change in notification.changes)
        assert read == Told("s", notification.topic, notification.version, changes, notification.complete)


def test_missing_parts_of_a_message_stay_unknown() -> None:
    for notification in notifications():
        read = Told.from_message("s", json.loads(encode_frame(notification, FrameFormat(detail="none"))))
        assert read == Told("s", notification.topic, None, None)
    assert Told.from_message("s", {"method": "notifications/message", "params": {"level": "info"}}) is None
    assert Told.from_message("s", {"id": 1, "result": {}}) is None
    assert Told.from_message("s", {"method": "notifications/tools/list_changed"}) == Told("s", TOOLS)


def recorded(policy: Policy | None = None) -> tuple[Clock, Catalog, Hub, Recorder]:
    clock = Clock()
    catalog = Catalog(policy, clock=clock)
    hub = Hub(catalog, clock=clock)
    return clock, catalog, hub, Recorder(hub)


def events_of(history: History, *kinds: type[Event]) -> list[Event]:
    return [event for event in history if isinstance(event, kinds)]


def test_recorder_records_all_events() -> None:
    clock, catalog, hub, recorder = recorded()
    muted: set[Topic] = set()
    subscriber = hub.open(lambda _: BUSY, label="x", is_muted=muted.__contains__)
    subscriber.subscribe("tools", uris=["a://p"])
    name = recorder.name(subscriber)
    assert name.startswith("x")
    catalog.tools.add({"name": "p"})
    first = catalog.version(TOOLS)
    catalog.tools.add({"name": "q"})
    muted.add(TOOLS)
    recorder.look()
    muted.clear()
    hub.wake(subscriber)
    hub.subscribe(subscriber, "prompts", ttl=1.0, told={TOOLS: first})
    subscriber.unsubscribe(uris=["a://p"])
    clock.now = 2.0
    hub.tick()
    recorder.look()
    subscriber.close()
    subscriber.close()
    check_all(recorder.history)
    start, one, two = catalog.tools.version, *(event for event in events_of(recorder.history, Changed)[3:])
    assert isinstance(one, Changed)
    assert isinstance(two, Changed)
    assert two.version == start
    assert events_of(recorder.history, Subscribed, Unsubscribed, Told, Muted, Unmuted, Closed) == [
        Subscribed(name, (TOOLS, "a://p")),
        Told(name, TOOLS, first, ((ADDED, "p"),)),
        Muted(name, (TOOLS,)),
        Unmuted(name, (TOOLS,)),
        Told(name, TOOLS, two.version, ((ADDED, "q"),)),
        Subscribed(name, (PROMPTS,), {TOOLS: first}),
        Unsubscribed(name, ("a://p",)),
        Unsubscribed(name, (PROMPTS,)),
        Closed(name, "unsubscribed"),
    ]
    assert events_of(recorder.history, MailboxSize) == [MailboxSize(name, 1, 10_000), MailboxSize(name, 1, 10_000)]


def test_recorder_starts_with_existing_versions_and_subscribers() -> None:
    catalog = Catalog()
    hub = Hub(catalog)
    catalog.tools.add({"name": "p"})
    catalog.resources.updated("a://p")
    found: list[Notification] = []
    hub.subscribe(found.append, "tools", uris=["a://p"])
    recorder = Recorder(hub, History())
    catalog.tools.add({"name": "q"})
    recorder.look()
    check_all(recorder.history)
    assert [type(event) for event in recorder.history] == [Changed] * 4 + [Subscribed, Changed, Told, MailboxSize]
