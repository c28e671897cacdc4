"""One call of an executable tool, from arguments to result.

Ties the parts together: a scratch directory for what does not fit a variable and for what the helpers in `sdk/` leave
behind, the environment, the process, and the result. Knows nothing of sessions: progress and log lines go to a
callback.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mcp_types as types

from tidings.workspace.environment import PROGRESS_FD, arguments_json, environment, roots_of
from tidings.workspace.process import run_process
from tidings.workspace.result import embedded_resources, failure, progress_line, tool_result

__all__ = ["call_executable"]


async def call_executable(
    command: Sequence[str],
    arguments: Mapping[str, Any],
    *,
    root: Path,
    name: str,
    timeout: float,  # noqa: ASYNC109  # the process's
    most_output: int,
    output_schema: Mapping[str, Any] | None = None,
    allowed: Iterable[str] = (),
    own: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    request_meta: Mapping[str, Any] | None = None,
    timeout_hint: str | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> types.CallToolResult:
    """Run a tool and say how it went. `on_progress` gets what `progress_line` makes of each line.

    Raises `MCPError` if the tool has failed with a protocol error of its own (`mcp_fail`), and `CannotStart`.
    """

    def on_line(line: str) -> None:
        if on_progress is not None and (said := progress_line(line)) is not None:
            on_progress(said)

    scratch = Path(tempfile.mkdtemp(prefix="tidings-"))
    try:
        outcome = await run_process(
            command,
            stdin=arguments_json(arguments).encode(),
            env=environment(
                root,
                arguments,
                name=name,
                allowed=allowed,
                own=own,
                metadata=metadata,
                request_meta=request_meta,
                scratch=scratch,
            ),
            cwd=root,
            timeout=timeout,
            most_output=most_output,
            on_line=on_line,
            line_fd_env=PROGRESS_FD,
            on_stop=(scratch / "cancelled").touch,
        )
        if outcome.status and (error := failure(scratch / "error.json")) is not None:
            raise error
        result = tool_result(outcome, output_schema, timeout=timeout, hint=timeout_hint)
        if (listing := scratch / "resources").exists() and not result.is_error:
            within = (root, *roots_of(root), Path(tempfile.gettempdir()))
            result.content += await asyncio.to_thread(embedded_resources, listing, within, most_output)
        return result
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
