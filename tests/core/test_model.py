"""Topics cannot be confused, and published values are immutable."""

import pytest

from tidings import Catalog, Change, Feature, Notification, Operation, Version


@pytest.fixture
def change() -> Change:
    [change] = Catalog(clock=lambda: 12.5).prompts.add({"name": "review", "arguments": []})
    return change


@pytest.mark.parametrize("feature", Feature)
def test_feature_differs_from_the_resource_with_its_name(feature: Feature) -> None:
    by_topic: dict[Feature | str, str] = {feature: "list", feature.value: "content"}

    assert by_topic[feature] == "list"
    assert by_topic[feature.value] == "content"


@pytest.mark.parametrize(
    ("feature", "method", "singular", "key_field"),
    [
        (Feature.TOOLS, "notifications/tools/list_changed", "tool", "name"),
        (Feature.PROMPTS, "notifications/prompts/list_changed", "prompt", "name"),
        (Feature.RESOURCES, "notifications/resources/list_changed", "resource", "uri"),
    ],
)
def test_names_of_a_feature_are_those_of_the_specification(
    feature: Feature, method: str, singular: str, key_field: str
) -> None:
    assert (feature.method, feature.singular, feature.key_field) == (method, singular, key_field)


def test_change_has_operation_item_and_time(change: Change) -> None:
    assert (change.topic, change.operation, change.key) == (Feature.PROMPTS, Operation.ADDED, "review")
    assert (change.revision, change.digest) == change.version
    assert change.previous.revision == 0
    assert change.digest != change.previous.digest
    assert (change.time, change.before) == (12.5, None)


def test_published_values_are_immutable(change: Change) -> None:
    item = change.item
    assert item is not None
    item.definition["arguments"].append("mine")

    assert item.definition == {"name": "review", "arguments": []}
    with pytest.raises(AttributeError):
        item.json = b"{}"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        change.key = "other"  # type: ignore[misc]


def test_repr_of_a_notification_names_its_changes(change: Change) -> None:
    told = Notification(Feature.PROMPTS, change.version, (change,), since=0)
    unknown = Notification("a://b", Version(9, ""), (), since=-1, complete=False)

    assert repr(told) == "<Notification notifications/prompts/list_changed r1: added 'review'>"
    assert repr(unknown) == "<Notification notifications/resources/updated r9: refetch>"
