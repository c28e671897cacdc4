"""Every knob, in one frozen value. A default is a decision: its reason stands beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from tidings.core.model import Feature, Priority, Topic
from tidings.core.patterns import Match, compile_pattern
from tidings.errors import InvalidPolicy

__all__ = ["Detail", "Policy"]

Detail: TypeAlias = Literal["full", "delta", "summary", "none"]
Callers: TypeAlias = Literal["none", "principals", "anyone"]

_LONGEST_TTL = 100 * 365 * 24 * 3600
"""Seconds: what is kept for ever ends at a date that no calendar has, and that JSON can't say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How much is said, how often, and how much is kept. A subscriber may have its own."""

    detail: Detail = "full"
    """How much a notification says: the item itself, only its changed fields (in `_meta`), only the summary (there
    too), or nothing (the plain specification). Full, because every client tested accepts the extra members and it saves
    those who read them a refetch."""

    quiet_gap: float = 0.0
    """Seconds without a further change of a topic before it is told. None by default: a reader that keeps up hears of
    each change at once, one that doesn't gets them together anyway."""

    longest_wait: float = 1.0
    """Seconds after which a topic is told although the gap never came, so that a busy source can't starve anyone."""

    min_interval: float = 0.0
    """Seconds between two notifications of one topic to one subscriber. The last change is always told. A default: a
    client may ask for less, or call a resource urgent; `terms=` is what binds."""

    spread: float = 0.0
    """Seconds over which the notifications of one change are spread, each subscriber having its own place in them, so
    that 10,000 refetches don't arrive at once. None by default: few servers have so many clients, and a change is worth
    most when it is new. What is urgent is not spread, nor is what a client that comes back has missed."""

    priorities: tuple[tuple[str, Priority], ...] = ()
    """(URI or pattern, priority) pairs; the first that matches counts. Lists are HIGH and contents NORMAL otherwise: a
    list decides what else a client may ask for."""

    subresources: bool = True
    """Whether a subscription to `a://b` covers `a://b/c`. The specification lets a server do so, and clients that
    subscribe to a folder expect it."""

    mute_list_changed: frozenset[str] = frozenset({"2025-03-26"})
    """Protocol versions whose sessions are never told of list changes. The version does define them; silence there is
    what servers of its time did and what the folder servers that we replace promise their clients."""

    announce: bool = False
    """Whether a new legacy session is told of every list once. For servers whose clients wait for it, as those of
    folders do; modern streams never get it, since the specification forbids what nobody asked for."""

    keep_alive: float = 15.0
    """Seconds between two comments on an idle stream: shorter than the idle time-outs of common proxies."""

    write_deadline: float = 20.0
    """Seconds that a reader may not read before it is cut off. Long enough for a laptop that wakes up, short enough
    for a socket's buffers not to be held by the dead."""

    max_streams: int = 50_000
    """Open streams and sessions in all: more than one process can serve well."""

    max_streams_per_principal: int | None = 1_000
    """Of one authenticated caller. A fleet of agents under one token is hundreds; more is a loop that reconnects."""

    max_streams_per_address: int | None = None
    """Of one address. No limit, since behind a proxy all clients have the same one."""

    list_ttl: float = 0.0
    """Seconds that a client may keep a list without asking again. None: whoever listens is told, and who doesn't
    must not be served a stale list. Never shorter on the wire than `spread`: whoever listens is told no sooner."""

    list_memory: float = 1.0
    """Seconds that an encoded list is used before the server is asked again: what nobody noticed, a tool changed in
    place say, shows when somebody asks after so long."""

    max_item_bytes: int = 1 << 20
    """The JSON of one item. A definition past 1 MiB is a mistake, and would be copied into every notification."""

    max_changes_per_frame: int = 64
    """Past this a client does better to refetch the list than to apply changes one by one."""

    max_pending: int = 10_000
    """Topics that may wait for one subscriber; past it, the subscriber is closed. Only a subscription to a pattern can
    reach it, and about 1 MB is what one reader may cost."""

    max_uris: int = 10_000
    """Subscriptions to URIs and patterns of one subscriber."""

    max_patterns: int = 1_000
    """Of those, patterns. A client chooses them, and at worst every one has to be tried for every update."""

    max_contents: int = 100_000
    """Resources whose content version is remembered; the one longest unchanged is forgotten first, which costs at most
    one notification too many."""

    journal_changes: int = 10_000
    """Changes that are remembered per feature, and as many of contents."""

    journal_age: float = 24 * 3600.0
    """Seconds that a change is remembered. A client that was away for longer does better to refetch."""

    journal_bytes: int = 16 << 20
    """Bytes of definitions that the changes of one feature may keep, and as many of contents: 10,000 changes of common
    tools are a tenth of it, and a server of giant ones must not fill the memory."""

    durable_ttl: float = 7 * 24 * 3600.0
    """Seconds that a durable subscription is kept without its client, who may ask for less: a holiday's length."""

    max_durables: int = 10_000
    """Durable subscriptions in all: each costs memory, and room in the store, whether or not its client comes back."""

    max_durables_per_principal: int = 100
    """Of one authenticated caller: a name is one agent or one machine of its, not one per start."""

    webhooks: Callers = "principals"
    """Who may have changes delivered to a URL: no client ("none"), those that the server's authentication knows, or
    anyone. Not anyone, because a stranger could aim this server's requests at others."""

    webhook_private: bool = False
    """Whether a webhook may lead to this machine or into a private network, where a client might reach through the
    server what it can't reach itself."""

    webhook_timeout: float = 10.0
    """Seconds that a receiver has to answer: it is to take a delivery, and do its work later."""

    webhook_backoff: float = 5.0
    """Seconds after the first failure of a webhook until it is tried again; twice as long each time, up to an hour."""

    webhook_attempts: int = 20
    """Failures in a row after which a webhook is given up: with the times above, after a night."""

    def __post_init__(self) -> None:
        if self.webhooks not in get_args(Callers):
            raise InvalidPolicy(f"webhooks is {self.webhooks!r}; it must be one of {', '.join(get_args(Callers))}")
        for name in ("webhook_timeout", "webhook_backoff"):
            self._check(name, getattr(self, name), (int, float), 0.001)
        self._check("webhook_attempts", self.webhook_attempts, (int,), 1)
        if self.detail not in get_args(Detail):
            raise InvalidPolicy(f"detail is {self.detail!r}; it must be one of {', '.join(get_args(Detail))}")
        for name in ("quiet_gap", "longest_wait", "min_interval", "spread", "journal_age", "list_ttl", "list_memory"):
            self._check(name, getattr(self, name), (int, float), 0)
        self._check("durable_ttl", self.durable_ttl, (int, float), 0)
        if self.durable_ttl > _LONGEST_TTL:
            raise InvalidPolicy(f"durable_ttl is {self.durable_ttl!r}; it must be at most {_LONGEST_TTL}, 100 years")
        for name in ("keep_alive", "write_deadline"):
            self._check(name, getattr(self, name), (int, float), 0.001)
        for name in ("max_streams", "max_streams_per_principal", "max_streams_per_address"):
            if (value := getattr(self, name)) is not None or name == "max_streams":
                self._check(name, value, (int,), 1)
        for name in ("max_item_bytes", "max_changes_per_frame", "max_pending"):
            self._check(name, getattr(self, name), (int,), 1)
        for name in ("max_uris", "max_patterns", "max_contents", "journal_changes", "journal_bytes"):
            self._check(name, getattr(self, name), (int,), 0)
        for name in ("max_durables", "max_durables_per_principal"):
            self._check(name, getattr(self, name), (int,), 0)
        if self.quiet_gap > self.longest_wait:
            raise InvalidPolicy(
                f"quiet_gap ({self.quiet_gap} s) is longer than longest_wait ({self.longest_wait} s), "
                "so the gap could never come; raise longest_wait"
            )
        object.__setattr__(self, "priorities", _priority_pairs(self.priorities))
        versions: Iterable[str] = self.mute_list_changed
        object.__setattr__(self, "mute_list_changed", frozenset([versions] if isinstance(versions, str) else versions))

    @staticmethod
    def _check(name: str, value: Any, kinds: Any, least: float) -> None:
        # Not `value < least`: a NaN must not pass.
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value:
            raise InvalidPolicy(f"{name} is {value!r}; it must be a number of at least {least}")

    @property
    def has_delays(self) -> bool:
        """Whether anything is ever held back although its reader is ready."""
        return self.quiet_gap > 0 or self.min_interval > 0 or self.spread > 0

    def ttl_ms(self, own: int | None = None) -> int:
        """`ttlMs` of list results, where the server has its `own` or none: within the spread a client is as up to date
        as one that listens may be, and asking again sooner would bring the herd back that the spread is there to
        disperse."""
        return max(own or math.ceil(self.list_ttl * 1000), math.ceil(self.spread * 1000))

    def priority(self, topic: Topic) -> Priority:
        if isinstance(topic, Feature):
            return Priority.HIGH
        for uri, priority in self.priorities:
            if _matcher(uri)(topic):
                return priority
        return Priority.NORMAL

    def but(self, **knobs: Any) -> Policy:
        """The same policy with some knobs turned."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(knobs.keys() - known):
            raise InvalidPolicy(f"no such knob: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return replace(self, **knobs)


@lru_cache(4_096)  # clients choose some of them
def _matcher(pattern: str) -> Match:
    return compile_pattern(pattern)


def _priority_pairs(given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Priority], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        chosen = tuple(
            (uri, Priority[value.upper()] if isinstance(value, str) else Priority(value)) for uri, value in pairs
        )
        for uri, _ in chosen:
            _matcher(uri)
        return chosen
    except (KeyError, ValueError, TypeError) as error:
        names = ", ".join(priority.name.lower() for priority in Priority)
        raise InvalidPolicy(f"priorities must map URIs or patterns to one of {names}: {error}") from None
