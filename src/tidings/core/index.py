"""The index from topics to subscribers: features, URIs and URI patterns.

Finding the subscribers of a change takes time in proportion to their number, however many watch something else.
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

_MAX_FOLDERS = 256
"""Folders whose watched ancestors are cached."""

_NO_SUBSCRIBERS: Mapping[Subscriber, None] = {}

_FEATURE_SETS = {
    chosen: chosen
    for size in range(len(Feature) + 1)
    for chosen in map(frozenset[Feature], combinations(Feature, size))
}
"""All sets of features, so that subscribers share them."""


class WatchIndex:
    """Uses dicts as ordered sets: the first subscriber is served first."""

    def __init__(self, templates: Templates | None, covers_subresources: bool) -> None:
        self.by_topic: dict[Topic, dict[Subscriber, None]] = {}
        """The subscribers of each feature, URI and pattern."""
        self.patterns = PatternIndex()
        self.removals = 0
        """Grows when a result of `subscribers` may be outdated."""
        self._ancestors: dict[str, list[Topic]] = {}
        """The watched ancestors of a folder. Most changes are in the folder of the last one."""
        self._templates = templates
        self._covers_subresources = covers_subresources

    def compile_patterns(self, uris: Iterable[str]) -> dict[str, Match]:
        """Return those URIs that are new patterns, compiled for `add`. Raise `InvalidPattern` for a bad one."""
        return {
            uri: compile_pattern(uri, self._templates) for uri in uris if is_pattern(uri) and uri not in self.by_topic
        }

    def keys(self, topic: Topic) -> list[Topic]:
        """Return the keys under which a topic may be watched: itself, matching patterns, and watched ancestors."""
        keys: list[Topic] = [topic]
        if not isinstance(topic, str):
            return keys
        if self.patterns.count:
            keys += self.patterns.matching(topic)
        if self._covers_subresources:
            folder = topic[: topic.rfind("/", 0, -1) + 1]
            ancestors = self._ancestors.get(folder)
            keys += self._find_ancestors(topic, folder) if ancestors is None else ancestors
        return keys

    def _find_ancestors(self, topic: str, folder: str) -> list[Topic]:
        """Return the watched ancestors of a URI in a folder: `a://b/c/`, `a://b/c`, `a://b/` and so on."""
        ancestors: list[Topic] = []
        scheme = topic.find("://")
        root = scheme + 3 if scheme >= 0 else 0
        end = len(folder) - 1
        while end > root:
            ancestors += [path for path in (folder[: end + 1], folder[:end]) if path in self.by_topic]
            end = folder.rfind("/", root, end)
        if len(self._ancestors) >= _MAX_FOLDERS:
            self._ancestors.clear()
        if not folder.endswith(":/"):  # `a://` is in no folder, but `a:/b` is
            self._ancestors[folder] = ancestors
        return ancestors

    def subscribers(self, keys: list[Topic]) -> Mapping[Subscriber, None]:
        """Return the subscribers of a topic with these `keys`, each once."""
        topic = keys[0]
        found = self.by_topic.get(topic, _NO_SUBSCRIBERS)
        if len(keys) > 1:
            found, uri = dict(found), str(topic)
            for key in keys[1:]:
                for subscriber in self.by_topic.get(key, _NO_SUBSCRIBERS):
                    if subscriber.is_authorized is None or subscriber.is_authorized(uri):
                        found[subscriber] = None
        return found

    def is_watching(self, subscriber: Subscriber, keys: list[Topic]) -> bool:
        topic, *others = keys
        if subscriber in self.by_topic.get(topic, _NO_SUBSCRIBERS):
            return True
        if not any(subscriber in self.by_topic.get(key, _NO_SUBSCRIBERS) for key in others):
            return False
        return subscriber.is_authorized is None or subscriber.is_authorized(str(topic))

    def add(self, subscriber: Subscriber, topic: Topic, matches: Mapping[str, Match]) -> bool:
        """Add a subscription. Return whether it is the first one to the topic."""
        subscribers = self.by_topic.get(topic)
        if subscribers is None:
            subscribers = self.by_topic[topic] = {}
            self._ancestors.clear()
            if isinstance(topic, str) and is_pattern(topic):
                # Not in `matches` if its last subscriber was garbage-collected in the meantime.
                self.patterns.add(topic, matches.get(topic) or compile_pattern(topic, self._templates))
        is_first = not subscribers
        subscribers[subscriber] = None
        if isinstance(topic, Feature):
            subscriber.features = _FEATURE_SETS[subscriber.features | {topic}]
        elif subscriber.uris is None:
            subscriber.uris = {topic: None}
        else:
            subscriber.uris[topic] = None
        return is_first

    def discard(self, subscriber: Subscriber, topic: Topic) -> bool:
        """Remove a subscription. Return whether it existed."""
        subscribers = self.by_topic.get(topic)
        if subscribers is None or subscriber not in subscribers:
            return False
        self.removals += 1
        del subscribers[subscriber]
        if isinstance(topic, Feature):
            subscriber.features = _FEATURE_SETS[subscriber.features - {topic}]
        elif subscriber.uris is not None:
            del subscriber.uris[topic]
            if not subscriber.uris:
                subscriber.uris = None
        if not subscribers:
            self._drop(topic)
        return True

    def remove(self, subscriber: Subscriber) -> list[Topic]:
        """Remove all subscriptions of a subscriber. Return the topics that have no subscriber now."""
        unwatched: list[Topic] = []
        for topic in subscriber.watched:
            subscribers = self.by_topic[topic]
            del subscribers[subscriber]
            if not subscribers:
                self._drop(topic)
                unwatched.append(topic)
        self.removals += 1
        subscriber.features, subscriber.uris = _FEATURE_SETS[frozenset()], None
        return unwatched

    def _drop(self, topic: Topic) -> None:
        del self.by_topic[topic]
        self._ancestors.clear()
        if isinstance(topic, str) and is_pattern(topic):
            self.patterns.discard(topic)


def check_limit(policy: Policy, subscriber: Subscriber | None, uris: list[str]) -> None:
    """Raise `LimitReached` if a subscriber would get more subscriptions than the policy allows."""
    if not uris:
        return
    watched = dict.fromkeys([*((subscriber.uris if subscriber else None) or ()), *uris])
    counts = {"max_uris": len(watched), "max_patterns": sum(map(is_pattern, watched))}
    for name, count in counts.items():
        limit: int = getattr(policy, name)
        if count > limit:
            raise LimitReached(f"this would make {count} subscriptions; Policy.{name} allows {limit}")
