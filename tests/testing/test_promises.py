"""Each validator accepts a good history and catches a bad one: who judges the core must be judged first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidings import Feature, Filter, Operation, Topic, Version
from tidings.testing import (
    PROMISES,
    Acknowledged,
    Changed,
    Closed,
    Event,
    History,
    MailboxSize,
    Muted,
    PromiseBroken,
    Subscribed,
    Told,
    Unmuted,
    Unsubscribed,
    check_all,
    check_resumable,
)

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
EMPTY, ONE, TWO, THREE = Version(0, "empty"), Version(1, "one"), Version(2, "two"), Version(3, "three")
ONE_AGAIN = Version(4, "one")
ADDED, REMOVED, UPDATED, DELETED = Operation.ADDED, Operation.REMOVED, Operation.UPDATED, Operation.DELETED


def changed(topic: Topic, *versions: Version) -> list[Event]:
    return [Changed(topic, version) for version in versions]


def listed(version: Version, previous: Version, key: str, before: str | None, after: str | None) -> Changed:
    """A change of the tools, with all that is known inside a process."""
    done = ADDED if before is None else REMOVED if after is None else UPDATED
    return Changed(TOOLS, version, previous, done, key, before, after)


def told(version: Version | None, topic: Topic = TOOLS, *changes: tuple[Operation, str]) -> Told:
    return Told("s", topic, version, changes or None)


def gone(version: Version, uri: str) -> Told:
    return told(version, uri, (DELETED, uri))


def subscribed(*topics: Topic, **options: object) -> Subscribed:
    return replace(Subscribed("s", topics), **options)  # type: ignore[arg-type]


START = Changed(TOOLS, EMPTY)
TWO_ADDED = [listed(ONE, EMPTY, "p", None, "1"), listed(TWO, ONE, "q", None, "1")]
ADDED_Q = (ADDED, "q")
ADDS = Filter(["added"])
NAMED_P = Filter(names=["p*"])
GOOD: dict[str, list[Event]] = {
    "nothing": [],
    "told at once": [START, subscribed(TOOLS), *changed(TOOLS, ONE), told(ONE), *changed(TOOLS, TWO), told(TWO)],
    "told together": [START, subscribed(TOOLS), *changed(TOOLS, ONE, TWO), told(TWO)],
    "told before the test saw the change": [START, subscribed(TOOLS), told(ONE), *changed(TOOLS, ONE)],
    "told while asking": [subscribed(TOOLS), *changed(TOOLS, ONE), told(ONE), Acknowledged("s")],
    "granted after the change": [START, subscribed(TOOLS), *changed(TOOLS, ONE), Acknowledged("s")],
    "told before the end was answered": [
        START,
        subscribed(TOOLS),
        *changed(TOOLS, ONE),
        told(ONE),
        Unsubscribed("s", (TOOLS,)),
        *changed(TOOLS, TWO),
    ],
    "knew it when it came": [*changed(TOOLS, ONE), subscribed(TOOLS)],
    "as it was when it came": [*changed(TOOLS, ONE), subscribed(TOOLS), *changed(TOOLS, TWO, ONE_AGAIN)],
    "as it was before the first change": [
        subscribed(TOOLS),
        listed(ONE, EMPTY, "p", None, "1"),
        listed(Version(2, "empty"), ONE, "p", "1", None),
    ],
    "as it was told": [subscribed(TOOLS), *changed(TOOLS, ONE), told(ONE), *changed(TOOLS, TWO, ONE_AGAIN)],
    "another one, and the first again": [
        subscribed(TOOLS),
        *changed(TOOLS, ONE, TWO, ONE_AGAIN),
        told(ONE),
        told(TWO),
        told(ONE_AGAIN),
    ],
    "back after it was away": [
        subscribed(TOOLS),
        *changed(TOOLS, ONE),
        told(ONE),
        Unsubscribed("s"),
        *changed(TOOLS, TWO),
        subscribed(TOOLS),
        *changed(TOOLS, ONE_AGAIN),
        told(ONE_AGAIN),
    ],
    "told anew, as its cursor asks": [
        *changed(TOOLS, ONE, TWO),
        subscribed(TOOLS, told={TOOLS: ONE}),
        told(TWO),
        Unsubscribed("s"),
        subscribed(TOOLS, told={TOOLS: ONE}),
        told(TWO),
    ],
    "came with the newest": [*changed(TOOLS, ONE, TWO), subscribed(TOOLS, told={TOOLS: TWO})],
    "came from another life": [*changed(TOOLS, ONE), subscribed(TOOLS, told={TOOLS: Version(9, "alien")}), told(ONE)],
    "back without the cursor it came with": [
        subscribed(TOOLS, told={TOOLS: TWO}),
        Unsubscribed("s"),
        subscribed(TOOLS),
        *changed(TOOLS, ONE, TWO),
        told(ONE),
        told(TWO),
    ],
    "a second cursor, older than the first": [
        *changed(TOOLS, ONE),
        subscribed(TOOLS, told={TOOLS: TWO}),
        subscribed(TOOLS, told={TOOLS: EMPTY}),
        told(ONE),
        *changed(TOOLS, TWO),
        told(TWO),
    ],
    "a cursor for what it does not watch": [
        *changed(TOOLS, ONE),
        subscribed(PROMPTS, told={TOOLS: ONE}),
        subscribed(TOOLS, told={TOOLS: EMPTY}),
        told(ONE),
    ],
    "muted": [START, subscribed(TOOLS), Muted("s"), *changed(TOOLS, ONE)],
    "muted for a topic": [
        subscribed(TOOLS, PROMPTS),
        Muted("s", (TOOLS,)),
        *changed(TOOLS, ONE),
        *changed(PROMPTS, TWO),
        told(TWO, PROMPTS),
    ],
    "muted for a while": [subscribed(TOOLS), Muted("s"), *changed(TOOLS, ONE), Unmuted("s"), told(ONE)],
    "closed": [subscribed(TOOLS), Closed("s"), *changed(TOOLS, ONE)],
    "a wire without versions": [subscribed(TOOLS), *changed(TOOLS, ONE), told(None), *changed(TOOLS, TWO), told(None)],
    "a glob": [subscribed("a://*/1"), *changed("a://p/1", ONE), told(ONE, "a://p/1"), *changed("a://p/q/1", TWO)],
    "a glob for all": [subscribed("a://**"), *changed("a://p/1", ONE), told(ONE, "a://p/1")],
    "a glob for no folder": [subscribed("a://p/**/1"), *changed("a://p/1", ONE), told(ONE, "a://p/1")],
    "a template": [subscribed("a://{p}/1"), *changed("a://p/1", ONE), told(ONE, "a://p/1"), *changed("a://q/1", TWO)],
    "a folder": [subscribed("a://p"), *changed("a://p/1", ONE), told(ONE, "a://p/1"), *changed("a://pq", TWO)],
    "a folder with a slash": [subscribed("a://p/"), *changed("a://p/1", ONE), told(ONE, "a://p/1")],
    "no root is a folder": [subscribed("a://", "a:"), *changed("a://p/1", ONE)],
    "no folders": [subscribed("a://p", subresources=False), *changed("a://p/1", ONE)],
    "a resource that went": [subscribed("a://p"), *changed("a://p", ONE), gone(ONE, "a://p"), *changed("a://p", TWO)],
    "one that went and came back": [
        subscribed("a://p"),
        *changed("a://p", ONE),
        gone(ONE, "a://p"),
        subscribed("a://p"),
        *changed("a://p", TWO),
        told(TWO, "a://p"),
    ],
    "asked again before it heard that it went": [
        subscribed("a://p"),
        *changed("a://p", ONE),
        subscribed("a://p"),
        gone(ONE, "a://p"),
        *changed("a://p", TWO),
        told(TWO, "a://p"),
    ],
    "filtered by operation": [
        subscribed(TOOLS, filter=ADDS),
        listed(ONE, EMPTY, "p", None, "1"),
        told(ONE, TOOLS, (ADDED, "p")),
        listed(TWO, ONE, "p", "1", "2"),
        listed(THREE, TWO, "p", "2", None),
    ],
    "filtered by name": [
        subscribed(TOOLS, filter=NAMED_P),
        listed(ONE, EMPTY, "q", None, "1"),
        listed(TWO, ONE, "p", None, "1"),
        listed(THREE, TWO, "p", "1", None),
    ],
    "added and changed, seen at once": [
        subscribed(TOOLS, filter=Filter(["updated"])),
        listed(ONE, EMPTY, "p", None, "1"),
        listed(TWO, ONE, "p", "1", "2"),
    ],
    "a filter, and a journal that forgot": [
        subscribed(TOOLS, filter=ADDS),
        listed(ONE, EMPTY, "p", "1", "2"),
        replace(told(ONE), changes=(), is_complete=False),
    ],
    "back with a cursor, told what differs": [
        *TWO_ADDED,
        subscribed(TOOLS, told={TOOLS: ONE}),
        told(TWO, TOOLS, ADDED_Q),
    ],
    "back with a cursor, and one more came": [
        *TWO_ADDED,
        subscribed(TOOLS, told={TOOLS: ONE}),
        listed(THREE, TWO, "p", "1", None),
        told(THREE, TOOLS, (REMOVED, "p"), ADDED_Q),
    ],
    "back with a cursor that nobody knows": [
        *TWO_ADDED,
        subscribed(TOOLS, told={TOOLS: Version(7, "alien")}),
        replace(told(TWO), changes=(), is_complete=False),
    ],
    "back with a filter": [
        *TWO_ADDED,
        subscribed(TOOLS, filter=NAMED_P, told={TOOLS: EMPTY}),
        told(TWO, TOOLS, (ADDED, "p")),
    ],
    "back, and what the filter ruled out at first is not said later": [
        *TWO_ADDED,
        subscribed(TOOLS, filter=Filter(["updated"]), told={TOOLS: EMPTY}),
        listed(THREE, TWO, "p", "1", "2"),
        told(THREE, TOOLS, (UPDATED, "p")),
    ],
    "back, and more than fits into a frame": [
        *TWO_ADDED,
        subscribed(TOOLS, told={TOOLS: EMPTY}),
        replace(told(TWO, TOOLS, ADDED_Q), is_complete=False),
    ],
    "a cursor ahead of what was published": [
        subscribed(TOOLS, told={TOOLS: ONE}),
        *TWO_ADDED,
        replace(told(TWO), changes=(), is_complete=False),
    ],
    "a full mailbox": [
        subscribed(TOOLS, "a://**"),
        *changed(TOOLS, ONE),
        *changed("a://1", TWO),
        MailboxSize("s", 2, 2),
        told(ONE),
        told(TWO, "a://1"),
        MailboxSize("s", 0, 2),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_accepted(name: str) -> None:
    check_all(History(GOOD[name]))


BAD: dict[str, tuple[str, Topic | None, list[Event]]] = {
    "told without asking": ("Filtered", TOOLS, [*changed(TOOLS, ONE), told(ONE)]),
    "told of something else": ("Filtered", PROMPTS, [subscribed(TOOLS), told(ONE, PROMPTS)]),
    "told after the end": ("Filtered", TOOLS, [subscribed(TOOLS), Unsubscribed("s", (TOOLS,)), told(ONE)]),
    "told after the end of all": ("Filtered", TOOLS, [subscribed(TOOLS), Unsubscribed("s"), told(ONE)]),
    "told when closed": ("Filtered", TOOLS, [subscribed(TOOLS), Closed("s"), told(ONE)]),
    "told when muted": ("Filtered", TOOLS, [subscribed(TOOLS), Muted("s"), told(ONE)]),
    "told when muted for it": ("Filtered", TOOLS, [subscribed(TOOLS), Muted("s", (TOOLS,)), told(ONE)]),
    "a glob goes too far": ("Filtered", "a://p/1", [subscribed("a://*"), told(ONE, "a://p/1")]),
    "a glob starts elsewhere": ("Filtered", "b://p", [subscribed("a://**"), told(ONE, "b://p")]),
    "a template goes too far": ("Filtered", "b://p", [subscribed("a://{p}"), told(ONE, "b://p")]),
    "no folder": ("Filtered", "a://pq", [subscribed("a://p"), told(ONE, "a://pq")]),
    "folders are off": ("Filtered", "a://p/1", [subscribed("a://p", subresources=False), told(ONE, "a://p/1")]),
    "told after it went": (
        "Filtered",
        "a://p",
        [subscribed("a://p"), *changed("a://p", ONE), gone(ONE, "a://p"), *changed("a://p", TWO), told(TWO, "a://p")],
    ),
    "the wrong operation": ("Filtered", TOOLS, [subscribed(TOOLS, filter=ADDS), told(ONE, TOOLS, (REMOVED, "p"))]),
    "the wrong name": ("Filtered", TOOLS, [subscribed(TOOLS, filter=NAMED_P), told(ONE, TOOLS, (ADDED, "q"))]),
    "one of them wrong": (
        "Filtered",
        TOOLS,
        [subscribed(TOOLS, filter=NAMED_P), told(ONE, TOOLS, (ADDED, "p"), (ADDED, "q"))],
    ),
    "nothing passes": ("Filtered", TOOLS, [subscribed(TOOLS, filter=ADDS), replace(told(ONE), changes=())]),
    "backwards": ("Ordered", TOOLS, [subscribed(TOOLS), told(TWO), told(ONE)]),
    "backwards after an absence": (
        "Ordered",
        TOOLS,
        [subscribed(TOOLS), told(TWO), Unsubscribed("s"), subscribed(TOOLS), told(ONE)],
    ),
    "behind the cursor it came with": (
        "Ordered",
        TOOLS,
        [*changed(TOOLS, ONE, TWO), subscribed(TOOLS, told={TOOLS: TWO}), told(ONE)],
    ),
    "twice": ("Unique", TOOLS, [subscribed(TOOLS), told(ONE), told(ONE)]),
    "twice, under another revision": ("Unique", TOOLS, [subscribed(TOOLS), told(ONE), told(ONE_AGAIN)]),
    "told what it came with": ("Unique", TOOLS, [subscribed(TOOLS, told={TOOLS: ONE}), told(ONE)]),
    "twice, after an absence": (
        "Unique",
        TOOLS,
        [subscribed(TOOLS), told(ONE), Unsubscribed("s"), subscribed(TOOLS), told(ONE)],
    ),
    "never told": ("Reliable", TOOLS, [START, subscribed(TOOLS), *changed(TOOLS, ONE)]),
    "the last one lost": ("Reliable", TOOLS, [subscribed(TOOLS), *changed(TOOLS, ONE, TWO), told(ONE)]),
    "lost through a glob": ("Reliable", "a://p/1", [subscribed("a://**"), *changed("a://p/1", ONE)]),
    "lost through a folder": ("Reliable", "a://p/1", [subscribed("a://p"), *changed("a://p/1", ONE)]),
    "lost after it was granted": (
        "Reliable",
        TOOLS,
        [START, subscribed(TOOLS), *changed(TOOLS, ONE), Acknowledged("s"), *changed(TOOLS, TWO)],
    ),
    "lost after a mute": (
        "Reliable",
        TOOLS,
        [subscribed(TOOLS), Muted("s"), *changed(TOOLS, ONE), Unmuted("s")],
    ),
    "not what the cursor was": ("Reliable", TOOLS, [*changed(TOOLS, ONE, TWO), subscribed(TOOLS, told={TOOLS: ONE})]),
    "knew nothing": ("Reliable", TOOLS, [*changed(TOOLS, ONE), subscribed(TOOLS, told={TOOLS: None})]),
    "another life, whatever the filter": (
        "Reliable",
        TOOLS,
        [listed(ONE, EMPTY, "q", None, "1"), subscribed(TOOLS, filter=NAMED_P, told={TOOLS: Version(1, "alien")})],
    ),
    "a wire without versions, too early": (
        "Reliable",
        TOOLS,
        [subscribed(TOOLS), *changed(TOOLS, ONE), told(None), *changed(TOOLS, TWO)],
    ),
    "passes the filter": (
        "Reliable",
        TOOLS,
        [START, subscribed(TOOLS, filter=NAMED_P), listed(ONE, EMPTY, "p", None, "1")],
    ),
    "passes the filter, then something else": (
        "Reliable",
        TOOLS,
        [
            START,
            subscribed(TOOLS, filter=NAMED_P),
            listed(ONE, EMPTY, "p", None, "1"),
            listed(TWO, ONE, "q", None, "1"),
        ],
    ),
    "passes the filter, there and back and there": (
        "Reliable",
        TOOLS,
        [
            START,
            subscribed(TOOLS, filter=NAMED_P),
            listed(ONE, EMPTY, "p", None, "1"),
            listed(TWO, ONE, "p", "1", "2"),
            listed(Version(3, "one"), TWO, "p", "2", "1"),
        ],
    ),
    "back, and told too much": (
        "Resumable",
        TOOLS,
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: ONE}), told(TWO, TOOLS, (ADDED, "p"), ADDED_Q)],
    ),
    "back, and told too little": (
        "Resumable",
        TOOLS,
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: EMPTY}), told(TWO, TOOLS, ADDED_Q)],
    ),
    "back, and told another operation": (
        "Resumable",
        TOOLS,
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: ONE}), told(TWO, TOOLS, (UPDATED, "q"))],
    ),
    "back from nowhere, and not told to refetch": (
        "Resumable",
        TOOLS,
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: Version(7, "alien")}), told(TWO, TOOLS, ADDED_Q)],
    ),
    "never told, and not told to refetch": (
        "Resumable",
        TOOLS,
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: None}), told(TWO, TOOLS, ADDED_Q)],
    ),
    "a later one leaves something out": (
        "Resumable",
        TOOLS,
        [
            subscribed(TOOLS),
            TWO_ADDED[0],
            told(ONE, TOOLS, (ADDED, "p")),
            TWO_ADDED[1],
            listed(THREE, TWO, "p", "1", None),
            told(THREE, TOOLS, ADDED_Q),
        ],
    ),
    "truncated, with something that never was": (
        "Resumable",
        TOOLS,
        [
            *TWO_ADDED,
            subscribed(TOOLS, told={TOOLS: EMPTY}),
            replace(told(TWO, TOOLS, (REMOVED, "q")), is_complete=False),
        ],
    ),
    "back, and told another change of a content": (
        "Resumable",
        "a://p",
        [
            Changed("a://p", ONE, EMPTY, UPDATED, "a://p"),
            Changed("a://p", TWO, ONE, UPDATED, "a://p"),
            subscribed("a://*", told={"a://p": ONE}),
            told(TWO, "a://p", (DELETED, "a://p")),
        ],
    ),
    "more than it watches": ("Bounded", None, [subscribed(TOOLS), *changed(TOOLS, ONE, TWO), MailboxSize("s", 2)]),
    "more than is allowed": (
        "Bounded",
        None,
        [subscribed("a://**"), *changed("a://1", ONE), *changed("a://2", TWO), MailboxSize("s", 2, 1)],
    ),
    "something for the closed": (
        "Bounded",
        None,
        [subscribed(TOOLS), *changed(TOOLS, ONE), Closed("s"), MailboxSize("s", 1)],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_caught(name: str) -> None:
    promise, topic, events = BAD[name]
    with pytest.raises(PromiseBroken) as caught:
        PROMISES[promise](History(events))
    assert (caught.value.promise, caught.value.subscriber, caught.value.topic) == (promise, "s", topic)
    assert caught.value.events
    assert all(events[index] is event for index, event in caught.value.events)
    assert str(caught.value).startswith(f"{promise}: s")


@pytest.mark.parametrize(("journal", "is_kept"), [(1, True), (2, False), (None, True)])
def test_who_could_have_been_told_what_differs_must_not_be_told_to_refetch(journal: int | None, is_kept: bool) -> None:
    history = History(
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: EMPTY}), replace(told(TWO), changes=(), is_complete=False)]
    )
    if is_kept:
        check_resumable(history, journal=journal)
        return
    with pytest.raises(PromiseBroken, match="2 changes since, and 2 are kept"):
        check_resumable(history, journal=journal)


def test_a_failure_is_an_assertion_that_shows_the_end_of_a_long_history() -> None:
    versions = [Version(number, str(number)) for number in range(1, 1000)]
    events = [subscribed(TOOLS), *changed(TOOLS, *versions), told(versions[-1]), told(versions[-1])]
    with pytest.raises(AssertionError) as caught:
        check_all(History(events))
    assert len(str(caught.value).splitlines()) < 30
    assert "Told" in str(caught.value).splitlines()[-1]
