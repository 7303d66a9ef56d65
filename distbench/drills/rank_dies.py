"""A rank that dies by itself, for the recipe `drill_restart`: a fault of the launch, and none that the gate looks for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from torch import Tensor

from distbench.data.batches import Batch
from distbench.faults.base import Fault, around
from distbench.trainer import Trainer


class RankDies(Fault):
    """`rank` gets SIGKILL in the forward of the `step`-th step that its process does; 0: never.

    One that goes on from a checkpoint has fewer steps to do, and so does not come to it again.
    """

    def __init__(self, rank: int = 1, step: int = 12) -> None:
        self.rank, self.step = rank, step
        self.done = 0

    def install(self, trainer: Trainer) -> None:
        if trainer.world.rank == self.rank:
            around(trainer, "forward", self._forward)

    def _forward(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        self.done += 1
        if self.done == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(batch)
