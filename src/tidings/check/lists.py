"""Check the order of the lists, and the cache hints of the results."""

from __future__ import annotations

from typing import Any

from tidings.check.listing import ServerList
from tidings.check.run import Run
from tidings.wire.methods import DISCOVER, READ_RESOURCE
from tidings.wire.session import Frame, Session

__all__ = ["check_cache_hints", "check_order", "check_public"]

_SCOPES = ("public", "private")
_NOT_COMPARED = ("_meta", "nextCursor", "ttlMs", "cacheScope")


async def check_order(run: Run) -> None:
    """Compare the lists of several sessions. On stdio, each session is a new process."""
    listings: list[tuple[Session, dict[str, ServerList]]] = list(run.before.items())
    for first in run.sessions:
        listings += [(first, await run.lists(first)) for _ in range(2)]
        other = await run.open(first.era)
        listings.append((other, await run.lists(other)))
        for url in run.options.replicas:
            replica = await run.open(first.era, url=url)
            listings.append((replica, await run.lists(replica)))
    for method in dict.fromkeys(method for _, found in listings for method in found):
        first_session, first_lists = next(each for each in listings if method in each[1])
        expected = first_lists[method]
        for session, found in listings:
            listing = found.get(method)
            # Only the order is compared: sessions may have different items.
            if listing is None or set(listing.keys) != set(expected.keys) or listing.keys == expected.keys:
                continue
            message = f"{method} has another order in {session.channel} than in {first_session.channel}"
            run.report.add("list-order", message, [*expected.pages[:1], *listing.pages[:1]])
            break
    run.passed("list-order")


async def check_cache_hints(run: Run) -> None:
    if run.modern is None:
        run.skip(["cache-hints"], run.missing["modern"])
        return
    answers = {method: listing.pages for method, listing in run.before[run.modern].items()}
    if run.modern.discovery is not None:
        answers[DISCOVER] = [run.modern.discovery]
    if run.uris:
        answers[READ_RESOURCE] = [await run.modern.request(READ_RESOURCE, uri=run.uris[0])]
    for method, frames in answers.items():
        for frame in frames:
            if frame.result is not None and (problem := _find_problem(frame.result)):
                run.report.add("cache-hints", f"the result of {method} has {problem}", [frame])
    run.passed("cache-hints")


def _find_problem(result: dict[str, Any]) -> str | None:
    ttl, scope = result.get("ttlMs"), result.get("cacheScope")
    if not isinstance(ttl, int | float) or isinstance(ttl, bool) or ttl < 0:
        return "no ttlMs" if ttl is None else f"the ttlMs {ttl!r}"
    if scope not in _SCOPES:
        return "no cacheScope" if scope is None else f"the cacheScope {scope!r}"
    return None


async def check_public(run: Run) -> None:
    if run.modern is None:
        run.skip(["cache-public"], run.missing["modern"])
        return
    if run.options.second_token is None:
        run.skip(["cache-public"], "a second token is needed: --second-auth-token-file")
        return
    first = run.before[run.modern]
    other = await run.open("modern", token=run.options.second_token)
    for method, listing in (await run.lists(other)).items():
        for mine, theirs in zip(first[method].pages if method in first else (), listing.pages, strict=False):
            if (_is_public(mine) or _is_public(theirs)) and _content(mine) != _content(theirs):
                message = f"{method} is public, and the two tokens get different results"
                run.report.add("cache-public", message, [mine, theirs])
    run.passed("cache-public")


def _is_public(frame: Frame) -> bool:
    return (frame.result or {}).get("cacheScope") == "public"


def _content(frame: Frame) -> dict[str, Any]:
    """Return the members of the result that must be equal for two callers. A cursor may differ."""
    return {name: value for name, value in (frame.result or {}).items() if name not in _NOT_COMPARED}
