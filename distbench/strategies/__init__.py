"""Strategies by name."""

from __future__ import annotations

from distbench.config import Config
from distbench.launching.world import World
from distbench.strategies.base import Strategy


def strategy_class(name: str) -> type[Strategy]:
    """The class of a strategy; its file is imported only when asked for."""
    if name == "single":
        from distbench.strategies.single import Single

        return Single
    if name == "ddp":
        from distbench.strategies.ddp import DDP

        return DDP
    if name == "fsdp":
        from distbench.strategies.fsdp import FSDP

        return FSDP
    from distbench.strategies.fsdp2 import FSDP2

    return FSDP2


def build_strategy(config: Config, world: World) -> Strategy:
    return strategy_class(config.strategy.name)(config.strategy, config.prefetch, world)
