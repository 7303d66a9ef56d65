"""Loss definitions with their reduction: sums per micro-batch, normalised by the global count known before backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from distbench.config import Loss, LossKind
from distbench.data.batches import Batch
from distbench.launching.world import World


class LossFunction:
    """`sum(outputs, targets)` of one micro-batch, and `count(batches)` to divide the global sum by."""

    def __init__(self, loss: Loss) -> None:
        self.kind, self.ignore_index = loss.name, loss.ignore_index

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The unnormalised loss, a scalar in the outputs' dtype (fp32; fp64 in references)."""
        if self.kind is LossKind.mse:
            return F.mse_loss(outputs, targets, reduction="sum")
        if self.kind is LossKind.cross_entropy:
            classes = outputs.shape[-1]
            return F.cross_entropy(
                outputs.reshape(-1, classes), targets.reshape(-1), reduction="sum", ignore_index=self.ignore_index
            )
        return outputs.sum()

    def count(self, batches: list[Batch], world: World) -> int:
        """What the global sum is divided by: elements (mse), real tokens (cross_entropy), or 1 (sum).

        Tokens are counted over all ranks, since ranks may hold different numbers of them: dividing each rank's
        mean by the number of ranks is the mean-of-means bug (huggingface/transformers#34191).
        """
        if self.kind is LossKind.sum:
            return 1
        if self.kind is LossKind.mse:
            return world.size * sum(batch.targets.numel() for batch in batches)
        tokens = torch.stack([(batch.targets != self.ignore_index).sum() for batch in batches]).sum()
        return max(1, int(world.sum(tokens)))
