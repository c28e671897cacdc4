"""The extension methods, for clients of either era on any transport: what happened, and their durable subscriptions.

`dev.tidings/history` answers with past Changes, the oldest first, in pages. A caller sees no more of the past than it
may watch of the present. `dev.tidings/subscriptions/list`, `put` and `remove` are about the caller's own durable
subscriptions, and about nobody else's. Callers without a name share what they have, but for webhooks: those are only
for whom `Policy.webhooks` says.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import mcp_types as types
import msgspec
from mcp.server import ServerRequestContext
from mcp.shared.exceptions import MCPError
from msgspec import structs
from pydantic import ConfigDict

from tidings.core.cursor import Cursor
from tidings.core.filters import Terms
from tidings.core.frames import EXTENSION
from tidings.core.journal import ChangeHistory, change_json
from tidings.core.model import Change, Topic
from tidings.errors import TidingsError
from tidings.http.router import principal_of
from tidings.server.authorization import Principal
from tidings.server.granted_topics import RequestedTopics, honour
from tidings.store.durable import DurableSubscription, Owner, Webhook
from tidings.store.durable import as_json as as_subscription
from tidings.webhooks.http_client import check_url
from tidings.webhooks.signature import check_secret, new_secret

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["HISTORY", "SUBSCRIPTIONS", "ExtensionMethods"]

HISTORY = "dev.tidings/history"
SUBSCRIPTIONS = "dev.tidings/subscriptions"

_PAGE = 200
"""Changes in one answer."""
_PAGE_BYTES = 1 << 20
"""Of items in one answer; one item may be as large by itself."""
_MOST_ASKED = 1_000
"""Resources that `authorize` is asked for in one answer: a caller that may see none of 10,000 must not hold up all."""

_MOST_DIGITS = 20
"""Of a revision."""

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


class _NoParams(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _NameParams(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _WebhookParams(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    secret: str | None = None


class _PutParams(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    notifications: RequestedTopics | None = None
    filter: dict[str, Any] | None = None
    ttl: Annotated[float, msgspec.Meta(ge=0)] | None = None
    webhook: _WebhookParams | None = None


class ExtensionMethods:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._serve(HISTORY, _HistoryParams, self._history)
        self._serve(f"{SUBSCRIPTIONS}/list", _NoParams, self._list)
        self._serve(f"{SUBSCRIPTIONS}/put", _PutParams, self._put)
        self._serve(f"{SUBSCRIPTIONS}/remove", _NameParams, self._remove)

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

    def _past(self, params: _HistoryParams) -> ChangeHistory:
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
        if epoch != self._live.epoch or not revision.isdecimal() or len(revision) > _MOST_DIGITS:
            raise TidingsError(f"the cursor {cursor!r:.80} is not of this server's life; ask again without it")
        return int(revision)

    # Subscriptions

    async def _list(self, principal: Principal | None, params: _NoParams) -> dict[str, Any]:
        durables = self._live.durables
        return {
            "subscriptions": [
                as_subscription(each, is_connected=durables.is_connected(each.key))
                for each in durables.all(_owner(principal))
                if each.webhook is None or self._live.webhooks.allows(_owner(principal))
            ]
        }

    async def _put(self, principal: Principal | None, params: _PutParams) -> dict[str, Any]:
        """Set one, new or not. What is left out stays as it was; a webhook that was given up is tried again."""
        live = self._live
        known = live.durables.get((_owner(principal), params.name))
        if (params.webhook or (known and known.webhook)) and not self._live.webhooks.allows(_owner(principal)):
            raise TidingsError("this server has no webhooks for this caller (Policy.webhooks)")
        if params.notifications is None and known is None:
            raise TidingsError(f"there is no {params.name!r}; a new one says in `notifications` what it watches")
        durable = known or DurableSubscription(name=params.name, owner=_owner(principal), ttl=live.policy.durable_ttl)
        if params.notifications is not None:
            honoured = await honour(live, params.notifications, principal)
            if not honoured:
                raise TidingsError("nothing of that can be watched by this caller")
            durable = structs.replace(durable, features=tuple(honoured.features), uris=tuple(honoured.uris))
        if params.filter is not None:
            durable = structs.replace(durable, terms=Terms.parse(params.filter, live.policy).as_json())
        if params.ttl is not None:
            durable = structs.replace(durable, ttl=min(params.ttl, live.policy.durable_ttl))
        shown: dict[str, str] = {}
        if params.webhook is not None:
            check_url(params.webhook.url, allow_loopback=live.policy.webhook_private)
            secret = params.webhook.secret
            if secret is None and durable.webhook is not None:
                secret = durable.webhook.secret
            if secret is None:
                secret = shown["secret"] = new_secret()  # this once
            scopes = principal.scopes if principal is not None else ()
            webhook = Webhook(url=params.webhook.url, secret=check_secret(secret), scopes=scopes)
            durable = structs.replace(durable, webhook=webhook)
        elif durable.webhook is not None:
            durable = structs.replace(durable, webhook=durable.webhook.revived())
        expires = None if durable.webhook is not None else live.catalog.now() + durable.ttl
        if not live.durables.is_connected(durable.key):
            durable = structs.replace(durable, expires=expires)
        durable = live.durables.put(durable)
        return {"subscription": as_subscription(durable), "isNew": known is None, **shown}

    async def _remove(self, principal: Principal | None, params: _NameParams) -> dict[str, Any]:
        key = (_owner(principal), params.name)
        known = self._live.durables.get(key)
        if known is None or (known.webhook is not None and not self._live.webhooks.allows(_owner(principal))):
            return {"removed": False}
        return {"removed": self._live.durables.remove(key)}


def _owner(principal: Principal | None) -> Owner:
    return principal.who if principal is not None else None


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


async def _newest(past: ChangeHistory, limit: int, seen: _Sight) -> tuple[ChangeHistory, bool]:
    """The newest that the caller may see, and whether there may be more of them before."""
    found: list[Change] = []
    for change in reversed(past.changes):
        if len(found) >= limit or seen.is_tired_of(change):
            return ChangeHistory(tuple(reversed(found)), past.complete), True
        if await seen.reaches(change):
            found.append(change)
    return ChangeHistory(tuple(reversed(found)), past.complete), False


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
            page.append(change_json(change, is_full=is_full))
        last = change.revision
    return page, None


def _convert(method: str, given: Any, kind: type[Params]) -> Params:
    members = {name: value for name, value in (given or {}).items() if name != "_meta"}
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        raise MCPError(types.INVALID_PARAMS, f"{method}: {error}") from None
