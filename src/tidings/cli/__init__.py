"""The command `tidings`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from tidings.cli.output import fail, fail_on_os_error
from tidings.dependencies import check_sdk
from tidings.errors import TidingsError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Print an expected error as one line on standard error, and exit with status 2."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error: a server chooses the text, and the terminal may not have its characters.
        sys.stdout.reconfigure(errors="backslashreplace")
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        check_sdk()
        from tidings.cli.commands import run

        run(arguments)
    except TidingsError as error:
        fail(str(error))
    except OSError as error:  # for example standard output on a disk that is full
        fail_on_os_error(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _open_missing_streams() -> None:
    """Open each standard stream that the caller has closed as the null device.

    Python has None in its place. Without this, the next file that is opened would get its descriptor, and its output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # the lowest free descriptor
