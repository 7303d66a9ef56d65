"""Faults in a rank's own gradients, before anything is reduced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from distbench.faults.base import around
from distbench.faults.catalogue import CatalogueFault
from distbench.faults.hooks import DEFAULT_PARAMETER, on_local_gradient
from distbench.launching.world import World
from distbench.trainer import Trainer


class LastMicrobatchOnly(CatalogueFault):
    """Gradients of all micro-batches but the last are lost.

    `zero_grad` runs inside the accumulation loop. Needs accumulation. Any strategy; fully_shard keeps unreduced
    gradients where `zero_grad` does not reach them, so there it takes reducing every micro-batch.
    """

    seen_in = "allenai/open-instruct#1498"
    overrides = ("accumulation=2",)
    overrides_on: ClassVar = {"fsdp2": ("accumulation_sync=true",)}
    checks = ("gradients",)
    diagnosis = ("data", "before_communication")

    def install(self, trainer: Trainer) -> None:
        def backward(original: Callable[[Tensor, float], None], loss: Tensor, factor: float) -> None:
            trainer.optimizer.zero_grad(set_to_none=True)
            original(loss, factor)

        around(trainer, "backward", backward)


class GradientsNotZeroed(CatalogueFault):
    """Gradients are never zeroed, so each step adds to the last one's.

    Any strategy.
    """

    checks = ("gradients",)
    diagnosis = ("later_steps",)

    def install(self, trainer: Trainer) -> None:
        around(trainer.optimizer, "zero_grad", lambda original, set_to_none=True: None)


class OneElementFlipped(CatalogueFault):
    """One gradient element changes sign on one rank: silent corruption.

    The largest element of one parameter's gradient, in the first micro-batch of one step. Any strategy.
    """

    checks = ("gradients",)
    location = (DEFAULT_PARAMETER,)
    diagnosis: ClassVar[tuple[str, ...]] = ("before_communication", "unknown", "wrapping", "reduction")

    def __init__(self, parameter: str = DEFAULT_PARAMETER, rank: int = 1, step: int = 1, once: bool = False) -> None:
        """`once`: transient, so that a repetition of the step does not show it again."""
        self.parameter, self.rank, self.step, self.left = parameter, rank, step, 1 if once else None

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        if world.rank == self.rank % world.size:
            on_local_gradient(model, self.parameter, self._flip)
        return model

    def install(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def _flip(self, gradient: Tensor) -> Tensor | None:
        if self.trainer.step + 1 != self.step or self.left == 0:
            return None
        if self.left is not None:
            self.left -= 1
        flipped = gradient.clone()
        flat = flipped.reshape(-1)
        flat[flat.abs().argmax()] *= -1
        return flat.reshape(flipped.shape)


class TransientFlip(OneElementFlipped):
    """One gradient element changes sign on one rank, once, after the first step.

    As `one_element_flipped`, but it never comes back when the step is repeated, as real silent corruption does not. Any
    strategy.
    """

    diagnosis = ("before_communication", "unknown", "wrapping", "reduction", "later_steps")

    def __init__(self, parameter: str = DEFAULT_PARAMETER, rank: int = 1, step: int = 2) -> None:
        super().__init__(parameter, rank, step, once=True)


class ScaleOneParameter(CatalogueFault):
    """One parameter's gradient is scaled by 1.00024 on every rank.

    A real case was a routed layer's gradient off by 2.4e-4. Only fp32 promises to see so little. Any strategy.
    """

    seen_in = "huggingface/transformers#48687"
    precisions = ("fp32",)
    checks = ("gradients",)
    location = (DEFAULT_PARAMETER,)
    diagnosis = ("scale", "before_communication", "wrapping")

    def __init__(self, parameter: str = DEFAULT_PARAMETER, factor: float = 1.00024) -> None:
        self.parameter, self.factor = parameter, factor

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        on_local_gradient(model, self.parameter, lambda gradient: gradient * self.factor)
        return model


class NoSyncForward(CatalogueFault):
    """Forward runs inside `no_sync`, backward outside, and nothing is reduced.

    DistributedDataParallel prepares its reduction in forward. FSDP and fully_shard look at the flag in backward, so
    there the same code is right.
    """

    seen_in = "karpathy/build-nanogpt#30"
    strategies = ("ddp",)
    why_not = "FSDP and fully_shard decide in backward whether to reduce"
    checks = ("replicas",)
    diagnosis = ("missing_sync",)

    def install(self, trainer: Trainer) -> None:
        def forward(original: Callable[..., Tensor], *args: Any) -> Tensor:
            with trainer.strategy.backward_sync(trainer.module, False):
                return original(*args)

        around(trainer, "forward", forward)


class NeverSynced(CatalogueFault):
    """Gradient synchronisation is turned off for accumulation and never turned on again.

    FSDP1 then steps on unsharded gradients and fails by itself.
    """

    strategies = ("ddp", "fsdp2")
    why_not = "FSDP1 refuses to step on unsharded gradients"
    checks = ("replicas", "none_gradients")
    diagnosis = ("missing_sync", "wrapping")

    def install(self, trainer: Trainer) -> None:
        def backward_sync(
            original: Callable[..., AbstractContextManager[Any]], module: nn.Module, sync: bool
        ) -> AbstractContextManager[Any]:
            return original(module, False)

        around(trainer.strategy, "backward_sync", backward_sync)
