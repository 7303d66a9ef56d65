"""Drawn configurations are legal, and repeatable."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from distbench.composing import compose
from distbench.config import world_size
from distbench.faults.clean import draw, grid
from distbench.faults.trial import overrides_of, run_trial


def test_an_index_draws_the_same_whatever_was_drawn_before() -> None:
    assert draw(0, 17) == draw(0, 17)
    assert draw(0, 17) != draw(1, 17)


def test_drawn_configurations_are_accepted() -> None:
    for index in range(20):
        compose(overrides_of(draw(7, index)))


def test_draws_cover_what_the_gate_must_pass() -> None:
    words = {word for index in range(300) for word in draw(0, index)}
    for strategy in ("single", "ddp", "fsdp", "fsdp2"):
        assert f"strategy={strategy}" in words
    for precision in ("fp32", "bf16", "fp16", "fp64", "bf16_autocast", "fp16_autocast"):
        assert f"precision={precision}" in words
    for ranks in (1, 2, 3, 4):
        assert f"launch.nproc={ranks}" in words
    for accumulation in (1, 2, 3, 4):
        assert f"accumulation={accumulation}" in words
    for mode in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        assert f"strategy.sharding_strategy={mode}" in words
    assert any(word.startswith("data.padding=0.") for word in words)
    assert any("tied: true" in word for word in words)
    assert any("unused: true" in word for word in words)
    assert any("frozen: true" in word for word in words)
    assert any("dropout: 0.2" in word for word in words)


def test_the_grid_has_each_combination_once() -> None:
    cells = grid(["ddp", "fsdp"], ["fp32"], ["2", "4"])
    assert len(cells) == 2 * 1 * 2 * 2
    assert len({tuple(cell) for cell in cells}) == len(cells)
    assert world_size(compose(overrides_of(cells[-1]))) == 4


@pytest.mark.parametrize("index", random.Random(0).sample(range(300), 4))
def test_a_sample_of_drawn_configurations_passes(index: int, tmp_path: Path) -> None:
    """`benchmarks/clean_matrix.py` runs all of them (docs/clean-matrix.md)."""
    trial = run_trial(draw(0, index), tmp_path, "run")
    assert trial.status == "passed", f"{trial.gate.get('text', trial.reason)}\n{trial.command}"
    ranks = int(next(o for o in trial.overrides if o.startswith("launch.nproc=")).partition("=")[2])
    assert trial.gate["tier"] == "bitwise" if ranks <= 2 else trial.gate["tier"] in ("bitwise", "bound")
