"""Optimizer and learning-rate schedule, built after wrapping, over the wrapped module's own parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from distbench.config import SGD, AdamW, Schedule


def build_optimizer(
    config: AdamW | SGD, parameters: Iterable[tuple[str, nn.Parameter]], dims: Mapping[str, int]
) -> torch.optim.Optimizer:
    """Over named parameters, wrapped or plain.

    `dims`: each one's number of dimensions in the *plain* model. Wrappers flatten parameters, and a decay rule that
    looks at the flattened ones decays norms and biases (mlfoundations/open_clip#358).
    """
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    if config.decay_1d:
        groups: list[dict[str, Any]] = [{"params": [p for _, p in trained]}]
    else:
        decayed = [p for name, p in trained if dims[name] > 1]
        spared = [p for name, p in trained if dims[name] <= 1]
        groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    if isinstance(config, AdamW):
        beta1, beta2 = config.betas
        return torch.optim.AdamW(
            groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay
        )
    return torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay
    )


def build_schedule(config: AdamW | SGD, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Linear warm-up, then constant, or down to `min_lr_ratio` linearly or along a cosine, at step `steps`."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.schedule is Schedule.constant:
            return 1.0
        progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
        if config.schedule is Schedule.linear:
            remaining = 1.0 - progress
        else:
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining

    return LambdaLR(optimizer, factor)
