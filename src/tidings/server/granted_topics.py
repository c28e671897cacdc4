"""The topics that a client asks to listen to, and those of them that it gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidings.core.model import Feature, Topic, topics_json
from tidings.core.patterns import Match

__all__ = ["GrantedTopics", "RequestedTopics"]


class RequestedTopics(msgspec.Struct, rename="camel"):
    """The `notifications` member of a listen request."""

    tools_list_changed: bool | None = None
    prompts_list_changed: bool | None = None
    resources_list_changed: bool | None = None
    resource_subscriptions: list[str] | None = None

    @property
    def features(self) -> list[Feature]:
        requested = (self.tools_list_changed, self.prompts_list_changed, self.resources_list_changed)
        return [feature for feature, is_requested in zip(Feature, requested, strict=True) if is_requested]


class GrantedTopics:
    """The topics that this server can send, and this caller may watch."""

    __slots__ = ("features", "matches", "uris")

    def __init__(self, topics: Iterable[Topic], matches: Mapping[str, Match] | None = None) -> None:
        """`matches` has the compiled form of each pattern among the topics, and may have more."""
        self.matches = matches or {}
        self.features: list[Feature] = []
        self.uris: list[str] = []
        for topic in topics:
            if isinstance(topic, Feature):
                self.features.append(topic)
            else:
                self.uris.append(topic)

    @property
    def topics(self) -> list[Topic]:
        return [*self.features, *self.uris]

    def __bool__(self) -> bool:
        return bool(self.features or self.uris)

    def as_json(self) -> dict[str, Any]:
        """Return the `notifications` member of the acknowledgement."""
        return topics_json(self.features, self.uris)
