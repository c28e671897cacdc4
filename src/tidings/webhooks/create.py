"""Create webhooks: for a caller, and for the server itself, whether or not it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs

from tidings.core.model import Feature
from tidings.errors import TidingsError
from tidings.store.durable import SERVER, DurableSubscription, Webhook
from tidings.store.durable_registry import DurableSubscriptions
from tidings.webhooks.http_client import check_url
from tidings.webhooks.signature import check_secret, new_secret

__all__ = ["create_webhook", "put_server_webhook"]


def create_webhook(
    url: str, secret: str | None, previous: Webhook | None, *, scopes: tuple[str, ...] = (), allow_loopback: bool
) -> Webhook:
    """Return a webhook. Without `secret`, it has that of the previous one, or a new one.

    Raise `TidingsError` if the URL or the secret is invalid."""
    check_url(url, allow_loopback=allow_loopback)
    if secret is None:
        secret = previous.secret if previous is not None else new_secret()
    try:
        secret = check_secret(secret)
    except TidingsError as error:
        raise TidingsError(f"{error}; omit it to get a new one") from None
    return Webhook(url=url, secret=secret, scopes=scopes)


def put_server_webhook(
    durables: DurableSubscriptions,
    name: str,
    url: str,
    features: Iterable[Feature],
    uris: Iterable[str],
    *,
    secret: str | None = None,
    terms: Mapping[str, Any] | None = None,
    ttl: float | None = None,
) -> DurableSubscription:
    """Create or replace a webhook of the server itself. A replaced webhook keeps its told versions."""
    known = durables.get((SERVER, name))
    previous = known.webhook if known is not None else None
    webhook = create_webhook(url, secret, previous, allow_loopback=True)
    if secret is None and previous is None:
        webhook = structs.replace(webhook, is_secret_new=True)
    if ttl is not None and not ttl >= 0:  # also rejects NaN
        raise TidingsError(f"the ttl of a webhook is a number of seconds, not {ttl}")
    max_ttl = durables.hub.policy.durable_ttl
    durable = DurableSubscription(
        name=name,
        owner=SERVER,
        features=tuple(features),
        uris=tuple(uris),
        terms=dict(terms or {}),
        ttl=max_ttl if ttl is None else min(ttl, max_ttl),
        webhook=webhook,
    )
    if not durable.features and not durable.uris:
        raise TidingsError("a webhook needs a feature or a URI to watch")
    return durables.put(durable)
