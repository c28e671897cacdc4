"""Strategies for steps, subscriptions and plans. They use few names and URIs, so that these coincide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tidings import Catalog, Feature, Filter, Policy, Priority, TidingsError, Topic

URIS = ("a://p", "a://p/1", "a://p/1/k", "a://q", "a://q/1", "b://p/1")
PATTERNS = ("a://*", "a://p/*", "a://**", "**/1", "a://*/1", "*://p/**", "a://p/**/k")
NAMES = ("p", "pq", "q")
NAME_FILTERS = (None, ("p",), ("p*",), ("*q", "x"))
URI_FILTERS = (None, ("a://p",), ("a://**",))
MAX_URIS = len(URIS) + len(PATTERNS)
OTHER_EPOCH = "of another epoch"
"""The digest in the cursor of a client from before a restart."""


@dataclass(frozen=True)
class Step:
    """An operation on a catalog."""

    kind: str
    feature: Feature
    name: str
    text: str
    uri: str
    etag: str | None
    others: tuple[tuple[str, str], ...]

    def do(self, catalog: Catalog) -> None:
        items, resources = catalog.items(self.feature), catalog.resources
        key = f"a://{self.name}" if self.feature is Feature.RESOURCES else self.name
        try:
            match self.kind:
                case "add":
                    items.add(self.define(self.name, self.text))
                case "put":
                    items.add(self.define(self.name, self.text), replace=True)
                case "remove":
                    items.remove(key)
                case "update":
                    items.update(key, description=self.text)
                case "replace":
                    items.replace([self.define(name, text) for name, text in self.others])
                case "template":
                    definition = {"uriTemplate": f"a://{self.name}/{{id}}", "name": self.name, "title": self.text}
                    resources.add(definition, replace=True)
                case "updated":
                    resources.updated(self.uri, etag=self.etag)
                case "deleted":
                    resources.deleted(self.uri)
        except TidingsError:
            pass  # a refused operation must change nothing

    def define(self, name: str, text: str) -> dict[str, Any]:
        if self.feature is Feature.RESOURCES:
            return {"uri": f"a://{name}", "name": name, "description": text}
        return {"name": name, "description": text}


@dataclass(frozen=True)
class Subscription:
    """The topics, time to live and cursors of a subscription."""

    topics: tuple[Topic, ...]
    ttl: float | None
    cursors: tuple[tuple[Topic, str, int], ...]


@dataclass(frozen=True)
class Plan:
    """The action of a reader during a delivery."""

    kind: str
    step: Step
    subscription: Subscription
    other: int


texts = st.sampled_from(("", "one", "two"))
topics = st.sampled_from((*Feature, *URIS))
seconds = st.sampled_from((0.1, 0.5, 1.0, 3.0))
steps = st.builds(
    Step,
    kind=st.sampled_from(("add", "put", "remove", "update", "replace", "template", "updated", "updated", "deleted")),
    feature=st.sampled_from(Feature),
    name=st.sampled_from(NAMES),
    text=texts,
    uri=st.sampled_from(URIS),
    etag=st.sampled_from((None, "1", "2")),
    others=st.lists(st.tuples(st.sampled_from(NAMES), texts), max_size=3, unique_by=lambda other: other[0]).map(tuple),
)
subscriptions = st.builds(
    Subscription,
    topics=st.lists(st.sampled_from((*Feature, *URIS, *PATTERNS)), min_size=1, max_size=4, unique=True).map(tuple),
    ttl=st.none() | seconds,
    cursors=st.lists(
        st.tuples(topics, st.sampled_from(("none", "past", "present", "other epoch")), st.integers(0, 9)),
        max_size=3,
        unique_by=lambda cursor: cursor[0],
    ).map(tuple),
)
plans = st.builds(
    Plan,
    kind=st.sampled_from(
        (
            *("busy", "busy", "raise", "change", "batch", "close", "unsubscribe", "tick"),
            *("close other", "unsubscribe other", "subscribe other", "wake other"),
        )
    ),
    step=steps,
    subscription=subscriptions,
    other=st.integers(0, 9),
)
policies = st.builds(
    Policy,
    quiet_gap=st.sampled_from((0.0, 0.0, 0.5)),
    longest_wait=st.sampled_from((0.5, 1.0)),
    min_interval=st.sampled_from((0.0, 0.0, 1.0)),
    max_pending=st.sampled_from((1, 2, 4, 10_000)),
    priorities=st.lists(st.tuples(st.sampled_from((*URIS, *PATTERNS)), st.sampled_from(Priority)), max_size=2).map(
        tuple
    ),
)
filters = st.none() | st.builds(
    Filter,
    operations=st.none() | st.sets(st.sampled_from(("added", "removed", "updated")), min_size=1),
    names=st.sampled_from(NAME_FILTERS),
    uris=st.sampled_from(URI_FILTERS),
    also=st.none() | st.just(Filter(names=["p*"])),
)
