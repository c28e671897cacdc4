"""docs/telemetry.md and the dashboard name every span, attribute and metric, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from mcp.server.mcpserver import MCPServer

from tidings import Live
from tidings.core.tracer import SPANS
from tidings.telemetry.metrics import METRICS, render
from tidings.telemetry.tracing import ATTRIBUTES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
SAMPLES = {
    metric.prometheus + suffix
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}
"""The names that a query can use."""
LABELS = {label for metric in METRICS for label in metric.labels} | {"le", "instance"}


def rows(heading: str) -> list[list[str]]:
    """Return the rows of the table with this heading."""
    _, _, table = PAGE.partition(f"\n{heading}\n")
    table = table.partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:]]


def metrics_of(text: str) -> set[str]:
    """Return the names of metrics in a text."""
    return set(re.findall(r"\btidings_\w+", text))


def labels_of(query: str) -> set[str]:
    """Return the labels that a query groups or selects by."""
    grouped = re.findall(r"(?:by|without) \(([^)]*)\)", query)
    selected = re.findall(r"(\w+)(?:=~|!=|!~|=)\"", query)
    return {label.strip() for group in grouped for label in group.split(",")} | set(selected)


def test_tables_of_spans_and_attributes_match_the_code() -> None:
    assert {name.strip("`") for name, _ in rows("| span | what it covers |")} == SPANS
    assert {name.strip("`") for name, _ in rows("| attribute | meaning |")} == ATTRIBUTES


def test_table_of_metrics_matches_the_code() -> None:
    written = rows("| OpenTelemetry | `/metrics` | kind | unit | labels | meaning |")
    expected = [
        [f"`{m.name}`", f"`{m.prometheus}`", m.kind, m.unit, ", ".join(f"`{each}`" for each in m.labels), m.help]
        for m in METRICS
    ]
    assert [[cell.strip() for cell in row] for row in written] == expected


def test_every_counted_failure_starts_at_zero() -> None:
    counted: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        counted |= set(re.findall(r'failures\["([^"]+)"\] \+=', path.read_text(encoding="utf-8")))
    samples = re.findall(
        r'^tidings_failures_total{what="([^"]+)"} 0$', render(Live(MCPServer("x")).metrics), re.MULTILINE
    )
    assert set(samples) == counted


def test_every_name_in_a_query_is_a_metric_and_every_metric_is_on_the_dashboard() -> None:
    assert metrics_of(PAGE) - {metric.prometheus for metric in METRICS} <= SAMPLES
    used: set[str] = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = metrics_of(target["expr"])
            assert names, target
            assert names <= SAMPLES, target
            used |= names
            assert labels_of(target["expr"]) <= LABELS, target
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels_of(target["expr"]), target
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in used} == {metric.prometheus for metric in METRICS}


def test_dashboard_can_be_imported() -> None:
    assert DASHBOARD["title"] == "Tidings"
    assert DASHBOARD["schemaVersion"] >= 36
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identities)) == len(identities)
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "instance"]


def test_recipes_are_valid_and_alerts_use_existing_metrics() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    [collector] = [block for block in blocks if "receivers" in block]
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= collector[part].keys()
    [alerts] = [block for block in blocks if "groups" in block]
    rules = {rule["alert"]: rule["expr"] for rule in alerts["groups"][0]["rules"]}
    assert rules.keys() >= {"SlowReaders", "CutOffs", "SuppressedGrowth", "WorkspaceErrors"}
    for expression in rules.values():
        assert metrics_of(expression) <= SAMPLES
        assert labels_of(expression) <= LABELS
    [scraping] = [block for block in blocks if "scrape_configs" in block]
    assert scraping["scrape_configs"][0]["job_name"] == "tidings"
