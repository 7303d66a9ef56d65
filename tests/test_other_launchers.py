"""Sweepers and launchers of Hydra's other plugins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distbench.runs.folder import read_record
from tests.cli import start

OK, GATE = 0, 3
SMALL = ["model.hidden_dim=6", "model.num_layers=2", "model.seq_len=3", "gate.fp64_reference=false"]


def test_optuna_is_told_the_worst_of_what_fails_its_gate(tmp_path: Path) -> None:
    """Two trials of a grid: the one that never synchronises is faster, and is not the best."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper not installed")
    words = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    window = ["window=quick", "steps=14", "sweep.objective=exposed_comm"]
    ended = start(
        "-m", *words, *SMALL, *window, "strategy=ddp", "fault=choice(none,never_synced)", cwd=tmp_path
    ).finish()
    assert ended.code == GATE, ended.said
    records = {run.name: read_record(run) for run in ended.runs}
    assert sorted(name.partition("_")[2] for name in records) == ["fault=never_synced", "fault=none"]
    assert {record["status"] for record in records.values()} == {"passed", "gate_failed"}
    best = yaml.safe_load((ended.runs[0].parent / "optimization_results.yaml").read_text())
    passed = next(record for record in records.values() if record["status"] == "passed")
    assert best["best_params"] == {"fault": "none"}
    assert best["best_value"] == passed["window"]["exposed_comm"]["median"]
    assert (ended.runs[0].parent / "decision.json").exists()


def test_joblib_runs_cells_in_processes_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher not installed")
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "window=off", "steps=3", "strategy=ddp,fsdp2"]
    ended = start("-m", *words, *SMALL, "fault=never_synced,none", cwd=tmp_path).finish()
    assert ended.code == GATE, ended.said
    statuses = {run.name.partition("_")[2]: read_record(run)["status"] for run in ended.runs}
    expected = {"never_synced": "gate_failed", "none": "passed"}
    assert statuses == {f"fault={f},strategy={s}": expected[f] for f in expected for s in ("ddp", "fsdp2")}
    assert "2 of 4 runs passed" in ended.out
