"""Log lines of `tidings serve` on standard error: text for users, or JSON for programs."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from tidings.core.redact import one_line, short_id

__all__ = ["LogFormat", "LogLevel", "LogOptions", "TextFormatter", "set_up_logging"]

_SESSION_ID = re.compile(r"(session(?: id)?:? )(\w{32,})", re.IGNORECASE)


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogOptions(NamedTuple):
    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.TEXT
    is_quiet: bool = False

    @property
    def effective_level(self) -> LogLevel:
        return max(self.level, LogLevel.WARNING, key=list(LogLevel).index) if self.is_quiet else self.level

    @property
    def is_detailed(self) -> bool:
        """Whether a log line has all details of a change, instead of a short text for users."""
        return self.format is LogFormat.JSON or self.level is LogLevel.DEBUG


def set_up_logging(options: LogOptions) -> None:
    """Configure logging. Call this before creating a server, because the SDK's server configures logging otherwise.

    Libraries log each request at `info`, so only their warnings and errors are logged, except with `debug`.
    """
    level = logging.getLevelNamesMapping()[options.effective_level.upper()]
    is_json = options.format is LogFormat.JSON
    handler = _StderrHandler()
    handler.setFormatter(_JsonFormatter() if is_json else TextFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(_hide_session_ids)
    root_level = logging.INFO if level == logging.DEBUG else max(level, logging.WARNING)
    logging.basicConfig(level=root_level, handlers=[handler])
    logging.getLogger("tidings").setLevel(level)
    logging.getLogger("uvicorn.error").addFilter(_is_not_cancellation)
    if is_json:
        # Python would write these to standard error as several lines of text.
        logging.captureWarnings(True)
        threading.excepthook = _log_thread_exception


def _log_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        name = arguments.thread.name if arguments.thread is not None else "a thread"
        logging.getLogger("tidings.serve").error("%s ended with an exception", name, exc_info=arguments.exc_value)


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Return False for work that is cancelled because the server stops: it has not failed and needs no traceback."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and kind.__name__ == "CancelledError":
        return False
    # After a second Ctrl-C, uvicorn logs the traceback of the app's lifespan as a text.
    return not record.getMessage().rstrip().endswith("asyncio.exceptions.CancelledError")


def _hide_session_ids(record: logging.LogRecord) -> bool:
    """Replace session ids, which the SDK logs. A reader of the log could send requests with a session id."""
    if record.name.startswith("mcp."):
        record.msg = _SESSION_ID.sub(lambda found: found[1] + short_id(found[2]), record.getMessage())
        record.args = ()
    return True


class _StderrHandler(logging.Handler):
    """A handler that writes to the current `sys.stderr`, which the status panel replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as every handler of logging does
            self.handleError(record)


class TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own name
        record.message = one_line(record.message)
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # likewise
        """Indent each line, because an exception may contain client input, which must not look like a log line."""
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))


class _JsonFormatter(logging.Formatter):
    """A formatter for one JSON object per line: time, level, logger, message, details and trace."""

    def format(self, record: logging.LogRecord) -> str:
        from opentelemetry import trace

        details: dict[str, Any] = getattr(record, "tidings", {})
        line = details | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
