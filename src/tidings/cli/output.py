"""What the commands print, and where: results on standard output, everything said about them on standard error.

A file of a workspace is code and may print. That must never end up among the results, nor in the protocol.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NoReturn

__all__ = [
    "LogFormat",
    "LogLevel",
    "counted",
    "fail",
    "print_json",
    "print_line",
    "print_text",
    "say",
    "set_up_logging",
    "stdout_is_set_aside",
]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    def unless(self, quiet: bool) -> LogLevel:
        return max(self, LogLevel.WARNING, key=list(LogLevel).index) if quiet else self


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"

    def is_in_detail(self, level: LogLevel) -> bool:
        """Whether a line is wanted with all its parts, in place of the few words that people like to read."""
        return self is LogFormat.JSON or level is LogLevel.DEBUG


def fail(message: str, status: int = 2) -> NoReturn:
    """End the command with one clear line."""
    say(f"tidings: {message}")
    raise SystemExit(status)


def say(text: str = "") -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def print_text(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    print_text(json.dumps(value, indent=2, ensure_ascii=not _takes_unicode()))


def print_line(value: Any) -> None:
    """JSON that is read while the command goes on."""
    print_text(json.dumps(value))


def _takes_unicode() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def stdout_is_set_aside() -> Iterator[None]:
    """Let whatever is printed meanwhile, by Python or below it, go to standard error."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is none, so nothing can get into it
        yield
        return
    os.dup2(2, 1)
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stdout
        os.dup2(kept, 1)
        os.close(kept)


def set_up_logging(level: LogLevel, form: LogFormat = LogFormat.TEXT) -> None:
    """Before a server is made: the SDK's sets up logging of its own unless somebody has."""
    chosen = logging.getLevelNamesMapping()[level.upper()]
    handler = _Lines()
    handler.setFormatter(_Json() if form is LogFormat.JSON else _Plain("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.addFilter(_hide_sessions)
    # What others have to say of every request is for whoever debugs.
    logging.basicConfig(
        level=logging.INFO if chosen == logging.DEBUG else max(chosen, logging.WARNING), handlers=[handler]
    )
    logging.getLogger("tidings").setLevel(chosen)
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    if form is LogFormat.JSON:
        # What Python itself would write to standard error, as several lines of text.
        logging.captureWarnings(True)
        threading.excepthook = _log_death


def _log_death(died: threading.ExceptHookArgs) -> None:
    """A thread has ended with an exception, one that a tool has started perhaps."""
    if died.exc_value is not None and not isinstance(died.exc_value, SystemExit):
        name = died.thread.name if died.thread is not None else "a thread"
        logging.getLogger("tidings.serve").error("%s ended with an exception", name, exc_info=died.exc_value)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """A call that is cut off at the end of the server is no failure, and no traceback."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "CancelledError"


def _hide_sessions(record: logging.LogRecord) -> bool:
    """The SDK logs the ids of sessions, with which anybody may speak for them."""
    if record.name.startswith("mcp."):
        from tidings.core.redact import nickname

        record.msg = _SESSION.sub(lambda found: found[1] + nickname(found[2]), record.getMessage())
        record.args = ()
    return True


_SESSION = re.compile(r"(session(?: id)?:? )(\w{32,})", re.IGNORECASE)


class _Lines(logging.Handler):
    """Standard error as it is when the line is written: the status on a terminal puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as every handler of logging does
            self.handleError(record)


class _Plain(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's own name
        from tidings.core.redact import plain

        record.message = plain(record.message)
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # likewise
        """What was raised may say what a client sent: no line of it begins where those of the log do."""
        from tidings.core.redact import plain

        return "\n".join(f"  {plain(line)}" for line in super().formatException(ei).split("\n"))


class _Json(logging.Formatter):
    """One object per line: when, how bad, who says it, the text, its parts, and the trace it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        from opentelemetry import trace

        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said = getattr(record, "tidings", {}) | said
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            said |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)
