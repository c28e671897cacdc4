"""Executable tools: any file that can be run, in any language.

A call starts the file without a shell in its own process group. It passes the arguments as JSON on standard input and
in the environment, forwards progress and log lines, and converts the output to a result. It stops the process group
after a timeout or a cancellation.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from pydantic import SkipValidation

from tidings.errors import InvalidItem
from tidings.runtime.child import CannotStart
from tidings.server.schema import find_schema_error, find_violation
from tidings.workspace.call_slots import TooManyCalls, call_slot
from tidings.workspace.caller import Caller
from tidings.workspace.environment import add_env_script, build_environment, check_variables, encode_json, list_roots
from tidings.workspace.items import LoadedItem
from tidings.workspace.metadata import get_display_fields
from tidings.workspace.problems import invalid_field, make_model
from tidings.workspace.process import run_process
from tidings.workspace.result import make_result, parse_progress, read_embedded_files, read_protocol_error
from tidings.workspace.settings import Settings

if TYPE_CHECKING:
    from mcp.server.mcpserver.context import Context

__all__ = ["Executable", "ExecutableTool", "make_executable"]


_MAX_EXTENDED = 600.0
"""Seconds that progress can extend a run to, unless the tool has its own limit: as in mcp-bash-framework."""


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
    max_timeout: float | None = None
    """If set, progress restarts `timeout`, up to this number of seconds."""
    allowed_env: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    async def call(
        self,
        arguments: Mapping[str, Any],
        *,
        meta: Mapping[str, Any] | None = None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        ask: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] | None = None,
    ) -> types.CallToolResult:
        """Run the executable and return its result. Call `on_progress` with `parse_progress(line)` for each line.

        `meta` is the `_meta` of the request. `ask` answers the questions of the tool; without it, there are none.

        Raises `MCPError` if the tool reported a protocol error (`mcp_fail`), and `CannotStart`.
        """
        scratch = Path(tempfile.mkdtemp(prefix="tidings-"))
        answers: set[asyncio.Task[None]] = set()

        async def answer(question: dict[str, Any]) -> None:
            assert ask is not None
            partial = scratch / "answer.partial"
            partial.write_text(encode_json(await ask(question)), "utf-8")
            partial.rename(scratch / "answer")  # the tool waits for this file, and must find it complete

        def on_line(line: str) -> None:
            progress = parse_progress(line)
            if progress is not None and "question" in progress:
                if ask is not None:
                    answers.add(asyncio.create_task(answer(progress["question"])))
            elif progress is not None and on_progress is not None:
                on_progress(progress)

        try:
            outcome = await run_process(
                add_env_script(self.root, self.command),
                stdin=encode_json(arguments).encode(),
                env=build_environment(
                    self.root,
                    arguments,
                    name=self.name,
                    allowed=self.allowed_env,
                    variables=self.env,
                    metadata=self.metadata,
                    request_meta=meta,
                    can_ask=ask is not None,
                    scratch=scratch,
                ),
                cwd=self.root,
                timeout=self.timeout,
                max_timeout=self.max_timeout,
                max_output=self.max_output,
                on_line=on_line,
                on_stop=(scratch / "cancelled").touch,
            )
            if outcome.status and (error := read_protocol_error(scratch / "error.json")) is not None:
                raise error
            result = make_result(outcome, self.output_schema, self.timeout, self.timeout_hint, self.max_timeout)
            if (listing := scratch / "resources").exists() and not result.is_error:
                folders = (self.root, *list_roots(self.root), Path(tempfile.gettempdir()))
                result.content += await asyncio.to_thread(read_embedded_files, listing, folders, self.max_output)
            return result
        finally:
            for task in answers:
                task.cancel()
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
        caller = Caller(context)
        ask = caller.ask if caller.question_modes else None
        forwarding = asyncio.create_task(caller.send_lines())
        try:
            async with call_slot(self.max_processes):
                result = await self.executable.call(arguments, meta=caller.meta, on_progress=caller.add_line, ask=ask)
            await caller.end_lines()
            await forwarding
            return result
        except (CannotStart, TooManyCalls) as error:
            raise ToolError(f"{self.name}: {error}") from None
        finally:
            forwarding.cancel()


def make_executable(
    root: Path, settings: Settings, path: Path, meta: dict[str, Any], name: str, meta_path: Path | None = None
) -> LoadedItem:
    """Return the tool for an executable. `meta_path` is the file that contains `meta`, if it is another file."""
    meta_path = meta_path or path
    timeout = _parse_seconds(meta, meta_path, "timeout" if "timeout" in meta else "timeoutSecs", settings.timeout)
    max_timeout = None
    if meta.get("progressExtendsTimeout") is True:
        max_timeout = _parse_seconds(meta, meta_path, "maxTimeoutSecs", max(_MAX_EXTENDED, timeout))
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
        timeout=timeout,
        max_timeout=max_timeout,
        max_output=settings.max_output,
        output_schema=output_schema,
        timeout_hint=None if hint is None else str(hint),
        allowed_env=settings.env,
        env=_parse_env(meta_path, meta.get("env") or {}),
        metadata=meta,
    )
    tool = make_model(
        ExecutableTool,
        meta_path,
        fn=_placeholder,
        name=tool_name,
        parameters=parameters,
        fn_metadata=_placeholder_metadata(),
        is_async=False,
        context_kwarg=None,
        **{**get_display_fields(meta), "description": str(meta.get("description") or "")},
        executable=executable,
        max_processes=settings.max_processes,
    )
    return LoadedItem(tool, files=(path,))


def _parse_seconds(meta: dict[str, Any], path: Path, name: str, default: float) -> float:
    value = default if meta.get(name) is None else meta[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise invalid_field(path, name, f"{name} is {value!r}; it must be a positive number of seconds")
    return float(value)


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
