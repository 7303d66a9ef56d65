"""Into the baseline's state and back, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distbench.build import build_trainer, set_determinism
from distbench.config import SGD, AdamW, Config, Gate, LossScaler, Schedule
from distbench.numerics.baseline import Baseline
from distbench.numerics.digests import tensor_digest
from distbench.numerics.state import load_state, restore, snapshot
from distbench.preflight import preset
from distbench.trainer import Trainer
from tests.configs import custom
from tests.gates import in_world, make_baseline
from tests.steps import ONE_PROCESS

ADAMW = AdamW(lr=1e-2, schedule=Schedule.cosine, warmup_steps=2)
SKIPPING = replace(preset("fp16"), scaler=LossScaler(enabled=True, init_scale=2.0**17, growth_interval=2))


def config_of(model: str = "Normed", **changes: Any) -> Config:
    settings: dict[str, Any] = {"optimizer": ADAMW, "steps": 12, "gate": Gate(steps=3, fp64_reference=False)}
    config = custom(model, "single", **{**settings, **changes})
    if model == "Odd":
        config.model._target_ = "tests.numerics.odd_models.Odd"
    return in_world(config, 1)


CONFIGS = {
    "adamw, buffers": config_of(),
    "momentum": config_of(optimizer=SGD(lr=1e-2, momentum=0.9, schedule=Schedule.linear)),
    "plain sgd": config_of(optimizer=SGD(lr=1e-2)),
    "fp16, steps skipped": config_of("Plain", precision=SKIPPING),
    "frozen": config_of("Frozen"),
    "unused": config_of("Unused"),
    "odd": config_of("Odd", optimizer=ADAMW),
    "many buffers": config_of("ManyBuffers", optimizer=ADAMW),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def built(config: Config) -> Trainer:
    set_determinism(config, 1)
    return build_trainer(config, ONE_PROCESS)[0]


def content(trainer: Trainer) -> dict[str, Any]:
    """All that a step changes, as digests and numbers."""
    tensors = {**dict(trainer.module.named_parameters()), **dict(trainer.module.named_buffers())}
    names = {id(p): name for name, p in trainer.module.named_parameters()}
    moments = {
        f"{names[id(p)]}/{key}": tensor_digest(value) if isinstance(value, torch.Tensor) else value
        for p, values in trainer.optimizer.state.items()
        for key, value in values.items()
    }
    return {
        **{name: tensor_digest(tensor) for name, tensor in tensors.items()},
        **moments,
        "lr": [group["lr"] for group in trainer.optimizer.param_groups],
        "last lr": trainer.schedule.get_last_lr(),
        "schedule": trainer.schedule.last_epoch,
        "scale": (trainer.scaler.scale, trainer.scaler.good_steps),
        "step": trainer.step,
    }


@every_config
@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_snapshot_is_restored_and_the_run_repeats_itself(name: str, before: int) -> None:
    trainer = built(CONFIGS[name])
    for _ in range(before):
        trainer.train_step()
    saved, then = snapshot(trainer), content(trainer)
    first = [trainer.train_step().loss for _ in range(3)]
    after = content(trainer)
    assert after != then
    restore(trainer, saved)
    assert content(trainer) == then
    assert [trainer.train_step().loss for _ in range(3)] == first and content(trainer) == after
    restore(trainer, saved)  # a snapshot serves more than once
    assert content(trainer) == then


@every_config
def test_the_baselines_state_is_loaded_from_wherever_the_run_is(name: str, tmp_path: Path) -> None:
    """Then the next step is the baseline's, bit for bit."""
    config = CONFIGS[name]
    baseline = Baseline(make_baseline(config, tmp_path))
    trainer, steps = built(config), baseline.num_steps
    expected = [content(trainer)]
    losses = []
    for _ in range(steps):
        losses.append(trainer.train_step().loss)
        expected.append(content(trainer))
    trainer.train_step()
    for step in [*range(1, steps), 0, steps - 1]:
        if step == 0 or any(not facts["skipped"] for facts in baseline.steps[:step]):
            load_state(trainer, baseline, step)
            assert content(trainer) == expected[step], step
            assert trainer.train_step().loss == losses[step] and content(trainer) == expected[step + 1]


def test_the_skipping_config_skips(tmp_path: Path) -> None:
    """And its scale grows, so that both are in the state."""
    baseline = Baseline(make_baseline(CONFIGS["fp16, steps skipped"], tmp_path))
    assert any(step["skipped"] for step in baseline.steps)
    assert len({step["next_scale"] for step in baseline.steps}) > 1


def test_a_parameter_of_another_memory_layout_is_loaded(tmp_path: Path) -> None:
    """`cut` gives a copy of it, and what is written there is lost."""
    config = CONFIGS["odd"]
    baseline = Baseline(make_baseline(config, tmp_path))
    trainer = built(config)
    parameter = trainer.module.get_parameter("transposed")
    assert not parameter.is_contiguous()
    expected = parameter.detach().clone()
    trainer.train_step()
    assert not torch.equal(parameter, expected)
    load_state(trainer, baseline, 0)
    assert torch.equal(parameter, expected)


def test_counters_that_a_module_keeps_are_restored() -> None:
    """They cannot be put into the baseline's state; but the run goes on as if the gate had not been there."""
    trainer = built(config_of("Hidden"))
    trainer.run(until=2)
    saved, first = snapshot(trainer), trainer.module.get_submodule("")
    losses = [trainer.train_step().loss for _ in range(2)]
    restore(trainer, saved)
    assert first.calls == 2
    assert [trainer.train_step().loss for _ in range(2)] == losses
