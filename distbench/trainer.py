"""The unified training loop: every strategy, model and precision runs through this one screen, and nothing else does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import record_function

from distbench.data.batches import Batch, SampleAddressedBatches, seed_random_state
from distbench.launching.world import World
from distbench.losses import LossFunction
from distbench.precision import PrecisionPolicy, Scaler
from distbench.strategies.base import Strategy

if TYPE_CHECKING:
    from distbench.checkpoint.attributes import Initial


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
    """Whether the optimizer took no step because a gradient, or the loss, was not finite."""
    samples: int
    tokens: int
    """Positions consumed by all ranks: samples x length of the input's first dimension."""
    data_seconds: float
    step_seconds: float
    """From asking for the batch to the device having finished the optimizer, less what observers took."""


@dataclass(frozen=True)
class Backward:
    """What one step's forward and backward did on this rank, for observers."""

    step: int
    """1-based."""
    batches: list[Batch]
    loss_sum: float
    """This rank's unnormalised loss."""
    count: int
    """What the global sum is divided by."""
    scale: float


class Stopped(Exception):
    """The run was asked to end early, and no further step begins."""


class Observer:
    """A side concern: a log, a progress bar, the gate. It must not change the training. Override what is needed."""

    reads_state: ClassVar[bool] = False
    """Looks at the model itself, so it cannot be told later of steps that a window measured."""

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        """Gradients are reduced and unscaled, not yet clipped."""

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        """The optimizer has stepped."""


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
    seed: int = 0
    """Of dropout and everything else that forward draws."""
    observers: Iterable[Observer] = ()
    refuses: Callable[[Trainer, list[Batch], Tensor, float, float], bool] = lambda *_: False
    """Whether the optimizer must not take a step, by this rank's micro-batches and loss sum, and the global loss and
    gradient norm. May raise, on all ranks alike."""
    span: Callable[[str], AbstractContextManager[Any]] = record_function
    """Marks a phase of the step by name: for profilers, and for the window."""
    beat: Callable[[str, int | None], None] = lambda phase, step: None
    """Told of each phase and the step it is in, for who must know where a rank was."""
    asked_to_stop: Callable[[], bool] = lambda: False
    """Whether this rank was told to end early."""
    stopping: bool = False
    """Whether any rank was: known to all after the same step."""
    step: int = 0
    """Optimizer steps done."""
    initial: Initial | None = None
    """Which attributes and buffers there were before the first one: checkpoints know those that training makes."""

    def run(self, until: int) -> None:
        """Train until `until` optimizer steps are done."""
        while self.step < until:
            metrics = self.train_step()
            for observer in self.observers:
                observer.on_step(metrics, self)

    def train_step(self) -> StepMetrics:
        """Raises Stopped, on all ranks before the same step, once one was asked to end early."""
        if self.stopping:
            raise Stopped
        start = time.perf_counter()
        with self.phase("data"):
            batches = self.batches.micro_batches(self.step)
        data_seconds = time.perf_counter() - start

        scale, lr = self.scaler.scale, self.schedule.get_last_lr()[0]
        with self.phase("count"):
            count = self.loss.count(batches, self.world)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, batch in enumerate(batches):
            sync = self.sync_each_micro_batch or index == len(batches) - 1
            with self.strategy.backward_sync(self.module, sync):
                with self.phase("forward"):
                    loss = self.forward(batch)
                # The one place that undoes the wrapper's averaging over ranks: the global gradient is the sum over all
                # samples divided by the global count, whoever holds them.
                with self.phase("backward"):
                    self.backward(loss, self.world.size / count * scale)
            loss_sum += loss.detach()

        gradients = self.strategy.gradients(self.module)
        self.scaler.unscale(gradients)
        watched = time.perf_counter()
        if self.observers:
            backward = Backward(self.step + 1, batches, float(loss_sum), count, scale)
            for observer in self.observers:
                observer.on_gradients(backward, self)
        watched = time.perf_counter() - watched

        with self.phase("optimizer"):
            total_loss, norm = self.agree(loss_sum, gradients)
            overflowed = self.scaler.enabled and not math.isfinite(norm)
            skipped = self.refuses(self, batches, loss_sum, total_loss / count, norm) or overflowed
            clip = self.clip(gradients, norm)
            if not skipped:
                self.optimizer.step()
                self.schedule.step()
            self.scaler.update(finite=not overflowed)
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
            tokens=samples * (batches[0].inputs.shape[1] if batches[0].inputs.dim() > 1 else 1),
            data_seconds=data_seconds,
            step_seconds=time.perf_counter() - start - watched,
        )

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """A part of the step, under its name."""
        self.beat(name, self.step + 1)
        return self.span(name)

    def forward(self, batch: Batch) -> Tensor:
        """The unnormalised loss of one micro-batch, from random state that its first sample's id decides."""
        seed_random_state(self.seed, batch)
        return self.loss.sum(self.policy.forward(self.module, batch.inputs), batch.targets)

    def backward(self, loss: Tensor, factor: float) -> None:
        (loss * factor).backward()

    def agree(self, loss_sum: Tensor, gradients: list[Tensor]) -> tuple[float, float]:
        """Global loss sum and gradient norm, in one small all-reduce, so that every rank reaches the same verdict on
        non-finite gradients, and on whether to go on.

        Each replica of a shard contributes its part of the square: summing whole replicas is a recurring clipping bug
        (pytorch/pytorch#88955).
        """
        square = squared_norm(gradients, self.world.device) / self.strategy.num_replicas
        stop = torch.full_like(square, float(self.asked_to_stop()))
        loss, total, stops = self.world.sum(torch.stack([loss_sum, square, stop])).tolist()
        self.stopping = self.stopping or stops > 0
        return loss, math.sqrt(total) if math.isfinite(total) else total

    def clip(self, gradients: list[Tensor], norm: float) -> float:
        """Scale gradients so that their global norm is at most `clip_norm`; returns the coefficient (torch's formula)."""
        coefficient = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))
        if coefficient < 1.0:
            for gradient in gradients:
                gradient.mul_(coefficient)
        return coefficient


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over all tensors, an fp64 scalar, accumulated in fp64 so that sharding does not show in it."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors if tensor.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(norms).square().sum()
