"""Gated runs without the command line: the baseline in this process, then the ranks, and everything the gate said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from distbench.build import EffectiveDtypes, build_trainer, set_determinism
from distbench.config import Config, LocalLaunch
from distbench.launching.world import World
from distbench.numerics.baseline import Baseline, compute_baseline
from distbench.numerics.gate import Check, Gate, StopGate, Verdict
from distbench.trainer import Observer, StepMetrics, Trainer
from tests.steps import ONE_PROCESS

CPU = torch.device("cpu")


@dataclass
class Gated:
    """What the gate said on one rank, and what the run did."""

    verdict: Verdict
    metrics: list[StepMetrics] = field(default_factory=list)
    """Of the free steps: the gate's, then the rest."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The state dict at the end; on rank 0."""

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed, with their steps."""
        return [f"{check.name} {check.step}" for check in self.verdict.checks if not check.passed]

    def why(self) -> str:
        return "; ".join(f"{c.name} {c.step} {c.mode}: {c.detail}" for c in self.verdict.checks if not c.passed)

    def tier(self, step: int = 1) -> str:
        """The weakest tier among a step's gradients."""
        tiers = [g.tier for g in self.verdict.gradients if g.step == step]
        return max(tiers, key=["bitwise", "bound", "noise", "tolerance", "fail"].index)

    def check(self, name: str, step: int = 1) -> Check:
        return next(c for c in self.verdict.checks if c.name == name and c.step == step)


class Log(Observer):
    """Keeps the metrics of the free steps."""

    def __init__(self) -> None:
        self.metrics: list[StepMetrics] = []

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        self.metrics.append(metrics)


def in_world(config: Config, ranks: int) -> Config:
    """The config, for so many ranks."""
    return replace(config, launch=LocalLaunch(nproc=ranks, threads_per_rank=1, timeout_s=120.0))


def make_baseline(config: Config, folder: Path) -> Path:
    """Replay `config` (its `launch.nproc` ranks) into a new folder. Not on a rank."""
    folder.mkdir(parents=True)
    set_determinism(config, 1)
    compute_baseline(config, folder, CPU)
    return folder


def gated(world: World, config: Config, folder: Path, gate: bool = True, whole: bool = False) -> Gated:
    """One run, as `experiment.run_rank` makes it: gate, forced steps, then on until `config.steps`. A collective."""
    set_determinism(config, 1)
    trainer, _ = build_trainer(config, world)
    dtypes, log = EffectiveDtypes(trainer), Log()
    trainer.observers = [dtypes, log]
    if not gate:
        trainer.run(until=config.steps)
        return Gated(Verdict(True, None, [], [], 0), log.metrics, state_of(trainer))  # type: ignore[arg-type]
    judge = Gate(Baseline(folder), config, type(trainer.strategy).reduction(config), trainer, dtypes, reused=False)
    trainer.observers = [dtypes, log, judge]
    try:
        judge.run(trainer)
    except StopGate:
        return Gated(judge.verdict(), log.metrics)
    trainer.observers = [log]
    trainer.run(until=config.steps)
    return Gated(judge.verdict(), log.metrics, state_of(trainer) if whole else {})


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.full_state(trainer.module).items()}


def gated_each(
    world: World, cases: Mapping[str, tuple[Config, Path]], gate: bool = True, whole: bool = False
) -> dict[str, Gated | str]:
    """Several runs in one world, so that one start of processes serves many cases. A case that raises on every rank
    alike is told as text."""
    results: dict[str, Gated | str] = {}
    for name, (config, folder) in cases.items():
        try:
            results[name] = gated(world, config, folder, gate, whole)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def gate_alone(config: Config, folder: Path, **changes: Any) -> Gated:
    """A gated run of one process, here. `config.strategy` must be `single`."""
    config = in_world(replace(config, **changes), 1)
    return gated(ONE_PROCESS, config, make_baseline(config, folder), whole=True)


__all__ = ["CPU", "Gated", "gate_alone", "gated", "gated_each", "in_world", "make_baseline"]
