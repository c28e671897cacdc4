"""The result of a check: findings with their evidence, and the rules that were passed or skipped."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidings.check.rules import RULES, Rule, Severity
from tidings.wire.session import Frame

__all__ = ["Finding", "Report"]

_MAX_EVIDENCE = 12
"""Frames of one finding: enough for its cause, and few enough to read."""


@dataclass(frozen=True)
class Finding:
    rule: Rule
    message: str
    """What the server did, and where."""
    evidence: tuple[Frame, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule.id,
            "severity": self.rule.severity.value,
            "title": self.rule.title,
            "message": self.message,
            "clause": self.rule.clause_url,
            "remedy": self.rule.remedy,
            "help": self.rule.help_url,
            "evidence": [frame.as_json() for frame in self.evidence],
        }


@dataclass
class Report:
    target: str
    server: str = ""
    """The name of the server."""
    protocols: list[str] = field(default_factory=list)
    transport: str = ""
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """The reason, by rule."""
    checked: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    """Checks that ended early because the server did not answer."""
    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from the start of the trigger to each notification, by era."""

    def add(self, rule: str, message: str, evidence: Sequence[Frame | None] = ()) -> None:
        """Add a finding, unless the report has one of this rule with the same message."""
        if not any(each.rule.id == rule and each.message == message for each in self.findings):
            frames = [frame for frame in evidence if frame is not None]
            self.findings.append(Finding(RULES[rule], message, tuple(frames[:_MAX_EVIDENCE])))
        self.checked.add(rule)

    def skip(self, rule: str, reason: str) -> None:
        """Record why a rule can't be checked. This has no effect if another check has checked the rule."""
        self.skipped.setdefault(rule, reason)

    def select(self, rules: set[str]) -> None:
        """Keep only these rules."""
        self.findings = [each for each in self.findings if each.rule.id in rules]
        self.checked &= rules
        self.skipped = {rule: reason for rule, reason in self.skipped.items() if rule in rules - self.checked}

    @property
    def failed(self) -> set[str]:
        return {finding.rule.id for finding in self.findings}

    @property
    def passed(self) -> list[str]:
        return [rule for rule in RULES if rule in self.checked - self.failed]

    def count(self, severity: Severity) -> int:
        return sum(finding.rule.severity is severity for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "server": self.server,
            "protocols": self.protocols,
            "transport": self.transport,
            "errors": self.count(Severity.ERROR),
            "warnings": self.count(Severity.WARNING),
            "passed": self.passed,
            "failed": [rule for rule in RULES if rule in self.failed],
            "skipped": self.skipped,
            "problems": self.problems,
            "latencyMs": {
                era: {
                    "notifications": len(values),
                    "median": round(statistics.median(values) * 1000, 1),
                    "max": round(max(values) * 1000, 1),
                }
                for era, values in self.latencies.items()
                if values
            },
        }
