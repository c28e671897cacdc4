"""Signatures of webhook deliveries, as in Standard Webhooks: a receiver that has the secret can verify the sender.

A signature is `v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`. To replace a secret, put both,
separated by a space: each one signs, and a receiver accepts any signature that it can verify.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from tidings.errors import TidingsError

__all__ = ["check_secret", "new_secret", "sign", "signed_headers"]

_PREFIX = "whsec_"
_MIN_BYTES, _MAX_BYTES = 24, 64
"""The range that Standard Webhooks allows."""
_MAX_SECRETS = 4
"""Two during a replacement, and two more for receivers that still use an older secret."""


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> str:
    """Return the secrets with single spaces. Raise `TidingsError`, without their text, if one is invalid."""
    parts = secret.split()
    if not 1 <= len(parts) <= _MAX_SECRETS:
        raise TidingsError(f"a webhook has 1 to {_MAX_SECRETS} secrets, separated by spaces")
    for part in parts:
        if not part.startswith(_PREFIX) or not _MIN_BYTES <= len(_key(part) or b"") <= _MAX_BYTES:
            raise TidingsError(
                f"the secret of a webhook is {_PREFIX} and the base64 of {_MIN_BYTES} to {_MAX_BYTES} random bytes"
            )
    return " ".join(parts)


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header `webhook-signature`."""
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    digests = (hmac.digest(_key(part) or b"", signed, hashlib.sha256) for part in secret.split())
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def signed_headers(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a delivery."""
    return {
        "content-type": "application/json",
        "user-agent": "tidings-webhook/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(secret, message_id, timestamp, body),
    }


def _key(secret: str) -> bytes | None:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
