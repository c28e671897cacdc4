"""A notification may repeat a version only if a client may have fetched another one."""

from __future__ import annotations

import pytest

from tests.support.promises.checks import check_all, check_resumable, check_unique
from tests.support.promises.history import (
    Changed,
    Event,
    Fetched,
    FetchEnded,
    FetchStarted,
    History,
    PromiseBroken,
    Subscribed,
    Told,
)
from tidings import Feature, Version

TOOLS, PROMPTS = Feature.TOOLS, Feature.PROMPTS
B, C, B_AGAIN, C_AGAIN, B_AT_LAST = Version(2, "b"), Version(3, "c"), Version(4, "b"), Version(5, "c"), Version(6, "b")


def told(version: Version) -> Told:
    return Told("s", TOOLS, version, (), is_complete=False)


def changed(*versions: Version) -> list[Event]:
    return [Changed(TOOLS, version) for version in versions]


A = Version(1, "a")
START = [*changed(A), Subscribed("s", (TOOLS,), {TOOLS: A}), *changed(B), Told("s", TOOLS, B)]
SAME_AGAIN = [*changed(C, B_AGAIN), told(B_AGAIN)]
SAME_A_THIRD_TIME = [*changed(C_AGAIN, B_AT_LAST), told(B_AT_LAST)]

REJECTED: dict[str, list[Event]] = {
    "no fetch": [*START, *SAME_AGAIN],
    "fetch before the first notification": [Fetched(TOOLS), *START, *SAME_AGAIN],
    "fetch after the repetition": [*START, *SAME_AGAIN, Fetched(TOOLS)],
    "fetch that the second notification answered": [*START, Fetched(TOOLS), *SAME_AGAIN, *SAME_A_THIRD_TIME],
    "fetch of another topic": [*START, Fetched(PROMPTS), FetchStarted(PROMPTS, 1), *SAME_AGAIN],
    "fetch of another version after the repetition": [*START, *SAME_AGAIN, Fetched(TOOLS, C)],
    "fetch that ended before": [FetchStarted(TOOLS, 0), FetchEnded(TOOLS, 0), *START, *SAME_AGAIN],
    "fetch that started later": [*START, *SAME_AGAIN, FetchStarted(TOOLS, 3)],
    "fetch that can return nothing older": [*START, *changed(C, B_AGAIN), FetchStarted(TOOLS, 4), told(B_AGAIN)],
    "fetch that returned the same content": [
        *START,
        FetchStarted(TOOLS, 2),
        Fetched(TOOLS, B),
        FetchEnded(TOOLS, 2),
        *SAME_AGAIN,
    ],
    "fetch without a result": [
        *START,
        FetchStarted(TOOLS, 2),
        *changed(C),
        FetchEnded(TOOLS, 2),
        *SAME_AGAIN,
    ],
    "fetch that an earlier notification answered": [
        *START,
        FetchStarted(TOOLS, 2),
        *SAME_AGAIN,
        Fetched(TOOLS, B_AGAIN),
        FetchEnded(TOOLS, 2),
        *SAME_A_THIRD_TIME,
    ],
}
ACCEPTED: dict[str, list[Event]] = {
    "fetch of an unknown version": [*START, *changed(C), Fetched(TOOLS), *changed(B_AGAIN), told(B_AGAIN)],
    "fetch of another version": [*START, *changed(C), Fetched(TOOLS, C), *changed(B_AGAIN), told(B_AGAIN)],
    "fetch of any version until then": [*START, *changed(C, B_AGAIN), Fetched(TOOLS, Version(4, "")), told(B_AGAIN)],
    "running fetch": [*START, FetchStarted(TOOLS, 2), *SAME_AGAIN, FetchEnded(TOOLS, 2)],
    "fetch that never ends": [FetchStarted(TOOLS), *START, *SAME_AGAIN, *SAME_A_THIRD_TIME],
    "one of two fetches with the same start": [
        *START,
        FetchStarted(TOOLS, 2),
        FetchStarted(TOOLS, 2),
        FetchEnded(TOOLS, 2),
        *SAME_AGAIN,
    ],
}


@pytest.mark.parametrize("events", REJECTED.values(), ids=REJECTED)
def test_repeated_version_is_rejected(events: list[Event]) -> None:
    with pytest.raises(PromiseBroken, match="Unique"):
        check_unique(History(events))


@pytest.mark.parametrize("events", REJECTED.values(), ids=REJECTED)
def test_refetch_is_rejected_if_the_journal_has_all_changes(events: list[Event]) -> None:
    with pytest.raises(PromiseBroken, match="Resumable: s, tools: it was told to refetch"):
        check_resumable(History(events), journal=1000)


@pytest.mark.parametrize("events", ACCEPTED.values(), ids=ACCEPTED)
def test_repeated_version_is_accepted_if_another_may_have_been_fetched(events: list[Event]) -> None:
    check_all(History(events))
    check_resumable(History(events), journal=1000)
