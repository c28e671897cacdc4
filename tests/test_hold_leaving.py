"""What was shown counts for those who wait in the hold; who leaves it is told no more; and what fails loses nobody."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import threading
from pathlib import Path

import pytest
from mcp.server.mcpserver import MCPServer

from tests.support.waiting import until
from tests.test_hold import TOOLS, Client, Place, here
from tidings import Feature, Live, Notification, Topic
from tidings.hold import LONGEST_HOLD, Crowd
from tidings.mailbox import Filter
from tidings.releases import Releases

URI = "a://1"


@pytest.fixture
def place() -> Place:
    return Place()


def show(place: Place, *topics: Topic) -> None:
    for topic in topics:
        place.hub.news.shown.note(topic, place.catalog.version(topic))


def told(client: Client) -> list[tuple[Topic, bool]]:
    return [(each.topic, each.complete) for each in client.heard]


def test_what_was_shown_while_it_was_held_is_told_though_all_is_as_it_was(place: Place) -> None:
    resources, tools = place.catalog.resources, place.catalog.tools
    resources.updated(URI, etag="A")
    place.save()
    (client,) = here(place, "a", uris=[URI])
    place.add("x")
    resources.updated(URI, etag="B")
    show(place, TOOLS, URI)
    tools.remove("x")
    resources.updated(URI, etag="A")
    place.save()

    assert told(client) == [(TOOLS, False), (URI, True)]
    assert [each.version for each in client.heard] == [place.catalog.version(TOOLS), place.catalog.version(URI)]
    place.save()
    assert len(client.heard) == 2, "once"


@pytest.mark.parametrize("falls_behind", [False, True])
@pytest.mark.parametrize(("name", "expected"), [("new", [(TOOLS, False)]), ("nothing", [])])
def test_so_is_what_a_filter_sees_nothing_of_in_the_end(
    place: Place, falls_behind: bool, name: str, expected: list[tuple[Topic, bool]]
) -> None:
    (client,) = here(place, "a", filter=Filter(names=[name]))
    place.add("new")
    show(place, TOOLS)
    place.catalog.tools.remove("new")
    if falls_behind:
        client.subscriber.pause()
    place.add("other")
    place.hub.wake(client.subscriber)
    place.save()

    assert told(client) == expected


@pytest.mark.parametrize("leaves", ["closes", "unsubscribes"])
def test_who_leaves_because_of_what_another_one_was_told_at_once_is_not_held(place: Place, leaves: str) -> None:
    (client,) = here(place, "a", uris=[URI])
    subscriber = client.subscriber
    place.hub.subscribe(lambda _: subscriber.close() if leaves == "closes" else subscriber.unsubscribe("tools"), TOOLS)
    place.add("x")

    assert not place.hub.hold
    place.save()
    assert client.heard == []


def test_who_leaves_because_of_what_another_crowd_was_told_is_told_nothing(place: Place) -> None:
    (first,) = here(place, "a")
    place.add("x")
    late = Client(place, "b")
    late.visit.note_presence()
    place.add("y")
    deliver = first.subscriber.deliver

    def deliver_and_close(notification: Notification) -> None:
        deliver(notification)
        late.subscriber.close()

    first.subscriber.deliver = deliver_and_close
    place.save()

    assert first.keys == [("added", "x"), ("added", "y")]
    assert late.heard == []


def test_a_session_that_has_to_refetch_all_resources_is_told_so_once() -> None:
    place = Place(max_pending=2)
    (client,) = here(place, "a", uris=["a://**"])
    client.subscriber.subscribe("resources")
    client.subscriber.collapses = True
    place.catalog.resources.add({"uri": "a://0", "name": "n"})
    place.catalog.resources.updated("a://held")
    place.add("x")
    client.subscriber.pause()
    for number in range(5):
        place.catalog.resources.updated(f"a://{number}")
    place.saved = place.catalog.revision
    place.hub.wake(client.subscriber)
    place.hub.release()

    assert told(client) == [(Feature.RESOURCES, False), (TOOLS, True)]


def test_what_fails_when_one_crowd_is_told_loses_neither_it_nor_the_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = here(place, "a")
    place.add("x")
    late = Client(place, "b")
    late.visit.note_presence()
    place.add("y")
    alarms = place.alarms

    def fail(notification: Notification) -> None:
        monkeypatch.undo()
        raise RuntimeError("telemetry")

    monkeypatch.setattr(place.hub.observer, "enter", fail)
    with pytest.raises(RuntimeError, match="telemetry"):
        place.save()
    assert place.alarms == alarms + 1, "whoever owns the hub comes back"
    place.hub.release()

    assert first.keys == [("added", "x"), ("added", "y")]
    assert late.keys == [("added", "y")]


def test_a_clock_that_is_set_back_silences_nobody(place: Place) -> None:
    (client,) = here(place, "a")
    other = Client(place, "b")
    assert not other.subscriber.is_patient, "it waits in its mailbox"
    place.add("x")
    now, place.hub._clock = place.now, lambda: now + LONGEST_HOLD
    place.now -= 3600.0
    place.hub.release()

    assert client.keys == other.keys == [("added", "x")]
    assert sum(place.hub.counts.latency.sums) == pytest.approx(2 * LONGEST_HOLD)


def test_topics_with_several_crowds_share_each_of_them(place: Place) -> None:
    """A thousand topics for two groups of readers are held for two crowds."""
    for name in "abcd":
        Client(place, name, f"{'ab'[name in 'cd']}://**")
    place.save()
    for number in range(1000):
        place.catalog.resources.updated(f"{'ab'[number % 2]}://{number}")

    assert len(place.hub.hold.topics) == 1000
    gc.collect()
    assert sum(isinstance(each, Crowd) and len(each) == 2 for each in gc.get_objects()) == 2
    place.save()
    assert not place.hub.hold._crowds


def test_who_never_joins_the_hold_does_not_search_it(place: Place) -> None:
    here(place, "a", uris=["a://**"])
    place.catalog.resources.updated(URI)
    other = place.hub.open(lambda _: None)
    place.hub.hold._held = None  # type: ignore[assignment]

    assert place.hub.hold.known(other) == {}


# On a loop


class Timed:
    """A place whose loop counts the timers that are started and not over."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.loop = asyncio.get_running_loop()
        place.hub._clock = self.loop.time
        self.releases = Releases(place.hub, contextvars.copy_context())
        place.hub.hold.on_hold = self.releases.later
        self.releases.bind(self.loop)

    def stand_still(self) -> None:
        """However long the machine takes, no time passes for the hub."""
        now = self.loop.time()
        self.place.hub._clock = lambda: now

    def go_on(self) -> None:
        self.place.hub._clock = self.loop.time

    async def until_released(self) -> None:
        await until(lambda: not self.place.hub.hold)

    @property
    def timers(self) -> int:
        scheduled: list[asyncio.TimerHandle] = self.loop._scheduled  # type: ignore[attr-defined]
        return sum(not each.cancelled() and each._callback == self.releases._release for each in scheduled)  # type: ignore[attr-defined]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_there_is_one_timer_however_often_something_is_released(place: Place) -> None:
    (client,) = here(place, "a", uris=[URI])
    timed = Timed(place)
    timed.stand_still()
    assert timed.timers == 0
    for number in itertools.count():
        place.add(f"t{number}")
        place.saved = place.catalog.revision
        place.catalog.resources.updated(URI)
        place.hub.release()
        assert timed.timers == 1
        if number > 100:
            break
    assert all(each.topic is TOOLS for each in client.heard)
    timed.go_on()
    await timed.until_released()
    assert client.heard[-1].topic == URI, "which nobody has written down"
    assert timed.timers == 0


@pytest.mark.anyio
async def test_what_came_after_the_timer_was_started_is_not_held_for_twice_as_long(place: Place) -> None:
    (client,) = here(place, "a", uris=[URI])
    timed = Timed(place)
    timed.stand_still()
    place.add("x")
    place.saved = place.catalog.revision
    began = place.hub._clock()
    place.hub.hold._held[TOOLS][0].began = began - LONGEST_HOLD * 0.8
    place.catalog.resources.updated(URI)
    timed.releases.stop()
    place.hub.release()
    assert [each.topic for each in client.heard] == [TOOLS]
    place.hub.hold._held[URI][0].began = began - LONGEST_HOLD * 0.8
    timed.releases.stop()
    timed.releases.later()

    scheduled = timed.releases._timer
    assert scheduled is not None
    assert scheduled.when() - timed.loop.time() <= LONGEST_HOLD * 0.25
    timed.releases.stop()
    assert timed.timers == 0


@pytest.mark.anyio
async def test_what_is_held_on_another_thread_is_released_on_the_loops_own(place: Place) -> None:
    (client,) = here(place, "a")
    timed = Timed(place)
    threads: list[int] = []
    deliver = client.subscriber.deliver

    def deliver_and_note(notification: Notification) -> object:
        threads.append(threading.get_ident())
        return deliver(notification)

    client.subscriber.deliver = deliver_and_note
    await asyncio.to_thread(place.add, "x")
    await timed.until_released()
    assert threads == [threading.get_ident()]
    assert client.keys == [("added", "x")]


@pytest.mark.anyio
async def test_a_live_server_has_that_timer_too_and_none_once_it_has_stopped(tmp_path: Path) -> None:
    live = Live(MCPServer("held"), store=tmp_path / "state.db")
    await live.attend()
    live.hub.hold.is_saved = lambda _: False
    heard: list[Notification] = []
    visit = live.durables.enter({"name": "a"}, None, [TOOLS], [], {}, lambda: None)
    assert visit is not None
    subscriber = live.hub.open(heard.append)
    visit.watch(subscriber)
    live.hub.subscribe(subscriber, TOOLS)
    visit.note_presence()
    live.tools.add(lambda: "x", name="x")
    timer = live._releases._timer
    assert (bool(live.hub.hold), heard) == (True, [])
    for _ in range(10):
        live.hub.release()
    assert timer is not None
    assert live._releases._timer is timer
    await until(lambda: heard)
    live.tools.remove("x")
    timer = live._releases._timer
    assert timer is not None
    live.stop()
    assert timer.cancelled()
    await asyncio.to_thread(live.close)
