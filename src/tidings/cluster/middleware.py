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
from tidings.cluster.shared_state import SharedState
from tidings.core.catalog import Catalog
from tidings.server.definitions import as_dict
from tidings.server.list_reader import ListReader
from tidings.server.methods import LIST_METHODS, ListMethod

__all__ = ["ClusterMiddleware"]

Ctx = ServerRequestContext[Any, Any]


class ClusterMiddleware:
    def __init__(self, backend: Backend, state: SharedState, own: Catalog, shared: Catalog, reader: ListReader) -> None:
        self._backend = backend
        self._state = state
        self._own = own
        self._shared = shared
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
        return await call_next(ctx)

    def _merge(self, method: ListMethod, listed: list[dict[str, Any]], *, is_last: bool) -> list[dict[str, Any]]:
        """Return the items of one page as the cluster has them, and on the last page those of other replicas too.

        An item that only some callers see is in no catalog, and stays."""
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
