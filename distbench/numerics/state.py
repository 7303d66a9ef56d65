"""Putting a wrapped trainer into a state: the baseline's, for a forced step, or its own of a moment ago."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distbench.checkpoint.attributes import Kept, attributes_of
from distbench.numerics.baseline import Baseline
from distbench.numerics.buffers import set_buffers, stored_buffers
from distbench.trainer import Trainer


@dataclass
class Snapshot:
    step: int
    parameters: list[Tensor]
    buffers: dict[str, Tensor]
    attributes: Kept
    optimizer: list[dict[str, Any]]
    schedule: dict[str, Any]
    learning_rates: list[float]
    scale: float
    good_steps: int


def snapshot(trainer: Trainer) -> Snapshot:
    """Copies of everything a step changes on this rank."""
    local = trainer.strategy.local
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    return Snapshot(
        step=trainer.step,
        parameters=[local(p.detach()).clone() for p in trainer.module.parameters()],
        buffers={name: buffer.detach().clone() for name, buffer in trainer.module.named_buffers()},
        attributes=attributes_of(trainer).collect().copy(),
        optimizer=[
            {
                key: local(value).clone() if isinstance(value, Tensor) else copy.copy(value)
                for key, value in trainer.optimizer.state.get(p, {}).items()
            }
            for p in held
        ],
        schedule=copy.deepcopy(trainer.schedule.state_dict()),
        learning_rates=[group["lr"] for group in trainer.optimizer.param_groups],
        scale=trainer.scaler.scale,
        good_steps=trainer.scaler.good_steps,
    )


@torch.no_grad()
def restore(trainer: Trainer, saved: Snapshot) -> None:
    """Back to a snapshot of the same trainer."""
    local = trainer.strategy.local
    trainer.step = saved.step
    for parameter, value in zip(trainer.module.parameters(), saved.parameters, strict=True):
        local(parameter.detach()).copy_(value)
    set_buffers(trainer.module, saved.buffers)
    attributes_of(trainer).put(saved.attributes)
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for parameter, values in zip(held, saved.optimizer, strict=True):
        if not values:
            trainer.optimizer.state.pop(parameter, None)
            continue
        state = trainer.optimizer.state[parameter]
        for key, value in values.items():
            if isinstance(value, Tensor):
                local(state[key]).copy_(value)
            else:
                state[key] = value
    trainer.schedule.load_state_dict(copy.deepcopy(saved.schedule))
    for group, lr in zip(trainer.optimizer.param_groups, saved.learning_rates, strict=True):
        group["lr"] = lr
    trainer.scaler.scale, trainer.scaler.good_steps = saved.scale, saved.good_steps
    trainer.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def load_state(trainer: Trainer, baseline: Baseline, step: int) -> None:
    """The baseline's state after `step` steps (0: initial): weights, moments, this rank's buffers, schedule, scaler.

    Each rank copies its own slices; the files are memory-mapped.
    """
    local = trainer.strategy.local
    trainer.optimizer.zero_grad(set_to_none=True)
    with baseline.tensors(step) as file:
        keys = set(file.keys())
        for slot in trainer.strategy.slots(trainer.module):
            slot.write(local(slot.parameter.detach()), slot.slice_of(file.get_tensor(f"P/{slot.name}")))
            for key, value in trainer.optimizer.state.get(slot.parameter, {}).items():
                if not isinstance(value, Tensor) or f"O/{key}/{slot.name}" not in keys:
                    continue
                stored = file.get_tensor(f"O/{key}/{slot.name}")
                here = local(value)
                if here.dim() == 0:
                    here.copy_(stored)
                else:
                    slot.write(here, slot.slice_of(stored))
        set_buffers(trainer.module, stored_buffers(file, trainer.world.rank), trainer.strategy.canonical_name)
    if step == 0:
        trainer.optimizer.state.clear()
    done = [baseline.step(number) for number in range(1, step + 1)]
    trainer.step = step
    set_schedule(trainer, sum(not facts["skipped"] for facts in done))
    trainer.scaler.scale = done[-1]["next_scale"] if done else trainer.scaler.config.init_scale
    if not trainer.scaler.enabled:
        trainer.scaler.scale = 1.0
    trainer.scaler.good_steps = done[-1]["good_steps"] if done else 0


def set_schedule(trainer: Trainer, updates: int) -> None:
    """Learning rates as they are after so many steps of the optimizer."""
    lrs = trainer.schedule.base_lrs
    trainer.schedule.last_epoch = updates
    for group, base, rule in zip(trainer.optimizer.param_groups, lrs, trainer.schedule.lr_lambdas, strict=True):
        group["lr"] = base * rule(updates)
    trainer.schedule._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]
