"""The fault interface: a few places to act from, and every part of the trainer to act on.

`fault._target_=my_file.MyFault '+fault.kwargs={factor: 0.5}'` injects a fault of your own into a run. The baseline
never sees it. A fault is not told to the gate either: it has to be found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from distbench.launching.world import World
from distbench.precision import PrecisionPolicy
from distbench.strategies.base import Strategy
from distbench.trainer import Trainer


class Fault:
    """A bug in a distributed run. Override what is needed; `kwargs` of the config come to `__init__`.

    What `install` may replace, by assigning to the trainer's attributes (`around` wraps the one that was there):

    - data: `trainer.batches` (`micro_batches(step) -> list[Batch]`)
    - RNG, forward: `trainer.forward(batch) -> loss sum`; loss: `trainer.loss` (`sum`, `count`)
    - backward: `trainer.backward(loss, factor)`; synchronisation: `trainer.strategy.backward_sync(module, sync)`
    - local gradients, before the wrapper reduces: `hooks.on_local_gradient` in `before_wrap`
    - reduced gradients: `trainer.strategy.gradients(module)`, called once a step after the reduction; what it does to
      them in place is what the optimizer and the gate see
    - norm, verdict: `trainer.agree(loss_sum, gradients)`; clipping: `trainer.clip(gradients, norm)`
    - optimizer: `trainer.optimizer` and its `step`; schedule: `trainer.schedule`; scaler: `trainer.scaler`
    - weights and buffers: `trainer.module`, at any of these times
    """

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        """The plain model, on its device with its initial weights, before it is wrapped. Return the model to wrap."""
        return model

    def wrap(self, strategy: Strategy, model: nn.Module, policy: PrecisionPolicy, units: list[str]) -> nn.Module:
        """How the model is wrapped: other units or another precision policy than the run declares, for instance."""
        return strategy.wrap(self.before_wrap(model, strategy.world), policy, units)

    def install(self, trainer: Trainer) -> None:
        """The trainer is built; nothing has run yet."""


def around(owner: object, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of one object: calls become `wrapper(original, *args, **kwargs)`."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))
