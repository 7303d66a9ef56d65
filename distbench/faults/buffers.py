"""Faults in buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from distbench.data.batches import Batch
from distbench.faults.base import around
from distbench.faults.catalogue import CatalogueFault
from distbench.faults.weights import LANGUAGE_MODEL
from distbench.launching.world import World
from distbench.trainer import Trainer

NORMED_MODEL = (
    "model=custom",
    "model._target_=distbench.faults.models.Normed",
    "model.block_classes=[NormedBlock]",
    "model.input_shape=[13]",
    "model.target_shape=[13]",
    "global_batch=16",
)
"""The catalogue's own small model with batch normalisation."""


class BufferDiffers(CatalogueFault):
    """A buffer that no checkpoint holds is uninitialised on every rank but the first.

    Built on the meta device, loaded on rank 0, and nobody computes it elsewhere. DistributedDataParallel broadcasts
    buffers when it wraps and before each forward, so there it takes broadcast_buffers=false. Any strategy.
    """

    seen_in = "hiyouga/LlamaFactory#10820"
    overrides = LANGUAGE_MODEL
    overrides_on: ClassVar = {"ddp": ("strategy.broadcast_buffers=false",)}
    checks = ("initial_buffers",)
    diagnosis = ("before_communication",)

    def install(self, trainer: Trainer) -> None:
        self._forget(trainer.module, trainer.world)

    @staticmethod
    @torch.no_grad()
    def _forget(module: nn.Module, world: World) -> None:
        if world.rank == 0:
            return
        for part in module.modules():
            for name in sorted(part._non_persistent_buffers_set):
                part.get_buffer(name).zero_()


class BuffersResetLater(CatalogueFault):
    """Batch-normalisation statistics are lost between two steps.

    A load leaves them out and re-initialises them, once. Training does not use them, so no gradient shows it. Any
    strategy.
    """

    overrides = NORMED_MODEL
    overrides_on: ClassVar = {"bf16": ("precision.buffer_dtype=bf16",)}
    checks = ("buffers",)
    diagnosis = ("later_steps",)

    def __init__(self, after: int = 1) -> None:
        """`after`: optimizer steps done when they are lost."""
        self.after, self.done = after, False

    def install(self, trainer: Trainer) -> None:
        def micro_batches(original: Callable[[int], list[Batch]], step: int) -> list[Batch]:
            if step == self.after and not self.done:
                self.done = True
                for module in trainer.module.modules():
                    if isinstance(module, nn.BatchNorm1d):
                        module.reset_running_stats()
            return original(step)

        around(trainer.batches, "micro_batches", micro_batches)
