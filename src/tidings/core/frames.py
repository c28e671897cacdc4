"""Notifications as bytes: encoded once per shape and shared, with only the subscription id spliced in.

What a notification says is DESIGN's: the operation and the item in `params`, where plain readers find them, and a
summary under `dev.tidings/change` in `_meta`, which typed clients keep, with the cursor that its reader then holds.
`params` is always an object, and there is never an `id`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from tidings.core.cursor import Cursor, cursor_json
from tidings.core.delta import merge_patch
from tidings.core.digest import safe_json
from tidings.core.model import Change, Feature, Item, Notification, Operation, Version
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
    "FrameEncoder",
    "FrameFormat",
    "acknowledgement",
    "bookmark",
    "encode_tag",
    "listen_result",
    "render",
    "write",
    "write_alone",
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


class FrameFormat(NamedTuple):
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
    is_brief: bool = False
    """The client itself, or the server for it, set how much is said: what it declared adds no items to that."""

    @property
    def is_bare(self) -> bool:
        """Whether a notification says no more than the plain specification."""
        return self.detail == "none" and not self.is_extended

    @property
    def says_delta(self) -> bool:
        """Whether a change of a list says what of its item is another."""
        return (self.is_extended and not self.is_brief) or self.detail == "delta"


class FrameEncoder:
    """Makes the frames of one shape, and has the newest at hand for the next of all those who are told it."""

    __slots__ = ("__weakref__", "_shape", "_tag_length", "head", "length", "notification", "tail")

    def __init__(self, shape: FrameFormat, tag_length: int | None = None) -> None:
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


def write(notification: Notification, shape: FrameFormat, tag: bytes = b"") -> bytes:
    """The frame for one subscriber. `tag` is its `encode_tag(id)` if the shape is tagged."""
    head, tail = render(notification, shape)
    return head + tag + tail


def write_alone(notification: Notification, shape: FrameFormat) -> bytes:
    """The same without a tag, for the only one who is told in this shape: nothing is kept for others."""
    return _render(notification, shape)[0]


def encode_tag(subscription_id: str | int) -> bytes:
    # Copied, because msgspec's bytes keep the unused 32 bytes of its buffer, and every stream has a tag.
    return b"%b" % _escape(msgspec.json.encode(subscription_id))


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


def render(notification: Notification, shape: FrameFormat) -> tuple[bytes, bytes]:
    """What stands before the subscription id, and after it. Without an id, all of it stands before."""
    frame = notification.frames.get(shape)
    if frame is None:
        frame = notification.frames[shape] = _render(notification, shape)
    return frame


def _render(notification: Notification, shape: FrameFormat) -> tuple[bytes, bytes]:
    text = _filled(notification, shape) or _text(notification, shape)
    head, _, tail = text.partition(_TAG)
    before, after = (_SSE_HEAD, _SSE_TAIL) if shape.is_sse else (b"", b"\n")
    return (before + head, tail + after) if tail else (before + head + after, b"")


_TAG, _KEY, _REVISION, _DIGEST, _ITEM = b"\0", b"\1", b"\2", b"\3", b"\4"
"""What stands in a text for a value to come: nothing that is encoded has such characters in it."""
_RAW_TAG = msgspec.Raw(_TAG)


def _filled(notification: Notification, shape: FrameFormat) -> bytes | None:
    """The text of a notification of one change that says no more of it than which item is how, or which version a
    content has: most of them by far, and all but for that the same."""
    if len(notification.changes) != 1 or not notification.complete or notification.trace is not None:
        return None
    change = notification.changes[0]
    item = change.item or change.before
    feature = change.topic if isinstance(change.topic, Feature) else None
    if change.metadata is not None or (feature is not None and (item is None or shape.says_delta)):
        return None
    revision, digest = notification.version
    text = _mold(shape, feature, change.operation)
    text = text.replace(_KEY, _escape(msgspec.json.encode(change.key)))
    text = text.replace(_REVISION, b"%d" % revision).replace(_DIGEST, msgspec.json.encode(digest))
    return text if item is None else text.replace(_ITEM, _escape(item.json))


@lru_cache(256)  # clients choose some of the shapes
def _mold(shape: FrameFormat, feature: Feature | None, operation: Operation) -> bytes:
    """Such a text without its values: taken from one whose values are found again in it."""
    key, version = "\1", Version(1 << 62, "\3")
    item = None if feature is None else Item(feature, key, _ITEM, b"")
    change = Change(feature or key, operation, key, version, version, 0.0, "", item)
    text = _text(Notification(change.topic, version, (change,), since=0), shape)
    for place, value in ((_KEY, key), (_REVISION, version.revision), (_DIGEST, version.digest)):
        text = text.replace(msgspec.json.encode(value), place)
    return text


def _text(notification: Notification, shape: FrameFormat) -> bytes:
    topic, trace = notification.topic, notification.trace
    method = notification.method
    params: dict[str, Any] = {}
    if not isinstance(topic, Feature):
        params["uri"] = topic
        if shape.is_extended and _is_deletion(notification):
            method = DELETED_METHOD
        if shape.detail in ("full", "delta"):
            _add_metadata(params, notification)
    elif shape.detail == "full":
        params = _members(notification, shape)
    meta: dict[str, Any] = {SUBSCRIPTION_KEY: _RAW_TAG} if shape.is_tagged else {}
    if not shape.is_bare:
        meta[CHANGE_KEY] = _summary(notification, shape)
        if shape.epoch:
            meta[CURSOR_KEY] = cursor_json(shape.epoch, {topic: notification.version})
    if trace is not None:
        meta.update(trace)
    if meta:
        params["_meta"] = meta
    return _escape(msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params}))


def _members(notification: Notification, shape: FrameFormat) -> dict[str, Any]:
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


def _add_metadata(params: dict[str, Any], notification: Notification) -> None:
    if notification.changes and (metadata := notification.changes[-1].metadata):
        params["metadata"] = msgspec.Raw(safe_json(metadata))


def _summary(notification: Notification, shape: FrameFormat) -> dict[str, Any]:
    """What rides in `_meta`."""
    changes = notification.changes
    summary = _summarized(changes[0], shape) if len(changes) == 1 else {}
    summary["revision"], summary["digest"] = notification.version
    is_truncated = len(changes) > shape.most
    if len(changes) > 1:
        summary["changes"] = [_summarized(change, shape) for change in changes[: shape.most]]
        if is_truncated:
            summary["truncated"] = True
    # Always there: whoever came back with a cursor knows by it whether to refetch.
    summary["complete"] = notification.complete and not is_truncated
    return summary


def _summarized(change: Change, shape: FrameFormat) -> dict[str, Any]:
    if not isinstance(change.topic, Feature):
        return {"operation": change.operation, "uri": change.key}
    summary: dict[str, Any] = {"operation": change.operation, change.topic.key_field: change.key}
    if shape.says_delta and change.item is not None:
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
