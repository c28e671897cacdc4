"""Webhooks: durable subscriptions that are delivered to a URL, for whoever can't hold a stream open.

Level-triggered like every lane: one delivery at a time, and what changes meanwhile waits in the mailbox as a set of
topics. A delivery counts as told when its receiver answered 2xx. After a failure the subscriber is closed, and with it
goes what was on its way; when the back-off is over it enters anew and is told what differs then, as after a restart.
Whoever keeps failing is dead: nothing is sent until somebody puts the subscription again.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from tidings.core.frames import CURSOR_KEY, FILTER_KEY, REFETCH_KEY, FrameFormat, write
from tidings.core.history import moment
from tidings.core.model import Feature, Notification, Reason, Topic
from tidings.core.redact import topic_name
from tidings.core.subscriber import PENDING, ConnectionKind, Subscriber
from tidings.errors import TidingsError
from tidings.server.authorization import Principal
from tidings.server.listen_options import ListenOptions, from_any_thread
from tidings.store.durable import SERVER, DurableSubscription, Key, Owner, Webhook
from tidings.store.durable_connection import DurableConnection
from tidings.webhooks.http_client import Outcome, WebhookClient, check_url
from tidings.webhooks.signature import check_secret, new_secret, sign

if TYPE_CHECKING:
    from tidings.live import Live

__all__ = ["Webhooks"]

logger = logging.getLogger(__name__)

_KIND = ConnectionKind("none", "webhook")

_LONGEST_BACKOFF = 3600.0
"""Seconds between two attempts, at most, unless the receiver asks for more."""
_LONGEST_RETRY_AFTER = 24 * 3600.0
_AT_ONCE = 64
"""Requests under way at the same time."""
_GONE = 410
_MOST_BYTES = 1 << 20
"""Of one delivery: past it, it goes without the items themselves."""
_ROUNDS = 2
"""Calls to refetch, one right after the other, while more changes than anybody can remember."""
_AGAIN = 15.0
"""Seconds until a name is tried again that a stream has taken over."""


class Webhooks:
    """All webhooks of one server, from the moment that it has an event loop."""

    def __init__(
        self,
        live: Live,
        *,
        courier: WebhookClient | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._live = live
        policy = live.policy
        self.courier = courier or WebhookClient(timeout=policy.webhook_timeout, allow_private=policy.webhook_private)
        self.clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posts: dict[Key, _Post] = {}
        self.at_once = asyncio.Semaphore(_AT_ONCE)
        live.durables.follow(self._changed)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.at_once = asyncio.Semaphore(_AT_ONCE)
        for durable in self._live.durables.all():
            if durable.webhook is not None:
                try:
                    self._look(durable.key)
                except Exception:  # of one that was kept: the others, and the server, start all the same
                    logger.exception("the webhook %r can't be started", durable.name)
                    self._live.failures["webhook"] += 1

    def stop(self) -> None:
        for post in self._posts.values():
            post.close()
        self._posts.clear()
        self._loop = None

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
        """Have changes delivered to a URL from now on, for the server itself. Under a name that is there already, it
        takes that one's place and knows what that one was told. Without a secret it keeps the one it has, or is given
        one."""
        check_url(url, allow_loopback=True)
        if ttl is not None and not ttl >= 0:  # a NaN must not pass
            raise TidingsError(f"the ttl of a webhook is a number of seconds, not {ttl}")
        known = self._live.durables.get((SERVER, name))
        if secret is None:
            secret = known.webhook.secret if known is not None and known.webhook is not None else new_secret()
        longest = self._live.policy.durable_ttl
        durable = DurableSubscription(
            name=name,
            owner=SERVER,
            features=tuple(map(Feature, features)),
            uris=tuple(uris),
            terms=dict(terms or {}),
            ttl=longest if ttl is None else min(ttl, longest),
            webhook=Webhook(url=url, secret=check_secret(secret)),
        )
        if not durable.features and not durable.uris:
            raise TidingsError("a webhook has a list or a URI to watch")
        return self._live.durables.put(durable)

    def revive(self, name: str, owner: Owner = SERVER) -> DurableSubscription | None:
        """Try again now, whether or not it was given up; None if there is no such webhook."""
        durable = self._live.durables.get((owner, name))
        if durable is None or durable.webhook is None:
            return None
        return self._live.durables.put(structs.replace(durable, expires=None, webhook=durable.webhook.revived()))

    def remove(self, name: str, owner: Owner = SERVER) -> bool:
        """Forget one; whether there was one."""
        return self._live.durables.remove((owner, name))

    def __len__(self) -> int:
        return len(self._posts)

    def _changed(self, key: Key, durable: DurableSubscription | None) -> None:
        """Called by whoever puts or removes one, on any thread and with the hub's lock: only leave a note."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look, key)

    def _look(self, key: Key) -> None:
        """Serve one anew, as it is now."""
        if (post := self._posts.pop(key, None)) is not None:
            post.close()
        durable = self._live.durables.get(key)
        if self._loop is None or durable is None or durable.webhook is None or durable.webhook.is_dead:
            return
        try:
            self._check(durable.owner, durable.webhook.url)
        except TidingsError as error:
            # One that an earlier life of the server allowed, and this one does not.
            logger.warning(
                "the webhook %r is given up: Policy.webhooks or Policy.webhook_private no longer allows it",
                durable.name,
            )
            dead = structs.replace(durable.webhook, is_dead=True, next_attempt=None, last_error=str(error))
            self._live.durables.change(key, webhook=dead, expires=self._live.catalog.now() + durable.ttl)
            return
        self._posts[key] = _Post(self._live, self, durable, durable.webhook, self._loop)

    def may_have(self, owner: Owner) -> bool:
        """Whether this owner may have webhooks at all."""
        allowed = self._live.policy.webhooks
        return owner == SERVER or allowed == "anyone" or (allowed == "principals" and owner is not None)

    def _check(self, owner: Owner, url: str) -> None:
        if not self.may_have(owner):
            raise TidingsError("this server has no webhooks for its owner (Policy.webhooks)")
        check_url(url, allow_loopback=owner == SERVER or self._live.policy.webhook_private)


class _Post:
    """One webhook: waiting for its time, open, or with a request under way."""

    def __init__(
        self,
        live: Live,
        lane: Webhooks,
        durable: DurableSubscription,
        webhook: Webhook,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._live = live
        self._lane = lane
        self._key = durable.key
        self._webhook = webhook
        self._loop = loop
        self._subscriber: Subscriber | None = None
        self._visit: DurableConnection | None = None
        self._shape = FrameFormat()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._handed = 0.0
        pause = (webhook.next_attempt or 0.0) - lane.clock()
        # No pause is longer: the clock was another one then, or is not set yet.
        self._again(pause if pause <= _LONGEST_RETRY_AFTER else 0.0)

    def close(self) -> None:
        """Nothing more is sent; what was on its way was not told."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._leave(Reason.SHUTDOWN)

    # Opening

    def _again(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.0, delay), self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._live.durables.is_connected(self._key):
            self._again(_AGAIN)  # a stream has the name, and is told
            return
        self._task = self._spawn(self._enter)

    async def _enter(self) -> None:
        live = self._live
        durable = live.durables.get(self._key)
        if durable is None:
            return
        is_ours = durable.owner == SERVER
        principal = None if is_ours or durable.owner is None else Principal(*durable.owner, self._webhook.scopes)
        topics: list[Topic] = [*durable.features, *durable.uris]
        allowed = topics if is_ours else await live.gate.allowed(principal, topics)
        if self._is_over:
            return
        if refused := [topic for topic in topics if topic not in allowed]:
            self._fail(Outcome(error=f"its owner may no longer watch {', '.join(map(topic_name, refused[:3]))}"))
            return
        if not await self._tell_to_refetch(durable):
            return
        with live.catalog.lock:
            # What is put until here counts, and was not asked about yet.
            if live.durables.is_connected(self._key) or self._unless_another(durable) is None:
                self._come_back()
                return
            wish = ListenOptions(live, {FILTER_KEY: durable.terms} if durable.terms else None, None, principal)
            self._shape = wish.shape()
            asked = {"name": durable.name, "ttl": durable.ttl}
            visit = live.durables.enter(
                asked, durable.owner, durable.features, durable.uris, durable.terms, from_any_thread(self._pushed_out)
            )
        if visit is None:
            self._fail(Outcome(error="the server can't keep it now; its log says why"))
            return
        self._visit = visit
        subscriber = self._subscriber = live.hub.open(
            self._deliver,
            label=f"webhook {durable.name}",
            kind=_KIND,
            policy=wish.policy,
            filter=wish.filter,
            on_close=self._on_close,
        )
        subscriber.may = None if is_ours else live.gate.predicate(principal)
        visit.watch(subscriber, is_sure=True)
        live.hub.subscribe(subscriber, *durable.features, uris=durable.uris, told=visit.told())

    async def _tell_to_refetch(self, durable: DurableSubscription) -> bool:
        """Say first of what it missed more than anybody knows; whether it has taken that."""
        live = self._live
        for _ in range(_ROUNDS):
            with live.catalog.lock:
                if (now := self._unless_another(durable)) is None:
                    self._come_back()
                    return False
                as_of, newest = live.hub.notifications.revision, live.hub.notifications.newest_content
                told, refetch = live.durables.missed(self._key)
                # These it is told of by themselves.
                rest = {topic: None for topic, version in told.items() if version is None}
                cursor = live.cursor(durable.uris, rest, as_of) if refetch else None
            if not refetch:
                return True
            self._note(refetch=refetch)
            data = {"_meta": {REFETCH_KEY: refetch, CURSOR_KEY: cursor}}
            message = _encoded("resources.refetch", self._lane.clock(), data)
            outcome = await self._post(self._message_id(refetch, now.as_of, newest), message)
            if self._is_over:
                return False
            if outcome.error is not None:
                self._fail(outcome)
                return False
            with live.catalog.lock:
                if self._unless_another(durable) is not None:
                    live.durables.refetched(self._key, as_of)
                    self._note_success(refetch=(), last_refetch=self._lane.clock())
        self._again(max(live.policy.min_interval, live.policy.webhook_backoff))
        return False

    def _unless_another(self, durable: DurableSubscription) -> DurableSubscription | None:
        """As it is now, unless somebody has put something else under its name."""
        now = self._live.durables.get(self._key)
        return now if now is not None and _what_was_put(now) == _what_was_put(durable) else None

    def _come_back(self) -> None:
        """As whatever it is then; later, if a stream has the name and is told."""
        self._again(_AGAIN if self._live.durables.is_connected(self._key) else 0.0)

    def _pushed_out(self) -> None:
        """Somebody came under the same name, with a stream."""
        if not self._is_over:
            self._cut_off()
            self._leave(Reason.DISCONNECTED)
            self._again(_AGAIN)

    def _on_close(self, reason: Reason) -> None:
        self._subscriber = None
        if reason is Reason.OVERFLOW and not self._is_over:
            self._cut_off()
            self._again(_AGAIN)

    def _cut_off(self) -> None:
        """Whatever comes of the request under way, it is no longer ours: it would set a second timer."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task(self._loop):
            task.cancel()

    def _leave(self, reason: Reason) -> None:
        if self._subscriber is not None:
            subscriber, self._subscriber = self._subscriber, None
            self._live.hub.close(subscriber, reason)

    # Delivering

    def _deliver(self, notification: Notification) -> object:
        self._handed = self._live.catalog.now()
        self._task = self._spawn(partial(self._send, notification))
        return PENDING

    async def _send(self, notification: Notification) -> None:
        told = (_name(notification.topic), notification.since, notification.version)
        outcome = await self._post(self._message_id(*told), self._message(notification))
        if self._is_over:
            return
        if outcome.error is None:
            self._succeed(notification)
        else:
            self._fail(outcome)

    async def _post(self, message_id: str, message: bytes) -> Outcome:
        now = int(self._lane.clock())
        headers = {
            "content-type": "application/json",
            "user-agent": "tidings-webhook/1",
            "webhook-id": message_id,
            "webhook-timestamp": str(now),
            "webhook-signature": sign(self._webhook.secret, message_id, now, message),
        }
        self._live.hub.counts.bytes += len(message)
        async with self._lane.at_once:
            return await self._lane.courier.post(self._webhook.url, headers, message)

    def _message(self, notification: Notification) -> bytes:
        line = write(notification, self._shape)
        if len(line) > _MOST_BYTES:
            line = write(notification, self._shape._replace(detail="summary"))
        frame = msgspec.json.decode(line)
        happened = notification.changes[-1].time if notification.changes else self._lane.clock()
        kind = frame["method"].removeprefix("notifications/").replace("/", ".")
        return _encoded(kind, happened, frame["params"])

    def _message_id(self, *notifications: object) -> str:
        """The same for the same news to the same subscriber, also after a restart: receivers may tell by it that they
        have it already."""
        told = (self._live.epoch, self._key, *notifications)
        return f"msg_{hashlib.sha256(repr(told).encode()).hexdigest()[:32]}"

    def _succeed(self, notification: Notification) -> None:
        self._task = None
        # What its own pace held back is not late for that.
        is_paced = self._subscriber is not None and self._subscriber.policy.paces
        began = self._handed if is_paced or not notification.changes else notification.changes[-1].time
        self._live.hub.counts.tell(notification.topic, self._live.catalog.now() - began)
        self._note_success()
        live, subscriber = self._live, self._subscriber
        if subscriber is None:
            return
        with live.catalog.lock:
            # Before the next one is under way, which would not be known to be the first that failed.
            subscriber.is_ready = True
            if self._visit is not None:
                self._visit.remember()
            live.hub.wake(subscriber)

    def _fail(self, outcome: Outcome) -> None:
        self._task = None
        self._live.failures["webhook"] += 1
        policy = self._live.policy
        attempts = self._webhook.attempts + 1
        is_dead = outcome.status == _GONE or attempts >= policy.webhook_attempts
        delay = min(policy.webhook_backoff * 2 ** min(attempts - 1, 30), _LONGEST_BACKOFF)
        # Half of it is chance, so that those who failed together don't come back together.
        delay = max(delay * random.uniform(0.5, 1.0), min(outcome.retry_after or 0.0, _LONGEST_RETRY_AFTER))
        self._leave(Reason.DISCONNECTED)
        self._note(
            attempts=attempts,
            next_attempt=None if is_dead else self._lane.clock() + delay,
            last_error=outcome.error,
            is_dead=is_dead,
        )
        if is_dead:
            logger.warning("the webhook %r is given up after %d attempts: %s", self._key[1], attempts, outcome.error)
            return
        logger.info("the webhook %r failed, and is tried again in %.1f s: %s", self._key[1], delay, outcome.error)
        self._again(delay)

    def _note_success(self, **fields: Any) -> None:
        self._note(attempts=0, next_attempt=None, last_error=None, last_success=self._lane.clock(), **fields)

    def _note(self, **fields: Any) -> None:
        """How it goes, unless it has become another one meanwhile: that has a post of its own, soon."""
        live, ours = self._live, self._webhook
        self._webhook = structs.replace(ours, **fields)
        with live.catalog.lock:
            durable = live.durables.get(self._key)
            if durable is None or (kept := durable.webhook) is None:
                return
            if (kept.url, kept.secret) == (ours.url, ours.secret):
                kept = structs.replace(kept, **fields)
                expires = live.durables.expiry(structs.replace(durable, webhook=kept))
                live.durables.change(self._key, webhook=kept, expires=expires)

    def _spawn(self, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        # In nobody's context: whoever publishes has one, with a caller in it perhaps.
        return self._loop.create_task(self._guarded(work), context=contextvars.Context())

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # ours; the webhook's owner sees it, and everybody else goes on
            logger.exception("the webhook %r failed", self._key[1])
            if self._is_over:
                self._live.failures["webhook"] += 1
            else:
                self._fail(Outcome(error=f"{type(error).__name__}: {error}"))


def _what_was_put(durable: DurableSubscription) -> tuple[object, ...]:
    webhook = durable.webhook
    to = (webhook.url, webhook.secret, webhook.scopes) if webhook is not None else None
    return durable.features, durable.uris, durable.terms, durable.ttl, to


def _encoded(kind: str, happened: float, data: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "timestamp": moment(happened), "data": data})


def _name(topic: Topic) -> str:
    return topic if isinstance(topic, str) else topic.value
