"""The error for a missing extra; tests/test_dist.py runs its command."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tidings.errors import missing_extra

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = {extra: needs for extra, needs in PROJECT["optional-dependencies"].items() if extra not in ("all", "dev")}


def parse(requirement: str) -> tuple[str, frozenset[str]]:
    """Return the name and the conditions of a requirement. A build backend may sort the conditions."""
    found = re.fullmatch(r"([\w.\[\]-]+)(.*)", requirement)
    assert found, requirement
    return found[1], frozenset(found[2].split(","))


@pytest.mark.parametrize("extra", EXTRAS)
def test_error_for_a_missing_extra_ends_with_a_command_that_names_its_packages(extra: str) -> None:
    message, _, command = str(missing_extra("Something", extra)).partition(": ")
    assert message == f'Something needs the extra "{extra}" of Tidings'
    python, *pip, install = shlex.split(command)[:4]
    assert (python, pip, install) == (sys.executable, ["-m", "pip"], "install")
    assert sorted(map(parse, shlex.split(command)[4:])) == sorted(map(parse, EXTRAS[extra]))


def test_command_for_a_missing_extra_is_one_of_uv_if_there_is_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert f": uv pip install --python {shlex.quote(sys.executable)} " in str(missing_extra("Something", "nats"))


def test_error_for_a_missing_extra_has_no_command_if_tidings_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert str(missing_extra("Something", "nats")) == 'Something needs the extra "nats" of Tidings'
