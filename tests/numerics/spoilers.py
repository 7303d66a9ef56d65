"""Ways to break a built trainer, one for each check of the gate. Importable by name, so that ranks can have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distbench.faults.base import around
from distbench.precision import PrecisionPolicy
from distbench.preflight import preset
from distbench.trainer import Trainer


def _gradients(trainer: Trainer, change: Callable[[list[Tensor]], object], step: int = 1) -> None:
    """Change the reduced gradients of one step, in place."""

    def changed(original: Callable[..., Any], module: nn.Module) -> list[Tensor]:
        found = original(module)
        if trainer.step == step - 1:
            change(found)
        return found

    around(trainer.strategy, "gradients", changed)


def _after_step(trainer: Trainer, action: Callable[[], object], step: int = 1) -> None:
    """Do something right after one step's optimizer."""

    def stepped(original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        if trainer.step == step - 1:
            with torch.no_grad():
                action()
        return result

    around(trainer.optimizer, "step", stepped)


def first(trainer: Trainer) -> Tensor:
    """This rank's part of the first parameter that it holds something of."""
    local = trainer.strategy.local
    return next(found for p in trainer.module.parameters() if (found := local(p.detach())).numel())


# --- data, loss


def other_samples(trainer: Trainer) -> None:
    around(trainer.batches, "micro_batches", lambda original, step: original(step + 1))


def other_samples_later(trainer: Trainer) -> None:
    around(trainer.batches, "micro_batches", lambda original, step: original(0))


def other_loss(trainer: Trainer) -> None:
    around(trainer.loss, "sum", lambda original, *args: original(*args) * (1 + 2.0**-20))


def other_count(trainer: Trainer) -> None:
    around(trainer.loss, "count", lambda original, *args: original(*args) + 1)


def loss_reported_wrong(trainer: Trainer) -> None:
    around(trainer, "agree", lambda original, *args: (original(*args)[0] * 1.001, original(*args)[1]))


def loss_reported_as_nan(trainer: Trainer) -> None:
    around(trainer, "agree", lambda original, *args: (math.nan, original(*args)[1]))


# --- what a run starts from


def other_weights(trainer: Trainer) -> None:
    first(trainer).reshape(-1)[0].add_(1e-6)


def other_buffers(trainer: Trainer) -> None:
    next(b for b in trainer.module.buffers() if b.is_floating_point()).add_(1e-6)


def another_parameter(trainer: Trainer) -> None:
    trainer.module.register_parameter("another", nn.Parameter(torch.zeros(2)))


def wider(trainer: Trainer) -> None:
    trainer.module.double()
    trainer.policy = PrecisionPolicy(preset("fp64"), trainer.world.device)


# --- gradients


def scaled(trainer: Trainer) -> None:
    """2.4e-4 in one parameter: a real case."""
    _gradients(trainer, lambda found: found[-1].mul_(1 + 2.4e-4))


def scaled_later(trainer: Trainer) -> None:
    _gradients(trainer, lambda found: found[-1].mul_(1 + 2.4e-4), step=2)


def one_sign(trainer: Trainer) -> None:
    _gradients(trainer, lambda found: found[0].reshape(-1)[:1].neg_())


def one_infinity(trainer: Trainer) -> None:
    _gradients(trainer, lambda found: found[0].reshape(-1)[:1].fill_(math.inf))


def one_nan(trainer: Trainer) -> None:
    _gradients(trainer, lambda found: found[0].reshape(-1)[:1].fill_(math.nan))


def finite(trainer: Trainer) -> None:
    """Infinities and NaNs are swept under the carpet."""
    _gradients(trainer, lambda found: [gradient.nan_to_num_(0.0, 1.0, -1.0) for gradient in found])


def rounded(trainer: Trainer) -> None:
    """Less than the bound of a low reduction dtype, but no value of that dtype."""
    _gradients(trainer, lambda found: [gradient.mul_(1 + 2.0**-14) for gradient in found])


def lost(trainer: Trainer) -> None:
    def drop(_: list[Tensor]) -> None:
        next(p for p in trainer.module.parameters() if p.grad is not None).grad = None

    _gradients(trainer, drop)


def on_rank_1(trainer: Trainer) -> None:
    if trainer.world.rank == 1:
        _gradients(trainer, lambda found: next(g for g in found if g.numel()).reshape(-1)[:1].mul_(1.5))


# --- norm, clipping, optimizer


def other_norm(trainer: Trainer) -> None:
    around(trainer, "agree", lambda original, *args: (original(*args)[0], original(*args)[1] * (1 + 1e-6)))


def norm_is_nan(trainer: Trainer) -> None:
    around(trainer, "agree", lambda original, *args: (original(*args)[0], math.nan))


def clipped_otherwise(trainer: Trainer) -> None:
    around(trainer, "clip", lambda original, *args: original(*args) * 0.5)


def not_clipped(trainer: Trainer) -> None:
    """The coefficient is right, but never applied."""
    around(trainer, "clip", lambda original, gradients, norm: original([], norm))


def dead_parameters(trainer: Trainer) -> None:
    """The optimizer holds copies."""
    for group in trainer.optimizer.param_groups:
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


def not_stepped(trainer: Trainer) -> None:
    around(trainer.optimizer, "step", lambda original, *args: None)


def stepped_twice(trainer: Trainer) -> None:
    around(trainer.optimizer, "step", lambda original, *args: (original(), original()))


def one_weight_differs_after(trainer: Trainer) -> None:
    _after_step(trainer, lambda: first(trainer).reshape(-1)[:1].mul_(1.01))


def moments_lost(trainer: Trainer) -> None:
    _after_step(trainer, trainer.optimizer.state.clear)


def other_decay(trainer: Trainer) -> None:
    """Too little to be seen in the weights."""
    trainer.optimizer.param_groups[0]["weight_decay"] += 1e-12


def schedule_twice(trainer: Trainer) -> None:
    around(trainer.schedule, "step", lambda original, *args: (original(), original()))


def other_weights_on_rank_1_after(trainer: Trainer) -> None:
    if trainer.world.rank == 1:
        one_weight_differs_after(trainer)


def unused_moves(trainer: Trainer) -> None:
    def move() -> None:
        name = next(n for n, p in trainer.module.named_parameters() if "spare" in n)
        trainer.module.get_parameter(name).mul_(0.999)

    _after_step(trainer, move)


# --- scaler, buffers


def other_scale(trainer: Trainer) -> None:
    trainer.scaler.scale /= 2


def other_momentum(trainer: Trainer) -> None:
    for module in trainer.module.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.2


def buffers_reset_later(trainer: Trainer) -> None:
    def reset() -> None:
        for module in trainer.module.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()

    _after_step(trainer, reset, step=2)


# --- inside the model


def _module(trainer: Trainer, name: str) -> nn.Module:
    """By its plain name, whatever it is wrapped in."""
    canonical = trainer.strategy.canonical_name
    return [m for n, m in trainer.module.named_modules() if canonical(f"{n}.").rstrip(".") == name][-1]


def block_1_forward(trainer: Trainer) -> None:
    _module(trainer, "blocks.1.linear").register_forward_hook(lambda module, args, output: output + 1e-3)


def block_1_forward_later(trainer: Trainer) -> None:
    """From the second step on."""
    hook = lambda module, args, output: output + 1e-3 if trainer.step else output  # noqa: E731
    _module(trainer, "blocks.1.linear").register_forward_hook(hook)


def block_1_forward_on_rank_1(trainer: Trainer) -> None:
    if trainer.world.rank == 1:
        block_1_forward(trainer)


class _Backward(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.01


def block_1_backward(trainer: Trainer) -> None:
    """Its input's gradient."""
    module = _module(trainer, "blocks.1")
    inner = module.forward
    module.forward = lambda x: inner(_Backward.apply(x))  # type: ignore[method-assign]


def head_local_gradient(trainer: Trainer) -> None:
    """Between autograd and the reduction; plain parameters only."""
    _module(trainer, "head").get_parameter("weight").register_hook(lambda gradient: gradient * 1.5)


def loss_weighted(trainer: Trainer) -> None:
    around(trainer, "backward", lambda original, loss, factor: original(loss, factor * 1.5))


def averaged_twice(trainer: Trainer) -> None:
    _gradients(trainer, lambda found: [gradient.div_(trainer.world.size) for gradient in found])


def summed(trainer: Trainer) -> None:
    _gradients(trainer, lambda found: [gradient.mul_(trainer.world.size) for gradient in found])
