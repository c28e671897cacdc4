"""How things are called in logs and traces: on one line, not at any length, and without what may be a secret.

What clients and sources send is in it as they sent it. So control characters are escaped, since they could forge a line
or command a terminal, and a URI goes without what people hide in one.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidings.core.model import Change, Topic

__all__ = ["change_name", "one_line", "redact_uri", "short_id", "topic_name"]

LONGEST = 128
"""Characters of a label or a name: no request should be able to fill a log."""
_LONGEST_URI = 256

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_USER = re.compile(r"^([^/?#]*//)[^/?#]*@")
_HIDDEN = re.compile(r"\{?[?#].*", re.DOTALL)
"""A query or a fragment, also as RFC 6570 writes it in a template."""


def one_line(text: str, longest: int | None = None) -> str:
    """A text that stays on its line."""
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return text if text.isprintable() else _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def redact_uri(uri: str) -> str:
    """A URI without what people hide in one: a password, a query, a fragment."""
    return one_line(_HIDDEN.sub("", _USER.sub(r"\1", uri)), _LONGEST_URI)


def topic_name(topic: Topic) -> str:
    return redact_uri(topic) if isinstance(topic, str) else topic.value


def change_name(change: Change) -> str:
    """Of the item that changed: by its URI, or by its name, in which a question mark hides nothing."""
    is_named = not isinstance(change.topic, str) and change.topic.key_field == "name"
    return one_line(change.key, LONGEST) if is_named else redact_uri(change.key)


def short_id(secret: str) -> str:
    """What a session is called: whoever knows its id may speak for it, so the id itself is in no log."""
    return hashlib.sha256(secret.encode()).hexdigest()[:8]
