"""Training steps seen from the outside: losses and whole gradients by the plain model's names, from any strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from distbench.build import build_trainer, set_determinism
from distbench.config import BatchShape, Config
from distbench.data.batches import SampleAddressedBatches, build_source, sample_digest
from distbench.launching.world import World
from distbench.losses import LossFunction
from distbench.models.build import build_model
from distbench.precision import PrecisionPolicy
from distbench.trainer import StepMetrics, Trainer

K = TypeVar("K")

ONE_PROCESS = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), backend=None)


@dataclass
class Steps:
    """What a few steps did, as one rank saw it."""

    metrics: list[StepMetrics]
    samples: int
    """Digest of the first step's global batch."""
    facts: dict[str, Any]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the last step, whole and as the optimizer reads them; on rank 0."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The whole state dict after the last step; on rank 0."""


def train(world: World, config: Config, steps: int = 1) -> Steps:
    """Train `steps` steps and gather the last one's gradients. A collective."""
    set_determinism(config, threads=1)
    trainer, facts = build_trainer(config, world)
    samples = sum(world.gather(sample_digest(trainer.batches.micro_batches(0)))) % 2**64
    metrics = [trainer.train_step() for _ in range(steps)]
    weights = {name: value.clone() for name, value in trainer.strategy.full_state(trainer.module).items()}
    gradients = whole_gradients(trainer)
    return Steps(metrics, samples, facts, gradients, weights)


def train_each(world: World, configs: dict[K, Config], steps: int = 1) -> dict[K, Steps]:
    """`train` for several configs in one world, so that a start of processes serves many cases."""
    return {name: train(world, config, steps) for name, config in configs.items()}


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Every gradient, whole, by canonical name, on rank 0. Overwrites the weights. A collective.

    The weights are replaced by their gradients, and then gathered as a checkpoint is: the one public way that every
    wrapper has to give a whole tensor by its plain name. A gradient that is None on every rank is left out.
    """
    module, strategy, world = trainer.module, trainer.strategy, trainer.world
    present: set[str] = set()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.grad is None:
                parameter.zero_()
                continue
            present.add(strategy.canonical_name(name))
            parameter.copy_(parameter.grad)
    anywhere = set().union(*world.gather(present))
    flat = not any(name in anywhere for name in trainer_names(trainer))
    state = strategy.full_state(module)
    buffers = {strategy.canonical_name(name) for name, _ in module.named_buffers()}
    return {name: value.clone() for name, value in state.items() if name not in buffers and (flat or name in anywhere)}


def trainer_names(trainer: Trainer) -> list[str]:
    """Canonical names of a trainer's parameters, as far as its wrapper keeps parameters apart."""
    return [
        trainer.strategy.canonical_name(name)
        for name, _ in trainer.module.named_parameters()
        if "_flat_param" not in name
    ]


@dataclass
class Replay:
    """One process plays the ranks one after another: what a correct distributed first step must reproduce."""

    losses: list[float]
    """Of each rank: the sum over its samples, over the global count."""
    gradients: list[dict[str, Tensor]]
    """Of each rank, not yet averaged; micro-batches are added up in the parameters' dtype."""
    magnitudes: dict[str, Tensor]
    """The mean over ranks of the sum over micro-batches of the gradients' magnitudes, in fp64."""

    def mean(self) -> dict[str, Tensor]:
        """The global gradient, summed in fp64, so that this sum's own rounding counts for little."""
        shares = [{name: g.double() / len(self.gradients) for name, g in rank.items()} for rank in self.gradients]
        return {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}


def replay(config: Config, world_size: int, scale: float = 1.0) -> Replay:
    """Play the first step of `world_size` ranks; `scale`: of the loss, and so of the gradients."""
    policy = PrecisionPolicy(config.precision, torch.device("cpu"))
    loss = LossFunction(config.loss)
    shape = BatchShape(config.global_batch, world_size, config.accumulation)
    result = Replay([], [], {})
    for rank in range(world_size):
        module = policy.cast(policy.prepare(build_model(config.model, config.seed.model)))
        batches = SampleAddressedBatches(
            build_source(config.data, config.seed), shape, rank, torch.device("cpu"), policy.data_dtype
        ).micro_batches(0)
        count = world_size * sum(batch.targets.numel() for batch in batches)
        total = 0.0
        gradients: dict[str, Tensor] = {}
        for batch in batches:
            module.zero_grad(set_to_none=True)
            value = loss.sum(policy.forward(module, batch.inputs), batch.targets)
            (value * (world_size / count * scale)).backward()
            total += value.item()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    name = name.removeprefix("_cast_module.")
                    share = parameter.grad.double().abs() / world_size
                    result.magnitudes[name] = result.magnitudes.get(name, torch.zeros_like(share)) + share
                    gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
        result.losses.append(total / count)
        result.gradients.append(gradients)
    return result


def gamma(roundings: int, unit_roundoff: float) -> float:
    """Higham's bound on the relative error that so many roundings make (Accuracy and Stability, lemma 3.1)."""
    return roundings * unit_roundoff / (1 - roundings * unit_roundoff)
