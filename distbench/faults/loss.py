"""Faults in the loss and what it is divided by."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distbench.data.batches import Batch
from distbench.faults.base import around
from distbench.faults.catalogue import CatalogueFault
from distbench.launching.world import World
from distbench.trainer import Trainer

PADDED = ("model=simple_text", "model.vocab_size=19", "loss=cross_entropy", "data.padding=0.7")
"""Token targets of which ranks hold different numbers."""


class MeanOfMeans(CatalogueFault):
    """Each rank's mean loss is averaged although ranks hold different numbers of tokens.

    Needs padding, so that counts differ. Any strategy: the wrapper averages whatever each rank normalised.
    """

    seen_in = "huggingface/transformers#34191"
    overrides = PADDED
    checks = ("loss",)
    diagnosis = ("data",)

    def install(self, trainer: Trainer) -> None:
        def count(_: Callable[..., int], batches: list[Batch], world: World) -> int:
            return max(1, trainer.loss.local_count(batches)) * world.size

        around(trainer.loss, "count", count)


class MeanOfMicroMeans(CatalogueFault):
    """Each micro-batch's mean loss is averaged although micro-batches hold different numbers of tokens.

    The reported loss is right; only gradients are weighted wrongly. Needs padding and accumulation. Any strategy.
    """

    seen_in = "huggingface/transformers#34191"
    overrides = (*PADDED, "accumulation=2")
    checks = ("gradients",)
    diagnosis = ("data",)

    def install(self, trainer: Trainer) -> None:
        def forward(original: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
            batches = trainer.batches.micro_batches(trainer.step)
            even = trainer.loss.local_count(batches) / len(batches)
            weight = even / max(1, trainer.loss.local_count([batch]))
            loss = original(batch)
            return loss.detach() + (loss - loss.detach()) * weight

        around(trainer, "forward", forward)


class MissingWorldScale(CatalogueFault):
    """Gradients are too small by the number of ranks.

    The loss is divided by the global count and the wrapper averages once more. Any strategy.
    """

    seen_in = "huggingface/transformers#37474"
    checks = ("gradients",)
    diagnosis = ("scale",)

    def install(self, trainer: Trainer) -> None:
        around(trainer, "backward", lambda backward, loss, factor: backward(loss, factor / trainer.world.size))


class AccumulationDivisor(CatalogueFault):
    """Micro-batch losses are not divided by the number of micro-batches, or twice.

    Needs accumulation. Any strategy.
    """

    seen_in = "meta-pytorch/torchtune#1875"
    overrides = ("accumulation=2",)
    checks = ("gradients",)
    diagnosis = ("scale",)

    def __init__(self, twice: bool = False) -> None:
        self.twice = twice

    def install(self, trainer: Trainer) -> None:
        k = trainer.batches.shape.accumulation
        divisor = k if self.twice else 1 / k
        around(trainer, "backward", lambda backward, loss, factor: backward(loss, factor / divisor))


class LossReportedLocally(CatalogueFault):
    """The reported loss is rank 0's own, not the mean over ranks.

    Training is right; the curve that people compare is not. Any strategy.
    """

    seen_in = "deepspeedai/DeepSpeed#7718"
    checks = ("reported",)
    diagnosis = ("missing_sync",)

    def install(self, trainer: Trainer) -> None:
        def agree(
            original: Callable[..., tuple[float, float]], loss_sum: Tensor, gradients: list[Tensor]
        ) -> tuple[float, float]:
            _, norm = original(loss_sum.clone(), gradients)
            return float(loss_sum) * trainer.world.size, norm

        around(trainer, "agree", agree)
