"""The window from the outside: in the record of a run started as a user starts it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli import SMALL, Finished, distbench, start

FIGURES = (
    "overhead",
    "step_time",
    "tokens_per_second",
    "data_wait",
    "core_wait",
    "comm_busy",
    "exposed_comm",
    "overlap",
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    words = [
        "-m",
        "strategy=single,ddp,fsdp2",
        "window=default,off",
        *SMALL,
        "gate=default",
        "steps=16",
        "window.trace=true",
    ]
    ended = start(*words, cwd=tmp_path_factory.mktemp("windows")).finish()
    assert ended.code == 0, ended.said
    return ended


def record(sweep: Finished, strategy: str, window: str) -> tuple[Path, dict[str, Any]]:
    for run in sweep.runs:
        found = json.loads((run / "record.json").read_text())
        if (found["config"]["strategy"]["name"], found["config"]["window"]["name"]) == (strategy, window):
            return run, found
    raise AssertionError(f"no run with {strategy} and window={window}")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_every_figure_is_measured_or_has_its_reason(sweep: Finished, strategy: str) -> None:
    _, found = record(sweep, strategy, "default")
    window = found["window"]
    assert found["window_reason"] is None and window["repeats"] == 1, "16 steps have room for one window"
    for name in FIGURES:
        figure = window[name]
        assert (figure["median"] is None) == (figure["reason"] is not None), name
        if figure["median"] is not None:
            assert figure["low"] <= figure["median"] <= figure["high"] and figure["meter"]
    for column, memory in window["memory"].items():
        assert (memory["bytes"] is None) == (memory["reason"] is not None), column
    assert window["memory"]["peak_allocated"]["bytes"] > 0
    assert len(window["ranks"]) == len(window["timeline"]) == found["batch"]["world_size"]
    if strategy == "single":
        assert window["comm_busy"]["reason"] == "one process: nothing is communicated"
    else:
        assert window["bytes"]["ledger"] == window["bytes"]["formula"] > 0
        assert window["bytes"]["warnings"] == []


def test_a_timeline_lies_within_its_step(sweep: Finished) -> None:
    _, found = record(sweep, "ddp", "default")
    for rank in found["window"]["timeline"]:
        assert {"data", "forward", "backward", "optimizer", "collective"} == {span["kind"] for span in rank}
        for span in rank:
            assert -0.001 < span["start"] < span["end"] < 60


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_the_kinds_of_memory_add_up_to_the_peak(sweep: Finished, strategy: str) -> None:
    """Also where the run has gathered the whole model for its checkpoint before."""
    window = record(sweep, strategy, "default")[1]["window"]
    peak = window["memory"]["peak_allocated"]["bytes"]
    unit = 4 * (9 * 6 * 6 + 8 * 6)  # what fully_shard gathers at once, and not in each step at the same moment
    slack = 1.1 * unit if strategy == "fsdp2" else 0.02 * peak
    kinds = {kind: size for kind, size in window["memory_by_kind"].items() if kind != "rank"}
    assert sum(kinds.values()) == pytest.approx(peak, abs=slack)


def test_traces_are_there_for_every_rank_and_window(sweep: Finished) -> None:
    run, _ = record(sweep, "fsdp2", "default")
    traces = sorted((run / "traces" / "window0").iterdir())
    assert [path.name for path in traces] == ["rank0.pt.trace.json", "rank1.pt.trace.json"]
    for rank, path in enumerate(traces):
        tree = json.loads(path.read_text())
        assert {"distbench.forward", "gloo:all_gather"} <= {event.get("name") for event in tree["traceEvents"]}
        assert tree["distributedInfo"] == {"backend": "gloo", "rank": rank, "world_size": 2}


def test_without_a_window_the_record_says_why(sweep: Finished, tmp_path: Path) -> None:
    _, found = record(sweep, "ddp", "off")
    assert found["window"] is None and found["window_reason"] == "window=off"
    short = distbench(*SMALL, "strategy=single", "steps=3", cwd=tmp_path)
    assert short.record["window"] is None and "too few for a window" in short.record["window_reason"]
    assert f"no window: {short.record['window_reason']}" in short.out


def test_steps_are_logged_once_each_with_a_window(sweep: Finished) -> None:
    for run in sweep.runs:
        lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert lines == list(range(1, 17))


def test_measuring_changes_no_number(sweep: Finished) -> None:
    """Loss for loss, a run with a window is the run without."""
    for strategy in ("single", "ddp", "fsdp2"):
        losses = [
            [json.loads(line)["loss"] for line in (record(sweep, strategy, name)[0] / "metrics.jsonl").open()]
            for name in ("default", "off")
        ]
        assert losses[0] == losses[1]


def test_the_kernel_counts_what_the_ledger_says(tmp_path: Path) -> None:
    """In a network namespace of its own, the loopback's counter has nothing but this run."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare and ip are needed for a network namespace")
    probe = subprocess.run(
        ["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
    )
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.strip()}")
    words = "-m strategy=ddp,fsdp,fsdp2 model.hidden_dim=96 steps=16"
    command = f"ip link set lo up && exec {sys.executable} -m distbench {words}"
    ended = subprocess.run(
        ["unshare", "-n", "sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = sorted(tmp_path.glob("outputs/*/*/record.json"))
    assert len(records) == 3
    for file in records:
        audit = json.loads(file.read_text())["window"]["bytes"]
        assert audit["ledger"] == audit["formula"] > 0
        assert 0 <= audit["interface_residual"] < 0.015, (file.parent.name, audit)
