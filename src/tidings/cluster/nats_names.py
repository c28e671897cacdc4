"""Encode names and keys as names of streams and tokens of subjects in NATS."""

from __future__ import annotations

import hashlib
import re

__all__ = ["KEY_HEADER", "SubjectError", "decode_key", "encode_key", "encode_name"]

KEY_HEADER = "Tidings-Key"
"""The encoded key of a message whose subject has only its digest."""

_LONGEST_KEY = 512
"""Characters of an encoded key. The server closes a connection that sends a command line above 4,096."""
_LONGEST_TOKEN = 64

_UNSAFE = re.compile(rb"[^A-Za-z0-9_/-]")
_ENCODED = re.compile(r"(?:[A-Za-z0-9_/-]|=[0-9A-F]{2})+")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


class SubjectError(ValueError):
    """A subject was not made by `encode_key`."""


def encode_name(text: str) -> str:
    """Return the text as the name of a stream or one token of a subject: unchanged if it is valid there."""
    if re.fullmatch(rf"[A-Za-z0-9_-]{{1,{_LONGEST_TOKEN}}}", text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', text)[: _LONGEST_TOKEN - 17]}-{digest}"


def encode_key(key: str) -> tuple[str, str | None]:
    """Return the key as one token of a subject, and the value of `KEY_HEADER` if the key is too long for a subject."""
    encoded = _UNSAFE.sub(lambda match: b"=%02X" % match[0][0], key.encode("utf-8", "surrogatepass")).decode("ascii")
    if len(encoded) <= _LONGEST_KEY:
        return encoded, None
    return f"={hashlib.sha256(encoded.encode('ascii')).hexdigest()}", encoded


def decode_key(encoded: str) -> str | None:
    """Return the key, or None if the subject has only its digest. Raise `SubjectError`."""
    if len(encoded) == 65 and re.fullmatch("=[0-9a-f]{64}", encoded):
        return None
    if not _ENCODED.fullmatch(encoded):
        raise SubjectError(encoded)
    try:
        raw = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), encoded.encode("ascii"))
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise SubjectError(encoded) from None
