"""`python -m tidings` is the `tidings` command."""

from tidings.cli import main

if __name__ == "__main__":
    main()
