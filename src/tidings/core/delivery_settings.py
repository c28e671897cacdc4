"""When and in which order one subscriber is notified: the settings of a `Policy` that delivery reads.

`Policy` documents and checks them. Subscribers without settings of their own share those of the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tidings.core.model import Feature, Priority, Topic
from tidings.core.patterns import Match, compile_pattern

__all__ = ["DeliverySettings", "priority_matcher"]


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    quiet_gap: float
    longest_wait: float
    min_interval: float
    priorities: Sequence[tuple[str, Priority]]
    max_pending: int

    @property
    def has_delays(self) -> bool:
        """Whether a notification may be delayed although its subscriber is ready."""
        return self.quiet_gap > 0 or self.min_interval > 0

    def priority(self, topic: Topic) -> Priority:
        if isinstance(topic, Feature):
            return Priority.HIGH
        for uri, priority in self.priorities:
            if priority_matcher(uri)(topic):
                return priority
        return Priority.NORMAL


@lru_cache(256)  # at most 256 kB: clients choose some of the patterns, and they stay after the client is gone
def priority_matcher(pattern: str) -> Match:
    return compile_pattern(pattern)
