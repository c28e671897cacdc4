"""Executable tools: any file that can be run, in any language.

A call starts the file without a shell in its own process group. It passes the arguments as JSON on standard input and
in the environment, forwards progress and log lines, and converts the output to a result. It stops the process group
after a timeout or a cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from pydantic import SkipValidation, ValidationError

from tidings.errors import InvalidItem
from tidings.workspace.call_slots import TooManyCalls, call_slot
from tidings.workspace.environment import build_environment, check_variables, encode_json, list_roots
from tidings.workspace.items import LoadedItem, make_item
from tidings.workspace.problems import invalid_field, invalid_model
from tidings.workspace.process import CannotStart, run_process
from tidings.workspace.result import make_result, parse_progress, read_embedded_files, read_protocol_error
from tidings.workspace.schema import find_schema_error, find_violation
from tidings.workspace.settings import Settings

if TYPE_CHECKING:
    from mcp.server.mcpserver.context import Context

__all__ = ["Executable", "ExecutableTool", "make_executable"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """The command of an executable tool, with its environment and limits."""

    command: Sequence[str]
    root: Path
    name: str
    timeout: float
    max_output: int
    output_schema: dict[str, Any] | None = None
    timeout_hint: str | None = None
    allowed_env: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    async def call(
        self,
        arguments: Mapping[str, Any],
        *,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> types.CallToolResult:
        """Run the executable and return its result. Call `on_progress` with `parse_progress(line)` for each line.

        Raises `MCPError` if the tool reported a protocol error (`mcp_fail`), and `CannotStart`.
        """

        def on_line(line: str) -> None:
            if on_progress is not None and (progress := parse_progress(line)) is not None:
                on_progress(progress)

        scratch = Path(tempfile.mkdtemp(prefix="tidings-"))
        try:
            outcome = await run_process(
                self.command,
                stdin=encode_json(arguments).encode(),
                env=build_environment(
                    self.root,
                    arguments,
                    name=self.name,
                    allowed=self.allowed_env,
                    variables=self.env,
                    metadata=self.metadata,
                    scratch=scratch,
                ),
                cwd=self.root,
                timeout=self.timeout,
                max_output=self.max_output,
                on_line=on_line,
                on_stop=(scratch / "cancelled").touch,
            )
            if outcome.status and (error := read_protocol_error(scratch / "error.json")) is not None:
                raise error
            result = make_result(outcome, self.output_schema, self.timeout, self.timeout_hint)
            if (listing := scratch / "resources").exists() and not result.is_error:
                folders = (self.root, *list_roots(self.root), Path(tempfile.gettempdir()))
                result.content += await asyncio.to_thread(read_embedded_files, listing, folders, self.max_output)
            return result
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


class ExecutableTool(Tool):
    """A tool of the SDK that calls an executable instead of a function."""

    executable: SkipValidation[Executable]
    max_processes: int

    @property
    def output_schema(self) -> dict[str, Any] | None:
        return self.executable.output_schema

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> Any:
        try:
            violation = find_violation(arguments, self.parameters)
        except ValueError as error:
            violation = f"its inputSchema can't be used: {error}"
        if violation is not None:
            raise ToolError(f"{self.name}: {violation}")
        # A queue keeps the lines in order, and a slow caller does not block the tool.
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=1000)

        def on_progress(progress: dict[str, Any]) -> None:
            with suppress(asyncio.QueueFull):  # a caller that is 1000 lines behind does not need each of them
                queue.put_nowait(progress)

        forwarding = asyncio.create_task(_forward_progress(queue, context))
        try:
            async with call_slot(self.max_processes):
                result = await self.executable.call(arguments, on_progress=on_progress)
            await queue.put(None)
            await forwarding
            return result
        except (CannotStart, TooManyCalls) as error:
            raise ToolError(f"{self.name}: {error}") from None
        finally:
            forwarding.cancel()


async def _forward_progress(queue: asyncio.Queue[dict[str, Any] | None], context: Context[Any, Any]) -> None:
    """Send the progress and log lines in the queue to the caller of a tool, until None."""
    while (line := await queue.get()) is not None:
        try:
            if "progress" in line:
                await context.report_progress(line["progress"], line["total"], line["message"])
            else:
                await _send_log(line, context)
        except Exception as error:  # a closed connection of the caller must not make the call fail
            logger.debug("could not send the progress of a tool to its caller: %r", error)


async def _send_log(line: dict[str, Any], context: Context[Any, Any]) -> None:
    request = context.request_context
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK deprecates log messages; older clients still show them
        await request.session.send_log_message(
            line["level"], line["data"], line["logger"], related_request_id=request.request_id
        )


def make_executable(
    root: Path, settings: Settings, path: Path, meta: dict[str, Any], name: str, meta_path: Path | None = None
) -> LoadedItem:
    """Return the tool for an executable. `meta_path` is the file that contains `meta`, if it is another file."""
    meta_path = meta_path or path
    timeout = meta.get("timeout", meta.get("timeoutSecs", settings.timeout))
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise invalid_field(meta_path, "timeout", f"timeout is {timeout!r}; it must be a positive number of seconds")
    parameters = meta.get("inputSchema", meta.get("arguments")) or {"type": "object"}
    output_schema = meta.get("outputSchema")
    for field_name, schema in (("inputSchema", parameters), ("outputSchema", output_schema)):
        if schema is not None and (error := find_schema_error(schema)) is not None:
            raise invalid_field(meta_path, field_name, f"{field_name} is not a JSON schema: {error}")
    parameters = {"type": "object"} | parameters
    if parameters["type"] != "object":  # clients reject the whole list because of one such tool
        message = f"inputSchema has the type {parameters['type']!r}; it must be 'object'"
        raise invalid_field(meta_path, "inputSchema", message)
    tool_name = str(meta.get("name") or name)
    hint = meta.get("timeoutHint")
    executable = Executable(
        # `tool.sh` in a folder need not be executable: copying may have lost the permission.
        command=[str(path)] if os.access(path, os.X_OK) else ["bash", str(path)],
        root=root,
        name=tool_name,
        timeout=float(timeout),
        max_output=settings.max_output,
        output_schema=output_schema,
        timeout_hint=None if hint is None else str(hint),
        allowed_env=settings.env,
        env=_parse_env(meta_path, meta.get("env") or {}),
        metadata=meta,
    )
    try:
        tool = ExecutableTool(
            fn=_placeholder,
            name=tool_name,
            title=meta.get("title"),
            description=str(meta.get("description") or ""),
            parameters=parameters,
            fn_metadata=_placeholder_metadata(),
            is_async=False,
            context_kwarg=None,
            annotations=meta.get("annotations"),
            icons=meta.get("icons"),
            meta=meta.get("_meta"),
            executable=executable,
            max_processes=settings.max_processes,
        )
    except ValidationError as error:
        raise invalid_model(meta_path, error) from None
    return make_item(tool, files=(path,))


def _parse_env(path: Path, env: Any) -> dict[str, str]:
    if not isinstance(env, dict):
        raise invalid_field(path, "env", f"env is {env!r:.60}; it must be an object of names and values")
    try:
        return check_variables({str(name): str(value) for name, value in env.items()})
    except InvalidItem as error:
        raise invalid_field(path, "env", str(error)) from None


@cache
def _placeholder_metadata() -> Any:
    return Tool.from_function(_placeholder).fn_metadata


def _placeholder() -> None:
    """Do nothing. The SDK's `Tool` requires a function, but `ExecutableTool` overrides `run`, which would call it."""
