"""Format the figures as Markdown tables, for the terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bench.peers.figures import GROUPS, TARGETS, Group, Samples, written
from bench.peers.programs import PEERS

__all__ = ["failures", "head", "tables", "targets"]


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def head(about: dict[str, Any]) -> str:
    built = "with PGO" if about["pgo"] else "without PGO"
    pinned = "server and client on a core each" if about["cores"] > 1 else "on one core: server and client share it"
    return (
        f"{about['date']}, {about['python']} ({built}), {about['system']}, {about['cpu']}, {about['cores']} cores; "
        f"{pinned}; {about['rounds']} rounds, {about['seconds']} s; {about['versions']}"
    )


def _group(group: Group, samples: Samples, peers: list[str]) -> Iterator[list[str]]:
    for figure in group.figures:
        for key, what in figure.rows(samples):
            medians = {peer: samples.median(peer, key) for peer in peers}
            if not any(medians.values()):
                continue  # not measured, or always zero
            yield [what, *(_cell(samples, peer, key, figure.unit) for peer in peers)]


def _cell(samples: Samples, peer: str, key: str, unit: str) -> str:
    median, spread = samples.median(peer, key), samples.spread(peer, key)
    if median is None or spread is None:
        return "–"
    around = f" ({written(spread[0])} … {written(spread[1])})" if spread[0] != spread[1] else ""
    return written(median, unit) + around


def tables(samples: Samples) -> Iterator[tuple[str, str]]:
    """Yield a title and a table for each group: medians, with minimum and maximum of the rounds."""
    for group in GROUPS:
        peers = [peer for peer in PEERS if peer in samples.values]
        rows = list(_group(group, samples, peers))
        used = [index for index in range(1, len(peers) + 1) if any(row[index] != "–" for row in rows)]
        if rows:
            header = ["", *(PEERS[peers[index - 1]].name for index in used)]
            yield group.title, _table(header, ([row[0], *(row[index] for index in used)] for row in rows))


def targets(samples: Samples) -> str:
    """Return a table of the targets: the value, the values of the rounds, the bound, and whether it is met."""
    rows = []
    for target in TARGETS:
        verdict = target.verdict(samples)
        if verdict is None:
            rows.append([target.requirement, target.what, "", "", target.bound, "not measured"])
            continue
        spread = f"{written(verdict.low)} … {written(verdict.high)}" if verdict.low != verdict.high else ""
        met = "met" if verdict.is_met else "MISSED"
        rows.append([target.requirement, target.what, written(verdict.value, target.unit), spread, target.bound, met])
    return _table(["", "target", "value", "rounds", "bound", ""], rows)


def failures(found: Iterable[str]) -> str:
    return "\n".join(f"* {each}" for each in found)
