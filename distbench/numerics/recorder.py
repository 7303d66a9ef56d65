"""Recording gradient summaries: in our own trainer, and in other people's loops (`distbench.GradientRecorder`)."""

from __future__ import annotations

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
