"""URI patterns, and an index that finds the patterns that match a URI without trying all of them.

There are three forms:

* a glob: `*` is any text within one segment, `**` any text (`resource://*/data`, `file:///logs/**`);
* an RFC 6570 template, which contains braces (`board://{sprint}/tasks{?page}`). The core does not parse templates: the
  hub is given a `Templates` function, and `tidings.server.uri_templates` has one that uses the SDK's `UriTemplate`;
* anything else is an exact URI, which this module does not handle.

The index is a trie over the segments between slashes. A segment with wildcards is stored by its literal start and end;
patterns that are equal in these are stored by a literal text between two wildcards. So ten thousand patterns that
differ in any literal text need a few lookups and no scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
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

_MAX_SEGMENTS = 100
"""More than real URIs have. The index recurses once per segment, and clients choose the patterns."""


def is_pattern(topic: Topic) -> bool:
    return isinstance(topic, str) and ("*" in topic or "{" in topic)


def compile_pattern(pattern: str, templates: Templates | None = None) -> Match:
    """Return a predicate for the URIs that match a pattern. A glob also matches itself."""
    if not is_unicode(pattern):
        raise InvalidPattern(f"{pattern!r:.80} contains an unpaired surrogate, which no URI has")
    if pattern.count("/") >= _MAX_SEGMENTS:
        raise InvalidPattern(f"{pattern!r:.80} has more than {_MAX_SEGMENTS} segments")
    if "{" not in pattern:
        regex = re.compile(_glob_regex(pattern), re.DOTALL)
        return lambda uri: regex.match(uri) is not None
    if templates is None:
        raise InvalidPattern(f"{pattern!r} is a URI template, and this hub was given no function for templates")
    try:
        return templates(pattern)
    except ValueError as error:
        raise InvalidPattern(f"{pattern!r} is not a URI template that can be matched: {error}") from None


def _glob_regex(pattern: str) -> str:
    """Return a regular expression without catastrophic backtracking, because clients choose the patterns.

    Literals and `*` between two `**` form a group. If a group matches at all, its first match is sufficient, so groups
    are atomic; only the last group is bound to the end.
    """
    regex = ""
    groups = re.split(r"\*\*+", pattern)
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        skip = ""
        if index:
            skip = ".*?"
            if groups[index - 1][-1:] in ("/", "") and group.startswith("/"):
                # `/**/` matches any number of segments, including none.
                skip, group = "(?:.*?/)??", group[1:]
        regex += skip + _group_regex(group, is_last) if is_last else f"(?>{skip}{_group_regex(group, is_last)})"
    return regex + r"\Z"


def _group_regex(group: str, is_last: bool) -> str:
    first, *others = map(re.escape, group.split("*"))
    if is_last and others:
        *others, end = others
        return first + "".join(f"(?>[^/]*?{literal})" for literal in others) + f"[^/]*{end}"
    return first + "".join(f"(?>[^/]*?{literal})" for literal in others)


class _Bucket:
    """Patterns with the same place in the trie, stored by a literal text between two wildcards."""

    __slots__ = ("by_length",)

    def __init__(self) -> None:
        self.by_length: dict[int, dict[str, dict[str, Match]]] = {}

    def collect(self, uri: str, found: list[tuple[str, Match]]) -> None:
        for length, by_text in self.by_length.items():
            if len(by_text) < len(uri):
                for text, patterns in by_text.items():
                    if text in uri:
                        found += patterns.items()
            else:
                for text in {uri[at : at + length] for at in range(len(uri) - length + 1)}:
                    if text in by_text:
                        found += by_text[text].items()

    def put(self, pattern: str, match: Match) -> bool:
        """Add a pattern. Return whether it is new."""
        texts = _inner_texts(pattern)
        existing = [self.by_length.get(len(text), _EMPTY).get(text, _NO_PATTERNS) for text in texts]
        if any(pattern in patterns for patterns in existing):
            return False
        # Use the text that the fewest patterns have, because a common text excludes few patterns.
        text = min(zip(map(len, existing), texts, strict=True), key=lambda pair: (pair[0], -len(pair[1])))[1]
        self.by_length.setdefault(len(text), {}).setdefault(text, {})[pattern] = match
        return True

    def discard(self, pattern: str) -> bool:
        for text in _inner_texts(pattern):
            by_text = self.by_length.get(len(text), _EMPTY)
            if pattern in (patterns := by_text.get(text, _NO_PATTERNS)):
                del patterns[pattern]
                if not patterns:
                    del by_text[text]
                if not by_text:
                    del self.by_length[len(text)]
                return True
        return False


class _PrefixSuffixMap(Generic[_Value]):
    """Values by prefix and suffix. `find` compares the prefix first, because most texts differ there."""

    __slots__ = ("by_start",)

    def __init__(self) -> None:
        self.by_start: dict[int, dict[str, dict[int, dict[str, _Value]]]] = {}

    def find(self, text: str) -> list[_Value]:
        found: list[_Value] = []
        for length, starts in self.by_start.items():
            by_end = starts.get(text[:length])
            if by_end is not None:
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
        self.count = 0

    def add(self, pattern: str, match: Match) -> None:
        """Add a pattern with its compiled form."""
        self._edit(self._root, _segments(pattern), pattern, match)

    def discard(self, pattern: str) -> None:
        self._edit(self._root, _segments(pattern), pattern, None)

    def matching(self, uri: str) -> list[str]:
        found: list[tuple[str, Match]] = []
        self._collect(self._root, uri.split("/"), 0, uri, found)
        return [pattern for pattern, match in found if match(uri)]

    def _collect(self, node: _Node, parts: list[str], at: int, uri: str, found: list[tuple[str, Match]]) -> None:
        if node.rest is not None:
            for bucket in node.rest.find("/".join(parts[at:])):
                bucket.collect(uri, found)
        if at == len(parts):
            if node.ends is not None:
                node.ends.collect(uri, found)
            return
        part = parts[at]
        child = node.literal.get(part)
        if child is not None:
            self._collect(child, parts, at + 1, uri, found)
        if node.wild is not None:
            for child in node.wild.find(part):
                self._collect(child, parts, at + 1, uri, found)

    def _edit(self, node: _Node, segments: list[str], pattern: str, match: Match | None) -> None:
        """Add `pattern` below `node`, or without a `match` remove it and the nodes that are empty then."""
        if not segments:
            if node.ends is None:
                node.ends = _Bucket()
            self._put(node.ends, pattern, match)
            if not node.ends.by_length:
                node.ends = None
            return
        segment, *others = segments
        pieces = _VARIABLE.split(segment)
        start, end = pieces[0], pieces[-1]
        if segment == start:
            child = node.literal.setdefault(segment, _Node())
            self._edit(child, others, pattern, match)
            if child.is_empty():
                del node.literal[segment]
        elif not _spans_segments(segment):
            if node.wild is None:
                node.wild = _PrefixSuffixMap()
            child = node.wild.setdefault(start, end, _Node())
            self._edit(child, others, pattern, match)
            if child.is_empty():
                node.wild.delete(start, end)
                if not node.wild.by_start:
                    node.wild = None
        else:
            end = _VARIABLE.split("/".join(segments))[-1]
            if segment.startswith("**") and not segment.strip("*"):
                end = end.removeprefix("/")  # `**/x` also matches `x`
            if node.rest is None:
                node.rest = _PrefixSuffixMap()
            bucket = node.rest.setdefault(start, end, _Bucket())
            self._put(bucket, pattern, match)
            if not bucket.by_length:
                node.rest.delete(start, end)
                if not node.rest.by_start:
                    node.rest = None

    def _put(self, bucket: _Bucket, pattern: str, match: Match | None) -> None:
        if match is None:
            self.count -= bucket.discard(pattern)
        else:
            self.count += bucket.put(pattern, match)


_NO_PATTERNS: dict[str, Match] = {}
_EMPTY: dict[str, dict[str, Match]] = {}


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
