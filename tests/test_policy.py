"""Every knob has a default that holds, and refuses what it can't have with words that help."""

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from tidings import Feature, InvalidPolicy, Policy, Priority, TidingsError


def test_the_defaults_hold_nothing_back() -> None:
    policy = Policy()

    assert not policy.has_delays
    assert policy.detail == "full"
    assert "2025-03-26" in policy.mute_list_changed


@pytest.mark.parametrize("knob", ["quiet_gap", "min_interval"])
def test_a_policy_with_a_gap_or_an_interval_paces(knob: str) -> None:
    assert Policy().but(**{knob: 0.1}).has_delays


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"detail": "some"}, "detail is 'some'.*full, delta, summary, none"),
        ({"quiet_gap": -1}, "quiet_gap is -1.*at least 0"),
        ({"longest_wait": math.nan}, "longest_wait is nan"),
        ({"min_interval": "1"}, "min_interval is '1'"),
        ({"journal_age": None}, "journal_age is None"),
        ({"max_pending": 0}, "max_pending is 0.*at least 1"),
        ({"max_changes_per_frame": 0}, "max_changes_per_frame is 0.*at least 1"),
        ({"max_item_bytes": 1.5}, "max_item_bytes is 1.5"),
        ({"max_uris": True}, "max_uris is True"),
        ({"max_contents": -1}, "max_contents is -1"),
        ({"journal_changes": -1}, "journal_changes is -1"),
        ({"durable_ttl": math.inf}, "durable_ttl is inf.*at most"),
        ({"quiet_gap": 2.0, "longest_wait": 1.0}, "quiet_gap .*longest_wait.*raise longest_wait"),
        ({"priorities": {"a://b": "soon"}}, "priorities.*urgent, high, normal, low"),
        ({"priorities": {"a://b": 7}}, "priorities.*7"),
        ({"priorities": {"a://{x}": "high"}}, "priorities.*template"),
        ({"priorities": [("a://b",)]}, "priorities"),
    ],
)
def test_a_knob_refuses_what_it_can_not_have_and_says_why(knobs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidPolicy, match=complaint) as caught:
        Policy(**knobs)
    assert isinstance(caught.value, TidingsError)
    assert isinstance(caught.value, ValueError)


def test_turning_a_knob_leaves_the_others_and_the_original_alone() -> None:
    policy = Policy(quiet_gap=0.5, longest_wait=5.0)
    turned = policy.but(longest_wait=6.0)

    changed = {field.name for field in fields(Policy) if getattr(policy, field.name) != getattr(turned, field.name)}
    assert changed == {"longest_wait"}
    assert policy.longest_wait == 5.0
    with pytest.raises(FrozenInstanceError):
        policy.longest_wait = 7.0  # type: ignore[misc]


def test_turning_a_knob_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(InvalidPolicy, match=r"no such knob: quite_gap; there are .*quiet_gap"):
        Policy().but(quite_gap=1)


def test_turned_knobs_are_checked_too() -> None:
    with pytest.raises(InvalidPolicy, match="longest_wait"):
        Policy(quiet_gap=0.5).but(longest_wait=0.1)


def test_lists_come_before_contents_by_default() -> None:
    policy = Policy()

    assert {policy.priority(feature) for feature in Feature} == {Priority.HIGH}
    assert policy.priority("a://b") is Priority.NORMAL
    assert policy.priority("tools") is Priority.NORMAL, "the resource of that name, not the list"
    assert Priority.URGENT < Priority.HIGH < Priority.NORMAL < Priority.LOW


@pytest.mark.parametrize(
    ("uri", "priority"),
    [
        ("alarm://fire", Priority.URGENT),
        ("alarm://fire/2", Priority.LOW),
        ("log://a/b", Priority.LOW),
        ("log://a", Priority.HIGH),
        ("else://a", Priority.NORMAL),
    ],
)
def test_the_first_uri_or_pattern_that_matches_gives_the_priority(uri: str, priority: Priority) -> None:
    policy = Policy(
        priorities=(("alarm://fire", Priority.URGENT), ("log://*", Priority.HIGH), ("*://*/**", Priority.LOW))
    )

    assert policy.priority(uri) is priority


def test_priorities_may_be_given_by_name_and_as_a_mapping() -> None:
    given: Any = {"a://*": "urgent", "b://*": 3}

    assert Policy(priorities=given).priorities == (("a://*", Priority.URGENT), ("b://*", Priority.LOW))
