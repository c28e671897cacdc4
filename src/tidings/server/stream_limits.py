"""Limits for the number of open streams: of all callers together, of each principal and of each address."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tidings.errors import TooManyStreams
from tidings.policy import Policy
from tidings.server.authorization import Principal

__all__ = ["StreamLimits", "StreamSlot"]


class StreamLimits:
    """Counts the open streams, and refuses more than the policy allows."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._principals: Counter[tuple[str, str | None]] = Counter()
        self._addresses: Counter[str] = Counter()
        self.count = 0

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

    def release(self, principal: Principal | None, address: str | None) -> None:
        """Count one stream less."""
        self.count -= 1
        if principal is not None:
            _decrement(self._principals, principal.identity)
        if address is not None:
            _decrement(self._addresses, address)


class StreamSlot:
    """One open stream, as `StreamLimits` counts it."""

    __slots__ = ("_address", "_limits", "_principal")

    def __init__(self, limits: StreamLimits | None, principal: Principal | None, address: str | None) -> None:
        """Without `limits`, the stream is not counted: a webhook."""
        self._limits = limits
        self._principal = principal
        self._address = address

    def release(self) -> None:
        """Count the stream no longer. Calling it twice has no effect."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.release(self._principal, self._address)


def _check(name: str, count: int, limit: int | None) -> None:
    if limit is not None and count >= limit:
        raise TooManyStreams(f"{count} streams are open; Policy.{name} allows {limit}")


def _decrement(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
