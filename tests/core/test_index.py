"""A URI is also watched through its ancestors, whatever was subscribed or unsubscribed before."""

from __future__ import annotations

import random

from tidings.core.catalog import Catalog
from tidings.core.hub import Hub
from tidings.core.index import _MAX_FOLDERS, WatchIndex
from tidings.core.model import Topic

SEGMENTS = ("a", "b", "", "a b", "a:")
ROOTS = ("x://h", "x://", "x:/", "x:", "", "/", "file:///")


def expected(topic: str, watched: set[str]) -> list[Topic]:
    """Return all ancestors: each slash after the root ends a folder, which may be watched with and without it."""
    scheme = topic.find("://")
    root = scheme + 3 if scheme >= 0 else 0
    ends = [at for at in range(len(topic) - 1) if topic[at] == "/" and at > root]
    folders = [path for end in reversed(ends) for path in (topic[: end + 1], topic[:end])]
    return [topic, *(folder for folder in folders if folder in watched)]


def some_uri(dice: random.Random) -> str:
    return "/".join([dice.choice(ROOTS), *dice.choices(SEGMENTS, k=dice.randrange(4))])


def test_uri_is_found_under_all_watched_ancestors() -> None:
    dice = random.Random(5)
    index = WatchIndex(None, covers_subresources=True)
    subscriber = Hub(Catalog()).open(lambda notification: None)
    watched: set[str] = set()
    found = 0
    for _ in range(20_000):
        uri = some_uri(dice)
        if dice.random() < 0.05:
            index.add(subscriber, uri)
            watched.add(uri)
        if dice.random() < 0.05 and watched:
            gone = dice.choice(sorted(watched))
            assert index.discard(subscriber, gone)
            watched.remove(gone)
        paths = index.keys(uri)
        assert paths == expected(uri, watched), uri
        assert (uri in index.watched(watched)) == (uri in watched or len(paths) > 1), uri
        found += len(paths) - 1
    assert found > 1_000


def test_folder_cache_is_bounded() -> None:
    index = WatchIndex(None, covers_subresources=True)
    for number in range(3 * _MAX_FOLDERS):
        index.keys(f"x://h/{number}/a")
    assert len(index._ancestors) <= _MAX_FOLDERS
