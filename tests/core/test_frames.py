"""Frames match the official schemas, have the documented members, and are encoded once."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mcp_types.jsonrpc import JSONRPCNotification
from mcp_types.methods import SERVER_NOTIFICATIONS, parse_server_notification, validate_server_result

from tidings import Catalog, Change, Feature, Notification, Version
from tidings.core.delta import apply_patch
from tidings.core.frames import (
    CHANGE_KEY,
    CURSOR_KEY,
    DELETED_METHOD,
    KEEP_ALIVE,
    SUBSCRIPTION_KEY,
    FrameEncoder,
    FrameFormat,
    acknowledgement,
    encode_frame,
    encode_tag,
    listen_result,
    render,
)
from tidings.policy import Detail

SCHEMAS = ("2025-11-25", "2026-07-28")
DETAILS: tuple[Detail, ...] = ("full", "summary", "none")

PROMPT = {
    "name": "generate_text",
    "description": "…",
    "arguments": [{"name": "topic", "required": True, "description": "…"}, {"name": "tone", "required": False}],
}
RESOURCE = {"uri": "file:///a", "name": "a", "mimeType": "text/plain", "_meta": {"com.example/pages": 3}}
TEMPLATE = {"uriTemplate": "board://{sprint}", "name": "sprint"}

# Everything that may break a reader or a writer of lines, JSON or server-sent events.
NASTY = '\u2028\u2029\x85\r\n\x0b\x0c\x1c\x1d\x1e\x00\x7f"\\/é日本🦊\ufeff\U0010ffff data: id: :'
texts = st.text(st.characters(codec="utf-8"), max_size=30)


def notification_of(*steps: Callable[[Catalog], object]) -> Notification:
    """Return the notification of the last commit."""
    catalog = Catalog()
    published: list[tuple[Change, ...]] = []
    catalog.follow(published.append)
    for step in steps:
        step(catalog)
    changes = published[-1]
    return Notification(changes[0].topic, changes[-1].version, changes, since=changes[0].previous.revision)


def add_prompt(catalog: Catalog) -> None:
    catalog.prompts.add(PROMPT)


def add_three_tools(catalog: Catalog) -> None:
    catalog.tools.replace([{"name": name, "inputSchema": {"type": "object"}} for name in "abc"])


CASES: dict[str, Callable[[], Notification]] = {
    "tool added": lambda: notification_of(lambda catalog: catalog.tools.add({"name": "a", "inputSchema": {}})),
    "prompt added": lambda: notification_of(add_prompt),
    "prompt updated": lambda: notification_of(
        add_prompt, lambda catalog: catalog.prompts.update("generate_text", description="New", arguments=None)
    ),
    "prompt removed": lambda: notification_of(add_prompt, lambda catalog: catalog.prompts.remove("generate_text")),
    "resource added": lambda: notification_of(lambda catalog: catalog.resources.add(RESOURCE)),
    "template added": lambda: notification_of(lambda catalog: catalog.resources.add(TEMPLATE)),
    "several tools": lambda: notification_of(add_three_tools),
    "list incomplete": lambda: Notification(Feature.TOOLS, Version(9, "d9"), (), since=-1, complete=False),
    "content updated": lambda: notification_of(
        lambda catalog: catalog.resources.updated("file:///a", version=2, author=NASTY)
    ),
    "content updated, no metadata": lambda: notification_of(lambda catalog: catalog.resources.updated("file:///a")),
    "content deleted": lambda: notification_of(lambda catalog: catalog.resources.deleted("file:///a")),
    "content incomplete": lambda: Notification("file:///a", Version(9, "d9"), (), since=-1, complete=False),
}
SHAPES = [FrameFormat(*given) for given in product(DETAILS, (64, 2), (True, False), (True, False), (True, False))]


def read_events(frames: bytes) -> list[tuple[str, str]]:
    """Parse server-sent events as in the WHATWG standard."""
    events: list[tuple[str, str]] = []
    kind, data = "", list[str]()
    for line in frames.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if not line:
            if data:
                events.append((kind or "message", "\n".join(data)))
            kind, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data.append(value)
    return events


def read(frame: bytes, shape: FrameFormat) -> dict[str, Any]:
    """Return the one message of a frame."""
    if shape.is_sse:
        [(kind, text)] = read_events(frame)
        assert kind == "message"
        assert len(frame.decode().splitlines()) == 3, "one event even if U+2028 is a line break"
    else:
        text = frame.decode()
        assert text.endswith("\n")
        assert len(text.splitlines()) == 1
    message: dict[str, Any] = json.loads(text)
    return message


def told(notification: Notification, **shape: Any) -> dict[str, Any]:
    """Return the params of a notification."""
    params: dict[str, Any] = read(encode_frame(notification, FrameFormat(**shape)), FrameFormat(**shape))["params"]
    return params


def validate(message: dict[str, Any], schema: str) -> None:
    """Validate the message by the official schema of a version, and by the parser of the SDK."""
    method = message["method"]
    SERVER_NOTIFICATIONS[method, schema].model_validate(message, strict=True, by_name=False)
    parse_server_notification(method, schema, message["params"])


@pytest.mark.parametrize("case", CASES)
def test_every_frame_matches_the_official_schemas(case: str) -> None:
    notification = CASES[case]()
    for shape in SHAPES:
        message = read(encode_frame(notification, shape, encode_tag(NASTY) if shape.is_tagged else b""), shape)

        assert message["jsonrpc"] == "2.0"
        assert "id" not in message
        assert isinstance(message["params"], dict)
        JSONRPCNotification.model_validate(message)
        assert message["params"].get("_meta", {}).get(SUBSCRIPTION_KEY) == (NASTY if shape.is_tagged else None)
        if shape.is_extended and case == "content deleted":
            assert message["method"] == DELETED_METHOD
            continue  # the one method that is not the specification's
        assert message["method"] == notification.method
        for schema in SCHEMAS:
            validate(message, schema)


# Members


@pytest.mark.parametrize(
    ("feature", "definition", "key"),
    [
        (Feature.TOOLS, {"name": "a", "inputSchema": {}}, {"name": "a"}),
        (Feature.PROMPTS, PROMPT, {"name": "generate_text"}),
        (Feature.RESOURCES, RESOURCE, {"uri": "file:///a"}),
        (Feature.RESOURCES, TEMPLATE, {"uri": "board://{sprint}"}),
    ],
)
def test_full_detail_has_operation_item_and_summary(
    feature: Feature, definition: dict[str, Any], key: dict[str, str]
) -> None:
    notification = notification_of(lambda catalog: catalog.items(feature).add(definition))
    version = notification.version._asdict()

    assert told(notification) == {
        "operation": "added",
        feature.singular: definition,
        **(key if "uri" in key else {}),
        "_meta": {CHANGE_KEY: {"operation": "added", **key, "complete": True, **version}},
    }
    assert told(notification, epoch="e1")["_meta"][CURSOR_KEY] == {"epoch": "e1", "topics": {feature.value: version}}


def test_updated_item_is_new_and_removed_item_is_the_last() -> None:
    updated = told(CASES["prompt updated"]())
    removed = told(CASES["prompt removed"]())

    assert (updated["operation"], updated["prompt"]) == ("updated", {"name": "generate_text", "description": "New"})
    assert (removed["operation"], removed["prompt"]) == ("removed", PROMPT)


def test_summary_detail_has_only_the_summary() -> None:
    full, summary = (told(CASES["prompt added"](), detail=detail) for detail in ("full", "summary"))

    assert summary == {"_meta": full["_meta"]}


@pytest.mark.parametrize("case", CASES)
def test_no_detail_is_the_plain_specification(case: str) -> None:
    notification = CASES[case]()
    expected = {} if isinstance(notification.topic, Feature) else {"uri": "file:///a"}

    assert told(notification, detail="none") == expected
    tagged = FrameFormat("none", is_tagged=True)
    assert read(encode_frame(notification, tagged, encode_tag(7)), tagged)["params"] == {
        **expected,
        "_meta": {SUBSCRIPTION_KEY: 7},
    }


def test_several_changes_are_in_one_frame() -> None:
    params = told(CASES["several tools"]())
    summary = params["_meta"][CHANGE_KEY]

    assert [(change["operation"], change["tool"]["name"]) for change in params["changes"]] == [
        ("added", "a"),
        ("added", "b"),
        ("added", "c"),
    ]
    assert summary["changes"] == [{"operation": "added", "name": name} for name in "abc"]
    assert summary["revision"] == 3
    assert "truncated" not in params
    assert "operation" not in params


@pytest.mark.parametrize("most", [1, 2])
def test_frame_with_too_many_changes_is_truncated(most: int) -> None:
    params = told(CASES["several tools"](), max_changes=most)
    summary = params["_meta"][CHANGE_KEY]

    assert [change["tool"]["name"] for change in params["changes"]] == list("abc")[:most]
    assert [change["name"] for change in summary["changes"]] == list("abc")[:most]
    assert params["truncated"] is True
    assert (summary["truncated"], summary["complete"]) == (True, False)


def test_default_limit_is_64_changes() -> None:
    for count, is_truncated in ((64, False), (65, True)):
        notification = notification_of(
            lambda catalog, count=count: catalog.tools.replace({"name": f"{n:02}"} for n in range(count))  # type: ignore[misc]
        )
        params = told(notification)
        assert len(params["changes"]) == 64
        assert params.get("truncated", False) is is_truncated


@pytest.mark.parametrize("case", ["list incomplete", "content incomplete"])
def test_incomplete_notification_says_so(case: str) -> None:
    params = told(CASES[case]())

    assert params.pop("_meta") == {CHANGE_KEY: {"revision": 9, "digest": "d9", "complete": False}}
    assert params.keys() <= {"uri"}


def test_content_has_uri_and_metadata() -> None:
    assert told(CASES["content updated"]())["metadata"] == {"version": 2, "author": NASTY}
    params = told(CASES["content updated, no metadata"]())
    assert params.keys() == {"uri", "_meta"}
    summary = params["_meta"][CHANGE_KEY]
    assert (summary["operation"], summary["uri"], summary["revision"]) == ("updated", "file:///a", 1)


def test_deletion_is_an_update_without_the_extension() -> None:
    plain, extended = (
        json.loads(encode_frame(CASES["content deleted"](), FrameFormat(is_extended=is_extended)))
        for is_extended in (False, True)
    )

    assert plain["method"] == "notifications/resources/updated"
    assert extended["method"] == "notifications/resources/deleted"
    for message in (plain, extended):
        assert message["params"]["uri"] == "file:///a"
        assert message["params"]["_meta"][CHANGE_KEY]["operation"] == "deleted"


def test_extension_adds_items_and_deltas() -> None:
    added = told(CASES["prompt added"](), detail="summary", is_extended=True)["_meta"][CHANGE_KEY]
    notification = CASES["prompt updated"]()
    [change] = notification.changes
    assert change.before is not None
    assert change.item is not None
    updated = told(notification, detail="none", is_extended=True)["_meta"][CHANGE_KEY]

    assert added["item"] == PROMPT
    assert updated["delta"] == {"description": "New", "arguments": None}
    assert apply_patch(PROMPT, updated["delta"]) == change.item.definition
    assert (updated["before"], updated["after"]) == (change.before.digest, change.item.digest)
    assert "item" not in updated


def test_update_without_a_patch_has_the_whole_item() -> None:
    notification = notification_of(add_prompt, lambda catalog: catalog.prompts.update("generate_text", x={"y": None}))
    summary = told(notification, is_extended=True)["_meta"][CHANGE_KEY]

    assert summary["item"] == {**PROMPT, "x": {"y": None}}
    assert "delta" not in summary


# Encoding


@given(texts, texts, texts | st.integers())
@example(NASTY, NASTY, NASTY)
@example("", "", "")
@example("{", "}", 0)
@example("a", "b", -(1 << 63))
def test_any_unicode_is_kept_in_names_contents_and_ids(name: str, text: str, tag: str | int) -> None:
    listed = notification_of(lambda catalog: catalog.prompts.add({"name": name, "description": text}))
    content = notification_of(lambda catalog: catalog.resources.updated(name, note=text))

    for is_sse in (True, False):
        shape = FrameFormat(is_sse=is_sse, is_tagged=True)
        params = read(encode_frame(listed, shape, encode_tag(tag)), shape)["params"]
        assert params["prompt"] == {"name": name, "description": text}
        assert params["_meta"][CHANGE_KEY]["name"] == name
        assert params["_meta"][SUBSCRIPTION_KEY] == tag
        assert type(params["_meta"][SUBSCRIPTION_KEY]) is type(tag)
        params = read(encode_frame(content, shape, encode_tag(tag)), shape)["params"]
        assert (params["uri"], params["metadata"], params["_meta"][SUBSCRIPTION_KEY]) == (name, {"note": text}, tag)


def test_successive_frames_are_one_event_each() -> None:
    shape = FrameFormat(is_sse=True, is_tagged=True)
    frames = [encode_frame(CASES[case](), shape, encode_tag(case)) for case in CASES]

    events = read_events(KEEP_ALIVE + KEEP_ALIVE.join(frames))

    assert [json.loads(text)["params"]["_meta"][SUBSCRIPTION_KEY] for _, text in events] == list(CASES)


@pytest.mark.parametrize("tag", [b"7", b"1234567", '"名前"'.encode()])
def test_encoder_makes_valid_chunks_of_each_notification(tag: bytes) -> None:
    shape = FrameFormat(is_sse=True, is_tagged=True)
    chunked, plain = FrameEncoder(shape, len(tag)), FrameEncoder(shape)
    for notification in (CASES["several tools"](), CASES["several tools"]()):
        frame = encode_frame(notification, shape, tag)
        chunked.encode(notification)
        plain.encode(notification)
        assert chunked.notification is notification
        assert chunked.head + tag + chunked.tail == b"%x\r\n%b\r\n" % (len(frame), frame)
        assert chunked.length == len(frame)
        assert plain.head + tag + plain.tail == frame


@pytest.mark.parametrize("is_tagged", [True, False])
def test_frame_is_encoded_once_and_shared(is_tagged: bool) -> None:
    notification = CASES["several tools"]()
    for shape in (shape for shape in SHAPES if shape.is_tagged is is_tagged):
        head, tail = render(notification, shape)
        again = render(notification, FrameFormat(*shape))
        assert again[0] is head
        assert again[1] is tail
        if is_tagged:
            assert encode_frame(notification, shape, b'"me"') == head + b'"me"' + tail
        else:
            assert encode_frame(notification, shape) is head, "not even copied"


@given(texts | st.integers())
@example(NASTY)
def test_first_and_last_frame_match_the_schema(tag: str | int) -> None:
    granted = {"toolsListChanged": True, "resourceSubscriptions": [NASTY]}
    cursor = {"tools": {"revision": 7, "digest": "d7"}}
    sse = FrameFormat(is_sse=True)
    begin = read(acknowledgement(granted, {CURSOR_KEY: cursor}, encode_tag(tag)), sse)
    end = read(listen_result({"com.example/why": NASTY}, encode_tag(tag)), sse)

    validate(begin, "2026-07-28")
    assert "id" not in begin
    assert begin["params"] == {"notifications": granted, "_meta": {SUBSCRIPTION_KEY: tag, CURSOR_KEY: cursor}}
    validate_server_result("subscriptions/listen", "2026-07-28", end["result"])
    assert end["id"] == tag
    assert end["result"]["_meta"] == {SUBSCRIPTION_KEY: tag, "com.example/why": NASTY}
