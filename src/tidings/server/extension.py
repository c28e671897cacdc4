"""The extension methods: the history of changes, and the caller's durable subscriptions.

`dev.tidings/history` returns past changes, the oldest first, in pages. A caller sees only topics that it may watch.
`dev.tidings/subscriptions/list`, `put` and `remove` manage the durable subscriptions of the caller alone. Callers that
are not authenticated share theirs, without webhooks unless `Policy.webhooks` allows them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import mcp_types as types
import msgspec
from mcp.server import ServerRequestContext
from mcp.shared.exceptions import MCPError
from msgspec import structs
from pydantic import ConfigDict

from tidings.core.cursor import Cursor
from tidings.core.filters import Terms
from tidings.core.frames import EXTENSION
from tidings.core.journal import ChangeHistory, change_json, history_topic
from tidings.core.model import Change, Topic
from tidings.errors import TidingsError
from tidings.server.authorization import Authorization, Principal, caller_of, owner_of
from tidings.server.granted_topics import RequestedTopics
from tidings.server.subscribe import Subscriptions
from tidings.store.durable import DurableSubscription, Owner, Webhook
from tidings.store.durable import as_json as as_subscription

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ["HISTORY", "SUBSCRIPTIONS", "ExtensionMethods", "WebhookRules", "add_method"]

HISTORY = "dev.tidings/history"
SUBSCRIPTIONS = "dev.tidings/subscriptions"

_PAGE = 200
"""Changes in one response."""
_PAGE_BYTES = 1 << 20
"""Bytes of items in one response. One item may be as large by itself."""
_MAX_AUTHORIZE_CALLS = 1_000
"""Calls of `authorize` for one response. A caller that may see none of 10,000 resources must not keep the server
busy."""

_MAX_DIGITS = 20
"""Digits of a revision."""

Ctx = ServerRequestContext[Any, Any]
Params = TypeVar("Params")


class WebhookRules(Protocol):
    """Decides which webhooks callers may have."""

    def allows(self, owner: Owner) -> bool:
        """Return whether the policy allows webhooks for this owner."""

    def create(self, url: str, secret: str | None, previous: Webhook | None, scopes: tuple[str, ...]) -> Webhook:
        """Return a webhook, with a new secret if there is none. Raise `TidingsError` if it is not allowed."""


class _AnyParams(types.RequestParams):
    """Accepts any members. `add_method` checks them and writes the error message."""

    model_config = ConfigDict(extra="allow")


def add_method(
    server: Server[Any],
    method: str,
    kind: type[Params],
    respond: Callable[[Principal | None, Params], Awaitable[dict[str, Any]]],
) -> None:
    """Serve a method of an extension. Invalid params, and a `TidingsError` of `respond`, are errors of the request."""

    async def handle(ctx: Ctx, given: _AnyParams) -> dict[str, Any]:
        members = {name: value for name, value in (ctx.params or {}).items() if name != "_meta"}
        try:
            return await respond(caller_of(ctx), msgspec.convert(members, kind))
        except (TidingsError, msgspec.ValidationError) as error:
            raise MCPError(types.INVALID_PARAMS, f"{method}: {error}") from None

    server.add_request_handler(method, _AnyParams, handle)


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
    def __init__(self, server: Server[Any], subscriptions: Subscriptions, webhooks: WebhookRules) -> None:
        self._hub = subscriptions.hub
        self._policy = subscriptions.policy
        self._durables = subscriptions.durables
        self._subscriptions = subscriptions
        self._webhooks = webhooks
        methods = [HISTORY, *(f"{SUBSCRIPTIONS}/{name}" for name in ("list", "put", "remove"))]
        server.extensions.setdefault(EXTENSION, {})["methods"] = methods
        add_method(server, HISTORY, _HistoryParams, self._history)
        add_method(server, f"{SUBSCRIPTIONS}/list", _NoParams, self._list)
        add_method(server, f"{SUBSCRIPTIONS}/put", _PutParams, self._put)
        add_method(server, f"{SUBSCRIPTIONS}/remove", _NameParams, self._remove)

    # History

    async def _history(self, principal: Principal | None, params: _HistoryParams) -> dict[str, Any]:
        history = self._find_changes(params)
        visibility = _Visibility(self._subscriptions.authorization, principal)
        if params.limit is not None and params.cursor is None:
            history = await _newest(history, params.limit, visibility)
        page, following = await _first_page(history.changes, params.detail == "full", visibility)
        response: dict[str, Any] = {"changes": page, "complete": history.complete, "epoch": self._hub.catalog.epoch}
        if following is not None:
            response["nextCursor"] = f"{self._hub.catalog.epoch}.{following}"
        return response

    def _find_changes(self, params: _HistoryParams) -> ChangeHistory:
        since = Cursor.parse(params.since) if isinstance(params.since, dict) else params.since
        history = self._hub.history(history_topic(params.feature, params.uri), since, self._hub.catalog.epoch)
        if since is None and params.since is not None:
            history = history._replace(complete=False)  # the cursor can't be read, so more may have changed
        if params.cursor is not None:
            start = self._start_of_page(params.cursor)
            history = history._replace(changes=tuple(each for each in history.changes if each.revision > start))
        return history

    def _start_of_page(self, cursor: str) -> int:
        epoch, _, revision = cursor.rpartition(".")
        if epoch != self._hub.catalog.epoch or not revision.isdecimal() or len(revision) > _MAX_DIGITS:
            raise TidingsError(f"the cursor {cursor!r:.80} belongs to another epoch; ask again without it")
        return int(revision)

    # Subscriptions

    async def _list(self, principal: Principal | None, params: _NoParams) -> dict[str, Any]:
        owner = owner_of(principal)
        return {
            "subscriptions": [
                as_subscription(each, is_connected=self._durables.is_connected(each.key))
                for each in self._durables.all(owner)
                if each.webhook is None or self._webhooks.allows(owner)
            ]
        }

    async def _put(self, principal: Principal | None, params: _PutParams) -> dict[str, Any]:
        """Create or change a subscription. Members that are left out stay as they are; a dead webhook is revived."""
        owner = owner_of(principal)
        known = self._durables.get((owner, params.name))
        if known is not None and known.event is not None:
            raise TidingsError(f"{params.name!r} is a subscription of an event; renew it with events/subscribe")
        if (params.webhook or (known and known.webhook)) and not self._webhooks.allows(owner):
            raise TidingsError("this server has no webhooks for this caller (Policy.webhooks)")
        if params.notifications is None and known is None:
            raise TidingsError(f"there is no {params.name!r}; to create it, name in `notifications` what it watches")
        durable = known or DurableSubscription(name=params.name, owner=owner, ttl=self._policy.durable_ttl)
        if params.notifications is not None:
            granted = await self._subscriptions.grant(params.notifications, principal)
            if not granted:
                raise TidingsError("this caller may watch none of the requested topics")
            durable = structs.replace(durable, features=tuple(granted.features), uris=tuple(granted.uris))
        if params.filter is not None:
            durable = structs.replace(durable, terms=Terms.parse(params.filter, self._policy).as_json())
        if params.ttl is not None:
            durable = structs.replace(durable, ttl=min(params.ttl, self._policy.durable_ttl))
        new_secret: dict[str, str] = {}
        if params.webhook is not None:
            scopes = principal.scopes if principal is not None else ()
            webhook = self._webhooks.create(params.webhook.url, params.webhook.secret, durable.webhook, scopes)
            if params.webhook.secret is None and durable.webhook is None:
                new_secret["secret"] = webhook.secret  # in this response only
            durable = structs.replace(durable, webhook=webhook)
        elif durable.webhook is not None:
            durable = durable.revived()
        if not self._durables.is_connected(durable.key):
            durable = structs.replace(durable, expires=self._durables.expiry(durable))
        durable = self._durables.put(durable)
        return {"subscription": as_subscription(durable), "isNew": known is None, **new_secret}

    async def _remove(self, principal: Principal | None, params: _NameParams) -> dict[str, Any]:
        owner = owner_of(principal)
        known = self._durables.get((owner, params.name))
        if known is None or (known.webhook is not None and not self._webhooks.allows(owner)):
            return {"removed": False}
        return {"removed": self._durables.remove(known.key)}


class _Visibility:
    """The topics that one caller may see. It calls `authorize` once for each topic."""

    def __init__(self, authorization: Authorization, principal: Principal | None) -> None:
        self._authorization = authorization
        self._principal = principal
        self._known: dict[Topic, bool] = {}

    def is_exhausted(self, change: Change) -> bool:
        """Return whether `authorize` would have to be called for too many topics."""
        return change.topic not in self._known and len(self._known) >= _MAX_AUTHORIZE_CALLS

    async def includes(self, change: Change) -> bool:
        topic = change.topic
        if (known := self._known.get(topic)) is None:
            known = self._known[topic] = bool(await self._authorization.filter(self._principal, [topic]))
        return known


async def _newest(history: ChangeHistory, limit: int, visibility: _Visibility) -> ChangeHistory:
    """Return the newest changes that the caller may see. It is not complete if there may be older ones."""
    found: list[Change] = []
    is_complete = history.complete
    for change in reversed(history.changes):
        if len(found) >= limit or visibility.is_exhausted(change):
            is_complete = False
            break
        if await visibility.includes(change):
            found.append(change)
    return ChangeHistory(tuple(reversed(found)), is_complete)


async def _first_page(
    changes: Iterable[Change], is_full: bool, visibility: _Visibility
) -> tuple[list[dict[str, Any]], int | None]:
    """Return one page, and the revision after which the next one begins, if there is one."""
    page: list[dict[str, Any]] = []
    size, last = 0, 0
    for change in changes:
        item = change.item or change.before
        size += len(item.json) if is_full and item is not None else 0
        if len(page) >= _PAGE or (page and size > _PAGE_BYTES) or visibility.is_exhausted(change):
            return page, last
        if await visibility.includes(change):
            page.append(change_json(change, is_full=is_full))
        last = change.revision
    return page, None
