"""The extension methods, for clients of either era on any transport: what happened.

`dev.tidings/history` answers with past Changes, the oldest first, in pages. A caller sees no more of the past than it
may watch of the present.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import mcp_types as types
import msgspec
from mcp.server import ServerRequestContext
from mcp.shared.exceptions import MCPError
from pydantic import ConfigDict

from tidings.cursor import Cursor
from tidings.errors import TidingsError
from tidings.frames import EXTENSION
from tidings.gate import Principal
from tidings.history import Past, as_json
from tidings.lanes.front import principal_of
from tidings.model import Change, Topic

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["HISTORY", "ExtensionLane"]

HISTORY = "dev.tidings/history"

_PAGE = 200
"""Changes in one answer."""
_PAGE_BYTES = 1 << 20
"""Of items in one answer; one item may be as large by itself."""
_MOST_ASKED = 1_000
"""Resources that `authorize` is asked for in one answer: a caller that may see none of 10,000 must not hold up all."""

Ctx = ServerRequestContext[Any, Any]
Params = TypeVar("Params")


class _Given(types.RequestParams):
    """Taken as it comes: what is wrong with it is said below, in words."""

    model_config = ConfigDict(extra="allow")


class _HistoryParams(msgspec.Struct, forbid_unknown_fields=True):
    feature: Literal["tools", "prompts", "resources"] | None = None
    uri: str | None = None
    since: Annotated[int, msgspec.Meta(ge=0)] | dict[str, Any] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    detail: Literal["summary", "full"] = "summary"
    cursor: str | None = None


class ExtensionLane:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._serve(HISTORY, _HistoryParams, self._history)

    def _serve(
        self,
        method: str,
        kind: type[Params],
        answer: Callable[[Principal | None, Params], Awaitable[dict[str, Any]]],
    ) -> None:
        async def handle(ctx: Ctx, given: _Given) -> dict[str, Any]:
            params = _convert(method, ctx.params, kind)
            principal = principal_of(ctx.request.scope.get("user")) if ctx.request is not None else None
            try:
                return await answer(principal, params)
            except TidingsError as error:
                raise MCPError(types.INVALID_PARAMS, f"{method}: {error}") from None

        self._live.lowlevel.add_request_handler(method, _Given, handle)
        self._live.lowlevel.extensions.setdefault(EXTENSION, {}).setdefault("methods", []).append(method)

    # History

    async def _history(self, principal: Principal | None, params: _HistoryParams) -> dict[str, Any]:
        live = self._live
        past = self._past(params)
        seen = _Sight(live, principal)
        is_cut = False
        if params.limit is not None and params.cursor is None:
            past, is_cut = await _newest(past, params.limit, seen)
        page, following = await _first(past.changes, params.detail == "full", seen)
        answer: dict[str, Any] = {"changes": page, "complete": past.complete and not is_cut, "epoch": live.epoch}
        if following is not None:
            answer["nextCursor"] = f"{live.epoch}.{following}"
        return answer

    def _past(self, params: _HistoryParams) -> Past:
        since = Cursor.parse(params.since) if isinstance(params.since, dict) else params.since
        past = self._live.history(params.feature, uri=params.uri, since=since)
        if since is None and params.since is not None:
            past = past._replace(complete=False)  # a cursor that can't be read: nobody knows what its client knows
        if params.cursor is not None:
            start = self._after(params.cursor)
            past = past._replace(changes=tuple(each for each in past.changes if each.revision > start))
        return past

    def _after(self, cursor: str) -> int:
        """Where the next page begins."""
        epoch, _, revision = cursor.rpartition(".")
        if epoch != self._live.epoch or not revision.isdecimal():
            raise TidingsError(f"the cursor {cursor!r:.80} is not of this server's life; ask again without it")
        return int(revision)


class _Sight:
    """What one caller may see, asked once for each topic."""

    def __init__(self, live: Live, principal: Principal | None) -> None:
        self._gate = live.gate
        self._principal = principal
        self._known: dict[Topic, bool] = {}

    def is_tired_of(self, change: Change) -> bool:
        return change.topic not in self._known and len(self._known) >= _MOST_ASKED

    async def reaches(self, change: Change) -> bool:
        topic = change.topic
        if (known := self._known.get(topic)) is None:
            known = self._known[topic] = bool(await self._gate.allowed(self._principal, [topic]))
        return known


async def _newest(past: Past, limit: int, seen: _Sight) -> tuple[Past, bool]:
    """The newest that the caller may see, and whether there may be more of them before."""
    found: list[Change] = []
    for change in reversed(past.changes):
        if len(found) >= limit or seen.is_tired_of(change):
            return Past(tuple(reversed(found)), past.complete), True
        if await seen.reaches(change):
            found.append(change)
    return Past(tuple(reversed(found)), past.complete), False


async def _first(changes: Iterable[Change], is_full: bool, seen: _Sight) -> tuple[list[dict[str, Any]], int | None]:
    """One page, and the revision after which the next one begins, if there is one."""
    page: list[dict[str, Any]] = []
    size, last = 0, 0
    for change in changes:
        item = change.item or change.before
        size += len(item.json) if is_full and item is not None else 0
        if len(page) >= _PAGE or (page and size > _PAGE_BYTES) or seen.is_tired_of(change):
            return page, last
        if await seen.reaches(change):
            page.append(as_json(change, is_full=is_full))
        last = change.revision
    return page, None


def _convert(method: str, given: Any, kind: type[Params]) -> Params:
    members = {name: value for name, value in (given or {}).items() if name != "_meta"}
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        raise MCPError(types.INVALID_PARAMS, f"{method}: {error}") from None
