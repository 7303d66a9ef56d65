"""What grows with the number of ranks, and what does not: 32 ranks, who share this machine's cores."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from distbench.runs.folder import read_record
from tests.cli import distbench

RANKS = (4, 32)
WORDS = [
    *("strategy=fsdp2", "global_batch=32", "model.hidden_dim=8", "model.num_layers=2", "model.seq_len=3"),
    *("steps=13", "window=quick", "gate.steps=1", "gate.fp64_reference=false", "checkpoint.every=13"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("scale")
    for ranks in RANKS:
        ended = distbench(*WORDS, f"launch.nproc={ranks}", f"hydra.run.dir=ranks{ranks}", cwd=root)
        assert ended.code == 0, ended.said
    return {ranks: root / f"ranks{ranks}" for ranks in RANKS}


def files(run: Path) -> Counter[str]:
    """Names without their numbers -> how many."""
    return Counter(re.sub(r"\d+", "N", str(file.relative_to(run))) for file in run.rglob("*") if file.is_file())


def test_a_rank_adds_its_log_and_its_shard_of_each_checkpoint_and_no_other_file(runs: dict[int, Path]) -> None:
    few, many = (files(runs[ranks]) for ranks in RANKS)
    grown = {name: (few[name], many[name]) for name in few | many if few[name] != many[name]}
    assert grown == {"logs/rankN.log": RANKS, "checkpoints/step_N/rank_N.safetensors": RANKS}


def test_the_record_grows_by_rows_and_what_the_gate_wrote_does_not(runs: dict[int, Path]) -> None:
    few, many = ((runs[ranks] / "record.json").stat().st_size for ranks in RANKS)
    assert (many - few) / (RANKS[1] - RANKS[0]) < 3072, "bytes a rank: docs/cluster.md"
    few, many = ((runs[ranks] / "gate.json").stat().st_size for ranks in RANKS)
    assert many < 1.2 * few
    few, many = (sum(f.stat().st_size for f in (runs[ranks] / "gradients").iterdir()) for ranks in RANKS)
    assert many < 1.05 * few
    few, many = ((runs[ranks] / "metrics.jsonl").stat().st_size for ranks in RANKS)
    assert many < 1.05 * few


def test_a_step_has_as_many_collectives_with_many_ranks_as_with_few(runs: dict[int, Path]) -> None:
    few, many = (
        [(row["backend_op"], row["dtype"], row["calls"]) for row in read_record(runs[ranks])["window"]["collectives"]]
        for ranks in RANKS
    )
    assert few == many != []


def test_runs_of_different_numbers_of_ranks_are_compared(runs: dict[int, Path], tmp_path: Path) -> None:
    ended = distbench("diff", *(str(runs[ranks]) for ranks in RANKS), cwd=tmp_path)
    assert ended.code == 1 and "of the size that another order of summation makes" in ended.out, ended.said
