"""The table of rules, its page, and SARIF."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema

from tidings.check.report import Report
from tidings.check.rules import RULES, Severity
from tidings.check.sarif import to_sarif
from tidings.wire.session import Frame

DOCS = Path(__file__).parents[2] / "docs"

SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": {"$ref": "#/$defs/run"}},
    },
    "$defs": {
        "text": {
            "type": "object",
            "required": ["text"],
            "additionalProperties": False,
            "properties": {"text": {"type": "string", "minLength": 1}},
        },
        "level": {"enum": ["none", "note", "warning", "error"]},
        "run": {
            "type": "object",
            "required": ["tool"],
            "additionalProperties": False,
            "properties": {
                "tool": {
                    "type": "object",
                    "required": ["driver"],
                    "additionalProperties": False,
                    "properties": {"driver": {"$ref": "#/$defs/driver"}},
                },
                "invocations": {"type": "array", "items": {"required": ["executionSuccessful"]}},
                "results": {"type": "array", "items": {"$ref": "#/$defs/result"}},
            },
        },
        "driver": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string"},
                "version": {"type": "string"},
                "rules": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/rule"}},
            },
        },
        "rule": {
            "type": "object",
            "required": ["id"],
            "additionalProperties": False,
            "properties": {
                "id": {"type": "string"},
                "shortDescription": {"$ref": "#/$defs/text"},
                "help": {"$ref": "#/$defs/text"},
                "helpUri": {"type": "string", "format": "uri"},
                "defaultConfiguration": {
                    "additionalProperties": False,
                    "properties": {"level": {"$ref": "#/$defs/level"}},
                },
            },
        },
        "result": {
            "type": "object",
            "required": ["message"],
            "additionalProperties": False,
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer", "minimum": 0},
                "level": {"$ref": "#/$defs/level"},
                "message": {"$ref": "#/$defs/text"},
                "locations": {
                    "type": "array",
                    "items": {
                        "additionalProperties": False,
                        "properties": {
                            "logicalLocations": {
                                "type": "array",
                                "items": {
                                    "additionalProperties": False,
                                    "properties": {
                                        "fullyQualifiedName": {"type": "string"},
                                        "kind": {"type": "string"},
                                    },
                                },
                            }
                        },
                    },
                },
                "properties": {"type": "object"},
            },
        },
    },
}
"""The part of the SARIF 2.1.0 schema that Tidings uses."""


def test_each_rule_has_a_section_with_its_title_severity_clause_and_remedy() -> None:
    sections = re.split(r"^## ", (DOCS / "rules.md").read_text(), flags=re.MULTILINE)[1:]
    found = {section.partition("\n")[0]: " ".join(section.split()) for section in sections}
    assert list(found) == list(RULES)
    for rule in RULES.values():
        section = found[rule.id]
        assert f"**{rule.title}** * {rule.severity.value}; clause [{rule.clause}]({rule.clause_url})" in section
        assert section.endswith(f"* Remedy: {rule.remedy}")
        assert "* Check: " in section


def test_the_page_of_the_command_names_each_rule() -> None:
    assert set(re.findall(r"rules\.md#([\w-]+)", (DOCS / "check.md").read_text())) == RULES.keys()


def test_sarif_has_each_rule_and_each_finding_with_its_evidence() -> None:
    report = Report("http://127.0.0.1:1/mcp")
    report.add("get-stream", "GET is answered with 405", [Frame(0.5, "legacy session 1", "received", "HTTP 405"), None])
    report.problems.append("lists: no answer")
    log = to_sarif(report)
    jsonschema.validate(log, SARIF, format_checker=jsonschema.FormatChecker())
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["version"] == version("tidings")
    assert [rule["id"] for rule in driver["rules"]] == list(RULES)
    (result,) = run["results"]
    assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "get-stream"
    assert result["level"] == Severity.ERROR
    assert [frame["content"] for frame in result["properties"]["evidence"]] == ["HTTP 405"]
    assert run["invocations"][0]["executionSuccessful"] is False
