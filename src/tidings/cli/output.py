"""Output of the commands: results on standard output, and messages on standard error.

Files, tools and servers choose a part of the text, so control characters, which a terminal would execute, are escaped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from tidings.core.redact import one_line, terminal_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "fail",
    "fail_on_os_error",
    "pluralize",
    "print_json",
    "print_json_lines",
    "print_stderr",
    "print_stdout",
    "print_styled",
    "print_table",
    "redirect_stdout_to_stderr",
    "render_rows",
    "toml_value",
]


def fail(message: str, status: int = 2) -> NoReturn:
    """Print a one-line error and exit."""
    print_stderr(f"tidings: {message}")
    raise SystemExit(status)


def fail_on_os_error(error: OSError) -> NoReturn:
    """Print an unexpected `OSError` as one line, and exit. Discard the output that is still buffered."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):  # `tidings history | head`
        raise SystemExit(1)
    fail(f"{error.filename or 'the output'}: {error.strerror or error}", 1)


def print_stderr(text: str) -> None:
    sys.stderr.write(f"{terminal_text(text)}\n")
    sys.stderr.flush()


def print_stdout(text: str) -> None:
    """Print a result. A program that reads it gets it unchanged; on a terminal, control characters are escaped."""
    sys.stdout.write(f"{terminal_text(text) if sys.stdout.isatty() else text}\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or ""
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    print_stdout(json.dumps(value, indent=2, ensure_ascii=not is_utf8))


def print_json_lines(values: Iterable[Any]) -> None:
    for value in values:
        print_stdout(json.dumps(value))


def print_styled(*parts: tuple[str, str]) -> None:
    """Print a line from its parts, each with its style, which only a terminal shows."""
    if not sys.stdout.isatty():
        print_stdout("".join(text for text, _ in parts))
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text.assemble(*parts), soft_wrap=True)


def render_rows(title: str, rows: Iterable[tuple[str, str, str]]) -> RenderableType:
    """Return a panel: a title, and rows of a label, a text and its style. Equal labels are shown once."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=10)  # a long line must not shorten the labels
    grid.add_column(overflow="ellipsis", no_wrap=True)
    previous = ""
    for label, text, style in rows:
        grid.add_row("" if label == previous else label, Text(one_line(text), style=style))
        previous = label
    return Group(Rule(Text(title, style="bold"), align="left", style="dim"), grid)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], styled: int, styles: dict[str, str]) -> None:
    """Print a table, as wide as the terminal. `styles` has the style of each value in column `styled`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title == "revision" else "left", overflow="fold")
    for row in rows:
        cells = [Text(one_line(cell)) for cell in row]
        cells[styled].stylize(styles.get(row[styled], styles[""]))
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)  # a program reads whole lines


def toml_value(value: str | list[str]) -> str:
    """Return a value of TOML: JSON, except that surrogates must not be escaped, and that DEL must."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Send all output of this block to standard error, whether Python or C code writes it.

    Python files of a workspace may print. Their output must not appear among results or protocol messages.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stdout
        os.dup2(saved, 1)
        os.close(saved)
