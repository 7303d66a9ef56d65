"""Faults in weights: where they start from, how they are tied, what a load makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from distbench.data.batches import Batch
from distbench.faults.base import around
from distbench.faults.catalogue import SHARDED, CatalogueFault
from distbench.launching.world import World
from distbench.trainer import Trainer

LANGUAGE_MODEL = (
    "model=custom",
    "model._target_=distbench.faults.models.LanguageModel",
    "model.block_classes=[Block]",
    "model.input_shape=[8]",
    "model.target_shape=[8]",
    "model.vocab_size=19",
    "loss=cross_entropy",
)
"""The catalogue's own small language model: attention, embedding, tied head, a buffer that no checkpoint has."""


class SeedPerRankInit(CatalogueFault):
    """Ranks start from different weights and nothing is broadcast.

    DistributedDataParallel broadcasts when it wraps, so there the weights are made after wrapping. Any strategy.
    """

    seen_in = "pytorch/torchtitan#166"
    checks = ("initial_weights",)
    diagnosis = ("before_communication",)

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        self._start_over(model, world)
        return model

    def install(self, trainer: Trainer) -> None:
        if isinstance(trainer.module, nn.parallel.DistributedDataParallel):
            self._start_over(trainer.module, trainer.world)

    @staticmethod
    @torch.no_grad()
    def _start_over(module: nn.Module, world: World) -> None:
        if world.rank == 0:
            return
        generator = torch.Generator(device=world.device).manual_seed(1000 + world.rank)
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, device=parameter.device))


class UntiedWeights(CatalogueFault):
    """Weights that were tied are silently apart after wrapping.

    Needs a model with tied weights. Any strategy.
    """

    seen_in = "facebookresearch/lingua#75"
    overrides = LANGUAGE_MODEL
    checks = ("structure",)
    location = ("head.weight",)
    diagnosis = ("wrapping",)

    def before_wrap(self, model: nn.Module, world: World) -> nn.Module:
        first: dict[int, str] = {}
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if first.setdefault(id(parameter), name) != name:
                owner, _, attribute = name.rpartition(".")
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(model.get_submodule(owner), attribute, copied)
        return model


class ShardsSwapped(CatalogueFault):
    """Two ranks' shards of a parameter are exchanged when a checkpoint is loaded.

    The load is emulated once, at a step boundary inside the gate's steps. DDP has no shards; FSDP1 loads flat ones.
    """

    strategies = SHARDED
    why_not = "under DDP every rank loads the whole parameter"
    overrides = ("model.hidden_dim=16",)
    overrides_on: ClassVar = {"fsdp": ("strategy.use_orig_params=false",)}
    checks = ("weights_held",)
    diagnosis = ("later_steps",)

    def __init__(self, after: int = 1) -> None:
        """`after`: optimizer steps done when the checkpoint is loaded."""
        self.after, self.done = after, False

    def install(self, trainer: Trainer) -> None:
        def micro_batches(original: Callable[[int], list[Batch]], step: int) -> list[Batch]:
            if step == self.after and not self.done:
                self.done = True
                self._swap(trainer)
            return original(step)

        around(trainer.batches, "micro_batches", micro_batches)

    @staticmethod
    @torch.no_grad()
    def _swap(trainer: Trainer) -> None:
        """Ranks 0 and 1 exchange their shards of the first parameter of which they hold equally shaped ones."""
        for parameter in trainer.module.parameters():
            local = trainer.strategy.local(parameter.detach())
            shards = trainer.world.gather(local.cpu())
            if shards[0].numel() and shards[0].shape == shards[1].shape:
                if trainer.world.rank < 2:
                    local.copy_(shards[1 - trainer.world.rank])
                return


class WeightsInBf16(CatalogueFault):
    """Master weights are kept in bf16 between steps although fp32 was declared.

    Small updates are rounded away. Any strategy.
    """

    checks = ("update",)
    diagnosis = ("optimizer",)

    def install(self, trainer: Trainer) -> None:
        @torch.no_grad()
        def rounded(*_: object) -> None:
            for parameter in trainer.module.parameters():
                local = trainer.strategy.local(parameter.detach())
                local.copy_(local.bfloat16())

        trainer.optimizer.register_step_post_hook(rounded)


class RowsZeroed(CatalogueFault):
    """Embedding rows that no rank's batch reads are zeroed between two steps.

    A resize or a partial load gone wrong: the step's loss and gradients are right to the bit, and only the weights
    themselves show it. Any strategy.
    """

    overrides = ("model=simple_text", "model.vocab_size=19", "loss=cross_entropy", "global_batch=4", "model.seq_len=2")
    checks = ("weights_held",)
    location = ("embedding.weight",)
    diagnosis = ("later_steps",)

    def __init__(self, after: int = 1) -> None:
        """`after`: optimizer steps done when it happens."""
        self.after = after

    def install(self, trainer: Trainer) -> None:
        def micro_batches(original: Callable[[int], list[Batch]], step: int) -> list[Batch]:
            batches = original(step)
            if step == self.after:
                self._zero(trainer, batches)
            return batches

        around(trainer.batches, "micro_batches", micro_batches)

    @staticmethod
    @torch.no_grad()
    def _zero(trainer: Trainer, batches: list[Batch]) -> None:
        own = sorted({int(token) for batch in batches for token in batch.inputs.reshape(-1)})
        used = sorted({token for ids in trainer.world.gather(own) for token in ids})
        for slot in trainer.strategy.slots(trainer.module):
            if slot.name == "embedding.weight" and slot.numel:
                keep = torch.zeros(slot.shape)
                keep[used] = 1
                slot.cut(trainer.strategy.local(slot.parameter.detach())).mul_(slot.slice_of(keep))


class WeightsOff(CatalogueFault):
    """Every weight of one parameter is off by two units in the last place after the first step.

    A cast to and from another format, or a kernel of another build: alike on every rank. Any strategy; fp32 master
    weights.
    """

    checks = ("update",)
    location = ("layers.0.mlp.0.weight",)
    diagnosis = ("optimizer",)

    def install(self, trainer: Trainer) -> None:
        def step(original: Callable[[], None]) -> None:
            original()
            for slot in trainer.strategy.slots(trainer.module):
                if trainer.step == 0 and slot.name == self.location[0] and slot.numel:
                    slot.cut(trainer.strategy.local(slot.parameter.detach())).view(torch.int32).bitwise_xor_(2)

        around(trainer.optimizer, "step", step)
