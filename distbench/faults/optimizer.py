"""Faults in the optimizer, its state, and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from distbench.faults.base import around
from distbench.faults.catalogue import SHARDED, CatalogueFault
from distbench.launching.world import World
from distbench.trainer import Trainer


class StaleOptimizer(CatalogueFault):
    """The optimizer was built before wrapping and holds dead parameters: nothing is trained.

    DistributedDataParallel keeps the module's own parameters, and so does FSDP with use_orig_params=true.
    """

    seen_in = "huggingface/accelerate#3256"
    strategies = SHARDED
    why_not = "DDP leaves the module's parameters in place"
    overrides_on: ClassVar = {"fsdp": ("strategy.use_orig_params=false",)}
    checks = ("plain_sgd", "update")
    diagnosis = ("optimizer",)

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        self.stale = list(model.parameters())
        return model

    def install(self, trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["params"] = self.stale


class DecayGroupsLost(CatalogueFault):
    """Weight decay is applied to norms and biases too.

    Flattening or renaming made the rule that spares them miss. Needs decay_1d=false. Any strategy.
    """

    seen_in = "mlfoundations/open_clip#358"
    overrides = ("optimizer.decay_1d=false",)
    checks = ("update",)
    diagnosis = ("optimizer",)

    def install(self, trainer: Trainer) -> None:
        decay = max(group["weight_decay"] for group in trainer.optimizer.param_groups)
        for group in trainer.optimizer.param_groups:
            group["weight_decay"] = decay


class SchedulerTimesWorld(CatalogueFault):
    """The learning-rate schedule advances by the number of ranks each step.

    Needs a schedule that changes. Any strategy.
    """

    seen_in = "huggingface/accelerate#1398"
    overrides = ("optimizer.schedule=linear",)
    checks = ("update", "optimizer_groups")
    diagnosis = ("optimizer", "later_steps")

    def install(self, trainer: Trainer) -> None:
        def step(original: Callable[[], None]) -> None:
            for _ in range(trainer.world.size):
                original()

        around(trainer.schedule, "step", step)


class ResumeWithoutMoments(CatalogueFault):
    """A resume loses the optimizer's state: moments start from zero again.

    The resume is emulated at a step boundary inside the gate's steps. Any strategy.
    """

    checks: ClassVar[tuple[str, ...]] = ("update",)
    diagnosis = ("optimizer", "later_steps")

    def __init__(self, after: int = 1) -> None:
        """`after`: optimizer steps done when the run is resumed."""
        self.after = after

    def install(self, trainer: Trainer) -> None:
        def forget(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if trainer.step == self.after:
                optimizer.state.clear()

        trainer.optimizer.register_step_pre_hook(forget)


class SteppedTwice(CatalogueFault):
    """The optimizer steps twice on the same gradients.

    Any strategy.
    """

    checks = ("update",)
    diagnosis = ("optimizer",)

    def install(self, trainer: Trainer) -> None:
        def step(original: Callable[..., Any], *args: Any) -> None:
            original(*args)
            original(*args)

        around(trainer.optimizer, "step", step)


class UnusedDecayed(CatalogueFault):
    """Parameters that forward never uses get a gradient of zeros instead of none, and weight decay shrinks them.

    Gradients are equal by value, so nothing but the weights shows it. Needs a model with unused parameters. FSDP1 does the
    same by design.
    """

    strategies = ("ddp", "fsdp2")
    why_not = "FSDP1 itself gives unused parameters a gradient of zeros"
    overrides = (
        "model=custom",
        "model._target_=distbench.faults.models.Mixed",
        "model.block_classes=[Linear]",
        "model.input_shape=[13]",
        "model.target_shape=[13]",
        "+model.kwargs={frozen: false}",
    )
    overrides_on: ClassVar = {"ddp": ("strategy.find_unused_parameters=true",)}
    checks = ("unused_weights",)
    location = ("spare.weight", "spare.bias")
    diagnosis = ("optimizer",)

    def install(self, trainer: Trainer) -> None:
        def gradients(original: Callable[[nn.Module], list[Tensor]], module: nn.Module) -> list[Tensor]:
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return original(module)

        around(trainer.strategy, "gradients", gradients)


class OneRankSkips(CatalogueFault):
    """One rank alone leaves out one optimizer step.

    Replicas drift apart; shards are from different steps. Any strategy.
    """

    checks = ("update", "replicas_after")
    diagnosis = ("optimizer",)

    def __init__(self, rank: int = 1, step: int = 1) -> None:
        self.rank, self.step = rank, step

    def install(self, trainer: Trainer) -> None:
        skips = trainer.world.rank == self.rank % trainer.world.size

        def step(original: Callable[..., Any], *args: Any) -> None:
            if not (skips and trainer.step + 1 == self.step):
                original(*args)

        around(trainer.optimizer, "step", step)


class MomentsLostAtSmallRate(ResumeWithoutMoments):
    """A resume loses the optimizer's momentum while the learning rate is still tiny.

    In warm-up an update is smaller than the weights' own rounding, so the weights hide it; the state does not. Any
    strategy.
    """

    overrides = ("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=1e-9")
    checks = ("update", "optimizer_state")
    diagnosis = ("optimizer", "later_steps")
