"""Loss definitions with their reduction: sums per micro-batch, normalised by the global count known before backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from distbench.config import Loss, LossKind
from distbench.data.batches import Batch
from distbench.errors import UserModelError
from distbench.launching.world import World


class LossFunction:
    """`sum(outputs, targets)` of one micro-batch, and `count(batches)` to divide the global sum by."""

    def __init__(self, loss: Loss) -> None:
        self.kind, self.ignore_index = loss.name, loss.ignore_index

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The unnormalised loss, a scalar in the outputs' dtype (fp32; fp64 in references).

        Raises UserModelError where outputs do not have the targets' shape: broadcasting would give another loss.
        """
        expected = outputs.shape[:-1] if self.kind is LossKind.cross_entropy else outputs.shape
        if self.kind is not LossKind.sum and expected != targets.shape:
            raise UserModelError(
                f"the model's outputs have shape {tuple(outputs.shape)}, but loss={self.kind.value} has targets of "
                f"shape {tuple(targets.shape)}; set model.target_shape, or change what the model returns"
            )
        if self.kind is LossKind.mse:
            return F.mse_loss(outputs, targets, reduction="sum")
        if self.kind is LossKind.cross_entropy:
            classes = outputs.shape[-1]
            return F.cross_entropy(
                outputs.reshape(-1, classes), targets.reshape(-1), reduction="sum", ignore_index=self.ignore_index
            )
        return outputs.sum()

    def local_count(self, batches: list[Batch]) -> int:
        """One rank's part of the count: elements (mse), real tokens (cross_entropy)."""
        if self.kind is LossKind.cross_entropy:
            return sum(int((batch.targets != self.ignore_index).sum()) for batch in batches)
        return sum(batch.targets.numel() for batch in batches)

    def total(self, counts: Iterable[int]) -> int:
        """What the global sum is divided by, from every rank's count; 1 for `sum`."""
        return 1 if self.kind is LossKind.sum else max(1, sum(counts))

    def count(self, batches: list[Batch], world: World) -> int:
        """What the global sum is divided by.

        Tokens are counted over all ranks, since ranks may hold different numbers of them: dividing each rank's
        mean by the number of ranks is the mean-of-means bug (huggingface/transformers#34191).
        """
        local = self.local_count(batches)
        if self.kind is not LossKind.cross_entropy:
            return self.total([local] * world.size)  # every rank holds as many elements
        return self.total([int(world.sum(torch.tensor(local, device=world.device)))])
