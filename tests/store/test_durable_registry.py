"""Durable subscriptions: a client that returns is told what differs from what it was last told, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from tests.support.durables import KEY, Client, record_of
from tests.support.stores import StoredServer
from tidings import Feature, LimitReached, TidingsError
from tidings.core.filters import Filter
from tidings.store.durable import SERVER, DurableSubscription, Owner, Webhook
from tidings.store.durable_registry import DurableSubscriptions

TOOLS, PROMPTS, RESOURCES = Feature.TOOLS, Feature.PROMPTS, Feature.RESOURCES


def test_returning_client_is_told_exactly_what_differs(server: StoredServer) -> None:
    server.catalog.prompts.add({"name": "p"})
    client = Client(server, TOOLS, PROMPTS)
    assert client.connection.ack == {"name": "laptop", "ttl": server.policy.durable_ttl, "isNew": True}
    assert client.received == [], "a new one knows everything as of now"
    server.add_tools("a")
    server.confirm_all()
    client.disconnect()
    server.add_tools("b", "c")
    server.catalog.tools.remove("c")

    client = Client(server, TOOLS, PROMPTS)

    assert client.is_new is False
    assert client.changes == [("added", "b")]
    assert client.received[0].complete
    server.add_tools("d")
    assert client.changes == [("added", "b"), ("added", "d")]


@pytest.mark.parametrize("is_connected", [True, False])
def test_client_of_a_killed_server_is_told_what_differs_or_to_refetch(server: StoredServer, is_connected: bool) -> None:
    """A client that was connected may have been told of the changes before the kill, or not."""
    uris = ["a://b", "a://c"]
    client = Client(server, TOOLS, uris=uris)
    server.add_tools("a")
    server.catalog.resources.updated("a://b")
    server.confirm_all()
    if not is_connected:
        client.disconnect()
    server.write()
    server.add_tools("b")
    server.catalog.resources.updated("a://c")
    server.store.write(server.batch)  # only the changes, not what the client was told of them
    server.kill()
    server.add_tools("c")

    client = Client(server, TOOLS, uris=uris)

    assert client.is_new is False
    assert client.topics == [(TOOLS, not is_connected), ("a://c", not is_connected)]
    assert client.changes == ([] if is_connected else [("added", "b"), ("added", "c"), ("updated", "a://c")])


def test_client_is_told_to_refetch_what_the_journal_has_dropped() -> None:
    server = StoredServer(journal_changes=1)
    Client(server, TOOLS, uris="a://{+path}").disconnect()
    server.add_tools("a", "b")
    server.catalog.resources.updated("a://1")
    server.catalog.resources.updated("a://2")

    client = Client(server, TOOLS, uris="a://{+path}")
    assert set(client.topics) == {(TOOLS, False), ("a://1", False), ("a://2", False)}


def test_client_is_told_to_refetch_if_it_missed_more_than_its_mailbox_holds() -> None:
    server = StoredServer(max_pending=10)
    Client(server, TOOLS, uris="a://{+path}").disconnect()
    for number in range(50):
        server.catalog.resources.updated(f"a://{number}")

    client = Client(server, TOOLS, uris="a://{+path}")
    assert not client.subscriber.is_closed, "after a new connection it would be the same"
    assert client.changes == []
    assert client.connection.resumed().refetch == ("a://{+path}",), "for the acknowledgement"


def test_changes_that_only_the_filter_excluded_are_no_reason_to_refetch() -> None:
    server = StoredServer(journal_changes=1)
    only_keep = Filter(names=["keep*"])
    first = Client(server, filter=only_keep)
    server.add_tools("other1", "other2", "other3")
    first.disconnect()

    second = Client(server, filter=only_keep)

    assert (first.received, second.received) == ([], [])
    server.add_tools("keep")
    assert second.changes == [("added", "keep")]


def test_cursor_of_the_client_has_precedence_over_the_record(server: StoredServer) -> None:
    server.add_tools("a")
    version = server.catalog.version(TOOLS)
    client = Client(server, TOOLS, PROMPTS)
    server.add_tools("b")
    server.confirm_all()
    client.disconnect()
    server.catalog.prompts.add({"name": "p"})

    assert Client(server, TOOLS, PROMPTS, resume={TOOLS: version}).changes == [("added", "b"), ("added", "p")]


def test_newer_connection_has_the_name_and_the_older_one_ends(server: StoredServer) -> None:
    older = Client(server)
    server.add_tools("a")
    server.confirm_all()
    newer = Client(server)
    server.add_tools("b")

    assert older.is_ended
    assert older.changes == [("added", "a")]
    assert newer.changes == [("added", "b")]
    server.confirm_all()
    newer.disconnect()
    assert not newer.is_ended
    server.add_tools("c")
    assert Client(server).changes == [("added", "c")]


def test_name_belongs_to_its_owner(server: StoredServer) -> None:
    owners: list[Owner] = [None, ("me", None), ("you", None)]
    clients = [Client(server, owner=owner) for owner in owners]

    assert [client.is_new for client in clients] == [True, True, True]
    assert not any(client.is_ended for client in clients)
    assert [record.owner for record in server.durables.all()] == owners
    assert [record.owner for record in server.durables.all(("me", None))] == [("me", None)]
    server.durables.put(DurableSubscription(name="laptop", owner=("me", "x"), ttl=9))
    server.durables.put(DurableSubscription(name="laptop", owner=SERVER, ttl=9))
    assert {record.owner for record in server.durables.all()} == {*owners, ("me", "x"), SERVER}


# Watched topics


def test_topics_that_are_new_in_a_subscription_are_known_as_of_now(server: StoredServer) -> None:
    Client(server, TOOLS, uris=["a://1", "b://{+path}"]).disconnect()
    server.catalog.prompts.add({"name": "p"})
    for uri in ("a://1", "a://2", "b://1", "c://1"):
        server.catalog.resources.updated(uri)

    client = Client(server, TOOLS, PROMPTS, uris=["a://1", "a://2", "b://{+path}", "c://{+path}"])

    assert client.changes == [("updated", "a://1"), ("updated", "b://1")]
    client.disconnect()
    server.catalog.resources.updated("a://2")
    assert Client(server, PROMPTS, uris=["a://2"]).changes == [("updated", "a://2")]


def test_pattern_that_is_new_in_a_record_is_known_as_of_when_it_was_put(server: StoredServer) -> None:
    Client(server, uris="a://{+path}").disconnect()
    for uri in ("a://1", "b://1"):
        server.catalog.resources.updated(uri)
    server.durables.put(structs.replace(record_of(server), uris=("a://{+path}", "b://{+path}")))
    for uri in ("a://2", "b://2"):
        server.catalog.resources.updated(uri)

    client = Client(server, uris=["a://{+path}", "b://{+path}"])
    assert sorted(client.changes) == [("updated", "a://1"), ("updated", "a://2"), ("updated", "b://2")]


def test_changes_of_contents_whose_versions_are_not_stored_one_by_one_are_told(server: StoredServer) -> None:
    uris = [f"a://{number}" for number in range(1000)]
    for uri in uris:
        server.catalog.resources.updated(uri)
    Client(server, uris=uris).disconnect()
    server.catalog.resources.updated("a://999")
    server.catalog.resources.updated("a://5")
    server.write()
    server.kill()

    assert len(record_of(server).contents) < 300
    assert sorted(Client(server, uris=uris).changes) == [("updated", "a://5"), ("updated", "a://999")]


def test_record_has_no_contents_that_are_no_longer_watched(server: StoredServer) -> None:
    record = DurableSubscription(name="laptop")
    for number in range(3):
        uris = ("b://1", *(f"a://{number}/{each}" for each in range(50)))
        record = server.durables.put(DurableSubscription(name="laptop", uris=uris, ttl=9, expires=server.now + 9))
        for uri in uris:
            server.catalog.resources.updated(uri)
    assert list(record.contents) == ["b://1"]


# A client may have fetched a version that it was never told


@pytest.mark.parametrize(
    ("steps", "is_told"),
    [
        ("fetch A", True),
        ("A fetch", False),
        ("A kill", True),
        ("connect kill", False),
        ("connect kill A B", False),
    ],
)
@pytest.mark.parametrize("has_cursor", [True, False])
def test_client_is_told_to_refetch_if_it_may_have_fetched_another_version(
    server: StoredServer, steps: str, is_told: bool, has_cursor: bool
) -> None:
    """The client was told A and disconnected. Then the content was B. A killed server does not know what was
    fetched."""
    topics, uri = (TOOLS, "a://b"), "a://b"

    def change(content: str) -> None:
        server.catalog.tools.replace([{"name": content}])
        server.catalog.resources.updated(uri, etag=content)

    client = Client(server, TOOLS, uris=uri)
    change("A")
    server.confirm_all()
    client.disconnect()
    change("B")
    for step in steps.split():
        match step:
            case "fetch":
                for topic in topics:
                    server.hub.notifications.fetched.record(topic, server.catalog.version(topic))
            case "kill":
                server.write()
                server.kill()
            case "connect":
                client = Client(server, TOOLS, uris=uri)
                server.confirm_all()
                client.disconnect()
            case content:
                change(content)

    cursor: dict[Any, Any] = {topic: server.catalog.version(topic) for topic in topics} if has_cursor else {}
    expected = [(topic, False) for topic in topics] if is_told and not has_cursor else []
    assert Client(server, TOOLS, uris=uri, resume=cursor).topics == expected


# Expiry, limits and invalid requests


@pytest.mark.parametrize(
    ("requested", "ttl"),
    [(60, 60.0), (1.5, 1.5), *((invalid, 1000.0) for invalid in (None, 10**9, 10**400, -1, True, "x"))],
)
def test_subscription_expires_its_ttl_after_its_client_disconnected(requested: Any, ttl: float) -> None:
    server = StoredServer(durable_ttl=1000)
    client = Client(server, ttl=requested)
    assert client.connection.ack["ttl"] == ttl
    server.now += 5000
    assert len(server.durables.all()) == 1, "not while it is connected"
    client.disconnect()
    server.now += ttl - 0.5
    assert len(server.durables.all()) == 1
    server.now += 1

    assert server.durables.all() == []
    assert server.durables.get(KEY) is None
    server.add_tools("a")
    client = Client(server)
    assert client.is_new is True
    assert client.received == []


def test_client_that_was_connected_when_the_server_was_killed_has_its_whole_ttl() -> None:
    server = StoredServer(durable_ttl=1000)
    Client(server)
    server.write()
    server.now += 5000
    server.kill()
    assert len(server.durables.all()) == 1
    server.now += 1001
    assert server.durables.all() == []
    server.write()
    server.kill()
    assert len(server.durables) == 0, "it is removed from the store too"


@pytest.mark.parametrize("expires", [None, 1001.0])
def test_webhook_expires_only_after_its_delivery_was_given_up(server: StoredServer, expires: float | None) -> None:
    retrying = Webhook(url="https://a.example/", secret="s", attempts=3, next_attempt=9000.0)
    dead = Webhook(url="https://a.example/", secret="s", is_dead=True)
    records = [
        DurableSubscription(name=name, ttl=5, expires=expires, webhook=webhook)
        for name, webhook in (("retrying", retrying), ("dead", dead))
    ]
    server.now += 0.5
    durables = DurableSubscriptions(server.hub, records)
    expiries = {record.name: record.expires for record in durables.all()}
    assert expiries == {"retrying": None, "dead": 1005.5 if expires is None else expires}
    server.now += 10
    assert [record.name for record in durables.all()] == ["retrying"]


@pytest.mark.parametrize("requested", [None, 3, "laptop", [], {}, {"name": ""}, {"name": 3}, {"name": "x" * 257}])
def test_request_without_a_valid_name_is_not_durable(server: StoredServer, requested: Any) -> None:
    assert server.durables.connect(requested, None, [TOOLS], [], {}, lambda: None) is None
    assert len(server.durables) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "1 to 256 characters"),
        ({"name": "x" * 257}, "1 to 256 characters"),
        ({"name": "\ud800"}, "an unpaired surrogate"),
        ({"uris": ("a://\ud800*",)}, "an unpaired surrogate"),
        ({"terms": {"names": ["\ud800"]}}, "an unpaired surrogate"),
        ({"uris": tuple(f"a://{number:0100}" for number in range(10_000))}, "watch fewer URIs"),
    ],
    ids=["empty name", "long name", "name", "uri", "terms", "size"],
)
def test_record_that_cannot_be_stored_is_refused(server: StoredServer, fields: dict[str, Any], message: str) -> None:
    record = DurableSubscription(**{"name": "laptop", **fields})
    with pytest.raises(TidingsError, match=message):
        server.durables.put(record)
    requested = {"name": record.name}
    assert server.durables.connect(requested, None, [TOOLS], record.uris, record.terms, lambda: None) is None
    assert len(server.durables) == 0


@pytest.mark.parametrize(
    ("uris", "message"), [(("a://{",), "not a URI template"), (("a://1", "a://2"), r"Policy\.max_uris")]
)
def test_record_with_invalid_uris_is_refused(uris: tuple[str, ...], message: str) -> None:
    server = StoredServer(max_uris=1)
    with pytest.raises(TidingsError, match=message):
        server.durables.put(DurableSubscription(name="laptop", uris=uris))
    assert len(server.durables) == 0


def test_number_of_subscriptions_is_limited_in_total_and_per_owner() -> None:
    server = StoredServer(max_durables=5, max_durables_per_principal=2)
    mine = [Client(server, name=name, owner=("me", None)).is_durable for name in "abc"]
    assert mine == [True, True, False]
    assert [Client(server, name=name).is_durable for name in "abcd"] == [True, True, True, False]
    with pytest.raises(LimitReached, match=r"there are 5 durable subscriptions; Policy\.max_durables allows 5"):
        server.durables.put(DurableSubscription(name="z"))
    assert server.durables.remove((None, "a"))
    record = server.durables.put(DurableSubscription(name="z", features=(TOOLS,), ttl=5))
    assert record.lists[TOOLS] == server.catalog.version(TOOLS)
    assert Client(server, name="a", owner=("me", None)).is_durable, "an existing one is not limited"


# Changes of records


def test_removed_subscription_ends_its_connection_and_calls_the_listeners(server: StoredServer) -> None:
    keys: list[Any] = []
    server.durables.follow(keys.append)
    client = Client(server)
    server.durables.put(DurableSubscription(name="other", ttl=9))

    assert server.durables.remove(KEY)
    assert not server.durables.remove(KEY)
    assert client.is_ended
    server.write()
    server.kill()
    assert [record.name for record in server.durables.all()] == ["other"]
    assert keys == [(None, "other"), KEY]


def test_record_with_other_topics_ends_the_connection_and_keeps_what_it_was_told(server: StoredServer) -> None:
    client = Client(server, TOOLS, uris="a://1")
    server.confirm_all()
    server.add_tools("a")
    server.confirm_all()
    server.durables.put(DurableSubscription(name="laptop", features=(TOOLS, PROMPTS), uris=("b://1",), ttl=9))
    assert client.is_ended
    client.disconnect()
    server.write()
    server.kill()

    record = record_of(server)
    assert (record.features, record.uris, record.expires) == ((TOOLS, PROMPTS), ("b://1",), server.now + 9)
    assert Client(server, TOOLS, PROMPTS, uris="b://1").changes == []


def test_record_with_the_same_topics_keeps_the_connection(server: StoredServer) -> None:
    client = Client(server, TOOLS, PROMPTS)
    server.durables.put(DurableSubscription(name="laptop", features=(PROMPTS, TOOLS), ttl=9))
    assert not client.is_ended
    assert server.durables.is_connected(KEY)
    client.disconnect()
    assert record_of(server).expires == server.now + 9


def test_changed_fields_and_options_survive_a_restart(server: StoredServer) -> None:
    server.durables.connect({"name": "laptop"}, None, [TOOLS], [], {"operations": ["added"]}, lambda: None)
    server.durables.change(KEY, ttl=7.0)
    assert server.durables.change((None, "unknown"), ttl=7.0) is None
    server.write()
    server.kill()

    assert record_of(server).ttl == 7.0
    assert record_of(server).terms == {"operations": ["added"]}


def test_sum_of_the_sizes_is_limited() -> None:
    server = StoredServer(max_durable_bytes=1_000)
    uris = tuple(f"board://{number}" for number in range(10))

    def put(name: str, *uris: str) -> DurableSubscription:
        return server.durables.put(DurableSubscription(name=name, uris=uris))

    put("one", *uris)
    with pytest.raises(LimitReached, match=r"would need 1030 bytes; Policy\.max_durable_bytes allows 1000"):
        put("two", *uris, "board://10")
    assert not Client(server, uris=[*uris, "board://10"], name="two").is_durable
    put("one", *uris[:5])
    assert Client(server, uris=[*uris, "board://10"], name="two").is_durable
    assert server.durables.remove((None, "two"))
    put("two", *uris, "board://10")
