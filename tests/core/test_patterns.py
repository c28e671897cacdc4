"""URI patterns match as documented, and the index finds exactly those that match."""

import time
from collections.abc import Iterable
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidings import InvalidPattern
from tidings.core.patterns import PatternIndex, compile_pattern, is_pattern
from tidings.sdk.uri_templates import read_template

globs = st.lists(st.sampled_from(["a", "b", "/", "*", "**", "/**/", "."]), max_size=9).map("".join)
uris = st.text("ab/.", max_size=9)
templates = st.lists(
    st.sampled_from(["a", "b", "/", ".", "{x}", "{y}", "{+r}", "{/p}", "{/q*}", "{?k}", "{.e}", "{;s}", "{#f}"]),
    min_size=1,
    max_size=6,
).map("".join)
addresses = st.lists(st.sampled_from(["a", "b", "/", ".", "?k=a", ";s=a", "#a", "%2F", ","]), max_size=8).map("".join)


def matches_glob(pattern: str, uri: str) -> bool:
    """Match a glob in the simplest way, however slow."""

    @cache
    def fits(at: int, there: int) -> bool:
        if at == len(pattern):
            return there == len(uri)
        stars = len(pattern[at:]) - len(pattern[at:].lstrip("*"))
        after = at + stars
        if stars >= 2:
            no_segment = (at == 0 or pattern[at - 1] == "/") and pattern[after : after + 1] == "/"
            return any(fits(after, end) for end in range(there, len(uri) + 1)) or (
                no_segment and fits(after + 1, there)
            )
        if stars == 1:
            segment = len(uri[there:].split("/")[0])
            return any(fits(after, there + length) for length in range(segment + 1))
        return uri[there : there + 1] == pattern[at] and fits(at + 1, there + 1)

    return fits(0, 0)


def index_of(patterns: Iterable[str]) -> PatternIndex:
    index = PatternIndex()
    for pattern in patterns:
        index.add(pattern, compile_pattern(pattern, read_template))
    return index


@pytest.mark.parametrize(
    ("pattern", "matched", "unmatched"),
    [
        ("resource://*/data", ["resource://a/data", "resource:///data"], ["resource://a/b/data", "resource://a/dat"]),
        ("file:///logs/**", ["file:///logs/a", "file:///logs/a/b.log", "file:///logs/"], ["file:///log/a", "file:///logs"]),
        ("a://**/x", ["a://x", "a://b/x", "a://b/c/x"], ["a://bx", "a://b/x/y"]),
        ("a://*.md", ["a://b.md", "a://.md", "a://\n.md"], ["a://b.mdx", "a://b/c.md", "a://bXmd"]),
        ("a://b?c[d]+*", ["a://b?c[d]+", "a://b?c[d]+é"], ["a://bc[d]+", "a://b?cd+"]),
        ("a://*", ["a://*", "a://日本"], ["a://b/c"]),
    ],
)  # fmt: skip
def test_glob_matches_within_or_across_segments(pattern: str, matched: list[str], unmatched: list[str]) -> None:
    match = compile_pattern(pattern)

    assert is_pattern(pattern)
    assert [uri for uri in matched + unmatched if match(uri)] == matched


@pytest.mark.parametrize(
    ("template", "matched", "unmatched"),
    [
        ("board://{sprint}/tasks", ["board://7/tasks"], ["board://7/8/tasks", "board://7/task"]),
        ("file:///{+path}", ["file:///a", "file:///a/b/c"], ["http:///a"]),
        ("board://{sprint}{?page}", ["board://7", "board://7?page=2"], ["board://7/8"]),
        ("repo://me{/path*}", ["repo://me", "repo://me/a/b"], ["repo:/me", "repo://you/a"]),
    ],
)
def test_template_matches_as_in_the_sdk(template: str, matched: list[str], unmatched: list[str]) -> None:
    index = index_of([template])

    assert is_pattern(template)
    assert [uri for uri in matched + unmatched if index.matching(uri)] == matched


@given(globs, uris)
def test_glob_matches_as_defined(pattern: str, uri: str) -> None:
    assert compile_pattern(pattern)(uri) == matches_glob(pattern, uri)


@settings(max_examples=300)
@given(st.lists(globs, max_size=6), uris)
@example(["***/a"], "a")
def test_index_finds_exactly_the_matching_globs(patterns: list[str], uri: str) -> None:
    expected = {pattern for pattern in patterns if matches_glob(pattern, uri)}

    assert sorted(index_of(patterns).matching(uri)) == sorted(expected)


@settings(max_examples=300)
@given(templates, addresses)
def test_index_finds_exactly_the_matching_templates(template: str, uri: str) -> None:
    try:
        match = compile_pattern(template, read_template)
    except InvalidPattern:
        return  # two variables side by side, which the SDK can't match

    assert index_of([template]).matching(uri) == ([template] if match(uri) else [])


@given(st.lists(globs, max_size=8), uris)
def test_removed_patterns_leave_an_empty_index(patterns: list[str], uri: str) -> None:
    index = index_of(patterns)
    assert len(index.matches) == len(set(patterns))

    for pattern in [*patterns, *patterns, "never/**/there"]:
        index.discard(pattern)

    assert not index.matches
    empty = PatternIndex()
    assert index.matching(uri) == empty.matching(uri) == []
    assert index.work == empty.work, "nothing is left to look up"


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("a://{x", "'a://{x' is not a URI template that can be matched"),
        ("a://{x}{y}", "is not a URI template that can be matched"),
        ("a/" * 101 + "*", "more than 100 segments"),
        ("a://" + "*a" * 100_000, r"has 200004 characters; a pattern has at most 1000"),
        ("a://" + "*a" * 17, "has 17 wildcards or variables; a pattern has at most 16"),
        ("a://{?" + ",".join(f"v{number}" for number in range(17)) + "}", "has 17 wildcards or variables"),
    ],
)
def test_invalid_pattern_is_refused_with_its_reason(pattern: str, complaint: str) -> None:
    with pytest.raises(InvalidPattern, match=complaint):
        compile_pattern(pattern, read_template)


def test_template_needs_a_template_function() -> None:
    with pytest.raises(InvalidPattern, match=r"'a://\{x\}' is a URI template.*no function for templates"):
        compile_pattern("a://{x}")


@pytest.mark.parametrize(
    "pattern", ["**a" * 14 + "**c**", "*a" * 14 + "*c*b", "**/*a" * 7 + "/**b", "a**/" * 14 + "b*b"]
)
def test_time_of_a_match_grows_only_with_the_length_of_the_uri(pattern: str) -> None:
    match = compile_pattern(pattern)
    started = time.process_time()

    for _ in range(100):
        assert not match("a" * 2_000 + "/" + "a" * 2_000 + "b")

    assert time.process_time() - started < 10  # with backtracking, a single match would take years


def test_no_pattern_matches_a_very_long_uri() -> None:
    uri = "a://" + "b" * 8_188

    for pattern in ("a://*", "{+any}"):
        match = compile_pattern(pattern, read_template)
        assert match(uri)
        assert not match(uri + "b")
    assert index_of(["a://*"]).matching(uri + "b") == []


def test_work_of_a_search_does_not_depend_on_patterns_that_differ_in_literal_text() -> None:
    few, many = (index_of(f"board://b{number:03}/*/t" for number in range(size)) for size in (10, 1_000))

    assert few.matching("board://b007/x/t") == many.matching("board://b007/x/t") == ["board://b007/*/t"]

    assert few.work == many.work > 0
