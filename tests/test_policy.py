"""Settings have valid defaults, and an invalid value is refused with a message that helps."""

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from tidings import Feature, InvalidPolicy, Policy, Priority, TidingsError


def test_defaults_delay_nothing() -> None:
    policy = Policy()

    assert not policy.delivery.has_delays
    assert policy.detail == "full"
    assert "2025-03-26" in policy.mute_list_changed


@pytest.mark.parametrize("setting", ["quiet_gap", "min_interval"])
def test_gap_and_interval_delay_notifications(setting: str) -> None:
    assert Policy().replace(**{setting: 0.1}).delivery.has_delays


@pytest.mark.parametrize(
    ("settings", "complaint"),
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
def test_invalid_setting_is_refused_with_its_reason(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidPolicy, match=complaint) as caught:
        Policy(**settings)
    assert isinstance(caught.value, TidingsError)
    assert isinstance(caught.value, ValueError)


def test_changed_keeps_the_other_settings() -> None:
    policy = Policy(quiet_gap=0.5, longest_wait=5.0)
    changed = policy.replace(longest_wait=6.0)

    differing = {field.name for field in fields(Policy) if getattr(policy, field.name) != getattr(changed, field.name)}
    assert differing == {"longest_wait"}
    assert policy.longest_wait == 5.0
    with pytest.raises(FrozenInstanceError):
        policy.longest_wait = 7.0  # type: ignore[misc]


def test_unknown_setting_names_the_known_ones() -> None:
    with pytest.raises(InvalidPolicy, match=r"no such setting: quite_gap; there are .*quiet_gap"):
        Policy().replace(quite_gap=1)


def test_changed_settings_are_checked() -> None:
    with pytest.raises(InvalidPolicy, match="longest_wait"):
        Policy(quiet_gap=0.5).replace(longest_wait=0.1)


def test_lists_come_before_contents_by_default() -> None:
    policy = Policy()

    assert {policy.delivery.priority(feature) for feature in Feature} == {Priority.HIGH}
    assert policy.delivery.priority("a://b") is Priority.NORMAL
    assert policy.delivery.priority("tools") is Priority.NORMAL, "the resource of that name, not the list"
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
def test_first_matching_uri_or_pattern_gives_the_priority(uri: str, priority: Priority) -> None:
    policy = Policy(
        priorities=(("alarm://fire", Priority.URGENT), ("log://*", Priority.HIGH), ("*://*/**", Priority.LOW))
    )

    assert policy.delivery.priority(uri) is priority


def test_priorities_are_accepted_by_name_and_as_a_mapping() -> None:
    given: Any = {"a://*": "urgent", "b://*": 3}

    assert Policy(priorities=given).priorities == (("a://*", Priority.URGENT), ("b://*", Priority.LOW))


@pytest.mark.parametrize(("own", "expected"), [(None, 5000), (0, 5000), (100, 100), (9000, 9000)])
def test_ttl_of_a_list_is_that_of_the_server_if_it_has_one(own: int | None, expected: int) -> None:
    assert Policy(list_ttl=5).ttl_ms(own) == expected
