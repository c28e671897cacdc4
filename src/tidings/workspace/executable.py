"""Executables as tools: any file that can be run, in any language.

It gets its arguments as JSON on standard input and in its environment, runs without a shell in its own process group,
and is ended with all that it started when it takes too long or its caller gives up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools.base import Tool
from pydantic import Field, ValidationError

from tidings.errors import InvalidItem
from tidings.workspace.call import call_executable
from tidings.workspace.environment import environment
from tidings.workspace.problems import Broken, broken_by, broken_member
from tidings.workspace.process import CannotStart, Outcome, run_process
from tidings.workspace.settings import Settings
from tidings.workspace.units import Piece, piece_of

if TYPE_CHECKING:
    from mcp.server.mcpserver.context import Context

__all__ = ["ExecutableTool", "executable_piece", "run_register"]

logger = logging.getLogger(__name__)


class ExecutableTool(Tool):
    """A tool of the SDK's that starts a process in place of calling a function."""

    command: list[str]
    root: Path
    schema_of_output: dict[str, Any] | None = None
    timeout: float
    hint: str | None = None
    max_output: int
    env: dict[str, str] = Field(default_factory=dict)
    allowed_env: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def output_schema(self) -> dict[str, Any] | None:
        return self.schema_of_output

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> Any:
        import jsonschema

        try:
            jsonschema.validate(arguments, self.parameters)
        except jsonschema.ValidationError as error:
            place = "/".join(map(str, error.absolute_path))
            raise ToolError(f"{self.name}: {place + ': ' if place else ''}{error.message}") from None
        try:
            async with _Notifier(context) as notifier:
                return await call_executable(
                    self.command,
                    arguments,
                    root=self.root,
                    name=self.name,
                    timeout=self.timeout,
                    most_output=self.max_output,
                    output_schema=self.schema_of_output,
                    allowed=self.allowed_env,
                    own=self.env,
                    metadata=self.metadata,
                    timeout_hint=self.hint,
                    on_progress=notifier.take,
                )
        except CannotStart as error:
            raise ToolError(f"{self.name}: {error}") from None


class _Notifier:
    """Passes a tool's progress and log lines on to its caller, in order and without making the tool wait."""

    def __init__(self, context: Context[Any, Any]) -> None:
        self._context = context
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=1000)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Notifier:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._task is not None:
            if exception[0] is None:
                await self._lines.put(None)
                await self._task
            else:
                self._task.cancel()

    def take(self, said: dict[str, Any]) -> None:
        if self._lines.full():
            return  # nobody reads thousands of steps; the next ones come when there is room again
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._pass_on())
        self._lines.put_nowait(said)

    async def _pass_on(self) -> None:
        while (said := await self._lines.get()) is not None:
            try:
                if "progress" in said:
                    await self._context.report_progress(said["progress"], said["total"], said["message"])
                else:
                    await self._log(said)
            except Exception as error:  # the caller is gone, or wants none of it: no reason to fail its call
                logger.debug("a tool's progress could not be passed on: %r", error)

    async def _log(self, said: dict[str, Any]) -> None:
        request = self._context.request_context
        with warnings.catch_warnings():
            # The protocol is about to drop logging; older clients still show it.
            warnings.simplefilter("ignore")
            await request.session.send_log_message(
                said["level"], said["data"], said["logger"], related_request_id=request.request_id
            )


def executable_piece(
    root: Path, settings: Settings, path: Path, meta: dict[str, Any], name: str, said_in: Path | None = None
) -> Piece:
    """A tool out of an executable and what is said of it; `said_in` is the file that says it, if it is another."""
    said_in = said_in or path
    timeout = meta.get("timeout", meta.get("timeoutSecs", settings.timeout))
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise broken_member(said_in, "timeout", f"timeout is {timeout!r}; it must be a number of seconds")
    parameters = meta.get("inputSchema", meta.get("arguments")) or {"type": "object"}
    for member, schema in (("inputSchema", parameters), ("outputSchema", meta.get("outputSchema"))):
        _check_schema(said_in, member, schema)
    parameters = {"type": "object"} | parameters
    if parameters["type"] != "object":
        # Clients refuse the whole list for it.
        message = f"inputSchema is of the type {parameters['type']!r}; arguments are an object"
        raise broken_member(said_in, "inputSchema", message)
    metadata = _metadata()
    try:
        tool = ExecutableTool(
            fn=_nothing,
            name=str(meta.get("name") or name),
            title=meta.get("title"),
            description=str(meta.get("description") or ""),
            parameters=parameters,
            fn_metadata=metadata,
            is_async=False,
            context_kwarg=None,
            annotations=meta.get("annotations"),
            icons=meta.get("icons"),
            meta=meta.get("_meta"),
            command=_command(path),
            root=root,
            schema_of_output=meta.get("outputSchema"),
            timeout=float(timeout),
            hint=meta.get("timeoutHint"),
            max_output=settings.max_output,
            env={str(key): str(value) for key, value in _own_env(said_in, meta).items()},
            allowed_env=settings.env,
            metadata=meta,
        )
    except ValidationError as error:
        raise broken_by(error, said_in) from None
    return piece_of(tool, files=(path,))


def run_register(root: Path, settings: Settings, path: Path, on_start: Callable[[Callable[[], None]], None]) -> bytes:
    """What a registration script prints. It runs on its own clock, in a thread, and never for a request.

    `on_start` gets what ends it early, from any thread."""
    outcome: list[Outcome | BaseException] = []
    ends: list[Callable[[], None]] = []
    is_told_to_end = threading.Event()

    def end_once() -> None:
        with suppress(IndexError):  # it has not begun, or was ended: a second time would disturb its cleaning up
            ends.pop()()

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def end_early() -> None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(task.cancel)

        ends.append(end_early)
        on_start(end_early)
        if is_told_to_end.is_set():
            end_once()
        try:
            outcome.append(
                await run_process(
                    [str(path)],
                    stdin=b"",
                    env=environment(root, {}, name="register", allowed=settings.env),
                    cwd=root,
                    timeout=settings.register_timeout,
                    most_output=settings.max_output,
                )
            )
        except (Exception, asyncio.CancelledError) as error:  # told to whoever asked, in the other thread
            outcome.append(error)

    over = threading.Event()  # a thread whose join was interrupted once is taken for ended by the next one

    def run_to_its_end() -> None:
        try:
            asyncio.run(run())
        finally:
            over.set()

    # A thread and an event loop of its own, since whoever loads a workspace may be inside one.
    thread = threading.Thread(target=run_to_its_end, name=f"running {path.name}")
    try:
        thread.start()
        over.wait()
    except BaseException:  # this process is told to end, and what it started must not outlive it
        is_told_to_end.set()
        end_once()
        if thread.is_alive():  # one that is still to begin ends by itself
            over.wait()
        raise
    [done] = outcome
    if isinstance(done, BaseException):
        raise Broken(path, str(done) or "was ended") from None
    if done.is_timeout:
        raise Broken(path, f"did not finish within {settings.register_timeout:g} s")
    if done.is_truncated:
        raise Broken(path, f"printed more than {settings.max_output} bytes; [tools] max_output allows no more")
    if done.status != 0:
        end = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise Broken(path, f"failed with exit status {done.status}{': ' + end if end else ''}")
    return done.stdout


def _command(path: Path) -> list[str]:
    # A folder's `tool.sh` need not be executable: whoever copied it may have lost the bit.
    return [str(path)] if os.access(path, os.X_OK) else ["bash", str(path)]


def _own_env(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    env = meta.get("env") or {}
    if env == {}:
        return {}
    if not isinstance(env, dict):
        raise broken_member(path, "env", f"env is {env!r:.60}; it must be names and values")
    try:
        environment(path.parent, {}, own={str(name): str(value) for name, value in env.items()})
    except InvalidItem as error:
        raise broken_member(path, "env", str(error)) from None
    return env


def _check_schema(path: Path, member: str, schema: Any) -> None:
    if schema is None or _is_plain_schema(schema):
        return
    if not isinstance(schema, dict):
        raise broken_member(path, member, f"{member} is {schema!r:.60}; it must be a JSON schema")
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise broken_member(path, member, f"{member} is not a JSON schema: {error.message}") from None


_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def _is_plain_schema(schema: Any) -> bool:
    """Whether it is a schema of the kind that most tools have, which needs no library to tell: importing that takes
    longer than reading a whole workspace."""
    if not isinstance(schema, dict):
        return False
    for keyword, value in schema.items():
        match keyword:
            case "type":
                is_plain = isinstance(value, str) and value in _TYPES
            case "properties":
                is_plain = isinstance(value, dict) and all(map(_is_plain_schema, value.values()))
            case "required":
                is_plain = _is_list_of_names(value) and len(set(value)) == len(value)
            case "enum":
                is_plain = _is_list_of_names(value)
            case "items":
                is_plain = _is_plain_schema(value)
            case "title" | "description":
                is_plain = isinstance(value, str)
            case "additionalProperties":
                is_plain = isinstance(value, bool) or _is_plain_schema(value)
            case _:
                is_plain = keyword == "default"
        if not is_plain:
            return False
    return True


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


@cache
def _metadata() -> Any:
    """What the SDK wants to know of a tool's function; the same for all, since there is none."""
    return Tool.from_function(_nothing).fn_metadata


def _nothing() -> None:
    """In place of a function: the process does the work."""
