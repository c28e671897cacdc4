"""Names for logs and traces: one line, of limited length, without secrets.

Clients and sources choose the text. So control characters are escaped, because they could forge a log line or control a
terminal, and the parts of a URI that often contain secrets are removed.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidings.core.model import Change, Topic

__all__ = ["MAX_LABEL", "change_name", "one_line", "redact_uri", "short_id", "terminal_text", "topic_name"]

MAX_LABEL = 128
"""Characters of a label or a name, so that no request can fill a log."""
_MAX_URI = 256

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_USER = re.compile(r"^([^/?#]*//)[^/?#]*@")
_QUERY = re.compile(r"\{?[?#].*", re.DOTALL)
"""A query or a fragment, also of an RFC 6570 template."""


def one_line(text: str, limit: int | None = None) -> str:
    """Shorten a text and escape its control characters."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text if text.isprintable() else _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def terminal_text(text: str) -> str:
    """Escape the control characters of a text, except for line ends and tabs. A terminal would execute the others."""
    return "\n".join("\t".join(map(one_line, line.split("\t"))) for line in text.replace("\r\n", "\n").split("\n"))


def redact_uri(uri: str) -> str:
    """Remove user, password, query and fragment from a URI."""
    return one_line(_QUERY.sub("", _USER.sub(r"\1", uri)), _MAX_URI)


def topic_name(topic: Topic) -> str:
    return redact_uri(topic) if isinstance(topic, str) else topic.value


def change_name(change: Change) -> str:
    """Return the name or the redacted URI of the item that changed."""
    is_named = not isinstance(change.topic, str) and change.topic.key_field == "name"
    return one_line(change.key, MAX_LABEL) if is_named else redact_uri(change.key)


def short_id(secret: str) -> str:
    """Return a name for a session. A client that knows the id of a session can use it, so logs must not contain it."""
    return hashlib.sha256(secret.encode()).hexdigest()[:8]
