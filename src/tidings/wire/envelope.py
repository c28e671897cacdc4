"""A JSON-RPC message as bytes: `params`, `result` and `error` stay encoded until somebody needs them."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

__all__ = [
    "DECODE_ERRORS",
    "RESPONSE_HEAD",
    "Message",
    "Request",
    "decode_message",
    "decode_request",
    "error_response",
    "tail_of_response",
]

DECODE_ERRORS: Final = (ValueError, RecursionError)
"""The errors of msgspec for bytes that can't be decoded. Text that is not UTF-8 is a `ValueError`, too."""

RESPONSE_HEAD: Final = b'{"jsonrpc":"2.0","id":'
"""The bytes of a response before its id, as the SDK writes them."""


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """A request with no unknown members."""

    jsonrpc: Literal["2.0"]
    id: int | str
    method: str
    params: msgspec.Raw = msgspec.Raw()


class Message(msgspec.Struct):
    """Any message. Members that it does not have are empty; unknown ones are ignored."""

    id: int | str | None = None
    method: str = ""
    params: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


_request_decoder = msgspec.json.Decoder(Request)
_message_decoder = msgspec.json.Decoder(Message)


def decode_message(data: bytes) -> Message | None:
    """Return the message in these bytes, or None if there is none."""
    try:
        return _message_decoder.decode(data)
    except DECODE_ERRORS:
        return None


def decode_request(data: bytes) -> Request | None:
    """Return the request in these bytes, or None if the SDK has to handle them."""
    try:
        return _request_decoder.decode(data)
    except DECODE_ERRORS:
        return None


def error_response(request_id: int | str | None, code: int, message: str) -> bytes:
    """Return the response to a request that failed."""
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}})


def tail_of_response(response: bytes, tag: bytes) -> bytes | None:
    """Return what follows the id in a response with a result. `tag` is the encoded id.

    Return None if it is another message, or its members have another order than in those of the SDK."""
    head = RESPONSE_HEAD + tag
    return response[len(head) :] if response.startswith(head + b',"result":{') else None
