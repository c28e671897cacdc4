"""The methods of MCP Events: `events/list`, `events/subscribe` and `events/unsubscribe`.

A subscription to events is a durable subscription. Its name is the id that the draft derives from principal, URL, event
name and arguments. So it is stored, limited, listed and removed like other durable subscriptions.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET, structs

from tidings.core.model import Feature, topics_json
from tidings.errors import LimitReached, TidingsError
from tidings.events import draft
from tidings.events.delivery import EventDeliveries, error_category
from tidings.events.types import RESOURCE_UPDATED, EventTopic, EventType, EventTypes, check, feature_of
from tidings.server.authorization import Principal, owner_of
from tidings.server.extension import add_method
from tidings.server.granted_topics import GrantedTopics, RequestedTopics
from tidings.store.durable import DurableSubscription, EventTarget, Owner
from tidings.webhooks.signature import check_secret
from tidings.wire.addresses import origin_of

if TYPE_CHECKING:
    from mcp.server import Server

    from tidings.server.subscribe import Subscriptions

__all__ = ["EventSubscriptions"]

_MIN_TTL = 60.0
"""Seconds that a subscription lasts at least. Clients would renew a shorter one too often."""
_MAX_TTL_IN_MEMORY = 3600.0
"""Seconds that a subscription lasts at most without a store. A restart loses it, until its client renews it."""
_OLD_SECRET_TTL = 3600.0
"""Seconds for which requests are also signed with the previous secret: longer than any request takes."""
_MAX_ARGUMENTS = 8 * 1024
"""Characters of the JSON of the arguments, which are kept as long as the subscription."""
_MAX_ANSWER = 8 * 1024
"""Bytes that are read of the response to a challenge."""
_VERIFICATION_TTL = 3600.0
"""Seconds for which a verified URL that no subscription uses needs no new challenge."""
_MAX_FAILED_CHALLENGES, _FAILED_CHALLENGES_TTL = 10, 60.0
"""The maximum of failed challenges of one principal at one receiver, and the seconds for which they count. A client may
have named somebody else's URL."""
_MAX_REMEMBERED = 10_000
"""Verified URLs, and receivers with failed challenges, that are remembered."""


class EventSubscriptions:
    """Serves the three methods to all clients of one server."""

    def __init__(
        self,
        server: Server[Any],
        subscriptions: Subscriptions,
        event_types: EventTypes,
        deliveries: EventDeliveries,
        *,
        is_stored: bool,
        save: Callable[[], object],
    ) -> None:
        """`save` writes the subscriptions to the store, and blocks until they are written."""
        self._subscriptions = subscriptions
        self._durables = subscriptions.durables
        self._types = event_types
        self._deliveries = deliveries
        self._save = save
        ttl = subscriptions.policy.durable_ttl
        self._max_ttl = max(_MIN_TTL, ttl if is_stored else min(ttl, _MAX_TTL_IN_MEMORY))
        self._verified: dict[tuple[Owner, str], float] = {}
        """The URLs that answered the challenge of an owner, and when."""
        self._failed: dict[tuple[Owner, str], deque[float]] = {}
        """When receivers failed a challenge of an owner."""
        add_method(server, draft.LIST, draft.ListParams, self._list)
        add_method(server, draft.SUBSCRIBE, draft.SubscribeParams, self._subscribe)
        add_method(server, draft.UNSUBSCRIBE, draft.UnsubscribeParams, self._unsubscribe)

    async def _list(self, principal: Principal | None, params: draft.ListParams) -> dict[str, Any]:
        return {"events": [each.as_json() for each in self._types if self._is_served(each)]}

    def _is_served(self, event: EventType) -> bool:
        if event.name == RESOURCE_UPDATED:
            return self._subscriptions.serves_contents()
        feature = feature_of(event.name)
        return feature is None or self._subscriptions.serves(feature)

    async def _subscribe(self, principal: Principal | None, params: draft.SubscribeParams) -> dict[str, Any]:
        try:
            return await self._put(principal, params)
        except LimitReached as error:
            raise draft.too_many("subscriptions", str(error)) from None

    async def _put(self, principal: Principal | None, params: draft.SubscribeParams) -> dict[str, Any]:
        owner = self._check_caller(principal)
        event, arguments = self._find_type(params), params.arguments or {}
        url, secret = params.delivery.url, params.delivery.secret
        if params.delivery.mode != "webhook":
            raise draft.unsupported("deliveryMode", params.delivery.mode)
        if secret is None:
            raise TidingsError("delivery.secret is missing: create a random whsec_… secret, and send it")
        if secret.split() != [secret]:
            raise TidingsError("delivery.secret must be one whsec_… secret, without spaces")
        check_secret(secret)
        self._deliveries.check_url(url)
        expires_in = self._grant_ttl(params.ttl_ms)
        if len(draft.normalized_json(arguments)) > _MAX_ARGUMENTS:
            raise TidingsError(f"the arguments have more than {_MAX_ARGUMENTS} characters of JSON")
        check(arguments, event.arguments, f"the arguments of {event.name}")
        granted = await self._grant(principal, event, arguments)
        key = (owner, draft.subscription_id(owner, url, event.name, arguments))
        known = self._durables.get(key)
        if known is None and not self._is_verified(owner, url):
            await self._verify(owner, key[1], url, secret)
        now = self._subscriptions.hub.catalog.now()
        known = self._durables.get(key)
        target = EventTarget(
            name=event.name,
            arguments=arguments,
            url=url,
            secret=secret,
            scopes=principal.scopes if principal is not None else (),
            expires=now + expires_in,
        )
        status = None
        if known is not None and known.event is not None:
            before = known.event
            status = draft.DeliveryStatus(
                not before.is_suspended, before.last_success, before.last_error, before.failed_since
            )
            target = _renewed(before, target, now)
        record = known or DurableSubscription(name=key[1], owner=owner, ttl=expires_in)
        record = structs.replace(
            record,
            features=tuple(granted.features),
            uris=tuple(granted.uris),
            ttl=expires_in,
            event=target,
            expires=target.expires,
        )
        self._durables.put(record)
        self._deliveries.update(key)
        # Write before the response: the client relies on the subscription from then on.
        await asyncio.to_thread(self._save)
        return draft.subscribed(key[1], target.expires, status)

    async def _unsubscribe(self, principal: Principal | None, params: draft.UnsubscribeParams) -> dict[str, Any]:
        owner = self._check_caller(principal)
        key = (owner, draft.subscription_id(owner, params.delivery.url, params.name, params.arguments or {}))
        if not self._durables.remove(key):
            raise draft.not_found("subscription", "there is no such subscription")
        self._deliveries.update(key)
        await asyncio.to_thread(self._save)  # otherwise a crash now would bring the subscription back
        return {}

    def _check_caller(self, principal: Principal | None) -> Owner:
        owner = owner_of(principal)
        if not self._deliveries.allows(owner):
            raise draft.forbidden("this server delivers no events to this caller (Policy.webhooks)")
        return owner

    def _find_type(self, params: draft.UnsubscribeParams) -> EventType:
        event = self._types.get(params.name)
        if event is None or not self._is_served(event):
            raise draft.not_found("event", f"there is no event {params.name!r:.140}; events/list has all")
        return event

    def _grant_ttl(self, requested: object) -> float:
        """Return the lifetime of a subscription in seconds."""
        if requested is None or requested is UNSET:
            return self._max_ttl
        assert isinstance(requested, float | int)
        if not requested > 0:  # also rejects NaN
            raise TidingsError("ttlMs is a number of milliseconds above 0, or null")
        return min(max(_MIN_TTL, requested / 1000), self._max_ttl)

    async def _grant(self, principal: Principal | None, event: EventType, arguments: dict[str, Any]) -> GrantedTopics:
        """Return the topics to watch, none for an emitted event. Raise if the caller may not watch them."""
        topic = event.topic(arguments)
        if isinstance(topic, EventTopic):
            if await self._subscriptions.authorization.filter(principal, [topic]):
                return GrantedTopics([])
        else:
            features, uris = ([topic], []) if isinstance(topic, Feature) else ([], [topic])
            requested = msgspec.convert(topics_json(features, uris), RequestedTopics)
            if granted := await self._subscriptions.grant(requested, principal):
                return granted
        raise draft.forbidden(f"this caller may not subscribe to {event.name} with these arguments")

    # Verification

    def _is_verified(self, owner: Owner, url: str) -> bool:
        """Return whether a URL has passed the challenge of an owner. The URL of a subscription always has."""
        now = self._subscriptions.hub.catalog.now()
        verified = self._verified.get((owner, url))
        if verified is not None and now - verified < _VERIFICATION_TTL:
            return True
        return self._deliveries.has_url(owner, url)

    async def _verify(self, owner: Owner, subscription: str, url: str, secret: str) -> None:
        """Send a challenge to a URL. Raise if the receiver does not send it back."""
        now, origin = self._subscriptions.hub.catalog.now(), origin_of(url)
        failed = self._failed.get((owner, origin), deque())
        while failed and now - failed[0] > _FAILED_CHALLENGES_TTL:
            failed.popleft()
        if len(failed) >= _MAX_FAILED_CHALLENGES:
            raise draft.too_many("verifications", f"{origin} failed too many challenges; try again in a minute")
        challenge = secrets.token_urlsafe(32)
        event = draft.encode_verification(challenge, secrets.token_hex(8))
        result = await self._deliveries.post(subscription, secret, url, event, _MAX_ANSWER)
        reason: draft.Reason | None = None
        if result.error is not None:
            reason = error_category(result)
        else:
            answer = draft.find_challenge(result.answer)
            if answer is None or not hmac.compare_digest(answer.encode(errors="replace"), challenge.encode()):
                reason = "challenge_failed"
        outcome = "verified" if reason is None else "unverified"
        self._subscriptions.hub.counts.events[outcome] += 1
        if reason is None:
            _make_room(self._verified)[owner, url] = now
            return
        failed.append(now)
        _make_room(self._failed)[owner, origin] = failed
        raise draft.callback_failed(reason)


def _renewed(before: EventTarget, target: EventTarget, now: float) -> EventTarget:
    """Return a target with the delivery state of the previous one. A renewal ends a suspension."""
    old_secret, old_until = before.old_secret, before.old_until
    if before.secret != target.secret:
        old_secret, old_until = before.secret, now + _OLD_SECRET_TTL
    return structs.replace(
        target,
        old_secret=old_secret,
        old_until=old_until,
        attempts=0 if before.is_suspended else before.attempts,
        next_attempt=before.next_attempt,
        last_success=before.last_success,
        last_error=before.last_error,
        failed_since=before.failed_since,
    )


Key = TypeVar("Key")
Value = TypeVar("Value")


def _make_room(entries: dict[Key, Value]) -> dict[Key, Value]:
    """Remove the oldest entry if the dict is full, and return the dict."""
    if len(entries) >= _MAX_REMEMBERED:
        del entries[next(iter(entries))]
    return entries
