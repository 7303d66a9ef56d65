"""Gated runs without the command line: the baseline in this process, then the ranks, and everything the gate said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from distbench.build import EffectiveDtypes, build_trainer, set_determinism
from distbench.config import Config, LocalLaunch, digest, to_container
from distbench.launching.world import World
from distbench.numerics.baseline import Baseline, compute_baseline
from distbench.numerics.diagnose import Diagnosis, diagnose
from distbench.numerics.gate import Check, Gate, StopGate, Tier, Verdict
from distbench.numerics.locate import Location, locate
from distbench.strategies import strategy_class
from distbench.trainer import Observer, StepMetrics, Trainer
from tests.steps import ONE_PROCESS

CPU = torch.device("cpu")
UNGATED = Verdict(True, Tier.bitwise, [], [], 0)

Spoiler = Callable[[Trainer], None]
"""Breaks a built trainer on purpose."""


@dataclass
class Gated:
    """What the gate said on one rank, and what the run did."""

    verdict: Verdict
    metrics: list[StepMetrics] = field(default_factory=list)
    """Of the free steps: the gate's, then the rest."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The state dict at the end; on rank 0."""

    @property
    def losses(self) -> list[float]:
        return [metrics.loss for metrics in self.metrics]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.verdict.checks if not check.passed]

    @property
    def why(self) -> str:
        return "; ".join(f"{c.name} {c.step} {c.mode}: {c.detail}" for c in self.verdict.checks if not c.passed)

    @property
    def tiers(self) -> set[str]:
        return {g.tier for g in self.verdict.gradients}

    @property
    def margin(self) -> float:
        return max(g.margin for g in self.verdict.gradients)

    @property
    def modes(self) -> list[tuple[int, str]]:
        """(step, mode) of every comparison of gradients, in order."""
        return list(dict.fromkeys((g.step, g.mode) for g in self.verdict.gradients))

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


def make_baseline(config: Config, root: Path) -> Path:
    """Replay `config` (its `launch.nproc` ranks) into a folder under `root`, once for all configs that share it."""
    tree = to_container(config)
    reduction = strategy_class(config.strategy.name).reduction(config).to_dict()
    parts = ["model", "precision", "loss", "optimizer", "seed", "clip_norm", "data", "gate", "global_batch", "steps"]
    parts += ["wrap_policy"] if reduction["unit_calls"] or reduction["packed"] else []
    folder = root / digest([reduction, config.launch.nproc, config.accumulation, *(tree[part] for part in parts)])
    if not folder.exists():
        folder.mkdir(parents=True)
        set_determinism(config, 1)
        compute_baseline(config, folder, CPU)
    return folder


def gated(
    world: World, config: Config, folder: Path | None, spoil: Spoiler | None = None, reused: bool = False
) -> Gated:
    """One run, as `experiment.run_rank` makes it: the gate, then on until `config.steps`. Ungated where there is no
    baseline. A collective."""
    set_determinism(config, 1)
    trainer, _ = build_trainer(config, world)
    if spoil is not None:
        spoil(trainer)
    dtypes, log = EffectiveDtypes(trainer), Log()
    trainer.observers = [dtypes, log]
    if folder is None:
        trainer.run(until=config.steps)
        return Gated(UNGATED, log.metrics, state_of(trainer))
    gate = Gate(Baseline(folder), config, type(trainer.strategy).reduction(config), trainer, dtypes, reused)
    trainer.observers = [dtypes, log, gate]
    try:
        gate.run(trainer)
    except StopGate:
        return Gated(gate.verdict(), log.metrics)
    trainer.observers = [log]
    trainer.run(until=config.steps)
    return Gated(gate.verdict(), log.metrics, state_of(trainer))


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.strategy.full_state(trainer.module).items()}


Case = tuple[Config, Path | None] | tuple[Config, Path | None, Spoiler | None]


def gated_each(world: World, cases: Mapping[str, Case]) -> dict[str, Gated]:
    """Several runs in one world, so that one start of processes serves many cases."""
    return {name: gated(world, *case) for name, case in cases.items()}


def explained(world: World, config: Config, folder: Path, spoil: Spoiler | None) -> tuple[Verdict, Location, Diagnosis]:
    """A run that fails, and what `locate` and `diagnose` make of it. A collective."""
    set_determinism(config, 1)
    trainer, _ = build_trainer(config, world)
    if spoil is not None:
        spoil(trainer)
    dtypes, baseline = EffectiveDtypes(trainer), Baseline(folder)
    gate = Gate(baseline, config, type(trainer.strategy).reduction(config), trainer, dtypes, reused=False)
    trainer.observers = [dtypes, gate]
    with suppress(StopGate):
        gate.run(trainer)
    verdict = gate.verdict()
    assert not verdict.passed, "nothing to explain"
    location = locate(config, baseline, trainer, verdict)
    return verdict, location, diagnose(verdict, location, config)


def explained_each(
    world: World, cases: Mapping[str, tuple[Config, Path, Spoiler]]
) -> dict[str, tuple[Verdict, Location, Diagnosis]]:
    return {name: explained(world, *case) for name, case in cases.items()}


def gated_here(config: Config, root: Path, spoil: Spoiler | None = None, reused: bool = False) -> Gated:
    """A gated run of one process, in this one; `strategy=single`."""
    config = in_world(config, 1)
    return gated(ONE_PROCESS, config, make_baseline(config, root), spoil, reused)
