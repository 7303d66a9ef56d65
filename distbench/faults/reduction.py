"""Faults in the reduction of gradients over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from distbench.data.batches import Batch, seed_random_state
from distbench.faults.base import around
from distbench.faults.catalogue import CatalogueFault
from distbench.faults.hooks import DEFAULT_PARAMETER, on_local_gradient
from distbench.launching.world import World
from distbench.precision import DTYPES, PrecisionPolicy
from distbench.strategies.base import Strategy
from distbench.trainer import Trainer


class SumNotMean(CatalogueFault):
    """Gradients are summed over ranks, not averaged: too large by the number of ranks.

    AdamW does not care about scale, so neither loss nor weights show it for long. Any strategy.
    """

    seen_in = "pytorch/torchtitan#2318"
    checks = ("gradients",)
    diagnosis = ("scale",)

    def install(self, trainer: Trainer) -> None:
        def gradients(original: Callable[[nn.Module], list[Tensor]], module: nn.Module) -> list[Tensor]:
            summed = original(module)
            for gradient in summed:
                gradient.mul_(trainer.world.size)
            return summed

        around(trainer.strategy, "gradients", gradients)


class WrapperBypassed(CatalogueFault):
    """The loss is computed on the unwrapped module, so nothing is reduced.

    FSDP and fully_shard fail by themselves without their forward: parameters are not gathered.
    """

    seen_in = "huggingface/trl#7245"
    strategies = ("ddp",)
    why_not = "a sharded module cannot run without its wrapper"
    checks = ("replicas",)
    diagnosis = ("missing_sync",)

    def install(self, trainer: Trainer) -> None:
        assert isinstance(trainer.module, nn.parallel.DistributedDataParallel)
        inner = trainer.module.module

        def forward(_: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
            seed_random_state(trainer.seed, batch)
            return trainer.loss.sum(trainer.policy.forward(inner, batch.inputs), batch.targets)

        around(trainer, "forward", forward)


class OneParamUnsynced(CatalogueFault):
    """One parameter's gradient is never reduced.

    DistributedDataParallel is told to ignore it, as a parameter that was left out of a gradient buffer. Where
    parameters are sharded, each rank's shard gets that rank's own gradient. Any strategy.
    """

    seen_in = "NVIDIA/Megatron-LM#1446"
    checks = ("replicas", "gradients")
    location = (DEFAULT_PARAMETER,)
    diagnosis = ("missing_sync",)

    def __init__(self, parameter: str = DEFAULT_PARAMETER) -> None:
        self.parameter = parameter
        self.own: Tensor | None = None
        """This rank's own gradient, added up over micro-batches."""

    def wrap(self, strategy: Strategy, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        if strategy.num_replicas == 1:
            on_local_gradient(model, self.parameter, self._add_up)
            return strategy.wrap(model, policy, units)
        policy = copy.copy(policy)
        around(policy, "cast", self._cast_and_ignore)
        return strategy.wrap(model, policy, units)

    def _cast_and_ignore(self, cast: Callable[[nn.Module], nn.Module], model: nn.Module) -> nn.Module:
        module = cast(model)
        ignored = [name for name, _ in module.named_parameters() if name.endswith(self.parameter)]
        module._ddp_params_and_buffers_to_ignore = ignored  # what DDP's own `_set_params_and_buffers_to_ignore` sets
        return module

    def install(self, trainer: Trainer) -> None:
        def gradients(original: Callable[[nn.Module], list[Tensor]], module: nn.Module) -> list[Tensor]:
            found = original(module)
            for slot in trainer.strategy.slots(module):
                if slot.name == self.parameter and slot.parameter.grad is not None and self.own is not None:
                    slot.cut(trainer.strategy.local(slot.parameter.grad)).copy_(slot.slice_of(self.own))
            self.own = None
            return found

        if trainer.strategy.num_replicas == 1:
            around(trainer.strategy, "gradients", gradients)

    def _add_up(self, gradient: Tensor) -> None:
        """In fp32, as the sharded gradient is kept."""
        own = gradient.detach().float()
        self.own = own if self.own is None else self.own + own


class LowPrecisionReduce(CatalogueFault):
    """Gradients are reduced in bf16 although fp32 was declared.

    Any strategy.
    """

    seen_in = "pytorch/pytorch#106395"
    overrides = ("precision.reduce_dtype=fp32",)
    checks = ("dtypes", "gradients")
    diagnosis = ("reduction", "before_communication")

    def __init__(self, dtype: str = "bf16") -> None:
        self.dtype = DTYPES[dtype]

    def wrap(self, strategy: Strategy, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        policy = copy.copy(policy)
        policy.reduce_dtype = self.dtype
        return strategy.wrap(model, policy, units)


class RoundedGradients(CatalogueFault):
    """Reduced gradients are rounded to bf16 on their way to the optimizer.

    As `low_precision_reduce`, but nothing in the wrapper's settings shows it. Any strategy.
    """

    precisions = ("fp32",)
    checks = ("gradients",)
    diagnosis = ("reduction",)

    def install(self, trainer: Trainer) -> None:
        def gradients(original: Callable[[nn.Module], list[Tensor]], module: nn.Module) -> list[Tensor]:
            rounded = original(module)
            for gradient in rounded:
                gradient.copy_(gradient.bfloat16())
            return rounded

        around(trainer.strategy, "gradients", gradients)


class FrozenByMistake(CatalogueFault):
    """One parameter is frozen in the wrapped model.

    Any strategy.
    """

    checks = ("none_gradients", "structure")
    location = (DEFAULT_PARAMETER,)
    diagnosis = ("wrapping",)

    def __init__(self, parameter: str = DEFAULT_PARAMETER) -> None:
        self.parameter = parameter

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        model.get_parameter(self.parameter).requires_grad_(False)
        return model
