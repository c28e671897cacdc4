"""URI patterns, and an index that finds the ones a URI matches without trying them all.

Three forms, told apart by what they contain:

* a glob: `*` is any text within one segment, `**` any text at all (`resource://*/data`, `file:///logs/**`);
* an RFC 6570 template, known by its braces (`board://{sprint}/tasks{?page}`). The core does not parse those: whoever
  builds the hub passes a `Templates` function, and `tidings.server.uri_templates` has one on the SDK's `UriTemplate`;
* anything else is an exact URI and no matter for this module.

The index is a trie over the segments between slashes. A segment with wildcards is filed under what is literal at its
two ends, and patterns that are alike in that too under a text between two wildcards, so that ten thousand patterns that
differ in any literal text cost a few look-ups and no scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Generic, TypeAlias, TypeVar

from tidings.core.model import is_unicode
from tidings.errors import InvalidPattern

__all__ = ["Match", "PatternIndex", "Templates", "compile_pattern", "is_pattern"]

Match: TypeAlias = Callable[[str], bool]
Templates: TypeAlias = Callable[[str], Match]
"""From the text of an RFC 6570 template to what tells whether a URI matches it; raises ValueError on a bad one."""

_Value = TypeVar("_Value")

_VARIABLE = re.compile(r"\{[^{}]*\}|\*+")
_SIMPLE_EXPRESSION = re.compile(r"\{[A-Za-z0-9_.]+\}")

_MOST_SEGMENTS = 100
"""More than any real URI has. The index recurses once per segment, and a client chooses the pattern."""


def is_pattern(uri: str) -> bool:
    return "*" in uri or "{" in uri


def compile_pattern(pattern: str, templates: Templates | None = None) -> Match:
    """What tells whether a URI matches `pattern`. A glob also matches itself, letter by letter."""
    if not is_unicode(pattern):
        raise InvalidPattern(f"{pattern!r:.80} has half a character in it, which no URI has")
    if pattern.count("/") >= _MOST_SEGMENTS:
        raise InvalidPattern(f"{pattern!r:.80} has more than {_MOST_SEGMENTS} segments")
    if "{" not in pattern:
        regex = re.compile(_glob_regex(pattern), re.DOTALL)
        return lambda uri: regex.match(uri) is not None
    if templates is None:
        raise InvalidPattern(f"{pattern!r} is a URI template, and this hub was given nothing that reads templates")
    try:
        return templates(pattern)
    except ValueError as error:
        raise InvalidPattern(f"{pattern!r} is not a URI template that can be matched: {error}") from None


def _glob_regex(pattern: str) -> str:
    """A regular expression without catastrophic backtracking, since clients choose the pattern.

    Between two `**`, literals and `*` form a group. The first place where a group fits is as good as any later one, so
    an atomic group may forget the others; only the last group is bound to the end.
    """
    regex = ""
    groups = re.split(r"\*\*+", pattern)
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        skip = ""
        if index:
            skip = ".*?"
            if groups[index - 1][-1:] in ("/", "") and group.startswith("/"):
                # `/**/` stands for any number of segments, none included.
                skip, group = "(?:.*?/)??", group[1:]
        regex += skip + _group_regex(group, is_last) if is_last else f"(?>{skip}{_group_regex(group, is_last)})"
    return regex + r"\Z"


def _group_regex(group: str, is_last: bool) -> str:
    first, *others = map(re.escape, group.split("*"))
    if is_last and others:
        *others, end = others
        return first + "".join(f"(?>[^/]*?{literal})" for literal in others) + f"[^/]*{end}"
    return first + "".join(f"(?>[^/]*?{literal})" for literal in others)


class _Shelf:
    """Patterns that the trie can't tell apart, filed under a text that each has between two wildcards."""

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
        """File a pattern; whether it was not there."""
        texts = _between(pattern)
        shelved = [self.by_length.get(len(text), _NO_TEXTS).get(text, _NONE) for text in texts]
        if any(pattern in patterns for patterns in shelved):
            return False
        # Where the fewest are: a text that all of them have tells nothing.
        text = min(zip(map(len, shelved), texts, strict=True), key=lambda pair: (pair[0], -len(pair[1])))[1]
        self.by_length.setdefault(len(text), {}).setdefault(text, {})[pattern] = match
        return True

    def discard(self, pattern: str) -> bool:
        for text in _between(pattern):
            by_text = self.by_length.get(len(text), _NO_TEXTS)
            if pattern in (patterns := by_text.get(text, _NONE)):
                del patterns[pattern]
                if not patterns:
                    del by_text[text]
                if not by_text:
                    del self.by_length[len(text)]
                return True
        return False


class _Ends(Generic[_Value]):
    """Values by what a text starts and ends with; by the start first, since most texts fail there."""

    __slots__ = ("by_start",)

    def __init__(self) -> None:
        self.by_start: dict[int, dict[str, dict[int, dict[str, _Value]]]] = {}

    def fitting(self, text: str) -> list[_Value]:
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
        self.wild: _Ends[_Node] | None = None
        """By what is literal at the two ends of the segment."""
        self.rest: _Ends[_Shelf] | None = None
        """Patterns that go on over any number of segments, by what is literal at the two ends of all that is left."""
        self.ends: _Shelf | None = None
        """Patterns whose last segment this is."""

    def is_empty(self) -> bool:
        return not (self.literal or self.wild or self.rest or self.ends)


class PatternIndex:
    """A set of patterns that can be asked: which of you match this URI?"""

    def __init__(self, templates: Templates | None = None) -> None:
        self._templates = templates
        self._root = _Node()
        self.count = 0

    def add(self, pattern: str, match: Match | None = None) -> None:
        """File a pattern; `match` is its compiled form, for who has that already."""
        self._edit(self._root, _segments(pattern), pattern, match or compile_pattern(pattern, self._templates))

    def discard(self, pattern: str) -> None:
        self._edit(self._root, _segments(pattern), pattern, None)

    def matching(self, uri: str) -> list[str]:
        if not self.count:
            return []
        found: list[tuple[str, Match]] = []
        self._collect(self._root, uri.split("/"), 0, uri, found)
        return [pattern for pattern, match in found if match(uri)]

    def __len__(self) -> int:
        return self.count

    def _collect(self, node: _Node, parts: list[str], at: int, uri: str, found: list[tuple[str, Match]]) -> None:
        if node.rest is not None:
            for shelf in node.rest.fitting("/".join(parts[at:])):
                shelf.collect(uri, found)
        if at == len(parts):
            if node.ends is not None:
                node.ends.collect(uri, found)
            return
        part = parts[at]
        child = node.literal.get(part)
        if child is not None:
            self._collect(child, parts, at + 1, uri, found)
        if node.wild is not None:
            for child in node.wild.fitting(part):
                self._collect(child, parts, at + 1, uri, found)

    def _edit(self, node: _Node, segments: list[str], pattern: str, match: Match | None) -> None:
        """File `pattern` below `node`, or with no `match` take it out, and with it what is empty then."""
        if not segments:
            if node.ends is None:
                node.ends = _Shelf()
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
        elif not _is_open(segment):
            if node.wild is None:
                node.wild = _Ends()
            child = node.wild.setdefault(start, end, _Node())
            self._edit(child, others, pattern, match)
            if child.is_empty():
                node.wild.delete(start, end)
                if not node.wild.by_start:
                    node.wild = None
        else:
            end = _VARIABLE.split("/".join(segments))[-1]
            if segment.startswith("**") and not segment.strip("*"):
                end = end.removeprefix("/")  # `**/x` matches a mere `x`
            if node.rest is None:
                node.rest = _Ends()
            shelf = node.rest.setdefault(start, end, _Shelf())
            self._put(shelf, pattern, match)
            if not shelf.by_length:
                node.rest.delete(start, end)
                if not node.rest.by_start:
                    node.rest = None

    def _put(self, shelf: _Shelf, pattern: str, match: Match | None) -> None:
        if match is None:
            self.count -= shelf.discard(pattern)
        else:
            self.count += shelf.put(pattern, match)


_NONE: dict[str, Match] = {}
_NO_TEXTS: dict[str, dict[str, Match]] = {}


def _between(pattern: str) -> list[str]:
    """The literal texts between two wildcards of a pattern, which a URI that matches must contain; at least one."""
    wildcards = list(_VARIABLE.finditer(pattern))
    texts = []
    for left, right in pairwise(wildcards):
        text = pattern[left.end() : right.start()]
        # `**/` stands for no segment at all too, and its slash is then not there.
        texts.append(text.removeprefix("/") if left[0].startswith("**") else text)
    return texts or [""]


def _segments(pattern: str) -> list[str]:
    """Split at the slashes that are not inside an expression: `{/path}` holds one of its own."""
    return [part.replace("\0", "/") for part in _VARIABLE.sub(_hide_slashes, pattern).split("/")]


def _hide_slashes(found: re.Match[str]) -> str:
    return found[0].replace("/", "\0")


def _is_open(segment: str) -> bool:
    """Whether a segment of a pattern can take in more than one segment of a URI, or less than one."""
    return any(
        found.startswith("**") or (found.startswith("{") and not _SIMPLE_EXPRESSION.fullmatch(found))
        for found in _VARIABLE.findall(segment)
    )
