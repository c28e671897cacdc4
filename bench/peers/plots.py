"""Write the plots and tables of docs/performance.md.

The SVG is written by hand: a few lines and rectangles need no library. Axes are logarithmic, because the peers
differ by two orders of magnitude. Colours are readable on white and on black, and text follows the reader's scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from bench.peers import report
from bench.peers.figures import Samples, written
from bench.peers.programs import PEERS, ROOT

__all__ = ["bars", "lines", "write_page"]

PAGE = ROOT / "docs" / "performance.md"
FOLDER = ROOT / "docs" / "performance"
BEGIN, END = "<!-- peers: what `python -m bench.peers --write` wrote -->", "<!-- peers: end -->"
COLOURS = {
    "floor": "#8c8c8c",
    "raw": "#5c6f7b",
    "bare": "#7a5c3e",
    "starlette": "#a3825f",
    "own": "#0a84c9",
    "asgi": "#2aa876",
    "typescript": "#b07aa1",
    "sdk": "#e4572e",
    "fastmcp": "#d9a404",
}
STYLE = """text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-size: 14px; font-weight: 600 }
.grid { stroke: #8886; stroke-width: 1 } .axis { stroke: #888; stroke-width: 1 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } }"""
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 70, 190, 40, 50


def _svg(height: int, title: str, body: Iterator[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _decades(low: float, high: float) -> list[int]:
    return list(range(math.floor(math.log10(low)), math.ceil(math.log10(high) - 1e-9) + 1))


def _power(exponent: int) -> str:
    return f"{10**exponent:,}" if exponent >= 0 else f"{10**exponent:g}"


def lines(title: str, samples: Samples, name: str, x_label: str) -> str | None:
    """One figure over its sizes, a line for each peer."""
    sizes = samples.sizes(name)
    found = {
        peer: [(size, value) for size in sizes if (value := samples.median(peer, f"{name}/{size}"))] for peer in PEERS
    }
    series = {peer: points for peer, points in found.items() if points}
    if len(sizes) < 2 or not series:
        return None
    values = [value for points in series.values() for _, value in points]
    across, up = _decades(sizes[0], sizes[-1]), _decades(min(values), max(values))
    height, plot_height, plot_width = 380, 380 - TOP - BOTTOM, WIDTH - LEFT - RIGHT

    def x(size: float) -> float:
        return LEFT + (math.log10(size) - across[0]) / (across[-1] - across[0]) * plot_width

    def y(value: float) -> float:
        return TOP + plot_height - (math.log10(value) - up[0]) / (up[-1] - up[0]) * plot_height

    def body() -> Iterator[str]:
        for power in up:
            at = y(10**power)
            yield f'<line class="grid" x1="{LEFT}" x2="{LEFT + plot_width}" y1="{at:.0f}" y2="{at:.0f}"/>'
            yield f'<text x="{LEFT - 8}" y="{at + 4:.0f}" text-anchor="end">{_power(power)}</text>'
        for size in sizes:
            yield f'<text x="{x(size):.0f}" y="{TOP + plot_height + 18}" text-anchor="middle">{size:,}</text>'
        middle = LEFT + plot_width / 2
        yield f'<text x="{middle:.0f}" y="{TOP + plot_height + 38}" text-anchor="middle">{escape(x_label)}</text>'
        for row, (peer, points) in enumerate(series.items()):
            path = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)
            colour = COLOURS[peer]
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'
            for size, value in points:
                yield f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>'
            at = TOP + 8 + row * 20
            yield f'<rect x="{LEFT + plot_width + 18}" y="{at - 9}" width="10" height="10" fill="{colour}"/>'
            yield f'<text x="{LEFT + plot_width + 34}" y="{at}">{escape(PEERS[peer].name)}</text>'

    return _svg(height, title, body())


def bars(title: str, samples: Samples, figures: dict[str, str], unit: str) -> str | None:
    """Draw several figures of one unit, with a bar for each peer."""
    groups = {
        what: [(peer, value) for peer in PEERS if (value := samples.median(peer, key))] for key, what in figures.items()
    }
    groups = {what: found for what, found in groups.items() if found}
    if not groups:
        return None
    values = [value for found in groups.values() for _, value in found]
    powers = _decades(min(values) / 2, max(values))
    start, end = 170, WIDTH - 110
    height = TOP + sum(24 + 18 * len(found) for found in groups.values()) + 10

    def x(value: float) -> float:
        return start + (math.log10(value) - powers[0]) / (powers[-1] - powers[0]) * (end - start)

    def body() -> Iterator[str]:
        at = TOP
        for what, found in groups.items():
            at += 16
            yield f'<text x="{start}" y="{at}">{escape(what)}</text>'
            at += 6
            for peer, value in found:
                yield f'<text x="{start - 8}" y="{at + 12}" text-anchor="end">{escape(PEERS[peer].name)}</text>'
                width = max(1.0, x(value) - start)
                colour = COLOURS[peer]
                yield f'<rect x="{start}" y="{at + 2}" width="{width:.1f}" height="13" fill="{colour}"/>'
                yield f'<text x="{start + width + 6:.1f}" y="{at + 12}">{written(value, unit)}</text>'
                at += 18
            at += 2

    return _svg(height, title, body())


def drawn(samples: Samples) -> dict[str, tuple[str, str | None]]:
    """Return the title and the picture of each file; the picture is None if nothing was measured."""
    herd = max(samples.sizes("herd-100") or [0], key=lambda size: -abs(size - 1000))
    memory = max(samples.sizes("memory") or [0], key=lambda size: -abs(size - 1000))
    titles = {
        "delivery": "CPU of the server for one delivery, µs",
        "last": "One change until the last stream is notified, ms",
        "lists": "tools/list, responses per second (logarithmic)",
        "herd": f"One change until {herd:,} clients have the new list, ms (logarithmic)",
        "memory": f"Memory of one of {memory:,} open streams, kB (logarithmic)",
    }
    tools = {f"lists/{size}": f"{size:,} tools" for size in samples.sizes("lists")}
    herds = {f"herd-{number}/{herd}": f"{number} tools" for number in (10, 100)}
    kept = {f"memory/{memory}": "listen streams", f"legacy-memory/{memory}": "legacy sessions"}
    pictures = {
        "delivery": lines(titles["delivery"], samples, "delivery", "open streams"),
        "last": lines(titles["last"], samples, "last", "open streams"),
        "lists": bars(titles["lists"], samples, tools, ""),
        "herd": bars(titles["herd"], samples, herds, "ms"),
        "memory": bars(titles["memory"], samples, kept, "kB"),
    }
    return {name: (titles[name], picture) for name, picture in pictures.items()}


def write_page(samples: Samples, failures: list[str], about: dict[str, Any]) -> None:
    """Write tables and plots between the markers of the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE.name} has no markers: {BEGIN} and {END}")
    FOLDER.mkdir(exist_ok=True)
    parts = [f"Measured on {report.head(about)}."]
    for name, (title, picture) in drawn(samples).items():
        if picture is not None:
            (FOLDER / f"{name}.svg").write_text(picture)
            parts.append(f"![{title}]({FOLDER.name}/{name}.svg)")
    parts += [f"#### {title}\n\n{table}" for title, table in report.tables(samples)]
    parts.append(f"#### Targets\n\n{report.targets(samples)}")
    if failures:
        parts.append(f"Not measured:\n\n{report.failures(failures)}")
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}")
