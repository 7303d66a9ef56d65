"""One process, no wrapper: the yardstick every other strategy is held against."""

from __future__ import annotations

from torch import nn

from distbench.precision import PrecisionPolicy
from distbench.strategies.base import Strategy


class Single(Strategy):
    needs_group = False

    def wrap(self, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        return policy.cast(model)
