"""A report as SARIF 2.1.0, the format of code scanners."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tidings.check.report import Finding, Report
from tidings.check.rules import RULES

__all__ = ["to_sarif"]


def to_sarif(report: Report) -> dict[str, Any]:
    indexes = {rule: index for index, rule in enumerate(RULES)}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "tidings check",
                        "version": version("tidings"),
                        "rules": [
                            {
                                "id": rule.id,
                                "shortDescription": {"text": rule.title},
                                "help": {"text": f"{rule.remedy}\nSpecification: {rule.clause_url}"},
                                "helpUri": rule.clause_url,
                                "defaultConfiguration": {"level": rule.severity.value},
                            }
                            for rule in RULES.values()
                        ],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": not report.problems,
                        "toolExecutionNotifications": [
                            {"level": "warning", "message": {"text": problem}} for problem in report.problems
                        ],
                    }
                ],
                "results": [_to_result(finding, report, indexes) for finding in report.findings],
            }
        ],
    }


def _to_result(finding: Finding, report: Report, indexes: dict[str, int]) -> dict[str, Any]:
    return {
        "ruleId": finding.rule.id,
        "ruleIndex": indexes[finding.rule.id],
        "level": finding.rule.severity.value,
        "message": {"text": finding.message},
        # A server has no file. Its name or URL is a logical location.
        "locations": [{"logicalLocations": [{"fullyQualifiedName": report.target, "kind": "module"}]}],
        "properties": {"evidence": [frame.as_json() for frame in finding.evidence]},
    }
