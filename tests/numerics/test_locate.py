"""Where a fault is: module, direction, ranks and samples, and whether it is compute or communication."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distbench.config import AdamW, Config, Gate, NoWrap
from distbench.numerics import locate
from distbench.numerics.diagnose import Diagnosis
from distbench.numerics.gate import Verdict
from distbench.numerics.locate import Location
from distbench.preflight import preset
from tests.configs import custom
from tests.distributed import run_distributed
from tests.gates import explained, explained_each, in_world, make_baseline
from tests.numerics import spoilers
from tests.steps import ONE_PROCESS

STRATEGIES = ["ddp", "fsdp", "fsdp2"]


def config_of(strategy: str, ranks: int, model: str = "Plain", **changes: Any) -> Config:
    config = custom(
        model,
        strategy,
        optimizer=AdamW(lr=1e-2),
        gate=Gate(steps=2, fp64_reference=False),
        steps=2,
        accumulation=2,
        **changes,
    )
    return in_world(config, ranks)


def alone(spoil: Any, root: Path, **changes: Any) -> tuple[Verdict, Location, Diagnosis]:
    config = config_of("single", 1, **changes)
    return explained(ONE_PROCESS, config, make_baseline(config, root), spoil)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_module_that_computes_something_else(precision: str, tmp_path: Path) -> None:
    _, location, diagnosis = alone(spoilers.block_1_forward, tmp_path, precision=preset(precision))
    assert (location.phase, location.module, location.direction) == ("forward", "blocks.1.linear", "forward")
    assert location.module_class == "Linear" and location.micro_batch == 0 and location.step == 1
    assert location.samples == list(range(6)), "the first micro-batch's"
    assert location.confirmed is True and location.local_gradients_agree is False
    assert "equal inputs, other output" in location.evidence[0]
    assert diagnosis.kind == "before_communication" and "blocks.1.linear" in diagnosis.text


def test_a_later_step(tmp_path: Path) -> None:
    _, location, diagnosis = alone(spoilers.block_1_forward_later, tmp_path)
    assert (location.step, location.module) == (2, "blocks.1.linear") and diagnosis.kind == "later_steps"
    assert location.samples == list(range(12, 18))


def test_a_wrong_backward(tmp_path: Path) -> None:
    _, location, _ = alone(spoilers.block_1_backward, tmp_path)
    assert location.phase == "backward" and location.direction == "backward"
    assert location.module is not None and location.module.startswith("blocks.1")


def test_a_wrong_local_gradient(tmp_path: Path) -> None:
    _, location, diagnosis = alone(spoilers.head_local_gradient, tmp_path)
    assert (location.phase, location.parameters) == ("local_gradients", ["head.weight"])
    assert diagnosis.kind in ("scale", "wrapping")


def test_the_loss(tmp_path: Path) -> None:
    _, location, _ = alone(spoilers.other_loss, tmp_path)
    assert location.phase == "loss" and location.module is None
    _, location, diagnosis = alone(spoilers.loss_weighted, tmp_path)
    assert location.phase == "loss" and "enters backward" in location.evidence[0]
    assert diagnosis.kind == "scale" and "1.5" in diagnosis.text


def test_after_the_gradients_the_check_is_the_place(tmp_path: Path) -> None:
    _, location, diagnosis = alone(spoilers.not_stepped, tmp_path)
    assert location.phase == "update" and location.confirmed is None and diagnosis.kind == "optimizer"
    _, location, diagnosis = alone(spoilers.other_samples, tmp_path)
    assert location.phase == "samples" and diagnosis.kind == "data"


# --------------------------------------------------------------------------------------------------------------
# Several ranks
# --------------------------------------------------------------------------------------------------------------

FAULTS = {
    "forward": spoilers.block_1_forward,
    "forward on rank 1": spoilers.block_1_forward_on_rank_1,
    "averaged twice": spoilers.averaged_twice,
    "summed": spoilers.summed,
    "scaled": spoilers.scaled,
    "samples": spoilers.other_samples,
}


@cache
def found() -> list[dict[str, tuple[Verdict, Location, Diagnosis]]]:
    folder = tempfile.mkdtemp(prefix="distbench-baselines-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root = Path(folder)
    cases: dict[str, Any] = {}
    for strategy in STRATEGIES:
        config = config_of(strategy, 2)
        for name, spoil in FAULTS.items():
            cases[f"{name}, {strategy}"] = (config, make_baseline(config, root), spoil)
    config = config_of("fsdp", 2, model="Unused", wrap=NoWrap())
    cases["scaled, unused beside used"] = (config, make_baseline(config, root), spoilers.scaled)
    return run_distributed(explained_each, 2, cases)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_on_every_rank(strategy: str) -> None:
    _, location, _ = found()[0][f"forward, {strategy}"]
    assert (location.phase, location.module, location.ranks) == ("forward", "blocks.1.linear", [0, 1])
    assert location.confirmed and location.local_gradients_agree is False


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compute_on_one_rank(strategy: str) -> None:
    """Named, with the samples that it held; every rank says the same."""
    for rank in (0, 1):
        _, location, _ = found()[rank][f"forward on rank 1, {strategy}"]
        assert (location.module, location.ranks, location.samples) == ("blocks.1.linear", [1], [6, 7, 8])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("fault", "text"), [("averaged twice", "averaged twice (world size 2)"), ("summed", "summed, not averaged")]
)
def test_communication(strategy: str, fault: str, text: str) -> None:
    _, location, diagnosis = found()[0][f"{fault}, {strategy}"]
    assert location.phase == "reduction" and location.local_gradients_agree is True and location.confirmed
    assert diagnosis.kind == "scale" and text in diagnosis.text and "local gradients equal" in diagnosis.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_parameters_that_differ_come_first(strategy: str) -> None:
    verdict, location, diagnosis = found()[0][f"scaled, {strategy}"]
    worst = verdict.worst_gradient()
    assert worst is not None and location.parameters[0] == worst.name
    assert diagnosis.kind == "scale" and "scaled by 1.000" in diagnosis.text


def test_zeros_of_an_unused_parameter_are_no_difference() -> None:
    """FSDP's flat gradient holds them."""
    _, location, _ = found()[0]["scaled, unused beside used"]
    assert location.local_gradients_agree is True and location.phase == "reduction"


def test_equal_gradients() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert locate._equal(None, None) and locate._equal(zeros, None) and locate._equal(None, zeros)
    assert not locate._equal(ones, None) and not locate._equal(None, ones) and not locate._equal(ones, zeros)
    assert not locate._equal(torch.zeros(1, 2), zeros) and not locate._equal(zeros, -zeros)
    nan = torch.full((2,), torch.nan)
    assert locate._equal(nan, nan.clone()) and not locate._equal(nan, None)
