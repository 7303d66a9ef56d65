"""The catalogue of faults: complete, documented, and caught."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from distbench.build import build_fault
from distbench.composing import compose
from distbench.config import Fault as FaultConfig
from distbench.faults.catalogue import ALL, CatalogueFault, catalogue
from distbench.faults.hooks import on_local_gradient
from distbench.faults.trial import overrides_of, run_trial
from distbench.hydra_edge import conf_dir

FAULTS = catalogue()

KNOWN = {
    "mean_of_means",
    "missing_world_scale",
    "sum_not_mean",
    "accumulation_divisor",
    "last_microbatch_only",
    "wrapper_bypassed",
    "no_sync_forward",
    "one_param_unsynced",
    "clip_before_reduce",
    "clip_local_shard",
    "clip_over_replicas",
    "low_precision_reduce",
    "inf_verdict_local",
    "stale_optimizer",
    "untied_weights",
    "decay_groups_lost",
    "scheduler_times_world",
    "seed_per_rank_init",
    "buffer_differs",
    "everyone_reads_shard_0",
    "duplicate_padding",
    "epoch_not_set",
    "same_dropout_mask",
    "resume_without_rng",
    "resume_without_moments",
    "shards_swapped",
    "one_element_flipped",
}
"""Bugs with a thread where each happened, which the catalogue must hold whatever else is in it."""

CLASSES = {
    "scale",
    "missing_sync",
    "reduction",
    "data",
    "before_communication",
    "wrapping",
    "clipping",
    "optimizer",
    "later_steps",
    "unknown",
}


def test_the_catalogue_holds_every_known_bug() -> None:
    assert set(FAULTS) >= KNOWN


def test_every_yaml_but_none_is_a_fault_of_the_catalogue() -> None:
    assert {file.stem for file in (conf_dir() / "fault").glob("*.yaml")} == {*FAULTS, "none"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_documented(name: str) -> None:
    fault = FAULTS[name]
    text = fault.__doc__ or ""
    assert fault.title().endswith(".") and len(fault.title()) > 20
    assert text.count("\n") > 1, "one line says what is wrong, the rest how it comes about and where"
    assert fault.__module__.startswith("distbench.faults.")
    assert fault.seen_in is None or re.fullmatch(r"[\w-]+/[\w-]+#\d+", fault.seen_in)
    assert set(fault.strategies) <= set(ALL) and fault.strategies
    assert (fault.why_not is not None) == (fault.strategies != ALL), "why the others cannot have it"
    assert fault.checks
    assert set(fault.diagnosis) <= CLASSES and fault.diagnosis


@pytest.mark.parametrize("name", FAULTS)
def test_a_yaml_names_its_fault_and_only_arguments_that_it_takes(name: str) -> None:
    tree = yaml.safe_load((conf_dir() / "fault" / f"{name}.yaml").read_text())
    assert tree["name"] == name
    built = build_fault(FaultConfig(_target_=tree["_target_"], name=name, kwargs=tree["kwargs"]))
    assert type(built) is FAULTS[name]


def test_a_seeded_sample_of_settings_composes() -> None:
    rng = random.Random(5)
    for name in rng.sample(sorted(FAULTS), 12):
        fault = FAULTS[name]
        strategy, precision, ranks = (
            rng.choice(fault.strategies),
            rng.choice(fault.precisions),
            rng.choice(fault.ranks),
        )
        own = [f"fault={name}", f"strategy={strategy}", f"precision={precision}", f"launch.nproc={ranks}"]
        config = compose(overrides_of([*own, *fault.overrides_for(strategy, precision, ranks)]))
        assert config.fault.name == name
        assert (config.strategy.name, config.precision.name, config.launch.nproc) == (strategy, precision, ranks)


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [("one_param_unsynced", "ddp", 2), ("shards_swapped", "fsdp2", 4), ("norm_on_one_rank", "fsdp", 2)],
)
def test_a_fault_is_caught_where_it_is(name: str, strategy: str, ranks: int, tmp_path: Path) -> None:
    fault = FAULTS[name]
    own = [f"fault={name}", f"strategy={strategy}", f"launch.nproc={ranks}"]
    trial = run_trial([*own, *fault.overrides_for(strategy, "fp32", ranks)], tmp_path, "run")
    assert trial.status == "gate_failed", trial.reason
    failure = trial.first_failure
    assert failure is not None and failure["name"] in fault.checks
    if fault.location:
        assert failure["parameter"] in fault.location or trial.gate["location"]["parameters"][0] in fault.location


def test_a_catalogue_fault_without_changes_is_no_fault(tmp_path: Path) -> None:
    trial = run_trial(["fault._target_=distbench.faults.base.Fault", "strategy=ddp", "launch.nproc=2"], tmp_path, "run")
    assert trial.status == "passed"


def test_a_local_gradient_hook_sees_each_micro_batch_once() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    seen: list[torch.Tensor] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    on_local_gradient(model, "0.weight", change)
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
    assert len(seen) == 3
    weight = model.get_parameter("0.weight")
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * sum(seen, torch.zeros(2, 3)))


def test_titles_are_one_line_of_the_docstring() -> None:
    class Example(CatalogueFault):
        """What is wrong.

        How.
        """

    assert Example.title() == "What is wrong."
