"""Records and summarizes the commits of a catalog."""

from tidings import Catalog, Change, Feature, Operation

Published = list[tuple[Change, ...]]


def record_commits(catalog: Catalog) -> Published:
    commits: Published = []
    catalog.follow(commits.append)
    return commits


def summary(changes: tuple[Change, ...] | list[Change]) -> list[tuple[Operation, str]]:
    return [(change.operation, change.key) for change in changes]


def state(catalog: Catalog) -> object:
    return [
        (catalog.version(feature), [item.json for item in catalog.items(feature).snapshot()]) for feature in Feature
    ]
