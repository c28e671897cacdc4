"""The output of `tidings check`: lines for people, JSON and SARIF for programs, and the progress on a terminal.

A server chooses names and messages, so their control characters are escaped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tidings.check.report import Finding, Report
from tidings.check.rules import Rule, Severity
from tidings.check.sarif import to_sarif
from tidings.cli.output import pluralize, print_json_lines, print_stderr, print_styled
from tidings.core.redact import one_line
from tidings.errors import TidingsError

__all__ = ["print_report", "print_rules", "show_progress", "write_sarif"]

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow"}


def print_rules(rules: Sequence[Rule], *, is_json: bool) -> None:
    if is_json:
        fields = ("id", "severity", "title", "remedy")
        print_json_lines(
            {**{name: getattr(rule, name) for name in fields}, "clause": rule.clause_url, "help": rule.help_url}
            for rule in rules
        )
        return
    for rule in rules:
        print_styled(
            (f"{rule.severity.value:<8} ", _STYLES[rule.severity]), (f"{rule.id:<22} ", "bold"), (rule.title, "")
        )


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show on a terminal which check runs."""
    if not sys.stderr.isatty():
        yield lambda title: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:
        yield lambda title: status.update(one_line(f"Checking: {title} …"))


def write_sarif(report: Report, path: Path) -> None:
    try:
        path.write_text(json.dumps(to_sarif(report), indent=2) + "\n", "utf-8")
    except OSError as error:
        raise TidingsError(f"--sarif: {path} can't be written: {error.strerror or error}") from None


def print_report(report: Report, *, is_json: bool) -> None:
    if is_json:
        print_json_lines({"type": "finding", **finding.as_json()} for finding in report.findings)
        print_json_lines([{"type": "summary", **report.as_json()}])
        return
    transport = "HTTP" if report.transport == "http" else report.transport
    print_styled(
        (f"Checked {one_line(report.target)}: ", ""), (one_line(report.server) or "a server without a name", "bold")
    )
    print_styled((f"{' and '.join(report.protocols)}, {transport}", "dim"))
    for finding in report.findings:
        print_styled()
        _write_finding(finding)
    print_styled()
    for reason in dict.fromkeys(report.skipped.values()):
        rules = ", ".join(rule for rule, each in report.skipped.items() if each == reason)
        print_styled((f"skipped  {rules}: {one_line(reason, 200)}", "dim"))
    for era, times in report.as_json()["latencyMs"].items():
        told = (
            f"{pluralize(times['notifications'], 'notification')}, {times['median']:g} ms (at most {times['max']:g} ms)"
        )
        print_styled((f"told     {era}: {told}, from the start of the trigger", "dim"))
    print_styled((summarize(report), "bold"))
    for problem in report.problems:
        print_stderr(f"tidings: not checked completely: {one_line(problem, 300)}")


def summarize(report: Report) -> str:
    errors, warnings = report.count(Severity.ERROR), report.count(Severity.WARNING)
    rules = (
        f"{pluralize(len(report.passed), 'rule')} passed, {len(report.failed)} failed, {len(report.skipped)} skipped"
    )
    return f"{pluralize(errors, 'error')}, {pluralize(warnings, 'warning')}; {rules}."


def _write_finding(finding: Finding) -> None:
    rule = finding.rule
    print_styled((f"{rule.severity.value:<8} ", _STYLES[rule.severity]), (rule.id, "bold"), (f"  {rule.title}", ""))
    print_styled((f"    {one_line(finding.message, 500)}", ""))
    for frame in finding.evidence:
        print_styled((f"    {frame}", "dim"))
    print_styled((f"    remedy: {rule.remedy}", ""))
    print_styled((f"    clause: {rule.clause_url}", "dim"))
