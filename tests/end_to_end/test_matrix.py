"""Every kind of server notifies clients of every version, over both transports, exactly once of each change.

There is one real client per (kind, transport, version), for all tests of this module. Each step is one change, made
through the board's tool `change`. All notifications up to that of a later marker are compared with the expected ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import mcp_types as types
import pytest

from tests.support.sdk_clients import (
    DEADLINE,
    KINDS,
    LEGACY,
    MARKER,
    MODERN,
    MUTED,
    Received,
    RecordingClient,
    keys,
    listening,
    open_client,
    serving_all,
    stdio_server,
)
from tidings.core.frames import EXTENSION

pytestmark = pytest.mark.anyio

TRANSPORTS = ("stdio", "http")
VERSIONS = (*LEGACY, MODERN)
FAST = {*((transport, version) for transport in TRANSPORTS for version in (LEGACY[-1], MODERN)), ("http", MUTED)}
"""The newest version of each era, and the muted one. `make test-all` runs the others, too."""
CASES = [
    pytest.param((kind, transport, version), marks=() if (transport, version) in FAST else pytest.mark.slow)
    for kind in KINDS
    for transport in TRANSPORTS
    for version in VERSIONS
]
PLACES = ("request", "thread", "loop", "outside")

KEYS = {"tools": "zoom", "prompts": "zest", "resources": "board://zone", "templates": "board://zone/{number}"}
"""The item that the tests add to each list."""
BASE = {
    "tools": ["change", "steady"],
    "prompts": ["greet"],
    "resources": ["board://sprint"],
    "templates": ["board://card/{number}"],
}
"""The items that are always on each list, in the order of a list."""


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with serving_all({kind: (kind, {}) for kind in KINDS}) as urls:
        yield urls


# Listen streams of the modern era, several at once on one connection


@pytest.fixture(
    scope="module",
    params=[(kind, transport) for kind in KINDS for transport in TRANSPORTS],
    ids="-".join,
)
async def modern(request: pytest.FixtureRequest, urls: dict[str, str]) -> AsyncIterator[RecordingClient]:
    kind, transport = request.param
    async with open_client(urls[kind] if transport == "http" else stdio_server(kind), MODERN) as client:
        yield client


async def test_each_listen_stream_gets_only_its_topics(modern: RecordingClient) -> None:
    async with (
        modern.listen(prompts=False, resources=False) as tools,
        modern.listen("board://sprint", tools=False, prompts=False, resources=False) as contents,
        modern.listen("board://sprint", prompts=False) as both,
    ):
        assert len({each.subscription_id for each in (tools, contents, both)}) == 3
        assert tools.honored.prompts_list_changed is None
        assert contents.honored.resource_subscriptions == ["board://sprint", MARKER]

        await modern.change("add", feature="tools", key="shared")
        await modern.change("updated", uri="board://sprint")
        await modern.change("add", feature="prompts", key="unwanted")
        await modern.change("remove", feature="prompts", key="unwanted")
        await modern.change("remove", feature="tools", key="shared")
        await modern.until(lambda: len(modern.received) >= 6, "all of it")
        await modern.mark(streams=3)

        told = {each.subscription_id: summaries_of(modern, each) for each in (tools, contents, both)}
        lists = ["tools added shared", "tools removed shared"]
        sprint, marker = "content updated board://sprint", f"content updated {MARKER}"
        assert told[tools.subscription_id] == [*lists, marker]
        assert told[contents.subscription_id] == [sprint, marker]
        assert told[both.subscription_id] == [lists[0], sprint, lists[1], marker]
        modern.received.clear()


def summaries_of(client: RecordingClient, subscription: Any) -> list[str]:
    return [each.summary for each in client.received if each.subscription == subscription.subscription_id]


async def test_subscription_id_keeps_its_type(modern: RecordingClient) -> None:
    """The id is a string in the SDK's own `listen()`, and a number in its other requests."""
    wanted = types.SubscriptionFilter(resource_subscriptions=["board://sprint", MARKER])
    request = types.SubscriptionsListenRequest(params=types.SubscriptionsListenRequestParams(notifications=wanted))
    async with anyio.create_task_group() as tasks, modern.listen("board://sprint") as subscription:
        tasks.start_soon(modern.session.send_request, request, types.SubscriptionsListenResult)
        await modern.until(lambda: len(modern.received) == 1, "the acknowledgement")
        [acknowledged] = modern.received
        number = acknowledged.subscription

        await modern.change("updated", uri="board://sprint")
        await modern.until(lambda: len(modern.received) == 3, "both")

        assert acknowledged.method == "notifications/subscriptions/acknowledged"
        assert type(number) is int
        assert {each.subscription for each in modern.received[1:]} == {number, subscription.subscription_id}
        modern.received.clear()
        tasks.cancel_scope.cancel()


async def test_ended_listen_stream_leaves_nothing_behind(modern: RecordingClient) -> None:
    """On stdio by a cancellation, over HTTP by closing the response."""
    await modern.until_state(subscribers=0, watched=[], streams=0)
    async with modern.listen("board://sprint", "board://glob/*"):
        state = await modern.change("state")
        assert (state["subscribers"], state["streams"]) == (1, 1)
        assert state["watched"] == ["board://glob/*", MARKER, "board://sprint"]
    await modern.until_state(subscribers=0, watched=[], streams=0)

    await modern.change("updated", uri="board://sprint")
    async with modern.listen():
        await modern.settle()


async def test_listen_without_granted_topics_ends_with_its_result(modern: RecordingClient) -> None:
    assert modern.sdk_client is not None
    with anyio.fail_after(DEADLINE):
        for unwatchable in ([], ["board://{unclosed"]):
            async with modern.sdk_client.listen(resource_subscriptions=unwatchable) as subscription:
                assert subscription.honored == types.SubscriptionFilter()
                # The end is the result; without it this would raise SubscriptionLost.
                assert [event async for event in subscription] == []
    await modern.until_state(subscribers=0, streams=0)


# The matrix


class Board:
    """One client and its server."""

    def __init__(self, kind: str, transport: str, client: RecordingClient, subscription: Any) -> None:
        self.kind = kind
        self.transport = transport
        self.client = client
        self.subscription = subscription

    def expected(self, *summaries: str) -> list[str]:
        """Return the notifications that a client of this version gets."""
        if self.client.version == MUTED:
            return [summary for summary in summaries if summary.startswith("content ")]
        return list(summaries)

    async def step(self, what: str, *expected: str, where: str = "request", **args: Any) -> list[Received]:
        received = await self.client.step(what, *self.expected(*expected), where=where, **args)
        for each in received:
            # Every frame of a listen stream carries its id, and no other frame has one.
            assert each.subscription == (self.subscription.subscription_id if self.subscription else None)
        return received

    async def check_list(self, feature: str, *more: str, received: list[Received]) -> None:
        """Fetch the list, and check that it has these items, in order, and the version of the notifications."""
        items, version = await self.client.listed(feature)
        assert keys(items) == [*BASE[feature], *more]
        for each in received:
            if each.method.endswith("/list_changed"):
                assert version == {"revision": each.change["revision"], "digest": each.change["digest"]}

    def topic(self, feature: str) -> str:
        return "resources" if feature == "templates" else feature


@pytest.fixture(scope="module", params=CASES, ids="-".join)
async def board(request: pytest.FixtureRequest, urls: dict[str, str]) -> AsyncIterator[Board]:
    kind, transport, version = request.param
    server = urls[kind] if transport == "http" else stdio_server(kind)
    watched = ["board://sprint", "board://doomed", "board://folder", "board://glob/*", "board://tpl/{name}"]
    async with open_client(server, version) as client, listening(client, *watched) as subscription:
        yield Board(kind, transport, client, subscription)


async def test_capabilities_match_what_is_served(board: Board) -> None:
    capabilities = board.client.capabilities
    assert capabilities is not None
    assert capabilities.tools
    assert capabilities.prompts
    assert capabilities.resources
    flags = (capabilities.tools.list_changed, capabilities.prompts.list_changed, capabilities.resources.list_changed)

    assert flags == (board.client.version != MUTED,) * 3
    assert capabilities.resources.subscribe is True
    if board.client.is_modern:
        assert EXTENSION in (capabilities.extensions or {})
        assert board.subscription.honored.tools_list_changed
        assert board.subscription.honored.prompts_list_changed
        assert board.subscription.honored.resources_list_changed
        assert set(board.subscription.honored.resource_subscriptions) >= {"board://sprint", "board://glob/*", MARKER}


@pytest.mark.parametrize("feature", list(KEYS))
async def test_added_updated_and_removed_item_notifies_once_each(board: Board, feature: str) -> None:
    key, topic = KEYS[feature], board.topic(feature)

    received = await board.step("add", f"{topic} added {key}", feature=feature, key=key)
    await board.check_list(feature, key, received=received)
    await check_served(board.client, feature, key)

    received = await board.step(
        "update", f"{topic} updated {key}", feature=feature, key=key, fields={"description": "Updated in place."}
    )
    await board.check_list(feature, key, received=received)
    items, _ = await board.client.listed(feature)
    assert [item["description"] for item in items if key in item.values()] == ["Updated in place."]
    await check_served(board.client, feature, key)

    received = await board.step(
        "add", f"{topic} updated {key}", feature=feature, key=key, description="Replaced.", replace=True
    )
    await board.check_list(feature, key, received=received)

    received = await board.step("remove", f"{topic} removed {key}", feature=feature, key=key)
    await board.check_list(feature, received=received)


async def check_served(client: RecordingClient, feature: str, key: str) -> None:
    """Check that the listed item can be used, and that the one that was there before still can."""
    with anyio.fail_after(DEADLINE):
        if feature == "tools":
            for name in (key, "steady"):
                result = await client.session.call_tool(name, {})
                assert isinstance(result.content[0], types.TextContent)
                assert result.content[0].text == "steady"
        elif feature == "prompts":
            for name in (key, "greet"):
                prompt = await client.session.get_prompt(name, {"name": "you"})
                assert prompt.messages[0].content == types.TextContent(type="text", text="Greet you.")
        else:
            for uri in (key.replace("{number}", "7"), "board://sprint"):
                read = await client.session.read_resource(uri)
                assert isinstance(read.contents[0], types.TextResourceContents)
                assert read.contents[0].text


async def test_only_subscribed_contents_notify(board: Board) -> None:
    await board.step("updated", "content updated board://sprint", uri="board://sprint", metadata={"version": 2})
    await board.step("updated", uri="board://elsewhere")
    await board.step("updated", "content updated board://folder/a/b", uri="board://folder/a/b")
    await board.step("updated", uri="board://folders")
    await board.step("updated", "content updated board://glob/x", uri="board://glob/x")
    await board.step("updated", "content updated board://tpl/x", uri="board://tpl/x")
    await board.step("updated", uri="board://globe/x")


async def test_same_content_notifies_once(board: Board) -> None:
    etag = f"of {board.client.version} {board.transport}"

    await board.step("updated", "content updated board://sprint", uri="board://sprint", etag=etag)
    await board.step("updated", uri="board://sprint", etag=etag)
    await board.step("updated", "content updated board://sprint", uri="board://sprint", etag=etag + ", later")


async def test_deleted_resource_notifies_subscribers_and_leaves_the_list(board: Board) -> None:
    await board.step("add", "resources added board://doomed", feature="resources", key="board://doomed")

    received = await board.step(
        "deleted", "content deleted board://doomed", "resources removed board://doomed", uri="board://doomed"
    )
    await board.check_list("resources", received=[each for each in received if each.uri is None])
    assert received[0].method == "notifications/resources/updated"

    # Its subscription has ended with it, and a refresh does not bring it back.
    await board.step("refresh")
    await board.step("updated", uri="board://doomed")


async def test_operation_without_a_change_does_not_notify(board: Board) -> None:
    await board.step("add", "tools added same", feature="tools", key="same")
    await board.step("add", feature="tools", key="same", replace=True)
    await board.step("update", feature="tools", key="same", fields={"description": "Unchanging."})
    await board.step("refresh")
    await board.step(
        "many",
        steps=[
            {"what": "add", "args": {"feature": "prompts", "key": "brief"}},
            {"what": "remove", "args": {"feature": "prompts", "key": "brief"}},
        ],
    )
    await board.step("remove", "tools removed same", feature="tools", key="same")


async def test_several_changes_are_one_notification(board: Board) -> None:
    steps = [{"what": "add", "args": {"feature": "tools", "key": f"one-{number}"}} for number in range(3)]
    received = await board.step("many", "tools added one-0, tools added one-1, tools added one-2", steps=steps)
    await board.check_list("tools", "one-0", "one-1", "one-2", received=received)

    steps = [{"what": "remove", "args": {"feature": "tools", "key": f"one-{number}"}} for number in range(3)]
    received = await board.step("many", "tools removed one-0, tools removed one-1, tools removed one-2", steps=steps)
    await board.check_list("tools", received=received)


async def test_change_from_any_thread_or_task_notifies(board: Board) -> None:
    for where in PLACES:
        await board.step("add", "tools added here", where=where, feature="tools", key="here")
        fields = {"title": where}
        await board.step("update", "tools updated here", where=where, feature="tools", key="here", fields=fields)
        await board.step("remove", "tools removed here", where=where, feature="tools", key="here")
        await board.step("updated", "content updated board://sprint", where=where, uri="board://sprint")


Steps = list[tuple[str, dict[str, Any], list[str]]]


def both_ways(name: str, topic: str, key: str, remove: str | None = None) -> Steps:
    """Return steps that add an item by a method of the server, and remove it by another one, or through Live."""
    removal: tuple[str, dict[str, Any]] = (
        (remove, {"key": key}) if remove else ("remove", {"feature": topic, "key": key})
    )
    return [(name, {"key": key}, [f"{topic} added {key}"]), (*removal, [f"{topic} removed {key}"])]


SENT: Steps = [
    # `ctx.session.send_*()` is only a wake-up, too, and reaches every client.
    ("send", {"kind": "tool"}, []),
    ("send", {"kind": "prompt"}, []),
    ("send", {"kind": "resource"}, []),
    ("send", {"kind": "updated", "uri": "board://sprint"}, ["content updated board://sprint"]),
    ("send", {"kind": "updated", "uri": "board://elsewhere"}, []),
    ("add_and_send", {"key": "sent"}, ["tools added sent"]),
    ("remove", {"feature": "tools", "key": "sent"}, ["tools removed sent"]),
]
OWN: dict[str, Steps] = {
    "mcpserver": [
        *both_ways("own_add_tool", "tools", "own", "own_remove_tool"),
        *both_ways("own_tool", "tools", "own", "own_remove_tool"),
        *both_ways("own_add_prompt", "prompts", "own", "own_remove_prompt"),
        *both_ways("own_prompt", "prompts", "own", "own_remove_prompt"),
        # The SDK itself can't remove these.
        *both_ways("own_add_resource", "resources", "board://own"),
        *both_ways("own_resource", "resources", "board://own"),
        *both_ways("own_template", "resources", "board://own/{number}"),
        # `ctx.notify_*()` is only a wake-up: the digest decides whether a list changed.
        ("notify", {"kind": "tools"}, []),
        ("notify", {"kind": "prompts"}, []),
        ("notify", {"kind": "resources"}, []),
        ("notify", {"kind": "resource", "uri": "board://sprint"}, ["content updated board://sprint"]),
        ("notify", {"kind": "resource", "uri": "board://elsewhere"}, []),
        ("own_add_tool", {"key": "own"}, ["tools added own"]),
        ("quietly_then_notify", {"key": "own"}, ["tools updated own"]),
        ("own_remove_tool", {"key": "own"}, ["tools removed own"]),
        *SENT,
    ],
    "fastmcp": [
        *both_ways("own_add_tool", "tools", "own", "own_remove_tool"),
        *both_ways("own_tool", "tools", "own", "own_remove_tool"),
        *both_ways("own_add_prompt", "prompts", "own", "own_remove_prompt"),
        *both_ways("own_prompt", "prompts", "own", "own_remove_prompt"),
        *both_ways("own_add_resource", "resources", "board://own", "own_remove_resource"),
        *both_ways("own_resource", "resources", "board://own", "own_remove_resource"),
        *both_ways("own_add_template", "resources", "board://own/{number}", "own_remove_template"),
        *both_ways("own_template", "resources", "board://own/{number}", "own_remove_template"),
        *SENT,
    ],
    # It has handlers and no registry, so only a wake-up finds a change.
    "lowlevel": [
        ("own_set_and_refresh", {"feature": "prompts", "key": "own", "item": {"name": "own"}}, ["prompts added own"]),
        (
            "own_set_and_refresh",
            {"feature": "prompts", "key": "own", "item": {"name": "own", "title": "Own"}},
            ["prompts updated own"],
        ),
        ("own_set_and_refresh", {"feature": "prompts", "key": "own", "item": None}, ["prompts removed own"]),
        ("own_set_and_send", {"feature": "prompts", "key": "own", "item": {"name": "own"}}, ["prompts added own"]),
        ("own_set_and_send", {"feature": "prompts", "key": "own", "item": None}, ["prompts removed own"]),
        ("own_set_and_publish", {"feature": "prompts", "key": "own", "item": {"name": "own"}}, ["prompts added own"]),
        ("own_set_and_publish", {"feature": "prompts", "key": "own", "item": None}, ["prompts removed own"]),
        ("publish_update", {"uri": "board://sprint"}, ["content updated board://sprint"]),
        *SENT,
    ],
}
"""Changes by methods of the server itself, without Live, and the expected notifications."""


async def test_methods_of_the_server_itself_notify(board: Board) -> None:
    for where in PLACES if board.client.is_modern else PLACES[:1]:
        for what, args, expected in OWN[board.kind]:
            await board.step(what, *expected, where=where, **args)


async def test_refresh_finds_unnoticed_changes(board: Board) -> None:
    # Each client has its own name, because an item that Live removed from the server's own list stays removed.
    key = f"quiet-{board.transport}-{board.client.version}"
    if board.kind == "lowlevel":
        item = {"name": key, "inputSchema": {"type": "object"}}
        await board.client.change("own_set", feature="tools", key=key, item=item)
    else:
        await board.step("own_add_tool", f"tools added {key}", key=key)
        await board.client.change("quietly", key=key)
    await board.client.settle()

    operation = "added" if board.kind == "lowlevel" else "updated"
    received = await board.step("refresh", f"tools {operation} {key}")
    await board.check_list("tools", key, received=received)
    await board.step("refresh")

    if board.kind == "lowlevel":
        await board.step("update", f"tools updated {key}", feature="tools", key=key, fields={"title": "Quiet"})
        received = await board.step("remove", f"tools removed {key}", feature="tools", key=key)
        await board.check_list("tools", received=received)
        await board.client.change("own_set", feature="tools", key=key, item=None)
        await board.step("refresh")
    else:
        await board.step("own_remove_tool", f"tools removed {key}", key=key)


@pytest.mark.parametrize("feature", list(KEYS))
async def test_missing_or_duplicate_item_is_an_error_without_notification(board: Board, feature: str) -> None:
    key, missing = BASE[feature][0], KEYS[feature]
    client = board.client

    assert (await client.change("remove", feature=feature, key=missing)).startswith("NotFound: ")
    assert (await client.change("update", feature=feature, key=missing, fields={})).startswith("NotFound: ")
    assert (await client.change("add", feature=feature, key=key)).startswith("AlreadyExists: ")
    await client.settle()
    assert await client.names(feature) == BASE[feature]


async def test_muted_session_is_not_recorded_as_told(board: Board) -> None:
    await board.step("add", "tools added seen", feature="tools", key="seen")

    state = await board.client.change("state")
    is_muted = board.client.version == MUTED
    assert list(state["behind"].values()) == [["tools"] if is_muted else []]

    await board.step("remove", "tools removed seen", feature="tools", key="seen")
