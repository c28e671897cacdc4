"""All settings, in one frozen dataclass. Each default has its reason beside it.

A policy decides nothing: the other modules read it. docs/policy.md has the same texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from tidings.core.delivery_settings import DeliverySettings, priority_matcher
from tidings.core.model import Priority
from tidings.errors import InvalidPolicy

__all__ = ["Detail", "Policy"]

Detail: TypeAlias = Literal["full", "delta", "summary", "none"]
Callers: TypeAlias = Literal["none", "principals", "anyone"]
ListOrder: TypeAlias = Literal["server", "name"]

_MAX_TTL = 100 * 365 * 24 * 3600
"""Seconds. A later end has no ISO 8601 date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings of what is sent, how often, and how much is kept."""

    detail: Detail = "full"
    """How much a notification says: `"full"`, `"delta"`, `"summary"` or `"none"`. Full, because every client that was
    tested accepts the extra members, and clients that read them save a refetch."""

    quiet_gap: float = 0.0
    """Seconds without a further change of a topic before it is sent. 0: the changes of one turn of the event loop are
    sent together, without a timer, and a slow reader gets more of them together anyway."""

    longest_wait: float = 1.0
    """Seconds after which a topic is sent although the quiet gap has not come, so that a source that changes all the
    time cannot block it."""

    min_interval: float = 0.0
    """Seconds between two notifications of one topic to one subscriber. The last change is always sent. A client may
    ask for a shorter interval, or call a resource urgent; `terms=` sets a limit."""

    priorities: tuple[tuple[str, Priority], ...] = ()
    """Pairs of (URI or pattern, priority); the first match counts. Otherwise lists are HIGH and contents NORMAL,
    because a list decides what else a client may ask for."""

    subresources: bool = True
    """Whether a subscription to `a://b` covers `a://b/c`. The specification allows it, and clients that subscribe to a
    folder expect it."""

    mute_list_changed: frozenset[str] = frozenset({"2025-03-26"})
    """Protocol versions whose sessions get no list changes. The version defines them, but servers of that time did not
    send them, and the folder servers that Tidings replaces promise not to."""

    announce: bool = False
    """Whether a new legacy session gets one notification per list. For clients that wait for it, as those of folder
    servers do. Modern streams never get it: the specification forbids notifications that the client did not ask for."""

    keep_alive: float = 15.0
    """Seconds between two comments on an idle stream: shorter than the idle timeouts of common proxies."""

    write_deadline: float = 20.0
    """Seconds without reading after which a stream is closed. Long enough for a laptop that wakes up, short enough that
    dead connections do not hold socket buffers."""

    max_streams: int = 50_000
    """Open streams and sessions in total: more than one process can serve well."""

    max_streams_per_principal: int | None = 1_000
    """Streams of one authenticated caller. A fleet of agents under one token has hundreds; more is a reconnect loop."""

    max_streams_per_address: int | None = None
    """Streams of one address. No limit, because behind a proxy all clients have the same address."""

    authorize_interval: float = 300.0
    """Seconds after which `authorize` is called again for all that an open stream watches. 5 minutes: rights that are
    withdrawn must not last as long as a stream, and an `authorize` that asks a database is called once per topic in
    that time. 0: never."""

    list_ttl: float = 0.0
    """Seconds that a client may keep a list without asking again (`ttlMs`). 0: a client that does not listen must not
    use an old list."""

    list_max_age: float = 1.0
    """Seconds that an encoded list is used before the server is asked again. A change that Tidings did not notice (a
    tool changed in place) is found then. A list that takes much CPU is used longer: 50 times that CPU time, at most a
    minute, so that this takes at most 2 % of a core. With 0, every request asks the server."""

    list_order: ListOrder = "server"
    """The order of lists: `"server"`, as the server returns them, or `"name"` (resources by URI). The server's own,
    because an author may put the most important item first, and a model reads the list in this order. A workspace
    lists by name in any case: the files of a folder have no other order. Another order alone causes no notification."""

    max_item_bytes: int = 1 << 20
    """Bytes of the JSON of one item. A definition of more than 1 MiB is a mistake, and would be copied into every
    notification."""

    max_changes_per_frame: int = 64
    """Changes in one notification. With more, fetching the list is cheaper for a client than applying the changes."""

    max_pending: int = 10_000
    """Topics that may be pending for one subscriber; with more it is closed. Only a subscription to a pattern can reach
    this. One reader costs at most about 1 MB."""

    max_uris: int = 10_000
    """URIs and patterns that one subscriber may watch."""

    max_patterns: int = 1_000
    """Patterns among those, of 64 characters, 8 segments, 4 wildcards and one template variable on average. A client
    chooses them, and in the worst case each is tried for every update."""

    max_watched: int = 250_000
    """URIs that all streams and sessions may watch together: about 100 MB. A URI counts once more for every 256
    characters. A glob counts ten times and a template fifty times, because each also takes time for every
    update."""

    max_watched_per_caller: int | None = 50_000
    """The same for one authenticated caller, or for one address without authentication: one caller must not use up
    `max_watched`. Raise it for many anonymous clients behind one proxy."""

    max_contents: int = 100_000
    """Resources whose content version is remembered. The one unchanged for longest is forgotten first, which costs at
    most one unnecessary notification."""

    journal_changes: int = 10_000
    """Changes that are kept per feature, and as many for contents."""

    journal_age: float = 24 * 3600.0
    """Seconds that a change is kept. For a client that was away for longer, refetching is better."""

    journal_bytes: int = 16 << 20
    """Bytes of definitions that the changes of one feature may keep, and as many for contents. 10,000 changes of usual
    tools need a tenth of it; very large tools must not fill the memory."""

    durable_ttl: float = 7 * 24 * 3600.0
    """Seconds that a durable subscription is kept while its client is not connected. A client may ask for less. 7 days,
    so that it survives a holiday. At most 100 years."""

    max_durables: int = 10_000
    """Durable subscriptions in total. Each costs memory and disk space, whether or not its client comes back."""

    max_durable_bytes: int = 16 << 20
    """Bytes of the URIs and patterns of all durable subscriptions together. They are kept in memory and in the store.
    Enough for 10,000 subscriptions with about 20 URIs each."""

    max_durables_per_principal: int = 100
    """Durable subscriptions of one authenticated caller: one per agent or machine, not one per start."""

    webhooks: Callers = "principals"
    """The callers that may create webhooks or subscribe to events: `"none"`, `"principals"` (authenticated callers), or
    `"anyone"`. With `"anyone"`, a stranger could make this server send requests to others."""

    webhook_private: bool = False
    """Whether a webhook may lead to this machine or into a private network, which a client could otherwise reach
    through the server."""

    webhook_timeout: float = 10.0
    """Seconds in which a receiver has to answer: it should accept a delivery and do its work later."""

    webhook_backoff: float = 5.0
    """Seconds until the first retry of a webhook; doubled each time, up to an hour."""

    webhook_attempts: int = 20
    """Failures in a row after which Tidings stops delivering to a webhook: with the times above, after about 10
    hours."""

    def __post_init__(self) -> None:
        self._check_choice("webhooks", get_args(Callers))
        self._check_choice("detail", get_args(Detail))
        self._check_choice("list_order", get_args(ListOrder))
        for name in ("quiet_gap", "longest_wait", "min_interval", "journal_age", "list_ttl", "list_max_age"):
            self._check_number(name, (int, float), 0)
        for name in ("keep_alive", "write_deadline", "webhook_timeout", "webhook_backoff"):
            self._check_number(name, (int, float), 0.001)
        for name in ("max_streams", "max_item_bytes", "max_changes_per_frame", "max_pending", "webhook_attempts"):
            self._check_number(name, (int,), 1)
        for name in ("max_streams_per_principal", "max_streams_per_address", "max_watched_per_caller"):
            if getattr(self, name) is not None:
                self._check_number(name, (int,), 1)
        for name in ("max_uris", "max_patterns", "max_contents", "journal_changes", "journal_bytes"):
            self._check_number(name, (int,), 0)
        for name in ("max_watched", "max_durables", "max_durable_bytes", "max_durables_per_principal"):
            self._check_number(name, (int,), 0)
        for name in ("authorize_interval", "durable_ttl"):
            self._check_number(name, (int, float), 0)
        if self.durable_ttl > _MAX_TTL:
            raise InvalidPolicy(f"durable_ttl is {self.durable_ttl!r}; it must be at most {_MAX_TTL}, 100 years")
        if self.quiet_gap > self.longest_wait:
            raise InvalidPolicy(
                f"quiet_gap ({self.quiet_gap} s) is longer than longest_wait ({self.longest_wait} s), "
                "so the gap would have no effect; raise longest_wait"
            )
        object.__setattr__(self, "priorities", _priority_pairs(self.priorities))
        versions: Iterable[str] = self.mute_list_changed
        object.__setattr__(self, "mute_list_changed", frozenset([versions] if isinstance(versions, str) else versions))

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if (value := getattr(self, name)) not in choices:
            raise InvalidPolicy(f"{name} is {value!r}; it must be one of {', '.join(choices)}")

    def _check_number(self, name: str, types: Any, minimum: float) -> None:
        value: Any = getattr(self, name)
        # Not `value < minimum`, because NaN must not pass.
        if isinstance(value, bool) or not isinstance(value, types) or not minimum <= value:
            raise InvalidPolicy(f"{name} is {value!r}; it must be a number of at least {minimum}")

    @property
    def delivery(self) -> DeliverySettings:
        """The settings that delivery to a subscriber reads."""
        return DeliverySettings(self.quiet_gap, self.longest_wait, self.min_interval, self.priorities, self.max_pending)

    def ttl_ms(self, own: int | None = None) -> int:
        """Return the `ttlMs` of list results. `own` is the value that the server set, or None."""
        return own or math.ceil(self.list_ttl * 1000)

    def replace(self, **settings: Any) -> Policy:
        """Return the same policy with some settings changed."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(settings.keys() - known):
            raise InvalidPolicy(f"no such setting: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return replace(self, **settings)


def _priority_pairs(given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Priority], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        parsed = tuple(
            (uri, Priority[value.upper()] if isinstance(value, str) else Priority(value)) for uri, value in pairs
        )
        for uri, _ in parsed:
            priority_matcher(uri)
        return parsed
    except (KeyError, ValueError, TypeError) as error:
        names = ", ".join(priority.name.lower() for priority in Priority)
        raise InvalidPolicy(f"priorities must map URIs or patterns to one of {names}: {error}") from None
