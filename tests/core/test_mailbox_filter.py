"""A filtered or muted change is not delivered, and does not move told."""

import pytest

from tests.support.readers import Reader, add, lines
from tidings import Catalog, Change, Feature, Filter, Hub, InvalidPattern, Notification, Topic, Version

TOOLS, PROMPTS, RESOURCES = Feature


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (Filter(operations=["added"]), ["added a", "added b"]),
        (Filter(operations=["removed", "updated"]), ["updated a", "removed a"]),
        (Filter(operations=[]), []),
        (Filter(names=["b*", "c"]), ["added b"]),
        (Filter(names=["?"]), []),
        (Filter(operations=["updated"], names=["a"]), ["updated a"]),
        (Filter(), ["added a", "updated a", "added b", "removed a"]),
    ],
)
def test_filter_selects_list_changes_and_ignores_contents(
    catalog: Catalog, hub: Hub, reader: Reader, filter: Filter, expected: list[str]
) -> None:
    hub.subscribe(reader.take, "tools", uris=["a"], filter=filter)
    add(catalog, "a")
    catalog.tools.update("a", title="A")
    add(catalog, "b")
    catalog.tools.remove("a")
    catalog.resources.updated("a")

    assert lines(reader) == [*expected, "updated a"]


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (Filter(names=["a*"]), ["added ab", "added x://1", "added y://1"]),
        (Filter(uris=["x:**"]), ["added ab", "added b", "added x://1"]),
        (Filter(names=[], uris=["y://*"]), ["added y://1"]),
        (Filter(names=["a*"], also=Filter(names=["*b"], uris=[])), ["added ab"]),
        (Filter(["removed"]).narrowed(Filter(["added"])), []),
        (Filter(names=["b"]).narrowed(None), ["added b", "added x://1", "added y://1"]),
    ],
)
def test_names_and_uris_select_and_two_filters_both_apply(
    catalog: Catalog, hub: Hub, reader: Reader, filter: Filter, expected: list[str]
) -> None:
    hub.subscribe(reader.take, "tools", "prompts", "resources", filter=filter)
    catalog.tools.add({"name": "ab"})
    catalog.prompts.add({"name": "b"})
    catalog.resources.add({"uri": "x://1", "name": "r"})
    catalog.resources.add({"uri": "y://1", "name": "r"})

    assert lines(reader) == expected


def test_filtered_change_does_not_move_told(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    subscriber = hub.subscribe(reader.take, "tools", filter=Filter(operations=["removed"]))
    knew = hub.told(subscriber, TOOLS)
    add(catalog, "a", "b")
    assert lines(reader) == []
    assert hub.told(subscriber, TOOLS) == knew

    catalog.tools.remove("a")
    assert lines(reader) == ["removed a"]
    assert hub.told(subscriber, TOOLS) == catalog.version(TOOLS)


def test_filter_applies_to_net_changes(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    reader.is_slow = True
    subscriber = hub.subscribe(reader.take, "tools", filter=Filter(operations=["added"], names=["x*"]))
    add(catalog, "x0", "x1", "x2", "y")
    catalog.tools.update("x1", title="X")
    catalog.tools.remove("x2")
    reader.told()

    hub.wake(subscriber)
    assert lines(reader) == ["added x1"]


def test_filters_with_equal_settings_are_equal() -> None:
    one, same, other = Filter(["added"], ["a*"]), Filter(["added"], ["a*"]), Filter(["added"])

    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != one.narrowed(other)
    assert one.narrowed(other) == same.narrowed(other)
    with pytest.raises(ValueError, match="moved"):
        Filter(operations=["moved"])
    with pytest.raises(InvalidPattern):
        Filter(names=["{x}"])


def test_refetch_is_told_despite_the_filter() -> None:
    """Its version is in the future, so it may know what is not published yet. When that is published, it does not."""
    catalog = Catalog()
    unpublished: list[tuple[Change, ...]] = []
    catalog.follow(unpublished.append)
    hub = Hub(catalog)
    catalog.publisher = None
    received: list[Notification] = []
    catalog.tools.add({"name": "other"})
    subscriber = hub.open(received.append, filter=Filter(names=["mine"]))

    hub.subscribe(subscriber, "tools", told={Feature.TOOLS: Version(7, "of another life")})
    for changes in unpublished:
        hub.delivery.publish(changes)

    assert [(told.topic, told.complete) for told in received] == [(Feature.TOOLS, False)]


def test_muted_topic_is_suppressed_without_moving_told(catalog: Catalog, hub: Hub, reader: Reader) -> None:
    muted: set[Topic] = {TOOLS}
    subscriber = hub.subscribe(reader.take, "tools", "prompts", uris=["a://b"], is_muted=muted.__contains__)
    knew = catalog.version(TOOLS)
    add(catalog, "a", "b")
    catalog.tools.remove("a")
    catalog.prompts.add({"name": "p"})
    catalog.resources.updated("a://b")
    hub.tick(1000)

    assert lines(reader) == ["added p", "updated a://b"]
    assert hub.told(subscriber, TOOLS) == knew
    assert hub.next_due() is None, "no timer is needed"
    muted.clear()
    hub.wake(subscriber)
    assert lines(reader) == ["added b"]
    assert hub.told(subscriber, TOOLS) == catalog.version(TOOLS)
