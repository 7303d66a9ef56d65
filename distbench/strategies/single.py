"""One process, no wrapper: the yardstick every other strategy is held against."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from distbench.config import Config
from distbench.numerics.bounds import Reduction
from distbench.precision import PrecisionPolicy
from distbench.strategies.base import Strategy


class Single(Strategy):
    needs_group = False

    @classmethod
    def reduction(cls, config: Config) -> Reduction:
        return replace(super().reduction(config), reduces=False, accumulate_dtype=config.precision.param_dtype)

    def wrap(self, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        return policy.cast(model)
