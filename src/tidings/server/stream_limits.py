"""Limits for open streams, and for what they watch: of all callers together, of each principal and of each address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tidings.core.patterns import is_pattern
from tidings.errors import LimitReached, TooManyStreams
from tidings.policy import Policy
from tidings.server.authorization import Principal

__all__ = ["StreamLimits", "StreamSlot"]


class StreamLimits:
    """Counts the open streams, and refuses more than the policy allows."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._principals: Counter[tuple[str, str | None]] = Counter()
        self._addresses: Counter[str] = Counter()
        self._watched: Counter[object] = Counter()
        """The sum of the `_weight` of all URIs that a caller watches."""
        self.count = 0
        self.watched = 0

    def reserve(self, principal: Principal | None, address: str | None) -> StreamSlot:
        """Count one more stream. Raise `TooManyStreams` if a limit is reached."""
        policy = self._policy
        _check("max_streams", self.count, policy.max_streams)
        if principal is not None:
            _check("max_streams_per_principal", self._principals[principal.identity], policy.max_streams_per_principal)
        if address is not None:
            _check("max_streams_per_address", self._addresses[address], policy.max_streams_per_address)
        self.count += 1
        if principal is not None:
            self._principals[principal.identity] += 1
        if address is not None:
            self._addresses[address] += 1
        return StreamSlot(self, principal, address)

    def watch(self, principal: Principal | None, address: str | None, more: int) -> None:
        """Add `more`, which may be negative, to what a caller watches. Raise `LimitReached` if that is too much."""
        policy, caller = self._policy, address if principal is None else principal.identity
        limits = {"max_watched": (self.watched, policy.max_watched)}
        if caller is not None and policy.max_watched_per_caller is not None:
            limits["max_watched_per_caller"] = (self._watched[caller], policy.max_watched_per_caller)
        for name, (count, limit) in limits.items():
            if more > 0 and count + more > limit:
                raise LimitReached(f"{count} URIs are watched, and this would add {more}; Policy.{name} allows {limit}")
        self.watched += more
        self._watched[caller] += more
        if not self._watched[caller]:
            del self._watched[caller]

    def release(self, principal: Principal | None, address: str | None) -> None:
        """Count one stream less."""
        self.count -= 1
        if principal is not None:
            _decrement(self._principals, principal.identity)
        if address is not None:
            _decrement(self._addresses, address)


class StreamSlot:
    """One open stream, as `StreamLimits` counts it."""

    __slots__ = ("_address", "_limits", "_principal", "_watched")

    def __init__(self, limits: StreamLimits | None, principal: Principal | None, address: str | None) -> None:
        """Without `limits`, the stream is not counted: a webhook."""
        self._limits = limits
        self._principal = principal
        self._address = address
        self._watched = 0

    def watch(self, uris: Iterable[str]) -> None:
        """Count the URIs and patterns that the stream watches now. Raise `LimitReached` if these are too many."""
        if self._limits is not None:
            watched = sum(map(_weight, uris))
            self._limits.watch(self._principal, self._address, watched - self._watched)
            self._watched = watched

    def release(self) -> None:
        """Count the stream no longer. Calling it twice has no effect."""
        self.watch(())
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.release(self._principal, self._address)


def _check(name: str, count: int, limit: int | None) -> None:
    if limit is not None and count >= limit:
        raise TooManyStreams(f"{count} streams are open; Policy.{name} allows {limit}")


def _weight(uri: str) -> int:
    """Return how much a URI counts, as `Policy.max_watched` describes it."""
    return (1 + len(uri) // 256) * (50 if "{" in uri else 10 if is_pattern(uri) else 1)


def _decrement(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
