"""Terms of a client: those that can be granted are, others are left out, and none is an error."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.filters import Filter, Terms
from tidings.core.model import Priority
from tidings.errors import InvalidPolicy
from tidings.policy import Policy

WHOLE = {
    "operations": ["added", "removed"],
    "names": ["weather_*", "exact"],
    "uris": ["file:///logs/**"],
    "minInterval": 0.5,
    "quietGap": 0.1,
    "longestWait": 2.0,
    "detail": "delta",
    "priorities": {"file:///urgent/*": "urgent", "file:///**": "low"},
    "bookmarks": True,
}

anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["added", "full", "low"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def test_valid_terms_are_granted_and_reported() -> None:
    terms = Terms.parse(WHOLE)

    assert msgspec.json.decode(msgspec.json.encode(terms.as_json())) == WHOLE
    assert terms.filter == Filter(["added", "removed"], ["weather_*", "exact"], ["file:///logs/**"])
    policy = terms.policy(Policy(priorities=(("a:b", Priority.HIGH),)))
    assert (policy.min_interval, policy.quiet_gap, policy.longest_wait, policy.detail) == (0.5, 0.1, 2.0, "delta")
    assert [policy.delivery.priority(uri) for uri in ("file:///urgent/x", "file:///x", "a:b", "c:d")] == [
        *(Priority.URGENT, Priority.LOW, Priority.HIGH, Priority.NORMAL)
    ]


def test_no_terms_are_the_defaults() -> None:
    base = Policy(quiet_gap=0.2)
    terms = Terms.parse({})

    assert terms == Terms()
    assert terms.as_json() == {}
    assert terms.filter is None
    assert terms.policy(base) is base
    assert not terms.bookmarks


@pytest.mark.parametrize(
    ("member", "value"),
    [
        *(("operations", bad) for bad in ("added", ["moved"], ["added", "moved"], ["deleted"], 7, {"added": True},
                                          ["added"] * 65)),
        *(("names", bad) for bad in ("a*", [7], ["{x}"], ["a"] * 65, ["a" * 1001], ["/" * 200], {"a": "b"},
                                     ["\ud800"])),
        *(("uris", bad) for bad in ("a:b", [None], ["a://{x}"], ["a:b"] * 65)),
        *((name, bad) for name in ("minInterval", "quietGap", "longestWait")
          for bad in (-1, -0.001, "1", True, [1], float("nan"), float("inf"), 10**400)),
        *(("detail", bad) for bad in ("everything", "", 1, ["full"])),
        *(("priorities", bad) for bad in ({"a": "now"}, {"a": 1}, {"{x}": "low"}, ["a"],
                                          dict.fromkeys(map(str, range(65)), "low"))),
        *(("bookmarks", bad) for bad in (1, "true", [1])),
        ("others", 1),
        *((name, None) for name in WHOLE),
    ],
)  # fmt: skip
def test_invalid_term_is_left_out(member: str, value: Any) -> None:
    assert Terms.parse({**WHOLE, member: value}) == Terms.parse({k: v for k, v in WHOLE.items() if k != member})


@given(anything | st.dictionaries(st.sampled_from([*WHOLE, "x"]), anything))
def test_any_json_gives_usable_terms(given_: Any) -> None:
    terms = Terms.parse(given_)

    assert Terms.parse(msgspec.json.decode(msgspec.json.encode(terms.as_json()))) == terms
    assert terms.policy(Policy()).longest_wait <= 3600
    assert terms.filter is None or isinstance(terms.filter, Filter)


def test_times_are_limited() -> None:
    asked = {"minInterval": 1e9, "quietGap": 1e9, "longestWait": 1e9}
    assert Terms.parse(asked).as_json() == {"minInterval": 3600.0, "quietGap": 3600.0, "longestWait": 3600.0}
    assert Terms.parse({"minInterval": 3}).as_json() == {"minInterval": 3.0}


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        ({"quietGap": 5}, {"quietGap": 5.0, "longestWait": 5.0}),
        ({"quietGap": 5, "longestWait": 2}, {"quietGap": 2.0, "longestWait": 2.0}),
        ({"longestWait": 0.1}, {"quietGap": 0.1, "longestWait": 0.1}),
        ({"quietGap": 0.5}, {"quietGap": 0.5}),
    ],
)
def test_gap_is_at_most_the_longest_wait(asked: dict[str, Any], granted: dict[str, Any]) -> None:
    base = Policy(quiet_gap=0.3)

    terms = Terms.parse(asked, base)

    assert terms.as_json() == granted
    assert terms.policy(base).longest_wait >= terms.policy(base).quiet_gap


def test_patterns_are_limited_by_the_policy() -> None:
    strict = Policy(max_patterns=1)
    assert Terms.parse({"names": ["a"], "uris": ["b", "c"]}, strict) == Terms(names=("a",))


def test_terms_of_the_server_limit_those_of_the_client() -> None:
    server = Terms(
        operations=("added", "removed"),
        names=("public_*",),
        min_interval=1.0,
        detail="summary",
        priorities={"file:///**": "low"},
    )
    wish = {"operations": ["added", "updated"], "minInterval": 0.1, "detail": "full", "bookmarks": True,
            "priorities": {"file:///a": "urgent"}}  # fmt: skip
    client = Terms.parse(wish)

    both = client.within(server)

    assert both == Terms(
        operations=("added",),
        names=("public_*",),
        min_interval=1.0,
        detail="summary",
        priorities={"file:///**": "low", "file:///a": "high"},
        bookmarks=True,
    )
    assert both.policy(Policy()).delivery.priority("file:///a") is Priority.LOW
    assert Terms().within(server) == server
    assert client.within(Terms()) == client
    assert Terms(min_interval=2.0).within(server).min_interval == 2.0
    assert Terms(detail="none").within(server).detail == "none"


@pytest.mark.parametrize("limit", [Terms(min_interval=3600.0), Terms(quiet_gap=5.0)])
def test_urgent_priority_does_not_lift_the_limit_of_the_server(limit: Terms) -> None:
    client = Terms.parse({"priorities": {"a://**": "urgent", "b://**": "low"}})

    assert client.within(limit).priorities == {"a://**": "high", "b://**": "low"}
    assert client.within(Terms(detail="none")).priorities == client.priorities, "not a limit on time"
    trusted = Terms(min_interval=limit.min_interval, quiet_gap=limit.quiet_gap, priorities={"a://**": "urgent"})
    assert client.within(trusted).priorities == {"a://**": "urgent", "b://**": "low"}, "set by the server"


def test_terms_of_a_server_have_a_known_detail() -> None:
    detail: Any = "everything"
    with pytest.raises(InvalidPolicy, match="detail is 'everything'; it must be one of none, summary, delta, full"):
        Terms(detail=detail)
