"""The `authorize` function: asked before the acknowledgement, and for each URI that a pattern matches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from tidings import Catalog, Feature, Hub, Notification, Principal, Topic
from tidings.server.authorization import Authorization

ADA, BOB = Principal("ada", scopes=("admin",)), Principal("bob")


def authorize(principal: Principal | None, topic: Topic) -> bool:
    return topic != "board://secret" or principal == ADA


async def authorize_later(principal: Principal | None, topic: Topic) -> bool:
    return authorize(principal, topic)


def watch(principal: Principal, gate: Authorization, *uris: str) -> tuple[Catalog, list[str]]:
    catalog, told = Catalog(), []
    hub = Hub(catalog)

    def deliver(notification: Notification) -> None:
        told.append(str(notification.topic))

    subscriber = hub.open(deliver)
    subscriber.is_authorized = gate.predicate(principal)
    hub.subscribe(subscriber, uris=uris)
    return catalog, told


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("board://**", ["board://secret", "board://open"]),
        ("board://*", ["board://secret", "board://open"]),
        ("board://secre*", ["board://secret"]),
    ],
)
def test_pattern_does_not_match_unauthorized_uris(pattern: str, matched: list[str]) -> None:
    for principal in (ADA, BOB):
        catalog, told = watch(principal, Authorization(authorize), pattern)
        catalog.resources.updated("board://secret")
        catalog.resources.updated("board://open")
        assert told == [uri for uri in matched if authorize(principal, uri)]


def test_subresource_needs_its_own_authorization() -> None:
    gate = Authorization(lambda principal, topic: topic == "board://a")
    catalog, told = watch(BOB, gate, "board://a")
    catalog.resources.updated("board://a/b")
    catalog.resources.updated("board://a")
    assert told == ["board://a"]


def test_async_authorize_refuses_patterns() -> None:
    gate = Authorization(authorize_later)
    assert not gate.allows_patterns
    may = gate.predicate(ADA)
    assert may is not None
    assert not may("board://open")
    topics: list[Topic] = [Feature.TOOLS, "board://secret"]
    assert asyncio.run(gate.filter(BOB, topics)) == [Feature.TOOLS]
    assert asyncio.run(gate.filter(ADA, topics)) == topics


def test_authorize_that_returns_an_awaitable_refuses_patterns() -> None:
    """The acknowledgement must not name a topic that is never sent."""

    class Later:
        async def __call__(self, principal: Principal | None, topic: Topic) -> bool:
            return True

    def handed_on(principal: Principal | None, topic: Topic) -> Awaitable[bool]:
        return authorize_later(principal, topic)

    for authorize in (Later(), handed_on):
        gate = Authorization(authorize)
        topics: list[Topic] = [Feature.TOOLS, "board://**", "board://{name}", "board://open"]
        assert asyncio.run(gate.filter(ADA, topics)) == [Feature.TOOLS, "board://open"]


def test_truthy_answer_of_authorize_allows_patterns() -> None:
    gate = Authorization(lambda principal, topic: {"read"} if topic != "board://secret" else set())  # type: ignore[arg-type, return-value]  # a common slip
    assert asyncio.run(gate.filter(ADA, ["board://**", "board://secret"])) == ["board://**"]
    catalog, told = watch(ADA, gate, "board://**")
    catalog.resources.updated("board://secret")
    catalog.resources.updated("board://open")
    assert told == ["board://open"]


def test_failing_authorize_refuses() -> None:
    def broken(principal: Principal | None, topic: Topic) -> bool:
        raise RuntimeError("broken")

    gate = Authorization(broken)
    may = gate.predicate(ADA)
    assert may is not None
    assert not may("board://open")
    assert asyncio.run(gate.filter(ADA, [Feature.TOOLS])) == []
