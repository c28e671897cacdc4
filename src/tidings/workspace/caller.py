"""The client that called an executable tool: it gets progress and log lines, and may answer questions.

Only a client of a handshake version can be asked: version 2026-07-28 has no requests from the server to the client.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import mcp_types as types
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from tidings.sdk import internals
from tidings.workspace.result import LOG_LEVELS

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.mcpserver.context import Context

__all__ = ["Caller", "set_log_level"]

logger = logging.getLogger(__name__)

_DEFAULT_LEVEL = "info"
"""The level until the client sets one, as in mcp-bash-framework."""

_LEVEL_KEY = "tidings.log_level"
"""The key of the level in the state of a connection."""


async def set_log_level(
    context: ServerRequestContext[Any, Any], params: types.SetLevelRequestParams
) -> types.EmptyResult:
    """Answer `logging/setLevel`."""
    internals.connection_of(context.session).state[_LEVEL_KEY] = params.level
    return types.EmptyResult()


class Caller:
    """The client that waits for the result of one call."""

    def __init__(self, context: Context[Any, Any]) -> None:
        self._context = context
        self._request = context.request_context
        # A queue keeps the lines in order, and a slow caller does not block the tool.
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=1000)

    @property
    def meta(self) -> dict[str, Any]:
        """The `_meta` of the request, as the client sent it."""
        meta = (self._request.params or {}).get("_meta")
        return dict(meta) if isinstance(meta, dict) else {}

    @property
    def question_modes(self) -> frozenset[str]:
        """The modes of questions that the caller can answer: `form`, `url`, both or none."""
        capabilities = self._request.session.client_capabilities
        if not self._request.session.can_send_request or capabilities is None or capabilities.elicitation is None:
            return frozenset()
        modes = {mode for mode in ("form", "url") if getattr(capabilities.elicitation, mode) is not None}
        return frozenset(modes or {"form"})  # a client of an older version declares no mode

    def add_line(self, line: dict[str, Any]) -> None:
        with suppress(asyncio.QueueFull):  # a caller that is 1000 lines behind does not need each of them
            self._lines.put_nowait(line)

    async def end_lines(self) -> None:
        await self._lines.put(None)

    async def send_lines(self) -> None:
        """Send the progress and log lines, until `end_lines`."""
        while (line := await self._lines.get()) is not None:
            try:
                if "progress" in line:
                    await self._context.report_progress(line["progress"], line["total"], line["message"])
                else:
                    await self._send_log(line)
            except Exception as error:  # a closed connection of the caller must not make the call fail
                logger.debug("could not send the progress of a tool to its caller: %r", error)

    async def _send_log(self, line: dict[str, Any]) -> None:
        session = self._request.session
        # A modern client sends its level in the `_meta` of the request, and the SDK applies it.
        if self._request.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            level = internals.connection_of(session).state.get(_LEVEL_KEY, _DEFAULT_LEVEL)
            if LOG_LEVELS.index(line["level"]) < LOG_LEVELS.index(level):
                return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the SDK deprecates log messages; older clients still show them
            await session.send_log_message(
                line["level"], line["data"], line["logger"], related_request_id=self._request.request_id
            )

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask the user a question (`elicitation/create`), and return `{"action": …, "content": …}`."""
        message, mode = str(question.get("message", "")), str(question.get("mode") or "form")
        if mode not in self.question_modes:
            return {"action": "decline", "content": None}
        session, request_id = self._request.session, self._request.request_id
        try:
            if mode == "url":
                answer = await session.elicit_url(message, str(question["url"]), uuid.uuid4().hex, request_id)
            else:
                answer = await session.elicit_form(message, question["schema"], request_id)
        except Exception as error:  # an invalid question, or a client that fails; the tool continues
            logger.warning("a question of a tool could not be asked: %s", error)
            return {"action": "error", "content": None}
        return {"action": answer.action, "content": answer.content}
