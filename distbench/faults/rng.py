"""Faults in random state. They need a model that draws in forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distbench.data.batches import Batch
from distbench.data.synthetic import mix
from distbench.faults.base import around
from distbench.faults.catalogue import CatalogueFault
from distbench.faults.weights import LANGUAGE_MODEL
from distbench.trainer import Trainer

DROPOUT = (*LANGUAGE_MODEL, "+model.kwargs={dropout: 0.2}")


class SameDropoutMask(CatalogueFault):
    """Every rank draws rank 0's dropout masks.

    The generators were seeded alike and nothing tells ranks apart. Any strategy.
    """

    overrides = DROPOUT
    checks = ("loss",)
    diagnosis = ("before_communication",)

    def install(self, trainer: Trainer) -> None:
        shift = trainer.world.rank * trainer.batches.shape.per_rank

        def forward(_: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
            torch.manual_seed(mix(trainer.seed, batch.ids[0] - shift))
            return unseeded_forward(trainer, batch)

        around(trainer, "forward", forward)


class ResumeWithoutRng(CatalogueFault):
    """A resume loses the random state: masks are drawn from a fresh generator.

    The resume is emulated at a step boundary inside the gate's steps. Any strategy.
    """

    seen_in = "huggingface/accelerate#2016"
    overrides = DROPOUT
    checks = ("loss",)
    diagnosis = ("later_steps",)

    def __init__(self, after: int = 1) -> None:
        """`after`: optimizer steps done when the run is resumed."""
        self.after = after

    def install(self, trainer: Trainer) -> None:
        def forward(original: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
            if trainer.step < self.after:
                return original(batch)
            torch.manual_seed(trainer.seed)
            return unseeded_forward(trainer, batch)

        around(trainer, "forward", forward)


class DropoutOff(CatalogueFault):
    """The wrapped model is in evaluation mode: dropout does nothing.

    Any strategy.
    """

    overrides = DROPOUT
    checks = ("loss",)
    diagnosis = ("before_communication",)

    def install(self, trainer: Trainer) -> None:
        trainer.module.eval()


def unseeded_forward(trainer: Trainer, batch: Batch) -> Tensor:
    """The trainer's forward from whatever random state there is."""
    return trainer.loss.sum(trainer.policy.forward(trainer.module, batch.inputs), batch.targets)
