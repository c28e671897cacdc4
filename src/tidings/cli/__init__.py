"""The command `tidings`.

A client that starts `tidings serve DIR --stdio` waits for the first answer, so that way is kept free of everything that
it does not need, the parser of commands included. Whatever else is said goes to `commands`.
"""

from __future__ import annotations

import sys

from tidings.errors import TidingsError

__all__ = ["main"]


def main() -> None:
    from tidings.cli.stdio import read_arguments, serve_stdio

    try:
        plain = read_arguments(sys.argv[1:])
        if plain is not None:
            serve_stdio(*plain)
        else:
            from tidings.cli.commands import app

            app(prog_name="tidings")
    except TidingsError as error:
        sys.stderr.write(f"tidings: {error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
