"""List, add, remove and revive the durable subscriptions of all owners, for `tidings subscriptions DIR`.

While a server runs, it does this for the command, which reaches it through the control socket. Otherwise the command
does it in the state file. A caller over HTTP manages only its own subscriptions (`tidings.server.extension`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidings.cli.control import Action
from tidings.errors import TidingsError
from tidings.server.granted_topics import RequestedTopics
from tidings.store.durable import SERVER, DurableSubscription, Key, Owner, as_json
from tidings.store.durable_registry import DurableSubscriptions
from tidings.webhooks.create import put_server_webhook

__all__ = ["manage_subscriptions"]


def manage_subscriptions(
    durables: DurableSubscriptions, request: dict[str, Any], *, is_running: bool = True
) -> dict[str, Any]:
    """Apply one request of `tidings subscriptions`, and return its result.

    `is_running` is whether the server runs. Otherwise no subscription is connected."""
    action, params, owner = request["action"], request["params"], request["owner"]

    def describe(durable: DurableSubscription) -> dict[str, Any]:
        described = as_json(durable, is_connected=is_running and durables.is_connected(durable.key))
        return {"name": described.pop("name"), "owner": _format_owner(durable.owner), **described}

    if action == Action.LIST:
        return {"subscriptions": [describe(durable) for durable in durables.all() if _has_owner(durable, owner)]}
    name = params["name"]
    if action == Action.ADD:
        durable, new_secret = _put_webhook(durables, name, params)
        return {"subscription": describe(durable)} | new_secret
    key = _find_key(durables, name, owner)
    if action == Action.REMOVE:
        return {"removed": key is not None and durables.remove(key)}
    known = durables.get(key) if key is not None else None
    if known is None or (known.webhook is None and known.event is None):
        return {"subscription": None}
    return {"subscription": describe(durables.put(known.revived()))}


def _find_key(durables: DurableSubscriptions, name: str, owner: str | None) -> Key | None:
    keys = [each.key for each in durables.all() if each.name == name and _has_owner(each, owner)]
    if len(keys) > 1:
        owners = ", ".join(_format_owner(key[0]) or "no owner" for key in keys)
        raise TidingsError(f"several subscriptions have the name {name!r} ({owners}); choose one with --owner")
    return keys[0] if keys else None


def _put_webhook(
    durables: DurableSubscriptions, name: str, params: dict[str, Any]
) -> tuple[DurableSubscription, dict[str, str]]:
    """Create or replace a webhook. A new one starts with the current versions as told. Return it, and a new secret."""
    requested = msgspec.convert(params["notifications"], RequestedTopics)
    secret = params["webhook"].get("secret")
    known = durables.get((SERVER, name))
    durable = put_server_webhook(
        durables,
        name,
        params["webhook"]["url"],
        requested.features,
        requested.resource_subscriptions or (),
        secret=secret,
    )
    is_new_secret = secret is None and (known is None or known.webhook is None)
    return durable, {"secret": durable.webhook.secret} if is_new_secret and durable.webhook is not None else {}


def _format_owner(owner: Owner) -> str | None:
    return None if owner is None else "/".join(part for part in owner if part is not None)


def _has_owner(durable: DurableSubscription, owner: str | None) -> bool:
    return owner is None or _format_owner(durable.owner) == owner
