"""Optimizer groups by the plain model's dimensions, and learning rates over steps."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

from distbench.config import SGD, AdamW, Schedule
from distbench.optim import build_optimizer, build_schedule
from tests.configs import small
from tests.distributed import run_distributed
from tests.steps import Steps, train_each


def rates(config: AdamW | SGD, steps: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer(config, [("p", parameter)], {"p": 1})
    schedule = build_schedule(config, optimizer, steps)
    used = []
    for _ in range(steps + 1):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def test_schedules() -> None:
    assert rates(SGD(lr=2.0), 4) == [2.0] * 5
    assert rates(SGD(lr=2.0, warmup_steps=4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    linear = rates(SGD(lr=1.0, schedule=Schedule.linear, warmup_steps=2, min_lr_ratio=0.5), 6)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5])
    cosine = rates(AdamW(lr=1.0, schedule=Schedule.cosine, min_lr_ratio=0.1), 4)
    assert cosine == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * s / 4)) / 2 for s in range(5)])


@pytest.mark.parametrize("decay_1d", [True, False])
def test_decay_groups(decay_1d: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    model[0].bias.requires_grad_(False)
    dims = {name: p.dim() for name, p in model.named_parameters()}
    optimizer = build_optimizer(AdamW(weight_decay=0.3, decay_1d=decay_1d), model.named_parameters(), dims)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert id(model[0].bias) not in decay, "frozen"
    assert decay[id(model[0].weight)] == 0.3
    assert decay[id(model[1].weight)] == decay[id(model[1].bias)] == (0.3 if decay_1d else 0.0)


def test_the_options_reach_torch() -> None:
    parameters = [("p", nn.Parameter(torch.zeros(2)))]
    adamw = build_optimizer(AdamW(lr=0.5, betas=[0.1, 0.2], eps=0.3, weight_decay=0.4), parameters, {"p": 1}).defaults
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (0.5, (0.1, 0.2), 0.3, 0.4)
    config = SGD(lr=0.5, momentum=0.6, nesterov=True, weight_decay=0.4)
    sgd = build_optimizer(config, parameters, {"p": 1}).defaults
    assert (sgd["lr"], sgd["momentum"], sgd["nesterov"], sgd["weight_decay"]) == (0.5, 0.6, True, 0.4)


# --------------------------------------------------------------------------------------------------------------
# Under wrappers that flatten or shard
# --------------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw, norms and biases not decayed": AdamW(lr=0.05, weight_decay=0.5, decay_1d=False),
    "adamw": AdamW(lr=0.05, weight_decay=0.5),
    "sgd with momentum": SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@cache
def trained() -> dict[str, Steps]:
    configs = {
        f"{strategy} {name}": small(strategy, optimizer=optimizer, clip_norm=0.05, steps=3)
        for strategy in ("ddp", "fsdp", "fsdp2")
        for name, optimizer in OPTIMIZERS.items()
    }
    return run_distributed(train_each, 2, configs, 3)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_sharding_does_not_change_the_optimizer(strategy: str, name: str) -> None:
    """Three clipped steps of an elementwise optimizer, from gradients that are the same to the bit. The norm that clips
    is summed over shards in another order, so a coefficient may differ in its last fp64 bit, a gradient by one ulp."""
    expected, got = trained()[f"ddp {name}"].weights, trained()[f"{strategy} {name}"].weights
    for key, tensor in expected.items():
        assert (got[key] - tensor).abs().max() <= 3 * 0.05 * 2.0**-20, key


def test_decaying_norms_and_biases_is_a_difference_that_shows() -> None:
    some, none = (trained()[f"ddp {name}"].weights for name in list(OPTIMIZERS)[1::-1])
    assert (some["layers.0.norm.weight"] - none["layers.0.norm.weight"]).abs().max() > 1e-3
