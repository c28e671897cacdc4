"""What a client wants to listen to, and what of it this server can ever send and this caller may watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tidings.core.index import check_limit
from tidings.core.model import Feature, Topic, is_unicode
from tidings.core.patterns import compile_pattern, is_pattern
from tidings.errors import InvalidPattern
from tidings.server.authorization import Principal

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["GrantedTopics", "RequestedTopics", "honour"]


class RequestedTopics(msgspec.Struct, rename="camel"):
    """What a client asks for, and in the acknowledgement what it gets."""

    tools_list_changed: bool | None = None
    prompts_list_changed: bool | None = None
    resources_list_changed: bool | None = None
    resource_subscriptions: list[str] | None = None

    @property
    def features(self) -> list[Feature]:
        chosen = (self.tools_list_changed, self.prompts_list_changed, self.resources_list_changed)
        return [feature for feature, is_chosen in zip(_FEATURES, chosen, strict=True) if is_chosen]


_FEATURES = (Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES)
_MEMBERS = {feature: f"{feature.value}ListChanged" for feature in Feature}


class GrantedTopics:
    """What of a listen request is served."""

    __slots__ = ("features", "uris")

    def __init__(self, topics: list[Topic]) -> None:
        self.features = [topic for topic in topics if isinstance(topic, Feature)]
        self.uris = [topic for topic in topics if not isinstance(topic, Feature)]

    @property
    def topics(self) -> list[Topic]:
        return [*self.features, *self.uris]

    def __bool__(self) -> bool:
        return bool(self.features or self.uris)

    def as_filter(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {_MEMBERS[feature]: True for feature in self.features}
        return chosen | ({"resourceSubscriptions": self.uris} if self.uris else {})


async def honour(live: Live, wanted: RequestedTopics, principal: Principal | None) -> GrantedTopics:
    """What this server can send of what is wanted, and this caller may watch."""
    topics: list[Topic] = [feature for feature in wanted.features if live.serves(feature)]
    if wanted.resource_subscriptions:
        uris = list(dict.fromkeys(wanted.resource_subscriptions))
        # Before anything is sent: a response that has begun as a stream can no longer be an error.
        check_limit(live.policy, None, uris)
        if live.serves(Feature.RESOURCES):
            topics += [uri for uri in uris if _can_be_matched(uri, live)]
    return GrantedTopics(await live.gate.allowed(principal, topics))


def _can_be_matched(uri: str, live: Live) -> bool:
    try:
        if is_pattern(uri):
            compile_pattern(uri, live.templates)
            return live.gate.knows_patterns
    except InvalidPattern:
        return False
    return is_unicode(uri)
