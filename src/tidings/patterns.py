"""URI patterns, and an index that finds the ones a URI matches without trying them all.

Three forms, told apart by what they contain:

* a glob: `*` is any text within one segment, `**` any text at all (`resource://*/data`, `file:///logs/**`);
* an RFC 6570 template, known by its braces (`board://{sprint}/tasks{?page}`). The core does not parse those: whoever
  builds the hub passes a `Templates` function, and `tidings.lanes.templates` has one on the SDK's `UriTemplate`;
* anything else is an exact URI and no matter for this module.

The index is a trie over the segments between slashes. A segment with wildcards is filed under what is literal at its
two ends, so that ten thousand patterns that differ anywhere near an end of a segment cost a look-up and no scan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from tidings.errors import InvalidPattern

__all__ = ["Match", "PatternIndex", "Templates", "compile_pattern", "is_pattern"]

Match: TypeAlias = Callable[[str], bool]
Templates: TypeAlias = Callable[[str], Match]
"""From the text of an RFC 6570 template to what tells whether a URI matches it; raises ValueError on a bad one."""

_Key = TypeVar("_Key")

_VARIABLE = re.compile(r"\{[^{}]*\}|\*+")
_SIMPLE_EXPRESSION = re.compile(r"\{[A-Za-z0-9_.]+\}")

_MOST_SEGMENTS = 100
"""More than any real URI has. The index recurses once per segment, and a client chooses the pattern."""


def is_pattern(uri: str) -> bool:
    return "*" in uri or "{" in uri


def compile_pattern(pattern: str, templates: Templates | None = None) -> Match:
    """What tells whether a URI matches `pattern`. A glob also matches itself, letter by letter."""
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


class _Node:
    __slots__ = ("ends", "literal", "rest", "wild")

    def __init__(self) -> None:
        self.literal: dict[str, _Node] = {}
        self.wild: dict[tuple[int, int], dict[tuple[str, str], _Node]] = {}
        """By (length of the literal start, of the literal end), then by those texts."""
        self.rest: dict[tuple[int, int], dict[tuple[str, str], dict[str, Match]]] = {}
        """Patterns that go on over any number of segments, by what is literal at the two ends of all that is left."""
        self.ends: dict[str, Match] = {}
        """Patterns whose last segment this is."""

    def is_empty(self) -> bool:
        return not (self.literal or self.wild or self.rest or self.ends)


class PatternIndex:
    """A set of patterns that can be asked: which of you match this URI?"""

    def __init__(self, templates: Templates | None = None) -> None:
        self._templates = templates
        self._root = _Node()
        self._count = 0

    def add(self, pattern: str) -> None:
        self._edit(self._root, _segments(pattern), pattern, compile_pattern(pattern, self._templates))

    def discard(self, pattern: str) -> None:
        self._edit(self._root, _segments(pattern), pattern, None)

    def matching(self, uri: str) -> list[str]:
        if not self._count:
            return []
        return [pattern for pattern, match in self._candidates(self._root, uri.split("/"), 0, uri) if match(uri)]

    def __len__(self) -> int:
        return self._count

    def _candidates(self, node: _Node, parts: list[str], at: int, uri: str) -> Iterator[tuple[str, Match]]:
        if node.rest:
            left = "/".join(parts[at:])
            for lengths, by_ends in node.rest.items():
                yield from by_ends.get(_ends(left, *lengths), _NONE).items()
        if at == len(parts):
            yield from node.ends.items()
            return
        part = parts[at]
        child = node.literal.get(part)
        if child is not None:
            yield from self._candidates(child, parts, at + 1, uri)
        for lengths, children in node.wild.items():
            child = children.get(_ends(part, *lengths))
            if child is not None:
                yield from self._candidates(child, parts, at + 1, uri)

    def _edit(self, node: _Node, segments: list[str], pattern: str, match: Match | None) -> None:
        """File `pattern` below `node`, or with no `match` take it out, and with it what is empty then."""
        if not segments:
            self._put(node.ends, pattern, match)
            return
        segment, *others = segments
        pieces = _VARIABLE.split(segment)
        start, end = pieces[0], pieces[-1]
        if segment == start:
            self._descend(node.literal, segment, others, pattern, match)
        elif not _is_open(segment):
            children = node.wild.setdefault((len(start), len(end)), {})
            self._descend(children, (start, end), others, pattern, match)
            if not children:
                del node.wild[len(start), len(end)]
        else:
            end = _VARIABLE.split("/".join(segments))[-1]
            if segments[0] == "**":
                end = end.removeprefix("/")  # `**/x` matches a mere `x`
            by_ends = node.rest.setdefault((len(start), len(end)), {})
            patterns = by_ends.setdefault((start, end), {})
            self._put(patterns, pattern, match)
            if not patterns:
                del by_ends[start, end]
            if not by_ends:
                del node.rest[len(start), len(end)]

    def _descend(
        self, children: dict[_Key, _Node], key: _Key, others: list[str], pattern: str, match: Match | None
    ) -> None:
        child = children.setdefault(key, _Node())
        self._edit(child, others, pattern, match)
        if child.is_empty():
            del children[key]

    def _put(self, patterns: dict[str, Match], pattern: str, match: Match | None) -> None:
        before = len(patterns)
        if match is None:
            patterns.pop(pattern, None)
        else:
            patterns[pattern] = match
        self._count += len(patterns) - before


_NONE: dict[str, Match] = {}


def _ends(text: str, start: int, end: int) -> tuple[str, str]:
    return text[:start], text[max(len(text) - end, 0) :]


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
