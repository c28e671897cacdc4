"""Clients of the durable subscriptions of a `StoredServer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.stores import StoredServer
from tidings import Feature, Notification, Version
from tidings.core.subscriber import Subscriber
from tidings.store.durable import DurableSubscription, Owner
from tidings.store.durable_connection import DurableConnection

KEY = (None, "laptop")


def record_of(server: StoredServer) -> DurableSubscription:
    """Return the record of the subscription that a `Client` has by default."""
    record = server.durables.get(KEY)
    assert record is not None
    return record


class Client:
    """One connection of a client, and the notifications that it received over it."""

    subscriber: Subscriber

    def __init__(
        self,
        server: StoredServer,
        *features: Feature,
        uris: str | Iterable[str] = (),
        name: str = "laptop",
        owner: Owner = None,
        ttl: Any = None,
        resume: dict[Any, Version | None] | None = None,
        confirms_receipt: bool = False,
        result: object = None,
        **options: Any,
    ) -> None:
        features = features or (Feature.TOOLS,)
        uris = [uris] if isinstance(uris, str) else list(uris)
        self.received: list[Notification] = []
        self.result = result
        """Returned for each notification."""
        self.is_ended = False
        requested = {"name": name, "ttl": ttl}
        self._connection = server.durables.connect(requested, owner, features, uris, {}, self._end)
        self.subscriber = server.hub.open(self._receive, **options)
        told: dict[Any, Version | None] = {}
        if self._connection is not None:
            self._connection.attach(self.subscriber, confirms_receipt=confirms_receipt)
            told = self._connection.told()
        server.hub.subscribe(self.subscriber, *features, uris=uris, told={**told, **(resume or {})})

    def _receive(self, notification: Notification) -> object:
        self.received.append(notification)
        return self.result

    def _end(self) -> None:
        self.is_ended = True
        self.disconnect()

    def disconnect(self) -> None:
        self.subscriber.close()

    @property
    def is_durable(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> DurableConnection:
        assert self._connection is not None
        return self._connection

    @property
    def is_new(self) -> object:
        return self.connection.ack["isNew"]

    @property
    def changes(self) -> list[tuple[str, str]]:
        """The operation and key of each change that it received."""
        return [(change.operation.value, change.key) for each in self.received for change in each.changes]

    @property
    def topics(self) -> list[tuple[Any, bool]]:
        """The topic of each notification, and whether the notification is complete."""
        return [(each.topic, each.complete) for each in self.received]
