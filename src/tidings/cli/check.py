"""`tidings check TARGET`: check the live behaviour of any MCP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidings.cli.auth import read_token
from tidings.cli.options import Header, Program, Token, TokenFile, flag, option, read_server
from tidings.cli.output import fail
from tidings.core.redact import redact_uri

__all__ = ["check"]

_CLOSE_TIMEOUT = 20.0
"""Seconds to close after Ctrl-C: a stdio server that does not exit is killed after fifteen."""


def check(
    target: Program = None,
    rules: Annotated[bool, flag("--rules", "Print the rules, and check nothing.")] = False,
    only: Annotated[list[str] | None, option("Check only this rule. May be repeated.", "RULE")] = None,
    skip: Annotated[list[str] | None, option("Skip this rule. May be repeated.", "RULE")] = None,
    trigger: Annotated[
        str | None,
        option(
            "Make one change with this shell command, or with this tool of the server (NAME, or NAME {JSON}), and "
            "check that each session is told. It may run twice.",
            "CMD|TOOL",
        ),
    ] = None,
    uri: Annotated[
        list[str] | None, option("A resource to subscribe to. May be repeated; the default is the first three.", "URI")
    ] = None,
    replica: Annotated[
        list[str] | None, option("The URL of another replica, whose lists must be in the same order. May be repeated.")
    ] = None,
    timeout: Annotated[float, option("Seconds to wait for one answer.", min=0.1)] = 20.0,
    quiet_time: Annotated[float, option("Seconds to listen for notifications while nothing changes.", min=0.1)] = 3.0,
    as_json: Annotated[
        bool, flag("--json", "Print one JSON object for each finding, and one for the summary.")
    ] = False,
    sarif: Annotated[Path | None, option("Also write the findings to this file, as SARIF 2.1.0.", "FILE")] = None,
    header: Header = None,
    auth_token: Token = None,
    auth_token_file: TokenFile = None,
    second_auth_token_file: Annotated[
        Path | None,
        option("Read the token of another user from this file: a public result must be the same for both.", "FILE"),
    ] = None,
    token_expires: Annotated[
        float | None, option("Seconds from now until the token expires: streams must end then.", "SECONDS", min=0.1)
    ] = None,
) -> None:
    """Check the live behaviour of an MCP server, of either era, with or without Tidings.

    The status is 0 if there is no error, 1 if there is one, and 2 if the server can't be checked.
    """
    from tidings.check.rules import RULES
    from tidings.cli.check_output import print_report, print_rules, show_progress, write_sarif

    for each in (*(only or ()), *(skip or ())):
        if each not in RULES:
            fail(f"there is no rule {each}; `tidings check --rules` lists them")
    selected = frozenset(only or RULES) - frozenset(skip or ())
    if rules:
        print_rules([RULES[rule] for rule in RULES if rule in selected], is_json=as_json)
        return
    if not selected:
        fail("no rule is left; --only and --skip name the same")
    if trigger is not None and not trigger.strip():
        fail("--trigger: give a command, or the name of a tool of the server")
    server = read_server("check", target, header, auth_token, auth_token_file)
    if not server.is_http and (second_auth_token_file or token_expires or replica):
        fail("tokens and replicas are for a URL; a stdio server has none")

    from tidings.check.checks import check_target
    from tidings.check.rules import Severity
    from tidings.check.run import CheckOptions
    from tidings.cli.remote import check_url, run

    for url in replica or ():
        check_url(url)
    options = CheckOptions(
        target=server.words[0] if server.is_http else server.words,
        name=redact_uri(server.name) if server.is_http else server.name,  # a URL may contain a secret
        headers=server.headers,
        token=server.token,
        second_token=read_token(None, second_auth_token_file) if second_auth_token_file else None,
        token_expires=token_expires,
        replicas=tuple(replica or ()),
        uris=tuple(uri or ()),
        trigger=trigger,
        timeout=timeout,
        quiet_time=quiet_time,
    )
    with show_progress() as on_progress:
        report = run(check_target(options, selected, on_progress), _CLOSE_TIMEOUT)
    print_report(report, is_json=as_json)
    if sarif is not None:
        write_sarif(report, sarif)
    if report.count(Severity.ERROR):
        raise typer.Exit(1)
    if report.problems:
        raise typer.Exit(2)
