"""Faults in which samples a rank sees."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distbench.data.batches import SampleSource
from distbench.faults.base import around
from distbench.faults.catalogue import CatalogueFault
from distbench.trainer import Trainer


class RemappedSource:
    """Another source's samples under other ids."""

    def __init__(self, source: SampleSource, index: Callable[[int], int]) -> None:
        self.source, self.index = source, index

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        return self.source.sample(self.index(index))


class EveryoneReadsShard0(CatalogueFault):
    """All ranks train on rank 0's samples.

    The sampler was built without rank and world size, or before the process group was. Any strategy.
    """

    checks = ("samples",)
    diagnosis = ("data",)

    def install(self, trainer: Trainer) -> None:
        trainer.batches.rank = 0


class DuplicatePadding(CatalogueFault):
    """The sampler pads the last rank's share by repeating samples.

    DistributedSampler with drop_last=False fills the data set up to a multiple of the world size from its beginning, so
    those samples count twice. Any strategy.
    """

    seen_in = "pytorch/pytorch#25162"
    checks = ("samples",)
    diagnosis = ("data",)

    def __init__(self, padded: int = 1) -> None:
        """`padded`: samples at the end of each step's global batch that repeat its first ones."""
        self.padded = padded

    def install(self, trainer: Trainer) -> None:
        size = trainer.batches.shape.global_batch

        def index(wanted: int) -> int:
            return wanted - size + self.padded if wanted % size >= size - self.padded else wanted

        trainer.batches.source = RemappedSource(trainer.batches.source, index)


class EpochNotSet(CatalogueFault):
    """Every epoch goes through the samples in the order of the first.

    `sampler.set_epoch` is never called. An epoch here is one step unless the data has its own (data=text), so step 2
    repeats step 1. Any strategy.
    """

    seen_in = "Lightning-AI/pytorch-lightning#224"
    checks = ("samples",)
    diagnosis = ("later_steps",)

    def install(self, trainer: Trainer) -> None:
        epoch = getattr(trainer.batches.source, "num_windows", trainer.batches.shape.global_batch)
        trainer.batches.source = RemappedSource(trainer.batches.source, lambda wanted: wanted % epoch)


class StepCounterAhead(CatalogueFault):
    """A resume restores the step counter, and nothing that belongs to it.

    The run goes on as if its first steps were done. Any strategy.
    """

    checks = ("coverage", "samples", "loss")
    diagnosis = ("later_steps",)

    def __init__(self, steps: int = 3) -> None:
        """`steps`: optimizer steps that the counter says are done."""
        self.steps = steps

    def install(self, trainer: Trainer) -> None:
        trainer.step = self.steps


class ResumeWithoutSampler(CatalogueFault):
    """A resume loses the sampler's position: training starts again at the first sample.

    The resume is emulated at a step boundary inside the gate's steps. Any strategy.
    """

    seen_in = "huggingface/accelerate#2016"
    checks = ("samples",)
    diagnosis = ("later_steps",)

    def __init__(self, after: int = 1) -> None:
        """`after`: optimizer steps done when the run is resumed."""
        self.after = after

    def install(self, trainer: Trainer) -> None:
        around(
            trainer.batches,
            "micro_batches",
            lambda micro_batches, step: micro_batches(step if step < self.after else step - self.after),
        )
