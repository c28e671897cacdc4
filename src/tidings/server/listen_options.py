"""The options that a client gives beyond the specification: a cursor, a durable name, and how to be notified.

They are in the `_meta` of `subscriptions/listen`, or of `initialize`. A client whose SDK can't send `_meta` there (for
example the `Client` of the Python SDK) puts them into its settings of the extension: `capabilities.extensions` (legacy:
`experimental`) with `{"dev.tidings/changes": {"resume": …, "filter": …, "durable": …}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidings.core.filters import Terms
from tidings.core.frames import DURABLE_KEY, EXTENSION, FILTER_KEY, RESUME_KEY, FrameFormat
from tidings.core.hub import Hub
from tidings.policy import Policy

__all__ = ["ABSENT", "ListenOptions"]

ABSENT: Final[Any] = object()
"""In place of an option that the client did not give."""

_NO_TERMS = Terms()


class ListenOptions:
    """The options of one client, as far as this server grants them."""

    __slots__ = ("_requested_terms", "durable", "filter", "has_terms", "is_extended", "resume", "settings", "terms")

    def __init__(self, meta: object, capabilities: object) -> None:
        """`meta` and `capabilities` are the client's: any JSON value."""
        given = meta if isinstance(meta, Mapping) else {}
        settings = _extension_settings(capabilities)
        self.is_extended = settings is not None
        """Whether the client declared `dev.tidings/changes`."""
        settings = settings or {}
        self.resume = given.get(RESUME_KEY, settings.get("resume", ABSENT))
        self.durable = given.get(DURABLE_KEY, settings.get("durable", ABSENT))
        self._requested_terms = given.get(FILTER_KEY, settings.get("filter", ABSENT))

    def grant(self, hub: Hub, bounds: Terms | None, remembered: Mapping[str, Any]) -> None:
        """Set `terms`, `filter` and `settings` of the subscription.

        `bounds` are the terms that the server sets for this caller. `remembered` are those of the client's durable
        subscription: they count if the client gives none this time."""
        requested = self._requested_terms
        if requested is ABSENT and remembered:
            requested = remembered
        self.has_terms = requested is not ABSENT or bounds is not None
        if not self.has_terms:
            self.terms, self.filter, self.settings = _NO_TERMS, None, hub.settings
            return
        policy = hub.policy
        self.terms = Terms.parse(requested, policy)
        self.filter = self.terms.filter
        if bounds is not None:
            # Both filters apply. No single list of patterns can express two lists of which both must match.
            self.filter = self.filter.narrowed(bounds.filter) if self.filter else bounds.filter
            self.terms = self.terms.within(bounds, policy)
        self.settings = self.terms.policy(policy).delivery

    @property
    def durable_name(self) -> str | None:
        """The name of the durable subscription that the client asks for, if it is one."""
        name = self.durable.get("name") if isinstance(self.durable, Mapping) else None
        return name if isinstance(name, str) else None

    @property
    def uses_extension(self) -> bool:
        """Whether the client gave any option, and so reads the options in the acknowledgement."""
        return self.is_extended or self.has_terms or self.resume is not ABSENT or self.durable is not ABSENT

    def frame_format(self, policy: Policy, epoch: str, *, is_sse: bool = False, is_tagged: bool = False) -> FrameFormat:
        omits_items = self.terms.detail in ("summary", "none")
        return FrameFormat(
            self.terms.detail or policy.detail,
            policy.max_changes_per_frame,
            is_sse,
            is_tagged,
            self.is_extended,
            epoch,
            omits_items,
        )


def _extension_settings(capabilities: object) -> Mapping[str, Any] | None:
    """Return the client's settings of the extension; None if it did not declare the extension."""
    if not isinstance(capabilities, Mapping):
        return None
    for declared in (capabilities.get("extensions"), capabilities.get("experimental")):
        if isinstance(declared, Mapping) and EXTENSION in declared:
            return declared[EXTENSION] if isinstance(declared[EXTENSION], Mapping) else {}
    return None
