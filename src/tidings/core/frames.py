"""Notifications as bytes, encoded once per format and shared. Only the subscription id is inserted for each subscriber.

A notification has the operation and the item in `params`, and in `_meta`, which typed clients keep, a summary
(`dev.tidings/change`) and the cursor of a client that has read it. `params` is always an object, and there is never an
`id`. This module writes nothing to a connection.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from tidings.core.cursor import Cursor, cursor_json
from tidings.core.delta import merge_patch
from tidings.core.encoding import safe_json
from tidings.core.model import Change, Feature, Item, Notification, Operation, Version
from tidings.policy import Detail

__all__ = [
    "ACKNOWLEDGED_METHOD",
    "AUTHORIZED_UNTIL_KEY",
    "CHANGE_KEY",
    "CURSOR_KEY",
    "DELETED_METHOD",
    "DURABLE_KEY",
    "EXTENSION",
    "FILTER_KEY",
    "HEARTBEAT_METHOD",
    "KEEP_ALIVE",
    "REFETCH_KEY",
    "RESUME_KEY",
    "SSE_HEAD",
    "SSE_TAIL",
    "SUBSCRIPTION_KEY",
    "FrameEncoder",
    "FrameFormat",
    "acknowledgement",
    "encode_frame",
    "encode_params",
    "encode_tag",
    "heartbeat",
    "listen_result",
    "render",
]

SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"
CHANGE_KEY = "dev.tidings/change"
CURSOR_KEY = "dev.tidings/cursor"
RESUME_KEY = "dev.tidings/resume"
"""The cursor of a client that reconnects."""
REFETCH_KEY = "dev.tidings/refetch"
"""In the acknowledgement: the URIs and patterns that such a client must refetch."""
DURABLE_KEY = "dev.tidings/durable"
"""A durable subscription: in the request the options that the client asks for, in the acknowledgement its state."""
AUTHORIZED_UNTIL_KEY = "dev.tidings/authorizedUntil"
"""In the acknowledgement: when the stream ends, because the token that opened it expires. ISO 8601, in UTC."""
FILTER_KEY = "dev.tidings/filter"
"""The `Terms` that a client asks for, and in the acknowledgement those that are granted."""
EXTENSION = "dev.tidings/changes"
"""The extension that a client declares to get items and deltas in `_meta`, and deletions as their own method."""
ACKNOWLEDGED_METHOD = "notifications/subscriptions/acknowledged"
KEEP_ALIVE = b": keep-alive\r\n\r\n"
DELETED_METHOD = "notifications/resources/deleted"
"""Not in the specification: only for clients that declare `dev.tidings/changes`."""
HEARTBEAT_METHOD = "notifications/dev.tidings/bookmark"
"""Not in the specification: a heartbeat with a cursor, only for clients that ask for bookmarks."""
SSE_HEAD, SSE_TAIL = b"event: message\r\ndata: ", b"\r\n\r\n"
"""The bytes around a message that is a server-sent event, as the SDK writes them."""


class FrameFormat(NamedTuple):
    """Everything except the subscription id in which the frames of two clients may differ."""

    detail: Detail = "full"
    max_changes: int = 64
    """The most changes in one frame: `Policy.max_changes_per_frame`."""
    is_sse: bool = False
    """A server-sent event, and not a line."""
    is_tagged: bool = False
    """With a subscription id, for listen streams."""
    is_extended: bool = False
    """For a client that declared `dev.tidings/changes`."""
    epoch: str = ""
    """The epoch of the cursors. If it is empty, there are none."""
    omits_items: bool = False
    """The client or the server chose a lower detail, so the extension adds no items."""

    @property
    def is_standard(self) -> bool:
        """Whether notifications contain only members of the specification."""
        return self.detail == "none" and not self.is_extended

    @property
    def has_deltas(self) -> bool:
        """Whether the summary contains items and deltas."""
        return (self.is_extended and not self.omits_items) or self.detail == "delta"


class FrameEncoder:
    """Encodes the frames of one format, and keeps the newest for all subscribers that get it."""

    __slots__ = ("__weakref__", "_format", "_tag_length", "head", "length", "notification", "tail")

    def __init__(self, format: FrameFormat, tag_length: int | None = None) -> None:
        """With a `tag_length`, each frame is a chunk of HTTP/1.1, which starts with its length."""
        self._format = format
        self._tag_length = tag_length
        self.notification: Notification | None = None
        """The notification of `head` and `tail`, the bytes before and after the tag."""
        self.head = self.tail = b""
        self.length = 0
        """The length of the frame with its tag, without the bytes around a chunk."""

    def encode(self, notification: Notification) -> None:
        head, tail = render(notification, self._format)
        self.length = len(head) + (self._tag_length or 0) + len(tail)
        if self._tag_length is not None:
            head, tail = b"%x\r\n%b" % (self.length, head), tail + b"\r\n"
        self.head, self.tail, self.notification = head, tail, notification


def encode_frame(notification: Notification, format: FrameFormat, tag: bytes = b"") -> bytes:
    """Return the frame for one subscriber. `tag` is its `encode_tag(id)` if the format is tagged."""
    head, tail = render(notification, format)
    return head + tag + tail


def encode_params(notification: Notification, format: FrameFormat) -> bytes:
    """Return only the params of a frame, for receivers of another kind. The format is one of lines."""
    return encode_frame(notification, format).partition(b'"params":')[2].removesuffix(b"}\n")


def encode_tag(subscription_id: str | int) -> bytes:
    """Return the tag of a subscriber: its subscription id as JSON."""
    # Copied, because msgspec's bytes keep the unused 32 bytes of its buffer, and every stream has a tag.
    return b"%b" % _escape(msgspec.json.encode(subscription_id))


def acknowledgement(granted: dict[str, Any], meta: dict[str, Any], tag: bytes) -> bytes:
    """Return the first event of a listen stream: the topics that are granted."""
    params = {"notifications": granted, "_meta": {SUBSCRIPTION_KEY: msgspec.Raw(tag), **meta}}
    return _event(ACKNOWLEDGED_METHOD, params)


def heartbeat(cursor: Cursor, tag: bytes | None = None) -> bytes:
    """Return a heartbeat with the cursor of its client."""
    tagged = {} if tag is None else {SUBSCRIPTION_KEY: msgspec.Raw(tag)}
    return _event(HEARTBEAT_METHOD, {"_meta": {**tagged, CURSOR_KEY: cursor.as_json()}})


def _event(method: str, params: dict[str, Any]) -> bytes:
    text = _escape(msgspec.json.encode(params))
    return SSE_HEAD + b'{"jsonrpc":"2.0","method":"%s","params":%s}' % (method.encode(), text) + SSE_TAIL


def listen_result(meta: dict[str, Any], tag: bytes) -> bytes:
    """Return the last event of a listen stream that ends gracefully."""
    result = {"resultType": "complete", "_meta": {**meta, SUBSCRIPTION_KEY: msgspec.Raw(tag)}}
    return SSE_HEAD + b'{"jsonrpc":"2.0","id":%s,"result":%s}' % (tag, _escape(msgspec.json.encode(result))) + SSE_TAIL


def render(notification: Notification, format: FrameFormat) -> tuple[bytes, bytes]:
    """Return the bytes before and after the subscription id. Without an id, the second part is empty."""
    frame = notification.frames.get(format)
    if frame is None:
        frame = notification.frames[format] = _render(notification, format)
    return frame


def _render(notification: Notification, format: FrameFormat) -> tuple[bytes, bytes]:
    text = _from_template(notification, format) or _text(notification, format)
    head, _, tail = text.partition(_TAG)
    before, after = (SSE_HEAD, SSE_TAIL) if format.is_sse else (b"", b"\n")
    return (before + head, tail + after) if tail else (before + head + after, b"")


_TAG, _KEY, _REVISION, _DIGEST, _ITEM = b"\0", b"\1", b"\2", b"\3", b"\4"
"""Placeholders in a text. JSON contains no such characters."""
_RAW_TAG = msgspec.Raw(_TAG)


def _from_template(notification: Notification, format: FrameFormat) -> bytes | None:
    """Return the text of a notification of one change without a trace, delta or metadata, from a template.

    Most notifications are like this, and differ only in the values that are inserted.
    """
    if len(notification.changes) != 1 or not notification.complete or notification.trace is not None:
        return None
    change = notification.changes[0]
    item = change.item or change.before
    feature = change.topic if isinstance(change.topic, Feature) else None
    if change.metadata is not None or (feature is not None and (item is None or format.has_deltas)):
        return None
    revision, digest = notification.version
    text = _template(format, feature, change.operation)
    text = text.replace(_KEY, _escape(msgspec.json.encode(change.key)))
    text = text.replace(_REVISION, b"%d" % revision).replace(_DIGEST, msgspec.json.encode(digest))
    return text if item is None else text.replace(_ITEM, _escape(item.json))


@lru_cache(256)  # bounded, because clients choose some of the formats
def _template(format: FrameFormat, feature: Feature | None, operation: Operation) -> bytes:
    """Encode a notification with unique values, and replace these by placeholders."""
    key, version = "\1", Version(1 << 62, "\3")
    item = None if feature is None else Item(feature, key, _ITEM, b"")
    change = Change(feature or key, operation, key, version, version, 0.0, item)
    text = _text(Notification(change.topic, version, (change,), since=0), format)
    for place, value in ((_KEY, key), (_REVISION, version.revision), (_DIGEST, version.digest)):
        text = text.replace(msgspec.json.encode(value), place)
    return text


def _text(notification: Notification, format: FrameFormat) -> bytes:
    topic, trace = notification.topic, notification.trace
    method = notification.method
    params: dict[str, Any] = {}
    if not isinstance(topic, Feature):
        params["uri"] = topic
        if format.is_extended and notification.is_deletion:
            method = DELETED_METHOD
        metadata = notification.changes[-1].metadata if notification.changes else None
        if metadata and format.detail in ("full", "delta"):
            params["metadata"] = msgspec.Raw(safe_json(metadata))
    elif format.detail == "full":
        params = _members(notification, format)
    meta: dict[str, Any] = {SUBSCRIPTION_KEY: _RAW_TAG} if format.is_tagged else {}
    if not format.is_standard:
        meta[CHANGE_KEY] = _summary(notification, format)
        if format.epoch:
            meta[CURSOR_KEY] = cursor_json(format.epoch, {topic: notification.version})
    if trace is not None:
        meta.update(trace)
    if meta:
        params["_meta"] = meta
    return _escape(msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params}))


def _members(notification: Notification, format: FrameFormat) -> dict[str, Any]:
    """Return the members of `params` that are not in the specification, for clients that read the raw message."""
    members = [_member(change) for change in notification.changes[: format.max_changes]]
    if len(notification.changes) > format.max_changes:
        return {"changes": members, "truncated": True}
    if len(members) == 1:
        return members[0]
    return {"changes": members} if members else {}


def _member(change: Change) -> dict[str, Any]:
    assert isinstance(change.topic, Feature)
    item = change.item or change.before
    member: dict[str, Any] = {"operation": change.operation}
    if change.topic is Feature.RESOURCES:
        member["uri"] = change.key
    if item is not None:
        member[change.topic.singular] = msgspec.Raw(item.json)
    return member


def _summary(notification: Notification, format: FrameFormat) -> dict[str, Any]:
    """Return the `dev.tidings/change` of `_meta`."""
    changes = notification.changes
    summary = _summarized(changes[0], format) if len(changes) == 1 else {}
    summary["revision"], summary["digest"] = notification.version
    is_truncated = len(changes) > format.max_changes
    if len(changes) > 1:
        summary["changes"] = [_summarized(change, format) for change in changes[: format.max_changes]]
        if is_truncated:
            summary["truncated"] = True
    # Always present: a client that reconnects with a cursor learns from it whether to refetch.
    summary["complete"] = notification.complete and not is_truncated
    return summary


def _summarized(change: Change, format: FrameFormat) -> dict[str, Any]:
    if not isinstance(change.topic, Feature):
        return {"operation": change.operation, "uri": change.key}
    summary: dict[str, Any] = {"operation": change.operation, change.topic.key_field: change.key}
    if format.has_deltas and change.item is not None:
        patch = merge_patch(change.before.definition, change.item.definition) if change.before else None
        if patch is None or change.before is None:
            summary["item"] = msgspec.Raw(change.item.json)
        else:
            summary |= {"delta": patch, "before": change.before.digest, "after": change.item.digest}
    return summary


_LINE_BREAKS = (
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
    ("\u0085".encode(), rb"\u0085"),
)
"""Characters that JSON allows in a text, but some readers of lines and server-sent events take for a line end."""


def _escape(text: bytes) -> bytes:
    if not text.isascii():
        for character, escaped in _LINE_BREAKS:
            text = text.replace(character, escaped)
    return text
