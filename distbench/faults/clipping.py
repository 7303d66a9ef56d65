"""Faults in gradient clipping. Each needs a clip_norm small enough to clip."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from distbench.faults.base import around
from distbench.faults.catalogue import SHARDED, CatalogueFault
from distbench.trainer import Trainer, squared_norm

Agree = Callable[[Tensor, list[Tensor]], tuple[float, float]]

CLIPS = ("clip_norm=0.01",)


class ClipBeforeReduce(CatalogueFault):
    """Each rank clips its own gradient by its own norm, and only then are they averaged.

    FSDP and fully_shard hand out no unreduced gradient to clip.
    """

    strategies = ("ddp",)
    why_not = "a sharded strategy hands out no unreduced gradient to clip"
    overrides = CLIPS
    checks = ("gradients",)
    diagnosis = ("clipping", "reduction", "scale")

    def install(self, trainer: Trainer) -> None:
        dtype = trainer.policy.reduce_dtype

        def backward_sync(
            original: Callable[..., AbstractContextManager[Any]], module: nn.Module, sync: bool
        ) -> AbstractContextManager[Any]:
            return original(module, False)

        def gradients(original: Callable[[nn.Module], list[Tensor]], module: nn.Module) -> list[Tensor]:
            own = original(module)
            norm = math.sqrt(float(squared_norm(own, trainer.world.device))) / trainer.scaler.scale
            trainer.clip(own, norm)
            for gradient in own:
                reduced = gradient.to(dtype)
                dist.all_reduce(reduced)
                gradient.copy_(reduced / trainer.world.size)
            return own

        around(trainer.strategy, "backward_sync", backward_sync)
        around(trainer.strategy, "gradients", gradients)


class ClipLocalShard(CatalogueFault):
    """The clip coefficient comes from this rank's own shard of the gradients.

    `torch.nn.utils.clip_grad_norm_` on shards. Under DDP a rank's own gradients are all of them.
    """

    seen_in = "areal-project/AReaL#312"
    strategies = SHARDED
    why_not = "under DDP every rank holds all gradients"
    overrides = CLIPS
    checks = ("norm", "clip", "update")
    diagnosis = ("clipping",)

    def install(self, trainer: Trainer) -> None:
        def agree(original: Agree, loss_sum: Tensor, gradients: list[Tensor]) -> tuple[float, float]:
            loss, _ = original(loss_sum, gradients)
            return loss, math.sqrt(float(squared_norm(gradients, trainer.world.device)))

        around(trainer, "agree", agree)


class ClipOverReplicas(CatalogueFault):
    """The gradient norm is summed over replicas: too large by the square root of their number.

    Where gradients are sharded over all ranks there are no replicas; FSDP has them with sharding_strategy=NO_SHARD.
    """

    seen_in = "pytorch/pytorch#88955"
    strategies = ("ddp", "fsdp")
    why_not = "fully_shard shards over all ranks here, so there are no replicas"
    overrides = CLIPS
    overrides_on: ClassVar = {"fsdp": ("strategy.sharding_strategy=NO_SHARD",)}
    checks = ("norm", "clip")
    diagnosis = ("clipping",)

    def install(self, trainer: Trainer) -> None:
        replicas = trainer.strategy.num_replicas

        def agree(original: Agree, loss_sum: Tensor, gradients: list[Tensor]) -> tuple[float, float]:
            loss, norm = original(loss_sum, gradients)
            return loss, norm * math.sqrt(replicas)

        around(trainer, "agree", agree)


class NormOnOneRank(CatalogueFault):
    """One rank alone clips by a wrong norm.

    It only shows on that rank, so a gate that looks at rank 0 passes. Any strategy.
    """

    overrides = CLIPS
    checks = ("norm", "clip")
    diagnosis = ("clipping",)

    def __init__(self, rank: int = 1, factor: float = 0.5) -> None:
        self.rank, self.factor = rank, factor

    def install(self, trainer: Trainer) -> None:
        wrong = trainer.world.rank == self.rank % trainer.world.size

        def agree(original: Agree, loss_sum: Tensor, gradients: list[Tensor]) -> tuple[float, float]:
            loss, norm = original(loss_sum, gradients)
            return loss, norm * self.factor if wrong else norm

        around(trainer, "agree", agree)


class ClippedOnlyOnPaper(CatalogueFault):
    """The clip coefficient is computed and logged, but the gradients are not scaled by it.

    The gradients that were clipped were not the optimizer's own. AdamW does not care about a constant scale. Any
    strategy.
    """

    overrides = CLIPS
    checks = ("clip", "update")
    diagnosis = ("clipping", "optimizer")

    def install(self, trainer: Trainer) -> None:
        around(trainer, "clip", lambda clip, gradients, norm: clip([gradient.clone() for gradient in gradients], norm))
