"""The benchmarks run and report what they measure. No test here checks how fast anything is."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.measuring import machine
from bench.peers import plots, work
from bench.peers.figures import TARGETS, Samples, Verdict
from bench.peers.plots import bars, lines
from bench.peers.programs import PEERS, compile_c, compiler
from bench.peers.report import targets
from bench.peers.work import SITTINGS, Scale, sit

BENCH = Path(__file__).resolve().parent.parent / "bench" / "core.py"

REQUIRED = {
    "add": "≤ 1.5",
    "updated-uris": "≤ 1.5",
    "updated-patterns": "≤ 3",
    "subscribe": "≤ 1.5",
    "memory": "≤ 1,000",
    "memory-callback": "≤ 1,000",
    "mailbox": "≤ 1.1",
    "fan-out-frames": "≥ 500,000",
    "fan-out-plain": "≥ 500,000",
    "removal-closed": "≤ 41",
}
"""The required figures and their targets."""


@pytest.mark.slow
def test_json_has_every_figure_with_its_target_and_spread() -> None:
    command = [sys.executable, str(BENCH), "--quick", "--json"]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    rows = {row["key"]: row for row in measured["rows"]}
    assert len(rows) == len(measured["rows"])
    assert {key: rows[key]["target"] for key in REQUIRED} == REQUIRED
    for row in rows.values():
        assert math.isfinite(row["value"]), row
        assert 0 < row["low"] <= row["high"], row
        assert (row["met"] is not None) == bool(row["target"]), row
    assert measured["quick"] is True
    assert isinstance(measured["pgo"], bool)


# Peers

ROOT = BENCH.parent.parent
needs_compiler = pytest.mark.skipif(compiler() is None, reason="the load client is in C: needs a compiler")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the bench reads other processes as Linux shows them")


def peers(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.peers", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, check=False, capture_output=True, encoding="utf-8", timeout=250
    )


@pytest.mark.slow
@needs_linux
@needs_compiler
def test_peers_and_the_load_client_are_measured() -> None:
    done = peers("--quick", "--json", "--only", "fanout,lists,floor,raw,bare,starlette,asgi,sdk", "--streams", "1,100")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert set(found["samples"]) == {"floor", "raw", "bare", "starlette", "asgi", "sdk"}
    for peer, samples in found["samples"].items():
        streams = ("last/1", "last/100", "delivery/100", "memory/100", "opens/100", "client/100", "client-busy/100")
        for name in (
            *(streams if peer not in ("bare", "starlette") else ()),
            "lists/10",
            "list/10",
            "list-client-busy/10",
        ):
            assert len(samples[name]) == 1, name
            assert samples[name][0] > 0, name
    verdicts = {target["requirement"]: target["verdict"] for target in found["targets"]}
    assert verdicts["S30"]["value"] > 1
    near_bare = next(target for target in found["targets"] if target["requirement"] == "S51")
    assert near_bare["verdict"]["value"] > 0
    assert verdicts["S55"] is None


@pytest.mark.slow
@needs_linux
@needs_compiler
def test_a_server_that_does_not_start_is_reported_and_the_others_are_measured(tmp_path: Path) -> None:
    (tmp_path / "fastmcp.py").touch()

    done = peers("--quick", "--only", "lists,fastmcp,sdk", PYTHONPATH=str(tmp_path))

    assert done.returncode == 1
    assert "lists with 10 tools: FastMCP ended with 1 (ImportError: cannot import name 'Context'" in done.stdout
    assert re.search(r"^\| tools/list, 10 tools +\| [\d.,]+ /s +\|$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@needs_linux
@needs_compiler
def test_the_parts_of_every_sitting_can_share_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above all the process of the load client: a part must not disturb the next one. There are more clients here than
    connections on which they may refetch."""
    monkeypatch.setattr(work, "ASKERS", 3)
    compile_c("load", tmp_path)
    scale = Scale(streams=(1, 10), legacy=(10,), herds=(10,), others=100, busy=0.01, listing=0.1)
    for sitting in SITTINGS:
        notes: dict[str, float] = {}
        sit(replace(sitting, tools=min(sitting.tools, 20)), list(sitting.parts), PEERS["asgi"], scale, tmp_path, notes)
        assert len(notes) >= len(sitting.parts)


def samples_of_two_rounds() -> Samples:
    samples = Samples()
    for slow in (80.0, 120.0):
        samples.add("sdk", {"delivery/1000": slow, "delivery/5000": 3 * slow, "lists/10": 1000, "others": 2})
        samples.add("asgi", {"delivery/1000": 10, "delivery/5000": 10, "lists/10": 20_000, "others": 1.1})
    return samples


def test_a_target_compares_medians_and_shows_the_rounds() -> None:
    target = next(target for target in TARGETS if target.requirement == "S24")
    verdict = target.verdict(samples_of_two_rounds())

    assert verdict == Verdict(value=10, low=8, high=12, is_met=True)
    assert "10.0×" in targets(samples_of_two_rounds())
    assert target.verdict(Samples()) is None


def test_plots_are_valid_and_name_every_measured_peer() -> None:
    samples = samples_of_two_rounds()
    for picture in (lines("t", samples, "delivery", "streams"), bars("t", samples, {"lists/10": "10 tools"}, "/s")):
        assert picture is not None
        root = ElementTree.fromstring(picture)
        assert {"Python SDK", "Tidings, plain ASGI"} <= {text.text for text in root.iter() if text.text}
    assert lines("t", Samples(), "delivery", "streams") is None


def test_tables_are_written_between_the_markers_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{plots.BEGIN}\nold\n{plots.END}\nafter\n")
    monkeypatch.setattr(plots, "PAGE", page)
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    about = {**machine(), "date": "today", "cpu": "one", "rounds": 2, "seconds": 3, "versions": "mcp 2"}

    plots.write_page(samples_of_two_rounds(), ["a peer was left out"], about)

    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "a peer was left out" in text
    for picture in re.findall(r"\]\(plots/(.*)\)", text):
        assert (tmp_path / "plots" / picture).exists()
    plots.write_page(samples_of_two_rounds(), [], about)
    assert page.read_text().count(plots.BEGIN) == 1


RATES = [f"{kind}-{size}" for kind in ("deliveries", "calls", "forwarded") for size in (1, 2, 4)]
BENCHES: dict[str, dict[str, str]] = {
    "telemetry": {"delivery": "", "control": "", "counted": "≤ 1.02", "exported": "≤ 1.15", "collection": ""},
    "cluster": {
        **dict.fromkeys(RATES, ""),
        **dict.fromkeys(("last-one", "last-four", "cpu-one", "cpu-four", "cpu", "ready-cpu", "ready-process"), ""),
        "last": "≤ 2",
        "ready": "≤ 2,000",
    },
    "console": {
        **dict.fromkeys(("change-100", "control-100", "change-1000", "control-1000"), ""),
        **dict.fromkeys(("recorded-100", "recorded-1000"), "≤ 1.02"),
        **dict.fromkeys(("open-100", "open-1000"), "≤ 1.05"),
    },
}
"""The target of each figure."""


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES)
def test_bench_has_its_figures_and_targets(bench: str) -> None:
    command = [sys.executable, str(BENCH.with_name(f"{bench}.py")), "--quick", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    rows = {row["key"]: row for row in json.loads(printed)["rows"]}

    assert {key: row["target"] for key, row in rows.items() if bench != "console" or "100" in key} == BENCHES[bench]
    assert all(math.isfinite(row["value"]) and row["value"] > 0 for row in rows.values())
