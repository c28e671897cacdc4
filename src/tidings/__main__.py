"""`python -m tidings`, for where the command is not on PATH."""

from tidings.cli import main

main()
