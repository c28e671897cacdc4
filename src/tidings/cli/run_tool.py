"""`tidings run-tool DIR NAME`: one tool, called the way a client calls it."""

from __future__ import annotations

import difflib
import json
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tidings.cli.argument import Folder
from tidings.cli.folder import open_workspace
from tidings.cli.output import fail, print_json, print_text, say, stdout_is_set_aside

if TYPE_CHECKING:
    from mcp_types import CallToolResult

    from tidings.workspace.source import Workspace

__all__ = ["run_tool"]


def run_tool(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool, by the name that clients see.")],
    args: Annotated[
        str | None,
        typer.Option(help="The arguments as one JSON object; - reads it from standard input.", metavar="JSON"),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="One argument. Taken as JSON unless the tool wants a text. May be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Try one tool, through the same path that a client's call takes.

    Its text is printed; progress goes to standard error. Ends with status 1 if the tool failed.
    """
    arguments = _object(args)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    workspace = open_workspace(folder, poll=0)
    import asyncio

    from tidings.core.model import Feature

    tools = {str(tool["name"]): tool for tool in workspace.list_now(Feature.TOOLS)}
    if name not in tools:
        _fail_unknown(workspace, name, sorted(tools))
    arguments |= _named(arg or [], tools[name].get("inputSchema", {}))
    with stdout_is_set_aside():
        result = asyncio.run(_call(workspace, name, arguments))
    if isinstance(result, Exception):
        fail(f"{name}: {result}", 1)
    if as_json:
        print_json(result.model_dump(by_alias=True, mode="json", exclude_none=True))
    else:
        for content in result.content:
            text = _shown(content)
            # An error is no result: a script that reads the output must not take it for one.
            say(text) if result.is_error else print_text(text)
    raise typer.Exit(1 if result.is_error else 0)


async def _call(workspace: Workspace, name: str, arguments: dict[str, Any]) -> CallToolResult | Exception:
    """The result, or what the client made of the answer: raised in here, it would come out wrapped in groups."""
    from mcp import MCPError
    from mcp.client.client import Client
    from mcp_types import CallToolResult, LoggingMessageNotificationParams

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        done = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        say(f"{done} {message}" if message else done)

    async def on_log(params: LoggingMessageNotificationParams) -> None:
        say(f"{params.level}: {params.data if isinstance(params.data, str) else json.dumps(params.data)}")

    async with Client(workspace.server, logging_callback=on_log, log_level="info") as client:
        try:
            result = await client.call_tool(name, arguments, progress_callback=on_progress)
        except (MCPError, RuntimeError) as error:
            return error
    assert isinstance(result, CallToolResult)
    return result


def _object(args: str | None) -> dict[str, Any]:
    if args is None:
        return {}
    try:
        found = json.loads(sys.stdin.read() if args == "-" else args)
    except ValueError as error:
        fail(f"--args is not JSON: {error}")
    if not isinstance(found, dict):
        fail('--args must be one JSON object, as {"name": "World"} is')
    return found


def _named(given: list[str], schema: dict[str, Any]) -> dict[str, Any]:
    """`name=value` pairs: a text where the tool wants one, and JSON wherever else it can be read as such."""
    properties = schema.get("properties", {})
    found: dict[str, Any] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            fail(f"--arg {each}: give it as NAME=VALUE")
        wanted = properties.get(key)
        found[key] = value
        if not (isinstance(wanted, dict) and wanted.get("type") == "string"):
            try:
                found[key] = json.loads(value)
            except ValueError:
                pass  # a text after all
    return found


def _fail_unknown(workspace: Workspace, name: str, names: list[str]) -> NoReturn:
    near = difflib.get_close_matches(name, names, n=5) or names[:20]
    more = ", …" if not set(names) <= set(near) else ""
    there = f"there is {', '.join(near)}{more}" if names else "there is none at all"
    for problem in workspace.problems:
        say(str(problem))  # a tool that is missing is as often as not one that could not be loaded
    fail(f"no tool {name!r} in {workspace.root}; {there}")


def _shown(content: Any) -> str:
    text = getattr(content, "text", None)
    if isinstance(text, str):
        return text
    kind = getattr(content, "mime_type", None)
    size = len(getattr(content, "data", "") or "") * 3 // 4
    uri = getattr(content, "uri", None)
    described = [str(each) for each in (kind, f"{size} bytes" if size else None, uri) if each]
    return f"[{content.type}{': ' if described else ''}{', '.join(described)}]"
