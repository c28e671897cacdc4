"""Webhooks: durable subscriptions that are delivered to a URL, for receivers that can't keep a stream open.

Each webhook has at most one request in progress; topics that change meanwhile wait in its mailbox. A topic counts as
told when the receiver answered 2xx. After a failure, the subscriber is closed and its pending topics are dropped. After
a delay, the subscriber is opened again and gets what differs then, as after a restart. After too many failures in a row
the webhook is dead: nothing is sent until the subscription is put again.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from tidings.core.encoding import iso_time
from tidings.core.frames import CURSOR_KEY, REFETCH_KEY, FrameFormat, encode_params
from tidings.core.model import Feature, Notification, Reason, Topic
from tidings.core.redact import topic_name
from tidings.core.subscriber import UNCONFIRMED, ConnectionKind, Subscriber
from tidings.errors import TidingsError
from tidings.server.subscribe import PreparedSubscription, Subscriptions
from tidings.store.durable import SERVER, DurableSubscription, Key, Owner, Webhook
from tidings.webhooks.create import create_webhook, put_server_webhook
from tidings.webhooks.http_client import PostResult, WebhookClient, check_url
from tidings.webhooks.retry import MAX_RETRY_AFTER, retry_delay
from tidings.webhooks.signature import signed_headers

__all__ = ["Webhooks"]

logger = logging.getLogger(__name__)

_KIND = ConnectionKind("none", "webhook")

_MAX_REQUESTS = 64
"""Requests in progress at the same time."""
_GONE = 410
_MAX_BYTES = 1 << 20
"""Bytes of one delivery. A larger one is sent without the items."""
_MAX_REFETCHES = 2
"""Refetch messages in immediate succession, while more contents change than the server can remember."""
_RECHECK_DELAY = 15.0
"""Seconds until the next attempt to open a webhook whose name a stream uses."""


class Webhooks:
    """All webhooks of one server. They run while the server has an event loop."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._hub = subscriptions.hub
        self._bridge = subscriptions.bridge
        self._durables = subscriptions.durables
        policy = self._policy = subscriptions.policy
        self.http_client = WebhookClient(timeout=policy.webhook_timeout, allow_private=policy.webhook_private)
        self._is_running = False
        self._deliveries: dict[Key, _WebhookDelivery] = {}
        self.request_slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._durables.follow(self._on_change)
        self._bridge.on_bind(self._start)

    def _start(self) -> None:
        self._is_running = True
        self.request_slots = asyncio.Semaphore(_MAX_REQUESTS)
        for durable in self._durables.all():
            if durable.webhook is not None:
                try:
                    self._restart(durable.key)
                except Exception:  # one invalid webhook from the store must not stop the others or the server
                    logger.exception("the webhook %r can't be started", durable.name)
                    self._hub.counts.failures["webhook"] += 1

    def stop(self) -> None:
        for delivery in self._deliveries.values():
            delivery.close()
        self._deliveries.clear()
        self._is_running = False

    def put(
        self,
        name: str,
        url: str,
        *features: Feature | str,
        uris: Iterable[str] = (),
        secret: str | None = None,
        terms: Mapping[str, Any] | None = None,
        ttl: float | None = None,
    ) -> DurableSubscription:
        """Deliver changes to a URL from now on, as a subscription of the server itself.

        A webhook with the same name is replaced, and its told versions are kept. Without `secret`, it keeps its secret
        or gets a new one.
        """
        return put_server_webhook(
            self._durables, name, url, map(Feature, features), uris, secret=secret, terms=terms, ttl=ttl
        )

    def revive(self, name: str) -> DurableSubscription | None:
        """Try a webhook again now, even if it is dead. Return None if there is none."""
        durable = self._durables.get((SERVER, name))
        return None if durable is None or durable.webhook is None else self._durables.put(durable.revived())

    def remove(self, name: str) -> bool:
        """Remove a webhook. Return False if there is none."""
        return self._durables.remove((SERVER, name))

    def create(self, url: str, secret: str | None, previous: Webhook | None, scopes: tuple[str, ...]) -> Webhook:
        """Return a webhook of a caller, as `create_webhook` does."""
        return create_webhook(url, secret, previous, scopes=scopes, allow_loopback=self._policy.webhook_private)

    def allows(self, owner: Owner) -> bool:
        """Return whether the policy allows webhooks for this owner."""
        allowed = self._policy.webhooks
        return owner == SERVER or allowed == "anyone" or (allowed == "principals" and owner is not None)

    def _on_change(self, key: Key) -> None:
        # Called in any thread, with the lock of the hub.
        if self._is_running:
            self._bridge.call_soon(self._restart, key)

    def _restart(self, key: Key) -> None:
        """Close the delivery of a webhook, and open it again as the webhook is now."""
        if (delivery := self._deliveries.pop(key, None)) is not None:
            delivery.close()
        durable = self._durables.get(key)
        if not self._is_running or durable is None or durable.webhook is None or durable.webhook.is_dead:
            return
        if not self._durables.may_deliver(key):
            return  # another replica delivers it
        try:
            self._check(durable.owner, durable.webhook.url)
        except TidingsError as error:
            # The policy allowed it when it was put, and no longer does.
            logger.warning(
                "the webhook %r is dead: Policy.webhooks or Policy.webhook_private no longer allows it", durable.name
            )
            dead = structs.replace(durable.webhook, is_dead=True, next_attempt=None, last_error=str(error))
            self._durables.change_webhook(key, dead)
            return
        self._deliveries[key] = _WebhookDelivery(self._subscriptions, self, durable, durable.webhook)

    def _check(self, owner: Owner, url: str) -> None:
        if not self.allows(owner):
            raise TidingsError("this server allows no webhooks for the owner (Policy.webhooks)")
        check_url(url, allow_loopback=owner == SERVER or self._policy.webhook_private)


class _WebhookDelivery:
    """Delivers to one webhook: waits for the next attempt, opens the subscriber, and sends its notifications."""

    def __init__(
        self, subscriptions: Subscriptions, webhooks: Webhooks, durable: DurableSubscription, webhook: Webhook
    ) -> None:
        self._subscriptions = subscriptions
        self._hub = subscriptions.hub
        self._durables = subscriptions.durables
        self._policy = subscriptions.policy
        self._lock = subscriptions.hub.catalog.lock
        self._now = subscriptions.hub.catalog.now
        self._webhooks = webhooks
        self._key = durable.key
        self._webhook = webhook
        self._loop = asyncio.get_running_loop()
        self._subscriber: Subscriber | None = None
        self._prepared: PreparedSubscription | None = None
        self._format = FrameFormat()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._delivered_at = 0.0
        """When the hub delivered the notification that is being sent."""
        delay = (webhook.next_attempt or 0.0) - self._now()
        # No delay is longer; otherwise the clock was set back.
        self._schedule_open(delay if delay <= MAX_RETRY_AFTER else 0.0)

    def close(self) -> None:
        """Stop sending. A request in progress does not count as told."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._close_subscriber(Reason.SHUTDOWN)

    # Opening

    def _schedule_open(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, delay), self._start_open)

    def _start_open(self) -> None:
        self._timer = None
        if self._durables.is_connected(self._key):
            self._schedule_open(_RECHECK_DELAY)  # a stream uses the name and gets the notifications
            return
        self._task = self._start_task(self._open)

    async def _open(self) -> None:
        durable = self._durables.get(self._key)
        if durable is None:
            return
        prepared = await self._subscriptions.prepare_webhook(durable)
        if self._is_closed:
            return
        granted = prepared.granted.topics
        topics: list[Topic] = [*durable.features, *durable.uris]
        if refused := [topic for topic in topics if topic not in granted]:
            self._fail(PostResult(error=f"the owner may no longer watch {', '.join(map(topic_name, refused[:3]))}"))
            return
        if not await self._send_refetch(durable):
            return
        with self._lock:
            # Another subscription that was put meanwhile may need another authorization.
            if self._durables.is_connected(self._key) or self._current(durable) is None:
                self._reopen()
                return
            prepared.connect(self._on_replaced, durable.terms)
        if not prepared.is_durable:
            self._fail(PostResult(error="the server can't keep the subscription; its log says why"))
            return
        self._prepared = prepared
        self._format = prepared.frame_format()
        subscriber = prepared.subscribe(
            self._deliver, label=f"webhook {durable.name}", kind=_KIND, on_close=self._on_close, confirms=True
        )
        if not subscriber.is_closed:
            self._subscriber = subscriber

    async def _send_refetch(self, durable: DurableSubscription) -> bool:
        """Tell the receiver to refetch if it missed changes that the server no longer knows.

        Return False if the webhook can't be opened now.
        """
        for _ in range(_MAX_REFETCHES):
            with self._lock:
                if (current := self._current(durable)) is None:
                    self._reopen()
                    return False
                as_of, newest = self._hub.notifications.revision, self._hub.notifications.newest_content
                told, refetch = self._durables.missed(self._key)
                # These topics get their own notifications.
                pending = {topic: None for topic, version in told.items() if version is None}
                cursor = self._subscriptions.cursor(durable.uris, pending, as_of) if refetch else None
            if not refetch:
                return True
            self._save(refetch=refetch)
            data = {"_meta": {REFETCH_KEY: refetch, CURSOR_KEY: cursor}}
            body = _encode("resources.refetch", self._now(), data)
            result = await self._post(self._message_id(refetch, current.as_of, newest), body)
            if self._is_closed:
                return False
            if result.error is not None:
                self._fail(result)
                return False
            with self._lock:
                if self._current(durable) is not None:
                    self._durables.mark_refetch_sent(self._key, as_of)
                    self._save_success(refetch=(), last_refetch=self._now())
        self._schedule_open(max(self._policy.min_interval, self._policy.webhook_backoff))
        return False

    def _current(self, durable: DurableSubscription) -> DurableSubscription | None:
        """Return the subscription as it is now, or None if another one was put under its name."""
        current = self._durables.get(self._key)
        return current if current is not None and _settings(current) == _settings(durable) else None

    def _reopen(self) -> None:
        self._schedule_open(_RECHECK_DELAY if self._durables.is_connected(self._key) else 0.0)

    def _on_replaced(self) -> None:
        """Stop sending, because a stream connected under the same name."""
        if not self._is_closed:
            self._cancel_request()
            self._close_subscriber(Reason.DISCONNECTED)
            self._schedule_open(_RECHECK_DELAY)

    def _on_close(self, reason: Reason) -> None:
        self._subscriber = None
        if reason in (Reason.OVERFLOW, Reason.REVOKED) and not self._is_closed:
            self._cancel_request()
            # If a right was revoked, opening fails with the reason, and is retried like a failed delivery.
            self._schedule_open(_RECHECK_DELAY if reason is Reason.OVERFLOW else 0.0)

    def _cancel_request(self) -> None:
        """Ignore the result of the request in progress, which would set a second timer."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task(self._loop):
            task.cancel()

    def _close_subscriber(self, reason: Reason) -> None:
        if self._subscriber is not None:
            subscriber, self._subscriber = self._subscriber, None
            self._hub.close(subscriber, reason)

    # Sending

    def _deliver(self, notification: Notification) -> object:
        self._delivered_at = self._now()
        self._task = self._start_task(partial(self._send, notification))
        return UNCONFIRMED

    async def _send(self, notification: Notification) -> None:
        topic = notification.topic.value if isinstance(notification.topic, Feature) else notification.topic
        message_id = self._message_id(topic, notification.since, notification.version)
        result = await self._post(message_id, self._body(notification))
        if self._is_closed:
            return
        if result.error is None:
            self._succeed(notification)
        else:
            self._fail(result)

    async def _post(self, message_id: str, body: bytes) -> PostResult:
        now = int(self._now())
        headers = signed_headers(self._webhook.secret, message_id, now, body)
        self._hub.counts.bytes += len(body)
        async with self._webhooks.request_slots:
            return await self._webhooks.http_client.post(self._webhook.url, headers, body)

    def _body(self, notification: Notification) -> bytes:
        params = encode_params(notification, self._format)
        if len(params) > _MAX_BYTES:
            params = encode_params(notification, self._format._replace(detail="summary"))
        changed_at = notification.changes[-1].time if notification.changes else self._now()
        kind = notification.method.removeprefix("notifications/").replace("/", ".")
        return _encode(kind, changed_at, msgspec.Raw(params))

    def _message_id(self, *content: object) -> str:
        """Return the same id for the same content, also after a restart, so that a receiver can detect duplicates."""
        key = (self._subscriptions.epoch, self._key, *content)
        return f"msg_{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"

    def _succeed(self, notification: Notification) -> None:
        self._task = None
        # A delay by its own rate limit does not count as latency.
        has_delays = self._subscriber is not None and self._subscriber.settings.has_delays
        start = self._delivered_at if has_delays or not notification.changes else notification.changes[-1].time
        seconds = self._now() - start
        self._hub.counts.add_sent(notification.topic, seconds)
        self._save_success()
        if self._subscriber is None:
            return
        with self._lock:
            self._hub.observers.delivered(self._subscriber, notification, seconds)
            # Before the next delivery starts, so that its failure does not affect this one.
            self._subscriber.mark_ready()
            if self._prepared is not None:
                self._prepared.save()
            self._hub.wake(self._subscriber)

    def _fail(self, result: PostResult) -> None:
        self._task = None
        self._hub.counts.failures["webhook"] += 1
        attempts = self._webhook.attempts + 1
        is_dead = result.status == _GONE or attempts >= self._policy.webhook_attempts
        delay = retry_delay(attempts, self._policy.webhook_backoff, result.retry_after)
        self._close_subscriber(Reason.DISCONNECTED)
        self._save(
            attempts=attempts,
            next_attempt=None if is_dead else self._now() + delay,
            last_error=result.error,
            is_dead=is_dead,
        )
        if is_dead:
            logger.warning("the webhook %r is dead after %d failed attempts: %s", self._key[1], attempts, result.error)
            return
        logger.info("the webhook %r failed, next attempt in %.1f s: %s", self._key[1], delay, result.error)
        self._schedule_open(delay)

    def _save_success(self, **fields: Any) -> None:
        self._save(attempts=0, next_attempt=None, last_error=None, last_success=self._now(), **fields)

    def _save(self, **fields: Any) -> None:
        """Save fields of the webhook, unless it has another URL or secret now: a new delivery replaces this one."""
        previous = self._webhook
        self._webhook = structs.replace(previous, **fields)
        with self._lock:
            durable = self._durables.get(self._key)
            if durable is None or (saved := durable.webhook) is None:
                return
            if (saved.url, saved.secret) == (previous.url, previous.secret):
                self._durables.change_webhook(self._key, structs.replace(saved, **fields))

    def _start_task(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        # In an empty context: the current one can belong to the caller that made the change.
        return self._loop.create_task(self._run(work), context=contextvars.Context())

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # a defect here must not stop the other webhooks; the owner sees it
            logger.exception("the webhook %r failed", self._key[1])
            if self._is_closed:
                self._hub.counts.failures["webhook"] += 1
            else:
                self._fail(PostResult(error=f"{type(error).__name__}: {error}"))


def _settings(durable: DurableSubscription) -> tuple[object, ...]:
    webhook = durable.webhook
    target = (webhook.url, webhook.secret, webhook.scopes) if webhook is not None else None
    return durable.features, durable.uris, durable.terms, durable.ttl, target


def _encode(kind: str, timestamp: float, data: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "timestamp": iso_time(timestamp), "data": data})
