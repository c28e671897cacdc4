"""What a catalog publishes: heard by a list, and summed up; and what the catalog has now."""

from tidings import Catalog, Change, Feature, Operation

Published = list[tuple[Change, ...]]


def hear(catalog: Catalog) -> Published:
    heard: Published = []
    catalog.follow(heard.append)
    return heard


def summary(changes: tuple[Change, ...] | list[Change]) -> list[tuple[Operation, str]]:
    return [(change.operation, change.key) for change in changes]


def state(catalog: Catalog) -> object:
    return [
        (catalog.version(feature), [item.json for item in catalog.items(feature).snapshot()]) for feature in Feature
    ]
