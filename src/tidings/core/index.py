"""The index from topics to subscribers: features, URIs and URI patterns.

Finding the subscribers of a change takes time in proportion to their number, however many watch something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from itertools import combinations

from tidings.core.model import Feature, Topic
from tidings.core.patterns import Match, PatternIndex, Templates, compile_pattern, is_pattern
from tidings.core.subscriber import Subscriber
from tidings.errors import InvalidPattern, LimitReached
from tidings.policy import Policy

__all__ = ["WatchIndex", "WatchedUris", "check_limit"]

_MAX_FOLDERS = 256
"""Folders whose watched ancestors are cached."""
_PATTERN_LENGTH, _PATTERN_SEGMENTS, _PATTERN_WILDCARDS, _PATTERN_VARIABLES = 64, 8, 4, 1
"""The average size of a pattern. `Policy.max_patterns` times this is the limit for all patterns of a subscriber,
because the time of a search grows with it."""

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

    def compile_pattern(self, pattern: str) -> Match:
        """Return the compiled form of a pattern. Raise `InvalidPattern` if it is invalid."""
        return self.patterns.matches.get(pattern) or compile_pattern(pattern, self._templates)

    def watched(
        self,
        uris: Collection[str],
        is_authorized: Callable[[str], bool] | None = None,
        matches: Mapping[str, Match] | None = None,
    ) -> WatchedUris:
        """Return the resources that these URIs and patterns watch. `is_authorized` says whether a resource may be
        watched through a pattern or a parent resource. `matches` has patterns that are compiled already."""

        def compile(pattern: str) -> Match:
            return (matches or {}).get(pattern) or self.compile_pattern(pattern)

        return WatchedUris(uris, compile, self._covers_subresources, is_authorized)

    def keys(self, topic: Topic) -> list[Topic]:
        """Return the keys under which a topic may be watched: itself, matching patterns, and watched ancestors."""
        keys: list[Topic] = [topic]
        if not isinstance(topic, str):
            return keys
        if self.patterns.matches:
            keys += self.patterns.matching(topic)
        if self._covers_subresources:
            folder = topic[: topic.rfind("/", 0, -1) + 1]
            ancestors = self._ancestors.get(folder)
            keys += self._find_ancestors(topic, folder) if ancestors is None else ancestors
        return keys

    def _find_ancestors(self, topic: str, folder: str) -> list[Topic]:
        """Return the watched ancestors of a URI in a folder: `a://b/c/`, `a://b/c`, `a://b/` and so on."""
        ancestors: list[Topic] = []
        root = _root(topic)
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

    def add(self, subscriber: Subscriber, topic: Topic, matches: Mapping[str, Match] | None = None) -> bool:
        """Add a subscription. Return whether it is the first one to the topic."""
        subscribers = self.by_topic.get(topic)
        if subscribers is None:
            subscribers = self.by_topic[topic] = {}
            self._ancestors.clear()
            if isinstance(topic, str) and is_pattern(topic):
                self.patterns.add(topic, (matches or {}).get(topic) or self.compile_pattern(topic))
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
    patterns = list(filter(is_pattern, watched))
    counts = {"max_uris": len(watched), "max_patterns": len(patterns)}
    for name, count in counts.items():
        limit: int = getattr(policy, name)
        if count > limit:
            raise LimitReached(f"this would make {count} subscriptions; Policy.{name} allows {limit}")
    sizes = {
        "characters": (sum(map(len, patterns)), _PATTERN_LENGTH),
        "segments": (sum(pattern.count("/") + 1 for pattern in patterns), _PATTERN_SEGMENTS),
        "wildcards": (sum(pattern.count("*") for pattern in patterns), _PATTERN_WILDCARDS),
        "template variables": (sum(_count_variables(pattern) for pattern in patterns), _PATTERN_VARIABLES),
    }
    for unit, (size, average) in sizes.items():
        # A single pattern has limits of its own.
        if len(patterns) > 1 and size > average * policy.max_patterns:
            raise LimitReached(
                f"these patterns have {size} {unit} together; Policy.max_patterns ({policy.max_patterns}) "
                f"allows {average * policy.max_patterns}"
            )


class WatchedUris:
    """The resources that some URIs and patterns watch, to look up many of them.

    Clients choose both sides, so the caller compares `work` with a limit after each lookup. Nothing is compiled before
    the first lookup needs it."""

    __slots__ = ("_compile", "_is_authorized", "_lengths", "_patterns", "_uris", "_work")

    def __init__(
        self,
        uris: Collection[str],
        compile: Callable[[str], Match],
        covers_subresources: bool,
        is_authorized: Callable[[str], bool] | None = None,
    ) -> None:
        """`is_authorized` says whether a resource may be watched through a pattern or a parent resource."""
        self._uris = uris if isinstance(uris, Set | Mapping) else frozenset(uris)
        self._compile = compile
        self._is_authorized = is_authorized
        self._patterns: PatternIndex | None = None
        self._work = 0
        self._lengths: list[int] | None = None if covers_subresources else []
        """The lengths of the URIs."""

    @property
    def work(self) -> int:
        """The work of all lookups so far, in the units of `PatternIndex.work`."""
        return self._work + (self._patterns.work if self._patterns is not None else 0)

    def __contains__(self, uri: str) -> bool:
        if uri in self._uris:
            return not is_pattern(uri)
        if not self._has_watched_ancestor(uri) and not self._index_patterns().matching(uri):
            return False
        return self._is_authorized is None or self._is_authorized(uri)

    def _has_watched_ancestor(self, uri: str) -> bool:
        if self._lengths is None:
            self._lengths = sorted(set(map(len, self._uris)))
        root = _root(uri)
        for length in self._lengths:
            self._work += 1 + length // 256
            # A folder may be watched with its slash, or without. The last character of a URI ends no folder.
            slashes = [at for at in (length - 1, length) if root < at < len(uri) - 1 and uri[at] == "/"]
            if slashes and uri[:length] in self._uris:
                return True
        return False

    def _index_patterns(self) -> PatternIndex:
        if self._patterns is None:
            self._patterns = PatternIndex()
            for uri in filter(is_pattern, self._uris):
                with suppress(InvalidPattern):  # from a server with other templates
                    self._patterns.add(uri, self._compile(uri))
        return self._patterns


def _count_variables(pattern: str) -> int:
    """Count the variables of a template: `{x}` has one, `{?page,size}` two."""
    return pattern.count("{") + pattern.count(",") if "{" in pattern else 0


def _root(uri: str) -> int:
    """Return where the path of a URI starts."""
    scheme = uri.find("://")
    return scheme + 3 if scheme >= 0 else 0
