"""URI patterns, and an index that finds the patterns that match a URI without trying all of them.

There are three forms:

* a glob: `*` is any text within one segment, `**` any text (`resource://*/data`, `file:///logs/**`);
* an RFC 6570 template, which contains braces (`board://{sprint}/tasks{?page}`). The core does not parse templates: the
  hub is given a `Templates` function, and `tidings.sdk.uri_templates` has one that uses the SDK's `UriTemplate`;
* anything else is an exact URI, which this module does not handle.

The index is a map by literal prefix, then by literal suffix, then by a literal text between two wildcards. So ten
thousand patterns that differ in one of these texts need a few lookups and no scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias

from tidings.core.encoding import is_unicode
from tidings.core.model import Topic
from tidings.errors import InvalidPattern

__all__ = ["Match", "PatternIndex", "Templates", "compile_pattern", "is_pattern"]

Match: TypeAlias = Callable[[str], bool]
Templates: TypeAlias = Callable[[str], Match]
"""Compiles an RFC 6570 template into a predicate for URIs. It raises ValueError for an invalid template."""

_VARIABLE = re.compile(r"\{[^{}]*\}|\*+")
# Clients choose the patterns, so the time that one of them can take is limited.
_MAX_LENGTH = 1_000
_MAX_WILDCARDS = 16
_MAX_SEGMENTS = 100
"""More than real URIs have."""
_MAX_URI_LENGTH = 8_192
"""No pattern matches a longer URI."""


def is_pattern(topic: Topic) -> bool:
    return isinstance(topic, str) and ("*" in topic or "{" in topic)


def compile_pattern(pattern: str, templates: Templates | None = None) -> Match:
    """Return a predicate for the URIs that match a pattern. A glob also matches itself."""
    _check(pattern)
    if "{" not in pattern:
        return _compile_glob(pattern)
    if templates is None:
        raise InvalidPattern(f"{pattern!r} is a URI template, and this hub was given no function for templates")
    try:
        match = templates(pattern)
    except ValueError as error:
        raise InvalidPattern(f"{pattern!r} is not a URI template that can be matched: {error}") from None
    return lambda uri: len(uri) <= _MAX_URI_LENGTH and match(uri)


def _check(pattern: str) -> None:
    if len(pattern) > _MAX_LENGTH:
        raise InvalidPattern(f"{pattern!r:.80} has {len(pattern)} characters; a pattern has at most {_MAX_LENGTH}")
    if not is_unicode(pattern):
        raise InvalidPattern(f"{pattern!r:.80} contains an unpaired surrogate, which no URI has")
    if pattern.count("/") >= _MAX_SEGMENTS:
        raise InvalidPattern(f"{pattern!r:.80} has more than {_MAX_SEGMENTS} segments")
    # An expression has several variables: `{?page,size}`.
    wildcards = sum(1 + found.count(",") for found in _VARIABLE.findall(pattern))
    if wildcards > _MAX_WILDCARDS:
        raise InvalidPattern(
            f"{pattern!r:.80} has {wildcards} wildcards or variables; a pattern has at most {_MAX_WILDCARDS}"
        )


def _compile_glob(pattern: str) -> Match:
    prefix, *tokens = _tokens(pattern)
    if not tokens:
        return lambda uri: uri == pattern
    suffix = "" if tokens[-1][0] == "*" else tokens.pop()
    shortest = sum(len(token) for token in (prefix, *tokens, suffix) if token[:1] != "*")

    def match(uri: str) -> bool:
        if not shortest <= len(uri) <= _MAX_URI_LENGTH or not (uri.startswith(prefix) and uri.endswith(suffix)):
            return False
        start, end = len(prefix), len(uri) - len(suffix)
        if len(tokens) > 1:
            return _matches(tokens, uri, start, end)
        # Faster, and the most common.
        text = uri[start:end]
        return "/" not in text if tokens[0] == "*" else tokens[0][-1] == "*" or not text or text[-1] == "/"

    return match


def _tokens(pattern: str) -> list[str]:
    """Return the literal text before the first wildcard, the wildcards, and the texts between and after them.

    The wildcard `**/` stands for any number of whole segments, including none."""
    pieces = re.split(r"(\*+)", pattern)
    tokens = pieces[:1]
    for before, stars, after in zip(pieces[::2], pieces[1::2], pieces[2::2], strict=False):
        if len(stars) > 1 and before[-1:] in ("/", "") and after.startswith("/"):
            stars, after = "**/", after[1:]
        tokens += [stars, after] if after else [stars]
    return tokens


def _matches(tokens: list[str], uri: str, start: int, end: int) -> bool:
    """Return whether wildcards and literals match a part of a URI, in a number of steps that its length limits.

    All positions to which the tokens so far can lead are kept at once, as the bits of an integer, so no token is tried
    twice."""
    where = _positions(uri)
    slashes = where.get("/", 0)
    inside = ((1 << end) - 1) & ~slashes
    up_to_end = (1 << end + 1) - 1
    reached = 1 << start
    for token in tokens:
        if token == "*":
            # The addition carries each bit over the characters that follow it, up to the next slash.
            reached |= ((reached & inside) + inside) ^ inside
        elif token[0] == "*":
            after = up_to_end & -(reached & -reached)  # the first position, and all that follow it
            reached = reached | (after & slashes) << 1 if token[-1] == "/" else after
        else:
            for character in token:
                reached = (reached & where.get(character, 0)) << 1 & up_to_end
        if not reached:
            return False
    return bool(reached >> end & 1)


@lru_cache(1)  # many patterns are tried on the same URI, one after the other
def _positions(uri: str) -> dict[str, int]:
    """Return the positions of each character, as the bits of an integer."""
    positions: dict[str, int] = {}
    for at, character in enumerate(uri):
        positions[character] = positions.get(character, 0) | 1 << at
    return positions


class PatternIndex:
    """A set of patterns, and the search for those that match a URI."""

    def __init__(self) -> None:
        self._by_text: dict[int, dict[str, Any]] = {}
        """The patterns by three literal texts (see `_literals`), each by its length first: so one lookup per length
        finds those whose text a URI has."""
        self.matches: dict[str, Match] = {}
        """The compiled form of each pattern."""
        self.work = 0
        """Grows with each search, in units of about a third of a microsecond."""

    def add(self, pattern: str, match: Match) -> None:
        """Add a pattern with its compiled form."""
        self.matches[pattern] = match
        found: dict[Any, Any] = self._by_text
        for text in _literals(pattern):
            found = found.setdefault(len(text), {}).setdefault(text, {})
        found[pattern] = None

    def discard(self, pattern: str) -> None:
        if self.matches.pop(pattern, None) is not None:
            _remove(self._by_text, pattern, *_literals(pattern))

    def matching(self, uri: str) -> list[str]:
        if len(uri) > _MAX_URI_LENGTH:
            return []
        found = list(self._candidates(uri))
        # The SDK needs about as long for a variable as a glob for 30 characters.
        self.work += 1 + sum(8 + len(uri) // 2 + 16 * pattern.count("{") for pattern in found)
        return [pattern for pattern in found if self.matches[pattern](uri)]

    def _candidates(self, uri: str) -> Iterator[str]:
        """Return the patterns whose literal texts this URI has."""
        self.work += len(self._by_text)
        for start, by_start in self._by_text.items():
            by_suffix = by_start.get(uri[:start], _NOTHING)
            self.work += len(by_suffix)
            for end, by_end in by_suffix.items():
                for size, inner in by_end.get(uri[-end:] if end else "", _NOTHING).items():
                    self.work += min(len(inner), len(uri))
                    if len(inner) < len(uri):
                        texts = {text for text in inner if text in uri}
                    else:
                        texts = {uri[at : at + size] for at in range(len(uri) - size + 1)} & inner.keys()
                    for text in texts:
                        yield from inner[text]


_NOTHING: dict[Any, Any] = {}


def _remove(by_text: dict[Any, Any], pattern: str, *texts: str) -> None:
    """Remove a pattern below its literal texts, and what is empty then."""
    if not texts:
        del by_text[pattern]
        return
    text, *others = texts
    same_length = by_text[len(text)]
    _remove(same_length[text], pattern, *others)
    if not same_length[text]:
        del same_length[text]
    if not same_length:
        del by_text[len(text)]


def _literals(pattern: str) -> tuple[str, str, str]:
    """Return three texts that each matching URI has: at its start, at its end, and, the longest one, in between."""
    prefix, *texts = _VARIABLE.split(pattern)
    wildcards = _VARIABLE.findall(pattern)
    # `**/` also matches no segment, without the slash.
    texts = [
        text.removeprefix("/") if wildcard.startswith("**") else text
        for wildcard, text in zip(wildcards, texts, strict=True)
    ]
    suffix = texts.pop() if texts else ""
    return prefix, suffix, max(texts, key=len, default="")
