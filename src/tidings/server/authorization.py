"""Authorization of callers to watch topics, checked before anything is acknowledged.

A refusal never says whether a topic exists.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tidings.core.model import Topic
from tidings.core.patterns import is_pattern
from tidings.core.redact import redact_uri, topic_name
from tidings.store.durable import Owner

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext

__all__ = [
    "Authorization",
    "Authorize",
    "MayWatch",
    "Principal",
    "caller_of",
    "owner_of",
    "principal_of",
]

logger = logging.getLogger(__name__)

_MAX_TIME = 253_402_300_800
"""The start of the year 10,000. ISO 8601 has no later date, so a later expiry counts as none."""

_CALLS_PER_TURN = 256
"""Calls of `authorize` in one turn of the event loop. A client may name thousands of URIs."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller, as the server's own authentication identified it."""

    client_id: str
    subject: str | None = None
    scopes: tuple[str, ...] = ()
    claims: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    expires_at: int | None = field(default=None, compare=False)
    """When its token expires, as Unix time. None: never."""

    @property
    def identity(self) -> tuple[str, str | None]:
        """The caller itself, without the rights of its present token."""
        return (self.client_id, self.subject)


def principal_of(user: object) -> Principal | None:
    """Return the caller that the server's authentication put into the scope of a request as `user`."""
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser

    if not isinstance(user, AuthenticatedUser):
        return None
    token = user.access_token
    expires_at = token.expires_at if token.expires_at and token.expires_at < _MAX_TIME else None
    return Principal(token.client_id, token.subject, tuple(token.scopes), token.claims or {}, expires_at)


def caller_of(ctx: ServerRequestContext[Any, Any]) -> Principal | None:
    """Return the caller of a request that the SDK serves."""
    return principal_of(ctx.request.scope.get("user")) if ctx.request is not None else None


def owner_of(principal: Principal | None) -> Owner:
    """Return the owner of the caller's durable subscriptions."""
    return principal.identity if principal is not None else None


Authorize: TypeAlias = Callable[[Principal | None, Topic], bool | Awaitable[bool]]
"""Returns whether a principal (None: not authenticated) may watch a feature, or the URI or pattern of a resource."""


class Authorization:
    """Calls the user's `authorize` function, if there is one."""

    def __init__(self, authorize: Authorize | None = None) -> None:
        self._authorize = authorize
        self.allows_patterns = authorize is None or not inspect.iscoroutinefunction(authorize)
        """Whether patterns can be watched: the hub calls `authorize` for each URI that matches when it changes, and
        does not await."""
        self.is_restricted = authorize is not None
        """Whether a topic may be refused."""
        self._synchronous = authorize if self.allows_patterns else None
        self._anonymous = MayWatch(self._synchronous, None)

    async def filter(self, principal: Principal | None, topics: Iterable[Topic]) -> list[Topic]:
        """Return the topics that the principal may watch."""
        if self._authorize is None:
            return list(topics)
        import asyncio  # not with the module: `from tidings import Principal` needs no event loop

        allowed: list[Topic] = []
        for number, topic in enumerate(topics, 1):
            if number % _CALLS_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                answer = self._authorize(principal, topic)
                if not isinstance(answer, bool) and inspect.isawaitable(answer):
                    # A function that returns an awaitable, without being declared `async`, can't be called for
                    # the URIs that a pattern matches either.
                    answer = await answer and not (isinstance(topic, str) and is_pattern(topic))
                if answer:
                    allowed.append(topic)
            except Exception:  # the user's function; in doubt refuse
                logger.exception("authorize() failed for %r; refusing", topic_name(topic))
        return allowed

    def predicate(self, principal: Principal | None) -> MayWatch | None:
        """Return a function that says whether the principal may be notified of a URI that it did not name itself, but
        watches through a pattern or as part of another resource. None: it may be notified of all."""
        if self._authorize is None:
            return None
        return self._anonymous if principal is None else MayWatch(self._synchronous, principal)


class MayWatch:
    """Decides whether one principal may watch a URI. A closure would take five times the memory."""

    __slots__ = ("_authorize", "principal")

    def __init__(self, authorize: Authorize | None, principal: Principal | None) -> None:
        self._authorize = authorize
        self.principal = principal

    def __call__(self, uri: str) -> bool:
        if self._authorize is None:
            return False  # it would have to be awaited
        try:
            answer = self._authorize(self.principal, uri)
            if isinstance(answer, bool) or not inspect.isawaitable(answer):
                return bool(answer)
            if inspect.iscoroutine(answer):
                answer.close()
        except Exception:  # as in `filter`
            logger.exception("authorize() failed for %r; refusing", redact_uri(uri))
        return False
