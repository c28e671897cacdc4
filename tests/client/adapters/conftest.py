"""The frameworks are in the environment of `make test-adapters` only; elsewhere pytest does not collect these tests."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("pydantic_ai") else ["test_*.py"]
