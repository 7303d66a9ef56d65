"""A plain optimizer beside the run's: fed the run's own gradients, it says where the parameters must be after a step.

It separates what the optimizer does (groups, decay, learning rate, state, clipping) from what the gradients are, at any
world size and without a tolerance that depends on it.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from distbench.config import Config
from distbench.numerics.bounds import unit_roundoff
from distbench.optim import build_optimizer, build_schedule
from distbench.strategies.slots import Slot
from distbench.trainer import Trainer

ENOUGH_MOVED = 32
"""Elements that moved, above which the norm of a parameter's update is trusted beside each element's own."""


class ShadowOptimizer:
    """The config's optimizer over plain copies of this rank's pieces."""

    def __init__(self, config: Config, trainer: Trainer, from_optimizer: torch.optim.Optimizer | None = None) -> None:
        """`from_optimizer`: take over its state (a forced step starts from the baseline's moments)."""
        self.config = config
        self.slots = trainer.strategy.slots(trainer.module)
        self.copies = [
            nn.Parameter(self._own(slot, trainer).clone(), slot.parameter.requires_grad) for slot in self.slots
        ]
        named = [(slot.name, parameter) for slot, parameter in zip(self.slots, self.copies, strict=True)]
        self.optimizer = build_optimizer(config.optimizer, named, {slot.name: len(slot.shape) for slot in self.slots})
        self.schedule = build_schedule(config.optimizer, self.optimizer, config.steps)
        self.learning_rate = self.schedule.get_last_lr()[0]
        self.scaled = trainer.scaler.enabled
        if from_optimizer is not None:
            self._take_state(from_optimizer, trainer)

    def _take_state(self, optimizer: torch.optim.Optimizer, trainer: Trainer) -> None:
        for slot, own in zip(self.slots, self.copies, strict=True):
            for key, value in optimizer.state.get(slot.parameter, {}).items():
                if not isinstance(value, Tensor):
                    continue
                local = trainer.strategy.local(value)
                counter = local.dim() == 0 and (key == "step" or slot.shape != ())  # not a scalar parameter's moment
                self.optimizer.state[own][key] = local.clone() if counter else slot.cut(local).clone()
        self.schedule.load_state_dict(copy.deepcopy(trainer.schedule.state_dict()))
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr

    def _own(self, slot: Slot, trainer: Trainer) -> Tensor:
        return slot.cut(trainer.strategy.local(slot.parameter.detach()))

    @torch.no_grad()
    def plain_sgd_moves(self, trainer: Trainer) -> list[str]:
        """Names of parameters that one plain SGD step of size 1, through the optimizer's parameters, does not move to
        p - g. It starts from p = 0, so that the smallest gradient shows. The parameters are put back as they were."""
        held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        saved = [trainer.strategy.local(p.detach()).clone() for p in held]
        for parameter in held:
            if parameter.grad is not None:
                trainer.strategy.local(parameter.detach()).zero_().sub_(trainer.strategy.local(parameter.grad))
        stuck = []
        for slot in trainer.strategy.slots(trainer.module):
            gradient = slot.parameter.grad
            if gradient is None or slot.numel == 0:
                continue
            wanted = -slot.cut(trainer.strategy.local(gradient))
            if not torch.equal(torch.nan_to_num(self._own(slot, trainer)), torch.nan_to_num(wanted)):
                stuck.append(slot.name)
        for parameter, value in zip(held, saved, strict=True):
            trainer.strategy.local(parameter.detach()).copy_(value)
        return stuck

    def other_settings(self, trainer: Trainer) -> list[str]:
        """Names of parameters that the run's optimizer holds in no group, or in one with another learning rate, decay
        or other setting than the config gives it for the next step: updates too small to show it show nothing."""
        held = {id(p): group for group in trainer.optimizer.param_groups for p in group["params"]}
        right = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        wrong = []
        for slot, own in zip(self.slots, self.copies, strict=True):
            if not own.requires_grad:
                continue
            group, wanted = held.get(id(slot.parameter)), right[id(own)]
            if group is None or any(group.get(key) != value for key, value in wanted.items() if key != "params"):
                wrong.append(slot.name)
        return wrong

    def take_gradients(self, trainer: Trainer) -> None:
        """Copy the reduced, unscaled, unclipped gradients and the weights that the step starts from."""
        self.slots = trainer.strategy.slots(trainer.module)
        for slot, own in zip(self.slots, self.copies, strict=True):
            own.data.copy_(self._own(slot, trainer))
            gradient = slot.parameter.grad
            own.grad = None if gradient is None else slot.cut(trainer.strategy.local(gradient)).clone()

    @torch.no_grad()
    def check_update(self, trainer: Trainer, norm: float) -> dict[str, float]:
        """Step the shadow as the trainer should have, and return the parameters that ended elsewhere, with their
        largest error over what the roundings of one elementwise update can explain. `norm`: what the run clipped by.

        On CPU none is owed: the same optimizer with the same numbers gives the same bits, whatever the sharding. The
        allowance elsewhere, where kernels may contract products and sums otherwise for another layout: 4 u |p| for the
        final additions and 64 u |update| for the chain of products, quotients and a root that makes the update (fewer
        than 32 operations in torch's AdamW, each off by at most u, in both computations). Where u |p| is more than an
        update (bf16 parameters), no element tells a step from none, but together they do: rounding moves few of them,
        and never half of the update's norm.
        """
        before = [own.detach().clone() for own in self.copies]
        self.learning_rate = self.schedule.get_last_lr()[0]
        if not (self.scaled and not math.isfinite(norm)):
            clip = self.config.clip_norm
            coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            if coefficient < 1.0:
                for own in self.copies:
                    if own.grad is not None:
                        own.grad.mul_(coefficient)
            with torch.enable_grad():
                self.optimizer.step()
            self.schedule.step()
        wrong: dict[str, float] = {}
        for slot, own, start in zip(self.slots, self.copies, before, strict=True):
            here, there = self._own(slot, trainer), own.detach()
            if torch.equal(here, there):  # the usual case; what follows takes ten passes over the parameter
                continue
            exact = here.device.type == "cpu"
            u = unit_roundoff(here.dtype)
            update = (there - start).abs()
            allowed = 4 * u * torch.maximum(here.abs(), start.abs()) + 64 * u * update
            error = (here - there).abs()
            both_nan = here.isnan() & there.isnan()
            legal = torch.zeros_like(error, dtype=torch.bool) if exact else (error <= allowed) & here.isfinite()
            bad = ~legal & ~both_nan & ~(here == there)
            if bool(bad.any()):
                ratio = error[bad] / allowed[bad].clamp_min(torch.finfo(here.dtype).tiny)
                wrong[slot.name] = float(torch.nan_to_num(ratio, nan=math.inf).max())
            elif int((there != start).sum()) >= ENOUGH_MOVED:
                off, moved = (here - there).double().norm(), (there - start).double().norm()
                if off > 0.5 * moved:
                    wrong[slot.name] = float(2 * off / moved)
        return wrong
