"""The size of tests that are random or long: a seeded sample, or the whole with `TIDINGS_STRESS=1`.

Such a test has the marker `stress`. Hypothesis marks its own, and `tests/conftest.py` sets their number of examples.
"""

from __future__ import annotations

import os

__all__ = ["sized"]

IS_WHOLE = os.environ.get("TIDINGS_STRESS") == "1"


def sized(sample: int, whole: int) -> int:
    """Return how often a test does something."""
    return whole if IS_WHOLE else sample
