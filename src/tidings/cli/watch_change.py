"""A change as `tidings watch` reports it: lines for people, JSON for programs, variables for commands.

A server chooses names and definitions. Lines and variables contain none of its control characters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple, TypeAlias

from tidings.client.snapshot import Detected
from tidings.core.encoding import iso_time
from tidings.core.field_diff import ABSENT, FieldChange, compare_fields
from tidings.core.model import Feature, Operation
from tidings.core.redact import one_line

__all__ = ["Connected", "Line", "WatchedChange", "format_latency"]

Line: TypeAlias = list[tuple[str, str]]
"""The parts of a line, each with its style."""

_STYLES = {Operation.ADDED: "green", Operation.UPDATED: "yellow"}
_MAX_FIELDS = 20
"""Changed fields that are shown for one item. `--json` has all of them."""
_MAX_VALUE = 120
_MAX_NAME = 1000
"""Characters of a name or URI in a line and in a variable."""
_CONTEXT = 20
"""Characters of a long text that are shown before its first difference."""


class Connected(NamedTuple):
    """The connection over which a change was seen."""

    protocol: str
    is_modern: bool
    transport: Literal["http", "stdio"]

    @property
    def era(self) -> str:
        return "modern" if self.is_modern else "legacy"


@dataclass(frozen=True)
class WatchedChange:
    operation: Operation
    name: str
    """The name of a tool or prompt, or the URI of a resource, template or content."""
    kind: str
    """`tool`, `prompt`, `resource`, `template` or `content`."""
    feature: Feature | None
    """None for the content of a resource."""
    connected: Connected
    time: float
    detected: Detected
    item: dict[str, Any] | None = None
    before: dict[str, Any] | None = None

    @property
    def fields(self) -> Iterator[FieldChange]:
        """The fields that an update changed."""
        return compare_fields(self.before, self.item) if self.before is not None else iter(())

    def as_json(self) -> dict[str, Any]:
        latency = self.detected.latency
        written: dict[str, Any] = {"time": iso_time(self.time), "operation": self.operation.value}
        if self.feature is not None:
            written["feature"] = self.feature.value
        written["uri" if self.feature is None else self.feature.key_field] = self.name
        if self.item is not None:
            written["item"] = self.item
        if self.before is not None:
            written |= {"before": self.before, "fields": [each.as_json() for each in self.fields]}
        return written | {
            "foundBy": self.detected.found_by,
            "latencyMs": None if latency is None else round(latency * 1000, 1),
            "era": self.connected.era,
            "protocol": self.connected.protocol,
            "transport": self.connected.transport,
        }

    def as_variables(self) -> dict[str, str]:
        return {
            "TIDINGS_OPERATION": self.operation.value,
            "TIDINGS_FEATURE": "content" if self.feature is None else self.feature.value,
            "TIDINGS_NAME": one_line(self.name, _MAX_NAME),
            "TIDINGS_TIME": iso_time(self.time),
        }

    def as_lines(self) -> Iterator[Line]:
        clock = f"{time.strftime('%H:%M:%S', time.localtime(self.time))}.{int(self.time % 1 * 1000):03}"
        style = _STYLES.get(self.operation, "red")
        found_by, latency = self.detected
        end = {"poll": "found by polling", "reconnect": "after a reconnect"}.get(found_by, "")
        if latency is not None:
            end = format_latency(latency)
        yield [
            (f"{clock}  ", "dim"),
            (f"{self.operation.value:<8} ", style),
            (f"{self.kind:<9} ", ""),
            (one_line(self.name, _MAX_NAME), "bold"),
            (f"  {end}" if end else "", "dim"),
        ]
        if self.operation is Operation.ADDED and self.item and self.item.get("description"):
            yield [("    ", ""), (_shorten(str(self.item["description"])), "dim")]
        fields = self.fields
        for field in islice(fields, _MAX_FIELDS):
            yield _field_line(field)
        if rest := sum(1 for _ in fields):
            yield [(f"    … {rest} more", "dim")]


def format_latency(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _field_line(field: FieldChange) -> Line:
    path = _shorten(field.path)
    if field.before is ABSENT:
        return [(f"    + {path}: {_shorten(_encode(field.after))}", "green")]
    if field.after is ABSENT:
        return [(f"    - {path}: {_shorten(_encode(field.before))}", "red")]
    before, after = _encode(field.before), _encode(field.after)
    # A long text is shown from its first difference on.
    start = 0
    if max(len(before), len(after)) > _MAX_VALUE:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        start = max(0, same - _CONTEXT)
    mark = "…" if start else ""
    before, after = mark + _shorten(before[start:]), mark + _shorten(after[start:])
    return [(f"    ~ {path}: ", "yellow"), (before, "red"), (" → ", ""), (after, "green")]


def _encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shorten(text: str) -> str:
    return one_line(text, _MAX_VALUE)
