"""The MCP middleware of a replica: lists have the items of all replicas, and calls reach the replica that has the item.

It is the innermost middleware, so the user's own middleware sees the lists and calls of the whole cluster.
"""

from __future__ import annotations

from typing import Any

import msgspec
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from pydantic import BaseModel

from tidings.cluster.backend import Backend
from tidings.cluster.calls import forward, is_forwarded
from tidings.cluster.shared_state import SharedState
from tidings.core.catalog import Catalog
from tidings.core.hub import Hub
from tidings.core.model import Feature
from tidings.sdk.definitions import as_dict
from tidings.sdk.uri_templates import read_template
from tidings.server.list_reader import ListReader
from tidings.wire.methods import CALL_METHODS, LIST_METHODS, ListMethod

__all__ = ["ClusterMiddleware"]

Ctx = ServerRequestContext[Any, Any]


class ClusterMiddleware:
    def __init__(self, backend: Backend, state: SharedState, own: Catalog, hub: Hub, reader: ListReader) -> None:
        self._backend = backend
        self._state = state
        self._own = own
        self._hub = hub
        self._shared = hub.catalog
        self._reader = reader

    async def __call__(self, ctx: Ctx, call_next: CallNext) -> HandlerResult:
        method = LIST_METHODS.get(ctx.method)
        if method is not None and ctx.request_id != self._reader.request_id:
            result = await call_next(ctx)
            if isinstance(result, BaseModel | dict):
                result = as_dict(result)
                if isinstance(result.get(method.member), list):
                    is_last = not result.get("nextCursor")
                    merged = self._merge(method, result[method.member], is_last=is_last)
                    if is_last and not (ctx.params or {}).get("cursor"):
                        # The registries of the replicas have different orders, and a client may ask any of them.
                        merged.sort(key=lambda definition: str(definition.get(method.key)))
                    return result | {method.member: merged}
            return result
        owners = self._find_owners(ctx) if ctx.method in CALL_METHODS else []
        if owners:
            return await forward(self._backend, owners, ctx, self._hub.tracer, self._hub.counts)
        return await call_next(ctx)

    def _find_owners(self, ctx: Ctx) -> list[str]:
        """Return the replicas that can run a call; none if this one can, or if no other replica has the item."""
        feature = CALL_METHODS[ctx.method]
        key = (ctx.params or {}).get(feature.key_field)
        own = self._own.items(feature)
        if not isinstance(key, str) or key in own or is_forwarded(ctx):
            return []
        owners = self._state.owners(feature, key)
        if owners or feature is not Feature.RESOURCES:
            return owners
        if any(_matches(item.key, key) for item in own.snapshot()):
            return []
        return next((self._state.owners(feature, each) for each in self._state.templates() if _matches(each, key)), [])

    def _merge(self, method: ListMethod, listed: list[dict[str, Any]], *, is_last: bool) -> list[dict[str, Any]]:
        """Replace the items of one page by the definitions of the cluster. Add the other items to the last page.

        Keep an item that is in no catalog, because only some callers see it."""
        own, shared = self._own.items(method.feature), self._shared.items(method.feature)
        merged: list[dict[str, Any]] = []
        for definition in listed:
            key = definition.get(method.key)
            mine = own.item(key) if isinstance(key, str) else None
            if mine is None:
                merged.append(definition)
                continue
            theirs = shared.item(mine.key)
            if theirs is not None:  # otherwise it was added just now, and is listed when the cluster has it
                merged.append(definition if theirs.hash == mine.hash else theirs.definition)
        if is_last:
            listed_keys = {definition.get(method.key) for definition in merged}
            for item in shared.snapshot():
                if item.key not in own and item.key not in listed_keys:
                    definition = msgspec.json.decode(item.json)
                    if method.key in definition:
                        merged.append(definition)
        return merged


def _matches(template: str, uri: str) -> bool:
    try:
        return "{" in template and read_template(template)(uri)
    except ValueError:  # not a template that the SDK can parse
        return False
