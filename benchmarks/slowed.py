"""A model whose steps take a tenth longer under `strategy.bucket_cap_mb=26`, and no number is another: for noise.py's
question of whether a decision sees it."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

MARK = 26
"""MiB; buckets that large hold this model's gradients in one, as those of 25 do."""
SHARE = 0.1


class Mlp(nn.Module):
    """(rows, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Slow:
    """Sleeps a share of what the step before took."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.slept = 0.0

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not isinstance(module, DistributedDataParallel) or module.bucket_bytes_cap != MARK * 2**20:
            return
        now = time.perf_counter()
        took = 0.0 if self.started is None else min(now - self.started - self.slept, 0.2)
        self.started, self.slept = now, SHARE * took
        time.sleep(self.slept)


def model(width: int, slow: bool) -> nn.Module:
    """`slow`: whether the mark slows anything down."""
    if slow:
        register_module_forward_pre_hook(Slow())
    return Mlp(width)
