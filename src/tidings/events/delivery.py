"""Deliver events to the URLs of their subscriptions.

Each subscription has at most one request in progress, and a timer while it waits for a retry. It has no task while
there is nothing to send.

There are two kinds of events:

* A change of a topic is level-triggered, as for a webhook. The subscription is a subscriber of the hub. A topic counts
  as told when the receiver responds with 2xx. A retry sends the difference at that time.
* An event that the server's own code emits is stored in `Occurrences`, and sent in order. A retry sends the same event.

After too many failures in a row, a subscription is suspended until its client renews it. It is removed if the receiver
responds with 410, if its principal may no longer watch the event, and when it expires.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from tidings.core.frames import REFETCH_KEY, FrameFormat, encode_params
from tidings.core.model import Feature, Notification, Reason, Topic
from tidings.core.subscriber import UNCONFIRMED, ConnectionKind, Subscriber
from tidings.core.tracer import DELIVER_EVENT
from tidings.errors import TidingsError
from tidings.events import draft
from tidings.events.occurrences import Occurrences
from tidings.events.slots import RequestSlots, origin_of
from tidings.events.types import RESOURCE_UPDATED, EventTopic
from tidings.server.authorization import Principal
from tidings.server.subscribe import PreparedSubscription, Subscriptions
from tidings.store.durable import DurableSubscription, EventTarget, Key, Owner
from tidings.webhooks.http_client import PostResult, WebhookClient, check_url
from tidings.webhooks.retry import MAX_BACKOFF, MAX_RETRY_AFTER, retry_delay
from tidings.webhooks.signature import signed_headers

__all__ = ["EventDeliveries", "error_category"]

logger = logging.getLogger(__name__)

_KIND = ConnectionKind("modern", "events")
_MAX_REFETCHES = 2
"""Refetch messages in immediate succession, while more contents change than the server can remember."""
_RECHECK_DELAY = 15.0
"""Seconds until the next attempt to open a subscription whose name a stream uses."""
_EXPIRY_INTERVAL = 5.0
"""Seconds between two checks for subscriptions that have expired."""


class EventDeliveries:
    """Delivers events to all subscriptions of one server, while the server has an event loop."""

    def __init__(self, subscriptions: Subscriptions, occurrences: Occurrences) -> None:
        self.subscriptions = subscriptions
        self.occurrences = occurrences
        self.policy = subscriptions.policy
        self.http_client = WebhookClient(timeout=self.policy.webhook_timeout, allow_private=self.policy.webhook_private)
        self.slots = RequestSlots()
        self.on_added: Callable[[DurableSubscription], None] = lambda record: None
        """Called with each new subscription, and at the start with each stored one."""
        self.on_removed: Callable[[DurableSubscription], None] = lambda record: None
        self._bridge = subscriptions.bridge
        self._durables = subscriptions.durables
        self._is_running = False
        self._deliveries: dict[Key, _EventDelivery] = {}
        self._urls: Counter[tuple[Owner, str]] = Counter()
        """The number of subscriptions by owner and URL."""
        self._keys: dict[str, Key] = {}
        """The keys of the subscriptions of the server's own events, by id."""
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._durables.follow(self._on_change)
        self._bridge.on_bind(self._start)

    def __len__(self) -> int:
        return len(self._deliveries)

    def _start(self) -> None:
        self._is_running = True
        self.slots = RequestSlots()
        for record in self._durables.all():
            if record.event is not None:
                self.update(record.key)
        for subscription in self.occurrences.subscriptions():
            if subscription not in self._keys:
                self.occurrences.remove_all(subscription)  # the subscription ended while the server did not run
        self._check_expiry()

    def stop(self) -> None:
        self._is_running = False
        for delivery in self._deliveries.values():
            delivery.close()
        self._deliveries.clear()
        self._keys.clear()
        self._urls.clear()
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()

    def update(self, key: Key) -> None:
        """Start, change or stop the delivery of a subscription that was added, changed or removed.

        Call this on the event loop.
        """
        record = self._durables.get(key)
        delivery = self._deliveries.get(key)
        if not self._is_running:
            return
        if record is None or record.event is None:
            if delivery is not None:
                del self._deliveries[key]
                self._keys.pop(key[1], None)
                self._urls[delivery.target] -= 1
                if not self._urls[delivery.target]:
                    del self._urls[delivery.target]
                delivery.close()
                self.on_removed(delivery.record)  # from here on, `emit` adds no event for it
                self.occurrences.remove_all(key[1])
            return
        if delivery is not None:
            delivery.renew(record)
            return
        self._deliveries[key] = delivery = _EventDelivery(self, record, record.event)
        self._keys[key[1]] = key
        self._urls[delivery.target] += 1
        self.on_added(record)
        delivery.start()

    def send_to(self, ids: Iterable[str]) -> None:
        """Send the waiting events of these subscriptions. Call this on the event loop."""
        for each in ids:
            if (key := self._keys.get(each)) is not None:
                self._deliveries[key].send_next()

    def has_url(self, owner: Owner, url: str) -> bool:
        """Return whether a subscription of an owner has this URL."""
        return (owner, url) in self._urls

    def allows(self, owner: Owner) -> bool:
        """Return whether the policy allows deliveries for this owner."""
        allowed = self.policy.webhooks
        return allowed == "anyone" or (allowed == "principals" and owner is not None)

    def check_url(self, url: str) -> None:
        check_url(url, allow_loopback=self.policy.webhook_private)

    async def post(
        self, subscription: str, secret: str, url: str, event: draft.Event, max_answer: int = 0
    ) -> PostResult:
        """Send one signed request. Wait first while too many requests are in progress."""
        async with self.slots.take(url):
            now = int(self.subscriptions.hub.catalog.now())
            headers = signed_headers(secret, event.id, now, event.body) | {draft.SUBSCRIPTION_HEADER: subscription}
            self.subscriptions.hub.counts.bytes += len(event.body)
            result = await self.http_client.post(url, headers, event.body, max_answer=max_answer)
            # A 4xx concerns one URL, and not all URLs of the receiver. A challenge that fails does not count: a client
            # may have named somebody else's receiver.
            is_failing = result.error is not None and (result.status is None or result.status >= 500)
            is_challenge = max_answer > 0
            if not (is_failing and is_challenge):
                self.slots.report(url, is_failing=is_failing)
            return result

    def may_send(self, record: DurableSubscription) -> bool:
        """Return whether the policy still allows requests to the URL of a subscription."""
        assert record.event is not None
        try:
            self.check_url(record.event.url)
        except TidingsError:
            return False
        return self.allows(record.owner)

    async def is_authorized(self, record: DurableSubscription) -> bool:
        """Return whether the owner of a subscription may still watch its event."""
        event = record.event
        assert event is not None
        topics: list[Topic] = [*record.features, *record.uris]
        topics = topics or [EventTopic(event.name, event.arguments)]
        principal = None if record.owner is None else Principal(*record.owner, record.scopes)
        return len(await self.subscriptions.authorization.filter(principal, topics)) == len(topics)

    def _on_change(self, key: Key) -> None:
        # Called in any thread, with the lock of the hub.
        if self._is_running:
            self._bridge.call_soon(self.update, key)

    def _check_expiry(self) -> None:
        self._durables.expire()
        loop = asyncio.get_running_loop()
        self._expiry_timer = loop.call_later(_EXPIRY_INTERVAL, self._check_expiry, context=contextvars.Context())


class _EventDelivery:
    """Delivers to one subscription."""

    def __init__(self, deliveries: EventDeliveries, record: DurableSubscription, event: EventTarget) -> None:
        self._deliveries = deliveries
        self._subscriptions = deliveries.subscriptions
        self._hub = deliveries.subscriptions.hub
        self._durables = deliveries.subscriptions.durables
        self._occurrences = deliveries.occurrences
        self._policy = deliveries.policy
        self._lock = self._hub.catalog.lock
        self._now = self._hub.catalog.now
        self.record = record
        self._key = record.key
        self._event = event
        self._is_topic = bool(record.features or record.uris)
        self._subscriber: Subscriber | None = None
        self._prepared: PreparedSubscription | None = None
        self._format = FrameFormat()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def target(self) -> tuple[Owner, str]:
        """The owner and the URL."""
        return self.record.owner, self._event.url

    def start(self) -> None:
        """Send now, or after the stored delay of a retry."""
        if self._event.is_suspended:
            return
        delay = (self._event.next_attempt or 0.0) - self._now()
        if 0.0 < delay <= MAX_RETRY_AFTER:  # no delay is longer; otherwise the clock was set back
            self._wait(delay)
        else:
            self._resume()

    def renew(self, record: DurableSubscription) -> None:
        """Use the new settings of the subscription. Send now if the renewal ended a suspension or a delay."""
        assert record.event is not None
        was_waiting = self._event.is_suspended or self._timer is not None
        self.record, self._event = record, record.event
        if was_waiting and record.event.next_attempt is None and not record.event.is_suspended:
            if self._timer is not None:
                self._timer.cancel()
            self._resume()

    def close(self) -> None:
        """Stop sending. After a restart, the receiver may get the request in progress again."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._close_subscriber(Reason.SHUTDOWN)

    def send_next(self) -> None:
        """Send the next event of the server's own code, unless a request is in progress or must wait."""
        is_waiting = self._task is not None or self._timer is not None or self._event.is_suspended
        if not is_waiting and not self._is_topic and self._occurrences.count(self._key[1]):
            self._start_task(self._send_occurrences)

    def _resume(self) -> None:
        self._timer = None
        if self._is_closed or self._task is not None:
            return
        if self._is_topic and self._durables.is_connected(self._key):
            if self._subscriber is None:
                self._wait(_RECHECK_DELAY)  # a stream uses its name
        elif self._is_topic:
            self._start_task(self._open)
        else:
            self.send_next()

    def _wait(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, self._resume, context=contextvars.Context())

    # Events of the server's own code

    async def _send_occurrences(self) -> None:
        while (event := self._occurrences.next(self._key[1])) is not None:
            if not await self._send(draft.Event(event.id, event.body), event.time):
                return
            self._occurrences.remove(self._key[1], event.id)

    # Changes of a topic

    async def _open(self) -> None:
        if not await self._check_rights():
            return
        prepared = await self._subscriptions.prepare_webhook(self.record)
        if not prepared.granted:
            self._wait(0.0)  # the rights ended after the check: check again
            return
        if not await self._send_refetch() or self._is_closed:
            return
        prepared.connect(self._on_replaced, self.record.terms)
        if not prepared.is_durable:
            self._wait(MAX_BACKOFF)  # the log says why
            return
        self._prepared = prepared
        self._format = prepared.frame_format()
        self._task = None  # a notification may be delivered before `subscribe` returns
        subscriber = prepared.subscribe(
            self._deliver, label=f"event {self._key[1]}", kind=_KIND, on_close=self._on_close, confirms=True
        )
        if not subscriber.is_closed:
            self._subscriber = subscriber

    async def _send_refetch(self) -> bool:
        """Tell the receiver to refetch if it missed changes that the server no longer knows.

        Return False if the subscription can't be opened now.
        """
        for _ in range(_MAX_REFETCHES):
            with self._lock:
                as_of, newest = self._hub.notifications.revision, self._hub.notifications.newest_content
                _, refetch = self._durables.missed(self._key)
            if not refetch:
                return True
            data = {"uri": refetch[0], "_meta": {REFETCH_KEY: refetch}}
            event_id = self._topic_event_id(RESOURCE_UPDATED, (refetch, self.record.as_of, newest))
            event = draft.encode_event(event_id, RESOURCE_UPDATED, self._now(), data)
            if not await self._send(event, self._now()):
                return False
            self._durables.mark_refetch_sent(self._key, as_of)
            self.record = self._durables.get(self._key) or self.record
        self._wait(max(self._policy.min_interval, self._policy.webhook_backoff))
        return False

    def _deliver(self, notification: Notification) -> object:
        self._start_task(partial(self._send_notification, notification))
        return UNCONFIRMED

    async def _send_notification(self, notification: Notification) -> None:
        changed_at = notification.changes[-1].time if notification.changes else self._now()
        if not await self._send(self._encode(notification, changed_at), changed_at) or self._subscriber is None:
            return
        with self._lock:
            self._task = None
            # Before the next delivery starts, so that its failure does not affect this one.
            self._subscriber.mark_ready()
            if self._prepared is not None:
                self._prepared.save()
            self._hub.wake(self._subscriber)

    def _encode(self, notification: Notification, time: float) -> draft.Event:
        event_id = self._topic_event_id(notification.topic, notification.version.revision)

        def encode(format: FrameFormat) -> draft.Event:
            params = msgspec.Raw(encode_params(notification, format))
            return draft.encode_event(event_id, self._event.name, time, params)

        event = encode(self._format)
        return event if len(event.body) <= draft.MAX_BODY else encode(self._format._replace(detail="summary"))

    def _topic_event_id(self, topic: object, revision: object) -> str:
        """Return the same id for the same version of a topic, also after a restart."""
        name = topic.value if isinstance(topic, Feature) else topic
        return f"evt_{hashlib.sha256(repr((self._subscriptions.epoch, name, revision)).encode()).hexdigest()[:32]}"

    def _on_replaced(self) -> None:
        """Stop sending, because the subscription was removed, or a stream connected under its name."""
        self._cancel_request()
        self._close_subscriber(Reason.REPLACED)
        if not self._is_closed:
            self._wait(_RECHECK_DELAY)

    def _on_close(self, reason: Reason) -> None:
        self._subscriber = None
        if reason in (Reason.OVERFLOW, Reason.REVOKED) and not self._is_closed:
            self._cancel_request()
            self._wait(self._policy.webhook_backoff if reason is Reason.OVERFLOW else 0.0)

    def _cancel_request(self) -> None:
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _close_subscriber(self, reason: Reason) -> None:
        if self._subscriber is not None:
            subscriber, self._subscriber = self._subscriber, None
            self._hub.close(subscriber, reason)

    # Both kinds of events

    async def _check_rights(self) -> bool:
        """End the subscription if its owner lost the right to it. Return whether it may be delivered."""
        if not self._deliveries.may_send(self.record):
            logger.warning("the event subscription %s has ended: the policy no longer allows it", self._key[1])
            self._count("revoked")
            self._durables.remove(self._key)
            return False
        if await self._deliveries.is_authorized(self.record):
            return not self._is_closed
        if self._is_closed:
            return False
        logger.info("the event subscription %s has ended: its owner may no longer watch it", self._key[1])
        self._count("revoked")
        event = draft.encode_termination(secrets.token_hex(8))
        await self._deliveries.post(self._key[1], self._event.signing_secrets(self._now()), self._event.url, event)
        if not self._is_closed:
            self._durables.remove(self._key)
        return False

    async def _send(self, event: draft.Event, changed_at: float) -> bool:
        """Send one event. Return False if it must be sent again later, or if the subscription has ended."""
        if not await self._check_rights():
            return False
        secret = self._event.signing_secrets(self._now())
        with self._hub.tracer.span(DELIVER_EVENT, event=self._event.name) as span:
            result = await self._deliveries.post(self._key[1], secret, self._event.url, event)
            if result.error is not None:
                span.set(error_category(result))
        if self._is_closed:
            return False
        if result.error is None:
            self._count("delivered")
            self._hub.counts.latency.add(self._now() - changed_at)
            self._save(attempts=0, next_attempt=None, last_error=None, failed_since=None, last_success=self._now())
            return True
        if result.status not in draft.NO_RETRY:
            self._fail(result)
            return False
        self._count("refused")
        logger.warning(
            "the receiver of %s at %s responded with %d; the event %s is not sent again",
            self._key[1],
            origin_of(self._event.url),
            result.status,
            event.id,
        )
        if result.status == 410:
            self._durables.remove(self._key)
            return False
        return True

    def _fail(self, result: PostResult) -> None:
        self._count("failed")
        attempts = self._event.attempts + 1
        is_suspended = attempts >= self._policy.webhook_attempts
        delay = retry_delay(attempts, self._policy.webhook_backoff, result.retry_after)
        self._close_subscriber(Reason.DISCONNECTED)
        self._save(
            attempts=attempts,
            next_attempt=None if is_suspended else self._now() + delay,
            last_error=error_category(result),
            failed_since=self._event.failed_since or self._now(),
            is_suspended=is_suspended,
        )
        level = logging.WARNING if is_suspended else logging.INFO
        outcome = "suspended" if is_suspended else f"next attempt in {delay:.1f} s"
        logger.log(level, "the event subscription %s failed, %s: %s", self._key[1], outcome, error_category(result))
        if not is_suspended:
            self._wait(delay)

    def _save(self, **fields: Any) -> None:
        """Save fields of the event target. Keep what the client has changed meanwhile by a renewal."""
        with self._lock:
            current = self._durables.get(self._key)
            if current is None or current.event is None:
                return
            self._event = structs.replace(current.event, **fields)
            self.record = self._durables.change(self._key, event=self._event) or self.record

    def _count(self, outcome: str) -> None:
        self._hub.counts.events[outcome] += 1

    def _start_task(self, work: Callable[[], Awaitable[None]]) -> None:
        # In an empty context: the current one can belong to the caller that made the change.
        self._task = asyncio.get_running_loop().create_task(self._run(work), context=contextvars.Context())

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:  # a defect here must not stop the other deliveries
            logger.exception("the event subscription %s failed", self._key[1])
            self._hub.counts.failures["event"] += 1
            if not self._is_closed:
                self._fail(PostResult(error="internal error", cause="connection"))
        finally:
            if self._task is asyncio.current_task():
                self._task = None
        if not self._is_closed:
            self.send_next()


def error_category(result: PostResult) -> draft.Reason:
    """Return the reason of a failed request that is shown to the client."""
    if result.status is not None:
        return "http_5xx" if result.status >= 500 else "http_4xx"
    return "timeout" if result.cause == "timeout" else "tls_error" if result.cause == "tls" else "connection_refused"
