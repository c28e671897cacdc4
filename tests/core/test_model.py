"""The words of Tidings as values: topics can't be mixed up, and nobody can change what was published."""

import pytest

from tidings import Catalog, Change, Feature, Item, Notification, Operation, Version


@pytest.fixture
def change() -> Change:
    [change] = Catalog(clock=lambda: 12.5, origin="here").prompts.add({"name": "review", "arguments": []})
    return change


@pytest.mark.parametrize("feature", Feature)
def test_a_feature_is_never_the_resource_of_the_same_name(feature: Feature) -> None:
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
def test_the_words_of_a_feature_are_the_specification_s(
    feature: Feature, method: str, singular: str, key_field: str
) -> None:
    assert (feature.method, feature.singular, feature.key_field) == (method, singular, key_field)


def test_a_notification_of_content_has_the_method_of_the_specification() -> None:
    assert Notification("a://b", Version(1, ""), (), since=0).method == "notifications/resources/updated"


def test_a_change_says_what_happened_to_which_item_when_and_where(change: Change) -> None:
    assert change.topic is Feature.PROMPTS
    assert change.operation is Operation.ADDED
    assert change.key == "review"
    assert (change.revision, change.digest) == change.version
    assert change.previous.revision == 0
    assert change.digest != change.previous.digest
    assert change.time == 12.5
    assert change.origin == "here"
    assert change.before is None


def test_what_was_published_can_not_be_changed(change: Change) -> None:
    item = change.item
    assert item is not None
    item.definition["arguments"].append("mine")

    assert item.definition == {"name": "review", "arguments": []}
    with pytest.raises(AttributeError):
        item.json = b"{}"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        change.key = "other"  # type: ignore[misc]


def test_items_of_the_same_content_have_the_same_digest_and_others_have_not(change: Change) -> None:
    def digest(definition: dict[str, object]) -> str:
        [change] = Catalog().prompts.add(definition)
        assert isinstance(change.item, Item)
        return change.item.digest

    assert change.item is not None
    assert digest({"arguments": [], "name": "review"}) == change.item.digest
    assert digest({"arguments": [1], "name": "review"}) != change.item.digest


def test_a_notification_tells_a_log_reader_what_it_says(change: Change) -> None:
    told = Notification(Feature.PROMPTS, change.version, (change,), since=0)
    unknown = Notification("a://b", Version(9, ""), (), since=-1, complete=False)

    assert repr(told) == "<Notification notifications/prompts/list_changed r1: added 'review'>"
    assert repr(unknown) == "<Notification notifications/resources/updated r9: refetch>"
