"""Clients written from the documentation alone end up with the current list, after any sequence of events.

They have filters and intervals, become busy, fetch lists, disconnect and resume with their cursor. This module has its
own short implementation of digests and patches. Each run has a seed, and is reproducible.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.support.readers import Clock
from tests.support.stress import sized
from tidings import BUSY, Catalog, Hub, Notification, Policy, Version
from tidings.core.cursor import Cursor
from tidings.core.filters import Filter, Terms
from tidings.core.frames import CHANGE_KEY, CURSOR_KEY, FrameFormat, encode_frame
from tidings.core.model import Feature
from tidings.core.resume import resume
from tidings.core.subscriber import Subscriber

TOOLS = Feature.TOOLS
STEPS = 200
WEIGHTS = {
    "change": 35,
    "several": 5,
    "wait": 10,
    "restart": 1,
    "check": 5,
    "disconnect": 8,
    "connect": 12,
    "stop": 6,
    "read": 8,
    "bookmark": 6,
    "fetch": 4,
}
"""The relative frequency of each step: first those of the server, then those of one client."""
VALUES: list[Any] = [
    *(None, 0, 1, True, 1.0, -0.0, 0.0, "", "é\u2028\U0001f600", [], [None], [{"x": None}], {}, {"x": None}),
    *({"x": {"y": None, "z": 1}}, {"x": {"y": 2}}, {"x": [1, 2]}),
]


def item_digest(item: Any) -> bytes:
    text = json.dumps(item, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def list_digest(items: Iterable[Any]) -> str:
    hashes = [int.from_bytes(item_digest(item), "big") for item in items]
    total = (sum(hashes) % 2**256).to_bytes(32, "big") + len(hashes).to_bytes(8, "big")
    return hashlib.blake2b(total, digest_size=16).hexdigest()


def patched(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        merged[name] = patched(merged.get(name), value)
    return {name: value for name, value in merged.items() if name not in patch or patch[name] is not None}


class Server:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.clock = Clock()
        self.restarts = 0
        self.policy = Policy(
            journal_changes=chance.choice([1, 3, 1000]),
            max_changes_per_frame=chance.choice([1, 2, 64]),
            min_interval=chance.choice([0, 0, 2.0]),
        )
        self.catalog = Catalog(self.policy)
        self.hub = Hub(self.catalog, clock=self.clock)

    @property
    def epoch(self) -> str:
        return f"epoch {self.restarts}"

    def restart(self) -> None:
        """Restart with the same tools, or with one more change."""
        self.restarts += 1
        items = list(self.catalog.tools)
        self.catalog = Catalog(self.policy)
        self.catalog.tools.replace(items)
        if self.chance.random() < 0.5:
            self.change()
        self.hub = Hub(self.catalog, clock=self.clock)

    def change(self) -> None:
        name = self.chance.choice(["a1", "a2", "b1", "b2"])
        if self.chance.random() < 0.3 and name in self.catalog.tools:
            self.catalog.tools.remove(name)
        else:
            field = self.chance.choice("uv")
            self.catalog.tools.add({"name": name, field: self.chance.choice(VALUES)}, replace=True)

    def change_several(self) -> None:
        with self.catalog.batch():
            for _ in range(self.chance.randrange(4)):
                self.change()

    def wait(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while (due := self.hub.next_due()) is not None and due <= end:
            self.clock.now = max(due, self.clock.now)
            self.hub.tick()
        self.clock.now = end


class Client:
    """A client that updates a copy of the tools that match its filter by deltas, and refetches if it must."""

    def __init__(self, server: Server) -> None:
        chance = server.chance
        self.server = server
        self.names: list[str] | None = chance.choice([None, ["a*"], ["*1"], ["b2"]])
        asked: dict[str, Any] = {"detail": "delta", "names": self.names}
        for pace in ("minInterval", "quietGap", "longestWait"):
            asked |= {pace: chance.choice([0, 1, 5])} if chance.random() < 0.3 else {}
        self.terms = Terms.parse(asked, server.policy)
        self.subscriber: Subscriber | None = None
        self.cursor = Cursor(server.epoch)
        self.copy: dict[str, Any] = {}
        self.is_busy = False
        self.has_fetched = self.has_to_fetch = False
        self.fetch()

    def sees(self, name: str) -> bool:
        return self.names is None or any(fnmatchcase(name, each) for each in self.names)

    def fetch(self) -> None:
        server = self.server
        version = server.catalog.version(TOOLS)
        server.hub.notifications.fetched.record(TOOLS, version)
        self.copy = {item["name"]: item for item in server.catalog.tools if self.sees(item["name"])}
        self.cursor = self.cursor.merge(Cursor(server.epoch, {TOOLS: version}))
        self.has_to_fetch, self.has_fetched = False, True

    def connect(self) -> None:
        if self.subscriber is None:
            server = self.server
            known = json.loads(json.dumps(self.cursor.as_json()))
            told = resume(known, server.epoch, server.hub, [TOOLS]).told
            policy = self.terms.policy(server.policy)
            self.subscriber = server.hub.open(self.deliver, settings=policy.delivery, filter=self.terms.filter)
            server.hub.subscribe(self.subscriber, TOOLS, told=told)

    def disconnect(self) -> None:
        if self.subscriber is not None:
            self.subscriber.close()
            self.subscriber = None

    def read(self) -> None:
        self.is_busy = False
        if self.subscriber is not None:
            self.server.hub.wake(self.subscriber)

    def bookmark(self) -> None:
        if self.subscriber is not None and not self.has_to_fetch:
            self.cursor = self.cursor.merge(Cursor(self.server.epoch, self.server.hub.known_versions(self.subscriber)))

    def deliver(self, notification: Notification) -> object:
        shape = FrameFormat(
            detail="delta", max_changes=self.server.policy.max_changes_per_frame, epoch=self.server.epoch
        )
        meta = json.loads(encode_frame(notification, shape))["params"]["_meta"]
        said, cursor = meta[CHANGE_KEY], Cursor.parse(meta[CURSOR_KEY])
        assert cursor is not None
        known = self.cursor.versions.get(TOOLS) if self.cursor.epoch == cursor.epoch else None
        if not self.has_to_fetch and (known is None or said["revision"] > known.revision):
            if not said["complete"] or not self.apply(said):
                assert self.has_fetched or not said["complete"], f"{said} does not fit {self.copy}"
                self.has_to_fetch = True
            if not self.has_to_fetch:
                self.cursor, self.has_fetched = self.cursor.merge(cursor), False
        return BUSY if self.is_busy else None

    def apply(self, said: dict[str, Any]) -> bool:
        """Apply the changes to the copy; return whether they fit the copy and lead to the announced digest."""
        for change in said.get("changes", [said]):
            name = change["name"]
            assert self.sees(name), f"the filter excludes {name}"
            if "delta" in change:
                if item_digest(self.copy.get(name))[:16].hex() != change["before"]:
                    return False
                self.copy[name] = patched(self.copy[name], change["delta"])
                assert item_digest(self.copy[name])[:16].hex() == change["after"]
            elif "item" in change:
                self.copy[name] = change["item"]
            else:
                self.copy.pop(name, None)
        return self.names is not None or list_digest(self.copy.values()) == said["digest"]

    def check(self) -> None:
        if self.has_to_fetch:
            self.fetch()
        there = {item["name"]: item for item in self.server.catalog.tools if self.sees(item["name"])}
        assert list_digest(self.copy.values()) == list_digest(there.values()), (self.names, self.copy, there)


@pytest.mark.stress
def test_copy_updated_by_deltas_equals_the_list() -> None:
    for number in range(sized(100, 400)):
        chance = random.Random(number)
        server = Server(chance)
        clients = [Client(server) for _ in range(3)]
        for _ in range(STEPS):
            client = chance.choice(clients)
            match chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
                case "change":
                    server.change()
                case "several":
                    server.change_several()
                case "wait":
                    server.wait(chance.choice([0.1, 1, 3, 10]))
                case "stop":
                    client.is_busy = True
                case "restart":
                    for each in clients:
                        each.disconnect()
                    server.restart()
                case "check":
                    for each in clients:
                        each.connect()
                        each.read()
                    server.wait(100)
                    for each in clients:
                        each.check()
                case what:
                    getattr(client, what)()
            assert not server.hub.counts.failures, f"run {number}"


@pytest.mark.parametrize("is_fetched", [False, True])
def test_filtered_client_that_fetched_an_undone_change_must_refetch(is_fetched: bool) -> None:
    """The net changes fit the version that it was told, but not the version that it fetched. With a filter, it has no
    digest to detect that."""
    catalog = Catalog()
    hub = Hub(catalog)
    received: list[Notification] = []
    reader = hub.open(received.append, filter=Filter(names=["a*"]))
    reader.subscribe("tools")
    reader.pause()
    catalog.tools.add({"name": "a1"})
    if is_fetched:
        hub.notifications.fetched.record(TOOLS, catalog.version(TOOLS))
    catalog.tools.add({"name": "a2"})
    catalog.tools.remove("a1")
    hub.wake(reader)

    assert [(each.complete, [change.key for change in each.changes]) for each in received] == (
        [(False, [])] if is_fetched else [(True, ["a2"])]
    )
    assert received[0].version == Version(3, catalog.tools.version.digest)
