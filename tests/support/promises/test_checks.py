"""Each check accepts a good history and rejects a bad one.

The good histories here are those that the state machine of tests/core/test_promises.py can't produce.

Covers `checks.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.promises.checks import PROMISES, check_all, check_resumable
from tests.support.promises.history import (
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
)
from tidings import Feature, Filter, Operation, Topic, Version

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
EMPTY, ONE, TWO, THREE = Version(0, "empty"), Version(1, "one"), Version(2, "two"), Version(3, "three")
ONE_AGAIN = Version(4, "one")
ADDED, REMOVED, UPDATED, DELETED = Operation.ADDED, Operation.REMOVED, Operation.UPDATED, Operation.DELETED


def changed(topic: Topic, *versions: Version) -> list[Event]:
    return [Changed(topic, version) for version in versions]


def listed(version: Version, previous: Version, key: str, before: str | None, after: str | None) -> Changed:
    """Return a change of the tools, with the digests of the item."""
    done = ADDED if before is None else REMOVED if after is None else UPDATED
    return Changed(TOOLS, version, previous, done, key, before, after)


def told(version: Version | None, topic: Topic = TOOLS, *changes: tuple[Operation, str]) -> Told:
    return Told("s", topic, version, changes or None)


def deleted(version: Version, uri: str) -> Told:
    return told(version, uri, (DELETED, uri))


def subscribed(*topics: Topic, **options: object) -> Subscribed:
    return replace(Subscribed("s", topics), **options)  # type: ignore[arg-type]


START = Changed(TOOLS, EMPTY)
TWO_ADDED = [listed(ONE, EMPTY, "p", None, "1"), listed(TWO, ONE, "q", None, "1")]
ADDED_Q = (ADDED, "q")
ADDS = Filter(["added"])
NAMED_P = Filter(names=["p*"])
GOOD: dict[str, list[Event]] = {
    "no events": [],
    "told before the change was recorded": [START, subscribed(TOOLS), told(ONE), *changed(TOOLS, ONE)],
    "told before the acknowledgement": [subscribed(TOOLS), *changed(TOOLS, ONE), told(ONE), Acknowledged("s")],
    "granted after the change": [START, subscribed(TOOLS), *changed(TOOLS, ONE), Acknowledged("s")],
    "told before the end was confirmed": [
        START,
        subscribed(TOOLS),
        *changed(TOOLS, ONE),
        told(ONE),
        Unsubscribed("s", (TOOLS,)),
        *changed(TOOLS, TWO),
    ],
    "cursor of another server": [*changed(TOOLS, ONE), subscribed(TOOLS, told={TOOLS: Version(9, "alien")}), told(ONE)],
    "second cursor is older": [
        *changed(TOOLS, ONE),
        subscribed(TOOLS, told={TOOLS: TWO}),
        subscribed(TOOLS, told={TOOLS: EMPTY}),
        told(ONE),
        *changed(TOOLS, TWO),
        told(TWO),
    ],
    "cursor of a topic that it does not watch": [
        *changed(TOOLS, ONE),
        subscribed(PROMPTS, told={TOOLS: ONE}),
        subscribed(TOOLS, told={TOOLS: EMPTY}),
        told(ONE),
    ],
    "one topic is muted": [
        subscribed(TOOLS, PROMPTS),
        Muted("s", (TOOLS,)),
        *changed(TOOLS, ONE),
        *changed(PROMPTS, TWO),
        told(TWO, PROMPTS),
    ],
    "notifications without versions": [
        subscribed(TOOLS),
        *changed(TOOLS, ONE),
        told(None),
        *changed(TOOLS, TWO),
        told(None),
    ],
    "a template": [subscribed("a://{p}/1"), *changed("a://p/1", ONE), told(ONE, "a://p/1"), *changed("a://q/1", TWO)],
    "a folder with a trailing slash": [subscribed("a://p/"), *changed("a://p/1", ONE), told(ONE, "a://p/1")],
    "a root is not a folder": [subscribed("a://", "a:"), *changed("a://p/1", ONE)],
    "subresources are off": [subscribed("a://p", subresources=False), *changed("a://p/1", ONE)],
    "subscribed again before it was told of the deletion": [
        subscribed("a://p"),
        *changed("a://p", ONE),
        subscribed("a://p"),
        deleted(ONE, "a://p"),
        *changed("a://p", TWO),
        told(TWO, "a://p"),
    ],
    "added and updated is one addition for a filter": [
        subscribed(TOOLS, filter=Filter(["updated"])),
        listed(ONE, EMPTY, "p", None, "1"),
        listed(TWO, ONE, "p", "1", "2"),
    ],
    "a filter and an incomplete journal": [
        subscribed(TOOLS, filter=ADDS),
        listed(ONE, EMPTY, "p", "1", "2"),
        replace(told(ONE), changes=(), is_complete=False),
    ],
    "cursor, and another change before the delivery": [
        *TWO_ADDED,
        subscribed(TOOLS, told={TOOLS: ONE}),
        listed(THREE, TWO, "p", "1", None),
        told(THREE, TOOLS, (REMOVED, "p"), ADDED_Q),
    ],
    "cursor, and changes that the filter excluded before": [
        *TWO_ADDED,
        subscribed(TOOLS, filter=Filter(["updated"]), told={TOOLS: EMPTY}),
        listed(THREE, TWO, "p", "1", "2"),
        told(THREE, TOOLS, (UPDATED, "p")),
    ],
    "cursor and a truncated notification": [
        *TWO_ADDED,
        subscribed(TOOLS, told={TOOLS: EMPTY}),
        replace(told(TWO, TOOLS, ADDED_Q), is_complete=False),
    ],
    "cursor is newer than the published version": [
        subscribed(TOOLS, told={TOOLS: ONE}),
        *TWO_ADDED,
        replace(told(TWO), changes=(), is_complete=False),
    ],
    "cursor of a replica that is ahead": [
        *changed(TOOLS, ONE),
        subscribed(TOOLS, told={TOOLS: TWO}),
        told(ONE),
        *changed(TOOLS, TWO),
        told(TWO),
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


@pytest.mark.parametrize("events", GOOD.values(), ids=GOOD)
def test_good_history_is_accepted(events: list[Event]) -> None:
    check_all(History(events))


BAD: dict[str, dict[str, list[Event]]] = {
    "Filtered": {
        "not subscribed": [*changed(TOOLS, ONE), told(ONE)],
        "another topic": [subscribed(TOOLS), told(ONE, PROMPTS)],
        "unsubscribed": [subscribed(TOOLS), Unsubscribed("s", (TOOLS,)), told(ONE)],
        "closed": [subscribed(TOOLS), Closed("s"), told(ONE)],
        "muted": [subscribed(TOOLS), Muted("s"), told(ONE)],
        "the glob does not match a subfolder": [subscribed("a://*"), told(ONE, "a://p/1")],
        "the glob has another scheme": [subscribed("a://**"), told(ONE, "b://p")],
        "the same prefix is no folder": [subscribed("a://p"), told(ONE, "a://pq")],
        "subresources are off": [subscribed("a://p", subresources=False), told(ONE, "a://p/1")],
        "told after the deletion": [
            subscribed("a://p"),
            *changed("a://p", ONE),
            deleted(ONE, "a://p"),
            *changed("a://p", TWO),
            told(TWO, "a://p"),
        ],
        "operation is excluded": [subscribed(TOOLS, filter=ADDS), told(ONE, TOOLS, (REMOVED, "p"))],
        "name is excluded": [subscribed(TOOLS, filter=NAMED_P), told(ONE, TOOLS, (ADDED, "q"))],
        "no change passes": [subscribed(TOOLS, filter=ADDS), replace(told(ONE), changes=())],
    },
    "Ordered": {
        "backwards": [subscribed(TOOLS), told(TWO), told(ONE)],
        "backwards after it subscribed again": [
            subscribed(TOOLS),
            told(TWO),
            Unsubscribed("s"),
            subscribed(TOOLS),
            told(ONE),
        ],
        "older than its cursor": [*changed(TOOLS, ONE, TWO), subscribed(TOOLS, told={TOOLS: TWO}), told(ONE)],
    },
    "Unique": {
        "twice": [subscribed(TOOLS), told(ONE), told(ONE)],
        "twice with another revision": [subscribed(TOOLS), told(ONE), told(ONE_AGAIN)],
        "told its cursor": [subscribed(TOOLS, told={TOOLS: ONE}), told(ONE)],
        "twice after it subscribed again": [
            subscribed(TOOLS),
            told(ONE),
            Unsubscribed("s"),
            subscribed(TOOLS),
            told(ONE),
        ],
    },
    "Reliable": {
        "never told": [START, subscribed(TOOLS), *changed(TOOLS, ONE)],
        "the last version is lost": [subscribed(TOOLS), *changed(TOOLS, ONE, TWO), told(ONE)],
        "lost through a glob": [subscribed("a://**"), *changed("a://p/1", ONE)],
        "lost after the acknowledgement": [
            START,
            subscribed(TOOLS),
            *changed(TOOLS, ONE),
            Acknowledged("s"),
            *changed(TOOLS, TWO),
        ],
        "lost after it was unmuted": [subscribed(TOOLS), Muted("s"), *changed(TOOLS, ONE), Unmuted("s")],
        "cursor is old": [*changed(TOOLS, ONE, TWO), subscribed(TOOLS, told={TOOLS: ONE})],
        "cursor of another server with a filter": [
            listed(ONE, EMPTY, "q", None, "1"),
            subscribed(TOOLS, filter=NAMED_P, told={TOOLS: Version(1, "alien")}),
        ],
        "lost after a notification without version": [
            subscribed(TOOLS),
            *changed(TOOLS, ONE),
            told(None),
            *changed(TOOLS, TWO),
        ],
        "passes the filter": [START, subscribed(TOOLS, filter=NAMED_P), listed(ONE, EMPTY, "p", None, "1")],
        "passes the filter after A, B, A": [
            START,
            subscribed(TOOLS, filter=NAMED_P),
            listed(ONE, EMPTY, "p", None, "1"),
            listed(TWO, ONE, "p", "1", "2"),
            listed(Version(3, "one"), TWO, "p", "2", "1"),
        ],
    },
    "Resumable": {
        "told too much": [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: ONE}), told(TWO, TOOLS, (ADDED, "p"), ADDED_Q)],
        "told too little": [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: EMPTY}), told(TWO, TOOLS, ADDED_Q)],
        "told another operation": [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: ONE}), told(TWO, TOOLS, (UPDATED, "q"))],
        "unknown cursor without refetch": [
            *TWO_ADDED,
            subscribed(TOOLS, told={TOOLS: Version(7, "alien")}),
            told(TWO, TOOLS, ADDED_Q),
        ],
        "empty cursor without refetch": [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: None}), told(TWO, TOOLS, ADDED_Q)],
        "a later notification omits a change": [
            subscribed(TOOLS),
            TWO_ADDED[0],
            told(ONE, TOOLS, (ADDED, "p")),
            TWO_ADDED[1],
            listed(THREE, TWO, "p", "1", None),
            told(THREE, TOOLS, ADDED_Q),
        ],
        "truncated with a change that did not happen": [
            *TWO_ADDED,
            subscribed(TOOLS, told={TOOLS: EMPTY}),
            replace(told(TWO, TOOLS, (REMOVED, "q")), is_complete=False),
        ],
        "told another operation on a content": [
            Changed("a://p", ONE, EMPTY, UPDATED, "a://p"),
            Changed("a://p", TWO, ONE, UPDATED, "a://p"),
            subscribed("a://*", told={"a://p": ONE}),
            told(TWO, "a://p", (DELETED, "a://p")),
        ],
    },
    "Bounded": {
        "more than it watches": [subscribed(TOOLS), *changed(TOOLS, ONE, TWO), MailboxSize("s", 2)],
        "more than the policy allows": [
            subscribed("a://**"),
            *changed("a://1", ONE),
            *changed("a://2", TWO),
            MailboxSize("s", 2, 1),
        ],
        "closed and not empty": [subscribed(TOOLS), *changed(TOOLS, ONE), Closed("s"), MailboxSize("s", 1)],
    },
}


@pytest.mark.parametrize(("promise", "name"), [(promise, name) for promise in BAD for name in BAD[promise]])
def test_bad_history_is_rejected(promise: str, name: str) -> None:
    events = BAD[promise][name]
    topic = None if promise == "Bounded" else [event.topic for event in events if isinstance(event, Changed | Told)][-1]
    with pytest.raises(PromiseBroken) as caught:
        PROMISES[promise](History(events))
    assert (caught.value.promise, caught.value.subscriber, caught.value.topic) == (promise, "s", topic)
    assert caught.value.events
    assert all(events[index] is event for index, event in caught.value.events)
    assert str(caught.value).startswith(f"{promise}: s")


@pytest.mark.parametrize(("journal", "is_accepted"), [(1, True), (2, False), (None, True)])
def test_refetch_is_rejected_if_the_journal_has_all_changes(journal: int | None, is_accepted: bool) -> None:
    history = History(
        [*TWO_ADDED, subscribed(TOOLS, told={TOOLS: EMPTY}), replace(told(TWO), changes=(), is_complete=False)]
    )
    if is_accepted:
        check_resumable(history, journal=journal)
        return
    with pytest.raises(PromiseBroken, match="2 changes since, and 2 are kept"):
        check_resumable(history, journal=journal)


def test_failure_is_an_assertion_error_that_shows_the_last_events() -> None:
    versions = [Version(number, str(number)) for number in range(1, 1000)]
    events = [subscribed(TOOLS), *changed(TOOLS, *versions), told(versions[-1]), told(versions[-1])]
    with pytest.raises(AssertionError) as caught:
        check_all(History(events))
    assert len(str(caught.value).splitlines()) < 30
    assert "Told" in str(caught.value).splitlines()[-1]
