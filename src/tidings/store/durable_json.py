"""Durable subscriptions as clients and scripts read them. Secrets are never among it."""

from __future__ import annotations

from typing import Any

from tidings.core.journal import iso_time
from tidings.store.durable import DurableSubscription, Webhook

__all__ = ["as_json"]


def as_json(durable: DurableSubscription, *, is_connected: bool = False) -> dict[str, Any]:
    watched: dict[str, Any] = {f"{feature.value}ListChanged": True for feature in durable.features}
    if durable.uris:
        watched["resourceSubscriptions"] = list(durable.uris)
    described: dict[str, Any] = {
        "name": durable.name,
        "notifications": watched,
        "ttl": durable.ttl,
        "created": iso_time(durable.created),
        "expires": None if durable.expires is None else iso_time(durable.expires),
        "connected": is_connected,
    }
    if durable.terms:
        described["filter"] = durable.terms
    if durable.webhook is not None:
        described["webhook"] = _webhook(durable.webhook)
    return described


def _webhook(webhook: Webhook) -> dict[str, Any]:
    state = "dead" if webhook.is_dead else "retrying" if webhook.attempts else "active"
    described: dict[str, Any] = {"url": webhook.url, "state": state, "attempts": webhook.attempts}
    if webhook.next_attempt is not None:
        described["nextAttempt"] = iso_time(webhook.next_attempt)
    if webhook.last_success is not None:
        described["lastSuccess"] = iso_time(webhook.last_success)
    if webhook.last_error is not None:
        described["lastError"] = webhook.last_error
    if webhook.refetch:
        described["refetch"] = list(webhook.refetch)
    if webhook.last_refetch is not None:
        described["lastRefetch"] = iso_time(webhook.last_refetch)
    return described
