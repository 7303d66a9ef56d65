"""Recording gradient summaries: in our own trainer, and in other people's loops (`distbench.GradientRecorder`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from distbench.numerics.summary import Summary, summarize
from distbench.runs.folder import RunFolder
from distbench.trainer import Backward, Observer, Trainer

STEPS = 3
"""Steps whose summaries an ungated run keeps; the gate keeps those of its own."""


def summarize_gradients(trainer: Trainer) -> Summary:
    """The whole summary of the reduced gradients, the same on every rank. A collective over the shards."""
    strategy = trainer.strategy
    shards = [
        slot.shard(None if slot.parameter.grad is None else strategy.local(slot.parameter.grad))
        for slot in strategy.slots(trainer.module)
    ]
    return summarize(shards).reduce(strategy.shard_group)


def summarize_weights(trainer: Trainer) -> Summary:
    """The same of the parameters."""
    strategy = trainer.strategy
    shards = [slot.shard(strategy.local(slot.parameter.detach())) for slot in strategy.slots(trainer.module)]
    return summarize(shards).reduce(strategy.shard_group)


class GradientLog(Observer):
    """`gradients/step_*.safetensors` of the first steps."""

    def __init__(self, folder: RunFolder, trainer: Trainer) -> None:
        self.folder, self.writes = folder, trainer.world.rank == 0

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        if backward.step > STEPS:
            return
        summary = summarize_gradients(trainer)
        if self.writes:
            self.folder.write_gradients(backward.step, summary)


class WholeGradients(Observer):
    """`gradients/step_XXXXXXXX.full.safetensors`: the first steps' reduced gradients, whole, by canonical name."""

    def __init__(self, folder: RunFolder, steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        if backward.step > self.steps:
            return
        whole = dict(whole_gradients(trainer))
        if trainer.world.rank == 0:
            self.folder.gradients.mkdir(exist_ok=True)
            save_file(whole, self.folder.gradients / f"step_{backward.step:08d}.full.safetensors")


def whole_gradients(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's reduced gradient, gathered on every rank's CPU, one at a time; those that are None
    everywhere are left out. A collective over the shards."""
    strategy = trainer.strategy
    for slot in strategy.slots(trainer.module):
        gradient = slot.parameter.grad
        local = None if gradient is None else strategy.local(gradient)
        whole = torch.zeros(slot.shape, dtype=slot.parameter.dtype, device=trainer.world.device)
        if local is not None:
            slot.put(whole, slot.cut(local))
        present = torch.tensor(float(local is not None), device=trainer.world.device)
        if strategy.shard_group is not None:
            dist.all_reduce(whole, group=strategy.shard_group)
            dist.all_reduce(present, group=strategy.shard_group)
        if present:
            yield slot.name, whole.cpu()
