"""How one subscriber wants to be told: what counts, how often, in how much detail.

A client asks in `_meta["dev.tidings/filter"]`, and finds in the acknowledgement what was honoured; a server may set
terms of its own, within which the client's apply. Whatever can't be honoured is left out, and is never an error: a
client that asks for too much still hears of every change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, structs

from tidings.core.model import Change, Feature, Operation
from tidings.core.patterns import Match, compile_pattern
from tidings.errors import InvalidPattern
from tidings.policy import Detail, Policy

__all__ = ["Filter", "Terms"]

_LONGEST = 3600.0
"""Seconds. Who wants to hear of changes less often than every hour does better to ask."""
_MOST_PATTERNS = 64
"""Of one kind. A client chooses them, and at worst every one is tried for every change."""

_Value = TypeVar("_Value")
_Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
_Pattern: TypeAlias = Annotated[str, Meta(max_length=1_000)]
_Patterns: TypeAlias = Annotated[tuple[_Pattern, ...], Meta(max_length=_MOST_PATTERNS)]
_Level: TypeAlias = Literal["urgent", "high", "normal", "low"]

_DETAILS: tuple[Detail, ...] = ("none", "summary", "delta", "full")
"""From the least to the most."""


class Filter:
    """Which changes of a *list* count for a subscriber. Contents are chosen by the URIs that it subscribed to."""

    __slots__ = ("_hash", "_matches", "also", "names", "operations", "uris")

    def __init__(
        self,
        operations: Iterable[Operation | str] | None = None,
        names: Iterable[str] | None = None,
        uris: Iterable[str] | None = None,
        *,
        also: Filter | None = None,
    ) -> None:
        """`names` are globs of tools and prompts, `uris` of resources; what passes must pass `also` too."""
        # A lone text is one name, not its letters.
        self.operations = None if operations is None else frozenset(map(Operation, _each(operations)))
        self.names = None if names is None else tuple(_each(names))
        self.uris = None if uris is None else tuple(_each(uris))
        self.also = also
        named, located = _compiled(self.names), _compiled(self.uris)
        self._matches = {Feature.TOOLS: named, Feature.PROMPTS: named, Feature.RESOURCES: located}
        self._hash = hash(self._identity)

    def passes(self, change: Change) -> bool:
        if self.operations is not None and change.operation not in self.operations:
            return False
        matches = self._matches.get(change.topic)  # type: ignore[arg-type]
        if matches is not None and not any(match(change.key) for match in matches):
            return False
        return self.also is None or self.also.passes(change)

    def narrowed(self, by: Filter | None) -> Filter:
        """What passes both."""
        return self if by is None else Filter(self.operations, self.names, self.uris, also=by)

    @property
    def _identity(self) -> tuple[object, ...]:
        return (self.operations, self.names, self.uris, self.also)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Filter) and self._identity == other._identity)

    def __hash__(self) -> int:
        return self._hash


class Terms(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    operations: (
        Annotated[tuple[Literal["added", "removed", "updated"], ...], Meta(max_length=_MOST_PATTERNS)] | None
    ) = None
    """Which changes of a list count."""
    names: _Patterns | None = None
    """Globs: of which tools and prompts changes count."""
    uris: _Patterns | None = None
    """Globs: of which resources changes of the list count. Contents are chosen by subscribing to them."""
    min_interval: _Seconds | None = None
    quiet_gap: _Seconds | None = None
    longest_wait: _Seconds | None = None
    detail: Detail | None = None
    priorities: Annotated[dict[_Pattern, _Level], Meta(max_length=_MOST_PATTERNS)] | None = None
    """URIs or globs, and how soon their contents are told when several wait; the first that matches counts."""
    bookmarks: bool = False
    """Whether heartbeats carry a cursor."""

    @classmethod
    def parse(cls, given: Any, policy: Policy | None = None) -> Terms:
        """What can be honoured of any JSON value at all."""
        if not isinstance(given, Mapping):
            return cls()
        policy = policy or Policy()
        taken: dict[str, Any] = {}
        for each in structs.fields(cls):
            if each.encode_name in given:
                try:
                    value = msgspec.convert(given[each.encode_name], each.type)
                except (msgspec.ValidationError, OverflowError):
                    continue
                if isinstance(value, float):
                    if math.isfinite(value):
                        taken[each.name] = min(value, _LONGEST)
                elif each.name not in _GLOBS or _are_globs(value, policy):
                    taken[each.name] = value
        return cls(**taken)._settled(policy)

    def as_json(self) -> dict[str, Any]:
        written: dict[str, Any] = msgspec.to_builtins(self)
        return written

    def within(self, bounds: Terms, policy: Policy | None = None) -> Terms:
        """These terms, as far as the server's own allow. That both filters count is a matter of `Filter.narrowed`."""
        operations = self.operations
        if operations is not None and bounds.operations is not None:
            operations = tuple(each for each in operations if each in bounds.operations)
        priorities = dict(self.priorities or {})
        if bounds.min_interval or bounds.quiet_gap:
            # What is urgent waits for nothing, and would lift the limit.
            priorities = {each: "high" if level == "urgent" else level for each, level in priorities.items()}
        return Terms(
            operations=_either(operations, bounds.operations),
            names=_either(self.names, bounds.names),
            uris=_either(self.uris, bounds.uris),
            min_interval=_larger(self.min_interval, bounds.min_interval),
            quiet_gap=_larger(self.quiet_gap, bounds.quiet_gap),
            longest_wait=_larger(self.longest_wait, bounds.longest_wait),
            detail=_lesser(self.detail, bounds.detail),
            # The first that matches counts: the server's.
            priorities={**(bounds.priorities or {}), **priorities, **(bounds.priorities or {})} or None,
            bookmarks=self.bookmarks or bounds.bookmarks,
        )._settled(policy or Policy())

    @property
    def filter(self) -> Filter | None:
        if self.operations is None and self.names is None and self.uris is None:
            return None
        return Filter(self.operations, self.names, self.uris)

    def policy(self, base: Policy) -> Policy:
        """The policy of this subscriber: the given one, unless it asked for something else."""
        terms = self._settled(base)
        knobs = {
            "min_interval": terms.min_interval,
            "quiet_gap": terms.quiet_gap,
            "longest_wait": terms.longest_wait,
            "detail": terms.detail,
            "priorities": None if terms.priorities is None else (*terms.priorities.items(), *base.priorities),
        }
        chosen = {name: value for name, value in knobs.items() if value is not None}
        return base.but(**chosen) if chosen else base

    def _settled(self, base: Policy) -> Terms:
        """A gap that is longer than the longest wait could never come: whichever was asked for counts."""
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


def _either(one: _Value | None, other: _Value | None) -> _Value | None:
    return other if one is None else one


def _larger(one: float | None, other: float | None) -> float | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _lesser(one: Detail | None, other: Detail | None) -> Detail | None:
    return min((each for each in (one, other) if each is not None), key=_DETAILS.index, default=None)


def _compiled(patterns: tuple[str, ...] | None) -> tuple[Match, ...] | None:
    return None if patterns is None else tuple(map(compile_pattern, patterns))


def _each(given: Iterable[str]) -> Iterable[str]:
    return [given] if isinstance(given, str) else given
