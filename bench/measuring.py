"""Measure figures and print them: both sides take turns; medians, and the middle half of the rounds."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from typing import Any

Sample = Callable[[], float]
"""Do the work once, and return the CPU seconds of the measured part."""


@dataclass(frozen=True)
class Row:
    key: str
    """The same in every run; `figure` also names the sizes."""
    figure: str
    value: float
    low: float
    high: float
    unit: str
    target: str = ""
    met: bool | None = None
    """None without a target."""
    note: str = ""


@dataclass(frozen=True)
class Scale:
    rounds: int
    part: int
    """The divisor of sizes in a quick run."""

    def of(self, size: int) -> int:
        return size // self.part


def interleaved(rounds: int, *samples: Sample) -> list[list[float]]:
    """Return the times of each sample, one per round, after a warm-up round."""
    times: list[list[float]] = [[] for _ in samples]
    for turn in range(-1, rounds):
        order = range(len(samples))
        for index in order if turn % 2 else reversed(order):
            taken = samples[index]()
            if turn >= 0:
                times[index].append(taken)
    return times


def cpu(work: Callable[[], object]) -> float:
    start = thread_time()
    work()
    return thread_time() - start


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def middle(values: list[float]) -> list[float]:
    """Return the median, followed by the values of the rounds."""
    return [statistics.median(values), *values]


def ratio(times: list[float], base: list[float]) -> list[float]:
    each = (taken / reference for taken, reference in zip(times, base, strict=True))
    return [statistics.median(times) / statistics.median(base), *each]


def compare(scale: Scale, few: Sample, many: Sample) -> tuple[list[float], str]:
    """Return the cost of `many` over that of `few`, and a note with both costs."""
    with no_collections():
        base, times = interleaved(scale.rounds, few, many)
    return ratio(times, base), f"{1e6 * statistics.median(times):.1f} over {1e6 * statistics.median(base):.1f} µs"


def row(key: str, figure: str, values: list[float], unit: str = "×", *, note: str = "", **bound: float) -> Row:
    """Make a row of a figure and its values in each round; `bound` is the target, `most` or `least`."""
    value, *each = values
    low, _, high = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else (value, value, value)
    target, met = "", None
    if "most" in bound:
        target, met = f"≤ {bound['most']:,g}", value <= bound["most"]
    if "least" in bound:
        target, met = f"≥ {bound['least']:,g}", value >= bound["least"]
    return Row(key, figure, value, low, high, unit, target, met, note)


def machine() -> dict[str, Any]:
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "pgo": "--enable-optimizations" in arguments,
        "lto": "--with-lto" in arguments,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }


def written(found: Row) -> str:
    if found.unit == "×":
        numbers = f"{found.value:.2f}×", f"{found.low:.2f} – {found.high:.2f}"
    else:
        digits = 1 if found.unit == "ms" else 0
        numbers = f"{found.value:,.{digits}f} {found.unit}", f"{found.low:,.{digits}f} – {found.high:,.{digits}f}"
    spread = numbers[1] if found.low != found.high else ""
    verdict = {True: "met", False: "MISSED", None: ""}[found.met]
    return f"{found.figure:<55} {numbers[0]:>13}  {spread:<21} {found.target:<9}  {verdict:<6} {found.note}".rstrip()
