"""Run the checks in their order. Each check decides some of the rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tidings.check.capabilities import check_served, open_legacy_streams, open_listen_streams
from tidings.check.lifecycle import check_expiry, check_sessions, check_sigterm, check_slow_reader
from tidings.check.lists import check_cache_hints, check_order, check_public
from tidings.check.notifications import check_frames, check_unchanged
from tidings.check.report import Report
from tidings.check.rules import RULES
from tidings.check.run import CheckOptions, Run
from tidings.check.trigger import check_trigger
from tidings.errors import Disconnected
from tidings.wire.session import Unanswered

__all__ = ["check_target"]


class _Check(NamedTuple):
    title: str
    run: Callable[[Run], Awaitable[None]]
    rules: frozenset[str]
    is_needed_by_others: bool = False
    """Whether it opens the streams that later checks use."""


_STREAMS = frozenset(
    {"ack-received", "ack-first", "ack-subset", "frame-tag", "capability-granted", "capability-advertised"}
)
_CHECKS = (
    _Check("capabilities", check_served, frozenset({"capability-served"})),
    _Check("listen streams", open_listen_streams, _STREAMS, True),
    _Check("legacy streams", open_legacy_streams, frozenset({"get-stream", "subscribe-served"}), True),
    _Check("silence while nothing changes", check_unchanged, frozenset({"unchanged"})),
    _Check("order of lists", check_order, frozenset({"list-order"})),
    _Check("cache hints", check_cache_hints, frozenset({"cache-hints"})),
    _Check("public results", check_public, frozenset({"cache-public"})),
    _Check("unknown sessions", check_sessions, frozenset({"unknown-session"})),
    _Check("trigger", check_trigger, frozenset({"told", "told-once", "tool-callable", "unsubscribe"})),
    _Check("slow reader", check_slow_reader, frozenset({"slow-reader"})),
    _Check("SIGTERM", check_sigterm, frozenset({"sigterm", "graceful-end"})),
    _Check("expiry of the token", check_expiry, frozenset({"token-expiry"})),
    _Check(
        "messages of the streams", check_frames, frozenset({"not-requested", "buffering", "unsubscribe"}) | _STREAMS
    ),
)
_RULES_ON_STREAMS = _STREAMS | {
    *("get-stream", "subscribe-served", "unchanged", "not-requested", "buffering"),
    *("told", "told-once", "tool-callable", "unsubscribe"),
}


async def check_target(
    options: CheckOptions,
    rules: frozenset[str] = frozenset(RULES),
    on_progress: Callable[[str], None] = lambda title: None,
) -> Report:
    """Check a server. Raise `TidingsError` if it can't be reached, or if the trigger fails."""
    async with Run(options, on_progress) as run:
        on_progress("connecting")
        await run.connect()
        try:
            await run.read_first_lists()
        except Unanswered as error:
            raise Disconnected(f"{options.name} can't be checked: {error}") from None
        for check in _CHECKS:
            if not check.rules & rules and not (check.is_needed_by_others and rules & _RULES_ON_STREAMS):
                continue
            on_progress(check.title)
            try:
                await check.run(run)
            except Unanswered as error:
                run.report.problems.append(f"{check.title}: {error}")
                run.skip(sorted(check.rules), f"the server did not answer: {error}")
        run.report.select(set(rules))
        return run.report
