"""`tidings run-tool DIR NAME`: call one tool as a client does."""

from __future__ import annotations

import difflib
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tidings.cli.folder import open_workspace
from tidings.cli.options import Folder, argument, flag, option, read_object
from tidings.cli.output import fail, print_json, print_stderr, print_stdout, redirect_stdout_to_stderr
from tidings.core.model import Feature

if TYPE_CHECKING:
    from mcp_types import CallToolResult

    from tidings.workspace.source import Workspace

__all__ = ["run_tool"]


def run_tool(
    folder: Folder,
    name: Annotated[str, argument("The name of the tool.", "NAME")],
    args: Annotated[
        str | None, option("The arguments as one JSON object; - reads it from standard input.", "JSON")
    ] = None,
    arg: Annotated[
        list[str] | None,
        option("One argument. The value is JSON unless the tool expects a string. May be repeated.", "NAME=VALUE"),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the whole result as JSON.")] = False,
) -> None:
    """Call one tool as a client does, and print its text.

    Progress goes to standard error. The exit status is 1 if the tool failed.
    """
    arguments = {} if args is None else read_object("--args", args)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    workspace = open_workspace(folder, poll=0)
    import asyncio

    tools = {str(tool["name"]): tool for tool in workspace.read_items(Feature.TOOLS)}
    if name not in tools:
        _fail_unknown(workspace, name, sorted(tools))
    arguments |= _parse_pairs(arg or [], tools[name].get("inputSchema", {}))
    with redirect_stdout_to_stderr():
        result = asyncio.run(_call(workspace, name, arguments))
    if isinstance(result, Exception):
        fail(f"{name}: {result}", 1)
    if as_json:
        print_json(result.model_dump(by_alias=True, mode="json", exclude_none=True))
    else:
        # Errors go to standard error, so that a script that reads standard output does not use one as a result.
        print_content = print_stderr if result.is_error else print_stdout
        for content in result.content:
            print_content(_format_content(content))
    raise typer.Exit(1 if result.is_error else 0)


async def _call(workspace: Workspace, name: str, arguments: dict[str, Any]) -> CallToolResult | Exception:
    """Return the result or the error. If this raised the error, the client would wrap it in exception groups."""
    from mcp import MCPError
    from mcp.client.client import Client
    from mcp_types import CallToolResult, LoggingMessageNotificationParams

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        done = f"{progress:g}" if total is None else f"{progress:g}/{total:g}"
        print_stderr(f"{done} {message}" if message else done)

    async def on_log(params: LoggingMessageNotificationParams) -> None:
        data = params.data if isinstance(params.data, str) else json.dumps(params.data)
        print_stderr(f"{params.level}: {data}")

    async with Client(workspace.server, logging_callback=on_log, log_level="info") as client:
        try:
            result = await client.call_tool(name, arguments, progress_callback=on_progress)
        except (MCPError, RuntimeError) as error:
            return error
    assert isinstance(result, CallToolResult)
    return result


def _parse_pairs(pairs: list[str], schema: dict[str, Any]) -> dict[str, Any]:
    """Parse `name=value` pairs. A value is a string if the tool expects one, else JSON, else a string."""
    properties = schema.get("properties", {})
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            fail(f"--arg {pair}: give it as NAME=VALUE")
        arguments[key] = value
        expected = properties.get(key)
        if not (isinstance(expected, dict) and expected.get("type") == "string"):
            with suppress(ValueError):
                arguments[key] = json.loads(value)
    return arguments


def _fail_unknown(workspace: Workspace, name: str, names: list[str]) -> NoReturn:
    for problem in workspace.problems:
        print_stderr(str(problem))  # the file of the missing tool may be one that could not be loaded
    similar = difflib.get_close_matches(name, names, n=5) or names[:20]
    more = ", …" if not set(names) <= set(similar) else ""
    available = f"there is {', '.join(similar)}{more}" if names else "it has no tools"
    fail(f"no tool {name!r} in {workspace.root}; {available}")


def _format_content(content: Any) -> str:
    text = getattr(content, "text", None)
    if isinstance(text, str):
        return text
    size = len(getattr(content, "data", "") or "") * 3 // 4
    details = (getattr(content, "mime_type", None), f"{size} bytes" if size else None, getattr(content, "uri", None))
    described = ", ".join(str(detail) for detail in details if detail)
    return f"[{content.type}: {described}]" if described else f"[{content.type}]"
