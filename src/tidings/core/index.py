"""Who watches which topic: features, URIs and patterns of URIs.

Finding who is to be told of a change costs what it finds, however many watch something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

from tidings.core.model import Feature, Topic
from tidings.core.patterns import Match, PatternIndex, Templates, compile_pattern, is_pattern
from tidings.core.subscriber import Subscriber
from tidings.errors import LimitReached
from tidings.policy import Policy

__all__ = ["WatchIndex", "check_limit"]


class WatchIndex:
    """Dicts as ordered sets: who came first is told first."""

    def __init__(self, templates: Templates | None, covers_subresources: bool) -> None:
        self.watchers: dict[Topic, dict[Subscriber, None]] = {}
        """By feature, URI and pattern."""
        self.patterns = PatternIndex(templates)
        self.edits = 0
        """Counts what makes an answer of `watching` stale."""
        self._above: dict[str, list[Topic]] = {}
        """By folder, what is watched of which a URI in it is a part: most changes are in the folder of the last one."""
        self._templates = templates
        self._covers_subresources = covers_subresources

    def compiled(self, uris: Iterable[str]) -> dict[str, Match]:
        """Those of the URIs that are patterns not yet watched, ready for `add`. Raises on a bad one."""
        return {
            uri: compile_pattern(uri, self._templates) for uri in uris if is_pattern(uri) and uri not in self.watchers
        }

    def paths(self, topic: Topic) -> list[Topic]:
        """Under what a topic may be watched: itself, the patterns that match it, and what it is a part of."""
        paths: list[Topic] = [topic]
        if not isinstance(topic, str):
            return paths
        if self.patterns.count:
            paths += self.patterns.matching(topic)
        if self._covers_subresources:
            folder = topic[: topic.rfind("/", 0, -1) + 1]
            above = self._above.get(folder)
            paths += self._find_above(topic, folder) if above is None else above
        return paths

    def _find_above(self, topic: str, folder: str) -> list[Topic]:
        """What is watched of which a URI is a part, as all in its folder: `a://b/c/`, `a://b/c`, `a://b/` and so on."""
        above: list[Topic] = []
        scheme = topic.find("://")
        root = scheme + 3 if scheme >= 0 else 0
        end = len(folder) - 1
        while end > root:
            above += [path for path in (folder[: end + 1], folder[:end]) if path in self.watchers]
            end = folder.rfind("/", root, end)
        if len(self._above) >= _MOST_FOLDERS:
            self._above.clear()
        if not folder.endswith(":/"):  # `a://` is in no folder, and `a:/b` is
            self._above[folder] = above
        return above

    def watching(self, paths: list[Topic]) -> Mapping[Subscriber, None]:
        """Who is to be told. One who matches in several ways is told once."""
        topic = paths[0]
        found = self.watchers.get(topic, _NOBODY)
        if len(paths) > 1:
            found, uri = dict(found), str(topic)
            for path in paths[1:]:
                for subscriber in self.watchers.get(path, _NOBODY):
                    if subscriber.is_authorized is None or subscriber.is_authorized(uri):
                        found[subscriber] = None
        return found

    def is_watching(self, subscriber: Subscriber, paths: list[Topic]) -> bool:
        topic, *others = paths
        if subscriber in self.watchers.get(topic, _NOBODY):
            return True
        if not any(subscriber in self.watchers.get(path, _NOBODY) for path in others):
            return False
        return subscriber.is_authorized is None or subscriber.is_authorized(str(topic))

    def add(self, subscriber: Subscriber, topic: Topic, matches: Mapping[str, Match]) -> bool:
        """Let a subscriber watch a topic; whether it is the first to do so."""
        watchers = self.watchers.get(topic)
        if watchers is None:
            watchers = self.watchers[topic] = {}
            self._above.clear()
            if not isinstance(topic, Feature) and is_pattern(topic):
                self.patterns.add(topic, matches.get(topic))
        is_first = not watchers
        watchers[subscriber] = None
        if isinstance(topic, Feature):
            subscriber.features = _SETS[subscriber.features | {topic}]
        elif subscriber.uris is None:
            subscriber.uris = {topic: None}
        else:
            subscriber.uris[topic] = None
        return is_first

    def discard(self, subscriber: Subscriber, topic: Topic) -> bool:
        """Let it watch the topic no longer; whether it did."""
        watchers = self.watchers.get(topic)
        if watchers is None or subscriber not in watchers:
            return False
        self.edits += 1
        del watchers[subscriber]
        if isinstance(topic, Feature):
            subscriber.features = _SETS[subscriber.features - {topic}]
        elif subscriber.uris is not None:
            del subscriber.uris[topic]
            if not subscriber.uris:
                subscriber.uris = None
        if not watchers:
            self._drop(topic)
        return True

    def remove(self, subscriber: Subscriber) -> list[Topic]:
        """Let it watch nothing any longer; returns what nobody watches now. Cheaper than topic by topic."""
        left: list[Topic] = []
        for topic in subscriber.watched:
            watchers = self.watchers[topic]
            del watchers[subscriber]
            if not watchers:
                self._drop(topic)
                left.append(topic)
        self.edits += 1
        subscriber.features, subscriber.uris = _SETS[frozenset()], None
        return left

    def _drop(self, topic: Topic) -> None:
        del self.watchers[topic]
        self._above.clear()
        if not isinstance(topic, Feature) and is_pattern(topic):
            self.patterns.discard(topic)


_MOST_FOLDERS = 256
"""Folders of which it is remembered what they are a part of."""

_NOBODY: Mapping[Subscriber, None] = {}

_SETS = {
    chosen: chosen
    for size in range(len(Feature) + 1)
    for chosen in map(frozenset[Feature], combinations(Feature, size))
}
"""All sets of features there are, so that subscribers share them."""


def check_limit(policy: Policy, known: Subscriber | None, uris: list[str]) -> None:
    """Refuse what would make more subscriptions than the policy allows; the message names the limit."""
    if not uris:
        return
    watched = dict.fromkeys([*((known.uris if known else None) or ()), *uris])
    counts = {"max_uris": len(watched), "max_patterns": sum(map(is_pattern, watched))}
    for name, count in counts.items():
        limit: int = getattr(policy, name)
        if count > limit:
            raise LimitReached(f"this would make {count} subscriptions; Policy.{name} allows {limit}")
