"""What was shown excuses a telling only where it could have been the reason for it."""

from __future__ import annotations

import pytest
from mcp.server.mcpserver import MCPServer

from tidings import BUSY, Catalog, Feature, Hub, Live, Version
from tidings.server.response_cursor import Sight
from tidings.testing import (
    Changed,
    Event,
    Fetched,
    FetchEnded,
    FetchStarted,
    History,
    PromiseBroken,
    Recorder,
    Subscribed,
    Told,
    check_all,
    check_resumable,
    check_unique,
)

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
B, C, B_AGAIN, C_AGAIN, B_AT_LAST = Version(2, "b"), Version(3, "c"), Version(4, "b"), Version(5, "c"), Version(6, "b")


def told(version: Version) -> Told:
    return Told("s", TOOLS, version, (), is_complete=False)


def changed(*versions: Version) -> list[Event]:
    return [Changed(TOOLS, version) for version in versions]


A = Version(1, "a")
START = [*changed(A), Subscribed("s", (TOOLS,), {TOOLS: A}), *changed(B), Told("s", TOOLS, B)]
UNTIL_THE_SECOND = [*changed(C, B_AGAIN), told(B_AGAIN)]
"""Which says again what it knows."""
UNTIL_THE_THIRD = [*changed(C_AGAIN, B_AT_LAST), told(B_AT_LAST)]

CAUGHT: dict[str, list[Event]] = {
    "nothing was shown": [*START, *UNTIL_THE_SECOND],
    "something, before it was told": [Fetched(TOOLS), *START, *UNTIL_THE_SECOND],
    "something, after all": [*START, *UNTIL_THE_SECOND, Fetched(TOOLS)],
    "something, and that was told of": [*START, Fetched(TOOLS), *UNTIL_THE_SECOND, *UNTIL_THE_THIRD],
    "something of another topic": [*START, Fetched(PROMPTS), FetchStarted(PROMPTS, 1), *UNTIL_THE_SECOND],
    "another one, but later": [*START, *UNTIL_THE_SECOND, Fetched(TOOLS, C)],
    "an answer that was over before": [FetchStarted(TOOLS, 0), FetchEnded(TOOLS, 0), *START, *UNTIL_THE_SECOND],
    "an answer that was begun later": [*START, *UNTIL_THE_SECOND, FetchStarted(TOOLS, 3)],
    "an answer that can show nothing older": [*START, *changed(C, B_AGAIN), FetchStarted(TOOLS, 4), told(B_AGAIN)],
    "an answer that showed the same": [
        *START,
        FetchStarted(TOOLS, 2),
        Fetched(TOOLS, B),
        FetchEnded(TOOLS, 2),
        *UNTIL_THE_SECOND,
    ],
    "an answer that was never given": [
        *START,
        FetchStarted(TOOLS, 2),
        *changed(C),
        FetchEnded(TOOLS, 2),
        *UNTIL_THE_SECOND,
    ],
    "an answer whose telling is over": [
        *START,
        FetchStarted(TOOLS, 2),
        *UNTIL_THE_SECOND,
        Fetched(TOOLS, B_AGAIN),
        FetchEnded(TOOLS, 2),
        *UNTIL_THE_THIRD,
    ],
}
PERMITTED: dict[str, list[Event]] = {
    "something, nobody knows what": [*START, *changed(C), Fetched(TOOLS), *changed(B_AGAIN), told(B_AGAIN)],
    "another one": [*START, *changed(C), Fetched(TOOLS, C), *changed(B_AGAIN), told(B_AGAIN)],
    "any one until then": [*START, *changed(C, B_AGAIN), Fetched(TOOLS, Version(4, "")), told(B_AGAIN)],
    "an answer under way": [*START, FetchStarted(TOOLS, 2), *UNTIL_THE_SECOND, FetchEnded(TOOLS, 2)],
    "an answer under way all the time": [FetchStarted(TOOLS), *START, *UNTIL_THE_SECOND, *UNTIL_THE_THIRD],
    "one of two that began together": [
        *START,
        FetchStarted(TOOLS, 2),
        FetchStarted(TOOLS, 2),
        FetchEnded(TOOLS, 2),
        *UNTIL_THE_SECOND,
    ],
}


@pytest.mark.parametrize("events", CAUGHT.values(), ids=CAUGHT)
def test_the_same_again_is_caught(events: list[Event]) -> None:
    with pytest.raises(PromiseBroken, match="Unique"):
        check_unique(History(events))


@pytest.mark.parametrize("events", CAUGHT.values(), ids=CAUGHT)
def test_the_word_to_refetch_is_caught_where_all_is_kept(events: list[Event]) -> None:
    with pytest.raises(PromiseBroken, match="Resumable: s, tools: it was told to refetch"):
        check_resumable(History(events), journal=1000)


@pytest.mark.parametrize("events", PERMITTED.values(), ids=PERMITTED)
def test_where_something_else_may_have_been_shown_it_may_be_told_again(events: list[Event]) -> None:
    check_all(History(events))
    check_resumable(History(events), journal=1000)


def test_answers_that_a_server_gives_are_recorded_from_their_begin_to_their_end() -> None:
    catalog = Catalog()
    hub = Hub(catalog)
    hub.notifications.fetched.begin_fetch(PROMPTS, 0)
    history = Recorder(hub).history
    begun = len(history)
    hub.notifications.fetched.begin_fetch(TOOLS, 0)
    catalog.tools.add({"name": "a"})
    hub.notifications.fetched.record(TOOLS, catalog.tools.version)
    hub.notifications.fetched.end_fetch(TOOLS, 0)
    hub.notifications.fetched.end_fetch(PROMPTS, 0)

    assert history.events[begun - 1] == FetchStarted(PROMPTS, 0), "it was under way already"
    assert [type(each) for each in history.events[begun:]] == [FetchStarted, Changed, Fetched, FetchEnded, FetchEnded]
    assert not hub.notifications.fetched._in_progress


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_server_whose_clients_list_all_the_time_is_checked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, is_sound: bool
) -> None:
    if not is_sound:
        monkeypatch.setattr("tidings.core.fetched.FetchedVersions.may_differ", lambda self, topic, now, since: True)
    live = Live(MCPServer("lists"))
    recorder = Recorder(live.hub)
    reader = live.hub.open(lambda _: BUSY, label="slow")
    reader.subscribe("prompts")
    live.catalog.prompts.add({"name": "told of, and busy since"})
    for _ in range(3):
        with Sight(live, [PROMPTS]) as sight:
            sight.cursor()
        live.catalog.prompts.add({"name": "passing"})
        live.catalog.prompts.remove("passing")
        with Sight(live, [PROMPTS]) as sight:
            sight.cursor()
        live.hub.wake(reader)
    recorder.look()

    if is_sound:
        check_all(recorder.history)
    else:
        with pytest.raises(PromiseBroken, match="Unique"):
            check_all(recorder.history)
