"""Notifications as bytes: encoded once per shape and shared, with only the subscription id spliced in.

What a notification says is DESIGN's: the operation and the item in `params`, where plain readers find them, and a
summary under `dev.tidings/change` in `_meta`, which typed clients keep, with the cursor that its reader then holds.
`params` is always an object, and there is never an `id`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tidings.cursor import Cursor
from tidings.delta import merge_patch
from tidings.digest import safe_json
from tidings.model import Change, Feature, Notification, Operation
from tidings.policy import Detail

__all__ = [
    "BOOKMARK_METHOD",
    "CHANGE_KEY",
    "CURSOR_KEY",
    "DELETED_METHOD",
    "DURABLE_KEY",
    "EXTENSION",
    "FILTER_KEY",
    "KEEP_ALIVE",
    "REFETCH_KEY",
    "RESUME_KEY",
    "SUBSCRIPTION_KEY",
    "Press",
    "Shape",
    "acknowledgement",
    "bookmark",
    "encode_tag",
    "listen_result",
    "render",
    "write",
]

SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"
CHANGE_KEY = "dev.tidings/change"
CURSOR_KEY = "dev.tidings/cursor"
RESUME_KEY = "dev.tidings/resume"
"""Where a client that comes back puts the cursor it holds."""
REFETCH_KEY = "dev.tidings/refetch"
"""In the answer to that: what it watches of which nobody knows how it changed meanwhile."""
DURABLE_KEY = "dev.tidings/durable"
"""What a client asks for, and in the acknowledgement what it has: a subscription that outlives its connection."""
FILTER_KEY = "dev.tidings/filter"
"""Where a client says how it wants to be told, and is told what of it was honoured."""
EXTENSION = "dev.tidings/changes"
"""What a client declares to get items and deltas in `_meta`, and deletions as such."""
KEEP_ALIVE = b": keep-alive\r\n\r\n"
DELETED_METHOD = "notifications/resources/deleted"
"""Not of the specification: only for clients that declare `dev.tidings/changes`."""
BOOKMARK_METHOD = "notifications/dev.tidings/bookmark"
"""Likewise: a heartbeat with a cursor, only for clients that ask for bookmarks."""


_SSE_HEAD, _SSE_TAIL = b"event: message\r\ndata: ", b"\r\n\r\n"


class Shape(NamedTuple):
    """All that makes one client's frame differ from another's, but for the subscription id."""

    detail: Detail = "full"
    most: int = 64
    """Changes in one frame: `Policy.max_changes_per_frame`."""
    is_sse: bool = False
    """A server-sent event rather than a line."""
    is_tagged: bool = False
    """With a subscription id, as listen streams need it."""
    is_extended: bool = False
    """For a client that declared `dev.tidings/changes`."""
    epoch: str = ""
    """Of the cursors; without one there are none."""

    @property
    def is_bare(self) -> bool:
        """Whether a notification says no more than the plain specification."""
        return self.detail == "none" and not self.is_extended


class Press:
    """Makes the frames of one shape, and has the newest at hand for the next of all those who are told it."""

    __slots__ = ("__weakref__", "_shape", "_tag_length", "head", "length", "notification", "tail")

    def __init__(self, shape: Shape, tag_length: int | None = None) -> None:
        """For tags of one length, each frame is made a chunk of HTTP/1.1, which begins with its length."""
        self._shape = shape
        self._tag_length = tag_length
        self.notification: Notification | None = None
        """The one that `head` and `tail` are of: what stands before a tag, and after it."""
        self.head = self.tail = b""
        self.length = 0
        """Of a frame with its tag, where that has one length, and without what makes a chunk of it."""

    def turn_to(self, notification: Notification) -> None:
        head, tail = render(notification, self._shape)
        self.length = len(head) + (self._tag_length or 0) + len(tail)
        if self._tag_length is not None:
            head, tail = b"%x\r\n%b" % (self.length, head), tail + b"\r\n"
        self.head, self.tail, self.notification = head, tail, notification


def write(notification: Notification, shape: Shape, tag: bytes = b"") -> bytes:
    """The frame for one subscriber. `tag` is its `encode_tag(id)` if the shape is tagged."""
    head, tail = render(notification, shape)
    return head + tag + tail


def encode_tag(subscription_id: str | int) -> bytes:
    return _escape(msgspec.json.encode(subscription_id))


def acknowledgement(honoured: dict[str, Any], meta: dict[str, Any], tag: bytes) -> bytes:
    """The first event of a listen stream: what of the request is served."""
    params = {"notifications": honoured, "_meta": {SUBSCRIPTION_KEY: msgspec.Raw(tag), **meta}}
    return _event("notifications/subscriptions/acknowledged", params)


def bookmark(cursor: Cursor, tag: bytes | None = None) -> bytes:
    """A heartbeat that says up to where its reader knows all."""
    tagged = {} if tag is None else {SUBSCRIPTION_KEY: msgspec.Raw(tag)}
    return _event(BOOKMARK_METHOD, {"_meta": {**tagged, CURSOR_KEY: cursor.as_json()}})


def _event(method: str, params: dict[str, Any]) -> bytes:
    text = _escape(msgspec.json.encode(params))
    return _SSE_HEAD + b'{"jsonrpc":"2.0","method":"%s","params":%s}' % (method.encode(), text) + _SSE_TAIL


def listen_result(meta: dict[str, Any], tag: bytes) -> bytes:
    """The last event of a listen stream that ends on purpose."""
    result = {"resultType": "complete", "_meta": {**meta, SUBSCRIPTION_KEY: msgspec.Raw(tag)}}
    return (
        _SSE_HEAD + b'{"jsonrpc":"2.0","id":%s,"result":%s}' % (tag, _escape(msgspec.json.encode(result))) + _SSE_TAIL
    )


def render(notification: Notification, shape: Shape) -> tuple[bytes, bytes]:
    """What stands before the subscription id, and after it. Without an id, all of it stands before."""
    frame = notification.frames.get(shape)
    if frame is None:
        frame = notification.frames[shape] = _render(notification, shape)
    return frame


def _render(notification: Notification, shape: Shape) -> tuple[bytes, bytes]:
    is_list = isinstance(notification.topic, Feature)
    method = notification.method
    members: dict[str, Any] = {} if is_list else {"uri": notification.topic}
    if shape.is_extended and _is_deletion(notification):
        method = DELETED_METHOD
    if is_list and shape.detail == "full":
        members |= _members(notification, shape)
    elif not is_list and shape.detail in ("full", "delta"):
        members |= _content_members(notification)
    head = b'{"jsonrpc":"2.0","method":"%s","params":{' % method.encode()
    tail = b"}}"
    if members:
        head += _escape(msgspec.json.encode(members))[1:-1]
    meta = b""
    if not shape.is_bare:
        said: dict[str, Any] = {CHANGE_KEY: _summary(notification, shape)}
        if shape.epoch:
            said[CURSOR_KEY] = Cursor(shape.epoch, {notification.topic: notification.version}).as_json()
        meta = _escape(msgspec.json.encode(said))[1:-1]
    if notification.trace is not None:
        meta += (b"," if meta else b"") + _escape(msgspec.json.encode(notification.trace))[1:-1]
    if shape.is_tagged or meta:
        head += b',"_meta":{' if members else b'"_meta":{'
        tail = b"}}}"
    if shape.is_tagged:
        head += b'"%s":' % SUBSCRIPTION_KEY.encode()
        tail = b"," + meta + tail if meta else tail
    else:
        head, tail = head + meta + tail, b""
    before, after = (_SSE_HEAD, _SSE_TAIL) if shape.is_sse else (b"", b"\n")
    return (before + head, tail + after) if tail else (before + head + after, b"")


def _members(notification: Notification, shape: Shape) -> dict[str, Any]:
    """The unofficial members of `params`, for those who look at the message itself."""
    described = [_described(change) for change in notification.changes[: shape.most]]
    if len(notification.changes) > shape.most:
        return {"changes": described, "truncated": True}
    if len(described) == 1:
        return described[0]
    return {"changes": described} if described else {}


def _described(change: Change) -> dict[str, Any]:
    assert isinstance(change.topic, Feature)
    item = change.item or change.before
    described: dict[str, Any] = {"operation": change.operation}
    if change.topic is Feature.RESOURCES:
        described["uri"] = change.key
    if item is not None:
        described[change.topic.singular] = msgspec.Raw(item.json)
    return described


def _content_members(notification: Notification) -> dict[str, Any]:
    metadata = notification.changes[-1].metadata if notification.changes else None
    return {"metadata": msgspec.Raw(safe_json(metadata))} if metadata else {}


def _summary(notification: Notification, shape: Shape) -> dict[str, Any]:
    """What rides in `_meta`."""
    revision, digest = notification.version
    summaries = [_summarized(change, shape) for change in notification.changes[: shape.most]]
    summary = summaries[0] if len(notification.changes) == 1 else {}
    summary |= {"revision": revision, "digest": digest}
    if len(notification.changes) > 1:
        summary["changes"] = summaries
    is_truncated = len(notification.changes) > shape.most
    if is_truncated:
        summary["truncated"] = True
    # Always there: whoever came back with a cursor knows by it whether to refetch.
    summary["complete"] = notification.complete and not is_truncated
    return summary


def _summarized(change: Change, shape: Shape) -> dict[str, Any]:
    if not isinstance(change.topic, Feature):
        return {"operation": change.operation, "uri": change.key}
    summary: dict[str, Any] = {"operation": change.operation, change.topic.key_field: change.key}
    if (shape.is_extended or shape.detail == "delta") and change.item is not None:
        patch = merge_patch(change.before.definition, change.item.definition) if change.before else None
        if patch is None or change.before is None:
            summary["item"] = msgspec.Raw(change.item.json)
        else:
            summary |= {"delta": patch, "before": change.before.digest, "after": change.item.digest}
    return summary


def _is_deletion(notification: Notification) -> bool:
    return bool(notification.changes) and notification.changes[-1].operation is Operation.DELETED


_LINE_BREAKS = (
    ("\u2028".encode(), rb"\u2028"),
    ("\u2029".encode(), rb"\u2029"),
    ("\u0085".encode(), rb"\u0085"),
)
"""What some readers of lines and of server-sent events take for the end of a line, though JSON allows it in a text."""


def _escape(text: bytes) -> bytes:
    if not text.isascii():
        for character, escaped in _LINE_BREAKS:
            text = text.replace(character, escaped)
    return text
