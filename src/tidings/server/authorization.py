"""Who may watch what, and how many streams there may be. Asked before anything is acknowledged.

A refusal never says whether the thing exists.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tidings.core.model import Topic
from tidings.core.patterns import is_pattern
from tidings.core.redact import redact_uri, topic_name
from tidings.errors import LimitReached
from tidings.policy import Policy

__all__ = ["Authorization", "Authorize", "Principal", "Ticket"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, as the server's own authentication found out."""

    client_id: str
    subject: str | None = None
    scopes: tuple[str, ...] = ()
    claims: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def who(self) -> tuple[str, str | None]:
        """Whatever its token allows this time."""
        return (self.client_id, self.subject)


Authorize: TypeAlias = Callable[[Principal | None, Topic], bool | Awaitable[bool]]
"""Whether a principal (None: nobody in particular) may watch a feature, or the URI or pattern of a resource."""


class Ticket(NamedTuple):
    """One open stream, for `leave`."""

    principal: Principal | None
    address: str | None


class Authorization:
    def __init__(self, policy: Policy, authorize: Authorize | None = None) -> None:
        self._policy = policy
        self._authorize = authorize
        self.knows_patterns = authorize is None or not inspect.iscoroutinefunction(authorize)
        """Whether a pattern can be honoured: what it matches has to be asked for when it changes, without waiting."""
        self._asked = authorize if self.knows_patterns else None
        self._anyone = _May(self._asked, None)
        self._principals: Counter[tuple[str, str | None]] = Counter()
        self._addresses: Counter[str] = Counter()
        self.count = 0

    def enter(self, principal: Principal | None, address: str | None) -> Ticket:
        """Count one more stream, or say which limit stands in the way."""
        policy = self._policy
        self._check("max_streams", self.count, policy.max_streams)
        if principal is not None:
            self._check("max_streams_per_principal", self._principals[principal.who], policy.max_streams_per_principal)
        if address is not None:
            self._check("max_streams_per_address", self._addresses[address], policy.max_streams_per_address)
        self.count += 1
        if principal is not None:
            self._principals[principal.who] += 1
        if address is not None:
            self._addresses[address] += 1
        return Ticket(principal, address)

    def leave(self, ticket: Ticket) -> None:
        self.count -= 1
        if ticket.principal is not None:
            _discount(self._principals, ticket.principal.who)
        if ticket.address is not None:
            _discount(self._addresses, ticket.address)

    def predicate(self, principal: Principal | None) -> Callable[[str], bool] | None:
        """Whether a principal may be told of a resource that it watches by a pattern, or as part of another."""
        if self._authorize is None:
            return None
        return self._anyone if principal is None else _May(self._asked, principal)

    async def allowed(self, principal: Principal | None, topics: Iterable[Topic]) -> list[Topic]:
        """Those of the topics that the principal may watch."""
        if self._authorize is None:
            return list(topics)
        may: list[Topic] = []
        for topic in topics:
            try:
                answer = self._authorize(principal, topic)
                if not isinstance(answer, bool) and inspect.isawaitable(answer):
                    # What a pattern covers could not be asked for, which no declaration told of this function.
                    answer = await answer and not (isinstance(topic, str) and is_pattern(topic))
                if answer:
                    may.append(topic)
            except Exception:  # the user's function; in doubt nobody is let in
                logger.exception("authorize() failed for %r; refusing", topic_name(topic))
        return may

    @staticmethod
    def _check(name: str, count: int, limit: int | None) -> None:
        if limit is not None and count >= limit:
            raise LimitReached(f"{count} streams are open; Policy.{name} allows {limit}")


class _May:
    """What one principal may be told of. An object, and not a closure, which takes five times the memory."""

    __slots__ = ("_authorize", "_principal")

    def __init__(self, authorize: Authorize | None, principal: Principal | None) -> None:
        self._authorize = authorize
        self._principal = principal

    def __call__(self, uri: str) -> bool:
        if self._authorize is None:
            return False  # it would have to be waited for
        try:
            answer = self._authorize(self._principal, uri)
            if isinstance(answer, bool) or not inspect.isawaitable(answer):
                return bool(answer)
            if inspect.iscoroutine(answer):
                answer.close()
        except Exception:  # as in `allowed`
            logger.exception("authorize() failed for %r; refusing", redact_uri(uri))
        return False


def _discount(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
