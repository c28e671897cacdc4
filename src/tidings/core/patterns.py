"""URI patterns, and an index that finds the patterns that match a URI without trying all of them.

There are three forms:

* a glob: `*` is any text within one segment, `**` any text (`resource://*/data`, `file:///logs/**`);
* an RFC 6570 template, which contains braces (`board://{sprint}/tasks{?page}`). The core does not parse templates: the
  hub is given a `Templates` function, and `tidings.sdk.uri_templates` has one that uses the SDK's `UriTemplate`;
* anything else is an exact URI, which this module does not handle.

The index is a trie over the segments between slashes. A segment with wildcards is stored by its literal start and end;
patterns that are equal in these are stored by a literal text between two wildcards. So ten thousand patterns that
differ in any literal text need a few lookups and no scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Generic, TypeAlias, TypeVar

from tidings.core.encoding import is_unicode
from tidings.core.model import Topic
from tidings.errors import InvalidPattern

__all__ = ["Match", "PatternIndex", "Templates", "compile_pattern", "is_pattern"]

Match: TypeAlias = Callable[[str], bool]
Templates: TypeAlias = Callable[[str], Match]
"""Compiles an RFC 6570 template into a predicate for URIs. It raises ValueError for an invalid template."""

_Value = TypeVar("_Value")

_VARIABLE = re.compile(r"\{[^{}]*\}|\*+")
_SIMPLE_EXPRESSION = re.compile(r"\{[A-Za-z0-9_.]+\}")
# Clients choose the patterns, so the time that one of them can take is limited.
_MAX_LENGTH = 1_000
_MAX_WILDCARDS = 16
_MAX_SEGMENTS = 100
"""More than real URIs have. The index recurses once per segment."""
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


class _Search:
    """The search for the patterns that may match one URI."""

    __slots__ = ("found", "parts", "uri", "work")

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.parts = uri.split("/")
        self.found: list[str] = []
        self.work = 0
        """The number of lookups and comparisons."""


class _Bucket:
    """Patterns with the same place in the trie, stored by a literal text between two wildcards."""

    __slots__ = ("by_length",)

    def __init__(self) -> None:
        self.by_length: dict[int, dict[str, dict[str, None]]] = {}

    def collect(self, search: _Search) -> None:
        uri = search.uri
        for length, by_text in self.by_length.items():
            search.work += min(len(by_text), len(uri))
            if len(by_text) < len(uri):
                for text, patterns in by_text.items():
                    if text in uri:
                        search.found += patterns
            else:
                for text in {uri[at : at + length] for at in range(len(uri) - length + 1)}:
                    if text in by_text:
                        search.found += by_text[text]

    def add(self, pattern: str) -> None:
        texts = _inner_texts(pattern)
        existing = [len(self.by_length.get(len(text), _EMPTY).get(text, ())) for text in texts]
        # Use the text that the fewest patterns have, because a common text excludes few patterns.
        text = min(zip(existing, texts, strict=True), key=lambda pair: (pair[0], -len(pair[1])))[1]
        self.by_length.setdefault(len(text), {}).setdefault(text, {})[pattern] = None

    def remove(self, pattern: str) -> None:
        for text in _inner_texts(pattern):
            by_text = self.by_length.get(len(text), _EMPTY)
            if pattern in (patterns := by_text.get(text, {})):
                del patterns[pattern]
                if not patterns:
                    del by_text[text]
                if not by_text:
                    del self.by_length[len(text)]
                return


class _PrefixSuffixMap(Generic[_Value]):
    """Values by prefix and suffix. `find` compares the prefix first, because most texts differ there."""

    __slots__ = ("by_start",)

    def __init__(self) -> None:
        self.by_start: dict[int, dict[str, dict[int, dict[str, _Value]]]] = {}

    def find(self, text: str, search: _Search) -> list[_Value]:
        found: list[_Value] = []
        search.work += len(self.by_start)
        for length, starts in self.by_start.items():
            by_end = starts.get(text[:length])
            if by_end is not None:
                search.work += len(by_end)
                for length, ends in by_end.items():
                    value = ends.get(text[-length:] if length else "")
                    if value is not None:
                        found.append(value)
        return found

    def setdefault(self, start: str, end: str, value: _Value) -> _Value:
        by_end = self.by_start.setdefault(len(start), {}).setdefault(start, {})
        return by_end.setdefault(len(end), {}).setdefault(end, value)

    def delete(self, start: str, end: str) -> None:
        starts = self.by_start[len(start)]
        by_end = starts[start]
        ends = by_end[len(end)]
        del ends[end]
        if not ends:
            del by_end[len(end)]
        if not by_end:
            del starts[start]
        if not starts:
            del self.by_start[len(start)]


class _Node:
    __slots__ = ("ends", "literal", "rest", "wild")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        self.wild: _PrefixSuffixMap[_Node] | None = None
        """By the literal start and end of the segment."""
        self.rest: _PrefixSuffixMap[_Bucket] | None = None
        """Patterns that continue over any number of segments, by the literal start and end of the rest."""
        self.ends: _Bucket | None = None
        """Patterns that end here."""

    def is_empty(self) -> bool:
        return not (self.literal or self.wild or self.rest or self.ends)


class PatternIndex:
    """A set of patterns, and the search for those that match a URI."""

    def __init__(self) -> None:
        self._root = _Node()
        self.matches: dict[str, Match] = {}
        """The compiled form of each pattern."""
        self.work = 0
        """Grows with each search, in units of about a third of a microsecond."""

    def add(self, pattern: str, match: Match) -> None:
        """Add a pattern with its compiled form."""
        if pattern not in self.matches:
            self.matches[pattern] = match
            self._edit(self._root, _segments(pattern), 0, pattern)

    def discard(self, pattern: str) -> None:
        if self.matches.pop(pattern, None) is not None:
            self._edit(self._root, _segments(pattern), 0, pattern)

    def matching(self, uri: str) -> list[str]:
        if len(uri) > _MAX_URI_LENGTH:
            return []
        search = _Search(uri)
        self._collect(self._root, 0, search)
        # The SDK needs about as long for a variable as a glob for 30 characters.
        self.work += search.work + sum(8 + len(uri) // 2 + 16 * pattern.count("{") for pattern in search.found)
        return [pattern for pattern in search.found if self.matches[pattern](uri)]

    def _collect(self, node: _Node, at: int, search: _Search) -> None:
        search.work += 1
        if node.rest is not None:
            for bucket in node.rest.find("/".join(search.parts[at:]), search):
                bucket.collect(search)
        if at == len(search.parts):
            if node.ends is not None:
                node.ends.collect(search)
            return
        part = search.parts[at]
        child = node.literal.get(part)
        if child is not None:
            self._collect(child, at + 1, search)
        if node.wild is not None:
            for child in node.wild.find(part, search):
                self._collect(child, at + 1, search)

    def _edit(self, node: _Node, segments: list[str], at: int, pattern: str) -> None:
        """Add `pattern` below `node`. If it is no longer in `matches`, remove it and the nodes that are empty then."""
        if at == len(segments):
            if node.ends is None:
                node.ends = _Bucket()
            self._put(node.ends, pattern)
            if not node.ends.by_length:
                node.ends = None
            return
        segment = segments[at]
        if not is_pattern(segment):
            if (child := node.literal.get(segment)) is None:
                child = node.literal[segment] = _Node()
            self._edit(child, segments, at + 1, pattern)
            if child.is_empty():
                del node.literal[segment]
            return
        pieces = _VARIABLE.split(segment)
        start, end = pieces[0], pieces[-1]
        if not _spans_segments(segment):
            if node.wild is None:
                node.wild = _PrefixSuffixMap()
            child = node.wild.setdefault(start, end, _Node())
            self._edit(child, segments, at + 1, pattern)
            if child.is_empty():
                node.wild.delete(start, end)
                if not node.wild.by_start:
                    node.wild = None
        else:
            end = _VARIABLE.split("/".join(segments[at:]))[-1]
            if segment.startswith("**") and not segment.strip("*"):
                end = end.removeprefix("/")  # `**/x` also matches `x`
            if node.rest is None:
                node.rest = _PrefixSuffixMap()
            bucket = node.rest.setdefault(start, end, _Bucket())
            self._put(bucket, pattern)
            if not bucket.by_length:
                node.rest.delete(start, end)
                if not node.rest.by_start:
                    node.rest = None

    def _put(self, bucket: _Bucket, pattern: str) -> None:
        if pattern in self.matches:
            bucket.add(pattern)
        else:
            bucket.remove(pattern)


_EMPTY: dict[str, dict[str, None]] = {}


def _inner_texts(pattern: str) -> list[str]:
    """Return the literal texts between two wildcards, which a matching URI must contain; at least one."""
    wildcards = list(_VARIABLE.finditer(pattern))
    texts = []
    for left, right in pairwise(wildcards):
        text = pattern[left.end() : right.start()]
        # `**/` also matches no segment, without the slash.
        texts.append(text.removeprefix("/") if left[0].startswith("**") else text)
    return texts or [""]


def _segments(pattern: str) -> list[str]:
    """Split at the slashes that are not part of an expression such as `{/path}`."""
    return [part.replace("\0", "/") for part in _VARIABLE.sub(_hide_slashes, pattern).split("/")]


def _hide_slashes(found: re.Match[str]) -> str:
    return found[0].replace("/", "\0")


def _spans_segments(segment: str) -> bool:
    """Return whether a segment of a pattern can match more or less than one segment of a URI."""
    return any(
        found.startswith("**") or (found.startswith("{") and not _SIMPLE_EXPRESSION.fullmatch(found))
        for found in _VARIABLE.findall(segment)
    )
