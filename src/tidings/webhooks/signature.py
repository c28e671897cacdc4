"""Signatures of webhooks, after the Standard Webhooks scheme: whoever holds the secret can tell who sent a delivery.

`v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`. A subscription may have several secrets, separated by
spaces, while one takes the place of another: each signs, and a receiver accepts any signature that it knows.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

from tidings.errors import TidingsError

__all__ = ["check_secret", "new_secret", "sign"]

_PREFIX = "whsec_"
_SHORTEST, _LONGEST = 24, 64
"""Bytes, as the scheme has it."""
_MOST = 4
"""Secrets of one subscription: two while one is replaced, and as many for whoever was slow the last time."""


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> str:
    """The secrets in their usual form, or an error that says what is wrong and shows nothing of them."""
    given = secret.split()
    if not 1 <= len(given) <= _MOST:
        raise TidingsError(f"a webhook has one secret, or up to {_MOST} with spaces between them")
    for each in given:
        if not each.startswith(_PREFIX) or not _SHORTEST <= len(_key(each) or b"") <= _LONGEST:
            raise TidingsError(
                f"a webhook's secret is {_PREFIX} and the base64 of {_SHORTEST} to {_LONGEST} random bytes; "
                "leave it out to be given one"
            )
    return " ".join(given)


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The value of `webhook-signature`."""
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    digests = (hmac.digest(_key(each) or b"", signed, hashlib.sha256) for each in secret.split())
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _key(secret: str) -> bytes | None:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
