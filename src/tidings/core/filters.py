"""Filters, and the terms of a subscription: which changes a subscriber gets, how often, and in how much detail.

A `Filter` selects changes of lists. `Terms` are the options that a client requests in `_meta["dev.tidings/filter"]`;
the acknowledgement contains those that are granted. A server may set terms of its own, which limit the client's. A
term that cannot be granted is left out and is not an error, so the client gets more, never less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, structs

from tidings.core.model import Change, Feature, Operation
from tidings.core.patterns import Match, compile_pattern
from tidings.errors import InvalidPattern, InvalidPolicy
from tidings.policy import Detail, Policy

__all__ = ["Filter", "Terms"]

_MAX_SECONDS = 3600.0
"""A client that wants notifications less often than every hour should poll."""
_MAX_PATTERNS = 64
"""The most patterns of one kind. Clients choose the patterns, and in the worst case each is tried for every change."""

_Value = TypeVar("_Value")
_Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
_Patterns: TypeAlias = Annotated[tuple[str, ...], Meta(max_length=_MAX_PATTERNS)]
_Level: TypeAlias = Literal["urgent", "high", "normal", "low"]

_DETAILS: tuple[Detail, ...] = ("none", "summary", "delta", "full")
"""In ascending order."""


class Filter:
    """Selects the changes of *lists* for a subscriber. Contents are selected by subscribing to URIs."""

    __slots__ = ("_hash", "_matches", "also", "names", "operations", "uris")

    def __init__(
        self,
        operations: Iterable[Operation | str] | None = None,
        names: Iterable[str] | None = None,
        uris: Iterable[str] | None = None,
        *,
        also: Filter | None = None,
    ) -> None:
        """`names` are globs for tools and prompts, `uris` for resources. A change must pass `also` too."""
        self.operations = None if operations is None else frozenset(map(Operation, _as_list(operations)))
        self.names = None if names is None else tuple(_as_list(names))
        self.uris = None if uris is None else tuple(_as_list(uris))
        self.also = also
        names_match, uris_match = _compile(self.names), _compile(self.uris)
        self._matches = {Feature.TOOLS: names_match, Feature.PROMPTS: names_match, Feature.RESOURCES: uris_match}
        self._hash = hash(self._identity)

    def passes(self, change: Change) -> bool:
        if self.operations is not None and change.operation not in self.operations:
            return False
        matches = self._matches.get(change.topic)  # type: ignore[arg-type]
        if matches is not None and not any(match(change.key) for match in matches):
            return False
        return self.also is None or self.also.passes(change)

    def narrowed(self, by: Filter | None) -> Filter:
        """Return a filter for the changes that pass this one and another."""
        return self if by is None else Filter(self.operations, self.names, self.uris, also=by)

    @property
    def _identity(self) -> tuple[object, ...]:
        return (self.operations, self.names, self.uris, self.also)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Filter) and self._identity == other._identity)

    def __hash__(self) -> int:
        return self._hash


class Terms(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    operations: Annotated[tuple[Literal["added", "removed", "updated"], ...], Meta(max_length=_MAX_PATTERNS)] | None = (
        None
    )
    """The operations on lists that the client wants."""
    names: _Patterns | None = None
    """Globs for the tools and prompts whose changes the client wants."""
    uris: _Patterns | None = None
    """Globs for the resources whose list changes the client wants. Contents are selected by subscribing."""
    min_interval: _Seconds | None = None
    quiet_gap: _Seconds | None = None
    longest_wait: _Seconds | None = None
    detail: Detail | None = None
    priorities: Annotated[dict[str, _Level], Meta(max_length=_MAX_PATTERNS)] | None = None
    """The order of pending contents, by URI or glob; the first match counts."""
    bookmarks: bool = False
    """Whether heartbeats have a cursor."""

    def __post_init__(self) -> None:
        if self.detail is not None and self.detail not in _DETAILS:
            raise InvalidPolicy(f"Terms: detail is {self.detail!r}; it must be one of {', '.join(_DETAILS)}")

    @classmethod
    def parse(cls, given: Any, policy: Policy | None = None) -> Terms:
        """Parse any JSON value. Terms that cannot be granted are left out."""
        if not isinstance(given, Mapping):
            return cls()
        policy = policy or Policy()
        granted: dict[str, Any] = {}
        for term in structs.fields(cls):
            if term.encode_name in given:
                try:
                    value = msgspec.convert(given[term.encode_name], term.type)
                except (msgspec.ValidationError, OverflowError):
                    continue
                if isinstance(value, float):
                    if math.isfinite(value):
                        granted[term.name] = min(value, _MAX_SECONDS)
                elif term.name not in _GLOBS or _are_globs(value, policy):
                    granted[term.name] = value
        return cls(**granted)._with_consistent_times(policy)

    def as_json(self) -> dict[str, Any]:
        written: dict[str, Any] = msgspec.to_builtins(self)
        return written

    def within(self, bounds: Terms, policy: Policy | None = None) -> Terms:
        """Return these terms, limited by those of the server. `Filter.narrowed` combines filters."""
        operations = self.operations
        if operations is not None and bounds.operations is not None:
            operations = tuple(operation for operation in operations if operation in bounds.operations)
        priorities = dict(self.priorities or {})
        if bounds.min_interval or bounds.quiet_gap:
            # The server's times would not apply to an urgent content.
            priorities = {uri: "high" if level == "urgent" else level for uri, level in priorities.items()}
        return Terms(
            operations=_first(operations, bounds.operations),
            names=_first(self.names, bounds.names),
            uris=_first(self.uris, bounds.uris),
            min_interval=_larger(self.min_interval, bounds.min_interval),
            quiet_gap=_larger(self.quiet_gap, bounds.quiet_gap),
            longest_wait=_larger(self.longest_wait, bounds.longest_wait),
            detail=_lesser(self.detail, bounds.detail),
            # The first match counts, so the server's come first.
            priorities={**(bounds.priorities or {}), **priorities, **(bounds.priorities or {})} or None,
            bookmarks=self.bookmarks or bounds.bookmarks,
        )._with_consistent_times(policy or Policy())

    @property
    def filter(self) -> Filter | None:
        if self.operations is None and self.names is None and self.uris is None:
            return None
        return Filter(self.operations, self.names, self.uris)

    def policy(self, base: Policy) -> Policy:
        """Return the given policy with these terms."""
        terms = self._with_consistent_times(base)
        settings = {
            "min_interval": terms.min_interval,
            "quiet_gap": terms.quiet_gap,
            "longest_wait": terms.longest_wait,
            "detail": terms.detail,
            "priorities": None if terms.priorities is None else (*terms.priorities.items(), *base.priorities),
        }
        chosen = {name: value for name, value in settings.items() if value is not None}
        return base.replace(**chosen) if chosen else base

    def _with_consistent_times(self, base: Policy) -> Terms:
        """Return terms whose gap is not longer than the longest wait. The one that the client asked for counts."""
        gap = base.quiet_gap if self.quiet_gap is None else self.quiet_gap
        wait = base.longest_wait if self.longest_wait is None else self.longest_wait
        if gap <= wait:
            return self
        if self.longest_wait is None:
            return structs.replace(self, longest_wait=gap)
        return structs.replace(self, quiet_gap=wait)


_GLOBS = frozenset({"names", "uris", "priorities"})


def _are_globs(patterns: Collection[str] | None, policy: Policy) -> bool:
    return patterns is None or (len(patterns) <= policy.max_patterns and all(map(_is_glob, patterns)))


def _is_glob(pattern: str) -> bool:
    try:
        compile_pattern(pattern)
    except InvalidPattern:
        return False
    return True


def _first(one: _Value | None, other: _Value | None) -> _Value | None:
    return other if one is None else one


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _lesser(one: Detail | None, other: Detail | None) -> Detail | None:
    return min((value for value in (one, other) if value is not None), key=_DETAILS.index, default=None)


def _compile(patterns: tuple[str, ...] | None) -> tuple[Match, ...] | None:
    return None if patterns is None else tuple(map(compile_pattern, patterns))


def _as_list(given: Iterable[str]) -> Iterable[str]:
    return [given] if isinstance(given, str) else given
