"""The unified training loop: every strategy, model and precision runs through this one screen, and nothing else does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from distbench.data.batches import SampleAddressedBatches
from distbench.launching.world import World
from distbench.losses import LossFunction
from distbench.precision import PrecisionPolicy, Scaler
from distbench.strategies.base import Strategy


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, the same on every rank but for the times."""

    step: int
    """1-based."""
    loss: float
    """Over the global batch: the sum over ranks, in fp64, over the global count."""
    grad_norm: float
    """Global L2 norm after unscaling, before clipping."""
    grad_norm_clipped: float
    lr: float
    scale: float
    """Of the loss scaler, as used in this step; 1 without one."""
    skipped: bool
    """Whether the scaler skipped the optimizer because a gradient was not finite."""
    samples: int
    tokens: int
    """Positions consumed by all ranks: samples x length of the input's first dimension."""
    data_seconds: float
    step_seconds: float
    """From asking for the batch to the device having finished the optimizer."""


class Observer(Protocol):
    """A side concern: a log, a progress bar, a heartbeat. It must not change the training."""

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None: ...


@dataclass
class Trainer:
    module: nn.Module
    strategy: Strategy
    batches: SampleAddressedBatches
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    policy: PrecisionPolicy
    scaler: Scaler
    world: World
    clip_norm: float | None = None
    sync_each_micro_batch: bool = False
    observers: Iterable[Observer] = ()
    step: int = 0
    """Optimizer steps done."""

    def run(self, until: int) -> None:
        """Train until `until` optimizer steps are done."""
        while self.step < until:
            metrics = self.train_step()
            for observer in self.observers:
                observer.on_step(metrics, self)

    def train_step(self) -> StepMetrics:
        start = time.perf_counter()
        micro_batches = self.batches.micro_batches(self.step)
        data_seconds = time.perf_counter() - start

        count = self.loss.count(micro_batches, self.world)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, batch in enumerate(micro_batches):
            sync = self.sync_each_micro_batch or index == len(micro_batches) - 1
            with self.strategy.backward_sync(self.module, sync):
                loss = self.loss.sum(self.policy.forward(self.module, batch.inputs), batch.targets)
                # The one place that undoes the wrapper's averaging over ranks: the global gradient is the sum over all
                # samples divided by the global count, whoever holds them.
                (loss * (self.world.size / count * self.scaler.scale)).backward()
            loss_sum += loss.detach()

        gradients = self.strategy.gradients(self.module)
        self.scaler.unscale(gradients)
        # One small all-reduce gives loss and norm, and every rank the same verdict on non-finite gradients. Each replica
        # of a shard contributes its part of the square: summing whole replicas is a recurring clipping bug
        # (pytorch/pytorch#88955).
        square = squared_norm(gradients, self.world.device) / self.strategy.num_replicas
        total_loss, total_square = self.world.sum(torch.stack([loss_sum, square])).tolist()
        norm = math.sqrt(total_square) if math.isfinite(total_square) else total_square
        clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))
        if clip < 1.0:
            for gradient in gradients:
                gradient.mul_(clip)

        scale, lr = self.scaler.scale, self.schedule.get_last_lr()[0]
        skipped = self.scaler.enabled and not math.isfinite(norm)
        if not skipped:
            self.optimizer.step()
            self.schedule.step()
        self.scaler.update(finite=not skipped)
        self.world.synchronize()
        self.step += 1
        samples = self.batches.shape.global_batch
        return StepMetrics(
            step=self.step,
            loss=total_loss / count,
            grad_norm=norm,
            grad_norm_clipped=norm * clip,
            lr=lr,
            scale=scale,
            skipped=skipped,
            samples=samples,
            tokens=samples * (micro_batches[0].inputs.shape[1] if micro_batches[0].inputs.dim() > 1 else 1),
            data_seconds=data_seconds,
            step_seconds=time.perf_counter() - start,
        )


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all tensors, an fp64 scalar, accumulated in fp64 so that sharding does not show in it."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors if tensor.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).square().sum()
