"""Faults in fp16 loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from distbench.faults.base import around
from distbench.faults.catalogue import SHARDED, CatalogueFault
from distbench.faults.clipping import Agree
from distbench.trainer import Trainer


class InfVerdictLocal(CatalogueFault):
    """Ranks whose own shard overflowed skip the step, the others do not.

    Needs fp16 and a loss scale at which some shards overflow and others do not. Under DDP every rank sees all
    gradients.
    """

    seen_in = "pytorch/pytorch#115710"
    strategies = SHARDED
    why_not = "under DDP every rank holds all gradients and reaches the same verdict"
    precisions = ("fp16",)
    overrides = ("clip_norm=null", "steps=8")
    overrides_on: ClassVar = {
        "2": ("precision.scaler.init_scale=260000",),
        "4": ("precision.scaler.init_scale=210000",),
    }
    checks = ("norm", "update", "skipped")
    diagnosis = ("optimizer", "clipping")

    def install(self, trainer: Trainer) -> None:
        def agree(original: Agree, loss_sum: Tensor, gradients: list[Tensor]) -> tuple[float, float]:
            finite = [gradient for gradient in gradients if bool(gradient.isfinite().all())]
            loss, norm = original(loss_sum, finite)
            return loss, norm if len(finite) == len(gradients) else math.inf

        around(trainer, "agree", agree)


class NotUnscaled(CatalogueFault):
    """Gradients reach clipping and the optimizer with the loss scale still in them.

    Any strategy, in fp16.
    """

    precisions = ("fp16",)
    overrides = ("precision.scaler.init_scale=1024",)
    checks = ("gradients",)
    diagnosis = ("scale",)

    def install(self, trainer: Trainer) -> None:
        around(trainer.scaler, "unscale", lambda original, gradients: None)


class ScaleGrowsOnOneRank(CatalogueFault):
    """One rank's loss scale grows and the others' do not.

    Its gradients weigh more in every average from then on. Any strategy, in fp16.
    """

    precisions = ("fp16",)
    overrides = ("precision.scaler.init_scale=1024",)
    checks = ("scale", "next_scale")
    diagnosis = ("later_steps", "scale")

    def install(self, trainer: Trainer) -> None:
        if trainer.world.rank != trainer.world.size - 1:
            return

        def update(original: Callable[..., None], finite: bool) -> None:
            original(finite=finite)
            trainer.scaler.scale *= 2.0

        around(trainer.scaler, "update", update)


class ScaleNeverGrows(CatalogueFault):
    """The loss scale does not grow when it should.

    Gradients are the same to the bit as long as nothing underflows, so only the scale itself shows it. Any strategy, in
    fp16.
    """

    precisions = ("fp16",)
    overrides = ("precision.scaler.init_scale=1024", "precision.scaler.growth_interval=1")
    checks = ("scale", "next_scale")
    diagnosis = ("later_steps", "scale")

    def install(self, trainer: Trainer) -> None:
        def update(original: Callable[..., None], finite: bool) -> None:
            if not finite:
                original(finite=finite)

        around(trainer.scaler, "update", update)
